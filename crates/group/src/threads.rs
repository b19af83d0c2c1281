//! Ranks that are threads of one process.

use crate::{
    Deadline,
    rounds::{Away, Rounds},
};
use brigade_device::{Bootstrap, Error, Result};
use parking_lot::{Condvar, Mutex};
use std::{sync::Arc, time::Duration};

struct Shared {
    size: usize,
    rounds: Mutex<Rounds>,
    changed: Condvar,
}

/// One rank's place in a group of threads. Dropping it tells the others that this rank will not come any more.
pub struct ThreadGroup {
    rank: usize,
    shared: Arc<Shared>,
}

/// The places of a group of `size` ranks, in rank order: one for each thread.
pub fn threads(size: usize) -> Vec<ThreadGroup> {
    let shared = Arc::new(Shared {
        size,
        rounds: Mutex::new(Rounds::new(size)),
        changed: Condvar::new(),
    });
    (0..size)
        .map(|rank| ThreadGroup {
            rank,
            shared: Arc::clone(&shared),
        })
        .collect()
}

impl Bootstrap for ThreadGroup {
    fn rank(&self) -> usize {
        self.rank
    }

    fn size(&self) -> usize {
        self.shared.size
    }

    /// # Errors
    /// [`Error::Group`] naming the ranks that are missing or gone; the same on every rank of the round. Also if two
    /// threads call it for the same rank at once.
    fn all_gather(&self, mine: &[u8], within: Duration) -> Result<Vec<Vec<u8>>> {
        let deadline = Deadline::after(within);
        let mut rounds = self.shared.rounds.lock();
        let number = rounds.enter(self.rank, mine.to_vec()).map_err(group)?;
        self.shared.changed.notify_all();
        let result = loop {
            if let Some(verdict) = rounds.verdict(number) {
                break verdict.to_owned();
            }
            let wait = self.shared.changed.wait_until(&mut rounds, deadline.end());
            // What came in the last moment counts.
            if wait.timed_out() && rounds.verdict(number).is_none() {
                let why = rounds.missing(number, deadline.within());
                rounds.fail(number, why);
                self.shared.changed.notify_all();
            }
        };
        rounds.next(self.rank);
        result.map_err(group)
    }
}

impl Drop for ThreadGroup {
    fn drop(&mut self) {
        self.shared.rounds.lock().leave(self.rank, Away::Gone);
        self.shared.changed.notify_all();
    }
}

impl std::fmt::Debug for ThreadGroup {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "ThreadGroup({} of {})", self.rank, self.shared.size)
    }
}

pub(crate) fn group(what: String) -> Error {
    Error::Group {
        step: "gathering messages",
        what,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const LONG: Duration = Duration::from_secs(30);

    /// Waits until rank 0 is known to wait, without a clock.
    fn until_waiting(boot: &ThreadGroup) {
        for _ in 0..100_000_000u64 {
            if boot.shared.rounds.lock().waits_in(0).is_some() {
                return;
            }
            std::thread::yield_now();
        }
        panic!("rank 0 never waited");
    }

    #[test]
    fn a_late_rank_completes_the_round() {
        let ranks = threads(2);
        std::thread::scope(|s| {
            let first = s.spawn(|| ranks[0].all_gather(b"a", LONG));
            until_waiting(&ranks[0]);
            let want = [b"a".to_vec(), b"b".to_vec()];
            assert_eq!(ranks[1].all_gather(b"b", LONG).unwrap(), want);
            assert_eq!(first.join().unwrap().unwrap(), want);
        });
        assert_eq!(ranks[0].shared.rounds.lock().kept(), 0);
    }

    #[test]
    fn a_rank_that_goes_while_others_wait_ends_their_wait() {
        let mut ranks = threads(2);
        let going = ranks.pop().unwrap();
        std::thread::scope(|s| {
            let first = s.spawn(|| ranks[0].all_gather(b"a", LONG));
            until_waiting(&ranks[0]);
            drop(going);
            let error = first.join().unwrap().unwrap_err();
            assert_eq!(error.to_string(), "gathering messages: gone: rank 1");
        });
    }

    #[test]
    fn one_rank_has_one_call_at_a_time() {
        let ranks = threads(2);
        std::thread::scope(|s| {
            let first = s.spawn(|| ranks[0].all_gather(b"a", LONG));
            until_waiting(&ranks[0]);
            let error = ranks[0].all_gather(b"z", LONG).unwrap_err();
            assert_eq!(
                error.to_string(),
                "gathering messages: rank 0 is in another call already"
            );
            ranks[1].all_gather(b"b", LONG).unwrap();
            assert_eq!(first.join().unwrap().unwrap()[0], b"a");
        });
    }
}
