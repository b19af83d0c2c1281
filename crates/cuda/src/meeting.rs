//! Meeting outside of leases: when a group is joined, in a reset of what it is a part of, and at its end.

use crate::{
    core::{Core, HEARSAY},
    mark::{self, CudaMark},
};
use brigade_device::{Call, Error, Result};
use brigade_sync::Deadline;
use std::{sync::Arc, time::Duration};

impl Core {
    /// All ranks meet on their GPUs: what a group does first.
    pub(crate) fn meet_once(self: &Arc<Self>) -> Result<()> {
        self.meet_within("join: flags between GPUs", self.config.first_deadline)
    }

    /// The same later, outside of leases: behind all work of this rank.
    pub(crate) fn meet_within(
        self: &Arc<Self>,
        step: &'static str,
        within: Duration,
    ) -> Result<()> {
        self.behind_all()?;
        let own = Arc::clone(&self.waiter);
        self.collective_within(&own, &Call::Barrier, Some(within), &[], None, |_| Ok(()))?;
        self.own_ended(step, within)
    }

    /// Work on the communicator's own stream comes behind that of all leases, whatever streams they had.
    fn behind_all(&self) -> Result<()> {
        let mut marks = self.marks().into_iter();
        marks.try_for_each(|mark| mark::wait(&self.device.card, self.waiter.stream, &mark))
    }

    /// Waits for the call on the communicator's own stream, which ends `within` the time by itself.
    fn own_ended(&self, step: &'static str, within: Duration) -> Result<()> {
        let ended = CudaMark::record(&self.device.card, self.waiter.stream)?
            .reached(within.saturating_add(HEARSAY));
        self.usable()?;
        if ended? {
            return Ok(());
        }
        Err(Error::Group {
            step,
            what: format!("this rank's GPU has not come to it within {within:?}"),
        })
    }

    pub(crate) fn close(self: &Arc<Self>, within: Duration) -> Result<()> {
        self.usable()?;
        let end = Deadline::after(within);
        let left = || end.left();
        self.behind_all()?;
        let own = Arc::clone(&self.waiter);
        self.collective_within(&own, &Call::Close, Some(left()), &[], None, |_| Ok(()))?;
        self.own_ended("close", left())?;
        self.control.set_closed();
        Ok(())
    }
}
