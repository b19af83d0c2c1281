//! What callers fill in: one struct per operation, never a list of positional arguments. `check()` names the field that
//! is wrong, what it was and what it should have been.

use crate::{
    AllReduceAlgorithm, DataType, Error, MemoryType, Operand, OverlapMode, QScheme, Result, Shape,
    View, ViewMut, comm::Filled,
};

/// How values of several ranks are combined.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum ReduceOp {
    /// Sum.
    Sum,
    /// Product.
    Prod,
    /// Greatest; -0 is below +0.
    Max,
    /// Least; -0 is below +0.
    Min,
    /// Sum divided by the number of ranks, in f32, before the one rounding.
    Avg,
}

/// Which parallelism a group of ranks serves.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum ParallelMode {
    /// Tensor parallel (attention).
    Tp,
    /// Data parallel.
    Dp,
    /// Data and tensor parallel together: all ranks.
    DpAndTp,
    /// Tensor parallel in the feed-forward part.
    FfnTp,
    /// Expert parallel.
    Ep,
    /// Expert-parallel load balancing.
    Eplb,
}

impl ParallelMode {
    /// Whether linears of this mode may overlap with their collective.
    pub const fn overlaps(self) -> bool {
        matches!(self, Self::Tp | Self::FfnTp)
    }
}

/// Applied to every element of a product, last.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum Activation {
    /// x
    #[default]
    None,
    /// max(x, 0)
    Relu,
    /// GELU by tanh (Hendrycks and Gimpel).
    GeluTanh,
    /// GELU by the error function.
    GeluErf,
    /// x / (1 + exp(-x))
    Silu,
}

/// Where a result goes.
#[derive(Debug)]
pub enum Output<'a> {
    /// Into the caller's buffer, whose dtype decides.
    Into(ViewMut<'a>),
    /// Into a new buffer of this type.
    Allocate(DataType),
}

impl Output<'_> {
    /// Type of the result.
    pub fn dtype(&self) -> DataType {
        match self {
            Self::Into(v) => v.dtype(),
            Self::Allocate(t) => *t,
        }
    }

    /// Checks shape and type of a given buffer, or the type of one to be allocated.
    ///
    /// # Errors
    /// [`Error::Invalid`] naming `output`.
    pub fn check(&self, shape: &[usize]) -> Result<()> {
        float("output.dtype", self.dtype())?;
        match self {
            Self::Into(v) if v.shape().dims() != shape => Err(Error::invalid(
                "output.shape",
                v.shape(),
                format!("{shape:?}"),
            )),
            _ => Ok(()),
        }
    }
}

pub(crate) fn float(field: &'static str, dtype: DataType) -> Result<()> {
    if matches!(dtype, DataType::F32 | DataType::F16 | DataType::BF16) {
        Ok(())
    } else {
        Err(Error::invalid(field, dtype, "f32, f16 or bf16"))
    }
}

/// The dimensions of a product.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct GemmShape {
    /// Products of the same size, one after the other (1 without a batch dimension).
    pub batch: usize,
    /// Rows of the result.
    pub m: usize,
    /// Columns of the result.
    pub n: usize,
    /// Inner dimension.
    pub k: usize,
    /// Shape of the result.
    pub d: Shape,
}

/// `D = act(alpha * op(A) op(B) + beta * C)`.
///
/// A is `[M, K]` (`[K, M]` if `transpose_a`), B `[K, N]` (`[N, K]` if `transpose_b`), C `[N]`, `[1, N]` or `[M, N]`.
/// With a leading batch dimension A and B must agree in it; C may then be `[N]` or have it too. f32, f16 and bf16;
/// products are accumulated in f32.
#[derive(Clone, Copy, Debug)]
pub struct GemmParams<'a> {
    /// Left factor.
    pub a: Operand<'a>,
    /// Right factor.
    pub b: Operand<'a>,
    /// Added to the product.
    pub c: Option<View<'a>>,
    /// Factor of the product.
    pub alpha: f32,
    /// Factor of C.
    pub beta: f32,
    /// Whether A is stored as `[K, M]`.
    pub transpose_a: bool,
    /// Whether B is stored as `[N, K]`, as most checkpoints store weights.
    pub transpose_b: bool,
    /// Applied last.
    pub activation: Activation,
    /// Type of the accumulator: f32.
    pub compute_type: DataType,
    /// Most streaming multiprocessors that the product may use.
    pub sm_cap: Option<u16>,
}

