//! Starting a new generation: with all ranks, or with those who are left.

use crate::core::{Core, Issue};
use brigade_device::{Absent, Error, Result};
use brigade_sync::Deadline;
use parking_lot::MutexGuard;
use std::{sync::atomic::Ordering, time::Duration};

impl Core {
    /// All ranks let go of the old generation, then start a new one.
    pub(crate) fn reset(&self, within: Duration) -> Result<()> {
        let mut issue = self.take_issue()?;
        self.control.reset(
            within,
            self.calls(),
            |_| self.let_go(within),
            || self.wipe(),
            || *issue = Issue::default(),
        )
    }

    /// The same by those who are left.
    pub(crate) fn shrink(&self, within: Duration) -> Result<Absent> {
        let mut issue = self.take_issue()?;
        self.control.shrink(
            within,
            self.calls(),
            |_| self.let_go(within),
            || self.wipe(),
            |generation, absent| {
                self.write_generation(generation, absent)?;
                *issue = Issue::default();
                Ok(())
            },
        )
    }

    fn take_issue(&self) -> Result<MutexGuard<'_, Issue>> {
        self.issue.try_lock().ok_or(Error::Busy("the communicator"))
    }

    /// Waits until this rank's work has ended, and takes from its user what belongs to the old generation.
    fn let_go(&self, within: Duration) -> Result<()> {
        let end = Deadline::after(within);
        for mark in self.marks() {
            if !mark.reached(end.left())? {
                return Err(Error::Group {
                    step: "reset",
                    what: format!("work of this rank has not ended within {within:?}"),
                });
            }
        }
        if let Some(nccl) = &self.memory.nccl {
            nccl.retire();
        }
        let dispatched = [&self.views.dispatched];
        for views in self
            .views
            .all
            .iter()
            .chain(&self.views.own)
            .chain(dispatched)
        {
            views.fetch_add(1, Ordering::AcqRel);
        }
        Ok(())
    }
}
