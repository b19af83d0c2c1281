//! Matrix products in f32, on the `gemm` crate.

use crate::element;
use brigade_device::{Activation, DataType, Error, Result};
use parking_lot::Mutex;
use std::ops::{Deref, DerefMut};

/// Vectors of f32 that are used again, so that large temporaries do not cost page faults at every call.
#[derive(Default)]
pub(crate) struct Scratch(Mutex<Vec<Vec<f32>>>);

/// Most vectors that are kept.
const KEPT: usize = 8;

impl Scratch {
    /// `len` numbers with unspecified values.
    ///
    /// # Errors
    /// [`Error::Backend`] if there is no memory for them.
    pub(crate) fn take(&self, len: usize) -> Result<Taken<'_>> {
        let mut kept = self.0.lock();
        let best = (0..kept.len())
            .filter(|&i| kept[i].capacity() >= len)
            .min_by_key(|&i| kept[i].capacity());
        let mut values = best.map(|i| kept.swap_remove(i)).unwrap_or_default();
        drop(kept);
        if values.capacity() < len {
            values = bytemuck::allocation::try_zeroed_vec(len)
                .map_err(|()| Error::no_memory(len.saturating_mul(4)))?;
        }
        values.resize(len, 0.0);
        Ok(Taken { values, home: self })
    }
}

/// A vector on loan.
pub(crate) struct Taken<'a> {
    values: Vec<f32>,
    home: &'a Scratch,
}

impl Deref for Taken<'_> {
    type Target = [f32];
    fn deref(&self) -> &[f32] {
        &self.values
    }
}

impl DerefMut for Taken<'_> {
    fn deref_mut(&mut self) -> &mut [f32] {
        &mut self.values
    }
}

impl Drop for Taken<'_> {
    fn drop(&mut self) {
        let values = std::mem::take(&mut self.values);
        let mut kept = self.home.0.lock();
        kept.push(values);
        if kept.len() > KEPT {
            let smallest = (0..kept.len()).min_by_key(|&i| kept[i].capacity());
            smallest.map(|i| kept.swap_remove(i));
        }
    }
}

enum Values<'a> {
    Borrowed(&'a [f32]),
    Converted(Taken<'a>),
}

/// A matrix of f32, borrowed where it is one already and converted otherwise.
pub(crate) struct Matrix<'a> {
    values: Values<'a>,
    rows: usize,
    columns: usize,
    row_stride: usize,
    column_stride: usize,
}

impl<'a> Matrix<'a> {
    /// op of a stored `[rows, columns]` matrix.
    pub(crate) fn new(
        dtype: DataType,
        bytes: &'a [u8],
        [rows, columns]: [usize; 2],
        transpose: bool,
        scratch: &'a Scratch,
    ) -> Result<Self> {
        if dtype == DataType::F32 {
            let stored = Self::of(bytemuck::cast_slice(bytes), rows, columns);
            return Ok(if transpose {
                stored.transposed()
            } else {
                stored
            });
        }
        let mut converted = scratch.take(rows * columns)?;
        element::load(dtype, bytes, &mut converted);
        Ok(Self::converted(converted, [rows, columns], transpose))
    }

    /// op of a matrix whose values were made here.
    pub(crate) fn converted(
        values: Taken<'a>,
        [rows, columns]: [usize; 2],
        transpose: bool,
    ) -> Self {
        let stored = Self {
            values: Values::Converted(values),
            rows,
            columns,
            row_stride: columns,
            column_stride: 1,
        };
        if transpose {
            stored.transposed()
        } else {
            stored
        }
    }

    /// A plain row-major matrix of f32.
    pub(crate) fn of(values: &'a [f32], rows: usize, columns: usize) -> Self {
        Self {
            values: Values::Borrowed(values),
            rows,
            columns,
            row_stride: columns,
            column_stride: 1,
        }
    }

    fn transposed(self) -> Self {
        Self {
            rows: self.columns,
            columns: self.rows,
            row_stride: self.column_stride,
            column_stride: self.row_stride,
            ..self
        }
    }

