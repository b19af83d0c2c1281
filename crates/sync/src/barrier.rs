//! All ranks meet: every rank writes its flag into every rank's memory, and waits for every rank's flag in its own.

use crate::{Flag, Post, Wait, Want, Word};

/// A barrier in two parts, arriving and waiting, so that work fits in between. Two alternating sets of flags: a rank can
/// be at most one meeting ahead of another, because it waits for the other's flag of this one; so a flag that is waited
/// for is never overwritten.
///
/// Words per rank: `2 * size`, from `base` on.
#[derive(Clone, Copy, Debug)]
pub struct FlagBarrier {
    /// This rank.
    pub rank: usize,
    /// Ranks in the group.
    pub size: usize,
    /// First word.
    pub base: usize,
}

impl FlagBarrier {
    /// Words it needs in every rank's memory.
    pub const fn words(size: usize) -> usize {
        2 * size
    }

    fn word(&self, owner: usize, epoch: u32, from: usize) -> Word {
        Word {
            owner,
            index: self.base + (epoch as usize & 1) * self.size + from,
        }
    }

    fn peers(self) -> impl Iterator<Item = usize> {
        (1..self.size).map(move |i| (self.rank + i) % self.size)
    }

    /// Tells every peer that this rank is at the flag's epoch.
    pub fn arrive(self, flag: Flag) -> impl Iterator<Item = Post> {
        self.peers().map(move |peer| Post {
            word: self.word(peer, flag.epoch(), self.rank),
            flag,
        })
    }

    /// Waits for every peer's flag.
    pub fn meet(self, flag: Flag) -> impl Iterator<Item = Wait> {
        self.peers().map(move |peer| Wait {
            word: self.word(self.rank, flag.epoch(), peer),
            want: Want::Exactly(flag),
            peer,
        })
    }
}
