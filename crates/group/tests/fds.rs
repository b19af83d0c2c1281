//! Passing descriptors: everybody gets everybody's, or all fail; through a folder that nobody else may enter.
#![cfg(unix)]
#![allow(clippy::unwrap_used)]

use brigade_device::{Bootstrap, Result};
use brigade_group::{ThreadGroup, exchange_fds, threads};
use std::{
    ffi::OsStr,
    fs::File,
    io::{Read, Write},
    os::unix::{
        ffi::OsStrExt,
        fs::{FileTypeExt, PermissionsExt},
        net::UnixStream,
    },
    path::{Path, PathBuf},
    sync::Mutex,
    time::{Duration, Instant},
};

const LONG: Duration = Duration::from_secs(20);
const SHORT: Duration = Duration::from_secs(1);

/// A rank that looks at rank 0's socket as soon as it knows the path.
struct Spy<'a> {
    boot: &'a ThreadGroup,
    look: &'a (dyn Fn(usize, &mut PathBuf) + Sync),
}

impl Bootstrap for Spy<'_> {
    fn rank(&self) -> usize {
        self.boot.rank()
    }

    fn size(&self) -> usize {
        self.boot.size()
    }

    fn all_gather(&self, mine: &[u8], within: Duration) -> Result<Vec<Vec<u8>>> {
        let mut all = self.boot.all_gather(mine, within)?;
        if all[0].starts_with(b"/") {
            let mut path = PathBuf::from(OsStr::from_bytes(&all[0]));
            (self.look)(self.rank(), &mut path);
            all[0] = path.as_os_str().as_bytes().to_vec();
        }
        Ok(all)
    }
}

/// Every rank gives the reading end of a pipe with its number in it. What each could read, or the error.
fn run(size: usize, within: Duration, look: &(dyn Fn(usize, &mut PathBuf) + Sync)) -> Vec<String> {
    let ranks = threads(size);
    let one = |boot: &ThreadGroup| {
        let (reader, mut writer) = std::io::pipe().unwrap();
        // One byte for each that reads.
        writer
            .write_all(&vec![b'0' + boot.rank() as u8; size])
            .unwrap();
        match exchange_fds(&Spy { boot, look }, reader, within) {
            Ok(all) => {
                let mut text = vec![0; size];
                for (fd, place) in all.into_iter().zip(text.chunks_mut(1)) {
                    File::from(fd).read_exact(place).unwrap();
                }
                String::from_utf8(text).unwrap()
            }
            Err(error) => error.to_string(),
        }
    };
    std::thread::scope(|s| {
        let handles: Vec<_> = ranks.iter().map(|b| s.spawn(|| one(b))).collect();
        handles.into_iter().map(|h| h.join().unwrap()).collect()
    })
}

#[test]
fn everybody_gets_everybodys_descriptor() {
    for size in [1, 2, 3, 8] {
        let seen = Mutex::new(Vec::new());
        let told = run(size, LONG, &|rank, path| {
            if rank == 0 {
                let folder = path.parent().unwrap().to_owned();
                let about = folder.metadata().unwrap();
                assert_eq!(about.permissions().mode() & 0o7777, 0o700);
                assert!(path.metadata().unwrap().file_type().is_socket());
                seen.lock().unwrap().push(folder);
            }
        });
        assert_eq!(told, vec!["01234567"[..size].to_owned(); size]);
        let folders = seen.into_inner().unwrap();
        assert_eq!(folders.len(), 1);
        assert!(!folders[0].exists());
    }
}

#[test]
fn a_rank_that_cannot_reach_rank_0_fails_all_in_time() {
    let start = Instant::now();
    let told = run(3, SHORT, &|rank, path| {
        if rank == 2 {
            *path = Path::new("/nowhere/fds").into();
        }
    });
    assert!(start.elapsed() < SHORT + Duration::from_secs(1));
    for text in &told {
        assert!(text.contains("/nowhere/fds: No such file"), "{text}");
        assert!(text.contains("are all ranks on one machine?"), "{text}");
        assert!(
            text.contains("rank 0: failed with \"missing: rank 2\""),
            "{text}"
        );
    }
}

#[test]
fn what_is_not_one_descriptor_fails_all() {
    for bytes in [&b""[..], b"x", b"four", b"a lot more than one number"] {
        let told = run(2, SHORT, &|rank, path| {
            if rank == 1 {
                let mut stream = UnixStream::connect(path).unwrap();
                stream.write_all(bytes).unwrap();
            }
        });
        let why = if bytes.is_empty() {
            "the other side closed the connection"
        } else {
            "not one number and one descriptor"
        };
        for text in &told {
            assert!(
                text.contains(&format!("rank 0: failed with {why:?}")),
                "{text}"
            );
        }
    }
}

#[test]
fn a_rank_that_says_nothing_ends_the_wait() {
    let silent = Mutex::new(None);
    let start = Instant::now();
    let told = run(2, SHORT, &|rank, path| {
        if rank == 1 {
            *silent.lock().unwrap() = Some(UnixStream::connect(path).unwrap());
        }
    });
    assert!(start.elapsed() < SHORT + Duration::from_secs(1));
    for text in &told {
        assert!(
            text.contains("failed with \"recvmsg: no answer in time\""),
            "{text}"
        );
    }
}
