//! Errors are values: one enum, `Clone + Send + Sync`; and the record that a wait leaves behind when it gives up.

use crate::Reason;
use std::{fmt, sync::Arc};

/// Why a communicator stopped.
#[repr(u32)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum FaultKind {
    /// A peer did not get there before the deadline.
    Timeout = 1,
    /// A peer made another call than this rank: other operation, shape, dtype or choice.
    Mismatch = 2,
    /// Somebody called `abort`; or a call failed on one rank alone, of NCCL's with its code in [`seen`](FaultRecord::seen).
    Aborted = 3,
    /// A peer's process or thread is gone.
    PeerLost = 4,
    /// More data arrived than the caller made room for.
    Overflow = 5,
}

impl FaultKind {
    /// The kind with this number, if there is one.
    pub const fn from_code(code: u32) -> Option<Self> {
        Some(match code {
            1 => Self::Timeout,
            2 => Self::Mismatch,
            3 => Self::Aborted,
            4 => Self::PeerLost,
            5 => Self::Overflow,
            _ => return None,
        })
    }
}

/// What a wait that gave up leaves behind. Fixed size: kernels write the same 64 bytes, aligned to 64; a copy here needs
/// no such alignment, which would double the size of every [`Result`].
///
/// The rank that gives up first writes it to every rank of the group, so that all return the same record.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FaultRecord {
    /// Why.
    pub kind: FaultKind,
    /// Which operation, as [`Operation`](crate::Operation) numbers it.
    pub operation: u32,
    /// The rank that gave up.
    pub rank: u32,
    /// The rank it waited for, or that is to blame.
    pub peer: u32,
    /// Chunk, channel or region it waited for.
    pub slot: u32,
    /// Generation of the communicator, counted by `reset`.
    pub generation: u32,
    /// Flag it wanted to see.
    pub expected: u64,
    /// Flag it saw; of NCCL that failed, its code.
    pub seen: u64,
    /// How long it waited, in nanoseconds.
    pub waited_ns: u64,
    /// Number of the call on this communicator, from 1; for an abort, of the last one that was completed.
    pub call: u64,
    /// Set by the writer that claimed the record.
    pub claimed: u32,
    /// 1 if ranks are those of all machines, whose groups tell each other what stopped one of them; otherwise 0, and they are those
    /// of the group.
    pub across: u32,
}

const _: () = assert!(size_of::<FaultRecord>() == 64);

impl FaultRecord {
    /// The record as eight words, for memory that is made of them.
    pub const fn to_words(self) -> [u64; 8] {
        const fn pair(low: u32, high: u32) -> u64 {
            low as u64 | (high as u64) << 32
        }
        [
            pair(self.kind as u32, self.operation),
            pair(self.rank, self.peer),
            pair(self.slot, self.generation),
            self.expected,
            self.seen,
            self.waited_ns,
            self.call,
            pair(self.claimed, self.across),
        ]
    }

    /// The inverse of [`to_words`](Self::to_words); `None` if the kind is not one.
    pub const fn from_words(w: [u64; 8]) -> Option<Self> {
        let Some(kind) = FaultKind::from_code(w[0] as u32) else {
            return None;
        };
        Some(Self {
            kind,
            operation: (w[0] >> 32) as u32,
            rank: w[1] as u32,
            peer: (w[1] >> 32) as u32,
            slot: w[2] as u32,
            generation: (w[2] >> 32) as u32,
            expected: w[3],
            seen: w[4],
            waited_ns: w[5],
            call: w[6],
            claimed: w[7] as u32,
            across: (w[7] >> 32) as u32,
        })
    }
}

impl fmt::Display for FaultRecord {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let operation = crate::Operation::from_code(self.operation)
            .map_or_else(|| self.operation.to_string(), |o| o.to_string());
        let what = match self.kind {
            FaultKind::Timeout => "timed out waiting for",
            FaultKind::Mismatch => "made another call than",
            FaultKind::Aborted => "was aborted by",
            FaultKind::PeerLost => "lost",
            FaultKind::Overflow => "got more data than there is room for from",
        };
        write!(
            f,
            "rank {} {what} rank {} in call {} ({operation}, slot {}, generation {}) after {:.3} ms: expected flag {:#018x}, saw {:#018x}",
            self.rank,
            self.peer,
            self.call,
            self.slot,
            self.generation,
            self.waited_ns as f64 / 1e6,
            self.expected,
            self.seen
        )
    }
}

/// Everything that can go wrong.
#[derive(Clone, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// The caller passed something that cannot be right.
    #[error("{field}: got {got}, wanted {want}")]
    Invalid {
        /// Which parameter.
        field: &'static str,
        /// What it was.
        got: String,
        /// What it should have been.
        want: String,
    },
    /// It may be right, but this device, plan or configuration does not do it.
    #[error(transparent)]
    Unsupported(#[from] Reason),
    /// Another lease is live, slots are lent, or a buffer is in use.
    #[error("{0} is in use by another call")]
    Busy(&'static str),
    /// The communicator stopped; `reset` makes it usable again.
    #[error("communicator stopped: {0}")]
    Fault(FaultRecord),
    /// The communicator was closed.
    #[error("communicator closed")]
    Closed,
    /// The ranks of the group did not come together in time, or did not agree, outside a communicator's calls.
    #[error("{step}: {what}")]
    Group {
        /// What the ranks were doing.
        step: &'static str,
        /// Who was missing, or who said what.
        what: String,
    },
    /// A library or the system refused.
    #[error("{call}: code {code}")]
    Backend {
        /// The call that failed.
        call: &'static str,
        /// What it returned.
        code: i64,
        /// The error behind it, where there is one.
        source: Option<Arc<dyn std::error::Error + Send + Sync>>,
    },
}

impl Error {
    /// [`Error::Invalid`] from anything that prints.
    pub fn invalid(field: &'static str, got: impl ToString, want: impl ToString) -> Self {
        Self::Invalid {
            field,
            got: got.to_string(),
            want: want.to_string(),
        }
    }

    /// [`Error::Backend`] for memory of the host that there is not; its code is how many bytes were asked for.
    pub fn no_memory(bytes: usize) -> Self {
        Self::Backend {
            call: "allocate",
            code: i64::try_from(bytes).unwrap_or(i64::MAX),
            source: None,
        }
    }

    /// The fault record, if this is a fault.
    pub fn fault(&self) -> Option<&FaultRecord> {
        match self {
            Self::Fault(f) => Some(f),
            _ => None,
        }
    }
}

/// Result with Brigade's error.
pub type Result<T, E = Error> = std::result::Result<T, E>;
