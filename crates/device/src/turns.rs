//! Who uses a communicator now, and where its last work is.

use crate::{Error, Event, Result, Stream};
use parking_lot::Mutex;
use std::{
    cell::RefCell,
    sync::{
        Arc, Weak,
        atomic::{AtomicBool, Ordering},
    },
};

/// Proof of exclusive use, and the order of the work: made by [`Comm::lease`](crate::Comm::lease) and
/// [`Hierarchy::lease`](crate::Hierarchy::lease) alone.
#[derive(Debug)]
pub struct Turn {
    number: u64,
    on: Stream,
}

impl Turn {
    /// Where the work goes.
    pub fn stream(&self) -> &Stream {
        &self.on
    }

    /// Which lease of the communicator it is, from 1.
    pub fn number(&self) -> u64 {
        self.number
    }
}

/// One turn after the other.
#[derive(Default)]
pub(crate) struct Turns {
    busy: AtomicBool,
    last: Mutex<Last>,
}

#[derive(Default)]
struct Last {
    number: u64,
    /// Where its work ends.
    end: Option<(Stream, Event)>,
}

impl Last {
    /// Lets `on` wait for the last work, if that was elsewhere. If it fails, the event stays for the next one.
    fn before(&mut self, on: &Stream) -> Result<()> {
        if let Some((stream, end)) = &self.end
            && !stream.same(on)
        {
            on.wait(end)?;
        }
        self.end = None;
        Ok(())
    }
}

/// Exclusive use, until it is dropped.
pub(crate) struct Claim<'c>(&'c AtomicBool);

impl Drop for Claim<'_> {
    fn drop(&mut self) {
        self.0.store(false, Ordering::Release);
    }
}

impl Turns {
    /// Exclusive use of `what` has these turns.
    pub(crate) fn claim(&self, what: &'static str) -> Result<Claim<'_>> {
        if self.busy.swap(true, Ordering::Acquire) {
            return Err(Error::Busy(what));
        }
        Ok(Claim(&self.busy))
    }

    /// The next turn, for whoever has the claim: its work comes after that of the last one. What is captured does not come now, but with
    /// every launch of the graph.
    pub(crate) fn next(self: &Arc<Self>, on: &Stream) -> Result<Turn> {
        let mut last = self.last.lock();
        if on.capturing() {
            note(self);
        } else {
            last.before(on)?;
        }
        last.number += 1;
        Ok(Turn {
            number: last.number,
            on: on.clone(),
        })
    }

    /// Notes where the work of a turn ends: before the claim is given up, so that the next turn finds it.
    pub(crate) fn end(&self, turn: &Turn) {
        if turn.on.capturing() {
            return;
        }
        if let Ok(end) = turn.on.record() {
            self.last.lock().end = Some((turn.on.clone(), end));
        }
    }
}

thread_local! {
    /// Whose turns are in what this thread captures: of each capture, the innermost last.
    static CAPTURED: RefCell<Vec<Vec<Weak<Turns>>>> = const { RefCell::new(Vec::new()) };
}

/// Turns of this are in what is captured.
fn note(turns: &Arc<Turns>) {
    CAPTURED.with_borrow_mut(|all| {
        if let Some(innermost) = all.last_mut() {
            let this = Arc::downgrade(turns);
            if !innermost.iter().any(|other| other.ptr_eq(&this)) {
                innermost.push(this);
            }
        }
    });
}

/// The end of a capture on this thread, also if what is captured panics.
struct Noted;

impl Drop for Noted {
    fn drop(&mut self) {
        CAPTURED.with_borrow_mut(|all| drop(all.pop()));
    }
}

/// The communicators and hierarchies of which a graph holds calls: for backends. Each launch is a turn of theirs, behind the last one wherever
/// that was, and in front of the next.
#[derive(Default)]
pub struct GraphTurns(Vec<Weak<Turns>>);

impl GraphTurns {
    /// Runs `work`, which records into a graph, and notes which of them this thread leases meanwhile on a stream that captures.
    ///
    /// # Errors
    /// What `work` returns.
    pub fn of(work: impl FnOnce() -> Result<()>) -> Result<Self> {
        CAPTURED.with_borrow_mut(|all| all.push(Vec::new()));
        let noted = Noted;
        work()?;
        let turns = CAPTURED.with_borrow_mut(|all| all.last_mut().map(std::mem::take));
        drop(noted);
        Ok(Self(turns.unwrap_or_default()))
    }

    /// Launches the graph on `on` by `work`, which gives its end.
    ///
    /// # Errors
    /// What `work` returns; backend errors.
    pub fn launch(&self, on: &Stream, work: impl FnOnce() -> Result<Event>) -> Result<Event> {
        let all: Vec<_> = self.0.iter().filter_map(Weak::upgrade).collect();
        if on.capturing() {
            all.iter().for_each(note);
            return work();
        }
        for turns in &all {
            turns.last.lock().before(on)?;
        }
        let end = work()?;
        for turns in &all {
            turns.last.lock().end = Some((on.clone(), end.clone()));
        }
        Ok(end)
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "tests")]

