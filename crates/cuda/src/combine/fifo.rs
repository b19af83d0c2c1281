//! Combine through queues: a launch that says which rows go back to whom, and one whose blocks send them, receive, and take own rows
//! to where all lie that have come back.

use super::{Arguments, sum_code};
use crate::{
    Launch,
    fifo::{queued, row_threads},
    job::Job,
    types,
};
use brigade_device::{Buffer, Result};
use brigade_kernels::CombineFifoParams;
use brigade_plan::{combine::Returning, fifo::Queues};

/// Threads of a block that goes through all rows.
const LIST_THREADS: u32 = 1024;

impl Job<'_> {
    /// Sends rows back, and puts all that comes back where it is staged. `list` has room for all rows to every rank, and their number.
    pub(super) fn queue_back(
        &mut self,
        a: &Arguments,
        queues: &Queues,
        (staged, list): (&Buffer, &Buffer),
    ) -> Result<()> {
        self.steps_now()?;
        let all = Returning::new(&a.call, a.call.max_rows());
        // Those of whole warps, which add rows up.
        let threads = row_threads(queues, Self::row_bytes(a)).max(32);
        let capacity = a.parts.sources.shape().rows();
        let parameters = CombineFifoParams {
            section: [0, 1, 2].map(|i| queues.sections.at(i, 0).start as u64),
            from: a.rows.address(),
            // A rank to which no row came has none to read here, but takes those of its own tokens: so this is not 0.
            back: a.weights.as_ref().map_or(0, |w| w.address().max(1)),
            sources: a.parts.sources.address(),
            held: a.parts.weights.as_ref().map_or(0, Buffer::address),
            rows_of: a.parts.rows_of.as_ref().map_or(0, Buffer::address),
            list: list.address(),
            sent_offsets: a.parts.layout.sent_offsets.address(),
            parts: staged.address(),
            parts_stride: staged.shape().columns() as u64,
            came_rows: all.rows(0).start as u64,
            came_weights: all.weights(0).start as u64,
            capacity: capacity as u32,
            hidden: a.call.hidden as u32,
            from_type: types::float_code(a.call.dtype),
            sum: sum_code(a.call.sum),
            max_tokens: a.call.max_tokens as u32,
            k: a.call.k as u32,
            max_rows: a.call.max_rows() as u32,
            row_threads: threads,
            waits: self.waits,
            ..queued!(CombineFifoParams, self, queues)
        };
        let kernels = &self.core.device.opened.kernels.combine_fifo;
        let lists = Launch::grid(self.core.size() as u32, LIST_THREADS);
        // SAFETY: the list lies in a buffer of the call, as what it is made from.
        unsafe { kernels.list.launch(self.stream, lists, parameters) }?;
        let shape = self.queue_blocks(queues, (capacity, threads));
        // SAFETY: rows lie in a buffer of the call, and go into the group's memory, which the core keeps; what comes goes into a buffer of
        // the call.
        unsafe { kernels.exchange.launch(self.stream, shape, parameters) }.map_err(Into::into)
    }
}
