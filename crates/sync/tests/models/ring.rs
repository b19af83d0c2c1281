//! The epoch/credit ring.

use crate::shared::*;
use brigade_sync::{CreditRing, Flag, HALVES, Half, Uses, Wait, Want};

/// What is taken away.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Without {
    Nothing,
    /// Halves alternate.
    SecondHalf,
    /// A half is written again when its reader is done.
    Credit,
    /// The credit is that of the use just before.
    CreditOfTheUseBefore,
    /// Every reader gives a credit.
    CreditOfTheLastPeer,
    /// The first use of a half in a generation waits for none.
    FreshStart,
    /// A flag is posted behind the data.
    DataFirst,
    /// A credit is given behind the reading.
    ReadFirst,
    /// Uses of each half are counted.
    Epochs,
}

/// Who moves the data.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Mode {
    /// Every rank writes into the next one's half.
    Push,
    /// Every rank writes into its own half, where all read.
    Pull,
    /// Rank 0 writes into its own half, where all read.
    Broadcast,
}

fn one_less(w: Wait) -> Wait {
    let flag = w.want.flag();
    let less = Flag::new(flag.generation(), 0, flag.epoch().wrapping_sub(1));
    Wait {
        want: Want::AtLeast(less),
        ..w
    }
}

/// For whom a rank writes, and whose data it reads.
fn lanes(mode: Mode, rank: usize, size: usize) -> (Vec<usize>, Vec<usize>) {
    let all = || peers(rank, size).collect();
    match mode {
        Mode::Push => (vec![(rank + 1) % size], vec![(rank + size - 1) % size]),
        Mode::Pull => (all(), all()),
        Mode::Broadcast if rank == 0 => (all(), vec![]),
        Mode::Broadcast => (vec![], vec![0]),
    }
}

/// Every rank writes and reads a number of times.
pub fn scenario(size: usize, rounds: u32, mode: Mode, without: Without) -> Scenario {
    let program = |rank| {
        let ring = CreditRing {
            rank,
            size,
            pieces: 1,
            base: 0,
        };
        let mut uses = Uses::default();
        let mut program = Program::new();
        for round in 0..rounds {
            let half = match without {
                Without::SecondHalf => Half::of(0),
                _ => uses.next_half(),
            };
            let (epoch, again) = uses.begin(half);
            let flag = match without {
                Without::Epochs => Flag::new(GENERATION, 0xA11, 1),
                _ => Flag::new(GENERATION, 0xA11, epoch),
            };
            let (targets, sources) = lanes(mode, rank, size);
            if (again && without != Without::Credit) || without == Without::FreshStart {
                let left_out = usize::from(without == Without::CreditOfTheLastPeer);
                let most = targets.len().saturating_sub(left_out);
                let credits = targets
                    .iter()
                    .take(most)
                    .map(|&p| ring.credit(half, p, flag));
                program.extend(credits.map(|w| match without {
                    Without::CreditOfTheUseBefore => waits(one_less(w)),
                    _ => waits(w),
                }));
            }
            let place = match mode {
                Mode::Push => cell((rank + 1) % size, half.index()),
                _ => cell(rank, half.index()),
            };
            let filled = targets
                .iter()
                .map(|&to| posts(ring.filled(to, half, rank, 0, flag)));
            let fill = (!targets.is_empty()).then(|| writes(place, value(round, rank)));
            if without == Without::DataFirst {
                program.extend(filled);
                program.extend(fill);
            } else {
                program.extend(fill);
                program.extend(filled);
            }
            let mut look = Program::new();
            for &from in &sources {
                program.push(waits(ring.arrival(half, from, 0, from, flag)));
                let place = match mode {
                    Mode::Push => cell(rank, half.index()),
                    _ => cell(from, half.index()),
                };
                look.push(reads(rank, place, value(round, from)));
            }
            let done = uses.end(half).unwrap();
            let done = Flag::new(GENERATION, 0xA11, done);
            // Credits matter to those who write what this rank reads.
            let release = ring
                .release(half, done)
                .filter(|p| sources.contains(&p.word.owner))
                .map(posts);
            if without == Without::ReadFirst {
                program.extend(release);
                program.extend(look);
            } else {
                program.extend(look);
                program.extend(release);
            }
        }
        program
    };
    Scenario::new(
        CreditRing::words(size, 1),
        HALVES,
        (0..size).map(program).collect(),
    )
}
