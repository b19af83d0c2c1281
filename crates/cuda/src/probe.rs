//! Shows that this build's kernels run on a GPU: one fill and one bounded wait, each from loading to reading the result.

use crate::{
    Kernel, KernelSet, Launch, Missing,
    devices::devices,
    driver::refused,
    types::{nanoseconds, poison_pattern},
};
use brigade_device::{DataType, FaultRecord};
use brigade_kernels::{FillParams, PostParams, WaitParams, fatbin};
use cudarc::driver::{
    CudaContext,
    result::{self, stream},
    sys,
};
use std::{ops::Range, sync::Arc, time::Duration};

/// The smallest kernels, loaded on one GPU.
#[derive(Debug)]
pub struct Probe {
    context: Arc<CudaContext>,
    fill: Kernel<FillParams>,
    post: Kernel<PostParams>,
    wait: Kernel<WaitParams>,
}

/// One wait: for what, how long, and what happens meanwhile.
#[derive(Clone, Copy, Debug)]
pub struct WaitCase {
    /// The flag to wait for: generation 8, signature 24, epoch 32 bits.
    pub expected: u64,
    /// How long at most.
    pub timeout: Duration,
    /// What another kernel posts, and how long after its start.
    pub posted: Option<(u64, Duration)>,
    /// Whether the abort word is set from the start.
    pub abort: bool,
}

/// How a wait ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Sight {
    /// 0 if the flag came, else the number of the fault's kind.
    pub outcome: u32,
    /// The abort word afterwards.
    pub abort_word: u32,
    /// What a wait that gave up left behind.
    pub record: Option<FaultRecord>,
}

const THREADS: u32 = 256;
/// `claimed` of a record that is written to its end (kernels/fault.cuh).
const CLAIM_COMPLETE: u32 = 2;

impl Probe {
    /// Loads the kernels on GPU `ordinal`.
    ///
    /// # Errors
    /// What is missing: driver, GPU or kernels.
    pub fn open(ordinal: usize) -> Result<Self, Missing> {
        let count = devices()?.len();
        if ordinal >= count {
            return Err(Missing::Ordinal { ordinal, count });
        }
        let (fill, probe) = (fatbin("fill")?, fatbin("probe")?);
        let context = CudaContext::new(ordinal).map_err(refused("cuDevicePrimaryCtxRetain"))?;
        let probe = KernelSet::load(&context, probe)?;
        Ok(Self {
            fill: KernelSet::load(&context, fill)?.kernel()?,
            post: probe.kernel()?,
            wait: probe.kernel()?,
            context,
        })
    }

    /// Allocates `bytes` bytes that all hold `before`, poisons those in `range` as an output of `dtype`, and returns them all.
    ///
    /// # Errors
    /// [`Missing::Refused`]. A range outside the bytes is cut to them.
    pub fn fill(
        &self,
        bytes: usize,
        before: u8,
        range: Range<usize>,
        dtype: DataType,
    ) -> Result<Vec<u8>, Missing> {
        self.bind()?;
        let end = range.end.min(bytes);
        let start = range.start.min(end);
        let memory = Region::device(bytes.max(1))?;
        let mut held = vec![before; bytes];
        memory.write(&held)?;
        let queue = Queue::new()?;
        let parameters = FillParams {
            out: memory.address + start as u64,
            bytes: (end - start) as u64,
            pattern: poison_pattern(dtype),
        };
        // SAFETY: the range lies inside `memory`, which outlives the synchronize below.
        unsafe {
            self.fill
                .launch(queue.0, Launch::grid(4, THREADS), parameters)?
        };
        queue.sync()?;
        memory.read(&mut held)?;
        Ok(held)
    }

