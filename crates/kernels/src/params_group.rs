//! What kernels of a communicator are told, and those that probe one.

use super::{Field, Layout, Parameters, Zero};

parameters! {
    /// `bytes` bytes at `out` become repeats of the 8 bytes of `pattern`, whatever the alignment.
    FillParams of "brigade_fill" in "fill" {
        /// Device address of the first byte.
        out: u64,
        /// How many bytes.
        bytes: u64,
        /// The bytes to repeat, lowest first.
        pattern: u64,
    }

    /// Posts one flag after a pause.
    PostParams of "brigade_probe_post" in "probe" {
        /// Address of the 64-bit flag.
        flag: u64,
        /// What to store there.
        value: u64,
        /// How long to wait first, in nanoseconds.
        delay_ns: u64,
    }

    /// Makes one bounded wait and says how it ended.
    WaitParams of "brigade_probe_wait" in "probe" {
        /// Address of the 64-bit flag.
        flag: u64,
        /// Address of this rank's 32-bit abort word.
        abort: u64,
        /// Address of this rank's 64-byte fault record, in memory that the host sees.
        fault: u64,
        /// Address of the 32-bit outcome: 0 when the flag came, else the fault's kind.
        outcome: u64,
        /// The flag to wait for.
        expected: u64,
        /// How long to wait at most, in nanoseconds.
        timeout_ns: u64,
        /// Number of the call, for the fault record.
        call: u64,
        /// Number of the operation, for the fault record.
        operation: u32,
        /// This rank.
        rank: u32,
        /// The rank waited for.
        peer: u32,
        /// Chunk, channel or region waited for.
        slot: u32,
    }

    /// Carries out steps of a protocol: counters, flags to peers, waits for theirs. One warp does it, phase by phase.
    StepsParams of "brigade_steps" in "steps" {
        ..group,
        /// Bytes to count as moved when the call has ended well.
        moved_bytes: u64,
        /// Device address of what waits for each rank are added to, or 0.
        waits: u64,
        /// Device addresses of what is poisoned if the group was stopped.
        poison: [u64; 6],
        /// Bytes to poison at each.
        poison_bytes: [u64; 6],
        /// The bytes of poison for each, lowest first.
        poison_pattern: [u64; 6],
        ..call,
        /// How many steps there are.
        count: u32,
        /// Whether all ranks make this call.
        collective: u32,
        /// Whether a product behind these steps begins beside them.
        product_begins: u32,
        /// Nothing.
        padding: u32,
        /// The steps.
        steps: [u64; 32],
    }

    /// Copies bytes, unless the group was stopped.
    MoveParams of "brigade_move" in "move" {
        /// Device address of the word by which this rank is told to stop.
        stop: u64,
        /// Device address of this rank's state.
        state: u64,
        /// How many copies.
        count: u64,
        /// Where each reads.
        from: [u64; 16],
        /// Where each writes.
        to: [u64; 16],
        /// How much.
        bytes: [u64; 16],
    }

    /// Combines the same elements of all ranks in rank order, unless the group was stopped.
    ReduceParams of "brigade_reduce" in "reduce" {
        /// Device address of the word by which this rank is told to stop.
        stop: u64,
        /// Device address of this rank's state.
        state: u64,
        /// Device address of the result.
        out: u64,
        /// Device address of rank 0's elements.
        from: u64,
        /// From one rank's elements to the next's.
        stride: u64,
        /// How many elements.
        elements: u64,
        /// Type of the result.
        out_type: u32,
        /// Type of the elements.
        from_type: u32,
        /// How many ranks.
        parts: u32,
        /// 0 sum, 1 product, 2 maximum, 3 minimum, 4 average.
        op: u32,
    }

    /// An all-reduce that pushes: one exchange, of as much as its buffers hold. Variants are named after the algorithm, the
    /// types and the most ranks that they are for.
    AllReduceParams of "brigade_all_reduce" in "all_reduce" {
        ..group,
        /// Bytes to count as moved.
        moved_bytes: u64,
        /// Device address of the input.
        from: u64,
        /// Device address of the result, which may be the input's.
        out: u64,
        /// Bytes of the result.
        out_bytes: u64,
        /// The bytes of poison for it, lowest first.
        poison: u64,
        /// How many elements.
        elements: u64,
        /// Byte of a rank's memory where the first buffer begins.
        slots: u64,
        /// From one buffer to the next.
        buffer_bytes: u64,
        /// How many buffers rotate: 3.
        buffers: u32,
        /// Granules of the input.
        granules: u32,
        /// Granules of a rank's place: in two shots, those that it reduces.
        share: u32,
        /// 0 sum, 1 product, 2 maximum, 3 minimum, 4 average.
        op: u32,
        ..call,
        /// Whether all ranks make this call.
        collective: u32,
        /// Whether the call ends with this exchange.
        last: u32,
    }

    /// The same, with the residual and RMSNorm behind it: rows of `hidden` elements. Variants are named after the algorithm,
    /// the type and the most ranks that they are for.
    AllReduceNormParams of "brigade_all_reduce_norm" in "all_reduce_norm" {
        ..group,
        /// Bytes to count as moved.
        moved_bytes: u64,
        /// Device address of the rows to be summed.
        from: u64,
        /// Device address of the residual's rows.
        residual: u64,
        /// Device address of the weight, a row.
        weight: u64,
        /// Device address of the new residual's rows, which may be the old one's.
        sum: u64,
        /// Device address of the rows that are normed.
        normed: u64,
        /// Device address of their scales, if they have one each.
        scales: u64,
        /// Device addresses of what is poisoned if the group was stopped.
        poisoned: [u64; 3],
        /// Bytes to poison at each.
        poisoned_bytes: [u64; 3],
        /// The bytes of poison for each, lowest first.
        poison: [u64; 3],
        /// Byte of a rank's memory where the first buffer begins.
        slots: u64,
        /// From one buffer to the next.
        buffer_bytes: u64,
        /// How many buffers rotate: 3.
        buffers: u32,
        /// Rows.
        rows: u32,
        /// Elements of a row.
        hidden: u32,
        /// Granules of a row.
        granules: u32,
        /// Rows that a rank reduces.
        share: u32,
        /// Whether all rows can be taken in whole granules.
        wide: u32,
        /// Bits of epsilon, an f32.
        eps: u32,
        /// Bits of the one scale, an f32, if there is one.
        scale: u32,
        /// How normed rows are given: 0 in their type, 1 int8 with a scale for each row, 2 fp8 with one scale.
        form: u32,
        ..call,
        /// Whether all ranks make this call.
        collective: u32,
        /// Whether the call ends with this exchange.
        last: u32,
        /// Zero.
        reserved: u32,
    }

    /// A reduce-scatter that pushes, as one exchange. Variants are named after the types and the most ranks that they are for.
    ReduceScatterParams of "brigade_reduce_scatter" in "reduce_scatter" {
        ..group,
        /// Bytes to count as moved.
        moved_bytes: u64,
        /// Device address of the input.
        from: u64,
        /// The element where each rank's share begins, of this piece.
        first: [u64; 8],
        /// Elements of each rank's share in it.
        elements: [u64; 8],
        /// Device address of the result.
        out: u64,
        /// Bytes from there on that are poisoned if the group was stopped: of the call's last piece, all of its result.
        out_bytes: u64,
        /// The bytes of poison for it, lowest first.
        poison: u64,
        /// Byte of a rank's memory where the first buffer begins.
        slots: u64,
        /// From one buffer to the next.
        buffer_bytes: u64,
        /// How many buffers rotate: 3.
        buffers: u32,
        /// Granules of the largest share.
        share: u32,
        /// 0 sum, 1 product, 2 maximum, 3 minimum, 4 average.
        op: u32,
        ..call,
        /// Whether all ranks make this call.
        collective: u32,
        /// Whether the call ends with this exchange.
        last: u32,
        /// Zero.
        reserved: u32,
    }

    /// Bytes of some ranks, which all get, by pushing: one exchange.
    PushCopyParams of "brigade_push_copy" in "push_copy" {
        ..group,
        /// Bytes to count as moved.
        moved_bytes: u64,
        /// Device address of what this rank has.
        from: u64,
        /// How many bytes each rank has.
        bytes: [u64; 8],
        /// Device address where those of each rank go; 0 if they stay where they are.
        out: [u64; 8],
        /// Bytes from there on that are poisoned if the group was stopped: of the call's last piece, all of them.
        poisoned: [u64; 8],
        /// The bytes of poison for it, lowest first.
        poison: u64,
        /// Byte of a rank's memory where the first buffer begins.
        slots: u64,
        /// From one buffer to the next.
        buffer_bytes: u64,
        /// How many buffers rotate: 3.
        buffers: u32,
        /// Packets of the rank that has most.
        packets: u32,
        /// Granules from one slot to the next.
        slot: u32,
        /// Granules that are filled in a buffer.
        filled: u32,
        ..call,
        /// Whether all ranks make this call.
        collective: u32,
        /// Whether the call ends with this exchange.
        last: u32,
    }

    /// Messages to and from peers, side by side: each by some blocks, through its sender's slot in the receiver's memory.
    MessagesParams of "brigade_messages" in "messages" {
        ..group,
        /// Byte of a rank's memory where the slots' first half begins.
        slots: u64,
        /// From one half to the other.
        half_bytes: u64,
        /// Bytes of a slot.
        slot_bytes: u64,
        /// Bytes of a message that go through it at once.
        piece_bytes: u64,
        /// Bytes that the call moves.
        moved_bytes: u64,
        /// Of a call of all ranks: address of what this rank has for itself.
        own: u64,
        /// What is poisoned with, 8 bytes.
        poison: u64,
        /// This rank.
        rank: u32,
        /// Ranks in the group.
        size: u32,
        /// Number of the operation, for fault records.
        operation: u32,
        /// Of the call.
        call_signature: u32,
        /// Word where the flags of arrival begin.
        barrier: u32,
        /// Word by which a rank is told to stop.
        stop: u32,
        /// Word where the flags of the slots begin.
        ring: u32,
        /// Flags of a slot.
        pieces: u32,
        /// Blocks for each message.
        blocks: u32,
        /// How many messages.
        count: u32,
        /// Whether all ranks make this call.
        collective: u32,
        /// The counter in whose place and the next one's stands what is counted of messages to rank 0, then to the others, then from each; in this rank's own, to itself,
        /// blocks that have read which call of all ranks it is.
        counters: u32,
        /// Whether the next kernel may begin beside this one.
        lets_next: u32,
        /// Of a call of all ranks: whether it is told to peers here, and counted.
        arrives: u32,
        /// The other rank of each, plus 256 where this rank receives; or this rank, plus 256, of what it has for itself.
        peer: [u32; 32],
        /// What each is signed by.
        signature: [u32; 32],
        /// Device address of each.
        local: [u64; 32],
        /// Its size.
        bytes: [u64; 32],
    }

    /// Rows that lists name, to and from all ranks through queues, by a block for each end of each.
    AllToAllRowsParams of "brigade_all_to_all_rows" in "all_to_all_rows" {
        ..group,
        /// Byte of a rank's memory where the queues begin.
        queues: u64,
        /// Bytes of those from each rank.
        queue_bytes: u64,
        /// Bytes of an entry.
        entry_bytes: u64,
        /// Where each section of an entry begins.
        section: [u64; 4],
        /// Bytes of a row of each payload.
        row_bytes: [u64; 4],
        /// Device address of the rows of each payload.
        from: [u64; 4],
        /// Device address of where those of each go.
        to: [u64; 4],
        /// Device address of where the rows for each rank begin in the list.
        send_offsets: u64,
        /// Device address of the list of rows that are sent.
        send_rows: u64,
        /// Device address of where the rows from each rank begin in the list.
        recv_offsets: u64,
        /// Device address of the list of rows that are received.
        recv_rows: u64,
        /// Length of the list of rows that are sent.
        send_length: u32,
        /// Length of the list of rows that are received.
        recv_length: u32,
        /// Rows that there are.
        from_rows: u32,
        /// Rows that there is room for.
        to_rows: u32,
        /// How many payloads.
        payloads: u32,
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
