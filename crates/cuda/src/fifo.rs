//! Queues between ranks: what kernels are told whose blocks serve them. Those blocks take the places of blocks that carry messages,
//! of which there are as many and as large ones.

use crate::{Kernel, KernelSet, Missing, job::Job, messages::BLOCKS_EACH};
use brigade_kernels::{CombineFifoParams, FIFO_CHANNELS, FIFO_LINE_WORDS, MESSAGE_THREADS};
use brigade_plan::fifo::{MOST_CHANNELS, Queues};
use brigade_sync::Fifo;
use std::sync::Arc;

const _: () = assert!(
    MOST_CHANNELS == FIFO_CHANNELS
        && Fifo::CHANNELS == FIFO_CHANNELS
        && Fifo::LINE_WORDS == FIFO_LINE_WORDS
        && FIFO_CHANNELS == BLOCKS_EACH as usize
);

/// What kernels whose blocks serve queues are told; the rest of their parameters is the default.
macro_rules! queued {
    ($parameters:ident, $job:expr, $queues:expr) => {{
        let (core, queues) = ($job.core, $queues);
        let layout = core.control.layout();
        $parameters {
            desk: core.memory.desk($crate::inject::Asker::Messages),
            queues: (core.data_start() + layout.fifo_start()) as u64,
            queue_bytes: ::brigade_plan::dispatch::part_bytes(layout.fifo_bytes(), core.size())
                as u64,
            entry_bytes: queues.entry_bytes as u64,
            channels: queues.channels as u32,
            depth: queues.depth,
            entry_rows: queues.entry_rows as u32,
            queue_words: layout.fifo(0, 0, 0, 1).base as u32,
            queue_counters: $crate::steps::Counters::new(core.size()).queues() as u32,
            signature: $job.kind.signature,
            ..$crate::job::waiting!($parameters, $job)
        }
    }};
}
pub(crate) use queued;

/// Most blocks that take own rows to where they go.
pub(crate) const OWN_BLOCKS: usize = 64;

/// Kernels by which rows go back through queues.
#[derive(Debug)]
pub(crate) struct BackKernels {
    pub(crate) list: Kernel<CombineFifoParams>,
    pub(crate) exchange: Kernel<CombineFifoParams>,
}

impl BackKernels {
    pub(crate) fn load(set: &Arc<KernelSet>) -> Result<Self, Missing> {
        Ok(Self {
            list: set.variant("_list")?,
            exchange: set.variant("_exchange")?,
        })
    }
}

/// Threads for each row of so many bytes at most: few enough that each has several accesses in flight, and all threads of a block for
/// what an entry holds.
pub(crate) fn row_threads(queues: &Queues, row_bytes: usize) -> u32 {
    let by_bytes = row_bytes.div_ceil(64).next_power_of_two() as u32;
    let by_rows = MESSAGE_THREADS / (queues.entry_rows as u32).clamp(1, MESSAGE_THREADS);
    by_bytes.max(1 << by_rows.ilog2()).min(MESSAGE_THREADS)
}

impl Job<'_> {
    /// Blocks of a launch that serve queues, and may wait.
    pub(crate) fn queue_blocks(&self, queues: &Queues) -> u32 {
        2 * (self.core.size() as u32 - 1) * queues.channels as u32
    }
}
