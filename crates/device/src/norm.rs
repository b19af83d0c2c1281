//! A residual and a norm by the root mean square: alone, or as what an all-reduce goes on to.

use crate::{
    AllReduceAlgorithm, Call, DataType, Error, MemoryType, QScheme, Result, Shape, View, ViewMut,
    params::{float, meet, resident},
};

/// Every rank gets the sum of all parts, adds its residual, and normalizes every row by its root mean square (Zhang and
/// Sennrich: Root Mean Square Layer Normalization, 2019):
/// `sum = all_reduce(from) + residual`, `normed = sum / sqrt(mean(sum^2) + eps) * weight`.
///
/// The rows of `sum` and `normed` are what `residual` and input of a transformer's next block are.
#[derive(Debug)]
pub struct AllReduceNormParams<'a> {
    /// This rank's part, `[rows, hidden]`: f32, f16 or bf16. Same shape and type on every rank.
    pub from: View<'a>,
    /// What is added to the sum of all parts, of the same shape and type. A rank adds its own.
    pub residual: View<'a>,
    /// What normalized columns are multiplied by, `[hidden]` of the same type.
    pub weight: View<'a>,
    /// Added to the mean square; finite, not negative, and the same on every rank.
    pub eps: f32,
    /// The new residual, of the same shape and type: may be exactly the bytes of `residual`.
    pub sum: ViewMut<'a>,
    /// The normalized rows, which overlap nothing else.
    pub normed: Normed<'a>,
    /// Forced algorithm.
    pub choice: Option<AllReduceAlgorithm>,
}

/// Where normalized rows go, and as what.
#[derive(Debug)]
pub enum Normed<'a> {
    /// As they are: `[rows, hidden]` of the input's type.
    Plain(ViewMut<'a>),
    /// What [`QScheme::Int8PerToken`] makes of the plain rows.
    Int8PerToken {
        /// i8, `[rows, hidden]`.
        values: ViewMut<'a>,
        /// f32, `[rows]`.
        scales: ViewMut<'a>,
    },
    /// The plain rows by a scale that is known before, as [`QScheme::Fp8PerTensor`] does with its own.
    Fp8PerTensor {
        /// f8e4m3, `[rows, hidden]`.
        values: ViewMut<'a>,
        /// Multiplies the stored values: finite, positive, and the same on every rank.
        scale: f32,
    },
}

impl Normed<'_> {
    /// How rows are quantized.
    pub const fn scheme(&self) -> QScheme {
        match self {
            Self::Plain(_) => QScheme::None,
            Self::Int8PerToken { .. } => QScheme::Int8PerToken,
            Self::Fp8PerTensor { .. } => QScheme::Fp8PerTensor,
        }
    }

    /// The rows, of whatever type.
    pub fn values(&self) -> View<'_> {
        match self {
            Self::Plain(values)
            | Self::Int8PerToken { values, .. }
            | Self::Fp8PerTensor { values, .. } => values.as_view(),
        }
    }

    fn check_writable(&self) -> Result<()> {
        match self {
            Self::Plain(values) | Self::Fp8PerTensor { values, .. } => values.check_writable(),
            Self::Int8PerToken { values, scales } => {
                values.check_writable()?;
                scales.check_writable()
            }
        }
    }

    /// A scale for each row, if rows have any.
    pub fn scales(&self) -> Option<View<'_>> {
        match self {
            Self::Int8PerToken { scales, .. } => Some(scales.as_view()),
            _ => None,
        }
    }

    /// The scale of all values, if it was given.
    pub const fn scale(&self) -> Option<f32> {
        match self {
            Self::Fp8PerTensor { scale, .. } => Some(*scale),
            _ => None,
        }
    }
}

impl AllReduceNormParams<'_> {
    /// Checks shapes, types and places, and gives the signed call.
    ///
    /// # Errors
    /// [`Error::Invalid`] naming the field, what it was and what it should have been.
    pub fn check(&self) -> Result<Call> {
        self.sum.check_writable()?;
        let views = [self.residual, self.weight, self.sum.as_view()];
        let [rows, hidden] = check(Some(self.from), views, self.eps, &self.normed)?;
        Ok(Call::AllReduceNorm {
            rows,
            hidden,
            dtype: self.from.dtype(),
            scheme: self.normed.scheme(),
            eps_bits: self.eps.to_bits(),
            scale_bits: self.normed.scale().map(f32::to_bits),
            choice: self.choice,
        })
    }
}

