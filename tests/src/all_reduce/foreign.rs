//! Sums that NCCL carries: close to what f64 gives, and like any other call where something goes wrong. Their bits are not
//! promised.

use super::{Case, OPS, Place};
use crate::{
    backend::Rank,
    check::{assert_kind, compare, expect_fault, expect_unsupported, norm, tolerance},
    faults::{AMPLE, impatient},
    gather_linear::config,
    layer::FLOATS,
    matrix::to_f64,
    suite::{Suite, World},
};
use brigade_device::{
    AllReduceAlgorithm, AllReduceParams, CommConfig, DataType, FaultKind, NcclUse, Plan, ReduceOp,
    SumOrder,
};
use brigade_plan::reason;
use rand::{Rng, rngs::StdRng};

const NCCL: Option<AllReduceAlgorithm> = Some(AllReduceAlgorithm::Nccl);

fn joined(config: CommConfig) -> CommConfig {
    CommConfig {
        nccl: NcclUse::Forced,
        ..config
    }
}

/// What the inputs come to in f64, and the norm of what is added up for it.
fn exact(case: &Case) -> (Vec<f64>, f64) {
    let values: Vec<_> = case.inputs.iter().map(|x| to_f64(case.dtype, x)).collect();
    let ranks = values.len() as f64;
    let all = |i: usize| values.iter().map(move |v| v[i]);
    let of = |i: usize| match case.op {
        ReduceOp::Sum => all(i).sum(),
        ReduceOp::Avg => all(i).sum::<f64>() / ranks,
        ReduceOp::Prod => all(i).product(),
        ReduceOp::Max => all(i).fold(f64::NEG_INFINITY, f64::max),
        ReduceOp::Min => all(i).fold(f64::INFINITY, f64::min),
    };
    let parts = |i: usize| match case.op {
        ReduceOp::Sum => all(i).map(f64::abs).sum(),
        ReduceOp::Avg => all(i).map(f64::abs).sum::<f64>() / ranks,
        _ => 0.0,
    };
    let len = values[0].len();
    let parts: Vec<f64> = (0..len).map(parts).collect();
    ((0..len).map(of).collect(), norm(&parts))
}

/// Makes the call, and asserts that its result is near.
fn run(case: &Case, rank: &Rank) {
    let what = format!("{:?} of {} x {}", case.op, case.want.len(), case.dtype);
    let (plan, _, out) = case.call(rank, NCCL);
    let plan = plan.unwrap();
    let foreign = matches!(
        plan,
        Plan::AllReduce {
            algorithm: AllReduceAlgorithm::Nccl,
            order: SumOrder::Foreign,
            ..
        }
    );
    assert!(foreign, "{what}: {plan:?}");
    assert_near(case, &rank.raw(out.part.view()), &what);
}

fn assert_near(case: &Case, got: &[u8], what: &str) {
    let (want, parts) = exact(case);
    let got = to_f64(case.dtype, got);
    // NCCL may round whenever it has multiplied or added.
    let rounded = case.inputs.len().saturating_sub(1).max(1) as f64;
    if let Err(why) = compare(&got, &want, rounded * tolerance(case.dtype), parts) {
        panic!("{what}: {why}");
    }
}

/// Factors whose product no type overflows with, in whatever order they are multiplied.
fn factors(rng: &mut StdRng, size: usize, len: usize, dtype: DataType, place: Place) -> Case {
    let mut factor = || rng.random_range(0.5f32..2.0) * [1.0, -1.0][rng.random_range(0..2)];
    let inputs = (0..size).map(|_| (0..len).map(|_| factor()).collect());
    Case::new(dtype, ReduceOp::Prod, place, inputs.collect())
}

/// All operations and types, at lengths of all kinds, in place and beside, and Brigade's own in between.
fn near(world: &World) {
    let mut rng = world.rng();
    let mut cases = vec![];
    for (o, op) in OPS.into_iter().enumerate() {
        for (t, dtype) in FLOATS.into_iter().enumerate() {
            for (l, len) in [0, 1, 7, 1023, 100_003, 1 << 20].into_iter().enumerate() {
                // Every length with every operation and with every type.
                if (o + t + l).is_multiple_of(3) {
                    let place = [Place::OverInput, Place::Beside][(o + l) % 2];
                    cases.push(match op {
                        ReduceOp::Prod => factors(&mut rng, world.size, len, dtype, place),
                        _ => Case::random(&mut rng, world.size, len, (dtype, op, place)),
                    });
                }
            }
        }
    }
    world.run(&joined(config()), move |rank| {
        for case in &cases {
            run(case, rank);
            if case.want.len() < 10_000 {
                case.run(rank, None);
            }
        }
    });
}

