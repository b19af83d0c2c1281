//! Sums through buffers that hold a sentinel.

use crate::shared::*;
use brigade_sync::{Flag, FlagBarrier, Memory, Rotation, Sentinel, Turnover, Word};
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
    /// Every NaN is made another one than the sentinel.
    Canonical,
    /// Every use is signed, also when it is empty.
    SignatureWhenEmpty,
    /// All buffers are empty before the first use.
    Prepare,
}

/// Memory that takes a guard from what goes through it.
struct Bent<'a> {
    shared: &'a dyn Shared,
    empty: bool,
    without: Without,
}

impl Memory for Bent<'_> {
    fn load(&self, at: Word) -> u64 {
        self.shared.load(at)
    }
    fn store(&self, at: Word, value: u64) {
        if self.without != Without::SignatureWhenEmpty || !self.empty {
            self.shared.store(at, value);
        }
    }
    fn load_relaxed(&self, at: Word) -> u64 {
        self.shared.load_relaxed(at)
    }
    fn store_relaxed(&self, at: Word, value: u64) {
        let sentinel = value as u32 == Sentinel::NAN && self.without == Without::Canonical;
        let raw = value >> 32 << 32 | u64::from(Sentinel::EMPTY);
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

/// What a use pushes: its values, and a NaN in front in use 1.
fn values(n: u32, from: usize, len: usize) -> Vec<f32> {
    let mut values = vec![value(n, from) as f32; len];
    if n == 1 && len > 0 {
        values[0] = f32::from_bits(Sentinel::EMPTY);
    }
    values
}

fn compare(rank: usize, got: &[f32], want: &[f32]) -> Result<(), Fault> {
    got.iter()
        .zip(want)
        .find(|(got, want)| Sentinel::canonical(**got) != Sentinel::canonical(**want))
        .map_or(Ok(()), |(&got, &want)| {
            Err(wrong(rank, got as u64, want as u64))
        })
}

fn turnover(rotation: &mut Rotation, n: usize, len: usize, without: Without) -> Turnover {
    let right = rotation.begin(len);
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
            stale_values: len,
            ..right
        },
        _ => right,
    }
}

fn takes(s: Sentinel, from: usize, turn: Turnover, flag: Flag, n: u32, len: usize) -> Step {
    awaits(from, move |shared, budget| {
        let mut got = vec![0.0; len];
        let heard = || shared.stopped();
        let end = s.take(shared, from, turn, flag, &mut got, budget, heard);
        if end.is_ok() {
            compare(s.rank, &got, &values(n, from, len))?;
        }
        Ok(end)
    })
}

/// Every rank pushes to every peer, so many values in each use.
pub fn scenario(size: usize, uses: &[usize], without: Without) -> Scenario {
    let capacity = uses.iter().copied().max().unwrap();
    let barrier_base = Sentinel::words(size, capacity);
    let program = |rank| {
        let s = Sentinel {
            rank,
            size,
            capacity,
            base: 0,
        };
        let barrier = FlagBarrier {
            rank,
            size,
            base: barrier_base,
        };
        let mut program = Program::new();
        if without != Without::Prepare {
            program.push(does(move |shared| s.prepare(shared)));
        }
        let met = Flag::new(GENERATION, 0, 1);
        program.extend(barrier.arrive(met).map(posts));
        program.extend(barrier.meet(met).map(waits));
        let mut rotation = Rotation::default();
        for (n, &len) in (0u32..).zip(uses) {
            let turn = turnover(&mut rotation, n as usize, len, without);
            let flag = Flag::new(GENERATION, 0xA11, n + 1);
            let empty = len == 0;
            for to in peers(rank, size) {
                program.push(does(move |shared| {
                    let bent = Bent {
                        shared,
                        empty,
                        without,
                    };
                    s.push(&bent, to, turn, flag, &values(n, rank, len));
                }));
            }
            if without != Without::Clear && turn.stale_values > 0 {
                program.push(does(move |shared| s.clear(shared, turn)));
            }
            for from in peers(rank, size) {
                match without {
                    Without::SignatureWhenEmpty if empty => {}
                    _ => program.push(takes(s, from, turn, flag, n, len)),
                }
            }
        }
        program
    };
    Scenario::new(
        barrier_base + FlagBarrier::words(size),
        0,
        (0..size).map(program).collect(),
    )
}
