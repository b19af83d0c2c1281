//! Quantized tensors: a kernel of small integers or fp8, and the scales that give it its size back.

use crate::{Buffer, DataType, Error, Reason, Result, Shape, View};
use std::ops::Range;

/// How a tensor was quantized. `scale` multiplies the stored value.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum QScheme {
    /// Not quantized.
    #[default]
    None,
    /// int8 weights with a scale per output channel; activations stay in floating point.
    Int8WeightOnly,
    /// int8, a scale per row (token).
    Int8PerToken,
    /// int8, one scale.
    Int8PerTensor,
    /// fp8 e4m3, one scale.
    Fp8PerTensor,
    /// fp8 e4m3, a scale per row and block of 128 columns.
    Fp8PerTokenBlock,
}

impl QScheme {
    /// Element type of the kernel; `None` for [`QScheme::None`].
    pub const fn kernel_type(self) -> Option<DataType> {
        match self {
            Self::None => None,
            Self::Int8WeightOnly | Self::Int8PerToken | Self::Int8PerTensor => Some(DataType::I8),
            Self::Fp8PerTensor | Self::Fp8PerTokenBlock => Some(DataType::F8E4M3),
        }
    }

    /// Columns of a row that share a scale where it has one for each block.
    pub const BLOCK: usize = 128;

    /// What quantizing `[rows, columns]` of floats gives: the kernel's element type, and the shape of its f32 scales.
    ///
    /// # Errors
    /// [`Error::Invalid`] for `a.shape`, `a.dtype` or `scheme`.
    pub fn quantized(self, a: View<'_>) -> Result<(DataType, Shape)> {
        let &[rows, columns] = a.shape().dims() else {
            return Err(Error::invalid("a.shape", a.shape(), "2 dimensions"));
        };
        if !matches!(a.dtype(), DataType::F32 | DataType::F16 | DataType::BF16) {
            return Err(Error::invalid("a.dtype", a.dtype(), "f32, f16 or bf16"));
        }
        let Some(kernel_type) = self.kernel_type() else {
            return Err(Error::invalid("scheme", "None", "a quantization scheme"));
        };
        let scales: &[usize] = match self {
            Self::Int8PerToken => &[rows, 1],
            Self::Fp8PerTokenBlock => &[rows, columns.div_ceil(Self::BLOCK)],
            Self::Int8WeightOnly => &[columns],
            Self::Int8PerTensor | Self::Fp8PerTensor | Self::None => &[1],
        };
        Ok((kernel_type, Shape::new(scales)?))
    }

    /// Whether scales go with rows, so that a slice of rows takes a slice of scales.
    pub const fn per_row(self) -> bool {
        matches!(self, Self::Int8PerToken | Self::Fp8PerTokenBlock)
    }
}

/// A quantized tensor that owns its parts, all in one memory.
#[derive(Clone, Debug)]
pub struct QBuffer {
    kernel: Buffer,
    scales: Buffer,
    zeros: Option<Buffer>,
    scheme: QScheme,
}

/// A borrowed look at a [`QBuffer`].
#[derive(Clone, Copy, Debug)]
pub struct QView<'a> {
    kernel: View<'a>,
    scales: View<'a>,
    zeros: Option<View<'a>>,
    scheme: QScheme,
}

impl QBuffer {
    /// # Errors
    /// As [`QView::new`].
    pub fn new(
        kernel: Buffer,
        scales: Buffer,
        zeros: Option<Buffer>,
        scheme: QScheme,
    ) -> Result<Self> {
        QView::new(
            kernel.view(),
            scales.view(),
            zeros.as_ref().map(Buffer::view),
            scheme,
        )?;
        Ok(Self {
            kernel,
            scales,
            zeros,
            scheme,
        })
    }

