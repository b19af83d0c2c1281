//! Memory behind buffers. Dropping it never blocks: it is freed once the streams that used it have come so far.

use crate::{
    card::{Card, Task},
    driver::failed,
    kept::Kept,
    lane::Lane,
    window::Window,
};
use brigade_device::{Access, Adopted, Buffer, Error, Gate, MemoryType, Result, Storage};
use cudarc::driver::{result, sys};
use parking_lot::Mutex;
use smallvec::SmallVec;
use std::{
    any::Any,
    collections::BTreeMap,
    ops::Range,
    sync::{Arc, atomic::Ordering},
};

/// Streams that used an allocation.
type Users = SmallVec<[Arc<Lane>; 2]>;

fn note(users: &Mutex<Users>, lane: &Arc<Lane>) {
    let mut users = users.lock();
    if !users.iter().any(|u| Arc::ptr_eq(u, lane)) {
        users.push(Arc::clone(lane));
    }
}

/// The device's own memory, from its pool.
#[derive(Debug)]
pub(crate) struct DeviceMemory {
    card: Arc<Card>,
    address: u64,
    bytes: usize,
    users: Mutex<Users>,
}

impl DeviceMemory {
    /// With unspecified content, for work of this stream; or of others that wait for it.
    pub(crate) fn on(lane: &Arc<Lane>, bytes: usize) -> Result<Self> {
        let address = lane.card.take(bytes, lane.stream)?;
        Ok(Self::around(&lane.card, address, bytes, Some(lane)))
    }

    /// All zero, and there at once.
    pub(crate) fn outside_of_streams(card: &Arc<Card>, bytes: usize) -> Result<Self> {
        let address = card.take_now(bytes)?;
        Ok(Self::around(card, address, bytes, None))
    }

    /// The context that it was allocated in.
    pub(crate) fn context(&self) -> sys::CUcontext {
        self.card.context.cu_ctx()
    }

    fn around(card: &Arc<Card>, address: u64, bytes: usize, user: Option<&Arc<Lane>>) -> Self {
        card.held.fetch_add(bytes as u64, Ordering::Relaxed);
        Self {
            card: Arc::clone(card),
            address,
            bytes,
            users: Mutex::new(user.into_iter().map(Arc::clone).collect()),
        }
    }
}

impl Drop for DeviceMemory {
    fn drop(&mut self) {
        self.card
            .held
            .fetch_sub(self.bytes as u64, Ordering::Relaxed);
        if self.address != 0 {
            let users = std::mem::take(self.users.get_mut());
            free(Arc::clone(&self.card), self.address, users);
        }
    }
}

/// Frees memory after the work of its users: on the one stream that used it, else on the card's own.
fn free(card: Arc<Card>, address: u64, mut users: Users) {
    let given = match &users[..] {
        [only] => only.give(address),
        _ => Ok(false),
    };
    let result = given.and_then(|given| {
        if given {
            return Ok(());
        }
        while let Some(user) = users.pop() {
            let rest = || {
                let (card, mut users) = (Arc::clone(&card), users.clone());
                users.push(Arc::clone(&user));
                Box::new(move || free(card, address, users)) as Task
            };
            if !user.fence(card.reclaim, &card, rest) {
                return Ok(());
            }
        }
        card.bind()?;
        card.give(address, card.reclaim)
    });
    if let Err(error) = result {
        tracing::warn!(%error, "memory is lost");
    }
}

impl Storage for DeviceMemory {
    fn address(&self) -> u64 {
        self.address
    }
    fn bytes(&self) -> usize {
        self.bytes
    }
    fn memory(&self) -> MemoryType {
        MemoryType::Device
    }
    fn as_any(&self) -> &dyn Any {
        self
    }
}

/// Page-locked host memory that is out of use, by size. To free it waits for all GPUs, and keeps every other thread from the
/// driver meanwhile, so that no kernel that waits for one of them would ever end: it is used again instead.
static SPARE: Mutex<BTreeMap<usize, Vec<u64>>> = Mutex::new(BTreeMap::new());

