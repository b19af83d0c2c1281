//! A linear and an all-reduce: of few rows the product may [send](crate::sent) its parts itself (`kernels/all_reduce.cu`).

use crate::{
    comm::{CudaComm, given},
    memory::{check_reach, overlap},
};
use brigade_device::{Call, LoraLinearAllReduceParams, ReduceOp, Reduced, Result, Turn};
use brigade_plan::pushed::GRANULE_BYTES;

impl CudaComm {
    /// The call with a product that sends, whose result goes to the caller's memory or to new one; none, and nothing is done, where it does not.
    pub(crate) fn sent_to_a_sum(
        &self,
        turn: &Turn,
        p: &LoraLinearAllReduceParams<'_>,
    ) -> Result<Option<Reduced>> {
        let shape = p.linear.check()?;
        p.output.check(shape.d.dims())?;
        let (on, dtype) = (turn.stream(), p.output.dtype());
        let elements = shape.m * shape.n;
        let call = Call::AllReduce {
            elements,
            dtype,
            output: dtype,
            op: ReduceOp::Sum,
            choice: p.choice,
        };
        // What cannot be planned so may be another call, of sums in f32.
        let Ok(plan) = self.core.plan(&call) else {
            return Ok(None);
        };
        let Some(sender) = self.sender(on, &p.linear, (&shape, dtype), &plan)? else {
            return Ok(None);
        };
        let Some(launch) = self.core.sent_shape(&plan, elements, dtype) else {
            return Ok(None);
        };
        let device = self.gpu();
        let given = given(&p.output);
        if let Some(d) = &given {
            check_reach(&device.card, "output.memory", d)?;
            // Some of the sums are written while products of others are made.
            let apart = sender.buffers().iter().all(|factor| !overlap(factor, d));
            if !apart || !d.address().is_multiple_of(GRANULE_BYTES as u64) {
                return Ok(None);
            }
        }
        let new = given.is_none();
        let d = match given {
            Some(d) => d,
            None => device.scratch(device.lane(on)?, dtype, shape.d.dims())?,
        };
        let mut buffers = vec![&d];
        buffers.extend(sender.buffers());
        self.core.exchange(on, &call, &buffers, |job| {
            sender.enqueue(job)?;
            job.sum_sent(launch, elements, &d)
        })?;
        Ok(Some(Reduced {
            d: new.then_some(d),
            plan,
            sent: true,
        }))
    }
}
