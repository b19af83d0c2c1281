//! All-reduces that NCCL carries, in a communicator of NCCL's that is made at `join`, where its ranks are told to make one.
//!
//! NCCL waits without a bound, on the host and on the GPU, and its kernels know no stop word. So its communicator does not
//! block the host, which asks until a call is taken or has taken too long; a wait of our own goes on beside its kernels, and
//! ends by the call's deadline; and whatever stops the group makes the watch give NCCL's communicator up, which ends its
//! kernels. There is no way back: a group that was reset goes on without NCCL.

use crate::{
    CudaDevice,
    all_reduce::{Kind, Piece},
    card::Card,
    core::{Core, HEARSAY},
    job::{Job, Side},
    lane::Lane,
    mark::CudaMark,
    memory::DeviceMemory,
    nccl_comm::{
        Functions, Handle, IN_PROGRESS, Settings, Status, UniqueId, check, missing, operation,
        reduced_type,
    },
    quiet,
};
use brigade_device::{
    Bootstrap, Buffer, DataType, Error, FaultKind, FaultRecord, Group, MemoryType, Operation,
    Reason, ReduceOp, Result, Shape, Storage,
};
use brigade_group::{Control, agree};
use brigade_sync::Area;
use parking_lot::Mutex;
use std::{
    any::Any,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    thread,
    time::{Duration, Instant},
};

const STEP: &str = "join: NCCL";

/// Between two questions whether NCCL has taken a call.
const ROUND: Duration = Duration::from_micros(50);

/// Sums made at `join`, in bytes: NCCL connects ranks and loads kernels when it first takes a way, which may wait for the GPU,
/// and the way goes by size.
const FIRST: [usize; 4] = [4, 64 << 10, 1 << 20, 16 << 20];

/// One rank's communicator of NCCL's, until it is given up.
pub(crate) struct NcclSums {
    functions: Functions,
    card: Arc<Card>,
    /// NCCL takes one call at a time.
    comm: Mutex<Option<Handle>>,
    /// Whether the group was reset, and all ranks know that it is gone.
    gone: AtomicBool,
    /// Whether NCCL is through with giving it up.
    ended: AtomicBool,
}

// SAFETY: a communicator may be used by any thread, by one at a time, as the lock sees to.
unsafe impl Send for NcclSums {}
// SAFETY: as above.
unsafe impl Sync for NcclSums {}

impl std::fmt::Debug for NcclSums {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "NcclSums({:?})", self.card)
    }
}

impl NcclSums {
    /// All ranks make one, or all fail.
    pub(crate) fn join(
        boot: &dyn Bootstrap,
        device: &CudaDevice,
        shares: bool,
        within: Duration,
    ) -> Result<Arc<Self>> {
        let found = if shares { Err(shared()) } else { usable() };
        // Where it is missing, the reason with its remedy says more than the ranks' list.
        let own = found.as_ref().err().cloned();
        let (functions, init) =
            agree(boot, STEP, found, within).map_err(|ranks| own.unwrap_or(ranks))?;
        let id = UniqueId::of_group(&functions, boot, within)?;
        quiet::quiet(device.card.context.ordinal());
        let end = Instant::now() + within;
        let made = device.card.bind().and_then(|()| {
            let mut comm = std::ptr::null_mut();
            let (size, rank) = (boot.size() as _, boot.rank() as _);
            // SAFETY: the pointers are to a live handle and to a static; this thread's context is the device's.
            let status = unsafe { init(&raw mut comm, size, id, rank, &Settings::NON_BLOCKING) };
            if comm.is_null() {
                check("ncclCommInitRankConfig", status)?;
                return Err(missing("it makes no communicator"));
            }
            // From here on, dropping it gives NCCL's communicator up.
            let sums = Self {
                functions,
                card: Arc::clone(&device.card),
                comm: Mutex::new(Some(comm)),
                gone: AtomicBool::new(false),
                ended: AtomicBool::new(false),
            };
            sums.taken(comm, "ncclCommInitRankConfig", status, || remains(end))?;
            sums.warm_up(end)?;
            Ok(Arc::new(sums))
        });
        agree(boot, STEP, made, within)
    }

    /// Makes sums of several sizes, so that later ones find everything there.
    fn warm_up(&self, end: Instant) -> Result<()> {
        let most = FIRST.into_iter().max().unwrap_or(0);
        let memory = DeviceMemory::outside_of_streams(&self.card, most)?;
        let lane = Lane::new(&self.card, 0)?;
        let done = self.first_sums(memory.address(), &lane, end);
        if done.is_err() {
            // Kernels that still wait end when the communicator is given up. They keep the memory.
            std::mem::forget((memory, lane));
        }
        done
    }

