//! What keeps quantized rows from overlapping, or from being taken at all; and quantizing in a graph.

use super::{
    Factor, Quantized, SCHEMES, add_at_worlds,
    gather::{Case, params},
    quantize_weight, scale_dims, tolerance,
};
use crate::{
    check::{self, compare, expect_unsupported},
    gather_linear::config,
    layer::Spec,
    matrix::Matrix,
    ops::tiles_or_a_piece,
    oracle,
    suite::{Suite, World},
    themes::modes_of_any_rows,
};
use brigade_device::{AllGatherLoraLinearParams, DataType, Output, OverlapMode, QBuffer, QScheme};
use brigade_plan::reason;

/// Rows, or scales, that do not fit the user buffer.
fn capacity(world: &World) {
    let mut rng = world.rng();
    let mut cases = vec![];
    for scheme in SCHEMES {
        let spec = Spec::ragged(&mut rng, world.size).with(|s| {
            s.rows[0] += 20;
            s.transpose = true;
        });
        cases.push(Case::new(&mut rng, spec, scheme, QScheme::Int8PerToken));
    }
    let mut no_scales = config();
    no_scales.gather_scale_bytes = 3;
    let mut no_rows = config();
    no_rows.gather_bytes = 64;
    let cases = std::sync::Arc::new(cases);
    for config in [no_scales, no_rows] {
        let cases = std::sync::Arc::clone(&cases);
        world.run(&config, move |rank| {
            for case in &*cases {
                let code = if case.overlaps() {
                    reason::CAPACITY
                } else {
                    reason::SCHEME
                };
                let plan = case.run(rank, None);
                let why = plan.instead_of.map(|r| r.code);
                assert_eq!((plan.mode, why), (OverlapMode::Off, Some(code)));
                let refused = case.call(rank, Some(OverlapMode::Ring)).0;
                assert_eq!(expect_unsupported(refused, "forced"), code);
                case.run(rank, Some(OverlapMode::Off));
            }
        });
    }
}

/// Quantized rows are a matrix, row by row; and no zero points.
fn layouts(world: &World) {
    let mut rng = world.rng();
    let spec = Spec::ragged(&mut rng, world.size);
    let case = Case::new(&mut rng, spec, QScheme::Int8PerToken, QScheme::None);
    world.run(&config(), move |rank| {
        let (me, rows) = (rank.rank, &case.spec.rows);
        let weight = case.weights[me].upload(rank);
        let kernel = rank.poisoned(DataType::I8, &[rows[me], 2, case.spec.k[0]]);
        let scale = rank.upload_f32(&[1.0]);
        let deep = QBuffer::new(kernel, scale, None, QScheme::Int8PerTensor).unwrap();
        let flat = case.chunks[me].upload(rank);
        let (kernel, scales) = case.chunks[me].parts(rank);
        let zeros = Some(scales.clone());
        let with_zeros = QBuffer::new(kernel, scales, zeros, case.scheme).unwrap();
        for choice in [None, Some(OverlapMode::Off), Some(OverlapMode::Ring)] {
            for (x, transpose_a, code) in [
                (&deep, false, "quantized-layout"),
                (&flat, true, "quantized-layout"),
                (&with_zeros, false, "zero-points"),
            ] {
                let mut lease = rank.lease();
                let refused = lease.all_gather_lora_linear(AllGatherLoraLinearParams {
                    transpose_a,
                    choice,
                    ..params(x, rows, &weight)
                });
                assert_eq!(expect_unsupported(refused.map(drop), "layout"), code);
            }
        }
        case.run(rank, None);
    });
}

/// Floats are quantized, gathered and multiplied in a graph; every launch works on the data of the day.
fn captured(world: &World) {
    let spec = Spec::ragged(&mut world.rng(), world.size).with(|s| s.output = DataType::F32);
    let choices = modes_of_any_rows(world.backend.engines()).into_iter();
    let choices = choices.map(|m| m.1[0]).collect();
    replayed(
        world,
        spec,
        &SCHEMES.map(|scheme| (scheme, QScheme::None)),
        choices,
    );
}

/// The same in tiles, or what comes closest: sizes and types that they take, and a weight that is quantized as the rows are.
fn captured_in_tiles(world: &World) {
    let spec = Spec::ragged(&mut world.rng(), world.size).with(|s| {
        s.k.iter_mut().for_each(|k| *k = k.next_multiple_of(16));
        s.n.iter_mut().for_each(|n| *n = n.next_multiple_of(8));
        (s.dtype, s.output, s.transpose) = (DataType::BF16, DataType::BF16, true);
    });
    let mode = tiles_or_a_piece(world.backend.engines());
    let schemes = [QScheme::Int8PerToken, QScheme::Fp8PerTensor];
    replayed(world, spec, &schemes.map(|s| (s, s)), vec![Some(mode)]);
}

