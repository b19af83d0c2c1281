//! Products of few rows by weights as checkpoints store them, for which devices have ways of their own: sizes around those at which these ways change.

use super::{alone, gemm::Case};
use crate::{
    backend::Rank,
    check::{assert_bits, expect_invalid},
    faults::AMPLE,
    layer::{BiasKind, FLOATS},
    matrix::Matrix,
    suite::Suite,
};
use brigade_device::{DataType, GemmParams, LoraLinearParams, Output, SiluMulParams};
use rand::{Rng, rngs::StdRng};

/// Columns and inner dimensions.
const SIZES: [[usize; 2]; 9] = [
    [1, 8],
    [7, 520],
    [8, 1000],
    [131, 72],
    [133, 1032],
    [1000, 512],
    [2200, 24],
    [300, 4104],
    [40, 1021],
];

const BIASES: [BiasKind; 4] = [
    BiasKind::None,
    BiasKind::Row,
    BiasKind::OneRow,
    BiasKind::Full,
];

fn products(rank: &Rank, rng: &mut StdRng) {
    for dtype in FLOATS {
        for [n, k] in SIZES {
            for bias in BIASES {
                let m = rng.random_range(1..=18);
                Case::stored(rng, [m, n, k], dtype, bias, [false, true]).run(rank);
            }
        }
        // Few blocks, which have more columns than they hold sums of.
        for (n, sms) in [(64, 1), (65, 1), (112, 1), (113, 1), (300, 2), (500, 1)] {
            let m = rng.random_range(1..=16);
            let case = Case::stored(rng, [m, n, 1100], dtype, BiasKind::Row, [false, true]);
            case.capped(sms).run(rank);
        }
        for m in [1, 8, 9, 16, 17] {
            Case::stored(rng, [m, 270, 1536], dtype, BiasKind::None, [false, true]).run(rank);
        }
    }
}

/// The same product has the same bits every time, whatever else the memory is busy with.
fn repeats(rank: &Rank, rng: &mut StdRng) {
    for (m, dtype) in [
        (1, DataType::BF16),
        (8, DataType::F16),
        (16, DataType::BF16),
    ] {
        let [n, k] = [1500, 2080];
        let x = rank.upload(&Matrix::random(rng, dtype, &[m, k], 1.0));
        let weight = rank.upload(&Matrix::random(rng, dtype, &[n, k], 1.0));
        rank.stream.sync(AMPLE).unwrap();
        let params = GemmParams {
            transpose_b: true,
            settled_b: true,
            ..GemmParams::new(&x, &weight)
        };
        let mut all: Vec<_> = (0..24).map(|_| rank.poisoned(dtype, &[m, n])).collect();
        for d in &mut all {
            rank.device
                .gemm(&rank.stream, &params, Output::Into(d.view_mut()))
                .unwrap();
        }
        let first = rank.raw(all[0].view());
        for d in &all[1..] {
            assert!(rank.raw(d.view()) == first, "{m} rows of {dtype}");
        }
    }
}

/// A row's bits do not depend on how many there are.
fn rows(rank: &Rank, rng: &mut StdRng) {
    for dtype in [DataType::F16, DataType::BF16] {
        for [n, k] in [[300, 4088], [270, 1536], [4100, 4616]] {
            let x = rank.upload(&Matrix::random(rng, dtype, &[16, k], 1.0));
            let weight = rank.upload(&Matrix::random(rng, dtype, &[n, k], 1.0));
            rank.stream.sync(AMPLE).unwrap();
            let product = |first, rows| {
                let x = x.slice(first, rows).unwrap();
                let params = GemmParams {
                    transpose_b: true,
                    settled_b: true,
                    ..GemmParams::new(&x, &weight)
                };
                let mut d = rank.poisoned(dtype, &[rows, n]);
                let output = Output::Into(d.view_mut());
                rank.device.gemm(&rank.stream, &params, output).unwrap();
                d
            };
            let all = product(0, 16);
            for count in [1, 7, 8, 9, 15] {
                let first = rng.random_range(0..=16 - count);
                let want = all.slice(first, count).unwrap();
                let what = format!("{count} rows of {k} by {n}");
                let got = rank.raw(product(first, count).view());
                assert_bits(&got, &rank.raw(want.view()), dtype, &what);
            }
        }
    }
}

