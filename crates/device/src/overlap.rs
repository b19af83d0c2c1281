//! Parameters of linears with a collective.

use crate::{
    Activation, AllReduceAlgorithm, DataType, Filled, LoraLinearParams, LoraRun, Operand, Output,
    OverlapMode, View,
};

/// Own rows: already in the user buffer, as the token proves, or to be copied there.
#[derive(Debug)]
pub enum Chunk<'a> {
    /// Written into the space that [`Lease::own_chunk`](crate::Lease::own_chunk) of the same communicator handed out, since its last reset.
    Resident(Filled),
    /// To be copied.
    Copy(Operand<'a>),
}

/// Gathers rows of all ranks, and multiplies them: `D = act(gather(chunk) W + adapters + bias)`.
///
/// The chunk is `[rows_per_rank[rank], K]`, the weight `[K, N]` (`[N, K]` if `transpose_weight`), D is
/// `[sum of rows_per_rank, N]`. Column-parallel linears have their own N on each rank.
#[derive(Debug)]
pub struct AllGatherLoraLinearParams<'a> {
    /// Own rows.
    pub chunk: Chunk<'a>,
    /// Rows of each rank, the same list on every rank. May be 0.
    pub rows_per_rank: &'a [usize],
    /// This rank's columns of the weight.
    pub weight: Operand<'a>,
    /// Whether the weight is stored as `[N, K]`.
    pub transpose_weight: bool,
    /// Whether the gathered rows are stored as op(A)'s columns. Never overlaps.
    pub transpose_a: bool,
    /// N over all ranks, where ranks have different N; `None` if all have the same.
    pub total_n: Option<usize>,
    /// C: `[N]`, `[1, N]` or `[sum of rows_per_rank, N]`.
    pub bias: Option<View<'a>>,
    /// Applied last.
    pub activation: Activation,
    /// Adapters over all gathered rows, the same run lengths on every rank; empty for none.
    pub runs: &'a [LoraRun<'a>],
    /// Where D goes.
    pub output: Output<'a>,
    /// Forced mode.
    pub choice: Option<OverlapMode>,
    /// As of [`GemmParams::batch_invariant`](crate::GemmParams::batch_invariant): D's bits depend neither on the mode, nor on how rows lie on
    /// ranks. Each rank decides for itself.
    pub batch_invariant: bool,
}

impl<'a> AllGatherLoraLinearParams<'a> {
    /// The plain case: no bias, no adapters, D allocated in the weight's type (f32 for a quantized weight).
    pub fn new(
        chunk: Chunk<'a>,
        rows_per_rank: &'a [usize],
        weight: impl Into<Operand<'a>>,
    ) -> Self {
        let weight = weight.into();
        let output = match weight {
            Operand::Plain(w) => w.dtype(),
            Operand::Quantized(_) => DataType::F32,
        };
        Self {
            chunk,
            rows_per_rank,
            weight,
            transpose_weight: false,
            transpose_a: false,
            total_n: None,
            bias: None,
            activation: Activation::None,
            runs: &[],
            output: Output::Allocate(output),
            choice: None,
            batch_invariant: false,
        }
    }
}

/// Multiplies, sums over all ranks, and leaves every rank its rows:
/// `D = act(rows of rank (sum over ranks of x W + adapters) + bias)`.
///
/// x is `[sum of rows_per_rank, K]`, the weight `[K, N]` (`[N, K]` if `transpose_weight`), D `[rows_per_rank[rank], N]`.
/// Row-parallel linears have their own K on each rank. Parts travel in D's type and are added in rank order in f32.
#[derive(Debug)]
pub struct LoraLinearReduceScatterParams<'a> {
    /// Activations: this rank's share of K.
    pub x: Operand<'a>,
    /// Rows that each rank gets, the same list on every rank. May be 0.
    pub rows_per_rank: &'a [usize],
    /// This rank's rows of the weight.
    pub weight: Operand<'a>,
    /// Whether the weight is stored as `[N, K]`.
    pub transpose_weight: bool,
    /// Whether x is stored as `[K, sum of rows_per_rank]`. Never overlaps.
    pub transpose_a: bool,
    /// K over all ranks, where ranks have different K; `None` if all have the same.
    pub total_k: Option<usize>,
    /// C, added once after the sum: `[N]`, `[1, N]`, or `[sum of rows_per_rank, N]`, of which a rank takes its rows.
    pub bias: Option<View<'a>>,
    /// Applied last.
    pub activation: Activation,
    /// Adapters over all rows, the same run lengths on every rank: A `[K of this rank, r]`. Empty for none.
    pub runs: &'a [LoraRun<'a>],
    /// Where D goes.
    pub output: Output<'a>,
    /// Forced mode.
    pub choice: Option<OverlapMode>,
    /// As of [`GemmParams::batch_invariant`](crate::GemmParams::batch_invariant), for the parts that are summed: D's bits depend neither on
    /// the mode, nor on who gets which rows. Each rank decides for itself, so all should.
    pub batch_invariant: bool,
}

impl<'a> LoraLinearReduceScatterParams<'a> {
    /// The plain case: no bias, no adapters, D allocated in the weight's type (f32 for a quantized weight).
    pub fn new(
        x: impl Into<Operand<'a>>,
        rows_per_rank: &'a [usize],
        weight: impl Into<Operand<'a>>,
    ) -> Self {
        let weight = weight.into();
        let output = match weight {
            Operand::Plain(w) => w.dtype(),
            Operand::Quantized(_) => DataType::F32,
        };
        Self {
            x: x.into(),
            rows_per_rank,
            weight,
            transpose_weight: false,
            transpose_a: false,
            total_k: None,
            bias: None,
            activation: Activation::None,
            runs: &[],
            output: Output::Allocate(output),
            choice: None,
            batch_invariant: false,
        }
    }
}

/// Multiplies, sums over all ranks, and gives every rank everything: `D = act(sum over ranks of (x W + adapters) + C)`.
#[derive(Debug)]
pub struct LoraLinearAllReduceParams<'a> {
    /// The linear. Its C and activation are applied once, after the sum. All ranks have them, or none: the sum is one of another type
    /// where they follow.
    pub linear: LoraLinearParams<'a>,
    /// Where D goes. Parts are summed in its type.
    pub output: Output<'a>,
    /// Forced algorithm of the sum.
    pub choice: Option<AllReduceAlgorithm>,
}
