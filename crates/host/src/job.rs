//! A call in progress: waiting for peers, failing, and the places in shared memory that it may touch.

use crate::{
    core::{Core, State},
    memory::set_gate,
    mover::Ticket,
};
use brigade_device::{Error, FaultKind, FaultRecord, Operation, Point, Result};
use brigade_group::SharedSegment;
use brigade_sync::{
    Area, Budget, Deadline, Flag, Half, Memory, Post, Stop, Verdict, Wait, Want, Words, post, wait,
};
use parking_lot::MutexGuard;
use std::{
    ops::Range,
    sync::{Arc, atomic::Ordering},
    time::Instant,
};

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
    pub(crate) flag: Flag,
    pub(crate) deadline: Deadline,
    pub(crate) operation: Operation,
    pub(crate) number: u64,
    pub(crate) made: Made,
}

/// Who makes a call.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Made {
    /// All ranks, and they meet in it.
    Together,
    /// All ranks, and they do not meet: a peer that is in a later call together has made this one.
    InTurn,
    /// Two ranks.
    Pairwise,
}

/// A call in progress.
pub(crate) struct Active<'a> {
    pub(crate) job: Job,
    pub(crate) state: MutexGuard<'a, State>,
}

impl Job {
    fn memory(&self) -> &Words<SharedSegment> {
        self.core.control.memory()
    }

    pub(crate) fn rank(&self) -> usize {
        self.core.control.group().rank
    }

    pub(crate) fn size(&self) -> usize {
        self.core.control.group().size
    }

    /// Other ranks that take part, the next one first.
    pub(crate) fn peers(&self) -> impl Iterator<Item = usize> + use<> {
        self.core.control.peers()
    }

    /// Arrivals that are waited for.
    fn arrivals_of(&self, flag: Flag) -> impl Iterator<Item = Wait> + use<> {
        let absent = self.core.control.absent();
        let barrier = self.core.control.layout().barrier;
        barrier.meet(flag).filter(move |w| !absent.contains(w.peer))
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
        Error::Fault(self.core.control.raise(FaultRecord {
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
            across: 0,
        }))
    }

    /// Stops the group if this rank alone failed, since the others wait for it: a fault has stopped it already.
    pub(crate) fn stop_after<R>(&self, result: &Result<R>) {
        if let Err(error) = result
            && !matches!(error, Error::Fault(_))
        {
            self.fail(FaultKind::Aborted, self.rank(), 0, 0, 0);
        }
    }

    /// Hands a part of the call over to the communication thread. If it fails there, all who wait for what it was to do hear of it at once,
    /// on this rank too.
    pub(crate) fn hand_over(
        &self,
        work: impl FnOnce(&Self) -> Result<()> + Send + 'static,
    ) -> Ticket {
        let (worker, witness) = (self.clone(), self.clone());
        let mover = &self.core.mover;
        mover.start(
            move || work(&worker),
            move |result| witness.stop_after(result),
        )
    }

    /// Waits for a flag until the call's deadline. Gives up early when the group was stopped, when a peer turns out to be
    /// in another call, or when the peer that is waited for is gone.
    pub(crate) fn wait(&self, w: Wait, slot: usize) -> Result<()> {
        self.wait_while(w, slot, || !self.lost(&w) && self.passed(&w).is_none())
    }

    fn wait_while(&self, w: Wait, slot: usize, hope: impl Fn() -> bool) -> Result<()> {
        self.wait_while_by(w, slot, hope, |deadline, watch| {
            wait(self.memory(), w, deadline, watch)
        })
    }

    /// Waits as [`wait`](Self::wait) does, for a flag and for what a protocol has before it. Whoever has gone has posted the
    /// flag before, or never will.
    pub(crate) fn wait_by(
        &self,
        w: Wait,
        slot: usize,
        wait: impl FnOnce(&mut Deadline, &mut dyn FnMut() -> bool) -> Result<(), Stop>,
    ) -> Result<()> {
        self.wait_while_by(w, slot, || !self.lost(&w), wait)
    }

