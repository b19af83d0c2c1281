//! Calls, plans and reasons are data and live here; the functions that choose them live in `brigade-plan`.

use crate::{
    AllToAllRowsCall, CombineCall, DataType, DispatchCall, HierarchicalCall, HierarchicalOperation,
    LowLatencyCombineCall, LowLatencyDispatchCall, QScheme, ReduceOp, Transport,
};
use smallvec::SmallVec;
use std::{
    borrow::Cow,
    fmt,
    hash::{Hash, Hasher},
};

/// Why something is not done the way it was asked for, and what to do about it.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{what}; {remedy}")]
pub struct Reason {
    /// Short and stable, for programs.
    pub code: &'static str,
    /// What is the matter, for people.
    pub what: Cow<'static, str>,
    /// What would help.
    pub remedy: Cow<'static, str>,
}

impl Reason {
    /// A reason from its three parts.
    pub fn new(
        code: &'static str,
        what: impl Into<Cow<'static, str>>,
        remedy: impl Into<Cow<'static, str>>,
    ) -> Self {
        Self {
            code,
            what: what.into(),
            remedy: remedy.into(),
        }
    }
}

/// One number per rank, inline up to eight ranks.
pub type PerRank = SmallVec<[usize; 8]>;

/// Operations, as fault records and traces name them.
#[repr(u32)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Operation {
    /// All ranks meet.
    Barrier = 1,
    /// Every rank gets the reduction of all inputs.
    AllReduce = 2,
    /// Every rank gets all rows.
    AllGather = 3,
    /// Every rank gets its rows of the reduction.
    ReduceScatter = 4,
    /// Every rank gets the root's data.
    Broadcast = 5,
    /// Every rank sends rows to every rank.
    AllToAll = 6,
    /// One rank to another.
    SendRecv = 7,
    /// Gather rows, then multiply.
    GatherLinear = 8,
    /// Multiply, then scatter the sums.
    LinearReduceScatter = 9,
    /// Registered regions.
    UserBuffers = 10,
    /// A new generation after a fault.
    Reset = 11,
    /// The end.
    Close = 12,
    /// Every rank gets the sum, with a residual added and rows normalized.
    AllReduceNorm = 13,
    /// Every rank gets the rows whose experts it has.
    Dispatch = 14,
    /// Every rank gets back what became of its rows.
    Combine = 15,
    /// Every rank sends rows that it names to every rank.
    AllToAllRows = 16,
    /// Every rank gets the rows whose experts it has, in two halves.
    LowLatencyDispatch = 17,
    /// Every rank gets back what became of them, in two halves.
    LowLatencyCombine = 18,
    /// Every rank of all machines gets the reduction of all inputs.
    HierarchicalAllReduce = 19,
    /// Every rank of all machines gets its rows of the reduction.
    HierarchicalReduceScatter = 20,
    /// Every rank of all machines gets all rows.
    HierarchicalAllGather = 21,
}

impl Operation {
    const ALL: [Self; 21] = [
        Self::Barrier,
        Self::AllReduce,
        Self::AllGather,
        Self::ReduceScatter,
        Self::Broadcast,
        Self::AllToAll,
        Self::SendRecv,
        Self::GatherLinear,
        Self::LinearReduceScatter,
        Self::UserBuffers,
        Self::Reset,
        Self::Close,
        Self::AllReduceNorm,
        Self::Dispatch,
        Self::Combine,
        Self::AllToAllRows,
        Self::LowLatencyDispatch,
        Self::LowLatencyCombine,
        Self::HierarchicalAllReduce,
        Self::HierarchicalReduceScatter,
        Self::HierarchicalAllGather,
    ];

    /// The operation with this number.
    pub fn from_code(code: u32) -> Option<Self> {
        Self::ALL.into_iter().find(|&o| o as u32 == code)
    }

