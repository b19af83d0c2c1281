//! A hierarchy is to several machines what a communicator is to one.

use crate::{
    turns::{Claim, Turns},
    *,
};
use std::{
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    time::Duration,
};

/// How a hierarchy is set up. Every rank of all machines passes the same values; they are voted on at [`Device::join_machines`].
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct HierarchyConfig {
    /// Of the communicators inside a machine and along a rail. Mode, scratch memory, deadlines and the budget of multiprocessors count;
    /// and for one of those inside, what calls with experts go through (`dispatch_bytes`, `combine_bytes`, `fifo_bytes`, and how queues
    /// are cut). Nothing else is taken by a hierarchy, and NCCL may carry nothing inside.
    pub comm: CommConfig,
    /// Most memory for slices on their way.
    pub staging_bytes: usize,
    /// Bytes of a slice's input, on each rank; `None` leaves them to the plan.
    pub slice_bytes: Option<usize>,
    /// Most slices on their way at a time; `None` leaves it to the plan.
    pub parallelism: Option<u16>,
    /// Most connections of a rank to its rail, at least 2; `None` leaves them to the device. Each takes memory and threads of whatever carries
    /// it (NCCL, on GPUs).
    pub connections: Option<u16>,
    /// Channels of each connection, up to 64, where what carries it has channels (NCCL, on GPUs: as many blocks, and sockets of their own); 0 leaves them to
    /// it, and `None` takes what was measured to be quickest, if anything was.
    pub channels: Option<u16>,
}

impl HierarchyConfig {
    /// Most channels of a connection: as many as NCCL has at most.
    pub const MOST_CHANNELS: u16 = 64;

    /// Defaults: 256 MiB for slices, which the plan cuts; and memory for calls with experts where [`CommConfig::new`] has it.
    pub fn new(mode: ParallelMode) -> Self {
        Self {
            comm: CommConfig {
                gather_bytes: 0,
                gather_scale_bytes: 0,
                reduce_scatter_bytes: 0,
                all_reduce_bytes: 0,
                low_latency_bytes: 0,
                message_bytes: 1 << 20,
                regions: 0,
                region_bytes: 0,
                ..CommConfig::new(mode)
            },
            staging_bytes: 256 << 20,
            slice_bytes: None,
            parallelism: None,
            connections: None,
            channels: None,
        }
    }

    /// Of each communicator that a hierarchy is made of, but the first one inside: of its memory, a collective needs the scratch alone.
    pub fn part(&self) -> CommConfig {
        CommConfig {
            dispatch_bytes: 0,
            combine_bytes: 0,
            fifo_bytes: 0,
            ..self.first_inside()
        }
    }

    /// Of the first communicator inside, which calls with experts go through.
    pub fn first_inside(&self) -> CommConfig {
        CommConfig {
            dispatch_bytes: self.comm.dispatch_bytes,
            combine_bytes: self.comm.combine_bytes,
            fifo_bytes: self.comm.fifo_bytes,
            fifo_depth: self.comm.fifo_depth,
            fifo_entry_bytes: self.comm.fifo_entry_bytes,
            scratch_bytes: self.comm.scratch_bytes,
            message_bytes: self.comm.message_bytes,
            deadline: self.comm.deadline,
            first_deadline: self.comm.first_deadline,
            sm_budget: self.comm.sm_budget,
            ..Self::new(self.comm.mode).comm
        }
    }

    /// # Errors
    /// [`Error::Invalid`] naming the field.
    pub fn check(&self) -> Result<()> {
        self.comm.check()?;
        // Sums inside would have an order of NCCL's, and sums across machines are `ByMachine`.
        if self.comm.nccl != NcclUse::Never {
            let got = format!("{:?}", self.comm.nccl);
            return Err(Error::invalid("comm.nccl", got, "Never"));
        }
        device::at_most("staging_bytes", self.staging_bytes)?;
        if self.slice_bytes == Some(0) {
            return Err(Error::invalid("slice_bytes", 0, "at least 1"));
        }
        if self.parallelism == Some(0) {
            return Err(Error::invalid("parallelism", 0, "at least 1"));
        }
        if let Some(few @ (0 | 1)) = self.connections {
            return Err(Error::invalid("connections", few, "at least 2"));
        }
        if let Some(got) = self.channels.filter(|&n| n > Self::MOST_CHANNELS) {
            let want = format!("at most {}", Self::MOST_CHANNELS);
            return Err(Error::invalid("channels", got, want));
        }
        Ok(())
    }
}

