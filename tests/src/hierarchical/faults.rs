//! Whatever a rank of one machine does wrong, every rank of all machines hears of it in time, as a typed error.

use super::{Case, SHAPES, all_ranks, at, config, settled};
use crate::{
    backend::Rank,
    check::{assert_kind, expect_fault, is_poisoned},
    faults::{AMPLE, GRACE},
    inject::Jitter,
    matrix::to_f32,
    oracle,
    suite::{Suite, World},
};
use brigade_device::{
    AllGatherParams, DataType, FaultKind, FaultRecord, HierarchicalAllReduceParams,
    HierarchicalPath, Hierarchy, HierarchyConfig, Operation, ReduceOp, ReduceScatterParams, Result,
};
use rand::Rng;
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

#[derive(Clone, Copy, Debug)]
pub(super) enum What {
    AllReduce,
    ReduceScatter,
    AllGather,
}

/// A call that differs from the others' in one thing.
#[derive(Clone, Copy, Debug)]
pub(super) struct Spec {
    pub(super) what: What,
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

/// Whether this is all of what an all-reduce of `call` gives, in which all elements of all ranks are the same.
fn is_whole(rank: &Rank, over: &Hierarchy, spec: Spec, bytes: &[u8]) -> bool {
    let own = to_f32(spec.dtype, &vec![0x3C; spec.dtype.bytes()]);
    let all = vec![own; rank.size];
    let element = match spec.choice {
        Some(HierarchicalPath::Whole) => oracle::reduce(spec.op, &all, spec.dtype),
        _ => oracle::reduce_by_machine(spec.op, &all, over.machines().ranks(), spec.dtype),
    };
    matches!(spec.what, What::AllReduce) && bytes.chunks(element.len()).all(|x| x == element)
}

/// Makes a call; asserts that it took no longer than it may, and that nobody takes its output for a result.
pub(super) fn call(rank: &Rank, over: &Hierarchy, spec: Spec, limit: Duration) -> Result<()> {
    let bytes = vec![0x3C; spec.elements * spec.dtype.bytes()];
    let mut data = rank.upload_bytes(spec.dtype, &[spec.elements], &bytes);
    let start = Instant::now();
    let result = over.lease(&rank.stream).and_then(|mut lease| {
        let rows = vec![spec.elements; rank.size];
        let mut all = rank.poisoned(spec.dtype, &[spec.elements * rank.size]);
        match spec.what {
            What::AllReduce => lease.all_reduce(HierarchicalAllReduceParams {
                data: data.view_mut(),
                from: None,
                op: spec.op,
                choice: spec.choice,
            }),
            What::ReduceScatter => lease.reduce_scatter(ReduceScatterParams {
                from: all.view(),
                rows_per_rank: &rows,
                to: data.view_mut(),
                op: spec.op,
            }),
            What::AllGather => lease.all_gather(AllGatherParams {
                from: data.view(),
                rows_per_rank: &rows,
                to: all.view_mut(),
            }),
        }
    });
    let ended_well = result.is_ok();
    let result = settled(rank, over, result);
    let took = start.elapsed();
    assert!(took < limit, "took {took:?}, allowed {limit:?}: {result:?}");
    let bytes = rank.raw(data.view());
    if result.is_ok() && matches!(spec.choice, Some(HierarchicalPath::Slices { .. })) {
        let whole = is_whole(rank, over, spec, &bytes);
        assert!(whole || !matches!(spec.what, What::AllReduce), "{spec:?}");
    }
    if result.is_err() {
        // Who heard of it before it began has not written anything.
        let untouched = bytes.iter().all(|&b| b == 0x3C);
        // Who was through with it as somebody was lost has all of it.
        let whole = ended_well && is_whole(rank, over, spec, &bytes);
        let poisoned = is_poisoned(spec.dtype, &bytes);
        assert!(untouched || whole || poisoned, "{result:?}");
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
        for choice in [
            USUAL.choice,
            None,
            Some(HierarchicalPath::Slices { count: 1 }),
        ] {
            case.run(rank, &over, choice);
            rank.meet();
            let record = if rank.rank == culprit {
                rank.meet();
                expect_fault(heard(&over), "the culprit")
            } else {
                let spec = Spec { choice, ..USUAL };
                let result = call(rank, &over, spec, DEADLINE + GRACE);
                let record = expect_fault(result, "a rank is missing");
                assert_kind(&record, FaultKind::Timeout, "a rank is missing");
                assert_eq!(record.peer as usize, culprit, "{choice:?}: {record}");
                let operation = Operation::HierarchicalAllReduce as u32;
                assert_eq!(record.operation, operation);
                rank.meet();
                record
            };
            goes_on(rank, &over, record, &case);
        }
    });
}

