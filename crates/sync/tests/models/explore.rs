//! All interleavings of single loads and stores, by stateright.

use crate::{
    replay::{Mode, Outcome, run},
    shared::{Expect, Fault, GENERATION, Program, Rests, Scenario, Timeouts},
};
use brigade_sync::{AbortCell, Memory, Stop, Word};
use stateright::{Checker, Model, Property};
use std::time::Instant;

/// A store that is on its way to memory.
#[derive(Clone, Debug, Hash, PartialEq, Eq)]
pub struct Pending {
    pub at: usize,
    pub value: u64,
    pub release: bool,
}

#[derive(Clone, Copy, Debug, Hash, PartialEq, Eq)]
pub enum Kind {
    Timeout,
    Mismatch,
    Heard,
}

#[derive(Clone, Debug, Hash, PartialEq, Eq)]
pub enum Phase {
    /// At this step of the program.
    At(usize),
    /// Stopping the group, because of a peer.
    Stopping(Kind, usize),
    Through,
    GaveUp([u64; AbortCell::RECORD]),
    Dead,
}

#[derive(Clone, Debug, Hash, PartialEq, Eq)]
pub struct Rank {
    pub phase: Phase,
    /// What its memory accesses of this step gave: the step is run again up to there.
    pub log: Vec<(usize, u64)>,
    pub resting: bool,
}

/// Everything, at one point in time.
#[derive(Clone, Debug, Hash, PartialEq, Eq)]
pub struct World {
    pub memory: Vec<u64>,
    pub pending: Vec<Vec<Pending>>,
    pub ranks: Vec<Rank>,
    /// Stores to each rank's memory, if they are counted.
    pub events: Vec<u32>,
    pub wrong: Option<String>,
}