impl<'a> GemmParams<'a> {
    /// A times B.
    pub fn new(a: impl Into<Operand<'a>>, b: impl Into<Operand<'a>>) -> Self {
        Self {
            a: a.into(),
            b: b.into(),
            c: None,
            alpha: 1.0,
            beta: 1.0,
            transpose_a: false,
            transpose_b: false,
            activation: Activation::None,
            compute_type: DataType::F32,
            sm_cap: None,
        }
    }

    /// Checks everything that can be checked without a device.
    ///
    /// # Errors
    /// [`Error::Invalid`] naming the field, what it was and what it should have been.
    pub fn check(&self) -> Result<GemmShape> {
        let (a, b) = (self.a.shape(), self.b.shape());
        for (field, s) in [("a.shape", a), ("b.shape", b)] {
            if !(2..=3).contains(&s.dims().len()) {
                return Err(Error::invalid(field, s, "2 dimensions, or 3 with a batch"));
            }
        }
        if self.compute_type != DataType::F32 {
            return Err(Error::invalid("compute_type", self.compute_type, "f32"));
        }
        for (field, operand) in [("a.dtype", self.a), ("b.dtype", self.b)] {
            if operand.scheme() == QScheme::None {
                float(field, operand.dtype())?;
            }
        }
        if a.dims().len() != b.dims().len() || a.dims().len() == 3 && a.rows() != b.rows() {
            return Err(Error::invalid(
                "b.shape",
                b,
                format!("the batch dimensions of a, {a}"),
            ));
        }
        let matrix = |s: Shape, transpose: bool| {
            let d = s.dims();
            let (x, y) = (d[d.len() - 2], d[d.len() - 1]);
            if transpose { (y, x) } else { (x, y) }
        };
        let (m, k) = matrix(a, self.transpose_a);
        let (k_of_b, n) = matrix(b, self.transpose_b);
        if k != k_of_b {
            return Err(Error::invalid(
                "b.shape",
                format!("{b} (K = {k_of_b})"),
                format!("K = {k}, as in a {a}"),
            ));
        }
        let batched = a.dims().len() == 3;
        let d = if batched {
            Shape::new(&[a.rows(), m, n])?
        } else {
            Shape::new(&[m, n])?
        };
        if let Some(c) = self.c {
            float("c.dtype", c.dtype())?;
            let s = c.shape();
            if !(s == d || s.dims() == [n] || s.dims() == [1, n]) {
                return Err(Error::invalid(
                    "c.shape",
                    s,
                    format!("{d}, or a row of {n}"),
                ));
            }
        }
        self.check_memory()?;
        Ok(GemmShape {
            batch: if batched { a.rows() } else { 1 },
            m,
            n,
            k,
            d,
        })
    }

    fn check_memory(&self) -> Result<()> {
        let at = self.a.kernel().memory();
        let others = [
            ("b.memory", Some(self.b.kernel().memory())),
            ("c.memory", self.c.map(|c| c.memory())),
        ];
        for (field, memory) in others {
            resident(field, memory, at)?;
        }
        Ok(())
    }
}

fn resident(field: &'static str, memory: Option<MemoryType>, want: MemoryType) -> Result<()> {
    match memory {
        Some(m) if (m == MemoryType::Device) != (want == MemoryType::Device) => Err(
            Error::invalid(field, format!("{m:?}"), format!("{want:?}, as a")),
        ),
        _ => Ok(()),
    }
}

