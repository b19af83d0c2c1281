//! What every call of a communicator goes through: entering, waiting, failing, leaving.

use crate::{
    fifo::none_queued,
    job::{Active, Job, Made, Use},
    memory::{Staging, in_call},
    mover::Mover,
    pushed::Buffers,
    user_buffers::RegionMemory,
    waits::Waits,
};
use brigade_device::{
    Absent, Call, CommConfig, DataType, Error, FaultRecord, Injector, LinearCall, Operation,
    PerRank, Plan, Point, Reason, Region, Result, Storage, Traffic,
};
use brigade_group::Control;
use brigade_plan::{
    Table, Topology,
    absent::{check, plan_without, told_without},
    reason,
};
use brigade_sync::{Area, Deadline, Exchanges, Flag, Half, Rotation, Uses, post};
use parking_lot::{Mutex, RwLock};
use smallvec::SmallVec;
use std::{
    collections::BTreeMap,
    sync::{
        Arc, Weak,
        atomic::{AtomicU64, Ordering},
    },
    time::Duration,
};

/// One rank's membership in a group.
pub(crate) struct Core {
    /// Who stopped the group, who left it, and the memory that all share.
    pub(crate) control: Control,
    pub(crate) config: CommConfig,
    pub(crate) topology: Topology,
    pub(crate) table: Table,
    pub(crate) mover: Mover,
    pub(crate) staging: Staging,
    /// Gates of both halves of the gather region, for this rank's views: all rows, and own rows.
    pub(crate) gates: [Gates; brigade_sync::HALVES],
    /// What is decided when a call is issued, or captured.
    pub(crate) issue: Mutex<Issue>,
    state: Mutex<State>,
    /// Registered regions, by number.
    pub(crate) regions: Mutex<Vec<Option<Arc<RegionMemory>>>>,
    calls: AtomicU64,
    pub(crate) moved_bytes: AtomicU64,
    pub(crate) waits: Waits,
    pub(crate) inject: Option<Injector>,
}

#[derive(Default)]
pub(crate) struct Gates {
    pub(crate) all: Arc<RwLock<bool>>,
    pub(crate) own: Arc<RwLock<bool>>,
}

/// Halves of the gather region alternate as calls are issued; own rows may be handed out before the call that uses them.
#[derive(Default)]
pub(crate) struct Issue {
    pub(crate) halves: Uses,
    pub(crate) reserved: Option<Reserved>,
    pub(crate) tickets: u64,
    /// The exchanges of each slot of the low-latency exchange.
    pub(crate) exchanges: [Exchanges; 2],
    /// Rows of the last dispatch, if they stay in place.
    pub(crate) in_place: Option<Weak<dyn Storage>>,
}

/// Space for own rows that was handed out.
pub(crate) struct Reserved {
    pub(crate) half: Half,
    pub(crate) ticket: u64,
    /// Rows of every rank, which say where own rows lie.
    pub(crate) rows: PerRank,
    pub(crate) columns: usize,
    pub(crate) dtype: DataType,
}

impl Reserved {
    /// Whether rows of the call lie as those that it was handed out for.
    pub(crate) fn holds(&self, call: &LinearCall) -> bool {
        (&self.rows, self.columns, self.dtype) == (&call.rows, call.k, call.input)
    }
}

/// What calls change as they run.
pub(crate) struct State {
    epoch: u32,
    pub(crate) uses: [Uses; Area::ALL.len()],
    /// A use of the gather region that was begun when own rows were handed out.
    pub(crate) begun: Option<Use>,
    /// Uses of the buffers that sums are pushed through.
    pub(crate) rotation: Rotation,
    /// Pieces of mail with every peer.
    pub(crate) mail: Pairs,
    /// Items of the queues with every peer.
    pub(crate) queued: Pairs,
    /// Signals of every region with every peer.
    pub(crate) signals: BTreeMap<Region, Pairs>,
}

/// How much went to and came from every peer.
#[derive(Clone, Debug)]
pub(crate) struct Pairs {
    pub(crate) sent: SmallVec<[u64; 8]>,
    pub(crate) received: SmallVec<[u64; 8]>,
}

impl Pairs {
    pub(crate) fn none(size: usize) -> Self {
        Self {
            sent: SmallVec::from_elem(0, size),
            received: SmallVec::from_elem(0, size),
        }
    }
}

impl State {
    fn new(size: usize) -> Self {
        Self {
            epoch: 0,
            uses: Default::default(),
            begun: None,
            rotation: Rotation::default(),
            mail: Pairs::none(size),
            queued: none_queued(size),
            signals: BTreeMap::new(),
        }
    }
}

