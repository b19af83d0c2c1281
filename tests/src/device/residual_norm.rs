//! A residual and a norm behind a sum that is there: bit for bit what an all-reduce with a norm of one rank gives, and close to what f64
//! gives.

use super::alone;
use crate::{
    all_reduce::{SPECIAL, uneven},
    all_reduce_norm::{Arguments, Case, NORMED},
    backend::Rank,
    check::expect_invalid,
    faults::AMPLE,
    layer::FLOATS,
    suite::Suite,
};
use brigade_device::{Buffer, DataType};
use rand::{Rng, rngs::StdRng};

/// None, one and several rows; less than a granule, no whole number of them, rows that threads hold, and longer ones, whose granules
/// are no power of two.
const SHAPES: [[usize; 2]; 16] = [
    [0, 100],
    [1, 1],
    [3, 1],
    [3, 8],
    [33, 8],
    [1, 100],
    [33, 100],
    [16, 288],
    [300, 72],
    [5, 2048],
    [3, 5000],
    [3, 8192],
    [2, 16_384],
    [2, 16_392],
    [1, 40_004],
    [2, 70_000],
];

fn run(case: &Case, rank: &Rank, what: &str) {
    let mut arguments = case.upload(rank, None);
    arguments.call_alone(rank).unwrap();
    case.assert_want(&arguments.outputs(rank), what);
    assert_eq!(rank.raw(arguments.from.view()), case.inputs[0], "{what}");
    if !case.in_place {
        let residual = rank.raw(arguments.residual.view());
        assert_eq!(residual, case.residual, "{what}");
    }
}

fn shapes(rank: &Rank, rng: &mut StdRng) {
    for (i, dims) in SHAPES.into_iter().enumerate() {
        for (j, scheme) in NORMED.into_iter().enumerate() {
            let kind = (FLOATS[(i + j) % FLOATS.len()], scheme);
            let case = Case::random(rng, 1, dims, kind);
            case.assert_near();
            run(&case, rank, &format!("{dims:?} {kind:?}"));
        }
    }
}

/// The fused call of one rank gives the same.
fn same_bits(rank: &Rank, rng: &mut StdRng) {
    for dtype in FLOATS {
        for scheme in NORMED {
            for dims in [[7, 136], [3, 2048], [2, 333]] {
                let case = Case::random(rng, 1, dims, (dtype, scheme));
                run(&case, rank, "alone");
                let [mut alone, mut fused] = [(), ()].map(|()| case.upload(rank, None));
                alone.call_alone(rank).unwrap();
                fused.call(rank).unwrap();
                let what = format!("{dims:?} {dtype} as {scheme:?}");
                assert_eq!(alone.outputs(rank), fused.outputs(rank), "{what}");
            }
        }
    }
}

/// Zeros, infinities, NaNs, and squares that overflow or vanish, alone in a row and among others.
fn special_values(rank: &Rank, rng: &mut StdRng) {
    for hidden in [36, 64, 20_000] {
        let rows = 2 * SPECIAL.len();
        let mut draw = || {
            let mut all: Vec<f32> = vec![];
            for x in SPECIAL {
                all.extend(std::iter::repeat_n(x, hidden));
                let first = all.len();
                all.extend((0..hidden).map(|_| uneven(rng)));
                all[first + rng.random_range(0..hidden)] = x;
            }
            all
        };
        let parts = [draw(), draw()];
        for (i, dtype) in FLOATS.into_iter().enumerate() {
            for (j, scheme) in NORMED.into_iter().enumerate() {
                let [from, residual] = parts.clone();
                let weight = (0..hidden).map(|i| SPECIAL.get(i).copied().unwrap_or(0.5));
                let eps = [0.0, 1e-6, 1e30][(i + j) % 3];
                let case = Case::new(
                    (dtype, scheme),
                    [rows, hidden],
                    vec![from],
                    [residual, weight.collect()],
                    eps,
                );
                run(&case, rank, &format!("{hidden} of {dtype} as {scheme:?}"));
            }
        }
    }
}

