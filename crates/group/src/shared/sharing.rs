//! How ranks get at each other's memory: threads of one process through a table in it, processes of one machine through
//! files.

use super::{Segment, SharedSegment};
use crate::{agree, messages};
use brigade_device::{Bootstrap, Error, Result};
use parking_lot::Mutex;
use std::{
    collections::{BTreeMap, btree_map::Entry},
    hash::{BuildHasher, Hasher, RandomState},
    sync::{Arc, LazyLock},
    time::Duration,
};

#[cfg(target_os = "linux")]
use super::{
    memfd::Memfd,
    pulse::{Pulse, Pulses},
};

/// Tells this process from others, on this machine and elsewhere.
static PROCESS: LazyLock<u64> = LazyLock::new(random);

/// How all ranks of a group share memory, and how they notice that a peer's process ended.
#[derive(Debug)]
pub struct Sharing(Way);

#[derive(Debug)]
enum Way {
    /// All ranks are threads of this process.
    Table,
    /// Every rank has a file that all have open, and a pulse.
    #[cfg(target_os = "linux")]
    Files { files: Vec<Memfd>, pulses: Pulses },
}

/// A segment that all ranks may take, while this lives.
#[derive(Debug)]
pub struct Offer {
    /// What they take it by; never 0.
    pub key: u64,
    _place: Option<Place>,
}

impl Sharing {
    /// Finds out whether all ranks are threads of one process, and gives each a file and a pulse if not. All ranks succeed,
    /// or all fail. Each step may take `within`.
    ///
    /// # Errors
    /// [`Error::Group`] if a rank is missing, or has no files and pipes; [`Error::Unsupported`] (`other-process`) for ranks
    /// in several processes on a system other than Linux.
    pub fn between(boot: &dyn Bootstrap, within: Duration) -> Result<Self> {
        // The number of a process tells it from its own forks.
        let process = format!("{:016x} {}", *PROCESS, std::process::id());
        let processes = messages(boot, process.as_bytes(), within)?;
        if processes.iter().all(|p| p == process.as_bytes()) {
            Ok(Self(Way::Table))
        } else {
            Way::between_processes(boot, within).map(Self)
        }
    }

    /// Whether all ranks are threads of this process.
    pub fn one_process(&self) -> bool {
        matches!(self.0, Way::Table)
    }

    /// Makes this rank's segment, and gives everybody's in rank order. All ranks succeed, or all fail. Each step may take
    /// `within`.
    ///
    /// # Errors
    /// [`Error::Group`] that names the ranks that are missing, or that have no memory.
    pub fn exchange(
        &self,
        boot: &dyn Bootstrap,
        words: usize,
        bytes: usize,
        within: Duration,
    ) -> Result<Vec<SharedSegment>> {
        let offer = self.offer(boot.rank(), words, bytes);
        let key = offer.as_ref().map_or(0, |offer| offer.key);
        let keys = messages(boot, &key.to_le_bytes(), within)?;
        let take = |(owner, key): (usize, &Vec<u8>)| {
            let key = u64::from_le_bytes(key.as_slice().try_into().map_err(|_| Error::Group {
                step: "join: shared memory",
                what: format!("rank {owner} sent {} bytes instead of 8", key.len()),
            })?);
            self.take(owner, key, words, bytes).map(SharedSegment)
        };
        // The offer stands until all ranks have taken it.
        let found = match &offer {
            Ok(_) => keys
                .iter()
                .enumerate()
                .map(take)
                .collect::<Result<Vec<_>>>(),
            Err(error) => Err(error.clone()),
        };
        agree(boot, "join: shared memory", found, within)
    }

    /// Makes a segment of rank `rank`, which is this one.
    ///
    /// # Errors
    /// [`Error::Backend`] if there is no memory for it.
    #[cfg_attr(not(target_os = "linux"), expect(unused_variables))]
    pub fn offer(&self, rank: usize, words: usize, bytes: usize) -> Result<Offer> {
        match &self.0 {
            Way::Table => {
                let place = Place::take(Segment::new(words, bytes)?);
                Ok(Offer {
                    key: place.0,
                    _place: Some(place),
                })
            }
            #[cfg(target_os = "linux")]
            Way::Files { files, .. } => {
                let start = files[rank].grow(Segment::size(words, bytes)?)?;
                Ok(Offer {
                    key: start + 1,
                    _place: None,
                })
            }
        }
    }

    /// The segment that `owner` offered, with as many words and bytes; this rank's own too.
    ///
    /// # Errors
    /// [`Error::Group`] if there is none; [`Error::Backend`] if it cannot be mapped.
    #[cfg_attr(not(target_os = "linux"), expect(unused_variables))]
    pub fn take(&self, owner: usize, key: u64, words: usize, bytes: usize) -> Result<Arc<Segment>> {
        let missing = || Error::Group {
            step: "join: shared memory",
            what: format!("rank {owner} could not make its segment"),
        };
        match &self.0 {
            Way::Table => TABLE.lock().get(&key).cloned().ok_or_else(missing),
            #[cfg(target_os = "linux")]
            Way::Files { files, .. } => {
                let start = key.checked_sub(1).ok_or_else(missing)?;
                Segment::map(&files[owner], start, words, bytes).map(Arc::new)
            }
        }
    }

    /// Whether the process of a peer is known to have ended.
    #[cfg_attr(not(target_os = "linux"), expect(unused_variables))]
    pub fn has_died(&self, peer: usize) -> bool {
        match &self.0 {
            Way::Table => false,
            #[cfg(target_os = "linux")]
            Way::Files { pulses, .. } => pulses.stopped(peer),
        }
    }
}

impl Way {
    /// Files for ranks in several processes. All ranks succeed, or all fail.
    #[cfg(target_os = "linux")]
    fn between_processes(boot: &dyn Bootstrap, within: Duration) -> Result<Self> {
        use crate::exchange_fds;
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
    fn between_processes(_: &dyn Bootstrap, _: Duration) -> Result<Self> {
        Err(brigade_device::Reason::new(
            "other-process",
            "a rank of this group runs in another process",
            "run all ranks of a host group as threads of one process: on this system, processes share no memory",
        )
        .into())
    }
}

/// Segments of this process that were offered, by keys that say nothing.
static TABLE: Mutex<BTreeMap<u64, Arc<Segment>>> = Mutex::new(BTreeMap::new());

/// A place in the table.
#[derive(Debug)]
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

fn random() -> u64 {
    RandomState::new().build_hasher().finish()
}
