//! Activations that do not overlap in the twin: three dimensions, and a transposed A.

use crate::{
    backend::Rank,
    check::{assert_sum_close, expect_unsupported, norm, overlap_of},
    gather_linear::config,
    layer::{BiasKind, Layer, LoraKind, Spec},
    matrix::Matrix,
    oracle,
    suite::{Suite, World},
};
use brigade_device::{
    Activation, LoraLinearReduceScatterParams, Output, OverlapMode, Reduced, Result,
};
use brigade_plan::reason;
use rand::rngs::StdRng;

struct Case {
    /// Rows are those of D's dimension 0; layers count all of its outer dimensions.
    spec: Spec,
    x: Vec<Matrix>,
    transpose_a: bool,
    inner: Option<usize>,
    layers: Vec<Layer>,
    want: Vec<Vec<f64>>,
    parts: f64,
    code: &'static str,
}

impl Case {
    /// With `inner` as the middle dimension, or with x stored as `[K, M]`.
    fn new(rng: &mut StdRng, size: usize, inner: Option<usize>) -> Self {
        let spec = Spec::ragged(rng, size).with(|s| s.activation = Activation::GeluTanh);
        let flat = spec.clone().with(|s| {
            s.rows.iter_mut().for_each(|r| *r *= inner.unwrap_or(1));
            (s.bias, s.lora) = (BiasKind::Full, LoraKind::Mixed);
        });
        let (m, n, k) = (flat.total_rows(), spec.n[0], spec.k[0]);
        // Adapters over rows are for activations of two dimensions.
        let layers = match inner {
            Some(_) => flat.clone().with(|s| s.lora = LoraKind::None),
            None => flat.clone(),
        }
        .layers(rng, true);
        let transpose_a = inner.is_none();
        let dims = if transpose_a { [k, m] } else { [m, k] };
        let mut x: Vec<_> = (0..size)
            .map(|_| Matrix::random(rng, spec.dtype, &dims, 1.0))
            .collect();
        let parts: Vec<_> = x
            .iter()
            .zip(&layers)
            .map(|(x, layer)| oracle::product(x, transpose_a, layer))
            .collect();
        let sum = |i: usize| parts.iter().map(|p| p[i]).sum::<f64>();
        let want = (0..size)
            .map(|rank| {
                let first = flat.first_row(rank);
                let mut d: Vec<_> = (first * n..(first + flat.rows[rank]) * n)
                    .map(sum)
                    .collect();
                oracle::finish(&mut d, &layers[rank], first);
                d
            })
            .collect();
        if let Some(inner) = inner {
            x.iter_mut()
                .for_each(|x| x.dims = vec![m / inner, inner, k]);
        }
        Self {
            parts: norm(&parts.concat()),
            code: match inner {
                Some(_) => reason::THREE_DIMENSIONAL,
                None => reason::TRANSPOSED,
            },
            spec,
            x,
            transpose_a,
            inner,
            layers,
            want,
        }
    }

    fn d_dims(&self, rank: usize) -> Vec<usize> {
        let (own, n) = (self.spec.rows[rank], self.spec.n[0]);
        match self.inner {
            Some(inner) => vec![own, inner, n],
            None => vec![own, n],
        }
    }

    fn call(
        &self,
        rank: &Rank,
        output: Output<'_>,
        choice: Option<OverlapMode>,
    ) -> Result<Reduced> {
        let layer = self.layers[rank.rank].upload(rank);
        let x = rank.upload(&self.x[rank.rank]);
        let runs = layer.runs();
        rank.lease()
            .lora_linear_reduce_scatter(LoraLinearReduceScatterParams {
                x: (&x).into(),
                rows_per_rank: &self.spec.rows,
                weight: (&layer.weight).into(),
                transpose_weight: self.spec.transpose,
                transpose_a: self.transpose_a,
                total_k: None,
                bias: layer.bias.as_ref().map(|b| b.view()),
                activation: self.spec.activation,
                runs: &runs,
                output,
                choice,
                batch_invariant: false,
            })
    }

    fn run(&self, rank: &Rank) {
        let (me, output) = (rank.rank, self.spec.output);
        for choice in [None, Some(OverlapMode::Off)] {
            let mut given = rank.poisoned(output, &self.d_dims(me));
            let into = self.call(rank, Output::Into(given.view_mut()), choice);
            let plan = into.unwrap().plan;
            let plan = overlap_of(&plan);
            assert_eq!(plan.mode, OverlapMode::Off);
            if choice.is_none() && rank.size > 1 {
                assert_eq!(plan.instead_of.as_ref().unwrap().code, self.code);
            }
            let allocated = self.call(rank, Output::Allocate(output), choice).unwrap();
            for d in [given, allocated.d.unwrap()] {
                assert_eq!(d.shape().dims(), self.d_dims(me));
                let got = rank.values(d.view());
                assert_sum_close(&got, &self.want[me], output, self.parts, self.code);
            }
        }
        if rank.size > 1 {
            let forced = self.call(rank, Output::Allocate(output), Some(OverlapMode::Ring));
            assert_eq!(expect_unsupported(forced, "forced"), self.code);
        }
    }
}

fn check(world: &World, inner: &[Option<usize>]) {
    let mut rng = world.rng();
    let cases: Vec<_> = inner
        .iter()
        .map(|&inner| Case::new(&mut rng, world.size, inner))
        .collect();
    world.run(&config(), move |rank| {
        cases.iter().for_each(|case| case.run(rank));
    });
}

pub(super) fn add(suite: &mut Suite) {
    if suite.backend().engines().ring {
        suite.add("linear_reduce_scatter/layouts/three_dimensional", |world| {
            check(world, &[Some(1), Some(3)]);
        });
        suite.add("linear_reduce_scatter/layouts/transpose_a", |world| {
            check(world, &[None, None]);
        });
    }
}