impl World {
    /// A store arrives in memory, and wakes its owner.
    pub fn arrive(&mut self, at: usize, value: u64, stride: usize) {
        self.memory[at] = value;
        self.ranks[at / stride].resting = false;
        if let Some(count) = self.events.get_mut(at / stride) {
            *count += 1;
        }
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Action {
    /// One memory access.
    Step(usize),
    /// The budget of a wait is spent.
    Expire(usize),
    Die(usize),
    /// A store becomes visible.
    Arrive(usize, usize),
}

impl Scenario {
    pub fn stride(&self) -> usize {
        self.words + self.cells
    }

    pub fn index(&self, at: Word) -> usize {
        assert!(at.index < self.stride(), "{at:?} is outside of memory");
        at.owner * self.stride() + at.index
    }

    /// The inner words of a record go with the access before: its first and its last word show whether it is torn.
    pub fn is_inside_record(&self, index: usize) -> bool {
        let places = self.abort.map_or(usize::MAX, |a| a.base + 1);
        let place = 1 + AbortCell::RECORD;
        let word = (index % self.stride()).checked_sub(places);
        word.is_some_and(|w| w < 2 * place && (2..AbortCell::RECORD).contains(&(w % place)))
    }

    fn words_of(kind: Kind, rank: usize, peer: usize) -> [u64; AbortCell::RECORD] {
        let word = (kind as u64) << 16 | (rank as u64) << 8 | peer as u64;
        std::array::from_fn(|i| word | (i as u64) << 32)
    }

    /// What a rank does that gives up.
    pub fn stop(
        &self,
        memory: &dyn Memory,
        rank: usize,
        kind: Kind,
        peer: usize,
    ) -> [u64; AbortCell::RECORD] {
        let own = Self::words_of(kind, rank, peer);
        match self.abort {
            None => own,
            Some(abort) if kind == Kind::Heard => {
                abort.raised(memory, rank, GENERATION).unwrap_or(own)
            }
            Some(abort) => (self.raise)(memory, abort, rank, own),
        }
    }

    /// Whether `rank` would get on: what it waits for is there, or hopeless, or it finds the first of several words.
    fn gets_on(&self, world: &World, rank: usize) -> bool {
        let mut world = world.clone();
        let before = world.ranks[rank].log.len();
        // Twice, since it may be in the middle of a round that looked too early.
        (0..2).any(|_| match run(self, &mut world, rank, Mode::Look) {
            Outcome::Rested => world.ranks[rank].log.len() > before,
            _ => true,
        })
    }

    /// What can happen by itself, and which ranks are waiting.
    fn moves(&self, world: &World) -> (Vec<Action>, Vec<usize>) {
        let (mut moves, mut waiting) = (Vec::new(), Vec::new());
        for (r, rank) in world.ranks.iter().enumerate() {
            let waits = match rank.phase {
                Phase::At(pc) => self.programs[r][pc].waits,
                Phase::Stopping(..) => false,
                _ => continue,
            };
            match self.rests {
                _ if !waits => moves.push(Action::Step(r)),
                Rests::Looks if self.gets_on(world, r) => moves.push(Action::Step(r)),
                Rests::Counts | Rests::Sleeps if !rank.resting => moves.push(Action::Step(r)),
                _ => waiting.push(r),
            }
        }
        for (r, pending) in world.pending.iter().enumerate() {
            for (i, p) in pending.iter().enumerate() {
                let free = !p.release && pending[..i].iter().all(|q| q.at != p.at);
                if i == 0 || free {
                    moves.push(Action::Arrive(r, i));
                }
            }
        }
        (moves, waiting)
    }

    /// What is wrong with a state.
    fn complaint(&self, world: &World) -> Option<String> {
        if world.wrong.is_some() {
            return world.wrong.clone();
        }
        if self.expect == Expect::Through {
            let gave_up = |r: &Rank| match r.phase {
                Phase::GaveUp(record) => Some(told(&record)),
                _ => None,
            };
            if let Some(why) = world.ranks.iter().find_map(gave_up) {
                return Some(why);
            }
        }
        let ended = |r: &Rank| matches!(r.phase, Phase::Through | Phase::GaveUp(_) | Phase::Dead);
        if world.ranks.iter().all(ended) {
            return self.complaint_at_end(world);
        }
        let (moves, waiting) = self.moves(world);
        if !moves.is_empty() {
            return None;
        }
        let (&first, rest) = waiting.split_first()?;
        if world.ranks[first].resting {
            let deaf = waiting.iter().find(|&&r| self.gets_on(world, r))?;
            return Some(format!(
                "rank {deaf} sleeps on though it would find something"
            ));
        }
        (self.timeouts == Timeouts::Unbounded).then(|| match rest.len() {
            0 => format!("rank {first} waits forever"),
            n => format!("rank {first} and {n} more wait forever"),
        })
    }

    fn complaint_at_end(&self, world: &World) -> Option<String> {
        let mut records = Vec::new();
        for (r, rank) in world.ranks.iter().enumerate() {
            match &rank.phase {
                Phase::GaveUp(record) => records.push((r, record)),
                Phase::Through if self.expect == Expect::Mismatch => {
                    return Some(format!("rank {r} is through, though in another call"));
                }
                _ => {}
            }
        }
        let &(first, record) = records.first()?;
        let whole = |i: usize| record[i] == record[0] | (i as u64) << 32;
        if !(0..AbortCell::RECORD).all(whole) {
            return Some(format!("rank {first} finds a record of several ranks"));
        }
        if self.expect == Expect::Mismatch && record[0] >> 16 != Kind::Mismatch as u64 {
            return Some(told(record));
        }
        if let Some((r, _)) = records.iter().find(|&&(_, other)| other != record) {
            return Some(format!("ranks {first} and {r} end with different records"));
        }
        for &(r, _) in &records {
            let cell = self
                .abort
                .map(|a| a.raised(&Still(self, world), r, GENERATION));
            if cell.is_some_and(|c| c != Some(*record)) {
                return Some(format!("rank {r} finds another record than it ended with"));
            }
        }
        None
    }

    fn after(&self, world: &World, action: Action) -> World {
        let mut next = world.clone();
        let (r, mode) = match action {
            Action::Step(r) => (r, Mode::One),
            Action::Expire(r) => (r, Mode::Expire),
            Action::Die(r) => {
                next.ranks[r] = Rank {
                    phase: Phase::Dead,
                    log: Vec::new(),
                    resting: false,
                };
                return next;
            }
            Action::Arrive(r, i) => {
                let p = next.pending[r].remove(i);
                next.arrive(p.at, p.value, self.stride());
                return next;
            }
        };
        let mode = match next.ranks[r].phase {
            Phase::Stopping(..) if self.stops_at_once => Mode::Look,
            _ => mode,
        };
        next.ranks[r].resting = false;
        let phase = match run(self, &mut next, r, mode) {
            Outcome::Paused | Outcome::Rested => return next,
            Outcome::Stopped(record) => Phase::GaveUp(record),
            Outcome::Ended(Ok(())) => match next.ranks[r].phase {
                Phase::At(pc) if pc + 1 < self.programs[r].len() => Phase::At(pc + 1),
                _ => Phase::Through,
            },
            Outcome::Ended(Err(Fault::Wrong(what))) => {
                next.wrong = Some(what);
                return next;
            }
            Outcome::Ended(Err(Fault::Stop(stop, peer))) => {
                next.ranks[r].log.clear();
                let kind = match stop {
                    Stop::Timeout { .. } => Kind::Timeout,
                    Stop::Mismatch { .. } => Kind::Mismatch,
                    Stop::Interrupted => Kind::Heard,
                };
                Phase::Stopping(kind, peer)
            }
        };
        next.ranks[r].phase = phase;
        next
    }
}

/// A record in words.
fn told(record: &[u64; AbortCell::RECORD]) -> String {
    let (kind, rank, peer) = (record[0] >> 16, record[0] >> 8 & 0xFF, record[0] & 0xFF);
    let why = if kind == Kind::Mismatch as u64 {
        "sees another call's flag from"
    } else {
        "waits in vain for"
    };
    format!("rank {rank} {why} rank {peer}")
}

/// Memory at the end.
struct Still<'a>(&'a Scenario, &'a World);

impl Memory for Still<'_> {
    fn load(&self, at: Word) -> u64 {
        self.1.memory[self.0.index(at)]
    }
    fn store(&self, _: Word, _: u64) {}
    fn compare_exchange(&self, at: Word, _: u64, _: u64) -> Result<(), u64> {
        Err(self.load(at))
    }
    fn events(&self, _: usize) -> u32 {
        0
    }
    fn rest(&self, _: usize, _: u32, _: Option<Instant>) {}
}

impl Model for Scenario {
    type State = World;
    type Action = Action;

