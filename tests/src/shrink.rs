//! A group that goes on without ranks it has lost: those who are left agree on who that is, and rows go to their experts and back as
//! if lost ranks' experts had been none.

use crate::{
    backend::{Backend, Rank},
    check::{assert_kind, expect_unsupported},
    experts::{
        self,
        back::Back,
        case::{By, Case, Ids},
        own::{Own, check},
    },
    faults::{AMPLE, GRACE},
    low_latency, ops,
    suite::{Suite, World},
};
use brigade_device::{
    Arrangement, CommConfig, DataType, Error, FaultKind, Result, SendParams, Transport,
};
use brigade_plan::reason;
use rand::{Rng, rngs::StdRng, seq::SliceRandom};
use std::time::{Duration, Instant};

/// For a rank that will not come.
const BRIEF: Duration = Duration::from_secs(1);

fn config() -> CommConfig {
    CommConfig {
        low_latency_bytes: 1 << 20,
        all_reduce_bytes: 64 << 10,
        deadline: Duration::from_secs(20),
        ..experts::config()
    }
}

/// What is dispatched and combined, whoever is left.
struct Calls {
    experts: Vec<(Case, Back)>,
    low_latency: [low_latency::RoundTrip; 2],
}

impl Calls {
    fn new(rng: &mut StdRng, size: usize) -> Self {
        let arrangements = [
            Arrangement::Dense,
            Arrangement::BySource,
            Arrangement::ByExpert { alignment: 4 },
        ];
        let mut experts = vec![];
        for arrangement in arrangements {
            let per_rank = 2;
            let slots = (per_rank * size) as i32;
            let mut case = Case::random(rng, size, (20, 32, 3, 2 * size + 1));
            case.arrangement = arrangement;
            let mut by_map = case.clone();
            let copies = (0..2 * by_map.experts).map(|_| rng.random_range(0..slots));
            by_map.places = experts::case::Where::Map {
                slots: copies.collect(),
                per_rank,
            };
            if arrangement != Arrangement::BySource {
                case.room = Some(20 * 3 * size + 4 * 8);
            }
            // Nothing is forced where one-sided is what is left.
            (by_map.by.there, by_map.by.back) = (None, None);
            case.by = By::of(Transport::OneSided, Transport::OneSided);
            for case in [case, by_map] {
                let back = Back::random(rng, &case);
                experts.push((case, back));
            }
        }
        // In pieces.
        let case = Case::random(rng, size, (900, 1024, 2, size));
        let back = Back::random(rng, &case);
        experts.push((case, back));
        Self {
            experts,
            low_latency: low_latency::both_sums(rng, size),
        }
    }

    fn one_sided(&self, rank: &Rank, absent: &[usize]) {
        for (case, back) in &self.experts {
            let left = case.without(absent);
            let own = Own::of(rank, case);
            let mut lease = rank.lease();
            let layout = lease.expert_layout(own.routing(case)).unwrap();
            let slots = experts::own::i32s(rank, &layout.slots);
            let tokens = (0..case.tokens(rank.rank)).flat_map(|t| (0..case.k).map(move |e| (t, e)));
            let want = tokens.map(|(t, e)| left.slot(rank.rank, t, e).map_or(-1, |s| s as i32));
            assert_eq!(slots, want.collect::<Vec<_>>(), "slots without {absent:?}");
            let got = own.dispatch(&mut lease, case).unwrap();
            check(rank, &left, &got);
            back.check(rank, &mut lease, &left, &got.handle);
        }
    }

    fn all(&self, rank: &Rank, absent: &[usize]) {
        self.one_sided(rank, absent);
        low_latency::round_trips_without(rank, absent, &self.low_latency);
    }
}

fn refused<T>(result: Result<T>, code: &str, what: &str) {
    assert_eq!(expect_unsupported(result, what), code, "{what}");
}

/// What needs all ranks says so, at once and to all alike.
fn assert_refuses(rank: &Rank, backend: &dyn Backend, case: &Case) {
    for op in ops::all(backend.engines()) {
        let goes_on = ["barrier", "experts", "low_latency"];
        if !goes_on.iter().any(|name| op.name.starts_with(name)) {
            refused(op.run(rank).result, reason::ABSENT_RANKS, &op.name);
        }
    }
    let mut forced = case.clone();
    for choice in [Transport::Fifo, Transport::Pushed, Transport::Gather] {
        forced.by = By::of(choice, choice);
        let own = Own::of(rank, &forced);
        let result = own.dispatch(&mut rank.lease(), &forced);
        refused(result, reason::ABSENT_RANKS, &format!("{choice:?}"));
    }
    forced.by = By {
        ids: Ids::Ragged,
        ..By::of(Transport::OneSided, Transport::OneSided)
    };
    let own = Own::of(rank, &forced);
    let result = own.dispatch(&mut rank.lease(), &forced);
    refused(result, reason::ABSENT_RANKS, "experts of all ranks' tokens");
    let row = rank.upload_f32(&[1.0]);
    let peer = (rank.rank + 1) % rank.size;
    let from = row.view();
    let sent = rank.lease().send(SendParams { peer, from });
    refused(sent, reason::ABSENT_RANKS, "send");
    rank.comm().check().unwrap();
}