/// A low-rank adapter (LoRA, Hu et al. 2021): `scale * x A B` is added to the base product.
#[derive(Clone, Copy, Debug)]
pub struct Lora<'a> {
    /// `[K, r]`
    pub a: View<'a>,
    /// `[r, N]`
    pub b: View<'a>,
    /// Factor of the adapter's product.
    pub scale: f32,
}

/// Consecutive rows that share an adapter; with `None` they keep the base product.
#[derive(Clone, Copy, Debug)]
pub struct LoraRun<'a> {
    /// How many rows.
    pub rows: usize,
    /// Which adapter.
    pub adapter: Option<Lora<'a>>,
}

/// Checks that runs cover `m` rows, and that every adapter fits `[K, N]`.
///
/// # Errors
/// [`Error::Invalid`] with the index of the run.
pub fn check_runs(runs: &[LoraRun<'_>], m: usize, k: usize, n: usize) -> Result<()> {
    if runs.is_empty() {
        return Ok(());
    }
    let covered: usize = runs.iter().map(|r| r.rows).sum();
    if covered != m {
        return Err(Error::invalid(
            "runs",
            format!("{covered} rows in {} runs", runs.len()),
            format!("{m} rows"),
        ));
    }
    for (i, run) in runs.iter().enumerate() {
        let Some(l) = run.adapter else { continue };
        let (a, b) = (l.a.shape(), l.b.shape());
        let fits = a.dims().len() == 2
            && b.dims().len() == 2
            && a.rows() == k
            && b.columns() == n
            && a.columns() == b.rows();
        if !fits {
            return Err(Error::invalid(
                "runs.adapter",
                format!("adapter {i} with A {a} and B {b}"),
                format!("A [{k}, r] and B [r, {n}]"),
            ));
        }
        for dtype in [l.a.dtype(), l.b.dtype()] {
            if float("runs.adapter", dtype).is_err() {
                return Err(Error::invalid(
                    "runs.adapter",
                    format!("adapter {i} of {dtype}"),
                    "f32, f16 or bf16",
                ));
            }
        }
        if !l.scale.is_finite() {
            return Err(Error::invalid(
                "runs.adapter",
                format!("adapter {i} with scale {}", l.scale),
                "a finite scale",
            ));
        }
    }
    Ok(())
}

/// A linear layer with adapters: the base product, plus per run of rows `scale * x A B`, then C, then the activation.
#[derive(Clone, Copy, Debug)]
pub struct LoraLinearParams<'a> {
    /// The base product. Its activation is applied after the adapters.
    pub gemm: GemmParams<'a>,
    /// Runs over the rows of op(A); empty for none.
    pub runs: &'a [LoraRun<'a>],
}

impl LoraLinearParams<'_> {
    /// # Errors
    /// As [`GemmParams::check`] and [`check_runs`]; a batch dimension takes no adapters.
    pub fn check(&self) -> Result<GemmShape> {
        let shape = self.gemm.check()?;
        if !self.runs.is_empty() && self.gemm.a.shape().dims().len() != 2 {
            return Err(Error::invalid(
                "a.shape",
                self.gemm.a.shape(),
                "2 dimensions where there are adapters",
            ));
        }
        check_runs(self.runs, shape.m, shape.k, shape.n)?;
        Ok(shape)
    }
}

/// Every rank gets the reduction of all inputs.
#[derive(Debug)]
pub struct AllReduceParams<'a> {
    /// Result, and input too unless `from` is given. Same shape on every rank.
    pub data: ViewMut<'a>,
    /// Input, if it is to be kept. The result may then be f32 where the input is f16 or bf16.
    pub from: Option<View<'a>>,
    /// How values are combined.
    pub op: ReduceOp,
    /// Forced algorithm.
    pub choice: Option<AllReduceAlgorithm>,
}

impl AllReduceParams<'_> {
    /// # Errors
    /// [`Error::Invalid`] naming the field.
    pub fn check(&self) -> Result<()> {
        let from = self.from.unwrap_or(self.data.as_view());
        reduction("from", from, "data", self.data.as_view())?;
        if from.shape() != self.data.shape() {
            return Err(Error::invalid(
                "from.shape",
                from.shape(),
                self.data.shape(),
            ));
        }
        Ok(())
    }
}

