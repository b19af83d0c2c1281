//! Resting, and what ends it: the bell's own code over loom's atomics, a mutex and a condition in place of the system.

use brigade_sync::Bell;
use loom::sync::{
    Condvar, Mutex,
    atomic::{AtomicU64, Ordering},
};
use std::{sync::Arc, time::Instant};

/// What is taken away.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Without {
    Nothing,
    /// Events are counted before the look.
    CountFirst,
    /// The bell rings after the store.
    RingLast,
    /// Who rests says so.
    Sleeper,
    /// Sleeping begins only if nothing was counted since.
    Recheck,
}

struct Loomed {
    bell: AtomicU64,
    word: AtomicU64,
    sleepers: Mutex<()>,
    woken: Condvar,
    without: Without,
}

impl Bell for Loomed {
    fn add(&self, n: u64) -> u64 {
        if self.without == Without::Sleeper && n as u32 != 0 {
            return self.bell.load(Ordering::Acquire);
        }
        self.bell.fetch_add(n, Ordering::AcqRel)
    }
    fn get(&self) -> u64 {
        self.bell.load(Ordering::Acquire)
    }
    fn sleep(&self, count: u32, _: Option<Instant>) {
        let guard = self.sleepers.lock().unwrap();
        if (self.bell.load(Ordering::Acquire) >> 32) as u32 == count
            || self.without == Without::Recheck
        {
            drop(self.woken.wait(guard));
        }
    }
    fn wake(&self) {
        let _guard = self.sleepers.lock().unwrap();
        self.woken.notify_all();
    }
}

impl Loomed {
    fn store(&self) {
        let store = || self.word.store(1, Ordering::Release);
        if self.without == Without::RingLast {
            self.ring();
            store();
        } else {
            store();
            self.ring();
        }
    }

    fn wait(&self) {
        loop {
            let counted = self.events();
            if self.word.load(Ordering::Acquire) == 1 {
                return;
            }
            let counted = match self.without {
                Without::CountFirst => self.events(),
                _ => counted,
            };
            self.rest(counted, None);
        }
    }
}

/// Goes through all executions of ranks that wait for a store: what goes wrong in the first bad one.
pub fn explore(waiters: usize, without: Without) -> Result<(), String> {
    crate::loomed::complaint(move || {
        let mut builder = loom::model::Builder::new();
        builder.preemption_bound = Some(3);
        builder.check(move || {
            let shared = Arc::new(Loomed {
                bell: AtomicU64::new(u64::from(u32::MAX) << 32),
                word: AtomicU64::new(0),
                sleepers: Mutex::new(()),
                woken: Condvar::new(),
                without,
            });
            let waiting: Vec<_> = (0..waiters)
                .map(|_| {
                    let shared = Arc::clone(&shared);
                    loom::thread::spawn(move || shared.wait())
                })
                .collect();
            shared.store();
            for waiter in waiting {
                waiter.join().unwrap();
            }
            assert_eq!(shared.get(), 0, "the bell's counts");
        });
    })
}
