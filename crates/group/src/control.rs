//! What every communicator needs to know about its group, whatever its device: who stopped it, who left, when all start
//! anew.

use crate::{SharedSegment, Sharing};
use brigade_device::{
    Absent, Error, FaultKind, FaultRecord, Group, Identity, Operation, Origin, Reason, Result,
};
use brigade_sync::{
    AbortCell, Called, Deadline, Layout, Memory, ResetGate, RollCall, Word, Words, post, wait,
};
use parking_lot::Mutex;
use std::{
    sync::atomic::{AtomicBool, AtomicU8, AtomicU32, Ordering},
    time::Duration,
};

/// One rank's part in stopping, resetting and leaving a group, by words that all ranks share in memory of the host.
///
/// Whoever owns it calls [`leave`](Self::leave) when it goes.
#[derive(Debug)]
pub struct Control {
    group: Group,
    layout: Layout,
    sharing: Sharing,
    segments: Vec<SharedSegment>,
    memory: Words<SharedSegment>,
    generation: AtomicU8,
    identity: Identity,
    /// Who is absent, and in the upper half who of them is gone.
    absent: AtomicU32,
    /// Rolls that this rank was in.
    rolls: AtomicU32,
    /// Steps of resets that are done: two for each. Held while one goes on.
    steps: Mutex<u32>,
    fault: Mutex<Option<FaultRecord>>,
    closed: AtomicBool,
}

impl Control {
    /// For a group whose ranks have these segments, in rank order, laid out like this.
    pub fn new(
        group: Group,
        layout: Layout,
        sharing: Sharing,
        segments: Vec<SharedSegment>,
    ) -> Self {
        Self {
            group,
            layout,
            sharing,
            memory: Words::new(segments.clone()),
            segments,
            generation: AtomicU8::new(1),
            identity: Identity::new(),
            absent: AtomicU32::new(0),
            rolls: AtomicU32::new(0),
            steps: Mutex::default(),
            fault: Mutex::default(),
            closed: AtomicBool::new(false),
        }
    }

    /// The group, and this rank's number in it.
    pub fn group(&self) -> &Group {
        &self.group
    }

    /// What lies where in every segment.
    pub fn layout(&self) -> &Layout {
        &self.layout
    }

    /// How ranks get at each other's memory.
    pub fn sharing(&self) -> &Sharing {
        &self.sharing
    }

    /// All ranks' segments, in rank order.
    pub fn segments(&self) -> &[SharedSegment] {
        &self.segments
    }

    /// Words of all segments, to post to and to wait for.
    pub fn memory(&self) -> &Words<SharedSegment> {
        &self.memory
    }

    /// Which generation's flags count: 1 at first, one more after each reset, and 1 again after 255.
    pub fn generation(&self) -> u8 {
        self.generation.load(Ordering::Acquire)
    }

    /// What this rank's caller is given now is from here, and no longer after the next reset.
    pub fn origin(&self) -> Origin {
        self.identity.origin()
    }

    /// Who does not take part any more.
    pub fn absent(&self) -> Absent {
        let bits = self.absent.load(Ordering::Acquire);
        Absent::from_bits(bits as u16, (bits >> 16) as u16)
    }

    /// Other ranks that take part, the next one first.
    pub fn peers(&self) -> impl Iterator<Item = usize> + use<> {
        let (Group { rank, size, .. }, absent) = (self.group, self.absent());
        (1..size)
            .map(move |i| (rank + i) % size)
            .filter(move |&peer| !absent.contains(peer))
    }

    /// The fault that stopped the group in this generation, whoever found it.
    pub fn fault(&self) -> Option<FaultRecord> {
        self.look(&mut self.fault.lock())
    }

    /// The generation of now, if it was stopped. Whoever asks for both apart may take the fault of one for that of the next, which a
    /// reset has just begun.
    pub fn stopped(&self) -> Option<u8> {
        let mut fault = self.fault.lock();
        self.look(&mut fault).map(|_| self.generation())
    }

    fn look(&self, fault: &mut Option<FaultRecord>) -> Option<FaultRecord> {
        if fault.is_none() {
            *fault = self
                .layout
                .abort
                .raised(&self.memory, self.group.rank, self.generation())
                .and_then(FaultRecord::from_words);
        }
        *fault
    }

