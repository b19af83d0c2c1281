//! Linears whose rows have the same bits whatever other rows they are multiplied with, in every mode, and on any number of ranks.

use crate::{
    backend::Rank,
    check::{assert_bits, assert_close, expect_unsupported},
    gather_linear::Case,
    layer::{Adapter, BiasKind, FLOATS, Layer, LoraKind, Run, Spec, Uploaded},
    linear_reduce_scatter as twin,
    matrix::Matrix,
    oracle,
    suite::{Suite, World},
    themes::{modes, scatters},
};
use brigade_device::{
    Activation, AllGatherLoraLinearParams, Buffer, Chunk, CommConfig, DataType, GemmParams,
    LoraLinearParams, LoraLinearReduceScatterParams, Output, OverlapMode, ParallelMode, Result,
    fallback::{clip_runs, cut_bias},
};
use brigade_plan::{Engines, reason};
use rand::{Rng, rngs::StdRng};
use std::ops::Range;

const HALVES: [DataType; 2] = [DataType::F16, DataType::BF16];

fn config() -> CommConfig {
    let mut config = CommConfig::new(ParallelMode::Tp);
    config.gather_bytes = 8 << 20;
    config.reduce_scatter_bytes = 8 << 20;
    config
}

fn any<T: Copy>(rng: &mut StdRng, of: &[T]) -> T {
    of[rng.random_range(0..of.len())]
}

/// What all devices take that are batch-invariant: sizes on both sides of those of a GPU's tiles.
fn spec(rng: &mut StdRng, size: usize) -> Spec {
    let dtype = any(rng, &HALVES);
    Spec::even(rng, size)
        .with(|s| {
            for rows in &mut s.rows {
                *rows = any(rng, &[0, 1, 5, 64, 127, 129, 256, 300]);
            }
            s.rows[0] = s.rows[0].max(1);
            s.k.fill(8 * rng.random_range(1..=60));
            s.n.fill(8 * rng.random_range(1..=40));
            (s.dtype, s.output, s.transpose) = (dtype, dtype, true);
            s.bias = any(rng, &[BiasKind::None, BiasKind::Row, BiasKind::Full]);
            s.bias_type = any(rng, &FLOATS);
            s.activation = any(rng, &[Activation::None, Activation::Relu, Activation::Silu]);
            s.lora = any(rng, &[LoraKind::None, LoraKind::One, LoraKind::Mixed]);
        })
        .taken_by(Some(OverlapMode::Tiles))
}

/// Adapters of so many neighbouring runs, more than a launch takes.
fn many(rng: &mut StdRng, [m, k, n]: [usize; 3], dtype: DataType) -> Vec<Run> {
    let mut ends: Vec<_> = (0..20).map(|_| rng.random_range(0..=m)).collect();
    ends.push(m);
    ends.sort_unstable();
    let mut first = 0;
    let mut runs = Vec::new();
    for end in ends {
        let width = rng.random_range(1..=20);
        let of = |rng: &mut StdRng, dims: &[usize], size: usize| {
            Matrix::random(rng, dtype, dims, 2.0 / (size as f64).sqrt())
        };
        let adapter = rng.random_range(0..5) > 0;
        let adapter = adapter.then(|| Adapter {
            a: of(rng, &[k, width], k),
            b: of(rng, &[width, n], width),
            scale: any(rng, &[1.0, -0.5, 0.25]),
        });
        let rows = end - first;
        first = end;
        runs.push(Run { rows, adapter });
    }
    runs
}

/// The linear of some of the rows.
fn linear(
    rank: &Rank,
    x: &Matrix,
    (layer, there): (&Layer, &Uploaded),
    rows: Range<usize>,
) -> Result<Buffer> {
    let part = rank.upload(&x.slice(rows.start, rows.len()));
    let runs = clip_runs(&there.runs(), rows.start, rows.len());
    let bias = there.bias.as_ref().map(|c| c.view());
    let gemm = GemmParams {
        c: cut_bias(bias, layer.n(), rows.start, rows.len())?,
        transpose_b: layer.transpose,
        activation: layer.activation,
        batch_invariant: true,
        ..GemmParams::new(&part, &there.weight)
    };
    let params = LoraLinearParams { gemm, runs: &runs };
    let output = Output::Allocate(layer.weight.dtype);
    Ok((rank.device.lora_linear(&rank.stream, &params, output)?).unwrap())
}

/// Rows by themselves, a few of them, and in another place, give what they give among all.
fn parts(rank: &Rank, rng: &mut StdRng) {
    for round in 0..8 {
        let spec = spec(rng, 1).with(|s| s.rows[0] = rng.random_range(1..=700));
        let (m, k, n, dtype) = (spec.rows[0], spec.k[0], spec.n[0], spec.dtype);
        let mut layer = spec.layers(rng, false).remove(0);
        if round % 2 == 0 {
            layer.runs = many(rng, [m, k, n], dtype);
        }
        let x = Matrix::random(rng, dtype, &[m, k], 1.0);
        let there = layer.upload(rank);
        let of = |rows: Range<usize>| linear(rank, &x, (&layer, &there), rows).unwrap();
        let all = of(0..m);
        let what = format!("{spec:?}, {} runs", layer.runs.len());
        let want = oracle::linear(&x, false, &layer);
        assert_close(&rank.values(all.view()), &want, dtype, &what);
        let all = rank.raw(all.view());
        for _ in 0..6 {
            let first = rng.random_range(0..m);
            let most = any(rng, &[1, 3, 40, 200, 700]).min(m - first);
            let rows = first..first + rng.random_range(1..=most);
            let bytes = rows.start * n * dtype.bytes()..rows.end * n * dtype.bytes();
            let part = rank.raw(of(rows.clone()).view());
            assert_bits(&part, &all[bytes], dtype, &format!("rows {rows:?}, {what}"));
        }
    }
}

