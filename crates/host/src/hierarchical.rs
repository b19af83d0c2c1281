//! Collectives across machines: two communicators inside the machine, and two along the rail, so that no phase waits for another's turn.
//!
//! A call of several slices has a thread for each track; the calling thread watches, and stops all four groups as soon as one of them is.
//! What stops a group inside a machine or along a rail so gets to the ranks of all machines, with ranks numbered over all of them.

mod experts;
mod progress;
mod run;

use crate::{
    comm::{self, join_core},
    core::Core,
    device::HostDevice,
    memory::{self, shares},
    mover::Mover,
    queue::HostQueue,
    rail::{HostRail, Link, RailModel},
};
use brigade_device::{
    Allocate, Bootstrap, Buffer, Call, CombineParams, Combined, CommConfig, Device, DispatchParams,
    Dispatched, Error, FaultRecord, Group, Hierarchical, HierarchicalCall, HierarchicalPlan,
    Hierarchy, HierarchyConfig, MachineLayout, Machines, MemoryType, Numbers, Phase, Queues,
    Reason, Result, Routing, Staging, Stream, Turn, combine_across, dispatch_across,
    expert_layout_across,
};
use brigade_group::{Across, Stoppable, machine, split};
use brigade_plan::{
    Table,
    hierarchical::{Costs, Track, Wire, plan},
};
use brigade_sync::Deadline;
use parking_lot::Mutex;
use run::Run;
use std::{sync::Arc, time::Duration};

/// Between machines waits end so much later than inside: where a rank is missing, its own machine is to find out first, and say who.
const GRACE: Duration = Duration::from_millis(300);

/// One rank's part in a hierarchy.
struct HostHierarchy {
    inner: Arc<Inner>,
}

/// Connections of a rank to its rail.
const CONNECTIONS: usize = Costs::host().connections;

/// What calls share with the work that they enqueue.
struct Inner {
    /// All four groups, as one.
    across: Across,
    config: HierarchyConfig,
    costs: Costs,
    device: Arc<HostDevice>,
    /// For the phase that reduces inside, and for the one that gathers.
    inside: [Arc<Core>; 2],
    /// Connections to the rail, which slices take in turn.
    rails: [HostRail; CONNECTIONS],
    /// A thread and a stream for each [home](Track::home) of a track: of each phase, in the order of [`Phase::ALL`]; those of both along the
    /// rail are the connections'.
    movers: Vec<Mover>,
    streams: Vec<Stream>,
    /// Held by the call in progress.
    staging: Mutex<Staging>,
}

impl Stoppable for Core {
    fn fault(&self) -> Option<FaultRecord> {
        self.control.fault()
    }
    fn stop(&self, record: FaultRecord) {
        Self::stop(self, record);
    }
    fn is_closed(&self) -> bool {
        self.control.is_closed()
    }
}

/// Memory that every rank takes in [`join`], and at most in calls.
pub(crate) fn memory_need(machines: Machines, config: &HierarchyConfig) -> Result<u64> {
    config.check()?;
    let (comm, first) = (config.part(), config.first_inside());
    let inside =
        comm::memory_need(&first, machines.ranks())? + comm::memory_need(&comm, machines.ranks())?;
    let rail = comm::memory_need(&comm, machines.count())?;
    let staging = match machines.count() {
        // One collective, from buffer to buffer.
        1 => 0,
        _ => config.staging_bytes as u64,
    };
    Ok(inside + 2 * rail + staging)
}

/// Joins both groups of this rank, its machine's and its rail's, twice each.
pub(crate) fn join(
    device: &Arc<HostDevice>,
    boot: &dyn Bootstrap,
    machines: Machines,
    config: &HierarchyConfig,
) -> Result<Hierarchy> {
    let inner = join_all(device, boot, machines, config)?;
    Ok(Hierarchy::new(Arc::new(HostHierarchy { inner })))
}

fn join_all(
    device: &Arc<HostDevice>,
    boot: &dyn Bootstrap,
    machines: Machines,
    config: &HierarchyConfig,
) -> Result<Arc<Inner>> {
    let measured = device.entries.costs(&device.info().name, machines);
    let costs = measured.unwrap_or_else(|| {
        let wire = device.rail.map_or(Wire::NONE, RailModel::wire);
        Costs::host().with_wire(wire)
    });
    let group = machine::vote_on(boot, machines, config, costs.digest())?;
    let within = config.comm.first_deadline;
    let pair = |part: &dyn Bootstrap, first: &CommConfig| -> Result<[Arc<Core>; 2]> {
        let join = |config| join_core(part, config, Table::host(), device.inject.clone());
        Ok([join(first)?, join(&config.part())?])
    };
    let inside = split(boot, machines.machine_of(group.rank), within, |part| {
        pair(part, &config.first_inside())
    })?;
    let rails = split(boot, machines.local_of(group.rank), within, |part| {
        pair(part, &config.part())
    })?;
    let link = device.rail.map(|model| Arc::new(Link::new(model)));
    let movers = (0..Track::homes(CONNECTIONS)).map(|_| Mover::new(&group));
    let streams = Phase::ALL.iter().map(|_| device.stream(0));
    let parts = [(&inside, Numbers::Inside), (&rails, Numbers::Rail)];
    let parts = parts.into_iter().flat_map(|(cores, numbers)| {
        let part = move |core: &Arc<Core>| (Arc::clone(core) as Arc<dyn Stoppable>, numbers);
        cores.iter().map(part)
    });
    let inner = Inner {
        across: Across::new(group, machines, parts.collect()),
        config: config.clone(),
        costs,
        device: Arc::clone(device),
        inside,
        rails: rails.map(|core| HostRail::new(core, link.clone())),
        movers: movers.collect::<Result<_>>()?,
        streams: streams.collect::<Result<_>>()?,
        staging: Mutex::default(),
    };
    Ok(Arc::new(inner))
}