    /// Rows `first..first + rows`.
    pub(crate) fn slice(&self, first: usize, rows: usize) -> Matrix<'_> {
        let values: &[f32] = self;
        Matrix {
            values: Values::Borrowed(&values[(first * self.row_stride).min(values.len())..]),
            rows,
            ..*self
        }
    }

    /// Writes rows from `first` on, as many as there is room for.
    pub(crate) fn copy_rows(&self, first: usize, to: &mut [f32]) {
        if self.columns == 0 {
            return;
        }
        for (row, to) in to.chunks_exact_mut(self.columns).enumerate() {
            let start = (first + row) * self.row_stride;
            for (column, to) in to.iter_mut().enumerate() {
                *to = self[start + column * self.column_stride];
            }
        }
    }

    pub(crate) fn rows(&self) -> usize {
        self.rows
    }

    pub(crate) fn columns(&self) -> usize {
        self.columns
    }
}

impl Deref for Matrix<'_> {
    type Target = [f32];
    fn deref(&self) -> &[f32] {
        match &self.values {
            Values::Borrowed(v) => v,
            Values::Converted(v) => v,
        }
    }
}

/// Who multiplies: the caller's thread, or the device's own pool.
pub(crate) struct Workers {
    pool: Option<rayon::ThreadPool>,
}

impl Workers {
    pub(crate) fn new(threads: usize) -> Result<Self, rayon::ThreadPoolBuildError> {
        let pool = (threads > 1)
            .then(|| {
                rayon::ThreadPoolBuilder::new()
                    .num_threads(threads)
                    .thread_name(|i| format!("brigade-gemm-{i}"))
                    .build()
            })
            .transpose()?;
        Ok(Self { pool })
    }

    pub(crate) fn pool(&self) -> Option<&rayon::ThreadPool> {
        self.pool.as_ref()
    }

    /// `out = alpha * x w`, or `out += alpha * x w`; `out` is row-major `[rows of x, columns of w]`.
    pub(crate) fn multiply(
        &self,
        out: &mut [f32],
        x: &Matrix<'_>,
        w: &Matrix<'_>,
        alpha: f32,
        accumulate: bool,
    ) {
        let (m, n, k) = (x.rows, w.columns, x.columns);
        assert!(out.len() == m * n && w.rows == k, "a product's dimensions");
        if m == 0 || n == 0 {
            return;
        }
        if k == 0 || alpha == 0.0 {
            if !accumulate {
                out.fill(0.0);
            }
            return;
        }
        let fits = |m: &Matrix<'_>| {
            (m.rows - 1) * m.row_stride + (m.columns - 1) * m.column_stride < m.len()
        };
        assert!(fits(x) && fits(w), "a matrix's values");
        let parallelism = match &self.pool {
            Some(pool) => gemm::Parallelism::Rayon(pool.current_num_threads()),
            None => gemm::Parallelism::None,
        };
        let out = SendPtr(out.as_mut_ptr());
        let run = move || {
            let out = out;
            // SAFETY: all three matrices were checked to hold what their dimensions and strides reach, and `out` is
            // borrowed mutably, so it does not overlap the others.
            unsafe {
                gemm::gemm(
                    m,
                    n,
                    k,
                    { out }.0,
                    1,
                    n as isize,
                    accumulate,
                    x.as_ptr(),
                    x.column_stride as isize,
                    x.row_stride as isize,
                    w.as_ptr(),
                    w.column_stride as isize,
                    w.row_stride as isize,
                    1.0,
                    alpha,
                    false,
                    false,
                    false,
                    parallelism,
                );
            }
        };
        match &self.pool {
            Some(pool) => pool.install(run),
            None => run(),
        }
    }
}

#[derive(Clone, Copy)]
struct SendPtr(*mut f32);
// SAFETY: the pointer stands for a slice that the calling thread borrows mutably while the pool works on it.
unsafe impl Send for SendPtr {}

/// Applies an activation to every value.
pub(crate) fn activate(activation: Activation, values: &mut [f32]) {
    let f: fn(f32) -> f32 = match activation {
        Activation::None => return,
        // Not `max`, which may give either zero for -0, and hides a NaN.
        Activation::Relu => |x| if x > 0.0 || x.is_nan() { x } else { 0.0 },
        Activation::GeluTanh => |x| {
            let inner = (2.0 / std::f32::consts::PI).sqrt() * (x + 0.044_715 * x * x * x);
            0.5 * x * (1.0 + inner.tanh())
        },
        Activation::GeluErf => {
            |x| 0.5 * x * (1.0 + libm::erff(x * std::f32::consts::FRAC_1_SQRT_2))
        }
        Activation::Silu => |x| x / (1.0 + (-x).exp()),
    };
    for x in values {
        *x = f(*x);
    }
}