/// A captured call gives the results of what its inputs hold at each replay.
fn captured(rank: &Rank, rng: &mut StdRng) {
    for scheme in NORMED {
        let mut day = || Case {
            in_place: false,
            ..Case::random(rng, 1, [5, 104], (DataType::BF16, scheme))
        };
        let days = [day(), day(), day()];
        let mut held = days[0].upload(rank, None);
        let work = &mut || held.call_alone(rank);
        let graph = rank.device.capture(&rank.stream, work).unwrap();
        for day in &days {
            for (buffer, bytes) in [
                (&mut held.from, &day.inputs[0]),
                (&mut held.residual, &day.residual),
                (&mut held.weight, &day.weight),
            ] {
                let written = rank.device.write(&rank.stream, buffer.view_mut(), bytes);
                written.unwrap();
            }
            graph.launch(&rank.stream).unwrap().sync(AMPLE).unwrap();
            day.assert_want(&held.outputs(rank), "a replay");
        }
    }
}

/// What is wrong is refused with its field, and nothing is written.
fn refusals(rank: &Rank, rng: &mut StdRng) {
    let [plain, int8, fp8] = NORMED.map(|scheme| Case {
        in_place: false,
        ..Case::random(rng, 1, [4, 16], (DataType::BF16, scheme))
    });
    let make = |dtype, dims: &[usize]| rank.poisoned(dtype, dims);
    let refused = |case: &Case, field: &str, change: &dyn Fn(&mut Arguments)| {
        let mut arguments = case.upload(rank, None);
        change(&mut arguments);
        let before = rank.raw(arguments.sum.view());
        assert_eq!(expect_invalid(arguments.call_alone(rank), field), field);
        assert_eq!(rank.raw(arguments.sum.view()), before, "{field}");
    };
    let (bf16, f32) = (DataType::BF16, DataType::F32);
    refused(&plain, "from.dtype", &|a| {
        a.from = make(DataType::I32, &[4, 16]);
    });
    refused(&plain, "from.shape", &|a| a.from = make(bf16, &[64]));
    refused(&plain, "from.shape", &|a| a.from = make(bf16, &[4, 0]));
    refused(&plain, "residual", &|a| a.residual = make(bf16, &[5, 16]));
    refused(&plain, "weight", &|a| a.weight = make(f32, &[16]));
    refused(&plain, "sum", &|a| a.sum = make(f32, &[4, 16]));
    refused(&plain, "normed", &|a| a.values = make(bf16, &[4, 15]));
    refused(&int8, "normed", &|a| {
        a.values = make(DataType::U8, &[4, 16]);
    });
    refused(&int8, "normed.scales", &|a| a.scales = make(bf16, &[4]));
    for scale in [0.0, f32::NAN] {
        refused(&fp8, "normed.scale", &|a| a.scale = scale);
    }
    for eps in [-1e-9, f32::INFINITY] {
        refused(&plain, "eps", &|a| a.eps = eps);
    }
    let (upper, lower) = (|b: &Buffer| b.slice(0, 4), |b: &Buffer| b.slice(1, 4));
    refused(&plain, "sum", &|a| {
        let all = make(bf16, &[5, 16]);
        (a.residual, a.sum) = (upper(&all).unwrap(), lower(&all).unwrap());
    });
    refused(&plain, "sum", &|a| a.sum = a.from.clone());
    refused(&plain, "normed", &|a| a.values = a.residual.clone());
    refused(&plain, "normed", &|a| a.values = a.sum.clone());
    for case in [plain, int8, fp8] {
        run(&case, rank, "after refusals");
    }
}

pub(super) fn add(suite: &mut Suite) {
    alone(suite, "residual_norm/shapes", shapes);
    if suite.backend().engines().norms {
        alone(suite, "residual_norm/same_bits", same_bits);
    }
    alone(suite, "residual_norm/special_values", special_values);
    alone(suite, "residual_norm/captured", captured);
    alone(suite, "residual_norm/refusals", refusals);
}
