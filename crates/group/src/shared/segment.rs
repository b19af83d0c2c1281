//! A rank's share of the memory that all ranks of a group can reach: words for flags in front, data behind.
//!
//! Who may touch which bytes when is what the protocols of `brigade-sync` settle; the functions here are `unsafe` so that
//! every use says which rule makes it alone.

#[cfg(target_os = "linux")]
use super::memfd::Memfd;
use brigade_device::{Error, Result};
#[cfg(target_os = "linux")]
use memmap2::MmapRaw;
use std::{
    alloc::{Layout, alloc_zeroed, dealloc},
    ops::Range,
    ptr::NonNull,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
};

/// One rank's shared memory.
pub struct Segment {
    base: NonNull<u8>,
    size: usize,
    words: usize,
    memory: Memory,
}

/// Where the bytes are.
enum Memory {
    Heap {
        start: *mut u8,
        layout: Layout,
    },
    /// A part of a rank's file, from this byte on. The mapping goes with it.
    #[cfg(target_os = "linux")]
    File {
        _map: MmapRaw,
        file: Memfd,
        start: u64,
    },
}

// SAFETY: the memory is plain bytes; words are atomics, and data is touched only through unsafe functions whose callers
// argue why they are alone.
unsafe impl Send for Segment {}
// SAFETY: as above.
unsafe impl Sync for Segment {}

impl Segment {
    /// `words` flags and `bytes` of data, all zero, that this process has for itself. [`Sharing`](crate::Sharing) makes
    /// those that others reach.
    ///
    /// # Errors
    /// [`Error::Backend`] if there is no memory for it.
    pub fn new(words: usize, bytes: usize) -> Result<Self> {
        /// A page: not asked of the allocator, which would then write all the zeros itself, instead of taking pages that
        /// cost nothing until they are used.
        const ALIGN: usize = 4096;
        let refused = || Self::refused(words, bytes);
        let size = Self::size(words, bytes)?;
        let room = size.checked_add(ALIGN).ok_or_else(refused)?;
        let layout = Layout::from_size_align(room, align_of::<u64>()).map_err(|_| refused())?;
        // SAFETY: the size is not 0.
        let start = unsafe { alloc_zeroed(layout) };
        if start.is_null() {
            return Err(refused());
        }
        // SAFETY: it is less than `ALIGN` bytes to a multiple of that, which leaves room for `size`.
        let base = unsafe { start.add(start.align_offset(ALIGN)) };
        Ok(Self {
            base: NonNull::new(base).ok_or_else(refused)?,
            size,
            words,
            memory: Memory::Heap { start, layout },
        })
    }

    /// A part of a rank's file, from byte `start` on.
    #[cfg(target_os = "linux")]
    pub(crate) fn map(file: &Memfd, start: u64, words: usize, bytes: usize) -> Result<Self> {
        let size = Self::size(words, bytes)?;
        let map = file.map(start, size)?;
        Ok(Self {
            base: NonNull::new(map.as_mut_ptr()).ok_or_else(|| Self::refused(words, bytes))?,
            size,
            words,
            memory: Memory::File {
                _map: map,
                file: file.clone(),
                start,
            },
        })
    }

    /// Bytes of a segment in all, never 0.
    pub(crate) fn size(words: usize, bytes: usize) -> Result<usize> {
        words
            .checked_mul(8)
            .and_then(|front| front.checked_next_multiple_of(64))
            .and_then(|front| front.checked_add(bytes.max(1)))
            .ok_or_else(|| Self::refused(words, bytes))
    }

    fn refused(words: usize, bytes: usize) -> Error {
        Error::Backend {
            call: "allocate shared memory",
            code: i64::try_from(words.saturating_mul(8).saturating_add(bytes)).unwrap_or(i64::MAX),
            source: None,
        }
    }

    /// Gives the memory back to the system before all mappings are gone. To be called by its owner, when no rank uses it
    /// any more.
    pub fn give_back(&self) {
        match &self.memory {
            Memory::Heap { .. } => {}
            #[cfg(target_os = "linux")]
            Memory::File { file, start, .. } => file.give_back(*start, self.size),
        }
    }

    /// Bytes before the data.
    fn data_offset(words: usize) -> usize {
        (words * 8).next_multiple_of(64)
    }

    /// Where these bytes of data are in this process.
    ///
    /// # Panics
    /// If they lie outside of the data; [`read`](Self::read) and [`write`](Self::write) too.
    pub fn data(&self, range: &Range<usize>) -> *mut u8 {
        let start = Self::data_offset(self.words);
        assert!(
            range.start <= range.end && range.end <= self.size - start,
            "shared memory: {range:?} lies outside"
        );
        // SAFETY: checked to lie inside the allocation.
        unsafe { self.base.as_ptr().add(start + range.start) }
    }

    /// Bytes of data.
    ///
    /// # Safety
    /// Nobody writes these bytes while the slice lives.
    pub unsafe fn read(&self, range: Range<usize>) -> &[u8] {
        // SAFETY: `data` checks the bounds; the caller promises that nobody writes.
        unsafe { std::slice::from_raw_parts(self.data(&range), range.len()) }
    }

    /// Bytes of data, to be written.
    ///
    /// # Safety
    /// Nobody else touches these bytes while the slice lives.
    #[expect(clippy::mut_from_ref, reason = "the caller promises to be alone")]
    pub unsafe fn write(&self, range: Range<usize>) -> &mut [u8] {
        // SAFETY: `data` checks the bounds; the caller promises to be alone.
        unsafe { std::slice::from_raw_parts_mut(self.data(&range), range.len()) }
    }
}