/// Types a reduction can take and give: equal ones, or f32 out of f16 and bf16.
fn reduction(
    from_field: &'static str,
    from: View<'_>,
    to_field: &'static str,
    to: View<'_>,
) -> Result<()> {
    float(from_field, from.dtype())?;
    if to.dtype() != from.dtype() && to.dtype() != DataType::F32 {
        return Err(Error::invalid(
            to_field,
            to.dtype(),
            format!("{} or f32", from.dtype()),
        ));
    }
    resident(to_field, Some(to.memory()), from.memory())
}

/// Checks a row count per rank.
///
/// # Errors
/// [`Error::Invalid`] naming `field` if there is not one count for each rank of the group.
pub fn check_rows(field: &'static str, rows: &[usize], size: usize) -> Result<usize> {
    if rows.len() != size {
        return Err(Error::invalid(
            field,
            format!("{} counts", rows.len()),
            format!("one for each of {size} ranks"),
        ));
    }
    rows.iter()
        .try_fold(0usize, |sum, &r| sum.checked_add(r))
        .ok_or_else(|| Error::invalid(field, format!("{rows:?}"), "a sum that does not overflow"))
}

/// Checks that `v` has `rows` rows of `row_len` elements of `dtype`.
fn rows_of(
    field: &'static str,
    v: View<'_>,
    rows: usize,
    row_len: usize,
    dtype: DataType,
) -> Result<()> {
    if v.dtype() != dtype {
        return Err(Error::invalid(field, v.dtype(), dtype));
    }
    if v.shape().dims().is_empty() || v.shape().rows() != rows || v.shape().row_len() != row_len {
        return Err(Error::invalid(
            field,
            v.shape(),
            format!("{rows} rows of {row_len}"),
        ));
    }
    Ok(())
}

/// Every rank gets all rows, in rank order.
#[derive(Debug)]
pub struct AllGatherParams<'a> {
    /// Own rows, `[rows_per_rank[rank], ..]`.
    pub from: View<'a>,
    /// Rows of each rank, the same list on every rank. May be 0.
    pub rows_per_rank: &'a [usize],
    /// All rows, `[sum of rows_per_rank, ..]`.
    pub to: ViewMut<'a>,
}

impl AllGatherParams<'_> {
    /// # Errors
    /// [`Error::Invalid`] naming the field.
    pub fn check(&self, rank: usize, size: usize) -> Result<()> {
        let total = check_rows("rows_per_rank", self.rows_per_rank, size)?;
        let row_len = self.to.shape().row_len();
        let dtype = self.to.dtype();
        rows_of("from", self.from, self.rows_per_rank[rank], row_len, dtype)?;
        rows_of("to", self.to.as_view(), total, row_len, dtype)?;
        resident("to", Some(self.to.memory()), self.from.memory())
    }
}

/// Every rank gets its rows of the reduction of all inputs.
#[derive(Debug)]
pub struct ReduceScatterParams<'a> {
    /// All rows, `[sum of rows_per_rank, ..]`.
    pub from: View<'a>,
    /// Rows that each rank gets, the same list on every rank. May be 0.
    pub rows_per_rank: &'a [usize],
    /// Own rows of the result, `[rows_per_rank[rank], ..]`; f32 is allowed where the input is f16 or bf16.
    pub to: ViewMut<'a>,
    /// How values are combined.
    pub op: ReduceOp,
}

impl ReduceScatterParams<'_> {
    /// # Errors
    /// [`Error::Invalid`] naming the field.
    pub fn check(&self, rank: usize, size: usize) -> Result<()> {
        let total = check_rows("rows_per_rank", self.rows_per_rank, size)?;
        let row_len = self.from.shape().row_len();
        reduction("from", self.from, "to", self.to.as_view())?;
        rows_of("from", self.from, total, row_len, self.from.dtype())?;
        let own = self.rows_per_rank[rank];
        rows_of("to", self.to.as_view(), own, row_len, self.to.dtype())
    }
}

