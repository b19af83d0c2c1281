//! Factors of a product: floats, or quantized values with their scales.

use crate::{
    element,
    gemm::{Matrix, Scratch, Workers},
};
use brigade_device::{Buffer, DataType, Operand, QScheme, Reason, Result};
use rayon::prelude::*;
use std::borrow::Cow;

/// A factor that owns what it refers to.
#[derive(Clone)]
pub(crate) struct OwnedOperand {
    pub(crate) kernel: Buffer,
    pub(crate) scales: Option<Buffer>,
    pub(crate) scheme: QScheme,
}

impl OwnedOperand {
    /// # Errors
    /// For zero points, which no scheme of the host uses.
    pub(crate) fn new(operand: &Operand<'_>) -> Result<Self> {
        Ok(match operand {
            Operand::Plain(v) => Self::plain(v.retain()),
            Operand::Quantized(q) if q.zeros().is_some() => {
                return Err(Reason::new(
                    "zero-points",
                    "the host device multiplies no zero points",
                    "quantize symmetrically",
                )
                .into());
            }
            Operand::Quantized(q) => Self {
                kernel: q.kernel().retain(),
                scales: Some(q.scales().retain()),
                scheme: q.scheme(),
            },
        })
    }

    pub(crate) fn plain(kernel: Buffer) -> Self {
        Self {
            kernel,
            scales: None,
            scheme: QScheme::None,
        }
    }

    /// What it reads, in the order in which [`bind`](Self::bind) wants the bytes.
    pub(crate) fn buffers(&self) -> impl Iterator<Item = &Buffer> {
        std::iter::once(&self.kernel).chain(&self.scales)
    }

    /// The factor over the bytes of its buffers.
    pub(crate) fn bind<'a>(
        &self,
        bytes: &mut impl Iterator<Item = &'a [u8]>,
        transpose: bool,
        scratch: &'a Scratch,
    ) -> Result<Factor<'a>> {
        let kernel = bytes.next().unwrap_or_default();
        let scales = self.scales.as_ref().and_then(|_| bytes.next());
        let d = self.kernel.shape();
        let d = d.dims();
        let parts = Parts {
            dtype: self.kernel.dtype(),
            scheme: self.scheme,
            kernel,
            scales: scales.map_or(&[], bytemuck::cast_slice),
            dims: [d[d.len() - 2], d[d.len() - 1]],
        };
        parts.factor(transpose, scratch)
    }
}

/// A stored matrix: values, and scales if it is quantized.
pub(crate) struct Parts<'a> {
    pub(crate) dtype: DataType,
    pub(crate) scheme: QScheme,
    pub(crate) kernel: &'a [u8],
    pub(crate) scales: &'a [f32],
    pub(crate) dims: [usize; 2],
}

impl<'a> Parts<'a> {
    /// op of the matrix: as integers where the scheme has them, else as f32.
    pub(crate) fn factor(self, transpose: bool, scratch: &'a Scratch) -> Result<Factor<'a>> {
        let [rows, columns] = self.dims;
        Ok(match self.scheme {
            QScheme::None => Factor::Float(Matrix::new(
                self.dtype,
                self.kernel,
                self.dims,
                transpose,
                scratch,
            )?),
            QScheme::Int8PerToken | QScheme::Int8PerTensor | QScheme::Int8WeightOnly => {
                let by_row = match self.scheme {
                    QScheme::Int8PerTensor => None,
                    scheme => Some((scheme == QScheme::Int8PerToken) != transpose),
                };
                let dims = if transpose {
                    [columns, rows]
                } else {
                    [rows, columns]
                };
                Factor::Int8(Int8Matrix {
                    values: Cow::Borrowed(bytemuck::cast_slice(self.kernel)),
                    scales: self.scales,
                    by_row,
                    dims,
                    transposed: transpose,
                })
            }
            QScheme::Fp8PerTensor | QScheme::Fp8PerTokenBlock => {
                let mut values = scratch.take(rows * columns)?;
                let blocks = columns.div_ceil(QScheme::BLOCK);
                for (row, out) in values.chunks_exact_mut(columns.max(1)).enumerate() {
                    let kernel = &self.kernel[row * columns..][..columns];
                    for (block, (out, kernel)) in out
                        .chunks_mut(QScheme::BLOCK)
                        .zip(kernel.chunks(QScheme::BLOCK))
                        .enumerate()
                    {
                        let scale = match self.scheme {
                            QScheme::Fp8PerTensor => self.scales[0],
                            _ => self.scales[row * blocks + block],
                        };
                        for (out, &bits) in out.iter_mut().zip(kernel) {
                            *out = element::fp8_to_f32(bits) * scale;
                        }
                    }
                }
                Factor::Float(Matrix::converted(values, self.dims, transpose))
            }
        })
    }
}

/// A factor ready to be multiplied.
pub(crate) enum Factor<'a> {
    Float(Matrix<'a>),
    Int8(Int8Matrix<'a>),
}

impl<'a> Factor<'a> {
    pub(crate) fn rows(&self) -> usize {
        match self {
            Self::Float(m) => m.rows(),
            Self::Int8(m) => m.dims[0],
        }
    }

    pub(crate) fn columns(&self) -> usize {
        match self {
            Self::Float(m) => m.columns(),
            Self::Int8(m) => m.dims[1],
        }
    }

    /// Rows `first..first + rows`.
    pub(crate) fn slice(&self, first: usize, rows: usize) -> Factor<'_> {
        match self {
            Self::Float(m) => Factor::Float(m.slice(first, rows)),
            Self::Int8(m) => Factor::Int8(m.slice(first, rows)),
        }
    }

    /// The factor in f32, which it may be already.
    pub(crate) fn float<'b>(&'b self, scratch: &'b Scratch) -> Result<AsFloat<'b, 'a>> {
        Ok(match self {
            Self::Float(m) => AsFloat::Borrowed(m),
            Self::Int8(m) => AsFloat::Owned(m.dequantize(scratch)?),
        })
    }

