//! Products of few rows by weights as checkpoints store them, for which devices have ways of their own: sizes around those at which these ways change.

use super::{alone, gemm::Case};
use crate::{
    backend::Rank,
    faults::AMPLE,
    layer::{BiasKind, FLOATS},
    matrix::Matrix,
    suite::Suite,
};
use brigade_device::{DataType, GemmParams, Output};
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

pub(super) fn add(suite: &mut Suite) {
    alone(suite, "few_rows/products", products);
    alone(suite, "few_rows/repeats", repeats);
}
