//! Copies that one rank has and its peers pass on: each part goes out of the root once, to a peer that pushes it, as it came, to all
//! others but the root, into the places into which the root would have pushed it (`kernels/push_copy.cu`).

use crate::{
    sentinel::{compare, lanes},
    shared::*,
};
use brigade_sync::{BUFFERS, Budget, Flag, Post, Rotation, Sentinel, Shot, Stop, Turnover, Word};

/// What is taken away.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Without {
    Nothing,
    /// A buffer that was read is cleared.
    Clear,
    /// A use ends behind the arrivals of all peers.
    Arrivals,
    /// What is passed on goes as it came: of the sentinel, it is known where it was.
    AsItCame,
    /// All others get it.
    LastPeer,
    /// The root, which waits for none of it, does not get it back.
    NotTheRoot,
}

/// One use: who has something, and how many lanes each part of it has.
#[derive(Clone, Copy)]
struct Relay {
    s: Sentinel,
    turn: Turnover,
    root: usize,
    lanes: usize,
    without: Without,
}

/// Bytes of a lane, and those that stand for the sentinel.
const LANE_BYTES: usize = 4;
const STAND_IN: [u8; LANE_BYTES] = (Sentinel::EMPTY - 1).to_ne_bytes();

/// Words of a part of so many lanes.
const fn words(lanes: usize) -> usize {
    Sentinel::copied(lanes * LANE_BYTES)
}

impl Relay {
    /// The part that goes to the rank this far behind the root.
    fn part(self, distance: usize) -> Shot {
        let words = words(self.lanes);
        Shot {
            first: (distance - 1) * words,
            ..Shot::single(words)
        }
    }

    fn flag(self) -> Flag {
        Flag::new(GENERATION, 0xA11, self.turn.epoch)
    }

    fn bytes(self) -> Vec<u8> {
        lanes(self.turn.epoch - 1, self.root, self.lanes)
    }

    fn distance(self) -> usize {
        (self.s.rank + self.s.size - self.root) % self.s.size
    }

    fn at(self, distance: usize) -> usize {
        (self.root + distance) % self.s.size
    }

    /// Where a part's words lie at a rank.
    fn places(self, owner: usize, distance: usize) -> impl Iterator<Item = Word> {
        let part = self.part(distance);
        (0..part.words).map(move |i| self.s.place(owner, self.turn.buffer, part, self.root, i))
    }

    /// Tells a peer that this rank has come, before anything else.
    fn arrives(self, to: usize) -> Post {
        self.s.signed(to, self.turn, self.part(1), self.flag())
    }

    /// Waits until all words of a part are there, whoever pushed them, and the one behind them if one of them is told of there.
    fn comes(self, distance: usize) -> Step {
        let by = match distance == self.distance() {
            true => self.root,
            false => self.at(distance),
        };
        awaits(by, move |shared, budget| {
            let (mut left, mut more) = (Sentinel::filled(self.lanes * LANE_BYTES), false);
            for at in self.places(self.s.rank, distance) {
                if left == 0 && !more {
                    break;
                }
                if let Err(stop) = until_there(shared, at, budget) {
                    return Ok(Err(stop));
                }
                left = left.saturating_sub(1);
                let come = Sentinel::unpack(shared.load_relaxed(at)).unwrap_or_default();
                more |= come.chunks(LANE_BYTES).any(|lane| lane == STAND_IN);
            }
            Ok(Ok(()))
        })
    }

    /// Pushes what has come to a peer.
    fn passes_on(self, to: usize) -> Step {
        let (s, own) = (self.s, self.distance());
        does(move |shared| {
            if self.without == Without::AsItCame {
                let (turn, part) = (self.turn, self.part(own));
                return s.push(shared, to, turn, part, Sentinel::EMPTY, &self.bytes());
            }
            let came = self.places(s.rank, own);
            for (from, there) in came.zip(self.places(to, own)) {
                let come = shared.load_relaxed(from);
                if Sentinel::unpack(come).is_some() {
                    shared.store_relaxed(there, come);
                }
            }
        })
    }

    /// Takes a part, and the arrival of whoever it is from.
    fn takes(self, distance: usize) -> Step {
        let s = self.s;
        let from = match distance == self.distance() {
            true => self.root,
            false => self.at(distance),
        };
        awaits(from, move |shared, budget| {
            let mut got = vec![0; self.lanes * LANE_BYTES];
            let (turn, part, heard) = (self.turn, self.part(distance), || shared.stopped());
            let flag = self.flag();
            let end = s.take_copy(shared, from, turn, part, flag, &mut got, budget, heard);
            if end.is_ok() {
                compare(s.rank, &got, &self.bytes(), Sentinel::EMPTY)?;
            }
            Ok(end)
        })
    }

