//! Each protocol between real threads, and beside it the guard taken away in a schedule that must then go wrong.

use brigade_sync::*;
use std::{
    sync::{
        Barrier,
        atomic::{AtomicU64, Ordering},
    },
    thread,
    time::{Duration, Instant},
};

const GENERATION: u8 = 7;
const SIGNATURE: u32 = 0x00AB_CDEF;

fn flag(epoch: u32) -> Flag {
    Flag::new(GENERATION, SIGNATURE, epoch)
}

fn memory(ranks: usize, words: usize) -> Words<Vec<AtomicU64>> {
    let zeroed = || (0..words + BELL_WORDS).map(|_| AtomicU64::new(0)).collect();
    Words::new((0..ranks).map(|_| zeroed()).collect())
}

fn long() -> Deadline {
    Deadline::after(Duration::from_secs(60))
}

fn holds(memory: &impl Memory, w: Wait) -> Verdict {
    w.want.verdict(memory.load(w.word))
}

/// Runs one thread per rank.
fn ranks(size: usize, body: impl Fn(usize) + Sync) {
    thread::scope(|s| {
        for rank in 0..size {
            let body = &body;
            s.spawn(move || body(rank));
        }
    });
}

#[test]
fn nobody_leaves_a_barrier_before_all_have_come() {
    for size in [1, 2, 3, 5, 8] {
        let memory = memory(size, FlagBarrier::words(size));
        let come: Vec<AtomicU64> = (0..size).map(|_| AtomicU64::new(0)).collect();
        ranks(size, |rank| {
            let barrier = FlagBarrier {
                rank,
                size,
                base: 0,
            };
            // Epochs that wrap on the way.
            for count in 1..=300u32 {
                let flag = flag((u32::MAX - 150).wrapping_add(count));
                come[rank].store(u64::from(count), Ordering::Relaxed);
                barrier.arrive(flag).for_each(|p| post(&memory, p));
                for w in barrier.meet(flag) {
                    wait(&memory, w, &mut long(), || false).unwrap();
                }
                for other in &come {
                    assert!(other.load(Ordering::Relaxed) >= u64::from(count));
                }
            }
        });
    }
}

/// A rank that is through meeting 1 goes on to meeting 2 while another still looks at meeting 1.
#[test]
fn two_sets_of_flags_keep_the_one_that_is_waited_for() {
    let memory = memory(2, FlagBarrier::words(2));
    let barrier = |rank| FlagBarrier {
        rank,
        size: 2,
        base: 0,
    };
    let looked_at = |epoch| barrier(1).meet(flag(epoch)).next().unwrap();
    for epoch in [1, 2] {
        barrier(0)
            .arrive(flag(epoch))
            .for_each(|p| post(&memory, p));
    }
    assert_eq!(holds(&memory, looked_at(1)), Verdict::Ready);

    // One set: epochs of the same parity share their words, and the later one hides the earlier.
    for epoch in [3, 5] {
        barrier(0)
            .arrive(flag(epoch))
            .for_each(|p| post(&memory, p));
    }
    assert_eq!(holds(&memory, looked_at(3)), Verdict::Mismatch);
}

/// A region of one word for each half and rank, next to the flags.
struct Data(Vec<AtomicU64>);

fn value(round: u32, from: usize) -> u64 {
    u64::from(round) << 8 | from as u64
}

/// Every rank writes to its next neighbour for many rounds; each reads what it got.
#[test]
fn credits_keep_what_is_still_read() {
    for size in [2, 3, 5] {
        let memory = memory(size, CreditRing::words(size, 1));
        let data: Vec<Data> = (0..size)
            .map(|_| Data((0..HALVES).map(|_| AtomicU64::new(0)).collect()))
            .collect();
        ranks(size, |rank| {
            let ring = CreditRing {
                rank,
                size,
                pieces: 1,
                base: 0,
            };
            let (next, prev) = ((rank + 1) % size, (rank + size - 1) % size);
            let mut uses = Uses::default();
            for round in 0..500 {
                let half = uses.next_half();
                let (epoch, again) = uses.begin(half);
                if again {
                    for peer in (0..size).filter(|&p| p != rank) {
                        let w = ring.credit(half, peer, flag(epoch));
                        wait(&memory, w, &mut long(), || false).unwrap();
                    }
                }
                data[next].0[half.index()].store(value(round, rank), Ordering::Relaxed);
                post(&memory, ring.filled(next, half, rank, 0, flag(epoch)));
                let w = ring.arrival(half, prev, 0, prev, flag(epoch));
                wait(&memory, w, &mut long(), || false).unwrap();
                // A slow reader now and then.
                (0..(rank * 31 + round as usize * 7) % 50).for_each(|_| thread::yield_now());
                let got = data[rank].0[half.index()].load(Ordering::Relaxed);
                assert_eq!(got, value(round, prev), "round {round}");
                let done = uses.end(half).unwrap();
                ring.release(half, flag(done))
                    .for_each(|p| post(&memory, p));
            }
        });
    }
}

