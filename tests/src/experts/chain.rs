//! A layer of experts as one chain: router, choice, dispatch, products in groups with the gate between them, combine. Nothing of it is read
//! by the host, so it is captured once, and replayed with other tokens every day.

use super::config;
use crate::{
    backend::Rank,
    check::{compare, norm, tolerance},
    faults::AMPLE,
    matrix::Matrix,
    oracle,
    suite::{Suite, World},
};
use brigade_device::{
    Activation, Arrangement, Buffer, CombineParams, CombineSum, DataType, DispatchParams,
    GemmParams, GroupedGemmParams, Groups, MemoryType, Output, Placement, PlacementCall,
    ReceivedIds, Result, Route, Routing, SiluMulParams, TopKParams, View,
};
use brigade_plan::routes::Slots;
use rand::{Rng, rngs::StdRng};

const HIDDEN: usize = 48;
const INNER: usize = 40;
const EXPERTS: usize = 7;
const K: usize = 3;
const MAX_TOKENS: usize = 24;
const ALIGNMENT: usize = 16;
const DAYS: usize = 6;

/// Adds the contract.
pub fn add(suite: &mut Suite) {
    suite.add("experts/chain", replayed);
}

/// What all ranks know.
struct Layer {
    dtype: DataType,
    /// `[experts, hidden]`
    router: Matrix,
    /// `[experts * 2 * inner, hidden]`
    gate_up: Matrix,
    /// `[experts * hidden, inner]`
    down: Matrix,
    /// Of every day and rank.
    tokens: Vec<Vec<Matrix>>,
}

impl Layer {
    fn new(rng: &mut StdRng, dtype: DataType, size: usize) -> Self {
        let scale = |inputs: usize| 2.0 / (inputs as f64).sqrt();
        let router = Matrix::random(rng, DataType::F32, &[EXPERTS, HIDDEN], scale(HIDDEN));
        let dims = [EXPERTS * 2 * INNER, HIDDEN];
        let gate_up = Matrix::random(rng, dtype, &dims, scale(HIDDEN));
        let down = Matrix::random(rng, dtype, &[EXPERTS * HIDDEN, INNER], scale(INNER));
        let mut layer = Self {
            dtype,
            router,
            gate_up,
            down,
            tokens: vec![],
        };
        // As many of a rank on all days, since that is a shape.
        let counts: Vec<usize> = (0..size)
            .map(|_| rng.random_range(0..=MAX_TOKENS))
            .collect();
        for _ in 0..DAYS {
            let day = counts.iter().map(|&n| layer.clear_tokens(rng, n));
            let day = day.collect();
            layer.tokens.push(day);
        }
        layer
    }

    /// Tokens whose experts are chosen by more than sums in f32 are off.
    fn clear_tokens(&self, rng: &mut StdRng, count: usize) -> Matrix {
        let mut values = vec![];
        while values.len() < count * HIDDEN {
            let token = Matrix::random(rng, self.dtype, &[1, HIDDEN], 1.0);
            let mut scores = oracle::multiply(&token, false, &self.router, true);
            scores.sort_by(|a, b| b.total_cmp(a));
            if scores[K - 1] - scores[K] > 1e-3 {
                values.extend(token.values);
            }
        }
        Matrix {
            dtype: self.dtype,
            dims: vec![count, HIDDEN],
            values,
        }
    }

    /// Every token by its experts, in f64, and the squares of what was added up.
    fn want(&self, tokens: &Matrix) -> (Vec<f64>, f64) {
        let (mut out, mut parts) = (vec![0.0; tokens.values.len()], 0.0);
        for (token, to) in out.chunks_exact_mut(HIDDEN).enumerate() {
            let x = tokens.slice(token, 1);
            let scores = oracle::multiply(&x, false, &self.router, true);
            let mut order: Vec<usize> = (0..EXPERTS).collect();
            order.sort_by(|&a, &b| scores[b].total_cmp(&scores[a]));
            let weights: Vec<f64> = order[..K].iter().map(|&e| scores[e].exp()).collect();
            let sum: f64 = weights.iter().sum();
            for (&expert, weight) in order.iter().zip(weights) {
                let gate_up = self.gate_up.slice(expert * 2 * INNER, 2 * INNER);
                let both = oracle::multiply(&x, false, &gate_up, true);
                let (gate, up) = both.split_at(INNER);
                let gated = gate.iter().zip(up);
                let gated = Matrix {
                    dtype: DataType::F64,
                    dims: vec![1, INNER],
                    values: gated
                        .map(|(&g, u)| oracle::activate(Activation::Silu, g) * u)
                        .collect(),
                };
                let down = self.down.slice(expert * HIDDEN, HIDDEN);
                let made = oracle::multiply(&gated, false, &down, true);
                for (to, made) in to.iter_mut().zip(made) {
                    *to += weight / sum * made;
                    parts += (weight / sum * made).powi(2);
                }
            }
        }
        (out, parts.sqrt())
    }
}

