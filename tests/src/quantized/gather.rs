//! Gather-linear over quantized rows: scales travel with the rows that they belong to, whoever chose them.

use super::{
    BLOCK, Factor, Quantized, SCHEMES, Uploaded, add_at_worlds, quantize_weight, tolerance,
};
use crate::{
    backend::Rank,
    check::{self, assert_bits, compare, expect_invalid, expect_unsupported, overlap_of},
    gather_linear::{assert_mode, config},
    layer::{BiasKind, Layer, LoraKind, Spec},
    matrix::Matrix,
    oracle,
    suite::{Suite, World},
    themes::modes_of_any_rows,
};
use brigade_device::{
    Activation, AllGatherLoraLinearParams, Call, Chunk, DataType, Gathered, GemmParams, Operand,
    Output, OverlapMode, OverlapPlan, Plan, QBuffer, QScheme, Reason, Result,
};
use brigade_plan::reason;
use rand::{Rng, rngs::StdRng};

/// A gather-linear over quantized rows.
pub struct Case {
    /// Its sizes.
    pub spec: Spec,
    /// How activations are quantized.
    pub scheme: QScheme,
    /// Own rows of every rank.
    pub chunks: Vec<Quantized>,
    /// Every rank's weight.
    pub weights: Vec<Factor>,
    layers: Vec<Layer>,
    want: Vec<Vec<f64>>,
}

impl Case {
    /// Draws the numbers. Every rank has scales of its own, whose magnitudes differ.
    pub fn new(rng: &mut StdRng, spec: Spec, scheme: QScheme, weight: QScheme) -> Self {
        let chunks: Vec<_> = (0..spec.rows.len())
            .map(|rank| {
                let size = 2f64.powi(rng.random_range(-3..=3));
                Quantized::random(rng, scheme, [spec.rows[rank], spec.k[0]], size)
            })
            .collect();
        let mut layers = spec.layers(rng, false);
        let weights = layers
            .iter_mut()
            .map(|l| quantize_weight(rng, l, weight))
            .collect();
        let all = Matrix::stack(
            &chunks
                .iter()
                .map(Quantized::dequantized)
                .collect::<Vec<_>>(),
        );
        Self {
            want: layers
                .iter()
                .map(|l| oracle::linear(&all, false, l))
                .collect(),
            spec,
            scheme,
            chunks,
            weights,
            layers,
        }
    }

    /// Whether the scheme's rows can travel chunk by chunk.
    pub fn overlaps(&self) -> bool {
        matches!(self.scheme, QScheme::Int8PerToken | QScheme::Fp8PerTensor)
    }

    fn tolerance(&self) -> f64 {
        tolerance(self.scheme)
            .max(tolerance(self.weights[0].scheme()))
            .max(check::tolerance(self.spec.output))
    }

    /// Makes the call, and asserts what it promises if it is done: that it does what its plan explained, its result, and
    /// the bits of the gathered rows and scales. Gives the plan and how it was explained beforehand.
    pub fn call(
        &self,
        rank: &Rank,
        choice: Option<OverlapMode>,
    ) -> (Result<OverlapPlan>, Result<Plan, Reason>) {
        let (spec, me) = (&self.spec, rank.rank);
        let layer = self.layers[me].upload(rank);
        let runs = layer.runs();
        let (x, weight) = (self.chunks[me].upload(rank), self.weights[me].upload(rank));
        let dims = [spec.total_rows(), spec.n[me]];
        let mut given = spec.into.then(|| rank.poisoned(spec.output, &dims));
        let mut lease = rank.lease();
        let params = AllGatherLoraLinearParams {
            transpose_weight: spec.transpose,
            bias: layer.bias.as_ref().map(|b| b.view()),
            activation: spec.activation,
            runs: &runs,
            output: match &mut given {
                Some(d) => Output::Into(d.view_mut()),
                None => Output::Allocate(spec.output),
            },
            choice,
            ..params(&x, &spec.rows, &weight)
        };
        let call = Call::GatherLinear(params.check(&rank.comm().group()).unwrap());
        let explained = rank.comm().explain(&call);
        let result = match lease.all_gather_lora_linear(params) {
            Ok(result) => result,
            Err(e) => return (Err(e), explained),
        };
        assert_eq!(
            Some(&result.plan),
            explained.as_ref().ok(),
            "another plan than explained"
        );
        self.assert_gathered(rank, &result.a);
        let plan = overlap_of(&result.plan).clone();
        let d = result.d;
        drop(lease);
        let d = d.or(given).unwrap();
        let got = rank.values(d.view());
        if let Err(why) = compare(&got, &self.want[me], self.tolerance(), 0.0) {
            let weight = self.weights[me].scheme();
            panic!(
                "{:?} by {weight:?}, {choice:?}, {plan:?}, {spec:?}: {why}",
                self.scheme
            );
        }
        (Ok(plan), explained)
    }

