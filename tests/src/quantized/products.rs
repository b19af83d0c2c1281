//! Products with quantized factors: exact integers and then scales, or what the dequantized factors give.

use super::{Factor, Quantized, SCHEMES, tolerance};
use crate::{
    backend::Rank,
    check::{self, assert_bits, compare, expect_unsupported, norm},
    gather_linear::config,
    layer::{BiasKind, FLOATS, Layer, LoraKind, Spec},
    matrix::Matrix,
    oracle,
    suite::{Suite, World},
};
use brigade_device::{
    Activation, DataType, GemmParams, LoraLinearParams, Operand, Output, QBuffer, QScheme,
};
use rand::{Rng, rngs::StdRng};

const ACTIVATIONS: [Activation; 5] = [
    Activation::None,
    Activation::Relu,
    Activation::GeluTanh,
    Activation::GeluErf,
    Activation::Silu,
];

/// One linear with factors that may be quantized.
struct Case {
    x: Factor,
    weight: Factor,
    transpose_x: bool,
    alpha: f32,
    beta: f32,
    output: DataType,
    layer: Layer,
    want: Vec<f64>,
    /// Norm of all that is added up.
    parts: f64,
}

impl Case {
    fn random(rng: &mut StdRng, schemes: [QScheme; 2], transposes: [bool; 2], turn: usize) -> Self {
        let [m, n, k] = [
            rng.random_range(1..9),
            rng.random_range(1..9),
            rng.random_range(1..300),
        ];
        Self::with(rng, schemes, transposes, turn, [m, n, k])
    }

    fn with(
        rng: &mut StdRng,
        schemes: [QScheme; 2],
        transposes: [bool; 2],
        turn: usize,
        [m, n, k]: [usize; 3],
    ) -> Self {
        let dims = |rows, columns, transpose| {
            if transpose {
                [columns, rows]
            } else {
                [rows, columns]
            }
        };
        let dtype = FLOATS[turn % 3];
        let size = 1.0 / (k.max(1) as f64).sqrt();
        let x = Factor::random(rng, schemes[0], dtype, dims(m, k, transposes[0]), 1.0);
        let weight = Factor::random(rng, schemes[1], dtype, dims(k, n, transposes[1]), size);
        let spec = Spec::even(rng, 1).with(|s| {
            (s.rows, s.k, s.n) = (vec![m], vec![k], vec![n]);
            (s.dtype, s.bias_type) = (dtype, dtype);
            s.transpose = transposes[1];
            s.activation = ACTIVATIONS[turn % 5];
            s.bias = [BiasKind::None, BiasKind::Row, BiasKind::Full][turn % 3];
            s.lora = [LoraKind::None, LoraKind::Mixed][turn % 2];
        });
        let mut layer = spec.layers(rng, false).remove(0);
        layer.weight = weight.matrix();
        let (alpha, beta) = ([1.0, -1.5][turn % 2], [1.0, 0.0, 0.5][turn / 2 % 3]);
        let plain = x.matrix();
        let mut want = oracle::multiply(&plain, transposes[0], &layer.weight, layer.transpose);
        let all = oracle::product(&plain, transposes[0], &layer);
        let adapters: Vec<_> = all
            .iter()
            .zip(&want)
            .map(|(all, base)| all - base)
            .collect();
        // alpha belongs to the base product, not to the adapters.
        for (w, adapters) in want.iter_mut().zip(&adapters) {
            *w = f64::from(alpha) * *w + adapters;
        }
        let scaled = Layer {
            bias: layer.bias.clone().map(|mut c| {
                c.values.iter_mut().for_each(|x| *x *= f64::from(beta));
                c
            }),
            ..layer.clone()
        };
        let all_c = scaled.bias.as_ref().map_or(0.0, |c| {
            let each_row = c.values.len() == n;
            norm(&c.values) * if each_row { (m as f64).sqrt() } else { 1.0 }
        });
        let of_base = oracle::addends(&plain, transposes[0], &layer.weight, layer.transpose);
        let parts = f64::from(alpha).abs() * of_base + norm(&adapters) + all_c;
        oracle::finish(&mut want, &scaled, 0);
        Self {
            x,
            weight,
            transpose_x: transposes[0],
            alpha,
            beta,
            output: FLOATS[turn / 3 % 3],
            layer,
            want,
            parts,
        }
    }

    fn run(&self, rank: &Rank) {
        let (x, weight) = (self.x.upload(rank), self.weight.upload(rank));
        let layer = self.layer.upload(rank);
        let runs = layer.runs();
        let gemm = GemmParams {
            c: layer.bias.as_ref().map(|c| c.view()),
            alpha: self.alpha,
            beta: self.beta,
            transpose_a: self.transpose_x,
            transpose_b: self.layer.transpose,
            activation: self.layer.activation,
            ..GemmParams::new(x.operand(), weight.operand())
        };
        let linear = LoraLinearParams { gemm, runs: &runs };
        let output = Output::Allocate(self.output);
        let d = rank
            .device
            .lora_linear(&rank.stream, &linear, output)
            .unwrap()
            .unwrap();
        let schemes = [self.x.scheme(), self.weight.scheme()];
        let allowed = schemes
            .map(tolerance)
            .into_iter()
            .fold(check::tolerance(self.output), f64::max);
        let what = format!(
            "{schemes:?}, {:?} x {:?}, transposed {} and {}, alpha {}, beta {}, {}",
            self.x.matrix().dims,
            self.layer.weight.dims,
            self.transpose_x,
            self.layer.transpose,
            self.alpha,
            self.beta,
            self.output
        );
        if let Err(why) = compare(&rank.values(d.view()), &self.want, allowed, self.parts) {
            panic!("{what}: {why}");
        }
    }
}

