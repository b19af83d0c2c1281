//! The events between tracks: which steps are done.

use super::CONNECTIONS;
use brigade_device::{Error, Phase, Result};
use brigade_plan::hierarchical::{Schedule, Step, Track};
use parking_lot::{Condvar, Mutex};
use std::time::{Duration, Instant};

/// Places for tracks: phases, and behind them the connections.
const TRACKS: usize = Phase::ALL.len() + CONNECTIONS;

/// What the tracks of one call tell each other.
pub(super) struct Progress {
    schedule: Schedule,
    state: Mutex<State>,
    /// For each track, that it may look again: each of them waits for one step. To wake all at every step costs more than a small step.
    may_look: [Condvar; TRACKS],
    has_ended: Condvar,
}

struct State {
    /// By slice and phase. Slices may pass each other along the rail.
    done: Vec<bool>,
    /// Connections that are under way, or were, from the first.
    begun: usize,
    /// The first track that failed, and how.
    failed: Option<Error>,
    /// Lanes that have ended, well or not.
    ended: usize,
}

impl Progress {
    pub(super) fn new(schedule: Schedule) -> Self {
        Self {
            schedule,
            state: Mutex::new(State {
                done: vec![false; schedule.slices * schedule.phases],
                begun: 0,
                failed: None,
                ended: 0,
            }),
            may_look: Default::default(),
            has_ended: Condvar::new(),
        }
    }

    fn at(&self, step: Step) -> usize {
        step.slice * self.schedule.phases + step.phase
    }

    /// That the track of a step may look again.
    fn look(&self, step: Step) -> &Condvar {
        &self.may_look[match self.schedule.track(step) {
            Track::Phase(phase) => phase,
            Track::Connection(which) => Phase::ALL.len() + which,
        }]
    }

    /// Waits until a step may begin; false at the end of the time. Whoever works for another step has waits that end before.
    ///
    /// Each connection begins after the one before: the link serves whoever asks first, which is to be the first slice.
    ///
    /// # Errors
    /// What another track failed with.
    pub(super) fn may_begin(&self, step: Step, until: Instant) -> Result<bool> {
        let needs = self.schedule.needs(step).map(|n| self.at(n));
        let track = self.schedule.track(step);
        let mut state = self.state.lock();
        loop {
            if let Some(error) = &state.failed {
                return Err(error.clone());
            }
            let is_turn = match track {
                Track::Connection(which) => state.begun >= which,
                Track::Phase(_) => true,
            };
            if is_turn && needs.is_none_or(|n| state.done[n]) {
                break;
            }
            let looked = self.look(step).wait_until(&mut state, until);
            if looked.timed_out() && Instant::now() >= until {
                return Ok(false);
            }
        }
        if track == Track::Connection(state.begun) {
            state.begun += 1;
            if let Some(next) = self.may_look.get(Phase::ALL.len() + state.begun) {
                next.notify_one();
            }
        }
        Ok(true)
    }

    /// A step is done.
    pub(super) fn done(&self, step: Step) {
        let at = self.at(step);
        self.state.lock().done[at] = true;
        if let Some(next) = self.schedule.needed_by(step) {
            self.look(next).notify_one();
        }
    }

    /// A track has ended.
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

    /// Waits until all tracks have ended. Bounded by them; `look` is asked now and then.
    ///
    /// # Errors
    /// What the first track that failed failed with.
    pub(super) fn watch(&self, look: impl Fn()) -> Result<()> {
        /// Until a stop in one group is told to the others.
        const REST: Duration = Duration::from_millis(10);
        let tracks = self.schedule.tracks().count();
        let mut state = self.state.lock();
        while state.ended < tracks {
            if self.has_ended.wait_for(&mut state, REST).timed_out() {
                parking_lot::MutexGuard::unlocked(&mut state, &look);
            }
        }
        state.failed.clone().map_or(Ok(()), Err)
    }
}
