//! The twin of gather-linear: parts of the product travel to their owners while the next part is multiplied, and every
//! owner adds what it got in rank order.

use crate::{
    comm::HostComm,
    device::Engine,
    element,
    gemm::Matrix,
    job::{Active, Job, Use},
    linear::{BoundLinear, OwnedLinear, finish},
    memory::{Staged, poison, writing},
    mover::{Ticket, both},
    operand::{Factor, OwnedOperand},
    queue::HostQueue,
};
use brigade_device::{
    Activation, Call, DataType, Error, LoraLinearReduceScatterParams, OverlapPlan, Plan, ReduceOp,
    Reduced, Result, Turn,
};
use brigade_sync::Area;
use std::ops::Range;

impl HostComm {
    pub(crate) fn run_linear_reduce_scatter(
        &self,
        turn: &Turn,
        p: LoraLinearReduceScatterParams<'_>,
        call: Call,
        plan: OverlapPlan,
    ) -> Result<Reduced> {
        let Call::LinearReduceScatter(linear_call) = &call else {
            return Err(Error::invalid(
                "call",
                call.operation(),
                "linear-reduce-scatter",
            ));
        };
        let linear = OwnedLinear::from_parts(
            p.weight,
            p.transpose_weight,
            None,
            Activation::None,
            p.runs,
            p.batch_invariant,
        )?;
        let x = OwnedOperand::new(&p.x)?;
        let bias = p.bias.map(|c| c.retain());
        let own = linear_call.rows[self.core.control.group().rank];
        let (d, new) = self.device.place(p.output, &[own, linear_call.n])?;
        let (core, engine, activation) =
            (self.core.clone(), self.device.engine.clone(), p.activation);
        let (out, steps) = (d.clone(), plan.clone());
        HostQueue::of(turn.stream())?.run(move || {
            core.collective(&call, |active| {
                let mut inputs = linear.buffers();
                let bias_at = inputs.len();
                inputs.extend(&bias);
                let x_at = inputs.len();
                inputs.extend(x.buffers());
                writing(&out, &inputs, |bytes, inputs| {
                    let scratch = &engine.scratch;
                    let x = x.bind(&mut inputs[x_at..].iter().copied(), false, scratch)?;
                    let linear = linear.bind(&inputs[..bias_at], x.is_integer_rows(), scratch)?;
                    let n = linear.n();
                    let bias = bias.as_ref().map(|c| {
                        let rows = c.shape().len().checked_div(n).unwrap_or(0);
                        Matrix::new(c.dtype(), inputs[bias_at], [rows, n], false, scratch)
                    });
                    let bias = bias.transpose()?;
                    let product = Product {
                        plan: &steps,
                        engine: &engine,
                        x,
                        linear: &linear,
                        bias,
                        activation,
                        dtype: out.dtype(),
                    };
                    product
                        .run(active, bytes)
                        .inspect_err(|_| poison(out.dtype(), bytes))
                })
            })
        })?;
        Ok(Reduced {
            d: new.then_some(d),
            plan: Plan::LinearReduceScatter(plan),
            sent: false,
        })
    }
}

/// The product of one call.
struct Product<'a> {
    plan: &'a OverlapPlan,
    engine: &'a Engine,
    x: Factor<'a>,
    linear: &'a BoundLinear<'a>,
    bias: Option<Matrix<'a>>,
    activation: Activation,
    /// Of the parts, and of the result.
    dtype: DataType,
}

impl Product<'_> {
    fn row_bytes(&self) -> usize {
        self.linear.n() * self.dtype.bytes()
    }

    /// Where `source`'s part of rows `rows` of a chunk lies in its owner's half.
    fn slot(&self, source: usize, chunk: &Range<usize>, rows: &Range<usize>) -> Range<usize> {
        let first = source * chunk.len();
        (first + rows.start) * self.row_bytes()..(first + rows.end) * self.row_bytes()
    }

    fn run(&self, active: &mut Active<'_>, out: &mut [u8]) -> Result<()> {
        let of = active.begin(Area::ReduceScatter)?;
        let mut moving = Vec::new();
        let multiplied = (0..self.plan.pieces()).try_for_each(|p| {
            self.plan.order.iter().try_for_each(|&c| {
                moving.extend(self.multiply(&active.job, of, usize::from(c), p)?);
                Ok(())
            })
        });
        let summed = multiplied.and_then(|()| self.sum(&active.job, of, out));
        // All of them, also after a fault: nothing may still be on its way when the next generation begins.
        moving.into_iter().map(Ticket::wait).fold(summed, both)?;
        active.end(of);
        Ok(())
    }

    /// Multiplies a piece of a chunk, and sends it to its owner.
    fn multiply(&self, job: &Job, of: Use, c: usize, p: usize) -> Result<Option<Ticket>> {
        let chunk = self.plan.chunk(c);
        let piece = brigade_plan::rows::piece(chunk.len(), self.plan.pieces(), p);
        let slot = self.slot(job.rank(), &chunk, &piece);
        let rows = chunk.start + piece.start..chunk.start + piece.end;
        let multiply = |out: &mut [u8]| {
            let _span = tracing::info_span!(
                target: "brigade::compute", "multiply", chunk = c, piece = p, rows = rows.len()
            )
            .entered();
            let x = self.x.slice(rows.start, rows.len());
            self.linear
                .multiply(&self.engine.workers, &x, rows.clone(), self.dtype, out)
        };
        if c == job.rank() {
            // SAFETY: own slot of own half, which only this rank fills and reads.
            multiply(unsafe { job.bytes_mut(c, of, slot) })?;
            return Ok(None);
        }
        let mut part = job.core.staging.take(slot.len())?;
        multiply(part.as_mut())?;
        let owner = c;
        Ok(Some(job.hand_over(move |job| {
            let _span =
                tracing::info_span!(target: "brigade::comm", "send part", to = owner, piece = p)
                    .entered();
            send_part(job, of, owner, slot, p, part);
            Ok(())
        })))
    }

    /// Adds the parts of own rows in rank order, and finishes them.
    fn sum(&self, job: &Job, of: Use, out: &mut [u8]) -> Result<()> {
        for source in job.peers() {
            for p in 0..self.plan.pieces() {
                job.await_filled(of, source, p, source)?;
            }
        }
        let _span = tracing::info_span!(target: "brigade::compute", "sum").entered();
        let own = self.plan.chunk(job.rank());
        let parts: Vec<&[u8]> = (0..job.size())
            .map(|source| {
                let slot = self.slot(source, &own, &(0..own.len()));
                // SAFETY: announced by its source for this use, which this rank has not ended; or its own.
                unsafe { job.bytes(job.rank(), of, slot) }
            })
            .collect();
        let n = self.linear.n();
        let mut sum = self.engine.scratch.take(own.len() * n)?;
        let bytes = bytemuck::cast_slice_mut(&mut sum);
        element::reduce(ReduceOp::Sum, self.dtype, &parts, DataType::F32, bytes);
        finish(self.bias.as_ref(), 1.0, self.activation, own, n, &mut sum);
        element::store(self.dtype, &sum, out);
        Ok(())
    }
}

fn send_part(job: &Job, of: Use, owner: usize, slot: Range<usize>, piece: usize, part: Staged) {
    let bytes: &[u8] = part.as_ref();
    // SAFETY: this rank's slot at the owner, who gave its credit before the use began; announced below.
    unsafe { job.bytes_mut(owner, of, slot) }.copy_from_slice(bytes);
    job.count_moved(bytes.len());
    job.say_filled(owner, of, job.rank(), piece);
    job.core.staging.put(part);
}
