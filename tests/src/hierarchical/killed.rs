//! Processes that are killed in the middle of slices, one or all of a machine: the others hear of it at once, and go on without that
//! machine.

use super::{
    Case, What, all_ranks, config,
    experts::{Trip, with_experts},
    faults::{Spec, USUAL, call},
};
use crate::{
    backend::{Rank, Seat},
    check::{assert_kind, expect_fault},
    faults::{AMPLE, GRACE},
    killed::survivors,
    processes::{self, KILLED},
    suite::{Suite, World},
};
use brigade_device::{FaultKind, FaultRecord, HierarchicalPath, Hierarchy, Result};
use brigade_group::TcpConfig;
use rand::Rng;
use std::{
    ops::Range,
    sync::Arc,
    time::{Duration, Instant},
};

const MANY: Option<HierarchicalPath> = Some(HierarchicalPath::Slices { count: 20 });

const SHARES: Option<HierarchicalPath> = Some(HierarchicalPath::OneShot { count: 20 });

/// What goes on while a process is killed: each operation in turn, in many slices and then as a whole.
fn long() -> impl Iterator<Item = Spec> {
    let by = |choice| {
        What::ALL.map(|what| Spec {
            what,
            elements: match what {
                What::AllReduce => 50_000,
                _ => 10_000,
            },
            choice,
            ..USUAL
        })
    };
    let all = [by(MANY), by(Some(HierarchicalPath::Whole)), by(SHARES)];
    all.concat().into_iter().cycle()
}

/// Makes these calls, each within so long.
fn calls<'a>(
    rank: &'a Rank,
    over: &'a Hierarchy,
    limit: Duration,
) -> impl FnMut() -> Result<()> + use<'a> {
    let mut long = long();
    move || {
        long.next()
            .map_or(Ok(()), |spec| call(rank, over, spec, limit))
    }
}

/// Makes calls until this process is killed, in so many rounds of idling. Others may be killed before.
fn until_killed(rank: &Rank, rounds: u32, mut call: impl FnMut() -> Result<()>) {
    std::thread::scope(|s| {
        s.spawn(|| {
            rank.dawdle(rounds);
            processes::kill();
        });
        while call().is_ok() {}
    });
}

/// Makes calls until one fails, each in time; it says that one of these ranks is lost.
fn until_lost(lost: &Range<usize>, mut call: impl FnMut() -> Result<()>) -> FaultRecord {
    let record = loop {
        if let Err(error) = call() {
            break expect_fault::<()>(Err(error), "a rank was killed");
        }
    };
    assert_kind(&record, FaultKind::PeerLost, "a rank was killed");
    assert!(lost.contains(&(record.peer as usize)), "{record}");
    record
}

/// A hierarchy in which all have made a call.
fn begun(rank: &Rank, machines: usize, case: &Case) -> Hierarchy {
    let over = rank.join_machines(machines, &config());
    case.run(rank, &over, None);
    rank.meet();
    // Nobody is killed before all are back from meeting. Who is slow may hear of it here already.
    let _ = call(rank, &over, USUAL, AMPLE);
    over
}

/// A rank.
fn one(world: &World, shape: (usize, usize)) {
    let mut rng = world.rng();
    let case = Case::sum(&mut rng, shape, 777);
    let culprit = rng.random_range(0..world.size);
    let rounds = rng.random_range(0..3000);
    world.run(&all_ranks(), move |rank| {
        let over = begun(rank, shape.0, &case);
        if rank.rank == culprit {
            return until_killed(rank, rounds, calls(rank, &over, AMPLE));
        }
        let lost = culprit..culprit + 1;
        until_lost(&lost, calls(rank, &over, 2 * GRACE));
    });
}

/// A rank, while rows go to experts and back.
fn with_rows(world: &World, shape: (usize, usize)) {
    let mut rng = world.rng();
    let trip = Trip::random(&mut rng, shape);
    let culprit = rng.random_range(0..world.size);
    let rounds = rng.random_range(0..3000);
    world.run(&all_ranks(), move |rank| {
        let over = rank.join_machines(shape.0, &with_experts());
        trip.run(rank, &over).unwrap();
        rank.meet();
        // Nobody is killed before all are back from meeting. Who is slow may hear of it here already.
        let _ = trip.run(rank, &over);
        if rank.rank == culprit {
            return until_killed(rank, rounds, || trip.run(rank, &over));
        }
        let lost = culprit..culprit + 1;
        until_lost(&lost, || {
            let start = Instant::now();
            let result = trip.run(rank, &over);
            let took = start.elapsed();
            assert!(took < 2 * GRACE, "took {took:?}: {result:?}");
            result
        });
    });
}

/// All ranks of a machine, each at its own time. Those of the others form a group of their own, and go on across the machines that are
/// left.
fn machine(world: &World, (machines, ranks): (usize, usize)) {
    let mut rng = world.rng();
    let case = Case::sum(&mut rng, (machines, ranks), 777);
    let later: Vec<_> = [100, 20_011]
        .map(|len| Case::sum(&mut rng, (machines - 1, ranks), len))
        .into();
    let first = rng.random_range(0..machines) * ranks;
    let lost = first..first + ranks;
    let rounds: Vec<u32> = lost.clone().map(|_| rng.random_range(0..3000)).collect();
    world.run(&all_ranks(), move |rank| {
        let over = begun(rank, machines, &case);
        if lost.contains(&rank.rank) {
            let rounds = rounds[rank.rank - first];
            return until_killed(rank, rounds, calls(rank, &over, AMPLE));
        }
        let record = until_lost(&lost, calls(rank, &over, 2 * GRACE));
        assert_eq!(expect_fault(over.check(), "check"), record);
        let reset = over.reset(Duration::from_millis(50));
        assert!(reset.is_err(), "reset without machine {lost:?}");
        // A machine is lost as a whole: whoever is named, it is the one of all who go.
        let all = over.machines();
        let gone = all.inside(all.machine_of(record.peer as usize));
        assert_eq!(gone, lost);
        drop(over);
        rank.leave();
        let gone: Vec<_> = gone.collect();
        let group = survivors(&TcpConfig::from_env().unwrap(), &gone, 0);
        let seat = Seat {
            device: Arc::clone(&rank.device),
            boot: Box::new(group),
        };
        let left = Rank::join(seat, &all_ranks());
        assert_eq!(left.size, (machines - 1) * ranks);
        let over = left.join_machines(machines - 1, &config());
        for case in &later {
            for choice in [None, Some(HierarchicalPath::Whole), MANY, SHARES] {
                case.run(&left, &over, choice);
            }
        }
    });
}

/// Adds the contracts.
pub fn add(suite: &mut Suite) {
    for shape in [(2, 1), (2, 2), (3, 2), (3, 1)] {
        let (machines, ranks) = shape;
        let name = format!("{KILLED}/hierarchical_{machines}x{ranks}");
        suite.add_across(shape, &name, move |world| one(world, shape));
    }
    for shape in [(2, 1), (2, 2)] {
        let (machines, ranks) = shape;
        let name = format!("{KILLED}/hierarchical_experts_{machines}x{ranks}");
        suite.add_across(shape, &name, move |world| with_rows(world, shape));
    }
    for shape in [(2, 2), (3, 1), (3, 2)] {
        let (machines, ranks) = shape;
        let name = format!("{KILLED}/hierarchical_machine_of_{machines}x{ranks}");
        suite.add_across(shape, &name, move |world| machine(world, shape));
    }
}
