//! Halves of calls in turn as GPUs make them: launches of several blocks, of which each waits by itself, tells of what it has written, and the last
//! one out counts. A receive is a launch that begins beside its send, once all of that one's blocks wait for nobody. A block is a thread of
//! control of its own here, and so is what receives; those of a rank share the memory of the first.

use crate::shared::*;
use brigade_sync::{CreditRing, Flag, HALVES, Half, Post, Wait, Want, Word, post, wait};

/// What is taken away.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Without {
    Nothing,
    /// Credits are given before anybody waits for some.
    CreditsFirst,
    /// Flags are posted once there are credits.
    FlagsLater,
    /// The counter is advanced by the last block out.
    LastCounts,
    /// Where one flag tells of what all blocks wrote, the last one out posts it.
    LastPosts,
    /// Every block of a send waits for credits.
    EveryBlockWaits,
    /// All that a receive takes was told of.
    EveryRowLooks,
    /// What a block writes is told of behind it.
    WritesFirst,
    /// A receive learns from its send which use it is of.
    Begun,
    /// That is said before the receive may begin.
    BegunFirst,
    /// A receive counts out when its send has ended.
    SendFirst,
    /// Where a block found the group stopped, the last one out poisons what all gave, that one among them.
    LastPoisons,
}

const BLOCKS: usize = 2;
const RANKS: usize = 2;
/// Those of a send, and one that receives.
const THREADS: usize = BLOCKS + 1;
/// Words behind those of the ring: one that tells of what each block wrote to a half, a counter for each half, whether its last use was let go of yet,
/// which one has begun, how many sends each block has waited for, blocks that are out, launches that are over, whether to stop.
const TOLD: usize = CreditRing::words(RANKS, 1);
const COUNTERS: usize = TOLD + HALVES * BLOCKS;
const OPEN: usize = COUNTERS + HALVES;
const BEGUN: usize = OPEN + HALVES;
const WAITED: usize = BEGUN + HALVES;
const OUT: usize = WAITED + BLOCKS;
const OVER: usize = OUT + 1;
const STOP: usize = OVER + 1;
const WORDS: usize = STOP + 1;

fn flag(epoch: u64) -> Flag {
    Flag::new(GENERATION, 0xA11, epoch as u32)
}

/// A word of the memory that blocks of a rank share.
fn own(rank: usize, index: usize) -> Word {
    let owner = rank * THREADS;
    Word { owner, index }
}

fn of_rank(word: Word) -> Word {
    own(word.owner, word.index)
}

/// Waits until so many launches have ended.
fn ended(rank: usize, launches: usize) -> Program {
    let over = Wait {
        word: own(rank, OVER),
        want: Want::AtLeast(flag(launches as u64)),
        peer: rank * THREADS,
    };
    (0..launches.min(1)).map(|_| waits(over)).collect()
}

/// Counts one of so many blocks out: whether it is the first, and whether the last.
fn count_out(shared: &dyn Shared, rank: usize, blocks: usize) -> (bool, bool) {
    let out = own(rank, OUT);
    loop {
        let before = shared.load(out);
        if shared.compare_exchange(out, before, before + 1).is_ok() {
            return (before == 0, before as usize + 1 == blocks);
        }
    }
}

/// The launch is over.
fn ends(shared: &dyn Shared, rank: usize, launch: usize) {
    shared.store(own(rank, OUT), 0);
    let word = own(rank, OVER);
    let flag = flag(launch as u64 + 1);
    post(shared, Post { word, flag });
}

/// A block of a send waits for nobody any more.
fn lets_begin(rank: usize, block: usize, n: usize) -> Step {
    posts(Post {
        word: own(rank, WAITED + block),
        flag: flag(n as u64 + 1),
    })
}

/// Waits until none of the send's blocks does.
fn may_begin(rank: usize, n: usize) -> Step {
    awaits(rank * THREADS, move |shared, budget| {
        for block in 0..BLOCKS {
            let waited = Wait {
                word: own(rank, WAITED + block),
                want: Want::AtLeast(flag(n as u64 + 1)),
                peer: rank * THREADS,
            };
            if let Err(stop) = wait(shared, waited, budget, || shared.stopped()) {
                return Ok(Err(stop));
            }
        }
        Ok(Ok(()))
    })
}

