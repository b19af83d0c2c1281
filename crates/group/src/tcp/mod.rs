//! Ranks that are processes, on one machine or on several, which find each other at rank 0's address.
//!
//! A star: everybody has one connection, to rank 0. Who is in which round is kept there and nowhere else, so that a round
//! ends in the same way for all.

mod address;
mod among;
mod config;
mod form;
mod handshake;
mod hub;
mod link;
mod member;
mod socket;
#[cfg(test)]
mod tests;
mod words;

pub use address::Address;
pub use config::TcpConfig;

use crate::{
    Deadline, Liveness, Loss, Watch,
    frame::{WORD_BYTES, message_limit},
};
use brigade_device::{Bootstrap, Error, Result};
use std::{fmt, sync::Arc, time::Duration};

/// How long dropping a group may take: the goodbye, and what was sent before it, has to arrive.
const LINGER: Duration = Duration::from_secs(1);

/// One rank's place in a group of processes. Dropping it says goodbye to the others, which is no loss; a process that ends
/// without that is lost. Without rank 0 nobody hears of anybody, so it goes last.
pub struct TcpGroup {
    rank: usize,
    size: usize,
    local_rank: Option<usize>,
    side: Side,
}

enum Side {
    Root(Arc<hub::Hub>),
    Member(Arc<member::Member>),
}

impl TcpGroup {
    /// Finds the other ranks. All are there when it returns.
    ///
    /// # Errors
    /// [`Error::Invalid`] for a configuration that cannot be; [`Error::Unsupported`] if other machines could reach the
    /// address and there is no secret; [`Error::Group`] naming who is missing, who came twice, whose group, version or
    /// secret is another one, or what is wrong with the address.
    pub fn join(config: &TcpConfig) -> Result<Self> {
        config.check()?;
        let deadline = Deadline::after(config.join_within);
        let group = |side| Self {
            rank: config.rank,
            size: config.size,
            local_rank: config.local_rank,
            side,
        };
        // From here on a group that does not form is dropped, and says goodbye to those who were there.
        if config.rank == 0 {
            let hub = hub::Hub::new(config);
            let group = group(Side::Root(Arc::clone(&hub)));
            let number = hub.begin(&[]).map_err(joining)?;
            let note = match config.size {
                1 => String::new(),
                _ => form::form(&hub, config, deadline)?,
            };
            hub.end(number, deadline, &note).map_err(joining)?;
            Ok(group)
        } else {
            let member = member::Member::connect(config, deadline)?;
            let group = group(Side::Member(Arc::clone(&member)));
            member.all_gather(&[], deadline).map_err(joining)?;
            Ok(group)
        }
    }

    /// This rank's number on its machine, as in the configuration.
    pub fn local_rank(&self) -> Option<usize> {
        self.local_rank
    }

    /// Longest message of one rank, in bytes: 16 MiB for all ranks together.
    pub fn message_limit(&self) -> usize {
        message_limit(self.size)
    }

    /// What is known about lost ranks; to be kept by whoever must know, a device for instance.
    pub fn liveness(&self) -> Liveness {
        match &self.side {
            Side::Root(hub) => hub.liveness.clone(),
            Side::Member(member) => member.liveness.clone(),
        }
    }

    /// Tells all other ranks something, between rounds or in one: nobody waits for it, and [`heard`](Self::heard) is where it comes
    /// out, in the order in which each rank told what it did. Some hundred words may be under way; with more of them, the connection ends.
    ///
    /// # Errors
    /// [`Error::Invalid`] if it is too long.
    pub fn tell(&self, what: &[u8]) -> Result<()> {
        if what.len() > WORD_BYTES {
            let want = format!("at most {WORD_BYTES} bytes");
            return Err(Error::invalid("what", what.len(), want));
        }
        match &self.side {
            Side::Root(hub) => hub.tell(what),
            Side::Member(member) => member.tell(what),
        }
        Ok(())
    }

    /// What other ranks have told since the last time, each with its number. Waits for something, but not longer than this, and not once
    /// [`wake`](Self::wake) was called.
    pub fn heard(&self, within: Duration) -> Vec<(usize, Vec<u8>)> {
        self.words().take(within)
    }

    /// Ends this rank's wait in [`heard`](Self::heard), or its next one.
    pub fn wake(&self) {
        self.words().wake();
    }

    fn words(&self) -> &words::Words {
        match &self.side {
            Side::Root(hub) => &hub.words,
            Side::Member(member) => &member.words,
        }
    }

    /// As [`Liveness::lost`].
    pub fn lost(&self) -> Option<Loss> {
        self.liveness().lost()
    }

    /// As [`Liveness::on_loss`].
    pub fn on_loss(&self, callback: impl Fn(&Loss) + Send + Sync + 'static) -> Watch {
        self.liveness().on_loss(callback)
    }
}

impl Bootstrap for TcpGroup {
    fn rank(&self) -> usize {
        self.rank
    }

    fn size(&self) -> usize {
        self.size
    }

    /// # Errors
    /// [`Error::Group`] naming the ranks that are missing, gone or lost, or whose message is too long; the same on every
    /// rank of the round, unless rank 0 itself is gone or lost. At most half a second later than `within`.
    fn all_gather(&self, mine: &[u8], within: Duration) -> Result<Vec<Vec<u8>>> {
        let deadline = Deadline::after(within);
        let result = match &self.side {
            Side::Root(hub) => {
                let number = hub.begin(mine).map_err(crate::threads::group)?;
                hub.end(number, deadline, "")
            }
            Side::Member(member) => member.all_gather(mine, deadline),
        };
        result.map_err(crate::threads::group)
    }
}

impl Drop for TcpGroup {
    fn drop(&mut self) {
        match &self.side {
            Side::Root(hub) => hub.close(),
            Side::Member(member) => member.close(),
        }
    }
}

impl fmt::Debug for TcpGroup {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "TcpGroup({} of {})", self.rank, self.size)
    }
}

fn joining(what: String) -> Error {
    Error::Group {
        step: "joining",
        what,
    }
}

fn too_long(rank: usize, bytes: u64, size: usize) -> String {
    let limit = message_limit(size);
    format!("rank {rank} has a message of {bytes} bytes; {limit} is the limit in a group of {size}")
}