/// One rank's weights and tokens.
struct Own {
    x: Buffer,
    router: Buffer,
    gate_up: Buffer,
    down: Buffer,
    slots: usize,
}

impl Own {
    fn new(rank: &Rank, layer: &Layer) -> Self {
        let experts = EXPERTS;
        let slots = Slots::new(PlacementCall::Even { experts }, rank.size).of(rank.rank);
        let stack = |of: &Matrix, rows: usize| {
            let part = of.slice(slots.start * rows, slots.len() * rows);
            let dims = [slots.len(), rows, of.columns()];
            rank.upload(&part).reshape(&dims).unwrap()
        };
        Self {
            x: rank.upload(&layer.tokens[0][rank.rank]),
            router: rank.upload(&layer.router),
            gate_up: stack(&layer.gate_up, 2 * INNER),
            down: stack(&layer.down, HIDDEN),
            slots: slots.len(),
        }
    }

    /// The whole layer.
    fn run(&self, rank: &Rank, to: &mut Buffer) -> Result<()> {
        let (device, on) = (&rank.device, &rank.stream);
        let (dtype, memory) = (self.x.dtype(), MemoryType::Device);
        let made = |buffer: Option<Buffer>| buffer.unwrap();
        let mut wide = device.allocate(on, memory, DataType::F32, self.x.shape().dims())?;
        device.convert(on, wide.view_mut(), self.x.view())?;
        let product = GemmParams {
            transpose_b: true,
            ..GemmParams::new(&wide, &self.router)
        };
        let scores = made(device.gemm(on, &product, Output::Allocate(DataType::F32))?);
        let chosen = device.top_k(on, &TopKParams::new(scores.view(), K))?;
        let mut lease = rank.lease();
        let there = lease.dispatch(DispatchParams {
            rows: self.x.view(),
            beside: &[],
            route: Route::Experts {
                routing: Routing {
                    ids: chosen.ids.view(),
                    placement: Placement::Even { experts: EXPERTS },
                },
                weights: Some(chosen.weights.view()),
            },
            arrangement: Arrangement::ByExpert {
                alignment: ALIGNMENT,
            },
            max_tokens: MAX_TOKENS,
            max_recv: Some(rank.size * MAX_TOKENS * K + EXPERTS * ALIGNMENT),
            received_ids: ReceivedIds::Local,
            totals: None,
            waits: None,
            cast: None,
            choice: None,
        })?;
        let offsets = there.handle.offsets();
        let groups = Groups::Behind {
            offsets,
            counts: Some(there.counts.view()),
        };
        let grouped = |x: &Buffer, weights: View<'_>, output| {
            let params = GroupedGemmParams::new(x, weights, groups);
            device.grouped_gemm(on, &params, Output::Allocate(output))
        };
        let both = made(grouped(&there.rows, self.gate_up.view(), DataType::F32)?);
        let gate = SiluMulParams {
            from: both.view(),
            rows: Some(offsets.slice(self.slots, 1)?),
        };
        let inner = made(device.silu_mul(on, &gate, Output::Allocate(dtype))?);
        let rows = made(grouped(&inner, self.down.view(), dtype)?);
        lease.combine(CombineParams {
            rows: rows.view(),
            handle: &there.handle,
            sum: CombineSum::ExpertByRank,
            weights: None,
            biases: &[],
            output: Output::Into(to.view_mut()),
            waits: None,
            choice: None,
        })?;
        Ok(())
    }
}

fn replayed(world: &World) {
    let mut rng = world.rng();
    for dtype in [DataType::F32, DataType::BF16] {
        let layer = Layer::new(&mut rng, dtype, world.size);
        world.run(&config(), move |rank| {
            let mut own = Own::new(rank, &layer);
            let (device, on) = (&rank.device, &rank.stream);
            let tokens = layer.tokens[0][rank.rank].rows();
            let d = rank.poisoned(DataType::F32, &[tokens, HIDDEN]);
            let mut to = d.clone();
            let work = &mut || own.run(rank, &mut to);
            let graph = device.capture(on, work).unwrap();
            // Making a graph may wait for the GPU, and so for a peer's replay where ranks share one.
            rank.meet();
            for day in &layer.tokens {
                let tokens = &day[rank.rank];
                device.fill(on, to.view_mut(), 0xFF).unwrap();
                device.write(on, own.x.view_mut(), &tokens.bytes()).unwrap();
                graph.launch(on).unwrap().sync(AMPLE).unwrap();
                let (want, parts) = layer.want(tokens);
                assert!(tokens.rows() == 0 || norm(&want) > 0.0);
                // Rounded as what is gated, as a result, and as a rank's sum.
                let allowed = 3.0 * tolerance(dtype);
                if let Err(why) = compare(&rank.values(d.view()), &want, allowed, parts) {
                    panic!("{dtype}: {why}");
                }
            }
        });
    }
}
