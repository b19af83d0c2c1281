//! What the blocks of a launch of messages tell each other (`kernels/messages.cuh`): how many pieces went before, and that the group was stopped.
//! Each block is a thread of control of its own, and all of them share the memory of the first.

use crate::shared::*;
use brigade_sync::{Budget, Flag, Post, Stop, Wait, Want, Word, post};

/// What is taken away.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Without {
    Nothing,
    /// Launches take two counts in turn.
    Turns,
    /// Whose turn it is changes when all blocks have read it.
    Shares,
    /// A call of all ranks is counted when all blocks have read which one it is.
    LastCounts,
    /// Who is stopped waits until nobody writes any more.
    Patience,
    /// The stop is looked for with each piece.
    EachPiece,
    /// Each block that is stopped poisons all of a message.
    PoisonsAll,
    /// It tells its host.
    Tells,
}

/// Words of all blocks.
const OUT: usize = 0;
const OVER: usize = 1;
const USES: usize = 2;
const COUNTS: usize = 3;
const STOP: usize = 2;
const TOLD: usize = 3;
const WRITES: usize = 4;
const SLOTS: usize = WRITES + BLOCKS;

const BLOCKS: usize = 2;
/// Pieces of the message that is stopped.
const PIECES: usize = 2;

const fn word(index: usize) -> Word {
    Word { owner: 0, index }
}

/// What the blocks of a launch add to the number of uses between them.
const USE: u64 = 1 << 8;

/// Adds to a word, and gives what was there.
pub fn add(shared: &dyn Shared, at: Word, more: u64) -> u64 {
    loop {
        let before = shared.load(at);
        let after = before.wrapping_add(more);
        if shared.compare_exchange(at, before, after).is_ok() {
            return before;
        }
    }
}

/// A block of a launch waits until the launch before has ended.
pub fn begins(over: Word, launch: usize) -> Option<Step> {
    let begun = Wait {
        word: over,
        want: Want::AtLeast(Flag::new(GENERATION, 0, launch as u32)),
        peer: over.owner,
    };
    (launch > 0).then(|| waits(begun))
}

/// One of so many blocks ends, and with the last one its launch.
pub fn leaves(shared: &dyn Shared, (out, over): (Word, Word), launch: usize, blocks: usize) {
    if add(shared, out, 1) + 1 == blocks as u64 {
        shared.store(out, 0);
        let flag = Flag::new(GENERATION, 0, launch as u32 + 1);
        post(shared, Post { word: over, flag });
    }
}

/// Launches of so many blocks, which find out how many pieces went before.
pub fn counts(blocks: usize, launches: usize, without: Without) -> Scenario {
    let share = USE >> (usize::BITS - blocks.leading_zeros());
    let program = |block: usize| {
        let mut program = Program::new();
        for launch in 0..launches {
            program.extend(begins(word(OVER), launch));
            program.push(acts(move |shared| {
                let [even, odd] = [0, 1].map(|turn| shared.load_relaxed(word(COUNTS + turn)));
                let launched = shared.load_relaxed(word(USES)) / USE;
                let turn = match without {
                    Without::Turns => 0,
                    _ => launched % 2,
                };
                let before = if turn == 0 { even } else { odd };
                if before != launch as u64 {
                    return Err(wrong(0, value(before as u32, 0), value(launch as u32, 0)));
                }
                let rest = USE - share * (blocks as u64 - 1);
                let added = match (block, without) {
                    (0, Without::Shares) => USE,
                    (_, Without::Shares) => 0,
                    (0, _) => rest,
                    _ => share,
                };
                add(shared, word(USES), added);
                if block == 0 {
                    let next = match without {
                        Without::Turns => 0,
                        _ => (launched + 1) % 2,
                    };
                    shared.store_relaxed(word(COUNTS + next as usize), before + 1);
                }
                leaves(shared, (word(OUT), word(OVER)), launch, blocks);
                Ok(())
            }));
        }
        program
    };
    Scenario::new(COUNTS + 2, 0, (0..blocks).map(program).collect())
}

/// Launches of so many blocks, each a call of all ranks, which find out which call it is.
pub fn calls(blocks: usize, launches: usize, without: Without) -> Scenario {
    let program = |block: usize| {
        let mut program = Program::new();
        for launch in 0..launches {
            program.extend(begins(word(OVER), launch));
            program.push(acts(move |shared| {
                let call = shared.load_relaxed(word(COUNTS));
                if call != launch as u64 {
                    return Err(wrong(0, value(call as u32, 0), value(launch as u32, 0)));
                }
                let last = add(shared, word(USES), 1) + 1 == blocks as u64;
                if last {
                    shared.store_relaxed(word(USES), 0);
                }
                let counts = match without {
                    Without::LastCounts => block == 0,
                    _ => last,
                };
                if counts {
                    shared.store_relaxed(word(COUNTS), call + 1);
                }
                leaves(shared, (word(OUT), word(OVER)), launch, blocks);
                Ok(())
            }));
        }
        program
    };
    Scenario::new(COUNTS + 1, 0, (0..blocks).map(program).collect())
}

