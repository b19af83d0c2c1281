//! Resets: new generations, in which old flags and old data mean nothing.

use crate::{
    check::{assert_kind, expect_fault},
    faults::{AMPLE, Probe},
    gather_linear::config,
    ops,
    suite::{Suite, World},
};
use brigade_device::{Error, FaultKind};
use rand::Rng;
use std::time::{Duration, Instant};

/// Generations in a row, more than a flag can count, with and without a fault before each.
fn generations(world: &World) {
    const GENERATIONS: usize = 300;
    let mut rng = world.rng();
    let probe = Probe::new(&mut rng, world.size);
    let culprits: Vec<Option<(usize, u32)>> = (0..GENERATIONS)
        .map(|_| {
            let fault = rng.random_ratio(2, 3);
            fault.then(|| (rng.random_range(0..world.size), rng.random_range(0..60)))
        })
        .collect();
    world.run(&config(), move |rank| {
        for (i, culprit) in culprits.iter().enumerate() {
            if i % 3 == 0 {
                probe.run(rank);
            } else {
                probe.sum(rank);
            }
            if culprit.is_some() {
                // An abort would end what others still wait for in the call before.
                rank.meet();
            }
            match *culprit {
                Some((culprit, rounds)) if culprit == rank.rank => {
                    rank.dawdle(rounds);
                    rank.comm().abort();
                }
                Some(_) => {
                    // The culprit does not come to this call, so it ends with the abort.
                    let record = expect_fault(ops::barrier().run(rank).result, "aborted");
                    assert_kind(&record, FaultKind::Aborted, "aborted");
                }
                None => {}
            }
            rank.comm().reset(AMPLE).unwrap();
        }
        probe.run(rank);
    });
}

/// A reset that a rank does not come to ends in time, names it, and can be tried again.
fn without_a_rank(world: &World) {
    let within = Duration::from_millis(200);
    let mut rng = world.rng();
    let probe = Probe::new(&mut rng, world.size);
    let missing = rng.random_range(0..world.size);
    world.run(&config(), move |rank| {
        for _ in 0..2 {
            probe.run(rank);
            rank.meet();
            if rank.rank == missing {
                rank.comm().abort();
                rank.meet();
            } else {
                let start = Instant::now();
                match rank.comm().reset(within) {
                    Err(Error::Group { what, .. }) => {
                        assert!(what.contains(&format!("ranks [{missing}]")), "{what}");
                    }
                    other => panic!("{other:?} instead of a missing rank"),
                }
                assert!(start.elapsed() < within + Duration::from_secs(1));
                rank.meet();
            }
            rank.comm().reset(AMPLE).unwrap();
        }
        probe.run(rank);
    });
}

/// A reset that a rank did not come to leaves the others stopped: they have let go of the old generation.
fn stays_stopped(world: &World) {
    let mut rng = world.rng();
    let probe = Probe::new(&mut rng, world.size);
    let missing = rng.random_range(0..world.size);
    world.run(&config(), move |rank| {
        probe.run(rank);
        rank.meet();
        if rank.rank != missing {
            assert!(rank.comm().reset(Duration::from_millis(50)).is_err());
            for _ in 0..2 {
                let record = expect_fault(ops::barrier().run(rank).result, "a call");
                assert_kind(&record, FaultKind::Timeout, "a call");
            }
        }
        rank.meet();
        rank.comm().reset(AMPLE).unwrap();
        probe.run(rank);
    });
}

/// As many resets later as a flag can count, a fault of then stops nobody.
fn laps(world: &World) {
    const LAP: usize = 255;
    let probe = Probe::new(&mut world.rng(), world.size);
    world.run(&config(), move |rank| {
        probe.run(rank);
        rank.meet();
        rank.comm().abort();
        for _ in 0..LAP {
            rank.comm().reset(AMPLE).unwrap();
        }
        rank.comm().check().unwrap();
        probe.run(rank);
    });
}

pub(super) fn add(suite: &mut Suite) {
    suite.add("reset/generations", generations);
    suite.add_from(2, "reset/without_a_rank", without_a_rank);
    suite.add_from(2, "reset/stays_stopped", stays_stopped);
    suite.add_from(2, "reset/laps", laps);
}
