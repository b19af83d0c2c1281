//! All-reduces that NCCL carries, in a communicator of NCCL's that is made at `join`, where its ranks are told to make one.
//!
//! A wait of our own goes on beside NCCL's kernels, and ends by the call's deadline; and whatever stops the group makes the watch
//! give NCCL's communicator up (`nccl_bounded.rs`). There is no way back: a group that was reset goes on without NCCL.

use crate::{
    CudaDevice,
    all_reduce::{Kind, Piece},
    core::Core,
    job::{Job, Side},
    lane::Lane,
    mark::CudaMark,
    memory::DeviceMemory,
    nccl_bounded::{Bounded, Usable, gone, late, remains, shared},
    nccl_comm::{Handle, operation, reduced_type},
    quiet,
};
use brigade_device::{
    Bootstrap, Buffer, DataType, Error, FaultKind, FaultRecord, Group, Operation, Reason, ReduceOp,
    Result, Storage,
};
use brigade_group::{Control, agree};
use brigade_sync::{Area, Deadline};
use std::{
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    time::{Duration, Instant},
};

const STEP: &str = "join: NCCL";

/// Sums made at `join`, in bytes: NCCL connects ranks and loads kernels when it first takes a way, which may wait for the GPU,
/// and the way goes by size.
const FIRST: [usize; 4] = [4, 64 << 10, 1 << 20, 16 << 20];

/// One rank's communicator of NCCL's, until it is given up.
#[derive(Debug)]
pub(crate) struct NcclSums {
    comm: Arc<Bounded>,
    /// Whether the group was reset, and all ranks know that it is gone.
    gone: AtomicBool,
}

impl NcclSums {
    /// All ranks make one, or all fail.
    pub(crate) fn join(
        boot: &dyn Bootstrap,
        device: &CudaDevice,
        shares: bool,
        within: Duration,
    ) -> Result<Arc<Self>> {
        let found = if shares {
            Err(shared())
        } else {
            Usable::find(None)
        };
        // Where it is missing, the reason with its remedy says more than the ranks' list.
        let own = found.as_ref().err().cloned();
        let usable = agree(boot, STEP, found, within).map_err(|ranks| own.unwrap_or(ranks))?;
        let id = usable.name(boot, within)?;
        quiet::quiet(device.card.context.ordinal());
        let end = Deadline::after(within).end();
        let place = (boot.rank(), boot.size());
        let made = Bounded::make(&device.card, usable, vec![id], place, end).and_then(|comm| {
            let sums = Self {
                comm,
                gone: AtomicBool::new(false),
            };
            sums.warm_up(device, end)?;
            Ok(Arc::new(sums))
        });
        agree(boot, STEP, made, within)
    }

    /// Makes sums of several sizes, so that later ones find everything there.
    fn warm_up(&self, device: &CudaDevice, end: Instant) -> Result<()> {
        let most = FIRST.into_iter().max().unwrap_or(0);
        let memory = DeviceMemory::outside_of_streams(&device.card, most)?;
        let lane = Lane::new(&device.card, 0)?;
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
                self.enqueue((dtype, op), piece, lane.stream.cast(), None, || {
                    remains(end)
                })?;
            }
        }
        let left = end.saturating_duration_since(Instant::now());
        match CudaMark::record(&lane.card, lane.stream)?.reached(left)? {
            true => Ok(()),
            false => Err(late()),
        }
    }

    /// Enqueues a sum. `goes_on` says whether to wait on for NCCL to take it, which may turn to what it `keeps` when nobody waits for that any more.
    fn enqueue(
        &self,
        (dtype, op): (DataType, ReduceOp),
        piece: Piece,
        stream: Handle,
        keeps: Option<(Arc<Lane>, [Buffer; 2])>,
        goes_on: impl Fn() -> Result<()>,
    ) -> Result<()> {
        let (kind, op) = (reduced_type(dtype)?, operation(op));
        let (from, to, stream) = (piece.from, piece.to, stream as usize);
        self.comm.call(0, "ncclAllReduce", goes_on, move |f, comm| {
            let (from, to, stream) = (from as *const _, to as *mut _, stream as Handle);
            // SAFETY: both buffers hold so many elements and are kept until the work is done, as callers see to.
            let status =
                unsafe { (f.all_reduce)(from, to, piece.elements, kind, op, comm, stream) };
            drop(keeps);
            status
        })
    }

    /// Hands on between NCCL and the group: what it fails with stops the group, and a group that is stopped gives it up. Where a
    /// peer is gone already, NCCL may miss it, which stops nobody who has nothing left to do.
    pub(crate) fn relay(&self, control: &Control) {
        let Group { rank, size, .. } = *control.group();
        let mut peers = (0..size).filter(|&p| p != rank);
        let ends = control.is_closed() || peers.any(|p| control.departed(p));
        if !ends
            && control.fault().is_none()
            && let Some(status) = self.comm.failed(0)
        {
            control.raise(FaultRecord {
                seen: status as u64,
                ..broken(control)
            });
        }
        if control.fault().is_some() {
            self.comm.give_up();
        }
    }

    /// For a group that is reset: from here on calls are refused, on all ranks.
    pub(crate) fn retire(&self) {
        self.gone.store(true, Ordering::Release);
        self.comm.give_up();
        // What NCCL frees may hold up the driver: better now, while no kernel waits.
        self.settle();
    }

    /// As [`Bounded::settle`].
    pub(crate) fn settle(&self) {
        self.comm.settle();
    }

    /// Whether calls can be made, as all ranks know. Graphs ask as well.
    pub(crate) fn check(&self) -> Result<(), Reason> {
        match self.gone.load(Ordering::Acquire) {
            false => Ok(()),
            true => Err(gone()),
        }
    }
}

impl Job<'_> {
    /// A sum by NCCL, once all ranks are in the same call, and while a wait beside it sees to it that they all come out again.
    pub(crate) fn sum_by_nccl(
        &mut self,
        sums: &NcclSums,
        kind: Kind,
        (from, to): (&Buffer, &Buffer),
    ) -> Result<()> {
        let core = self.core;
        self.steps.meet();
        let of = self.begin(Area::Scratch);
        self.fork_behind_steps(&[Side::Waiter])?;
        let mut beside = core.steps();
        beside.await_all(of, 0);
        self.steps_on(Side::Waiter, beside)?;
        let piece = kind.piece(0, from.shape().len(), from, to);
        if piece.elements > 0 {
            let end = Instant::now() + core.config.deadline;
            let goes_on = || match core.fault() {
                Some(fault) => Err(Error::Fault(fault)),
                None => remains(end),
            };
            let keeps = Some((Arc::clone(self.lane), [from.clone(), to.clone()]));
            let stream = self.stream.cast();
            sums.enqueue((kind.dtype, kind.op), piece, stream, keeps, goes_on)?;
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