    /// The bytes of the result in a mode.
    fn bytes(&self, rank: &Rank, mode: OverlapMode) -> Vec<u8> {
        let (spec, me) = (&self.spec, rank.rank);
        let layer = self.layers[me].upload(rank);
        let (x, weight) = (self.chunks[me].upload(rank), self.weights[me].upload(rank));
        let mut d = rank.poisoned(spec.output, &[spec.total_rows(), spec.n[me]]);
        let mut lease = rank.lease();
        let params = AllGatherLoraLinearParams {
            transpose_weight: spec.transpose,
            bias: layer.bias.as_ref().map(|b| b.view()),
            output: Output::Into(d.view_mut()),
            choice: Some(mode),
            ..params(&x, &spec.rows, &weight)
        };
        lease.all_gather_lora_linear(params).unwrap();
        drop(lease);
        rank.raw(d.view())
    }

    /// Makes a call that works.
    pub fn run(&self, rank: &Rank, choice: Option<OverlapMode>) -> OverlapPlan {
        self.call(rank, choice).0.unwrap()
    }

    /// Rows and scales of every rank, and of all where they are one tensor, bit for bit.
    fn assert_gathered(&self, rank: &Rank, a: &Gathered<'_>) {
        for (owner, want) in self.chunks.iter().enumerate() {
            let got = a.chunk(owner).unwrap();
            let what = format!("{:?}, rows of rank {owner}", self.scheme);
            assert_same(rank, got, want, &what);
            // As a factor of a further product.
            let [rows, k] = want.dims;
            let ones = Matrix {
                dtype: DataType::F32,
                dims: vec![k, 1],
                values: vec![1.0; k],
            };
            let sums = oracle::multiply(&want.dequantized(), false, &ones, false);
            let ones = rank.upload(&ones);
            let output = Output::Allocate(DataType::F32);
            let product = GemmParams::new(got, &ones);
            let product = rank
                .device
                .gemm(&rank.stream, &product, output)
                .unwrap()
                .unwrap();
            let parts = check::norm(&want.dequantized().values);
            if let Err(why) = compare(&rank.values(product.view()), &sums, 1e-5, parts) {
                panic!("{what}, {rows} summed: {why}");
            }
        }
        assert_eq!(
            expect_invalid(a.chunk(self.chunks.len()), "no such rank"),
            "rank"
        );
        if !self.scheme.per_row() && self.chunks.len() > 1 {
            assert_eq!(
                expect_unsupported(a.operand(), "all rows"),
                "scales-by-rank"
            );
            return;
        }
        let all = Quantized {
            scheme: self.scheme,
            dims: [self.spec.total_rows(), self.spec.k[0]],
            kernel: self.chunks.iter().flat_map(|c| c.kernel.clone()).collect(),
            scales: self.chunks.iter().flat_map(|c| c.scales.clone()).collect(),
        };
        assert_same(rank, a.operand().unwrap(), &all, "all rows");
    }
}

/// A plain call over quantized rows.
pub fn params<'a>(
    x: &'a QBuffer,
    rows: &'a [usize],
    weight: &'a Uploaded,
) -> AllGatherLoraLinearParams<'a> {
    let chunk = Chunk::Copy(Operand::Quantized(x.view()));
    AllGatherLoraLinearParams::new(chunk, rows, weight.operand())
}

/// Asserts that a factor holds these bits.
fn assert_same(rank: &Rank, got: Operand<'_>, want: &Quantized, what: &str) {
    let Operand::Quantized(got) = got else {
        panic!("{what}: not quantized any more");
    };
    assert_eq!(got.scheme(), want.scheme, "{what}");
    assert_eq!(got.kernel().shape().dims(), want.dims, "{what}");
    assert_bits(
        &rank.raw(got.kernel()),
        &want.kernel,
        DataType::U8,
        &format!("{what}: kernel"),
    );
    let scales = rank.raw(got.scales());
    assert_bits(
        &scales,
        &want.scale_bytes(),
        DataType::F32,
        &format!("{what}: scales"),
    );
}

/// Weights that a scheme of activations is tried with.
fn weights(scheme: QScheme) -> [QScheme; 4] {
    let own = match scheme {
        QScheme::Int8WeightOnly => QScheme::Int8WeightOnly,
        QScheme::Fp8PerTensor | QScheme::Fp8PerTokenBlock => QScheme::Fp8PerTensor,
        _ => QScheme::Int8PerToken,
    };
    [
        QScheme::None,
        own,
        QScheme::Int8WeightOnly,
        QScheme::Int8PerTensor,
    ]
}