/// Most bytes that lie in [`SPARE`]; beyond these, memory is freed all the same.
const MOST_SPARE: usize = 4 << 30;

/// Page-locked host memory comes in powers of two, from a page on, so that what was used fits again.
fn size_class(bytes: usize) -> usize {
    bytes.max(4096).next_power_of_two()
}

/// Page-locked host memory, at the same address for every GPU.
#[derive(Debug)]
pub(crate) struct Pinned {
    pages: Arc<Pages>,
    users: Mutex<Users>,
}

#[derive(Debug)]
struct Pages {
    card: Arc<Card>,
    address: u64,
    bytes: usize,
}

impl Pinned {
    /// All zero.
    pub(crate) fn new(card: &Arc<Card>, bytes: usize) -> Result<Self> {
        let class = size_class(bytes);
        let spare = SPARE.lock().get_mut(&class).and_then(Vec::pop);
        let address = match spare {
            Some(address) => address,
            None => {
                card.bind()?;
                let flags = sys::CU_MEMHOSTALLOC_PORTABLE | sys::CU_MEMHOSTALLOC_DEVICEMAP;
                // SAFETY: a context is current, which stays; freed once, or kept, in `Drop for Pages`.
                let pointer = unsafe { result::malloc_host(class, flags) };
                pointer.map_err(failed("cuMemHostAlloc"))? as u64
            }
        };
        // SAFETY: nobody else has these pages, which have at least this size.
        unsafe { std::ptr::write_bytes(address as *mut u8, 0, bytes) };
        card.held.fetch_add(bytes as u64, Ordering::Relaxed);
        Ok(Self {
            pages: Arc::new(Pages {
                card: Arc::clone(card),
                address,
                bytes,
            }),
            users: Mutex::default(),
        })
    }
}

impl Drop for Pinned {
    fn drop(&mut self) {
        let bytes = self.pages.bytes as u64;
        self.pages.card.held.fetch_sub(bytes, Ordering::Relaxed);
        for lane in std::mem::take(self.users.get_mut()) {
            let pages = Arc::clone(&self.pages);
            if let Err(error) = lane.after(Box::new(move |_| drop(pages))) {
                tracing::warn!(%error, "host memory is freed without waiting");
            }
        }
    }
}

impl Drop for Pages {
    fn drop(&mut self) {
        // All streams that used it have come so far.
        let class = size_class(self.bytes);
        {
            let mut spare = SPARE.lock();
            let kept: usize = spare.iter().map(|(class, list)| class * list.len()).sum();
            if kept + class <= MOST_SPARE {
                spare.entry(class).or_default().push(self.address);
                return;
            }
        }
        if self.card.bind().is_ok() {
            // SAFETY: allocated in `Pinned::new`, and in nobody's list.
            let _ = unsafe { result::free_host(self.address as *mut _) };
        }
    }
}

impl Storage for Pinned {
    fn address(&self) -> u64 {
        self.pages.address
    }
    fn bytes(&self) -> usize {
        self.pages.bytes
    }
    fn memory(&self) -> MemoryType {
        MemoryType::HostPinned
    }
    fn as_any(&self) -> &dyn Any {
        self
    }
}

/// Ordinary host memory. The driver copies from and to it before its calls return, so no work outlives it.
#[derive(Debug)]
pub(crate) struct HostMemory {
    card: Arc<Card>,
    _words: Vec<u64>,
    address: u64,
    bytes: usize,
}

impl HostMemory {
    /// All zero.
    pub(crate) fn new(card: &Arc<Card>, bytes: usize) -> Self {
        let mut words = vec![0u64; bytes.div_ceil(8)];
        card.held.fetch_add(bytes as u64, Ordering::Relaxed);
        Self {
            card: Arc::clone(card),
            address: words.as_mut_ptr() as u64,
            _words: words,
            bytes,
        }
    }
}

impl Drop for HostMemory {
    fn drop(&mut self) {
        self.card
            .held
            .fetch_sub(self.bytes as u64, Ordering::Relaxed);
    }
}

