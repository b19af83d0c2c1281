//! How ranks that are threads find each other's segments.
//!
//! A [`Bootstrap`] carries bytes, not pointers. Each rank therefore lays its segment down in a table of this process under
//! a random key, sends the key, and picks up everybody's; the table holds it only until all have done so.

use crate::{
    layout::Layout,
    segment::{Segment, SharedSegment},
};
use brigade_device::{Bootstrap, CommConfig, Error, Reason, Result};
use brigade_plan::Table;
use parking_lot::Mutex;
use std::{
    collections::{BTreeMap, hash_map::RandomState},
    hash::{BuildHasher, Hasher},
    sync::{Arc, LazyLock},
};

static LAID_DOWN: Mutex<BTreeMap<u64, Arc<Segment>>> = Mutex::new(BTreeMap::new());

/// Tells this process from others.
static PROCESS: LazyLock<u64> = LazyLock::new(random);

fn random() -> u64 {
    RandomState::new().build_hasher().finish()
}

/// A segment in the table, until it is dropped.
pub(crate) struct LaidDown(u64);

impl LaidDown {
    pub(crate) fn new(segment: &Arc<Segment>) -> Self {
        let mut table = LAID_DOWN.lock();
        loop {
            let key = random();
            if let std::collections::btree_map::Entry::Vacant(place) = table.entry(key) {
                place.insert(Arc::clone(segment));
                return Self(key);
            }
        }
    }
}

impl LaidDown {
    /// What others find it by.
    pub(crate) fn key(&self) -> u64 {
        self.0
    }
}

/// Picks up a segment that a rank of this process laid down.
pub(crate) fn pick_up(key: u64) -> Option<Arc<Segment>> {
    LAID_DOWN.lock().get(&key).cloned()
}

impl Drop for LaidDown {
    fn drop(&mut self) {
        LAID_DOWN.lock().remove(&self.0);
    }
}

/// Makes this rank's segment, and gives everybody's in rank order. All ranks succeed, or all fail.
pub(crate) fn exchange(
    boot: &dyn Bootstrap,
    config: &CommConfig,
    table: &Table,
    layout: &Layout,
) -> Result<Vec<SharedSegment>> {
    let within = config.first_deadline;
    let voted = format!("{config:?}, tables {:016x}", table.digest());
    brigade_group::vote(boot, "join: configuration", voted.as_bytes(), within)?;

    let segment = Segment::new(layout.words, layout.bytes).map(Arc::new);
    let laid_down = segment.as_ref().ok().map(LaidDown::new);
    let key = laid_down.as_ref().map_or(0, LaidDown::key);
    let mut message = PROCESS.to_le_bytes().to_vec();
    message.extend(key.to_le_bytes());
    let messages = boot.all_gather(&message, within)?;
    let found = segment.and_then(|_| messages.iter().map(|m| find(m)).collect::<Result<Vec<_>>>());
    brigade_group::agree(boot, "join: shared memory", found, within)
}

fn find(message: &[u8]) -> Result<SharedSegment> {
    let word = |i: usize| {
        message
            .get(8 * i..8 * i + 8)
            .and_then(|b| b.try_into().ok())
            .map(u64::from_le_bytes)
    };
    let (Some(process), Some(key)) = (word(0), word(1)) else {
        return Err(Error::Group {
            step: "join: shared memory",
            what: format!("a message of {} bytes instead of 16", message.len()),
        });
    };
    if process != *PROCESS {
        return Err(Reason::new(
            "other-process",
            "a rank of this group runs in another process",
            "run all ranks of a host group as threads of one process",
        )
        .into());
    }
    pick_up(key).map(SharedSegment).ok_or_else(|| Error::Group {
        step: "join: shared memory",
        what: "a rank could not make its segment".into(),
    })
}
