//! Of kernels that push rows to experts and back.

use super::{Field, Layout, Parameters, Zero};

parameters! {
    /// A dispatch whose rows are their own flags: all of it is one launch.
    PushDispatchParams of "brigade_push_dispatch" in "push_dispatch" {
        ..group,
        /// Device address of what waits for each rank are added to, or 0.
        waits: u64,
        /// Bytes to count as moved, beside those that the kernel counts.
        moved_bytes: u64,
        /// Byte of a rank's memory where the first buffer begins.
        slots: u64,
        /// From one buffer to the next.
        buffer_bytes: u64,
        /// Device address of the experts of every token, i32 or i64.
        ids: u64,
        /// Device address of the slots of every expert, if there is a map.
        map: u64,
        /// Device address of the slot of every expert of every token.
        chosen: u64,
        /// Device address of every token's position among the rows for each rank.
        positions: u64,
        /// Device address of the tokens that go to each rank.
        sent: u64,
        /// Device address of where those of each rank begin.
        sent_offsets: u64,
        /// Device address of how often each slot is named.
        rows_per_slot: u64,
        /// Device address of the rows that came from each rank.
        received: u64,
        /// Device address of where each row is from.
        sources: u64,
        /// Device address of where the rows of each rank or slot begin.
        offsets: u64,
        /// Device address of the slots of each row.
        received_ids: u64,
        /// Device address of the rows of each slot.
        counts: u64,
        /// Device address of what each slot has got so far, i64, or 0.
        totals: u64,
        /// Device address of the row of every expert of every token that came, or 0.
        rows_of: u64,
        /// Where rows stay at a receiver, in its memory, that come from this rank; of no use but in place.
        places: u64,
        /// Device address of what goes into each section of own rows.
        from: [u64; 9],
        /// Device address of where each section's rows go.
        to: [u64; 9],
        /// Bytes of a row in each section.
        row_bytes: [u64; 9],
        /// What is poisoned if the group was stopped.
        poisoned: [u64; 10],
        /// Bytes of each.
        poisoned_bytes: [u64; 10],
        /// The bytes of poison for each, lowest first.
        poisons: [u64; 10],
        /// Granule of a row's image where each section begins, and where it ends.
        first_granule: [u32; 10],
        /// Bytes of a row, with all that belongs to it.
        all_bytes: u32,
        /// How many buffers rotate: 3.
        buffers: u32,
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
        /// Slots of this rank.
        own_slots: u32,
        /// What the first of them is called in ids.
        first_id: u32,
        /// What is said there of none.
        no_id: u32,
        /// Slots of all ranks.
        all_slots: u32,
        /// Room for tokens in the lists of sent ones.
        room: u32,
        /// 0 dense, 1 by source, 2 by expert.
        arrangement: u32,
        /// Rows that a slot's begin at a multiple of.
        alignment: u32,
        /// Whether rows go the same ways again.
        again: u32,
        /// Sections.
        sections: u32,
        /// Words of a row's scales if they lie by columns, or 0.
        scale_words: u32,
        /// Rows that there is room for.
        capacity: u32,
        /// By expert: granules in which a rank tells another how many rows it has for its slots.
        count_granules: u32,
        /// That of a buffer where the first of them is.
        first_count: u32,
        /// Granules of a row's header.
        header: u32,
        /// Granule of a record where the row begins.
        body: u32,
        /// That where the words behind packets begin.
        words: u32,
        /// Granules of a row's image.
        granules: u32,
        /// Packets of it.
        packets: u32,
        /// Runs of a row that stays in place, of which a warp stores one at a time.
        row_runs: u32,
        /// To divide by them.
        inverse_row_runs: u32,
        /// Counter of the uses of the half in which rows stay.
        half_counter: u32,
        /// Word of rank 0's credit for it.
        half_credit: u32,
        /// Word that tells a hook of what rank 0 puts there.
        half_filled: u32,
        /// From one rank's to the next's.
        half_pieces: u32,
        /// Granules of a row, with its header and the words behind it.
        record: u32,
        /// That of a buffer where the first of them begins.
        first_record: u32,
        /// To divide by `k`, as all inverses: `u32::MAX` divided by it.
        inverse_k: u32,
        /// To divide by `packets`.
        inverse_packets: u32,
        /// To divide by `size`.
        inverse_size: u32,
        /// To divide by how many peers there are.
        inverse_peers: u32,
        /// Of ten blocks that push rows or take them, how many push, where each does one of these.
        pushing: u32,
        /// Blocks that do neither: they write down what the caller is told.
        clerks: u32,
        ..call,
        /// Whether all ranks make this call.
        collective: u32,
        /// Whether the call ends with this exchange.
        last: u32,
    }

    /// A combine whose rows are their own flags: all of it is one launch.
    PushCombineParams of "brigade_push_combine" in "push_combine" {
        ..group,
        /// Device address of what waits for each rank are added to, or 0.
        waits: u64,
        /// Bytes to count as moved, beside those that the kernel counts.
        moved_bytes: u64,
        /// Byte of a rank's memory where the first buffer begins.
        slots: u64,
        /// From one buffer to the next.
        buffer_bytes: u64,
        /// Device address of the rows.
        from: u64,
        /// Device address of what goes back with them, or 0.
        back: u64,
        /// Device address of the rows that came from each rank.
        received: u64,
        /// Device address of where each row is from.
        sources: u64,
        /// Device address of where the rows of each rank or slot begin.
        offsets: u64,
        /// Device address of the slots of each row.
        received_ids: u64,
        /// Device address of the weights that rows came with.
        held: u64,
        /// Device address of the row of every expert of every token that came.
        rows_of: u64,
        /// Device address of the slot of every expert of own tokens.
        chosen: u64,
        /// Device address of own tokens' positions among the rows for each rank.
        positions: u64,
        /// Device address of own tokens' weights.
        own_weights: u64,
        /// Device addresses of what is added.
        biases: [u64; 2],
        /// Device address of the result.
        out: u64,
        /// Its bytes.
        out_bytes: u64,
        /// The bytes of poison for it, lowest first.
        poison: u64,
        /// Device address of what came back for each expert, or 0.
        weights_out: u64,
        /// How many buffers rotate: 3.
        buffers: u32,
        /// Granules of a row.
        granules: u32,
        /// Its inverse.
        inverse_granules: u32,
        /// That of the number of peers.
        inverse_peers: u32,
        /// Granules that what goes back with rows takes.
        weight_granules: u32,
        /// Tokens of this rank.
        tokens: u32,
        /// Most tokens of any rank.
        max_tokens: u32,
        /// Experts of a token.
        k: u32,
        /// 0 by rank, 1 by expert, 2 by expert and then by rank.
        sum: u32,
        /// How many are added.
        bias_count: u32,
        /// 0 even, 1 a map, 2 ids are ranks.
        placement: u32,
        /// How many experts there are.
        experts: u32,
        /// Slots of a rank, if there is a map.
        per_rank: u32,
        /// Slots of this rank.
        own_slots: u32,
        ..call,
        /// Whether all ranks make this call.
        collective: u32,
        /// Whether the call ends with this exchange.
        last: u32,
    }
}
