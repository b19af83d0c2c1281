//! Every reason that a plan can give, in one place. Programs match [`Reason::code`](brigade_device::Reason::code)
//! against the constants; people read the rest.

use crate::{MAX_PIECES, Topology, crossover::Least};
use brigade_device::{
    Absent, AllReduceAlgorithm, DataType, Error, LinearCall, Operation, OverlapMode, ParallelMode,
    QScheme, Reason, Transport,
};
use std::borrow::Cow;

/// One rank has nothing to overlap with. Not an error even where a mode is forced.
pub const SINGLE_RANK: &str = "single-rank";
/// The group serves a parallelism whose linears do not overlap.
pub const GROUP_MODE: &str = "group-mode";
/// The activations are quantized in a way that cannot be cut by chunks.
pub const SCHEME: &str = "scheme";
/// op(A) is a transpose.
pub const TRANSPOSED: &str = "transposed";
/// The activations have three dimensions.
pub const THREE_DIMENSIONAL: &str = "three-dimensional";
/// A region of the communicator is too small.
pub const CAPACITY: &str = "capacity";
/// There is nothing to multiply.
pub const EMPTY: &str = "empty";
/// Chunks, or the product on a GPU, are too small for overlap to pay.
pub const TOO_SMALL: &str = "too-small";
/// The tuning table says that overlap does not pay on this machine.
pub const TUNED_OFF: &str = "tuned-off";
/// The figures from which on overlap pays cannot be read.
pub const CROSSOVERS: &str = "crossovers";
/// The figures of which all-reduce is quickest cannot be read.
pub const ALL_REDUCES: &str = "all-reduces";
/// The figures of this build of how rows travel to experts cannot be read.
pub const EXPERTS: &str = "experts";
/// The backend cannot run the mode or algorithm.
pub const NO_ENGINE: &str = "no-engine";
/// A number of pieces that is not allowed.
pub const PIECES: &str = "pieces";
/// Pull is a way to gather, not to scatter.
pub const PULL_TWIN: &str = "pull-twin";
/// Rows of which no product of waiting tiles can be made.
pub const TILES: &str = "tiles";
/// What a rank multiplies those rows by is not for tiles.
pub const TILES_OPERANDS: &str = "tiles-operands";
/// A GPU has no room for tiles that wait.
pub const TILES_ROOM: &str = "tiles-room";
/// A type that sums are not made of.
pub const DTYPE: &str = "dtype";
/// The scratch memory does not hold one element for each rank.
pub const SCRATCH: &str = "scratch";
/// Row counts that do not go with the group.
pub const ROWS: &str = "rows";
/// A transport that has no use for the experts of all ranks' tokens.
pub const GATHERED_IDS: &str = "gathered-ids";
/// Rows cannot stay where they come.
pub const IN_PLACE: &str = "in-place";
/// No rank of the group.
pub const ROOT: &str = "root";
/// One machine has no path to others. Not an error even where one is forced.
pub const ONE_MACHINE: &str = "one-machine";
/// An operation that needs all ranks, in a group that goes on without some; or a graph from before.
pub const ABSENT_RANKS: &str = "absent-ranks";
/// An exchange whose places absent ranks could write to, if they live.
pub const ABSENT_ALIVE: &str = "absent-alive";
/// An operation that this version has no plan for.
pub const UNKNOWN: &str = "unknown-operation";

pub(crate) fn one_machine() -> Reason {
    Reason::new(
        ONE_MACHINE,
        "one machine has no path to others",
        "nothing to do: the collective inside is the whole work",
    )
}

pub(crate) fn single_rank() -> Reason {
    Reason::new(
        SINGLE_RANK,
        "a single rank has nothing to overlap with",
        "nothing to do: the plain linear is the whole work",
    )
}

pub(crate) fn group_mode(mode: ParallelMode) -> Reason {
    Reason::new(
        GROUP_MODE,
        format!("linears of a group that serves {mode:?} do not overlap"),
        "use a Tp or FfnTp group, or leave the mode to the plan",
    )
}

pub(crate) fn scheme(scheme: QScheme) -> Reason {
    Reason::new(
        SCHEME,
        format!("activations quantized as {scheme:?} cannot travel chunk by chunk"),
        "quantize them as Int8PerToken or Fp8PerTensor, or leave the mode to the plan",
    )
}

pub(crate) fn transposed() -> Reason {
    Reason::new(
        TRANSPOSED,
        "with transpose_a a chunk of rows is no chunk of op(A)",
        "store the activations row by row, or leave the mode to the plan",
    )
}

pub(crate) fn three_dimensional() -> Reason {
    Reason::new(
        THREE_DIMENSIONAL,
        "activations of three dimensions do not overlap",
        "reshape them to [rows, columns], or leave the mode to the plan",
    )
}

pub(crate) fn capacity(field: &'static str, need: usize, have: usize) -> Reason {
    Reason::new(
        CAPACITY,
        format!("the call needs {need} bytes of {field}, the communicator has {have}"),
        format!("join with {field} of at least {need}, or call with fewer rows"),
    )
}

