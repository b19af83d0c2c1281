//! Collectives across machines: two communicators inside the machine and NCCL's along the rail, so that no phase waits for another's
//! turn.
//!
//! A call is enqueued as a whole, and the host waits for nothing: phases have streams, and what waits for what are events. A watch of the
//! hierarchy's sees what NCCL would not tell, and hands on what stops one group, to the others and along the rail.

mod experts;
mod run;
mod watch;

use crate::{
    CudaDevice,
    comm::{self, CudaComm},
    core::Core,
    kept::Kept,
    lane::Lane,
    memory::{check_reach, overlap},
    nccl_bounded::ROUND,
    rail::{CONNECTIONS, EXPLAINING, GRACE},
    rails::{Found, Rails},
};
use brigade_device::{
    Bootstrap, Buffer, Call, CombineParams, Combined, CommConfig, Device, DispatchParams,
    Dispatched, Error, FaultKind, FaultRecord, Group, Hierarchical, HierarchicalCall,
    HierarchicalPlan, Hierarchy, HierarchyConfig, MachineLayout, Machines, Numbers, Operation,
    Phase, Queues, Reason, Result, Routing, Staging, Stream, Turn, combine_across, dispatch_across,
    expert_layout_across,
};
use brigade_group::{Across, Deadline, Stoppable, agree, machine, split};
use brigade_plan::hierarchical::{Costs, Track, plan};
use parking_lot::{Condvar, Mutex};
use run::Run;
use std::{
    sync::{
        Arc, Weak,
        atomic::{AtomicBool, AtomicU32, Ordering},
    },
    time::{Duration, Instant},
};
use watch::Handle;

/// One rank's part in a hierarchy.
struct CudaHierarchy {
    handle: Arc<Handle>,
}

/// What calls, graphs and the watch share.
pub(crate) struct Inner {
    /// All groups, as one.
    across: Across,
    config: HierarchyConfig,
    costs: Costs,
    device: Arc<CudaDevice>,
    /// For the phase that reduces inside, and for the one that gathers.
    inside: [CudaComm; 2],
    /// None where there is one machine.
    rails: Option<Arc<Rails>>,
    /// A stream for each [home](Track::home) of a track: of each phase, in the order of [`Phase::ALL`]; those of both along the rail are the
    /// first connections'.
    streams: Vec<Stream>,
    staging: Mutex<Staging>,
    /// The operation of the last call, for records.
    operation: AtomicU32,
    /// Nobody uses it any more: the watch ends once the work is done.
    leaving: AtomicBool,
    left: (Mutex<bool>, Condvar),
}

impl Stoppable for Core {
    fn fault(&self) -> Option<FaultRecord> {
        Self::fault(self)
    }
    fn known(&self) -> Option<FaultRecord> {
        Self::known(self)
    }
    fn tell(&self, record: FaultRecord) {
        Self::tell(self, record);
    }
    fn stop(&self, record: FaultRecord) {
        Self::stop(self, record);
    }
    fn is_closed(&self) -> bool {
        self.control.is_closed()
    }
}

/// The configuration of both communicators: what pushes is much quicker for few bytes, so they have buffers for that as all others do.
fn parts(config: &HierarchyConfig) -> [CommConfig; 2] {
    let usual = CommConfig::new(config.comm.mode);
    [config.first_inside(), config.part()].map(|part| CommConfig {
        all_reduce_bytes: usual.all_reduce_bytes,
        reduce_scatter_bytes: usual.reduce_scatter_bytes,
        ..part
    })
}

/// Memory that every rank takes in [`join`], and at most in calls, besides what NCCL takes.
pub(crate) fn memory_need(
    device: &CudaDevice,
    machines: Machines,
    config: &HierarchyConfig,
) -> Result<u64> {
    config.check()?;
    let inside = parts(config).map(|part| comm::memory_need(device, &part, machines.ranks()));
    let [first, second] = inside;
    let staging = match machines.count() {
        // One collective, from buffer to buffer.
        1 => 0,
        _ => config.staging_bytes as u64,
    };
    Ok(first? + second? + staging)
}

