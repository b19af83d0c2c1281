//! Calls beside the caller's stream: on one of the communicator's own, behind an event and before another.

use crate::{Comm, Event, Lease, Reason, Result, Stream};
use std::ops::{Deref, DerefMut};

impl Comm {
    /// Exclusive use on a stream of the communicator's own, so that what `compute` is given meanwhile goes on beside the calls. They
    /// come after `after`, or, where none is given, after all that `compute` has been given so far; and before what `compute` is given
    /// behind [`Finished::join`]. (DeepEP has the same as `previous_event` and `async_finish`.)
    ///
    /// Until then what calls read must not be written, and what they give must not be read. A fault is told by
    /// [`check`](Self::check) and the next lease, not by `compute`.
    ///
    /// Streams of the host run their work at once, so there nothing goes on meanwhile.
    ///
    /// # Errors
    /// As [`lease`](Self::lease); [`Error::Unsupported`](crate::Error::Unsupported) while `compute` captures.
    pub fn lease_beside(&self, compute: &Stream, after: Option<&Event>) -> Result<Beside<'_>> {
        if compute.capturing() {
            let what = "calls beside a stream cannot be captured in a graph of that stream";
            return Err(Reason::new("not-capturable", what, "capture them on one stream").into());
        }
        let own = self.own_stream()?;
        let lease = self.lease(&own)?;
        match after {
            Some(event) => own.wait(event)?,
            None => own.wait(&compute.record()?)?,
        }
        Ok(Beside {
            lease,
            compute: compute.clone(),
        })
    }

    fn own_stream(&self) -> Result<Stream> {
        let mut own = self.0.beside.lock();
        if let Some(stream) = &*own {
            return Ok(stream.clone());
        }
        let stream = self.0.backend.own_stream()?;
        *own = Some(stream.clone());
        Ok(stream)
    }
}

/// A [`Lease`] on a stream of the communicator's own: see [`Comm::lease_beside`].
#[must_use = "the caller's stream waits for nothing before `finish`"]
pub struct Beside<'c> {
    lease: Lease<'c>,
    compute: Stream,
}

impl<'c> Deref for Beside<'c> {
    type Target = Lease<'c>;
    fn deref(&self) -> &Lease<'c> {
        &self.lease
    }
}

impl DerefMut for Beside<'_> {
    fn deref_mut(&mut self) -> &mut Self::Target {
        &mut self.lease
    }
}

impl Beside<'_> {
    /// Ends the lease: no more calls in it.
    ///
    /// # Errors
    /// As [`Lease::finish`].
    pub fn finish(self) -> Result<Finished> {
        Ok(Finished {
            event: self.lease.finish()?,
            compute: self.compute,
        })
    }
}

/// Calls that were made beside a stream, which has yet to wait for them.
#[must_use = "results are there for a stream that has waited for them"]
#[derive(Debug)]
pub struct Finished {
    event: Event,
    compute: Stream,
}

impl Finished {
    /// What the caller's stream is given from here on runs behind the calls.
    ///
    /// # Errors
    /// Backend errors.
    pub fn join(self) -> Result<()> {
        self.compute.wait(&self.event)
    }

    /// The end of the calls, for other streams.
    pub fn event(&self) -> &Event {
        &self.event
    }
}
