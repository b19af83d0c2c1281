//! Gather-linear: every mode gives the linear of all ranks' rows, and the rows themselves.

mod alone;
mod beside;
mod layouts;
mod limits;
mod pressure;
pub(crate) mod tiles;
mod tokens;

use crate::{
    backend::Rank,
    check::{assert_bits, assert_close, overlap_of},
    layer::{Layer, Spec},
    matrix::Matrix,
    oracle,
    suite::{Suite, World},
    themes::{THEMES, modes},
};
use brigade_device::{
    AllGatherLoraLinearParams, Call, Chunk, CommConfig, DataType, GemmParams, Output, OverlapMode,
    OverlapPlan, ParallelMode,
};
use brigade_plan::reason;
use rand::{Rng, rngs::StdRng};

/// A case with its numbers, and what must come out.
#[derive(Clone)]
pub struct Case {
    /// Its sizes.
    pub spec: Spec,
    /// Own rows of every rank.
    pub x: Vec<Matrix>,
    /// All rows.
    pub all: Matrix,
    /// Every rank's layer.
    pub layers: Vec<Layer>,
    /// D of every rank.
    pub want: Vec<Vec<f64>>,
    second: Matrix,
    second_want: Vec<f64>,
}

impl Case {
    /// Draws the numbers.
    pub fn new(rng: &mut StdRng, spec: Spec) -> Self {
        Self::with_layers(rng, spec, None)
    }

    /// As [`new`](Self::new), with layers that exist already.
    pub fn with_layers(rng: &mut StdRng, spec: Spec, layers: Option<Vec<Layer>>) -> Self {
        let x: Vec<_> = spec
            .rows
            .iter()
            .map(|&rows| Matrix::random(rng, spec.dtype, &[rows, spec.k[0]], 1.0))
            .collect();
        let all = Matrix::stack(&x);
        let layers = layers.unwrap_or_else(|| spec.layers(rng, false));
        let want = layers
            .iter()
            .map(|l| oracle::linear(&all, false, l))
            .collect();
        let second = Matrix::random(rng, spec.dtype, &[spec.k[0], 3], 1.0);
        Self {
            second_want: oracle::multiply(&all, false, &second, false),
            second,
            x,
            all,
            layers,
            want,
            spec,
        }
    }

    /// Makes the call, and asserts everything that it promises. Gives the overlap part of its plan.
    pub fn run(&self, rank: &Rank, choice: Option<OverlapMode>) -> OverlapPlan {
        self.run_slowly(rank, choice, 0)
    }

    /// As [`run`](Self::run), but reads the gathered rows late, when peers have long gone on.
    pub fn run_slowly(&self, rank: &Rank, choice: Option<OverlapMode>, pause: u32) -> OverlapPlan {
        let (spec, me) = (&self.spec, rank.rank);
        let choice = spec.choice(choice);
        let what = format!("{choice:?}, {spec:?}");
        let layer = self.layers[me].upload(rank);
        let runs = layer.runs();
        let x = rank.upload(&self.x[me]);
        let second = rank.upload(&self.second);
        let total_n = spec.n.iter().any(|&n| n != spec.n[0]);
        let mut given = spec
            .into
            .then(|| rank.poisoned(spec.output, &[spec.total_rows(), spec.n[me]]));
        let mut lease = rank.lease();
        let chunk = if spec.resident {
            let mut space = lease.own_chunk(&spec.rows, spec.k[0], spec.dtype).unwrap();
            rank.device
                .copy(&rank.stream, space.view_mut(), x.view())
                .unwrap();
            Chunk::Resident(space.filled())
        } else {
            Chunk::Copy((&x).into())
        };
        let params = AllGatherLoraLinearParams {
            transpose_weight: spec.transpose,
            total_n: total_n.then(|| spec.n.iter().sum()),
            bias: layer.bias.as_ref().map(|b| b.view()),
            activation: spec.activation,
            runs: &runs,
            output: match &mut given {
                Some(d) => Output::Into(d.view_mut()),
                None => Output::Allocate(spec.output),
            },
            choice,
            ..AllGatherLoraLinearParams::new(chunk, &spec.rows, &layer.weight)
        };
        let call = Call::GatherLinear(params.check(&rank.comm().group()).unwrap());
        let explained = rank.comm().explain(&call).unwrap();
        let result = lease.all_gather_lora_linear(params).unwrap();
        assert_eq!(
            result.plan, explained,
            "{what}: another plan than explained"
        );
        assert_eq!(
            result.d.is_none(),
            spec.into,
            "{what}: D given and allocated"
        );

        rank.dawdle(pause);
        let rows = result.a.operand().unwrap();
        let product = GemmParams::new(rows, &second);
        let output = Output::Allocate(DataType::F32);
        let product = rank.device.gemm(&rank.stream, &product, output).unwrap();
        let gathered = rank.raw(rows.kernel());
        let plan = overlap_of(&result.plan).clone();
        let d = result.d;
        drop(lease);
        let d = d.or(given).unwrap();
        // To read tells of no fault.
        rank.settle(Ok(())).expect(&what);
        assert_eq!(d.dtype(), spec.output, "{what}: D's type");
        assert_close(&rank.values(d.view()), &self.want[me], spec.output, &what);
        assert_bits(&gathered, &self.all.bytes(), spec.dtype, "gathered rows");
        let product = rank.values(product.unwrap().view());
        assert_close(&product, &self.second_want, DataType::F32, "second product");
        plan
    }

