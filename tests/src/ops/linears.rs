//! Linears with a collective, as one call.

use super::{COLUMNS, Op, ended, old, own};
use crate::{
    backend::Rank,
    quantized::{Quantized, Uploaded},
};
use brigade_device::{
    AllGatherLoraLinearParams, Buffer, Chunk, DataType, Lora, LoraLinearReduceScatterParams,
    LoraRun, Operation, Output, OverlapMode, QScheme,
};
use brigade_plan::Engines;

/// A linear with a collective: what all ranks must have in common.
#[derive(Clone, Copy)]
pub struct Linear {
    /// Rows of every rank.
    pub rows: usize,
    /// K of gather-linear, N of its twin.
    pub columns: usize,
    /// The mode.
    pub choice: Option<OverlapMode>,
    /// How rows are quantized, and the weight with them.
    pub scheme: QScheme,
    /// Whether there is an adapter over all rows.
    pub lora: bool,
    /// D's type, where it is another than usual.
    pub output: Option<DataType>,
    /// The middle dimension, where there are three.
    pub inner: Option<usize>,
}

impl Linear {
    /// Floats, and no adapter.
    pub fn new(rows: usize, columns: usize, choice: Option<OverlapMode>) -> Self {
        Self {
            rows,
            columns,
            choice,
            scheme: QScheme::None,
            lora: false,
            output: None,
            inner: None,
        }
    }

    /// With other values in some fields.
    #[must_use]
    pub fn with(mut self, change: impl FnOnce(&mut Self)) -> Self {
        change(&mut self);
        self
    }

    /// Whether rows are of whole 16 bytes, and the weight is stored as `[N, K]`, as tiles want it.
    fn is_whole(&self) -> bool {
        self.choice == Some(OverlapMode::Tiles) || self.scheme != QScheme::None
    }

    /// So many columns, or more.
    fn whole(&self, columns: usize) -> usize {
        columns.next_multiple_of(if self.is_whole() { 16 } else { 1 })
    }

    /// Type of floats.
    fn dtype(&self) -> DataType {
        if self.is_whole() {
            DataType::BF16
        } else {
            DataType::F32
        }
    }

    fn output(&self) -> DataType {
        self.output.unwrap_or(self.dtype())
    }

    /// So many rows of so many columns.
    fn dims(&self, rows: usize, columns: usize) -> Vec<usize> {
        [Some(rows), self.inner, Some(columns)]
            .into_iter()
            .flatten()
            .collect()
    }

    fn activations(&self, rank: &Rank, rows: usize, k: usize) -> Uploaded {
        match self.inner {
            Some(_) => Uploaded::Plain(own(rank, self.dtype(), &self.dims(rows, k))),
            None => self.factor(rank, [rows, k]),
        }
    }

    fn factor(&self, rank: &Rank, dims: [usize; 2]) -> Uploaded {
        let first = match self.scheme {
            QScheme::None => return Uploaded::Plain(own(rank, self.dtype(), &dims)),
            // Bits of 1.0, and of eighths above it.
            QScheme::Fp8PerTensor => 0x38,
            _ => 1,
        };
        let byte = |i: usize| first + (rank.rank + 2 * (i % 5)) as u8;
        let all = Quantized {
            scheme: self.scheme,
            dims,
            kernel: (0..dims[0] * dims[1]).map(byte).collect(),
            scales: vec![1.0; if self.scheme.per_row() { dims[0] } else { 1 }],
        };
        Uploaded::Quantized(all.upload(rank))
    }

    fn weight(&self, rank: &Rank, [k, n]: [usize; 2]) -> Uploaded {
        self.factor(rank, if self.is_whole() { [n, k] } else { [k, n] })
    }

    /// The factors of an adapter, if there is one.
    fn adapter(&self, rank: &Rank, [k, n]: [usize; 2]) -> Option<[Buffer; 2]> {
        let factors = [[k, 2], [2, n]];
        self.lora
            .then(|| factors.map(|dims| own(rank, self.dtype(), &dims)))
    }

    /// As gather-linear.
    pub fn gather(self) -> Op {
        let operation = Operation::GatherLinear;
        Op::new("gather_linear", operation, move |rank, lease| {
            let counts = vec![self.rows; rank.size];
            let [k, n] = [self.columns, COLUMNS].map(|c| self.whole(c));
            let x = self.activations(rank, self.rows, k);
            let weight = self.weight(rank, [k, n]);
            let adapter = self.adapter(rank, [k, n]);
            let m = self.rows * rank.size;
            let mut d = old(rank, self.output(), &self.dims(m, n));
            let chunk = Chunk::Copy(x.operand());
            let result = lease.all_gather_lora_linear(AllGatherLoraLinearParams {
                output: Output::Into(d.view_mut()),
                transpose_weight: self.is_whole(),
                runs: &over_all(m, adapter.as_ref()),
                choice: self.choice,
                ..AllGatherLoraLinearParams::new(chunk, &counts, weight.operand())
            });
            let result = result.map(drop);
            ended(result, d)
        })
    }

    /// As its twin.
    pub fn scatter(self) -> Op {
        let operation = Operation::LinearReduceScatter;
        Op::new("linear_reduce_scatter", operation, move |rank, lease| {
            let counts = vec![self.rows; rank.size];
            let [k, n] = [COLUMNS, self.columns].map(|c| self.whole(c));
            let m = self.rows * rank.size;
            let x = self.activations(rank, m, k);
            let weight = self.weight(rank, [k, n]);
            let adapter = self.adapter(rank, [k, n]);
            let mut d = old(rank, self.output(), &self.dims(self.rows, n));
            let result = lease.lora_linear_reduce_scatter(LoraLinearReduceScatterParams {
                output: Output::Into(d.view_mut()),
                transpose_weight: self.is_whole(),
                runs: &over_all(m, adapter.as_ref()),
                choice: self.choice,
                ..LoraLinearReduceScatterParams::new(x.operand(), &counts, weight.operand())
            });
            ended(result, d)
        })
    }
}

/// One adapter over all rows.
fn over_all(rows: usize, adapter: Option<&[Buffer; 2]>) -> Vec<LoraRun<'_>> {
    let runs = adapter.into_iter().map(|[a, b]| LoraRun {
        rows,
        adapter: Some(Lora {
            a: a.view(),
            b: b.view(),
            scale: 1.0,
        }),
    });
    runs.collect()
}

/// What comes closest to tiles on a device.
pub fn tiles_or_a_piece(engines: Engines) -> OverlapMode {
    if engines.tiles {
        OverlapMode::Tiles
    } else {
        OverlapMode::Chunked { pieces: 1 }
    }
}
