//! What lies where in a rank's segment: the same on every rank, computed from the voted configuration.

use crate::segment::Segment;
use brigade_device::{CommConfig, Error, Region, Result};
use brigade_plan::MAX_PIECES;
use brigade_sync::{AbortCell, BELL_WORDS, CreditRing, FlagBarrier, HALVES, Half, ResetGate};

/// The regions that carry data between ranks, each in two halves.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Area {
    /// Rows of all ranks, for gather-linear.
    Gather,
    /// Parts of all ranks, for its twin.
    ReduceScatter,
    /// Pieces of collectives.
    Scratch,
    /// A slot per sender, for send and receive.
    Mail,
}

impl Area {
    pub(crate) const ALL: [Self; 4] =
        [Self::Gather, Self::ReduceScatter, Self::Scratch, Self::Mail];
}

/// Flags and data of one group, as one rank sees them.
pub(crate) struct Layout {
    pub(crate) barrier: FlagBarrier,
    pub(crate) abort: AbortCell,
    pub(crate) reset: ResetGate,
    /// A word per peer: 1 once it is gone.
    pub(crate) departed: usize,
    rings: [CreditRing; Area::ALL.len()],
    /// Flags of the regions that users can register.
    region_rings: Vec<CreditRing>,
    starts: [usize; Area::ALL.len()],
    half_bytes: [usize; Area::ALL.len()],
    /// Words that hold flags.
    pub(crate) flags: usize,
    /// All words: the flags and the bell.
    pub(crate) words: usize,
    pub(crate) bytes: usize,
}

impl Layout {
    pub(crate) fn new(config: &CommConfig, rank: usize, size: usize) -> Result<Self> {
        config.check()?;
        let mut words = 0;
        let mut take = |n: usize| {
            let base = words;
            words += n;
            base
        };
        let barrier = FlagBarrier {
            rank,
            size,
            base: take(FlagBarrier::words(size)),
        };
        let abort = AbortCell {
            size,
            base: take(AbortCell::WORDS),
        };
        let reset = ResetGate {
            rank,
            size,
            base: take(ResetGate::words(size)),
        };
        let departed = take(size);
        let rings = Area::ALL.map(|_| CreditRing {
            rank,
            size,
            pieces: usize::from(MAX_PIECES),
            base: take(CreditRing::words(size, usize::from(MAX_PIECES))),
        });
        let region_rings = (0..config.regions)
            .map(|_| CreditRing {
                rank,
                size,
                pieces: 1,
                base: take(CreditRing::words(size, 1)),
            })
            .collect();
        let flags = words;
        let words = flags.next_multiple_of(BELL_WORDS) + BELL_WORDS;
        let mail = (config.scratch_bytes / size.max(1))
            .next_multiple_of(64)
            .max(64)
            * size;
        // The scales of gathered rows lie behind them in the same half.
        let gather = Self::scales_offset(config)
            .checked_add(config.gather_scale_bytes)
            .ok_or_else(|| {
                Error::invalid(
                    "gather_bytes",
                    config.gather_bytes,
                    "a size that fits in memory",
                )
            })?;
        let half_bytes = [
            gather,
            config.reduce_scatter_bytes,
            config.scratch_bytes,
            mail,
        ];
        let mut bytes = 0usize;
        let mut starts = [0; Area::ALL.len()];
        for (start, half) in starts.iter_mut().zip(half_bytes) {
            *start = bytes;
            bytes = half
                .checked_next_multiple_of(64)
                .and_then(|half| half.checked_mul(HALVES))
                .and_then(|both| both.checked_add(bytes))
                .ok_or_else(|| {
                    Error::invalid("config", format!("{config:?}"), "sizes that fit in memory")
                })?;
        }
        Ok(Self {
            barrier,
            abort,
            reset,
            departed,
            rings,
            region_rings,
            starts,
            half_bytes,
            flags,
            words,
            bytes,
        })
    }

    /// Where scales begin in a half of the gather region.
    pub(crate) fn scales_offset(config: &CommConfig) -> usize {
        config.gather_bytes.next_multiple_of(64)
    }

    pub(crate) fn ring(&self, area: Area) -> CreditRing {
        self.rings[area as usize]
    }

    /// Flags of a user's region.
    pub(crate) fn region_ring(&self, region: Region) -> Option<CreditRing> {
        self.region_rings.get(usize::from(region.0)).copied()
    }

    /// First byte of a half.
    pub(crate) fn start(&self, area: Area, half: Half) -> usize {
        let half_bytes = self.half_bytes[area as usize].next_multiple_of(64);
        self.starts[area as usize] + half.index() * half_bytes
    }

    /// Capacity of a half.
    pub(crate) fn half_bytes(&self, area: Area) -> usize {
        self.half_bytes[area as usize]
    }

    /// All memory of a rank.
    pub(crate) fn total_bytes(&self) -> usize {
        Segment::data_offset(self.words) + self.bytes
    }
}
