//! Tuning numbers. All ranks must have the same: they vote on [`Table::digest`].

use crate::{
    Entries,
    crossover::{Crossovers, Figures, Gpus, Least, Overlapped},
    transports::{self, ByRows},
    tuned::{self, ByType},
};
use brigade_device::{OverlapMode, Reason};
use std::borrow::Cow;

/// Where one way of doing things overtakes another, as measured.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Table {
    /// Which all-reduce, and how it is launched.
    pub all_reduce: ByType,
    /// Which copies and reduce-scatters are pushed.
    pub copies: Copies,
    /// How rows travel to experts and back.
    pub experts: ByRows,
    /// From where on gather-linear overlaps; chunks are of rows.
    pub gather: Crossovers,
    /// From where on the twin overlaps; chunks are parts of sums.
    pub scatter: Crossovers,
    /// The mode that overlaps best where nothing is forced. The twin takes the ring in place of pull. Where tiles are
    /// not for a call's rows, they go in one piece.
    pub overlap: OverlapMode,
}

/// Which all-gathers, broadcasts and reduce-scatters are pushed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Copies {
    /// Most that is pushed at once, in bytes that arrive at a rank; `None` if nothing is pushed. It must fit the buffers, too.
    pub push_max_bytes: Option<usize>,
    /// Whether what is more is pushed in pieces, where these are no smaller than those of the scratch memory.
    pub in_pieces: bool,
    /// Where the figure is from, for people. Empty for the host, whose figure is a rule.
    pub source: Cow<'static, str>,
}

impl Copies {
    /// Those of GPUs: about what fits the buffers of a usual configuration. There a push costs one launch and no wait for anybody before
    /// it. docs/results/all-gather.h200x4.json and all-gather-large.h100x4.json and their like have it ahead of NCCL up to 16 MiB; no file has it beside a pull.
    const UNTUNED: Self = Self {
        push_max_bytes: Some(8 << 20),
        in_pieces: true,
        source: Cow::Borrowed("untuned: about what fits usual buffers at once"),
    };
}

impl Table {
    /// For ranks that are threads or processes of one host: a chunk is worth overlapping once copying it takes longer
    /// than waking a thread. Nothing is pushed: no figure says that it pays.
    pub fn host() -> Self {
        Self {
            all_reduce: ByType::all(tuned::Figures {
                one_shot_max_bytes: 64 << 10,
                pull_from_bytes: Some(0),
                max_blocks: 1,
                threads: Vec::new(),
                nccl_from_bytes: None,
                source: "".into(),
            }),
            copies: Copies {
                push_max_bytes: None,
                in_pieces: false,
                source: "".into(),
            },
            experts: ByRows::all(transports::Figures::nothing_pushed()),
            gather: Crossovers::all(Least::ChunkBytes(16 << 10)),
            scatter: Crossovers::all(Least::ChunkBytes(16 << 10)),
            overlap: OverlapMode::Ring,
        }
    }

    /// For GPUs of one host: own rows are pushed to all peers by copy engines. A small product
    /// loses more by overlap than it hides; from where on depends on the GPUs, and is read from the [figures](crate::crossover)
    /// of this build, as are [which all-reduce](crate::tuned) is quickest and [how rows travel](crate::transports) to experts. Entries of
    /// the user's count before those of this build for the same GPUs.
    ///
    /// # Errors
    /// [`CROSSOVERS`](crate::reason::CROSSOVERS), [`ALL_REDUCES`](crate::reason::ALL_REDUCES) or
    /// [`EXPERTS`](crate::reason::EXPERTS) if they cannot be read.
    pub fn cuda(gpus: &Gpus, own: &Entries) -> Result<Self, Reason> {
        let figures = Figures::embedded()?.with(&own.crossovers);
        Ok(Self {
            all_reduce: tuned::File::embedded()?.with(&own.all_reduces).of(gpus),
            copies: Copies::UNTUNED,
            experts: transports::File::embedded()?.with(&own.experts).of(gpus),
            gather: figures.of(gpus, Overlapped::GatherLinear),
            scatter: figures.of(gpus, Overlapped::ReduceScatterLinear),
            overlap: OverlapMode::Tiles,
        })
    }

    /// A number that differs, with overwhelming likelihood, between tables that decide differently, and is the same for
    /// equal ones on every machine and build (FNV-1a of the figures; where they come from does not count).
    pub fn digest(&self) -> u64 {
        let Self {
            all_reduce,
            copies,
            experts,
            gather,
            scatter,
            overlap,
        } = self;
        let overlap = match overlap {
            OverlapMode::Off => 0,
            OverlapMode::Ring => 1,
            OverlapMode::Pull => 2,
            OverlapMode::Tiles => 3,
            OverlapMode::Chunked { pieces } => 1 << 16 | u64::from(*pieces),
        };
        let crossovers = [gather, scatter]
            .into_iter()
            .flat_map(Crossovers::each)
            .flat_map(|(_, c)| Least::numbers(c.least));
        all_reduce
            .numbers()
            .chain([overlap])
            .chain([copies.push_max_bytes.map_or(u64::MAX, |b| b as u64)])
            .chain([copies.in_pieces.into()])
            .chain(experts.numbers())
            .chain(crossovers)
            .flat_map(u64::to_le_bytes)
            .fold(0xcbf2_9ce4_8422_2325, |h, b| {
                (h ^ u64::from(b)).wrapping_mul(0x100_0000_01b3)
            })
    }
}
