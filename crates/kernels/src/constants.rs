//! Numbers that kernels and the crate that launches them have in common; written into `params.cuh` too.

/// Numbers that kernels and the crate that launches them have in common.
macro_rules! constants {
    ($($(#[doc = $doc:literal])* $name:ident: $type:ident = $value:expr;)*) => {
        $($(#[doc = $doc])* pub const $name: $type = $value;)*

        /// All of them, by name.
        pub(super) const ALL: &[(&str, u64)] = &[$((stringify!($name), $value as u64),)*];
    };
}

constants! {
    /// Most ranks of a group: a warp has a lane for each, and parameter structs a place for what goes there and back.
    MOST_RANKS: usize = 16;
    /// Steps that one launch carries out: a lane of a warp for each.
    MOST_STEPS: usize = 32;
    /// Copies in one launch.
    MOST_MOVES: usize = 16;
    /// Ranges that a launch of steps poisons.
    MOST_POISONED: usize = 6;
    /// Messages in one launch.
    MOST_MESSAGES: usize = 32;
    /// Most queues from one rank to another.
    FIFO_CHANNELS: usize = 16;
    /// Words of a line that a count of a queue has for itself.
    FIFO_LINE_WORDS: usize = 32;
    /// Threads that carry out steps and poison outputs.
    STEP_THREADS: u32 = 256;
    /// Threads that carry one share of a message.
    MESSAGE_THREADS: u32 = 512;
    /// Most threads of a block that pushes sums.
    ALL_REDUCE_THREADS: u32 = 512;
    /// Packets of a broadcast from which on peers pass it on.
    RELAYED_PACKETS: u32 = 8192;
    /// Most tokens of a rank in a dispatch that is pushed, by its kernels for few.
    PUSH_TOKENS: u32 = 1024;
    /// Most slots of all ranks where rows lie by expert, and once more those of a rank.
    PUSH_PLACES: u32 = 2048;
    /// Most tokens of a rank by the kernel for many.
    PUSH_MANY_TOKENS: u32 = 8192;
    /// Most blocks of such a dispatch that write down what the caller is told.
    PUSH_CLERKS: u32 = 5;
    /// Most slots of a rank in one.
    PUSH_SLOTS: u32 = 1024;
    /// A half of low latency lets the next launch take its places beside all of it: a send once it waits for nobody.
    LETS_NEXT_AT_ONCE: u32 = 1;
    /// Or beside its end.
    LETS_NEXT_AT_THE_END: u32 = 2;
    /// Most elements of a row, of 16 bits, that is normed in the same kernel; half as many of 32.
    NORM_COLUMNS: u32 = 16_384;
    /// Most threads of a block that norms rows.
    NORM_THREADS: u32 = 1024;
    /// Most threads of a block that norms a row together with others.
    NORM_CLUSTER_THREADS: u32 = 256;
    /// Normed rows are given in their type.
    NORM_PLAIN: u32 = 0;
    /// As int8, with a scale for each row.
    NORM_INT8: u32 = 1;
    /// As fp8, with one scale.
    NORM_FP8: u32 = 2;
    /// Threads of the blocks of a product of few rows.
    FEW_ROWS_THREADS: u32 = 384;
    /// Elements of the inner dimension that they take at a time.
    FEW_ROWS_SLICE: u32 = 1024;
    /// Their shared memory, in bytes: stages of 16 columns of such a slice, and the sums of 8 warps.
    FEW_ROWS_BYTES: u32 = 6 * 16 * (2 * FEW_ROWS_SLICE + 64) + 8 * 4 * 4 * 8 * (16 + 4);
    /// Most columns between adapters' factors that such a product takes along, of up to four of them.
    FEW_LOW_COLUMNS: u32 = 64;
    /// Blocks that share the multiplication of rows by first factors.
    FEW_LOW_BLOCKS: u32 = 2;
    /// Rows of a tile of a product whose tiles wait.
    GEMM_ROWS: u32 = 128;
    /// Bands of a part whose tiles are neighbours.
    GEMM_BANDS: u32 = 8;
    /// Threads of a block of such a product.
    GEMM_THREADS: u32 = 384;
    /// Its shared memory in bytes, which as many stages fill as find room.
    GEMM_SHARED_BYTES: u32 = 230_400;
    /// Rows and columns of a large tile of a product in groups.
    GROUPED_LARGE: u32 = 128;
    /// Threads of a block that has these.
    GROUPED_LARGE_THREADS: u32 = 256;
    /// Its shared memory in bytes: three stages.
    GROUPED_LARGE_BYTES: u32 = 3 * (GROUPED_LARGE + GROUPED_LARGE) * 128;
    /// Rows of a small tile.
    GROUPED_SMALL_ROWS: u32 = 32;
    /// Its columns.
    GROUPED_SMALL_COLUMNS: u32 = 64;
    /// Threads of a block that has these.
    GROUPED_SMALL_THREADS: u32 = 128;
    /// Its shared memory in bytes: five stages.
    GROUPED_SMALL_BYTES: u32 = 5 * (GROUPED_SMALL_ROWS + GROUPED_SMALL_COLUMNS) * 128;
    /// Runs of rows with adapters that one launch of `brigade_lora` takes.
    MOST_LORA_RUNS: usize = 96;
    /// Rows of a tile of its products.
    LORA_ROWS: u32 = 32;
    /// Columns of a tile.
    LORA_COLUMNS: u32 = 64;
    /// Of the inner dimension going down, what is summed before it is added to the rest.
    LORA_CHUNK: u32 = 1024;
    /// Most columns of an adapter's first factor.
    LORA_WIDTH: u32 = 256;
    /// Threads of a block where tensor cores multiply.
    LORA_THREADS: u32 = 128;
    /// Threads of one where they do not.
    LORA_FLOAT_THREADS: u32 = 256;
    /// Shared memory of a block that goes down, in bytes: six stages of rows and of a factor.
    LORA_DOWN_BYTES: u32 = 6 * (LORA_ROWS + 64) * 128;
    /// Of one that goes up: rows of all of the width, and four stages of a factor.
    LORA_UP_BYTES: u32 = LORA_WIDTH / 64 * LORA_ROWS * 128 + 4 * 64 * 128;
    /// Parts of rows that one launch waits for.
    MOST_PARTS: usize = 32;
    /// Columns that all adapters of such a product have between their factors.
    GEMM_LOW_COLUMNS: u32 = 64;
    /// Runs of rows with an adapter in one launch.
    MOST_RUNS: usize = 16;
    /// Such a product multiplies own rows before the kernel in front has ended: steps, which let it.
    BEGINS_BESIDE_STEPS: u32 = 1;
    /// Or it comes behind the kernel that makes its state.
    BEGINS_WITH_NEW_STATE: u32 = 2;

    /// Words of a rank's own state: which generation of the communicator it is in.
    STATE_GENERATION: usize = 0;
    /// When the call in progress began.
    STATE_STARTED: usize = 1;
    /// Calls that ended well.
    STATE_CALLS: usize = 2;
    /// Bytes that this rank moved.
    STATE_MOVED: usize = 3;
    /// Blocks that are through with a launch of messages, or with half of a call in turn; of these, those that failed in the upper half.
    STATE_OUT: usize = 4;
    /// Waits for each rank that were not over at once.
    STATE_WAITS: usize = 8;
    /// How long they were, in nanoseconds.
    STATE_WAITED: usize = 24;
    /// Exchanges by pushing, times `USE`; between two, the blocks of a kernel add their parts of it.
    STATE_USES: usize = 40;
    /// Granules that lie in the buffer of the last use with an even number, and of the last with an odd one: half a word each.
    STATE_GRANULES: usize = 41;
    /// Tiles that blocks have taken of the product in progress: half a word for narrow ones beyond the first of each block that begins with them, and
    /// half for all others. 0 between products.
    STATE_TILES: usize = 42;
    /// A bit for each rank that does not take part any more.
    STATE_ABSENT: usize = 43;
    /// What is through of what a product sends to a rank, or of a part: half a word for each, 0 between products. The last one, which no rank has, counts
    /// slices of own rows that warps have taken.
    STATE_SENT: usize = 44;
    /// Which use of a half of low latency has begun: a word for each half of each slot.
    STATE_BEGUN: usize = 60;
    /// The counters: two words each, the count and its marks.
    STATE_COUNTERS: usize = 64;

    /// What all blocks of an exchange add to `STATE_USES` between them.
    USE: u64 = 1 << USE_BITS;
    /// Its binary logarithm.
    USE_BITS: u32 = 20;

    /// Mark of a counter: its use has begun and not ended.
    MARK_OPEN: u64 = 1;
    /// Mark of a counter: its use was begun ahead of the call that it is for.
    MARK_BEGUN: u64 = 2;

    /// Bytes into the report: the host sets it to the generation that it wants stopped.
    REPORT_ABORT: usize = 0;
    /// A bit for each rank that is gone.
    REPORT_DEPARTED: usize = 8;
    /// The fault record.
    REPORT_FAULT: usize = 64;
    /// The generation in which a kernel gave up, or found that another rank had.
    REPORT_STOPPED: usize = 128;
    /// Bytes of a report.
    REPORT_BYTES: usize = 192;

    /// Words of a slot of the desk, where a kernel asks the hook of fault injection one question at a time.
    QUESTION_WORDS: usize = 8;
    /// Which word of a slot says how many questions were asked there. Written last.
    QUESTION_ASKED: usize = 0;
    /// Which step it is about, packed as in `StepsParams`.
    QUESTION_STEP: usize = 1;
    /// Which use or signal the step is about.
    QUESTION_EPOCH: usize = 2;
    /// Number of the call.
    QUESTION_CALL: usize = 3;
    /// Number of the operation.
    QUESTION_OPERATION: usize = 4;
    /// The host's word: four times the number of a question, plus the answer to it.
    QUESTION_ANSWER: usize = 5;
    /// The step is carried out.
    ANSWER_GO_ON: u64 = 1;
    /// The step is left out.
    ANSWER_LEAVE_OUT: u64 = 2;

    /// Two ranks make the call.
    MADE_PAIRWISE: u64 = 0;
    /// All ranks make it, and meet in it.
    MADE_TOGETHER: u64 = 1;
    /// All ranks make it, and do not meet in it.
    MADE_IN_TURN: u64 = 2;

    /// Begins to count the time of a call.
    STEP_START: u64 = 0;
    /// A new use.
    STEP_ADVANCE: u64 = 1;
    /// A new use, or the one that was begun ahead.
    STEP_TAKE: u64 = 2;
    /// Begins a use ahead of its call.
    STEP_RESERVE: u64 = 3;
    /// Writes the flag of the counter's use.
    STEP_POST: u64 = 4;
    /// The same, if the use is open and was not begun ahead.
    STEP_POST_OPEN: u64 = 5;
    /// A use that was not begun ahead is over.
    STEP_CLOSE: u64 = 6;
    /// Waits for the flag of the counter's use.
    STEP_WAIT: u64 = 7;
    /// Waits for the credit of the use before the counter's.
    STEP_CREDIT: u64 = 8;
    /// Waits for the credit of the counter's use.
    STEP_RELEASED: u64 = 9;
    /// Says that this rank is in the call.
    STEP_ARRIVE: u64 = 10;
    /// Waits for a peer to be in the call.
    STEP_MEET: u64 = 11;
    /// Counts up to the flag in an own word.
    STEP_CATCH_UP: u64 = 12;
    /// The call ended well.
    STEP_FINISH: u64 = 13;
    /// For the hook: the buffer that a step's word names is about to be emptied.
    STEP_CLEAR: u64 = 14;
    /// For the hook: what was pushed into the buffer is about to be read. The word has the shot above its lowest 8 bits.
    STEP_READ: u64 = 15;
}

/// One step of a protocol, as `StepsParams` has them: what to do, in which phase (steps of a phase go on side by side), by
/// which counter, about which slot (for fault records), with which rank, and at which word of its memory.
pub const fn step(op: u64, phase: u64, counter: u64, slot: u64, peer: u64, word: u64) -> u64 {
    op << 60
        | phase << 56
        | (counter & 0xFFFF) << 40
        | (slot & 0xFFF) << 28
        | (peer & 0xFF) << 20
        | (word & 0xF_FFFF)
}