/// Lets go of a generation.
type LetGo<'a> = &'a dyn Fn(&Deadline) -> Result<()>;

/// Everything that a communicator is made of.
pub(crate) struct Parts {
    /// Who stopped the group, who left it, and the memory that all share.
    pub(crate) control: Control,
    pub(crate) config: CommConfig,
    pub(crate) topology: Topology,
    pub(crate) table: Table,
    pub(crate) inject: Option<Injector>,
}

impl Core {
    pub(crate) fn new(parts: Parts) -> Result<Arc<Self>> {
        let Parts {
            control,
            config,
            topology,
            table,
            inject,
        } = parts;
        let group = *control.group();
        // All have agreed by now that this rank is in.
        let mover = Mover::new(&group).inspect_err(|_| control.leave())?;
        Ok(Arc::new(Self {
            mover,
            staging: Staging::default(),
            control,
            config,
            topology,
            table,
            gates: Default::default(),
            issue: Mutex::default(),
            state: Mutex::new(State::new(group.size)),
            regions: Mutex::default(),
            calls: AtomicU64::new(0),
            moved_bytes: AtomicU64::new(0),
            waits: Waits::new(group.size),
            inject,
        }))
    }

    pub(crate) fn plan(&self, call: &Call) -> Result<Plan, Reason> {
        plan_without(self.control.absent(), call, &self.topology, &self.table)
    }

    pub(crate) fn told(&self, call: &Call) -> Result<String, Reason> {
        told_without(self.control.absent(), call, &self.topology, &self.table)
    }

    /// Whether a graph that was captured without these ranks can be launched.
    pub(crate) fn is_still_without(&self, absent: Absent) -> Result<()> {
        match self.control.absent() {
            now if now == absent => Ok(()),
            now => Err(reason::absent_since(now).into()),
        }
    }

    pub(crate) fn traffic(&self) -> Traffic {
        let waits = self.waits.per_peer();
        Traffic {
            calls: self.calls.load(Ordering::Relaxed),
            moved_bytes: self.moved_bytes.load(Ordering::Relaxed),
            waited_ns: waits.iter().map(|w| w.waited_ns).sum(),
            waits,
        }
    }

    pub(crate) fn abort(&self) {
        self.control.abort(self.calls.load(Ordering::Relaxed));
    }

    /// Stops the group with what stopped another one.
    pub(crate) fn stop(&self, record: FaultRecord) {
        if self.control.fault().is_none() {
            self.control.raise(record);
        }
    }