impl Inner {
    fn machines(&self) -> Machines {
        self.across.machines()
    }

    /// All four groups.
    fn cores(&self) -> impl Iterator<Item = &Arc<Core>> {
        let rails = self.rails.iter();
        self.inside.iter().chain(rails.map(|rail| &rail.core))
    }

    /// The bound of the next call.
    fn deadline(&self) -> Deadline {
        let config = &self.config.comm;
        Deadline::after(match self.across.calls() {
            0 => config.first_deadline,
            _ => config.deadline,
        })
    }

    /// All ranks of all machines meet: those of each machine; then along the rails, so that each machine has met all; and again inside,
    /// so that every rank knows of every rail.
    fn meet(&self, deadline: &Deadline) -> Result<()> {
        [&self.inside[0], &self.rails[0].core, &self.inside[0]]
            .into_iter()
            .try_for_each(|core| {
                core.collective_within(&Call::Barrier, Some(deadline.left()), |_| Ok(()))
            })
            .map_err(|error| self.across.give_up(error))
    }

    /// The input as it may be read while the output is written: slices in place follow each other, but others may not.
    fn apart(&self, to: &Buffer, from: &Buffer) -> Result<Buffer> {
        if !shares(to, from) || (to.address(), to.bytes()) == (from.address(), from.bytes()) {
            return Ok(from.clone());
        }
        let on = &self.streams[0];
        let dims = from.shape();
        let mut copy = self
            .device
            .allocate(on, MemoryType::Device, from.dtype(), dims.dims())?;
        self.device.copy(on, copy.view_mut(), from.view())?;
        Ok(copy)
    }
}

impl Hierarchical for HostHierarchy {
    fn group(&self) -> &Group {
        self.inner.across.group()
    }

    fn machines(&self) -> Machines {
        self.inner.machines()
    }

    fn plan(&self, call: &HierarchicalCall) -> Result<HierarchicalPlan, Reason> {
        plan(call, &self.inner.config, &self.inner.costs)
    }

    /// Whoever hears of a fault here tells the others: it may never make the call in which they wait for it.
    fn fault(&self) -> Option<FaultRecord> {
        self.inner.across.relay()
    }

    fn abort(&self) {
        self.inner.across.abort();
    }

    fn reset(&self, within: Duration) -> Result<()> {
        let inner = &self.inner;
        let deadline = Deadline::after(within);
        inner.across.renew(within, || {
            inner
                .cores()
                .try_for_each(|core| core.reset(deadline.left()))
        })?;
        inner.meet(&deadline)
    }

    fn close(&self, within: Duration) -> Result<()> {
        let inner = &self.inner;
        let deadline = Deadline::after(within);
        inner.across.usable()?;
        inner.meet(&deadline)?;
        inner
            .cores()
            .try_for_each(|core| core.close(deadline.left()))
            .map_err(|error| inner.across.give_up(error))
    }

