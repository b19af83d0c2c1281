//! Of kernels of the low-latency exchange.

use super::{Field, Layout, Parameters, Zero};

parameters! {
    /// Half of an exchange: rows are sent to their experts, received, sent back, and added up, in a launch each (`kernels/in_turn.cuh`).
    LowLatencyParams of "brigade_low_latency" in "low_latency" {
        ..group,
        /// Device address of what waits for each rank are added to, or 0.
        waits: u64,
        /// Byte of a rank's memory where the half begins.
        half: u64,
        /// Bytes of a sender's part of it, on the way there.
        part_bytes: u64,
        /// Byte of a rank's memory where the words begin that tell of what comes in the half.
        told: u64,
        /// Bytes of a sender's part of them, on the way there.
        told_bytes: u64,
        /// Where each section of such a part begins: rows, scales, experts, weights.
        section: [u64; 4],
        /// Bytes of a token in each section. On the way back those of a row's values, of what belongs to them, and of a place for both.
        row_bytes: [u64; 4],
        /// Device address of what is sent: own rows, or rows of this rank's experts.
        from: u64,
        /// Device address of the experts of every own token, i32 or i64.
        ids: u64,
        /// Device address of the slots of every expert, if there is a map.
        map: u64,
        /// Device address of the slots of the experts of every own token.
        chosen: u64,
        /// Device address of where received rows go, or sums.
        to: u64,
        /// Device address of where received scales go, or 0.
        to_scales: u64,
        /// Device address of the rows of each of this rank's experts.
        counts: u64,
        /// Device address of where each of them is from.
        sources: u64,
        /// Device address of where those of each rank begin, and how many they are.
        ranges: u64,
        /// Device address of the rows that each of this rank's experts has got so far, i64, or 0.
        totals: u64,
        /// Device address of the weights of own tokens' experts, or 0.
        weights: u64,
        /// Device address of the row that each expert of every token got here, if weights came with them, or 0.
        rows_of: u64,
        /// Device address of their weights.
        held: u64,
        /// Bytes of what a launch gives: rows or sums, scales, counts, sources and ranges.
        poisoned_bytes: [u64; 5],
        /// What it is filled with if the group was stopped.
        poisons: [u64; 5],
        /// Own tokens.
        tokens: u32,
        /// Most tokens of any rank.
        max_tokens: u32,
        /// Experts of a token.
        k: u32,
        /// Bytes of an id.
        id_bytes: u32,
        /// 0 even, 1 a map, 2 ids are ranks.
        placement: u32,
        /// How many experts there are.
        experts: u32,
        /// Most slots of an expert.
        copies: u32,
        /// Slots of a rank, if there is a map.
        per_rank: u32,
        /// Slots that each rank has, and how many of the first ranks have one more.
        slots_each: u32,
        /// See there.
        slots_more: u32,
        /// Threads for each row.
        row_threads: u32,
        /// This rank's experts.
        own_experts: u32,
        /// Columns of rows that are cast, or added up.
        hidden: u32,
        /// Their type.
        from_type: u32,
        /// Type of the sums.
        out_type: u32,
        /// This rank.
        rank: u32,
        /// Ranks in the group.
        size: u32,
        /// Rows that each expert has room for.
        room: u32,
        /// 1 where there is a row for each expert, 2 where each rank has added its own.
        sum: u32,
        /// How rows travel: 0 as they are, 1 fp8 with scales in f32, 2 with powers of two, 3 with their exponents, 4 LogFMT-10.
        payload: u32,
        /// Words of a received row's scales if they lie by columns, or 0.
        scale_words: u32,
        /// Number of the operation, for fault records.
        operation: u32,
        /// Of the call.
        signature: u32,
        /// Word where the flags of arrival begin.
        barrier: u32,
        /// Word by which a rank is told to stop.
        stop: u32,
        /// Whether all ranks make this call.
        collective: u32,
        /// Whether the launch is all of the half of the call: it waits, posts and counts. Else steps around it do.
        alone: u32,
        /// Whether the next launch may take its places beside this one's: 1 once a send waits for nobody, or at once; 2 where this one ends.
        lets_next: u32,
        /// Whether a receive may be beside the send of the same use.
        beside: u32,
        /// Number of the word of the state that says which use of the half has begun.
        begun: u32,
        /// Numbers of the counters of this half of the slot, and of its other half.
        counters: [u32; 2],
        /// Words where credits of these begin.
        credits: [u32; 2],
        /// Word where flags of this half begin.
        filled: u32,
        /// From one rank's to the next's.
        pieces: u32,
    }
}
