//! Products: transposes, factors, C, activations, batches, adapters, and outputs over inputs.

use super::alone;
use crate::{
    backend::Rank,
    check::{assert_close, assert_sum_close, expect_invalid, norm},
    faults::AMPLE,
    layer::{BiasKind, FLOATS, Layer, LoraKind, Spec, Uploaded},
    matrix::Matrix,
    oracle,
    suite::Suite,
};
use brigade_device::{
    Activation, Buffer, DataType, GemmParams, LoraLinearParams, LoraRun, Output, View,
};
use rand::{Rng, rngs::StdRng};

const ACTIVATIONS: [Activation; 5] = [
    Activation::None,
    Activation::Relu,
    Activation::GeluTanh,
    Activation::GeluErf,
    Activation::Silu,
];

/// One product, drawn.
pub(super) struct Case {
    a: Matrix,
    b: Matrix,
    c: Option<Matrix>,
    transpose_a: bool,
    transpose_b: bool,
    alpha: f32,
    beta: f32,
    activation: Activation,
    settled_b: bool,
    sm_cap: Option<u16>,
    output: DataType,
    dims: [usize; 2],
}

impl Case {
    fn new(rng: &mut StdRng, dims: [usize; 3], dtype: DataType, bias: BiasKind) -> Self {
        let transposes = [rng.random(), rng.random()];
        Self::stored(rng, dims, dtype, bias, transposes)
    }

    /// The same of factors that are stored so.
    pub(super) fn stored(
        rng: &mut StdRng,
        [m, n, k]: [usize; 3],
        dtype: DataType,
        bias: BiasKind,
        [transpose_a, transpose_b]: [bool; 2],
    ) -> Self {
        let a = if transpose_a { [k, m] } else { [m, k] };
        let b = if transpose_b { [n, k] } else { [k, n] };
        let c = match bias {
            BiasKind::None => None,
            BiasKind::Row => Some(vec![n]),
            BiasKind::OneRow => Some(vec![1, n]),
            BiasKind::Full => Some(vec![m, n]),
        };
        let scale = 2.0 / (k.max(1) as f64).sqrt();
        Self {
            a: Matrix::random(rng, dtype, &a, scale),
            b: Matrix::random(rng, dtype, &b, 1.0),
            c: c.map(|dims| Matrix::random(rng, dtype, &dims, 1.0)),
            transpose_a,
            transpose_b,
            alpha: [1.0, -0.5, 2.0, 0.0][rng.random_range(0..4)],
            beta: [1.0, 0.5, -1.0, 0.0][rng.random_range(0..4)],
            activation: ACTIVATIONS[rng.random_range(0..5)],
            settled_b: rng.random(),
            sm_cap: None,
            output: [dtype, DataType::F32][rng.random_range(0..2)],
            dims: [m, n],
        }
    }

    fn want(&self) -> Vec<f64> {
        let product = oracle::multiply(&self.a, self.transpose_a, &self.b, self.transpose_b);
        let n = self.dims[1];
        let c = |i: usize| match &self.c {
            Some(c) if c.values.len() == n => c.values[i % n],
            Some(c) => c.values[i],
            None => 0.0,
        };
        let (alpha, beta) = (f64::from(self.alpha), f64::from(self.beta));
        let each = product.into_iter().enumerate();
        each.map(|(i, x)| oracle::activate(self.activation, alpha * x + beta * c(i)))
            .collect()
    }

    /// Norm of all that is added up.
    fn parts(&self) -> f64 {
        let product = oracle::addends(&self.a, self.transpose_a, &self.b, self.transpose_b);
        let c = self.c.as_ref().map_or(0.0, |c| {
            let times = self.dims.iter().product::<usize>() / c.values.len().max(1);
            norm(&c.values) * (times as f64).sqrt()
        });
        f64::from(self.alpha.abs()) * product + f64::from(self.beta.abs()) * c
    }

