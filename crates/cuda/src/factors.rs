//! Factors of a product, in the form in which one of the routes multiplies them.
//!
//! | A | B | route |
//! |---|---|---|
//! | floats | floats of the same type | as they are |
//! | int8 by row, or one scale | int8 by column, or one scale | exact sums of integers, then the scales |
//! | fp8, one scale | fp8, one scale | fp8 (compute capability 8.9 and later) |
//! | anything else | | both in f32 |

use crate::{
    CudaDevice,
    finish::{Scales, Sums},
    kernels::blocks_for,
    lane::Lane,
    lt::Product,
    matrix::Matrix,
};
use brigade_device::{Buffer, DataType, GemmParams, GemmShape, Operand, QScheme, QView, Result};
use brigade_kernels::{LongParams, PackParams};
use std::sync::Arc;

/// Greatest K whose sums of products of int8 stay in 32 bits.
const LONGEST: usize = (1 << 17) - 1;

/// What the library wants K and N of bytes to be multiples of, and addresses too.
const GRAIN: usize = 16;

/// Both factors, ready to be multiplied.
pub(crate) enum Factors<'a> {
    /// Floats of one type; for fp8, with the scale of each. Columns of B may have been filled up.
    Float(Matrix, Matrix, Option<[Matrix; 2]>),
    /// Integers.
    Int8(QView<'a>, QView<'a>),
}

/// The scales of a row factor or a column factor.
fn scales(q: &QView<'_>) -> Scales {
    Scales {
        values: q.scales().retain(),
        stride: u32::from(q.scheme() != QScheme::Int8PerTensor),
    }
}

/// Whether sums of integers can be taken before the scales.
pub(crate) fn are_integers(
    (a, transpose_a): (QScheme, bool),
    (b, transpose_b): (QScheme, bool),
) -> bool {
    use QScheme::{Int8PerTensor, Int8PerToken, Int8WeightOnly};
    let rows = !transpose_a && matches!(a, Int8PerToken | Int8PerTensor);
    let columns = match b {
        Int8PerTensor => true,
        Int8PerToken => transpose_b,
        Int8WeightOnly => !transpose_b,
        _ => false,
    };
    rows && columns
}