/// Joins this rank's machine, twice, and its rail.
pub(crate) fn join(
    device: &Arc<CudaDevice>,
    boot: &dyn Bootstrap,
    machines: Machines,
    config: &HierarchyConfig,
) -> Result<Hierarchy> {
    let measured = device.entries.costs(&device.info().name, machines);
    let costs = match (measured, device.wire) {
        (Some(costs), Some(wire)) => costs.with_wire(wire),
        (Some(costs), None) => costs,
        (None, Some(wire)) => Costs::cuda_over(wire),
        (None, None) => Costs::cuda(),
    };
    let group = machine::vote_on(boot, machines, config, costs.digest())?;
    let within = config.comm.first_deadline;
    let [first, second] = parts(config);
    let inside = split(boot, machines.machine_of(group.rank), within, |part| {
        let join = |config| comm::join_one(Arc::clone(device), part, config);
        Ok([join(&first)?, join(&second)?])
    })?;
    let connections = config
        .connections
        .map_or(CONNECTIONS, |most| CONNECTIONS.min(most.into()));
    let channels = config.channels.or(costs.channels).filter(|&n| n > 0);
    let rails = match machines.count() {
        1 => None,
        _ => {
            let rails = split(boot, machines.local_of(group.rank), within, |part| {
                let at = device.rail_address;
                Rails::join(part, &inside[0].core, (connections, channels), at, within)
            })?;
            // NCCL's first kernels, once nobody loads anything any more.
            agree(boot, "join: rails", rails.warm_up(within), within)?;
            Some(Arc::new(rails))
        }
    };
    let streams = (0..Track::homes(connections)).map(|home| {
        // Later phases make room for others.
        let phase = Phase::ALL.get(home).unwrap_or(&Phase::Collect);
        device.stream(*phase as i8)
    });
    let streams = agree(boot, "join: streams", streams.collect(), within)?;
    let cores = inside.iter().map(|comm| Arc::clone(&comm.core));
    let parts = cores.map(|core| (core as Arc<dyn Stoppable>, Numbers::Inside));
    let rail = rails.iter().map(|rails| {
        let rails = Arc::clone(rails);
        (rails as Arc<dyn Stoppable>, Numbers::Rail)
    });
    let inner = Arc::new(Inner {
        across: Across::new(group, machines, parts.chain(rail).collect()),
        config: config.clone(),
        costs,
        device: Arc::clone(device),
        inside,
        rails,
        streams,
        staging: Mutex::default(),
        operation: AtomicU32::new(0),
        leaving: AtomicBool::new(false),
        left: Default::default(),
    });
    for comm in &inner.inside {
        // The first, and the last: nobody else knows this communicator.
        let _ = comm.core.whole.set(inner.whole());
    }
    let handle = agree(boot, "join: watch", Handle::new(inner), within)?;
    Ok(Hierarchy::new(Arc::new(CudaHierarchy { handle })))
}

impl Inner {
    fn machines(&self) -> Machines {
        self.across.machines()
    }

    /// As what waits for a stream is told of faults by.
    fn whole(self: &Arc<Self>) -> Weak<dyn Stoppable> {
        Arc::downgrade(self) as _
    }

    /// For how long NCCL may be under way.
    fn most(&self) -> Duration {
        let config = &self.config.comm;
        let usual = match self.across.calls() {
            0 | 1 => config.first_deadline,
            _ => config.deadline,
        };
        usual + GRACE
    }

    /// Looks at everything that can stop it, and stops all if something has. The rails first: whoever finds a core stopped may wait to hear
    /// why, and it may be a rail that knows.
    fn look(&self) -> Option<FaultRecord> {
        self.look_at_rails();
        self.across.relay()
    }

    /// The same for the watch, who waits for nothing: a kernel that misses what another machine should have sent stops its core, and why is the
    /// watch's to hear.
    fn look_on(&self) {
        self.look_at_rails();
        self.across.relay_known();
    }

