//! Which collective, what its sizes mean, and what its bandwidths are made of: all as nccl-tests counts.
//!
//! <https://github.com/NVIDIA/nccl-tests/blob/master/doc/PERFORMANCE.md>

use crate::float::Float;
use anyhow::{Result, ensure};

/// The bytes of a row are those of the larger of a rank's two buffers, whatever the collective: of all-reduce and broadcast the
/// buffer that every rank has, of all-gather the rows of all ranks that come out, of reduce-scatter those that go in, of all-to-all either.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Which {
    AllReduce,
    AllGather,
    ReduceScatter,
    Broadcast,
    AllToAll,
}

/// How much a rank has of a row's bytes, in elements.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Extent {
    /// What the row's bytes are.
    pub all: usize,
    /// Of one rank, where every rank has an equal share; else all.
    pub share: usize,
}

/// Shares begin at multiples of this, as those of nccl-tests do.
const ALIGN_BYTES: usize = 16;

impl Which {
    /// Bytes over each link for each byte of the row, if every rank sent and received no more than it must: with it, bandwidths
    /// compare with that of the links, whatever the number of ranks.
    pub fn bus_factor(self, ranks: usize) -> f64 {
        let others = (ranks - 1) as f64 / ranks as f64;
        match self {
            Self::AllReduce => 2.0 * others,
            Self::AllGather | Self::ReduceScatter | Self::AllToAll => others,
            Self::Broadcast => 1.0,
        }
    }

    /// What there is of so many bytes or, where they do not divide evenly, of somewhat less.
    pub fn extent(self, bytes: usize, float: Float, ranks: usize) -> Result<Extent> {
        let extent = match self {
            Self::AllReduce | Self::Broadcast => {
                let all = bytes / float.bytes();
                Extent { all, share: all }
            }
            Self::AllGather | Self::ReduceScatter | Self::AllToAll => {
                let share = bytes / ranks / ALIGN_BYTES * ALIGN_BYTES / float.bytes();
                Extent {
                    all: share * ranks,
                    share,
                }
            }
        };
        ensure!(
            extent.share > 0,
            "{bytes} bytes are too few: {ranks} ranks need {}",
            self.least(float, ranks)
        );
        Ok(extent)
    }

    fn least(self, float: Float, ranks: usize) -> usize {
        match self {
            Self::AllReduce | Self::Broadcast => float.bytes(),
            Self::AllGather | Self::ReduceScatter | Self::AllToAll => ranks * ALIGN_BYTES,
        }
    }
}

/// Gigabytes in a second.
pub fn gb_per_s(bytes: usize, us: f64) -> f64 {
    bytes as f64 / us / 1e3
}

#[cfg(test)]
mod tests {
    use super::*;

    const ALL: [Which; 5] = [
        Which::AllReduce,
        Which::AllGather,
        Which::ReduceScatter,
        Which::Broadcast,
        Which::AllToAll,
    ];

    #[test]
    fn bus_factors_are_those_of_nccl_tests() {
        let of = |ranks| ALL.map(|w| w.bus_factor(ranks));
        assert_eq!(of(2), [1.0, 0.5, 0.5, 1.0, 0.5]);
        assert_eq!(of(4), [1.5, 0.75, 0.75, 1.0, 0.75]);
        assert_eq!(of(8), [1.75, 0.875, 0.875, 1.0, 0.875]);
        // 1 MB in 10 us are 100 GB/s.
        assert!((gb_per_s(1_000_000, 10.0) - 100.0).abs() < 1e-9);
    }

    #[test]
    fn bytes_are_those_of_the_larger_buffer() {
        let of = |which: Which, bytes, float, ranks| {
            let Extent { all, share } = which.extent(bytes, float, ranks).unwrap();
            (all, share)
        };
        assert_eq!(of(Which::AllReduce, 2048, Float::Bf16, 3), (1024, 1024));
        assert_eq!(of(Which::Broadcast, 2048, Float::F32, 3), (512, 512));
        assert_eq!(of(Which::AllGather, 2048, Float::Bf16, 4), (1024, 256));
        // 682 bytes of each rank, of which 672 are a multiple of 16.
        assert_eq!(of(Which::ReduceScatter, 2048, Float::Bf16, 3), (1008, 336));
    }

    #[test]
    fn bytes_that_leave_a_rank_with_nothing_are_refused() {
        let told = Which::AllGather.extent(127, Float::F32, 8).unwrap_err();
        assert_eq!(told.to_string(), "127 bytes are too few: 8 ranks need 128");
        assert!(Which::AllGather.extent(128, Float::F32, 8).is_ok());
        assert!(Which::AllReduce.extent(3, Float::F32, 8).is_err());
    }
}