    fn first_sums(&self, at: u64, lane: &Lane, end: Instant) -> Result<()> {
        for bytes in FIRST {
            for (dtype, op) in [
                (DataType::BF16, ReduceOp::Sum),
                (DataType::F32, ReduceOp::Prod),
            ] {
                let piece = Piece {
                    elements: bytes / dtype.bytes(),
                    from: at,
                    to: at,
                };
                self.enqueue((dtype, op), piece, lane.stream.cast(), || remains(end))?;
            }
        }
        let left = end.saturating_duration_since(Instant::now());
        match CudaMark::record(&self.card, lane.stream)?.reached(left)? {
            true => Ok(()),
            false => Err(late()),
        }
    }

    /// Enqueues a sum. `goes_on` says whether to wait on for NCCL to take it.
    fn enqueue(
        &self,
        (dtype, op): (DataType, ReduceOp),
        piece: Piece,
        stream: Handle,
        goes_on: impl Fn() -> Result<()>,
    ) -> Result<()> {
        let comm = self.comm.lock();
        let Some(comm) = *comm else {
            return Err(gone().into());
        };
        let (kind, op) = (reduced_type(dtype)?, operation(op));
        let (from, to) = (piece.from as *const _, piece.to as *mut _);
        // SAFETY: both buffers hold so many elements and are kept until the work is done, as callers see to.
        let status = unsafe {
            (self.functions.all_reduce)(from, to, piece.elements, kind, op, comm, stream)
        };
        self.taken(comm, "ncclAllReduce", status, goes_on)
    }

    /// Waits until NCCL is done with a call on the host.
    fn taken(
        &self,
        comm: Handle,
        call: &'static str,
        mut status: Status,
        goes_on: impl Fn() -> Result<()>,
    ) -> Result<()> {
        while status == IN_PROGRESS {
            goes_on()?;
            // tidy: sleeps because NCCL tells nobody when it is done.
            thread::sleep(ROUND);
            // SAFETY: the communicator has not been given up, and the pointer is to a live number.
            let asked = unsafe { (self.functions.async_error)(comm, &raw mut status) };
            check("ncclCommGetAsyncError", asked)?;
        }
        check(call, status)
    }

    /// What NCCL has failed with beside its calls. Nothing is known while a call is made.
    fn failed(&self) -> Option<Status> {
        let comm = (*self.comm.try_lock()?)?;
        let mut status = 0;
        // SAFETY: as above.
        let asked = unsafe { (self.functions.async_error)(comm, &raw mut status) };
        [asked, status]
            .into_iter()
            .find(|s| ![0, IN_PROGRESS].contains(s))
    }

    /// Hands on between NCCL and the group: what it fails with stops the group, and a group that is stopped gives it up. Where a
    /// peer is gone already, NCCL may miss it, which stops nobody who has nothing left to do.
    pub(crate) fn relay(self: &Arc<Self>, control: &Control) {
        let Group { rank, size, .. } = *control.group();
        let mut peers = (0..size).filter(|&p| p != rank);
        let ends = control.is_closed() || peers.any(|p| control.departed(p));
        if !ends
            && control.fault().is_none()
            && let Some(status) = self.failed()
        {
            control.raise(FaultRecord {
                seen: status as u64,
                ..broken(control)
            });
        }
        if control.fault().is_some() {
            self.give_up();
        }
    }

    /// Ends NCCL's kernels, and its communicator. On a thread of its own, since NCCL waits for graphs that use it to be
    /// dropped; their kernels find that it was given up, and end at once.
    pub(crate) fn give_up(self: &Arc<Self>) {
        let Some(comm) = self.comm.lock().take() else {
            return;
        };
        let (sums, comm) = (Arc::clone(self), Given(comm));
        let gives_up = thread::Builder::new().name("gives NCCL up".into());
        // Without a thread its kernels go on until their process ends.
        let _ = gives_up.spawn(move || {
            sums.abort(comm);
            sums.ended.store(true, Ordering::Release);
        });
    }

    fn abort(&self, Given(comm): Given) {
        if self.card.bind().is_ok() {
            // SAFETY: made once, taken out of its place once.
            let _ = unsafe { (self.functions.abort)(comm) };
        }
    }

    /// For a group that is reset: from here on calls are refused, on all ranks.
    pub(crate) fn retire(self: &Arc<Self>) {
        self.gone.store(true, Ordering::Release);
        self.give_up();
        // What NCCL frees may hold up the driver: better now, while no kernel waits.
        self.settle();
    }

