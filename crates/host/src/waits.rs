//! How long a rank waited, and for whom.

use crate::routing::add_to;
use brigade_device::{Buffer, PeerWait, Result};
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

    /// Makes a call, and adds how long it waited for each rank to `to`, i64 `[ranks]`, in nanoseconds. A communicator makes one call at
    /// a time.
    pub(crate) fn of_call<R>(
        &self,
        to: Option<&Buffer>,
        call: impl FnOnce() -> Result<R>,
    ) -> Result<R> {
        let Some(to) = to else {
            return call();
        };
        let before = self.per_peer();
        let result = call();
        let all = self.per_peer().into_iter().zip(before);
        let more = all.map(|(now, before)| now.waited_ns.wrapping_sub(before.waited_ns) as i64);
        let added = add_to(to, &more.collect::<Vec<i64>>());
        result.and_then(|result| added.map(|()| result))
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
