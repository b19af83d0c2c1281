//! All weakly ordered executions with few preemptions, by loom.

use crate::shared::{Fault, GENERATION, Scenario, Shared};
use brigade_sync::{Budget, Memory, Stop, Word};
use loom::{
    cell::UnsafeCell,
    sync::atomic::{AtomicU64, Ordering, fence},
};
use std::{
    panic::{AssertUnwindSafe, catch_unwind},
    sync::Arc,
    thread,
    time::Instant,
};

/// Orders that the model gives to what the machines ask for.
#[derive(Clone, Copy, Debug)]
pub struct Orders {
    pub store: Ordering,
    pub load: Ordering,
    pub exchange: Ordering,
}

impl Orders {
    /// As `Words` has them.
    pub const RIGHT: Self = Self {
        store: Ordering::Release,
        load: Ordering::Acquire,
        exchange: Ordering::AcqRel,
    };
    pub const RELAXED_STORE: Self = Self {
        store: Ordering::Relaxed,
        exchange: Ordering::Acquire,
        ..Self::RIGHT
    };
    pub const RELAXED: Self = Self {
        store: Ordering::Relaxed,
        load: Ordering::Relaxed,
        exchange: Ordering::Relaxed,
    };
    pub const RELAXED_LOAD: Self = Self {
        load: Ordering::Relaxed,
        exchange: Ordering::Release,
        ..Self::RIGHT
    };
}

/// Words are atomics, and plain data are cells in which loom finds every race.
struct Loomed {
    words: Vec<Vec<AtomicU64>>,
    cells: Vec<Vec<UnsafeCell<u64>>>,
    orders: Orders,
}

struct Seen<'a> {
    world: &'a Loomed,
    model: &'a Scenario,
    rank: usize,
}

impl Seen<'_> {
    fn word(&self, at: Word) -> &AtomicU64 {
        &self.world.words[at.owner][at.index]
    }
}

impl Memory for Seen<'_> {
    fn load(&self, at: Word) -> u64 {
        self.word(at).load(self.world.orders.load)
    }
    fn store(&self, at: Word, value: u64) {
        self.word(at).store(value, self.world.orders.store);
    }
    fn load_relaxed(&self, at: Word) -> u64 {
        self.word(at).load(Ordering::Relaxed)
    }
    fn store_relaxed(&self, at: Word, value: u64) {
        self.word(at).store(value, Ordering::Relaxed);
    }
    fn compare_exchange(&self, at: Word, current: u64, new: u64) -> Result<(), u64> {
        let Orders { exchange, load, .. } = self.world.orders;
        self.word(at)
            .compare_exchange(current, new, exchange, load)
            .map(drop)
    }
    fn events(&self, _: usize) -> u32 {
        0
    }
    fn rest(&self, _: usize, _: u32, _: Option<Instant>) {
        loom::thread::yield_now();
    }
}

// SAFETY: loom runs one thread at a time, and reports any access to a cell that is not ordered.
unsafe impl Sync for Loomed {}
// SAFETY: as above.
unsafe impl Send for Loomed {}

impl Shared for Seen<'_> {
    fn write(&self, at: Word, value: u64) {
        self.world.cells[at.owner][at.index].with_mut(|cell| {
            // SAFETY: loom checks that nobody else is there.
            unsafe { *cell = value }
        });
    }
    fn read(&self, at: Word) -> u64 {
        self.world.cells[at.owner][at.index].with(|cell| {
            // SAFETY: loom checks that nobody writes there.
            unsafe { *cell }
        })
    }
    fn fence(&self) {
        fence(Ordering::AcqRel);
    }
    fn stopped(&self) -> bool {
        let abort = self.model.abort;
        abort.is_some_and(|a| a.raised(self, self.rank, GENERATION).is_some())
    }
}

/// Counts rounds.
struct Rounds(u32);

impl Budget for Rounds {
    fn spent(&mut self) -> bool {
        self.0 -= 1;
        self.0 == 0
    }
    fn until(&self) -> Option<Instant> {
        None
    }
    fn spins(&self) -> u32 {
        0
    }
}

fn run(world: &Loomed, model: &Scenario, rank: usize) {
    let seen = Seen { world, model, rank };
    for step in &model.programs[rank] {
        match (step.run)(&seen, &mut Rounds(100)) {
            Ok(()) => {}
            Err(Fault::Wrong(what)) => panic!("{what}"),
            Err(Fault::Stop(Stop::Timeout { .. }, peer)) => {
                panic!("rank {rank} waits in vain for rank {peer}")
            }
            Err(Fault::Stop(stop, peer)) => panic!("rank {rank}, for rank {peer}: {stop:?}"),
        }
    }
}

fn check(model: &Arc<Scenario>, orders: Orders, preemptions: usize) {
    let model = Arc::clone(model);
    let mut builder = loom::model::Builder::new();
    builder.preemption_bound = Some(preemptions);
    builder.max_branches = 10_000;
    builder.check(move || {
        let row = |n: usize| (0..n).map(|_| AtomicU64::new(0)).collect();
        let cells = |n: usize| (0..n).map(|_| UnsafeCell::new(0)).collect();
        let world = Arc::new(Loomed {
            words: (0..model.ranks()).map(|_| row(model.words)).collect(),
            cells: (0..model.ranks()).map(|_| cells(model.cells)).collect(),
            orders,
        });
        let others: Vec<_> = (1..model.ranks())
            .map(|rank| {
                let (world, model) = (Arc::clone(&world), Arc::clone(&model));
                loom::thread::spawn(move || run(&world, &model, rank))
            })
            .collect();
        run(&world, &model, 0);
        for other in others {
            other.join().unwrap();
        }
    });
}

/// Goes through all executions with so few preemptions: what goes wrong in the first bad one.
pub fn explore(model: Scenario, orders: Orders, preemptions: usize) -> Result<(), String> {
    let model = Arc::new(model);
    complaint(move || check(&model, orders, preemptions))
}

/// What loom says about it.
pub fn complaint(check: impl FnOnce() + Send + 'static) -> Result<(), String> {
    // A thread of its own: loom leaves traces in the thread that it stops in.
    let work = move || catch_unwind(AssertUnwindSafe(check));
    let Err(panic) = thread::spawn(work).join().unwrap() else {
        return Ok(());
    };
    let text = panic.downcast_ref::<String>().cloned();
    let text = text.or_else(|| panic.downcast_ref::<&str>().map(|s| (*s).to_owned()));
    let text = text.unwrap_or_default();
    // Loom goes on to say where.
    Err(match text.lines().next() {
        Some(line) if line.contains("Concurrent read and write") => {
            "data is read while it is written".into()
        }
        Some(line) if line.starts_with("deadlock") => "a rank sleeps forever".into(),
        Some(line) => line.to_owned(),
        None => String::new(),
    })
}
