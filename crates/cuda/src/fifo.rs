//! Queues between ranks: what kernels are told whose blocks serve them. Those blocks take the places of blocks that carry messages,
//! of which there are as many and as large ones.

use crate::{Kernel, KernelSet, Launch, Missing, job::Job, messages};
use brigade_kernels::{CombineFifoParams, FIFO_CHANNELS, FIFO_LINE_WORDS, MESSAGE_THREADS};
use brigade_plan::fifo::{MOST_CHANNELS, Queues};
use brigade_sync::Fifo;
use std::sync::Arc;

const _: () = assert!(
    MOST_CHANNELS == FIFO_CHANNELS
        && Fifo::CHANNELS == FIFO_CHANNELS
        && Fifo::LINE_WORDS == FIFO_LINE_WORDS
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

/// Blocks of a multiprocessor.
const BLOCKS: u32 = 2;

/// Queues from one rank to another, so that all that may wait for them find places: where ranks share a GPU, those of messages.
pub(crate) fn queues_each(size: usize, sharing: usize, sm_budget: Option<u16>) -> u32 {
    /// Of ends of queues of a rank.
    const MOST_BLOCKS: u32 = 128;
    if sharing > 1 {
        return messages::blocks_each(size, sharing);
    }
    // Some of a budget is for own rows.
    let budget = sm_budget.map_or(MOST_BLOCKS, |sms| u32::from(sms) * BLOCKS * 3 / 4);
    let each = budget.min(MOST_BLOCKS) / ends(size, 1).max(1);
    each.clamp(1, MOST_CHANNELS as u32)
}

/// Blocks that serve so many queues from one rank to another: one at each end.
pub(crate) fn ends(size: usize, queues: u32) -> u32 {
    2 * size.saturating_sub(1) as u32 * queues
}

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
    /// A launch whose first blocks serve queues, and may wait; the others take so many own rows to where they go.
    pub(crate) fn queue_blocks(&self, queues: &Queues, (own, threads): (usize, u32)) -> Launch {
        /// Most blocks for own rows.
        const MOST_OWN: u32 = 64;
        let serving = ends(self.core.size(), queues.channels as u32);
        let budget = self.core.config.sm_budget.map_or(MOST_OWN, |sms| {
            (u32::from(sms) * BLOCKS).saturating_sub(serving)
        });
        let own = (own * threads as usize).div_ceil(MESSAGE_THREADS as usize);
        let own = (own as u32).min(budget).clamp(1, MOST_OWN);
        Launch::grid(serving + own, MESSAGE_THREADS)
    }
}