    /// Its name in traces and tables.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Barrier => "barrier",
            Self::AllReduce => "all_reduce",
            Self::AllGather => "all_gather",
            Self::ReduceScatter => "reduce_scatter",
            Self::Broadcast => "broadcast",
            Self::AllToAll => "all_to_all",
            Self::SendRecv => "send_recv",
            Self::GatherLinear => "all_gather_lora_linear",
            Self::LinearReduceScatter => "lora_linear_reduce_scatter",
            Self::UserBuffers => "user_buffers",
            Self::Reset => "reset",
            Self::Close => "close",
            Self::AllReduceNorm => "all_reduce_norm",
            Self::Dispatch => "dispatch",
            Self::Combine => "combine",
            Self::AllToAllRows => "all_to_all_rows",
            Self::LowLatencyDispatch => "low_latency_dispatch",
            Self::LowLatencyCombine => "low_latency_combine",
            Self::HierarchicalAllReduce => "hierarchical_all_reduce",
            Self::HierarchicalReduceScatter => "hierarchical_reduce_scatter",
            Self::HierarchicalAllGather => "hierarchical_all_gather",
        }
    }
}

impl fmt::Display for Operation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// Everything that a plan may depend on, and everything that a call's signature covers: the same struct for both, so
/// that ranks cannot choose differently without noticing. Nothing that may differ between ranks (address, alignment,
/// the local share of a ragged dimension) may enter.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Call {
    /// See [`Operation::Barrier`].
    Barrier,
    /// See [`Operation::AllReduce`].
    AllReduce {
        /// Elements of the input.
        elements: usize,
        /// Type of the input.
        dtype: DataType,
        /// Type of the result.
        output: DataType,
        /// How values are combined.
        op: ReduceOp,
        /// Forced algorithm.
        choice: Option<AllReduceAlgorithm>,
    },
    /// See [`Operation::AllGather`].
    AllGather {
        /// Rows that each rank brings.
        rows: PerRank,
        /// Elements in a row.
        row_len: usize,
        /// Their type.
        dtype: DataType,
    },
    /// See [`Operation::ReduceScatter`].
    ReduceScatter {
        /// Rows that each rank gets.
        rows: PerRank,
        /// Elements in a row.
        row_len: usize,
        /// Type of the input.
        dtype: DataType,
        /// Type of the result.
        output: DataType,
        /// How values are combined.
        op: ReduceOp,
    },
    /// See [`Operation::Broadcast`].
    Broadcast {
        /// Elements.
        elements: usize,
        /// Their type.
        dtype: DataType,
        /// Who has the data.
        root: usize,
    },
    /// See [`Operation::AllToAll`]. Row counts are between pairs, and are checked where they meet.
    AllToAll {
        /// Elements in a row.
        row_len: usize,
        /// Their type.
        dtype: DataType,
    },
    /// See [`Operation::GatherLinear`].
    GatherLinear(LinearCall),
    /// See [`Operation::LinearReduceScatter`].
    LinearReduceScatter(LinearCall),
    /// A region registered on all ranks.
    Register {
        /// Its size on every rank.
        bytes: usize,
    },
    /// A region given back on all ranks.
    Deregister {
        /// Its number.
        region: u16,
    },
    /// The end.
    Close,
    /// See [`Operation::AllReduceNorm`].
    AllReduceNorm {
        /// Rows of the input.
        rows: usize,
        /// Elements in a row.
        hidden: usize,
        /// Their type.
        dtype: DataType,
        /// How normalized rows are quantized.
        scheme: QScheme,
        /// Bits of what is added to the mean square, an f32.
        eps_bits: u32,
        /// Bits of the given scale, an f32, if the scheme has one.
        scale_bits: Option<u32>,
        /// Forced algorithm.
        choice: Option<AllReduceAlgorithm>,
    },
    /// See [`Operation::Dispatch`]. Tokens of a rank, and who sends how many to whom, are found out as rows come.
    Dispatch(DispatchCall),
    /// See [`Operation::Combine`].
    Combine(CombineCall),
    /// See [`Operation::AllToAllRows`]. Which rows go where is found out as they come, and how many, where they meet.
    AllToAllRows(AllToAllRowsCall),
    /// See [`Operation::LowLatencyDispatch`].
    LowLatencyDispatch(LowLatencyDispatchCall),
    /// See [`Operation::LowLatencyCombine`].
    LowLatencyCombine(LowLatencyCombineCall),
    /// A collective across machines: every collective inside a machine and along a rail that is part of it bears its signature.
    Hierarchical(HierarchicalCall),
}

