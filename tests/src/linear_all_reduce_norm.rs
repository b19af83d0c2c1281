//! Linear with all-reduce and norm: bit for bit what the three one after the other give, of few rows, where a product may send its parts itself, as of many.

use crate::{
    all_reduce_norm::{Arguments, Case, NORMED},
    backend::Rank,
    check::{assert_bits, expect_invalid},
    faults::AMPLE,
    matrix::{Matrix, to_f32},
    suite::{Suite, World},
};
use brigade_device::{
    Activation, AllReduceParams, Buffer, CommConfig, DataType, GemmParams, LinearAllReduceNorm,
    Lora, LoraLinearAllReduceNormParams, LoraLinearParams, LoraRun, Normed, Output, ParallelMode,
    QScheme, ReduceOp, Replay, Result,
};
use rand::{Rng, SeedableRng, rngs::StdRng};

/// As a rank's call has it: its product, and the arguments of what follows.
struct Own {
    x: Buffer,
    weight: Buffer,
    /// The adapter of all rows, and its scale.
    adapter: Option<[Buffer; 2]>,
    settled: bool,
    cap: Option<u16>,
}

impl Own {
    fn gemm(&self) -> GemmParams<'_> {
        GemmParams {
            transpose_b: true,
            settled_b: self.settled,
            sm_cap: self.cap,
            ..GemmParams::new(&self.x, &self.weight)
        }
    }

    fn runs(&self) -> Vec<LoraRun<'_>> {
        let adapter = self.adapter.as_ref().map(|[a, b]| Lora {
            a: a.view(),
            b: b.view(),
            scale: 0.5,
        });
        let rows = self.x.shape().rows();
        adapter
            .into_iter()
            .map(|adapter| LoraRun {
                rows,
                adapter: Some(adapter),
            })
            .collect()
    }

    /// This rank's part alone.
    fn part(&self, rank: &Rank, dtype: DataType) -> Buffer {
        let linear = LoraLinearParams {
            gemm: self.gemm(),
            runs: &self.runs(),
        };
        let output = Output::Allocate(dtype);
        let part = rank.device.lora_linear(&rank.stream, &linear, output);
        part.unwrap().unwrap()
    }

    fn call(&self, rank: &Rank, behind: &mut Arguments) -> Result<LinearAllReduceNorm> {
        let runs = self.runs();
        let linear = LoraLinearParams {
            gemm: self.gemm(),
            runs: &runs,
        };
        let mut lease = rank.comm().lease(&rank.stream)?;
        lease.lora_linear_with_all_reduce_norm(behind.of_a_linear(linear))
    }
}

/// A layer and what follows it.
#[derive(Clone)]
struct Spec {
    dtype: DataType,
    scheme: QScheme,
    rows: usize,
    inner: usize,
    hidden: usize,
    settled: bool,
    adapted: bool,
    /// Most multiprocessors of the product, so that each has many columns.
    cap: Option<u16>,
}

/// Elements of a weight, above which only who sends products has something to show.
const MUCH: usize = 1 << 20;

/// Few rows and many, of rows that are whole granules and that are not, with and without clusters.
fn specs(rng: &mut StdRng, sends: bool) -> Vec<Spec> {
    let sizes = [
        (4, 3080, 2048),
        (2, 2048, 2048),
        (1, 1032, 2048),
        (8, 512, 4096),
        (3, 64, 8192),
        (16, 520, 2048),
        (5, 1024, 2056),
        (17, 96, 2048),
        (40, 64, 100),
        (0, 8, 2048),
        (2, 7, 24),
        (1, 2056, 3072),
    ];
    let types = [DataType::BF16, DataType::F16, DataType::F32];
    let all = sizes.into_iter().enumerate();
    let all = all.filter(|(_, (_, inner, hidden))| sends || inner * hidden <= MUCH);
    all.flat_map(|(i, (rows, inner, hidden))| {
        // The first types of each size are those of which products of few rows may send.
        let two = [types[i % 2], types[(i + 1) % 3]];
        two.map(|dtype| Spec {
            dtype,
            scheme: NORMED[rng.random_range(0..3)],
            rows,
            inner,
            hidden,
            settled: rng.random(),
            adapted: i % 4 == 3,
            cap: (inner == 3080).then_some(4),
        })
    })
    .collect()
}

fn config() -> CommConfig {
    CommConfig::new(ParallelMode::Tp)
}