    /// Borrow for reading.
    pub fn view(&self) -> QView<'_> {
        QView {
            kernel: self.kernel.view(),
            scales: self.scales.view(),
            zeros: self.zeros.as_ref().map(Buffer::view),
            scheme: self.scheme,
        }
    }

    /// The quantized values.
    pub fn kernel(&self) -> &Buffer {
        &self.kernel
    }

    /// The scales, f32.
    pub fn scales(&self) -> &Buffer {
        &self.scales
    }

    /// The zero points, if the scheme has any.
    pub fn zeros(&self) -> Option<&Buffer> {
        self.zeros.as_ref()
    }

    /// How it was quantized.
    pub fn scheme(&self) -> QScheme {
        self.scheme
    }

    /// The tag of the pair: [`DataType::QI8`] or [`DataType::QF8E4M3`].
    pub fn dtype(&self) -> DataType {
        match self.kernel.dtype() {
            DataType::I8 => DataType::QI8,
            _ => DataType::QF8E4M3,
        }
    }

    /// Rows of kernel, scales and zeros together: for schemes whose scales go with rows.
    ///
    /// # Errors
    /// [`Error::Invalid`] if the rows do not lie inside; [`Error::Unsupported`] if the scheme has one scale for
    /// all rows (see [`slice_per_tensor`](Self::slice_per_tensor)).
    pub fn slice(&self, offset: usize, rows: usize) -> Result<Self> {
        if !self.scheme.per_row() {
            return Err(Reason::new(
                "scales-not-per-row",
                format!("{:?} keeps scales that rows do not cut", self.scheme),
                "use slice_per_tensor",
            )
            .into());
        }
        Ok(self
            .view()
            .rows(offset..offset.saturating_add(rows))?
            .retain())
    }

    /// Rows of the kernel, with the scales and zeros as they are: for schemes with one scale for all rows.
    ///
    /// # Errors
    /// [`Error::Invalid`] if the rows do not lie inside; [`Error::Unsupported`] if the scheme has scales per row.
    pub fn slice_per_tensor(&self, offset: usize, rows: usize) -> Result<Self> {
        if self.scheme.per_row() {
            return Err(Reason::new(
                "scales-per-row",
                format!("{:?} has scales that rows must cut", self.scheme),
                "use slice",
            )
            .into());
        }
        Ok(self
            .view()
            .rows(offset..offset.saturating_add(rows))?
            .retain())
    }
}

impl<'a> QView<'a> {
    /// Kernel, scales (f32, 1 to 3 dimensions) and zeros that belong together.
    ///
    /// # Errors
    /// [`Error::Invalid`] naming the part whose dtype, memory or shape does not fit the scheme.
    pub fn new(
        kernel: View<'a>,
        scales: View<'a>,
        zeros: Option<View<'a>>,
        scheme: QScheme,
    ) -> Result<Self> {
        let Some(kernel_type) = scheme.kernel_type() else {
            return Err(Error::invalid("scheme", "None", "a quantization scheme"));
        };
        if kernel.dtype() != kernel_type {
            return Err(Error::invalid("kernel.dtype", kernel.dtype(), kernel_type));
        }
        scales.expect_type::<f32>("scales.dtype")?;
        for (field, part) in [("scales", Some(scales)), ("zeros", zeros)] {
            let Some(part) = part else { continue };
            if part.memory() != kernel.memory() {
                return Err(Error::invalid(
                    field,
                    format!("{:?} memory", part.memory()),
                    format!("{:?}, where the kernel lies", kernel.memory()),
                ));
            }
            if !(1..=3).contains(&part.shape().dims().len()) {
                return Err(Error::invalid(field, part.shape(), "1 to 3 dimensions"));
            }
        }
        let (rows, columns) = (kernel.shape().rows(), kernel.shape().columns());
        let blocks = columns.div_ceil(128);
        let want = match scheme {
            QScheme::Int8PerToken => rows,
            QScheme::Int8WeightOnly => columns,
            QScheme::Fp8PerTokenBlock => rows * blocks,
            _ => 1,
        };
        if scales.shape().len() != want || scheme.per_row() && scales.shape().rows() != rows {
            return Err(Error::invalid(
                "scales",
                scales.shape(),
                format!("{want} scales for a kernel of {}", kernel.shape()),
            ));
        }
        if let Some(z) = zeros
            && z.shape() != scales.shape()
        {
            return Err(Error::invalid(
                "zeros",
                z.shape(),
                format!("the scales' shape {}", scales.shape()),
            ));
        }
        Ok(Self {
            kernel,
            scales,
            zeros,
            scheme,
        })
    }

