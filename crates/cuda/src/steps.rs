//! Protocols as kernels carry them out: the posts and waits that the machines of `brigade-sync` give, with counters in the
//! GPU's memory in place of epochs, so that a captured graph goes on counting at every replay.

use brigade_device::{Absent, Group, Region, Result};
use brigade_kernels::{
    FIFO_CHANNELS, MOST_STEPS, STEP_ADVANCE, STEP_ARRIVE, STEP_CATCH_UP, STEP_CLOSE, STEP_CREDIT,
    STEP_FINISH, STEP_MEET, STEP_POST, STEP_POST_OPEN, STEP_RELEASED, STEP_RESERVE, STEP_START,
    STEP_TAKE, STEP_WAIT, step,
};
use brigade_sync::{Area, CreditRing, Flag, HALVES, Half, Layout, Word};

/// One use of one half of an area. Which one of the half's uses it is, kernels count.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Use {
    pub(crate) area: Area,
    pub(crate) half: Half,
}

/// Numbers of a rank's counters. 0 counts the calls that all ranks make.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Counters {
    size: usize,
}

impl Counters {
    pub(crate) const CALLS: usize = 0;

    pub(crate) const fn new(size: usize) -> Self {
        Self { size }
    }

    pub(crate) fn uses(of: Use) -> usize {
        1 + of.area as usize * HALVES + of.half.index()
    }

    /// What is counted of messages sent to rank 0, in place of two counters, then to the others; of those received it stands behind them.
    pub(crate) const fn messages(self) -> usize {
        1 + Area::ALL.len() * HALVES
    }

    /// Items that were put into the queues for rank 0, a counter for each channel, then for the others; those taken stand behind them.
    pub(crate) const fn queues(self) -> usize {
        self.messages() + 4 * self.size
    }

    const fn regions(self) -> usize {
        self.queues() + 2 * self.size * FIFO_CHANNELS
    }

    fn sent(self, region: Region, peer: usize) -> usize {
        self.regions() + 2 * self.size * usize::from(region.0) + peer
    }

    fn received(self, region: Region, peer: usize) -> usize {
        self.sent(region, peer) + self.size
    }

    /// How many there are.
    pub(crate) const fn count(self, regions: u16) -> usize {
        self.regions() + 2 * self.size * regions as usize
    }
}

/// What a step does beside counting, which is done in the order of steps before anything else of a phase.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Kind {
    /// Begins a call's time, and is asked about: what follows is held up with it.
    Start,
    Count,
    Post,
    Wait,
}

/// Steps in the making.
#[derive(Debug)]
pub(crate) struct Steps<'a> {
    layout: &'a Layout,
    group: Group,
    absent: Absent,
    counters: Counters,
    /// Steps, and the phase of each, counted from the first.
    list: Vec<(u64, u64)>,
    phase: u64,
    last: Option<Kind>,
    /// Words of posts of this phase, which go side by side, and whether they tell of arrivals.
    posted: Vec<(bool, Word)>,
}

/// Steps for one launch.
pub(crate) type Batch = ([u64; MOST_STEPS], u32);

/// Phases that a step can name.
const MOST_PHASES: u64 = 16;

/// Stands for no counter. Kernels look at the first one then, and leave it as it is.
const NONE: usize = usize::MAX;

/// Machines give words and flags; the flags are made by kernels.
const ANY: Flag = Flag::from_bits(0);

impl<'a> Steps<'a> {
    pub(crate) fn new(layout: &'a Layout, group: Group) -> Self {
        Self {
            layout,
            group,
            absent: Absent::default(),
            counters: Counters::new(group.size),
            list: Vec::new(),
            phase: 0,
            last: None,
            posted: Vec::new(),
        }
    }

    /// For a group that goes on without these ranks: no step is about them.
    pub(crate) fn without(self, absent: Absent) -> Self {
        Self { absent, ..self }
    }

    /// A phase is as long as it may be, since each takes a microsecond or two: what waits ends it, but for others that wait.
    fn push(&mut self, kind: Kind, op: u64, counter: usize, slot: usize, at: Word) {
        let post = (kind == Kind::Post).then_some((op == STEP_ARRIVE, at));
        let apart = match self.last {
            None => false,
            Some(Kind::Start) => true,
            Some(Kind::Wait) => kind != Kind::Wait,
            Some(_) => kind == Kind::Start || post.is_some_and(|p| self.posted.contains(&p)),
        };
        if apart {
            self.phase += 1;
            self.posted.clear();
        }
        self.last = Some(kind);
        self.posted.extend(post);
        let (peer, word) = (at.owner as u64, at.index as u64);
        let counter = if counter == NONE { 0 } else { counter as u64 };
        let bits = step(op, 0, counter, slot as u64, peer, word);
        self.list.push((self.phase, bits));
    }

