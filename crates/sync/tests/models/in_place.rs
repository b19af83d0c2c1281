//! Rows that stay where they come: in a half, under its credits. Each block that has stored its part says so in a word of a buffer that the receiver
//! empties: how many blocks its launch has, which is not the same for each.

use crate::{message_launch::until, shared::*, table::*};
use brigade_sync::{BUFFERS, CreditRing, Flag, HALVES, Uses, Word};

/// What is taken away.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Without {
    Nothing,
    /// Rows are stored once the half's last use is over.
    Credit,
    /// Rows go first, then the word.
    RowsFirst,
    /// A fence stands between them.
    Fence,
    /// The receiver waits for all blocks.
    AllBlocks,
    /// Words that were seen are emptied.
    Clear,
    /// There are three buffers of words.
    ThirdBuffer,
}

/// Most blocks of a launch. Each is a rank of the model, behind the receiver.
const BLOCKS: usize = 2;

/// Those of a use.
const fn blocks(n: u32) -> usize {
    1 + n as usize % BLOCKS
}

/// The receiver, and a sender's blocks, in so many uses.
pub fn scenario(uses: u32, without: Without) -> Scenario {
    let size = 1 + BLOCKS;
    let words = CreditRing::words(size, 1);
    let buffers = if without == Without::ThirdBuffer {
        BUFFERS - 1
    } else {
        BUFFERS
    };
    let told = move |n: u32, block: usize| Word {
        owner: 0,
        index: words + n as usize % buffers * BLOCKS + block,
    };
    let ring = |rank| CreditRing {
        rank,
        size,
        pieces: 1,
        base: 0,
    };
    let flag = |epoch| Flag::new(GENERATION, 0xA11, epoch);

    let receiver =
        || {
            let mut program = Program::new();
            let (mut counts, mut open) = (Uses::default(), None);
            for n in 0..uses {
                // Rows of the use before are not read any more.
                if let Some((half, done)) = open.take() {
                    program.extend(ring(0).release(half, flag(done)).map(posts));
                }
                let half = counts.next_half();
                counts.begin(half);
                if n > 0 && without != Without::Clear {
                    program.extend((0..BLOCKS).map(|block| {
                        does(move |shared| shared.store_relaxed(told(n - 1, block), 0))
                    }));
                }
                program.push(awaits(1, move |shared, budget| {
                    let mut all = 0;
                    let first = until(shared, budget, || {
                        all = shared.load_relaxed(told(n, 0));
                        all != 0
                    });
                    if without == Without::AllBlocks {
                        return Ok(first);
                    }
                    let rest = (1..all as usize).try_for_each(|block| {
                        until(shared, budget, || shared.load_relaxed(told(n, block)) != 0)
                    });
                    Ok(first.and(rest))
                }));
                program.extend((0..blocks(n)).map(|block| {
                    let at = cell(0, half.index() * BLOCKS + block);
                    reads(0, at, value(n, 1 + block))
                }));
                // A kernel ends.
                program.push(does(|shared| shared.fence()));
                open = counts.end(half).map(|done| (half, done));
            }
            program
        };
    let sender = |block: usize| {
        let mut program = Program::new();
        let mut counts = Uses::default();
        for n in 0..uses {
            let half = counts.next_half();
            let (epoch, again) = counts.begin(half);
            counts.end(half);
            if block >= blocks(n) {
                continue;
            }
            if again && without != Without::Credit {
                program.push(waits(ring(1 + block).credit(half, 0, flag(epoch))));
            }
            let at = cell(0, half.index() * BLOCKS + block);
            let row = writes(at, value(n, 1 + block));
            let word = does(move |shared| {
                if without != Without::Fence {
                    shared.fence();
                }
                shared.store_relaxed(told(n, block), blocks(n) as u64);
            });
            match without {
                Without::RowsFirst => program.extend([word, row]),
                _ => program.extend([row, word]),
            }
        }
        program
    };
    let senders = (0..BLOCKS).map(sender);
    Scenario::new(
        words + BUFFERS * BLOCKS,
        HALVES * BLOCKS,
        [receiver()].into_iter().chain(senders).collect(),
    )
}

/// With one guard taken away each.
pub fn guards() -> Vec<Row> {
    use Without::*;
    let by = |without| states(move || scenario(5, without));
    let row = |what, mutation, by| Row::without("in place", what, mutation, by);
    vec![
        row("rows are stored with credit", "no credit", by(Credit)),
        row(
            "rows, then the word that tells of them",
            "the word, then rows",
            by(RowsFirst),
        ),
        row(
            "a fence stands between rows and their word",
            "none",
            states(|| scenario(3, Fence).weak(true)),
        ),
        row(
            "all blocks have told of theirs",
            "the first one has",
            by(AllBlocks),
        ),
        row(
            "words that were seen are emptied",
            "they are not",
            by(Clear),
        ),
        row("there are three buffers of words", "two", by(ThirdBuffer)),
    ]
}
