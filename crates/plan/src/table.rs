//! Tuning numbers. All ranks must have the same: they vote on [`Table::digest`].

use crate::{
    crossover::{Crossovers, Figures, Gpus, Overlapped},
    tuned::{self, ByType},
};
use brigade_device::{OverlapMode, Reason};

/// Where one way of doing things overtakes another, as measured.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Table {
    /// Which all-reduce, and how it is launched.
    pub all_reduce: ByType,
    /// Largest copy or reduce-scatter, in bytes that arrive at a rank, that is pushed; `None` if none is. It must fit the buffers at
    /// once, too.
    pub push_max_bytes: Option<usize>,
    /// Most bytes that may come to a rank in a dispatch or combine that is pushed, where a budget of multiprocessors does not keep it
    /// from all its blocks, and with fewer blocks that part of it; `None` if none is.
    pub rows_push_max_bytes: Option<usize>,
    /// How many rows of a sender go through a half of a dispatch at a time where more could: while they are taken, the next are on their
    /// way. `None` if as many as fit.
    pub rows_at_a_time: Option<usize>,
    /// Smallest mean chunk, in bytes of rows, for which gather-linear overlaps.
    pub gather: Crossovers,
    /// Smallest mean part, in bytes of sums, for which the twin overlaps.
    pub scatter: Crossovers,
    /// The mode that overlaps best where nothing is forced. The twin takes the ring in place of pull, and one piece in place of
    /// tiles.
    pub overlap: OverlapMode,
}

/// What fits the buffers of a usual configuration: there a push costs one launch and no wait for anybody before it.
const PUSH_MAX_BYTES: usize = 8 << 20;

/// Where rows were quicker pushed than one-sided on two and four GPUs, in docs/results/moe.h200x4.json and its like: up to the most
/// that was measured.
const ROWS_PUSH_MAX_BYTES: usize = 64 << 20;

/// Of what was tried on two GPUs, the quickest (docs/src/experts.md).
const ROWS_AT_A_TIME: usize = 1024;

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
                source: "".into(),
            }),
            push_max_bytes: None,
            rows_push_max_bytes: None,
            rows_at_a_time: None,
            gather: Crossovers::all(16 << 10),
            scatter: Crossovers::all(16 << 10),
            overlap: OverlapMode::Ring,
        }
    }

    /// For GPUs of one host: own rows are pushed to all peers by copy engines. Below some megabytes a product of chunks
    /// loses more than the gather costs; from where on depends on the GPUs, and is read from the [figures](crate::crossover)
    /// of this build, as is [which all-reduce](crate::tuned) is quickest.
    ///
    /// # Errors
    /// [`CROSSOVERS`](crate::reason::CROSSOVERS) or [`ALL_REDUCES`](crate::reason::ALL_REDUCES) if they cannot be read.
    pub fn cuda(gpus: &Gpus) -> Result<Self, Reason> {
        let figures = Figures::embedded()?;
        Ok(Self {
            all_reduce: tuned::File::embedded()?.of(gpus),
            push_max_bytes: Some(PUSH_MAX_BYTES),
            rows_push_max_bytes: Some(ROWS_PUSH_MAX_BYTES),
            rows_at_a_time: Some(ROWS_AT_A_TIME),
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
            push_max_bytes,
            rows_push_max_bytes,
            rows_at_a_time,
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
            .map(|(_, c)| c.min_chunk_bytes.map_or(u64::MAX, |bytes| bytes as u64));
        all_reduce
            .numbers()
            .chain([overlap])
            .chain(
                [push_max_bytes, rows_push_max_bytes, rows_at_a_time]
                    .map(|b| b.map_or(u64::MAX, |b| b as u64)),
            )
            .chain(crossovers)
            .flat_map(u64::to_le_bytes)
            .fold(0xcbf2_9ce4_8422_2325, |h, b| {
                (h ^ u64::from(b)).wrapping_mul(0x100_0000_01b3)
            })
    }
}
