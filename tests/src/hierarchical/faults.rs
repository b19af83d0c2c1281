//! Whatever a rank of one machine does wrong, every rank of all machines hears of it in time, as a typed error.

use super::{Case, Made, SHAPES, What, all_ranks, at, config, make, settled};
use crate::{
    backend::Rank,
    check::{assert_kind, expect_fault, is_poisoned},
    faults::{AMPLE, GRACE, panics::whose},
    inject::{Jitter, Panics},
    matrix::to_f32,
    oracle,
    suite::{Suite, World},
};
use brigade_device::{
    DataType, Error, FaultKind, FaultRecord, HierarchicalPath, Hierarchy, HierarchyConfig, Point,
    ReduceOp, Result,
};
use rand::{Rng, seq::IndexedRandom};
use std::{
    sync::Arc,
    time::{Duration, Instant},
};

pub(super) const DEADLINE: Duration = Duration::from_millis(300);

/// Calls have a short deadline, once the first is over.
fn impatient() -> HierarchyConfig {
    let mut config = config();
    config.comm.deadline = DEADLINE;
    config.comm.first_deadline = AMPLE;
    config
}

/// A call that differs from the others' in one thing.
#[derive(Clone, Copy, Debug)]
pub(super) struct Spec {
    pub(super) what: What,
    /// Of an all-reduce, or of each rank.
    pub(super) elements: usize,
    pub(super) dtype: DataType,
    pub(super) op: ReduceOp,
    pub(super) choice: Option<HierarchicalPath>,
}

pub(super) const USUAL: Spec = Spec {
    what: What::AllReduce,
    elements: 1000,
    dtype: DataType::F32,
    op: ReduceOp::Sum,
    choice: Some(HierarchicalPath::Slices { count: 5 }),
};

/// Ways to go.
const PATHS: [Option<HierarchicalPath>; 5] = [
    USUAL.choice,
    None,
    Some(HierarchicalPath::Slices { count: 1 }),
    Some(HierarchicalPath::Whole),
    Some(HierarchicalPath::OneShot { count: 4 }),
];

/// Every operation by every path.
fn specs() -> impl Iterator<Item = Spec> {
    let by_paths = |what| {
        PATHS.map(|choice| Spec {
            what,
            choice,
            ..USUAL
        })
    };
    What::ALL.into_iter().flat_map(by_paths)
}

/// Every operation by one path, which is another one in other shapes: where time has to pass, that is enough for each.
fn one_path_each((machines, ranks): (usize, usize)) -> [Spec; 3] {
    let first = machines + ranks;
    let by = |i: usize| PATHS[(first + i) % PATHS.len()];
    [0, 1, 2].map(|i| Spec {
        what: What::ALL[i],
        choice: by(i),
        ..USUAL
    })
}

/// What a rank brings, in every byte: numbers of every type that differ from rank to rank.
const fn brought(rank: usize) -> u8 {
    0x30 + rank as u8
}

/// What is in an output before.
const OLD: u8 = 0x5A;

/// All of what a call gives to a rank.
fn wanted(over: &Hierarchy, spec: Spec) -> Vec<u8> {
    let machines = over.machines();
    let all = 0..machines.size();
    let own = |rank, elements| vec![brought(rank); elements * spec.dtype.bytes()];
    match spec.what {
        What::AllGather => all.flat_map(|rank| own(rank, spec.elements)).collect(),
        _ => {
            let all: Vec<_> = all.map(|rank| to_f32(spec.dtype, &own(rank, 1))).collect();
            let element = oracle::reduce_by_machine(spec.op, &all, machines.ranks(), spec.dtype);
            element.repeat(spec.elements)
        }
    }
}

/// Makes a call; asserts that it took no longer than it may, and that nobody takes its output for a result that is none.
pub(super) fn call(rank: &Rank, over: &Hierarchy, spec: Spec, limit: Duration) -> Result<()> {
    let Spec { what, dtype, .. } = spec;
    let rows = vec![spec.elements; rank.size];
    let made = Made {
        what,
        op: spec.op,
        choice: spec.choice,
        rows: &rows,
    };
    let all = match what {
        What::AllReduce => spec.elements,
        _ => spec.elements * rank.size,
    };
    let (brings, gets) = made.elements(rank.rank, all);
    let filled = |elements: usize, byte| {
        let bytes = vec![byte; elements * dtype.bytes()];
        rank.upload_bytes(dtype, &[elements], &bytes)
    };
    let from = filled(brings, brought(rank.rank));
    let (mut to, input) = match what {
        // In place.
        What::AllReduce => (from, None),
        _ => (filled(gets, OLD), Some(from)),
    };
    let before = rank.raw(to.view());
    let start = Instant::now();
    let result = make(rank, over, made, (input.as_ref(), &mut to));
    let ended_well = result.is_ok();
    let result = settled(rank, over, result);
    let took = start.elapsed();
    assert!(took < limit, "took {took:?}, allowed {limit:?}: {result:?}");
    let bytes = rank.raw(to.view());
    let is_whole = || bytes == wanted(over, spec);
    match &result {
        Ok(_) => assert!(is_whole(), "{spec:?}"),
        Err(error) => {
            // Who heard of it before it began has not written anything, as who gave up waiting in it cannot have; who was through with it as
            // somebody was lost has all of it.
            let waited = matches!(error, Error::Fault(record)
                if record.kind == FaultKind::Timeout && record.rank as usize == rank.rank);
            let is_right = bytes == before && !waited || ended_well && is_whole();
            assert!(is_right || is_poisoned(dtype, &bytes), "{spec:?}: {error}");
        }
    }
    result.map(drop)
}