    /// Whether calls can be made.
    ///
    /// # Errors
    /// [`Error::Closed`] once closed; [`Error::Unsupported`] if the others have gone on without this rank; [`Error::Fault`] once stopped.
    pub fn usable(&self) -> Result<()> {
        if self.is_closed() {
            return Err(Error::Closed);
        }
        self.is_in()?;
        self.fault().map_or(Ok(()), |f| Err(Error::Fault(f)))
    }

    /// Whether this rank belongs to those that are left.
    ///
    /// # Errors
    /// [`Error::Unsupported`] otherwise.
    pub fn is_in(&self) -> Result<()> {
        let rolls = self.rolls.load(Ordering::Acquire);
        match self.layout.roll.is_left_out(&self.memory, rolls) {
            true => Err(left_out(self.group.rank)),
            false => Ok(()),
        }
    }

    /// Stops the group; everybody's waits end with the record that won, which is returned.
    pub fn raise(&self, record: FaultRecord) -> FaultRecord {
        self.raise_now(&mut self.fault.lock(), record)
    }

    /// The same, for what was found in this generation; nothing, if another has begun by now.
    pub fn raise_in(&self, generation: u8, record: FaultRecord) -> Option<FaultRecord> {
        let mut fault = self.fault.lock();
        let is_now = self.generation() == generation;
        is_now.then(|| self.raise_now(&mut fault, record))
    }

    fn raise_now(&self, fault: &mut Option<FaultRecord>, record: FaultRecord) -> FaultRecord {
        if self.is_in().is_err() {
            // The cell is the others' by now.
            return *fault.get_or_insert(record);
        }
        let words = self
            .layout
            .abort
            .raise(&self.memory, self.generation(), record.to_words());
        let record = FaultRecord::from_words(words).unwrap_or(record);
        tracing::warn!(target: "brigade::fault", rank = self.group.rank, %record, "stopped");
        *fault.get_or_insert(record)
    }

    /// Stops the group because this rank's program wants it, after `calls` calls.
    pub fn abort(&self, calls: u64) {
        self.raise(FaultRecord {
            call: calls,
            ..self.record(FaultKind::Aborted)
        });
    }

    /// A record about nothing but this rank.
    fn record(&self, kind: FaultKind) -> FaultRecord {
        let rank = self.group.rank as u32;
        FaultRecord {
            kind,
            operation: 0,
            rank,
            peer: rank,
            slot: 0,
            generation: self.generation().into(),
            expected: 0,
            seen: 0,
            waited_ns: 0,
            call: 0,
            claimed: 1,
            across: 0,
        }
    }

    /// Whether a peer said that it is gone, or its process ended without a word.
    pub fn departed(&self, peer: usize) -> bool {
        let word = Word {
            owner: self.group.rank,
            index: self.layout.departed + peer,
        };
        self.memory.load(word) != 0 || self.sharing.has_died(peer)
    }

    /// Tells the peers that this rank is gone, so that whoever waits for it hears of it at once; waits for nobody. To be
    /// said after everything else.
    pub fn leave(&self) {
        for peer in (0..self.group.size).filter(|&p| p != self.group.rank) {
            let word = Word {
                owner: peer,
                index: self.layout.departed + self.group.rank,
            };
            self.memory.store(word, 1);
        }
    }

    /// Refuses calls and resets from now on.
    pub fn set_closed(&self) {
        self.closed.store(true, Ordering::Release);
    }

    /// Whether [`set_closed`](Self::set_closed) was called.
    pub fn is_closed(&self) -> bool {
        self.closed.load(Ordering::Acquire)
    }

