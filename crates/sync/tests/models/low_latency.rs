//! The low-latency exchange: a slot's uses are sent and received apart, other slots' between them, and any rank may give one up.

use crate::shared::*;
use brigade_sync::{CreditRing, Flag, HALVES, Half, Uses};

/// What is taken away.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Without {
    Nothing,
    /// A half is written again when its reader is done.
    Credit,
    /// A flag is posted behind the data.
    DataFirst,
    /// A credit is given behind the reading.
    ReadFirst,
    /// Who gives a use up gives its credit too.
    CreditOfGivenUp,
    /// Flags are signed.
    Signature,
}

/// What a rank does with each of its exchanges: an exchange is one of a slot, and is received `later` exchanges on.
#[derive(Clone, Copy)]
pub struct Exchange {
    slot: usize,
    later: usize,
    /// Ranks that give it up, as bits.
    given_up: u32,
}

/// One slot, used over and over.
pub const ONE: [Exchange; 3] = [exchange(0, 0, 0); 3];

/// Rank 0 is ahead: it gives up the first uses, and comes to a half that others may not have read yet.
pub const AHEAD: [Exchange; 3] = [
    exchange(0, 0, 0b01),
    exchange(0, 0, 0b01),
    exchange(0, 0, 0),
];

/// Two slots, of which one is received while the other is on its way.
pub const BOTH: [Exchange; 4] = [
    exchange(0, 1, 0),
    exchange(1, 1, 0b10),
    exchange(0, 1, 0),
    exchange(1, 0, 0),
];

const fn exchange(slot: usize, later: usize, given_up: u32) -> Exchange {
    Exchange {
        slot,
        later,
        given_up,
    }
}

/// The slot of one rank, as it uses it.
struct Slot {
    ring: CreditRing,
    uses: Uses,
    /// The use that was sent last, and whether it was received.
    open: Option<(u32, Half, Flag, bool)>,
}

impl Slot {
    fn place(&self, number: usize, half: Half, owner: usize, from: usize) -> brigade_sync::Word {
        cell(
            owner,
            (number * HALVES + half.index()) * self.ring.size + from,
        )
    }

    /// Lets go of a use.
    fn end(&mut self, half: Half, flag: Flag) -> Program {
        self.uses.end(half);
        self.ring.release(half, flag).map(posts).collect()
    }
}

/// Every rank sends to every other.
pub fn scenario(
    size: usize,
    exchanges: &'static [Exchange],
    calls: bool,
    without: Without,
) -> Scenario {
    let words = CreditRing::words(size, 1);
    let program = |rank: usize| {
        let mut slots = [0, 1].map(|number| Slot {
            ring: CreditRing {
                rank,
                size,
                pieces: 1,
                base: number * words,
            },
            uses: Uses::default(),
            open: None,
        });
        let mut program = Program::new();
        for (n, of) in exchanges.iter().enumerate() {
            let slot = &mut slots[of.slot];
            // What was not received is given up.
            if let Some((_, half, flag, received)) = slot.open.take() {
                let credits = slot.end(half, flag);
                match without {
                    Without::CreditOfGivenUp if !received => {}
                    Without::ReadFirst if received => {}
                    _ => program.extend(credits),
                }
            }
            let half = slot.uses.next_half();
            let (epoch, again) = slot.uses.begin(half);
            // Another call on the last rank.
            let signature = match calls && rank + 1 == size && without != Without::Signature {
                true => 0xB22,
                false => 0xA11,
            };
            let flag = Flag::new(GENERATION, signature, epoch);
            if again && without != Without::Credit {
                let credits = peers(rank, size).map(|p| waits(slot.ring.credit(half, p, flag)));
                program.extend(credits);
            }
            for to in peers(rank, size) {
                let data = writes(slot.place(of.slot, half, to, rank), value(n as u32, rank));
                let filled = posts(slot.ring.filled(to, half, rank, 0, flag));
                match without {
                    Without::DataFirst => program.extend([filled, data]),
                    _ => program.extend([data, filled]),
                }
            }
            slot.open = Some((n as u32, half, flag, false));
            for (m, due) in exchanges.iter().enumerate().take(n + 1) {
                let slot = &mut slots[due.slot];
                let open = slot.open.filter(|open| open.0 == m as u32);
                let Some((sent, half, flag, _)) = open.filter(|_| m + due.later == n) else {
                    continue;
                };
                if due.given_up >> rank & 1 == 1 {
                    continue;
                }
                slot.open = Some((sent, half, flag, true));
                for from in peers(rank, size) {
                    program.push(waits(slot.ring.arrival(half, from, 0, from, flag)));
                }
                let place = |from| slot.place(due.slot, half, rank, from);
                let look: Program = peers(rank, size)
                    .map(|from| reads(rank, place(from), value(sent, from)))
                    .collect();
                if without == Without::ReadFirst {
                    program.extend(slot.ring.release(half, flag).map(posts));
                }
                program.extend(look);
            }
        }
        program
    };
    Scenario::new(
        2 * words,
        2 * HALVES * size,
        (0..size).map(program).collect(),
    )
}
