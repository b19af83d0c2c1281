//! Whatever a rank does wrong with rows to experts, every rank of all machines hears of it in time, as a typed error.

use super::{any, case, check_all, combined, dispatch, round_trip, with_experts};
use crate::{
    backend::Rank,
    check::{assert_kind, expect_fault, expect_invalid},
    experts::{back::Back, case::Case, own::Own},
    faults::{AMPLE, GRACE},
    hierarchical::{
        all_ranks,
        faults::{DEADLINE, heard},
    },
    inject::Jitter,
    suite::World,
};
use brigade_device::{
    DataType, FaultKind, FaultRecord, Hierarchy, HierarchyConfig, Operation, Result, Route,
};
use rand::{Rng, SeedableRng, rngs::StdRng};
use std::{sync::Arc, time::Instant};

/// Calls have a short deadline, once the first is over.
fn impatient() -> HierarchyConfig {
    let mut config = with_experts();
    config.comm.deadline = DEADLINE;
    config.comm.first_deadline = AMPLE;
    config
}

/// More rows than there is room for: every rank of all machines hears of it, in this call or the next; and after a reset all goes on,
/// with new handles.
pub(super) fn overflow(world: &World, shape: (usize, usize)) {
    let mut rng = world.rng();
    let mut case = case(&mut rng, shape, (8, 16, 1, world.size));
    case = case.with_tokens(&mut rng, &vec![8; world.size]);
    let full = rng.random_range(0..world.size) as i64;
    case.ids.iter_mut().for_each(|ids| ids.fill(full));
    case.dtype = DataType::BF16;
    let case = case.with_rows(&mut rng);
    let room = 8 * world.size;
    let fits = Case {
        room: Some(room),
        ..case.clone()
    };
    let small = Case {
        room: Some(room - 1),
        ..case
    };
    world.run(&all_ranks(), move |rank| {
        let over = rank.join_machines(shape.0, &with_experts());
        let before = dispatch(rank, &over, &fits).unwrap();
        check_all(rank, &over, &fits, &before);
        // Who had no part in it may hear of it in the next call.
        let result = dispatch(rank, &over, &small);
        let result = result.and_then(|got| combined(rank, &over, &got.handle, &small));
        let record = expect_fault(result, "one row too many");
        assert_kind(&record, FaultKind::Overflow, "one row too many");
        rank.meet();
        over.reset(AMPLE).unwrap();
        let refused = combined(rank, &over, &before.handle, &fits);
        assert_eq!(expect_invalid(refused, "one from before a reset"), "handle");
        let got = dispatch(rank, &over, &fits).unwrap();
        check_all(rank, &over, &fits, &got);
        combined(rank, &over, &got.handle, &fits).unwrap();
    });
}

/// Makes a call and asserts that it ended in time.
fn timed<R>(call: impl FnOnce() -> Result<R>, what: &str) -> Result<R> {
    let start = Instant::now();
    let result = call();
    let took = start.elapsed();
    assert!(took < DEADLINE + GRACE, "{what} took {took:?}");
    result
}

/// After a fault: a reset, and all is as before.
fn goes_on(rank: &Rank, over: &Hierarchy, record: FaultRecord, (case, back): &(Case, Back)) {
    assert_eq!(expect_fault(over.check(), "check"), record);
    rank.meet();
    over.reset(AMPLE).unwrap();
    round_trip(rank, over, case, back);
    rank.meet();
}

/// A rank that makes no dispatch, or no combine: all others time out, and name it.
pub(super) fn never_calls(world: &World, shape: (usize, usize)) {
    let mut rng = world.rng();
    let case = case(&mut rng, shape, (9, 32, 3, 7));
    let usual = any(&mut rng, case);
    let culprit = rng.random_range(0..world.size);
    world.run(&all_ranks(), move |rank| {
        let over = rank.join_machines(shape.0, &impatient());
        let (case, back) = &usual;
        for operation in [Operation::Dispatch, Operation::Combine] {
            let got = round_trip(rank, &over, case, back);
            rank.meet();
            let record = if rank.rank == culprit {
                rank.meet();
                expect_fault(heard(&over), "the culprit")
            } else {
                let result = timed(
                    || match operation {
                        Operation::Dispatch => {
                            dispatch(rank, &over, case).and_then(|_| heard(&over))
                        }
                        _ => {
                            let floats = Case {
                                dtype: DataType::F32,
                                ..case.clone()
                            };
                            combined(rank, &over, &got.handle, &floats).map(drop)
                        }
                    },
                    "a call without one rank",
                );
                let record = expect_fault(result, "a rank is missing");
                assert_kind(&record, FaultKind::Timeout, "a rank is missing");
                assert_eq!(record.peer as usize, culprit, "{record}");
                assert_eq!(record.operation, operation as u32);
                rank.meet();
                record
            };
            goes_on(rank, &over, record, &usual);
        }
    });
}