/// What every rank gets, by all ranks' parts and what is written down of the rest; also where one rank makes the calls one after the other, and where
/// normalized rows go over those that are multiplied.
fn same_bits(world: &World, sends: bool) {
    let mut rng = world.rng();
    let all: Vec<_> = specs(&mut rng, sends)
        .into_iter()
        .map(|s| (s, rng.random()))
        .collect();
    world.run(&config(), move |rank| {
        for (spec, seed) in &all {
            let (own, case) = spec.prepare(rank, *seed);
            let what = format!(
                "{} rows of {} by {}, {} as {:?}, settled {}",
                spec.rows, spec.inner, spec.hidden, spec.dtype, spec.scheme, spec.settled
            );
            case.assert_near();
            let mut behind = case.upload(rank, None);
            let done = own.call(rank, &mut behind).unwrap();
            let explained = rank.comm().explain(&case.explained(None)).unwrap();
            assert_eq!(done.plan, explained, "{what}");
            assert_eq!(done.sent, sends && spec.is_sent(rank.size), "{what}");
            case.assert_want(&behind.outputs(rank), &what);

            let mut behind = case.upload(rank, None);
            if rank.rank == 0 {
                behind.from = own.part(rank, spec.dtype);
                behind.call(rank).map(drop)
            } else {
                own.call(rank, &mut behind).map(drop)
            }
            .unwrap();
            case.assert_want(&behind.outputs(rank), &format!("{what}, rank 0 apart"));

            if spec.inner == spec.hidden && spec.scheme == QScheme::None {
                let mut behind = case.upload(rank, None);
                behind.values = own.x.clone();
                own.call(rank, &mut behind).unwrap();
                case.assert_want(&behind.outputs(rank), &format!("{what}, over its rows"));
            }
        }
    });
}

impl Spec {
    /// Whether a product sends its parts, where that is done at all.
    fn is_sent(&self, size: usize) -> bool {
        let most = if self.settled { 16 } else { 8 };
        let half = matches!(self.dtype, DataType::F16 | DataType::BF16);
        let whole = [self.inner, self.hidden].iter().all(|n| n % 8 == 0);
        let clusters = (2048..=8192).contains(&self.hidden) && (2..=4).contains(&size);
        half && whole && clusters && !self.adapted && (1..=most).contains(&self.rows)
    }

    /// What a rank multiplies, and what is to come of all ranks' parts.
    fn prepare(&self, rank: &Rank, seed: u64) -> (Own, Case) {
        let of = |which: u64, rank: usize, dims: &[usize]| {
            let rng = &mut StdRng::seed_from_u64(seed ^ (which << 8 | rank as u64));
            Matrix::random(rng, self.dtype, dims, 1.0)
        };
        let mine = |which, dims: &[usize]| rank.upload(&of(which, rank.rank, dims));
        let own = Own {
            x: mine(0, &[self.rows, self.inner]),
            weight: mine(1, &[self.hidden, self.inner]),
            adapter: self
                .adapted
                .then(|| [mine(2, &[self.inner, 8]), mine(3, &[8, self.hidden])]),
            settled: self.settled,
            cap: self.cap,
        };
        rank.stream.sync(AMPLE).unwrap();
        let part = own.part(rank, self.dtype);
        let parts = rank.share(&rank.raw(part.view()));
        let parts = parts
            .iter()
            .map(|bytes| to_f32(self.dtype, bytes))
            .collect();
        let all = [vec![self.rows, self.hidden], vec![self.hidden]];
        let behind = [4, 5].map(|which| of(which, rank.size, &all[which as usize - 4]));
        let behind = behind.map(|m| m.values.iter().map(|&v| v as f32).collect());
        let kind = (self.dtype, self.scheme);
        let mut case = Case::new(kind, [self.rows, self.hidden], parts, behind, 1e-5);
        case.in_place = seed.is_multiple_of(2);
        (own, case)
    }
}

/// Rows from a layer to the next one, with a sum of another size between them.
struct Chain {
    own: Own,
    behind: Arguments,
    beside: Buffer,
    next: Own,
    last: Arguments,
}

impl Chain {
    fn new(rank: &Rank, spec: &Spec, seed: u64) -> Self {
        let (own, case) = spec.prepare(rank, seed);
        let behind = case.upload(rank, None);
        let second = Spec {
            inner: spec.hidden,
            ..spec.clone()
        };
        let (mut next, case) = second.prepare(rank, seed ^ 1 << 40);
        next.x = behind.values.clone();
        Self {
            own,
            behind,
            beside: rank.poisoned(DataType::F32, &[40]),
            next,
            last: case.upload(rank, None),
        }
    }

    fn call(&mut self, rank: &Rank) -> Result<()> {
        for _ in 0..2 {
            self.own.call(rank, &mut self.behind)?;
            rank.comm()
                .lease(&rank.stream)?
                .all_reduce(AllReduceParams {
                    data: self.beside.view_mut(),
                    from: None,
                    op: ReduceOp::Max,
                    choice: None,
                })?;
            self.next.call(rank, &mut self.last)?;
        }
        Ok(())
    }

    /// The same in calls of their own.
    fn apart(&mut self, rank: &Rank) -> Result<()> {
        for (own, behind) in [(&self.own, &mut self.behind), (&self.next, &mut self.last)] {
            behind.from = own.part(rank, behind.residual.dtype());
            behind.call(rank)?;
        }
        Ok(())
    }

