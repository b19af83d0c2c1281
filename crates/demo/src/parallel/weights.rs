//! One rank's weights and adapters on its device. Linears that read the same rows are one matrix.

use crate::{Adapter, AdapterSpec, Config, Matrix, Projection, Result, Shard, Source, TensorId};
use brigade::{Buffer, Device, DeviceExt, Lora, Stream};
use std::ops::Range;

/// The four linears of a layer, as ranks run them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Fused {
    QueryKeyValue,
    Output,
    GateUp,
    Down,
}

impl Fused {
    pub(crate) const ALL: [Self; 4] = [Self::QueryKeyValue, Self::Output, Self::GateUp, Self::Down];

    fn parts(self) -> &'static [Projection] {
        match self {
            Self::QueryKeyValue => &[Projection::Query, Projection::Key, Projection::Value],
            Self::Output => &[Projection::Output],
            Self::GateUp => &[Projection::Gate, Projection::Up],
            Self::Down => &[Projection::Down],
        }
    }

    /// Whether a rank computes some of the outputs from all inputs, rather than a summand of all outputs.
    fn column_parallel(self) -> bool {
        matches!(self, Self::QueryKeyValue | Self::GateUp)
    }

    /// Outputs over the given ranks, KV heads that are on two ranks counted twice.
    pub(crate) fn total_outputs(self, config: &Config, shards: &[Shard]) -> usize {
        let outputs = |s: &Shard| -> usize {
            self.parts()
                .iter()
                .map(|&p| share(p, config, s).len())
                .sum()
        };
        shards.iter().map(outputs).sum()
    }
}

/// What a shard has of a projection: of its outputs if it is column-parallel, else of its inputs.
fn share(p: Projection, config: &Config, shard: &Shard) -> Range<usize> {
    match p {
        Projection::Query | Projection::Output => shard.query_rows(config),
        Projection::Key | Projection::Value => shard.kv_rows(config),
        Projection::Gate | Projection::Up | Projection::Down => shard.feed_forward.clone(),
    }
}

/// An adapter on the device.
pub(crate) struct DeviceAdapter {
    a: Buffer,
    b: Buffer,
    scale: f32,
}

impl DeviceAdapter {
    pub(crate) fn view(&self) -> Lora<'_> {
        Lora {
            a: self.a.view(),
            b: self.b.view(),
            scale: self.scale,
        }
    }
}

/// A layer's part on one rank.
pub(crate) struct RankLayer {
    pub(crate) attention_norm: Vec<f32>,
    pub(crate) feed_forward_norm: Vec<f32>,
    linears: [Buffer; 4],
    /// For each sequence, for each linear.
    adapters: Vec<[Option<DeviceAdapter>; 4]>,
}

impl RankLayer {
    /// `[inputs, outputs]`
    pub(crate) fn linear(&self, which: Fused) -> &Buffer {
        &self.linears[which as usize]
    }

    pub(crate) fn adapter(&self, sequence: usize, which: Fused) -> Option<Lora<'_>> {
        self.adapters
            .get(sequence)
            .and_then(|a| a[which as usize].as_ref())
            .map(DeviceAdapter::view)
    }
}

/// All of a rank's part.
pub(crate) struct RankWeights {
    /// `[vocabulary of this rank, hidden]`
    pub(crate) embedding: Buffer,
    pub(crate) layers: Vec<RankLayer>,
    pub(crate) output_norm: Vec<f32>,
    /// Bytes of all weights without adapters.
    pub(crate) bytes: u64,
}

struct Loader<'a> {
    source: &'a dyn Source,
    shard: &'a Shard,
    device: &'a dyn Device,
    on: &'a Stream,
    bytes: u64,
}

impl RankWeights {
    /// Loads a rank's shard, and makes an adapter for each of `sequences` sequences.
    pub(crate) fn load(
        source: &dyn Source,
        shard: &Shard,
        lora: Option<&AdapterSpec>,
        sequences: usize,
        device: &dyn Device,
        on: &Stream,
    ) -> Result<Self> {
        let mut loader = Loader {
            source,
            shard,
            device,
            on,
            bytes: 0,
        };
        let specs: Vec<AdapterSpec> = lora
            .map(|spec| (0..sequences).map(|s| for_sequence(spec, s)).collect())
            .unwrap_or_default();
        let embedding = source.rows(TensorId::Embedding, shard.vocabulary.clone())?;
        Ok(Self {
            embedding: loader.upload(embedding)?,
            layers: (0..source.config().layers)
                .map(|layer| loader.layer(layer, &specs))
                .collect::<Result<_>>()?,
            output_norm: loader.norm(TensorId::OutputNorm)?,
            bytes: loader.bytes,
        })
    }
}