    /// The quantized values.
    pub fn kernel(&self) -> View<'a> {
        self.kernel
    }

    /// The scales, f32.
    pub fn scales(&self) -> View<'a> {
        self.scales
    }

    /// The zero points, if any.
    pub fn zeros(&self) -> Option<View<'a>> {
        self.zeros
    }

    /// How it was quantized.
    pub fn scheme(&self) -> QScheme {
        self.scheme
    }

    /// Rows `r`. Scales and zeros per row go with their rows; others stay.
    ///
    /// # Errors
    /// [`Error::Invalid`] if the rows do not lie inside.
    pub fn rows(&self, r: Range<usize>) -> Result<QView<'a>> {
        let part = |v: View<'a>| {
            if self.scheme.per_row() {
                v.rows(r.clone())
            } else {
                Ok(v)
            }
        };
        Ok(QView {
            kernel: self.kernel.rows(r.clone())?,
            scales: part(self.scales)?,
            zeros: self.zeros.map(part).transpose()?,
            scheme: self.scheme,
        })
    }

    /// For backends: an owner of the same parts.
    pub fn retain(&self) -> QBuffer {
        QBuffer {
            kernel: self.kernel.retain(),
            scales: self.scales.retain(),
            zeros: self.zeros.map(|z| z.retain()),
            scheme: self.scheme,
        }
    }
}

/// A factor of a product: plain or quantized.
#[derive(Clone, Copy, Debug)]
pub enum Operand<'a> {
    /// Floating-point values.
    Plain(View<'a>),
    /// Quantized values with their scales.
    Quantized(QView<'a>),
}

impl<'a> Operand<'a> {
    /// Rows `r` of dimension 0.
    ///
    /// # Errors
    /// [`Error::Invalid`] if the rows do not lie inside.
    pub fn rows(&self, r: Range<usize>) -> Result<Operand<'a>> {
        Ok(match self {
            Self::Plain(v) => Self::Plain(v.rows(r)?),
            Self::Quantized(q) => Self::Quantized(q.rows(r)?),
        })
    }

    /// The values without their scales.
    pub fn kernel(&self) -> View<'a> {
        match self {
            Self::Plain(v) => *v,
            Self::Quantized(q) => q.kernel,
        }
    }

    /// Shape of the values.
    pub fn shape(&self) -> Shape {
        self.kernel().shape()
    }

    /// Element type of the values.
    pub fn dtype(&self) -> DataType {
        self.kernel().dtype()
    }

    /// How it was quantized ([`QScheme::None`] for plain values).
    pub fn scheme(&self) -> QScheme {
        match self {
            Self::Plain(_) => QScheme::None,
            Self::Quantized(q) => q.scheme,
        }
    }

    /// The plain view.
    ///
    /// # Errors
    /// [`Error::Unsupported`] for a quantized operand.
    pub fn plain(&self, field: &'static str) -> Result<View<'a>> {
        match self {
            Self::Plain(v) => Ok(*v),
            Self::Quantized(q) => Err(Reason::new(
                "quantized-operand",
                format!("{field} is quantized ({:?})", q.scheme),
                "pass floating-point values here",
            )
            .into()),
        }
    }
}

impl<'a> From<View<'a>> for Operand<'a> {
    fn from(v: View<'a>) -> Self {
        Self::Plain(v)
    }
}

impl<'a> From<&'a Buffer> for Operand<'a> {
    fn from(b: &'a Buffer) -> Self {
        Self::Plain(b.view())
    }
}
