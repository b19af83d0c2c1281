//! What all streams and buffers of one device share: the context, the memory pool, and a thread for what may not run in a
//! callback of the driver's.

use crate::{
    Missing,
    driver::{failed, refused},
    mark::CudaMark,
    retired::Retired,
};
use brigade_device::{Error, Mark, Result};
use cudarc::driver::{
    CudaContext,
    result::{self, mem_pool, stream},
    sys,
};
use parking_lot::Mutex;
use std::{
    ffi::c_void,
    mem::MaybeUninit,
    panic::{AssertUnwindSafe, catch_unwind},
    ptr,
    sync::{
        Arc,
        atomic::AtomicU64,
        mpsc::{Sender, channel},
    },
    thread,
    time::Duration,
};

/// Bytes that the pool keeps when nobody holds them: taking memory from the driver anew costs a synchronization.
const KEPT_BYTES: u64 = 1 << 30;

/// Longest that memory for a capture is waited for.
const TAKING: Duration = Duration::from_secs(60);

/// A piece of work for the keeper's thread.
pub(crate) type Task = Box<dyn FnOnce() + Send>;

/// One GPU of this process.
pub(crate) struct Card {
    pub(crate) context: Arc<CudaContext>,
    pool: sys::CUmemoryPool,
    /// A stream that no caller sees: memory is freed on it once others are done, and allocated on it during a capture.
    pub(crate) reclaim: sys::CUstream,
    /// For reading and wiping what kernels count, of all communicators: no kernel that waits is ever here.
    pub(crate) counting: sys::CUstream,
    /// Bytes in buffers that have not been dropped.
    pub(crate) held: AtomicU64,
    keeper: Mutex<Option<Sender<Task>>>,
    /// Graphs of this GPU that nobody launches any more.
    pub(crate) retired: Arc<Retired>,
}

// SAFETY: the handles belong to the context, not to a thread, and the driver locks what it changes.
unsafe impl Send for Card {}
// SAFETY: as above.
unsafe impl Sync for Card {}

impl std::fmt::Debug for Card {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Card({})", self.context.ordinal())
    }
}

impl Card {
    /// Takes the primary context of a GPU.
    pub(crate) fn open(ordinal: usize) -> Result<Arc<Self>, Missing> {
        let context = CudaContext::new(ordinal).map_err(refused("cuDevicePrimaryCtxRetain"))?;
        let pool = create_pool(ordinal).map_err(refused("cuMemPoolCreate"))?;
        let made =
            || stream::create(stream::StreamKind::NonBlocking).map_err(refused("cuStreamCreate"));
        let card = Self {
            context,
            pool,
            reclaim: made()?,
            counting: made()?,
            held: AtomicU64::new(0),
            keeper: Mutex::new(None),
            retired: Retired::of(ordinal),
        };
        let set = |attribute, to: *mut c_void| {
            // SAFETY: the pool was just created, and the caller's value has this attribute's type.
            unsafe { mem_pool::set_attribute(card.pool, attribute, to) }
                .map_err(refused("cuMemPoolSetAttribute"))
        };
        let mut kept = KEPT_BYTES;
        let threshold = sys::CUmemPool_attribute::CU_MEMPOOL_ATTR_RELEASE_THRESHOLD;
        set(threshold, ptr::from_mut(&mut kept).cast())?;
        // No stream waits for another unseen, to have the memory that work there still uses: that may wait for a peer which waits for what comes here.
        let mut depends = 0_i32;
        let dependencies =
            sys::CUmemPool_attribute::CU_MEMPOOL_ATTR_REUSE_ALLOW_INTERNAL_DEPENDENCIES;
        set(dependencies, ptr::from_mut(&mut depends).cast())?;
        Ok(Arc::new(card))
    }

    /// Makes the context current on this thread: every call of the driver needs it.
    pub(crate) fn bind(&self) -> Result<()> {
        self.context
            .bind_to_thread()
            .map_err(failed("cuCtxSetCurrent"))
    }