    fn params<'a>(&self, a: &'a Buffer, b: &'a Buffer, c: Option<View<'a>>) -> GemmParams<'a> {
        GemmParams {
            c,
            alpha: self.alpha,
            beta: self.beta,
            transpose_a: self.transpose_a,
            transpose_b: self.transpose_b,
            activation: self.activation,
            settled_b: self.settled_b,
            sm_cap: self.sm_cap,
            ..GemmParams::new(a, b)
        }
    }

    /// On so many multiprocessors at most.
    pub(super) fn capped(mut self, sms: u16) -> Self {
        self.sm_cap = Some(sms);
        self
    }

    pub(super) fn run(&self, rank: &Rank) {
        let (a, b) = (rank.upload(&self.a), rank.upload(&self.b));
        // B is there, as some of the products say.
        rank.stream.sync(AMPLE).unwrap();
        let c = self.c.as_ref().map(|c| rank.upload(c));
        let params = self.params(&a, &b, c.as_ref().map(|c| c.view()));
        let what = format!("{params:?}");
        let allocated = rank
            .device
            .gemm(&rank.stream, &params, Output::Allocate(self.output))
            .unwrap()
            .unwrap();
        let mut given = rank.poisoned(self.output, &self.dims);
        let none = rank
            .device
            .gemm(&rank.stream, &params, Output::Into(given.view_mut()))
            .unwrap();
        assert!(none.is_none(), "D given and allocated");
        for d in [allocated, given] {
            assert_eq!((d.shape().dims(), d.dtype()), (&self.dims[..], self.output));
            let got = rank.values(d.view());
            assert_sum_close(&got, &self.want(), self.output, self.parts(), &what);
        }
    }
}

fn products(rank: &Rank, rng: &mut StdRng) {
    for dtype in FLOATS {
        for bias in [
            BiasKind::None,
            BiasKind::Row,
            BiasKind::OneRow,
            BiasKind::Full,
        ] {
            for _ in 0..6 {
                let mut size = || rng.random_range(1..60);
                let dims = [size(), size(), size()];
                Case::new(rng, dims, dtype, bias).run(rank);
            }
            // Sizes that a device may take several elements at a time of, and more than one tile.
            for dims in [[33, 64, 128], [5, 2056, 72]] {
                Case::new(rng, dims, dtype, bias).run(rank);
            }
        }
    }
}

fn empty(rank: &Rank, rng: &mut StdRng) {
    for dims in [[0, 4, 5], [4, 0, 5], [4, 5, 0], [0, 0, 0], [1, 1, 1]] {
        for bias in [BiasKind::None, BiasKind::Row, BiasKind::Full] {
            Case::new(rng, dims, DataType::F32, bias).run(rank);
        }
    }
}

/// A batch is its products, one after the other, with a C of its own or one row for all.
fn batches(rank: &Rank, rng: &mut StdRng) {
    for bias in [BiasKind::None, BiasKind::Row, BiasKind::Full] {
        for dtype in FLOATS {
            let first = Case::new(rng, [5, 7, 9], dtype, bias);
            let more = (0..2).map(|_| Case {
                a: Matrix::random(rng, dtype, &first.a.dims, 0.5),
                b: Matrix::random(rng, dtype, &first.b.dims, 1.0),
                c: match (&first.c, bias) {
                    (Some(c), BiasKind::Full) => Some(Matrix::random(rng, dtype, &c.dims, 1.0)),
                    (c, _) => c.clone(),
                },
                ..first
            });
            let more: Vec<_> = more.collect();
            let cases: Vec<_> = std::iter::once(&first).chain(&more).collect();
            let batch = |part: fn(&Case) -> &Matrix| {
                let parts: Vec<_> = cases.iter().map(|c| part(c).clone()).collect();
                let dims = [&[parts.len()], &parts[0].dims[..]].concat();
                rank.upload(&Matrix::stack(&parts)).reshape(&dims).unwrap()
            };
            let (a, b) = (batch(|c| &c.a), batch(|c| &c.b));
            let c = match bias {
                BiasKind::Full => Some(batch(|c| c.c.as_ref().unwrap())),
                _ => first.c.as_ref().map(|c| rank.upload(c)),
            };
            let params = first.params(&a, &b, c.as_ref().map(|c| c.view()));
            let output = Output::Allocate(first.output);
            let d = rank
                .device
                .gemm(&rank.stream, &params, output)
                .unwrap()
                .unwrap();
            assert_eq!(d.shape().dims(), [3, 5, 7]);
            let want: Vec<_> = cases.iter().flat_map(|c| c.want()).collect();
            assert_close(&rank.values(d.view()), &want, first.output, "a batch");
        }
    }
}

