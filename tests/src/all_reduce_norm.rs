//! All-reduce with a norm: bit for bit what an all-reduce, an addition and a norm one after the other give, whatever the
//! algorithm, and close to what f64 gives.

pub(crate) mod case;
mod naive;
mod special;

pub(crate) use case::Arguments;
pub use case::Case;

use crate::{
    all_reduce::algorithms,
    check::{assert_kind, expect_fault, expect_invalid, expect_unsupported},
    faults::{AMPLE, impatient},
    gather_linear::config,
    layer::FLOATS,
    suite::{Suite, World},
};
use brigade_device::{AllReduceAlgorithm, Buffer, CommConfig, DataType, FaultKind, QScheme};
use brigade_plan::reason;
use rand::Rng;

/// What becomes of normalized rows: as they are, int8 by rows, fp8 by the scale of [`Case`].
pub const NORMED: [QScheme; 3] = [QScheme::None, QScheme::Int8PerToken, QScheme::Fp8PerTensor];

/// A communicator whose buffers hold a row of 8192 of f32 from each of 8 ranks.
fn roomy() -> CommConfig {
    CommConfig {
        all_reduce_bytes: 1 << 20,
        ..config()
    }
}

/// Shapes of all kinds: none, one and several rows for every rank; less than a granule, no whole number of them, and many.
const SHAPES: [[usize; 2]; 14] = [
    [0, 100],
    [1, 1],
    [3, 1],
    [1, 8],
    [3, 8],
    [33, 8],
    [1, 100],
    [16, 100],
    [33, 100],
    [3, 288],
    [16, 288],
    [1, 2048],
    [16, 2048],
    [3, 8192],
];

/// Every shape with one type: over the three schemes with each, in every group and with every algorithm.
fn shapes(world: &World, scheme: QScheme, choice: Option<AllReduceAlgorithm>) {
    let mut rng = world.rng();
    let first = world.size + NORMED.iter().position(|&s| s == scheme).unwrap();
    let cases: Vec<_> = (first..)
        .zip(SHAPES)
        .map(|(i, dims)| {
            let kind = (FLOATS[i % FLOATS.len()], scheme);
            Case::random(&mut rng, world.size, dims, kind)
        })
        .collect();
    cases.iter().for_each(Case::assert_near);
    world.run(&roomy(), move |rank| {
        for case in &cases {
            case.run(rank, choice);
        }
        cases
            .iter()
            .step_by(4)
            .for_each(|c| c.assert_composed(rank));
    });
}

/// Inputs longer than what passes at a time: pieces are whole rows, few and many.
fn in_pieces(world: &World, choice: Option<AllReduceAlgorithm>) {
    let mut rng = world.rng();
    let cases: Vec<_> = [[33, 100], [1, 1000], [7, 999], [500, 8]]
        .map(|dims| {
            let kind = (FLOATS[dims[0] % 3], NORMED[dims[1] % 3]);
            Case::random(&mut rng, world.size, dims, kind)
        })
        .into();
    let small = CommConfig {
        all_reduce_bytes: 4000 * 2 * world.size,
        scratch_bytes: 8192,
        ..config()
    };
    world.run(&small, move |rank| {
        for case in &cases {
            case.run(rank, choice);
        }
    });
}

/// Of many rows for each block, of which a device may have some push and the rest take rows, where they are long: in pieces too, by odd and even numbers of
/// blocks; and ranks of which one makes another call, or none.
fn many_rows(world: &World, choice: Option<AllReduceAlgorithm>) {
    let mut rng = world.rng();
    let culprit = rng.random_range(0..world.size);
    let (dims, budgets): ([_; 3], &[u16]) = match world.backend.reduces_millions() {
        true => ([[230, 4096], [41, 288], [130, 8192]], &[4, 64, 65]),
        false => ([[30, 512], [41, 288], [14, 1024]], &[4]),
    };
    let cases: Vec<_> = FLOATS
        .into_iter()
        .zip(dims)
        .map(|(dtype, dims)| {
            let kind = (dtype, NORMED[rng.random_range(0..3)]);
            Case::random(&mut rng, world.size, dims, kind)
        })
        .collect();
    for &budget in budgets {
        let config = CommConfig {
            all_reduce_bytes: 4 << 20,
            sm_budget: Some(budget),
            ..impatient()
        };
        let cases = cases.clone();
        world.run(&config, move |rank| {
            let long = &cases[2];
            for kind in [FaultKind::Mismatch, FaultKind::Timeout] {
                let what = format!("many rows, {kind:?}");
                let misses = kind == FaultKind::Timeout && rank.rank == culprit;
                // The first call has a longer deadline.
                for case in cases.iter().cycle().take(2 * cases.len()) {
                    case.run(rank, choice);
                }
                rank.meet();
                if !misses {
                    let mut arguments = long.upload(rank, choice);
                    if kind == FaultKind::Mismatch && rank.rank == culprit {
                        arguments.eps *= 2.0;
                    }
                    let made = arguments.call(rank).map(drop);
                    assert_kind(&expect_fault(rank.settle(made), &what), kind, &what);
                    long.assert_poisoned(&arguments.outputs(rank), &what);
                }
                rank.meet();
                rank.comm().reset(AMPLE).unwrap();
            }
            long.run(rank, choice);
        });
    }
}