    fn look_at_rails(&self) {
        let generation = self.across.generation();
        let rails = self.rails.as_ref();
        if let Some(found) = rails.and_then(|rails| rails.look(self.most())) {
            self.across.stop_in(generation, self.record_of(&found));
        }
    }

    /// Whether calls can be made.
    fn usable(&self) -> Result<()> {
        self.look();
        self.across.usable()
    }

    /// The same, where no rank of the rail is gone: what is called then, nobody ends.
    fn can_call(&self) -> Result<()> {
        self.usable()?;
        match self.rails.as_ref().and_then(|rails| rails.line.gone()) {
            Some((machine, _)) => Err(Error::Fault(self.blame(FaultKind::PeerLost, machine))),
            None => Ok(()),
        }
    }

    /// Stops all for what a machine's rank of this rail has done; gives what stopped them.
    fn blame(&self, kind: FaultKind, machine: usize) -> FaultRecord {
        let found = Found::by(kind, machine);
        self.across.stop(self.record_of(&found))
    }

    fn record_of(&self, found: &Found) -> FaultRecord {
        let machines = self.machines();
        let local = machines.local_of(self.across.group().rank);
        FaultRecord {
            peer: machines.rank(found.machine, local) as u32,
            operation: self.operation.load(Ordering::Relaxed),
            waited_ns: u64::try_from(found.waited.as_nanos()).unwrap_or(u64::MAX),
            seen: found.seen,
            ..self.across.record(found.kind)
        }
    }

    /// All ranks of all machines meet: those of each machine; then along the rails, so that each machine has met all; and again inside,
    /// so that every rank knows of every rail.
    fn meet(&self, step: &'static str, deadline: Deadline) -> Result<()> {
        let inside = || match self.machines().ranks() {
            1 => Ok(()),
            _ => self.inside[0].core.meet_within(step, deadline.left()),
        };
        let rail = || match &self.rails {
            Some(rails) => {
                let met = rails.line.group().all_gather(&[], deadline.left());
                met.map(drop)
            }
            None => Ok(()),
        };
        let met = inside().and_then(|()| rail()).and_then(|()| inside());
        met.map_err(|error| self.across.give_up(error))
    }

    /// The input as it may be read while the output is written: slices in place follow each other, but others may not.
    fn apart(&self, lane: &Arc<Lane>, to: &Buffer, from: Buffer) -> Result<Buffer> {
        if !overlap(to, &from) || (to.address(), to.bytes()) == (from.address(), from.bytes()) {
            return Ok(from);
        }
        let copy = self
            .device
            .scratch(lane, from.dtype(), from.shape().dims())?;
        self.device.copy_bytes(lane, &copy, &from)?;
        Ok(copy)
    }
}

impl Stoppable for Inner {
    fn fault(&self) -> Option<FaultRecord> {
        let cut_short = || self.rails.as_ref().is_some_and(|r| r.is_cut_short());
        let end = Instant::now() + EXPLAINING;
        loop {
            let found = self.look();
            if found.is_some() || !cut_short() || Instant::now() >= end {
                return found;
            }
            // tidy: sleeps because why NCCL was given up is heard from another host.
            std::thread::sleep(ROUND);
        }
    }
    fn stop(&self, record: FaultRecord) {
        self.across.stop(record);
    }
}

/// A call, as a graph keeps it: each launch makes it once more.
pub(crate) struct Made {
    handle: Arc<Handle>,
    operation: Operation,
    signature: u32,
    generation: u32,
}

impl Made {
    /// For a launch of a graph that it is in.
    pub(crate) fn again(&self, lane: &Arc<Lane>) -> Result<()> {
        let inner = self.handle.inner();
        inner.can_call()?;
        if inner.rails.is_some() && inner.across.generation() != self.generation {
            return Err(Reason::new(
                "nccl-gone",
                "the graph was captured before a reset, and holds kernels of NCCL's communicators that ended then",
                "capture it anew",
            )
            .into());
        }
        self.begin(lane);
        Ok(())
    }