/// With these schemes of rows and weights, in these modes as far as rows travel in them.
fn replayed(
    world: &World,
    spec: Spec,
    schemes: &[(QScheme, QScheme)],
    choices: Vec<Option<OverlapMode>>,
) {
    let mut rng = world.rng();
    let weights: Vec<(QScheme, Vec<Factor>)> = schemes
        .iter()
        .map(|&(scheme, of_weight)| {
            let mut layers = spec.layers(&mut rng, false);
            let weights = layers.iter_mut();
            let weights = weights.map(|l| quantize_weight(&mut rng, l, of_weight));
            (scheme, weights.collect())
        })
        .collect();
    let days: Vec<Vec<Matrix>> = (0..4)
        .map(|_| {
            let chunk = |&rows| Matrix::random(&mut rng, DataType::F32, &[rows, spec.k[0]], 1.0);
            spec.rows.iter().map(chunk).collect()
        })
        .collect();
    world.run(&config(), move |rank| {
        let (me, device) = (rank.rank, &rank.device);
        for (scheme, weights) in &weights {
            let (scheme, of_weight) = (*scheme, &weights[me]);
            let weight = of_weight.upload(rank);
            let allowed = tolerance(scheme)
                .max(tolerance(of_weight.scheme()))
                .max(check::tolerance(spec.output));
            let overlaps = matches!(scheme, QScheme::Int8PerToken | QScheme::Fp8PerTensor);
            let possible = |c: &&Option<OverlapMode>| {
                overlaps || c.is_none_or(|mode| mode == OverlapMode::Off)
            };
            for &choice in choices.iter().filter(possible) {
                let mut x = rank.poisoned(DataType::F32, &[spec.rows[me], spec.k[0]]);
                let mut d = rank.poisoned(spec.output, &[spec.total_rows(), spec.n[me]]);
                let mut kept = None;
                let mut work = || {
                    let q = kept.insert(device.quantize(&rank.stream, x.view(), scheme)?);
                    let output = Output::Into(d.view_mut());
                    let params = AllGatherLoraLinearParams {
                        output,
                        transpose_weight: spec.transpose,
                        choice,
                        ..params(q, &spec.rows, &weight)
                    };
                    rank.lease().all_gather_lora_linear(params).map(drop)
                };
                let graph = device.capture(&rank.stream, &mut work).unwrap();
                let q = kept.unwrap();
                for day in &days {
                    device
                        .write(&rank.stream, x.view_mut(), &day[me].bytes())
                        .unwrap();
                    device.fill(&rank.stream, d.view_mut(), 0xFF).unwrap();
                    let end = graph.launch(&rank.stream).unwrap();
                    end.sync(crate::faults::AMPLE).unwrap();
                    // Exact for what was quantized, which every rank shows the others.
                    let made = Quantized {
                        scheme,
                        dims: [spec.rows[me], spec.k[0]],
                        kernel: rank.raw(q.kernel().view()),
                        scales: bytemuck::pod_collect_to_vec(&rank.raw(q.scales().view())),
                    };
                    let kernels = rank.share(&made.kernel);
                    let scales = rank.share(&made.scale_bytes());
                    let chunks: Vec<_> = (0..rank.size)
                        .map(|r| {
                            let all = Quantized {
                                dims: [spec.rows[r], spec.k[0]],
                                kernel: kernels[r].clone(),
                                scales: bytemuck::pod_collect_to_vec(&scales[r]),
                                ..made.clone()
                            };
                            let count: usize = scale_dims(scheme, all.dims).iter().product();
                            assert_eq!(all.scales.len(), count);
                            all.dequantized()
                        })
                        .collect();
                    let all = Matrix::stack(&chunks);
                    let want = oracle::multiply(&all, false, &of_weight.matrix(), spec.transpose);
                    let got = rank.values(d.view());
                    if let Err(why) = compare(&got, &want, allowed, 0.0) {
                        panic!("{scheme:?}, {choice:?}, replayed: {why}");
                    }
                }
            }
        }
    });
}

pub(super) fn add(suite: &mut Suite) {
    suite.add_from(2, "quantized_gather/capacity", capacity);
    add_at_worlds(suite, "quantized_gather/layouts", layouts);
    add_at_worlds(suite, "quantized_gather/captured", captured);
    add_at_worlds(
        suite,
        "quantized_gather/captured_in_tiles",
        captured_in_tiles,
    );
}