    fn count(&mut self, op: u64, counter: usize) {
        self.push(Kind::Count, op, counter, 0, self.nowhere());
    }

    fn nowhere(&self) -> Word {
        Word {
            owner: self.group.rank,
            index: 0,
        }
    }

    fn ring(&self, of: Use) -> CreditRing {
        self.layout.ring(of.area)
    }

    pub(crate) fn peers(&self) -> impl Iterator<Item = usize> + use<> {
        let (Group { rank, size, .. }, absent) = (self.group, self.absent);
        (1..size)
            .map(move |i| (rank + i) % size)
            .filter(move |&peer| !absent.contains(peer))
    }

    /// A call begins: its time is counted from here.
    pub(crate) fn start(&mut self) {
        self.push(Kind::Start, STEP_START, NONE, 0, self.nowhere());
    }

    /// What the last call left to be read in the gather region is not read any more, unless it was begun ahead.
    pub(crate) fn let_go(&mut self) {
        self.let_go_of_area(Area::Gather);
    }

    /// What was begun in an area, and not ahead, ends.
    pub(crate) fn let_go_of_area(&mut self, area: Area) {
        let halves = [0, 1].map(|n| Use {
            area,
            half: Half::of(n),
        });
        for of in halves {
            self.credits_to_all(STEP_POST_OPEN, of);
        }
        for of in halves {
            self.count(STEP_CLOSE, Counters::uses(of));
        }
    }

    /// Tells every peer that this rank is in the call.
    pub(crate) fn arrive(&mut self) {
        self.count(STEP_ADVANCE, Counters::CALLS);
        for owner in self.peers() {
            let at = Word { owner, index: 0 };
            self.push(Kind::Post, STEP_ARRIVE, Counters::CALLS, 0, at);
        }
    }

    /// Waits until every peer is in the call.
    pub(crate) fn meet(&mut self) {
        for owner in self.peers() {
            let at = Word { owner, index: 0 };
            self.push(Kind::Wait, STEP_MEET, Counters::CALLS, 0, at);
        }
    }

    /// The call ended well.
    pub(crate) fn finish(&mut self) {
        self.count(STEP_FINISH, NONE);
    }

    /// Begins a use, once every peer is done with the one before.
    pub(crate) fn begin(&mut self, of: Use) {
        self.begin_at_once(of);
        self.credits(of);
    }

    /// Begins a use. A kernel waits for its credits.
    pub(crate) fn begin_at_once(&mut self, of: Use) {
        self.count(STEP_ADVANCE, Counters::uses(of));
    }

    /// The same, or goes on with the use that was begun ahead.
    pub(crate) fn take(&mut self, of: Use) {
        self.count(STEP_TAKE, Counters::uses(of));
        self.credits(of);
    }

    /// Begins a use ahead of its call.
    pub(crate) fn reserve(&mut self, of: Use) {
        self.count(STEP_RESERVE, Counters::uses(of));
        self.credits(of);
    }

    fn credits(&mut self, of: Use) {
        for peer in self.peers() {
            let at = self.ring(of).credit(of.half, peer, ANY).word;
            self.push_wait(STEP_CREDIT, Counters::uses(of), peer, peer, at.index);
        }
    }

    fn push_wait(&mut self, op: u64, counter: usize, slot: usize, peer: usize, index: usize) {
        // The word is this rank's own; the step names who is waited for.
        self.push(Kind::Wait, op, counter, slot, Word { owner: peer, index });
    }

    /// Says that piece `piece` of `slot` lies in `to`'s half.
    pub(crate) fn filled(&mut self, to: usize, of: Use, slot: usize, piece: usize) {
        let at = self.ring(of).filled(to, of.half, slot, piece, ANY).word;
        self.push(Kind::Post, STEP_POST, Counters::uses(of), slot, at);
    }

    /// Says so to every peer.
    pub(crate) fn filled_to_all(&mut self, of: Use, slot: usize, piece: usize) {
        for to in self.peers() {
            self.filled(to, of, slot, piece);
        }
    }

    /// Waits for piece `piece` of `slot`, that `from` puts into this rank's half, or lets it read in its own.
    pub(crate) fn await_filled(&mut self, of: Use, slot: usize, piece: usize, from: usize) {
        let at = self.ring(of).arrival(of.half, slot, piece, from, ANY).word;
        self.push_wait(STEP_WAIT, Counters::uses(of), slot, from, at.index);
    }

    /// The own word that [`await_filled`](Self::await_filled) waits at.
    pub(crate) fn filled_word(&self, of: Use, slot: usize, piece: usize, from: usize) -> u32 {
        let at = self.ring(of).arrival(of.half, slot, piece, from, ANY).word;
        at.index as u32
    }

    /// Waits for every peer's slot.
    pub(crate) fn await_all(&mut self, of: Use, piece: usize) {
        for peer in self.peers() {
            self.await_filled(of, peer, piece, peer);
        }
    }

