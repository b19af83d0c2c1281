//! What the protocols need of memory that ranks share.

use crate::bell::{Bell, shared::Shared};
use std::{
    ops::Range,
    sync::atomic::{AtomicU64, Ordering},
    time::Instant,
};

/// One 64-bit word in some rank's memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Word {
    /// Whose memory.
    pub owner: usize,
    /// Which word there.
    pub index: usize,
}

/// Words that all ranks of a group can reach.
pub trait Memory: Send + Sync {
    /// Reads a word; what was written before the store that it sees is seen too (acquire).
    fn load(&self, at: Word) -> u64;

    /// Writes a word after everything before it (release), and wakes whoever rests on a word of that owner.
    fn store(&self, at: Word, value: u64);

    /// Reads a word that says by itself whether it is there, and orders nothing else (relaxed).
    fn load_relaxed(&self, at: Word) -> u64 {
        self.load(at)
    }

    /// Writes a word that says by itself that it is there: orders nothing else, and wakes nobody (relaxed).
    fn store_relaxed(&self, at: Word, value: u64) {
        self.store(at, value);
    }

    /// Writes 0 to those of an owner's words that are not, as [`store_relaxed`](Self::store_relaxed) does. They may be many.
    fn empty(&self, owner: usize, words: Range<usize>) {
        for index in words {
            let at = Word { owner, index };
            if self.load_relaxed(at) != 0 {
                self.store_relaxed(at, 0);
            }
        }
    }

    /// Replaces `current` by `new` and wakes whoever rests on a word of that owner, or says what was there instead.
    ///
    /// # Errors
    /// The value that stood there.
    fn compare_exchange(&self, at: Word, current: u64, new: u64) -> Result<(), u64>;

    /// How often something happened to `owner`'s words, modulo 2^32. To be read before the words that are looked at.
    fn events(&self, owner: usize) -> u32;

    /// Lets the caller rest until more has happened to `owner`'s words than these `events`, or until `until` is over. May
    /// return at any time.
    fn rest(&self, owner: usize, events: u32, until: Option<Instant>);
}

/// Words at the end of a rank's slice that [`Words`] keeps for itself: a cache line.
pub const BELL_WORDS: usize = 8;

/// Words of ranks that share memory: std atomics, and a [`Bell`] per rank for those who rest.
///
/// `W` gives each rank's words: a slice per rank, whose last [`BELL_WORDS`] are the bell. On Linux the slices may lie in
/// memory that processes share.
#[derive(Debug)]
pub struct Words<W> {
    ranks: Vec<W>,
}

impl<W: AsRef<[AtomicU64]>> Words<W> {
    /// One slice of words per rank.
    pub fn new(ranks: Vec<W>) -> Self {
        Self { ranks }
    }

    fn word(&self, at: Word) -> &AtomicU64 {
        &self.ranks[at.owner].as_ref()[at.index]
    }

    fn bell(&self, owner: usize) -> Shared<'_> {
        let words = self.ranks[owner].as_ref();
        Shared(&words[words.len() - BELL_WORDS])
    }
}

impl<W: AsRef<[AtomicU64]> + Send + Sync> Memory for Words<W> {
    fn load(&self, at: Word) -> u64 {
        self.word(at).load(Ordering::Acquire)
    }

    fn store(&self, at: Word, value: u64) {
        self.word(at).store(value, Ordering::Release);
        self.bell(at.owner).ring();
    }

    fn load_relaxed(&self, at: Word) -> u64 {
        self.word(at).load(Ordering::Relaxed)
    }

    fn store_relaxed(&self, at: Word, value: u64) {
        self.word(at).store(value, Ordering::Relaxed);
    }

    fn compare_exchange(&self, at: Word, current: u64, new: u64) -> Result<(), u64> {
        self.word(at)
            .compare_exchange(current, new, Ordering::AcqRel, Ordering::Acquire)
            .map(|_| self.bell(at.owner).ring())
    }

    fn events(&self, owner: usize) -> u32 {
        self.bell(owner).events()
    }

    fn rest(&self, owner: usize, events: u32, until: Option<Instant>) {
        self.bell(owner).rest(events, until);
    }
}
