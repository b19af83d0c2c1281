//! Activations that do not overlap: three dimensions, and a transposed A.

use super::config;
use crate::{
    backend::Rank,
    check::{assert_bits, assert_close, expect_unsupported, overlap_of},
    layer::{BiasKind, Layer, LoraKind, Spec},
    matrix::Matrix,
    oracle,
    suite::{Suite, World},
};
use brigade_device::{Activation, AllGatherLoraLinearParams, Chunk, Output, OverlapMode};
use brigade_plan::reason;
use rand::Rng;

/// One linear over activations of another layout.
struct Case {
    spec: Spec,
    /// Own rows as they are stored, of two or three dimensions.
    chunks: Vec<Matrix>,
    all: Matrix,
    transpose_a: bool,
    layers: Vec<Layer>,
    want: Vec<Vec<f64>>,
    d_dims: Vec<usize>,
    code: &'static str,
}

impl Case {
    fn three_dimensional(world: &World, inner: usize) -> Self {
        let mut rng = world.rng();
        let spec = Spec::ragged(&mut rng, world.size).with(|s| {
            s.bias = BiasKind::Row;
            s.activation = Activation::Silu;
        });
        let chunks: Vec<_> = (0..world.size)
            .map(|r| {
                let dims = [spec.rows[r], inner, spec.k[0]];
                Matrix::random(&mut rng, spec.dtype, &dims, 1.0)
            })
            .collect();
        let layers = spec.layers(&mut rng, false);
        let all = Matrix::stack(&chunks);
        let mut flat = all.clone();
        flat.dims = vec![spec.total_rows() * inner, spec.k[0]];
        Self {
            want: layers
                .iter()
                .map(|l| oracle::linear(&flat, false, l))
                .collect(),
            d_dims: vec![spec.total_rows(), inner, spec.n[0]],
            transpose_a: false,
            code: reason::THREE_DIMENSIONAL,
            all,
            chunks,
            layers,
            spec,
        }
    }

    /// Chunks are rows of the stored matrix `[rows, columns]`, so op(A) is `[columns, rows]`, and K is their number.
    fn transposed(world: &World) -> Self {
        let mut rng = world.rng();
        let columns = rng.random_range(1..30);
        let mut spec = Spec::ragged(&mut rng, world.size);
        spec.k = vec![spec.total_rows(); world.size];
        let chunks: Vec<_> = (0..world.size)
            .map(|r| Matrix::random(&mut rng, spec.dtype, &[spec.rows[r], columns], 1.0))
            .collect();
        // Bias and adapters are over op(A)'s rows.
        let outer = spec.clone().with(|s| {
            s.rows = vec![columns];
            s.bias = BiasKind::Full;
            s.lora = LoraKind::Mixed;
        });
        let layers: Vec<_> = (0..world.size)
            .flat_map(|_| outer.layers(&mut rng, false))
            .collect();
        let all = Matrix::stack(&chunks);
        Self {
            want: layers
                .iter()
                .map(|l| oracle::linear(&all, true, l))
                .collect(),
            d_dims: vec![columns, spec.n[0]],
            transpose_a: true,
            code: reason::TRANSPOSED,
            all,
            chunks,
            layers,
            spec,
        }
    }

    fn run(&self, rank: &Rank, choice: Option<OverlapMode>) {
        let me = rank.rank;
        let layer = self.layers[me].upload(rank);
        let runs = layer.runs();
        let x = rank.upload(&self.chunks[me]);
        let mut d = rank.poisoned(self.spec.output, &self.d_dims);
        let mut lease = rank.lease();
        let mut call = |output, choice| {
            let chunk = Chunk::Copy((&x).into());
            let params = AllGatherLoraLinearParams {
                transpose_weight: self.spec.transpose,
                transpose_a: self.transpose_a,
                bias: layer.bias.as_ref().map(|b| b.view()),
                activation: self.layers[me].activation,
                runs: &runs,
                output,
                choice,
                ..AllGatherLoraLinearParams::new(chunk, &self.spec.rows, &layer.weight)
            };
            let result = lease.all_gather_lora_linear(params)?;
            let rows = rank.raw(result.a.operand()?.kernel());
            brigade_device::Result::Ok((result.d, result.plan, rows))
        };
        if choice.is_some_and(|mode| mode != OverlapMode::Off) && rank.size > 1 {
            let refused = call(Output::Allocate(self.spec.output), choice);
            assert_eq!(expect_unsupported(refused, "forced"), self.code);
            return;
        }
        let (_, plan, rows) = call(Output::Into(d.view_mut()), choice).unwrap();
        let (allocated, ..) = call(Output::Allocate(self.spec.output), choice).unwrap();
        let plan = overlap_of(&plan);
        assert_eq!(plan.mode, OverlapMode::Off);
        if choice.is_none() && rank.size > 1 {
            assert_eq!(plan.instead_of.as_ref().unwrap().code, self.code);
        }
        assert_bits(&rows, &self.all.bytes(), self.spec.dtype, "gathered rows");
        for d in [d, allocated.unwrap()] {
            assert_eq!(d.shape().dims(), self.d_dims);
            assert_close(
                &rank.values(d.view()),
                &self.want[me],
                self.spec.output,
                self.code,
            );
        }
    }
}

fn check(world: &World, cases: Vec<Case>) {
    let engines = world.backend.engines();
    world.run(&config(), move |rank| {
        for case in &cases {
            case.run(rank, None);
            case.run(rank, Some(OverlapMode::Off));
            if engines.ring {
                case.run(rank, Some(OverlapMode::Ring));
            }
        }
    });
}

pub(super) fn add(suite: &mut Suite) {
    suite.add("gather_linear/layouts/three_dimensional", |world| {
        check(
            world,
            [1, 3]
                .map(|inner| Case::three_dimensional(world, inner))
                .into(),
        );
    });
    suite.add("gather_linear/layouts/transpose_a", |world| {
        check(world, vec![Case::transposed(world)]);
    });
}
