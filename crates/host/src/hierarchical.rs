//! Collectives across machines: two communicators inside the machine, and two along the rail, so that no phase waits for another's turn.
//!
//! A call of several slices has a thread for each phase; the calling thread watches, and stops all four groups as soon as one of them is.
//! What stops a group inside a machine or along a rail so gets to the ranks of all machines, with ranks numbered over all of them.

mod progress;
mod run;
mod staging;

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
    AllGatherParams, Allocate, Bootstrap, Buffer, Call, CommConfig, Error, FaultKind, FaultRecord,
    Group, Hierarchical, HierarchicalAllReduceParams, HierarchicalCall, HierarchicalOperation,
    HierarchicalPlan, Hierarchy, HierarchyConfig, Machines, MemoryType, PerRank, Phase, Queues,
    Reason, ReduceOp, ReduceScatterParams, Result, Stream, Turn,
};
use brigade_group::{split, vote};
use brigade_plan::{
    Table,
    hierarchical::{Costs, Wire, plan},
};
use brigade_sync::Deadline;
use parking_lot::Mutex;
use run::Run;
use staging::Staging;
use std::{
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
    time::Duration,
};

/// Between machines waits end so much later than inside: where a rank is missing, its own machine is to find out first, and say who.
const GRACE: Duration = Duration::from_millis(300);

/// One rank's part in a hierarchy.
struct HostHierarchy {
    inner: Arc<Inner>,
}

/// What calls share with the work that they enqueue.
struct Inner {
    group: Group,
    machines: Machines,
    config: HierarchyConfig,
    costs: Costs,
    device: Arc<HostDevice>,
    /// For the phase that reduces inside, and for the one that gathers.
    inside: [Arc<Core>; 2],
    /// For the phase that collects, and for the one that diffuses.
    rails: [HostRail; 2],
    /// A thread and a stream for each phase, in the order of [`Phase::ALL`].
    movers: Vec<Mover>,
    streams: Vec<Stream>,
    /// Held by the call in progress.
    staging: Mutex<Staging>,
    calls: AtomicU64,
    /// What stopped it, with ranks numbered over all machines.
    fault: Mutex<Option<FaultRecord>>,
}

/// The configuration of each communicator: of its memory, a collective needs the scratch alone.
fn each(config: &HierarchyConfig) -> CommConfig {
    CommConfig {
        scratch_bytes: config.comm.scratch_bytes,
        deadline: config.comm.deadline,
        first_deadline: config.comm.first_deadline,
        sm_budget: config.comm.sm_budget,
        ..HierarchyConfig::new(config.comm.mode).comm
    }
}

/// Memory that every rank takes in [`join`], and at most in calls.
pub(crate) fn memory_need(machines: Machines, config: &HierarchyConfig) -> Result<u64> {
    config.check()?;
    let comm = each(config);
    let [inside, rail] =
        [machines.ranks(), machines.count()].map(|size| comm::memory_need(&comm, size));
    let staging = match machines.count() {
        // One collective, from buffer to buffer.
        1 => 0,
        _ => config.staging_bytes as u64,
    };
    Ok(2 * (inside? + rail?) + staging)
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
    config.check()?;
    let (rank, size) = (boot.rank(), boot.size());
    if size != machines.size() || rank >= size {
        let want = format!("the {size} ranks of the group");
        return Err(Error::invalid("machines", machines, want));
    }
    let wire = device.rail.map_or(Wire::NONE, RailModel::wire);
    let costs = Costs::host().with_wire(wire);
    let within = config.comm.first_deadline;
    let voted = format!("{machines}, {config:?}, costs {:016x}", costs.digest());
    vote(boot, "join: machines", voted.as_bytes(), within)?;
    let comm = each(config);
    let pair = |part: &dyn Bootstrap| -> Result<[Arc<Core>; 2]> {
        let join = || join_core(part, &comm, Table::host(), device.inject.clone());
        Ok([join()?, join()?])
    };
    let inside = split(boot, machines.machine_of(rank), within, pair)?;
    let rails = split(boot, machines.local_of(rank), within, pair)?;
    let link = device.rail.map(|model| Arc::new(Link::new(model)));
    let group = Group {
        mode: config.comm.mode,
        rank,
        size,
    };
    let movers = Phase::ALL.iter().map(|_| Mover::new(&group));
    let streams = Phase::ALL.iter().map(|_| device.stream(0));
    let inner = Inner {
        group,
        machines,
        config: config.clone(),
        costs,
        device: Arc::clone(device),
        inside,
        rails: rails.map(|core| HostRail::new(core, link.clone())),
        movers: movers.collect::<Result<_>>()?,
        streams: streams.collect::<Result<_>>()?,
        staging: Mutex::default(),
        calls: AtomicU64::new(0),
        fault: Mutex::default(),
    };
    Ok(Arc::new(inner))
}