/// D may lie over C, and over a factor.
fn in_place(rank: &Rank, rng: &mut StdRng) {
    for dtype in FLOATS {
        for over in 0..3 {
            // A product of few rows too, where C can be D.
            let mut case = match rng.random() {
                true => Case::new(rng, [11, 11, 11], dtype, BiasKind::Full),
                false => {
                    let dims = if over == 2 { [5, 40, 64] } else { [16, 16, 16] };
                    Case::stored(rng, dims, dtype, BiasKind::Full, [false, true])
                }
            };
            case.output = dtype;
            let buffers = [&case.a, &case.b, case.c.as_ref().unwrap()].map(|m| rank.upload(m));
            let [a, b, c] = &buffers;
            let mut d = buffers[over].clone();
            let params = case.params(a, b, Some(c.view()));
            rank.device
                .gemm(&rank.stream, &params, Output::Into(d.view_mut()))
                .unwrap();
            assert_close(&rank.values(d.view()), &case.want(), dtype, "in place");
        }
    }
}

fn layer_params<'a>(x: &'a Buffer, layer: &Layer, on_device: &'a Uploaded) -> GemmParams<'a> {
    GemmParams {
        c: on_device.bias.as_ref().map(|b| b.view()),
        transpose_b: layer.transpose,
        activation: layer.activation,
        ..GemmParams::new(x, &on_device.weight)
    }
}

fn adapters(rank: &Rank, rng: &mut StdRng) {
    for lora in [
        LoraKind::None,
        LoraKind::One,
        LoraKind::Mixed,
        LoraKind::Mixed,
        LoraKind::Bare,
    ] {
        for activation in ACTIVATIONS {
            let transpose = rng.random();
            let spec = Spec::ragged(rng, 1).with(|s| {
                (s.lora, s.activation, s.transpose) = (lora, activation, transpose);
                s.bias = BiasKind::Full;
            });
            let layer = &spec.layers(rng, false)[0];
            let x = Matrix::random(rng, spec.dtype, &[spec.rows[0], spec.k[0]], 1.0);
            let (on_device, x_on_device) = (layer.upload(rank), rank.upload(&x));
            let runs = on_device.runs();
            let params = LoraLinearParams {
                gemm: layer_params(&x_on_device, layer, &on_device),
                runs: &runs,
            };
            let output = Output::Allocate(spec.output);
            let d = rank
                .device
                .lora_linear(&rank.stream, &params, output)
                .unwrap();
            let want = oracle::linear(&x, false, layer);
            let got = rank.values(d.unwrap().view());
            assert_close(
                &got,
                &want,
                spec.output,
                &format!("{lora:?}, {activation:?}"),
            );
        }
    }
}

/// A refused product names the field, a bad adapter its index, and nothing has been written.
fn refusals(rank: &Rank, _: &mut StdRng) {
    let f32 = DataType::F32;
    let new = |dims: &[usize]| rank.poisoned(f32, dims);
    let (a, b) = (new(&[4, 5]), new(&[5, 6]));
    let refused = |params: &GemmParams<'_>| {
        let output = Output::Allocate(f32);
        expect_invalid(rank.device.gemm(&rank.stream, params, output), "gemm")
    };
    let other = new(&[4, 6]);
    assert_eq!(refused(&GemmParams::new(&a, &other)), "b.shape");
    let integers = rank.poisoned(DataType::I32, &[4, 5]);
    assert_eq!(refused(&GemmParams::new(&integers, &b)), "a.dtype");
    let c = new(&[3, 6]);
    let with_c = GemmParams {
        c: Some(c.view()),
        ..GemmParams::new(&a, &b)
    };
    assert_eq!(refused(&with_c), "c.shape");

    let mut d = rank.upload_bytes(f32, &[4, 7], &[0; 4 * 28]);
    let output = Output::Into(d.view_mut());
    let result = rank
        .device
        .gemm(&rank.stream, &GemmParams::new(&a, &b), output);
    assert_eq!(expect_invalid(result, "D"), "output.shape");
    assert_eq!(rank.values(d.view()), [0.0; 28]);

    let (low, high) = (new(&[5, 2]), new(&[3, 6]));
    let bad = brigade_device::Lora {
        a: low.view(),
        b: high.view(),
        scale: 1.0,
    };
    let runs = [None, Some(bad)].map(|adapter| LoraRun { rows: 2, adapter });
    let params = LoraLinearParams {
        gemm: GemmParams::new(&a, &b),
        runs: &runs,
    };
    let output = Output::Allocate(f32);
    let result = rank.device.lora_linear(&rank.stream, &params, output);
    let text = result.as_ref().unwrap_err().to_string();
    assert!(text.contains("adapter 1"), "{text}");
    assert_eq!(expect_invalid(result, "an adapter"), "runs.adapter");
}