/// An entry of a queue holds no row.
pub(crate) fn narrow_entry(need: usize, have: usize) -> Reason {
    Reason::new(
        CAPACITY,
        format!("a row takes {need} bytes of an entry, the communicator's have {have}"),
        format!("join with fifo_entry_bytes of at least {need}, or leave it to the plan"),
    )
}

pub(crate) fn empty(call: &LinearCall) -> Reason {
    Reason::new(
        EMPTY,
        format!(
            "a product of {} x {} x {} has nothing to overlap",
            call.total_rows(),
            call.k,
            call.n
        ),
        "nothing to do",
    )
}

/// `source` is where the figure comes from, if that is to be told.
pub(crate) fn too_small(have: Least, least: Least, source: &str) -> Reason {
    let from = match source {
        "" => String::new(),
        source => format!(": {source}"),
    };
    Reason::new(
        TOO_SMALL,
        format!(
            "{have} are too small for overlap to pay, below {}{from}",
            least.count()
        ),
        "nothing to do; force a mode to overlap all the same",
    )
}

pub(crate) fn tuned_off() -> Reason {
    Reason::new(
        TUNED_OFF,
        "the tuning table prefers no overlap on this machine",
        "nothing to do; force a mode to overlap all the same",
    )
}

pub(crate) fn never_paid(source: &str) -> Reason {
    Reason::new(
        TUNED_OFF,
        format!("overlap paid at no size that was measured: {source}"),
        "nothing to do; force a mode to overlap all the same",
    )
}

pub(crate) fn crossovers(why: &str) -> Reason {
    Reason::new(
        CROSSOVERS,
        format!("the figures from which on overlap pays cannot be read: {why}"),
        "build with crates/plan/tables/crossovers.json as it is in the repository",
    )
}

pub(crate) fn all_reduces(why: &str) -> Reason {
    Reason::new(
        ALL_REDUCES,
        format!("the figures of which all-reduce is quickest cannot be read: {why}"),
        "build with crates/plan/tables/all_reduce.json as it is in the repository",
    )
}

pub(crate) fn experts(why: &str) -> Reason {
    Reason::new(
        EXPERTS,
        format!("the figures of how rows travel to experts cannot be read: {why}"),
        "build with crates/plan/tables/experts.json as it is in the repository",
    )
}

pub(crate) fn no_engine(mode: OverlapMode) -> Reason {
    Reason::new(
        NO_ENGINE,
        format!("this device cannot run {mode}"),
        "leave the mode to the plan",
    )
}

pub(crate) fn no_algorithm(algorithm: AllReduceAlgorithm) -> Reason {
    Reason::new(
        NO_ENGINE,
        format!("this device cannot run {algorithm:?}"),
        "leave the algorithm to the plan",
    )
}

/// Sums by NCCL, where there is none.
pub fn no_nccl() -> Reason {
    Reason::new(
        NO_ENGINE,
        "NCCL was not asked for when this communicator was joined, or its device has none",
        "join with nccl on GPUs, or leave the algorithm to the plan",
    )
}

pub(crate) fn nccl_output(input: DataType, output: DataType) -> Reason {
    Reason::new(
        DTYPE,
        format!("NCCL does not reduce {input} to {output}"),
        "take an output of the input's type, or another algorithm",
    )
}

pub(crate) fn no_norm() -> Reason {
    Reason::new(
        NO_ENGINE,
        "this device has no all-reduce with a norm",
        "call all_reduce, then add and normalize",
    )
}

pub(crate) fn no_all_reduce() -> Reason {
    Reason::new(
        NO_ENGINE,
        "this device has no all-reduce whose order of sums is Brigade's",
        "force Nccl, if its order will do",
    )
}

pub(crate) fn no_experts() -> Reason {
    Reason::new(
        NO_ENGINE,
        "this device has no expert-parallel dispatch",
        "use all_to_all",
    )
}

pub(crate) fn no_rows_pushed() -> Reason {
    Reason::new(
        NO_ENGINE,
        "this backend has no kernel that pushes rows to experts in a group like this",
        "leave the transport to the plan",
    )
}

pub(crate) fn rows_pushed(field: &str, got: usize, most: usize) -> Reason {
    Reason::new(
        ROWS,
        format!("{field}: {got}, where rows are pushed for at most {most}"),
        "leave the transport to the plan, or take one-sided",
    )
}

pub(crate) fn rows_countable(rows: usize) -> Reason {
    Reason::new(
        ROWS,
        format!(
            "a rank's experts have places for {rows} rows, and {} can be counted",
            i32::MAX
        ),
        "give max_tokens or experts less, or take dispatch and combine",
    )
}

pub(crate) fn gathered_ids() -> Reason {
    Reason::new(
        GATHERED_IDS,
        "rows that are pushed or queued bring their experts with them",
        "take one-sided or gather, or leave the transport to the plan",
    )
}

pub(crate) fn not_in_place() -> Reason {
    Reason::new(
        IN_PLACE,
        "rows stay in place where they lie by source, and go back as sums of ranks, with no weights beside them",
        "take by source, or another transport",
    )
}

pub(crate) fn rows_uncounted() -> Reason {
    Reason::new(
        ROWS,
        "rows are pushed where there is room for a known number of them",
        "give max_recv, or take by source",
    )
}