/// The backend's side of a hierarchy. Object-safe, and `&self`: whoever holds the [`Turn`] is alone.
pub trait Hierarchical: Send + Sync {
    /// All ranks, as this one sees them.
    fn group(&self) -> &Group;
    /// Which of them share a machine.
    fn machines(&self) -> Machines;
    /// What would be done for a call.
    ///
    /// # Errors
    /// Why it cannot be done.
    fn plan(&self, call: &HierarchicalCall) -> Result<HierarchicalPlan, Reason>;
    /// The fault that stopped it, if one did; ranks are those of all machines.
    fn fault(&self) -> Option<FaultRecord>;
    /// See [`Hierarchy::abort`].
    fn abort(&self);
    /// See [`Hierarchy::reset`].
    ///
    /// # Errors
    /// As there.
    fn reset(&self, within: Duration) -> Result<()>;
    /// See [`Hierarchy::close`].
    ///
    /// # Errors
    /// As there.
    fn close(&self, within: Duration) -> Result<()>;
    /// Makes a call that was checked: `to` gets what it gives, and `from` may be the same.
    ///
    /// # Errors
    /// As [`HierarchyLease::all_reduce`].
    fn enqueue(
        &self,
        turn: &Turn,
        call: HierarchicalCall,
        to_and_from: (Buffer, Buffer),
    ) -> Result<HierarchicalPlan>;
    /// See [`HierarchyLease::expert_layout`]: what a backend without it says.
    ///
    /// # Errors
    /// As there.
    fn expert_layout(&self, _turn: &mut Turn, _routing: Routing<'_>) -> Result<MachineLayout> {
        Err(no_experts().into())
    }
    /// See [`HierarchyLease::dispatch`]: what a backend without it says.
    ///
    /// # Errors
    /// As there.
    fn dispatch(&self, _turn: &mut Turn, _p: DispatchParams<'_>) -> Result<Dispatched> {
        Err(no_experts().into())
    }
    /// See [`HierarchyLease::combine`]: what a backend without it says.
    ///
    /// # Errors
    /// As there.
    fn combine(&self, _turn: &mut Turn, _p: CombineParams<'_>) -> Result<Combined> {
        Err(no_experts().into())
    }
}

fn no_experts() -> Reason {
    Reason::new(
        "no-experts",
        "this device has no expert-parallel dispatch across machines",
        "keep experts inside a machine",
    )
}

/// One rank's membership in a group that spans machines, made of communicators inside each machine and rails between them. Clones
/// are the same. It is leased, stopped, reset and closed as a [`Comm`] is; ranks in its errors are those of all machines.
///
/// Made by [`Device::join_machines`].
#[derive(Clone)]
pub struct Hierarchy(Arc<Shared>);

struct Shared {
    backend: Arc<dyn Hierarchical>,
    turns: Arc<Turns>,
    closed: AtomicBool,
}

impl Hierarchy {
    /// Wraps a backend's hierarchy.
    pub fn new(backend: Arc<dyn Hierarchical>) -> Self {
        Self(Arc::new(Shared {
            backend,
            turns: Arc::default(),
            closed: AtomicBool::new(false),
        }))
    }

    /// All ranks, as this one sees them.
    pub fn group(&self) -> Group {
        *self.0.backend.group()
    }

    /// Which of them share a machine.
    pub fn machines(&self) -> Machines {
        self.0.backend.machines()
    }

    /// What would be done for `call`, without doing it.
    ///
    /// # Errors
    /// Why it cannot be done.
    pub fn explain(&self, call: &HierarchicalCall) -> Result<HierarchicalPlan, Reason> {
        self.0.backend.plan(call)
    }

    /// # Errors
    /// The fault that stopped it, if one did; [`Error::Closed`] after [`close`](Self::close).
    pub fn check(&self) -> Result<()> {
        if self.0.closed.load(Ordering::Acquire) {
            return Err(Error::Closed);
        }
        let fault = self.0.backend.fault();
        fault.map_or(Ok(()), |f| Err(Error::Fault(f)))
    }

    /// Ends every wait of every rank of all machines with [`FaultKind::Aborted`]. Needs no lease.
    pub fn abort(&self) {
        self.0.backend.abort();
    }

    /// After a fault: all ranks of all machines come together and start anew.
    ///
    /// # Errors
    /// [`Error::Busy`] while a lease is live; [`Error::Group`] naming the ranks of the machine or the machines of the rail that did
    /// not come `within` the time (it may be called again).
    pub fn reset(&self, within: Duration) -> Result<()> {
        let _claim = self.claim()?;
        self.0.backend.reset(within)
    }

    /// The collective end: all ranks come, and then nobody waits for this one any more. Later leases are [`Error::Closed`].
    ///
    /// # Errors
    /// [`Error::Busy`] while a lease is live; the fault, if ranks did not come.
    pub fn close(&self, within: Duration) -> Result<()> {
        let _claim = self.claim()?;
        self.0.backend.close(within)?;
        self.0.closed.store(true, Ordering::Release);
        Ok(())
    }

    /// Exclusive use on one stream, in turn as by [`Comm::lease`].
    ///
    /// # Errors
    /// As [`Comm::lease`].
    pub fn lease(&self, on: &Stream) -> Result<HierarchyLease<'_>> {
        self.check()?;
        let claim = self.claim()?;
        Ok(HierarchyLease {
            shared: &self.0,
            turn: self.0.turns.next(on)?,
            _claim: claim,
        })
    }

    fn claim(&self) -> Result<Claim<'_>> {
        self.0.turns.claim("the hierarchy")
    }
}

