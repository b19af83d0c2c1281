//! Linear with all-reduce: every rank gets the sum of all ranks' products, with C and the activation once.

use crate::{
    all_reduce::algorithms,
    backend::Rank,
    check::{assert_bits, assert_sum_close, expect_invalid, norm},
    gather_linear::config,
    layer::{BiasKind, FLOATS, Layer, Spec},
    matrix::{Matrix, to_f32},
    oracle,
    suite::{Suite, World},
    themes::THEMES,
};
use brigade_device::{
    AllReduceAlgorithm, GemmParams, LoraLinearAllReduceParams, LoraLinearParams, Output, Plan,
    ReduceOp,
};
use rand::rngs::StdRng;

/// A case with its numbers, and what must come out.
pub struct Case {
    spec: Spec,
    x: Vec<Matrix>,
    layers: Vec<Layer>,
    want: Vec<f64>,
    parts: f64,
}

impl Case {
    /// Draws the numbers. N is that of rank 0.
    pub fn new(rng: &mut StdRng, mut spec: Spec) -> Self {
        let (m, n) = (spec.total_rows(), spec.n[0]);
        spec.n.fill(n);
        let x: Vec<_> = spec
            .k
            .iter()
            .map(|&k| Matrix::random(rng, spec.dtype, &[m, k], 1.0))
            .collect();
        let layers = spec.layers(rng, true);
        let parts: Vec<_> = x
            .iter()
            .zip(&layers)
            .map(|(x, layer)| oracle::product(x, false, layer))
            .collect();
        let mut want = vec![0.0; m * n];
        for part in &parts {
            want.iter_mut().zip(part).for_each(|(s, p)| *s += p);
        }
        oracle::finish(&mut want, &layers[0], 0);
        Self {
            parts: norm(&parts.concat()),
            spec,
            x,
            layers,
            want,
        }
    }

    /// Makes the call, and asserts everything that it promises.
    pub fn run(&self, rank: &Rank, choice: Option<AllReduceAlgorithm>) {
        let (spec, me) = (&self.spec, rank.rank);
        let what = format!("{choice:?}, {spec:?}");
        let layer = self.layers[me].upload(rank);
        let runs = layer.runs();
        let x = rank.upload(&self.x[me]);
        let dims = [spec.total_rows(), spec.n[0]];
        let mut given = spec.into.then(|| rank.poisoned(spec.output, &dims));
        let gemm = GemmParams {
            c: layer.bias.as_ref().map(|b| b.view()),
            transpose_b: spec.transpose,
            activation: spec.activation,
            ..GemmParams::new(&x, &layer.weight)
        };
        let result = rank
            .lease()
            .lora_linear_with_all_reduce(LoraLinearAllReduceParams {
                linear: LoraLinearParams { gemm, runs: &runs },
                output: match &mut given {
                    Some(d) => Output::Into(d.view_mut()),
                    None => Output::Allocate(spec.output),
                },
                choice,
            })
            .unwrap();
        let Plan::AllReduce { algorithm, .. } = result.plan else {
            panic!("{what}: {:?}", result.plan);
        };
        assert!(
            choice.is_none_or(|c| c == algorithm),
            "{what}: {algorithm:?}"
        );
        assert_eq!(
            result.d.is_none(),
            spec.into,
            "{what}: D given and allocated"
        );
        let d = result.d.or(given).unwrap();
        assert_eq!((d.dtype(), d.shape().dims()), (spec.output, &dims[..]));
        let got = rank.values(d.view());
        assert_sum_close(&got, &self.want, spec.output, self.parts, &what);
        rank.assert_shared(&rank.raw(d.view()), &what);
    }
}

