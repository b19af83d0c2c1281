//! Events, and waiting for them on the host with a bound.

use crate::{card::Card, driver::failed, lane::Lane};
use brigade_device::{Error, Event, Mark, Result};
use cudarc::driver::{
    result::{DriverError, event},
    sys::{self, CUresult, CUstreamCaptureMode_enum as CaptureMode},
};
use std::{
    any::Any,
    hint,
    ops::RangeInclusive,
    sync::{Arc, Weak},
    thread,
    time::{Duration, Instant},
};

/// An event of the driver's.
#[derive(Debug)]
pub(crate) struct CudaMark {
    card: Arc<Card>,
    event: sys::CUevent,
    /// Whose faults whoever waits for the mark is told of.
    lane: Option<Weak<Lane>>,
}

// SAFETY: the handle belongs to its context, not to a thread, and the driver locks what it changes.
unsafe impl Send for CudaMark {}
// SAFETY: as above.
unsafe impl Sync for CudaMark {}

/// Looks that a wait takes in one go before it lets others run.
const SPINS: u32 = 64;
/// A wait spins for so long, and parks between looks after that.
const SPINNING: Duration = Duration::from_micros(200);
const PARKED: Duration = Duration::from_micros(50);

impl CudaMark {
    /// Marks the work of `stream` so far.
    pub(crate) fn record(card: &Arc<Card>, stream: sys::CUstream) -> Result<Self> {
        card.bind()?;
        let event = event::create(sys::CUevent_flags::CU_EVENT_DISABLE_TIMING)
            .map_err(failed("cuEventCreate"))?;
        let mark = Self {
            card: Arc::clone(card),
            event,
            lane: None,
        };
        // SAFETY: the event was just created in the stream's context.
        unsafe { event::record(event, stream) }.map_err(failed("cuEventRecord"))?;
        Ok(mark)
    }

    /// Marks the work of a lane so far. Whoever waits for the mark is told of faults of the groups that work there.
    pub(crate) fn of_lane(lane: &Arc<Lane>) -> Result<Self> {
        let mut mark = Self::record(&lane.card, lane.stream)?;
        mark.lane = Some(Arc::downgrade(lane));
        Ok(mark)
    }

    /// The mark behind an event of this backend.
    pub(crate) fn of(event: &Event) -> Result<&Self> {
        event.as_any().downcast_ref().ok_or_else(|| {
            Error::invalid("event", format!("{event:?}"), "an event of a CUDA stream")
        })
    }

    /// The driver's handle.
    pub(crate) fn raw(&self) -> sys::CUevent {
        self.event
    }

    /// Whether the work is not going on any more, and what it used may be let go of: done, or ended with its context. What only a
    /// capture forbids to tell is still going on.
    pub(crate) fn is_over(&self) -> bool {
        match self.query() {
            Ok(code) => is_over(code),
            // The context cannot even be made current.
            Err(_) => true,
        }
    }

    /// What the driver says of the event.
    ///
    /// While another thread captures in CUDA's default mode, this one may not ask, and breaks that capture if it does: unless it says
    /// that it knows what it does, as nothing here depends on work that is captured.
    fn query(&self) -> Result<CUresult> {
        self.card.bind()?;
        let _relaxed = Relaxed::new()?;
        // SAFETY: the event lives as long as `self`.
        Ok(unsafe { event::query(self.event) }
            .map_or_else(|DriverError(code)| code, |()| CUresult::CUDA_SUCCESS))
    }

    /// Waits at most `within`; whether it was long enough.
    pub(crate) fn reached(&self, within: Duration) -> Result<bool> {
        let start = Instant::now();
        loop {
            for _ in 0..SPINS {
                if self.done()? {
                    return Ok(true);
                }
                hint::spin_loop();
            }
            let waited = start.elapsed();
            if waited >= within {
                return Ok(false);
            }
            if waited > SPINNING {
                thread::park_timeout(PARKED);
            }
        }
    }
}

/// What a code of cuEventQuery means for what the work uses.
fn is_over(code: CUresult) -> bool {
    /// From CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED to CUDA_ERROR_STREAM_CAPTURE_WRONG_THREAD.
    const OF_CAPTURES: RangeInclusive<u32> = 900..=908;
    code != CUresult::CUDA_ERROR_NOT_READY && !OF_CAPTURES.contains(&(code as u32))
}

/// In the time of this, captures of other threads neither forbid this thread anything nor end by what it does.
struct Relaxed {
    before: CaptureMode,
}

impl Relaxed {
    fn new() -> Result<Self> {
        let mut mode = CaptureMode::CU_STREAM_CAPTURE_MODE_RELAXED;
        // SAFETY: the pointer is to a live mode, into which this thread's own is written.
        unsafe { sys::cuThreadExchangeStreamCaptureMode(&raw mut mode) }
            .result()
            .map_err(failed("cuThreadExchangeStreamCaptureMode"))?;
        Ok(Self { before: mode })
    }
}

impl Drop for Relaxed {
    fn drop(&mut self) {
        // SAFETY: as above.
        let _ = unsafe { sys::cuThreadExchangeStreamCaptureMode(&raw mut self.before) };
    }
}

impl Mark for CudaMark {
    fn done(&self) -> Result<bool> {
        match self.query()? {
            CUresult::CUDA_SUCCESS => Ok(true),
            CUresult::CUDA_ERROR_NOT_READY => Ok(false),
            code => Err(failed("cuEventQuery")(DriverError(code))),
        }
    }

    fn sync(&self, within: Duration) -> Result<()> {
        if self.reached(within)? {
            let lane = self.lane.as_ref().and_then(Weak::upgrade);
            return lane.map_or(Ok(()), |lane| lane.check_groups());
        }
        Err(Error::Backend {
            call: "cuEventQuery (the work is not done in the time given)",
            code: CUresult::CUDA_ERROR_NOT_READY as i64,
            source: None,
        })
    }

    fn as_any(&self) -> &dyn Any {
        self
    }
}

impl Drop for CudaMark {
    fn drop(&mut self) {
        if self.card.bind().is_ok() {
            // SAFETY: created once, destroyed once; the driver keeps what it still needs of it.
            let _ = unsafe { event::destroy(self.event) };
        }
    }
}

/// Lets `stream` wait for `mark`, which may be of another GPU.
pub(crate) fn wait(card: &Card, stream: sys::CUstream, mark: &CudaMark) -> Result<()> {
    card.bind()?;
    // SAFETY: both handles are alive, and the call keeps no pointer.
    unsafe { sys::cuStreamWaitEvent(stream, mark.raw(), 0) }
        .result()
        .map_err(failed("cuStreamWaitEvent"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn work_is_over_unless_it_goes_on_or_a_capture_forbids_to_tell() {
        for (code, over) in [
            (CUresult::CUDA_SUCCESS, true),
            (CUresult::CUDA_ERROR_NOT_READY, false),
            (CUresult::CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED, false),
            (CUresult::CUDA_ERROR_STREAM_CAPTURE_INVALIDATED, false),
            (CUresult::CUDA_ERROR_CAPTURED_EVENT, false),
            (CUresult::CUDA_ERROR_STREAM_CAPTURE_WRONG_THREAD, false),
            (CUresult::CUDA_ERROR_DEINITIALIZED, true),
            (CUresult::CUDA_ERROR_CONTEXT_IS_DESTROYED, true),
            (CUresult::CUDA_ERROR_ILLEGAL_ADDRESS, true),
            (CUresult::CUDA_ERROR_LAUNCH_FAILED, true),
        ] {
            assert_eq!(is_over(code), over, "{code:?}");
        }
    }
}
