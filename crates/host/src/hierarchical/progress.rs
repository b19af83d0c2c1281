//! The events between phases: how many slices each has done.

use brigade_device::{Error, Phase, Result};
use brigade_plan::hierarchical::{Schedule, Step};
use parking_lot::{Condvar, Mutex};
use std::time::{Duration, Instant};

/// What the phases of one call tell each other.
pub(super) struct Progress {
    schedule: Schedule,
    state: Mutex<State>,
    /// For each phase, that it may look again: each of them waits for one other. To wake all at every step costs more than a small step.
    may_look: [Condvar; Phase::ALL.len()],
    has_ended: Condvar,
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
            may_look: Default::default(),
            has_ended: Condvar::new(),
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
            let changed = &self.may_look[step.phase];
            if changed.wait_until(&mut state, until).timed_out() && Instant::now() >= until {
                return Ok(false);
            }
        }
    }

    /// A step is done.
    pub(super) fn done(&self, step: Step) {
        self.state.lock().done[step.phase] = step.slice + 1;
        // The next phase waits for the same slice, and the first one for a slot that the last one has left.
        self.may_look[(step.phase + 1) % self.schedule.phases].notify_one();
    }

    /// A phase has ended.
    pub(super) fn end(&self, result: Result<()>) {
        let mut state = self.state.lock();
        state.ended += 1;
        if let Err(error) = result {
            state.failed.get_or_insert(error);
        }
        for changed in &self.may_look {
            changed.notify_one();
        }
        self.has_ended.notify_one();
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
            if self.has_ended.wait_for(&mut state, REST).timed_out() {
                parking_lot::MutexGuard::unlocked(&mut state, &look);
            }
        }
        state.failed.clone().map_or(Ok(()), Err)
    }
}
