//! Barrier: a call with nothing in it, since every call ends with all ranks having met.

use crate::{comm::HostComm, queue::HostQueue};
use brigade_device::{Call, Result, Turn};

impl HostComm {
    pub(crate) fn run_barrier(&self, turn: &Turn) -> Result<()> {
        let core = self.core.clone();
        let absent = core.control.absent();
        HostQueue::of(turn.stream())?.run(move || {
            core.is_still_without(absent)?;
            core.collective(&Call::Barrier, |_| Ok(()))
        })
    }
}
