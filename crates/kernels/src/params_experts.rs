//! Of kernels that send rows to experts and back.

use super::{Field, Layout, Parameters, Zero};

parameters! {
    /// Where a rank's rows go, in two launches with a block for each rank: positions, and then lists.
    RouteParams of "brigade_route" in "routing" {
        /// Device address of the experts of every token, i32 or i64.
        ids: u64,
        /// Device address of the slots of every expert, if there is a map.
        map: u64,
        /// Device address of the slot of every expert of every token.
        slots: u64,
        /// Device address of every token's position among the rows for each rank.
        positions: u64,
        /// Device address of the tokens that go to each rank.
        sent: u64,
        /// Device address of where those of each rank begin.
        sent_offsets: u64,
        /// Device address of how often each slot is named.
        rows_per_slot: u64,
        /// Device address of a count for each block, between the launches.
        counts: u64,
        /// A bit for each rank whose experts are none.
        absent: u32,
        /// Runs of tokens: a block for each rank and each of them.
        runs: u32,
        /// Tokens of this rank.
        tokens: u32,
        /// Experts of a token.
        k: u32,
        /// Bytes of an id.
        id_bytes: u32,
        /// This rank.
        rank: u32,
        /// Ranks in the group.
        size: u32,
        /// 0 even, 1 a map, 2 ids are ranks.
        placement: u32,
        /// How many experts there are.
        experts: u32,
        /// Most slots of an expert.
        copies: u32,
        /// Slots of a rank, if there is a map.
        per_rank: u32,
        /// Room for tokens in the lists.
        room: u32,
    }

    /// Which rows come, where the experts of all ranks' tokens are known, with a block for each rank.
    GatheredParams of "brigade_gathered" in "gathered" {
        ..group,
        /// Device address of the experts of all tokens, i32 or i64.
        ids: u64,
        /// Device address of the slots of every expert, if there is a map.
        map: u64,
        /// Device address of where those of each rank begin, or of how many there are.
        lengths: u64,
        /// Device address of their weights, or 0.
        weights: u64,
        /// Device address of where own ids go.
        own_ids: u64,
        /// Device address of where own weights go, or 0.
        own_weights: u64,
        /// Device address of the part of rank 0, where it is told which rows come.
        parts: u64,
        /// From one part to the next.
        parts_stride: u64,
        /// Where each section of such a part begins, up to the weights.
        came: [u64; 5],
        /// Rows of ids.
        rows: u64,
        /// Whether a rank's are behind those of the one before.
        ragged: u32,
        /// Tokens of this rank.
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
        ..call,
        /// Whether all ranks make this call.
        collective: u32,
    }

    /// Rows become fp8, with a scale for each 128 columns.
    CastParams of "brigade_cast" in "dispatch" {
        /// Device address of the rows.
        from: u64,
        /// Device address of the fp8 values.
        values: u64,
        /// Device address of the scales.
        scales: u64,
        /// How many rows.
        rows: u64,
        /// Their columns, a multiple of 16.
        hidden: u32,
        /// Type of the rows.
        from_type: u32,
        /// 0 f32, 1 powers of two, 2 their exponents.
        format: u32,
        /// Scales of a row, with what fills up its last word.
        per_row: u32,
    }

    /// A dispatch: rows are pushed, counted, arranged and collected, in a launch each.
    DispatchParams of "brigade_dispatch" in "dispatch" {
        ..group,
        /// Byte of a rank's memory where the half begins.
        half: u64,
        /// Bytes of a sender's part of it.
        part_bytes: u64,
        /// Where each section of a part begins.
        section: [u64; 9],
        /// Bytes of a row in each section.
        row_bytes: [u64; 9],
        /// Device address of what goes into each section of own rows: nothing for tokens.
        from: [u64; 9],
        /// Device address of where each section's rows go.
        to: [u64; 9],
        /// Device address of the part of rank 0, where rows have come.
        parts: u64,
        /// From one part to the next.
        parts_stride: u64,
        /// Where each section of such a part begins.
        came: [u64; 9],
        /// Device address of the tokens that go to each rank.
        sent: u64,
        /// Device address of where those of each rank begin.
        sent_offsets: u64,
        /// Device address of the rows that came from each rank.
        received: u64,
        /// Device address of where each row is from.
        sources: u64,
        /// Device address of where the rows of each rank or slot begin.
        offsets: u64,
        /// Device address of the slots of each row.
        ids: u64,
        /// Device address of their weights, or 0.
        weights: u64,
        /// Device address of the rows of each slot.
        counts: u64,
        /// Device address of the row of every expert of every token that came, or 0.
        rows_of: u64,
        /// Address of how much room is needed.
        room: u64,
        /// Device address of what each slot has got so far, i64, or 0.
        totals: u64,
        /// Rows that there is room for.
        capacity: u32,
        /// First row of the piece.
        first_row: u32,
        /// Rows of a piece.
        piece_rows: u32,
        /// First own row that is taken with the piece.
        own_first: u32,
        /// How many of them.
        own_rows: u32,
        /// Most tokens of any rank.
        max_tokens: u32,
        /// Experts of a token.
        k: u32,
        /// Threads for each row.
        row_threads: u32,
        /// 0 dense, 1 by source, 2 by expert.
        arrangement: u32,
        /// Rows that a slot's begin at a multiple of.
        alignment: u32,
        /// Whether it is known which rows come.
        known: u32,
        /// Whether all ranks get all rows.
        gathers: u32,
        /// Tokens of this rank.
        tokens: u32,
        /// Sections.
        sections: u32,
        /// Words of a row's scales if they lie by columns, or 0.
        scale_words: u32,
        /// Slots of this rank.
        own_slots: u32,
        /// What the first of them is called in ids.
        first_id: u32,
        /// What is said there of none.
        no_id: u32,
        /// 0 even, 1 a map, 2 ids are ranks.
        placement: u32,
        /// How many experts there are.
        experts: u32,
        /// Slots of a rank, if there is a map.
        per_rank: u32,
        ..call,
        /// Whether all ranks make this call.
        collective: u32,
    }

    /// A combine: rows go back to where they came from, and are added there.
    CombineParams of "brigade_combine" in "combine" {
        /// Device address of the word by which this rank is told to stop.
        stop: u64,
        /// Device address of this rank's state.
        state: u64,
        /// Where this rank reaches the memory of rank 0.
        base: u64,
        /// From one rank's memory to the next's.
        stride: u64,
        /// Byte of a rank's memory where the half begins.
        half: u64,
        /// Bytes of a sender's part of it.
        part_bytes: u64,
        /// Where rows begin in a part.
        rows_at: u64,
        /// Where weights begin in a part.
        weights_at: u64,
        /// Device address of the rows.
        from: u64,
        /// Device address of what goes back with them, or 0.
        back: u64,
        /// Device address of where each row is from.
        sources: u64,
        /// Device address of the weights that rows came with.
        held: u64,
        /// Device address of the row of every expert of every token that came, or 0.
        rows_of: u64,
        /// Device address of the rows, if own ones are added from there, and do not go through this rank's part; or 0.
        own_from: u64,
        /// Device address of where the rows of each rank begin among them.
        offsets: u64,
        /// Device address of the part of rank 0, where rows have come back.
        parts: u64,
        /// From one part to the next.
        parts_stride: u64,
        /// Where rows begin in such a part.
        came_rows: u64,
        /// Where weights begin in such a part.
        came_weights: u64,
        /// Device address of the slot of every expert of own tokens.
        slots: u64,
        /// Device address of own tokens' positions among the rows for each rank.
        positions: u64,
        /// Device address of own tokens' weights.
        own_weights: u64,
        /// Device addresses of what is added.
        biases: [u64; 2],
        /// Device address of the result.
        out: u64,
        /// Device address of what came back for each expert, or 0.
        weights_out: u64,
        /// Tokens of this rank.
        tokens: u64,
        /// Rows that there is room for.
        capacity: u32,
        /// Elements in a row.
        hidden: u32,
        /// Their type.
        from_type: u32,
        /// Type of the result.
        out_type: u32,
        /// 0 by rank, 1 by expert, 2 by expert and then by rank.
        sum: u32,
        /// First row of the piece.
        first_row: u32,
        /// Rows of a piece.
        piece_rows: u32,
        /// Most tokens of any rank.
        max_tokens: u32,
        /// Experts of a token.
        k: u32,
        /// Threads for each row.
        row_threads: u32,
        /// How many are added.
        bias_count: u32,
        /// 0 even, 1 a map, 2 ids are ranks.
        placement: u32,
        /// How many experts there are.
        experts: u32,
        /// Slots of a rank, if there is a map.
        per_rank: u32,
        /// This rank.
        rank: u32,
        /// Ranks in the group.
        size: u32,
    }
}
