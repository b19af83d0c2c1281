//! Ranks that the rest of a group goes on without.

use std::fmt;

/// The ranks that a communicator was [shrunk](crate::Comm::shrink) by: they keep their numbers, nobody sends to them or waits for them,
/// and experts of theirs are none.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct Absent {
    ranks: u16,
    gone: u16,
}

impl Absent {
    /// Most ranks of a group that can shrink.
    pub const MOST_RANKS: usize = 16;

    /// From a bit for each rank that is absent, and one for each whose process or communicator is known to have ended.
    pub const fn from_bits(ranks: u16, gone: u16) -> Self {
        Self {
            ranks,
            gone: gone & ranks,
        }
    }

    /// A bit for each.
    pub const fn bits(self) -> u16 {
        self.ranks
    }

    /// Whether there are none.
    pub const fn is_empty(self) -> bool {
        self.ranks == 0
    }

    /// Whether this one is.
    pub const fn contains(self, rank: usize) -> bool {
        rank < Self::MOST_RANKS && self.ranks >> rank & 1 == 1
    }

    /// Those of them that may live, and write what they were about to write.
    pub fn perhaps_alive(self) -> Self {
        Self::from_bits(self.ranks & !self.gone, 0)
    }

    /// All of them, in rank order.
    pub fn ranks(self) -> impl Iterator<Item = usize> {
        (0..Self::MOST_RANKS).filter(move |&rank| self.contains(rank))
    }

    /// The signature of a call that is made without them, so that ranks which disagree about them are found out: the call's own where
    /// there are none.
    pub const fn sign(self, signature: u32) -> u32 {
        // Knuth's multiplicative hash.
        let mixed = signature ^ (self.ranks as u32).wrapping_mul(0x9E37_79B1) >> 8;
        match mixed & 0xFF_FFFF {
            0 => 1,
            mixed => mixed,
        }
    }
}

impl fmt::Display for Absent {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_list().entries(self.ranks()).finish()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn calls_without_other_ranks_are_other_calls() {
        let signatures = [1, 0xA11, 0xFF_FFFF];
        for signature in signatures {
            assert_eq!(Absent::default().sign(signature), signature);
            let mut all: Vec<u32> = (0..=u16::MAX)
                .map(|bits| Absent::from_bits(bits, 0).sign(signature))
                .collect();
            assert!(all.iter().all(|&s| s != 0 && s <= 0xFF_FFFF));
            all.sort_unstable();
            all.dedup();
            // Of 2^16 in 2^24, at most one pair falls together: on 1, in place of 0.
            assert!(all.len() >= usize::from(u16::MAX), "{}", all.len());
        }
    }

    #[test]
    fn only_the_absent_can_be_gone() {
        let absent = Absent::from_bits(0b1010, 0b0011);
        assert_eq!(absent.ranks().collect::<Vec<_>>(), [1, 3]);
        assert_eq!(absent.perhaps_alive().to_string(), "[3]");
        assert!(!absent.contains(0) && !absent.contains(64) && !absent.is_empty());
    }
}
