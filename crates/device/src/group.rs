//! A group of ranks.

use crate::{Error, ParallelMode, Result};

/// The ranks that a communicator joins, as one of them sees them.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Group {
    /// Which kind of parallelism it serves.
    pub mode: ParallelMode,
    /// This rank's number in the group.
    pub rank: usize,
    /// Ranks in the group.
    pub size: usize,
}

impl Group {
    /// Most ranks of a group: what is counted over all of them has 32 bits.
    pub const MOST_RANKS: usize = 1 << 10;

    /// # Errors
    /// [`Error::Invalid`] for more ranks than that, for none, and for a rank that is not among them.
    pub fn check(&self) -> Result<()> {
        if !(1..=Self::MOST_RANKS).contains(&self.size) {
            let want = format!("1 to {} ranks", Self::MOST_RANKS);
            return Err(Error::invalid("group.size", self.size, want));
        }
        if self.rank >= self.size {
            let want = format!("a rank below {}", self.size);
            return Err(Error::invalid("group.rank", self.rank, want));
        }
        Ok(())
    }
}