/// The same bits on all ranks, from all algorithms, in every repeat.
fn same_bits(world: &World) {
    const REPEATS: usize = 1000;
    let mut rng = world.rng();
    let choices = algorithms(world.backend.engines());
    let cases: Vec<_> = (0..9)
        .map(|i| {
            let dims = [rng.random_range(1..6), rng.random_range(1..200)];
            Case::random(&mut rng, world.size, dims, (FLOATS[i % 3], NORMED[i / 3]))
        })
        .collect();
    world.run(&config(), move |rank| {
        for repeat in 0..REPEATS {
            for (_, choice) in &choices {
                cases[repeat % cases.len()].run(rank, *choice);
            }
        }
        rank.assert_shared(&cases[0].want.concat(), "all-reduce with a norm");
    });
}

/// Ranks may add residuals of their own: each gets its own result.
fn own_residuals(world: &World) {
    let mut rng = world.rng();
    let choices = algorithms(world.backend.engines());
    let kind = (DataType::BF16, QScheme::None);
    let first = Case::random(&mut rng, world.size, [9, 72], kind);
    let cases: Vec<_> = (0..world.size)
        .map(|_| {
            let residual = Case::random(&mut rng, world.size, [9, 72], kind).residual;
            let mut case = Case {
                residual,
                ..first.clone()
            };
            case.want = case.after(&case.reduced());
            case
        })
        .collect();
    world.run(&config(), move |rank| {
        for (_, choice) in &choices {
            cases[rank.rank].run(rank, *choice);
        }
    });
}

/// A row that is too long for the buffers is not pushed: forced it is refused with a reason, and the plan pulls.
fn long_rows(world: &World) {
    let mut rng = world.rng();
    let choices = crate::all_reduce::pushing(world.backend.engines());
    let kind = (DataType::F32, QScheme::None);
    let case = Case::random(&mut rng, world.size, [3, 1000], kind);
    let small = CommConfig {
        all_reduce_bytes: 3999,
        ..config()
    };
    world.run(&small, move |rank| {
        for (name, choice) in &choices {
            let refused = case.upload(rank, Some(*choice)).call(rank);
            assert_eq!(expect_unsupported(refused, name), reason::SCRATCH);
        }
        case.run(rank, None);
    });
}

/// A captured call gives the results of what its inputs hold at each replay.
fn captured(world: &World, choice: Option<AllReduceAlgorithm>) {
    const REPLAYS: usize = 60;
    let mut rng = world.rng();
    let days: Vec<Vec<_>> = NORMED
        .map(|scheme| {
            let kind = (FLOATS[rng.random_range(0..3)], scheme);
            let first = Case::random(&mut rng, world.size, [5, 100], kind);
            let mut day = |_| Case {
                in_place: false,
                weight: first.weight.clone(),
                ..Case::random(&mut rng, world.size, [5, 100], kind)
            };
            (0..5).map(&mut day).collect()
        })
        .into_iter()
        .map(|days: Vec<Case>| {
            let with_want = |mut case: Case| {
                case.want = case.after(&case.reduced());
                case
            };
            days.into_iter().map(with_want).collect()
        })
        .collect();
    world.run(&config(), move |rank| {
        let (on, device) = (&rank.stream, &rank.device);
        for days in &days {
            days[0].run(rank, choice);
            let mut held = days[0].upload(rank, choice);
            let work = &mut || held.call(rank).map(drop);
            let graph = device.capture(on, work).unwrap();
            rank.meet();
            for day in days.iter().cycle().take(REPLAYS) {
                let inputs = [
                    (&mut held.from, &day.inputs[rank.rank]),
                    (&mut held.residual, &day.residual),
                ];
                for (buffer, bytes) in inputs {
                    device.write(on, buffer.view_mut(), bytes).unwrap();
                }
                for out in [&mut held.sum, &mut held.values, &mut held.scales] {
                    device.fill(on, out.view_mut(), 0xFF).unwrap();
                }
                graph
                    .launch(on)
                    .unwrap()
                    .sync(crate::faults::AMPLE)
                    .unwrap();
                day.assert_want(&held.outputs(rank), "a replay");
            }
        }
    });
}