impl Storage for HostMemory {
    fn address(&self) -> u64 {
        self.address
    }
    fn bytes(&self) -> usize {
        self.bytes
    }
    fn memory(&self) -> MemoryType {
        MemoryType::Host
    }
    fn as_any(&self) -> &dyn Any {
        self
    }
}

/// The kinds of storage that a CUDA device can reach.
pub(crate) enum Place<'a> {
    Device(&'a DeviceMemory),
    Pinned(&'a Pinned),
    Host,
    Adopted(&'a Adopted),
    /// A communicator's memory, which lives until its work is done.
    Group(&'a Window),
    /// What is kept beside memory.
    Kept,
}

impl<'a> Place<'a> {
    /// Which kind an allocation is, if it may still be used.
    pub(crate) fn of(storage: &'a Arc<dyn Storage>) -> Result<Self> {
        if let Some(memory) = storage.downcast() {
            Ok(Self::Device(memory))
        } else if let Some(memory) = storage.downcast() {
            Ok(Self::Pinned(memory))
        } else if storage.downcast::<HostMemory>().is_some() {
            Ok(Self::Host)
        } else if let Some(memory) = storage.downcast::<Adopted>() {
            Gate::check(*memory.gate().lock().read_recursive(), Access::Read)?;
            Ok(Self::Adopted(memory))
        } else if let Some(window) = storage.downcast::<Window>() {
            window.check().map(|()| Self::Group(window))
        } else if storage.downcast::<Kept>().is_some() {
            Ok(Self::Kept)
        } else {
            Err(Error::invalid(
                "memory",
                format!("{storage:?}"),
                "memory of a CUDA device",
            ))
        }
    }

    /// Keeps the memory until the work of this stream is done.
    pub(crate) fn used_on(&self, lane: &Arc<Lane>) {
        match self {
            Self::Device(memory) => note(&memory.users, lane),
            Self::Pinned(memory) => note(&memory.users, lane),
            Self::Host | Self::Adopted(_) | Self::Group(_) | Self::Kept => {}
        }
    }

    /// Whether it is ordinary host memory, which no kernel and no graph can use.
    pub(crate) fn is_pageable(&self) -> bool {
        match self {
            Self::Host => true,
            Self::Adopted(memory) => memory.memory() == MemoryType::Host,
            Self::Device(_) | Self::Pinned(_) | Self::Group(_) | Self::Kept => false,
        }
    }
}

/// Checks that kernels of this card can use the buffer.
pub(crate) fn check_reach(card: &Card, field: &'static str, buffer: &Buffer) -> Result<()> {
    let of = match Place::of(buffer.storage())? {
        Place::Device(memory) => &*memory.card,
        Place::Group(window) => window.card(),
        place if place.is_pageable() => {
            let want = "Device or HostPinned memory, which a kernel can reach";
            return Err(Error::invalid(field, "Host memory", want));
        }
        _ => return Ok(()),
    };
    if of.context == card.context {
        return Ok(());
    }
    let (got, want) = (format!("memory of {of:?}"), format!("memory of {card:?}"));
    Err(Error::invalid(field, got, want))
}

/// Where a buffer lies.
pub(crate) fn bytes_of(buffer: &Buffer) -> Range<u64> {
    let start = buffer.address();
    start..start + buffer.bytes() as u64
}

/// Whether two places share a byte.
pub(crate) fn meet(a: &Range<u64>, b: &Range<u64>) -> bool {
    a.start < b.end && b.start < a.end
}

/// Whether two buffers do.
pub(crate) fn overlap(a: &Buffer, b: &Buffer) -> bool {
    meet(&bytes_of(a), &bytes_of(b))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_was_given_back_is_large_enough_for_what_takes_it() {
        for bytes in [0, 1, 192, 4096, 4097, 1 << 20, (1 << 20) + 1] {
            let class = size_class(bytes);
            assert!(class >= bytes && class >= 4096 && class.is_power_of_two());
            assert!(class < 2 * bytes.max(4096), "{bytes} take {class}");
        }
    }
}
