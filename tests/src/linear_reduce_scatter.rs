//! The twin of gather-linear: every mode gives every rank its rows of the sum of all ranks' products.

mod layouts;
mod tiles;

use crate::{
    backend::Rank,
    check::{assert_bits, assert_sum_close, expect_unsupported, norm, overlap_of},
    gather_linear::{assert_mode, config},
    layer::{BiasKind, Layer, LoraKind, Spec},
    matrix::Matrix,
    oracle,
    suite::{Suite, World},
    themes::{Modes, THEMES, modes, scatters},
};
use brigade_device::{
    Activation, Call, CommConfig, DataType, LoraLinearReduceScatterParams, Output, OverlapMode,
    OverlapPlan, ParallelMode,
};
use brigade_plan::{Engines, reason};
use rand::{Rng, rngs::StdRng};

/// Where D lies in an allocation that begins with x.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Lies {
    /// Behind x.
    BehindX,
    /// At the same beginning.
    InX,
    /// Behind x, with C of a row in its last one.
    OverC,
}

/// A case with its numbers, and what must come out.
#[derive(Clone)]
pub struct Case {
    /// Its sizes.
    pub spec: Spec,
    /// Activations of every rank, `[M, K of the rank]`.
    pub x: Vec<Matrix>,
    /// Every rank's layer. C is the same on all.
    pub layers: Vec<Layer>,
    /// D of every rank.
    pub want: Vec<Vec<f64>>,
    /// Norm of what is added up for every rank.
    pub parts: Vec<f64>,
}

impl Case {
    /// Draws the numbers. N is that of rank 0.
    pub fn new(rng: &mut StdRng, spec: Spec) -> Self {
        Self::with_layers(rng, spec, None)
    }

    /// As [`new`](Self::new), with layers that exist already.
    pub fn with_layers(rng: &mut StdRng, mut spec: Spec, layers: Option<Vec<Layer>>) -> Self {
        let n = spec.n[0];
        spec.n.fill(n);
        let m = spec.total_rows();
        let x: Vec<_> = spec
            .k
            .iter()
            .map(|&k| Matrix::random(rng, spec.dtype, &[m, k], 1.0))
            .collect();
        let layers = layers.unwrap_or_else(|| spec.layers(rng, true));
        let all_parts: Vec<_> = x
            .iter()
            .zip(&layers)
            .map(|(x, layer)| oracle::product(x, false, layer))
            .collect();
        let mut sum = vec![0.0; m * n];
        for part in &all_parts {
            sum.iter_mut().zip(part).for_each(|(s, p)| *s += p);
        }
        let own = |rank| {
            let first = spec.first_row(rank);
            first * n..(first + spec.rows[rank]) * n
        };
        let want = (0..spec.rows.len())
            .map(|rank| {
                let mut d = sum[own(rank)].to_vec();
                oracle::finish(&mut d, &layers[rank], spec.first_row(rank));
                d
            })
            .collect();
        let parts = (0..spec.rows.len())
            .map(|rank| {
                let of_rank = all_parts.iter().flat_map(|p| p[own(rank)].to_vec());
                norm(&of_rank.collect::<Vec<_>>())
            })
            .collect();
        Self {
            spec,
            x,
            layers,
            want,
            parts,
        }
    }

    /// Makes the call, and asserts everything that it promises. Gives the overlap part of its plan.
    pub fn run(&self, rank: &Rank, choice: Option<OverlapMode>) -> OverlapPlan {
        let first = self.call(rank, choice);
        assert_mode(&first.0, self.spec.choice(choice), rank.size);
        first.0
    }

