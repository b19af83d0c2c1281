//! The page of host memory through which one rank's kernels and its host talk: the host asks for a stop and says who is gone, a
//! kernel that gives up leaves its fault record.

use crate::{card::Card, memory::Pinned};
use brigade_device::{FaultRecord, Result, Storage};
use brigade_kernels::{REPORT_ABORT, REPORT_BYTES, REPORT_DEPARTED, REPORT_FAULT, REPORT_STOPPED};
use std::sync::{
    Arc,
    atomic::{AtomicU32, AtomicU64, Ordering},
};

/// Where in a fault record `claimed` stands, and what it is once the record is whole.
const CLAIMED: usize = REPORT_FAULT + 56;
const COMPLETE: u32 = 2;

/// One rank's report.
#[derive(Debug)]
pub(crate) struct Report(Pinned);

impl Report {
    pub(crate) fn new(card: &Arc<Card>) -> Result<Self> {
        Pinned::new(card, REPORT_BYTES).map(Self)
    }

    /// The same for the GPU as for the host.
    pub(crate) fn address(&self) -> u64 {
        self.0.address()
    }

    fn half_word(&self, at: usize) -> &AtomicU32 {
        debug_assert!(at + 4 <= REPORT_BYTES);
        // SAFETY: inside the page, which lives as long as `self`; its words are only ever used as atomics here.
        unsafe { AtomicU32::from_ptr((self.address() as usize + at) as *mut u32) }
    }

    fn word(&self, at: usize) -> &AtomicU64 {
        debug_assert!(at + 8 <= REPORT_BYTES);
        // SAFETY: as above.
        unsafe { AtomicU64::from_ptr((self.address() as usize + at) as *mut u64) }
    }

    /// Kernels of this rank that wait give up, if they are in this generation.
    pub(crate) fn ask_to_stop(&self, generation: u8) {
        self.half_word(REPORT_ABORT)
            .store(generation.into(), Ordering::Release);
    }

    /// Kernels of this rank wait no more for these ranks, a bit each.
    pub(crate) fn say_departed(&self, mask: u64) {
        self.word(REPORT_DEPARTED).store(mask, Ordering::Release);
    }

    /// Whether a kernel gave up in this generation, or found that it should.
    pub(crate) fn stopped(&self, generation: u8) -> bool {
        self.half_word(REPORT_STOPPED).load(Ordering::Acquire) == u32::from(generation)
    }

    /// The record that a kernel of this rank left in this generation.
    pub(crate) fn fault(&self, generation: u8) -> Option<FaultRecord> {
        if self.half_word(CLAIMED).load(Ordering::Acquire) != COMPLETE {
            return None;
        }
        let words =
            std::array::from_fn(|i| self.word(REPORT_FAULT + 8 * i).load(Ordering::Relaxed));
        FaultRecord::from_words(words)
            .filter(|r| r.generation == u32::from(generation))
            .map(|r| FaultRecord { claimed: 1, ..r })
    }

    /// For a new generation.
    pub(crate) fn clear(&self) {
        for at in [REPORT_ABORT, REPORT_STOPPED, CLAIMED] {
            self.half_word(at).store(0, Ordering::Release);
        }
    }
}
