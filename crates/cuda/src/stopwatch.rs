//! Time between two places of a stream, as the GPU sees it.

use crate::{CudaDevice, trace::Time};
use brigade_device::{Error, Result, Stream};
use brigade_sync::Deadline;
use std::time::Duration;

/// Notes the time at two places of a stream.
#[derive(Default)]
pub struct Stopwatch([Option<Time>; 2]);

impl Stopwatch {
    /// Starts when the work so far is done.
    ///
    /// # Errors
    /// [`Error::Invalid`] for a stream of another device; [`Error::Backend`].
    pub fn start(&mut self, device: &CudaDevice, on: &Stream) -> Result<()> {
        self.0[0] = Some(Time::record(&device.card, device.lane(on)?.stream)?);
        Ok(())
    }

    /// Stops when the work so far is done.
    ///
    /// # Errors
    /// As [`start`](Self::start).
    pub fn stop(&mut self, device: &CudaDevice, on: &Stream) -> Result<()> {
        self.0[1] = Some(Time::record(&device.card, device.lane(on)?.stream)?);
        Ok(())
    }

    /// The time between both, waiting at most `within` for the second.
    ///
    /// # Errors
    /// [`Error::Invalid`] if it was not started and stopped; [`Error::Backend`], also if the work was not done in time.
    pub fn elapsed(&self, within: Duration) -> Result<Duration> {
        let [Some(start), Some(stop)] = &self.0 else {
            let want = "a stopwatch that was started and stopped";
            return Err(Error::invalid(
                "stopwatch",
                "one that runs or never ran",
                want,
            ));
        };
        stop.reach(Deadline::after(within).end())?;
        stop.since(start)
    }
}