/// The writer is two uses ahead of a reader that has the flag and is about to read.
#[test]
fn without_the_credit_the_reader_finds_the_next_use() {
    let memory = memory(2, CreditRing::words(2, 1));
    let ring = |rank| CreditRing {
        rank,
        size: 2,
        pieces: 1,
        base: 0,
    };
    let region = [AtomicU64::new(0), AtomicU64::new(0)];
    let mut uses = Uses::default();
    let mut write = |round, heed_credits: bool| {
        let half = uses.next_half();
        let (epoch, again) = uses.begin(half);
        let credit = ring(0).credit(half, 1, flag(epoch));
        if heed_credits && again && holds(&memory, credit) != Verdict::Ready {
            return false;
        }
        region[half.index()].store(value(round, 0), Ordering::Relaxed);
        post(&memory, ring(0).filled(1, half, 0, 0, flag(epoch)));
        true
    };
    let arrival = ring(1).arrival(Half::of(0), 0, 0, 0, flag(1));
    let read = || region[0].load(Ordering::Relaxed);

    assert!(write(0, true) && write(1, true));
    assert_eq!(holds(&memory, arrival), Verdict::Ready);
    assert!(!write(2, true), "the writer must wait for the reader");
    assert_eq!(read(), value(0, 0));

    // The guard away: the same half is written under the reader's eyes.
    uses = Uses::default();
    let mut write = |round| {
        let half = uses.next_half();
        let (epoch, _) = uses.begin(half);
        region[half.index()].store(value(round, 0), Ordering::Relaxed);
        post(&memory, ring(0).filled(1, half, 0, 0, flag(epoch)));
    };
    (0..3).for_each(&mut write);
    assert_eq!(read(), value(2, 0));
    assert_eq!(holds(&memory, arrival), Verdict::Mismatch);
}

#[test]
fn all_ranks_find_the_same_record() {
    const SIZE: usize = 6;
    let memory = memory(SIZE, AbortCell::WORDS);
    let cell = AbortCell {
        size: SIZE,
        base: 0,
    };
    for generation in 1..=50u8 {
        let start = Barrier::new(SIZE);
        let winners: Vec<[AtomicU64; AbortCell::RECORD]> = (0..SIZE)
            .map(|_| [const { AtomicU64::new(0) }; 8])
            .collect();
        ranks(SIZE, |rank| {
            assert_eq!(cell.raised(&memory, rank, generation), None);
            start.wait();
            let mine = std::array::from_fn(|i| (rank * 100 + i) as u64);
            let won = cell.raise(&memory, generation, mine);
            for (to, from) in winners[rank].iter().zip(won) {
                to.store(from, Ordering::Relaxed);
            }
            start.wait();
            assert_eq!(cell.raised(&memory, rank, generation), Some(won));
        });
        let first: Vec<u64> = winners[0]
            .iter()
            .map(|w| w.load(Ordering::Relaxed))
            .collect();
        assert_eq!(first[1], first[0] + 1, "a record is one rank's, whole");
        for winner in &winners {
            let words: Vec<u64> = winner.iter().map(|w| w.load(Ordering::Relaxed)).collect();
            assert_eq!(words, first);
        }
    }
}

#[test]
fn a_new_generation_starts_when_all_have_let_go_of_the_old_one() {
    const SIZE: usize = 4;
    let memory = memory(SIZE, ResetGate::words(SIZE));
    let gate = |rank| ResetGate {
        rank,
        size: SIZE,
        base: 0,
    };
    let missing = |rank: usize, generation| -> Vec<usize> {
        gate(rank)
            .meet(generation)
            .filter(|&w| holds(&memory, w) != Verdict::Ready)
            .map(|w| w.peer)
            .collect()
    };
    for rank in [0, 1, 3] {
        gate(rank).arrive(1).for_each(|p| post(&memory, p));
    }
    assert_eq!(missing(0, 1), [2]);
    assert_eq!(missing(2, 1), []);
    // Trying again changes nothing, and the last one frees all.
    gate(0).arrive(1).for_each(|p| post(&memory, p));
    assert_eq!(missing(3, 1), [2]);
    gate(2).arrive(1).for_each(|p| post(&memory, p));
    for rank in 0..SIZE {
        assert_eq!(missing(rank, 1), []);
        assert_eq!(missing(rank, 2).len(), SIZE - 1);
    }
}

#[test]
fn waits_end() {
    let memory = memory(1, 1);
    let word = Word { owner: 0, index: 0 };
    let w = Wait {
        word,
        want: Want::Exactly(flag(1)),
        peer: 0,
    };
    let start = Instant::now();
    let mut short = Deadline::after(Duration::from_millis(20));
    assert_eq!(
        wait(&memory, w, &mut short, || false),
        Err(Stop::Timeout { seen: 0 })
    );
    assert!(start.elapsed() >= Duration::from_millis(20));
    assert_eq!(
        wait(&memory, w, &mut long(), || true),
        Err(Stop::Interrupted)
    );
    memory.store(word, Flag::new(GENERATION, SIGNATURE + 1, 1).bits());
    assert!(matches!(
        wait(&memory, w, &mut long(), || false),
        Err(Stop::Mismatch { .. })
    ));
    memory.store(word, flag(1).bits());
    assert_eq!(wait(&memory, w, &mut long(), || true), Ok(()));
}

/// A waiter that rests is woken by the store, not by its deadline.
#[test]
fn a_store_wakes_whoever_rests() {
    let memory = memory(2, 4);
    let start = Instant::now();
    thread::scope(|s| {
        s.spawn(|| {
            for epoch in 1..=1000 {
                let w = Wait {
                    word: Word { owner: 1, index: 3 },
                    want: Want::AtLeast(flag(epoch)),
                    peer: 0,
                };
                wait(&memory, w, &mut long(), || false).unwrap();
                memory.store(Word { owner: 0, index: 2 }, flag(epoch).bits());
            }
        });
        for epoch in 1..=1000 {
            memory.store(Word { owner: 1, index: 3 }, flag(epoch).bits());
            let w = Wait {
                word: Word { owner: 0, index: 2 },
                want: Want::AtLeast(flag(epoch)),
                peer: 1,
            };
            wait(&memory, w, &mut long(), || false).unwrap();
        }
    });
    assert!(start.elapsed() < Duration::from_secs(30));
}
