//! A linear and an all-reduce with a norm: of few rows the product may [send](crate::sent) its parts itself, to clusters (`kernels/all_reduce_norm.cu`).

use crate::{
    comm::CudaComm,
    norm::{Arguments, Rows, Source},
};
use brigade_device::{
    Call, GemmShape, LinearAllReduceNorm, LoraLinearAllReduceNormParams, Plan, Result, Turn,
    fallback,
};

impl CudaComm {
    pub(crate) fn run_linear_all_reduce_norm(
        &self,
        turn: &mut Turn,
        p: LoraLinearAllReduceNormParams<'_>,
    ) -> Result<LinearAllReduceNorm> {
        let (shape, call) = p.check()?;
        match self.sent_to_a_norm(turn, &p, &shape, &call)? {
            Some(plan) => Ok(LinearAllReduceNorm { plan, sent: true }),
            None => fallback::lora_linear_with_all_reduce_norm(self, turn, p),
        }
    }

    /// The call with a product that sends; none, and nothing is done, where it does not.
    fn sent_to_a_norm(
        &self,
        turn: &Turn,
        p: &LoraLinearAllReduceNormParams<'_>,
        shape: &GemmShape,
        call: &Call,
    ) -> Result<Option<Plan>> {
        let (on, plan) = (turn.stream(), self.core.plan(call)?);
        let of = (shape, p.residual.dtype());
        let Some(sender) = self.sender(on, &p.linear, of, &plan)? else {
            return Ok(None);
        };
        let views = [p.residual, p.weight, p.sum.as_view()];
        let of = Arguments::of(&self.gpu().card, views, p.eps, &p.normed)?;
        if !self.core.norms_in_clusters(&of, shape.m) {
            return Ok(None);
        }
        let mut buffers = of.all();
        buffers.extend(sender.buffers());
        self.core.exchange(on, call, &buffers, |job| {
            sender.enqueue(job)?;
            let rows = Rows {
                first: 0,
                count: shape.m,
                last: true,
            };
            job.norm(Source::Sent, &of, rows)
        })?;
        Ok(Some(plan))
    }
}
