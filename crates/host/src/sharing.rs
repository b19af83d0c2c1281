//! How ranks get at each other's memory: threads of one process through a table in it, processes of one machine through
//! files.

use crate::segment::Segment;
use brigade_device::{Bootstrap, Error, Result};
use parking_lot::Mutex;
use std::{
    collections::{BTreeMap, btree_map::Entry},
    hash::{BuildHasher, Hasher, RandomState},
    sync::Arc,
    time::Duration,
};

#[cfg(target_os = "linux")]
use crate::{
    memfd::Memfd,
    pulse::{Pulse, Pulses},
};

/// What all ranks of a group agreed on.
#[derive(Debug)]
pub(crate) enum Sharing {
    /// All ranks are threads of this process.
    Table,
    /// Every rank has a file that all have open, and a pulse.
    #[cfg(target_os = "linux")]
    Files { files: Vec<Memfd>, pulses: Pulses },
}

/// A segment that all ranks may take, while this lives. `key` is what they take it by, and never 0.
pub(crate) struct Offer {
    pub(crate) key: u64,
    _place: Option<Place>,
}

impl Sharing {
    /// Files for ranks in several processes. All ranks succeed, or all fail.
    #[cfg(target_os = "linux")]
    pub(crate) fn between_processes(boot: &dyn Bootstrap, within: Duration) -> Result<Self> {
        use brigade_group::{agree, exchange_fds};
        let made = Memfd::new().and_then(|file| Ok((file, Pulse::new()?)));
        let (file, pulse) = agree(boot, "join: shared memory", made, within)?;
        let files = exchange_fds(boot, file.file(), within)?;
        let pulses = pulse.exchange(|fd| exchange_fds(boot, fd, within))?;
        let mut files = files
            .into_iter()
            .map(Memfd::of_peer)
            .collect::<Result<Vec<_>>>();
        if let Ok(files) = &mut files {
            files[boot.rank()] = file;
        }
        let files = agree(boot, "join: shared memory", files, within)?;
        Ok(Self::Files { files, pulses })
    }

    #[cfg(not(target_os = "linux"))]
    pub(crate) fn between_processes(_: &dyn Bootstrap, _: Duration) -> Result<Self> {
        Err(brigade_device::Reason::new(
            "other-process",
            "a rank of this group runs in another process",
            "run all ranks of a host group as threads of one process: on this system, processes share no memory",
        )
        .into())
    }

    /// Makes a segment of rank `rank`, which is this one.
    #[cfg_attr(not(target_os = "linux"), expect(unused_variables))]
    pub(crate) fn offer(&self, rank: usize, words: usize, bytes: usize) -> Result<Offer> {
        match self {
            Self::Table => {
                let place = Place::take(Segment::new(words, bytes)?);
                Ok(Offer {
                    key: place.0,
                    _place: Some(place),
                })
            }
            #[cfg(target_os = "linux")]
            Self::Files { files, .. } => {
                let start = files[rank].grow(Segment::size(words, bytes)?)?;
                Ok(Offer {
                    key: start + 1,
                    _place: None,
                })
            }
        }
    }

    /// The segment that `owner` offered; this rank's own too.
    #[cfg_attr(not(target_os = "linux"), expect(unused_variables))]
    pub(crate) fn take(
        &self,
        owner: usize,
        key: u64,
        words: usize,
        bytes: usize,
    ) -> Result<Arc<Segment>> {
        let missing = || Error::Group {
            step: "join: shared memory",
            what: format!("rank {owner} could not make its segment"),
        };
        match self {
            Self::Table => TABLE.lock().get(&key).cloned().ok_or_else(missing),
            #[cfg(target_os = "linux")]
            Self::Files { files, .. } => {
                let start = key.checked_sub(1).ok_or_else(missing)?;
                Segment::map(&files[owner], start, words, bytes).map(Arc::new)
            }
        }
    }

    /// Whether the process of a peer is known to have ended.
    #[cfg_attr(not(target_os = "linux"), expect(unused_variables))]
    pub(crate) fn has_died(&self, peer: usize) -> bool {
        match self {
            Self::Table => false,
            #[cfg(target_os = "linux")]
            Self::Files { pulses, .. } => pulses.stopped(peer),
        }
    }
}

/// Segments of this process that were offered, by keys that say nothing.
static TABLE: Mutex<BTreeMap<u64, Arc<Segment>>> = Mutex::new(BTreeMap::new());

/// A place in the table.
struct Place(u64);

impl Place {
    fn take(segment: Segment) -> Self {
        let segment = Arc::new(segment);
        let mut table = TABLE.lock();
        loop {
            let key = random();
            if let (1.., Entry::Vacant(place)) = (key, table.entry(key)) {
                place.insert(segment);
                return Self(key);
            }
        }
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        TABLE.lock().remove(&self.0);
    }
}

pub(crate) fn random() -> u64 {
    RandomState::new().build_hasher().finish()
}