    /// All ranks let go of the old generation, then start a new one. There are two gates at which all meet:
    ///
    /// 1. `let_go` takes from this rank's user what belongs to the old generation. Then all meet at the first gate.
    /// 2. Nobody writes any flags now. This rank wipes its own, and `wipe` what its device has besides. Then all meet at
    ///    the second gate.
    /// 3. `renew` sets back what this rank counts. The generation goes up, and the fault is forgotten.
    ///
    /// A reset that failed can be tried again. One that timed out at the second gate goes on there, without `let_go` and
    /// `wipe`: this rank's words may already hold flags of peers that are through. `calls` is how many this rank made, for
    /// the record of a gate where somebody is missing.
    ///
    /// # Errors
    /// [`Error::Closed`] once closed; [`Error::Busy`] while another one goes on; [`Error::Group`] with the ranks that did
    /// not come, or are gone; and what `let_go` and `wipe` fail with. After all but the first two and an error of `let_go`,
    /// this rank stays stopped until a reset succeeds.
    pub fn reset(
        &self,
        within: Duration,
        calls: u64,
        let_go: impl FnOnce(&Deadline) -> Result<()>,
        wipe: impl FnOnce() -> Result<()>,
        renew: impl FnOnce(),
    ) -> Result<()> {
        if self.is_closed() {
            return Err(Error::Closed);
        }
        self.is_in()?;
        let mut steps = self
            .steps
            .try_lock()
            .ok_or(Error::Busy("the communicator"))?;
        let mut deadline = Deadline::after(within);
        if steps.is_multiple_of(2) {
            let_go(&deadline)?;
            self.pass_gate(steps.wrapping_add(1), &mut deadline, within, calls)?;
            self.clear_words();
            self.or_stay_stopped(wipe(), calls)?;
            *steps = steps.wrapping_add(1);
        }
        self.pass_gate(steps.wrapping_add(1), &mut deadline, within, calls)?;
        renew();
        *steps = steps.wrapping_add(1);
        self.start(after(self.generation()));
        Ok(())
    }

    fn start(&self, generation: u8) {
        let mut fault = self.fault.lock();
        self.generation.store(generation, Ordering::Release);
        self.identity.renew();
        *fault = None;
    }

    /// As [`reset`](Self::reset), by those who are left: in place of gates, two rolls are called. Each ends when all have answered
    /// who are not known to be gone, or at the end of the time of the first whose time ends, and whoever has not answered is absent from
    /// then on. `renew` hears which generation starts, and without whom.
    ///
    /// # Errors
    /// As a reset; [`Error::Unsupported`] if the others have gone on without this rank, or the group is too large.
    pub fn shrink(
        &self,
        within: Duration,
        calls: u64,
        let_go: impl FnOnce(&Deadline) -> Result<()>,
        wipe: impl FnOnce() -> Result<()>,
        renew: impl FnOnce(u8, Absent) -> Result<()>,
    ) -> Result<Absent> {
        if self.is_closed() {
            return Err(Error::Closed);
        }
        self.is_in()?;
        if self.group.size > Absent::MOST_RANKS {
            return Err(too_many(self.group.size));
        }
        let mut steps = self
            .steps
            .try_lock()
            .ok_or(Error::Busy("the communicator"))?;
        let rolls = self.rolls.load(Ordering::Acquire);
        if rolls.is_multiple_of(2) {
            let_go(&Deadline::after(within))?;
            self.call_roll(rolls.wrapping_add(1), within)?;
            self.clear_words();
            self.clear_for_others();
            self.or_stay_stopped(wipe(), calls)?;
            self.rolls.store(rolls.wrapping_add(1), Ordering::Release);
        }
        let last = self.rolls.load(Ordering::Acquire).wrapping_add(1);
        let called = self.call_roll(last, within)?;
        let all = (1u32 << self.group.size) - 1;
        let absent = Absent::from_bits(all as u16 & !called.answered, called.gone);
        let bits = u32::from(absent.bits()) | u32::from(called.gone) << 16;
        self.absent.store(bits, Ordering::Release);
        self.rolls.store(last, Ordering::Release);
        *steps = 0;
        self.or_stay_stopped(renew(after(called.generation), absent), calls)?;
        self.start(after(called.generation));
        tracing::warn!(target: "brigade::fault", rank = self.group.rank, %absent, "shrunk");
        Ok(absent)
    }

