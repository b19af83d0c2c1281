//! The FIFO channel.

use crate::shared::*;
use brigade_sync::{Fifo, Flag, Post, Wait, Want, Word};

/// What is taken away.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Without {
    Nothing,
    /// The sender waits for room.
    Room,
    /// There is room when `depth` items are not taken yet, and no more.
    ExactDepth,
    /// An item is put behind its data.
    DataFirst,
    /// An item is taken behind the reading.
    ReadFirst,
    /// The sender counts on over calls.
    Persistence,
    /// Counts are compared by signed difference.
    WrapSafety,
}

/// The model's queues have no lines, so that its memory is small.
fn squeezed(w: Word) -> Word {
    Word {
        index: w.index / Fifo::LINE_WORDS,
        ..w
    }
}

fn shifted(want: Want, by: u32) -> Want {
    let flag = want.flag();
    Want::AtLeast(Flag::new(
        flag.generation(),
        0,
        flag.epoch().wrapping_sub(by),
    ))
}

/// Waits for a count that is not smaller, as plain numbers.
fn waits_plainly(w: Wait) -> Step {
    awaits(w.peer, move |shared, budget| {
        loop {
            let events = shared.events(w.word.owner);
            let seen = Flag::from_bits(shared.load(w.word));
            let want = w.want.flag();
            if seen.generation() == want.generation() && seen.epoch() >= want.epoch() {
                return Ok(Ok(()));
            }
            if budget.spent() {
                return Ok(Err(brigade_sync::Stop::Timeout { seen: seen.bits() }));
            }
            shared.rest(w.word.owner, events, None);
        }
    })
}

/// A chain of ranks: each hands on to the next what it gets from the one before, in calls of a few items.
pub fn scenario(size: usize, depth: u32, calls: u32, items: u32, without: Without) -> Scenario {
    // Counts that wrap on the way.
    let start = u32::MAX - 1;
    let channel = |from: usize| Fifo {
        from,
        to: from + 1,
        size,
        depth,
        base: 0,
    };
    let waits = |w: Wait| {
        let w = Wait {
            word: squeezed(w.word),
            ..w
        };
        match without {
            Without::WrapSafety => waits_plainly(w),
            _ => waits(w),
        }
    };
    let posts = |p: Post| {
        posts(Post {
            word: squeezed(p.word),
            ..p
        })
    };
    let program = |rank: usize| {
        let mut program = Program::new();
        let fresh = || channel(rank).sender_from(GENERATION, start);
        let mut sender = (rank + 1 < size).then(fresh);
        let mut receiver = (rank > 0).then(|| channel(rank - 1).receiver_from(GENERATION, start));
        for n in 0..calls * items {
            let signature = n / items;
            if let Some(receiver) = &mut receiver {
                program.push(waits(receiver.arrival()));
                let look = reads(rank, cell(rank, receiver.entry()), value(n, 0));
                let taken = posts(receiver.taken(signature));
                if without == Without::ReadFirst {
                    program.extend([taken, look]);
                } else {
                    program.extend([look, taken]);
                }
            }
            if let Some(sender) = &mut sender {
                if without == Without::Persistence && n % items == 0 {
                    *sender = fresh();
                }
                if let Some(room) = sender.room().filter(|_| without != Without::Room) {
                    let by = u32::from(without == Without::ExactDepth);
                    program.push(waits(Wait {
                        want: shifted(room.want, by),
                        ..room
                    }));
                }
                let fill = writes(cell(rank + 1, sender.entry()), value(n, 0));
                let put = posts(sender.put(signature));
                if without == Without::DataFirst {
                    program.extend([put, fill]);
                } else {
                    program.extend([fill, put]);
                }
            }
        }
        program
    };
    Scenario::new(2 * size, depth as usize, (0..size).map(program).collect())
}
