//! All-to-all of rows that lists name: one launch, with a block for each end of each queue.

use crate::{
    comm::CudaComm,
    fifo::{queued, row_threads},
    job::Job,
    memory::check_reach,
};
use brigade_device::{AllToAllRowsCall, AllToAllRowsParams, Buffer, Call, Plan, Result, Turn};
use brigade_kernels::AllToAllRowsParams as Parameters;
use brigade_plan::fifo::Queues;

/// The arguments.
struct Arguments {
    call: AllToAllRowsCall,
    queues: Queues,
    from: Vec<Buffer>,
    to: Vec<Buffer>,
    /// Offsets and rows of what is sent, and of what is received.
    lists: [Buffer; 4],
}

impl CudaComm {
    pub(crate) fn run_all_to_all_rows(
        &self,
        turn: &Turn,
        p: AllToAllRowsParams<'_>,
    ) -> Result<Plan> {
        let size = self.core.size();
        let call = p.check(size)?;
        let signed = Call::AllToAllRows(call.clone());
        let plan = self.core.plan(&signed)?;
        let card = &self.gpu().card;
        let to: Vec<_> = p.payloads.iter().map(|p| p.to.as_view().retain()).collect();
        let lists = [p.send_offsets, p.send_rows, p.recv_offsets, p.recv_rows];
        let lists = lists.map(|list| list.retain());
        for buffer in &to {
            check_reach(card, "payloads.to.memory", buffer)?;
        }
        for buffer in &lists {
            check_reach(card, "lists.memory", buffer)?;
        }
        let mut from = Vec::with_capacity(to.len());
        for payload in p.payloads {
            let mut buffer = payload.from.retain();
            check_reach(card, "payloads.from.memory", &buffer)?;
            // What is written is not read.
            for to in &to {
                buffer = self.apart(turn.stream(), buffer, to)?;
            }
            from.push(buffer);
        }
        let each: Vec<usize> = call.row_bytes().collect();
        let a = Arguments {
            queues: Queues::of(&self.core.topology, &each)?,
            call,
            from,
            to,
            lists,
        };
        let kept: Vec<_> = a.from.iter().chain(&a.to).chain(&a.lists).collect();
        self.core
            .collective(turn.stream(), &signed, &kept, None, |job| {
                for to in &a.to {
                    job.poisons(to.address(), to.bytes(), to.dtype());
                }
                job.rows_of_lists(&a)
            })?;
        Ok(plan)
    }
}

impl Job<'_> {
    fn rows_of_lists(&mut self, a: &Arguments) -> Result<()> {
        self.steps_now()?;
        let widest = a.call.row_bytes().max().unwrap_or(0);
        let [send_offsets, send_rows, recv_offsets, recv_rows] = &a.lists;
        let rows = |list: &[Buffer]| list.first().map_or(0, |b| b.shape().rows() as u32);
        let length = |list: &Buffer| list.shape().len() as u32;
        let threads = row_threads(&a.queues, widest);
        let mut parameters = Parameters {
            send_offsets: send_offsets.address(),
            send_rows: send_rows.address(),
            recv_offsets: recv_offsets.address(),
            recv_rows: recv_rows.address(),
            send_length: length(send_rows),
            recv_length: length(recv_rows),
            from_rows: rows(&a.from),
            to_rows: rows(&a.to),
            payloads: a.from.len() as u32,
            row_threads: threads,
            ..queued!(Parameters, self, &a.queues)
        };
        for (i, bytes) in a.call.row_bytes().enumerate() {
            parameters.row_bytes[i] = bytes as u64;
            parameters.section[i] = a.queues.sections.at(i, 0).start as u64;
            parameters.from[i] = a.from[i].address();
            parameters.to[i] = a.to[i].address();
        }
        let shape = self.queue_blocks(&a.queues, (send_rows.shape().len(), threads));
        let kernel = &self.core.device.opened.kernels.rows;
        // SAFETY: rows and lists lie in buffers of the call, the rest in the group's memory, which the core keeps.
        unsafe { kernel.launch(self.stream, shape, parameters) }.map_err(Into::into)
    }
}