    fn call(&self, rank: &Rank, choice: Option<OverlapMode>) -> (OverlapPlan, Vec<u8>) {
        let (spec, me) = (&self.spec, rank.rank);
        let choice = spec.choice(choice);
        let what = format!("{choice:?}, {spec:?}");
        let layer = self.layers[me].upload(rank);
        let runs = layer.runs();
        let x = rank.upload(&self.x[me]);
        let total_k = spec.k.iter().any(|&k| k != spec.k[0]);
        let mut given = spec
            .into
            .then(|| rank.poisoned(spec.output, &[spec.rows[me], spec.n[0]]));
        let params = LoraLinearReduceScatterParams {
            transpose_weight: spec.transpose,
            total_k: total_k.then(|| spec.k.iter().sum()),
            bias: layer.bias.as_ref().map(|b| b.view()),
            activation: spec.activation,
            runs: &runs,
            output: match &mut given {
                Some(d) => Output::Into(d.view_mut()),
                None => Output::Allocate(spec.output),
            },
            choice,
            ..LoraLinearReduceScatterParams::new(&x, &spec.rows, &layer.weight)
        };
        let call = Call::LinearReduceScatter(params.check(&rank.comm().group()).unwrap());
        let explained = rank.comm().explain(&call).unwrap();
        let result = rank.lease().lora_linear_reduce_scatter(params).unwrap();
        assert_eq!(
            result.plan, explained,
            "{what}: another plan than explained"
        );
        assert_eq!(
            result.d.is_none(),
            spec.into,
            "{what}: D given and allocated"
        );
        let d = result.d.or(given).unwrap();
        // To read tells of no fault.
        rank.settle(Ok(())).expect(&what);
        assert_eq!(d.shape().dims(), [spec.rows[me], spec.n[0]], "{what}");
        assert_eq!(d.dtype(), spec.output, "{what}: D's type");
        let got = rank.values(d.view());
        assert_sum_close(&got, &self.want[me], spec.output, self.parts[me], &what);
        (overlap_of(&result.plan).clone(), rank.raw(d.view()))
    }
}

impl Case {
    /// D's bytes of a call whose x and D are in one allocation.
    pub(crate) fn bytes(&self, rank: &Rank, choice: Option<OverlapMode>, lies: Lies) -> Vec<u8> {
        let (spec, me) = (&self.spec, rank.rank);
        let layer = self.layers[me].upload(rank);
        let runs = layer.runs();
        let shape = [spec.rows[me], spec.n[0]];
        let (x, d) = (self.x[me].values.len(), shape[0] * shape[1]);
        let mut room = rank.poisoned(spec.dtype, &[x.next_multiple_of(8) + d]);
        let data = rank.upload(&self.x[me]).reshape(&[x]).unwrap();
        let mut to = room.view_mut();
        let to = to.rows(0..x).unwrap();
        rank.device.copy(&rank.stream, to, data.view()).unwrap();
        let part = |first, elements| room.slice(first, elements).unwrap();
        let first = match lies {
            Lies::InX => 0,
            Lies::BehindX | Lies::OverC => x.next_multiple_of(8),
        };
        let mut d = part(first, d).reshape(&shape).unwrap();
        let x = part(0, x).reshape(&self.x[me].dims).unwrap();
        let mut bias = layer.bias.clone();
        if let (Lies::OverC, Some(given), Some(last)) = (lies, &mut bias, shape[0].checked_sub(1)) {
            let row = d.index(last).unwrap();
            let mut to = d.view_mut();
            let to = to.rows(last..last + 1).unwrap();
            let from = given.view().reshape(&[1, shape[1]]).unwrap();
            rank.device.copy(&rank.stream, to, from).unwrap();
            *given = row;
        }
        let result = rank
            .lease()
            .lora_linear_reduce_scatter(LoraLinearReduceScatterParams {
                transpose_weight: spec.transpose,
                bias: bias.as_ref().map(|b| b.view()),
                activation: spec.activation,
                runs: &runs,
                output: Output::Into(d.view_mut()),
                choice,
                ..LoraLinearReduceScatterParams::new(&x, &spec.rows, &layer.weight)
            })
            .unwrap();
        assert_mode(overlap_of(&result.plan), choice, rank.size);
        rank.settle(Ok(())).unwrap();
        let got = rank.values(d.view());
        assert_sum_close(
            &got,
            &self.want[me],
            spec.output,
            self.parts[me],
            "D beside x",
        );
        rank.raw(d.view())
    }
}

