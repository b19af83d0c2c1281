//! Sums over all ranks with what stands behind them in a transformer: a residual, and a norm.

use crate::{
    Parallel, Residual, ResidualNorm,
    residual_norm::{Inputs, Rows},
};
use brigade::{AllReduceNormParams, Normed, View, ViewMut};
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
        let rows = Rows::of(x.dims())?;
        self.normed(rows, residual, norm, |inputs, sum, normed| {
            self.sum_normed(rows.cut(lent.view())?, inputs, norm, (sum, normed))
        })
    }

    /// The same into tensors that are there, and have no memory of `others`.
    pub(crate) fn sum_norm_into(
        &self,
        x: &Tensor,
        residual: &Tensor,
        norm: &ResidualNorm,
        out: &Residual,
        others: &[&Tensor],
    ) -> Result<()> {
        let rows = Rows::of(x.dims())?;
        self.check_normed_into(rows, (residual, norm), out, others)?;
        let lent = self.lend(x)?;
        self.normed_into(rows, (residual, norm), out, |inputs, sum, normed| {
            self.sum_normed(rows.cut(lent.view())?, inputs, norm, (sum, normed))
        })
    }

    fn sum_normed(
        &self,
        from: View<'_>,
        inputs: Inputs<'_>,
        norm: &ResidualNorm,
        (sum, normed): (ViewMut<'_>, ViewMut<'_>),
    ) -> brigade::Result<()> {
        let params = AllReduceNormParams {
            from,
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
