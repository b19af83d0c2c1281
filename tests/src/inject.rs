//! Hooks of contracts: delays everywhere, one mishap at one point, or a panic where no rank makes its calls.

use crate::backend::Backend;
use brigade_device::{Action, Inject, Point, Step};
use parking_lot::Mutex;
use rand::{Rng, rngs::StdRng};
use std::{
    hash::{DefaultHasher, Hash, Hasher},
    panic::resume_unwind,
    sync::{
        Arc, Weak,
        atomic::{AtomicBool, Ordering},
    },
    thread::{self, ThreadId},
    time::Duration,
};

/// Random stalls: which steps and how long follows from the seed, and is the same in every run.
#[derive(Clone, Copy, Debug)]
pub struct Jitter {
    /// Of this draw.
    pub seed: u64,
    /// One step in so many is stalled.
    pub one_in: u64,
    /// Longest stall, in microseconds.
    pub most_us: u64,
}

impl Jitter {
    /// Draws a seed.
    pub fn new(rng: &mut StdRng, one_in: u64, most_us: u64) -> Self {
        Self {
            seed: rng.random(),
            one_in,
            most_us,
        }
    }
}

impl Inject for Jitter {
    fn at(&self, step: &Step) -> Action {
        let mut hasher = DefaultHasher::new();
        (self.seed, step).hash(&mut hasher);
        let drawn = hasher.finish();
        if drawn.is_multiple_of(self.one_in) {
            let us = drawn / self.one_in % self.most_us;
            Action::Stall(Duration::from_micros(us))
        } else {
            Action::GoOn
        }
    }
}

/// What happens to a rank, once.
#[derive(Clone, Copy, Debug)]
pub struct Mishap {
    /// To whom.
    pub culprit: usize,
    /// Where.
    pub point: Point,
    /// What.
    pub what: What,
}

/// What can happen.
#[derive(Clone, Copy, Debug)]
pub enum What {
    /// What the device does by itself.
    Act(Action),
    /// The rank dies, when this thread of it comes to the point.
    Kill(ThreadId),
}

impl Mishap {
    fn is_at(&self, step: &Step) -> bool {
        let mine = match self.what {
            What::Kill(thread) => thread::current().id() == thread,
            // A rank's own threads tell each other things, too; that does not get lost.
            What::Act(_) => self.point == Point::Begin || step.peer != step.rank,
        };
        mine && (step.rank, step.point) == (self.culprit, self.point)
    }
}

/// A hook that a contract directs while its ranks run.
pub struct Director {
    /// Not kept alive: a device's own threads may hold the hook for a moment longer than the ranks run, and with the
    /// backend they would hold its group, which then would not say goodbye when its process ends.
    backend: Weak<dyn Backend>,
    jitter: Option<Jitter>,
    mishap: Mutex<Option<Mishap>>,
}

impl Director {
    /// Nothing happens yet, but for these delays.
    pub fn new(backend: &Arc<dyn Backend>, jitter: Option<Jitter>) -> Arc<Self> {
        Arc::new(Self {
            backend: Arc::downgrade(backend),
            jitter,
            mishap: Mutex::default(),
        })
    }

    /// Lets this happen, at the next step that it fits.
    pub fn arm(&self, mishap: Mishap) {
        *self.mishap.lock() = Some(mishap);
    }

    /// Takes back what has not happened, and says whether it has.
    pub fn disarm(&self) -> bool {
        self.mishap.lock().take().is_none()
    }
}

impl Inject for Director {
    fn at(&self, step: &Step) -> Action {
        let now = self.mishap.lock().take_if(|m| m.is_at(step));
        match now.map(|m| m.what) {
            Some(What::Act(action)) => action,
            Some(What::Kill(_)) => self.backend.upgrade().unwrap().kill(),
            None => self.jitter.map_or(Action::GoOn, |j| j.at(step)),
        }
    }
}

/// A hook that panics once: on the first thread that comes to a point, and is none of those that make calls.
pub struct Panics {
    point: Point,
    callers: Mutex<Vec<ThreadId>>,
    armed: AtomicBool,
}

impl Panics {
    /// Not yet.
    pub fn at(point: Point) -> Arc<Self> {
        Arc::new(Self {
            point,
            callers: Mutex::default(),
            armed: AtomicBool::new(false),
        })
    }

    /// This thread makes calls. To be said by every rank before one of them arms it.
    pub fn spare_caller(&self) {
        self.callers.lock().push(thread::current().id());
    }

    /// From now on.
    pub fn arm(&self) {
        self.armed.store(true, Ordering::Release);
    }
}

impl Inject for Panics {
    fn at(&self, step: &Step) -> Action {
        let is_it = step.point == self.point
            && self.armed.load(Ordering::Acquire)
            && !self.callers.lock().contains(&thread::current().id())
            && self.armed.swap(false, Ordering::AcqRel);
        if is_it {
            resume_unwind(Box::new("meant to happen, in a hook"));
        }
        Action::GoOn
    }
}
