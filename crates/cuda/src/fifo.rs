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

/// Queues from one rank to another, the same on all ranks. All that may wait for them have places for as long as there is the communicator, and
/// keep those from others: so they are no more than this, or than as many as messages have. Where ranks share a GPU they are those of messages.
pub(crate) fn queues_each(size: usize, sharing: usize, sm_budget: Option<u16>) -> u32 {
    /// Of ends of queues of a rank.
    const MOST_BLOCKS: u32 = 48;
    let messages = messages::blocks_each(size, sharing);
    if sharing > 1 {
        return messages;
    }
    let of = |blocks: u32| blocks / ends(size, 1).max(1);
    // Some of a budget is for own rows.
    let budget = sm_budget.map_or(u32::MAX, |sms| of(u32::from(sms) * 3 / 4));
    let most = of(MOST_BLOCKS).max(messages).min(budget);
    [MOST_CHANNELS as u32, 8, 4, 2]
        .into_iter()
        .find(|&n| n <= most)
        .unwrap_or(1)
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
        let budget = self
            .core
            .config
            .sm_budget
            .map_or(MOST_OWN, |sms| u32::from(sms).saturating_sub(serving));
        let own = (own * threads as usize).div_ceil(MESSAGE_THREADS as usize);
        let own = (own as u32).min(budget).clamp(1, MOST_OWN);
        Launch::grid(serving + own, MESSAGE_THREADS)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ends_of_queues_keep_to_what_they_may_have() {
        let each =
            |sharing, budget| [2, 3, 4, 5, 8, 16].map(|size| queues_each(size, sharing, budget));
        assert_eq!(each(1, None), [16, 8, 8, 4, 4, 4]);
        assert_eq!(each(1, Some(24)), [8, 4, 2, 2, 1, 1]);
        assert_eq!(each(1, Some(1)), [1; 6]);
        assert!(each(2, None).into_iter().all(|n| n <= 4));
    }
}
