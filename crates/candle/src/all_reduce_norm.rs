//! Sums over all ranks with what stands behind them in a transformer: a residual, and a norm.

use crate::{Parallel, error::invalid};
use brigade::{AllReduceNormParams, Normed, ViewMut};
use candle_core::{Result, Tensor};

/// The norm behind a sum: `sum / sqrt(mean(sum^2) + eps) * weight` over the last dimension (Zhang and Sennrich: Root Mean Square Layer
/// Normalization, 2019), in f32 and rounded once.
#[derive(Clone, Debug)]
pub struct ResidualNorm {
    weight: Tensor,
    eps: f32,
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
    /// The sum of all ranks' parts and the residual: the residual of what comes next.
    pub sum: Tensor,
    /// The same, normalized: the input of what comes next.
    pub normed: Tensor,
}

impl Parallel {
    /// `sum = all_reduce(x) + residual`, and its norm, in one operation. `x` and `residual` are `[.., hidden]`, of one type, and every
    /// rank has the same residual.
    ///
    /// # Errors
    /// [`brigade::Error::Invalid`] naming what does not fit; [`brigade::Error::Fault`] if a rank does not come, or calls something
    /// else.
    pub fn all_reduce_norm(
        &self,
        x: &Tensor,
        residual: &Tensor,
        norm: &ResidualNorm,
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
        let call = |sum: ViewMut<'_>, normed: ViewMut<'_>| {
            let params = AllReduceNormParams {
                from: x.view().reshape(&rows)?,
                residual: old.view().reshape(&rows)?,
                weight: weight.view(),
                eps: norm.eps,
                sum,
                normed: Normed::Plain(normed),
                choice: None,
            };
            self.call(|lease| lease.all_reduce_norm(params))
        };
        let mut sum = None;
        let normed = self.make(dtype, rows.as_slice(), |normed| {
            sum = Some(self.make(dtype, rows.as_slice(), |sum| call(sum, normed)));
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
