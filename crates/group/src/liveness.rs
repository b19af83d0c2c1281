//! Noticing that a rank is lost: its process died, its machine fell silent, or it broke the rules.

use parking_lot::{Condvar, Mutex};
use std::{
    collections::BTreeMap,
    fmt,
    panic::{AssertUnwindSafe, catch_unwind},
    sync::Arc,
    time::Duration,
};

/// One rank is lost, for good. A rank that says goodbye is not.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Loss {
    /// Which.
    pub rank: usize,
    /// How it was noticed.
    pub why: String,
}

impl fmt::Display for Loss {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "rank {} is lost: {}", self.rank, self.why)
    }
}

type Callback = Arc<dyn Fn(&Loss) + Send + Sync>;

#[derive(Default)]
struct State {
    losses: Vec<Loss>,
    callbacks: BTreeMap<u64, Callback>,
    next: u64,
}

#[derive(Default)]
struct Shared {
    state: Mutex<State>,
    changed: Condvar,
}

/// What is known about lost ranks. Clones know the same; a device keeps one and asks, waits or subscribes.
#[derive(Clone, Default)]
pub struct Liveness(Arc<Shared>);

impl Liveness {
    /// The first loss, if there was any.
    pub fn lost(&self) -> Option<Loss> {
        self.0.state.lock().losses.first().cloned()
    }

    /// The first loss; waits for one, but not longer than this.
    pub fn wait(&self, within: Duration) -> Option<Loss> {
        let deadline = crate::Deadline::after(within);
        let mut state = self.0.state.lock();
        while state.losses.is_empty() {
            let wait = self.0.changed.wait_until(&mut state, deadline.end());
            if wait.timed_out() {
                break;
            }
        }
        state.losses.first().cloned()
    }

    /// Calls `callback` once for each lost rank: now for those that are, later for others, until the [`Watch`] is
    /// dropped. It runs on the thread that notices, so it must not wait. If it panics, a warning is traced, and all goes on.
    pub fn on_loss(&self, callback: impl Fn(&Loss) + Send + Sync + 'static) -> Watch {
        let callback: Callback = Arc::new(callback);
        let mut state = self.0.state.lock();
        let number = state.next;
        state.next += 1;
        state.callbacks.insert(number, Arc::clone(&callback));
        let losses = state.losses.clone();
        drop(state);
        for loss in &losses {
            call(&callback, loss);
        }
        Watch {
            of: self.clone(),
            number,
        }
    }

    /// A rank is lost. Nothing may be locked here that a callback could want.
    pub(crate) fn report(&self, loss: Loss) {
        let mut state = self.0.state.lock();
        if state.losses.iter().any(|known| known.rank == loss.rank) {
            return;
        }
        state.losses.push(loss.clone());
        let callbacks: Vec<_> = state.callbacks.values().cloned().collect();
        drop(state);
        self.0.changed.notify_all();
        for callback in callbacks {
            call(&callback, &loss);
        }
    }
}

/// A callback that panics takes nobody along: the thread that notices losses has more to do.
fn call(callback: &Callback, loss: &Loss) {
    if catch_unwind(AssertUnwindSafe(|| callback(loss))).is_err() {
        tracing::warn!(%loss, "a callback for lost ranks panicked");
    }
}

impl fmt::Debug for Liveness {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Liveness(lost: {:?})", self.0.state.lock().losses)
    }
}

/// A subscription to losses; dropping it ends it. A call that has begun by then still runs to its end.
#[must_use = "dropping it ends the subscription"]
#[derive(Debug)]
pub struct Watch {
    of: Liveness,
    number: u64,
}

impl Drop for Watch {
    fn drop(&mut self) {
        // The callback may hold a clone of what this locks: it is dropped outside.
        let callback = self.of.0.state.lock().callbacks.remove(&self.number);
        drop(callback);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn loss(rank: usize) -> Loss {
        let why = "it closed".into();
        Loss { rank, why }
    }

    #[test]
    fn everybody_hears_of_every_loss_once() {
        let liveness = Liveness::default();
        let heard = Arc::new(Mutex::new(Vec::new()));
        let note = |name: &'static str| {
            let heard = Arc::clone(&heard);
            move |loss: &Loss| heard.lock().push((name, loss.rank))
        };
        let early = liveness.on_loss(note("early"));
        assert_eq!(liveness.wait(Duration::ZERO), None);
        liveness.report(loss(2));
        liveness.report(loss(2));
        let _late = liveness.on_loss(note("late"));
        drop(early);
        liveness.report(loss(1));
        assert_eq!(*heard.lock(), [("early", 2), ("late", 2), ("late", 1)]);
        assert_eq!(liveness.lost(), Some(loss(2)));
        assert_eq!(liveness.wait(Duration::ZERO), Some(loss(2)));
        assert_eq!(loss(2).to_string(), "rank 2 is lost: it closed");
    }

    #[test]
    fn a_callback_that_panics_takes_nobody_along() {
        let liveness = Liveness::default();
        let heard = Arc::new(Mutex::new(Vec::new()));
        let note = |panics: bool| {
            let heard = Arc::clone(&heard);
            move |loss: &Loss| {
                heard.lock().push((loss.rank, panics));
                assert!(!panics, "meant to happen, within a callback");
            }
        };
        let _watches = [true, false].map(|panics| liveness.on_loss(note(panics)));
        liveness.report(loss(1));
        liveness.report(loss(2));
        let _late = liveness.on_loss(note(true));
        let all = [(1, true), (1, false), (2, true), (2, false)];
        assert_eq!(heard.lock()[..4], all);
        assert_eq!(heard.lock()[4..], [(1, true), (2, true)]);
    }
}