/// What a block of `rank` does in a use of its slot; the one behind those of a send receives.
struct Block {
    rank: usize,
    block: usize,
    ring: CreditRing,
    uses: Uses,
    without: Without,
}

/// Which half each use takes, and how many of the first ones the first rank gives up.
#[derive(Clone, Copy)]
pub struct Uses {
    halves: &'static [u32],
    ahead: usize,
}

/// As calls are issued.
pub const BY_TURNS: Uses = Uses {
    halves: &[0, 1, 0],
    ahead: 0,
};

/// A graph of one exchange, launched again and again, takes the half of its capture.
pub const REPLAYED: Uses = Uses {
    halves: &[0, 0],
    ahead: 0,
};

/// The first rank is ahead: it comes to a half that the other may not have read yet.
pub const AHEAD: Uses = Uses {
    halves: &[0, 1, 0],
    ahead: 2,
};

/// The same where one half is used over and over, which is soon gone through.
pub const REPLAYED_AHEAD: Uses = Uses {
    halves: &[0, 0],
    ahead: 1,
};

/// A single use.
pub const ONCE: Uses = Uses {
    halves: &[0],
    ahead: 0,
};

impl Uses {
    fn half(self, n: usize) -> Half {
        Half::of(self.halves[n])
    }

    /// Which one of its half's uses it is.
    fn count(self, n: usize) -> u64 {
        let same = |&&half: &&u32| half == self.halves[n];
        self.halves[..=n].iter().filter(same).count() as u64
    }
}

fn ring(rank: usize) -> CreditRing {
    CreditRing {
        rank,
        size: RANKS,
        pieces: 1,
        base: 0,
    }
}

impl Block {
    fn peer(&self) -> usize {
        1 - self.rank
    }

    fn counter(&self, half: Half) -> Word {
        own(self.rank, COUNTERS + half.index())
    }

    fn begun(&self, half: Half) -> Word {
        own(self.rank, BEGUN + half.index())
    }

    fn place(owner: usize, half: Half, block: usize) -> Word {
        own(owner, half.index() * BLOCKS + block)
    }

    /// The word that tells of what lies there.
    fn told(owner: usize, half: Half, block: usize) -> Word {
        own(owner, TOLD + half.index() * BLOCKS + block)
    }

    fn of(from: usize, block: usize) -> usize {
        from * BLOCKS + block
    }

    fn send(&self, n: usize) -> Program {
        let (rank, block, peer, ring, without) =
            (self.rank, self.block, self.peer(), self.ring, self.without);
        let (half, launch, count) = (self.uses.half(n), 2 * n, self.uses.count(n));
        let (counter, begun) = (self.counter(half), self.begun(half));
        let mut program = ended(rank, launch);
        // What launches before took, or gave up, and nobody has let go of.
        let credits = does(move |shared| {
            for half in (0..HALVES as u32).map(Half::of) {
                if shared.load(own(rank, OPEN + half.index())) == 0 {
                    continue;
                }
                let used = flag(shared.load(own(rank, COUNTERS + half.index())));
                for p in ring.release(half, used) {
                    let word = of_rank(p.word);
                    post(shared, Post { word, ..p });
                }
            }
        });
        let credits: Program = [credits].into_iter().filter(|_| block == 0).collect();
        let mut waiting = Program::new();
        if block == 0 || without != Without::EveryBlockWaits {
            waiting.push(awaits(peer * THREADS, move |shared, budget| {
                let use_of_half = shared.load(counter) + 1;
                let credit = ring.credit(half, peer, flag(use_of_half));
                let credit = Wait {
                    word: of_rank(credit.word),
                    ..credit
                };
                if use_of_half == 1 {
                    return Ok(Ok(()));
                }
                Ok(wait(shared, credit, budget, || shared.stopped()))
            }));
        }
        let flags = does(move |shared| {
            let filled = ring.filled(peer, half, rank, 0, flag(count));
            let word = of_rank(filled.word);
            post(shared, Post { word, ..filled });
        });
        let flags: Program = [flags].into_iter().filter(|_| block == 0).collect();
        match without {
            Without::CreditsFirst => {
                program.extend(waiting.into_iter().chain(credits).chain(flags))
            }
            Without::FlagsLater => program.extend(credits.into_iter().chain(flags).chain(waiting)),
            _ => program.extend(credits.into_iter().chain(waiting).chain(flags)),
        }
        let say = does(move |shared| shared.store(begun, shared.load(counter) + 1));
        let let_begin = lets_begin(rank, block, n);
        match (block, without) {
            (0, Without::BegunFirst) => program.extend([let_begin, say]),
            (0, _) => program.extend([say, let_begin]),
            _ => program.push(let_begin),
        }
        let data = writes(
            Self::place(peer, half, block),
            value(n as u32, Self::of(rank, block)),
        );
        let tell = posts(Post {
            word: Self::told(peer, half, block),
            flag: flag(count),
        });
        match without {
            Without::WritesFirst => program.extend([tell, data]),
            _ => program.extend([data, tell]),
        }
        program.push(does(move |shared| {
            let (first, last) = count_out(shared, rank, BLOCKS);
            if last && without != Without::LastCounts || first && without == Without::LastCounts {
                shared.store(counter, count);
                // Of the other half, this launch has let go.
                for other in 0..HALVES {
                    let open = u64::from(other == half.index());
                    shared.store(own(rank, OPEN + other), open);
                }
            }
            if last {
                ends(shared, rank, launch);
            }
        }));
        program
    }