    /// Answers, and waits until the roll is closed.
    fn call_roll(&self, round: u32, within: Duration) -> Result<Called> {
        let (roll, memory) = (self.layout.roll, &self.memory);
        if !roll.answer(memory, round, self.generation()) {
            return Err(left_out(self.group.rank));
        }
        let bits = |of: &dyn Fn(usize) -> bool| {
            let ranks = (0..self.group.size).filter(|&rank| of(rank));
            ranks.fold(0u16, |bits, rank| bits | 1 << rank)
        };
        let absent = self.absent();
        let expected = bits(&|rank| !absent.contains(rank));
        let mut deadline = Deadline::after(within);
        // Whoever is missing at the end of the time is left out.
        let _ = roll.wait(memory, (round, expected), &mut deadline, |peer| {
            self.departed(peer)
        });
        let gone = bits(&|rank| rank != self.group.rank && self.departed(rank));
        roll.close(memory, round, gone)
            .ok_or_else(|| left_out(self.group.rank))
    }

    /// Wipes the gate, which counts anew, and what absent ranks would have wiped of what all use.
    fn clear_for_others(&self) {
        let wipe = |owner, base, words| {
            (base..base + words).for_each(|index| self.memory.store(Word { owner, index }, 0));
        };
        let layout = &self.layout;
        let words = ResetGate::words(self.group.size);
        wipe(self.group.rank, layout.reset.base, words);
        for owner in self.absent().ranks() {
            wipe(owner, layout.abort.base, AbortCell::WORDS);
        }
    }

    /// Arrives at the gate, and waits for all.
    fn pass_gate(
        &self,
        count: u32,
        deadline: &mut Deadline,
        within: Duration,
        calls: u64,
    ) -> Result<()> {
        let gate = self.layout.reset;
        let absent = self.absent();
        gate.arrive(count)
            .filter(|p| !absent.contains(p.word.owner))
            .for_each(|p| post(&self.memory, p));
        let missing: Vec<usize> = gate
            .meet(count)
            .filter(|w| !absent.contains(w.peer))
            .filter(|&w| wait(&self.memory, w, deadline, || self.departed(w.peer)).is_err())
            .map(|w| w.peer)
            .collect();
        let Some(&first) = missing.first() else {
            return Ok(());
        };
        self.stay_stopped(FaultRecord {
            peer: first as u32,
            expected: count.into(),
            waited_ns: u64::try_from(deadline.elapsed().as_nanos()).unwrap_or(u64::MAX),
            call: calls,
            ..self.record(FaultKind::Timeout)
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

    /// Gives up a reset. This rank has already said that it let go of the old generation, so it may make no more calls in
    /// it: it stays stopped until a reset succeeds.
    fn stay_stopped(&self, record: FaultRecord) {
        self.fault.lock().get_or_insert(FaultRecord {
            operation: Operation::Reset as u32,
            ..record
        });
    }

    /// The same, if what the reset came to has failed.
    fn or_stay_stopped(&self, done: Result<()>, calls: u64) -> Result<()> {
        done.inspect_err(|_| {
            self.stay_stopped(FaultRecord {
                call: calls,
                ..self.record(FaultKind::Aborted)
            });
        })
    }

    /// Wipes this rank's own flags while nobody writes any, so that none of them is taken for one of the generation that
    /// will have the same 8 bits.
    fn clear_words(&self) {
        let layout = &self.layout;
        let gate = layout.reset.base..layout.reset.base + self.group.size;
        let departed = layout.departed..layout.departed + self.group.size;
        let roll = layout.roll.base..layout.roll.base + RollCall::WORDS;
        let kept = |i: &usize| [&gate, &departed, &roll].iter().any(|r| r.contains(i));
        for index in (0..layout.flags).filter(|i| !kept(i)) {
            let owner = self.group.rank;
            self.memory.store(Word { owner, index }, 0);
        }
    }
}

/// The generation behind this one.
fn after(generation: u8) -> u8 {
    generation.checked_add(1).unwrap_or(1)
}

fn left_out(rank: usize) -> Error {
    Reason::new(
        "left-out",
        format!("the group has gone on without rank {rank}, which did not come in time"),
        "drop the communicator, and join a new group",
    )
    .into()
}

fn too_many(size: usize) -> Error {
    Reason::new(
        "ranks",
        format!("a group of {size} ranks does not shrink"),
        format!(
            "make a new group, or groups of at most {}",
            Absent::MOST_RANKS
        ),
    )
    .into()
}