/// Which ranks a communicator's numbers stand for.
#[derive(Clone, Copy)]
enum Numbers {
    /// Those of this rank's machine.
    Inside,
    /// Those of its rail.
    Rail,
}

impl Inner {
    /// The four groups, each with what its ranks' numbers mean.
    fn cores(&self) -> impl Iterator<Item = (&Arc<Core>, Numbers)> {
        let inside = self.inside.iter().map(|core| (core, Numbers::Inside));
        let rails = self.rails.iter();
        inside.chain(rails.map(|rail| (&rail.core, Numbers::Rail)))
    }

    /// The record with ranks of all machines.
    fn over_all(&self, record: FaultRecord, numbers: Numbers) -> FaultRecord {
        if record.across == 1 {
            return record;
        }
        let (machines, rank) = (self.machines, self.group.rank);
        let of = |number: u32| {
            let number = number as usize;
            let rank = match numbers {
                Numbers::Inside => machines.rank(machines.machine_of(rank), number),
                Numbers::Rail => machines.rank(number, machines.local_of(rank)),
            };
            rank as u32
        };
        FaultRecord {
            rank: of(record.rank),
            peer: of(record.peer),
            across: 1,
            ..record
        }
    }

    /// What stopped it: the first that this rank heard of.
    fn fault(&self) -> Option<FaultRecord> {
        let mut fault = self.fault.lock();
        if fault.is_none() {
            let mut found = self
                .cores()
                .filter_map(|(core, numbers)| Some(self.over_all(core.control.fault()?, numbers)));
            *fault = found.next();
        }
        *fault
    }

    /// If one group was stopped, stops the others.
    fn relay(&self) -> Option<FaultRecord> {
        let record = self.fault()?;
        self.cores().for_each(|(core, _)| core.stop(record));
        Some(record)
    }

    /// Stops all groups after `error`; gives what this call returns.
    fn give_up(&self, error: Error) -> Error {
        if self.relay().is_none() {
            // It went wrong outside of any group, and they wait for this rank.
            *self.fault.lock() = Some(self.aborted());
            self.relay();
        }
        match (error, self.fault()) {
            (Error::Fault(_), Some(record)) => Error::Fault(record),
            (other, _) => other,
        }
    }

    fn aborted(&self) -> FaultRecord {
        let rank = self.group.rank as u32;
        FaultRecord {
            kind: FaultKind::Aborted,
            operation: 0,
            rank,
            peer: rank,
            slot: 0,
            generation: self.inside[0].control.generation().into(),
            expected: 0,
            seen: 0,
            waited_ns: 0,
            call: self.calls.load(Ordering::Relaxed),
            claimed: 1,
            across: 1,
        }
    }

    /// Whether calls can be made.
    fn usable(&self) -> Result<()> {
        self.is_open()?;
        self.relay().map_or(Ok(()), |f| Err(Error::Fault(f)))
    }

    fn is_open(&self) -> Result<()> {
        match self.cores().any(|(core, _)| core.control.is_closed()) {
            true => Err(Error::Closed),
            false => Ok(()),
        }
    }