    /// Looks at a part without waiting for anybody.
    fn looks(self, distance: usize) -> Step {
        acts(move |shared| {
            let want = lanes(self.turn.epoch - 1, self.root, 1);
            let at = self.places(self.s.rank, distance).next();
            let got = at.and_then(|at| Sentinel::unpack(shared.load_relaxed(at)));
            let got = got.unwrap_or_default();
            compare(self.s.rank, &got[..LANE_BYTES], &want, Sentinel::EMPTY)
        })
    }

    /// What was cleared is empty as long as this rank is in the use.
    fn stays_empty(self) -> Step {
        let Sentinel {
            rank,
            buffers,
            capacity,
            ..
        } = self.s;
        let first = buffers + self.turn.stale * capacity;
        acts(move |shared| {
            let words = first..first + self.turn.stale_words;
            let mut left =
                words.filter_map(|i| Sentinel::unpack(shared.load_relaxed(cell(rank, i))));
            match left.next() {
                Some(bytes) => {
                    let got = u32::from_ne_bytes([bytes[0], bytes[1], bytes[2], bytes[3]]);
                    Err(wrong(rank, got.into(), 0))
                }
                None => Ok(()),
            }
        })
    }

    fn program(self) -> Program {
        let Self {
            s, turn, without, ..
        } = self;
        let all = || peers(s.rank, s.size);
        let mut program: Program = all().map(|to| posts(self.arrives(to))).collect();
        let own = self.distance();
        if own == 0 {
            program.extend((1..s.size).map(|distance| {
                does(move |shared| {
                    let (to, part) = (self.at(distance), self.part(distance));
                    s.push_copy(shared, to, turn, part, &self.bytes());
                })
            }));
        }
        let cleared = without != Without::Clear && turn.stale_words > 0;
        program.extend(cleared.then(|| does(move |shared| s.clear(shared, turn))));
        if own == 0 {
            let flag = self.flag();
            let arrivals = all().map(|from| waits(s.signature(from, turn, self.part(1), flag)));
            program.extend(arrivals.filter(|_| without != Without::Arrivals));
            program.extend(cleared.then(|| self.stays_empty()));
            return program;
        }
        // By one is enough.
        let back = without == Without::NotTheRoot && own == 1;
        let others = all().filter(|&to| to != self.root || back);
        let skipped = usize::from(without == Without::LastPeer);
        program.push(self.comes(own));
        program.extend(others.skip(skipped).map(|to| self.passes_on(to)));
        let parts = std::iter::once(own).chain((1..s.size).filter(|&d| d != own));
        program.extend(parts.flat_map(|distance| match without {
            Without::Arrivals => vec![self.comes(distance), self.looks(distance)],
            _ => vec![self.takes(distance)],
        }));
        program.extend(cleared.then(|| self.stays_empty()));
        program
    }
}

/// As a wait for a word that is its own flag.
fn until_there(shared: &dyn Shared, at: Word, budget: &mut dyn Budget) -> Result<(), Stop> {
    loop {
        let events = shared.events(at.owner);
        let seen = shared.load_relaxed(at);
        if Sentinel::unpack(seen).is_some() {
            return Ok(());
        }
        if shared.stopped() {
            return Err(Stop::Interrupted);
        }
        if budget.spent() {
            return Err(Stop::Timeout { seen });
        }
        shared.rest(at.owner, events, budget.until());
    }
}

/// Uses, each by its root and the lanes of a part.
pub fn scenario(size: usize, uses: &[(usize, usize)], without: Without) -> Scenario {
    let most = uses.iter().map(|&(_, lanes)| words(lanes)).max().unwrap();
    let buffers = Sentinel::signatures(size);
    let capacity = (size - 1) * most;
    let program = |rank| {
        let s = Sentinel {
            rank,
            size,
            base: 0,
            buffers,
            capacity,
        };
        let mut rotation = Rotation::default();
        let one = |&(root, lanes): &(usize, usize)| {
            let turn = rotation.begin((size - 1) * words(lanes));
            Relay {
                s,
                turn,
                root,
                lanes,
                without,
            }
            .program()
        };
        uses.iter().flat_map(one).collect()
    };
    let programs = (0..size).map(program).collect();
    Scenario::new(buffers + BUFFERS * capacity, 0, programs)
}