    use super::*;
    use crate::{Hook, Mark, Queue};
    use std::{any::Any, time::Duration};

    /// A queue that counts what it waits for.
    #[derive(Debug, Default)]
    struct Counting {
        waits: Mutex<usize>,
        captures: AtomicBool,
    }

    #[derive(Debug)]
    struct Reached;

    impl Mark for Reached {
        fn done(&self) -> Result<bool> {
            Ok(true)
        }
        fn sync(&self, _within: Duration) -> Result<()> {
            Ok(())
        }
        fn as_any(&self) -> &dyn Any {
            self
        }
    }

    impl Queue for Counting {
        fn record(&self) -> Result<Event> {
            assert!(
                !self.capturing(),
                "an event of a capture is for nobody else"
            );
            Ok(Event::new(Arc::new(Reached)))
        }
        fn wait(&self, _event: &Event) -> Result<()> {
            assert!(
                !self.capturing(),
                "a capture waits for nothing outside of it"
            );
            *self.waits.lock() += 1;
            Ok(())
        }
        fn sync(&self, _within: Duration) -> Result<()> {
            Ok(())
        }
        fn on_complete(&self, _hook: Hook) -> Result<()> {
            Ok(())
        }
        fn capturing(&self) -> bool {
            self.captures.load(Ordering::Relaxed)
        }
        fn as_any(&self) -> &dyn Any {
            self
        }
    }

    struct One {
        queue: Arc<Counting>,
        stream: Stream,
    }

    impl One {
        fn new() -> Self {
            let queue = Arc::new(Counting::default());
            let stream = Stream::new(Arc::<Counting>::clone(&queue));
            Self { queue, stream }
        }

        /// How often it has waited since it was last asked.
        fn waits(&self) -> usize {
            std::mem::take(&mut self.queue.waits.lock())
        }

        fn turn(&self, turns: &Arc<Turns>) {
            let turn = turns.next(&self.stream).unwrap();
            turns.end(&turn);
        }

        fn capture(&self, work: impl FnOnce()) -> GraphTurns {
            self.queue.captures.store(true, Ordering::Relaxed);
            let graph = GraphTurns::of(|| {
                work();
                Ok(())
            });
            self.queue.captures.store(false, Ordering::Relaxed);
            graph.unwrap()
        }

        fn launch(&self, graph: &GraphTurns) {
            graph.launch(&self.stream, || self.stream.record()).unwrap();
        }
    }

    #[test]
    fn turns_on_other_streams_wait_for_the_last() {
        let (turns, s, t) = (Arc::default(), One::new(), One::new());
        s.turn(&turns);
        s.turn(&turns);
        t.turn(&turns);
        t.turn(&turns);
        assert_eq!((s.waits(), t.waits()), (0, 1));
    }

    /// A capture waits for nothing and is waited for by nobody; its launches are turns.
    #[test]
    fn launches_of_graphs_are_turns() {
        let (turns, other) = (Arc::<Turns>::default(), Arc::<Turns>::default());
        let (s, t) = (One::new(), One::new());
        t.turn(&turns);
        let graph = s.capture(|| {
            s.turn(&turns);
            s.turn(&turns);
        });
        let without = s.capture(|| ());
        assert_eq!((s.waits(), t.waits()), (0, 0));
        t.turn(&turns);
        assert_eq!(t.waits(), 0, "what was captured has not come");
        s.launch(&without);
        assert_eq!(s.waits(), 0);
        s.launch(&graph);
        s.launch(&graph);
        assert_eq!(s.waits(), 1, "behind the lease on the other stream");
        t.turn(&turns);
        t.turn(&other);
        assert_eq!(t.waits(), 1, "behind the launch");
        t.launch(&graph);
        s.turn(&other);
        assert_eq!((s.waits(), t.waits()), (1, 0), "behind the other's lease");
        s.turn(&turns);
        assert_eq!(s.waits(), 1, "behind the launch over there");
    }

    /// A graph may be launched into another one, which then holds its calls, and outlive who made them.
    #[test]
    fn graphs_in_graphs_hold_the_same_turns() {
        let turns = Arc::<Turns>::default();
        let (s, t) = (One::new(), One::new());
        let inner = s.capture(|| s.turn(&turns));
        let outer =
            s.capture(|| drop(inner.launch(&s.stream, || Ok(Event::new(Arc::new(Reached))))));
        t.turn(&turns);
        s.launch(&outer);
        assert_eq!(s.waits(), 1);
        drop(turns);
        s.launch(&outer);
        assert_eq!(s.waits(), 0);
    }
}
