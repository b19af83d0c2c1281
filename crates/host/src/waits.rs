//! How long a rank waited, and for whom.

use brigade_device::PeerWait;
use std::{
    sync::atomic::{AtomicU64, Ordering},
    time::Duration,
};

/// Waits for every rank of the group.
pub(crate) struct Waits(Box<[Counts]>);

#[derive(Default)]
struct Counts {
    waits: AtomicU64,
    waited_ns: AtomicU64,
}

impl Waits {
    pub(crate) fn new(size: usize) -> Self {
        Self((0..size).map(|_| Counts::default()).collect())
    }

    /// Counts a wait for `peer`.
    pub(crate) fn add(&self, peer: usize, took: Duration) {
        let counts = &self.0[peer];
        let ns = u64::try_from(took.as_nanos()).unwrap_or(u64::MAX);
        counts.waits.fetch_add(1, Ordering::Relaxed);
        counts.waited_ns.fetch_add(ns, Ordering::Relaxed);
    }

    pub(crate) fn per_peer(&self) -> Vec<PeerWait> {
        let each = self.0.iter();
        each.map(|c| PeerWait {
            waits: c.waits.load(Ordering::Relaxed),
            waited_ns: c.waited_ns.load(Ordering::Relaxed),
        })
        .collect()
    }
}