/// A captured sum gives that of its inputs at each replay, until the group is reset.
fn captured(world: &World) {
    const LEN: usize = 3000;
    const REPLAYS: usize = 100;
    let mut rng = world.rng();
    let kind = (DataType::BF16, ReduceOp::Sum, Place::Beside);
    let days: Vec<_> = (0..5)
        .map(|_| Case::random(&mut rng, world.size, LEN, kind))
        .collect();
    world.run(&joined(config()), move |rank| {
        let (on, device) = (&rank.stream, &rank.device);
        run(&days[0], rank);
        let mut from = rank.upload_bytes(DataType::BF16, &[LEN], &days[0].input(rank.rank));
        let mut to = rank.poisoned(DataType::BF16, &[LEN]);
        let mut work = || {
            let params = AllReduceParams {
                data: to.view_mut(),
                from: Some(from.view()),
                op: ReduceOp::Sum,
                choice: NCCL,
            };
            rank.lease().all_reduce(params).map(drop)
        };
        let graph = device.capture(on, &mut work).unwrap();
        rank.meet();
        for (i, day) in days.iter().cycle().take(REPLAYS).enumerate() {
            let input = day.input(rank.rank);
            device.write(on, from.view_mut(), &input).unwrap();
            device.fill(on, to.view_mut(), 0xFF).unwrap();
            graph.launch(on).unwrap().sync(AMPLE).unwrap();
            assert_near(day, &rank.raw(to.view()), "a replay");
            if i % 10 == 0 {
                run(day, rank);
                day.run(rank, None);
            }
        }
        rank.meet();
        rank.comm().reset(AMPLE).unwrap();
        let code = expect_unsupported(graph.launch(on), "a graph after a reset");
        assert_eq!(code, GONE);
    });
}

/// The code of the reason why NCCL carries nothing more after a reset.
const GONE: &str = "nccl-gone";

/// After a reset NCCL is gone, on all ranks, and Brigade's own goes on.
fn assert_gone(rank: &Rank, case: &Case) {
    rank.meet();
    rank.comm().reset(AMPLE).unwrap();
    for _ in 0..2 {
        let code = expect_unsupported(case.try_run(rank, NCCL), "after a reset");
        assert_eq!(code, GONE);
        case.run(rank, None);
    }
}

/// A rank that does not come is a timeout of all others, and a rank that aborts ends their wait.
fn alone(world: &World, aborts: bool) {
    let mut rng = world.rng();
    let culprit = rng.random_range(0..world.size);
    let kind = (DataType::F32, ReduceOp::Sum, Place::Beside);
    let case = Case::random(&mut rng, world.size, 5000, kind);
    world.run(&joined(impatient()), move |rank| {
        run(&case, rank);
        rank.meet();
        if rank.rank != culprit {
            let record = expect_fault(case.try_run(rank, NCCL), "without a rank");
            let kind = if aborts {
                FaultKind::Aborted
            } else {
                FaultKind::Timeout
            };
            assert_kind(&record, kind, "without a rank");
        } else if aborts {
            rank.comm().abort();
        }
        assert_gone(rank, &case);
    });
}

/// Ranks that differ hear of it before NCCL does.
fn mismatch(world: &World) {
    let mut rng = world.rng();
    let culprit = rng.random_range(0..world.size);
    let mut sum = |len| {
        let kind = (DataType::F32, ReduceOp::Sum, Place::OverInput);
        Case::random(&mut rng, world.size, len, kind)
    };
    let (case, longer) = (sum(5000), sum(5001));
    world.run(&joined(impatient()), move |rank| {
        run(&case, rank);
        let (mine, choice) = match rank.rank == culprit {
            true => (&longer, NCCL),
            false => (&case, NCCL),
        };
        let record = expect_fault(mine.try_run(rank, choice), "lengths");
        assert_kind(&record, FaultKind::Mismatch, "lengths");
        assert_gone(rank, &case);
    });
}

/// Its sums stay in their type.
fn widened(world: &World) {
    let mut rng = world.rng();
    let kind = (DataType::BF16, ReduceOp::Sum, Place::Widened);
    let case = Case::random(&mut rng, world.size, 100, kind);
    world.run(&joined(config()), move |rank| {
        let code = expect_unsupported(case.try_run(rank, NCCL), "widened");
        assert_eq!(code, reason::DTYPE);
        case.run(rank, None);
    });
}

/// Who cannot have it hears so from joining, on all ranks.
fn refused(world: &World) {
    world.run(&config(), move |rank| {
        let joined = rank.try_join_another(&joined(config()));
        let code = expect_unsupported(joined, "joining with NCCL");
        let codes = [reason::NO_ENGINE, "nccl-shared", "nccl-missing"];
        assert!(codes.contains(&code), "{code}");
    });
}

/// Adds the contracts.
pub(super) fn add(suite: &mut Suite) {
    if !suite.backend().has_nccl() {
        return suite.add("all_reduce/nccl/refused", refused);
    }
    suite.add("all_reduce/nccl/near", near);
    suite.add("all_reduce/nccl/captured", captured);
    suite.add("all_reduce/nccl/widened", widened);
    suite.add_from(2, "all_reduce/nccl/mismatch", mismatch);
    suite.add_from(2, "all_reduce/nccl/never_calls", |world| {
        alone(world, false)
    });
    suite.add_from(2, "all_reduce/nccl/aborted", |world| alone(world, true));
}
