//! Linear layers: base product, adapters, C, activation, one rounding.

use crate::{
    element,
    gemm::{Matrix, Scratch, Workers, activate},
    operand::{Factor, OwnedOperand},
};
use brigade_device::{
    Activation, Buffer, DataType, Error, GemmParams, LoraRun, Operand, Result, Shape, View,
};
use smallvec::SmallVec;
use std::ops::Range;

/// Rows that are multiplied together where results must not depend on how many there are.
const BLOCK: usize = 32;

/// A linear layer that owns what it refers to, so that it can run later and again.
pub(crate) struct OwnedLinear {
    weight: OwnedOperand,
    transpose: bool,
    bias: Option<Buffer>,
    alpha: f32,
    beta: f32,
    activation: Activation,
    runs: Vec<OwnedRun>,
    batch_invariant: bool,
}

struct OwnedRun {
    rows: Range<usize>,
    adapter: Option<(Buffer, Buffer, f32)>,
}

impl OwnedLinear {
    /// From the parameters of a gemm and the runs of its adapters.
    pub(crate) fn new(p: &GemmParams<'_>, runs: &[LoraRun<'_>]) -> Result<Self> {
        Ok(Self {
            weight: OwnedOperand::new(&p.b)?,
            transpose: p.transpose_b,
            bias: p.c.filter(|_| p.beta != 0.0).map(|c| c.retain()),
            alpha: p.alpha,
            beta: p.beta,
            activation: p.activation,
            runs: own_runs(runs),
            batch_invariant: p.batch_invariant,
        })
    }

    /// From the parts that a linear with a collective has.
    pub(crate) fn from_parts(
        weight: Operand<'_>,
        transpose: bool,
        bias: Option<View<'_>>,
        activation: Activation,
        runs: &[LoraRun<'_>],
        batch_invariant: bool,
    ) -> Result<Self> {
        Ok(Self {
            weight: OwnedOperand::new(&weight)?,
            transpose,
            bias: bias.map(|c| c.retain()),
            alpha: 1.0,
            beta: 1.0,
            activation,
            runs: own_runs(runs),
            batch_invariant,
        })
    }

    /// Columns of the result.
    pub(crate) fn n(&self) -> usize {
        let s = self.weight.kernel.shape();
        if self.transpose {
            s.rows()
        } else {
            s.columns()
        }
    }

    /// Everything that it reads, in the order in which [`bind`](Self::bind) wants the bytes.
    pub(crate) fn buffers(&self) -> SmallVec<[&Buffer; 6]> {
        let adapters = self.runs.iter().filter_map(|r| r.adapter.as_ref());
        self.weight
            .buffers()
            .chain(&self.bias)
            .chain(adapters.flat_map(|(a, b, _)| [a, b]))
            .collect()
    }

    /// The layer over the bytes of its buffers. `integers` says that the rows to come are, and are to be multiplied as,
    /// small integers.
    pub(crate) fn bind<'a>(
        &'a self,
        bytes: &[&'a [u8]],
        integers: bool,
        scratch: &'a Scratch,
    ) -> Result<BoundLinear<'a>> {
        let mut bytes = bytes.iter().copied();
        let weight = self.weight.bind(&mut bytes, self.transpose, scratch)?;
        let weight = weight.for_rows(integers, scratch)?;
        let mut next = move || bytes.next().unwrap_or_default();
        let dims = |s: Shape| {
            let d = s.dims();
            [d[d.len() - 2], d[d.len() - 1]]
        };
        let matrix = |b: &Buffer, bytes: &'a [u8], transpose| {
            Matrix::new(b.dtype(), bytes, dims(b.shape()), transpose, scratch)
        };
        let n = weight.columns();
        let bias = self.bias.as_ref().map(|c| {
            let rows = c.shape().len().checked_div(n).unwrap_or(0);
            Matrix::new(c.dtype(), next(), [rows, n], false, scratch)
        });
        let bias = bias.transpose()?;
        let run = |r: &OwnedRun| {
            let adapter = r.adapter.as_ref().map(|(a, b, scale)| {
                let a = matrix(a, next(), false)?;
                Ok::<_, Error>((a, matrix(b, next(), false)?, *scale))
            });
            Ok(BoundRun {
                rows: r.rows.clone(),
                adapter: adapter.transpose()?,
            })
        };
        let runs = self.runs.iter().map(run).collect::<Result<_>>()?;
        Ok(BoundLinear {
            weight,
            bias,
            runs,
            alpha: self.alpha,
            beta: self.beta,
            activation: self.activation,
            batch_invariant: self.batch_invariant,
            scratch,
        })
    }
}

fn own_runs(runs: &[LoraRun<'_>]) -> Vec<OwnedRun> {
    let mut first = 0;
    runs.iter()
        .map(|r| {
            let rows = first..first + r.rows;
            first = rows.end;
            OwnedRun {
                rows,
                adapter: r.adapter.map(|l| (l.a.retain(), l.b.retain(), l.scale)),
            }
        })
        .collect()
}

struct BoundRun<'a> {
    rows: Range<usize>,
    adapter: Option<(Matrix<'a>, Matrix<'a>, f32)>,
}