const COME: u64 = 1;
const POISON: u64 = 2;

const fn share(piece: usize, block: usize) -> usize {
    piece * BLOCKS + block
}

/// Looks until `done`: at what changes in the memory of rank 0.
pub fn until(
    shared: &dyn Shared,
    budget: &mut dyn Budget,
    mut done: impl FnMut() -> bool,
) -> Result<(), Stop> {
    loop {
        let events = shared.events(0);
        if done() {
            return Ok(());
        }
        if budget.spent() {
            return Err(Stop::Timeout { seen: 0 });
        }
        shared.rest(0, events, budget.until());
    }
}

/// Takes a block's share of each piece. Whether it was not stopped.
fn takes(
    shared: &dyn Shared,
    budget: &mut dyn Budget,
    block: usize,
    without: Without,
) -> Result<bool, Stop> {
    let writes = word(WRITES + block);
    for piece in 0..PIECES {
        shared.store(writes, 1);
        let mut stopped = false;
        until(shared, budget, || {
            let come = shared.load_relaxed(word(SLOTS + share(piece, block)));
            let looks = piece == 0 || without != Without::EachPiece;
            stopped = looks && shared.load(word(STOP)) != 0;
            stopped || come != 0
        })?;
        if !stopped {
            shared.write(word(share(piece, block)), COME);
        }
        shared.store(writes, 0);
        if stopped {
            return Ok(false);
        }
    }
    Ok(true)
}

/// A message that comes while the group is being stopped: who is not told so has all of it, others all of it or poison.
pub fn stopped(without: Without) -> Scenario {
    let receives = |block: usize| {
        awaits(BLOCKS, move |shared, budget| {
            match takes(shared, budget, block, without) {
                Ok(true) => {}
                Ok(false) => {
                    if without != Without::Tells {
                        shared.store(word(TOLD), 1);
                    }
                    let other = word(WRITES + 1 - block);
                    let end = until(shared, budget, || {
                        without == Without::Patience || shared.load(other) == 0
                    });
                    if end.is_err() {
                        return Ok(end);
                    }
                    let own = |&i: &usize| i % BLOCKS == block || without != Without::PoisonsAll;
                    for i in (0..PIECES * BLOCKS).filter(own) {
                        shared.write(word(i), POISON);
                    }
                }
                Err(stop) => return Ok(Err(stop)),
            }
            leaves(shared, (word(OUT), word(OVER)), 0, BLOCKS);
            Ok(Ok(()))
        })
    };
    let sends = does(|shared| {
        for i in 0..PIECES * BLOCKS {
            shared.store_relaxed(word(SLOTS + i), COME);
        }
    });
    let mut stops = vec![does(|shared| shared.store(word(STOP), 1))];
    stops.extend(begins(word(OVER), 1));
    stops.push(acts(|shared| {
        let told = shared.load(word(TOLD)) != 0;
        let found: Vec<_> = (0..PIECES * BLOCKS).map(|i| shared.read(word(i))).collect();
        let all = |what| found.iter().all(|&f| f == what);
        let wrong = |what: &str| Err(Fault::Wrong(what.into()));
        match told {
            false if !all(COME) => wrong("poison is taken for a message"),
            true if !all(COME) && !all(POISON) => wrong("a part of a message is poison"),
            _ => Ok(()),
        }
    }));
    let programs = vec![vec![receives(0)], vec![receives(1)], vec![sends], stops];
    Scenario::new(SLOTS + PIECES * BLOCKS, PIECES * BLOCKS, programs)
}

/// Two blocks that have taken their shares, of which the last gives the credit, and who waits for it to fill the slot again.
pub fn handing_back() -> Scenario {
    let credit = Post {
        word: word(OVER),
        flag: Flag::new(GENERATION, 0, 1),
    };
    let takes = |block: usize| {
        does(move |shared| {
            shared.read(word(block));
            if add(shared, word(OUT), 1) + 1 == BLOCKS as u64 {
                post(shared, credit);
            }
        })
    };
    let fills = (0..BLOCKS).map(|block| writes(word(block), value(0, BLOCKS)));
    let sends = begins(credit.word, 1).into_iter().chain(fills).collect();
    let programs = vec![vec![takes(0)], vec![takes(1)], sends];
    Scenario::new(OVER + 1, BLOCKS, programs)
}
