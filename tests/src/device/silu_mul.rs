//! The gate between two products.

use super::alone;
use crate::{
    backend::Rank,
    check::{assert_close, expect_invalid},
    layer::FLOATS,
    matrix::{Matrix, to_f64},
    oracle,
    suite::Suite,
};
use brigade_device::{Activation, DataType, DeviceExt, Output, SiluMulParams};
use rand::rngs::StdRng;

fn gates(rank: &Rank, rng: &mut StdRng) {
    for (from, to) in FLOATS.into_iter().flat_map(|f| FLOATS.map(|t| (f, t))) {
        for (rows, n) in [(5, 24), (3, 7), (2, 2056), (0, 8), (4, 0), (1, 1)] {
            let x = Matrix::random(rng, from, &[rows, 2 * n], 6.0);
            let on_device = rank.upload(&x);
            // Some rows count, all, or fewer than none.
            for count in [None, Some(rows as i32 / 2), Some(rows as i32 + 9), Some(-1)] {
                let counts = count.map(|c| rank.device.upload(&rank.stream, &[c], &[1]).unwrap());
                let params = SiluMulParams {
                    from: on_device.view(),
                    rows: counts.as_ref().map(|c| c.view()),
                };
                let mut d = rank.poisoned(to, &[rows, n]);
                let none = rank
                    .device
                    .silu_mul(&rank.stream, &params, Output::Into(d.view_mut()))
                    .unwrap();
                assert!(none.is_none(), "D given and allocated");
                let bytes = rank.raw(d.view());
                let counted = count.map_or(rows, |c| (c.max(0) as usize).min(rows));
                let (done, left) = bytes.split_at(counted * n * to.bytes());
                let want: Vec<f64> = (0..counted * n)
                    .map(|i| {
                        let at = i / n.max(1) * 2 * n + i % n.max(1);
                        oracle::activate(Activation::Silu, x.values[at]) * x.values[at + n]
                    })
                    .collect();
                let what = format!("{from} to {to}, [{rows}, {n}], {count:?}");
                assert_close(&to_f64(to, done), &want, to, &what);
                assert!(left.iter().all(|&b| b == 0xFF), "{what}: rows behind");
            }
            let made = rank
                .device
                .silu_mul(
                    &rank.stream,
                    &SiluMulParams::new(on_device.view()),
                    Output::Allocate(to),
                )
                .unwrap()
                .unwrap();
            assert_eq!((made.shape().dims(), made.dtype()), (&[rows, n][..], to));
        }
    }
    let odd = Matrix::random(rng, DataType::F32, &[3, 5], 1.0);
    let odd = rank.upload(&odd);
    let params = SiluMulParams::new(odd.view());
    let result = rank
        .device
        .silu_mul(&rank.stream, &params, Output::Allocate(DataType::F32));
    assert_eq!(expect_invalid(result, "odd columns"), "from.shape");
    // Half of it is read when the other half is written.
    let both = Matrix::random(rng, DataType::F32, &[1, 8], 1.0);
    let both = rank.upload(&both).reshape(&[8]).unwrap();
    let from = both.reshape(&[1, 8]).unwrap();
    let mut d = both.slice(4, 4).unwrap().reshape(&[1, 4]).unwrap();
    let result = rank.device.silu_mul(
        &rank.stream,
        &SiluMulParams::new(from.view()),
        Output::Into(d.view_mut()),
    );
    assert_eq!(expect_invalid(result, "in place"), "output.memory");
}

/// Values that overflow on the way are what the formula says.
fn extremes(rank: &Rank, _: &mut StdRng) {
    let (big, inf, nan) = (200.0, f32::INFINITY, f32::NAN);
    let gates = [-big, big, 0.0, -0.0, nan, 1.0, inf];
    let ups = [3.0, 3.0, 5.0, 5.0, 1.0, nan, 2.0];
    let from = rank.upload_f32(&[gates, ups].concat());
    let from = from.reshape(&[1, 14]).unwrap();
    let d = rank
        .device
        .silu_mul(
            &rank.stream,
            &SiluMulParams::new(from.view()),
            Output::Allocate(DataType::F32),
        )
        .unwrap()
        .unwrap();
    let got: Vec<f32> = rank.device.download(&rank.stream, d.view()).unwrap();
    assert_eq!(got[..4], [0.0, 600.0, 0.0, 0.0]);
    assert!(got[4].is_nan() && got[5].is_nan());
    assert_eq!(got[6], inf);
}

pub(super) fn add(suite: &mut Suite) {
    alone(suite, "silu_mul/gates", gates);
    alone(suite, "silu_mul/extremes", extremes);
}