/// The adapters of one sequence.
pub(crate) fn for_sequence(spec: &AdapterSpec, sequence: usize) -> AdapterSpec {
    AdapterSpec {
        seed: spec.seed.wrapping_add(sequence as u64),
        ..spec.clone()
    }
}

impl Loader<'_> {
    fn upload(&mut self, m: Matrix) -> Result<Buffer> {
        self.bytes += m.data().len() as u64 * 4;
        self.place(&m)
    }

    fn place(&self, m: &Matrix) -> Result<Buffer> {
        Ok(self
            .device
            .upload(self.on, m.data(), &[m.rows(), m.columns()])?)
    }

    fn norm(&mut self, id: TensorId) -> Result<Vec<f32>> {
        let norm = self.source.tensor(id)?.into_data();
        self.bytes += norm.len() as u64 * 4;
        Ok(norm)
    }

    fn layer(&mut self, layer: usize, specs: &[AdapterSpec]) -> Result<RankLayer> {
        let [qkv, output, gate_up, down] = Fused::ALL;
        Ok(RankLayer {
            attention_norm: self.norm(TensorId::AttentionNorm(layer))?,
            feed_forward_norm: self.norm(TensorId::FeedForwardNorm(layer))?,
            linears: [
                self.linear(layer, qkv)?,
                self.linear(layer, output)?,
                self.linear(layer, gate_up)?,
                self.linear(layer, down)?,
            ],
            adapters: specs
                .iter()
                .map(|spec| {
                    Ok([
                        self.adapter(layer, qkv, spec)?,
                        self.adapter(layer, output, spec)?,
                        self.adapter(layer, gate_up, spec)?,
                        self.adapter(layer, down, spec)?,
                    ])
                })
                .collect::<Result<_>>()?,
        })
    }

    fn linear(&mut self, layer: usize, which: Fused) -> Result<Buffer> {
        let config = self.source.config();
        let mut all = Vec::new();
        let (mut rows, mut columns) = (0, 0);
        for &p in which.parts() {
            let id = TensorId::Linear(layer, p);
            let share = share(p, config, self.shard);
            let part = if which.column_parallel() {
                self.source.rows(id, share)?
            } else {
                self.source.columns(id, share)?
            };
            rows += part.rows();
            columns = part.columns();
            all.extend(part.into_data());
        }
        // Turned over once, since a product of several rows would otherwise do it at every call.
        let turned = (0..columns)
            .flat_map(|c| all.iter().skip(c).step_by(columns).copied())
            .collect();
        self.upload(Matrix::new(columns, rows, turned)?)
    }

    /// The adapters of a linear's parts as one: the A side by side, the B down the diagonal.
    fn adapter(
        &self,
        layer: usize,
        which: Fused,
        spec: &AdapterSpec,
    ) -> Result<Option<DeviceAdapter>> {
        let config = self.source.config();
        let mut parts = Vec::new();
        for &p in which.parts() {
            let share = share(p, config, self.shard);
            let outputs = if which.column_parallel() {
                share.len()
            } else {
                config.hidden
            };
            let part = Adapter::generate(spec, config, layer, p)?
                .map(|a| {
                    if which.column_parallel() {
                        a.cut_outputs(share)
                    } else {
                        a.cut_inputs(share)
                    }
                })
                .transpose()?;
            parts.push((outputs, part));
        }
        let Some(inputs) = parts
            .iter()
            .find_map(|(_, a)| a.as_ref().map(|a| a.a.rows()))
        else {
            return Ok(None);
        };
        let some = || parts.iter().filter_map(|(_, a)| a.as_ref());
        let rank: usize = some().map(|a| a.a.columns()).sum();
        let outputs: usize = parts.iter().map(|(outputs, _)| outputs).sum();
        let a = (0..inputs)
            .flat_map(|row| some().flat_map(move |a| a.a.row(row)).copied())
            .collect();
        let mut b = vec![0.0; rank * outputs];
        let (mut row, mut column) = (0, 0);
        for (outputs_of, part) in &parts {
            if let Some(part) = part {
                for r in 0..part.b.rows() {
                    let start = (row + r) * outputs + column;
                    b[start..start + outputs_of].copy_from_slice(part.b.row(r));
                }
                row += part.b.rows();
            }
            column += outputs_of;
        }
        Ok(Some(DeviceAdapter {
            a: self.place(&Matrix::new(inputs, rank, a)?)?,
            b: self.place(&Matrix::new(rank, outputs, b)?)?,
            scale: spec.scale,
        }))
    }
}