/// The signed part of a linear that overlaps with a collective.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct LinearCall {
    /// Rows of the chunk that each rank owns.
    pub rows: PerRank,
    /// Inner dimension: for gather-linear that of every rank, for its twin the sum over all ranks.
    pub k: usize,
    /// Outer dimension: for gather-linear the sum over all ranks, for its twin that of every rank.
    pub n: usize,
    /// Type of the activations.
    pub input: DataType,
    /// Type of the result.
    pub output: DataType,
    /// How the activations are quantized.
    pub scheme: QScheme,
    /// Whether adapters take part.
    pub lora: bool,
    /// Whether op(A) is the transpose.
    pub transpose_a: bool,
    /// The middle dimension of activations that have three.
    pub inner: Option<usize>,
    /// Forced mode.
    pub choice: Option<OverlapMode>,
}

impl LinearCall {
    /// Rows over all ranks.
    pub fn total_rows(&self) -> usize {
        self.rows.iter().sum()
    }
}

impl Call {
    /// Which operation it is.
    pub const fn operation(&self) -> Operation {
        match self {
            Self::Barrier => Operation::Barrier,
            Self::AllReduce { .. } => Operation::AllReduce,
            Self::AllGather { .. } => Operation::AllGather,
            Self::ReduceScatter { .. } => Operation::ReduceScatter,
            Self::Broadcast { .. } => Operation::Broadcast,
            Self::AllToAll { .. } => Operation::AllToAll,
            Self::GatherLinear(_) => Operation::GatherLinear,
            Self::LinearReduceScatter(_) => Operation::LinearReduceScatter,
            Self::Register { .. } | Self::Deregister { .. } => Operation::UserBuffers,
            Self::Close => Operation::Close,
            Self::AllReduceNorm { .. } => Operation::AllReduceNorm,
            Self::Dispatch(_) => Operation::Dispatch,
            Self::Combine(_) => Operation::Combine,
            Self::AllToAllRows(_) => Operation::AllToAllRows,
            Self::LowLatencyDispatch(_) => Operation::LowLatencyDispatch,
            Self::LowLatencyCombine(_) => Operation::LowLatencyCombine,
            Self::Hierarchical(c) => match c.operation {
                HierarchicalOperation::AllReduce { .. } => Operation::HierarchicalAllReduce,
                HierarchicalOperation::ReduceScatter { .. } => Operation::HierarchicalReduceScatter,
                HierarchicalOperation::AllGather { .. } => Operation::HierarchicalAllGather,
            },
        }
    }

    /// 24 bits that differ, with overwhelming likelihood, between different calls. Never 0.
    pub fn signature(&self) -> u32 {
        signature_of(self)
    }
}

/// What a call, or what is made of one, signs with.
pub(crate) fn signature_of(what: &impl Hash) -> u32 {
    let mut hasher = Fnv(0xcbf2_9ce4_8422_2325);
    what.hash(&mut hasher);
    let h = hasher.finish();
    (((h >> 40) ^ (h >> 16) ^ h) as u32 & 0xFF_FFFF).max(1)
}

/// FNV-1a (Fowler, Noll, Vo): the same on every rank and build, which std's hasher does not promise.
struct Fnv(u64);

impl Hasher for Fnv {
    fn finish(&self) -> u64 {
        self.0
    }
    fn write(&mut self, bytes: &[u8]) {
        for &b in bytes {
            self.0 = (self.0 ^ u64::from(b)).wrapping_mul(0x100_0000_01b3);
        }
    }
}

