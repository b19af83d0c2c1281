//! Dispatch through queues: one launch, whose blocks send, receive, and take own rows to where all lie that have come.

use super::Arguments;
use crate::{
    fifo::{queued, row_threads},
    job::Job,
    routing::Placed,
};
use brigade_device::{Buffer, Result};
use brigade_kernels::DispatchFifoParams;
use brigade_plan::{
    dispatch::{Section, Sections},
    fifo::Queues,
};

impl Job<'_> {
    /// Sends own rows, and puts all that comes where it is staged.
    pub(super) fn queue_rows(
        &mut self,
        a: &Arguments,
        queues: &Queues,
        staged: &Buffer,
    ) -> Result<()> {
        self.steps_now()?;
        let placed = Placed::from(a.call.placement);
        let layout = a.ways.layout();
        let row_bytes = queues.sections.row_bytes(Section::Row);
        let threads = row_threads(queues, row_bytes);
        let mut parameters = DispatchFifoParams {
            parts: staged.address(),
            parts_stride: staged.shape().columns() as u64,
            sent: layout.sent.address(),
            sent_offsets: layout.sent_offsets.address(),
            max_tokens: a.call.max_tokens as u32,
            k: a.call.k as u32,
            sections: queues.sections.count() as u32,
            placement: placed.code,
            experts: placed.experts,
            per_rank: placed.per_rank,
            row_threads: threads,
            waits: self.waits,
            ..queued!(DispatchFifoParams, self, queues)
        };
        let all = Sections::dispatch(&a.call, a.call.max_tokens);
        for i in 0..queues.sections.count() {
            parameters.section[i] = queues.sections.at(i, 0).start as u64;
            parameters.row_bytes[i] = queues.sections.at(i, 1).len() as u64;
            parameters.came[i] = all.at(i, 0).start as u64;
        }
        parameters.from = a.from();
        let rows = a.rows.shape().rows();
        let shape = self.queue_blocks(queues, (rows, threads));
        let kernel = &self.core.device.opened.kernels.dispatch_fifo;
        // SAFETY: rows lie in buffers of the call, and go into the group's memory, which the core keeps; what comes goes into a buffer of
        // the call.
        unsafe { kernel.launch(self.stream, shape, parameters) }.map_err(Into::into)
    }
}