    fn receive(&self, n: usize) -> Program {
        let (rank, peer, ring, without) = (self.rank, self.peer(), self.ring, self.without);
        let (half, launch) = (self.uses.half(n), 2 * n + 1);
        let begun = match without {
            Without::Begun => self.counter(half),
            _ => self.begun(half),
        };
        let mut program = vec![may_begin(rank, n)];
        if rank != 0 || n >= self.uses.ahead {
            program.push(awaits(peer * THREADS, move |shared, budget| {
                let arrival = ring.arrival(half, peer, 0, peer, flag(shared.load(begun)));
                let arrival = Wait {
                    word: of_rank(arrival.word),
                    ..arrival
                };
                Ok(wait(shared, arrival, budget, || shared.stopped()))
            }));
            // It takes what all blocks of the peer wrote.
            for block in 0..BLOCKS {
                if block == 0 || without != Without::EveryRowLooks {
                    program.push(awaits(peer * THREADS, move |shared, budget| {
                        let told = Wait {
                            word: Self::told(rank, half, block),
                            want: Want::Exactly(flag(shared.load(begun))),
                            peer: peer * THREADS,
                        };
                        Ok(wait(shared, told, budget, || shared.stopped()))
                    }));
                }
                let place = Self::place(rank, half, block);
                program.push(reads(rank, place, value(n as u32, Self::of(peer, block))));
            }
        }
        if without != Without::SendFirst {
            program.extend(ended(rank, launch));
        }
        program.push(does(move |shared| {
            if count_out(shared, rank, 1).1 {
                ends(shared, rank, launch);
            }
        }));
        program
    }
}

/// Both ranks send and receive in all uses of a slot.
pub fn scenario(uses: Uses, without: Without) -> Scenario {
    let program = |id: usize| {
        let block = Block {
            rank: id / THREADS,
            block: id % THREADS,
            ring: ring(id / THREADS),
            uses,
            without,
        };
        let launch = |n| match block.block {
            BLOCKS => block.receive(n),
            _ => block.send(n),
        };
        (0..uses.halves.len()).flat_map(launch).collect()
    };
    let programs = (0..RANKS * THREADS).map(program).collect();
    Scenario::new(WORDS, HALVES * BLOCKS, programs)
}

