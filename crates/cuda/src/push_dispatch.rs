//! A dispatch as one exchange that pushes (`kernels/push_dispatch.cuh`): the ways of rows are found, and rows pushed, taken and put where they
//! belong, in one kernel.

use crate::{
    dispatch::{Arguments, codes, to},
    inject::Asker,
    job::{Job, Poisoned, waiting},
    pushed::pushing,
    routing::Placed,
    steps::{Counters, Use},
    types,
};
use brigade_device::{Arrangement, Buffer, DispatchCall, DispatchOutputs, Launch, Result};
use brigade_kernels::{
    ALL_REDUCE_THREADS, PUSH_CLERKS, PUSH_MANY_TOKENS, PUSH_PLACES, PUSH_SLOTS, PUSH_TOKENS,
    PushDispatchParams,
};
use brigade_plan::{
    dispatch::{Section, Sections},
    pushed::GRANULE_BYTES,
    records::{CLERKS, MANY_TOKENS, PLACES, Record, SLOTS, TOKENS, inverse},
    routes::Slots,
};
use brigade_sync::{BUFFERS, Flag};

/// The plan knows what the kernel is for.
const _: () = assert!(TOKENS == PUSH_TOKENS as usize && SLOTS == PUSH_SLOTS as usize);
const _: () = assert!(MANY_TOKENS == PUSH_MANY_TOKENS as usize);
const _: () = assert!(PLACES == PUSH_PLACES as usize);
const _: () = assert!(CLERKS == PUSH_CLERKS as usize);

