//! Carrying out posts and waits.

use crate::{Flag, Memory, Verdict, Want, Word};
use std::time::{Duration, Instant};

/// A flag to be written.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Post {
    /// Where.
    pub word: Word,
    /// What.
    pub flag: Flag,
}

/// A flag to be waited for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Wait {
    /// Where.
    pub word: Word,
    /// What.
    pub want: Want,
    /// Whose flag it is.
    pub peer: usize,
}

/// Why a wait gave up.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Stop {
    /// The budget is spent.
    Timeout {
        /// What the word held then.
        seen: u64,
    },
    /// The peer is in another call.
    Mismatch {
        /// What the word held.
        seen: u64,
    },
    /// The watcher said so.
    Interrupted,
}

/// How long a wait may go on.
pub trait Budget {
    /// Called once per round; true when the wait must end.
    fn spent(&mut self) -> bool;
    /// Until when a round may rest; `None` if rounds are counted, not timed.
    fn until(&self) -> Option<Instant>;
    /// Rounds before the first rest.
    fn spins(&self) -> u32;
}

/// Nothing is waited for longer than a day: some clocks cannot be asked for a moment that is much further off.
const LONGEST: Duration = Duration::from_secs(86_400);

/// A point in time at which waits end. Whoever waits by a caller's duration takes the moment from here, since
/// `Instant::now() + Duration::MAX` panics.
#[derive(Clone, Copy, Debug)]
pub struct Deadline {
    start: Instant,
    within: Duration,
}

impl Deadline {
    /// Rounds that a wait spins before it rests: about the time of a wake-up, so that a peer that is nearly there costs
    /// no system call, and one that is not does not keep a core from it.
    const SPINS: u32 = 128;

    /// Longest rest: a process that dies wakes nobody, and a watcher that looks for dead ones must get to it.
    const REST: Duration = Duration::from_millis(100);

    /// So long from now; at most a day.
    pub fn after(within: Duration) -> Self {
        Self {
            start: Instant::now(),
            within: within.min(LONGEST),
        }
    }

    /// The moment.
    pub fn end(&self) -> Instant {
        self.start + self.within
    }

    /// How long the whole wait may take.
    pub fn within(&self) -> Duration {
        self.within
    }

    /// Time since it was set.
    pub fn elapsed(&self) -> Duration {
        self.start.elapsed()
    }

    /// Time left; none once it is over.
    pub fn left(&self) -> Duration {
        self.within.saturating_sub(self.start.elapsed())
    }

    /// Whether it is over.
    pub fn passed(&self) -> bool {
        self.start.elapsed() >= self.within
    }
}

impl Budget for Deadline {
    fn spent(&mut self) -> bool {
        self.passed()
    }
    fn until(&self) -> Option<Instant> {
        Some(self.end().min(Instant::now() + Self::REST))
    }
    fn spins(&self) -> u32 {
        Self::SPINS
    }
}

/// Writes a flag.
pub fn post<M: Memory + ?Sized>(memory: &M, p: Post) {
    memory.store(p.word, p.flag.bits());
}

/// Waits for a flag. `watch` is asked before every rest, and ends the wait by `true`: for an abort, or for what other
/// words of the same owner say. Stores to them end the rest too.
///
/// # Errors
/// Why it gave up.
pub fn wait<M: Memory + ?Sized>(
    memory: &M,
    w: Wait,
    budget: &mut (impl Budget + ?Sized),
    mut watch: impl FnMut() -> bool,
) -> Result<(), Stop> {
    let mut spins = budget.spins();
    loop {
        let events = memory.events(w.word.owner);
        let seen = memory.load(w.word);
        match w.want.verdict(seen) {
            Verdict::Ready => return Ok(()),
            Verdict::Mismatch => return Err(Stop::Mismatch { seen }),
            Verdict::NotYet => {}
        }
        if spins > 0 {
            spins -= 1;
            std::hint::spin_loop();
            continue;
        }
        if watch() {
            // What a peer says last is that it is gone: all that it wrote before is there by now.
            let last = w.want.verdict(memory.load(w.word));
            return match last {
                Verdict::Ready => Ok(()),
                _ => Err(Stop::Interrupted),
            };
        }
        if budget.spent() {
            return Err(Stop::Timeout { seen });
        }
        memory.rest(w.word.owner, events, budget.until());
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_deadline_bounds_every_wait() {
        let none = Deadline::after(Duration::ZERO);
        assert!(none.passed() && none.left().is_zero());
        let longest = Deadline::after(Duration::MAX);
        assert!(!longest.passed() && longest.left() <= LONGEST);
        assert_eq!(longest.within(), LONGEST);
        assert_eq!(longest.end(), longest.start + LONGEST);
    }

    #[test]
    fn a_rest_ends_however_long_the_wait_may_take() {
        for within in [Duration::ZERO, Deadline::REST * 2, Duration::MAX] {
            let until = Deadline::after(within).until();
            let latest = Instant::now() + Deadline::REST;
            assert!(until.is_some_and(|until| until <= latest), "{within:?}");
        }
    }
}
