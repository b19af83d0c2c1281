//! Those who are left agree on who that is, and start anew.

use crate::shared::*;
use brigade_sync::{CreditRing, Flag, Half, Memory, Post, RollCall, Word};
use std::time::Instant;

/// What is taken away.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Without {
    Nothing,
    /// One rank's word decides.
    Arbiter,
    /// Who comes behind the closing is left out.
    Closing,
    /// A rank answers when it has let go.
    LetGoFirst,
    /// A rank wipes its flags.
    Wipe,
    /// A roll is called before flags are wiped.
    RollBeforeWipe,
    /// A roll is called behind it.
    RollAfterWipe,
    /// What a roll said stays until the next but one.
    TwoWords,
}

/// Memory that takes a guard from what goes through it.
struct Bent<'a> {
    memory: &'a dyn Memory,
    roll: RollCall,
    without: Without,
}

/// That a roll is closed.
const CLOSED: u64 = 1 << 40;

impl<'a> Bent<'a> {
    fn new(memory: &'a dyn Memory, roll: RollCall, without: Without) -> Self {
        Self {
            memory,
            roll,
            without,
        }
    }

    fn place(&self, at: Word) -> Word {
        match self.without {
            Without::Arbiter if at.index >= self.roll.base => Word {
                owner: self.roll.rank,
                ..at
            },
            Without::TwoWords => Word {
                index: self.roll.base,
                ..at
            },
            _ => at,
        }
    }
}

impl Memory for Bent<'_> {
    fn load(&self, at: Word) -> u64 {
        let seen = self.memory.load(self.place(at));
        match self.without {
            Without::Closing => seen & !CLOSED,
            _ => seen,
        }
    }
    fn store(&self, at: Word, value: u64) {
        // Each rank's own word decides: nobody else's changes it.
        if self.without != Without::Arbiter {
            self.memory.store(self.place(at), value);
        }
    }
    fn compare_exchange(&self, at: Word, current: u64, new: u64) -> Result<(), u64> {
        let at = self.place(at);
        match self.without {
            Without::Closing => {
                let seen = self.memory.load(at) & CLOSED;
                self.memory.compare_exchange(at, current | seen, new | seen)
            }
            _ => self.memory.compare_exchange(at, current, new),
        }
    }
    fn events(&self, owner: usize) -> u32 {
        self.memory.events(owner)
    }
    fn rest(&self, owner: usize, events: u32, until: Option<Instant>) {
        self.memory.rest(owner, events, until);
    }
}

/// Where a rank keeps who is left; and where rank 0 has what each goes on with.
const LEFT: usize = 0;

/// A rank that was left out.
const OUT: u64 = 1 << 63;

struct Model {
    roll: RollCall,
    ring: CreditRing,
    /// Words behind those of the machines.
    free: usize,
    without: Without,
}

impl Model {
    fn new(rank: usize, size: usize, without: Without) -> Self {
        let words = CreditRing::words(size, 1);
        Self {
            roll: RollCall {
                rank,
                size,
                base: words,
            },
            ring: CreditRing {
                rank,
                size,
                pieces: 1,
                base: 0,
            },
            free: words + RollCall::WORDS,
            without,
        }
    }

    const fn words(&self) -> usize {
        self.free + 1 + self.roll.size
    }

    fn own(&self) -> Word {
        cell(self.roll.rank, self.free + LEFT)
    }

    fn goes_on(&self, rank: usize) -> Word {
        cell(0, self.free + 1 + rank)
    }

    /// Who is left, as this rank knows; none if it was left out.
    fn left(memory: &dyn Memory, own: Word) -> u64 {
        match memory.load(own) {
            OUT => 0,
            left => left,
        }
    }

    fn calls(&self, round: u32, program: &mut Program) {
        let (roll, without, own) = (self.roll, self.without, self.own());
        program.push(does(move |shared| {
            let bent = Bent::new(shared, roll, without);
            let late = round > 1 && Self::left(shared, own) == 0;
            if late || !roll.answer(&bent, round, 1) {
                shared.store(own, OUT);
            }
        }));
        let expected = (1u16 << roll.size) - 1;
        let first = (roll.rank + 1) % roll.size;
        program.push(awaits(first, move |shared, budget| {
            let bent = Bent::new(shared, roll, without);
            if shared.load(own) != OUT {
                // Whoever has not come by then is left out.
                let _ = roll.wait(&bent, (round, expected), budget, |_| false);
            }
            Ok(Ok(()))
        }));
        program.push(does(move |shared| {
            let bent = Bent::new(shared, roll, without);
            if shared.load(own) == OUT {
                return;
            }
            let called = roll.close(&bent, round, 0);
            shared.store(own, called.map_or(OUT, |called| called.answered.into()));
        }));
    }

