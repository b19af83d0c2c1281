//! Host memory behind buffers. Every allocation carries a lock, so that safe code cannot alias.

use crate::{job::Job, window::Window};
use brigade_device::{Access, Adopted, Buffer, Error, Gate, MemoryType, Result, Storage};
use brigade_sync::Deadline;
use bytemuck::{Pod, Zeroable};
use parking_lot::{Mutex, RwLock, RwLockReadGuard, RwLockWriteGuard};
use smallvec::SmallVec;
use std::{
    any::Any,
    cell::RefCell,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
    time::Duration,
};

/// A cache line: allocations are aligned to it.
#[derive(Clone, Copy, Pod, Zeroable)]
#[repr(C, align(64))]
struct Line([u8; 64]);

/// Zeroed bytes, aligned to a cache line.
pub(crate) struct Bytes {
    lines: Vec<Line>,
    bytes: usize,
}

impl Bytes {
    pub(crate) fn zeroed(bytes: usize) -> Result<Self> {
        let lines = bytemuck::allocation::try_zeroed_vec(bytes.div_ceil(64))
            .map_err(|()| Error::no_memory(bytes))?;
        Ok(Self { lines, bytes })
    }

    pub(crate) fn copy_of(from: &[u8]) -> Result<Self> {
        let mut copy = Self::zeroed(from.len())?;
        copy.as_mut().copy_from_slice(from);
        Ok(copy)
    }
}

impl AsRef<[u8]> for Bytes {
    fn as_ref(&self) -> &[u8] {
        &bytemuck::cast_slice(&self.lines)[..self.bytes]
    }
}

impl AsMut<[u8]> for Bytes {
    fn as_mut(&mut self) -> &mut [u8] {
        &mut bytemuck::cast_slice_mut(&mut self.lines)[..self.bytes]
    }
}

/// An allocation of the device's own.
pub(crate) struct Heap {
    content: RwLock<Bytes>,
    address: u64,
    bytes: usize,
    held: Arc<AtomicU64>,
}

impl Heap {
    pub(crate) fn new(bytes: usize, held: &Arc<AtomicU64>) -> Result<Self> {
        let content = Bytes::zeroed(bytes)?;
        held.fetch_add(bytes as u64, Ordering::Relaxed);
        Ok(Self {
            address: content.lines.as_ptr() as u64,
            content: RwLock::new(content),
            bytes,
            held: Arc::clone(held),
        })
    }
}

impl Drop for Heap {
    fn drop(&mut self) {
        self.held.fetch_sub(self.bytes as u64, Ordering::Relaxed);
    }
}