impl Job<'_> {
    /// Enqueues the exchange, launched as the plan has it. Rows in place stay in a half whose use has begun.
    pub(crate) fn push_dispatch(
        &mut self,
        launch: Launch,
        a: &Arguments,
        outputs: &DispatchOutputs,
        stay: Option<Use>,
    ) -> Result<()> {
        self.steps_now()?;
        let core = self.core;
        let (call, layout, parts) = (&a.call, a.ways.layout(), &outputs.parts);
        let record = Record::new(call, a.group.size);
        let sections = Sections::dispatch(call, 1);
        let row_bytes = sections.row_bytes(Section::Row);
        let placed = Placed::from(call.placement);
        let slots = Slots::new(call.placement, a.group.size);
        let (arrangement, alignment) = codes(call.arrangement);
        let (first_id, no_id) = a.called();
        let tokens = layout.slots.shape().rows();
        let mut parameters = PushDispatchParams {
            desk: core.memory.desk(Asker::Messages),
            chosen: layout.slots.address(),
            positions: layout.positions.address(),
            sent: layout.sent.address(),
            sent_offsets: layout.sent_offsets.address(),
            rows_per_slot: layout.rows_per_slot.address(),
            received: parts.received.address(),
            sources: parts.sources.address(),
            offsets: parts.offsets.address(),
            received_ids: parts.ids.address(),
            counts: parts.counts.address(),
            waits: self.waits,
            totals: a.totals.as_ref().map_or(0, Buffer::address),
            rows_of: parts.rows_of.as_ref().map_or(0, Buffer::address),
            from: a.from(),
            to: to(outputs),
            all_bytes: sections.all_bytes() as u32,
            tokens: tokens as u32,
            max_tokens: call.max_tokens as u32,
            k: call.k as u32,
            placement: placed.code,
            experts: placed.experts,
            copies: placed.copies,
            per_rank: placed.per_rank,
            own_slots: slots.of(a.group.rank).len() as u32,
            first_id,
            no_id,
            all_slots: slots.total() as u32,
            room: layout.sent.shape().len() as u32,
            arrangement,
            alignment,
            again: u32::from(call.again),
            sections: sections.count() as u32,
            scale_words: a.scale_words(),
            capacity: u32::try_from(outputs.capacity()).unwrap_or(u32::MAX),
            count_granules: record.counts as u32,
            first_count: Record::ways(call.max_tokens, a.group.size) as u32,
            header: record.header as u32,
            body: record.body() as u32,
            words: record.words() as u32,
            granules: record.granules() as u32,
            packets: record.packets() as u32,
            row_runs: record.runs as u32,
            inverse_row_runs: inverse(record.runs),
            record: record.all() as u32,
            first_record: record.told(call.max_tokens, a.group.size) as u32,
            inverse_k: inverse(call.k),
            inverse_packets: inverse(record.packets()),
            inverse_size: inverse(a.group.size),
            inverse_peers: inverse(a.group.size - 1),
            signature: self.kind.signature,
            last: 1,
            ..pushing!(PushDispatchParams, self)
        };
        if let (Some(layout), Some(of)) = (&a.in_place, stay) {
            let ring = core.control.layout().ring(of.area);
            let none = Flag::from_bits(0);
            parameters.places = (core.data_offset(of) + a.group.rank * layout.source_bytes) as u64;
            parameters.half_counter = Counters::uses(of) as u32;
            parameters.half_credit = ring.credit(of.half, 0, none).word.index as u32;
            parameters.half_filled = ring.arrival(of.half, 0, 0, 0, none).word.index as u32;
            parameters.half_pieces = ring.pieces as u32;
        }
        if let Some(router) = &a.router {
            parameters.ids = router.ids.address();
            parameters.id_bytes = router.ids.dtype().bytes() as u32;
            parameters.map = router.map.as_ref().map_or(0, Buffer::address);
        }
        for (i, first) in parameters.first_granule.iter_mut().enumerate() {
            *first = record.first.get(i).copied().unwrap_or(record.granules()) as u32;
        }
        for i in 0..sections.count() {
            parameters.row_bytes[i] = sections.at(i, 1).len() as u64;
        }
        let mut poisoned = Poisoned::default();
        for out in outputs.poisoned() {
            poisoned.add((out.address(), out.bytes(), out.dtype()));
        }
        for (i, (address, bytes, dtype)) in poisoned.0.into_iter().enumerate() {
            // Steps behind the exchange poison what its kernel has no place for.
            if i >= parameters.poisoned.len() {
                self.poisons(address, bytes, dtype);
                continue;
            }
            parameters.poisoned[i] = address;
            parameters.poisoned_bytes[i] = bytes as u64;
            parameters.poisons[i] = types::poison_pattern(dtype);
        }
        let kernels = &core.device.opened.kernels.pushes;
        let [few, many, by_expert, in_place] = &kernels.dispatch;
        let kernel = match call.arrangement {
            _ if stay.is_some() => in_place,
            Arrangement::ByExpert { .. } => by_expert,
            Arrangement::Dense | Arrangement::BySource if record.shared > 0 => many,
            Arrangement::Dense | Arrangement::BySource => few,
        };
        let together = kernels.dispatch_together;
        let granules = record.granules().max(row_bytes.div_ceil(GRANULE_BYTES));
        let shape = self.rows_shape(launch, together, tokens.saturating_mul(granules));
        (parameters.pushing, parameters.clerks) =
            (pushing_of_ten(call, shape, a.group.size), clerks(shape));
        // SAFETY: rows and all that is found lie in buffers of the call, the rest in the group's memory, which the core keeps.
        unsafe { kernel.launch(self.stream, shape, parameters) }.map_err(Into::into)
    }
}

/// Of ten blocks that push rows or take them, how many push: half of them. Where a row has few peers to go to and lies there for many experts, it is taking that
/// takes longest; and between two ranks, as many rows are own ones, which the largest blocks would wait behind.
fn pushing_of_ten(call: &DispatchCall, shape: crate::Launch, size: usize) -> u32 {
    match call.arrangement {
        Arrangement::ByExpert { .. } if call.k > 4 * (size - 1) => 2,
        Arrangement::Dense | Arrangement::BySource
            if size == 2 && shape.threads > ALL_REDUCE_THREADS =>
        {
            4
        }
        _ => 5,
    }
}

/// Blocks that write down what the caller is told: one for each thing of few rows, else two, where there are some to spare.
fn clerks(shape: crate::Launch) -> u32 {
    match shape.blocks {
        blocks @ 0..=2 => blocks.saturating_sub(1),
        blocks if blocks > 2 * PUSH_CLERKS && shape.threads < ALL_REDUCE_THREADS => PUSH_CLERKS,
        _ => 2,
    }
}
