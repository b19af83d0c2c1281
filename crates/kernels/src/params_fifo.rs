//! Of kernels that send rows through queues.

use super::{Field, Layout, Parameters, Zero};

parameters! {
    /// Rows of a dispatch to and from all ranks through queues, by a block for each end of each.
    DispatchFifoParams of "brigade_dispatch_fifo" in "dispatch_fifo" {
        ..group,
        /// Device address of what waits for each rank are added to, or 0.
        waits: u64,
        /// Byte of a rank's memory where the queues begin.
        queues: u64,
        /// Bytes of those from each rank.
        queue_bytes: u64,
        /// Bytes of an entry.
        entry_bytes: u64,
        /// Where each section of an entry begins.
        section: [u64; 9],
        /// Bytes of a row in each section.
        row_bytes: [u64; 9],
        /// Device address of what goes into each section of own rows: nothing for tokens.
        from: [u64; 9],
        /// Device address of the part of rank 0, where rows go that have come.
        parts: u64,
        /// From one part to the next.
        parts_stride: u64,
        /// Where each section of such a part begins.
        came: [u64; 9],
        /// Device address of the tokens that go to each rank.
        sent: u64,
        /// Device address of where those of each rank begin.
        sent_offsets: u64,
        /// Most tokens of any rank.
        max_tokens: u32,
        /// Experts of a token.
        k: u32,
        /// Sections.
        sections: u32,
        /// 0 even, 1 a map, 2 ids are ranks.
        placement: u32,
        /// How many experts there are.
        experts: u32,
        /// Slots of a rank, if there is a map.
        per_rank: u32,
        /// Threads for each row.
        row_threads: u32,
        /// Queues from one rank to another.
        channels: u32,
        /// Entries of a queue.
        depth: u32,
        /// Most rows in an entry.
        entry_rows: u32,
        /// Word where the counts of the queues begin.
        queue_words: u32,
        /// The counter of what was put for rank 0 in the first channel.
        queue_counters: u32,
        ..call,
        /// Whether all ranks make this call.
        collective: u32,
        /// Zero.
        reserved: u32,
    }

    /// Rows of a combine through queues: which go back to each rank, and then to and from all, by a block for each end of each.
    CombineFifoParams of "brigade_combine_fifo" in "combine_fifo" {
        ..group,
        /// Device address of what waits for each rank are added to, or 0.
        waits: u64,
        /// Byte of a rank's memory where the queues begin.
        queues: u64,
        /// Bytes of those from each rank.
        queue_bytes: u64,
        /// Bytes of an entry.
        entry_bytes: u64,
        /// Where each section of an entry begins: rows, weights, and which of the rows from there each is.
        section: [u64; 3],
        /// Device address of the rows.
        from: u64,
        /// Device address of what goes back with them, or 0.
        back: u64,
        /// Device address of where each row is from.
        sources: u64,
        /// Device address of the weights that rows came with.
        held: u64,
        /// Device address of the row of every expert of every token that came.
        rows_of: u64,
        /// Device address of how many rows go back to each rank, and which.
        list: u64,
        /// Device address of where the tokens begin that went to each rank.
        sent_offsets: u64,
        /// Device address of the part of rank 0, where rows go that have come back.
        parts: u64,
        /// From one part to the next.
        parts_stride: u64,
        /// Where rows begin in such a part.
        came_rows: u64,
        /// Where weights begin in such a part.
        came_weights: u64,
        /// Rows that there is room for.
        capacity: u32,
        /// Elements in a row.
        hidden: u32,
        /// Their type.
        from_type: u32,
        /// 0 by rank, 1 by expert, 2 by expert and then by rank.
        sum: u32,
        /// Most tokens of any rank.
        max_tokens: u32,
        /// Experts of a token.
        k: u32,
        /// Most rows that go from one rank to another.
        max_rows: u32,
        /// Threads for each row.
        row_threads: u32,
        /// Queues from one rank to another.
        channels: u32,
        /// Entries of a queue.
        depth: u32,
        /// Most rows in an entry.
        entry_rows: u32,
        /// Word where the counts of the queues begin.
        queue_words: u32,
        /// The counter of what was put for rank 0 in the first channel.
        queue_counters: u32,
        ..call,
        /// Whether all ranks make this call.
        collective: u32,
    }
}