impl CudaDevice {
    /// The factors of a product, converted or dequantized where no route takes them as they are.
    pub(crate) fn factors<'a>(
        &self,
        lane: &Arc<Lane>,
        p: &GemmParams<'a>,
        shape: &GemmShape,
    ) -> Result<Factors<'a>> {
        match (&p.a, &p.b) {
            (Operand::Plain(a), Operand::Plain(b)) if a.dtype() == b.dtype() => {
                let a = Matrix::of(&a.retain(), p.transpose_a);
                let b = Matrix::of(&b.retain(), p.transpose_b);
                Ok(Factors::Float(a, b, None))
            }
            (Operand::Quantized(a), Operand::Quantized(b))
                if are_integers((a.scheme(), p.transpose_a), (b.scheme(), p.transpose_b)) =>
            {
                Ok(Factors::Int8(*a, *b))
            }
            (Operand::Quantized(x), Operand::Quantized(w))
                if [x.scheme(), w.scheme()] == [QScheme::Fp8PerTensor; 2]
                    && self.capability >= (8, 9) =>
            {
                let [a, b] = self.bytes(lane, (x, w), p, shape)?;
                let scales = [self.one_scale(lane, x)?, self.one_scale(lane, w)?];
                Ok(Factors::Float(a, b, Some(scales)))
            }
            _ => {
                let [a, b] = self.in_f32(lane, p)?;
                Ok(Factors::Float(a, b, None))
            }
        }
    }

    /// The one scale of a factor, at an address that the library takes.
    fn one_scale(&self, lane: &Arc<Lane>, q: &QView<'_>) -> Result<Matrix> {
        let scale = q.scales().retain();
        if scale.address().is_multiple_of(GRAIN as u64) {
            return Ok(Matrix::shaped(&scale, 1, 1));
        }
        let aligned = self.scratch(lane, DataType::F32, scale.shape().dims())?;
        self.copy_bytes(lane, &aligned, &scale)?;
        Ok(Matrix::shaped(&aligned, 1, 1))
    }

    /// Both factors in f32.
    pub(crate) fn in_f32(&self, lane: &Arc<Lane>, p: &GemmParams<'_>) -> Result<[Matrix; 2]> {
        let wide = |operand: &Operand<'_>, transposed| -> Result<Matrix> {
            let floats = self.floats(lane, operand)?;
            let wide = self.as_type(lane, &floats, DataType::F32)?;
            Ok(Matrix::of(&wide, transposed))
        };
        Ok([wide(&p.a, p.transpose_a)?, wide(&p.b, p.transpose_b)?])
    }

    /// The values of an operand as floats, where they lie if they are some already.
    pub(crate) fn floats(&self, lane: &Arc<Lane>, operand: &Operand<'_>) -> Result<Buffer> {
        match operand {
            Operand::Plain(v) => Ok(v.retain()),
            Operand::Quantized(q) => self.dequantize(lane, q),
        }
    }

    /// The same numbers in another type of floats.
    pub(crate) fn as_type(
        &self,
        lane: &Arc<Lane>,
        from: &Buffer,
        dtype: DataType,
    ) -> Result<Buffer> {
        if from.dtype() == dtype {
            return Ok(from.clone());
        }
        let to = self.scratch(lane, dtype, from.shape().dims())?;
        self.convert_numbers(lane, &to, from)?;
        Ok(to)
    }

    /// Sums of products of integers: the library's, or our own where they leave 32 bits.
    pub(crate) fn integer_sums(
        &self,
        lane: &Arc<Lane>,
        (x, w): (&QView<'_>, &QView<'_>),
        p: &GemmParams<'_>,
        shape: &GemmShape,
    ) -> Result<Sums> {
        if shape.k <= LONGEST {
            let [a, b] = self.bytes(lane, (x, w), p, shape)?;
            let stride = b.columns();
            let values = self.scratch(lane, DataType::I32, &[shape.m, stride])?;
            let d = Matrix::of(&values, false);
            let product = Product {
                sm_cap: p.sm_cap,
                ..Product::new(&a, &b, &d)
            };
            if self.opened.lt.run(lane, &product)? {
                return Ok(Sums::Integer {
                    values,
                    stride,
                    alpha: p.alpha,
                    rows: scales(x),
                    columns: scales(w),
                });
            }
        }
        self.long_sums(lane, (x, w), p, shape)
    }

    fn long_sums(
        &self,
        lane: &Arc<Lane>,
        (x, w): (&QView<'_>, &QView<'_>),
        p: &GemmParams<'_>,
        shape: &GemmShape,
    ) -> Result<Sums> {
        let (m, n, inner) = (shape.m, shape.n, shape.k as u64);
        let (rows, columns) = (scales(x), scales(w));
        let (a, b) = (x.kernel().retain(), w.kernel().retain());
        let values = self.scratch(lane, DataType::F32, &[m, n])?;
        let (w_inner_stride, w_column_stride) = if p.transpose_b {
            (1, inner)
        } else {
            (n as u64, 1)
        };
        let parameters = LongParams {
            out: values.address(),
            x: a.address(),
            w: b.address(),
            row_scales: rows.values.address(),
            column_scales: columns.values.address(),
            rows: m as u64,
            columns: n as u64,
            inner,
            x_stride: inner,
            w_inner_stride,
            w_column_stride,
            alpha: p.alpha,
            row_scale_stride: rows.stride,
            column_scale_stride: columns.stride,
            reserved: 0,
        };
        let buffers = [&values, &a, &b, &rows.values, &columns.values];
        // A warp for each element.
        let (k, blocks) = (&self.opened.kernels, blocks_for(m * n * 32));
        // SAFETY: the shapes were checked, and there is a scale for each row and column, or one.
        unsafe { k.launch(&k.long, lane, &buffers, blocks, parameters) }?;
        Ok(Sums::Float { values, stride: n })
    }

    /// Both factors as the library takes bytes: A by rows, B by columns, K and N filled up to the grain.
    fn bytes(
        &self,
        lane: &Arc<Lane>,
        (x, w): (&QView<'_>, &QView<'_>),
        p: &GemmParams<'_>,
        shape: &GemmShape,
    ) -> Result<[Matrix; 2]> {
        let (k, n) = (
            shape.k.next_multiple_of(GRAIN),
            shape.n.next_multiple_of(GRAIN),
        );
        let (x, w) = (x.kernel().retain(), w.kernel().retain());
        let a = self.packed(lane, &x, p.transpose_a, [shape.m, k])?;
        let b = self.packed(lane, &w, !p.transpose_b, [n, k])?;
        Ok([Matrix::of(&a, false), Matrix::of(&b, true)])
    }

    /// A matrix of bytes as `[rows, columns]`: where it lies if it is that already, else laid out anew (and transposed, if
    /// asked for), filled up with zeros.
    fn packed(
        &self,
        lane: &Arc<Lane>,
        from: &Buffer,
        transpose: bool,
        [rows, columns]: [usize; 2],
    ) -> Result<Buffer> {
        let (from_rows, from_columns) = (from.shape().rows(), from.shape().columns());
        let aligned = from.address().is_multiple_of(GRAIN as u64);
        if !transpose && (from_rows, from_columns) == (rows, columns) && aligned {
            return Ok(from.clone());
        }
        let out = self.scratch(lane, from.dtype(), &[rows, columns])?;
        let mut parameters = PackParams {
            out: out.address(),
            from: from.address(),
            rows: from_rows as u64,
            columns: from_columns as u64,
            out_rows: rows as u64,
            out_columns: columns as u64,
            row_stride: from_columns as u64,
            column_stride: 1,
        };
        if transpose {
            (parameters.rows, parameters.columns) = (parameters.columns, parameters.rows);
            (parameters.row_stride, parameters.column_stride) = (1, from_columns as u64);
        }
        let (k, blocks) = (&self.opened.kernels, blocks_for(rows * columns));
        // SAFETY: the input has this many rows and columns by these strides, the output is as large as said.
        unsafe { k.launch(&k.pack, lane, &[&out, from], blocks, parameters) }?;
        Ok(out)
    }
}
