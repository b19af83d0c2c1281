//! Runs a rank's step up to its next memory access, again and again: the machines' code as it is, one access at a time.

use crate::{
    explore::{Pending, Phase, World},
    shared::{Fault, GENERATION, Rests, Scenario, Shared},
};
use brigade_sync::{AbortCell, Budget, Memory, Word};
use std::{
    panic::{AssertUnwindSafe, catch_unwind, resume_unwind},
    sync::{Mutex, MutexGuard, PoisonError},
    time::Instant,
};

#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Mode {
    /// Makes one memory access.
    One,
    /// Goes on until it would rest.
    Look,
    /// Goes on with a budget that is spent.
    Expire,
}

pub enum Outcome {
    /// The step wants to access memory again.
    Paused,
    /// The step rests.
    Rested,
    Ended(Result<(), Fault>),
    Stopped([u64; AbortCell::RECORD]),
}

struct Pause;

/// Stands in logs where a round of a wait begins.
const ROUND: usize = usize::MAX;

/// The same for a fence.
const FENCE: usize = ROUND - 1;

struct Inner<'a> {
    world: &'a mut World,
    log: Vec<(usize, u64)>,
    at: usize,
    fresh: usize,
    rested: bool,
}

struct Replay<'a> {
    model: &'a Scenario,
    rank: usize,
    inner: Mutex<Inner<'a>>,
}

/// Runs what `rank` does next.
pub fn run(model: &Scenario, world: &mut World, rank: usize, mode: Mode) -> Outcome {
    let me = &mut world.ranks[rank];
    let (log, phase) = (std::mem::take(&mut me.log), me.phase.clone());
    let replay = Replay {
        model,
        rank,
        inner: Mutex::new(Inner {
            world,
            log,
            at: 0,
            fresh: if mode == Mode::One { 1 } else { usize::MAX },
            rested: false,
        }),
    };
    let work = AssertUnwindSafe(|| match phase {
        Phase::At(pc) => {
            let mut budget = Spent(mode == Mode::Expire);
            Outcome::Ended((model.programs[rank][pc].run)(&replay, &mut budget))
        }
        Phase::Stopping(kind, peer) => Outcome::Stopped(model.stop(&replay, rank, kind, peer)),
        _ => Outcome::Paused,
    });
    let result = catch_unwind(work);
    let inner = replay
        .inner
        .into_inner()
        .unwrap_or_else(PoisonError::into_inner);
    match result {
        Ok(outcome) => outcome,
        Err(pause) if pause.is::<Pause>() => {
            inner.world.ranks[rank].log = inner.log;
            if inner.rested {
                Outcome::Rested
            } else {
                Outcome::Paused
            }
        }
        Err(panic) => resume_unwind(panic),
    }
}

impl<'a> Replay<'a> {
    fn lock(&self) -> MutexGuard<'_, Inner<'a>> {
        self.inner.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// One access: what it gave before, or what it gives now.
    fn access(&self, index: usize, now: impl FnOnce(&mut World) -> u64) -> u64 {
        let mut inner = self.lock();
        if inner.at == inner.log.len() {
            let free = match index {
                ROUND => self.model.rests == Rests::Looks,
                FENCE => !self.model.weak,
                _ => self.model.is_inside_record(index),
            };
            if !free {
                if inner.fresh == 0 {
                    drop(inner);
                    resume_unwind(Box::new(Pause));
                }
                inner.fresh -= 1;
            }
            let value = now(inner.world);
            inner.log.push((index, value));
        }
        inner.at += 1;
        inner.log[inner.at - 1].1
    }

    fn put(&self, at: Word, value: u64, release: bool) {
        let (index, stride) = (self.model.index(at), self.model.stride());
        let release = release && !self.model.relaxed;
        self.access(index, |world| {
            if self.model.weak {
                world.pending[self.rank].push(Pending {
                    at: index,
                    value,
                    release,
                });
            } else {
                world.arrive(index, value, stride);
            }
            0
        });
    }

    fn get(&self, at: Word) -> u64 {
        let index = self.model.index(at);
        self.access(index, |world| {
            let own = &world.pending[self.rank];
            let newest = own.iter().rev().find(|p| p.at == index);
            newest.map_or(world.memory[index], |p| p.value)
        })
    }

    /// What this rank stored becomes visible.
    fn settle(&self, world: &mut World) {
        for p in std::mem::take(&mut world.pending[self.rank]) {
            world.arrive(p.at, p.value, self.model.stride());
        }
    }

    fn cell(&self, at: Word) -> Word {
        Word {
            index: self.model.words + at.index,
            ..at
        }
    }
}

impl Memory for Replay<'_> {
    fn load(&self, at: Word) -> u64 {
        self.get(at)
    }

    fn store(&self, at: Word, value: u64) {
        self.put(at, value, true);
    }

    fn store_relaxed(&self, at: Word, value: u64) {
        self.put(at, value, false);
    }

    /// In one piece; what this rank stored before is visible before.
    fn compare_exchange(&self, at: Word, current: u64, new: u64) -> Result<(), u64> {
        let (index, stride) = (self.model.index(at), self.model.stride());
        let was = self.access(index, |world| {
            self.settle(world);
            let was = world.memory[index];
            if was == current {
                world.arrive(index, new, stride);
            }
            was
        });
        if was == current { Ok(()) } else { Err(was) }
    }

    /// Where a round of a wait begins. Only where rests are looked at closely is it an access of its own.
    fn events(&self, owner: usize) -> u32 {
        self.access(ROUND, |world| {
            world.events.get(owner).copied().unwrap_or(0).into()
        }) as u32
    }

    /// The wait goes on with a new round.
    fn rest(&self, owner: usize, events: u32, _: Option<Instant>) {
        let mut inner = self.lock();
        if self.model.rests != Rests::Looks {
            // Between the last look and the rest, something may happen.
            if inner.fresh == 0 {
                drop(inner);
                resume_unwind(Box::new(Pause));
            }
            inner.fresh -= 1;
        }
        let round = inner.log.iter().rposition(|&(i, _)| i == ROUND);
        inner.log.truncate(round.unwrap_or(0));
        inner.rested = true;
        let nothing_new = inner.world.events.get(owner).is_none_or(|&e| e == events);
        let still = nothing_new || self.model.rests == Rests::Sleeps;
        inner.world.ranks[self.rank].resting = still;
        drop(inner);
        resume_unwind(Box::new(Pause));
    }
}

impl Shared for Replay<'_> {
    fn write(&self, at: Word, value: u64) {
        self.put(self.cell(at), value, false);
    }

    fn read(&self, at: Word) -> u64 {
        self.get(self.cell(at))
    }

    fn fence(&self) {
        self.access(FENCE, |world| {
            self.settle(world);
            0
        });
    }

    fn stopped(&self) -> bool {
        self.model
            .abort
            .is_some_and(|a| a.raised(self, self.rank, GENERATION).is_some())
    }
}

struct Spent(bool);

impl Budget for Spent {
    fn spent(&mut self) -> bool {
        self.0
    }
    fn until(&self) -> Option<Instant> {
        None
    }
    fn spins(&self) -> u32 {
        0
    }
}
