//! What every call of a communicator goes through: entering, waiting, failing, leaving.

use crate::{
    layout::{Area, Layout},
    memory::Staging,
    mover::Mover,
    segment::SharedSegment,
};
use brigade_device::{
    Call, CommConfig, Error, FaultKind, FaultRecord, Group, Operation, Plan, Reason, Result,
    Traffic,
};
use brigade_plan::{Table, Topology};
use brigade_sync::{
    Deadline, Flag, Half, Memory, Post, Stop, Uses, Verdict, Wait, Word, Words, post, wait,
};
use parking_lot::{Mutex, MutexGuard, RwLock};
use std::{
    ops::Range,
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicU8, AtomicU32, AtomicU64, Ordering},
    },
    time::{Duration, Instant},
};

/// One rank's membership in a group.
pub(crate) struct Core {
    pub(crate) group: Group,
    pub(crate) config: CommConfig,
    pub(crate) topology: Topology,
    pub(crate) table: Table,
    pub(crate) layout: Layout,
    pub(crate) segments: Vec<SharedSegment>,
    pub(crate) memory: Words<SharedSegment>,
    pub(crate) mover: Mover,
    pub(crate) staging: Staging,
    /// Gates of both halves of the gather region, for this rank's views: all rows, and own rows.
    pub(crate) gates: [Gates; brigade_sync::HALVES],
    /// What is decided when a call is issued, or captured.
    pub(crate) issue: Mutex<Issue>,
    state: Mutex<State>,
    generation: AtomicU8,
    resets: AtomicU32,
    fault: Mutex<Option<FaultRecord>>,
    closed: AtomicBool,
    calls: AtomicU64,
    moved_bytes: AtomicU64,
    waited_ns: AtomicU64,
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
    pub(crate) reserved: Option<(Half, u64)>,
    pub(crate) tickets: u64,
}

/// What calls change as they run.
#[derive(Default)]
pub(crate) struct State {
    epoch: u32,
    uses: [Uses; Area::ALL.len()],
    /// A use of the gather region that was begun when own rows were handed out.
    pub(crate) begun: Option<Use>,
    /// Pieces sent to and received from every peer.
    pub(crate) sent: Vec<u32>,
    pub(crate) received: Vec<u32>,
}

/// One use of one half of a region.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Use {
    pub(crate) area: Area,
    pub(crate) half: Half,
    pub(crate) epoch: u32,
}

/// What threads that work for one call share.
#[derive(Clone)]
pub(crate) struct Job {
    pub(crate) core: Arc<Core>,
    flag: Flag,
    deadline: Deadline,
    operation: Operation,
    number: u64,
    /// Whether all ranks make this call.
    collective: bool,
}

/// A call in progress.
pub(crate) struct Active<'a> {
    pub(crate) job: Job,
    pub(crate) state: MutexGuard<'a, State>,
}

/// Everything that a communicator is made of.
pub(crate) struct Parts {
    pub(crate) group: Group,
    pub(crate) config: CommConfig,
    pub(crate) topology: Topology,
    pub(crate) table: Table,
    pub(crate) layout: Layout,
    pub(crate) segments: Vec<SharedSegment>,
}

