//! One rank's layers, with its part of weights and adapters. Linears that read the same rows are one matrix.

use crate::{Adapter, AdapterSpec, Config, Matrix, Projection, Result, Shard, Source, TensorId};
use brigade::OverlapMode;
use brigade_candle::{
    ColumnParallelLinear, GatherLinear, LinearReduceScatter, Parallel, RowParallelLinear, Runs,
    VocabParallelEmbedding, VocabParallelHead,
};
use candle_core::{DType, Tensor};
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

/// A linear whose outputs are spread: of rows that are spread too, and of rows that all ranks have. Both have one weight.
pub(crate) struct Column {
    pub(crate) gathered: GatherLinear,
    pub(crate) whole: ColumnParallelLinear,
    adapted: bool,
}

/// A linear whose inputs are spread: to the owners of rows, and to all ranks.
pub(crate) struct Row {
    pub(crate) scattered: LinearReduceScatter,
    pub(crate) whole: RowParallelLinear,
    adapted: bool,
}

/// Each sequence's rows have the sequence's adapter, if the linear has adapters.
fn runs(adapted: bool, rows: &[(usize, usize)]) -> Runs {
    match adapted {
        true => Runs::of(rows.iter().map(|&(sequence, rows)| (rows, Some(sequence)))),
        false => Runs::none(),
    }
}

impl Column {
    pub(crate) fn runs(&self, rows: &[(usize, usize)]) -> Runs {
        runs(self.adapted, rows)
    }
}

impl Row {
    pub(crate) fn runs(&self, rows: &[(usize, usize)]) -> Runs {
        runs(self.adapted, rows)
    }
}

/// A layer's part on one rank.
pub(crate) struct RankLayer {
    /// f32, as all norms.
    pub(crate) attention_norm: Tensor,
    pub(crate) query_key_value: Column,
    pub(crate) output: Row,
    pub(crate) feed_forward_norm: Tensor,
    pub(crate) gate_up: Column,
    pub(crate) down: Row,
}

/// All of a rank's part.
pub(crate) struct RankWeights {
    pub(crate) embedding: VocabParallelEmbedding,
    pub(crate) layers: Vec<RankLayer>,
    pub(crate) output_norm: Tensor,
    /// Shares the embedding's weight.
    pub(crate) head: VocabParallelHead,
    /// Bytes of all weights without adapters.
    pub(crate) bytes: u64,
}

/// Where weights go, and which.
pub(crate) struct Loader<'a> {
    pub(crate) source: &'a dyn Source,
    pub(crate) shards: &'a [Shard],
    /// For attention, the embedding and the head.
    pub(crate) attention: &'a Parallel,
    pub(crate) feed_forward: &'a Parallel,
    pub(crate) dtype: DType,
    pub(crate) mode: Option<OverlapMode>,
    /// One for each sequence, or none.
    pub(crate) adapters: Vec<AdapterSpec>,
    pub(crate) bytes: u64,
}

/// The adapters of one sequence.
#[must_use]
pub fn for_sequence(spec: &AdapterSpec, sequence: usize) -> AdapterSpec {
    AdapterSpec {
        seed: spec.seed.wrapping_add(sequence as u64),
        ..spec.clone()
    }
}

