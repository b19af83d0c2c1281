//! The twin of gather-linear with quantized factors.

use super::{Factor, SCHEMES, add_at_worlds, quantize_weight, tolerance};
use crate::{
    backend::Rank,
    check::{self, compare, expect_unsupported, norm, overlap_of},
    gather_linear::{assert_mode, config},
    layer::{Layer, Spec},
    oracle,
    suite::{Suite, World},
    themes::modes_of_any_rows,
};
use brigade_device::{
    DataType, LoraLinearReduceScatterParams, Operand, Output, OverlapMode, OverlapPlan, QBuffer,
    QScheme, Result,
};
use brigade_plan::reason;
use rand::rngs::StdRng;

struct Case {
    spec: Spec,
    scheme: QScheme,
    x: Vec<Factor>,
    weights: Vec<Factor>,
    layers: Vec<Layer>,
    want: Vec<Vec<f64>>,
    /// Norm of what is added up, and rounded to D's type before.
    parts: f64,
}

impl Case {
    fn new(rng: &mut StdRng, mut spec: Spec, scheme: QScheme, weight: QScheme) -> Self {
        let (m, n, size) = (spec.total_rows(), spec.n[0], spec.rows.len());
        spec.n.fill(n);
        let x: Vec<_> = (0..size)
            .map(|r| Factor::random(rng, scheme, spec.dtype, [m, spec.k[r]], 1.0))
            .collect();
        let mut layers = spec.layers(rng, true);
        let weights = layers
            .iter_mut()
            .map(|l| quantize_weight(rng, l, weight))
            .collect();
        let parts: Vec<_> = x
            .iter()
            .zip(&layers)
            .map(|(x, layer)| oracle::product(&x.matrix(), false, layer))
            .collect();
        let sum: Vec<f64> = (0..m * n)
            .map(|i| parts.iter().map(|p| p[i]).sum())
            .collect();
        let want = (0..size)
            .map(|rank| {
                let first = spec.first_row(rank);
                let mut d = sum[first * n..(first + spec.rows[rank]) * n].to_vec();
                oracle::finish(&mut d, &layers[rank], first);
                d
            })
            .collect();
        Self {
            parts: norm(&parts.concat()),
            spec,
            scheme,
            x,
            weights,
            layers,
            want,
        }
    }

    fn call(&self, rank: &Rank, choice: Option<OverlapMode>) -> Result<OverlapPlan> {
        let (spec, me) = (&self.spec, rank.rank);
        let layer = self.layers[me].upload(rank);
        let runs = layer.runs();
        let (x, weight) = (self.x[me].upload(rank), self.weights[me].upload(rank));
        let mut d = rank.poisoned(spec.output, &[spec.rows[me], spec.n[me]]);
        let params = LoraLinearReduceScatterParams {
            transpose_weight: spec.transpose,
            bias: layer.bias.as_ref().map(|b| b.view()),
            activation: spec.activation,
            runs: &runs,
            output: Output::Into(d.view_mut()),
            choice,
            ..LoraLinearReduceScatterParams::new(x.operand(), &spec.rows, weight.operand())
        };
        let result = rank.lease().lora_linear_reduce_scatter(params)?;
        let allowed = tolerance(self.scheme)
            .max(tolerance(self.weights[me].scheme()))
            .max(check::tolerance(spec.output));
        let got = rank.values(d.view());
        if let Err(why) = compare(&got, &self.want[me], allowed, self.parts) {
            let weight = self.weights[me].scheme();
            panic!(
                "{:?} by {weight:?}, {choice:?}, {spec:?}: {why}",
                self.scheme
            );
        }
        Ok(overlap_of(&result.plan).clone())
    }
}

fn every_mode(world: &World, scheme: QScheme) {
    let mut rng = world.rng();
    let mut cases = vec![];
    for weight in [
        QScheme::None,
        QScheme::Int8PerToken,
        QScheme::Int8WeightOnly,
    ] {
        for spec in super::gather::specs(&mut rng, world.size) {
            cases.push(Case::new(&mut rng, spec, scheme, weight));
        }
    }
    let choices: Vec<_> = modes_of_any_rows(world.backend.engines())
        .into_iter()
        .flat_map(|m| m.1)
        .filter(|&c| c != Some(OverlapMode::Pull))
        .collect();
    let overlaps = matches!(
        scheme,
        QScheme::None | QScheme::Int8PerToken | QScheme::Fp8PerTensor
    );
    world.run(&config(), move |rank| {
        for case in &cases {
            for &choice in &choices {
                let forced = choice.is_some_and(|mode| mode != OverlapMode::Off);
                let result = case.call(rank, choice);
                if overlaps || rank.size == 1 {
                    assert_mode(&result.unwrap(), choice, rank.size);
                } else if forced {
                    assert_eq!(expect_unsupported(result, "forced"), reason::SCHEME);
                } else {
                    assert_eq!(result.unwrap().mode, OverlapMode::Off);
                }
            }
        }
    });
}

/// Quantized rows are a matrix, row by row; and no zero points.
fn layouts(world: &World) {
    let mut rng = world.rng();
    let spec = Spec::ragged(&mut rng, world.size);
    let case = Case::new(&mut rng, spec, QScheme::Int8PerToken, QScheme::None);
    world.run(&config(), move |rank| {
        let (rows, m, k) = (&case.spec.rows, case.spec.total_rows(), case.spec.k[0]);
        let weight = case.weights[rank.rank].upload(rank);
        let with = |dims: &[usize], zeros: bool| {
            let kernel = rank.poisoned(DataType::I8, dims);
            let scale = rank.upload_f32(&[1.0]);
            let zeros = zeros.then(|| scale.clone());
            QBuffer::new(kernel, scale, zeros, QScheme::Int8PerTensor).unwrap()
        };
        for (x, transpose_a, code) in [
            (with(&[m, 2, k], false), false, "quantized-layout"),
            (with(&[k, m], false), true, "quantized-layout"),
            (with(&[m, k], true), false, "zero-points"),
        ] {
            let x = Operand::Quantized(x.view());
            let refused = rank
                .lease()
                .lora_linear_reduce_scatter(LoraLinearReduceScatterParams {
                    transpose_a,
                    ..LoraLinearReduceScatterParams::new(x, rows, weight.operand())
                });
            assert_eq!(expect_unsupported(refused, "layout"), code);
        }
        case.call(rank, None).unwrap();
    });
}

pub(super) fn add(suite: &mut Suite) {
    for scheme in [QScheme::None].into_iter().chain(SCHEMES) {
        let name = format!("quantized_scatter/{scheme:?}").to_lowercase();
        add_at_worlds(suite, &name, move |world| every_mode(world, scheme));
    }
    add_at_worlds(suite, "quantized_scatter/layouts", layouts);
}
