//! What the protocols need of memory that ranks share.

use std::{
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

    /// Replaces `current` by `new`, or says what was there instead.
    ///
    /// # Errors
    /// The value that stood there.
    fn compare_exchange(&self, at: Word, current: u64, new: u64) -> Result<(), u64>;

    /// Lets the caller rest while the word still holds `seen`, until a word of the same owner is stored or `until` is
    /// over. May return at any time.
    ///
    /// A store to *another* word of the owner just before the rest begins does not end it: whoever looks at several words
    /// rests for a short time only, see [`Deadline`](crate::Deadline).
    fn rest(&self, at: Word, seen: u64, until: Option<Instant>);
}

/// Words of ranks that share an address space: std atomics, and parking for those who rest.
///
/// `W` gives each rank's words: a slice per rank.
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

    /// Whoever waits on a rank's memory rests under the address of its first word.
    fn bell(&self, owner: usize) -> usize {
        self.ranks[owner].as_ref().as_ptr() as usize
    }

    fn ring(&self, owner: usize) {
        // SAFETY: the key is the address of words that this value keeps alive, so no other user of the parking lot has
        // it; the callback of unpark_all does not panic or call back into the parking lot.
        unsafe {
            parking_lot_core::unpark_all(self.bell(owner), parking_lot_core::DEFAULT_UNPARK_TOKEN);
        }
    }
}

impl<W: AsRef<[AtomicU64]> + Send + Sync> Memory for Words<W> {
    fn load(&self, at: Word) -> u64 {
        self.word(at).load(Ordering::Acquire)
    }

    fn store(&self, at: Word, value: u64) {
        self.word(at).store(value, Ordering::Release);
        self.ring(at.owner);
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
            .map(drop)
    }

    fn rest(&self, at: Word, seen: u64, until: Option<Instant>) {
        // SAFETY: the key is an address that this value keeps alive; the closures neither panic nor call back into the
        // parking lot. A store rings after it wrote, and `validate` runs under the lock that ringing takes, so a store
        // between the caller's load and this call is not missed.
        unsafe {
            parking_lot_core::park(
                self.bell(at.owner),
                || self.word(at).load(Ordering::Acquire) == seen,
                || {},
                |_, _| {},
                parking_lot_core::DEFAULT_PARK_TOKEN,
                until,
            );
        }
    }
}
