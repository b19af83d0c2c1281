//! What every call of a communicator goes through: entering, waiting, failing, leaving.

use crate::{
    job::{Active, Job, Use},
    layout::{Area, Layout},
    memory::Staging,
    mover::Mover,
    segment::SharedSegment,
    sharing::Sharing,
    user_buffers::RegionMemory,
    waits::Waits,
};
use brigade_device::{
    Call, CommConfig, Error, FaultKind, FaultRecord, Group, Injector, Operation, PerRank, Plan,
    Point, Reason, Region, Result, Traffic,
};
use brigade_plan::{Table, Topology};
use brigade_sync::{Deadline, Flag, Half, Memory, Uses, Word, Words, post, wait};
use parking_lot::{Mutex, RwLock};
use smallvec::SmallVec;
use std::{
    collections::BTreeMap,
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicU8, AtomicU32, AtomicU64, Ordering},
    },
    time::Duration,
};

/// One rank's membership in a group.
pub(crate) struct Core {
    pub(crate) group: Group,
    pub(crate) config: CommConfig,
    pub(crate) topology: Topology,
    pub(crate) table: Table,
    pub(crate) layout: Layout,
    pub(crate) sharing: Sharing,
    pub(crate) segments: Vec<SharedSegment>,
    pub(crate) memory: Words<SharedSegment>,
    pub(crate) mover: Mover,
    pub(crate) staging: Staging,
    /// Gates of both halves of the gather region, for this rank's views: all rows, and own rows.
    pub(crate) gates: [Gates; brigade_sync::HALVES],
    /// What is decided when a call is issued, or captured.
    pub(crate) issue: Mutex<Issue>,
    state: Mutex<State>,
    /// Registered regions, by number.
    pub(crate) regions: Mutex<Vec<Option<Arc<RegionMemory>>>>,
    generation: AtomicU8,
    resets: AtomicU32,
    fault: Mutex<Option<FaultRecord>>,
    closed: AtomicBool,
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
}

/// Space for own rows that was handed out.
pub(crate) struct Reserved {
    pub(crate) half: Half,
    pub(crate) ticket: u64,
    /// Rows of every rank, which say where own rows lie.
    pub(crate) rows: PerRank,
}

/// What calls change as they run.
pub(crate) struct State {
    epoch: u32,
    pub(crate) uses: [Uses; Area::ALL.len()],
    /// A use of the gather region that was begun when own rows were handed out.
    pub(crate) begun: Option<Use>,
    /// Pieces of mail with every peer.
    pub(crate) mail: Pairs,
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
            mail: Pairs::none(size),
            signals: BTreeMap::new(),
        }
    }
}

/// Everything that a communicator is made of.
pub(crate) struct Parts {
    pub(crate) group: Group,
    pub(crate) config: CommConfig,
    pub(crate) topology: Topology,
    pub(crate) table: Table,
    pub(crate) layout: Layout,
    pub(crate) sharing: Sharing,
    pub(crate) segments: Vec<SharedSegment>,
    pub(crate) inject: Option<Injector>,
}

impl Core {
    pub(crate) fn new(parts: Parts) -> Result<Arc<Self>> {
        let Parts {
            group,
            config,
            topology,
            table,
            layout,
            sharing,
            segments,
            inject,
        } = parts;
        Ok(Arc::new(Self {
            mover: Mover::new(&group)?,
            staging: Staging::default(),
            memory: Words::new(segments.clone()),
            group,
            config,
            topology,
            table,
            layout,
            sharing,
            segments,
            gates: Default::default(),
            issue: Mutex::default(),
            state: Mutex::new(State::new(group.size)),
            regions: Mutex::default(),
            generation: AtomicU8::new(1),
            resets: AtomicU32::new(0),
            fault: Mutex::default(),
            closed: AtomicBool::new(false),
            calls: AtomicU64::new(0),
            moved_bytes: AtomicU64::new(0),
            waits: Waits::new(group.size),
            inject,
        }))
    }