/// The end of a linear whose sum was taken elsewhere.
fn bias_activation(rank: &Rank, rng: &mut StdRng) {
    for activation in ACTIVATIONS {
        for bias in [BiasKind::None, BiasKind::Row, BiasKind::Full] {
            let output = FLOATS[rng.random_range(0..3)];
            let spec = Spec::even(rng, 1).with(|s| {
                (s.bias, s.activation, s.output) = (bias, activation, output);
            });
            let layer = &spec.layers(rng, false)[0];
            let from = Matrix::random(rng, DataType::F32, &[spec.rows[0], spec.n[0]], 2.0);
            let (c, x) = (layer.upload(rank).bias, rank.upload(&from));
            let bias = c.as_ref().map(|c| c.view());
            let d = rank
                .device
                .bias_activation(
                    &rank.stream,
                    x.view(),
                    bias,
                    activation,
                    Output::Allocate(output),
                )
                .unwrap()
                .unwrap();
            let mut want = from.values;
            oracle::finish(&mut want, layer, 0);
            assert_close(
                &rank.values(d.view()),
                &want,
                output,
                &format!("{activation:?}"),
            );
        }
    }
}

/// Of the types that elements have, it takes floats, and names what is none.
fn bias_activation_types(rank: &Rank, _: &mut StdRng) {
    use DataType::{
        BF16, Bool, F8E4M3, F8E5M2, F16, F32, F64, I8, I16, I32, I64, U8, U16, U32, U64,
    };
    let all = [
        Bool, U8, I8, U16, I16, U32, I32, U64, I64, F16, BF16, F32, F64, F8E4M3, F8E5M2,
    ];
    let is_float = |dtype| [F16, BF16, F32].contains(&dtype);
    let call = |from: DataType, bias: DataType, output: DataType| {
        let (x, c) = (
            rank.upload_bytes(from, &[2, 4], &vec![0; 8 * from.bytes()]),
            rank.upload_bytes(bias, &[4], &vec![0; 4 * bias.bytes()]),
        );
        let (device, on) = (&rank.device, &rank.stream);
        let output = Output::Allocate(output);
        device.bias_activation(on, x.view(), Some(c.view()), Activation::Silu, output)
    };
    for from in all {
        for bias in all {
            let what = format!("{from} and {bias}");
            let result = call(from, bias, F32);
            if is_float(from) && is_float(bias) {
                let d = result.unwrap().unwrap();
                assert_eq!(rank.values(d.view()), [0.0; 8], "{what}");
            } else {
                let want = if is_float(from) {
                    "bias.dtype"
                } else {
                    "from.dtype"
                };
                assert_eq!(expect_invalid(result, &what), want, "{what}");
            }
        }
    }
    assert_eq!(expect_invalid(call(F32, F32, I32), "i32"), "output.dtype");
}

pub(super) fn add(suite: &mut Suite) {
    alone(suite, "gemm/products", products);
    alone(suite, "gemm/empty", empty);
    alone(suite, "gemm/batches", batches);
    alone(suite, "gemm/in_place", in_place);
    alone(suite, "gemm/refusals", refusals);
    alone(suite, "lora_linear/adapters", adapters);
    alone(suite, "bias_activation", bias_activation);
    alone(suite, "bias_activation_types", bias_activation_types);
}
