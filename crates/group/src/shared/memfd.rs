//! Memory that processes share: a file without a name for each rank, that lives as long as somebody has it open.

use crate::machine::available_bytes;
use brigade_device::{Error, Result};
use memmap2::{MmapOptions, MmapRaw};
use rustix::{
    fs::{
        FallocateFlags, MemfdFlags, SealFlags, fallocate, fcntl_add_seals, fcntl_get_seals,
        ftruncate,
    },
    io::Errno,
};
use std::{fs::File, os::fd::OwnedFd, sync::Arc};

/// Parts of a file begin at multiples of this: no system has larger pages.
const STEP: u64 = 64 << 10;

/// One rank's file. It only grows; what is given back is taken from the system's memory, not from the file's length.
#[derive(Clone, Debug)]
pub(crate) struct Memfd(Arc<File>);

impl Memfd {
    /// A file with nothing in it, that nobody can shrink under a mapping.
    pub(crate) fn new() -> Result<Self> {
        let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
        let fd = rustix::fs::memfd_create("brigade", flags).map_err(failed("memfd_create"))?;
        fcntl_add_seals(&fd, SealFlags::SHRINK).map_err(failed("fcntl F_ADD_SEALS"))?;
        Ok(Self(Arc::new(File::from(fd))))
    }

    /// A peer's file.
    pub(crate) fn of_peer(fd: OwnedFd) -> Result<Self> {
        let seals = fcntl_get_seals(&fd).map_err(failed("fcntl F_GET_SEALS"))?;
        if seals.contains(SealFlags::SHRINK) {
            Ok(Self(Arc::new(File::from(fd))))
        } else {
            Err(Error::Group {
                step: "join: shared memory",
                what: "a peer's memory could shrink while it is in use".into(),
            })
        }
    }

    pub(crate) fn file(&self) -> &File {
        &self.0
    }

    /// Bytes so far.
    fn len(&self) -> Result<u64> {
        let metadata = self.0.metadata();
        metadata.map(|m| m.len()).map_err(io("fstat"))
    }

    /// Appends `bytes` bytes, all zero, and says where they begin. As with other memory, the system finds room for a page
    /// when it is first used; more than it has now is refused.
    pub(crate) fn grow(&self, bytes: usize) -> Result<u64> {
        let start = self.len()?.next_multiple_of(STEP);
        let bytes = (bytes as u64).max(1);
        let end = match start.checked_add(bytes) {
            Some(end) if bytes <= available_bytes() => end,
            _ => return Err(failed("ftruncate")(Errno::NOMEM)),
        };
        ftruncate(&*self.0, end).map_err(failed("ftruncate"))?;
        Ok(start)
    }

    /// Gives memory back to the system. Whoever still has it mapped reads zeros.
    pub(crate) fn give_back(&self, start: u64, bytes: usize) {
        let flags = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
        // Whole pages: the next part begins behind them.
        let bytes = (bytes as u64).max(1).next_multiple_of(STEP);
        // What could not be given back is given back with the file.
        let _ = fallocate(&*self.0, flags, start, bytes);
    }

    /// A part of the file, to be read and written.
    pub(crate) fn map(&self, start: u64, bytes: usize) -> Result<MmapRaw> {
        let len = self.len()?;
        match start.checked_add(bytes as u64) {
            Some(end) if end <= len => {}
            _ => {
                return Err(Error::Group {
                    step: "join: shared memory",
                    what: format!(
                        "a peer's memory has {len} bytes, {bytes} from byte {start} on are needed"
                    ),
                });
            }
        }
        MmapOptions::new()
            .offset(start)
            .len(bytes.max(1))
            .map_raw(&*self.0)
            .map_err(io("mmap"))
    }
}

fn failed(call: &'static str) -> impl Fn(Errno) -> Error {
    move |errno| Error::Backend {
        call,
        code: errno.raw_os_error().into(),
        source: Some(Arc::new(std::io::Error::from(errno))),
    }
}

pub(crate) fn io(call: &'static str) -> impl Fn(std::io::Error) -> Error {
    move |error| Error::Backend {
        call,
        code: error.raw_os_error().unwrap_or(0).into(),
        source: Some(Arc::new(error)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use rustix::fs::fstat;

    #[test]
    fn parts_are_apart_shared_and_given_back() {
        let mine = Memfd::new().unwrap();
        let theirs = Memfd::of_peer(OwnedFd::from(mine.file().try_clone().unwrap())).unwrap();
        let blocks = || fstat(mine.file()).unwrap().st_blocks;
        let first = mine.grow(100_000).unwrap();
        let second = mine.grow(0).unwrap();
        assert!(second >= first + 100_000);
        let (a, b) = (
            mine.map(first, 100_000).unwrap(),
            theirs.map(first, 100_000).unwrap(),
        );
        // SAFETY: both are mapped, and no other thread has them.
        unsafe {
            a.as_mut_ptr().add(99_999).write(7);
            assert_eq!(b.as_ptr().add(99_999).read(), 7);
        }
        let before = blocks();
        mine.give_back(first, 100_000);
        assert!(blocks() < before);
        // SAFETY: as above.
        assert_eq!(unsafe { b.as_ptr().add(99_999).read() }, 0);
    }

    #[test]
    fn a_file_that_could_shrink_or_is_too_short_is_refused() {
        let mine = Memfd::new().unwrap();
        mine.grow(10).unwrap();
        assert!(ftruncate(mine.file(), 0).is_err());
        assert!(mine.map(0, 1 << 20).is_err());
        let fd = rustix::fs::memfd_create("brigade", MemfdFlags::ALLOW_SEALING).unwrap();
        assert!(mine.grow(1 << 60).is_err() && mine.grow(usize::MAX).is_err());
        let error = Memfd::of_peer(fd).unwrap_err();
        assert_eq!(
            error.to_string(),
            "join: shared memory: a peer's memory could shrink while it is in use"
        );
    }
}
