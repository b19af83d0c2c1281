//! What parameters are made of. Callers fill in one struct per operation, never a list of positional arguments; its
//! `check()` names the field that is wrong, what it was and what it should have been.

use crate::{Buffer, DataType, Error, MemoryType, Result, Shape, View, ViewMut};
use std::ops::Range;

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
        if let Self::Into(v) = self {
            v.check_writable()?;
        }
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

/// What [`Linear::bias_activation`](crate::Linear::bias_activation) takes: floats, and a bias of a row or of as many.
///
/// # Errors
/// [`Error::Invalid`] naming the field.
pub fn check_bias_activation(
    from: View<'_>,
    bias: Option<View<'_>>,
    output: &Output<'_>,
) -> Result<()> {
    float("from.dtype", from.dtype())?;
    let (shape, n) = (from.shape(), from.shape().columns());
    if let Some(c) = bias {
        float("bias.dtype", c.dtype())?;
        if c.shape().len() != n && c.shape().len() != shape.len() {
            let want = format!("{shape} or [{n}]");
            return Err(Error::invalid("bias.shape", c.shape(), want));
        }
    }
    output.check(shape.dims())
}

/// A type of elements, and no tag of a quantized pair.
pub(crate) fn plain(field: &'static str, dtype: DataType) -> Result<()> {
    if matches!(dtype, DataType::QI8 | DataType::QF8E4M3) {
        return Err(Error::invalid(field, dtype, "a type of elements"));
    }
    Ok(())
}

/// Checks that a part lies on the same side as `want`: in device memory, or in the host's.
pub(crate) fn resident(
    field: &'static str,
    memory: Option<MemoryType>,
    want: MemoryType,
) -> Result<()> {
    match memory {
        Some(m) if (m == MemoryType::Device) != (want == MemoryType::Device) => {
            Err(Error::invalid(
                field,
                format!("{m:?} memory"),
                format!("{want:?}, where the input lies"),
            ))
        }
        _ => Ok(()),
    }
}

/// Where what is counted is added up.
pub(crate) fn check_totals(totals: &ViewMut<'_>, counts: &Buffer) -> Result<()> {
    check_totals_of(totals, counts.shape(), counts.memory())
}

/// The same before there are counts.
pub(crate) fn check_totals_of(
    totals: &ViewMut<'_>,
    counts: Shape,
    beside: MemoryType,
) -> Result<()> {
    if totals.dtype() != DataType::I64 {
        let want = DataType::I64;
        return Err(Error::invalid("totals.dtype", totals.dtype(), want));
    }
    if totals.shape() != counts {
        return Err(Error::invalid("totals.shape", totals.shape(), counts));
    }
    totals.check_writable()?;
    let memory = totals.as_view().memory();
    resident("totals", Some(memory), beside)
}

/// Addresses of its bytes.
pub(crate) fn span(view: View<'_>) -> Range<u64> {
    view.address()..view.address() + view.bytes() as u64
}

/// Whether two have a byte in common.
pub(crate) fn meet(one: View<'_>, other: View<'_>) -> bool {
    let (a, b) = (span(one), span(other));
    a.start.max(b.start) < a.end.min(b.end)
}

/// Checks that a result has no byte in common with what is read.
pub(crate) fn apart(output: &ViewMut<'_>, input: View<'_>) -> Result<()> {
    if meet(output.as_view(), input) {
        let got = "bytes of an input";
        return Err(Error::invalid("output.memory", got, "bytes of its own"));
    }
    Ok(())
}
