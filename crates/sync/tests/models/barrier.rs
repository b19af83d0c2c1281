//! The flag barrier.

use crate::shared::*;
use brigade_sync::{Flag, FlagBarrier, Post, Stop, Verdict, Wait, Word};

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
    /// Who gets nothing waits to be told so.
    Nobodies,
}

const SIGNATURE: u32 = 0xA11;

fn word(without: Without, size: usize, w: Word) -> Word {
    let index = match without {
        Without::SecondSet => w.index % size,
        _ => w.index,
    };
    Word { index, ..w }
}

/// Of a call, of which epochs wrap on the way; a strange one is another.
fn flag_of(call: u32, strange: bool, without: Without) -> Flag {
    let signature = match without {
        Without::Signature => 0,
        _ if strange => 0xBAD,
        _ => SIGNATURE,
    };
    Flag::new(GENERATION, signature, u32::MAX.wrapping_add(call))
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
            let flag = flag_of(meeting, stranger && rank + 1 == size, without);
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

/// Calls that end with data of every peer, which is its own flag, and with no meeting: exchanges by pushing, and all-to-alls of GPUs
/// (`kernels/push.cuh`, `kernels/messages.cuh`). Whoever waits for data looks at all arrivals, for peers in another call.
pub fn unmet(size: usize, calls: u32, stranger: bool, without: Without) -> Scenario {
    let behind = FlagBarrier::words(size);
    let data = move |to, from, call: u32| cell(to, behind + call as usize * size + from);
    let program = |rank| {
        let barrier = FlagBarrier {
            rank,
            size,
            base: 0,
        };
        let mut program = Program::new();
        for call in 0..calls {
            let flag = flag_of(call, stranger && rank + 1 == size, without);
            let arrivals = barrier.arrive(flag);
            let tells = arrivals.map(move |p| (word(without, size, p.word), p.flag));
            let sends = peers(rank, size).map(move |to| (data(to, rank, call), flag));
            // Nothing orders them.
            let mut stores: Vec<_> = tells.chain(sends).collect();
            if rank % 2 == 1 {
                stores.reverse();
            }
            program.extend(
                stores
                    .into_iter()
                    .map(|(at, flag)| does(move |shared| shared.store_relaxed(at, flag.bits()))),
            );
            let gets_nothing = rank == 0 && without == Without::Nobodies;
            for from in peers(rank, size).filter(|_| !gets_nothing) {
                program.push(awaits(from, move |shared, budget| {
                    loop {
                        let events = shared.events(rank);
                        let seen = shared.load_relaxed(data(rank, from, call));
                        if seen == flag.bits() {
                            return Ok(Ok(()));
                        }
                        for meet in barrier.meet(flag) {
                            let seen = shared.load(word(without, size, meet.word));
                            if meet.want.verdict(seen) == Verdict::Mismatch {
                                return Ok(Err(Stop::Mismatch { seen }));
                            }
                        }
                        if shared.stopped() {
                            return Ok(Err(Stop::Interrupted));
                        }
                        if budget.spent() {
                            return Ok(Err(Stop::Timeout { seen }));
                        }
                        shared.rest(rank, events, budget.until());
                    }
                }));
            }
            // A kernel ends.
            program.push(does(|shared| shared.fence()));
        }
        program
    };
    let words = behind + calls as usize * size;
    Scenario::new(words, 0, (0..size).map(program).collect())
}
