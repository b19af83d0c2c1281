//! What a look at a rail sees, and what follows from it.

use super::Found;
use crate::{line::Gone, nccl_comm::Status};
use brigade_device::FaultKind;
use std::time::{Duration, Instant};

/// How long what NCCL fails with may wait for what stopped the peer that it failed for.
const HEARSAY: Duration = Duration::from_millis(200);

/// What a kernel of NCCL's that ended without what it should have brought is called where nobody says why and NCCL has nothing to say either: its own
/// name for another process's end (`ncclRemoteError`).
const CUT_SHORT: Status = 6;

/// How long a wait may go on for a machine that is gone: word of the call that is waited for may be on its way, or, if it was lost in that call,
/// what it had sent. Nobody waits for one that left behind it.
const fn patience(gone: Gone) -> Duration {
    match gone {
        Gone::Behind => Duration::from_millis(20),
        Gone::Lost => Duration::from_millis(300),
        Gone::Left => Duration::MAX,
    }
}

/// What NCCL fails with, and since when that is known: from one look to the next.
pub(super) type Failing = Option<(Status, Instant)>;

/// What one look sees.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Seen {
    /// This rank's machine.
    pub(super) me: usize,
    /// A machine that made another call.
    pub(super) differs: Option<usize>,
    /// A machine that is gone, and how.
    pub(super) gone: Option<(usize, Gone)>,
    /// The machine that a wait is for, if there is one.
    pub(super) awaited: usize,
    /// For how long NCCL has been under way on the GPU.
    pub(super) under_way: Duration,
    /// How long a call had waited that NCCL did not take in time.
    pub(super) overdue: Option<Duration>,
    /// Whether NCCL's kernel ended without a signature.
    pub(super) cut_short: bool,
    /// Whether NCCL refused a call.
    pub(super) refused: bool,
    /// What NCCL has failed with, in a call or beside them.
    pub(super) failed: Option<Status>,
}