/// A product and its gate in one call are, bit for bit, the two one after the other.
fn gates(rank: &Rank, rng: &mut StdRng) {
    let (device, on) = (&rank.device, &rank.stream);
    for dtype in FLOATS {
        for ([n, k], cap) in [
            ([1, 8], None),
            ([7, 520], None),
            ([15, 64], Some(1)),
            ([33, 1032], Some(1)),
            ([131, 72], None),
            ([300, 2056], Some(3)),
            ([1500, 512], None),
            ([40, 1021], None),
        ] {
            let m = rng.random_range(1..=17);
            let x = rank.upload(&Matrix::random(rng, dtype, &[m, k], 1.0));
            let weight = rank.upload(&Matrix::random(rng, dtype, &[2 * n, k], 1.0));
            let bias = rank.upload(&Matrix::random(rng, dtype, &[2 * n], 1.0));
            on.sync(AMPLE).unwrap();
            for c in [None, Some(bias.view())] {
                let gemm = GemmParams {
                    c,
                    transpose_b: true,
                    settled_b: rng.random(),
                    alpha: 0.75,
                    sm_cap: cap,
                    ..GemmParams::new(&x, &weight)
                };
                let linear = LoraLinearParams { gemm, runs: &[] };
                let both = device.lora_linear(on, &linear, Output::Allocate(dtype));
                let both = both.unwrap().unwrap();
                let mut want = rank.poisoned(dtype, &[m, n]);
                let to = Output::Into(want.view_mut());
                device
                    .silu_mul(on, &SiluMulParams::new(both.view()), to)
                    .unwrap();
                let mut got = rank.poisoned(dtype, &[m, n]);
                let to = Output::Into(got.view_mut());
                assert!(
                    device
                        .lora_linear_silu_mul(on, &linear, to)
                        .unwrap()
                        .is_none()
                );
                let new = device.lora_linear_silu_mul(on, &linear, Output::Allocate(dtype));
                let new = new.unwrap().unwrap();
                let what = format!("{m} rows of {k} by 2 x {n}, {dtype}, C: {}", c.is_some());
                let want = rank.raw(want.view());
                assert_bits(&rank.raw(got.view()), &want, dtype, &what);
                assert_bits(&rank.raw(new.view()), &want, dtype, &what);
            }
        }
    }
    let [x, odd] = [[2, 8], [3, 8]].map(|dims| rank.poisoned(DataType::F32, &dims));
    let gemm = GemmParams {
        transpose_b: true,
        ..GemmParams::new(&x, &odd)
    };
    let linear = LoraLinearParams { gemm, runs: &[] };
    let refused = device.lora_linear_silu_mul(on, &linear, Output::Allocate(DataType::F32));
    assert_eq!(expect_invalid(refused, "odd"), "gemm.b.shape");
    let even = GemmParams {
        b: x.view().into(),
        ..gemm
    };
    let linear = LoraLinearParams {
        gemm: even,
        runs: &[],
    };
    let mut wrong = rank.poisoned(DataType::F32, &[2, 2]);
    let refused = device.lora_linear_silu_mul(on, &linear, Output::Into(wrong.view_mut()));
    assert_eq!(expect_invalid(refused, "shape"), "output.shape");
}

pub(super) fn add(suite: &mut Suite) {
    alone(suite, "few_rows/gates", gates);
    alone(suite, "few_rows/products", products);
    alone(suite, "few_rows/repeats", repeats);
    // A promise of the kernel's, which comes with tiles; a library chooses by the size.
    if suite.backend().engines().tiles {
        alone(suite, "few_rows/rows", rows);
    }
}