    /// Waits until NCCL is through with being given up, if it is, but not for long: graphs may keep it.
    pub(crate) fn settle(&self) {
        if self.comm.lock().is_some() {
            return;
        }
        let end = Instant::now() + HEARSAY;
        while !self.ended.load(Ordering::Acquire) && Instant::now() < end {
            // tidy: sleeps because NCCL tells nobody when it is done.
            thread::sleep(ROUND);
        }
    }

    /// Whether calls can be made, as all ranks know.
    pub(crate) fn check(&self) -> Result<(), Reason> {
        match self.gone.load(Ordering::Acquire) {
            false => Ok(()),
            true => Err(gone()),
        }
    }
}

impl Drop for NcclSums {
    /// Nobody uses it any more: all of a communicator's work is done by then.
    fn drop(&mut self) {
        if let Some(comm) = self.comm.get_mut().take() {
            self.abort(Given(comm));
        }
    }
}

/// A communicator on its way to who gives it up.
struct Given(Handle);

// SAFETY: as for `NcclSums`.
unsafe impl Send for Given {}

/// Graphs keep it: they are refused once NCCL is gone.
#[derive(Debug)]
pub(crate) struct NcclUse(pub(crate) Arc<NcclSums>);

impl Storage for NcclUse {
    fn address(&self) -> u64 {
        0
    }
    fn bytes(&self) -> usize {
        0
    }
    fn memory(&self) -> MemoryType {
        MemoryType::Device
    }
    fn as_any(&self) -> &dyn Any {
        self
    }
}

impl NcclUse {
    pub(crate) fn buffer(sums: &Arc<NcclSums>) -> Result<Buffer> {
        let storage = Arc::new(Self(Arc::clone(sums)));
        Buffer::new(storage, DataType::U8, Shape::new(&[0])?)
    }
}

impl Job<'_> {
    /// A sum by NCCL, once all ranks are in the same call, and while a wait beside it sees to it that they all come out again.
    pub(crate) fn sum_by_nccl(&mut self, sums: &NcclSums, kind: Kind, piece: Piece) -> Result<()> {
        let core = self.core;
        self.steps.meet();
        let of = self.begin(Area::Scratch);
        self.fork_behind_steps()?;
        let mut beside = core.steps();
        beside.await_all(of, 0);
        self.steps_on(Side::Waiter, beside)?;
        if piece.elements > 0 {
            let end = Instant::now() + core.config.deadline;
            let goes_on = || match core.fault() {
                Some(fault) => Err(Error::Fault(fault)),
                None => remains(end),
            };
            sums.enqueue((kind.dtype, kind.op), piece, self.stream.cast(), goes_on)?;
        }
        self.steps.filled_to_all(of, core.rank(), 0);
        self.steps_now()?;
        self.join()?;
        self.steps.end(of);
        Ok(())
    }
}

impl Core {
    /// What carries NCCL's sums, as the plan says that it can.
    pub(crate) fn nccl(&self) -> Result<&Arc<NcclSums>> {
        let sums = self.memory.nccl.as_ref();
        sums.ok_or_else(|| brigade_plan::reason::no_nccl().into())
    }
}

/// The functions, with the one that makes communicators that do not block.
fn usable() -> Result<(Functions, crate::nccl_comm::Initialize)> {
    let functions = Functions::find()?;
    match functions.init_config {
        Some(init) => Ok((functions, init)),
        None => Err(missing("it is older than 2.14")),
    }
}

fn remains(end: Instant) -> Result<()> {
    if Instant::now() < end {
        return Ok(());
    }
    Err(late())
}

fn late() -> Error {
    Error::Group {
        step: "NCCL",
        what: "it has not done in time what this rank asked for".into(),
    }
}

fn broken(control: &Control) -> FaultRecord {
    let rank = control.group().rank as u32;
    FaultRecord {
        kind: FaultKind::Aborted,
        operation: Operation::AllReduce as u32,
        rank,
        peer: rank,
        slot: 0,
        generation: control.generation().into(),
        expected: 0,
        seen: 0,
        waited_ns: 0,
        call: 0,
        claimed: 1,
        across: 0,
    }
}

fn shared() -> Error {
    Reason::new(
        "nccl-shared",
        "NCCL serves no ranks that share a GPU",
        "give every rank a GPU of its own, or join without nccl",
    )
    .into()
}

fn gone() -> Reason {
    Reason::new(
        "nccl-gone",
        "NCCL's communicator ended with the group that was stopped, and a reset makes no other",
        "join anew, or leave the algorithm to the plan",
    )
}
