//! Sums that are pushed, in one shot and in two; and copies.

use crate::shared::*;
use brigade_device::DataType;
use brigade_sync::{BUFFERS, Flag, FlagBarrier, Memory, Rotation, Sentinel, Shot, Turnover, Word};
use std::time::Instant;

/// What is taken away.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Without {
    Nothing,
    /// A buffer that was read is cleared.
    Clear,
    /// There are three buffers.
    ThirdBuffer,
    /// The buffer that was read is cleared, and not the next one.
    Stale,
    /// As much is cleared as the buffer's last use filled.
    Extent,
    /// The sentinel is made another value.
    Canonical,
    /// Every first push is signed, also when it is empty.
    SignatureWhenEmpty,
    /// All buffers are empty when a generation begins.
    Empty,
    /// Of a copy, it is known which values are the sentinel.
    Bits,
    /// That is told, too, where none is but what stands for it.
    Alone,
}

/// What a use is.
#[derive(Clone, Copy, PartialEq, Eq)]
enum What {
    /// Sums, in so many shots.
    Sums(usize),
    /// Any bytes, of which ranks with an odd number have half as many.
    Copies,
    /// Copies, and sums in one shot.
    InTurn,
}

/// Memory that takes a guard from what goes through it.
struct Bent<'a> {
    shared: &'a dyn Shared,
    without: Without,
}

/// What is pushed for the sentinel, as it lies in memory.
const STORED_NAN: u32 = !NAN;
const NAN: u32 = Sentinel::nan(DataType::F32);
const LANE_BYTES: usize = 4;

impl Memory for Bent<'_> {
    fn load(&self, at: Word) -> u64 {
        self.shared.load(at)
    }
    fn store(&self, at: Word, value: u64) {
        self.shared.store(at, value);
    }
    fn load_relaxed(&self, at: Word) -> u64 {
        self.shared.load_relaxed(at)
    }
    fn store_relaxed(&self, at: Word, value: u64) {
        let sentinel = value as u32 == STORED_NAN && self.without == Without::Canonical;
        let raw = value >> 32 << 32;
        // A word without a bit, as it lies in memory.
        if value == u64::MAX && self.without == Without::Alone {
            return;
        }
        self.shared
            .store_relaxed(at, if sentinel { raw } else { value });
    }
    fn compare_exchange(&self, at: Word, current: u64, new: u64) -> Result<(), u64> {
        self.shared.compare_exchange(at, current, new)
    }
    fn events(&self, owner: usize) -> u32 {
        self.shared.events(owner)
    }
    fn rest(&self, owner: usize, events: u32, until: Option<Instant>) {
        self.shared.rest(owner, events, until);
    }
}

/// What a use pushes: its lanes, and in use 0 the sentinel among them, where there are enough, and in use 4 what stands for it in copies.
pub fn lanes(n: u32, from: usize, len: usize) -> Vec<u8> {
    let mut lanes = vec![value(n, from) as u32; len];
    if n == 0 && len > 2 {
        lanes[len - 2] = Sentinel::EMPTY;
    }
    if n == 4 && len > 2 {
        lanes[len - 1] = Sentinel::EMPTY - 1;
    }
    lanes.into_iter().flat_map(u32::to_ne_bytes).collect()
}

/// Compares lanes, of which those that are the sentinel are to be `nan`.
pub fn compare(rank: usize, got: &[u8], want: &[u8], nan: u32) -> Result<(), Fault> {
    let lane = |bytes: &[u8]| u32::from_ne_bytes(bytes.try_into().unwrap());
    got.chunks(LANE_BYTES)
        .zip(want.chunks(LANE_BYTES))
        .map(|(got, want)| match (lane(got), lane(want)) {
            (got, Sentinel::EMPTY) => (got, nan),
            both => both,
        })
        .find(|(got, want)| got != want)
        .map_or(Ok(()), |(got, want)| {
            Err(wrong(rank, got.into(), want.into()))
        })
}

