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

/// A point in time at which waits end.
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

    /// So long from now.
    pub fn after(within: Duration) -> Self {
        Self {
            start: Instant::now(),
            within,
        }
    }

    /// Time since it was set.
    pub fn elapsed(&self) -> Duration {
        self.start.elapsed()
    }

    /// Time left.
    pub fn left(&self) -> Duration {
        self.within.saturating_sub(self.start.elapsed())
    }
}

impl Budget for Deadline {
    fn spent(&mut self) -> bool {
        self.start.elapsed() >= self.within
    }
    fn until(&self) -> Option<Instant> {
        let end = self.start.checked_add(self.within)?;
        Instant::now().checked_add(Self::REST).map(|r| r.min(end))
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
            return Err(Stop::Interrupted);
        }
        if budget.spent() {
            return Err(Stop::Timeout { seen });
        }
        memory.rest(w.word.owner, events, budget.until());
    }
}