fn run_all(world: &World, specs: Vec<Spec>, choices: &[Option<OverlapMode>]) {
    let mut rng = world.rng();
    let cases: Vec<_> = specs
        .into_iter()
        .map(|s| Case::new(&mut rng, s.taken_by(choices[0])))
        .collect();
    let choices = choices.to_vec();
    world.run(&config(), move |rank| {
        for case in &cases {
            for &choice in &choices {
                case.run(rank, choice);
            }
        }
    });
}

/// The modes that send parts as they are made.
fn modes_of_twin(engines: Engines) -> Modes {
    let mut list = modes(engines);
    list.retain(|(_, choices)| scatters(choices[0]));
    list
}

/// Row-parallel linears whose ranks have different K, 0 among them.
fn different_k(rng: &mut StdRng, size: usize) -> Vec<Spec> {
    let mut draw = |least| (0..size).map(|_| rng.random_range(least..=30)).collect();
    let (k, with_nothing): (Vec<usize>, Vec<usize>) = (draw(1), draw(0));
    let mut none_but_one = vec![0; size];
    none_but_one[size / 2] = 11;
    [k, with_nothing, none_but_one]
        .map(|k| {
            Spec::ragged(rng, size).with(|s| {
                s.k = k;
                s.lora = LoraKind::Mixed;
            })
        })
        .to_vec()
}

/// C is added once, and the activation comes after the sum: constants that would show if either came in parts.
fn finished_once(world: &World) {
    let mut rng = world.rng();
    let spec = Spec::ragged(&mut rng, world.size).with(|s| {
        (s.bias, s.activation) = (BiasKind::Full, Activation::Relu);
        (s.dtype, s.output, s.bias_type) = (DataType::F32, DataType::F32, DataType::F32);
    });
    let mut case = Case::new(&mut rng, spec);
    let size = world.size as f64;
    for (rank, x) in case.x.iter_mut().enumerate() {
        let sign = if rank == 0 { -1.0 } else { 1.0 };
        x.values.fill(sign);
    }
    for layer in &mut case.layers {
        layer.weight.values.fill(1.0);
        layer.bias.as_mut().unwrap().values.fill(3.0);
    }
    let value = ((size - 2.0) * case.spec.k[0] as f64 + 3.0).max(0.0);
    case.want.iter_mut().for_each(|d| d.fill(value));
    let choices = modes_of_twin(world.backend.engines());
    world.run(&config(), move |rank| {
        for &choice in choices.iter().flat_map(|(_, choices)| choices) {
            case.run(rank, choice);
        }
    });
}

/// C may lie in D: it is added to all rows before any of them takes its place.
fn over_c(world: &World) {
    let mut rng = world.rng();
    let spec = Spec::ragged(&mut rng, world.size).with(|s| {
        s.rows.iter_mut().for_each(|rows| *rows *= 8);
        s.n.fill(8 * rng.random_range(2..8));
        (s.bias, s.activation) = (BiasKind::Row, Activation::Silu);
        (s.dtype, s.output, s.bias_type) = (DataType::BF16, DataType::BF16, DataType::BF16);
    });
    let choices = modes_of_twin(world.backend.engines());
    let choices: Vec<_> = choices.into_iter().flat_map(|(_, c)| c).collect();
    let cases: Vec<_> = choices
        .iter()
        .map(|&choice| Case::new(&mut rng, spec.clone().taken_by(choice)))
        .collect();
    world.run(&config(), move |rank| {
        for (case, &choice) in cases.iter().zip(&choices) {
            let apart = case.bytes(rank, choice, Lies::BehindX);
            let over = case.bytes(rank, choice, Lies::OverC);
            assert_bits(&over, &apart, case.spec.output, "C in D");
        }
    });
}

