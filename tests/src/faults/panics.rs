//! A hook that panics on a thread that the device has for communication: the rank lives, and the call fails on it alone.

use super::{
    AMPLE, GRACE, Probe, assert_in_time, assert_stays_stopped,
    injected::{assert_no_result, undisturbed},
};
use crate::{
    backend::Rank,
    check::{assert_kind, expect_fault},
    gather_linear::config,
    inject::Panics,
    ops::{Linear, Op},
    suite::{Suite, World},
    themes::{modes, scatters, with_a_hook},
};
use brigade_device::{Error, FaultKind, OverlapMode, Point, Result};
use rand::Rng;
use std::time::Instant;

/// The rank on whose thread it was: that alone has an error of its own, which says so.
pub fn whose<R>(rank: &Rank, result: &Result<R>) -> usize {
    let own = match result {
        Err(error) if !matches!(error, Error::Fault(_)) => {
            assert!(error.to_string().contains("panicked"), "{error}");
            true
        }
        _ => false,
    };
    let all = rank.share(&[own.into()]);
    let ranks: Vec<_> = (0..rank.size).filter(|&r| all[r] == [1]).collect();
    let [culprit] = ranks[..] else {
        panic!("it was on one rank, not on {ranks:?}");
    };
    culprit
}

/// The rank itself hears why, all others that it is to blame, in this call or the next; and the group can go on.
fn panics(world: &World, op: Op) {
    let mut rng = world.rng();
    let probe = Probe::new(&mut rng, world.size);
    let arms = rng.random_range(0..world.size);
    // What that thread has in every mode.
    let hook = Panics::at(Point::Announce);
    world.run_injected(&config(), hook.clone(), move |rank| {
        hook.spare_caller();
        probe.run(rank);
        let want = undisturbed(rank, &op);
        rank.meet();
        if rank.rank == arms {
            hook.arm();
        }
        rank.meet();
        let start = Instant::now();
        let ended = op.run(rank);
        assert_in_time(start, GRACE, &op.name);
        let culprit = whose(rank, &ended.result);
        let record = expect_fault(rank.comm().check(), &op.name);
        assert_kind(&record, FaultKind::Aborted, &op.name);
        assert_eq!(record.rank as usize, culprit, "{}: {record}", op.name);
        assert_no_result(rank, &op, &ended, &want);
        assert!(!matches!(ended.result, Err(Error::Fault(f)) if f != record));
        assert_stays_stopped(rank, record);
        rank.comm().reset(AMPLE).unwrap();
        assert_eq!(undisturbed(rank, &op), want, "after a panic");
        probe.run(rank);
    });
}

/// Adds the contracts: the linears in every mode that overlaps, which such a thread carries.
pub(super) fn add(suite: &mut Suite) {
    let backend = suite.backend();
    if !backend.injects() || !backend.asks_callers() {
        return;
    }
    let mut ops = Vec::new();
    for (name, choices) in modes(with_a_hook(backend.engines())) {
        let choice = choices.last().copied().flatten();
        if matches!(choice, None | Some(OverlapMode::Off)) {
            continue;
        }
        let linear = Linear::new(3, 6, choice);
        ops.push((format!("gather_{name}"), linear.gather()));
        if scatters(choice) {
            ops.push((format!("twin_{name}"), linear.scatter()));
        }
    }
    for (name, op) in ops {
        suite.add_from(2, &format!("faults/panics/{name}"), move |world| {
            panics(world, op.clone());
        });
    }
}