    fn credits_to_all(&mut self, op: u64, of: Use) {
        let posts: Vec<_> = self.ring(of).release(of.half, ANY).collect();
        let absent = self.absent;
        for post in posts.into_iter().filter(|p| !absent.contains(p.word.owner)) {
            self.push(Kind::Post, op, Counters::uses(of), 0, post.word);
        }
    }

    /// Ends a use: every peer may begin the next one of this half.
    pub(crate) fn end(&mut self, of: Use) {
        self.credits_to_all(STEP_POST, of);
        self.count(STEP_CLOSE, Counters::uses(of));
    }

    fn region_ring(&self, region: Region) -> Result<CreditRing> {
        self.layout.region_ring(region).ok_or_else(|| {
            brigade_device::Error::invalid("region", region.0, "a region of this communicator")
        })
    }

    /// Waits until the peer has released all that was signalled in a region.
    pub(crate) fn await_released(&mut self, region: Region, peer: usize) -> Result<()> {
        let at = self
            .region_ring(region)?
            .credit(Half::of(0), peer, ANY)
            .word;
        let counter = self.counters.sent(region, peer);
        self.push_wait(STEP_RELEASED, counter, region.0.into(), peer, at.index);
        Ok(())
    }

    /// Signals in a region.
    pub(crate) fn signal(&mut self, region: Region, peer: usize) -> Result<()> {
        self.await_released(region, peer)?;
        let counter = self.counters.sent(region, peer);
        self.count(STEP_ADVANCE, counter);
        let ring = self.region_ring(region)?;
        let at = ring.filled(peer, Half::of(0), self.group.rank, 0, ANY).word;
        self.push(Kind::Post, STEP_POST, counter, region.0.into(), at);
        Ok(())
    }

    fn arrival_in(&self, region: Region, peer: usize) -> Result<Word> {
        let ring = self.region_ring(region)?;
        Ok(ring.arrival(Half::of(0), peer, 0, peer, ANY).word)
    }

    /// Waits for the peer's next signal in a region.
    pub(crate) fn await_signal(&mut self, region: Region, peer: usize) -> Result<()> {
        let counter = self.counters.received(region, peer);
        self.count(STEP_ADVANCE, counter);
        let at = self.arrival_in(region, peer)?;
        self.push_wait(STEP_WAIT, counter, region.0.into(), peer, at.index);
        Ok(())
    }

    /// Tells the peer that what its signals announced was used.
    pub(crate) fn release(&mut self, region: Region, peer: usize) -> Result<()> {
        let counter = self.counters.received(region, peer);
        let ring = self.region_ring(region)?;
        let posts: Vec<_> = ring.release(Half::of(0), ANY).collect();
        for post in posts.into_iter().filter(|p| p.word.owner == peer) {
            self.push(Kind::Post, STEP_POST, counter, region.0.into(), post.word);
        }
        Ok(())
    }

    /// Releases all that the peer has signalled, whether it was waited for or not, so that the next who gets this region's
    /// number begins with nothing on its way.
    pub(crate) fn let_go_of(&mut self, region: Region, peer: usize) -> Result<()> {
        let at = self.arrival_in(region, peer)?;
        let counter = self.counters.received(region, peer);
        self.push(Kind::Count, STEP_CATCH_UP, counter, region.0.into(), at);
        self.release(region, peer)
    }