/// C counts once or not at all: any other factor is refused, before anything is sent.
fn beta(world: &World) {
    let mut rng = world.rng();
    let spec = Spec::ragged(&mut rng, world.size).with(|s| s.bias = BiasKind::Full);
    let case = Case::new(&mut rng, spec.clone());
    let without = Case::new(&mut rng, spec.with(|s| s.bias = BiasKind::None));
    world.run(&config(), move |rank| {
        let layer = case.layers[rank.rank].upload(rank);
        let x = rank.upload(&case.x[rank.rank]);
        let gemm = GemmParams {
            c: layer.bias.as_ref().map(|b| b.view()),
            beta: 0.5,
            ..GemmParams::new(&x, &layer.weight)
        };
        let result = rank
            .lease()
            .lora_linear_with_all_reduce(LoraLinearAllReduceParams {
                linear: LoraLinearParams { gemm, runs: &[] },
                output: Output::Allocate(case.spec.output),
                choice: None,
            });
        assert_eq!(expect_invalid(result, "beta"), "linear.gemm.beta");

        let layer = without.layers[rank.rank].upload(rank);
        let x = rank.upload(&without.x[rank.rank]);
        let c = rank.poisoned(without.spec.output, &[without.spec.n[0]]);
        let gemm = GemmParams {
            c: Some(c.view()),
            beta: 0.0,
            ..GemmParams::new(&x, &layer.weight)
        };
        let result = rank
            .lease()
            .lora_linear_with_all_reduce(LoraLinearAllReduceParams {
                linear: LoraLinearParams { gemm, runs: &[] },
                output: Output::Allocate(without.spec.output),
                choice: None,
            })
            .unwrap();
        let d = rank.values(result.d.unwrap().view());
        assert_sum_close(
            &d,
            &without.want,
            without.spec.output,
            without.parts,
            "beta 0",
        );
    });
}

/// D without C and an activation has the bits of the parts, rounded to D's type, added in rank order in f32 and rounded once; and so has
/// D with a C of zeros, which goes another way.
fn same_bits(world: &World) {
    let mut rng = world.rng();
    let sizes = [
        (5, 33, 70),
        (64, 96, 48),
        (1, 7, 1),
        (3, 520, 264),
        (8, 1040, 2048),
    ];
    let cases: Vec<_> = FLOATS
        .into_iter()
        .flat_map(|dtype| sizes.map(|size| (dtype, size)))
        .map(|(dtype, (m, k, n))| {
            let mut draw = |dims: [usize; 2]| -> Vec<Matrix> {
                let one = |_| Matrix::random(&mut rng, dtype, &dims, 1.0);
                (0..world.size).map(one).collect()
            };
            (dtype, draw([m, k]), draw([n, k]), [m, n])
        })
        .collect();
    world.run(&config(), move |rank| {
        for (i, (dtype, x, weight, dims)) in cases.iter().enumerate() {
            let (x, weight) = (rank.upload(&x[rank.rank]), rank.upload(&weight[rank.rank]));
            let product = GemmParams {
                transpose_b: true,
                ..GemmParams::new(&x, &weight)
            };
            let part = rank
                .device
                .gemm(&rank.stream, &product, Output::Allocate(*dtype))
                .unwrap()
                .unwrap();
            let parts = rank.share(&rank.raw(part.view()));
            let parts: Vec<_> = parts.iter().map(|bytes| to_f32(*dtype, bytes)).collect();
            let want = oracle::reduce(ReduceOp::Sum, &parts, *dtype);
            let zeros = vec![0; dims[1] * dtype.bytes()];
            let zeros = rank.upload_bytes(*dtype, &[dims[1]], &zeros);
            for c in [None, Some(zeros.view())] {
                let mut given = (i % 2 == 0).then(|| rank.poisoned(*dtype, dims));
                let gemm = GemmParams { c, ..product };
                let params = LoraLinearAllReduceParams {
                    linear: LoraLinearParams { gemm, runs: &[] },
                    output: match &mut given {
                        Some(d) => Output::Into(d.view_mut()),
                        None => Output::Allocate(*dtype),
                    },
                    choice: None,
                };
                let result = rank.lease().lora_linear_with_all_reduce(params).unwrap();
                let d = result.d.or(given).unwrap();
                let what = format!("{dims:?} of {dtype}, C: {}", c.is_some());
                let got = rank.raw(d.view());
                if c.is_none() {
                    assert_bits(&got, &want, *dtype, &what);
                }
                // Zero plus minus zero is zero.
                assert_eq!(to_f32(*dtype, &got), to_f32(*dtype, &want), "{what}");
            }
        }
    });
}

/// Adds the contracts.
pub fn add(suite: &mut Suite) {
    for (name, choice) in algorithms(suite.backend().engines()) {
        for (theme, specs) in THEMES {
            suite.add(&format!("linear_all_reduce/{name}/{theme}"), move |world| {
                let mut rng = world.rng();
                let specs = specs(&mut rng, world.size).into_iter();
                let cases: Vec<_> = specs.map(|s| Case::new(&mut rng, s)).collect();
                world.run(&config(), move |rank| {
                    cases.iter().for_each(|case| case.run(rank, choice));
                });
            });
        }
    }
    suite.add("linear_all_reduce/beta", beta);
    suite.add("linear_all_reduce/same_bits", same_bits);
}