/// What is wrong is refused with its field, and the communicator goes on.
fn refusals(world: &World) {
    let mut rng = world.rng();
    let [plain, int8, fp8] = NORMED.map(|scheme| {
        let kind = (DataType::BF16, scheme);
        Case {
            in_place: false,
            ..Case::random(&mut rng, world.size, [4, 16], kind)
        }
    });
    world.run(&config(), move |rank| {
        let make = |dtype, dims: &[usize]| rank.poisoned(dtype, dims);
        type Change<'a> = &'a dyn Fn(&mut Arguments);
        let refused = |case: &Case, field: &str, change: Change<'_>| {
            let mut arguments = case.upload(rank, None);
            change(&mut arguments);
            assert_eq!(expect_invalid(arguments.call(rank), field), field);
        };
        let (bf16, f32) = (DataType::BF16, DataType::F32);
        refused(&plain, "from.dtype", &|a| {
            a.from = make(DataType::I32, &[4, 16])
        });
        refused(&plain, "from.shape", &|a| a.from = make(bf16, &[64]));
        refused(&plain, "from.shape", &|a| a.from = make(bf16, &[4, 0]));
        refused(&plain, "residual", &|a| a.residual = make(f32, &[4, 16]));
        refused(&plain, "residual", &|a| a.residual = make(bf16, &[5, 16]));
        refused(&plain, "weight", &|a| a.weight = make(f32, &[16]));
        refused(&plain, "weight", &|a| a.weight = make(bf16, &[1, 16]));
        refused(&plain, "sum", &|a| a.sum = make(f32, &[4, 16]));
        refused(&plain, "sum", &|a| a.sum = make(bf16, &[16, 4]));
        refused(&plain, "normed", &|a| a.values = make(f32, &[4, 16]));
        refused(&plain, "normed", &|a| a.values = make(bf16, &[4, 15]));
        refused(&int8, "normed", &|a| {
            a.values = make(DataType::U8, &[4, 16])
        });
        refused(&int8, "normed.scales", &|a| a.scales = make(bf16, &[4]));
        refused(&int8, "normed.scales", &|a| a.scales = make(f32, &[4, 1]));
        refused(&fp8, "normed", &|a| a.values = make(DataType::I8, &[4, 16]));
        for scale in [0.0, -1.0, f32::NAN, f32::INFINITY] {
            refused(&fp8, "normed.scale", &|a| a.scale = scale);
        }
        for eps in [-1e-9, f32::NAN, f32::INFINITY] {
            refused(&plain, "eps", &|a| a.eps = eps);
        }
        // Rows that overlap: those of the residual by a part, and all others at all.
        let (upper, lower) = (|b: &Buffer| b.slice(0, 4), |b: &Buffer| b.slice(1, 4));
        let five = || make(bf16, &[5, 16]);
        refused(&plain, "sum", &|a| {
            let all = five();
            (a.residual, a.sum) = (upper(&all).unwrap(), lower(&all).unwrap());
        });
        refused(&plain, "sum", &|a| a.sum = a.from.clone());
        refused(&plain, "normed", &|a| a.values = a.from.clone());
        refused(&plain, "normed", &|a| a.values = a.residual.clone());
        refused(&plain, "normed", &|a| a.values = a.sum.clone());
        refused(&plain, "normed", &|a| {
            let all = five();
            a.values = upper(&all).unwrap();
            a.weight = all.index(3).unwrap();
        });
        // An order of sums that is somebody else's is never promised.
        let mut forced = plain.upload(rank, Some(AllReduceAlgorithm::Nccl));
        let code = expect_unsupported(forced.call(rank), "Nccl");
        assert_eq!(code, reason::NO_ENGINE);
        plain.run(rank, None);
        int8.run(rank, None);
        fp8.run(rank, None);
    });
}

/// Adds the contracts, where the device has the operation.
pub fn add(suite: &mut Suite) {
    if !suite.backend().engines().norms {
        return;
    }
    for (name, choice) in algorithms(suite.backend().engines()) {
        for scheme in NORMED {
            let trial = format!("all_reduce_norm/{name}/{scheme:?}").to_lowercase();
            suite.add(&trial, move |world| shapes(world, scheme, choice));
        }
        suite.add(&format!("all_reduce_norm/{name}/in_pieces"), move |world| {
            in_pieces(world, choice);
        });
        suite.add_from(2, &format!("all_reduce_norm/{name}/many_rows"), move |w| {
            many_rows(w, choice);
        });
        suite.add(&format!("all_reduce_norm/{name}/captured"), move |world| {
            captured(world, choice);
        });
        let trial = format!("all_reduce_norm/{name}/special_values");
        suite.add(&trial, move |world| special::values(world, choice));
    }
    suite.add("all_reduce_norm/same_bits", same_bits);
    suite.add("all_reduce_norm/own_residuals", own_residuals);
    suite.add("all_reduce_norm/refusals", refusals);
    suite.add_from(2, "all_reduce_norm/long_rows", long_rows);
}
