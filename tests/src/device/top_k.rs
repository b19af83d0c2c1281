//! A router's choice: which experts, ties included, and what they weigh.

use super::alone;
use crate::{
    backend::Rank,
    check::{assert_close, expect_invalid},
    layer::FLOATS,
    matrix::{round, to_bytes},
    suite::Suite,
};
use brigade_device::{DataType, DeviceExt, TopKParams, Weighting};
use rand::{Rng, rngs::StdRng, seq::IndexedRandom};

const WEIGHTINGS: [Weighting; 3] = [
    Weighting::SoftmaxOfChosen,
    Weighting::Softmax,
    Weighting::Sigmoid,
];

/// Scores are picked from a few, so that many are equal, or drawn.
fn scores(rng: &mut StdRng, dtype: DataType, experts: usize, tied: bool) -> Vec<f64> {
    let few = [0.0, -0.0, 1.5, -2.25, 3.0];
    let mut one = |_| match tied {
        true => *few.choose(rng).unwrap_or(&0.0),
        false => round(dtype, rng.random_range(-6.0..6.0)),
    };
    (0..experts).map(&mut one).collect()
}

/// Best first, by sorting all of them.
fn chosen(scores: &[f64], k: usize) -> Vec<usize> {
    let mut order: Vec<usize> = (0..scores.len()).collect();
    let value = |e: usize| match scores[e] {
        s if s.is_nan() => (0, 0.0),
        s => (1, s + 0.0),
    };
    order.sort_by(|&a, &b| {
        let (a_of, b_of) = (value(a), value(b));
        let by_score = (b_of.0, b_of.1).partial_cmp(&(a_of.0, a_of.1));
        by_score
            .unwrap_or(std::cmp::Ordering::Equal)
            .then(a.cmp(&b))
    });
    order.truncate(k);
    order
}

fn weights(scores: &[f64], chosen: &[usize], weighting: Weighting, factor: f64) -> Vec<f64> {
    let part = |e: usize| match weighting {
        Weighting::Sigmoid => 1.0 / (1.0 + (-scores[e]).exp()),
        _ => (scores[e] - scores[chosen[0]]).exp(),
    };
    let sum: f64 = match weighting {
        Weighting::Softmax => (0..scores.len()).map(part).sum(),
        _ => chosen.iter().map(|&e| part(e)).sum(),
    };
    chosen.iter().map(|&e| factor * part(e) / sum).collect()
}

fn run(
    rank: &Rank,
    dtype: DataType,
    all: &[Vec<f64>],
    p: (usize, Weighting, f32),
) -> [Vec<f64>; 2] {
    let experts = all.first().map_or(4, Vec::len);
    let bytes = to_bytes(dtype, &all.concat());
    let scores = rank.upload_bytes(dtype, &[all.len(), experts], &bytes);
    let (k, weights, factor) = p;
    let params = TopKParams {
        weights,
        factor,
        ..TopKParams::new(scores.view(), k)
    };
    let made = rank.device.top_k(&rank.stream, &params).unwrap();
    assert_eq!(made.ids.shape().dims(), [all.len(), k]);
    assert_eq!(made.weights.shape().dims(), [all.len(), k]);
    let ids: Vec<i32> = rank.device.download(&rank.stream, made.ids.view()).unwrap();
    let ids = ids.into_iter().map(f64::from).collect();
    [ids, rank.values(made.weights.view())]
}

fn choices(rank: &Rank, rng: &mut StdRng) {
    // Every number of scores that a lane of a warp may have, and those of models.
    let sizes = [
        (1, 1),
        (7, 3),
        (8, 2),
        (32, 32),
        (64, 6),
        (128, 8),
        (129, 1),
        (256, 8),
        (257, 9),
        (1000, 22),
        (1024, 32),
    ];
    for dtype in FLOATS {
        for (experts, k) in sizes {
            for tied in [false, true] {
                let tokens = rng.random_range(1..12);
                let all: Vec<_> = (0..tokens)
                    .map(|_| scores(rng, dtype, experts, tied))
                    .collect();
                let weighting = *WEIGHTINGS.choose(rng).unwrap_or(&WEIGHTINGS[0]);
                let factor = [1.0, 2.5][rng.random_range(0..2)];
                let [ids, got] = run(rank, dtype, &all, (k, weighting, factor));
                let what = format!("{dtype}, {k} of {experts}, {weighting:?}");
                let (mut want_ids, mut want) = (vec![], vec![]);
                for scores in &all {
                    let best = chosen(scores, k);
                    want.extend(weights(scores, &best, weighting, f64::from(factor)));
                    want_ids.extend(best.into_iter().map(|e| e as f64));
                }
                assert_eq!(ids, want_ids, "{what}");
                assert_close(&got, &want, DataType::F32, &what);
            }
        }
        for weighting in WEIGHTINGS {
            let [ids, weights] = run(rank, dtype, &[], (2, weighting, 1.0));
            assert!(ids.is_empty() && weights.is_empty(), "no tokens");
        }
    }
}

/// Infinities are numbers, and a NaN is worse than all; every id is one, and there once.
fn extremes(rank: &Rank, _: &mut StdRng) {
    let (inf, nan) = (f64::INFINITY, f64::NAN);
    for dtype in FLOATS {
        for weighting in WEIGHTINGS {
            let row = vec![nan, -inf, 2.0, -1.0, nan, -inf];
            let [ids, got] = run(rank, dtype, std::slice::from_ref(&row), (4, weighting, 1.0));
            assert_eq!(ids, [2.0, 3.0, 1.0, 5.0], "{dtype}, {weighting:?}");
            if weighting != Weighting::Softmax {
                assert!(got[0] > got[1] && got[1] > 0.0, "{got:?}");
                assert_eq!(got[2..], [0.0, 0.0]);
            } else {
                assert!(got.iter().all(|w| w.is_nan()), "{got:?}");
            }
            let [ids, _] = run(rank, dtype, &[row], (6, weighting, 1.0));
            assert_eq!(ids, [2.0, 3.0, 1.0, 5.0, 0.0, 4.0]);
            let [ids, _] = run(rank, dtype, &[vec![nan; 40]], (5, weighting, 1.0));
            assert_eq!(ids, [0.0, 1.0, 2.0, 3.0, 4.0]);
        }
    }
}

fn refusals(rank: &Rank, _: &mut StdRng) {
    let refused = |dtype, dims: &[usize], k, factor| {
        let scores = rank.poisoned(dtype, dims);
        let params = TopKParams {
            factor,
            ..TopKParams::new(scores.view(), k)
        };
        expect_invalid(rank.device.top_k(&rank.stream, &params), "a choice")
    };
    let (f32, nan) = (DataType::F32, f32::NAN);
    assert_eq!(refused(DataType::I32, &[2, 4], 1, 1.0), "scores.dtype");
    assert_eq!(refused(f32, &[8], 1, 1.0), "scores.shape");
    assert_eq!(refused(f32, &[1, 1025], 1, 1.0), "scores.shape");
    assert_eq!(refused(f32, &[1, 0], 1, 1.0), "scores.shape");
    assert_eq!(refused(f32, &[2, 4], 0, 1.0), "k");
    assert_eq!(refused(f32, &[2, 4], 5, 1.0), "k");
    assert_eq!(refused(f32, &[2, 40], 33, 1.0), "k");
    assert_eq!(refused(f32, &[2, 4], 1, nan), "factor");
}

pub(super) fn add(suite: &mut Suite) {
    alone(suite, "top_k/choices", choices);
    alone(suite, "top_k/extremes", extremes);
    alone(suite, "top_k/refusals", refusals);
}