pub(crate) fn no_rows() -> Reason {
    Reason::new(
        NO_ENGINE,
        "this device has no all-to-all of rows that lists name",
        "gather the rows, and use all_to_all",
    )
}

pub(crate) fn all_reduce_bytes(have: usize, need: usize) -> Reason {
    Reason::new(
        SCRATCH,
        format!("all_reduce_bytes of {have} are too few to push a sum"),
        format!("join with all_reduce_bytes of at least {need}, or force an algorithm that pulls"),
    )
}

pub(crate) fn pieces(pieces: u16) -> Reason {
    Reason::new(
        PIECES,
        format!("chunks cannot be cut into {pieces} pieces"),
        format!("ask for 1 to {MAX_PIECES}"),
    )
}

pub(crate) fn pull_twin() -> Reason {
    Reason::new(
        PULL_TWIN,
        "pull fetches chunks that exist, and parts of sums are sent as they are made",
        "force the ring, or leave the mode to the plan",
    )
}

pub(crate) fn tiles(call: &LinearCall) -> Reason {
    Reason::new(
        TILES,
        format!(
            "tiles are of rows of f16 or bf16, or of int8 by token or fp8 by tensor with results of 16 bits, each row a multiple of 16 bytes, not {} to {} with K {} ({:?})",
            call.input, call.output, call.k, call.scheme
        ),
        "force chunked, or leave the mode to the plan",
    )
}

/// What is this rank's own is not for tiles: `what` names the parameter first.
pub fn tiles_operands(
    what: impl Into<Cow<'static, str>>,
    remedy: impl Into<Cow<'static, str>>,
) -> Reason {
    Reason::new(TILES_OPERANDS, what, remedy)
}

/// Tiles that wait would find no multiprocessors on this rank's GPU.
pub fn tiles_room(what: impl Into<Cow<'static, str>>) -> Reason {
    Reason::new(
        TILES_ROOM,
        what,
        "close communicators that are not needed, or leave the mode to the plan",
    )
}

pub(crate) fn scratch(topology: &Topology, need: usize) -> Reason {
    let (have, size) = (topology.config.scratch_bytes, topology.group.size);
    Reason::new(
        SCRATCH,
        format!("scratch_bytes of {have} are too few for {size} ranks"),
        format!("join with scratch_bytes of at least {need}"),
    )
}

pub(crate) fn scratch_row(have: usize, need: usize) -> Reason {
    Reason::new(
        SCRATCH,
        format!("scratch_bytes of {have} are too few for a row"),
        format!("join with scratch_bytes of at least {need}"),
    )
}

pub(crate) fn rows(e: &Error) -> Reason {
    Reason::new(ROWS, e.to_string(), "pass the same counts on every rank")
}

pub(crate) fn root(root: usize, size: usize) -> Reason {
    Reason::new(
        ROOT,
        format!("rank {root} cannot be the root of {size} ranks"),
        format!("name a rank below {size}"),
    )
}

const WHOLE: &str = "make a new group of those who are left";

/// An operation that needs all ranks.
pub fn absent_ranks(absent: Absent, operation: Operation) -> Reason {
    Reason::new(
        ABSENT_RANKS,
        format!("{operation} needs all ranks, and {absent} are absent"),
        WHOLE,
    )
}

/// A graph that was captured when other ranks were absent.
pub fn absent_since(absent: Absent) -> Reason {
    Reason::new(
        ABSENT_RANKS,
        format!("the graph was captured before the group went on without {absent}"),
        "capture it again",
    )
}

pub(crate) fn absent_ids(absent: Absent) -> Reason {
    Reason::new(
        ABSENT_RANKS,
        format!("experts of all ranks' tokens are not known where {absent} are absent"),
        "dispatch by the experts of own tokens",
    )
}

pub(crate) fn absent_by(transport: Transport, absent: Absent) -> Reason {
    Reason::new(
        ABSENT_RANKS,
        format!("{transport:?} needs all ranks, and {absent} are absent"),
        "leave the transport to the plan, or make a new group of those who are left",
    )
}

pub(crate) fn absent_alive(alive: Absent) -> Reason {
    Reason::new(
        ABSENT_ALIVE,
        format!(
            "ranks {alive} are absent and may live, and would write where others' rows come back"
        ),
        "end their processes and shrink again, or use dispatch and combine",
    )
}

pub(crate) fn unknown(operation: Operation) -> Reason {
    Reason::new(
        UNKNOWN,
        format!("there is no plan for {operation}"),
        "use a version of brigade-plan as new as brigade-device",
    )
}

/// Sums are of f32, f16 or bf16, and stay in their type or become f32.
pub(crate) fn check_sum(input: DataType, output: DataType) -> Result<(), Reason> {
    let float = matches!(input, DataType::F32 | DataType::F16 | DataType::BF16);
    if float && (output == input || output == DataType::F32) {
        return Ok(());
    }
    Err(Reason::new(
        DTYPE,
        format!("{input} is not reduced to {output}"),
        "reduce f32, f16 or bf16, to the same type or to f32",
    ))
}
