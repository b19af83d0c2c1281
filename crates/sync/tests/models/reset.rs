//! A new generation.

use crate::shared::*;
use brigade_sync::{CreditRing, Flag, Half, Post, ResetGate, Uses};

/// What is taken away.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Without {
    Nothing,
    /// A rank waits for all others before it begins.
    Gate,
    /// A rank waits for the one that it writes to.
    Target,
    /// A rank says that it has let go when it has.
    LetGoFirst,
    /// Flags carry their generation.
    Generation,
    /// The gate counts resets.
    Count,
    /// A rank wipes its flags.
    Wipe,
    /// All have let go before a rank wipes its flags.
    GateBeforeWipe,
    /// All have wiped their flags before a rank begins.
    GateAfterWipe,
}

fn machines(rank: usize, size: usize) -> (CreditRing, ResetGate) {
    let (pieces, words) = (1, CreditRing::words(size, 1));
    let ring = CreditRing {
        rank,
        size,
        pieces,
        base: 0,
    };
    let gate = ResetGate {
        rank,
        size,
        base: words,
    };
    (ring, gate)
}

fn of_all(size: usize, program: impl Fn(usize) -> Program) -> Scenario {
    let words = CreditRing::words(size, 1) + ResetGate::words(size);
    Scenario::new(words, 1, (0..size).map(program).collect())
}

/// Every rank writes to the next one once in each generation; counts begin anew each time.
pub fn scenario(size: usize, generations: u8, without: Without) -> Scenario {
    let program = |rank| {
        let (ring, gate) = machines(rank, size);
        let (next, prev) = ((rank + 1) % size, (rank + size - 1) % size);
        let half = Half::of(0);
        let mut program = Program::new();
        for generation in 0..generations {
            let signed = match without {
                Without::Generation => 1,
                _ => 1 + generation,
            };
            let n = u32::from(generation);
            let (epoch, again) = Uses::default().begin(half);
            assert!(!again, "no credit is awaited in a new generation");
            let flag = Flag::new(signed, 0xA11, epoch);
            program.push(writes(cell(next, 0), value(n, rank)));
            program.push(posts(ring.filled(next, half, rank, 0, flag)));
            program.push(waits(ring.arrival(half, prev, 0, prev, flag)));
            let look = reads(rank, cell(rank, 0), value(n, prev));
            let count = match without {
                Without::Count => 1,
                _ => n + 1,
            };
            let arrive = gate.arrive(count).map(posts);
            if without == Without::LetGoFirst {
                program.extend(arrive);
                program.push(look);
            } else {
                program.push(look);
                program.extend(arrive);
            }
            let left_out = |peer| match without {
                Without::Gate => true,
                Without::Target => peer == next,
                _ => false,
            };
            let meet = gate.meet(count).filter(|w| !left_out(w.peer));
            program.extend(meet.map(waits));
        }
        program
    };
    of_all(size, program)
}

/// Arriving at the gate, and waiting for all unless that is left out.
fn passes(gate: ResetGate, count: u32, skip: bool) -> impl Iterator<Item = Step> {
    let waited_for = gate.meet(count).filter(move |_| !skip);
    gate.arrive(count).map(posts).chain(waited_for.map(waits))
}

/// Calls that are given up, with flags still on their way, and a last one that goes well. Generations have come round and
/// are the same again: old flags are told from new ones by being wiped, between two gates.
pub fn wiping(size: usize, resets: u32, without: Without) -> Scenario {
    let program = |rank| {
        let (ring, gate) = machines(rank, size);
        let (next, prev) = ((rank + 1) % size, (rank + size - 1) % size);
        let half = Half::of(0);
        let flag = Flag::new(1, 0xA11, 1);
        let arrival = ring.arrival(half, prev, 0, prev, flag);
        let mut program = Program::new();
        for n in 0..=resets {
            program.push(writes(cell(next, 0), value(n, rank)));
            program.push(posts(ring.filled(next, half, rank, 0, flag)));
            if n == resets {
                program.push(waits(arrival));
                program.push(reads(rank, cell(rank, 0), value(n, prev)));
                continue;
            }
            let skip = without == Without::GateBeforeWipe;
            program.extend(passes(gate, 2 * n + 1, skip));
            if without != Without::Wipe {
                program.push(posts(Post {
                    word: arrival.word,
                    flag: Flag::from_bits(0),
                }));
            }
            let skip = without == Without::GateAfterWipe;
            program.extend(passes(gate, 2 * n + 2, skip));
        }
        program
    };
    of_all(size, program)
}