/// How an all-reduce is done.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum AllReduceAlgorithm {
    /// Every rank pushes its input to every rank; data is its own flag.
    OneShotPush,
    /// Every rank reads every rank's input after a barrier.
    OneShotPull,
    /// Reduce-scatter, then all-gather, each by reading after a barrier.
    TwoShot,
    /// Every rank pushes each part of its input to the rank that reduces it, which pushes the result to every rank; data is
    /// its own flag, both times.
    TwoShotPush,
    /// NVIDIA's library, where the communicator was [joined with it](crate::CommConfig::nccl). Its order of sums is its own, so a plan chooses
    /// it only where [that is allowed](crate::NcclUse::Quicker).
    Nccl,
}

/// How a linear and its collective share the time.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum OverlapMode {
    /// One after the other.
    Off,
    /// The rows of every rank in so many pieces; a piece travels while the one before it is multiplied.
    Chunked {
        /// At least 1.
        pieces: u16,
    },
    /// Chunks go round from neighbour to neighbour, and are multiplied as they pass.
    Ring,
    /// Every rank fetches chunks from their owners.
    Pull,
    /// All rows are one product. Its tiles wait for their rows, which every rank pushes to all; in the twin, tiles for others end in memory
    /// of this rank, from where they are sent, and own ones with the sum of all ranks'. A rank of which that product does not take what is its own (weight, C, activation, adapters, where
    /// they lie), or whose GPU has no room for it, is refused where this mode is forced; otherwise it multiplies chunk by chunk, in as many
    /// pieces as the others send, and the plan that the call gives says so.
    Tiles,
}

impl fmt::Display for OverlapMode {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Off => f.write_str("off"),
            Self::Chunked { pieces } => write!(f, "chunked({pieces})"),
            Self::Ring => f.write_str("ring"),
            Self::Pull => f.write_str("pull"),
            Self::Tiles => f.write_str("tiles"),
        }
    }
}

/// Which bits a sum promises: equal orders give equal bits.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum SumOrder {
    /// Rank 0 + rank 1 + ... in f32, one rounding at the end.
    Flat,
    /// [`Flat`](Self::Flat) inside machines of so many ranks, and then flat over what machines have, in machine order: the
    /// operation is done twice, with two roundings to the type of the result. So an average is the average of the machines'
    /// averages, and sums that are not to be rounded on their way between machines are those whose result is f32.
    ByMachine {
        /// Ranks in a machine.
        ranks: u16,
    },
    /// Somebody else's.
    Foreign,
}

/// What will be done, in full.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Plan {
    /// Data moves as it is.
    Copy {
        /// Elements of one rank in each piece that is pushed, or passes through the scratch memory.
        piece_elements: usize,
        /// Pieces, one after the other.
        pieces: usize,
        /// For GPUs, where it is pushed; otherwise peers fetch it.
        pushed: Option<Launch>,
    },
    /// For [`Call::AllReduce`] and [`Call::AllReduceNorm`].
    AllReduce {
        /// How.
        algorithm: AllReduceAlgorithm,
        /// Which bits.
        order: SumOrder,
        /// Elements in each piece that passes through the scratch memory: whole rows, where rows are normalized.
        piece_elements: usize,
        /// For GPUs.
        launch: Launch,
    },
    /// For [`Call::ReduceScatter`].
    ReduceScatter {
        /// Which bits.
        order: SumOrder,
        /// Elements of one rank in each piece that is pushed, or passes through the scratch memory.
        piece_elements: usize,
        /// Pieces, one after the other.
        pieces: usize,
        /// For GPUs, where it is pushed; otherwise peers fetch it.
        pushed: Option<Launch>,
    },
    /// For [`Call::GatherLinear`].
    GatherLinear(OverlapPlan),
    /// For [`Call::LinearReduceScatter`].
    LinearReduceScatter(OverlapPlan),
    /// For [`Call::Dispatch`] and [`Call::Combine`].
    Experts {
        /// How rows travel.
        transport: Transport,
        /// Most rows from one rank to another that go at a time.
        piece_rows: usize,
        /// Pieces, one after the other.
        pieces: usize,
        /// For GPUs.
        launch: Launch,
    },
    /// For [`Call::LowLatencyDispatch`] and [`Call::LowLatencyCombine`]: every row has its place at its receiver.
    LowLatency {
        /// Bytes of the places at each rank.
        bytes: usize,
    },
    /// For [`Call::AllToAllRows`]: through queues.
    Queued {
        /// Bytes of an entry.
        entry_bytes: usize,
        /// Most rows in one.
        entry_rows: usize,
        /// Entries of a queue.
        depth: u32,
        /// Queues from every rank to every other.
        channels: u16,
    },
}

