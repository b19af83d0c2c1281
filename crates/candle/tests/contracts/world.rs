//! Groups of ranks of any kind.

use super::oracle;
use brigade::{CommConfig, ParallelMode};
use brigade_candle::{Parallel, brigade};
use candle_core::{DType, Device, Result};
use std::{ops::RangeInclusive, panic::resume_unwind, sync::Arc, time::Duration};

/// Longest that anything may take that must come.
pub const PATIENCE: Duration = Duration::from_secs(60);

/// A kind of ranks, which are threads.
pub trait Places: Send + Sync {
    /// The first part of trials' names.
    fn name(&self) -> &'static str;

    /// How many ranks a group has.
    fn sizes(&self) -> RangeInclusive<usize>;

    /// Where each rank of a group has its tensors.
    ///
    /// # Errors
    /// What keeps a device from being opened.
    fn places(&self, size: usize) -> Result<Vec<Device>>;

    /// Whether tensors lie in the host's memory.
    fn on_host(&self) -> bool {
        false
    }

    /// Whether ranks share a GPU. What is loaded there waits for kernels, and so for ranks that wait for the one that loads: all must
    /// multiply the same shapes.
    fn shares(&self) -> bool {
        false
    }
}

/// What a contract is given.
pub struct World {
    places: Arc<dyn Places>,
    /// Ranks in the group.
    pub size: usize,
}

/// A configuration whose deadline nothing comes near that goes well.
pub fn config(mode: ParallelMode) -> CommConfig {
    CommConfig {
        deadline: Duration::from_secs(20),
        first_deadline: Duration::from_secs(20),
        ..CommConfig::new(mode)
    }
}

impl World {
    pub(super) fn new(places: &Arc<dyn Places>, size: usize) -> Self {
        Self {
            places: Arc::clone(places),
            size,
        }
    }

    fn places(&self) -> Vec<Device> {
        self.places.places(self.size).unwrap()
    }

    /// Whether tensors lie in the host's memory.
    pub fn on_host(&self) -> bool {
        self.places.on_host()
    }

    /// Features that are cut over ranks, or words: so many, and where ranks must have equal shares, so many for each.
    pub fn features(&self, number: usize) -> usize {
        number * if self.places.shares() { self.size } else { 1 }
    }

    /// What is allowed for one rounding. On a GPU, adapters round what they add twice more.
    pub fn tolerance(&self, dtype: DType) -> f64 {
        oracle::tolerance(dtype) * if self.on_host() { 1.0 } else { 2.0 }
    }

    /// Does on each device what would load kernels while others wait, where ranks share one.
    pub fn ahead(&self, work: impl Fn(&Device) -> Result<()>) {
        if self.places.shares() {
            for place in self.places() {
                work(&place).unwrap();
                place.synchronize().unwrap();
            }
        }
    }

    /// What each rank of a group makes, in rank order.
    pub fn ranks_of<R: Send>(
        &self,
        config: &CommConfig,
        work: impl Fn(&Parallel) -> R + Sync,
    ) -> Vec<R> {
        let boots = brigade::group::threads(self.size);
        let ended: Vec<_> = std::thread::scope(|s| {
            let ranks: Vec<_> = boots
                .into_iter()
                .zip(self.places())
                .map(|(boot, place)| {
                    let work = &work;
                    s.spawn(move || work(&Parallel::join(&place, &boot, config).unwrap()))
                })
                .collect();
            ranks.into_iter().map(|rank| rank.join()).collect()
        });
        let made = ended.into_iter().map(|made| match made {
            Ok(made) => made,
            Err(panic) => resume_unwind(panic),
        });
        made.collect()
    }

    /// The same of work that succeeds.
    pub fn ranks_in<R: Send>(
        &self,
        mode: ParallelMode,
        work: impl Fn(&Parallel) -> Result<R> + Sync,
    ) -> Vec<R> {
        self.ranks_of(&config(mode), |p| {
            let made = work(p).unwrap();
            p.sync(PATIENCE).unwrap();
            made
        })
    }

    /// The same in a tensor-parallel group.
    pub fn ranks<R: Send>(&self, work: impl Fn(&Parallel) -> Result<R> + Sync) -> Vec<R> {
        self.ranks_in(ParallelMode::Tp, work)
    }
}
