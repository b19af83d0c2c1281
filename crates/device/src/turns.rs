//! Who uses a communicator now, and where its last work is.

use crate::{Error, Event, Result, Stream};
use parking_lot::Mutex;
use std::sync::atomic::{AtomicBool, Ordering};

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

    /// The next turn, for whoever has the claim: its work comes after that of the last one.
    pub(crate) fn next(&self, on: &Stream) -> Result<Turn> {
        let mut last = self.last.lock();
        // If the wait fails, the event stays for the next turn.
        if let Some((stream, end)) = &last.end
            && !stream.same(on)
        {
            on.wait(end)?;
        }
        last.end = None;
        last.number += 1;
        Ok(Turn {
            number: last.number,
            on: on.clone(),
        })
    }

    /// Notes where the work of a turn ends: before the claim is given up, so that the next turn finds it.
    pub(crate) fn end(&self, turn: &Turn) {
        if let Ok(end) = turn.on.record() {
            self.last.lock().end = Some((turn.on.clone(), end));
        }
    }
}