/// Every scheme, or none, with every other, stored either way, with C, activations, adapters and alpha.
fn pairs(world: &World) {
    let mut rng = world.rng();
    let schemes = || [QScheme::None].into_iter().chain(SCHEMES);
    let mut cases = vec![];
    for (a, b) in schemes().flat_map(|a| schemes().map(move |b| (a, b))) {
        for transposes in [[false, false], [false, true], [true, false], [true, true]] {
            let turn = rng.random_range(0..90);
            cases.push(Case::random(&mut rng, [a, b], transposes, turn));
        }
    }
    world.run(&config(), move |rank| {
        cases.iter().for_each(|case| case.run(rank))
    });
}

/// Products without rows, columns or an inner dimension.
fn empty(world: &World) {
    let mut rng = world.rng();
    let mut cases = vec![];
    for scheme in SCHEMES {
        for sizes in [[0, 3, 5], [3, 0, 5], [3, 5, 0], [0, 0, 0]] {
            for other in [QScheme::None, scheme] {
                let turn = rng.random_range(0..90);
                cases.push(Case::with(
                    &mut rng,
                    [scheme, other],
                    [false, true],
                    turn,
                    sizes,
                ));
            }
        }
    }
    world.run(&config(), move |rank| {
        cases.iter().for_each(|case| case.run(rank))
    });
}

/// The product of two quantized factors in f32, the second as its scheme stores it.
fn product(rank: &Rank, x: &QBuffer, w: &QBuffer) -> Vec<u8> {
    let params = GemmParams {
        transpose_b: w.scheme() == QScheme::Int8PerToken,
        ..GemmParams::new(Operand::Quantized(x.view()), Operand::Quantized(w.view()))
    };
    let output = Output::Allocate(DataType::F32);
    let d = rank
        .device
        .gemm(&rank.stream, &params, output)
        .unwrap()
        .unwrap();
    rank.raw(d.view())
}

/// Sums of products of int8 are exact: with scales that are powers of two, every bit of the result is.
fn exact(world: &World, weight: QScheme) {
    let mut rng = world.rng();
    let (m, n, k) = (13, 17, 1000);
    let dims = if weight == QScheme::Int8PerToken {
        [n, k]
    } else {
        [k, n]
    };
    let mut power = |q: &mut Quantized| {
        q.scales.fill_with(|| 2f32.powi(rng.random_range(-8..8)));
    };
    let mut x = Quantized::random(&mut world.rng(), QScheme::Int8PerToken, [m, k], 1.0);
    let mut w = Quantized::random(&mut world.rng(), weight, dims, 1.0);
    power(&mut x);
    power(&mut w);
    let want = oracle::multiply(
        &x.dequantized(),
        false,
        &w.dequantized(),
        weight == QScheme::Int8PerToken,
    );
    let want = crate::matrix::to_bytes(DataType::F32, &want);
    world.run(&config(), move |rank| {
        let got = product(rank, &x.upload(rank), &w.upload(rank));
        assert_bits(&got, &want, DataType::F32, "exact integers");
    });
}

/// Inner dimensions whose sums leave 32 bits, and sums that cancel but for a few.
fn long(world: &World) {
    world.run(&config(), |rank| {
        for k in [65_536, 65_537, 150_000, 300_001] {
            let with = |value: i8, last: i8| {
                let mut kernel = vec![value.cast_unsigned(); k];
                kernel[k / 2..].fill(last.cast_unsigned());
                Quantized {
                    scheme: QScheme::Int8PerToken,
                    dims: [1, k],
                    kernel,
                    scales: vec![1.0],
                }
            };
            for (x, w) in [
                (with(-128, -128), with(-128, -128)),
                (with(127, 127), with(-128, -128)),
                (with(127, 127), with(127, -127)),
                (with(-128, 127), with(-128, 127)),
            ] {
                let products = x.kernel.iter().zip(&w.kernel);
                let sum: i64 = products
                    .map(|(&a, &b)| i64::from(a.cast_signed()) * i64::from(b.cast_signed()))
                    .sum();
                let got = product(rank, &x.upload(rank), &w.upload(rank));
                assert_bits(
                    &got,
                    &(sum as f32).to_ne_bytes(),
                    DataType::F32,
                    "a long sum",
                );
            }
        }
    });
}

