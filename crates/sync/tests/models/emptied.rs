//! Halves of calls in turn whose rows tell of themselves: memory is empty before they come, and whoever takes them empties it. What is given up
//! is emptied by the next send of that half, once all peers have begun theirs, which come behind what they wrote.

use crate::shared::*;
use brigade_sync::{Flag, HALVES, Post, Stop, Wait, Want, Word, post};

/// What is taken away.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Without {
    Nothing,
    /// What is taken is emptied.
    Emptied,
    /// What is given up is emptied.
    GivenUp,
    /// That waits until peers have begun the next use.
    Begun,
    /// A use has begun before anybody is waited for.
    BegunFirst,
    /// Credits are for halves that are empty.
    Empty,
}

const RANKS: usize = 2;
/// Of each half: what came, two words of it; the use that a peer has begun; and its credit. Behind them, whether the last use filled the half, and how
/// many uses it had.
const DATA: usize = 0;
const BEGUN: usize = DATA + 2 * HALVES;
const CREDIT: usize = BEGUN + HALVES;
const FULL: usize = CREDIT + HALVES;
const USED: usize = FULL + HALVES;
const WORDS: usize = USED + HALVES;

fn word(owner: usize, index: usize, half: usize) -> Word {
    cell(owner, index + half)
}

fn came(owner: usize, half: usize, n: usize) -> Word {
    cell(owner, DATA + 2 * half + n)
}

fn flag(count: u64) -> Flag {
    Flag::new(GENERATION, 0xE0, count as u32)
}

fn empty(shared: &dyn Shared, rank: usize, half: usize) {
    for n in 0..2 {
        shared.store_relaxed(came(rank, half, n), 0);
    }
    shared.store(word(rank, FULL, half), 0);
}

fn gives_credit(shared: &dyn Shared, rank: usize, half: usize) {
    let used = shared.load(word(rank, USED, half));
    if used > 0 {
        let word = word(1 - rank, CREDIT, half);
        post(
            shared,
            Post {
                word,
                flag: flag(used),
            },
        );
    }
}

fn until(rank: usize, at: Word, count: u64) -> Step {
    let want = Want::AtLeast(flag(count));
    waits(Wait {
        word: at,
        want,
        peer: 1 - rank,
    })
}

/// Use `n` of the slot, of those that take these halves.
fn send(rank: usize, n: usize, halves: &[usize], taken: &[bool], without: Without) -> Program {
    let (peer, half) = (1 - rank, halves[n]);
    let count = halves[..=n].iter().filter(|&&h| h == half).count() as u64;
    // Whether the half's last use was given up, as launches find by what the last receive left.
    let last = (0..n).rev().find(|&m| halves[m] == half);
    let given_up = last.is_some_and(|m| !taken[m]);
    let begins = posts(Post {
        word: word(peer, BEGUN, half),
        flag: flag(count),
    });
    let credits = does(move |shared| {
        for half in 0..HALVES {
            if shared.load(word(rank, FULL, half)) == 0 || without == Without::Empty {
                gives_credit(shared, rank, half);
            }
        }
    });
    let mut drain = Program::new();
    if given_up && without != Without::GivenUp {
        if without != Without::Begun {
            drain.push(until(rank, word(rank, BEGUN, half), count));
        }
        drain.push(does(move |shared| {
            empty(shared, rank, half);
            gives_credit(shared, rank, half);
        }));
    } else if given_up {
        drain.push(does(move |shared| gives_credit(shared, rank, half)));
    }
    let mut program = Program::new();
    if without == Without::BegunFirst {
        program.push(credits);
        program.extend(drain);
        program.push(begins);
    } else {
        program.extend([begins, credits]);
        program.extend(drain);
    }
    if count > 1 {
        program.push(until(rank, word(rank, CREDIT, half), count - 1));
    }
    program.push(does(move |shared| {
        shared.store(word(rank, FULL, half), 1);
        shared.store(word(rank, USED, half), count);
    }));
    for i in 0..2 {
        program.push(does(move |shared| {
            shared.store_relaxed(came(peer, half, i), value(n as u32, rank));
        }));
    }
    program
}

fn receive(rank: usize, n: usize, half: usize, without: Without) -> Program {
    let (peer, mut program) = (1 - rank, Program::new());
    for i in 0..2 {
        program.push(awaits(peer, move |shared, budget| {
            let at = came(rank, half, i);
            loop {
                let events = shared.events(rank);
                let got = shared.load_relaxed(at);
                let want = value(n as u32, peer);
                match got {
                    0 if budget.spent() => return Ok(Err(Stop::Timeout { seen: got })),
                    0 => shared.rest(rank, events, budget.until()),
                    _ if got == want => return Ok(Ok(())),
                    _ => return Err(wrong(rank, got, want)),
                }
            }
        }));
        if without != Without::Emptied {
            program.push(does(move |shared| {
                shared.store_relaxed(came(rank, half, i), 0)
            }));
        }
    }
    program.push(does(move |shared| shared.store(word(rank, FULL, half), 0)));
    program
}

/// Which half each use takes, as calls are issued, and as a graph of one exchange is launched.
pub const BY_TURNS: &[usize] = &[0, 1, 0];
pub const REPLAYED: &[usize] = &[0, 0, 0];

/// Uses of these halves, of which each rank takes those with a bit.
pub fn scenario(halves: &'static [usize], taken: [u32; RANKS], without: Without) -> Scenario {
    let program = |rank: usize| {
        let taken: Vec<bool> = (0..halves.len())
            .map(|n| taken[rank] >> n & 1 == 1)
            .collect();
        let one = |n: usize| {
            let mut program = send(rank, n, halves, &taken, without);
            if taken[n] {
                program.extend(receive(rank, n, halves[n], without));
            }
            program
        };
        (0..halves.len()).flat_map(one).collect()
    };
    Scenario::new(WORDS, 0, (0..RANKS).map(program).collect())
}

/// Whatever ranks give up.
pub fn all(halves: &'static [usize]) -> Vec<Scenario> {
    let taken = 0..1u32 << halves.len();
    taken
        .clone()
        .flat_map(|a| taken.clone().map(move |b| [a, b]))
        .map(|taken| scenario(halves, taken, Without::Nothing))
        .collect()
}