    /// Goes on with those who are left, if nobody goes on with others.
    fn goes_on_alone(&self) -> Step {
        let (rank, size, own) = (self.roll.rank, self.roll.size, self.own());
        let all: Vec<Word> = (0..size).map(|r| self.goes_on(r)).collect();
        acts(move |shared| {
            let left = Self::left(shared, own);
            if left == 0 {
                return Ok(());
            }
            shared.store(all[rank], left);
            let others = all.iter().map(|&at| shared.load(at));
            match others
                .into_iter()
                .find(|&other| other != 0 && other != left)
            {
                Some(other) => Err(Fault::Wrong(format!(
                    "ranks {left:#b} go on, and so do ranks {other:#b}"
                ))),
                None => Ok(()),
            }
        })
    }

    /// A call that is given up, two rolls with wiping between them, and a call of those who are left. Generations have come round.
    fn program(self) -> Program {
        let (rank, size, own) = (self.roll.rank, self.roll.size, self.own());
        let ring = self.ring;
        let half = Half::of(0);
        let flag = Flag::new(1, 0xA11, 1);
        let filled = move |to| ring.filled(to, half, rank, 0, flag);
        let arrival = move |from| ring.arrival(half, from, 0, from, flag);
        let mut given_up = Program::new();
        for to in peers(rank, size) {
            given_up.push(writes(cell(to, rank), value(0, rank)));
            given_up.push(posts(filled(to)));
        }
        let mut program = Program::new();
        let without = self.without;
        if without != Without::LetGoFirst {
            program.append(&mut given_up);
        }
        if without != Without::RollBeforeWipe {
            self.calls(1, &mut program);
        }
        program.append(&mut given_up);
        if without != Without::Wipe {
            program.extend(peers(rank, size).map(|from| {
                posts(Post {
                    word: arrival(from).word,
                    flag: Flag::from_bits(0),
                })
            }));
        }
        match without {
            Without::RollAfterWipe => {}
            // The first that is called.
            Without::RollBeforeWipe => self.calls(1, &mut program),
            _ => self.calls(2, &mut program),
        }
        program.push(self.goes_on_alone());
        for to in peers(rank, size) {
            program.push(does(move |shared| {
                if Self::left(shared, own) >> to & 1 == 1 {
                    shared.write(cell(to, rank), value(1, rank));
                    brigade_sync::post(shared, filled(to));
                }
            }));
        }
        for from in peers(rank, size) {
            program.push(awaits(from, move |shared, budget| {
                if Self::left(shared, own) >> from & 1 == 0 {
                    return Ok(Ok(()));
                }
                if let Err(stop) =
                    brigade_sync::wait(shared, arrival(from), budget, || shared.stopped())
                {
                    return Ok(Err(stop));
                }
                let got = shared.read(cell(rank, from));
                match got == value(1, from) {
                    true => Ok(Ok(())),
                    false => Err(wrong(rank, got, value(1, from))),
                }
            }));
        }
        program
    }
}

/// Nobody is missing: all start anew together.
pub fn renewing(size: usize, without: Without) -> Scenario {
    let words = Model::new(0, size, without).words();
    let program = |rank| Model::new(rank, size, without).program();
    Scenario::new(words, size, (0..size).map(program).collect())
}

/// Nobody is missing, and so many rolls follow each other: nobody is left out, however late it looks.
pub fn following(size: usize, rolls: u32, without: Without) -> Scenario {
    let program = |rank| {
        let model = Model::new(rank, size, without);
        let own = model.own();
        let mut program = Program::new();
        for round in 1..=rolls {
            model.calls(round, &mut program);
        }
        program.push(acts(move |shared| match shared.load(own) {
            OUT => Err(Fault::Wrong(format!(
                "rank {rank} is left out, and was there"
            ))),
            _ => Ok(()),
        }));
        program
    };
    let words = Model::new(0, size, without).words();
    Scenario::new(words, 0, (0..size).map(program).collect())
}

/// One roll, for which ranks may be too late at any time.
pub fn deciding(size: usize, without: Without) -> Scenario {
    let program = |rank| {
        let model = Model::new(rank, size, without);
        let mut program = Program::new();
        model.calls(1, &mut program);
        program.push(model.goes_on_alone());
        program
    };
    let words = Model::new(0, size, without).words();
    let mut scenario = Scenario::new(words, 0, (0..size).map(program).collect());
    scenario.timeouts = Timeouts::Any;
    scenario
}

/// Ranks may be too late at any time, and perhaps one dies at any point.
pub fn agreeing(size: usize, mortal: Option<usize>, without: Without) -> Scenario {
    let mut scenario = renewing(size, without).with_abort();
    scenario.mortal = mortal;
    scenario.expect = Expect::Ended;
    scenario.timeouts = Timeouts::Any;
    scenario
}