    /// Runs with the rows of a day, and asserts what comes out.
    fn check(&mut self, rank: &Rank, graph: Option<&dyn Replay>, day: u64) {
        let (device, on) = (&rank.device, &rank.stream);
        let rng = &mut StdRng::seed_from_u64(day << 8 | rank.rank as u64);
        let x = Matrix::random(rng, self.own.x.dtype(), self.own.x.shape().dims(), 1.0);
        device.write(on, self.own.x.view_mut(), &x.bytes()).unwrap();
        let poison = |chain: &mut Self| {
            for of in [&mut chain.behind, &mut chain.last] {
                for out in [&mut of.sum, &mut of.values] {
                    device.fill(on, out.view_mut(), 0xFF).unwrap();
                }
            }
        };
        poison(self);
        self.apart(rank).unwrap();
        let outputs = |chain: &Self| [&chain.behind, &chain.last].map(|of| of.outputs(rank));
        let want = outputs(self);
        poison(self);
        match graph {
            Some(graph) => graph.launch(on).map(drop).unwrap(),
            None => self.call(rank).unwrap(),
        }
        on.sync(AMPLE).unwrap();
        let dtype = self.own.x.dtype();
        for (got, want) in outputs(self).iter().zip(&want) {
            for (got, want) in got.iter().zip(want).take(2) {
                assert_bits(got, want, dtype, &format!("day {day}"));
            }
        }
    }
}

/// Calls one after the other, and graphs of them whose rows change, in turns with calls.
fn chains(world: &World, sends: bool) {
    let mut rng = world.rng();
    let sizes = match sends {
        true => [(1, 2048), (3, 4096), (8, 2048), (17, 2048)],
        false => [(1, 256), (3, 384), (8, 100), (17, 264)],
    };
    let types = [DataType::BF16, DataType::F16].into_iter().cycle();
    let kinds: Vec<_> = sizes
        .into_iter()
        .zip(types)
        .map(|((rows, hidden), dtype)| {
            let spec = Spec {
                dtype,
                scheme: QScheme::None,
                rows,
                // Of one row long enough that what follows takes its place in the middle of the product.
                inner: if rows == 1 && sends { 6152 } else { 256 },
                hidden,
                settled: true,
                adapted: false,
                cap: None,
            };
            // New residuals are not the old ones: the same comes out again.
            (spec, rng.random::<u64>() | 1)
        })
        .collect();
    world.run(&config(), move |rank| {
        let new = |(spec, seed): &(Spec, u64)| Chain::new(rank, spec, *seed);
        let mut chains: Vec<_> = kinds.iter().map(new).collect();
        for chain in &mut chains {
            chain.check(rank, None, 0);
        }
        let capture = |chain: &mut Chain| {
            let mut call = || chain.call(rank);
            rank.device.capture(&rank.stream, &mut call).unwrap()
        };
        let graphs: Vec<_> = chains.iter_mut().map(capture).collect();
        for day in 1..6 {
            for (chain, graph) in chains.iter_mut().zip(&graphs) {
                let graph = (day % 3 != 0).then_some(&**graph);
                chain.check(rank, graph, day);
            }
        }
    });
}

/// Nothing stands between a sum and its residual, and shapes are those of the product.
fn refusals(world: &World) {
    world.run(&config(), move |rank| {
        let dtype = DataType::F32;
        let x = rank.poisoned(dtype, &[2, 8]);
        let weight = rank.poisoned(dtype, &[24, 8]);
        let refused = |gemm: GemmParams<'_>, rows: usize, hidden: usize, eps: f32| {
            let residual = rank.poisoned(dtype, &[rows, hidden]);
            let norm = rank.poisoned(dtype, &[hidden]);
            let mut sum = rank.poisoned(dtype, &[rows, hidden]);
            let mut normed = rank.poisoned(dtype, &[rows, hidden]);
            let result =
                rank.lease()
                    .lora_linear_with_all_reduce_norm(LoraLinearAllReduceNormParams {
                        linear: LoraLinearParams { gemm, runs: &[] },
                        residual: residual.view(),
                        weight: norm.view(),
                        eps,
                        sum: sum.view_mut(),
                        normed: Normed::Plain(normed.view_mut()),
                        choice: None,
                    });
            expect_invalid(result, "refused").to_owned()
        };
        let gemm = GemmParams {
            transpose_b: true,
            ..GemmParams::new(&x, &weight)
        };
        let c = rank.poisoned(dtype, &[24]);
        let with_c = GemmParams {
            c: Some(c.view()),
            ..gemm
        };
        let active = GemmParams {
            activation: Activation::Relu,
            ..gemm
        };
        assert_eq!(refused(with_c, 2, 24, 0.0), "linear.gemm.c");
        assert_eq!(refused(active, 2, 24, 0.0), "linear.gemm.activation");
        assert_eq!(refused(gemm, 3, 24, 0.0), "residual.shape");
        assert_eq!(refused(gemm, 2, 23, 0.0), "residual.shape");
        assert_eq!(refused(gemm, 2, 24, f32::NAN), "eps");
    });
}

/// Adds the contracts.
pub(crate) fn add(suite: &mut Suite) {
    if !suite.backend().engines().norms {
        return;
    }
    let [_, sends] = suite.backend().sends_products();
    suite.add("linear_all_reduce_norm/same_bits", move |world| {
        same_bits(world, sends);
    });
    suite.add("linear_all_reduce_norm/chains", move |world| {
        chains(world, sends);
    });
    suite.add("linear_all_reduce_norm/refusals", refusals);
}