/// What `quantize` gives can be multiplied, and is near what the floats give.
fn made_by_quantize(world: &World) {
    let mut rng = world.rng();
    let (m, n, k) = (9, 11, 260);
    let x = Matrix::random(&mut rng, DataType::F32, &[m, k], 1.0);
    let w = Matrix::random(&mut rng, DataType::F32, &[n, k], 1.0);
    let want = oracle::multiply(&x, false, &w, true);
    world.run(&config(), move |rank| {
        let (x, w) = (rank.upload(&x), rank.upload(&w));
        for (a, b) in [
            (QScheme::Int8PerToken, QScheme::Int8PerToken),
            (QScheme::Int8PerTensor, QScheme::Int8PerTensor),
            (QScheme::Fp8PerTensor, QScheme::Fp8PerTensor),
            (QScheme::Fp8PerTokenBlock, QScheme::Fp8PerTokenBlock),
        ] {
            let quantize = |v, scheme| rank.device.quantize(&rank.stream, v, scheme).unwrap();
            let (x, w) = (quantize(x.view(), a), quantize(w.view(), b));
            let params = GemmParams {
                transpose_b: true,
                ..GemmParams::new(Operand::Quantized(x.view()), Operand::Quantized(w.view()))
            };
            let output = Output::Allocate(DataType::F32);
            let d = rank
                .device
                .gemm(&rank.stream, &params, output)
                .unwrap()
                .unwrap();
            if let Err(why) = compare(&rank.values(d.view()), &want, 0.07, 0.0) {
                panic!("{a:?} by {b:?}: {why}");
            }
        }
    });
}

/// Rows of a quantized tensor with their scales are a factor like any other.
fn slices(world: &World) {
    let seed = world.rng();
    world.run(&config(), move |rank| {
        let mut rng = seed.clone();
        for scheme in SCHEMES {
            let q = Quantized::random(&mut rng, scheme, [12, 140], 1.0);
            let w = Matrix::random(&mut rng, DataType::F32, &[140, 3], 0.1);
            let all = oracle::multiply(&q.dequantized(), false, &w, false);
            let (whole, w) = (q.upload(rank), rank.upload(&w));
            for (first, rows) in [(0, 12), (0, 1), (5, 7), (11, 1), (12, 0), (3, 0)] {
                let part = if scheme.per_row() {
                    whole.slice(first, rows)
                } else {
                    whole.slice_per_tensor(first, rows)
                };
                let part = part.unwrap();
                let params = GemmParams::new(Operand::Quantized(part.view()), &w);
                let output = Output::Allocate(DataType::F32);
                let d = rank
                    .device
                    .gemm(&rank.stream, &params, output)
                    .unwrap()
                    .unwrap();
                let want = &all[first * 3..(first + rows) * 3];
                if let Err(why) = compare(&rank.values(d.view()), want, tolerance(scheme), 0.0) {
                    panic!("{scheme:?}, {rows} rows from {first}: {why}");
                }
            }
        }
    });
}

/// What cannot be multiplied has a reason.
fn refusals(world: &World) {
    let mut rng = world.rng();
    let q = Quantized::random(&mut rng, QScheme::Int8PerToken, [6, 6], 1.0);
    let plain = Matrix::random(&mut rng, DataType::F32, &[6, 6], 1.0);
    world.run(&config(), move |rank| {
        let (kernel, scales) = q.parts(rank);
        let zeros = Some(scales.clone());
        let with_zeros = QBuffer::new(kernel, scales, zeros, q.scheme).unwrap();
        let zeros = Operand::Quantized(with_zeros.view());
        let plain = rank.upload(&plain);
        let refused = |a: Operand<'_>, b: Operand<'_>| {
            let params = GemmParams::new(a, b);
            let result = rank
                .device
                .gemm(&rank.stream, &params, Output::Allocate(DataType::F32));
            expect_unsupported(result, "gemm")
        };
        assert_eq!(refused(zeros, (&plain).into()), "zero-points");
        assert_eq!(refused((&plain).into(), zeros), "zero-points");
        let batch = rank.poisoned(DataType::I8, &[2, 3, 4]);
        let scale = rank.upload_f32(&[1.0]);
        let batch = QBuffer::new(batch, scale, None, QScheme::Int8PerTensor).unwrap();
        let other = rank.poisoned(DataType::F32, &[2, 4, 3]);
        let code = refused(Operand::Quantized(batch.view()), (&other).into());
        assert_eq!(code, "quantized-operand");
    });
}

pub(super) fn add(suite: &mut Suite) {
    suite.add_at(1, "quantized_products/pairs", pairs);
    suite.add_at(1, "quantized_products/empty", empty);
    suite.add_at(1, "quantized_products/exact/by_row", |w| {
        exact(w, QScheme::Int8PerToken)
    });
    suite.add_at(1, "quantized_products/exact/by_column", |w| {
        exact(w, QScheme::Int8WeightOnly)
    });
    suite.add_at(1, "quantized_products/long", long);
    suite.add_at(1, "quantized_products/made_by_quantize", made_by_quantize);
    suite.add_at(1, "quantized_products/slices", slices);
    suite.add_at(1, "quantized_products/refusals", refusals);
}
