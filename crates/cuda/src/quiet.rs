//! A GPU on which nobody waits, for what has to be loaded there, or taken down.

use crate::{
    card::Card,
    core::{Core, GroupMemory, HEARSAY},
};
use parking_lot::Mutex;
use std::{
    collections::BTreeMap,
    sync::{Arc, Weak},
    time::{Duration, Instant},
};

/// Longest that a load waits where ranks share a GPU, or several groups have it.
const SHARING: Duration = Duration::from_millis(50);

/// Communicators of this process on each GPU.
static HERE: Mutex<BTreeMap<usize, Vec<Weak<Core>>>> = Mutex::new(BTreeMap::new());

/// What members of groups left on GPUs that they shared with other ranks.
static LEFT: Mutex<BTreeMap<usize, Vec<Remains>>> = Mutex::new(BTreeMap::new());

/// What a member leaves. To unmap memory, or to free what the host sees, waits for the GPU.
type Remains = (Arc<GroupMemory>, Arc<Card>);

/// Waits until the work of all communicators on a GPU is done: before something is loaded there. Loading waits for the GPU, and
/// whoever calls the driver meanwhile waits with it, peers of this process too, for whom the GPU's kernels may be waiting.
///
/// Where several ranks of a group share the GPU, they may be waiting for this very rank, and another group's work for a rank
/// that waits here as this one does: then not for long.
pub(crate) fn quiet(ordinal: usize) {
    let cores = alive(ordinal);
    let patience = if cores.len() > 1 || cores.iter().any(|core| core.shares) {
        SHARING
    } else {
        let longest = cores.iter().map(|core| core.config.first_deadline).max();
        longest.unwrap_or_default() + HEARSAY
    };
    let end = Instant::now() + patience;
    for mark in cores.iter().flat_map(|core| core.marks()) {
        // Whatever ended the work, it ended.
        let _ = mark.reached(end.saturating_duration_since(Instant::now()));
    }
}

fn alive(ordinal: usize) -> Vec<Arc<Core>> {
    let mut here = HERE.lock();
    let list = here.entry(ordinal).or_default();
    list.retain(|core| core.strong_count() > 0);
    list.iter().filter_map(Weak::upgrade).collect()
}

/// Whether another communicator of this process on the same GPU may hold all of it with tiles that wait. Two of them would
/// each keep the other's steps from their peers.
pub(crate) fn others_have_tiles(core: &Core) -> bool {
    let all = alive(core.device.card.context.ordinal());
    all.iter()
        .any(|other| !std::ptr::eq(Arc::as_ptr(other), core) && other.has_tiles())
}

/// From here on, loads on this communicator's GPU wait for it.
pub(crate) fn heed(core: &Arc<Core>) {
    let ordinal = core.device.card.context.ordinal();
    let mut here = HERE.lock();
    here.entry(ordinal).or_default().push(Arc::downgrade(core));
}

/// A communicator is being dropped. Where a peer on the same GPU goes on, what waits for the GPU is put off until the last of
/// them goes: the peer's kernels may be waiting for another peer, which then could not call the driver.
pub(crate) fn leave(core: &Core) {
    if !core.shares {
        return;
    }
    let card = &core.device.card;
    let ordinal = card.context.ordinal();
    // Let go of behind the lock: one of them may be the last that anybody has.
    let alive = alive(ordinal);
    let others = alive.iter().any(|other| other.shares);
    let mut left = LEFT.lock();
    let list = left.entry(ordinal).or_default();
    if others {
        list.push((Arc::clone(&core.memory), Arc::clone(card)));
        return;
    }
    let gone = std::mem::take(list);
    drop(left);
    drop(gone);
}