    /// The bound of the next call.
    fn deadline(&self) -> Deadline {
        let config = &self.config.comm;
        Deadline::after(match self.calls.load(Ordering::Relaxed) {
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
            .map_err(|error| self.give_up(error))
    }
}

impl HostHierarchy {
    /// Enqueues a call.
    fn enqueue(
        &self,
        turn: &Turn,
        (operation, choice): (
            HierarchicalOperation,
            Option<brigade_device::HierarchicalPath>,
        ),
        op: ReduceOp,
        (to, from): (Buffer, Buffer),
    ) -> Result<HierarchicalPlan> {
        let inner = &self.inner;
        let call = HierarchicalCall {
            machines: inner.machines,
            operation,
            dtype: from.dtype(),
            output: to.dtype(),
            choice,
        };
        let plan = plan(&call, &inner.config, &inner.costs)?;
        let (inner, ours) = (Arc::clone(inner), plan.clone());
        let call = Arc::new(call);
        HostQueue::of(turn.stream())?.run(move || {
            inner.usable()?;
            let mut staging = inner
                .staging
                .try_lock()
                .ok_or(Error::Busy("the hierarchy"))?;
            let from = inner.apart(&to, &from)?;
            let run = Run {
                inner: Arc::clone(&inner),
                deadline: inner.deadline(),
                signed: Call::Hierarchical((*call).clone()),
                call: Arc::clone(&call),
                op,
                to: to.clone(),
                from,
            };
            let result = run.run(&ours, &mut staging);
            inner.calls.fetch_add(1, Ordering::Relaxed);
            result.map_err(|error| {
                // Whoever keeps the buffer busy writes to it anyhow.
                let _ = memory::writing(&to, &[], |out, _| {
                    memory::poison(to.dtype(), out);
                    Ok(())
                });
                inner.give_up(error)
            })
        })?;
        Ok(plan)
    }
}

impl Inner {
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
        &self.inner.group
    }

    fn machines(&self) -> Machines {
        self.inner.machines
    }

    fn plan(&self, call: &HierarchicalCall) -> Result<HierarchicalPlan, Reason> {
        plan(call, &self.inner.config, &self.inner.costs)
    }

    /// Whoever hears of a fault here tells the others: it may never make the call in which they wait for it.
    fn fault(&self) -> Option<FaultRecord> {
        self.inner.relay()
    }

    fn abort(&self) {
        self.inner
            .fault
            .lock()
            .get_or_insert_with(|| self.inner.aborted());
        self.inner.relay();
    }

    fn reset(&self, within: Duration) -> Result<()> {
        let inner = &self.inner;
        inner.is_open()?;
        let deadline = Deadline::after(within);
        let result = inner
            .cores()
            .try_for_each(|(core, _)| core.reset(deadline.left()));
        *inner.fault.lock() = None;
        match result {
            Ok(()) => inner.meet(&deadline),
            Err(error) => Err(inner.give_up(error)),
        }
    }

    fn close(&self, within: Duration) -> Result<()> {
        let inner = &self.inner;
        let deadline = Deadline::after(within);
        inner.usable()?;
        inner.meet(&deadline)?;
        inner
            .cores()
            .try_for_each(|(core, _)| core.close(deadline.left()))
            .map_err(|error| inner.give_up(error))
    }

    fn all_reduce(
        &self,
        turn: &mut Turn,
        p: HierarchicalAllReduceParams<'_>,
    ) -> Result<HierarchicalPlan> {
        p.check()?;
        let to = p.data.as_view().retain();
        let from = p.from.map_or_else(|| to.clone(), |f| f.retain());
        let operation = HierarchicalOperation::AllReduce {
            elements: from.shape().len(),
            op: p.op,
        };
        self.enqueue(turn, (operation, p.choice), p.op, (to, from))
    }

    fn reduce_scatter(
        &self,
        turn: &mut Turn,
        p: ReduceScatterParams<'_>,
    ) -> Result<HierarchicalPlan> {
        let group = self.group();
        p.check(group.rank, group.size)?;
        let operation = HierarchicalOperation::ReduceScatter {
            rows: PerRank::from_slice(p.rows_per_rank),
            row_len: p.from.shape().row_len(),
            op: p.op,
        };
        let (to, from) = (p.to.as_view().retain(), p.from.retain());
        self.enqueue(turn, (operation, None), p.op, (to, from))
    }

    fn all_gather(&self, turn: &mut Turn, p: AllGatherParams<'_>) -> Result<HierarchicalPlan> {
        let group = self.group();
        p.check(group.rank, group.size)?;
        let operation = HierarchicalOperation::AllGather {
            rows: PerRank::from_slice(p.rows_per_rank),
            row_len: p.to.shape().row_len(),
        };
        let (to, from) = (p.to.as_view().retain(), p.from.retain());
        // Nothing is combined.
        self.enqueue(turn, (operation, None), ReduceOp::Sum, (to, from))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use brigade_device::{Device, DeviceExt, ParallelMode};
    use brigade_group::threads;

    /// What was said before: no less than what communicators and slices take, and no more than slices may.
    #[test]
    fn memory_is_what_was_said() -> Result<()> {
        for (count, ranks) in [(1, 2), (2, 1), (2, 2)] {
            let machines = Machines::cut(count * ranks, count)?;
            let mut config = HierarchyConfig::new(ParallelMode::Tp);
            config.comm.scratch_bytes = 16 << 10;
            config.staging_bytes = 300_000;
            let one = |boot: &dyn Bootstrap| -> Result<()> {
                let device = HostDevice::new()?;
                let need = device.machines_memory_need(machines, &config)?;
                let held = || Ok::<_, Error>(device.memory_status()?.held_bytes);
                let on = device.stream(0)?;
                let inner = join_all(&device, boot, machines, &config)?;
                let cores = inner
                    .cores()
                    .map(|(core, _)| core.control.layout().total_bytes());
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
            };
            std::thread::scope(|scope| {
                let ranks: Vec<_> = threads(machines.size())
                    .into_iter()
                    .map(|boot| scope.spawn(move || one(&boot)))
                    .collect();
                ranks.into_iter().try_for_each(|rank| match rank.join() {
                    Ok(result) => result,
                    Err(panic) => std::panic::resume_unwind(panic),
                })
            })?;
            config.comm.scratch_bytes = 1;
            assert!(memory_need(machines, &config).is_err());
        }
        Ok(())
    }
}