impl std::fmt::Debug for Heap {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Heap({:#x}, {} bytes)", self.address, self.bytes)
    }
}

impl Storage for Heap {
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

/// The kinds of storage that the host device can reach.
enum Reach<'a> {
    Heap(&'a Heap),
    Window(&'a Window),
    Adopted(&'a Adopted),
}

fn reach(buffer: &Buffer) -> Result<Reach<'_>> {
    let storage = buffer.storage();
    if let Some(heap) = storage.downcast() {
        Ok(Reach::Heap(heap))
    } else if let Some(window) = storage.downcast() {
        Ok(Reach::Window(window))
    } else {
        match storage.downcast::<Adopted>() {
            Some(a) if a.memory() != MemoryType::Device => Ok(Reach::Adopted(a)),
            _ => Err(Error::invalid(
                "memory",
                format!("{:?}", buffer.storage()),
                "memory of the host device",
            )),
        }
    }
}

#[expect(dead_code, reason = "gates are held, not read")]
enum ReadGuard<'a> {
    Heap(RwLockReadGuard<'a, Bytes>),
    Window(RwLockReadGuard<'a, bool>, &'a Window),
    Adopted(RwLockReadGuard<'a, Access>, &'a Adopted),
    Copy(Bytes),
}

#[expect(dead_code, reason = "gates are held, not read")]
enum WriteGuard<'a> {
    Heap(RwLockWriteGuard<'a, Bytes>),
    Window(RwLockWriteGuard<'a, bool>, &'a Window),
    Adopted(RwLockWriteGuard<'a, Access>, &'a Adopted),
}

fn stale() -> Error {
    Error::invalid(
        "buffer",
        "rows of a user buffer that has gone on",
        "rows of the lease's last call",
    )
}

impl<'a> ReadGuard<'a> {
    /// `None` while somebody writes.
    fn try_lock(buffer: &'a Buffer) -> Result<Option<Self>> {
        Ok(match reach(buffer)? {
            // Recursive: an operation may read the same allocation twice while a writer waits.
            Reach::Heap(h) => h.content.try_read_recursive().map(Self::Heap),
            Reach::Window(w) => match w.gate().try_read_recursive() {
                Some(open) if !*open => return Err(stale()),
                guard => guard.map(|g| Self::Window(g, w)),
            },
            Reach::Adopted(a) => match a.gate().lock().try_read_recursive() {
                Some(access) => {
                    Gate::check(*access, Access::Read)?;
                    Some(Self::Adopted(access, a))
                }
                None => None,
            },
        })
    }

    fn bytes(&self, buffer: &Buffer) -> &[u8] {
        let range = buffer.offset_bytes()..buffer.offset_bytes() + buffer.bytes();
        match self {
            Self::Heap(g) => &(**g).as_ref()[range],
            // SAFETY: the guard shows that the gate is open to this rank's views for reading, so no peer writes.
            Self::Window(_, w) => unsafe { &w.bytes()[range] },
            // SAFETY: whoever adopted the memory promised that it is valid while its owner lives, which `buffer`
            // keeps alive, and that nobody else writes to it while an operation runs; the guard keeps other operations from
            // writing, and whoever lent the memory from taking it back.
            Self::Adopted(_, a) => unsafe {
                std::slice::from_raw_parts((a.address() as *const u8).add(range.start), range.len())
            },
            Self::Copy(bytes) => bytes.as_ref(),
        }
    }
}

impl<'a> WriteGuard<'a> {
    fn try_lock(buffer: &'a Buffer) -> Result<Option<Self>> {
        Ok(match reach(buffer)? {
            Reach::Heap(h) => h.content.try_write().map(Self::Heap),
            Reach::Window(w) => match w.gate().try_write() {
                Some(open) if !*open => return Err(stale()),
                guard => guard.map(|g| Self::Window(g, w)),
            },
            Reach::Adopted(a) => match a.gate().lock().try_write() {
                Some(access) => {
                    Gate::check(*access, Access::Write)?;
                    Some(Self::Adopted(access, a))
                }
                None => None,
            },
        })
    }

    fn bytes(&mut self, buffer: &Buffer) -> &mut [u8] {
        let range = buffer.offset_bytes()..buffer.offset_bytes() + buffer.bytes();
        match self {
            Self::Heap(g) => &mut (**g).as_mut()[range],
            // SAFETY: the guard shows that the gate is open to this rank's views, and nobody else holds it.
            Self::Window(_, w) => unsafe { &mut w.bytes_mut()[range] },
            // SAFETY: as for reading; and nobody reads what an operation writes, by the same promise and the same guard.
            Self::Adopted(_, a) => unsafe {
                std::slice::from_raw_parts_mut(
                    (a.address() as *mut u8).add(range.start),
                    range.len(),
                )
            },
        }
    }
}

const A_BUFFER: &str = "a buffer";

/// How long an operation waits for others to let go of its buffers: in a communicator's call no longer than that may take.
const PATIENCE: Duration = Duration::from_secs(10);

/// How long the end of a call that failed may wait for an output, to mark it.
const LAST: Duration = Duration::from_secs(1);

thread_local! {
    /// The call of a communicator that this thread is in. It bounds every wait for a buffer, wherever in the call that is.
    static CALL: RefCell<Option<Job>> = const { RefCell::new(None) };
}

/// Does what a call is about, or what comes behind its end.
fn in_call_or_not<R>(job: Option<Job>, work: impl FnOnce() -> R) -> R {
    struct Before(Option<Job>);
    impl Drop for Before {
        fn drop(&mut self) {
            CALL.set(self.0.take());
        }
    }
    let _before = Before(CALL.replace(job));
    work()
}

/// Does a call's work: waits in it for buffers end with the call's deadline, and when the group is stopped.
pub(crate) fn in_call<R>(job: &Job, work: impl FnOnce() -> R) -> R {
    in_call_or_not(Some(job.clone()), work)
}

/// Takes all that an operation needs, or nothing: whoever holds one lock never waits for another.
///
/// # Errors
/// What the attempt failed with; the fault that stopped the group of the call that this thread is in; [`Error::Busy`].
pub(crate) fn until_free<T>(
    what: &'static str,
    within: Duration,
    mut attempt: impl FnMut() -> Result<Option<T>>,
) -> Result<T> {
    let own = Deadline::after(within);
    let over = || {
        CALL.with_borrow(|call| match call {
            Some(job) => match job.core.control.fault() {
                Some(fault) => Some(Error::Fault(fault)),
                None => (job.deadline.passed() || own.passed()).then_some(Error::Busy(what)),
            },
            None => own.passed().then_some(Error::Busy(what)),
        })
    };
    loop {
        if let Some(all) = attempt()? {
            return Ok(all);
        }
        if let Some(error) = over() {
            return Err(error);
        }
        std::thread::yield_now();
    }
}

/// Opens or shuts a gate, once nobody looks through it any more.
pub(crate) fn set_gate(gate: &RwLock<bool>, open: bool, what: &'static str) -> Result<()> {
    /// Of one attempt. A reader that comes again and again is kept out meanwhile.
    const ROUND: Duration = Duration::from_millis(5);
    let mut gate = until_free(what, PATIENCE, || Ok(gate.try_write_for(ROUND)))?;
    *gate = open;
    Ok(())
}

/// Reads several buffers at once.
pub(crate) fn reading<R>(
    inputs: &[&Buffer],
    work: impl FnOnce(&[&[u8]]) -> Result<R>,
) -> Result<R> {
    let guards = until_free(A_BUFFER, PATIENCE, || {
        inputs
            .iter()
            .map(|b| ReadGuard::try_lock(b))
            .collect::<Result<Option<SmallVec<[_; 6]>>>>()
    })?;
    let slices: SmallVec<[&[u8]; 6]> = guards.iter().zip(inputs).map(|(g, b)| g.bytes(b)).collect();
    work(&slices)
}

/// Reads several buffers and writes one. An input in the output's allocation is copied first, so that in-place calls and
/// overlaps mean what they say.
pub(crate) fn writing<R>(
    output: &Buffer,
    inputs: &[&Buffer],
    work: impl FnOnce(&mut [u8], &[&[u8]]) -> Result<R>,
) -> Result<R> {
    let (mut out, guards) = until_free(A_BUFFER, PATIENCE, || {
        let mut guards = SmallVec::<[_; 6]>::new();
        for b in inputs {
            let Some(guard) = ReadGuard::try_lock(b)? else {
                return Ok(None);
            };
            guards.push(if shares(b, output) {
                ReadGuard::Copy(Bytes::copy_of(guard.bytes(b))?)
            } else {
                guard
            });
        }
        Ok(WriteGuard::try_lock(output)?.map(|out| (out, guards)))
    })?;
    let slices: SmallVec<[&[u8]; 6]> = guards.iter().zip(inputs).map(|(g, b)| g.bytes(b)).collect();
    work(out.bytes(output), &slices)
}

/// Whether two buffers lie in one allocation, or adopted ones overlap.
pub(crate) fn shares(a: &Buffer, b: &Buffer) -> bool {
    let overlap = || {
        let (x, y) = (a.address(), b.address());
        x < y + b.bytes() as u64 && y < x + a.bytes() as u64
    };
    Arc::ptr_eq(a.storage(), b.storage()) || overlap()
}

/// Marks an output that nobody may trust.
pub(crate) fn poison(dtype: brigade_device::DataType, out: &mut [u8]) {
    let pattern = dtype.poison().to_le_bytes();
    for element in out.chunks_exact_mut(dtype.bytes()) {
        element.copy_from_slice(&pattern[..dtype.bytes()]);
    }
}

/// Marks what a call that failed was to write, so that nobody trusts it.
pub(crate) fn mark(out: &Buffer) {
    in_call_or_not(None, || {
        // Whoever keeps the buffer busy writes to it anyhow.
        if let Ok(mut guard) = until_free(A_BUFFER, LAST, || WriteGuard::try_lock(out)) {
            poison(out.dtype(), guard.bytes(out));
        }
    });
}

/// Memory for parts on their way, used again so that large ones do not cost page faults at every call.
#[derive(Default)]
pub(crate) struct Staging(Mutex<Vec<Bytes>>);

/// Part of a staging buffer on loan, with unspecified content.
pub(crate) struct Staged {
    bytes: Bytes,
    len: usize,
}

impl Staging {
    pub(crate) fn take(&self, len: usize) -> Result<Staged> {
        let mut kept = self.0.lock();
        let fits = kept.iter().position(|b| b.bytes >= len);
        let kept = fits.map(|i| kept.swap_remove(i));
        let bytes = kept.map_or_else(|| Bytes::zeroed(len), Ok)?;
        Ok(Staged { bytes, len })
    }

    pub(crate) fn put(&self, staged: Staged) {
        const KEPT: usize = 16;
        let mut kept = self.0.lock();
        if kept.len() < KEPT {
            kept.push(staged.bytes);
        }
    }
}

impl AsRef<[u8]> for Staged {
    fn as_ref(&self) -> &[u8] {
        &self.bytes.as_ref()[..self.len]
    }
}

impl AsMut<[u8]> for Staged {
    fn as_mut(&mut self) -> &mut [u8] {
        &mut self.bytes.as_mut()[..self.len]
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{HostDevice, gemm::Scratch};
    use brigade_device::{
        AllReduceParams, Comm, CommConfig, DataType, Device, DeviceExt, Loan, ParallelMode, Queues,
        ReduceOp, Stream,
    };
    use std::{sync::mpsc, thread, time::Instant};

    fn lend(values: &mut [u8], access: Access) -> Loan {
        let address = values.as_mut_ptr() as u64;
        let (memory, dtype) = (MemoryType::Host, DataType::U8);
        let shape = [values.len()];
        // SAFETY: the callers have the values for longer than the loan, and let go of them meanwhile.
        unsafe { Buffer::lend(address, memory, dtype, &shape, access, Arc::new(())) }.unwrap()
    }

    fn add(to: &Buffer, from: &Buffer) -> Result<()> {
        writing(to, &[from], |to, from| {
            to.iter_mut()
                .zip(from[0])
                .for_each(|(to, from)| *to += from);
            Ok(())
        })
    }

    #[test]
    fn operations_reach_lent_memory_until_it_is_back() {
        let (mut a, mut b) = ([1, 2, 3], [10, 20, 30]);
        let (from, to) = (lend(&mut a, Access::Read), lend(&mut b, Access::Write));
        let (kept, also) = (from.view().retain(), to.view().retain());
        add(&also, &kept).unwrap();
        add(&also, &also).unwrap();
        let refused = add(&kept, &also).unwrap_err().to_string();
        assert!(refused.contains("lent for reading"), "{refused}");
        drop((from, to));
        assert_eq!((a, b), ([1, 2, 3], [22, 44, 66]));
        for (to, from) in [(&also, &kept), (&kept, &also)] {
            let refused = add(to, from).unwrap_err().to_string();
            assert!(refused.contains("given back"), "{refused}");
        }
        assert_eq!((a, b), ([1, 2, 3], [22, 44, 66]));
    }

    /// A group of one whose calls may take so long, a buffer, and what is done while another thread reads the buffer.
    fn while_read<R>(deadline: Duration, work: impl FnOnce(&Comm, &Stream, &mut Buffer) -> R) -> R {
        let device = HostDevice::new().unwrap();
        let on = device.stream(0).unwrap();
        let mut data = device.upload(&on, &[1f32; 8], &[8]).unwrap();
        let config = CommConfig {
            deadline,
            first_deadline: deadline,
            ..CommConfig::new(ParallelMode::Tp)
        };
        let comm = device.join(&brigade_group::threads(1)[0], &config).unwrap();
        let read = data.view().retain();
        let (holds, held) = mpsc::channel();
        let (ends, ended) = mpsc::channel::<()>();
        thread::scope(|s| {
            s.spawn(move || {
                reading(&[&read], |_| {
                    holds.send(()).unwrap();
                    // Until the other side is dropped.
                    let _ = ended.recv();
                    Ok(())
                })
            });
            held.recv().unwrap();
            let result = work(&comm, &on, &mut data);
            drop(ends);
            result
        })
    }

    fn sum(comm: &Comm, on: &Stream, data: &mut Buffer) -> Result<()> {
        let params = AllReduceParams {
            data: data.view_mut(),
            from: None,
            op: ReduceOp::Sum,
            choice: None,
        };
        comm.lease(on)?.all_reduce(params).map(drop)
    }

    #[test]
    fn a_call_waits_for_buffers_until_its_deadline() {
        let deadline = Duration::from_millis(50);
        while_read(deadline, |comm, on, data| {
            let start = Instant::now();
            let busy = sum(comm, on, data);
            assert!(matches!(busy, Err(Error::Busy(A_BUFFER))), "{busy:?}");
            let took = start.elapsed();
            assert!(took >= deadline && took < PATIENCE, "{took:?}");
        });
    }

    #[test]
    fn a_call_waits_for_buffers_until_the_group_is_stopped() {
        while_read(PATIENCE * 6, |comm, on, data| {
            let start = Instant::now();
            thread::scope(|s| {
                let call = s.spawn(|| sum(comm, on, data));
                comm.abort();
                let stopped = call.join().unwrap();
                assert!(matches!(stopped, Err(Error::Fault(_))), "{stopped:?}");
            });
            assert!(start.elapsed() < PATIENCE, "{:?}", start.elapsed());
        });
    }

    #[test]
    fn memory_that_there_is_not_is_an_error() {
        let none = |result: Result<()>| {
            matches!(
                result,
                Err(Error::Backend {
                    call: "allocate",
                    ..
                })
            )
        };
        let scratch = Scratch::default();
        for len in [1 << 48, usize::MAX / 4, usize::MAX] {
            assert!(none(scratch.take(len).map(drop)), "{len}");
        }
        let device = HostDevice::new().unwrap();
        let on = device.stream(0).unwrap();
        let (memory, owner) = (MemoryType::Host, Arc::new(()));
        // SAFETY: nobody gets to read it, since there is no room for what would be read.
        let much = unsafe { Buffer::adopt(64, memory, DataType::U8, &[1 << 48], owner) }.unwrap();
        assert!(none(device.download::<u8>(&on, much.view()).map(drop)));
    }

    #[test]
    fn a_gate_is_shut_once_nobody_looks_through_it() {
        let gate = RwLock::new(true);
        let (looks, looked) = mpsc::channel();
        thread::scope(|s| {
            s.spawn(|| {
                let open = gate.read();
                looks.send(()).unwrap();
                // Long enough for one attempt.
                let start = Instant::now();
                while start.elapsed() < Duration::from_millis(50) {
                    thread::yield_now();
                }
                assert!(*open);
            });
            looked.recv().unwrap();
            set_gate(&gate, false, "the gate").unwrap();
            assert!(!*gate.read());
        });
    }
}