impl Core {
    pub(crate) fn new(parts: Parts) -> Result<Arc<Self>> {
        let Parts {
            group,
            config,
            topology,
            table,
            layout,
            segments,
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
            segments,
            gates: Default::default(),
            issue: Mutex::default(),
            state: Mutex::default(),
            generation: AtomicU8::new(1),
            resets: AtomicU32::new(0),
            fault: Mutex::default(),
            closed: AtomicBool::new(false),
            calls: AtomicU64::new(0),
            moved_bytes: AtomicU64::new(0),
            waited_ns: AtomicU64::new(0),
        }))
    }

    pub(crate) fn plan(&self, call: &Call) -> Result<Plan, Reason> {
        brigade_plan::plan(call, &self.topology, &self.table)
    }

    pub(crate) fn traffic(&self) -> Traffic {
        Traffic {
            calls: self.calls.load(Ordering::Relaxed),
            moved_bytes: self.moved_bytes.load(Ordering::Relaxed),
            waited_ns: self.waited_ns.load(Ordering::Relaxed),
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

    fn usable(&self) -> Result<()> {
        if self.closed.load(Ordering::Acquire) {
            return Err(Error::Closed);
        }
        self.fault().map_or(Ok(()), |f| Err(Error::Fault(f)))
    }

    /// Stops the group; everybody's waits end with the record that won.
    fn raise(&self, record: FaultRecord) -> FaultRecord {
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
                barrier
                    .arrive(active.job.flag)
                    .for_each(|p| post(&self.memory, p));
                work(&mut active)
            })
            .and_then(|r| {
                barrier
                    .meet(active.job.flag)
                    .try_for_each(|w| active.job.wait(w, 0))?;
                Ok(r)
            });
        self.finish(active.job, result)
    }

    /// Gets ready for a call that will come: no call itself, but what the last one left is let go of.
    pub(crate) fn prepare<R>(
        self: &Arc<Self>,
        work: impl FnOnce(&mut Active<'_>) -> Result<R>,
    ) -> Result<R> {
        self.pairwise(0, |active| {
            active.let_go()?;
            work(active)
        })
    }

    /// Makes a call between two ranks.
    pub(crate) fn pairwise<R>(
        self: &Arc<Self>,
        signature: u32,
        work: impl FnOnce(&mut Active<'_>) -> Result<R>,
    ) -> Result<R> {
        self.usable()?;
        let mut state = self
            .state
            .try_lock()
            .ok_or(Error::Busy("the communicator"))?;
        state.sent.resize(self.group.size, 0);
        state.received.resize(self.group.size, 0);
        let job = Job {
            core: Arc::clone(self),
            flag: Flag::new(self.generation(), signature, 0),
            deadline: Deadline::after(self.config.deadline),
            operation: Operation::SendRecv,
            number: self.calls.load(Ordering::Relaxed) + 1,
            collective: false,
        };
        let mut active = Active { job, state };
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
        let next = self.generation().checked_add(1).unwrap_or(1);
        // Counted without the wrap of a flag's 8 bits, so that arriving for generation 1 again is not mistaken for the
        // first time.
        let gate = self.layout.reset;
        let count = self.resets.load(Ordering::Relaxed).wrapping_add(1);
        gate.arrive(count).for_each(|p| post(&self.memory, p));
        let mut deadline = Deadline::after(within);
        let missing: Vec<usize> = gate
            .meet(count)
            .filter(|&w| wait(&self.memory, w, &mut deadline, || self.departed(w.peer)).is_err())
            .map(|w| w.peer)
            .collect();
        if !missing.is_empty() {
            return Err(Error::Group {
                step: "reset",
                what: format!("ranks {missing:?} did not come within {within:?}"),
            });
        }
        *state = State::default();
        *self.issue.lock() = Issue::default();
        self.resets.store(count, Ordering::Relaxed);
        for gates in &self.gates {
            *gates.all.write() = false;
            *gates.own.write() = false;
        }
        self.generation.store(next, Ordering::Release);
        *self.fault.lock() = None;
        Ok(())
    }

    pub(crate) fn close(self: &Arc<Self>, within: Duration) -> Result<()> {
        self.collective_within(&Call::Close, Some(within), |_| Ok(()))?;
        self.closed.store(true, Ordering::Release);
        Ok(())
    }

    fn departed(&self, peer: usize) -> bool {
        let word = Word {
            owner: self.group.rank,
            index: self.layout.departed + peer,
        };
        self.memory.load(word) != 0
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

impl Job {
    fn memory(&self) -> &Words<SharedSegment> {
        &self.core.memory
    }

    pub(crate) fn rank(&self) -> usize {
        self.core.group.rank
    }

    pub(crate) fn size(&self) -> usize {
        self.core.group.size
    }

    /// Other ranks, the next one first.
    pub(crate) fn peers(&self) -> impl Iterator<Item = usize> + use<> {
        let (rank, size) = (self.rank(), self.size());
        (1..size).map(move |i| (rank + i) % size)
    }

    /// Stops the group, and gives the error that this call returns.
    pub(crate) fn fail(
        &self,
        kind: FaultKind,
        peer: usize,
        slot: usize,
        expected: u64,
        seen: u64,
    ) -> Error {
        let elapsed = self.deadline.elapsed().as_nanos();
        Error::Fault(self.core.raise(FaultRecord {
            kind,
            operation: self.operation as u32,
            rank: self.rank() as u32,
            peer: peer as u32,
            slot: slot as u32,
            generation: self.flag.generation().into(),
            expected,
            seen,
            waited_ns: u64::try_from(elapsed).unwrap_or(u64::MAX),
            call: self.number,
            claimed: 1,
            reserved: 0,
        }))
    }

    /// Waits for a flag until the call's deadline. Gives up early when the group was stopped, when a peer turns out to be
    /// in another call, or when the peer that is waited for is gone.
    pub(crate) fn wait(&self, w: Wait, slot: usize) -> Result<()> {
        if w.want.verdict(self.memory().load(w.word)) == Verdict::Ready {
            return Ok(());
        }
        let start = Instant::now();
        let mut deadline = self.deadline;
        let result = wait(self.memory(), w, &mut deadline, || {
            self.core.fault().is_some() || self.stranger().is_some() || self.lost(&w)
        });
        let waited = u64::try_from(start.elapsed().as_nanos()).unwrap_or(u64::MAX);
        self.core.waited_ns.fetch_add(waited, Ordering::Relaxed);
        result.map_err(|stop| self.give_up(stop, &w, slot))
    }

    fn give_up(&self, stop: Stop, w: &Wait, slot: usize) -> Error {
        let expected = w.want.flag().bits();
        match stop {
            Stop::Mismatch { seen } => self.fail(FaultKind::Mismatch, w.peer, slot, expected, seen),
            Stop::Timeout { seen } => {
                let (peer, seen) = self.absent().unwrap_or((w.peer, seen));
                self.fail(FaultKind::Timeout, peer, slot, expected, seen)
            }
            Stop::Interrupted => {
                if let Some(record) = self.core.fault() {
                    Error::Fault(record)
                } else if let Some((peer, seen)) = self.stranger() {
                    self.fail(FaultKind::Mismatch, peer, slot, self.flag.bits(), seen)
                } else {
                    let seen = self.memory().load(w.word);
                    self.fail(FaultKind::PeerLost, w.peer, slot, expected, seen)
                }
            }
        }
    }

    /// A peer that is gone, and whose flag is not there: it was its last chance, since a rank says that it leaves after
    /// everything else it says.
    fn lost(&self, w: &Wait) -> bool {
        self.core.departed(w.peer) && w.want.verdict(self.memory().load(w.word)) == Verdict::NotYet
    }

    fn arrivals(&self, verdict: Verdict) -> Option<(usize, u64)> {
        let barrier = self.core.layout.barrier;
        self.collective
            .then(|| {
                barrier.meet(self.flag).find_map(|w| {
                    let seen = self.memory().load(w.word);
                    (w.want.verdict(seen) == verdict).then_some((w.peer, seen))
                })
            })
            .flatten()
    }

    /// A peer that is in another call.
    fn stranger(&self) -> Option<(usize, u64)> {
        self.arrivals(Verdict::Mismatch)
    }

    /// A peer that has not come.
    fn absent(&self) -> Option<(usize, u64)> {
        self.arrivals(Verdict::NotYet)
    }

    /// The flag of a use, signed by this call.
    fn flag_of(&self, of: Use) -> Flag {
        Flag::new(self.flag.generation(), self.flag.signature(), of.epoch)
    }

    fn post(&self, p: Post) {
        post(self.memory(), p);
    }

    /// Says that piece `piece` of `slot` lies in `to`'s half.
    pub(crate) fn say_filled(&self, to: usize, of: Use, slot: usize, piece: usize) {
        let ring = self.core.layout.ring(of.area);
        self.post(ring.filled(to, of.half, slot, piece, self.flag_of(of)));
    }

    /// Says so to every peer.
    pub(crate) fn say_filled_to_all(&self, of: Use, slot: usize, piece: usize) {
        self.peers()
            .for_each(|to| self.say_filled(to, of, slot, piece));
    }

    /// Waits for piece `piece` of `slot`, that `from` puts into this rank's half, or lets it read in its own.
    pub(crate) fn await_filled(
        &self,
        of: Use,
        slot: usize,
        piece: usize,
        from: usize,
    ) -> Result<()> {
        let ring = self.core.layout.ring(of.area);
        let w = ring.arrival(of.half, slot, piece, from, self.flag_of(of));
        self.wait(w, slot)
    }

    /// Waits until `peer` is done with the use before this one.
    pub(crate) fn await_credit(&self, of: Use, peer: usize) -> Result<()> {
        let ring = self.core.layout.ring(of.area);
        self.wait(ring.credit(of.half, peer, self.flag_of(of)), peer)
    }

    /// Tells one peer that this rank is done with a use.
    pub(crate) fn say_done_to(&self, peer: usize, of: Use) {
        let ring = self.core.layout.ring(of.area);
        ring.release(of.half, self.flag_of(of))
            .filter(|p| p.word.owner == peer)
            .for_each(|p| self.post(p));
    }

    fn place(&self, of: Use, range: Range<usize>) -> Range<usize> {
        assert!(
            range.end <= self.core.layout.half_bytes(of.area),
            "{range:?} lies outside a half of {:?}",
            of.area
        );
        let start = self.core.layout.start(of.area, of.half);
        start + range.start..start + range.end
    }

    /// Bytes of a rank's half.
    ///
    /// # Safety
    /// Nobody writes them while the slice lives: they were announced for this use, and this rank has not said that it is
    /// done with it.
    pub(crate) unsafe fn bytes(&self, owner: usize, of: Use, range: Range<usize>) -> &[u8] {
        let place = self.place(of, range);
        // SAFETY: the caller's promise.
        unsafe { self.core.segments[owner].0.read(place) }
    }

    /// Bytes of a rank's half, to be written.
    ///
    /// # Safety
    /// Nobody else touches them while the slice lives: the owner has given its credit for this use, only this rank fills
    /// this place in it, and it has not announced it yet.
    #[expect(clippy::mut_from_ref, reason = "the caller promises to be alone")]
    pub(crate) unsafe fn bytes_mut(&self, owner: usize, of: Use, range: Range<usize>) -> &mut [u8] {
        let place = self.place(of, range);
        // SAFETY: the caller's promise.
        unsafe { self.core.segments[owner].0.write(place) }
    }

    /// Counts bytes that this rank moved to or from another rank's memory.
    pub(crate) fn count_moved(&self, bytes: usize) {
        self.core
            .moved_bytes
            .fetch_add(bytes as u64, Ordering::Relaxed);
    }
}

impl Active<'_> {
    /// Begins a use of a half, once every peer is done with the one before.
    pub(crate) fn begin_half(&mut self, area: Area, half: Half) -> Result<Use> {
        let (epoch, again) = self.state.uses[area as usize].begin(half);
        let of = Use { area, half, epoch };
        if again {
            self.job
                .peers()
                .try_for_each(|peer| self.job.await_credit(of, peer))?;
        }
        Ok(of)
    }

    /// Begins a use of the next half.
    pub(crate) fn begin(&mut self, area: Area) -> Result<Use> {
        let half = self.state.uses[area as usize].next_half();
        self.begin_half(area, half)
    }

    /// Ends a use: every peer may begin the next one of this half.
    pub(crate) fn end(&mut self, of: Use) {
        if self.state.uses[of.area as usize].end(of.half).is_some() {
            self.job.peers().for_each(|p| self.job.say_done_to(p, of));
        }
    }

    /// What the last call left to be read in the gather region is not read any more.
    pub(crate) fn let_go(&mut self) -> Result<()> {
        let kept = self.state.begun.map(|of| of.half);
        let uses = &mut self.state.uses[Area::Gather as usize];
        let open: Vec<(Half, u32)> = uses.open().filter(|(h, _)| Some(*h) != kept).collect();
        for (half, epoch) in open {
            let gates = &self.job.core.gates[half.index()];
            match gates.all.try_write() {
                Some(mut gate) => *gate = false,
                None => return Err(Error::Busy("the gathered rows")),
            }
            self.end(Use {
                area: Area::Gather,
                half,
                epoch,
            });
        }
        Ok(())
    }
}
