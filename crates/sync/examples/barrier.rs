//! Threads that meet at flag barriers, notice a peer in another call, and give up on one that stays away.
//! `cargo run -p brigade-sync --example barrier`.
#![allow(clippy::print_stdout)]

use brigade_sync::{BELL_WORDS, Deadline, Flag, FlagBarrier, Stop, Words, post, wait};
use std::{
    sync::atomic::{AtomicU32, AtomicU64, Ordering},
    time::Duration,
};

const RANKS: usize = 4;
const MEETINGS: u32 = 1000;

type Shared = Words<Vec<AtomicU64>>;

/// Words of all ranks, all zero: no flag of generation 0 is ever posted, so zero means that nobody has come.
fn words() -> Shared {
    let words = || (0..FlagBarrier::words(RANKS) + BELL_WORDS).map(|_| AtomicU64::new(0));
    Words::new((0..RANKS).map(|_| words().collect()).collect())
}

fn barrier(rank: usize) -> FlagBarrier {
    FlagBarrier {
        rank,
        size: RANKS,
        base: 0,
    }
}

fn meet(words: &Shared, rank: usize, flag: Flag, within: Duration) -> Result<(), (usize, Stop)> {
    let mut deadline = Deadline::after(within);
    barrier(rank)
        .meet(flag)
        .try_for_each(|w| wait(words, w, &mut deadline, || false).map_err(|stop| (w.peer, stop)))
}

fn arrive(words: &Shared, rank: usize, flag: Flag) {
    barrier(rank).arrive(flag).for_each(|p| post(words, p));
}

fn main() {
    let long = Duration::from_secs(30);

    // All four meet a thousand times. Whoever has met sees what everybody did before.
    let (shared, done) = (words(), AtomicU32::new(0));
    std::thread::scope(|s| {
        for rank in 0..RANKS {
            let (shared, done) = (&shared, &done);
            s.spawn(move || {
                for epoch in 1..=MEETINGS {
                    done.fetch_add(1, Ordering::Relaxed);
                    let flag = Flag::new(1, 0xA11, epoch);
                    arrive(shared, rank, flag);
                    assert_eq!(meet(shared, rank, flag, long), Ok(()));
                    assert!(done.load(Ordering::Relaxed) >= epoch * RANKS as u32);
                }
            });
        }
    });
    println!("{RANKS} threads met {MEETINGS} times");

    // Rank 3 signs another call. Nobody waits for it until the deadline: the flag itself says so.
    let shared = words();
    for rank in 0..RANKS {
        let signature = if rank == 3 { 0xBAD } else { 0xA11 };
        arrive(&shared, rank, Flag::new(1, signature, 1));
    }
    let met = meet(&shared, 0, Flag::new(1, 0xA11, 1), long);
    assert!(matches!(met, Err((3, Stop::Mismatch { .. }))), "{met:?}");
    println!("rank 3 was in another call: {met:?}");

    // Rank 2 never comes. The wait ends at its deadline, and names it.
    let shared = words();
    for rank in [0, 1, 3] {
        arrive(&shared, rank, Flag::new(1, 0xA11, 1));
    }
    let met = meet(
        &shared,
        0,
        Flag::new(1, 0xA11, 1),
        Duration::from_millis(20),
    );
    assert_eq!(met, Err((2, Stop::Timeout { seen: 0 })));
    println!("rank 2 stayed away: {met:?}");
}