/// A rank, or a machine, that makes another call: with other room, ids that number otherwise, wider rows; or a combine.
pub(super) fn other_call(world: &World, shape: (usize, usize)) {
    let mut rng = world.rng();
    let mut case = case(&mut rng, shape, (9, 32, 3, 7));
    case.room = Some(9 * world.size);
    let back = Back::random(&mut rng, &case);
    let usual = (case, back);
    let culprit = rng.random_range(0..world.size);
    world.run(&all_ranks(), move |rank| {
        let over = rank.join_machines(shape.0, &with_experts());
        let (case, _) = &usual;
        let more = Case {
            room: case.room.map(|room| room + 1),
            ..case.clone()
        };
        let mut wider = case.clone();
        wider.hidden *= 2;
        let wider = wider.with_rows(&mut StdRng::seed_from_u64(3));
        let machines = over.machines();
        let machine = machines.machine_of(culprit);
        for (other, whole_machine) in [(&more, false), (&wider, false), (&more, true)] {
            if whole_machine && machines.count() == 1 {
                continue;
            }
            rank.meet();
            let is_other = match whole_machine {
                true => machines.machine_of(rank.rank) == machine,
                false => rank.rank == culprit,
            };
            let case = if is_other { other } else { case };
            // On one machine with room for rows, nobody waits for counts.
            let call = || dispatch(rank, &over, case).and_then(|_| heard(&over));
            let result = timed(call, "another call");
            let record = expect_fault(result, "another call");
            assert_kind(&record, FaultKind::Mismatch, "another call");
            let named = [record.rank, record.peer].map(|r| machines.machine_of(r as usize));
            assert!(named.contains(&machine), "{culprit}: {record}");
            goes_on(rank, &over, record, &usual);
        }
    });
}

/// Machines that send rows the ways of different calls: their numbers of rows do not fit, and all hear of it.
pub(super) fn other_ways(world: &World, shape: (usize, usize)) {
    let mut rng = world.rng();
    let mut case = case(&mut rng, shape, (8, 32, 2, world.size));
    case = case.with_tokens(&mut rng, &vec![8; world.size]);
    case.dtype = DataType::F32;
    // All rows of the one to the first rank, of the other to the last one.
    let cases = [0, world.size as i64 - 1].map(|expert| {
        let mut case = case.clone();
        case.ids.iter_mut().for_each(|ids| ids.fill(expert));
        case.with_rows(&mut rng)
    });
    let back = Back::random(&mut rng, &cases[0]);
    let usual = (cases[0].clone(), back);
    world.run(&all_ranks(), move |rank| {
        let over = rank.join_machines(shape.0, &with_experts());
        let handles = [0, 1].map(|i| dispatch(rank, &over, &cases[i]).unwrap().handle);
        rank.meet();
        let first = over.machines().machine_of(rank.rank) == 0;
        let (case, handle) = match first {
            true => (&cases[0], &handles[0]),
            false => (&cases[1], &handles[1]),
        };
        let again = |over: &Hierarchy| {
            let mut lease = over.lease(&rank.stream)?;
            Own::of(rank, case).dispatch_by(&mut lease, case, Route::Again(handle))?;
            drop(lease);
            combined(rank, over, handle, case)?;
            heard(over)
        };
        let record = expect_fault(timed(|| again(&over), "other ways"), "other ways");
        assert_kind(&record, FaultKind::Mismatch, "other ways");
        goes_on(rank, &over, record, &usual);
    });
}

/// A rank that leaves before a dispatch or a combine: all hear of it, with its name.
pub(super) fn leaves(world: &World, shape: (usize, usize)) {
    let mut rng = world.rng();
    let case = case(&mut rng, shape, (9, 32, 3, 7));
    let case = Case {
        dtype: DataType::F32,
        ..case
    };
    let case = case.with_rows(&mut rng);
    let culprit = rng.random_range(0..world.size);
    world.run(&all_ranks(), move |rank| {
        for combines in [false, true] {
            let over = rank.join_machines(shape.0, &with_experts());
            let got = dispatch(rank, &over, &case).unwrap();
            rank.meet();
            if rank.rank != culprit {
                let call = || match combines {
                    true => combined(rank, &over, &got.handle, &case).map(drop),
                    false => dispatch(rank, &over, &case).map(drop),
                };
                let record = expect_fault(timed(call, "without one rank"), "a rank has left");
                assert_kind(&record, FaultKind::PeerLost, "a rank has left");
                assert_eq!(record.peer as usize, culprit, "{record}");
            }
            drop((got, over));
            rank.meet();
        }
    });
}

/// Delays at any step change nothing but the time.
pub(super) fn delays(world: &World, shape: (usize, usize)) {
    let mut rng = world.rng();
    let cases = [0, 1, 2].map(|_| {
        let case = case(&mut rng, shape, (30, 48, 3, 9));
        any(&mut rng, case)
    });
    let jitter = Jitter::new(&mut rng, 9, 400);
    world.run_injected(&all_ranks(), Arc::new(jitter), move |rank| {
        let over = rank.join_machines(shape.0, &with_experts());
        for (case, back) in &cases {
            round_trip(rank, &over, case, back);
        }
    });
}