    /// All steps so far, cut into launches; none are left.
    pub(crate) fn batches(&mut self) -> Vec<Batch> {
        let mut batches: Vec<Batch> = Vec::new();
        // The phase in which the last batch begins.
        let mut first = 0;
        for &(phase, bits) in &self.list {
            let full = |b: &Batch| b.1 as usize == MOST_STEPS || phase - first == MOST_PHASES;
            if batches.last().is_none_or(full) {
                batches.push(([0; MOST_STEPS], 0));
                first = phase;
            }
            if let Some((steps, count)) = batches.last_mut() {
                steps[*count as usize] = bits | (phase - first) << 56;
                *count += 1;
            }
        }
        self.list.clear();
        (self.phase, self.last) = (0, None);
        self.posted.clear();
        batches
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use brigade_device::{CommConfig, ParallelMode};

    const SIZE: usize = 3;

    fn with<R>(test: impl FnOnce(Steps<'_>) -> R) -> R {
        let config = CommConfig::new(ParallelMode::Tp);
        let layout = Layout::new(&config, 16, 1, SIZE).unwrap();
        let group = Group {
            mode: ParallelMode::Tp,
            rank: 1,
            size: SIZE,
        };
        test(Steps::new(&layout, group))
    }

    fn scratch() -> Use {
        Use {
            area: Area::Scratch,
            half: Half::of(1),
        }
    }

    /// Operation and phase of every step of a batch.
    fn told((steps, count): &Batch) -> Vec<(u64, u64)> {
        let steps = &steps[..*count as usize];
        steps.iter().map(|s| (s >> 60, s >> 56 & 0xF)).collect()
    }

    #[test]
    fn what_must_wait_for_something_is_in_a_later_phase() {
        with(|mut steps| {
            steps.start();
            steps.arrive();
            steps.begin(scratch());
            steps.filled_to_all(scratch(), 1, 0);
            steps.await_all(scratch(), 0);
            steps.end(scratch());
            steps.meet();
            steps.finish();
            let batches = steps.batches();
            let want = [
                (STEP_START, 0),
                // Nothing that counts or posts waits for anything but what was waited for before.
                (STEP_ADVANCE, 1),
                (STEP_ARRIVE, 1),
                (STEP_ARRIVE, 1),
                (STEP_ADVANCE, 1),
                (STEP_CREDIT, 1),
                (STEP_CREDIT, 1),
                (STEP_POST, 2),
                (STEP_POST, 2),
                (STEP_WAIT, 2),
                (STEP_WAIT, 2),
                (STEP_POST, 3),
                (STEP_POST, 3),
                (STEP_CLOSE, 3),
                (STEP_MEET, 3),
                (STEP_MEET, 3),
                (STEP_FINISH, 4),
            ];
            assert_eq!(batches.iter().map(told).collect::<Vec<_>>(), [want]);
            assert!(steps.batches().is_empty(), "they were taken");
        });
    }

    #[test]
    fn no_step_is_about_absent_ranks() {
        with(|steps| {
            let mut steps = steps.without(Absent::from_bits(0b001, 0));
            steps.arrive();
            steps.begin(scratch());
            steps.filled_to_all(scratch(), 1, 0);
            steps.await_all(scratch(), 0);
            steps.end(scratch());
            steps.meet();
            let batches = steps.batches();
            let all = batches.iter().flat_map(|(steps, n)| &steps[..*n as usize]);
            let about: Vec<(u64, u64)> = all.map(|s| (s >> 60, s >> 20 & 0xFF)).collect();
            let of = |op| about.iter().filter(move |s| s.0 == op).map(|s| s.1);
            for op in [STEP_ARRIVE, STEP_CREDIT, STEP_WAIT, STEP_MEET] {
                assert_eq!(of(op).collect::<Vec<_>>(), [2], "{op}");
            }
            // What is filled, and the credit.
            assert_eq!(of(STEP_POST).collect::<Vec<_>>(), [2, 2]);
        });
    }

    #[test]
    fn a_word_is_posted_once_in_a_phase() {
        with(|mut steps| {
            for slot in [0, 1, 0, 0] {
                steps.filled(2, scratch(), slot, 0);
            }
            let told = told(&steps.batches()[0]);
            assert_eq!(told, [0, 0, 1, 2].map(|phase| (STEP_POST, phase)));
        });
    }

    #[test]
    fn launches_hold_what_a_warp_and_a_phase_number_can() {
        with(|mut steps| {
            for piece in 0..40 {
                steps.await_filled(scratch(), 0, piece % 16, 0);
            }
            let counts: Vec<_> = steps.batches().iter().map(|b| b.1).collect();
            assert_eq!(counts, [32, 8]);

            for _ in 0..20 {
                steps.arrive();
            }
            let batches = steps.batches();
            let all: Vec<_> = batches.iter().flat_map(told).collect();
            assert_eq!(all.len(), 60);
            for batch in &batches {
                let told = told(batch);
                assert_eq!(told[0].1, 0, "each begins anew");
                assert!(told.is_sorted_by_key(|&(_, phase)| phase), "{told:?}");
            }
            // Advance, tell, advance, tell: in whatever launches they are.
            let ops: Vec<_> = all.iter().map(|&(op, _)| op).collect();
            let round = [STEP_ADVANCE, STEP_ARRIVE, STEP_ARRIVE];
            assert_eq!(ops, round.repeat(20));
        });
    }

    #[test]
    fn counters_do_not_meet() {
        let counters = Counters::new(SIZE);
        let mut all = vec![Counters::CALLS];
        for area in Area::ALL {
            all.extend([0, 1].map(|n| {
                Counters::uses(Use {
                    area,
                    half: Half::of(n),
                })
            }));
        }
        all.extend(counters.messages()..counters.messages() + 4 * SIZE);
        all.extend(counters.queues()..counters.queues() + 2 * SIZE * FIFO_CHANNELS);
        for region in 0..3 {
            for peer in 0..SIZE {
                all.push(counters.sent(Region(region), peer));
                all.push(counters.received(Region(region), peer));
            }
        }
        all.sort_unstable();
        assert_eq!(all, (0..counters.count(3)).collect::<Vec<_>>());
    }
}