/// What stopped it, once that was heard: what tells machines of it takes its time.
pub(super) fn heard(over: &Hierarchy) -> Result<()> {
    let start = Instant::now();
    loop {
        match over.check() {
            Ok(()) if start.elapsed() < GRACE => std::thread::yield_now(),
            other => return other,
        }
    }
}

/// Asserts that every later use gives the record, and that after a reset all goes on.
fn goes_on(rank: &Rank, over: &Hierarchy, record: FaultRecord, case: &Case) {
    assert_eq!(expect_fault(over.check(), "check"), record);
    let later = over.lease(&rank.stream).map(drop);
    assert_eq!(expect_fault(later, "a later lease"), record);
    rank.meet();
    over.reset(AMPLE).unwrap();
    case.run(rank, over, None);
    case.run(rank, over, USUAL.choice);
    // What stops the next call is not to reach anybody in this one.
    rank.meet();
}

/// A rank that never calls: all others time out, and all of them name it.
fn never_calls(world: &World, shape: (usize, usize)) {
    let mut rng = world.rng();
    let case = Case::sum(&mut rng, shape, 777);
    let culprit = rng.random_range(0..world.size);
    world.run(&all_ranks(), move |rank| {
        let over = rank.join_machines(shape.0, &impatient());
        for spec in one_path_each(shape) {
            call(rank, &over, spec, AMPLE).unwrap();
            rank.meet();
            let record = if rank.rank == culprit {
                rank.meet();
                expect_fault(heard(&over), "the culprit")
            } else {
                let result = call(rank, &over, spec, DEADLINE + GRACE);
                let record = expect_fault(result, "a rank is missing");
                assert_kind(&record, FaultKind::Timeout, "a rank is missing");
                assert_eq!(record.peer as usize, culprit, "{spec:?}: {record}");
                let operation = spec.what.operation() as u32;
                assert_eq!(record.operation, operation, "{spec:?}");
                rank.meet();
                record
            };
            goes_on(rank, &over, record, &case);
        }
    });
}

/// What differs in one thing from a call, in turn: another operation, longer, of another type, another reduction, on another path.
fn others(spec: Spec) -> Vec<Spec> {
    let operations = What::ALL.into_iter().filter(|&what| what != spec.what);
    let mut all: Vec<_> = operations.map(|what| Spec { what, ..spec }).collect();
    all.push(Spec {
        elements: spec.elements + 1,
        ..spec
    });
    all.push(Spec {
        dtype: DataType::F16,
        ..spec
    });
    if spec.what != What::AllGather {
        all.push(Spec {
            op: ReduceOp::Max,
            ..spec
        });
    }
    let next = PATHS.into_iter().find(|&choice| choice != spec.choice);
    all.extend(next.map(|choice| Spec { choice, ..spec }));
    all
}

/// A rank that makes another call.
fn other_call(world: &World, shape: (usize, usize)) {
    let mut rng = world.rng();
    let case = Case::sum(&mut rng, shape, 777);
    let culprit = rng.random_range(0..world.size);
    world.run(&all_ranks(), move |rank| {
        let over = rank.join_machines(shape.0, &config());
        for usual in one_path_each(shape) {
            for other in others(usual) {
                call(rank, &over, usual, AMPLE).unwrap();
                rank.meet();
                let spec = if rank.rank == culprit { other } else { usual };
                let result = call(rank, &over, spec, GRACE);
                let record = expect_fault(result, "another call");
                assert_kind(&record, FaultKind::Mismatch, "another call");
                let named = [record.rank, record.peer].map(|r| r as usize);
                assert!(named.contains(&culprit), "{other:?} by {culprit}: {record}");
                goes_on(rank, &over, record, &case);
            }
        }
    });
}

/// All ranks of a machine make another call than those of the others, which no group inside a machine can tell: of as many bytes.
fn other_machine(world: &World, shape: (usize, usize)) {
    let mut rng = world.rng();
    let case = Case::sum(&mut rng, shape, 777);
    let culprit = rng.random_range(0..shape.0);
    world.run(&all_ranks(), move |rank| {
        let over = rank.join_machines(shape.0, &config());
        for usual in one_path_each(shape) {
            let other = match usual.what {
                What::AllGather => Spec {
                    elements: 2 * usual.elements,
                    dtype: DataType::F16,
                    ..usual
                },
                _ => Spec {
                    op: ReduceOp::Min,
                    ..usual
                },
            };
            let is_other = over.machines().machine_of(rank.rank) == culprit;
            let spec = if is_other { other } else { usual };
            let record = expect_fault(call(rank, &over, spec, GRACE), "another call");
            assert_kind(&record, FaultKind::Mismatch, "another call");
            let machines = [record.rank, record.peer];
            let machines = machines.map(|r| over.machines().machine_of(r as usize));
            assert!(machines.contains(&culprit), "{culprit}: {record}");
            goes_on(rank, &over, record, &case);
        }
    });
}