/// The same call gives the same bits.
fn repeats(world: &World) {
    let mut rng = world.rng();
    let spec = Spec::ragged(&mut rng, world.size);
    let case = Case::new(&mut rng, spec);
    let choices = modes_of_twin(world.backend.engines());
    world.run(&config(), move |rank| {
        for &choice in choices.iter().flat_map(|(_, choices)| choices) {
            let (_, first) = case.call(rank, choice);
            for _ in 0..20 {
                let (_, again) = case.call(rank, choice);
                assert_bits(&again, &first, case.spec.output, "a repeat");
            }
        }
    });
}

/// What cannot overlap says why, and is right all the same; what was forced is refused.
fn falls_back(world: &World, config: &CommConfig, change: fn(&mut Spec), code: &'static str) {
    let mut rng = world.rng();
    let spec = Spec::ragged(&mut rng, world.size).with(change);
    let case = Case::new(&mut rng, spec);
    let choices = modes_of_twin(world.backend.engines());
    world.run(config, move |rank| {
        let plan = case.run(rank, None);
        assert_eq!(plan.mode, OverlapMode::Off);
        assert_eq!(plan.instead_of.map(|r| r.code), Some(code));
        for mode in choices.iter().flat_map(|(_, c)| c).flatten() {
            if *mode != OverlapMode::Off {
                assert_eq!(forced(rank, &case, *mode), code);
            }
        }
    });
}

fn forced(rank: &Rank, case: &Case, mode: OverlapMode) -> &'static str {
    let layer = case.layers[rank.rank].upload(rank);
    let x = rank.upload(&case.x[rank.rank]);
    let result = rank
        .lease()
        .lora_linear_reduce_scatter(LoraLinearReduceScatterParams {
            choice: Some(mode),
            ..LoraLinearReduceScatterParams::new(&x, &case.spec.rows, &layer.weight)
        });
    expect_unsupported(result, "forced")
}

fn limits(world: &World) {
    let mut small = config();
    (small.reduce_scatter_bytes, small.scratch_bytes) = (64, 4096);
    let large = |s: &mut Spec| {
        s.rows.iter_mut().for_each(|r| *r += 20);
        s.output = DataType::F32;
    };
    falls_back(world, &small, large, reason::CAPACITY);
    let mut other = config();
    other.mode = ParallelMode::Ep;
    falls_back(world, &other, |_| {}, reason::GROUP_MODE);
    let case = Case::new(&mut world.rng(), Spec::ragged(&mut world.rng(), world.size));
    let pull = world.backend.engines().pull;
    world.run(&config(), move |rank| {
        if pull {
            assert_eq!(forced(rank, &case, OverlapMode::Pull), reason::PULL_TWIN);
        }
        case.run(rank, None);
    });
}

/// Adds the contracts.
pub fn add(suite: &mut Suite) {
    for (mode, choices) in modes_of_twin(suite.backend().engines()) {
        for (theme, specs) in THEMES {
            let choices = choices.clone();
            suite.add(
                &format!("linear_reduce_scatter/{mode}/{theme}"),
                move |world| {
                    run_all(world, specs(&mut world.rng(), world.size), &choices);
                },
            );
        }
        if suite.backend().differs() {
            let name = format!("linear_reduce_scatter/{mode}/different_k");
            suite.add(&name, move |world| {
                run_all(world, different_k(&mut world.rng(), world.size), &choices);
            });
        }
    }
    layouts::add(suite);
    if suite.backend().engines().tiles {
        tiles::add(suite);
    }
    suite.add("linear_reduce_scatter/finished_once", finished_once);
    suite.add("linear_reduce_scatter/over_c", over_c);
    suite.add("linear_reduce_scatter/repeats", repeats);
    suite.add_from(2, "linear_reduce_scatter/limits", limits);
}
