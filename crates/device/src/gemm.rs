//! Parameters of products and of linears with adapters.

use crate::{
    Activation, DataType, Error, Operand, QScheme, Result, Shape, View,
    params::{float, resident},
};

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
    /// Whether all that has written B had ended before the call in front of this product, a kernel or a whole operation, began: then a device may read it while
    /// that call ends, as GPUs do where there are few rows. A promise of the caller's, which nobody can check: kept by weights that stay as they are, and broken by those
    /// that a copy or an operation right in front writes.
    pub settled_b: bool,
    /// Whether bits of a row of D depend on that row of A (and C), on B and on its adapter alone: not on how many rows are multiplied
    /// together, which they are, or where it lies among them. Libraries choose a kernel by the number of rows, and so do not promise that.
    ///
    /// Devices that cannot are [`Error::Unsupported`](crate::Error::Unsupported), with what they take. Between devices bits differ.
    pub batch_invariant: bool,
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
            settled_b: false,
            batch_invariant: false,
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
    let covered = runs.iter().map(|r| r.rows).fold(0, usize::saturating_add);
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