impl Seen {
    /// What is wrong, if anything is. NCCL may be under way for `most` at a time.
    pub(super) fn verdict(
        &self,
        most: Duration,
        now: Instant,
        failing: &mut Failing,
    ) -> Option<Found> {
        if let Some(machine) = self.differs {
            return Some(Found::by(FaultKind::Mismatch, machine));
        }
        let waited = self.under_way.max(self.overdue.unwrap_or_default());
        if let Some((machine, how)) = self.gone
            && waited >= patience(how)
        {
            return Some(Found {
                waited,
                ..Found::by(FaultKind::PeerLost, machine)
            });
        }
        if waited >= most || self.overdue.is_some() {
            return Some(Found {
                waited,
                ..Found::by(FaultKind::Timeout, self.awaited)
            });
        }
        // A machine that is gone has ended its part of NCCL's communicators: where nothing is under way, nobody minds.
        let minds = self.cut_short || self.refused || self.gone.is_none();
        let status = self.failed.or(self.cut_short.then_some(CUT_SHORT));
        let Some(status) = status.filter(|_| minds) else {
            *failing = None;
            return None;
        };
        let (_, since) = *failing.get_or_insert((status, now));
        let waited = now.saturating_duration_since(since);
        if let Some((machine, how)) = self.gone {
            let lost = Found::by(FaultKind::PeerLost, machine);
            return (waited >= patience(how).min(HEARSAY)).then_some(Found { waited, ..lost });
        }
        (waited >= HEARSAY).then(|| Found {
            seen: status as u64,
            ..Found::by(FaultKind::Aborted, self.me)
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use FaultKind::{Aborted, Mismatch, PeerLost, Timeout};
    use Gone::{Behind, Left, Lost};

    const MOST: Duration = Duration::from_secs(1);

    const fn ms(ms: u64) -> Duration {
        Duration::from_millis(ms)
    }

    /// What a look finds that sees the same as one so long before.
    fn after(before: Duration, seen: Seen) -> Option<(FaultKind, usize, u64)> {
        let mut failing = None;
        let start = Instant::now();
        let first = seen.verdict(MOST, start, &mut failing);
        let found = first.or_else(|| seen.verdict(MOST, start + before, &mut failing));
        found.map(|found| (found.kind, found.machine, found.seen))
    }

    #[test]
    fn what_is_seen_decides_on_the_fault() {
        let idle = Seen {
            me: 1,
            awaited: 2,
            ..Seen::default()
        };
        let gone = |how| Seen {
            gone: Some((3, how)),
            ..idle
        };
        let failed = Seen {
            failed: Some(2),
            ..idle
        };
        let waits = |under_way, seen| Seen { under_way, ..seen };
        let (timeout, lost) = (Some((Timeout, 2, 0)), Some((PeerLost, 3, 0)));
        let table = [
            ("nothing", ms(900), idle, None),
            ("a wait in time", ms(900), waits(ms(999), idle), None),
            ("a wait that is over", ms(0), waits(MOST, idle), timeout),
            // NCCL did not take a call: as late as a kernel that does not end, whatever bound the next call has.
            (
                "a call that was not taken",
                ms(0),
                Seen {
                    overdue: Some(ms(400)),
                    ..idle
                },
                timeout,
            ),
            (
                "a call that was not taken, for who is gone",
                ms(0),
                Seen {
                    overdue: Some(ms(400)),
                    ..gone(Lost)
                },
                lost,
            ),
            (
                "another call, before all else",
                ms(0),
                Seen {
                    differs: Some(0),
                    failed: Some(2),
                    ..waits(MOST, gone(Lost))
                },
                Some((Mismatch, 0, 0)),
            ),
            ("gone, and nobody waits", ms(900), gone(Lost), None),
            ("behind", ms(0), waits(ms(20), gone(Behind)), lost),
            (
                "behind, word may come",
                ms(0),
                waits(ms(19), gone(Behind)),
                None,
            ),
            ("lost", ms(0), waits(ms(300), gone(Lost)), lost),
            (
                "lost, rows may come",
                ms(0),
                waits(ms(299), gone(Lost)),
                None,
            ),
            ("left behind it", ms(0), waits(ms(999), gone(Left)), None),
            (
                "left, and a wait is over",
                ms(0),
                waits(MOST, gone(Left)),
                timeout,
            ),
            ("NCCL fails, and why may be heard", ms(199), failed, None),
            ("NCCL fails", ms(200), failed, Some((Aborted, 1, 2))),
            (
                "NCCL fails for who is gone, and nobody waits",
                ms(900),
                Seen {
                    failed: Some(2),
                    ..gone(Lost)
                },
                None,
            ),
            (
                "NCCL refused a call for who is gone",
                ms(200),
                Seen {
                    failed: Some(2),
                    refused: true,
                    ..gone(Lost)
                },
                lost,
            ),
            (
                "cut short by who is behind",
                ms(20),
                Seen {
                    cut_short: true,
                    ..gone(Behind)
                },
                lost,
            ),
            // Not as who aborts, of whom nothing was seen.
            (
                "cut short, and nobody says why",
                ms(200),
                Seen {
                    cut_short: true,
                    ..idle
                },
                Some((Aborted, 1, 6)),
            ),
        ];
        for (what, before, seen, want) in table {
            assert_eq!(after(before, seen), want, "{what}");
        }
    }

    /// A failure that passes is forgotten: the next one has its own time to be explained.
    #[test]
    fn what_passes_is_forgotten() {
        let start = Instant::now();
        let mut failing = None;
        let fails = Seen {
            failed: Some(3),
            ..Seen::default()
        };
        for (at, seen) in [
            (0, fails),
            (150, Seen::default()),
            (190, fails),
            (380, fails),
        ] {
            let found = seen.verdict(MOST, start + ms(at), &mut failing);
            assert!(found.is_none(), "after {at} ms");
        }
        let found = fails.verdict(MOST, start + ms(390), &mut failing);
        assert_eq!(found.map(|found| found.seen), Some(3));
    }
}