    fn wait_while_by(
        &self,
        w: Wait,
        slot: usize,
        hope: impl Fn() -> bool,
        wait: impl FnOnce(&mut Deadline, &mut dyn FnMut() -> bool) -> Result<(), Stop>,
    ) -> Result<()> {
        let ready = w.want.verdict(self.memory().load(w.word)) == Verdict::Ready;
        let start = (!ready).then(Instant::now);
        let mut deadline = self.deadline;
        let result = wait(&mut deadline, &mut || {
            self.core.control.fault().is_some() || self.stranger().is_some() || !hope()
        });
        if let Some(start) = start {
            self.core.waits.add(w.peer, start.elapsed());
        }
        result.map_err(|stop| self.give_up(stop, &w, slot))
    }

    /// Whether a wait for this flag would end at once, well or badly.
    pub(crate) fn is_decided(&self, w: &Wait) -> bool {
        w.want.verdict(self.memory().load(w.word)) != Verdict::NotYet
    }

    /// Waits until one of several flags is there, all of them in this rank's own memory. Gives up as [`wait`](Self::wait) does, on
    /// whoever is gone, or else on the first.
    pub(crate) fn wait_any(&self, all: &[(Wait, usize)]) -> Result<()> {
        let Some((first, slot)) = all.first() else {
            return Ok(());
        };
        let (memory, start) = (self.memory(), Instant::now());
        let mut deadline = self.deadline;
        let mut spins = deadline.spins();
        let result = loop {
            let events = memory.events(self.rank());
            if all.iter().any(|(w, _)| self.is_decided(w)) {
                break Ok(());
            }
            if spins > 0 {
                spins -= 1;
                std::hint::spin_loop();
            } else if self.core.control.fault().is_some() || self.stranger().is_some() {
                break Err(self.give_up(Stop::Interrupted, first, *slot));
            } else if let Some((w, slot)) = all.iter().find(|(w, _)| self.lost(w)) {
                break Err(self.give_up(Stop::Interrupted, w, *slot));
            } else if deadline.spent() {
                let seen = memory.load(first.word);
                break Err(self.give_up(Stop::Timeout { seen }, first, *slot));
            } else {
                memory.rest(self.rank(), events, deadline.until());
            }
        };
        let took = start.elapsed();
        // Of all of them, each once: this rank would have gone on with any.
        for (i, (w, _)) in all.iter().enumerate() {
            if all[..i].iter().all(|(before, _)| before.peer != w.peer) {
                self.core.waits.add(w.peer, took);
            }
        }
        result
    }

    /// Waits until all ranks are in this call.
    pub(crate) fn meet(&self) -> Result<()> {
        self.arrivals_of(self.flag).try_for_each(|w| {
            self.step(Point::Meet, w.peer, None);
            self.wait(w, 0)
        })
    }

