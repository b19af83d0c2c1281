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
        let launched = work();
        // If it was not launched, what it was to wait for is in front of `on` all the same.
        if let Ok(end) = launched
            .as_ref()
            .map_or_else(|_| on.record(), |end| Ok(end.clone()))
        {
            for turns in &all {
                turns.last.lock().end = Some((on.clone(), end.clone()));
            }
        }
        launched
    }
}