impl std::fmt::Debug for Hierarchy {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Hierarchy({}, {:?})", self.machines(), self.group())
    }
}

/// Exclusive use of a hierarchy on one stream, until it is dropped.
///
/// Every method is a call that all ranks of all machines make, in the same order; a rank that does not, or that makes another call,
/// becomes a typed error on every rank.
pub struct HierarchyLease<'h> {
    shared: &'h Shared,
    turn: Turn,
    _claim: Claim<'h>,
}

impl Drop for HierarchyLease<'_> {
    fn drop(&mut self) {
        // Before the claim is given up: fields drop after this.
        self.shared.turns.end(&self.turn);
    }
}

impl HierarchyLease<'_> {
    /// Every rank gets the reduction of all inputs.
    ///
    /// # Errors
    /// [`Error::Invalid`] naming the field; [`Error::Unsupported`] if the staging memory holds no slice; [`Error::Fault`] if a rank
    /// does not come or calls something else.
    pub fn all_reduce(&mut self, p: HierarchicalAllReduceParams<'_>) -> Result<HierarchicalPlan> {
        let backend = &self.shared.backend;
        let call = HierarchicalCall::all_reduce(backend.machines(), &p)?;
        let to = p.data.as_view().retain();
        let from = p.from.map_or_else(|| to.clone(), |f| f.retain());
        backend.enqueue(&self.turn, call, (to, from))
    }

    /// Every rank gets its rows of the reduction of all inputs; rows in the order of all ranks. Takes [`ReduceScatterParams`], or these
    /// [by a path](ByPath).
    ///
    /// # Errors
    /// As [`all_reduce`](Self::all_reduce).
    pub fn reduce_scatter<'p>(
        &mut self,
        p: impl Into<ByPath<ReduceScatterParams<'p>>>,
    ) -> Result<HierarchicalPlan> {
        let p = p.into();
        let backend = &self.shared.backend;
        let rank = backend.group().rank;
        let call = HierarchicalCall::reduce_scatter(backend.machines(), rank, &p)?;
        let buffers = (p.params.to.as_view().retain(), p.params.from.retain());
        backend.enqueue(&self.turn, call, buffers)
    }

    /// Every rank gets all rows, in the order of all ranks. Takes [`AllGatherParams`], or these [by a path](ByPath).
    ///
    /// # Errors
    /// As [`all_reduce`](Self::all_reduce).
    pub fn all_gather<'p>(
        &mut self,
        p: impl Into<ByPath<AllGatherParams<'p>>>,
    ) -> Result<HierarchicalPlan> {
        let p = p.into();
        let backend = &self.shared.backend;
        let rank = backend.group().rank;
        let call = HierarchicalCall::all_gather(backend.machines(), rank, &p)?;
        let buffers = (p.params.to.as_view().retain(), p.params.from.retain());
        backend.enqueue(&self.turn, call, buffers)
    }

    /// Where this rank's rows would go. Asks no other rank.
    ///
    /// # Errors
    /// [`Error::Invalid`] naming the field; [`Error::Unsupported`] if the device has no experts across machines.
    pub fn expert_layout(&mut self, routing: Routing<'_>) -> Result<MachineLayout> {
        self.shared.backend.expert_layout(&mut self.turn, routing)
    }

    /// Every rank of all machines gets the rows whose experts it has, as in [`Lease::dispatch`], in the order of all ranks. A token goes once
    /// to a machine, along the rail of its rank, and inside that machine once to a rank. The handle says how many rows went to each machine
    /// ([`Handle::machines`]), takes rows back, and further rows the same ways.
    ///
    /// Of several machines, rows are taken [`Arrangement::Dense`], from own ids, with scales by rows, and fewer than
    /// [`DispatchParams::MOST_BESIDE`] things beside them, scales among these. The host waits for ids and counts, so no graph can have the
    /// call. A forced transport is that inside the machine.
    ///
    /// # Errors
    /// As [`all_reduce`](Self::all_reduce); [`Error::Unsupported`] with `across-machines` for what does not go across machines; a fault of
    /// [`Overflow`](FaultKind::Overflow) if more rows come than there is room for, which other machines may hear of in their next call.
    pub fn dispatch(&mut self, p: DispatchParams<'_>) -> Result<Dispatched> {
        self.shared.backend.dispatch(&mut self.turn, p)
    }

    /// Every rank gets back what became of its rows, added up: in the order of ranks inside each machine, in f32; that sum is rounded to the
    /// result's type and goes back along the rail; and sums of machines are added in their order, then biases, in f32, and rounded once
    /// more. That is [`SumOrder::ByMachine`]; who wants a single rounding takes the result in f32.
    ///
    /// # Errors
    /// As [`dispatch`](Self::dispatch).
    pub fn combine(&mut self, p: CombineParams<'_>) -> Result<Combined> {
        self.shared.backend.combine(&mut self.turn, p)
    }

    /// Ends the lease; whoever needs the results elsewhere waits for the event.
    ///
    /// # Errors
    /// Backend errors; the fault, if there was one.
    pub fn finish(self) -> Result<Event> {
        self.turn.stream().record()
    }
}
