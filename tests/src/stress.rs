//! Stress: calls of all kinds and sizes in random order, with stalls all over the place and a fault now and then, in one
//! group after the other, for as long as one likes.
//!
//! What happens in which order follows from the seed alone, and is drawn before a group begins, so that all ranks do the
//! same and a failure comes again.

mod draw;
mod span;

use crate::{
    backend::{Rank, panic_text},
    faults::{
        self, AMPLE,
        injected::{MISHAPS, befall},
    },
    gather_linear::config,
    inject::{Director, Jitter, Mishap, What},
    ops::{self, Op},
    suite::{Suite, World},
    themes::with_a_hook,
};
use brigade_device::CommConfig;
use rand::{
    Rng, SeedableRng,
    rngs::StdRng,
    seq::{IndexedRandom, IteratorRandom},
};
use std::{
    panic::{AssertUnwindSafe, catch_unwind},
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    time::{Duration, Instant},
};

/// The environment variable that says how long to go on, over all group sizes: `90s`, `30m` or `2h`.
const STRESS: &str = "BRIGADE_STRESS";

/// How long it goes on where nobody says, with threads and with processes each.
const USUALLY: Duration = Duration::from_secs(30);

/// What one group does before the next one is made.
const TURNS: usize = 40;

/// Deadline of calls: far more than any takes, with all stalls and on a busy machine.
const DEADLINE: Duration = Duration::from_secs(2);

/// Memory for what is pushed: rows with experts, of up to eight ranks, are the most.
const ALL_REDUCE_BYTES: usize = 80 << 10;

/// Something that all ranks of a group do.
type Turn = Box<dyn Fn(&Rank, &Director) + Send + Sync>;

fn turn(rng: &mut StdRng, world: &World) -> Turn {
    if world.size > 1 && rng.random_ratio(1, 20) {
        return fault(rng, world);
    }
    let call = draw::call(rng, world.size, with_a_hook(world.backend.engines()));
    Box::new(move |rank, _| call(rank))
}

fn fault(rng: &mut StdRng, world: &World) -> Turn {
    let culprit = rng.random_range(0..world.size);
    let all = ops::all(with_a_hook(world.backend.engines()));
    let op = all.choose(rng).unwrap().clone();
    // Modes of one operation may come down to the same call.
    let differs = |other: &&Op| !other.operations.iter().any(|o| op.operations.contains(o));
    let other = all.iter().filter(differs).choose(rng).unwrap().clone();
    match rng.random_range(0..5) {
        0 => {
            let (point, action) = *MISHAPS.choose(rng).unwrap();
            let mishap = Mishap {
                culprit,
                point,
                what: What::Act(action),
            };
            Box::new(move |rank, director| befall(rank, director, mishap, &op, DEADLINE))
        }
        1 | 2 => Box::new(move |rank, _| {
            rank.meet();
            faults::differ(rank, culprit, &op, &other);
        }),
        _ => {
            let rounds = rng.random_range(0..2000);
            Box::new(move |rank, _| faults::abort(rank, culprit, rounds, &op))
        }
    }
}

/// One group, from its first call to its end. Gives whether rank 0 finds that it is over by then.
fn group(world: &World, seed: u64, end: Instant) -> bool {
    let mut rng = StdRng::seed_from_u64(seed);
    let jitter = Jitter::new(&mut rng, 25, 400);
    let turns: Vec<_> = (0..TURNS).map(|_| turn(&mut rng, world)).collect();
    let config = CommConfig {
        deadline: DEADLINE,
        first_deadline: AMPLE,
        all_reduce_bytes: ALL_REDUCE_BYTES,
        ..config()
    };
    let director = Director::new(&world.backend, Some(jitter));
    let over = Arc::new(AtomicBool::new(false));
    let found = Arc::clone(&over);
    world.run_injected(&config, Arc::clone(&director) as Arc<_>, move |rank| {
        turns.iter().for_each(|turn| turn(rank, &director));
        rank.comm().close(AMPLE).unwrap();
        let late = rank.share(&[(Instant::now() >= end).into()]);
        found.store(late[0] == [1], Ordering::Relaxed);
    });
    over.load(Ordering::Relaxed)
}

/// How long somebody wants it to go on, if anybody does.
///
/// # Panics
/// What was wrong with the time.
pub fn asked() -> Option<Duration> {
    let text = std::env::var(STRESS).ok()?;
    Some(span::parse(&text).unwrap())
}

/// Groups until the time is over.
fn random(world: &World) {
    let all = asked().unwrap_or(USUALLY);
    let sizes = u32::try_from(world.backend.worlds().len()).unwrap();
    let end = Instant::now() + all / sizes;
    let mut rng = world.rng();
    for number in 1.. {
        let seed = rng.random();
        match catch_unwind(AssertUnwindSafe(|| group(world, seed, end))) {
            Ok(true) => break,
            Ok(false) => {}
            Err(payload) => panic!("group {number}: {}", panic_text(&*payload)),
        }
    }
}

/// Adds the contract.
pub fn add(suite: &mut Suite) {
    if suite.backend().injects() {
        suite.add("stress/random", random);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::experts::DRAWN;
    use brigade_device::{
        Arrangement, Call, CombineCall, CombineSum, DataType, DispatchCall, DispatchParams,
        PlacementCall, ReceivedIds, Transport,
    };
    use brigade_plan::experts::need;

    #[test]
    fn the_largest_rows_with_experts_that_are_drawn_can_be_pushed() {
        const SIZE: usize = 8;
        let (max_tokens, hidden, k, experts) = DRAWN;
        let there = DispatchCall {
            max_tokens,
            hidden,
            dtype: DataType::BF16,
            // As many bytes as the widest has.
            beside_bytes: [24; DispatchParams::MOST_BESIDE].into_iter().collect(),
            k,
            weights: true,
            placement: PlacementCall::Even { experts },
            arrangement: Arrangement::BySource,
            max_recv: None,
            received_ids: ReceivedIds::Local,
            again: false,
            gathered: false,
            cast: None,
            choice: Some(Transport::Pushed),
        };
        let back = CombineCall {
            max_tokens,
            hidden,
            dtype: DataType::F32,
            output: DataType::F32,
            k,
            arrangement: Arrangement::ByExpert { alignment: 1 },
            sum: CombineSum::Expert,
            weights: true,
            choice: Some(Transport::Pushed),
        };
        for call in [Call::Dispatch(there), Call::Combine(back)] {
            let need = need(&call, SIZE).unwrap();
            assert_eq!(need.field, "all_reduce_bytes");
            // Neither more than there is, nor so little that this asks nothing.
            let (least, most) = (config().all_reduce_bytes, ALL_REDUCE_BYTES);
            assert!((least..=most).contains(&need.bytes), "{need:?}, {call:?}");
        }
    }
}
