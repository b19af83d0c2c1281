//! Time between two places of a stream, as the GPU sees it.

use crate::{CudaDevice, card::Card, driver::failed};
use brigade_device::{Error, Result, Stream};
use cudarc::driver::{
    result::{DriverError, event},
    sys,
};
use std::{
    sync::Arc,
    thread,
    time::{Duration, Instant},
};

/// Two events that note the time.
#[derive(Debug)]
pub struct Stopwatch {
    card: Arc<Card>,
    events: [sys::CUevent; 2],
}

// SAFETY: the handles belong to their context, not to a thread, and the driver locks what it changes.
unsafe impl Send for Stopwatch {}

impl CudaDevice {
    /// A stopwatch for streams of this device.
    ///
    /// # Errors
    /// [`Error::Backend`].
    pub fn stopwatch(&self) -> Result<Stopwatch> {
        self.card.bind()?;
        let new =
            || event::create(sys::CUevent_flags::CU_EVENT_DEFAULT).map_err(failed("cuEventCreate"));
        Ok(Stopwatch {
            card: Arc::clone(&self.card),
            events: [new()?, new()?],
        })
    }
}

impl Stopwatch {
    fn note(&self, device: &CudaDevice, on: &Stream, which: usize) -> Result<()> {
        let lane = device.lane(on)?;
        self.card.bind()?;
        // SAFETY: both handles are alive, and of one context.
        unsafe { event::record(self.events[which], lane.stream) }.map_err(failed("cuEventRecord"))
    }

    /// Starts when the work so far is done.
    ///
    /// # Errors
    /// [`Error::Invalid`] for a stream of another device; [`Error::Backend`].
    pub fn start(&self, device: &CudaDevice, on: &Stream) -> Result<()> {
        self.note(device, on, 0)
    }

    /// Stops when the work so far is done.
    ///
    /// # Errors
    /// As [`start`](Self::start).
    pub fn stop(&self, device: &CudaDevice, on: &Stream) -> Result<()> {
        self.note(device, on, 1)
    }

    /// The time between both, waiting at most `within` for the second.
    ///
    /// # Errors
    /// [`Error::Backend`], also if the work was not done in time.
    pub fn elapsed(&self, within: Duration) -> Result<Duration> {
        self.card.bind()?;
        let end = Instant::now() + within;
        loop {
            // SAFETY: the event lives as long as `self`.
            match unsafe { event::query(self.events[1]) } {
                Ok(()) => break,
                Err(DriverError(sys::CUresult::CUDA_ERROR_NOT_READY)) if Instant::now() < end => {
                    thread::yield_now();
                }
                Err(e) => return Err(failed("cuEventQuery")(e)),
            }
        }
        // SAFETY: both events live, and the second is done, so the first is too.
        let ms = unsafe { event::elapsed(self.events[0], self.events[1]) }
            .map_err(failed("cuEventElapsedTime"))?;
        Duration::try_from_secs_f32(ms / 1e3)
            .map_err(|_| Error::invalid("elapsed", ms, "a time that is not negative"))
    }
}

impl Drop for Stopwatch {
    fn drop(&mut self) {
        if self.card.bind().is_ok() {
            for event in self.events {
                // SAFETY: created once, destroyed once.
                let _ = unsafe { event::destroy(event) };
            }
        }
    }
}