impl Loader<'_> {
    /// Loads the rank's shard.
    pub(crate) fn load(mut self) -> Result<RankWeights> {
        let words = self.source.config().vocabulary;
        let table = self
            .source
            .rows(TensorId::Embedding, self.shard().vocabulary.clone())?;
        let table = self.weight(&table)?;
        Ok(RankWeights {
            embedding: VocabParallelEmbedding::from_shard(self.attention, &table, words)?,
            head: VocabParallelHead::from_shard(self.attention, &table, words)?,
            layers: (0..self.source.config().layers)
                .map(|layer| self.layer(layer))
                .collect::<Result<_>>()?,
            output_norm: self.norm(TensorId::OutputNorm)?,
            bytes: self.bytes,
        })
    }

    fn shard(&self) -> &Shard {
        &self.shards[self.attention.rank()]
    }

    fn weight(&mut self, m: &Matrix) -> Result<Tensor> {
        self.bytes += (m.data().len() * self.dtype.size_in_bytes()) as u64;
        self.place(m)
    }

    fn place(&self, m: &Matrix) -> Result<Tensor> {
        let whole = Tensor::from_slice(m.data(), (m.rows(), m.columns()), self.attention.place())?;
        Ok(whole.to_dtype(self.dtype)?)
    }

    fn norm(&mut self, id: TensorId) -> Result<Tensor> {
        let norm = self.source.tensor(id)?.into_data();
        self.bytes += norm.len() as u64 * 4;
        Ok(Tensor::new(norm, self.attention.place())?)
    }

    fn layer(&mut self, layer: usize) -> Result<RankLayer> {
        Ok(RankLayer {
            attention_norm: self.norm(TensorId::AttentionNorm(layer))?,
            query_key_value: self.column(layer, Fused::QueryKeyValue)?,
            output: self.row(layer, Fused::Output)?,
            feed_forward_norm: self.norm(TensorId::FeedForwardNorm(layer))?,
            gate_up: self.column(layer, Fused::GateUp)?,
            down: self.row(layer, Fused::Down)?,
        })
    }

    /// Attention and feed-forward have a group each.
    fn parallel(&self, which: Fused) -> Parallel {
        match which {
            Fused::QueryKeyValue | Fused::Output => self.attention.clone(),
            Fused::GateUp | Fused::Down => self.feed_forward.clone(),
        }
    }

    fn column(&mut self, layer: usize, which: Fused) -> Result<Column> {
        let (weight, adapters) = (self.linear(layer, which)?, self.adapters(layer, which)?);
        let total = which.total_outputs(self.source.config(), self.shards);
        let parallel = self.parallel(which);
        let gathered = GatherLinear::from_shard(&parallel, &weight, None, total)?;
        let gathered = match self.mode {
            Some(mode) => gathered.with_mode(mode),
            None => gathered,
        };
        let whole = ColumnParallelLinear::from_shard(&parallel, &weight, None)?;
        Ok(Column {
            adapted: !adapters.is_empty(),
            gathered: gathered.with_adapters(adapters.clone())?,
            whole: whole.with_adapters(adapters)?,
        })
    }

    fn row(&mut self, layer: usize, which: Fused) -> Result<Row> {
        let (weight, adapters) = (self.linear(layer, which)?, self.adapters(layer, which)?);
        let config = self.source.config();
        let total = match which {
            Fused::Output => config.query_width(),
            _ => config.feed_forward,
        };
        let parallel = self.parallel(which);
        let scattered = LinearReduceScatter::from_shard(&parallel, &weight, None, total)?;
        let scattered = match self.mode {
            Some(mode) => scattered.with_mode(mode),
            None => scattered,
        };
        let whole = RowParallelLinear::from_shard(&parallel, &weight, None)?;
        Ok(Row {
            adapted: !adapters.is_empty(),
            scattered: scattered.with_adapters(adapters.clone())?,
            whole: whole.with_adapters(adapters)?,
        })
    }

    /// `[own outputs, inputs]` or `[outputs, own inputs]`.
    fn linear(&mut self, layer: usize, which: Fused) -> Result<Tensor> {
        let config = self.source.config();
        let mut all = Vec::new();
        let (mut rows, mut columns) = (0, 0);
        for &p in which.parts() {
            let id = TensorId::Linear(layer, p);
            let share = share(p, config, self.shard());
            let part = if which.column_parallel() {
                self.source.rows(id, share)?
            } else {
                self.source.columns(id, share)?
            };
            rows += part.rows();
            columns = part.columns();
            all.extend(part.into_data());
        }
        self.weight(&Matrix::new(rows, columns, all)?)
    }

    /// Every sequence's adapter of a linear, if it has any.
    fn adapters(&self, layer: usize, which: Fused) -> Result<Vec<brigade_candle::Adapter>> {
        let all: Result<Vec<_>> = self
            .adapters
            .iter()
            .map(|spec| self.adapter(layer, which, spec))
            .collect();
        // Of one linear all sequences have one, or none has.
        Ok(all?.into_iter().flatten().collect())
    }

    /// The adapters of a linear's parts as one: the A side by side, the B down the diagonal.
    fn adapter(
        &self,
        layer: usize,
        which: Fused,
        spec: &AdapterSpec,
    ) -> Result<Option<brigade_candle::Adapter>> {
        let config = self.source.config();
        let mut parts = Vec::new();
        for &p in which.parts() {
            let share = share(p, config, self.shard());
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
        let (a, b) = (
            Matrix::new(inputs, rank, a)?,
            Matrix::new(rank, outputs, b)?,
        );
        let (a, b) = (self.place(&a)?, self.place(&b)?);
        Ok(Some(brigade_candle::Adapter::new(&a, &b, spec.scale)?))
    }
}
