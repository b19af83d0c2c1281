//! The end of a wait.

use std::time::{Duration, Instant};

/// Longest wait there is; longer ones are cut to it, so that none is without a bound.
const LONGEST: Duration = Duration::from_secs(86_400);

/// A moment by which something must have happened. Kept over the steps of a wait, so that the steps together, not each
/// of them, are bounded.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Deadline {
    end: Instant,
    within: Duration,
}

impl Deadline {
    /// So long from now; at most a day.
    pub fn after(within: Duration) -> Self {
        let within = within.min(LONGEST);
        Self {
            end: Instant::now() + within,
            within,
        }
    }

    /// The moment.
    pub fn instant(self) -> Instant {
        self.end
    }

    /// How long the whole wait may take.
    pub fn within(self) -> Duration {
        self.within
    }

    /// What is left of it; nothing once it is over.
    pub fn remaining(self) -> Duration {
        self.end.saturating_duration_since(Instant::now())
    }

    /// Whether it is over.
    pub fn passed(self) -> bool {
        self.remaining().is_zero()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_deadline_bounds_every_wait() {
        let none = Deadline::after(Duration::ZERO);
        assert!(none.passed() && none.remaining().is_zero());
        let longest = Deadline::after(Duration::MAX);
        assert!(!longest.passed() && longest.remaining() <= LONGEST);
        assert_eq!(longest.within(), LONGEST);
        assert_eq!(longest.instant(), longest.end);
    }
}
