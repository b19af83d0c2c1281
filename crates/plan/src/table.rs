//! Tuning numbers. All ranks must have the same: they vote on [`Table::digest`].

use brigade_device::OverlapMode;

/// Where one way of doing things overtakes another, as measured.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Table {
    /// Largest input, in bytes, for which an all-reduce takes one shot.
    pub one_shot_max_bytes: usize,
    /// Smallest mean chunk, in bytes of rows, for which gather-linear overlaps.
    pub gather_min_chunk_bytes: usize,
    /// Smallest mean part, in bytes of sums, for which the twin overlaps.
    pub scatter_min_chunk_bytes: usize,
    /// The mode that overlaps best where nothing is forced. The twin takes the ring in place of pull.
    pub overlap: OverlapMode,
}

impl Table {
    /// For ranks that are threads or processes of one host: a chunk is worth overlapping once copying it takes longer
    /// than waking a thread.
    pub const fn host() -> Self {
        Self {
            one_shot_max_bytes: 64 << 10,
            gather_min_chunk_bytes: 16 << 10,
            scatter_min_chunk_bytes: 16 << 10,
            overlap: OverlapMode::Ring,
        }
    }

    /// For GPUs of one host with a switch between them: own rows are pushed to all peers by copy engines. Below some
    /// megabytes a product of chunks loses more than the gather costs.
    pub const fn cuda() -> Self {
        Self {
            one_shot_max_bytes: 512 << 10,
            gather_min_chunk_bytes: 4 << 20,
            scatter_min_chunk_bytes: 4 << 20,
            overlap: OverlapMode::Tiles,
        }
    }

    /// A number that differs, with overwhelming likelihood, between different tables, and is the same for equal ones on
    /// every machine and build (FNV-1a of the fields).
    pub fn digest(&self) -> u64 {
        let Self {
            one_shot_max_bytes,
            gather_min_chunk_bytes,
            scatter_min_chunk_bytes,
            overlap,
        } = self;
        let overlap = match overlap {
            OverlapMode::Off => 0,
            OverlapMode::Ring => 1,
            OverlapMode::Pull => 2,
            OverlapMode::Tiles => 3,
            OverlapMode::Chunked { pieces } => 1 << 16 | u64::from(*pieces),
        };
        [
            *one_shot_max_bytes as u64,
            *gather_min_chunk_bytes as u64,
            *scatter_min_chunk_bytes as u64,
            overlap,
        ]
        .into_iter()
        .flat_map(u64::to_le_bytes)
        .fold(0xcbf2_9ce4_8422_2325, |h, b| {
            (h ^ u64::from(b)).wrapping_mul(0x100_0000_01b3)
        })
    }
}
