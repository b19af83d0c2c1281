//! A new generation: all ranks say that they have let go of the old one before any of them starts the new one.

use crate::{Flag, Post, Wait, Want, Word};

/// A word per peer in every rank's memory, which counts the generation that the peer is ready for. Old flags need no
/// clearing: they carry their generation. Arriving twice for the same generation is harmless, so a reset that timed out
/// can be tried again.
#[derive(Clone, Copy, Debug)]
pub struct ResetGate {
    /// This rank.
    pub rank: usize,
    /// Ranks in the group.
    pub size: usize,
    /// First word.
    pub base: usize,
}

impl ResetGate {
    /// Words it needs in every rank's memory.
    pub const fn words(size: usize) -> usize {
        size
    }

    fn peers(self) -> impl Iterator<Item = usize> {
        (1..self.size).map(move |i| (self.rank + i) % self.size)
    }

    /// The gate's flags stand outside of generations: they are what counts them.
    const fn flag(generation: u32) -> Flag {
        Flag::new(0, 0, generation)
    }

    /// Tells every peer that this rank has let go of everything before `generation`.
    pub fn arrive(self, generation: u32) -> impl Iterator<Item = Post> {
        self.peers().map(move |peer| Post {
            word: Word {
                owner: peer,
                index: self.base + self.rank,
            },
            flag: Self::flag(generation),
        })
    }

    /// Waits for every peer to have done so.
    pub fn meet(self, generation: u32) -> impl Iterator<Item = Wait> {
        self.peers().map(move |peer| Wait {
            word: Word {
                owner: self.rank,
                index: self.base + peer,
            },
            want: Want::AtLeast(Self::flag(generation)),
            peer,
        })
    }
}