/// Makes calls until one fails because of one of these ranks.
fn until_lost(rank: &Rank, lost: &[usize]) {
    loop {
        let start = Instant::now();
        let ended = rank.settle(ops::barrier().run(rank).result);
        let Err(error) = ended else { continue };
        let Error::Fault(record) = error else {
            panic!("no fault: {error}")
        };
        assert!(start.elapsed() < GRACE, "took {:?}", start.elapsed());
        assert_kind(&record, FaultKind::PeerLost, "a lost rank");
        assert!(lost.contains(&(record.peer as usize)), "{record}");
        return;
    }
}

/// Shrinks, and asserts who is left.
fn shrink(rank: &Rank, lost: &[usize]) {
    let start = Instant::now();
    let absent = rank.comm().shrink(AMPLE).unwrap();
    assert!(start.elapsed() < GRACE, "took {:?}", start.elapsed());
    assert_eq!(absent.ranks().collect::<Vec<_>>(), lost);
    assert!(absent.perhaps_alive().is_empty(), "{absent:?}");
    assert_eq!(rank.comm().absent(), absent);
    rank.comm().check().unwrap();
}

/// Ranks end one after the other, until one is left.
fn one_by_one(world: &World) {
    let mut rng = world.rng();
    let calls = Calls::new(&mut rng, world.size);
    let mut order: Vec<usize> = (0..world.size).collect();
    order.shuffle(&mut rng);
    order.pop();
    let rounds: Vec<u32> = order.iter().map(|_| rng.random_range(0..2000)).collect();
    let backend = world.backend.clone();
    world.run(&config(), move |rank| {
        calls.all(rank, &[]);
        let mut absent = vec![];
        for (&lost, &rounds) in order.iter().zip(&rounds) {
            if rank.rank == lost {
                // Nobody is lost before all are back from their calls.
                ops::barrier().run(rank).result.unwrap();
                rank.dawdle(rounds);
                backend.kill();
            }
            until_lost(rank, &[lost]);
            absent.push(lost);
            absent.sort_unstable();
            shrink(rank, &absent);
            calls.all(rank, &absent);
            assert_refuses(rank, &*backend, &calls.experts[0].0);
            rank.comm().reset(AMPLE).unwrap();
            calls.all(rank, &absent);
        }
        rank.comm().close(AMPLE).unwrap();
    });
}

/// Several end at once, also while the others shrink.
fn at_once(world: &World) {
    let mut rng = world.rng();
    let calls = Calls::new(&mut rng, world.size);
    let mut order: Vec<usize> = (0..world.size).collect();
    order.shuffle(&mut rng);
    let left = rng.random_range(1..world.size - 1);
    let mut lost = order.split_off(left);
    lost.sort_unstable();
    let rounds: Vec<u32> = lost.iter().map(|_| rng.random_range(0..4000)).collect();
    let backend = world.backend.clone();
    world.run(&config(), move |rank| {
        calls.one_sided(rank, &[]);
        if let Some(i) = lost.iter().position(|&l| l == rank.rank) {
            end_in_a_shrink(rank, &*backend, (i, rounds[i]));
        }
        // Who is lost while the others shrink is lost in the next call.
        loop {
            until_lost(rank, &lost);
            let absent = rank.comm().shrink(AMPLE).unwrap();
            let absent: Vec<usize> = absent.ranks().collect();
            assert!(absent.iter().all(|rank| lost.contains(rank)), "{absent:?}");
            if absent == lost {
                break;
            }
        }
        calls.all(rank, &lost);
        rank.comm().close(AMPLE).unwrap();
    });
}

/// The first is just gone; others shrink with those who stay as far as they come.
fn end_in_a_shrink(rank: &Rank, backend: &dyn Backend, (i, rounds): (usize, u32)) -> ! {
    // Nobody is lost before all are back from their calls.
    let _ = rank.settle(ops::barrier().run(rank).result);
    rank.dawdle(rounds);
    if i > 0 {
        let _ = rank.settle(ops::barrier().run(rank).result);
        let _ = rank.comm().shrink(AMPLE);
    }
    backend.kill()
}

