//! The events between phases: how many slices each has done.

use brigade_device::{Error, Phase, Result};
use brigade_plan::hierarchical::{Schedule, Step};
use parking_lot::{Condvar, Mutex};
use std::time::{Duration, Instant};

/// What the phases of one call tell each other.
pub(super) struct Progress {
    schedule: Schedule,
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Default)]
struct State {
    done: [usize; Phase::ALL.len()],
    /// The first phase that failed, and how.
    failed: Option<Error>,
    /// Phases that have ended, well or not.
    ended: usize,
}

impl Progress {
    pub(super) fn new(schedule: Schedule) -> Self {
        Self {
            schedule,
            state: Mutex::default(),
            changed: Condvar::new(),
        }
    }

    /// Waits until a step may begin; false at the end of the time. Whoever works for another step has waits that end before.
    ///
    /// # Errors
    /// What another phase failed with.
    pub(super) fn may_begin(&self, step: Step, until: Instant) -> Result<bool> {
        let needs = self.schedule.needs(step);
        let mut state = self.state.lock();
        loop {
            if let Some(error) = &state.failed {
                return Err(error.clone());
            }
            if needs.is_none_or(|n| state.done[n.phase] > n.slice) {
                return Ok(true);
            }
            if self.changed.wait_until(&mut state, until).timed_out() && Instant::now() >= until {
                return Ok(false);
            }
        }
    }

    /// A step is done.
    pub(super) fn done(&self, step: Step) {
        self.state.lock().done[step.phase] = step.slice + 1;
        self.changed.notify_all();
    }

    /// A phase has ended.
    pub(super) fn end(&self, result: Result<()>) {
        let mut state = self.state.lock();
        state.ended += 1;
        if let Err(error) = result {
            state.failed.get_or_insert(error);
        }
        self.changed.notify_all();
    }

    /// Waits until all phases have ended. Bounded by them; `look` is asked now and then.
    ///
    /// # Errors
    /// What the first phase that failed failed with.
    pub(super) fn watch(&self, look: impl Fn()) -> Result<()> {
        /// Until a stop in one group is told to the others.
        const REST: Duration = Duration::from_millis(10);
        let mut state = self.state.lock();
        while state.ended < self.schedule.phases {
            if self.changed.wait_for(&mut state, REST).timed_out() {
                parking_lot::MutexGuard::unlocked(&mut state, &look);
            }
        }
        state.failed.clone().map_or(Ok(()), Err)
    }
}