/// Ragged cases with everything that a linear has, ranks without rows among them.
pub fn specs(rng: &mut StdRng, size: usize) -> Vec<Spec> {
    let plain = Spec::ragged(rng, size).with(|s| s.transpose = true);
    let full = Spec::ragged(rng, size).with(|s| {
        s.bias = BiasKind::Full;
        s.activation = Activation::Silu;
        s.lora = LoraKind::Mixed;
        s.transpose = true;
    });
    let blocks = rng.random_range(BLOCK - 1..2 * BLOCK + 2);
    let mut wide = Spec::ragged(rng, size).with(|s| {
        s.k.fill(blocks);
        s.bias = BiasKind::Row;
    });
    wide.output = DataType::F32;
    let mut one = Spec::ragged(rng, size).with(|s| s.rows.fill(0));
    one.rows[rng.random_range(0..size)] = 7;
    let none = Spec::ragged(rng, size).with(|s| s.rows.fill(0));
    let thin = Spec::ragged(rng, size).with(|s| s.k.fill(0));
    vec![plain, full, wide, one, none, thin]
}

fn every_mode(world: &World, scheme: QScheme) {
    let mut rng = world.rng();
    let mut cases = vec![];
    for weight in weights(scheme) {
        for spec in specs(&mut rng, world.size) {
            cases.push(Case::new(&mut rng, spec, scheme, weight));
        }
    }
    let choices: Vec<_> = modes_of_any_rows(world.backend.engines())
        .into_iter()
        .flat_map(|m| m.1)
        .collect();
    world.run(&config(), move |rank| {
        for case in &cases {
            for &choice in &choices {
                let forced = choice.is_some_and(|mode| mode != OverlapMode::Off);
                if case.overlaps() || rank.size == 1 {
                    assert_mode(&case.run(rank, choice), choice, rank.size);
                } else if forced {
                    let refused = case.call(rank, choice).0;
                    assert_eq!(expect_unsupported(refused, "forced"), reason::SCHEME);
                } else {
                    let plan = case.run(rank, choice);
                    let why = plan.instead_of.map(|r| r.code);
                    let want = choice.is_none().then_some(reason::SCHEME);
                    assert_eq!((plan.mode, why), (OverlapMode::Off, want));
                }
            }
        }
    });
}

/// Sizes on both sides of those of tiles. Sums of int8 are exact, so tiles give the bits that any other mode gives.
fn tiles(world: &World) {
    let mut rng = world.rng();
    let cases: Vec<_> = [
        (QScheme::Int8PerToken, QScheme::Int8PerToken),
        (QScheme::Int8PerToken, QScheme::Int8PerTensor),
        (QScheme::Fp8PerTensor, QScheme::Fp8PerTensor),
    ]
    .into_iter()
    .cycle()
    .take(9)
    .map(|(scheme, weight)| {
        let rows = [0, 1, 127, 128, 129, 200, 300];
        let output = [DataType::F16, DataType::BF16][rng.random_range(0..2)];
        let mut spec = Spec::even(&mut rng, world.size);
        for r in &mut spec.rows {
            *r = rows[rng.random_range(0..rows.len())];
        }
        spec.rows[0] = spec.rows[0].max(1);
        spec.k.fill(16 * rng.random_range(1..=40));
        spec.n.fill(8 * rng.random_range(1..=70));
        spec.bias = [BiasKind::None, BiasKind::Row, BiasKind::OneRow][rng.random_range(0..3)];
        (spec.output, spec.bias_type, spec.transpose) = (output, output, true);
        Case::new(&mut rng, spec, scheme, weight)
    })
    .collect();
    let mut config = config();
    config.gather_bytes = 4 << 20;
    world.run(&config, move |rank| {
        for case in &cases {
            let plan = case.run(rank, Some(OverlapMode::Tiles));
            assert_eq!(plan.mode, OverlapMode::Tiles);
            if case.scheme == QScheme::Int8PerToken {
                let [tiles, off] =
                    [OverlapMode::Tiles, OverlapMode::Off].map(|m| case.bytes(rank, m));
                assert_bits(&tiles, &off, case.spec.output, &format!("{:?}", case.spec));
            }
        }
    });
}

pub(super) fn add(suite: &mut Suite) {
    if suite.backend().engines().tiles {
        suite.add("quantized_gather/tiles", tiles);
    }
    for scheme in SCHEMES {
        let name = format!("quantized_gather/{scheme:?}").to_lowercase();
        add_at_worlds(suite, &name, move |world| every_mode(world, scheme));
    }
}
