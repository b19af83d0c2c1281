//! Trials: a contract, a device and a group size each.

use crate::backend::{Backend, Rank, panic_text, run};
use brigade_device::{CommConfig, Inject, Injector};
use libtest_mimic::{Arguments, Failed, Trial};
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
    /// Machines, and ranks of each, where it is about these.
    machines: Option<(usize, usize)>,
    seed: u64,
}

impl World {
    /// Random numbers that no other trial has.
    pub fn rng(&self) -> StdRng {
        StdRng::seed_from_u64(self.seed)
    }

    /// Runs `body` on every rank. See [`run`].
    pub fn run(&self, config: &CommConfig, body: impl Fn(&mut Rank) + Send + Sync + 'static) {
        let seats = match self.machines {
            Some(shape) => self.backend.machine_seats(shape),
            None => self.backend.seats(self.size),
        };
        run(seats.unwrap(), Some(config), body);
    }

    /// As [`run`](Self::run), with a hook in every rank's device.
    pub fn run_injected(
        &self,
        config: &CommConfig,
        hook: Arc<dyn Inject>,
        body: impl Fn(&mut Rank) + Send + Sync + 'static,
    ) {
        let hook = Injector::new(hook);
        let seats = match self.machines {
            Some(shape) => self.backend.injected_machine_seats(shape, &hook),
            None => self.backend.injected_seats(self.size, &hook),
        };
        run(seats.unwrap(), Some(config), body);
    }
}

/// The one trial that a program is asked for, where it is asked for one: a runner that starts a process for each says so.
pub fn asked(args: &Arguments) -> Option<&str> {
    let one = args.exact && args.skip.is_empty();
    args.filter.as_deref().filter(|_| one)
}

/// Collects trials.
pub struct Suite {
    backend: Arc<dyn Backend>,
    base_seed: u64,
    contracts: Vec<Contract>,
    only: Option<String>,
}

/// A contract at one group size.
struct Contract {
    name: String,
    run: Box<dyn FnOnce() -> Result<(), Failed> + Send>,
}

impl Suite {
    /// No trials yet. The seed is the one that the environment names, or a new one.
    pub fn new(backend: Arc<dyn Backend>) -> Self {
        Self {
            backend,
            base_seed: base_seed(),
            contracts: Vec::new(),
            only: None,
        }
    }

    /// The same for the trial of this name alone, if there is one: thousands that a process does not run take it more time than many a
    /// trial does.
    pub fn only(mut self, name: Option<&str>) -> Self {
        self.only = name.map(str::to_owned);
        self
    }

    /// The device under test.
    pub fn backend(&self) -> &dyn Backend {
        &*self.backend
    }

    /// All of them.
    pub fn into_trials(self) -> Vec<Trial> {
        let contracts = self.contracts.into_iter();
        contracts.map(|c| Trial::test(c.name, c.run)).collect()
    }

    /// All their names.
    pub fn into_names(self) -> impl Iterator<Item = String> {
        self.contracts.into_iter().map(|contract| contract.name)
    }

    /// Runs one of them, and drops what it leaves behind before the result is there.
    ///
    /// # Errors
    /// Why it failed; that there is none of this name.
    pub fn run(self, name: &str) -> Result<(), Failed> {
        match self.contracts.into_iter().find(|c| c.name == name) {
            Some(contract) => (contract.run)(),
            None => Err(format!("there is no trial {name:?}").into()),
        }
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
        self.add_for(size, None, name, Box::new(contract));
    }

    /// A contract across machines: how many, and ranks of each. None where the device does not span these.
    pub fn add_across(
        &mut self,
        shape: (usize, usize),
        name: &str,
        contract: impl Fn(&World) + Send + 'static,
    ) {
        if self.backend.spans(shape) {
            self.add_for(shape.0 * shape.1, Some(shape), name, Box::new(contract));
        }
    }

    fn add_for(
        &mut self,
        size: usize,
        machines: Option<(usize, usize)>,
        name: &str,
        contract: Box<dyn Fn(&World) + Send>,
    ) {
        let only = self.only.as_deref();
        if only.is_some_and(|only| !only.ends_with(name)) {
            return;
        }
        let name = format!("w{size}/{name}");
        if !self.backend.tries(&name.split('/').collect::<Vec<_>>()) {
            return;
        }
        let name = format!("{}/{name}", self.backend.name());
        if only.is_some_and(|only| only != name) {
            return;
        }
        let base_seed = self.base_seed;
        let mut hasher = DefaultHasher::new();
        (base_seed, &name).hash(&mut hasher);
        let world = World {
            backend: Arc::clone(&self.backend),
            size,
            machines,
            seed: hasher.finish(),
        };
        let run = move || {
            catch_unwind(AssertUnwindSafe(|| contract(&world))).map_err(|payload| {
                let text = panic_text(&*payload);
                Failed::from(format!("{text}\nreplay with {SEED}={base_seed}"))
            })
        };
        let run = Box::new(run);
        self.contracts.push(Contract { name, run });
    }
}
