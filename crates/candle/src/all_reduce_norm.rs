//! Sums over all ranks with what stands behind them in a transformer: a residual, and a norm.

use crate::{
    Parallel, Residual, ResidualNorm,
    residual_norm::{Inputs, Rows},
};
use brigade::{AllReduceNormParams, Normed, ViewMut};
use candle_core::{Result, Tensor};

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
        let x = x.contiguous()?;
        let lent = self.lend(&x)?;
        let from = Rows::of(&x, lent.view())?;
        self.normed(&from, residual, norm, |inputs, sum, normed| {
            self.sum_normed(inputs, norm, sum, normed)
        })
    }

    /// The same into tensors that are there, and have no memory of `others`.
    pub(crate) fn sum_norm_into(
        &self,
        from: &Rows<'_>,
        residual: &Tensor,
        norm: &ResidualNorm,
        out: &Residual,
        others: &[&Tensor],
    ) -> Result<()> {
        self.normed_into(
            from,
            (residual, norm),
            (out, others),
            |inputs, sum, normed| self.sum_normed(inputs, norm, sum, normed),
        )
    }

    fn sum_normed(
        &self,
        inputs: Inputs<'_>,
        norm: &ResidualNorm,
        sum: ViewMut<'_>,
        normed: ViewMut<'_>,
    ) -> brigade::Result<()> {
        let params = AllReduceNormParams {
            from: inputs.from,
            residual: inputs.residual,
            weight: inputs.weight,
            eps: norm.eps,
            sum,
            normed: Normed::Plain(normed),
            choice: None,
        };
        self.call(|lease| lease.all_reduce_norm(params))
    }
}