    /// Memory that is there when the work of `stream` comes to it; null for no bytes. With unspecified content.
    pub(crate) fn take(&self, bytes: usize, stream: sys::CUstream) -> Result<u64> {
        if bytes == 0 {
            return Ok(0);
        }
        self.bind()?;
        // SAFETY: pool and stream belong to this context.
        unsafe { mem_pool::alloc_async(self.pool, bytes, stream) }
            .map_err(failed("cuMemAllocFromPoolAsync"))
    }

    /// Memory that is there at return, whatever streams do: for a capture, which must not take part in it.
    pub(crate) fn take_now(self: &Arc<Self>, bytes: usize) -> Result<u64> {
        let address = self.take(bytes, self.reclaim)?;
        if address != 0 {
            self.zero_now(address, bytes)?;
        }
        Ok(address)
    }

    /// Zeros memory that nobody uses yet, and waits for it.
    pub(crate) fn zero_now(self: &Arc<Self>, address: u64, bytes: usize) -> Result<()> {
        self.bind()?;
        // SAFETY: the caller has just allocated or mapped this much there.
        unsafe { result::memset_d8_async(address, 0, bytes, self.reclaim) }
            .map_err(failed("cuMemsetD8Async"))?;
        CudaMark::record(self, self.reclaim)?.sync(TAKING)
    }

    /// Gives memory back when the work of `stream` has come so far.
    pub(crate) fn give(&self, address: u64, stream: sys::CUstream) -> Result<()> {
        // SAFETY: `address` came from `take`, and whoever gives it back has let go of it.
        unsafe { result::free_async(address, stream) }.map_err(failed("cuMemFreeAsync"))
    }

    /// Where to send work for the keeper: a thread that may call the driver, as a callback of the driver's may not.
    pub(crate) fn keeper(&self) -> Result<Sender<Task>> {
        let mut keeper = self.keeper.lock();
        if let Some(sender) = &*keeper {
            return Ok(sender.clone());
        }
        let (sender, tasks) = channel::<Task>();
        // Ends when the card and every callback that is still to come have dropped their senders.
        thread::Builder::new()
            .name(format!("brigade-cuda-{}", self.context.ordinal()))
            .spawn(move || {
                for task in tasks {
                    if catch_unwind(AssertUnwindSafe(task)).is_err() {
                        tracing::warn!("a completion hook panicked");
                    }
                }
            })
            .map_err(|e| Error::Backend {
                call: "start the thread for completion hooks",
                code: i64::from(e.raw_os_error().unwrap_or(0)),
                source: Some(Arc::new(e)),
            })?;
        *keeper = Some(sender.clone());
        Ok(sender)
    }
}

impl Drop for Card {
    fn drop(&mut self) {
        self.retired.sweep();
        if self.context.bind_to_thread().is_ok() {
            // SAFETY: all were created in `open`, and are destroyed once; the driver lets what is in flight end first.
            let ended = unsafe {
                (
                    [self.reclaim, self.counting].map(|s| stream::destroy(s)),
                    mem_pool::destroy(self.pool),
                )
            };
            tracing::debug!(?ended, "GPU closed");
        }
    }
}

/// A pool of this GPU's memory, not to be exported.
fn create_pool(ordinal: usize) -> Result<sys::CUmemoryPool, result::DriverError> {
    let pinned = sys::CUmemAllocationType::CU_MEM_ALLOCATION_TYPE_PINNED as i32;
    let not_exported = 0;
    let on_device = sys::CUmemLocationType::CU_MEM_LOCATION_TYPE_DEVICE as i32;
    let mut properties = MaybeUninit::<sys::CUmemPoolProps>::zeroed();
    let fields = [pinned, not_exported, on_device, ordinal as i32];
    // SAFETY: the struct begins with these four integers in every version of the driver's interface; the rest is zero, as it
    // must be. Written so because its bindings name the last one differently from version to version.
    unsafe {
        properties.as_mut_ptr().cast::<[i32; 4]>().write(fields);
        mem_pool::create(properties.as_ptr())
    }
}
