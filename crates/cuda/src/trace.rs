//! Spans of what a communicator enqueues, as the GPU times them: to see what overlaps.

use crate::{CudaDevice, card::Card, driver::failed};
use brigade_device::{Error, Result};
use brigade_sync::Deadline;
use cudarc::driver::{
    result::{DriverError, event},
    sys,
};
use parking_lot::Mutex;
use std::{
    sync::Arc,
    thread,
    time::{Duration, Instant},
};

/// Something that ran on a GPU.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Span {
    /// On which of a communicator's streams: `compute`, `copy` or `wait`; or the phase, for what goes across machines.
    pub stream: &'static str,
    /// What it was.
    pub name: String,
    /// When it began, from where the recording did.
    pub start: Duration,
    /// When it ended.
    pub end: Duration,
}

/// What is being recorded on a device.
#[derive(Default)]
pub(crate) struct Tracer(Mutex<Option<Recording>>);

struct Recording {
    card: Arc<Card>,
    base: Time,
    spans: Vec<(&'static str, String, [Time; 2])>,
}

/// An event that notes the time.
pub(crate) struct Time {
    card: Arc<Card>,
    event: sys::CUevent,
}

// SAFETY: the handle belongs to its context, not to a thread.
unsafe impl Send for Time {}

impl Time {
    pub(crate) fn record(card: &Arc<Card>, stream: sys::CUstream) -> Result<Self> {
        card.bind()?;
        let event =
            event::create(sys::CUevent_flags::CU_EVENT_DEFAULT).map_err(failed("cuEventCreate"))?;
        let time = Self {
            card: Arc::clone(card),
            event,
        };
        // SAFETY: just created, in the stream's context.
        unsafe { event::record(time.event, stream) }.map_err(failed("cuEventRecord"))?;
        Ok(time)
    }

    /// Waits until it is reached, and no longer than until `end`.
    pub(crate) fn reach(&self, end: Instant) -> Result<()> {
        self.card.bind()?;
        loop {
            // SAFETY: the event is alive.
            match unsafe { event::query(self.event) } {
                Ok(()) => return Ok(()),
                Err(DriverError(sys::CUresult::CUDA_ERROR_NOT_READY)) if Instant::now() < end => {
                    thread::yield_now();
                }
                Err(e) => return Err(failed("cuEventQuery")(e)),
            }
        }
    }

    /// The time from `base` to here. Both have been reached.
    pub(crate) fn since(&self, base: &Self) -> Result<Duration> {
        // SAFETY: both events are alive.
        let ms = unsafe { event::elapsed(base.event, self.event) }
            .map_err(failed("cuEventElapsedTime"))?;
        Ok(Duration::try_from_secs_f32(ms / 1e3).unwrap_or_default())
    }
}

impl Drop for Time {
    fn drop(&mut self) {
        if self.card.bind().is_ok() {
            // SAFETY: created once, destroyed once.
            let _ = unsafe { event::destroy(self.event) };
        }
    }
}

impl CudaDevice {
    /// From here on, spans of this device's communicators are recorded, of calls that are not captured.
    ///
    /// # Errors
    /// [`Error::Backend`].
    pub fn record_spans(&self) -> Result<()> {
        let base = Time::record(&self.card, self.card.reclaim)?;
        *self.tracer.0.lock() = Some(Recording {
            card: Arc::clone(&self.card),
            base,
            spans: Vec::new(),
        });
        Ok(())
    }

    /// Ends the recording, waits at most `within` for the work that is in it, and gives its spans.
    ///
    /// # Errors
    /// [`Error::Invalid`] if nothing is recorded; [`Error::Backend`], also if the work was not done in time.
    pub fn spans(&self, within: Duration) -> Result<Vec<Span>> {
        let recording = self.tracer.0.lock().take();
        let Some(Recording { card, base, spans }) = recording else {
            let want = "a recording that was begun";
            return Err(Error::invalid("spans", "none recorded", want));
        };
        let end = Deadline::after(within).end();
        for (.., [_, last]) in &spans {
            last.reach(end)?;
        }
        card.bind()?;
        spans
            .into_iter()
            .map(|(stream, name, [start, end])| {
                Ok(Span {
                    stream,
                    name,
                    start: start.since(&base)?,
                    end: end.since(&base)?,
                })
            })
            .collect()
    }
}

impl Tracer {
    /// Runs `work`, which enqueues on `stream`, and records it if that is wanted.
    pub(crate) fn span<R>(
        &self,
        (name_of_stream, stream): (&'static str, sys::CUstream),
        name: impl FnOnce() -> String,
        capturing: impl FnOnce() -> bool,
        work: impl FnOnce() -> Result<R>,
    ) -> Result<R> {
        // Nothing is held while the work is enqueued.
        let recording = self.0.lock().as_ref().map(|r| Arc::clone(&r.card));
        let Some(card) = recording.filter(|_| !capturing()) else {
            return work();
        };
        let start = Time::record(&card, stream)?;
        let result = work()?;
        let end = Time::record(&card, stream)?;
        if let Some(recording) = &mut *self.0.lock() {
            recording.spans.push((name_of_stream, name(), [start, end]));
        }
        Ok(result)
    }
}