    fn init_states(&self) -> Vec<World> {
        let rank = |program: &Program| Rank {
            phase: if program.is_empty() {
                Phase::Through
            } else {
                Phase::At(0)
            },
            log: Vec::new(),
            resting: false,
        };
        vec![World {
            memory: vec![0; self.ranks() * self.stride()],
            pending: vec![Vec::new(); self.ranks()],
            ranks: self.programs.iter().map(rank).collect(),
            events: match self.rests {
                Rests::Looks => Vec::new(),
                Rests::Counts | Rests::Sleeps => vec![0; self.ranks()],
            },
            wrong: None,
        }]
    }

    fn actions(&self, world: &World, actions: &mut Vec<Action>) {
        if world.wrong.is_some() {
            return;
        }
        let (moves, waiting) = self.moves(world);
        let spent = match self.timeouts {
            Timeouts::Any => true,
            Timeouts::Last => moves.is_empty(),
            Timeouts::Unbounded => false,
        };
        actions.extend(moves);
        if spent {
            let left = waiting.into_iter().filter(|r| self.patient != Some(*r));
            actions.extend(left.map(Action::Expire));
        }
        if let Some(r) = self.mortal
            && matches!(world.ranks[r].phase, Phase::At(_) | Phase::Stopping(..))
        {
            actions.push(Action::Die(r));
        }
    }

    fn next_state(&self, world: &World, action: Action) -> Option<World> {
        Some(self.after(world, action))
    }

    fn properties(&self) -> Vec<Property<Self>> {
        vec![Property::always("sound", |model: &Self, world: &World| {
            model.complaint(world).is_none()
        })]
    }
}

/// Goes through all states: how many there are, or what is wrong with the first bad one.
pub fn explore(scenario: Scenario) -> Result<usize, String> {
    let checker = scenario.checker().threads(1).spawn_bfs().join();
    match checker.discovery("sound") {
        None => Ok(checker.unique_state_count()),
        Some(path) => {
            let complaint = checker.model().complaint(path.last_state());
            Err(complaint.unwrap_or_default())
        }
    }
}