/// A linear and its collective, step by step, for one rank. What is asked for beforehand is common to all ranks; what a call gives is what this
/// rank did, which differs from that in [`OverlapMode::Tiles`] alone.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct OverlapPlan {
    /// How they share the time.
    pub mode: OverlapMode,
    /// First row of every rank's chunk, and at the end the number of all rows.
    pub offsets: PerRank,
    /// Chunks in the order in which this rank multiplies them.
    pub order: SmallVec<[u16; 8]>,
    /// Which bits the sums of the twin promise.
    pub sums: SumOrder,
    /// Why another mode than the one asked for, or than the usual one, was taken.
    pub instead_of: Option<Reason>,
}

impl OverlapPlan {
    /// Rows of chunk `c`, as a range of the gathered rows.
    pub fn chunk(&self, c: usize) -> std::ops::Range<usize> {
        self.offsets[c]..self.offsets[c + 1]
    }

    /// Pieces that every chunk is cut into.
    pub fn pieces(&self) -> usize {
        match self.mode {
            OverlapMode::Chunked { pieces } => usize::from(pieces),
            _ => 1,
        }
    }
}

impl fmt::Display for Plan {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Copy {
                pushed: Some(_),
                pieces,
                ..
            } => write!(f, "copy, {}", Pushed(*pieces)),
            Self::Copy { pieces, .. } => write!(f, "copy in {pieces} pieces"),
            Self::AllReduce {
                algorithm, order, ..
            } => write!(f, "{algorithm:?}, {order:?}"),
            Self::Experts {
                transport, pieces, ..
            } => write!(f, "{transport:?} in {pieces} pieces"),
            Self::LowLatency { bytes } => write!(f, "{bytes} bytes of places at each rank"),
            Self::Queued {
                entry_bytes,
                entry_rows,
                depth,
                channels,
            } => {
                let s = |n| if n == 1 { "" } else { "s" };
                let queues = format!("{channels} queue{}", s(usize::from(*channels)));
                let entries = if *depth == 1 { "entry" } else { "entries" };
                let rows = format!("{entry_rows} row{}", s(*entry_rows));
                write!(
                    f,
                    "{queues} of {depth} {entries} of {entry_bytes} bytes, up to {rows}"
                )
            }
            Self::ReduceScatter {
                order,
                pushed: Some(_),
                pieces,
                ..
            } => write!(f, "{order:?}, {}", Pushed(*pieces)),
            Self::ReduceScatter { order, .. } => write!(f, "{order:?}"),
            Self::GatherLinear(p) | Self::LinearReduceScatter(p) => {
                write!(f, "{}", p.mode)?;
                match &p.instead_of {
                    Some(reason) => write!(f, " ({})", reason.what),
                    None => Ok(()),
                }
            }
        }
    }
}

/// Pushed in so many pieces.
struct Pushed(usize);

impl fmt::Display for Pushed {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.0 {
            ..=1 => f.write_str("pushed at once"),
            pieces => write!(f, "pushed in {pieces} pieces"),
        }
    }
}

/// The part of a plan that only a GPU reads.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Launch {
    /// Thread blocks.
    pub blocks: u16,
    /// Threads in a block.
    pub threads: u16,
}