    fn enqueue(
        &self,
        turn: &Turn,
        call: HierarchicalCall,
        (to, from): (Buffer, Buffer),
    ) -> Result<HierarchicalPlan> {
        let inner = &self.inner;
        let plan = plan(&call, &inner.config, &inner.costs)?;
        let (inner, ours) = (Arc::clone(inner), plan.clone());
        let call = Arc::new(call);
        HostQueue::of(turn.stream())?.run(move || {
            inner.across.usable()?;
            let mut staging = inner
                .staging
                .try_lock()
                .ok_or(Error::Busy("the hierarchy"))?;
            let deadline = inner.deadline();
            let result = inner.apart(&to, &from).and_then(|from| {
                let run = Run {
                    inner: Arc::clone(&inner),
                    deadline,
                    signed: Call::Hierarchical((*call).clone()),
                    call: Arc::clone(&call),
                    to: to.clone(),
                    from,
                };
                run.run(&ours, &mut staging)
            });
            inner.across.count_call();
            result.map_err(|error| {
                memory::mark(&to);
                inner.across.give_up(error)
            })
        })?;
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

#[cfg(test)]
mod tests {
    use super::*;
    use brigade_device::{
        AllGatherParams, ByPath, DataType, Device, DeviceExt, FaultKind,
        HierarchicalAllReduceParams, ParallelMode, ReduceOp, Shape, Storage,
    };
    use brigade_group::{ThreadGroup, threads};

    /// Does something on every rank.
    fn on_ranks(
        machines: Machines,
        work: impl Fn(&ThreadGroup) -> Result<()> + Sync,
    ) -> Result<()> {
        let work = &work;
        std::thread::scope(|scope| {
            let ranks: Vec<_> = threads(machines.size())
                .into_iter()
                .map(|boot| scope.spawn(move || work(&boot)))
                .collect();
            ranks.into_iter().try_for_each(|rank| match rank.join() {
                Ok(result) => result,
                Err(panic) => std::panic::resume_unwind(panic),
            })
        })
    }

    /// What was said before: no less than what communicators and slices take, and no more than slices may.
    #[test]
    fn memory_is_what_was_said() -> Result<()> {
        for (count, ranks) in [(1, 2), (2, 1), (2, 2)] {
            let machines = Machines::cut(count * ranks, count)?;
            let mut config = HierarchyConfig::new(ParallelMode::Tp);
            config.comm.scratch_bytes = 16 << 10;
            (config.comm.dispatch_bytes, config.comm.combine_bytes) = (5000, 70_000);
            config.staging_bytes = 300_000;
            on_ranks(machines, |boot| {
                let device = HostDevice::new()?;
                let need = device.machines_memory_need(machines, &config)?;
                let held = || Ok::<_, Error>(device.memory_status()?.held_bytes);
                let on = device.stream(0)?;
                let inner = join_all(&device, boot, machines, &config)?;
                let cores = inner
                    .cores()
                    .map(|core| core.control.layout().total_bytes());
                let taken = cores.sum::<usize>() as u64;
                let staging = if count == 1 {
                    0
                } else {
                    config.staging_bytes as u64
                };
                assert_eq!(need, taken + staging);
                let elements = 100_000;
                let mut data = device.upload(&on, &vec![1f32; elements], &[elements])?;
                let over = Hierarchy::new(Arc::new(HostHierarchy { inner }));
                let before = held()?;
                over.lease(&on)?.all_reduce(HierarchicalAllReduceParams {
                    data: data.view_mut(),
                    from: None,
                    op: ReduceOp::Sum,
                    choice: None,
                })?;
                let slices = held()? - before;
                assert!(slices <= staging && (slices > 0) == (count > 1), "{slices}");
                let got: Vec<f32> = device.download(&on, data.view())?;
                assert!(got.iter().all(|&x| x == machines.size() as f32));
                Ok(())
            })?;
            config.comm.scratch_bytes = 1;
            assert!(memory_need(machines, &config).is_err());
        }
        Ok(())
    }

    /// Memory that no host can reach.
    #[derive(Debug)]
    struct Elsewhere;

    impl Storage for Elsewhere {
        fn address(&self) -> u64 {
            64
        }
        fn bytes(&self) -> usize {
            64
        }
        fn memory(&self) -> MemoryType {
            MemoryType::Device
        }
        fn as_any(&self) -> &dyn std::any::Any {
            self
        }
    }

    /// Where one rank alone cannot set its input aside, the others hear of it at once.
    #[test]
    fn an_input_that_cannot_be_copied_is_told() -> Result<()> {
        let machines = Machines::cut(2, 2)?;
        let mut config = HierarchyConfig::new(ParallelMode::Tp);
        config.comm.first_deadline = Duration::from_secs(30);
        on_ranks(machines, |boot| {
            let device = HostDevice::new()?;
            let on = device.stream(0)?;
            let over = join(&device, boot, machines, &config)?;
            let mine = |elements: usize| device.upload(&on, &vec![1f32; elements], &[elements]);
            let (from, mut to) = match boot.rank() {
                0 => {
                    // One begins where the other does, and is longer.
                    let storage: Arc<dyn Storage> = Arc::new(Elsewhere);
                    let part = |elements| {
                        let shape = Shape::new(&[elements])?;
                        Buffer::new(Arc::clone(&storage), DataType::F32, shape)
                    };
                    (part(4)?, part(8)?)
                }
                _ => (mine(4)?, mine(8)?),
            };
            let p = ByPath {
                params: AllGatherParams {
                    from: from.view(),
                    rows_per_rank: &[4, 4],
                    to: to.view_mut(),
                },
                choice: None,
            };
            // Who comes late hears of it here.
            let gathered = over.lease(&on).and_then(|mut lease| lease.all_gather(p));
            let error = gathered.expect_err("a rank has no input");
            assert_eq!(
                matches!(error, Error::Fault(_)),
                boot.rank() == 1,
                "{error}"
            );
            let Err(Error::Fault(record)) = over.check() else {
                panic!("it is stopped");
            };
            let named = (record.kind, record.rank);
            assert_eq!(named, (FaultKind::Aborted, 0), "{record}");
            Ok(())
        })
    }
}
