//! The flag barrier.

use crate::shared::*;
use brigade_sync::{Flag, FlagBarrier, Post, Wait, Word};

/// What is taken away.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Without {
    Nothing,
    /// All meetings use the same flags.
    SecondSet,
    /// The last peer is not waited for.
    LastPeer,
    /// A rank says that it is there, then writes.
    DataFirst,
    /// Flags are not signed.
    Signature,
}

const SIGNATURE: u32 = 0xA11;

fn word(without: Without, size: usize, w: Word) -> Word {
    let index = match without {
        Without::SecondSet => w.index % size,
        _ => w.index,
    };
    Word { index, ..w }
}

/// Every rank writes its cell, meets all, reads all cells, and meets all again before it writes anew.
pub fn scenario(size: usize, meetings: u32, stranger: bool, without: Without) -> Scenario {
    let program = |rank| {
        let barrier = FlagBarrier {
            rank,
            size,
            base: 0,
        };
        let mut program = Program::new();
        for meeting in 0..meetings {
            let signature = match without {
                Without::Signature => 0,
                _ if stranger && rank + 1 == size => 0xBAD,
                _ => SIGNATURE,
            };
            // Epochs that wrap on the way.
            let flag = Flag::new(GENERATION, signature, u32::MAX.wrapping_add(meeting));
            let round = meeting / 2;
            let arrive = || {
                barrier.arrive(flag).map(|p| {
                    posts(Post {
                        word: word(without, size, p.word),
                        ..p
                    })
                })
            };
            let fill = (meeting % 2 == 0).then(|| writes(cell(rank, 0), value(round, rank)));
            if without == Without::DataFirst {
                program.extend(arrive());
                program.extend(fill);
            } else {
                program.extend(fill);
                program.extend(arrive());
            }
            let most = size - 1 - usize::from(without == Without::LastPeer);
            program.extend(barrier.meet(flag).take(most).map(|w| {
                waits(Wait {
                    word: word(without, size, w.word),
                    ..w
                })
            }));
            if meeting % 2 == 0 {
                let look = |p| reads(rank, cell(p, 0), value(round, p));
                program.extend(peers(rank, size).map(look));
            }
        }
        program
    };
    Scenario::new(
        FlagBarrier::words(size),
        1,
        (0..size).map(program).collect(),
    )
}