fn turnover(rotation: &mut Rotation, words: usize, without: Without) -> Turnover {
    let right = rotation.begin(words);
    let n = right.epoch as usize;
    match without {
        Without::ThirdBuffer => Turnover {
            buffer: n % 2,
            stale: (n + 1) % 2,
            ..right
        },
        Without::Stale => Turnover {
            stale: (right.buffer + 1) % 3,
            ..right
        },
        Without::Extent => Turnover {
            stale_words: words,
            ..right
        },
        _ => right,
    }
}

/// One push of one use, as a rank makes and takes it.
#[derive(Clone, Copy)]
struct Part {
    s: Sentinel,
    turn: Turnover,
    shot: Shot,
    copies: bool,
    without: Without,
}

impl Part {
    fn use_number(self) -> u32 {
        self.turn.epoch - 1
    }

    fn flag(self) -> Flag {
        Flag::new(GENERATION, 0xA11, self.turn.epoch)
    }

    fn is_signed(self, len: usize) -> bool {
        match self.shot.index {
            0 => len > 0 || self.without != Without::SignatureWhenEmpty,
            _ => len > 0,
        }
    }

    /// Pushes so many lanes.
    fn pushes(self, to: usize, len: usize) -> Step {
        does(move |shared| {
            let (s, without) = (self.s, self.without);
            let bent = Bent { shared, without };
            let bytes = lanes(self.use_number(), s.rank, len);
            match (self.copies, without) {
                (true, Without::Canonical) => {
                    s.push(&bent, to, self.turn, self.shot, Sentinel::EMPTY, &bytes);
                }
                (true, _) => s.push_copy(&bent, to, self.turn, self.shot, &bytes),
                (false, _) => s.push(&bent, to, self.turn, self.shot, NAN, &bytes),
            }
            if self.is_signed(len) {
                let signed = s.signed(to, self.turn, self.shot, self.flag());
                brigade_sync::post(&bent, signed);
            }
        })
    }

    /// Takes so many lanes.
    fn takes(self, from: usize, len: usize) -> Option<Step> {
        let (s, turn, shot, flag) = (self.s, self.turn, self.shot, self.flag());
        self.is_signed(len).then(|| {
            awaits(from, move |shared, budget| {
                let mut got = vec![0; len * LANE_BYTES];
                let heard = || shared.stopped();
                let end = if self.copies && self.without != Without::Bits {
                    s.take_copy(shared, from, turn, shot, flag, &mut got, budget, heard)
                } else {
                    s.take(shared, from, turn, shot, flag, &mut got, budget, heard)
                };
                if end.is_ok() {
                    let nan = if self.copies { Sentinel::EMPTY } else { NAN };
                    compare(s.rank, &got, &lanes(self.use_number(), from, len), nan)?;
                }
                Ok(end)
            })
        })
    }
}

/// An exchange of so many lanes.
#[derive(Clone, Copy)]
struct Exchange {
    size: usize,
    lanes: usize,
    shots: usize,
    copies: bool,
}

impl Exchange {
    /// The lanes that a rank reduces: all of them in one shot, a share of whole words in two.
    fn of(self, rank: usize) -> usize {
        let each = match self.shots {
            1 => return self.lanes,
            _ => self.lanes.div_ceil(2).div_ceil(self.size) * 2,
        };
        each.min(self.lanes.saturating_sub(rank * each))
    }

    /// The lanes of a copy that a rank has for all.
    fn has(self, rank: usize) -> usize {
        self.lanes / (1 + rank % 2)
    }

    fn shots(self) -> [Shot; 2] {
        let bytes = self.of(0) * LANE_BYTES;
        let words = match self.copies {
            true => Sentinel::copied(bytes),
            false => Sentinel::filled(bytes),
        };
        let first = Shot::first(words);
        [first, first.then(self.size, words)]
    }

    /// Words of a buffer that it takes.
    fn words(self) -> usize {
        self.shots()[self.shots - 1].end(self.size)
    }