/// A rank that leaves: all hear of it at once, with its name.
fn leaves(world: &World, shape: (usize, usize)) {
    let culprit = world.rng().random_range(0..world.size);
    world.run(&all_ranks(), move |rank| {
        for spec in one_path_each(shape) {
            let over = rank.join_machines(shape.0, &config());
            call(rank, &over, spec, AMPLE).unwrap();
            rank.meet();
            if rank.rank != culprit {
                let record = expect_fault(call(rank, &over, spec, GRACE), "a rank has left");
                assert_kind(&record, FaultKind::PeerLost, "a rank has left");
                assert_eq!(record.peer as usize, culprit, "{spec:?}: {record}");
                let reset = over.reset(Duration::from_millis(50));
                assert!(reset.is_err(), "reset without rank {culprit}");
            }
            drop(over);
            rank.meet();
        }
    });
}

/// Stopped from outside while all are in a call, or none: every rank hears who did it.
fn aborted(world: &World, shape: (usize, usize)) {
    let mut rng = world.rng();
    let case = Case::sum(&mut rng, shape, 777);
    let culprit = rng.random_range(0..world.size);
    world.run(&all_ranks(), move |rank| {
        let over = rank.join_machines(shape.0, &config());
        for spec in specs() {
            call(rank, &over, spec, AMPLE).unwrap();
            rank.meet();
            let record = if rank.rank == culprit {
                over.abort();
                expect_fault(over.check(), "who aborts")
            } else {
                expect_fault(call(rank, &over, spec, GRACE), "aborted")
            };
            assert_kind(&record, FaultKind::Aborted, "aborted");
            assert_eq!(record.rank as usize, culprit, "{spec:?}: {record}");
            goes_on(rank, &over, record, &case);
        }
    });
}

/// Delays at any step of any phase change nothing but the time.
fn delays(world: &World, shape: (usize, usize)) {
    let mut rng = world.rng();
    let cases: Vec<_> = (0..6)
        .map(|i| Case::sum(&mut rng, shape, 500 * i + 7))
        .collect();
    let jitter = Jitter::new(&mut rng, 9, 400);
    let config = HierarchyConfig {
        parallelism: Some(rng.random_range(2..5)),
        ..config()
    };
    world.run_injected(&all_ranks(), Arc::new(jitter), move |rank| {
        let over = rank.join_machines(shape.0, &config);
        for case in &cases {
            for count in [1, 4, 11] {
                case.run(rank, &over, Some(HierarchicalPath::Slices { count }));
            }
        }
    });
}

/// A hook that panics on a track's thread: its rank hears why, all others that it is to blame, and all can go on.
fn panics(world: &World, shape: (usize, usize)) {
    let mut rng = world.rng();
    let case = Case::sum(&mut rng, shape, 777);
    let arms = rng.random_range(0..world.size);
    // Where every track along the rail comes.
    let points = [Point::Begin, Point::Arrive, Point::Meet];
    let hook = Panics::at(*points.choose(&mut rng).unwrap());
    world.run_injected(&all_ranks(), hook.clone(), move |rank| {
        hook.spare_caller();
        let over = rank.join_machines(shape.0, &config());
        for what in What::ALL {
            let spec = Spec { what, ..USUAL };
            call(rank, &over, spec, AMPLE).unwrap();
            rank.meet();
            if rank.rank == arms {
                hook.arm();
            }
            rank.meet();
            let result = call(rank, &over, spec, GRACE);
            let culprit = whose(rank, &result);
            let record = expect_fault(heard(&over), "a panic");
            assert_kind(&record, FaultKind::Aborted, "a panic");
            assert_eq!(record.rank as usize, culprit, "{spec:?}: {record}");
            goes_on(rank, &over, record, &case);
        }
    });
}

/// Adds the contracts.
pub fn add(suite: &mut Suite) {
    let (injects, asks_callers) = (suite.backend().injects(), suite.backend().asks_callers());
    for shape in SHAPES.into_iter().filter(|(m, r)| m * r > 1) {
        at(suite, shape, "never_calls", never_calls);
        at(suite, shape, "other_call", other_call);
        at(suite, shape, "leaves", leaves);
        at(suite, shape, "aborted", aborted);
        if shape.0 > 1 {
            at(suite, shape, "other_machine", other_machine);
            if injects && asks_callers {
                at(suite, shape, "panics", panics);
            }
        }
        if injects {
            at(suite, shape, "delays", delays);
        }
    }
}
