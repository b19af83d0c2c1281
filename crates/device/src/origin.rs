//! Which communicator something is of, and of which of its generations.

use crate::{Error, Result};
use std::{
    fmt,
    sync::atomic::{AtomicU64, Ordering},
};

/// Communicators and hierarchies that this process has made: none has the number 0.
static MADE: AtomicU64 = AtomicU64::new(0);

/// Where something is from that a caller keeps between calls: which communicator or hierarchy of this process, and of which generation.
/// Numbers are not used again, and generations are counted from 1 without coming round. By default it is of none.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct Origin {
    communicator: u64,
    generation: u64,
}

impl Origin {
    /// Checks that what a caller gives as `field` is from where it is used now.
    ///
    /// # Errors
    /// [`Error::Invalid`] with both origins otherwise.
    pub fn check(self, field: &'static str, now: Self) -> Result<()> {
        if self == now {
            return Ok(());
        }
        Err(Error::invalid(
            field,
            format!("one of {self}"),
            format!("one of {now}"),
        ))
    }
}

impl fmt::Display for Origin {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self {
            communicator,
            generation,
        } = self;
        write!(f, "communicator {communicator}, generation {generation}")
    }
}

/// What a communicator has to mark what it gives out, for backends.
#[derive(Debug)]
pub struct Identity {
    communicator: u64,
    generation: AtomicU64,
}

impl Identity {
    /// Another than any before in this process.
    #[expect(
        clippy::new_without_default,
        reason = "no two are alike, which a default would be"
    )]
    pub fn new() -> Self {
        Self {
            communicator: MADE.fetch_add(1, Ordering::Relaxed) + 1,
            generation: AtomicU64::new(1),
        }
    }

    /// What is given out now is from here.
    pub fn origin(&self) -> Origin {
        Origin {
            communicator: self.communicator,
            generation: self.generation.load(Ordering::Acquire),
        }
    }

    /// Starts a generation: what was given out before is not from here any more.
    pub fn renew(&self) {
        self.generation.fetch_add(1, Ordering::AcqRel);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_what_is_of_the_same_communicator_and_generation_passes() {
        let (a, b) = (Identity::new(), Identity::new());
        let of_a = a.origin();
        assert!(of_a.check("handle", a.origin()).is_ok());
        assert!(of_a.check("handle", b.origin()).is_err());
        assert!(Origin::default().check("handle", a.origin()).is_err());
        // More than a flag's eight bits can count.
        for _ in 0..600 {
            a.renew();
            assert!(of_a.check("handle", a.origin()).is_err());
        }
        let Err(Error::Invalid { field, got, want }) = of_a.check("handle", a.origin()) else {
            panic!("not refused");
        };
        assert_eq!(field, "handle");
        assert!(got.starts_with("one of communicator ") && got.ends_with(", generation 1"));
        assert!(want.ends_with(", generation 601"), "{want}");
    }
}