    fn program(self, s: Sentinel, turn: Turnover, without: Without) -> Program {
        let [first, second] = self.shots().map(|shot| Part {
            s,
            turn,
            shot,
            copies: self.copies,
            without,
        });
        let (all, own) = (|| peers(s.rank, s.size), self.of(s.rank));
        let pushed = |to| match self.copies {
            true => self.has(s.rank),
            false => self.of(to),
        };
        let taken = |from| if self.copies { self.has(from) } else { own };
        let mut program: Program = all().map(|to| first.pushes(to, pushed(to))).collect();
        if without != Without::Clear && turn.stale_words > 0 {
            program.push(does(move |shared| s.clear(shared, turn)));
        }
        program.extend(all().filter_map(|from| first.takes(from, taken(from))));
        if self.shots == 2 {
            program.extend(all().map(|to| second.pushes(to, own)));
            program.extend(all().filter_map(|from| second.takes(from, self.of(from))));
        }
        program
    }
}

/// Uses of so many lanes each. In a second generation, buffers hold what the first one left.
fn uses(
    size: usize,
    what: What,
    lens: &[usize],
    second_generation: bool,
    without: Without,
) -> Scenario {
    let exchange = |lanes, n: usize| Exchange {
        size,
        lanes,
        shots: if what == What::Sums(2) { 2 } else { 1 },
        copies: what == What::Copies || what == What::InTurn && n.is_multiple_of(2),
    };
    let most = exchange(lens.iter().copied().max().unwrap(), 0);
    let signatures = Sentinel::signatures(size);
    let barrier_base = signatures + BUFFERS * most.words();
    let program = |rank| {
        let s = Sentinel {
            rank,
            size,
            base: 0,
            buffers: signatures,
            capacity: most.words(),
        };
        let barrier = FlagBarrier {
            rank,
            size,
            base: barrier_base,
        };
        let gate = |count| {
            let met = Flag::new(GENERATION, 0, count);
            let arrive = barrier.arrive(met).map(posts);
            arrive.chain(barrier.meet(met).map(waits))
        };
        let mut program = Program::new();
        if second_generation {
            // What nobody has taken yet when all let go.
            let turn = Rotation::default().begin(most.words());
            let [shot, _] = most.shots();
            program.extend(peers(rank, size).map(|to| {
                let old = lanes(7, rank, most.of(to));
                does(move |shared| s.push(shared, to, turn, shot, NAN, &old))
            }));
            program.extend(gate(1));
            if without != Without::Empty {
                program.push(does(move |shared| s.empty(shared)));
            }
            program.extend(gate(2));
        }
        let mut rotation = Rotation::default();
        for exchange in lens.iter().zip(0..).map(|(&lanes, n)| exchange(lanes, n)) {
            let turn = turnover(&mut rotation, exchange.words(), without);
            program.extend(exchange.program(s, turn, without));
        }
        program
    };
    Scenario::new(
        barrier_base + FlagBarrier::words(size),
        0,
        (0..size).map(program).collect(),
    )
}

/// Every rank pushes to every peer, so many lanes in each use.
pub fn scenario(size: usize, lens: &[usize], without: Without) -> Scenario {
    uses(size, What::Sums(1), lens, false, without)
}

/// The same in two shots.
pub fn twice(size: usize, lens: &[usize], without: Without) -> Scenario {
    uses(size, What::Sums(2), lens, false, without)
}

/// The same in one shot, after a reset.
pub fn again(size: usize, lens: &[usize], without: Without) -> Scenario {
    uses(size, What::Sums(1), lens, true, without)
}

/// Ranks with an even number push so many lanes in each use to every peer, the others half as many.
pub fn copies(size: usize, lens: &[usize], without: Without) -> Scenario {
    uses(size, What::Copies, lens, false, without)
}

/// Such a use, and one of sums in one shot, in turn.
pub fn in_turn(size: usize, lens: &[usize], without: Without) -> Scenario {
    uses(size, What::InTurn, lens, false, without)
}
