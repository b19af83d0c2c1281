//! Noticing that a peer's process died.
//!
//! Every rank keeps the writing end of a pipe open and gives everybody the reading end. The system closes the writing end
//! when the process ends, however it ends.

use super::memfd::io;
use brigade_device::Result;
use rustix::{
    event::{PollFd, PollFlags, Timespec, poll},
    pipe::{PipeFlags, pipe_with},
};
use std::os::fd::OwnedFd;

/// This rank's pulse.
pub(crate) struct Pulse {
    reading: OwnedFd,
    writing: OwnedFd,
}

/// The pulses of all ranks.
#[derive(Debug)]
pub(crate) struct Pulses {
    _own: OwnedFd,
    peers: Vec<OwnedFd>,
}

impl Pulse {
    pub(crate) fn new() -> Result<Self> {
        let (reading, writing) =
            pipe_with(PipeFlags::CLOEXEC).map_err(|errno| io("pipe2")(errno.into()))?;
        Ok(Self { reading, writing })
    }

    /// Gives the reading end to all by `exchange`, which gives everybody's.
    pub(crate) fn exchange(
        self,
        exchange: impl FnOnce(OwnedFd) -> Result<Vec<OwnedFd>>,
    ) -> Result<Pulses> {
        Ok(Pulses {
            _own: self.writing,
            peers: exchange(self.reading)?,
        })
    }
}

impl Pulses {
    /// Whether this peer's process has ended, or has closed its communicator.
    pub(crate) fn stopped(&self, peer: usize) -> bool {
        let mut fds = [PollFd::new(&self.peers[peer], PollFlags::IN)];
        // An error of the call says nothing about the peer.
        let _ = poll(&mut fds, Some(&Timespec::default()));
        fds[0].revents().contains(PollFlags::HUP)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_closed_end_is_noticed() {
        let (mine, theirs) = (Pulse::new().unwrap(), Pulse::new().unwrap());
        let copy = mine.reading.try_clone().unwrap();
        let mine = mine.exchange(|fd| Ok(vec![fd])).unwrap();
        let peer = theirs.exchange(|_| Ok(vec![copy])).unwrap();
        assert!(!peer.stopped(0) && !mine.stopped(0));
        drop(mine);
        assert!(peer.stopped(0));
    }
}
