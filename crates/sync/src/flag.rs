//! Flags: 64 bits that say which generation, which call, and how far.

use std::fmt;

/// `generation << 56 | signature << 32 | epoch`
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub struct Flag(u64);

impl Flag {
    /// Bits of a signature.
    pub const SIGNATURE_MASK: u32 = 0xFF_FFFF;

    /// A flag. Bits of `signature` above the lower 24 are dropped.
    pub const fn new(generation: u8, signature: u32, epoch: u32) -> Self {
        Self(
            (generation as u64) << 56
                | ((signature & Self::SIGNATURE_MASK) as u64) << 32
                | epoch as u64,
        )
    }

    /// From what a word holds.
    pub const fn from_bits(bits: u64) -> Self {
        Self(bits)
    }

    /// What a word holds.
    pub const fn bits(self) -> u64 {
        self.0
    }

    /// Which generation of the communicator.
    pub const fn generation(self) -> u8 {
        (self.0 >> 56) as u8
    }

    /// Which call.
    pub const fn signature(self) -> u32 {
        (self.0 >> 32) as u32 & Self::SIGNATURE_MASK
    }

    /// How far.
    pub const fn epoch(self) -> u32 {
        self.0 as u32
    }
}

impl fmt::Debug for Flag {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "Flag(generation {}, signature {:#08x}, epoch {})",
            self.generation(),
            self.signature(),
            self.epoch()
        )
    }
}

/// What a wait is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Want {
    /// This flag: the protocol keeps the peer from posting a later one before it was seen.
    Exactly(Flag),
    /// This epoch or a later one of this generation, whatever its signature: credits and arrivals at a reset.
    AtLeast(Flag),
    /// The same, of this signature: the protocol keeps the peer from another call before all of this one's flags were seen.
    Since(Flag),
}

/// What a word says to a wait.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Verdict {
    /// It is there.
    Ready,
    /// Not yet: an earlier epoch, or a generation that is over.
    NotYet,
    /// The peer is in another call.
    Mismatch,
}

impl Want {
    /// The flag wanted.
    pub const fn flag(self) -> Flag {
        match self {
            Self::Exactly(f) | Self::AtLeast(f) | Self::Since(f) => f,
        }
    }

    /// Judges what a word holds. Epochs are compared by signed difference, so that they may wrap.
    pub const fn verdict(self, seen: u64) -> Verdict {
        let (want, seen) = (self.flag(), Flag(seen));
        if seen.generation() != want.generation() {
            return Verdict::NotYet;
        }
        let ahead = seen.epoch().wrapping_sub(want.epoch()) as i32;
        match self {
            _ if ahead < 0 => Verdict::NotYet,
            Self::AtLeast(_) => Verdict::Ready,
            Self::Since(_) if seen.signature() == want.signature() => Verdict::Ready,
            Self::Exactly(_) if ahead == 0 && seen.signature() == want.signature() => {
                Verdict::Ready
            }
            Self::Exactly(_) | Self::Since(_) => Verdict::Mismatch,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn parts_come_back(g: u8, s in 0u32..=Flag::SIGNATURE_MASK, e: u32) {
            let f = Flag::new(g, s, e);
            prop_assert_eq!((f.generation(), f.signature(), f.epoch()), (g, s, e));
        }

        #[test]
        fn epochs_wrap(e: u32, ahead in 0u32..1000) {
            let want = Want::AtLeast(Flag::new(1, 0, e));
            prop_assert_eq!(want.verdict(Flag::new(1, 7, e.wrapping_add(ahead)).bits()), Verdict::Ready);
            prop_assert_eq!(want.verdict(Flag::new(1, 7, e.wrapping_sub(ahead + 1)).bits()), Verdict::NotYet);
            prop_assert_eq!(want.verdict(Flag::new(2, 7, e.wrapping_add(ahead)).bits()), Verdict::NotYet);
        }
    }

    #[test]
    fn another_call_is_a_mismatch() {
        let want = Want::Exactly(Flag::new(3, 5, 9));
        for (seen, verdict) in [
            (Flag::new(3, 5, 9), Verdict::Ready),
            (Flag::new(3, 6, 9), Verdict::Mismatch),
            (Flag::new(3, 5, 10), Verdict::Mismatch),
            (Flag::new(3, 6, 8), Verdict::NotYet),
            (Flag::new(2, 5, 9), Verdict::NotYet),
            (Flag::from_bits(0), Verdict::NotYet),
        ] {
            assert_eq!(want.verdict(seen.bits()), verdict, "{seen:?}");
        }
    }
}
