//! `quantize` bit for bit: `scale = max |x| / limit`, `q = x / scale`, each one f32 operation, and one rounding to the
//! kernel's type, ties to even. A scale of 0 makes zeros; NaNs are canonical.

use super::{Quantized, SCHEMES, fp8, is_fp8, limit, scale_dims};
use crate::{
    backend::Rank,
    check::{assert_bits, expect_invalid},
    gather_linear::config,
    layer::FLOATS,
    matrix::{to_bytes, to_f32},
    suite::{Suite, World},
};
use brigade_device::{DataType, QScheme};
use rand::{Rng, rngs::StdRng};
use std::sync::LazyLock;

const CANONICAL_NAN: u32 = 0x7FC0_0000;

/// The nearest fp8 number, the even one of two that are equally near.
pub fn to_fp8(x: f32) -> u8 {
    if x.is_nan() {
        return 0x7F;
    }
    static ALL: LazyLock<Vec<f64>> = LazyLock::new(|| (0..=0x7Eu8).map(fp8).collect());
    let magnitude = f64::from(x.abs().min(448.0));
    let (mut best, mut nearest) = (0u8, magnitude);
    for (bits, number) in (0u8..).zip(&*ALL) {
        let near = (number - magnitude).abs();
        if near < nearest || near == nearest && bits % 2 == 0 {
            (best, nearest) = (bits, near);
        }
    }
    best | u8::from(x.is_sign_negative()) << 7
}

fn to_int8(x: f32) -> u8 {
    if x.is_nan() {
        return 0;
    }
    let floor = f64::from(x).floor();
    let over = f64::from(x) - floor;
    let up = over > 0.5 || over == 0.5 && floor % 2.0 != 0.0;
    let rounded = if up { floor + 1.0 } else { floor };
    (rounded.clamp(-127.0, 127.0) as i8).cast_unsigned()
}

/// What `quantize` must give.
pub fn oracle(scheme: QScheme, dims: [usize; 2], x: &[f32]) -> Quantized {
    let mut q = Quantized {
        scheme,
        dims,
        kernel: vec![],
        scales: vec![0.0; scale_dims(scheme, dims).iter().product()],
    };
    let groups: Vec<_> = (0..dims[0])
        .flat_map(|i| (0..dims[1]).map(move |j| (i, j)))
        .map(|(i, j)| q.group(i, j))
        .collect();
    for (&x, &g) in x.iter().zip(&groups) {
        let most = &mut q.scales[g];
        if x.is_nan() {
            *most = f32::NAN;
        } else if x.abs() > *most {
            *most = x.abs();
        }
    }
    for scale in &mut q.scales {
        *scale = if scale.is_nan() {
            f32::from_bits(CANONICAL_NAN)
        } else {
            *scale / limit(scheme)
        };
    }
    q.kernel = x
        .iter()
        .zip(&groups)
        .map(|(&x, &g)| {
            let scale = q.scales[g];
            let ratio = if scale == 0.0 { 0.0 } else { x / scale };
            if is_fp8(scheme) {
                to_fp8(ratio)
            } else {
                to_int8(ratio)
            }
        })
        .collect();
    q
}

/// Rows that rounding, ranges and signs show in.
fn rows(rng: &mut StdRng, dtype: DataType, columns: usize) -> Vec<Vec<f32>> {
    let (huge, tiny) = match dtype {
        DataType::F16 => (65504.0, 6e-8),
        _ => (f32::MAX / 2.0, 1e-40),
    };
    let mut row = |f: &mut dyn FnMut(&mut StdRng) -> f32| (0..columns).map(|_| f(rng)).collect();
    let mut n = 0.0f32;
    vec![
        row(&mut |_| 0.0),
        row(&mut |_| -0.0),
        row(&mut |r| r.random_range(-3.0..3.0)),
        row(&mut |r| huge * r.random_range(-1.0f32..1.0)),
        row(&mut |r| tiny * r.random_range(-40.0f32..40.0)),
        row(&mut |r| if r.random() { tiny } else { -0.0 }),
        // Halves below a greatest value of 127, so that the scale of int8 is 1: ties.
        row(&mut |_| {
            n += 1.0;
            (127.5 - n).clamp(-126.5, 127.0)
        }),
        // The same for fp8, whose steps are 32 at the top.
        row(&mut |r| {
            if r.random() {
                448.0
            } else {
                16.0 * r.random_range(0.0f32..28.0).floor()
            }
        }),
        row(&mut |r| {
            if r.random() {
                448.0
            } else {
                r.random_range(0.0f32..64.0).floor() / 1024.0
            }
        }),
        row(&mut |r| 2f32.powi(r.random_range(-12..12)) * if r.random() { 1.0 } else { -1.0 }),
        row(&mut |r| r.random_range(-1.0f32..1.0).powi(9)),
    ]
}

/// Rows with numbers that nothing can be made of.
fn broken_rows(rng: &mut StdRng, columns: usize) -> Vec<Vec<f32>> {
    let payload = f32::from_bits(0xFFC5_4321);
    [f32::NAN, payload, f32::INFINITY, f32::NEG_INFINITY]
        .map(|broken| {
            let mut row: Vec<_> = (0..columns).map(|_| rng.random_range(-9.0..9.0)).collect();
            row[rng.random_range(0..columns)] = broken;
            row
        })
        .to_vec()
}