/// What [`AllReduceNormParams`] have behind their sum, alone: `sum = from + residual`,
/// `normed = sum / sqrt(mean(sum^2) + eps) * weight`. The bits are those of an all-reduce with a norm of one rank; so an all-reduce
/// and this behind it give those of the fused call. Rows may have any length.
#[derive(Debug)]
pub struct ResidualNormParams<'a> {
    /// `[rows, hidden]`: f32, f16 or bf16. What an all-reduce or a linear gave.
    pub from: View<'a>,
    /// What is added, of the same shape and type.
    pub residual: View<'a>,
    /// What normalized columns are multiplied by, `[hidden]` of the same type.
    pub weight: View<'a>,
    /// Added to the mean square; finite and not negative.
    pub eps: f32,
    /// The new residual, of the same shape and type: may be exactly the bytes of `residual`.
    pub sum: ViewMut<'a>,
    /// The normalized rows, which overlap nothing else.
    pub normed: Normed<'a>,
}

impl ResidualNormParams<'_> {
    /// Checks shapes, types and places, and gives rows and columns.
    ///
    /// # Errors
    /// [`Error::Invalid`] naming the field, what it was and what it should have been.
    pub fn check(&self) -> Result<[usize; 2]> {
        self.sum.check_writable()?;
        let views = [self.residual, self.weight, self.sum.as_view()];
        check(Some(self.from), views, self.eps, &self.normed)
    }
}

/// Checks the rows, where they are there, the residual, the weight and the new residual, and gives rows and columns.
pub(crate) fn check(
    from: Option<View<'_>>,
    [residual, weight, sum]: [View<'_>; 3],
    eps: f32,
    normed: &Normed<'_>,
) -> Result<[usize; 2]> {
    normed.check_writable()?;
    let (first, dtype_field, shape_field) = match from {
        Some(from) => (from, "from.dtype", "from.shape"),
        None => (residual, "residual.dtype", "residual.shape"),
    };
    let dtype = first.dtype();
    float(dtype_field, dtype)?;
    let &[rows, hidden] = first.shape().dims() else {
        let want = "2 dimensions, [rows, hidden]";
        return Err(Error::invalid(shape_field, first.shape(), want));
    };
    if hidden == 0 {
        let want = "rows of at least 1 element";
        return Err(Error::invalid(shape_field, first.shape(), want));
    }
    if !(eps.is_finite() && eps >= 0.0) {
        return Err(Error::invalid("eps", eps, "finite and not negative"));
    }
    if let Some(scale) = normed.scale().filter(|s| !(s.is_finite() && *s > 0.0)) {
        return Err(Error::invalid("normed.scale", scale, "finite and positive"));
    }
    let part = |name, view, dtype, shape| Part::new(name, view, dtype, shape, first.memory());
    let matrix = first.shape();
    let residual = part("residual", residual, dtype, matrix)?;
    let weight = part("weight", weight, dtype, Shape::new(&[hidden])?)?;
    let sum = part("sum", sum, dtype, matrix)?;
    let values_type = normed.scheme().kernel_type().unwrap_or(dtype);
    let values = part("normed", normed.values(), values_type, matrix)?;
    let scales = match normed.scales() {
        Some(s) => Some(part(
            "normed.scales",
            s,
            DataType::F32,
            Shape::new(&[rows])?,
        )?),
        None => None,
    };
    let mut beside = vec![weight];
    beside.extend(from.map(|view| Part {
        field: "from",
        view,
    }));
    if residual.view.address() != sum.view.address() {
        sum.apart(&[residual], "bytes of its own, or exactly the residual's")?;
    }
    sum.apart(&beside, "bytes of its own, or exactly the residual's")?;
    for written in [Some(values), scales].into_iter().flatten() {
        written.apart(&beside, "bytes of its own")?;
        written.apart(&[residual, sum], "bytes of its own")?;
    }
    if let Some(scales) = scales {
        scales.apart(&[values], "bytes of its own")?;
    }
    Ok([rows, hidden])
}

/// An argument by its name.
#[derive(Clone, Copy)]
struct Part<'a> {
    field: &'static str,
    view: View<'a>,
}

impl<'a> Part<'a> {
    /// One of this type and shape, on the same side as the input.
    fn new(
        field: &'static str,
        view: View<'a>,
        dtype: DataType,
        shape: Shape,
        beside: MemoryType,
    ) -> Result<Self> {
        if view.dtype() != dtype {
            return Err(Error::invalid(field, view.dtype(), dtype));
        }
        if view.shape() != shape {
            return Err(Error::invalid(field, view.shape(), shape));
        }
        resident(field, Some(view.memory()), beside)?;
        Ok(Self { field, view })
    }

    /// Checks that it has no byte in common with any of the others.
    fn apart(&self, others: &[Part<'_>], want: &str) -> Result<()> {
        let meets = |other: &&Part<'_>| meet(self.view, other.view);
        others.iter().find(meets).map_or(Ok(()), |other| {
            let got = format!("bytes of {}", other.field);
            Err(Error::invalid(self.field, got, want))
        })
    }
}
