//! The watch of a hierarchy: a thread that looks after its rails, and ends them when nobody uses the hierarchy any more.

use super::{GRACE, Inner};
use crate::{core::HEARSAY, mark::CudaMark};
use brigade_device::{Error, Result};
use std::{
    sync::{Arc, atomic::Ordering},
    thread,
    time::{Duration, Instant},
};

/// How long a wait of NCCL's may be over its bound. What others say wakes the watch at once.
const ROUND: Duration = Duration::from_millis(5);

/// A hierarchy as its users and graphs keep it. When the last one is dropped, this rank leaves once its work is done.
pub(crate) struct Handle(Arc<Inner>);

impl Handle {
    /// Starts the watch, if there is something to watch.
    pub(super) fn new(inner: Arc<Inner>) -> Result<Arc<Self>> {
        if inner.rails.is_some() {
            let watched = Arc::clone(&inner);
            let rank = inner.across.group().rank;
            thread::Builder::new()
                .name(format!("rank {rank} watches its rail"))
                .spawn(move || watch(watched))
                .map_err(|e| Error::Backend {
                    call: "start the watch of a hierarchy",
                    code: e.raw_os_error().unwrap_or(0).into(),
                    source: Some(Arc::new(e)),
                })?;
        }
        Ok(Arc::new(Self(inner)))
    }

    pub(super) fn inner(&self) -> &Arc<Inner> {
        &self.0
    }
}

impl Drop for Handle {
    /// Waits for nobody but NCCL, and not for long: a process that ended while NCCL is given up would crash.
    fn drop(&mut self) {
        let inner = &self.0;
        let Some(rails) = &inner.rails else {
            return;
        };
        let done = inner.marks().iter().all(|m| m.is_over());
        inner.leaving.store(true, Ordering::Release);
        rails.line.wake();
        if !done {
            return;
        }
        let (left, changed) = &inner.left;
        let end = Instant::now() + HEARSAY;
        let mut left = left.lock();
        while !*left && !changed.wait_until(&mut left, end).timed_out() {}
    }
}

impl Inner {
    /// Marks of all work so far.
    fn marks(&self) -> Vec<Arc<CudaMark>> {
        let lanes = self.streams.iter().filter_map(|s| self.device.lane(s).ok());
        let own = lanes.filter_map(|lane| lane.mark());
        let inside = self.inside.iter().flat_map(|comm| comm.core.marks());
        own.chain(inside).collect()
    }
}

/// Looks until nobody uses the hierarchy any more and its work is done, which ends by itself or because this looks.
fn watch(inner: Arc<Inner>) {
    let Some(rails) = inner.rails.clone() else {
        return;
    };
    let mut last = None;
    loop {
        rails.line.hear(ROUND);
        inner.look_on();
        if !inner.leaving.load(Ordering::Acquire) {
            continue;
        }
        let config = &inner.config.comm;
        let patience = config.first_deadline.max(config.deadline) + GRACE + HEARSAY;
        let (marks, since) = last.get_or_insert_with(|| (inner.marks(), Instant::now()));
        if marks.iter().all(|m| m.is_over()) || since.elapsed() >= patience {
            break;
        }
    }
    rails.leave();
    *inner.left.0.lock() = true;
    inner.left.1.notify_all();
}