    /// This rank makes it now, on this stream.
    fn begin(&self, lane: &Lane) {
        let inner = self.handle.inner();
        inner.across.count_call();
        inner
            .operation
            .store(self.operation as u32, Ordering::Relaxed);
        lane.belongs_to(inner.whole());
        if let Some(rails) = &inner.rails {
            rails.line.call(self.signature);
        }
    }
}

impl std::fmt::Debug for Made {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Made({:?})", self.operation)
    }
}

impl CudaHierarchy {
    /// A call, as this rank makes it.
    fn made(&self, call: &Call) -> Made {
        Made {
            handle: Arc::clone(&self.handle),
            operation: call.operation(),
            signature: call.signature(),
            generation: self.handle.inner().across.generation(),
        }
    }
}

impl Hierarchical for CudaHierarchy {
    fn group(&self) -> &Group {
        self.handle.inner().across.group()
    }

    fn machines(&self) -> Machines {
        self.handle.inner().machines()
    }

    fn plan(&self, call: &HierarchicalCall) -> Result<HierarchicalPlan, Reason> {
        let inner = self.handle.inner();
        plan(call, &inner.config, &inner.costs)
    }

    fn fault(&self) -> Option<FaultRecord> {
        self.handle.inner().look()
    }

    fn abort(&self) {
        self.handle.inner().across.abort();
    }

    fn reset(&self, within: Duration) -> Result<()> {
        let inner = self.handle.inner();
        let deadline = Deadline::after(within);
        inner.across.renew(within, || {
            for comm in &inner.inside {
                comm.core.reset(deadline.left())?;
            }
            match &inner.rails {
                Some(rails) => {
                    let next = inner.across.generation() + 1;
                    rails.renew(next, deadline.left())
                }
                None => Ok(()),
            }
        })?;
        inner.meet("reset", deadline)
    }

    fn close(&self, within: Duration) -> Result<()> {
        let inner = self.handle.inner();
        let deadline = Deadline::after(within);
        inner.usable()?;
        inner.meet("close", deadline)?;
        let mut comms = inner.inside.iter();
        comms
            .try_for_each(|comm| comm.core.close(deadline.left()))
            .map_err(|error| inner.across.give_up(error))
    }

    fn enqueue(
        &self,
        turn: &Turn,
        call: HierarchicalCall,
        (to, from): (Buffer, Buffer),
    ) -> Result<HierarchicalPlan> {
        let inner = self.handle.inner();
        check_reach(&inner.device.card, "to.memory", &to)?;
        check_reach(&inner.device.card, "from.memory", &from)?;
        // What stopped it says more than that NCCL's communicators ended with it.
        inner.can_call()?;
        let plan = plan(&call, &inner.config, &inner.costs)?;
        let mut staging = inner
            .staging
            .try_lock()
            .ok_or(Error::Busy("the hierarchy"))?;
        let on = turn.stream();
        let lane = inner.device.lane(on)?;
        let signed = Call::Hierarchical(call.clone());
        let made = self.made(&signed);
        if lane.capturing() {
            // It is made by each launch of the graph.
            let made = Kept::Across(made).buffer()?;
            lane.run(&[&made], |_| Ok(()))?;
        } else {
            made.begin(lane);
        }
        // All others wait for this rank now, also if it has no memory to set its input aside.
        let done = inner.apart(lane, &to, from).and_then(|from| {
            let run = Run {
                inner,
                call: &call,
                signed: &signed,
                on,
                lane,
                to: &to,
                from: &from,
            };
            run.run(&plan, &mut staging)
        });
        done.map_err(|error| inner.across.give_up(error))?;
        Ok(plan)
    }

    fn expert_layout(&self, turn: &mut Turn, routing: Routing<'_>) -> Result<MachineLayout> {
        expert_layout_across(&self.experts(), turn.stream(), routing)
    }

    fn dispatch(&self, turn: &mut Turn, p: DispatchParams<'_>) -> Result<Dispatched> {
        dispatch_across(&self.experts(), turn, p)
    }

    fn combine(&self, turn: &mut Turn, p: CombineParams<'_>) -> Result<Combined> {
        combine_across(&self.experts(), turn, p)
    }
}
