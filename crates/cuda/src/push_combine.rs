//! A combine as one exchange that pushes (`kernels/push_combine.cuh`).

use crate::{
    combine::{Arguments, sum_code},
    inject::Asker,
    job::{Job, waiting},
    pushed::{one_of, pushing},
    routing::Placed,
    types,
};
use brigade_device::{Buffer, CombineSum, Error, Launch, ReduceOp, Result};
use brigade_kernels::{ALL_REDUCE_THREADS, PushCombineParams};
use brigade_plan::{
    records::{Returned, inverse},
    routes::Slots,
};
use brigade_sync::BUFFERS;

/// Most granules of rows that came, with room for what threads count beyond the last: they count in 32 bits.
const MOST_GRANULES: usize = 1 << 31;

/// Granules of own rows for a thread from which a combine of ranks' rows or sums is one of many, whose warps take pieces of a row, and granules of the largest piece.
const MANY_TURNS: usize = 2;
const PIECE: usize = 128;

impl Job<'_> {
    /// Enqueues the exchange, launched as the plan has it.
    pub(crate) fn push_combine(&mut self, launch: Launch, a: &Arguments) -> Result<()> {
        self.steps_now()?;
        let core = self.core;
        let (call, parts, size) = (&a.call, &a.parts, core.size());
        let kind = crate::all_reduce::Kind {
            op: ReduceOp::Sum,
            dtype: call.dtype,
            output: call.output,
        };
        let returned = Returned::new(call, size);
        let granules = (parts.sources.shape().rows()).saturating_mul(returned.row);
        if granules > MOST_GRANULES {
            let want = format!("at most {MOST_GRANULES} times 16 bytes where rows are pushed");
            return Err(Error::invalid("rows.shape", granules, want));
        }
        let placed = Placed::from(parts.call.placement);
        let slots = Slots::new(parts.call.placement, size);
        let tokens = parts.layout.slots.shape().rows();
        let mut parameters = PushCombineParams {
            desk: core.memory.desk(Asker::Messages),
            waits: self.waits,
            from: a.rows.address(),
            back: a.weights.as_ref().map_or(0, Buffer::address),
            received: parts.received.address(),
            sources: parts.sources.address(),
            offsets: parts.offsets.address(),
            received_ids: parts.ids.address(),
            held: parts.weights.as_ref().map_or(0, Buffer::address),
            rows_of: parts.rows_of.as_ref().map_or(0, Buffer::address),
            chosen: parts.layout.slots.address(),
            positions: parts.layout.positions.address(),
            own_weights: parts.own_weights.as_ref().map_or(0, Buffer::address),
            out: a.d.address(),
            out_bytes: a.d.bytes() as u64,
            poison: types::poison_pattern(call.output),
            weights_out: a.weights_back.as_ref().map_or(0, Buffer::address),
            granules: returned.row as u32,
            inverse_granules: inverse(returned.row),
            inverse_peers: inverse(size - 1),
            weight_granules: returned.weights as u32,
            tokens: tokens as u32,
            max_tokens: call.max_tokens as u32,
            k: call.k as u32,
            sum: sum_code(call.sum),
            bias_count: a.biases.len() as u32,
            placement: placed.code,
            experts: placed.experts,
            per_rank: placed.per_rank,
            own_slots: slots.of(core.rank()).len() as u32,
            signature: self.kind.signature,
            last: 1,
            ..pushing!(PushCombineParams, self)
        };
        for (to, bias) in parameters.biases.iter_mut().zip(&a.biases) {
            *to = bias.address();
        }
        let granules = tokens.saturating_mul(returned.row);
        let shape = self.rows_shape(launch, ALL_REDUCE_THREADS, granules);
        let kernels = &core.device.opened.kernels.pushes;
        let kernels = match (call.sum, is_of_many(&parameters, shape, granules)) {
            (CombineSum::Rank, true) => &kernels.combine_many,
            (CombineSum::Rank, false) => &kernels.combine,
            (CombineSum::ExpertByRank, true) => &kernels.combine_experts_many,
            (CombineSum::Expert | CombineSum::ExpertByRank, _) => &kernels.combine_experts,
        };
        let kernel = one_of(kernels, kind, size)
            .ok_or_else(|| Error::invalid("rows", format!("{kind:?}"), "a kernel for it"))?;
        // SAFETY: rows and the result lie in buffers of the call, the rest in the group's memory, which the core keeps.
        unsafe { kernel.launch(self.stream, shape, parameters) }.map_err(Into::into)
    }
}

/// Whether a combine of ranks' rows or sums, of so many granules of own rows, is one of many tokens as their kernel wants them (`kernels/push_combine_many.cu`).
fn is_of_many(p: &PushCombineParams, shape: crate::Launch, granules: usize) -> bool {
    let [first, second] = p.biases;
    let whole = (p.from | p.out | first | second).is_multiple_of(16);
    let alone = p.back == 0 && p.weights_out == 0 && p.desk == 0;
    let splits = p.size > 1 && shape.blocks > 1;
    let many = granules > MANY_TURNS * (shape.blocks * shape.threads) as usize;
    whole && alone && splits && many && p.granules as usize >= PIECE
}