/// What no kernel is for is refused by name, or has the property as well.
fn refused(rank: &Rank, rng: &mut StdRng, takes_all: bool) {
    let [x, w] = [[40, 16], [16, 24]].map(|d| Matrix::random(rng, DataType::F32, &d, 1.0));
    let (x, w) = (rank.upload(&x), rank.upload(&w));
    let gemm = |rows: usize| {
        let part = x.slice(0, rows).unwrap();
        let params = GemmParams {
            batch_invariant: true,
            ..GemmParams::new(&part, &w)
        };
        let output = Output::Allocate(DataType::F32);
        rank.device.gemm(&rank.stream, &params, output)
    };
    if !takes_all {
        assert_eq!(expect_unsupported(gemm(40), "f32"), reason::TILES_OPERANDS);
        return;
    }
    let [all, one] = [40, 1].map(|rows| rank.raw(gemm(rows).unwrap().unwrap().view()));
    assert_bits(&one, &all[..one.len()], DataType::F32, "the first row");
}

/// Gathered rows give what they give on one device, in every mode.
fn gathered(world: &World) {
    let mut rng = world.rng();
    let engines = world.backend.engines();
    let cases: Vec<_> = (0..4)
        .map(|_| {
            let spec = spec(&mut rng, world.size);
            Case::new(&mut rng, spec)
        })
        .collect();
    world.run(&config(), move |rank| {
        for case in &cases {
            let (spec, layer) = (&case.spec, &case.layers[rank.rank]);
            let there = layer.upload(rank);
            let rows = 0..spec.total_rows();
            let want = linear(rank, &case.all, (layer, &there), rows).unwrap();
            let want = rank.raw(want.view());
            let x = rank.upload(&case.x[rank.rank]);
            for choice in choices(engines) {
                let params = AllGatherLoraLinearParams {
                    transpose_weight: true,
                    bias: there.bias.as_ref().map(|c| c.view()),
                    activation: spec.activation,
                    runs: &there.runs(),
                    choice,
                    batch_invariant: true,
                    ..AllGatherLoraLinearParams::new(
                        Chunk::Copy((&x).into()),
                        &spec.rows,
                        &there.weight,
                    )
                };
                let d = rank.lease().all_gather_lora_linear(params).unwrap().d;
                let d = rank.raw(d.unwrap().view());
                assert_bits(&d, &want, spec.dtype, &format!("{choice:?}, {spec:?}"));
            }
        }
    });
}

fn choices(engines: Engines) -> Vec<Option<OverlapMode>> {
    let all = modes(engines).into_iter();
    all.flat_map(|(_, choices)| choices).collect()
}

/// The twin's sums have the same bits in every mode.
fn scattered(world: &World) {
    let mut rng = world.rng();
    let engines = world.backend.engines();
    let cases: Vec<_> = (0..4)
        .map(|_| {
            let spec = spec(&mut rng, world.size);
            twin::Case::new(&mut rng, spec)
        })
        .collect();
    world.run(&config(), move |rank| {
        for case in &cases {
            let spec = &case.spec;
            let there = case.layers[rank.rank].upload(rank);
            let x = rank.upload(&case.x[rank.rank]);
            let of = |choice| {
                let params = LoraLinearReduceScatterParams {
                    transpose_weight: true,
                    bias: there.bias.as_ref().map(|c| c.view()),
                    activation: spec.activation,
                    runs: &there.runs(),
                    choice,
                    batch_invariant: true,
                    ..LoraLinearReduceScatterParams::new(&x, &spec.rows, &there.weight)
                };
                let d = rank.lease().lora_linear_reduce_scatter(params).unwrap().d;
                rank.raw(d.unwrap().view())
            };
            let want = of(Some(OverlapMode::Off));
            for choice in choices(engines).into_iter().filter(|&c| scatters(c)) {
                let what = format!("{choice:?}, {spec:?}");
                assert_bits(&of(choice), &want, spec.dtype, &what);
            }
        }
    });
}

pub(super) fn add(suite: &mut Suite) {
    let takes_all = suite.backend().is_batch_invariant();
    suite.add_at(1, "device/batch_invariant/refused", move |world| {
        let rng = world.rng();
        world.run(&config(), move |rank| {
            refused(rank, &mut rng.clone(), takes_all);
        });
    });
    if !takes_all && !suite.backend().engines().tiles {
        return;
    }
    suite.add_at(1, "device/batch_invariant/parts", |world| {
        let rng = world.rng();
        world.run(&config(), move |rank| parts(rank, &mut rng.clone()));
    });
    suite.add("gather_linear/batch_invariant", gathered);
    suite.add("linear_reduce_scatter/batch_invariant", scattered);
}
