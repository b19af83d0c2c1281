//! What stands between the halves of a transformer's blocks: a residual, and a norm.

use crate::{
    Parallel,
    error::{OrCandle, invalid},
};
use brigade::{Normed, ResidualNormParams, View, ViewMut};
use candle_core::{Result, Tensor};

/// The norm behind a residual: `sum / sqrt(mean(sum^2) + eps) * weight` over the last dimension (Zhang and Sennrich: Root Mean Square Layer
/// Normalization, 2019), in f32 and rounded once.
#[derive(Clone, Debug)]
pub struct ResidualNorm {
    weight: Tensor,
    pub(crate) eps: f32,
}

impl ResidualNorm {
    /// With a weight of `[hidden]`, of the type of the activations, and the same epsilon on every rank.
    ///
    /// # Errors
    /// [`brigade::Error::Invalid`] for a weight that is no vector.
    pub fn new(weight: &Tensor, eps: f32) -> Result<Self> {
        match weight.dims() {
            [_] => Ok(Self {
                weight: weight.contiguous()?,
                eps,
            }),
            other => Err(invalid("weight.shape", format!("{other:?}"), "[hidden]")),
        }
    }
}

/// What comes out.
#[derive(Clone, Debug)]
pub struct Residual {
    /// What came in and the residual, added up: the residual of what comes next.
    pub sum: Tensor,
    /// The same, normalized: the input of what comes next.
    pub normed: Tensor,
}

/// What an operation reads: rows, the residual and the weight of the norm.
pub(crate) struct Inputs<'a> {
    pub(crate) from: View<'a>,
    pub(crate) residual: View<'a>,
    pub(crate) weight: View<'a>,
}

impl Parallel {
    /// `sum = x + residual`, and its norm, in one operation of this rank's alone: for rows that are spread over ranks, behind
    /// [`LinearReduceScatter`](crate::LinearReduceScatter). `x` and `residual` are `[.., hidden]`, of one type.
    ///
    /// # Errors
    /// [`brigade::Error::Invalid`] naming what does not fit.
    pub fn residual_norm(
        &self,
        x: &Tensor,
        residual: &Tensor,
        norm: &ResidualNorm,
    ) -> Result<Residual> {
        self.normed(x, residual, norm, |inputs, sum, normed| {
            let params = ResidualNormParams {
                from: inputs.from,
                residual: inputs.residual,
                weight: inputs.weight,
                eps: norm.eps,
                sum,
                normed: Normed::Plain(normed),
            };
            self.device().residual_norm(self.stream(), &params)
        })
    }

    /// New tensors for a residual and its norm, which `call` writes as rows.
    pub(crate) fn normed(
        &self,
        x: &Tensor,
        residual: &Tensor,
        norm: &ResidualNorm,
        call: impl FnOnce(Inputs<'_>, ViewMut<'_>, ViewMut<'_>) -> brigade::Result<()>,
    ) -> Result<Residual> {
        for tensor in [residual, &norm.weight] {
            self.check_place(tensor)?;
        }
        let dims = x.dims();
        let Some((&hidden, outer)) = dims.split_last() else {
            return Err(invalid("x.shape", "a scalar", "[.., hidden]"));
        };
        if residual.dims() != dims {
            let want = format!("{dims:?}, as what is added to it");
            return Err(invalid(
                "residual.shape",
                format!("{:?}", residual.dims()),
                want,
            ));
        }
        let rows = [outer.iter().product(), hidden];
        let dtype = residual.dtype();
        let (x, residual) = (x.contiguous()?, residual.contiguous()?);
        let (x, old, weight) = (
            self.lend(&x)?,
            self.lend(&residual)?,
            self.lend(&norm.weight)?,
        );
        let inputs = Inputs {
            from: x.view().reshape(&rows).or_candle()?,
            residual: old.view().reshape(&rows).or_candle()?,
            weight: weight.view(),
        };
        let mut sum = None;
        let normed = self.make(dtype, rows.as_slice(), |normed| {
            let made = self.make(dtype, rows.as_slice(), |sum| call(inputs, sum, normed));
            sum = Some(made);
            Ok(())
        })?;
        match sum {
            Some(sum) => Ok(Residual {
                sum: sum?.reshape(dims)?,
                normed: normed.reshape(dims)?,
            }),
            None => Err(crate::to_candle(brigade::Error::Closed)),
        }
    }
}