/// How a send and a receive beside it are counted out, and that what comes behind both begins.
pub fn overlapping(without: Without) -> Scenario {
    let send = |block| {
        let leave = does(move |shared| {
            if count_out(shared, 0, BLOCKS).1 {
                ends(shared, 0, 0);
            }
        });
        vec![lets_begin(0, block, 0), leave]
    };
    let mut receive = vec![may_begin(0, 0)];
    if without != Without::SendFirst {
        receive.extend(ended(0, 1));
    }
    receive.push(does(move |shared| {
        if count_out(shared, 0, 1).1 {
            ends(shared, 0, 1);
        }
    }));
    let programs = vec![send(0), send(1), receive, ended(0, 2)];
    Scenario::new(WORDS, HALVES * BLOCKS, programs)
}

/// One flag for what all blocks of a rank wrote, as products of tiles send.
pub fn counted(without: Without) -> Scenario {
    let half = Half::of(0);
    let block = |block: usize| {
        let data = writes(Block::place(1, half, block), value(0, Block::of(0, block)));
        let leave = does(move |shared| {
            let (first, last) = count_out(shared, 0, BLOCKS);
            if last && without != Without::LastPosts || first && without == Without::LastPosts {
                let filled = ring(0).filled(1, half, 0, 0, flag(1));
                let word = of_rank(filled.word);
                post(shared, Post { word, ..filled });
            }
        });
        match without {
            Without::WritesFirst => vec![leave, data],
            _ => vec![data, leave],
        }
    };
    let arrival = ring(1).arrival(half, 0, 0, 0, flag(1));
    let mut receive = vec![waits(Wait {
        word: of_rank(arrival.word),
        ..arrival
    })];
    receive.extend((0..BLOCKS).map(|block| {
        let place = Block::place(1, half, block);
        reads(1, place, value(0, Block::of(0, block)))
    }));
    let programs = vec![block(0), block(1), Program::new(), receive];
    Scenario::new(WORDS, HALVES * BLOCKS, programs)
}

/// What one rank's blocks send, another receives.
pub fn one_way() -> Scenario {
    let send = |block| Block {
        rank: 0,
        block,
        ring: ring(0),
        uses: ONCE,
        without: Without::Nothing,
    };
    let half = Half::of(0);
    let takes = (0..BLOCKS).flat_map(|block| {
        let told = Wait {
            word: Block::told(1, half, block),
            want: Want::Exactly(flag(1)),
            peer: 0,
        };
        let place = Block::place(1, half, block);
        [waits(told), reads(1, place, value(0, Block::of(0, block)))]
    });
    // Three threads of a rank share the memory of the first.
    let programs = vec![
        send(0).send(0),
        send(1).send(0),
        Program::new(),
        takes.collect(),
    ];
    Scenario::new(WORDS, HALVES * BLOCKS, programs)
}

/// A launch that gives something while the group is being stopped: all that it gave is what it should be, or all of it is poison.
pub fn stopped(without: Without) -> Scenario {
    const GIVEN: u64 = 1;
    const POISON: u64 = 2;
    let failed = 1 << 8;
    let give = move |block: usize| {
        vec![does(move |shared| {
            let well = shared.load(own(0, STOP)) == 0;
            // Some warps of a block that failed had all they needed.
            let own_poison = !well && without == Without::LastPoisons;
            shared.write(own(0, block), if own_poison { POISON } else { GIVEN });
            let (out, add) = (own(0, OUT), if well { 1 } else { 1 + failed });
            let all = loop {
                let before = shared.load(out);
                if shared.compare_exchange(out, before, before + add).is_ok() {
                    break before + add;
                }
            };
            if all % failed != BLOCKS as u64 {
                return;
            }
            let poisons = all / failed != 0 && without != Without::LastPoisons;
            for block in (0..BLOCKS).filter(|_| poisons) {
                shared.write(own(0, block), POISON);
            }
            ends(shared, 0, 0);
        })]
    };
    let mut peer = vec![does(|shared| shared.store(own(0, STOP), 1))];
    peer.extend(ended(0, 1));
    peer.push(acts(|shared| {
        let (first, second) = (shared.read(own(0, 0)), shared.read(own(0, 1)));
        if first == second {
            return Ok(());
        }
        Err(Fault::Wrong("a part of what was given is poison".into()))
    }));
    Scenario::new(WORDS, BLOCKS, vec![give(0), give(1), peer])
}
