//! Sums over all ranks with what stands behind them in a transformer: a residual, and a norm.

use crate::{Parallel, Residual, ResidualNorm};
use brigade::{AllReduceNormParams, Normed};
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
        self.normed(x, residual, norm, |inputs, sum, normed| {
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
        })
    }
}