    /// Runs one bounded wait, with a post beside it if the case asks for one.
    ///
    /// # Errors
    /// [`Missing::Refused`].
    pub fn wait(&self, case: WaitCase) -> Result<Sight, Missing> {
        self.bind()?;
        // Flag, abort word and outcome, each in its own 16 bytes.
        let words = Region::device(48)?;
        let mut held = [0u64; 6];
        held[2] = u64::from(case.abort);
        words.write(&held)?;
        let record = Region::pinned(64)?;
        let (waiting, posting) = (Queue::new()?, Queue::new()?);
        if let Some((value, delay)) = case.posted {
            let post = PostParams {
                flag: words.address,
                value,
                delay_ns: nanoseconds(delay),
            };
            // SAFETY: `words` outlives both synchronizes below.
            unsafe { self.post.launch(posting.0, Launch::grid(1, 1), post)? };
        }
        let wait = WaitParams {
            flag: words.address,
            abort: words.address + 16,
            fault: record.address,
            outcome: words.address + 32,
            expected: case.expected,
            timeout_ns: nanoseconds(case.timeout),
            call: 1,
            operation: 0,
            rank: 0,
            peer: 1,
            slot: 3,
        };
        // SAFETY: as above, and the same for `record`.
        unsafe { self.wait.launch(waiting.0, Launch::grid(1, 1), wait)? };
        waiting.sync()?;
        posting.sync()?;
        words.read(&mut held)?;
        // SAFETY: 64 pinned bytes, aligned to a page, and no kernel is left that writes them.
        let left = unsafe { std::ptr::read_volatile(record.address as *const [u64; 8]) };
        Ok(Sight {
            outcome: held[4] as u32,
            abort_word: held[2] as u32,
            record: FaultRecord::from_words(left).filter(|r| r.claimed == CLAIM_COMPLETE),
        })
    }

    fn bind(&self) -> Result<(), Missing> {
        self.context
            .bind_to_thread()
            .map_err(refused("cuCtxSetCurrent"))
    }
}

/// Memory of the current context, freed on drop.
struct Region {
    address: u64,
    pinned: bool,
}

impl Region {
    fn device(bytes: usize) -> Result<Self, Missing> {
        // SAFETY: a context is current (`Probe::bind`); freed once, in `drop`.
        let address = unsafe { result::malloc_sync(bytes) }.map_err(refused("cuMemAlloc"))?;
        Ok(Self {
            address,
            pinned: false,
        })
    }

    /// Zeroed, and at the same address for the GPU.
    fn pinned(bytes: usize) -> Result<Self, Missing> {
        let flags = sys::CU_MEMHOSTALLOC_PORTABLE | sys::CU_MEMHOSTALLOC_DEVICEMAP;
        // SAFETY: as above.
        let pointer =
            unsafe { result::malloc_host(bytes, flags) }.map_err(refused("cuMemHostAlloc"))?;
        // SAFETY: just allocated with this size.
        unsafe { std::ptr::write_bytes(pointer.cast::<u8>(), 0, bytes) };
        Ok(Self {
            address: pointer as u64,
            pinned: true,
        })
    }

    fn write<T: Copy>(&self, from: &[T]) -> Result<(), Missing> {
        // SAFETY: callers pass no more than they allocated; the call is complete when it returns.
        unsafe { result::memcpy_htod_sync(self.address, from) }.map_err(refused("cuMemcpyHtoD"))
    }

    fn read<T: Copy>(&self, into: &mut [T]) -> Result<(), Missing> {
        // SAFETY: as above; `T` is u8 or u64, so that every bit pattern is a value.
        unsafe { result::memcpy_dtoh_sync(into, self.address) }.map_err(refused("cuMemcpyDtoH"))
    }
}

impl Drop for Region {
    fn drop(&mut self) {
        // SAFETY: allocated by the matching call, freed once. cuMemFree waits for kernels that use it.
        let _ = unsafe {
            if self.pinned {
                result::free_host(self.address as *mut _)
            } else {
                result::free_sync(self.address)
            }
        };
    }
}

/// A stream of the current context.
struct Queue(sys::CUstream);

impl Queue {
    fn new() -> Result<Self, Missing> {
        stream::create(stream::StreamKind::NonBlocking)
            .map(Self)
            .map_err(refused("cuStreamCreate"))
    }

    fn sync(&self) -> Result<(), Missing> {
        // SAFETY: created above, destroyed in `drop` only.
        unsafe { stream::synchronize(self.0) }.map_err(refused("cuStreamSynchronize"))
    }
}

impl Drop for Queue {
    fn drop(&mut self) {
        // SAFETY: destroyed once; the driver lets the work in it end first.
        let _ = unsafe { stream::destroy(self.0) };
    }
}