/// Every rank gets the root's data.
#[derive(Debug)]
pub struct BroadcastParams<'a> {
    /// Input on the root, result elsewhere. Same shape on every rank.
    pub data: ViewMut<'a>,
    /// Who has the data.
    pub root: usize,
}

impl BroadcastParams<'_> {
    /// # Errors
    /// [`Error::Invalid`] naming the field.
    pub fn check(&self, size: usize) -> Result<()> {
        if self.root < size {
            Ok(())
        } else {
            Err(Error::invalid(
                "root",
                self.root,
                format!("a rank below {size}"),
            ))
        }
    }
}

/// Every rank sends rows to every rank. Counts may differ for every pair, and may be 0.
#[derive(Debug)]
pub struct AllToAllParams<'a> {
    /// Rows to send, those for rank 0 first: `[sum of send_rows, ..]`.
    pub from: View<'a>,
    /// Rows for each rank.
    pub send_rows: &'a [usize],
    /// Rows received, those of rank 0 first: `[sum of recv_rows, ..]`.
    pub to: ViewMut<'a>,
    /// Rows of each rank. What a sender sends and a receiver expects must agree.
    pub recv_rows: &'a [usize],
}

impl AllToAllParams<'_> {
    /// # Errors
    /// [`Error::Invalid`] naming the field.
    pub fn check(&self, rank: usize, size: usize) -> Result<()> {
        let send = check_rows("send_rows", self.send_rows, size)?;
        let recv = check_rows("recv_rows", self.recv_rows, size)?;
        let row_len = self.from.shape().row_len();
        rows_of("from", self.from, send, row_len, self.from.dtype())?;
        rows_of("to", self.to.as_view(), recv, row_len, self.from.dtype())?;
        if self.send_rows[rank] != self.recv_rows[rank] {
            return Err(Error::invalid(
                "recv_rows",
                format!("{} from itself", self.recv_rows[rank]),
                format!("{}, as sent", self.send_rows[rank]),
            ));
        }
        resident("to", Some(self.to.memory()), self.from.memory())
    }
}

/// Data for one peer, who calls `recv` with the same shape and type.
#[derive(Debug)]
pub struct SendParams<'a> {
    /// What to send.
    pub from: View<'a>,
    /// To whom.
    pub peer: usize,
}

/// Data from one peer, who calls `send`.
#[derive(Debug)]
pub struct RecvParams<'a> {
    /// Where it goes.
    pub to: ViewMut<'a>,
    /// From whom.
    pub peer: usize,
}

/// Checks a peer's number.
///
/// # Errors
/// [`Error::Invalid`] if it is this rank, or none of the group.
pub fn check_peer(peer: usize, rank: usize, size: usize) -> Result<()> {
    if peer < size && peer != rank {
        Ok(())
    } else {
        Err(Error::invalid(
            "peer",
            peer,
            format!("a rank below {size} other than {rank}"),
        ))
    }
}

/// Own rows: already in the user buffer, as the token proves, or to be copied there.
#[derive(Debug)]
#[expect(
    clippy::large_enum_variant,
    reason = "a parameter on the stack, moved once"
)]
pub enum Chunk<'a> {
    /// Written into the space that [`Lease::own_chunk`](crate::Lease::own_chunk) handed out.
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
        }
    }
}

/// Multiplies, sums over all ranks, and gives every rank everything: `D = act(sum over ranks of (x W + adapters) + C)`.
#[derive(Debug)]
pub struct LoraLinearAllReduceParams<'a> {
    /// The linear. Its C and activation are applied once, after the sum.
    pub linear: LoraLinearParams<'a>,
    /// Where D goes. Parts are summed in its type.
    pub output: Output<'a>,
    /// Forced algorithm of the sum.
    pub choice: Option<AllReduceAlgorithm>,
}
