//! Giving up: one record for the group, and nobody who waits forever or sleeps through it.

use crate::shared::*;
use brigade_sync::{AbortCell, Flag, Memory, Wait, Want, Word};
use std::time::Instant;

/// What is taken away.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Without {
    Nothing,
    /// One rank's cell decides.
    Arbiter,
    /// Every record has a place of its own.
    Place,
    /// The record is named to all ranks.
    Naming,
    /// A rank decides when its record is complete.
    RecordFirst,
}

/// Memory that takes a guard from what goes through it.
struct Bent<'a> {
    memory: &'a dyn Memory,
    cell: AbortCell,
    rank: usize,
    without: Without,
}

impl Bent<'_> {
    fn is_verdict(&self, at: Word) -> bool {
        at.index == self.cell.base
    }

    /// Words that say whether a place is taken.
    fn is_claim(&self, at: Word) -> bool {
        self.without == Without::Place
            && at.index > self.cell.base
            && (at.index - self.cell.base - 1).is_multiple_of(1 + AbortCell::RECORD)
    }

    fn place(&self, at: Word) -> Word {
        match self.without {
            Without::Arbiter if self.is_verdict(at) && at.owner == 0 => Word {
                owner: self.rank,
                ..at
            },
            _ => at,
        }
    }
}

impl Memory for Bent<'_> {
    fn load(&self, at: Word) -> u64 {
        if self.is_claim(at) {
            return 0;
        }
        self.memory.load(self.place(at))
    }
    fn store(&self, at: Word, value: u64) {
        self.memory.store(at, value);
    }
    fn compare_exchange(&self, at: Word, current: u64, new: u64) -> Result<(), u64> {
        let named = self.without == Without::Naming && self.is_verdict(at) && at.owner != 0;
        if named || self.is_claim(at) {
            return Ok(());
        }
        self.memory.compare_exchange(self.place(at), current, new)
    }
    fn events(&self, owner: usize) -> u32 {
        self.memory.events(owner)
    }
    fn rest(&self, owner: usize, events: u32, until: Option<Instant>) {
        self.memory.rest(owner, events, until);
    }
}

/// Takes rank 0's cell, then writes the record there; others look a few times whether it is complete.
fn claim_first(memory: &dyn Memory, cell: AbortCell, record: Record) -> Record {
    const TAKEN: u64 = 1 << 63;
    // The verdict for the first place.
    const COMPLETE: u64 = (GENERATION as u64) << 16 | 1;
    let word = |owner, i| Word {
        owner,
        index: cell.base + i,
    };
    if memory.compare_exchange(word(0, 0), 0, TAKEN).is_ok() {
        for (i, value) in record.into_iter().enumerate() {
            memory.store(word(0, 2 + i), value);
        }
        memory.store(word(0, 0), COMPLETE);
    }
    let complete = (0..3).any(|_| memory.load(word(0, 0)) == COMPLETE);
    if !complete {
        return record;
    }
    for owner in 1..cell.size {
        memory.store(word(owner, 0), COMPLETE);
    }
    std::array::from_fn(|i| memory.load(word(0, 2 + i)))
}

fn never_comes(rank: usize, size: usize) -> Step {
    waits(Wait {
        word: cell(rank, 0),
        want: Want::Exactly(Flag::new(GENERATION, 0xA11, 1)),
        peer: (rank + 1) % size,
    })
}

/// Every rank waits for what never comes, gives up at any time, and perhaps one dies on the way.
pub fn scenario(size: usize, mortal: Option<usize>, without: Without) -> Scenario {
    let programs = (0..size).map(|r| vec![never_comes(r, size)]).collect();
    let mut scenario = Scenario::new(1, 0, programs).with_abort();
    scenario.stops_at_once = false;
    scenario.mortal = mortal;
    scenario.expect = Expect::Ended;
    scenario.timeouts = Timeouts::Any;
    if without != Without::Nothing {
        scenario.raise = Box::new(move |memory, cell, rank, record| {
            let bent = Bent {
                memory,
                cell,
                rank,
                without,
            };
            match without {
                Without::RecordFirst => claim_first(memory, cell, record),
                _ => cell.raise(&bent, GENERATION, record),
            }
        });
    }
    scenario
}

/// As above, but the last rank does not give up by itself: it must hear.
pub fn hearing(size: usize) -> Scenario {
    let mut scenario = scenario(size, None, Without::Nothing);
    scenario.patient = Some(size - 1);
    scenario
}

/// Every rank waits for what never comes, and rests in the way that is said.
pub fn resting(size: usize, rests: Rests) -> Scenario {
    let mut scenario = scenario(size, None, Without::Nothing);
    scenario.rests = rests;
    scenario
}

/// Every rank stops the group, and looks at the record that it finds.
pub fn raising(size: usize) -> Scenario {
    let program = |rank: usize| {
        let cell = AbortCell { size, base: 0 };
        let raises = acts(move |shared| {
            let own = std::array::from_fn(|i| (rank as u64 + 1) << 8 | i as u64);
            let won = cell.raise(shared, GENERATION, own);
            let whole = |record: Record| {
                let mut words = (0..).zip(record);
                words.all(|(i, w)| w >> 8 == record[0] >> 8 && w & 0xFF == i) && record[0] != 0
            };
            let told = cell.raised(shared, rank, GENERATION);
            if whole(won) && told.is_some_and(whole) {
                Ok(())
            } else {
                Err(Fault::Wrong(format!("rank {rank} finds half a record")))
            }
        });
        vec![raises]
    };
    Scenario::new(AbortCell::WORDS, 0, (0..size).map(program).collect())
}