/// A rank that makes another call: longer, of another type, another operation, on another path.
fn other_call(world: &World, shape: (usize, usize)) {
    let mut rng = world.rng();
    let case = Case::sum(&mut rng, shape, 777);
    let culprit = rng.random_range(0..world.size);
    let others = [
        Spec {
            what: What::ReduceScatter,
            ..USUAL
        },
        Spec {
            what: What::AllGather,
            ..USUAL
        },
        Spec {
            elements: 1001,
            ..USUAL
        },
        Spec {
            dtype: DataType::F16,
            ..USUAL
        },
        Spec {
            op: ReduceOp::Max,
            ..USUAL
        },
        Spec {
            choice: Some(HierarchicalPath::Whole),
            ..USUAL
        },
    ];
    world.run(&all_ranks(), move |rank| {
        let over = rank.join_machines(shape.0, &config());
        for other in others {
            case.run(rank, &over, None);
            rank.meet();
            let spec = if rank.rank == culprit { other } else { USUAL };
            let result = call(rank, &over, spec, GRACE);
            let record = expect_fault(result, "another call");
            assert_kind(&record, FaultKind::Mismatch, "another call");
            let named = [record.rank, record.peer].map(|r| r as usize);
            assert!(named.contains(&culprit), "{other:?} by {culprit}: {record}");
            goes_on(rank, &over, record, &case);
        }
    });
}

/// All ranks of a machine make another call than those of the others, which no group inside a machine can tell.
fn other_machine(world: &World, shape: (usize, usize)) {
    let mut rng = world.rng();
    let case = Case::sum(&mut rng, shape, 777);
    let culprit = rng.random_range(0..shape.0);
    world.run(&all_ranks(), move |rank| {
        let over = rank.join_machines(shape.0, &config());
        for choice in [None, USUAL.choice] {
            let machine = over.machines().machine_of(rank.rank);
            let op = [ReduceOp::Sum, ReduceOp::Min][usize::from(machine == culprit)];
            let spec = Spec {
                op,
                choice,
                ..USUAL
            };
            let record = expect_fault(call(rank, &over, spec, GRACE), "another operation");
            assert_kind(&record, FaultKind::Mismatch, "another operation");
            let machines = [record.rank, record.peer];
            let machines = machines.map(|r| over.machines().machine_of(r as usize));
            assert!(machines.contains(&culprit), "{culprit}: {record}");
            goes_on(rank, &over, record, &case);
        }
    });
}

/// A rank that leaves: all hear of it at once, with its name.
fn leaves(world: &World, shape: (usize, usize)) {
    let mut rng = world.rng();
    let case = Case::sum(&mut rng, shape, 777);
    let culprit = rng.random_range(0..world.size);
    world.run(&all_ranks(), move |rank| {
        for choice in [USUAL.choice, None] {
            let over = rank.join_machines(shape.0, &config());
            case.run(rank, &over, choice);
            rank.meet();
            if rank.rank != culprit {
                let spec = Spec { choice, ..USUAL };
                let record = expect_fault(call(rank, &over, spec, GRACE), "a rank has left");
                assert_kind(&record, FaultKind::PeerLost, "a rank has left");
                assert_eq!(record.peer as usize, culprit, "{record}");
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
        case.run(rank, &over, None);
        rank.meet();
        let record = if rank.rank == culprit {
            over.abort();
            expect_fault(over.check(), "who aborts")
        } else {
            expect_fault(call(rank, &over, USUAL, GRACE), "aborted")
        };
        assert_kind(&record, FaultKind::Aborted, "aborted");
        assert_eq!(record.rank as usize, culprit, "{record}");
        goes_on(rank, &over, record, &case);
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

/// Adds the contracts.
pub fn add(suite: &mut Suite) {
    let injects = suite.backend().injects();
    for shape in SHAPES.into_iter().filter(|(m, r)| m * r > 1) {
        at(suite, shape, "never_calls", never_calls);
        at(suite, shape, "other_call", other_call);
        at(suite, shape, "leaves", leaves);
        at(suite, shape, "aborted", aborted);
        if shape.0 > 1 {
            at(suite, shape, "other_machine", other_machine);
        }
        if injects {
            at(suite, shape, "delays", delays);
        }
    }
}
