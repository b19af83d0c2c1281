//! Trials: a contract, a device and a group size each.

use crate::backend::{Backend, Rank, panic_text, run};
use brigade_device::{CommConfig, Inject, Injector};
use libtest_mimic::{Failed, Trial};
use rand::{Rng, SeedableRng, rngs::StdRng};
use std::{
    hash::{DefaultHasher, Hash, Hasher},
    panic::{AssertUnwindSafe, catch_unwind},
    sync::Arc,
};

/// The environment variable that replays a run.
pub const SEED: &str = "BRIGADE_SEED";

/// The seed that the environment names, or a new one.
pub fn base_seed() -> u64 {
    let named = std::env::var(SEED).ok();
    named.map_or_else(
        || StdRng::from_os_rng().random(),
        |s| s.trim().parse().unwrap(),
    )
}

/// What a contract is given: N ranks of a device, and fresh random numbers.
pub struct World {
    /// The device.
    pub backend: Arc<dyn Backend>,
    /// Ranks in the group.
    pub size: usize,
    seed: u64,
}

impl World {
    /// Random numbers that no other trial has.
    pub fn rng(&self) -> StdRng {
        StdRng::seed_from_u64(self.seed)
    }

    /// Runs `body` on every rank. See [`run`].
    pub fn run(&self, config: &CommConfig, body: impl Fn(&mut Rank) + Send + Sync + 'static) {
        run(self.backend.seats(self.size).unwrap(), Some(config), body);
    }

    /// As [`run`](Self::run), with a hook in every rank's device.
    pub fn run_injected(
        &self,
        config: &CommConfig,
        hook: Arc<dyn Inject>,
        body: impl Fn(&mut Rank) + Send + Sync + 'static,
    ) {
        let seats = self.backend.injected_seats(self.size, &Injector::new(hook));
        run(seats.unwrap(), Some(config), body);
    }
}

/// Collects trials.
pub struct Suite {
    backend: Arc<dyn Backend>,
    base_seed: u64,
    trials: Vec<Trial>,
}

impl Suite {
    /// No trials yet. The seed is the one that the environment names, or a new one.
    pub fn new(backend: Arc<dyn Backend>) -> Self {
        Self {
            backend,
            base_seed: base_seed(),
            trials: Vec::new(),
        }
    }

    /// The device under test.
    pub fn backend(&self) -> &dyn Backend {
        &*self.backend
    }

    /// All of them.
    pub fn into_trials(self) -> Vec<Trial> {
        self.trials
    }

    /// A contract at every group size.
    pub fn add(&mut self, name: &str, contract: impl Fn(&World) + Clone + Send + 'static) {
        self.add_from(1, name, contract);
    }

    /// A contract at every group size of at least `smallest`.
    pub fn add_from(
        &mut self,
        smallest: usize,
        name: &str,
        contract: impl Fn(&World) + Clone + Send + 'static,
    ) {
        for size in self.backend.worlds() {
            if size >= smallest {
                self.add_at(size, name, contract.clone());
            }
        }
    }

    /// A contract at one group size.
    pub fn add_at(&mut self, size: usize, name: &str, contract: impl Fn(&World) + Send + 'static) {
        let name = format!("{}/w{size}/{name}", self.backend.name());
        let base_seed = self.base_seed;
        let mut hasher = DefaultHasher::new();
        (base_seed, &name).hash(&mut hasher);
        let world = World {
            backend: Arc::clone(&self.backend),
            size,
            seed: hasher.finish(),
        };
        self.trials.push(Trial::test(name, move || {
            catch_unwind(AssertUnwindSafe(|| contract(&world))).map_err(|payload| {
                let text = panic_text(&*payload);
                Failed::from(format!("{text}\nreplay with {SEED}={base_seed}"))
            })
        }));
    }
}