    fn give_up(&self, stop: Stop, w: &Wait, slot: usize) -> Error {
        let expected = w.want.flag().bits();
        match stop {
            // Whoever is in another call may have written where a third rank's flag was waited for.
            Stop::Mismatch { seen } => match self.stranger() {
                Some((peer, seen)) => {
                    self.fail(FaultKind::Mismatch, peer, slot, self.flag.bits(), seen)
                }
                None => self.fail(FaultKind::Mismatch, w.peer, slot, expected, seen),
            },
            Stop::Timeout { seen } => {
                let (peer, seen) = self.absent().unwrap_or((w.peer, seen));
                self.fail(FaultKind::Timeout, peer, slot, expected, seen)
            }
            Stop::Interrupted => {
                if let Some(record) = self.core.control.fault() {
                    Error::Fault(record)
                } else if let Some((peer, seen)) = self.stranger() {
                    self.fail(FaultKind::Mismatch, peer, slot, self.flag.bits(), seen)
                } else if let Some(seen) = self.passed(w) {
                    self.fail(FaultKind::Mismatch, w.peer, slot, expected, seen)
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
        self.core.control.departed(w.peer)
            && w.want.verdict(self.memory().load(w.word)) == Verdict::NotYet
    }

    fn arrivals(&self, verdict: Verdict) -> Option<(usize, u64)> {
        (self.made == Made::Together)
            .then(|| {
                self.arrivals_of(self.flag).find_map(|w| {
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

    /// What a peer says of the call that it is in, if it has gone past this one, which all ranks make in turn, without what is waited for.
    fn passed(&self, w: &Wait) -> Option<u64> {
        if self.made != Made::InTurn {
            return None;
        }
        let next = self.flag.epoch().wrapping_add(1);
        let next = Flag::new(self.generation(), 0, next);
        let barrier = self.core.control.layout().barrier;
        let arrival = barrier.meet(next).find(|arrival| arrival.peer == w.peer)?;
        let seen = self.memory().load(arrival.word);
        // It arrived behind all that it posted before.
        let late = Want::AtLeast(next).verdict(seen) == Verdict::Ready
            && w.want.verdict(self.memory().load(w.word)) == Verdict::NotYet;
        late.then_some(seen)
    }

    /// A peer that has not come.
    fn absent(&self) -> Option<(usize, u64)> {
        self.arrivals(Verdict::NotYet)
    }

    /// The flag of a use, signed by this call.
    pub(crate) fn flag_of(&self, of: Use) -> Flag {
        Flag::new(self.flag.generation(), self.flag.signature(), of.epoch)
    }

    /// The same call, whose flags have another signature.
    pub(crate) fn signed(&self, signature: u32) -> Self {
        Self {
            flag: Flag::new(self.flag.generation(), signature, self.flag.epoch()),
            ..self.clone()
        }
    }

    pub(crate) fn generation(&self) -> u8 {
        self.flag.generation()
    }

    pub(crate) fn post(&self, p: Post) {
        post(self.memory(), p);
    }

    /// Says that piece `piece` of `slot` lies in `to`'s half.
    pub(crate) fn say_filled(&self, to: usize, of: Use, slot: usize, piece: usize) {
        let ring = self.core.control.layout().ring(of.area);
        if self.step(Point::Announce, to, Some(of.place(slot, piece))) {
            self.post(ring.filled(to, of.half, slot, piece, self.flag_of(of)));
        }
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
        let ring = self.core.control.layout().ring(of.area);
        let w = ring.arrival(of.half, slot, piece, from, self.flag_of(of));
        self.wait(w, slot)?;
        self.step(Point::Read, from, Some(of.place(slot, piece)));
        Ok(())
    }

    /// Waits for piece `piece` of `slot`, which this rank's own communication thread fetches from `from`. That rank may
    /// have ended the call and gone by then.
    pub(crate) fn await_fetched(
        &self,
        of: Use,
        slot: usize,
        piece: usize,
        from: usize,
    ) -> Result<()> {
        let ring = self.core.control.layout().ring(of.area);
        let w = ring.arrival(of.half, slot, piece, from, self.flag_of(of));
        self.wait_while(w, slot, || true)?;
        self.step(Point::Read, from, Some(of.place(slot, piece)));
        Ok(())
    }

    /// Waits until `peer` is done with the use before this one.
    pub(crate) fn await_credit(&self, of: Use, peer: usize) -> Result<()> {
        let ring = self.core.control.layout().ring(of.area);
        if !self.step(Point::Credit, peer, Some(of.place(self.rank(), 0))) {
            return Ok(());
        }
        self.wait(ring.credit(of.half, peer, self.flag_of(of)), peer)
    }

    /// Tells one peer that this rank is done with a use.
    pub(crate) fn say_done_to(&self, peer: usize, of: Use) {
        if !self.step(Point::Done, peer, Some(of.place(self.rank(), 0))) {
            return;
        }
        let ring = self.core.control.layout().ring(of.area);
        ring.release(of.half, self.flag_of(of))
            .filter(|p| p.word.owner == peer)
            .for_each(|p| self.post(p));
    }

    fn place(&self, of: Use, range: Range<usize>) -> Range<usize> {
        assert!(
            range.end <= self.core.control.layout().half_bytes(of.area),
            "{range:?} lies outside a half of {:?}",
            of.area
        );
        let start = self.core.control.layout().start(of.area, of.half);
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
        unsafe { self.core.control.segments()[owner].0.read(place) }
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
        unsafe { self.core.control.segments()[owner].0.write(place) }
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

    /// The use of a half that has begun and not ended.
    pub(crate) fn open(&self, area: Area, half: Half) -> Option<Use> {
        let mut open = self.state.uses[area as usize].open();
        let (_, epoch) = open.find(|(h, _)| *h == half)?;
        Some(Use { area, half, epoch })
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
            // Somebody may be reading them on another thread.
            let gates = &self.job.core.gates[half.index()];
            set_gate(&gates.all, false, "the gathered rows")?;
            self.end(Use {
                area: Area::Gather,
                half,
                epoch,
            });
        }
        Ok(())
    }
}