    /// As [`run`](Self::run), and asserts that the mode is the forced one.
    pub fn run_forced(&self, rank: &Rank, choice: Option<OverlapMode>) {
        let plan = self.run(rank, choice);
        assert_mode(&plan, self.spec.choice(choice), rank.size);
    }
}

/// Asserts that a plan does what was asked for, or says why not.
pub fn assert_mode(plan: &OverlapPlan, choice: Option<OverlapMode>, size: usize) {
    let why = plan.instead_of.as_ref().map(|r| r.code);
    match choice {
        Some(OverlapMode::Off) => assert_eq!((plan.mode, why), (OverlapMode::Off, None)),
        // Tiles are a kernel, too, whose bits a single rank may want.
        choice if size == 1 && choice != Some(OverlapMode::Tiles) => assert_eq!(
            (plan.mode, why),
            (OverlapMode::Off, Some(reason::SINGLE_RANK))
        ),
        Some(mode) => assert_eq!((plan.mode, why), (mode, None)),
        None => assert_eq!(plan.mode == OverlapMode::Off, why.is_some(), "{plan:?}"),
    }
}

/// A communicator for cases of these contracts.
pub fn config() -> CommConfig {
    let mut config = CommConfig::new(ParallelMode::Tp);
    config.gather_bytes = 256 << 10;
    config.reduce_scatter_bytes = 256 << 10;
    config.all_reduce_bytes = 64 << 10;
    config.scratch_bytes = 64 << 10;
    config.message_bytes = 64 << 10;
    config.dispatch_bytes = 16 << 10;
    config.combine_bytes = 16 << 10;
    config.fifo_bytes = 32 << 10;
    config.low_latency_bytes = 64 << 10;
    config
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
                case.run_forced(rank, choice);
            }
        }
    });
}

/// Adds the contracts.
pub fn add(suite: &mut Suite) {
    for (mode, choices) in modes(suite.backend().engines()) {
        for (theme, specs) in THEMES {
            let choices = choices.clone();
            suite.add(&format!("gather_linear/{mode}/{theme}"), move |world| {
                let specs = specs(&mut world.rng(), world.size);
                run_all(world, specs, &choices);
            });
        }
        let own = choices.clone();
        if suite.backend().differs() {
            suite.add(&format!("gather_linear/{mode}/different_n"), move |world| {
                run_all(world, different_n(&mut world.rng(), world.size), &own);
            });
        }
        suite.add(&format!("gather_linear/{mode}/resident"), move |world| {
            run_all(world, resident(&mut world.rng(), world.size), &choices);
        });
    }
    alone::add(suite);
    limits::add(suite);
    layouts::add(suite);
    tokens::add(suite);
    pressure::add(suite);
    if suite.backend().engines().tiles {
        tiles::add(suite);
        beside::add(suite);
    }
}

/// Column-parallel linears whose ranks have different N, 0 among them. A rank that is alone has a few: of one element of f32 that cancels,
/// rounding may be more than the tolerance.
fn different_n(rng: &mut StdRng, size: usize) -> Vec<Spec> {
    let mut draw = |least| (0..size).map(|_| rng.random_range(least..=20)).collect();
    let (n, with_nothing): (Vec<usize>, Vec<usize>) = (draw(4), draw(0));
    let mut none_but_one = vec![0; size];
    none_but_one[size - 1] = 7;
    [n, with_nothing, none_but_one]
        .map(|n| Spec::ragged(rng, size).with(|s| s.n = n))
        .to_vec()
}

/// Own rows written straight into the user buffer, several times in a row.
fn resident(rng: &mut StdRng, size: usize) -> Vec<Spec> {
    let mut specs: Vec<_> = (0..4).map(|_| Spec::ragged(rng, size)).collect();
    specs[0].resident = true;
    specs[1].resident = true;
    specs[3].resident = true;
    specs[3].rows.fill(0);
    specs
}
