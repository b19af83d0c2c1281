//! Epochs and credits: who writes into a peer's memory says when data is there, and hears when it was used.

use crate::{Flag, Post, Wait, Want, Word};

/// Halves of a region: one is filled while the other is still read.
pub const HALVES: usize = 2;

/// One half of a region.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Half(u8);

impl Half {
    /// The half that the `n`-th of alternating uses takes.
    pub const fn of(n: u32) -> Self {
        Self((n & 1) as u8)
    }

    /// Its number, 0 or 1.
    pub const fn index(self) -> usize {
        self.0 as usize
    }
}

/// The flags of one region that lies on every rank in two halves.
///
/// Data for use `u` of a half comes in slots (one per source rank or chunk) of several pieces; each has a flag word at
/// the reader. Once a rank is done with use `u` of its half, it writes credit `u` to every peer; a peer touches that half
/// for use `u + 1` only when it has the credit. Uses of a half are counted by every rank alike.
///
/// Words per rank: [`words`](Self::words), from `base` on.
#[derive(Clone, Copy, Debug)]
pub struct CreditRing {
    /// This rank.
    pub rank: usize,
    /// Ranks in the group.
    pub size: usize,
    /// Most pieces of a slot.
    pub pieces: usize,
    /// First word.
    pub base: usize,
}

impl CreditRing {
    /// Words it needs in every rank's memory.
    pub const fn words(size: usize, pieces: usize) -> usize {
        HALVES * size * pieces + HALVES * size
    }

    fn flag_word(&self, owner: usize, half: Half, slot: usize, piece: usize) -> Word {
        debug_assert!(slot < self.size && piece < self.pieces);
        Word {
            owner,
            index: self.base + (half.index() * self.size + slot) * self.pieces + piece,
        }
    }

    fn credit_word(&self, owner: usize, half: Half, from: usize) -> Word {
        Word {
            owner,
            index: self.base + HALVES * self.size * self.pieces + half.index() * self.size + from,
        }
    }

    /// What a word is for, if it is one of this ring's.
    pub fn role(self, index: usize) -> Option<Role> {
        let (at, flags) = (
            index.checked_sub(self.base)?,
            HALVES * self.size * self.pieces,
        );
        if at < flags {
            let (slot, piece) = (at / self.pieces, at % self.pieces);
            return Some(Role::Filled {
                half: Half::of((slot / self.size) as u32),
                slot: slot % self.size,
                piece,
            });
        }
        let at = at - flags;
        (at < HALVES * self.size).then(|| Role::Credit {
            half: Half::of((at / self.size) as u32),
            from: at % self.size,
        })
    }

    /// Data for `flag`'s use of `half` lies in `slot` of `to`.
    pub fn filled(self, to: usize, half: Half, slot: usize, piece: usize, flag: Flag) -> Post {
        Post {
            word: self.flag_word(to, half, slot, piece),
            flag,
        }
    }

    /// Waits for the data in `slot` of this rank's half, that `from` puts there.
    pub fn arrival(self, half: Half, slot: usize, piece: usize, from: usize, flag: Flag) -> Wait {
        Wait {
            word: self.flag_word(self.rank, half, slot, piece),
            want: Want::Exactly(flag),
            peer: from,
        }
    }

    /// Waits until `peer` is done with the use before `flag`'s.
    pub fn credit(self, half: Half, peer: usize, flag: Flag) -> Wait {
        let before = Flag::new(flag.generation(), 0, flag.epoch().wrapping_sub(1));
        Wait {
            word: self.credit_word(self.rank, half, peer),
            want: Want::AtLeast(before),
            peer,
        }
    }

    /// Tells every peer that this rank is done with `flag`'s use of `half`.
    pub fn release(self, half: Half, flag: Flag) -> impl Iterator<Item = Post> {
        (1..self.size)
            .map(move |i| (self.rank + i) % self.size)
            .map(move |peer| Post {
                word: self.credit_word(peer, half, self.rank),
                flag,
            })
    }
}

/// What a word of a ring is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Role {
    /// Says that a piece of a slot lies in a half.
    Filled {
        /// Of this rank's memory.
        half: Half,
        /// One per source rank or chunk.
        slot: usize,
        /// Piece of it.
        piece: usize,
    },
    /// Says that a rank is done with a use of its half.
    Credit {
        /// Of that rank's memory.
        half: Half,
        /// That rank.
        from: usize,
    },
}

/// How often each half of a region has been used in this generation: the same on every rank, since all make the same
/// calls.
#[derive(Clone, Debug, Default)]
pub struct Uses {
    count: [u32; HALVES],
    open: [bool; HALVES],
    begun: [bool; HALVES],
    next: u8,
}

impl Uses {
    /// The half that the next call takes: they alternate.
    pub fn next_half(&mut self) -> Half {
        let half = Half(self.next);
        self.next ^= 1;
        half
    }

    /// Begins a use of `half`: its epoch, and whether there was one before it in this generation, whose credits must be
    /// waited for.
    pub fn begin(&mut self, half: Half) -> (u32, bool) {
        let i = half.index();
        let again = std::mem::replace(&mut self.begun[i], true);
        self.open[i] = true;
        self.count[i] = self.count[i].wrapping_add(1);
        (self.count[i], again)
    }

    /// Ends the use of `half`, if one is open, and gives its epoch for the credit.
    pub fn end(&mut self, half: Half) -> Option<u32> {
        std::mem::take(&mut self.open[half.index()]).then_some(self.count[half.index()])
    }

    /// Uses that have begun and not ended, with their epochs.
    pub fn open(&self) -> impl Iterator<Item = (Half, u32)> {
        [Half(0), Half(1)]
            .into_iter()
            .filter(|h| self.open[h.index()])
            .map(|h| (h, self.count[h.index()]))
    }
}
