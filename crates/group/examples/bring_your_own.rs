//! A [`Bootstrap`] of one's own: ranks that meet in a folder that all of them see, on a shared file system for instance.
//! Everything that takes a `Bootstrap` works with it. `cargo run -p brigade-group --example bring_your_own`.
#![allow(clippy::print_stdout)]

use brigade_device::{Bootstrap, Error, Result};
use brigade_group::{Deadline, agree, vote};
use std::{
    fs, io,
    path::{Path, PathBuf},
    sync::atomic::{AtomicU64, Ordering},
    time::Duration,
};

/// One rank's place. The folder must be empty when the first rank comes.
struct FolderGroup {
    folder: PathBuf,
    rank: usize,
    size: usize,
    round: AtomicU64,
}

impl FolderGroup {
    fn path(&self, round: u64, rank: usize) -> PathBuf {
        self.folder.join(format!("{round}-{rank}"))
    }

    /// A file appears at once and whole, or not at all.
    fn put(&self, round: u64, mine: &[u8]) -> io::Result<()> {
        let unfinished = self.folder.join(format!("unfinished-{}", self.rank));
        fs::write(&unfinished, mine)?;
        fs::rename(unfinished, self.path(round, self.rank))
    }
}

impl Bootstrap for FolderGroup {
    fn rank(&self) -> usize {
        self.rank
    }

    fn size(&self) -> usize {
        self.size
    }

    fn all_gather(&self, mine: &[u8], within: Duration) -> Result<Vec<Vec<u8>>> {
        let failed = |what: String| Error::Group {
            step: "gathering in a folder",
            what,
        };
        let deadline = Deadline::after(within);
        // Every call is a round of its own, so that a slow rank still finds what it needs.
        let round = self.round.fetch_add(1, Ordering::Relaxed);
        self.put(round, mine).map_err(|e| failed(e.to_string()))?;
        let mut all = Vec::with_capacity(self.size);
        while all.len() < self.size {
            match fs::read(self.path(round, all.len())) {
                Ok(message) => all.push(message),
                Err(error) if error.kind() != io::ErrorKind::NotFound => {
                    return Err(failed(error.to_string()));
                }
                Err(_) if deadline.passed() => {
                    return Err(failed(format!("missing: rank {}", all.len())));
                }
                // tidy: sleeps because a folder does not tell when a file appears in it
                Err(_) => std::thread::sleep(Duration::from_millis(2)),
            }
        }
        Ok(all)
    }
}

fn rank(folder: &Path, rank: usize, size: usize) -> Result<String> {
    let within = Duration::from_secs(10);
    let boot = FolderGroup {
        folder: folder.to_owned(),
        rank,
        size,
        round: AtomicU64::new(0),
    };
    // A device would be given `&boot` now: `device.join(&boot, &config)`.
    vote(&boot, "scratch size", b"1 MiB", within)?;
    let mine = if rank == 1 { Err("no memory") } else { Ok(()) };
    let told = match agree(&boot, "allocating", mine, within) {
        Ok(()) => "all are ready".into(),
        Err(error) => error.to_string(),
    };
    Ok(format!("rank {rank}: {told}"))
}

fn main() -> std::result::Result<(), Box<dyn std::error::Error>> {
    const SIZE: usize = 3;
    let folder = std::env::temp_dir().join(format!("brigade-example-{}", std::process::id()));
    fs::create_dir(&folder)?;
    let told: Result<Vec<_>> = std::thread::scope(|s| {
        let start = |r| {
            s.spawn({
                let folder = &folder;
                move || rank(folder, r, SIZE)
            })
        };
        let ranks: Vec<_> = (0..SIZE).map(start).collect();
        let ends = ranks.into_iter().filter_map(|r| r.join().ok());
        ends.collect()
    });
    fs::remove_dir_all(&folder)?;
    for line in told? {
        println!("{line}");
    }
    Ok(())
}