/// Quantizes on the device, and asserts every bit of kernel and scales.
fn check(rank: &Rank, scheme: QScheme, dtype: DataType, dims: [usize; 2], x: &[f32]) -> Quantized {
    let what = format!("{scheme:?} of {dims:?} {dtype}");
    let wide: Vec<f64> = x.iter().copied().map(f64::from).collect();
    let bytes = to_bytes(dtype, &wide);
    let from = rank.upload_bytes(dtype, &dims, &bytes);
    let got = rank
        .device
        .quantize(&rank.stream, from.view(), scheme)
        .unwrap();
    let want = oracle(scheme, dims, &to_f32(dtype, &bytes));
    assert_eq!(got.scheme(), scheme);
    assert_eq!(got.kernel().shape().dims(), dims, "{what}");
    assert_eq!(
        got.scales().shape().dims(),
        scale_dims(scheme, dims),
        "{what}"
    );
    assert!(got.zeros().is_none());
    let scales = rank.raw(got.scales().view());
    assert_bits(
        &scales,
        &want.scale_bytes(),
        DataType::F32,
        &format!("{what}: scales"),
    );
    let kernel = rank.raw(got.kernel().view());
    assert_bits(
        &kernel,
        &want.kernel,
        DataType::U8,
        &format!("{what}: kernel"),
    );
    want
}

/// Every row alone, so that one row's greatest value hides no other's.
fn bits(world: &World, scheme: QScheme) {
    let seed = world.rng();
    world.run(&config(), move |rank| {
        let mut rng = seed.clone();
        for dtype in FLOATS {
            for columns in [1, 37, 128, 129, 300] {
                let mut all = rows(&mut rng, dtype, columns);
                all.extend(broken_rows(&mut rng, columns));
                for row in &all {
                    check(rank, scheme, dtype, [1, columns], row);
                }
                let dims = [all.len(), columns];
                check(rank, scheme, dtype, dims, &all.concat());
            }
            for dims in [[0, 0], [0, 5], [5, 0], [1, 1]] {
                check(rank, scheme, dtype, dims, &vec![-0.5; dims[0] * dims[1]]);
            }
        }
    });
}

/// What comes back is within half a step of int8, and within half a unit in the last place of fp8.
fn error_bounds(world: &World, scheme: QScheme) {
    let seed = world.rng();
    world.run(&config(), move |rank| {
        let mut rng = seed.clone();
        for dtype in FLOATS {
            let dims = [17, 200];
            let x: Vec<f32> = (0..17 * 200)
                .map(|_| rng.random_range(-1.0f32..1.0).powi(3) * 50.0)
                .collect();
            let q = check(rank, scheme, dtype, dims, &x);
            let wide: Vec<f64> = x.iter().copied().map(f64::from).collect();
            let given = to_f32(dtype, &to_bytes(dtype, &wide));
            let back = q.dequantized();
            for (i, (&x, &y)) in given.iter().zip(&back.values).enumerate() {
                let x = f64::from(x);
                let scale = f64::from(q.scales[q.group(i / 200, i % 200)]);
                let bound = if is_fp8(scheme) {
                    (x.abs() / 16.0).max(scale / 1024.0)
                } else {
                    scale / 2.0
                };
                let slack = 1.0 + 1e-4;
                assert!(
                    (x - y).abs() <= bound * slack,
                    "{scheme:?} of {dtype}: {x} became {y}"
                );
            }
        }
    });
}

fn refusals(world: &World) {
    world.run(&config(), |rank| {
        let refused = |dtype, dims: &[usize], scheme| {
            let from = rank.poisoned(dtype, dims);
            let result = rank.device.quantize(&rank.stream, from.view(), scheme);
            expect_invalid(result, "quantize")
        };
        let (f32, per_token) = (DataType::F32, QScheme::Int8PerToken);
        assert_eq!(refused(f32, &[4], per_token), "a.shape");
        assert_eq!(refused(f32, &[2, 2, 4], per_token), "a.shape");
        assert_eq!(refused(DataType::I32, &[2, 4], per_token), "a.dtype");
        assert_eq!(refused(DataType::F64, &[2, 4], per_token), "a.dtype");
        assert_eq!(refused(f32, &[2, 4], QScheme::None), "scheme");
    });
}

/// A captured `quantize` works on what lies in its input when it is launched.
fn captured(world: &World) {
    let seed = world.rng();
    world.run(&config(), move |rank| {
        let mut rng = seed.clone();
        for scheme in SCHEMES {
            let dims = [5, 130];
            let mut x = rank.poisoned(DataType::F32, &dims);
            let mut q = None;
            let mut work = || {
                q = Some(rank.device.quantize(&rank.stream, x.view(), scheme)?);
                Ok(())
            };
            let graph = rank.device.capture(&rank.stream, &mut work).unwrap();
            let q = q.unwrap();
            for _ in 0..3 {
                let values: Vec<f32> = (0..650).map(|_| rng.random_range(-2.0..2.0)).collect();
                let bytes = bytemuck::cast_slice(&values);
                rank.device
                    .write(&rank.stream, x.view_mut(), bytes)
                    .unwrap();
                graph.launch(&rank.stream).unwrap();
                let want = oracle(scheme, dims, &values);
                let kernel = rank.raw(q.kernel().view());
                assert_bits(&kernel, &want.kernel, DataType::U8, "replayed kernel");
                let scales = rank.raw(q.scales().view());
                assert_bits(
                    &scales,
                    &want.scale_bytes(),
                    DataType::F32,
                    "replayed scales",
                );
            }
        }
    });
}

pub(super) fn add(suite: &mut Suite) {
    for scheme in SCHEMES {
        let name = format!("{scheme:?}").to_lowercase();
        suite.add_at(1, &format!("quantize/bits/{name}"), move |w| {
            bits(w, scheme)
        });
        suite.add_at(1, &format!("quantize/error_bounds/{name}"), move |w| {
            error_bounds(w, scheme);
        });
    }
    suite.add_at(1, "quantize/refusals", refusals);
    suite.add_at(1, "quantize/captured", captured);
}