/// A linear layer ready to multiply.
pub(crate) struct BoundLinear<'a> {
    weight: Factor<'a>,
    bias: Option<Matrix<'a>>,
    runs: Vec<BoundRun<'a>>,
    alpha: f32,
    beta: f32,
    activation: Activation,
    batch_invariant: bool,
    scratch: &'a Scratch,
}

impl BoundLinear<'_> {
    /// Columns of the result.
    pub(crate) fn n(&self) -> usize {
        self.weight.columns()
    }

    /// Inner dimension.
    pub(crate) fn k(&self) -> usize {
        self.weight.rows()
    }

    /// Multiplies `x`, whose rows are `rows` of all the rows that runs and bias count, and writes `out`.
    pub(crate) fn multiply(
        &self,
        workers: &Workers,
        x: &Factor<'_>,
        rows: Range<usize>,
        dtype: DataType,
        out: &mut [u8],
    ) -> Result<()> {
        if dtype == DataType::F32 {
            self.multiply_f32(workers, x, rows, bytemuck::cast_slice_mut(out))
        } else {
            let mut sum = self.scratch.take(rows.len() * self.n())?;
            self.multiply_f32(workers, x, rows, &mut sum)?;
            element::store(dtype, &sum, out);
            Ok(())
        }
    }

    fn multiply_f32(
        &self,
        workers: &Workers,
        x: &Factor<'_>,
        rows: Range<usize>,
        out: &mut [f32],
    ) -> Result<()> {
        let n = self.n();
        match (x, &self.weight) {
            (Factor::Int8(x), Factor::Int8(w)) => workers.multiply_int8(out, x, w, self.alpha),
            (x, w) => {
                let (x, w) = (x.float(self.scratch)?, w.float(self.scratch)?);
                x.with(|x| w.with(|w| self.product(workers, out, x, w, self.alpha, false)))?;
            }
        }
        for run in &self.runs {
            let clipped = run.rows.start.max(rows.start)..run.rows.end.min(rows.end);
            let Some((a, b, scale)) = run.adapter.as_ref().filter(|_| !clipped.is_empty()) else {
                continue;
            };
            let first = clipped.start - rows.start;
            let x = x.slice(first, clipped.len());
            let mut low = self.scratch.take(clipped.len() * a.columns())?;
            x.float(self.scratch)?
                .with(|x| self.product(workers, &mut low, x, a, 1.0, false))?;
            let low = Matrix::of(&low, clipped.len(), a.columns());
            let out = &mut out[first * n..(first + clipped.len()) * n];
            self.product(workers, out, &low, b, *scale, true)?;
        }
        finish(self.bias.as_ref(), self.beta, self.activation, rows, n, out);
        Ok(())
    }

    /// The library chooses how to multiply by the number of rows; where that must not matter, it always gets as many.
    fn product(
        &self,
        workers: &Workers,
        out: &mut [f32],
        x: &Matrix<'_>,
        w: &Matrix<'_>,
        alpha: f32,
        accumulate: bool,
    ) -> Result<()> {
        if !self.batch_invariant {
            workers.multiply(out, x, w, alpha, accumulate);
            return Ok(());
        }
        let (k, n) = (x.columns(), w.columns());
        if n == 0 {
            return Ok(());
        }
        let mut rows = self.scratch.take(BLOCK * k)?;
        let mut sums = self.scratch.take(BLOCK * n)?;
        for (block, out) in out.chunks_mut(BLOCK * n).enumerate() {
            let count = out.len() / n;
            x.copy_rows(block * BLOCK, &mut rows[..count * k]);
            rows[count * k..].fill(0.0);
            sums[..out.len()].copy_from_slice(out);
            sums[out.len()..].fill(0.0);
            workers.multiply(
                &mut sums,
                &Matrix::of(&rows, BLOCK, k),
                w,
                alpha,
                accumulate,
            );
            out.copy_from_slice(&sums[..out.len()]);
        }
        Ok(())
    }
}

/// `out = act(out + beta * bias)`, for rows `rows` of all the rows that a full bias has.
pub(crate) fn finish(
    bias: Option<&Matrix<'_>>,
    beta: f32,
    activation: Activation,
    rows: Range<usize>,
    n: usize,
    out: &mut [f32],
) {
    if let Some(c) = bias.filter(|_| n > 0) {
        let full = c.rows() != 1;
        for (row, out) in rows.zip(out.chunks_exact_mut(n)) {
            let c = if full { &c[row * n..][..n] } else { &c[..n] };
            for (x, &c) in out.iter_mut().zip(c) {
                *x += beta * c;
            }
        }
    }
    activate(activation, out);
}