    /// As the right factor of integers: values of a column side by side, a scale per column.
    fn as_right(&mut self) {
        if let Self::Int8(m) = self {
            m.pack_columns();
        }
    }

    /// Gets the weight of a linear ready for rows that are integers, or are not.
    pub(crate) fn for_rows(mut self, integers: bool, scratch: &'a Scratch) -> Result<Self> {
        Ok(match &self {
            Self::Int8(m) if !integers || m.by_row == Some(true) => {
                Self::Float(m.dequantize(scratch)?)
            }
            _ => {
                self.as_right();
                self
            }
        })
    }

    /// Whether rows of it can be multiplied as integers.
    pub(crate) fn is_integer_rows(&self) -> bool {
        matches!(self, Self::Int8(m) if !m.transposed && m.by_row != Some(false))
    }
}

/// A matrix of f32, borrowed or made.
pub(crate) enum AsFloat<'b, 'a> {
    Borrowed(&'b Matrix<'a>),
    Owned(Matrix<'b>),
}

impl<'a> AsFloat<'_, 'a> {
    pub(crate) fn with<R>(&self, f: impl FnOnce(&Matrix<'_>) -> R) -> R {
        match self {
            Self::Borrowed(m) => f(m),
            Self::Owned(m) => f(m),
        }
    }
}

/// op of a stored int8 matrix.
pub(crate) struct Int8Matrix<'a> {
    values: Cow<'a, [i8]>,
    scales: &'a [f32],
    /// Whether scales go with rows (of op) or columns; `None` for one scale.
    by_row: Option<bool>,
    /// Of op.
    dims: [usize; 2],
    /// Whether values of a column (of op) lie side by side.
    transposed: bool,
}

impl<'a> Int8Matrix<'a> {
    fn scale(&self, row: usize, column: usize) -> f32 {
        match self.by_row {
            Some(true) => self.scales[row],
            Some(false) => self.scales[column],
            None => self.scales[0],
        }
    }

    fn slice(&self, first: usize, rows: usize) -> Int8Matrix<'_> {
        debug_assert!(!self.transposed, "rows of a transposed matrix");
        let [_, columns] = self.dims;
        let scales = match self.by_row {
            Some(true) => &self.scales[first..first + rows],
            _ => self.scales,
        };
        Int8Matrix {
            values: Cow::Borrowed(&self.values[first * columns..(first + rows) * columns]),
            scales,
            by_row: self.by_row,
            dims: [rows, columns],
            transposed: false,
        }
    }

    fn dequantize<'b>(&self, scratch: &'b Scratch) -> Result<Matrix<'b>> {
        let [rows, columns] = self.dims;
        let mut out = scratch.take(rows * columns)?;
        for row in 0..rows {
            for column in 0..columns {
                let at = if self.transposed {
                    column * rows + row
                } else {
                    row * columns + column
                };
                out[row * columns + column] = f32::from(self.values[at]) * self.scale(row, column);
            }
        }
        Ok(Matrix::converted(out, self.dims, false))
    }

    fn pack_columns(&mut self) {
        let [rows, columns] = self.dims;
        if self.transposed {
            return;
        }
        let packed = (0..columns)
            .flat_map(|c| (0..rows).map(move |r| (r, c)))
            .map(|(r, c)| self.values[r * columns + c])
            .collect();
        self.values = Cow::Owned(packed);
        self.transposed = true;
    }
}

/// A dot product of small integers, exact: i32 sums of blocks that cannot overflow, added in i64.
fn dot(a: &[i8], b: &[i8]) -> i64 {
    const BLOCK: usize = 1 << 16;
    a.chunks(BLOCK)
        .zip(b.chunks(BLOCK))
        .map(|(a, b)| {
            let products = a.iter().zip(b).map(|(&a, &b)| i32::from(a) * i32::from(b));
            i64::from(products.sum::<i32>())
        })
        .sum()
}

impl Workers {
    /// `out = alpha * x w` for rows and columns of integers: exact sums, then the scales in f32.
    pub(crate) fn multiply_int8(
        &self,
        out: &mut [f32],
        x: &Int8Matrix<'_>,
        w: &Int8Matrix<'_>,
        alpha: f32,
    ) {
        let ([m, k], [_, n]) = (x.dims, w.dims);
        if m == 0 || n == 0 {
            return;
        }
        let row = |(i, out): (usize, &mut [f32])| {
            let a = &x.values[i * k..(i + 1) * k];
            for (j, out) in out.iter_mut().enumerate() {
                let sum = dot(a, &w.values[j * k..(j + 1) * k]);
                *out = alpha * (sum as f32 * x.scale(i, 0) * w.scale(0, j));
            }
        };
        match self.pool() {
            Some(pool) => pool.install(|| out.par_chunks_exact_mut(n).enumerate().for_each(row)),
            None => out.chunks_exact_mut(n).enumerate().for_each(row),
        }
    }
}
