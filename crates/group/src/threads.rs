//! Ranks that are threads of one process.
//!
//! Invariant: every call of a rank takes one round, whether it ends well or not. A round that was given up stays given
//! up: whoever comes late to it gets the same error as those who waited, and all are in the same round again after it.

use crate::Deadline;
use brigade_device::{Bootstrap, Error, Result};
use parking_lot::{Condvar, Mutex};
use std::{collections::BTreeMap, sync::Arc, time::Duration};

const STEP: &str = "gathering messages";

/// One exchange of messages.
#[derive(Default)]
struct Round {
    messages: Vec<Option<Vec<u8>>>,
    /// Why nobody will get an answer any more.
    given_up: Option<String>,
}

struct State {
    rounds: BTreeMap<u64, Round>,
    /// The round that each rank's next call belongs to; `None` once it is gone.
    at: Vec<Option<u64>>,
}

impl State {
    /// The round that rank `rank` is in, with this message of its in it.
    fn enter(&mut self, rank: usize, mine: &[u8]) -> Result<u64> {
        let size = self.at.len();
        let Some(number) = self.at[rank] else {
            return Err(group(format!("gone: rank {rank}")));
        };
        let round = self.rounds.entry(number).or_default();
        round.messages.resize_with(size, || None);
        if round.messages[rank].is_some() {
            return Err(group(format!("rank {rank} is in another call already")));
        }
        round.messages[rank] = Some(mine.to_vec());
        Ok(number)
    }

    /// The result of round `number`, as soon as there is one.
    fn result(&mut self, number: u64) -> Option<Result<Vec<Vec<u8>>>> {
        let round = self.rounds.get_mut(&number)?;
        if round.given_up.is_none() {
            if let Some(all) = round.messages.iter().cloned().collect() {
                return Some(Ok(all));
            }
            let gone = |&r: &usize| round.messages[r].is_none() && self.at[r].is_none();
            let gone: Vec<_> = (0..self.at.len()).filter(gone).collect();
            if !gone.is_empty() {
                round.given_up = Some(format!("gone: {}", ranks(&gone)));
            }
        }
        round.given_up.clone().map(|why| Err(group(why)))
    }

    /// Ends round `number` for all ranks, unless it has ended.
    fn give_up(&mut self, number: u64, within: Duration) {
        let Some(round) = self.rounds.get_mut(&number) else {
            return;
        };
        let missing = |&r: &usize| round.messages[r].is_none();
        let (missing, here): (Vec<_>, Vec<_>) = (0..self.at.len()).partition(missing);
        round.given_up.get_or_insert_with(|| {
            format!(
                "missing after {within:?}: {}; there: {}",
                ranks(&missing),
                ranks(&here)
            )
        });
    }

    /// Rank `rank` has what it will get from its round. Rounds that nobody is in any more are forgotten.
    fn leave(&mut self, rank: usize, next: Option<u64>) {
        self.at[rank] = next;
        let first = self.at.iter().flatten().min().copied();
        self.rounds.retain(|&n, _| first.is_some_and(|f| n >= f));
    }
}

struct Shared {
    size: usize,
    state: Mutex<State>,
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
        state: Mutex::new(State {
            rounds: BTreeMap::new(),
            at: vec![Some(0); size],
        }),
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
        let mut state = self.shared.state.lock();
        let number = state.enter(self.rank, mine)?;
        self.shared.changed.notify_all();
        let result = loop {
            if let Some(result) = state.result(number) {
                break result;
            }
            let wait = self
                .shared
                .changed
                .wait_until(&mut state, deadline.instant());
            // What came in the last moment counts.
            if wait.timed_out() && state.result(number).is_none() {
                state.give_up(number, deadline.within());
                self.shared.changed.notify_all();
            }
        };
        state.leave(self.rank, Some(number + 1));
        result
    }
}

impl Drop for ThreadGroup {
    fn drop(&mut self) {
        self.shared.state.lock().leave(self.rank, None);
        self.shared.changed.notify_all();
    }
}

impl std::fmt::Debug for ThreadGroup {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "ThreadGroup({} of {})", self.rank, self.shared.size)
    }
}

fn group(what: String) -> Error {
    Error::Group { step: STEP, what }
}

/// `rank 1`, `ranks 0, 2`, `no rank`.
pub(crate) fn ranks(which: &[usize]) -> String {
    let listed: Vec<_> = which.iter().map(usize::to_string).collect();
    match listed.len() {
        0 => "no rank".into(),
        1 => format!("rank {}", listed[0]),
        _ => format!("ranks {}", listed.join(", ")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const LONG: Duration = Duration::from_secs(30);

    /// Waits until rank 0 is known to wait, without a clock.
    fn until_waiting(boot: &ThreadGroup, number: u64) {
        let waits = || {
            let state = boot.shared.state.lock();
            let round = state.rounds.get(&number);
            round.is_some_and(|r| r.messages[0].is_some())
        };
        for _ in 0..100_000_000u64 {
            if waits() {
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
            until_waiting(&ranks[0], 0);
            let want = [b"a".to_vec(), b"b".to_vec()];
            assert_eq!(ranks[1].all_gather(b"b", LONG).unwrap(), want);
            assert_eq!(first.join().unwrap().unwrap(), want);
        });
        assert!(ranks[0].shared.state.lock().rounds.is_empty());
    }

    #[test]
    fn a_rank_that_goes_while_others_wait_ends_their_wait() {
        let mut ranks = threads(2);
        let going = ranks.pop().unwrap();
        std::thread::scope(|s| {
            let first = s.spawn(|| ranks[0].all_gather(b"a", LONG));
            until_waiting(&ranks[0], 0);
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
            until_waiting(&ranks[0], 0);
            let error = ranks[0].all_gather(b"z", LONG).unwrap_err();
            assert_eq!(
                error.to_string(),
                "gathering messages: rank 0 is in another call already"
            );
            ranks[1].all_gather(b"b", LONG).unwrap();
            assert_eq!(first.join().unwrap().unwrap()[0], b"a");
        });
    }

    #[test]
    fn names_of_ranks() {
        assert_eq!(ranks(&[]), "no rank");
        assert_eq!(ranks(&[1]), "rank 1");
        assert_eq!(ranks(&[0, 2]), "ranks 0, 2");
    }
}
