//! A GPU on which nobody waits, for what has to be loaded there; or nobody but on one stream.

use crate::{
    CudaDevice,
    core::{Core, HEARSAY},
    lane::Lane,
};
use parking_lot::Mutex;
use std::{
    collections::BTreeMap,
    sync::{Arc, Weak},
    time::{Duration, Instant},
};

/// Longest that a load waits where ranks share a GPU.
const SHARING: Duration = Duration::from_millis(50);

/// Communicators of this process on each GPU.
static HERE: Mutex<BTreeMap<usize, Vec<Weak<Core>>>> = Mutex::new(BTreeMap::new());

/// Waits until the work of all communicators on a GPU is done: before something is loaded there. Loading waits for the GPU, and
/// whoever calls the driver meanwhile waits with it, peers of this process too, for whom the GPU's kernels may be waiting.
///
/// Where several ranks of a group share the GPU, they may be waiting for this very rank: then not for long.
pub(crate) fn quiet(ordinal: usize) {
    let cores = alive(ordinal);
    let patience = if cores.iter().any(|core| core.shares()) {
        SHARING
    } else {
        let longest = cores.iter().map(|core| core.config.first_deadline).max();
        longest.unwrap_or_default() + HEARSAY
    };
    let end = Instant::now() + patience;
    // Of now: not of calls that come while it waits.
    let marks: Vec<_> = cores.iter().flat_map(|core| core.marks()).collect();
    for mark in marks {
        // Whatever ended the work, it ended.
        let _ = mark.reached(end.saturating_duration_since(Instant::now()));
    }
}

impl CudaDevice {
    /// Whether launches of this GPU may take place while the kernel in front of them goes on, where it lets them.
    pub(crate) fn launches_early(&self) -> bool {
        self.opened.kernels.pushes.programmatic && !self.serial
    }

    /// Whether a kernel on this lane may take its place on the GPU while the one before it ends, and lie in wait for that. Its blocks are in the way of
    /// other streams' meanwhile, for which a peer may be waiting, who may keep from its place what this lane waits for. So only if all communicators
    /// that this process has on the GPU have worked, on this lane alone, and no rank of theirs shares it.
    pub(crate) fn overtakes(&self, lane: &Lane) -> bool {
        let suits = |core: &Arc<Core>| !core.shares() && core.works_only_on(lane);
        self.launches_early() && alive(self.card.context.ordinal()).iter().all(suits)
    }
}

/// The communicators of this process on a GPU.
pub(crate) fn alive(ordinal: usize) -> Vec<Arc<Core>> {
    let mut here = HERE.lock();
    let list = here.entry(ordinal).or_default();
    list.retain(|core| core.strong_count() > 0);
    list.iter().filter_map(Weak::upgrade).collect()
}

/// The other communicators of this process on the same GPU.
pub(crate) fn others(core: &Core) -> Vec<Arc<Core>> {
    let mut all = alive(core.device.card.context.ordinal());
    all.retain(|other| !std::ptr::eq(Arc::as_ptr(other), core));
    all
}

/// From here on, loads on this communicator's GPU wait for it.
pub(crate) fn heed(core: &Arc<Core>) {
    let ordinal = core.device.card.context.ordinal();
    let mut here = HERE.lock();
    here.entry(ordinal).or_default().push(Arc::downgrade(core));
}
