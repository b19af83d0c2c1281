//! A page of the host's that the GPU writes: whether NCCL is under way on a connection, and which machine made another call.

use super::CONNECTIONS;
use crate::{
    core::Core,
    driver::failed,
    memory::{DeviceMemory, Pinned},
};
use brigade_device::{Result, Storage};
use cudarc::driver::sys;
use std::{
    sync::atomic::{AtomicU64, Ordering},
    time::{Duration, Instant},
};

/// Words of the page: for each connection, whether NCCL is under way, and whether it has got through since the host looked.
const fn under_way(connection: usize) -> usize {
    2 * connection
}
const PASSED: usize = 1;
/// The machine that made another call, from 1, as each connection brought it out.
const DIFFERS: usize = 2 * CONNECTIONS;
/// What stands there where no signature came.
const CUT_SHORT: u64 = u64::MAX;
const PAGE_WORDS: usize = DIFFERS + CONNECTIONS;

/// Words of the GPU's: what is copied to the page, and from there on what each machine signed, for each connection.
const COPIED: [u64; 3] = [1, 0, 1];
const SIGNED: usize = COPIED.len();

/// A page of the host's that the GPU writes, and what it writes.
pub(crate) struct Page {
    page: Pinned,
    words: DeviceMemory,
    machines: usize,
}

impl Page {
    /// Of a rail of so many machines.
    pub(crate) fn new(core: &Core, machines: usize) -> Result<Self> {
        let card = &core.device.card;
        let words = DeviceMemory::outside_of_streams(card, 8 * (SIGNED + CONNECTIONS * machines))?;
        for (i, word) in COPIED.into_iter().enumerate() {
            core.write_word(words.address() + 8 * i as u64, word)?;
        }
        let made = Self {
            page: Pinned::new(card, 8 * PAGE_WORDS)?,
            words,
            machines,
        };
        made.unsign(core)?;
        Ok(made)
    }

    /// Takes away what machines signed, while nothing is under way.
    pub(super) fn unsign(&self, core: &Core) -> Result<()> {
        let words = CONNECTIONS * self.machines;
        (0..words).try_for_each(|word| core.write_word(self.word(SIGNED + word), 0))
    }

    /// Address of the word that a machine signs with on a connection, in the GPU's memory. A connection's lie one after the other.
    pub(super) fn signed(&self, connection: usize, machine: usize) -> u64 {
        self.word(SIGNED + connection * self.machines + machine)
    }

    /// Address of the word by which a connection tells the host which machine made another call, from 1.
    pub(super) fn tells(&self, connection: usize) -> u64 {
        self.at(DIFFERS + connection)
    }

    /// What each connection told.
    fn told(&self) -> impl Iterator<Item = u64> {
        (DIFFERS..PAGE_WORDS).map(|word| self.cell(word).load(Ordering::Acquire))
    }

    /// That machine. One that a connection names counts for more than what was cut short on another.
    pub(crate) fn differs(&self) -> Option<usize> {
        let named = |told: u64| usize::try_from(told).ok()?.checked_sub(1);
        self.told()
            .filter(|&told| told != CUT_SHORT)
            .find_map(named)
    }

    /// Whether NCCL's kernel ended without a signature: somebody was stopped or has given it up, and will say why.
    pub(crate) fn is_cut_short(&self) -> bool {
        self.told().any(|told| told == CUT_SHORT)
    }

    /// Enqueues that NCCL is under way from here on.
    pub(super) fn begins(&self, connection: usize, stream: sys::CUstream) -> Result<()> {
        self.show(stream, under_way(connection), 0, 1)
    }

    /// Enqueues that it has got through.
    pub(super) fn ends(&self, connection: usize, stream: sys::CUstream) -> Result<()> {
        self.show(stream, under_way(connection), 1, 2)
    }

    /// Address of a word of the page, for both.
    fn at(&self, word: usize) -> u64 {
        self.page.address() + 8 * word as u64
    }

    /// Address of a word of the GPU's.
    fn word(&self, word: usize) -> u64 {
        self.words.address() + 8 * word as u64
    }

    fn cell(&self, word: usize) -> &AtomicU64 {
        debug_assert!(word < PAGE_WORDS);
        // SAFETY: inside the page, which lives as long as `self`; its words are only ever used as atomics here.
        unsafe { AtomicU64::from_ptr(self.at(word) as *mut u64) }
    }

    /// For a new generation.
    pub(crate) fn clear(&self) {
        (0..PAGE_WORDS).for_each(|word| self.cell(word).store(0, Ordering::Release));
    }

    /// Enqueues a copy of `count` words, from one of the GPU's to one of the page.
    fn show(&self, stream: sys::CUstream, to: usize, from: usize, count: usize) -> Result<()> {
        // SAFETY: both lie in memory of the rail's, which outlives its work.
        unsafe { sys::cuMemcpyAsync(self.at(to), self.word(from), 8 * count, stream) }
            .result()
            .map_err(failed("cuMemcpyAsync"))
    }
}

/// What the watch knows of a connection.
#[derive(Default)]
pub(crate) struct Pace {
    /// Since when NCCL has been under way without getting through.
    since: Option<Instant>,
}

impl Pace {
    /// Looks, and says for how long NCCL has been under way.
    pub(crate) fn look(&mut self, page: &Page, connection: usize) -> Duration {
        let at = under_way(connection);
        let now = Instant::now();
        // If it gets through again in between, it has all the same just got through.
        if page.cell(at + PASSED).load(Ordering::Acquire) != 0 {
            page.cell(at + PASSED).store(0, Ordering::Release);
            self.since = None;
        }
        if page.cell(at).load(Ordering::Acquire) == 0 {
            self.since = None;
            return Duration::ZERO;
        }
        now.saturating_duration_since(*self.since.get_or_insert(now))
    }
}