/// A rank that sleeps is left out, hears of it, and is known to be gone once it is.
fn left_out(world: &World) {
    let mut rng = world.rng();
    let calls = Calls::new(&mut rng, world.size);
    let sleeper = rng.random_range(0..world.size);
    let faulty: bool = rng.random();
    world.run(&config(), move |rank| {
        calls.one_sided(rank, &[]);
        rank.meet();
        if rank.rank == sleeper {
            if faulty {
                rank.comm().abort();
            }
            rank.meet();
            for _ in 0..2 {
                let start = Instant::now();
                let what = "of who was left out";
                let called = ops::barrier().run(rank).result;
                let stopped = matches!(called, Err(Error::Fault(_)));
                if !stopped {
                    refused(called, "left-out", what);
                }
                refused(rank.comm().reset(AMPLE), "left-out", what);
                refused(rank.comm().shrink(AMPLE), "left-out", what);
                refused(rank.comm().close(AMPLE), "left-out", what);
                rank.comm().abort();
                assert!(start.elapsed() < GRACE, "took {:?}", start.elapsed());
            }
            rank.meet();
            rank.leave();
            rank.meet();
            rank.meet();
            return;
        }
        let start = Instant::now();
        let absent = rank.comm().shrink(BRIEF).unwrap();
        assert!(start.elapsed() < 2 * BRIEF + GRACE, "{:?}", start.elapsed());
        assert_eq!(absent.ranks().collect::<Vec<_>>(), [sleeper]);
        assert_eq!(absent.perhaps_alive(), absent);
        rank.meet();
        // Meanwhile it tries to stop the group.
        calls.one_sided(rank, &[sleeper]);
        let refusal = low_latency::try_send(rank, &calls.low_latency[0]);
        refused(refusal, reason::ABSENT_ALIVE, "low latency");
        rank.meet();
        rank.meet();
        shrink(rank, &[sleeper]);
        calls.all(rank, &[sleeper]);
        rank.meet();
    });
}

/// With all ranks it is a reset.
fn nobody_lost(world: &World) {
    let mut rng = world.rng();
    let probe = crate::faults::Probe::new(&mut rng, world.size);
    let config = crate::gather_linear::config();
    world.run(&config, move |rank| {
        for round in 0..3 {
            probe.run(rank);
            rank.meet();
            if round == 1 {
                rank.comm().abort();
            }
            let absent = rank.comm().shrink(AMPLE).unwrap();
            assert!(absent.is_empty(), "{absent:?}");
            probe.run(rank);
            rank.comm().reset(AMPLE).unwrap();
        }
        probe.run(rank);
    });
}

/// Graphs from before are refused, and those from after run.
fn captured(world: &World) {
    let mut rng = world.rng();
    let mut case = Case::random(&mut rng, world.size, (20, 32, 3, 2 * world.size));
    (case.room, case.dtype) = (Some(20 * 3 * world.size), DataType::BF16);
    case.by = By::of(Transport::OneSided, Transport::OneSided);
    let case = case.with_rows(&mut rng);
    let lost = rng.random_range(0..world.size);
    world.run(&config(), move |rank| {
        let own = Own::of(rank, &case);
        let capture = |rank: &Rank| {
            let mut got = None;
            let graph = rank.device.capture(&rank.stream, &mut || {
                got = Some(own.dispatch(&mut rank.lease(), &case)?);
                Ok(())
            });
            (graph.unwrap(), got.unwrap())
        };
        if rank.rank == lost {
            // Not in a graph, which would keep the communicator.
            let got = own.dispatch(&mut rank.lease(), &case).unwrap();
            check(rank, &case, &got);
            rank.meet();
            rank.leave();
            rank.meet();
            return;
        }
        let (before, got) = capture(rank);
        before.launch(&rank.stream).unwrap();
        check(rank, &case, &got);
        rank.meet();
        until_lost(rank, &[lost]);
        shrink(rank, &[lost]);
        let launched = before.launch(&rank.stream).map(drop);
        refused(launched, reason::ABSENT_RANKS, "a graph from before");
        let (after, got) = capture(rank);
        for _ in 0..2 {
            after.launch(&rank.stream).unwrap();
            check(rank, &case.without(&[lost]), &got);
        }
        rank.meet();
    });
}

/// Adds all trials.
pub fn add(suite: &mut Suite) {
    if !suite.backend().engines().dispatches {
        return;
    }
    suite.add("shrink/nobody_lost", nobody_lost);
    suite.add_from(2, "shrink/killed/one_by_one", one_by_one);
    suite.add_from(3, "shrink/killed/at_once", at_once);
    suite.add_from(2, "shrink/left_out", left_out);
    suite.add_from(2, "shrink/captured", captured);
}