/// Data that is words: buffers of sums, which ranks write and poll at the same time.
impl Segment {
    /// Bytes of data as words, which all ranks may read and write.
    ///
    /// # Panics
    /// If they lie outside of the data, or are not whole words.
    ///
    /// # Safety
    /// While the slice lives, nobody touches these bytes but as such words.
    pub unsafe fn data_words(&self, range: Range<usize>) -> &[AtomicU64] {
        assert!(
            range.start.is_multiple_of(8) && range.end.is_multiple_of(8),
            "shared memory: {range:?} are not whole words"
        );
        // SAFETY: `data` checks the bounds; data begins at a multiple of 64 bytes, and is zeroed or was stored so; the
        // caller promises that it is used as words only.
        unsafe { std::slice::from_raw_parts(self.data(&range).cast(), range.len() / 8) }
    }
}

/// Segments of users' regions: all of it is words, and bytes are copied word by word as relaxed atomics, so that a caller
/// who reads while a peer writes gets torn data, but nothing worse.
impl Segment {
    /// Words that `bytes` bytes take.
    pub fn words_for(bytes: usize) -> usize {
        bytes.div_ceil(8)
    }

    // Every look at a flag begins here.
    #[inline]
    fn atomics(&self) -> &[AtomicU64] {
        // SAFETY: the front of the allocation is `words` zeroed, aligned u64s, which are only ever used as atomics.
        unsafe { std::slice::from_raw_parts(self.base.as_ptr().cast(), self.words) }
    }

    /// Copies bytes in, from byte `offset` on.
    ///
    /// # Panics
    /// If they do not fit in the segment's words.
    pub fn store_bytes(&self, offset: usize, bytes: &[u8]) {
        for (word, place, part) in words_of(offset, bytes.len()) {
            let word = &self.atomics()[word];
            let part = &bytes[part];
            match part.try_into() {
                Ok(whole) => word.store(u64::from_ne_bytes(whole), Ordering::Relaxed),
                Err(_) => {
                    // A neighbour may be written by somebody else at the same time.
                    let merged = |old: u64| {
                        let mut all = old.to_ne_bytes();
                        all[place.clone()].copy_from_slice(part);
                        Some(u64::from_ne_bytes(all))
                    };
                    let _ = word.fetch_update(Ordering::Relaxed, Ordering::Relaxed, merged);
                }
            }
        }
    }

    /// Copies bytes out, from byte `offset` on.
    ///
    /// # Panics
    /// If they lie outside of the segment's words.
    pub fn load_bytes(&self, offset: usize, bytes: &mut [u8]) {
        for (word, place, part) in words_of(offset, bytes.len()) {
            let all = self.atomics()[word].load(Ordering::Relaxed).to_ne_bytes();
            bytes[part].copy_from_slice(&all[place]);
        }
    }
}

/// The words that `len` bytes from `offset` on touch: which word, which of its bytes, which of the `len`.
fn words_of(
    offset: usize,
    len: usize,
) -> impl Iterator<Item = (usize, Range<usize>, Range<usize>)> {
    let mut at = 0;
    std::iter::from_fn(move || {
        let (word, first) = ((offset + at) / 8, (offset + at) % 8);
        let take = (8 - first).min(len - at);
        let part = at..at + take;
        at += take;
        (take > 0).then_some((word, first..first + take, part))
    })
}

impl Drop for Segment {
    fn drop(&mut self) {
        if let Memory::Heap { start, layout } = self.memory {
            // SAFETY: allocated in `new` with this layout.
            unsafe { dealloc(start, layout) }
        }
    }
}

impl std::fmt::Debug for Segment {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(
            f,
            "Segment({} words, {} bytes in all)",
            self.words, self.size
        )
    }
}

/// A segment, shared; as a slice, it is its words.
#[derive(Clone, Debug)]
pub struct SharedSegment(pub Arc<Segment>);

impl AsRef<[AtomicU64]> for SharedSegment {
    #[inline]
    fn as_ref(&self) -> &[AtomicU64] {
        self.0.atomics()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    #[cfg(target_os = "linux")]
    fn memory_costs_nothing_until_it_is_used() {
        const BYTES: usize = 1 << 28;
        let resident = || -> usize {
            let pages = std::fs::read_to_string("/proc/self/statm").unwrap();
            pages.split(' ').nth(1).unwrap().parse::<usize>().unwrap() * 4096
        };
        let before = resident();
        let segment = Segment::new(8, BYTES).unwrap();
        // SAFETY: nobody else has the segment.
        let data = unsafe { segment.data_words(0..BYTES) };
        assert_eq!(data.len(), BYTES / 8);
        data[data.len() - 1].store(1, Ordering::Relaxed);
        assert_eq!(data[0].load(Ordering::Relaxed), 0);
        let taken = resident().saturating_sub(before);
        assert!(taken < BYTES / 4, "{taken} bytes for {BYTES}");
    }

    #[test]
    fn bytes_come_back_at_every_offset_and_leave_neighbours_alone() {
        let segment = Segment::new(Segment::words_for(64), 0).unwrap();
        for offset in 0..24 {
            for len in 0..24 {
                segment.store_bytes(0, &[0xAA; 64]);
                let data: Vec<u8> = (0..len as u8).map(|b| b.wrapping_mul(37) ^ 0x5C).collect();
                segment.store_bytes(offset, &data);
                let mut all = [0; 64];
                segment.load_bytes(0, &mut all);
                let mut want = [0xAA; 64];
                want[offset..offset + len].copy_from_slice(&data);
                assert_eq!(all, want, "{len} bytes at {offset}");
                let mut back = vec![0; len];
                segment.load_bytes(offset, &mut back);
                assert_eq!(back, data);
            }
        }
    }
}