    pub(crate) fn plan(&self, call: &Call) -> Result<Plan, Reason> {
        brigade_plan::plan(call, &self.topology, &self.table)
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

    fn generation(&self) -> u8 {
        self.generation.load(Ordering::Acquire)
    }

    /// The fault that stopped the group in this generation, whoever found it.
    pub(crate) fn fault(&self) -> Option<FaultRecord> {
        let mut fault = self.fault.lock();
        if fault.is_none() {
            *fault = self
                .layout
                .abort
                .raised(&self.memory, self.group.rank, self.generation())
                .and_then(FaultRecord::from_words);
        }
        *fault
    }

    /// Whether calls can be made: no fault, and not closed.
    pub(crate) fn usable(&self) -> Result<()> {
        if self.closed.load(Ordering::Acquire) {
            return Err(Error::Closed);
        }
        self.fault().map_or(Ok(()), |f| Err(Error::Fault(f)))
    }

    /// Stops the group; everybody's waits end with the record that won.
    pub(crate) fn raise(&self, record: FaultRecord) -> FaultRecord {
        let words = self
            .layout
            .abort
            .raise(&self.memory, self.generation(), record.to_words());
        let record = FaultRecord::from_words(words).unwrap_or(record);
        tracing::warn!(target: "brigade::fault", rank = self.group.rank, %record, "stopped");
        *self.fault.lock().get_or_insert(record)
    }

    pub(crate) fn abort(&self) {
        let rank = self.group.rank as u32;
        self.raise(FaultRecord {
            kind: FaultKind::Aborted,
            operation: 0,
            rank,
            peer: rank,
            slot: 0,
            generation: self.generation().into(),
            expected: 0,
            seen: 0,
            waited_ns: 0,
            call: self.calls.load(Ordering::Relaxed),
            claimed: 1,
            reserved: 0,
        });
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

    fn collective_within<R>(
        self: &Arc<Self>,
        call: &Call,
        within: Option<Duration>,
        work: impl FnOnce(&mut Active<'_>) -> Result<R>,
    ) -> Result<R> {
        self.usable()?;
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
            flag: Flag::new(self.generation(), call.signature(), state.epoch),
            deadline: Deadline::after(within),
            operation: call.operation(),
            number: self.calls.load(Ordering::Relaxed) + 1,
            collective: true,
        };
        let mut active = Active { job, state };
        let barrier = self.layout.barrier;
        let result = active
            .let_go()
            .and_then(|()| {
                active.job.step(Point::Begin, self.group.rank, None);
                barrier
                    .arrive(active.job.flag)
                    .filter(|p| active.job.step(Point::Arrive, p.word.owner, None))
                    .for_each(|p| post(&self.memory, p));
                work(&mut active)
            })
            .and_then(|r| active.job.meet().map(|()| r));
        self.finish(active.job, result)
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
        self.usable()?;
        let state = self
            .state
            .try_lock()
            .ok_or(Error::Busy("the communicator"))?;
        let job = Job {
            core: Arc::clone(self),
            flag: Flag::new(self.generation(), signature, 0),
            deadline: Deadline::after(self.config.deadline),
            operation,
            number: self.calls.load(Ordering::Relaxed) + 1,
            collective: false,
        };
        let mut active = Active { job, state };
        active.job.step(Point::Begin, self.group.rank, None);
        let result = work(&mut active);
        self.finish(active.job, result)
    }

    fn finish<R>(&self, job: Job, result: Result<R>) -> Result<R> {
        match &result {
            Ok(_) => {
                self.calls.fetch_add(1, Ordering::Relaxed);
            }
            Err(Error::Fault(_)) => {}
            Err(_) => {
                job.fail(FaultKind::Aborted, self.group.rank, 0, 0, 0);
            }
        }
        result
    }

    /// All ranks let go of the old generation, then start a new one.
    pub(crate) fn reset(&self, within: Duration) -> Result<()> {
        let mut state = self
            .state
            .try_lock()
            .ok_or(Error::Busy("the communicator"))?;
        if self.closed.load(Ordering::Acquire) {
            return Err(Error::Closed);
        }
        let mut deadline = Deadline::after(within);
        let done = self.resets.load(Ordering::Relaxed);
        // A reset that timed out in its second step goes on there: this rank's words may already hold flags of peers that
        // are through.
        let cleared = if done.is_multiple_of(2) {
            self.shut_gates(&deadline)?;
            self.pass_gate(done.wrapping_add(1), &mut deadline, within)?;
            self.clear_words();
            let cleared = done.wrapping_add(1);
            self.resets.store(cleared, Ordering::Relaxed);
            cleared
        } else {
            done
        };
        self.pass_gate(cleared.wrapping_add(1), &mut deadline, within)?;
        *state = State::new(self.group.size);
        *self.issue.lock() = Issue::default();
        self.resets
            .store(cleared.wrapping_add(1), Ordering::Relaxed);
        let next = self.generation().checked_add(1).unwrap_or(1);
        self.generation.store(next, Ordering::Release);
        *self.fault.lock() = None;
        Ok(())
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

    /// Arrives at the gate, and waits for all. A rank that gives up there has already said that it let go of the old
    /// generation, so it may make no more calls in it: it stays stopped until a reset succeeds.
    fn pass_gate(&self, count: u32, deadline: &mut Deadline, within: Duration) -> Result<()> {
        let gate = self.layout.reset;
        gate.arrive(count).for_each(|p| post(&self.memory, p));
        let missing: Vec<usize> = gate
            .meet(count)
            .filter(|&w| wait(&self.memory, w, deadline, || self.departed(w.peer)).is_err())
            .map(|w| w.peer)
            .collect();
        let Some(&first) = missing.first() else {
            return Ok(());
        };
        let rank = self.group.rank as u32;
        self.fault.lock().get_or_insert(FaultRecord {
            kind: FaultKind::Timeout,
            operation: Operation::Reset as u32,
            rank,
            peer: first as u32,
            slot: 0,
            generation: self.generation().into(),
            expected: count.into(),
            seen: 0,
            waited_ns: u64::try_from(deadline.elapsed().as_nanos()).unwrap_or(u64::MAX),
            call: self.calls.load(Ordering::Relaxed),
            claimed: 1,
            reserved: 0,
        });
        let gone: Vec<usize> = missing
            .iter()
            .copied()
            .filter(|&r| self.departed(r))
            .collect();
        let what = if gone.is_empty() {
            format!("ranks {missing:?} did not come within {within:?}")
        } else {
            format!("ranks {gone:?} are gone")
        };
        Err(Error::Group {
            step: "reset",
            what,
        })
    }

    /// Wipes this rank's own flags while nobody writes any, so that none of them is taken for one of the generation that
    /// will have the same 8 bits.
    fn clear_words(&self) {
        let layout = &self.layout;
        let gate = layout.reset.base..layout.reset.base + self.group.size;
        let departed = layout.departed..layout.departed + self.group.size;
        for index in (0..layout.flags).filter(|i| !gate.contains(i) && !departed.contains(i)) {
            let owner = self.group.rank;
            self.memory.store(Word { owner, index }, 0);
        }
    }

    pub(crate) fn close(self: &Arc<Self>, within: Duration) -> Result<()> {
        self.collective_within(&Call::Close, Some(within), |_| Ok(()))?;
        self.closed.store(true, Ordering::Release);
        Ok(())
    }

    /// Whether a peer said that it is gone, or its process ended without a word.
    pub(crate) fn departed(&self, peer: usize) -> bool {
        let word = Word {
            owner: self.group.rank,
            index: self.layout.departed + peer,
        };
        self.memory.load(word) != 0 || self.sharing.has_died(peer)
    }
}

impl Drop for Core {
    /// Tells the peers, so that whoever waits for this rank hears of it at once; waits for nobody.
    fn drop(&mut self) {
        for peer in (0..self.group.size).filter(|&p| p != self.group.rank) {
            let word = Word {
                owner: peer,
                index: self.layout.departed + self.group.rank,
            };
            self.memory.store(word, 1);
        }
    }
}