    /// Makes a call that all ranks make: tells them which, works, and sees to it that all were in the same one.
    ///
    /// An error in `work` that is no fault stops the group too, since the others wait for this rank.
    pub(crate) fn collective<R>(
        self: &Arc<Self>,
        call: &Call,
        work: impl FnOnce(&mut Active<'_>) -> Result<R>,
    ) -> Result<R> {
        self.collective_within(call, None, work)
    }

    /// The same with a bound of its own, or the configuration's.
    pub(crate) fn collective_within<R>(
        self: &Arc<Self>,
        call: &Call,
        within: Option<Duration>,
        work: impl FnOnce(&mut Active<'_>) -> Result<R>,
    ) -> Result<R> {
        self.collective_signed((call, call.signature()), within, work)
    }

    /// The same, signed with more than the call.
    pub(crate) fn collective_signed<R>(
        self: &Arc<Self>,
        (call, signature): (&Call, u32),
        within: Option<Duration>,
        work: impl FnOnce(&mut Active<'_>) -> Result<R>,
    ) -> Result<R> {
        self.control.usable()?;
        let absent = self.control.absent();
        check(absent, call)?;
        let mut state = self
            .state
            .try_lock()
            .ok_or(Error::Busy("the communicator"))?;
        state.epoch = state.epoch.wrapping_add(1);
        let first = state.epoch == 1;
        let within = within.unwrap_or(if first {
            self.config.first_deadline
        } else {
            self.config.deadline
        });
        let job = Job {
            core: Arc::clone(self),
            flag: Flag::new(
                self.control.generation(),
                absent.sign(signature),
                state.epoch,
            ),
            deadline: Deadline::after(within),
            operation: call.operation(),
            number: self.calls.load(Ordering::Relaxed) + 1,
            made: Made::Together,
        };
        let mut active = Active {
            job: job.clone(),
            state,
        };
        let barrier = self.control.layout().barrier;
        let result = in_call(&job, || {
            active.let_go()?;
            active
                .job
                .step(Point::Begin, self.control.group().rank, None);
            barrier
                .arrive(active.job.flag)
                .filter(|p| !absent.contains(p.word.owner))
                .filter(|p| active.job.step(Point::Arrive, p.word.owner, None))
                .for_each(|p| post(self.control.memory(), p));
            let r = work(&mut active)?;
            active.job.meet()?;
            Ok(r)
        });
        self.finish(job, result)
    }

    /// Gets ready for a call that will come: no call itself, but what the last one left is let go of.
    pub(crate) fn prepare<R>(
        self: &Arc<Self>,
        work: impl FnOnce(&mut Active<'_>) -> Result<R>,
    ) -> Result<R> {
        self.pairwise(Operation::GatherLinear, 0, |active| {
            active.let_go()?;
            work(active)
        })
    }

    /// Makes a call between two ranks.
    pub(crate) fn pairwise<R>(
        self: &Arc<Self>,
        operation: Operation,
        signature: u32,
        work: impl FnOnce(&mut Active<'_>) -> Result<R>,
    ) -> Result<R> {
        let absent = self.control.absent();
        if !absent.is_empty() {
            return Err(reason::absent_ranks(absent, operation).into());
        }
        self.apart(Made::Pairwise, operation, signature, work)
    }

    /// Makes a call, or half of one, that all ranks make, without meeting them.
    pub(crate) fn in_turn<R>(
        self: &Arc<Self>,
        call: &Call,
        work: impl FnOnce(&mut Active<'_>) -> Result<R>,
    ) -> Result<R> {
        let absent = self.control.absent();
        check(absent, call)?;
        let signature = absent.sign(call.signature());
        self.apart(Made::InTurn, call.operation(), signature, work)
    }

    fn apart<R>(
        self: &Arc<Self>,
        made: Made,
        operation: Operation,
        signature: u32,
        work: impl FnOnce(&mut Active<'_>) -> Result<R>,
    ) -> Result<R> {
        self.control.usable()?;
        let state = self
            .state
            .try_lock()
            .ok_or(Error::Busy("the communicator"))?;
        let job = Job {
            core: Arc::clone(self),
            flag: Flag::new(self.control.generation(), signature, state.epoch),
            deadline: Deadline::after(self.config.deadline),
            operation,
            number: self.calls.load(Ordering::Relaxed) + 1,
            made,
        };
        let mut active = Active {
            job: job.clone(),
            state,
        };
        let result = in_call(&job, || {
            job.step(Point::Begin, self.control.group().rank, None);
            work(&mut active)
        });
        self.finish(job, result)
    }

    fn finish<R>(&self, job: Job, result: Result<R>) -> Result<R> {
        job.stop_after(&result);
        if result.is_ok() {
            self.calls.fetch_add(1, Ordering::Relaxed);
        }
        result
    }

    /// All ranks let go of the old generation, then start a new one.
    pub(crate) fn reset(&self, within: Duration) -> Result<()> {
        self.renew(|calls, let_go, wipe, renew| {
            self.control.reset(within, calls, let_go, wipe, renew)
        })
    }

    /// The same by those who are left.
    pub(crate) fn shrink(&self, within: Duration) -> Result<Absent> {
        self.renew(|calls, let_go, wipe, renew| {
            self.control.shrink(within, calls, let_go, wipe, |_, _| {
                renew();
                Ok(())
            })
        })
    }

    fn renew<R>(
        &self,
        by: impl FnOnce(u64, LetGo<'_>, &dyn Fn() -> Result<()>, &mut dyn FnMut()) -> Result<R>,
    ) -> Result<R> {
        let mut state = self
            .state
            .try_lock()
            .ok_or(Error::Busy("the communicator"))?;
        by(
            self.calls.load(Ordering::Relaxed),
            &|deadline| self.shut_gates(deadline),
            &|| {
                self.control.layout().sums().empty(&Buffers::of(self));
                Ok(())
            },
            &mut || {
                *state = State::new(self.control.group().size);
                *self.issue.lock() = Issue::default();
            },
        )
    }

    /// Takes the gathered rows from this rank's views, before it says that it has let go of them.
    fn shut_gates(&self, deadline: &Deadline) -> Result<()> {
        for gates in &self.gates {
            for gate in [&gates.all, &gates.own] {
                let mut open = gate
                    .try_write_for(deadline.left())
                    .ok_or(Error::Busy("the user buffer"))?;
                *open = false;
            }
        }
        Ok(())
    }

    pub(crate) fn close(self: &Arc<Self>, within: Duration) -> Result<()> {
        self.collective_within(&Call::Close, Some(within), |_| Ok(()))?;
        self.control.set_closed();
        Ok(())
    }
}

impl Drop for Core {
    /// Tells the peers, so that whoever waits for this rank hears of it at once; waits for nobody.
    fn drop(&mut self) {
        self.control.leave();
    }
}
