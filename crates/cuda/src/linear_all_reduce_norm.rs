//! A linear and an all-reduce with a norm: of few rows the product sends its parts itself, as soon as it has them (`kernels/few_rows.cu`), and the
//! sum's kernel takes its place while the product ends (`kernels/all_reduce_norm.cu`). To peers that is one shot like any other.

use crate::{
    comm::CudaComm,
    core::Core,
    few_rows::FewRows,
    memory::Place,
    norm::{Arguments, Rows, Source},
};
use brigade_device::{
    AllReduceAlgorithm, Call, GemmShape, LinearAllReduceNorm, LoraLinearAllReduceNormParams, Plan,
    Result, Storage, Turn, fallback,
};
use brigade_kernels::FewRowsParams;
use brigade_sync::BUFFERS;

impl CudaComm {
    pub(crate) fn run_linear_all_reduce_norm(
        &self,
        turn: &mut Turn,
        p: LoraLinearAllReduceNormParams<'_>,
    ) -> Result<LinearAllReduceNorm> {
        let (shape, call) = p.check()?;
        match self.sent(turn, &p, &shape, &call)? {
            Some(plan) => Ok(LinearAllReduceNorm { plan, sent: true }),
            None => fallback::lora_linear_with_all_reduce_norm(self, turn, p),
        }
    }

    /// The call with a product that sends; none, and nothing is done, where it does not.
    fn sent(
        &self,
        turn: &Turn,
        p: &LoraLinearAllReduceNormParams<'_>,
        shape: &GemmShape,
        call: &Call,
    ) -> Result<Option<Plan>> {
        let (device, gemm) = (self.gpu(), &p.linear.gemm);
        let plan = self.core.plan(call)?;
        let &Plan::AllReduce {
            algorithm: AllReduceAlgorithm::OneShotPush,
            piece_elements,
            ..
        } = &plan
        else {
            return Ok(None);
        };
        if piece_elements < shape.m * shape.n {
            return Ok(None);
        }
        let Some([x, weight]) = device.few_factors(&p.linear, shape, p.residual.dtype())? else {
            return Ok(None);
        };
        // Rows of the group's memory end with the next call, which this is: a product of its own reads them first.
        for factor in [&x, &weight] {
            if let Place::Group(_) = Place::of(factor.buffer().storage())? {
                return Ok(None);
            }
        }
        let views = [p.residual, p.weight, p.sum.as_view()];
        let of = Arguments::of(&device.card, views, p.eps, &p.normed)?;
        let few = FewRows::plain([&x, &weight], gemm);
        let lane = device.lane(turn.stream())?;
        let Some((kernel, launch)) = device.few_rows_kernel(lane, &few, shape.n) else {
            return Ok(None);
        };
        if !self.core.takes_sent(&of, shape.m) {
            return Ok(None);
        }
        let parameters = sending(&self.core, few.parameters());
        let mut buffers = of.all();
        buffers.extend([x.buffer(), weight.buffer()]);
        self.core.exchange(turn.stream(), call, &buffers, |job| {
            // SAFETY: shapes, strides and reach were checked, and the call keeps the buffers until the work is done; what is sent goes to places of
            // the group's memory, of which there are enough.
            unsafe { kernel.launch(job.stream, launch, parameters) }?;
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

/// What a product is told so that it sends its result to all ranks, as their next use of a buffer.
fn sending(core: &Core, product: FewRowsParams) -> FewRowsParams {
    let layout = core.control.layout();
    FewRowsParams {
        base: core.memory.symmetric.base(),
        stride: core.memory.symmetric.stride() as u64,
        state: core.memory.state.address(),
        slots: (core.data_start() + layout.sums_start(0)) as u64,
        buffer_bytes: (layout.sums_start(1) - layout.sums_start(0)) as u64,
        buffers: BUFFERS as u32,
        rank: core.rank() as u32,
        size: core.size() as u32,
        ..product
    }
}
