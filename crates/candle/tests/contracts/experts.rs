use crate::common::*;
use brigade_candle::{
    ExpertParallel, GatedExperts, Parallel,
    brigade::{Error, FaultKind, ParallelMode},
    brigade_error,
};
use candle_core::{DType, Device, Result, Tensor};
use rand::Rng;
use std::time::{Duration, Instant};

/// A layer of experts, each `silu(x A^T) B^T`, and tokens of every rank.
struct Layer {
    experts: Vec<(Tensor, Tensor)>,
    tokens: Vec<Tokens>,
    hidden: usize,
    dtype: DType,
}

struct Tokens {
    x: Tensor,
    ids: Vec<i64>,
    weights: Tensor,
    k: usize,
}

impl Layer {
    fn new(experts: usize, tokens: &[usize], hidden: usize, dtype: DType) -> Self {
        let mut rng = rand::rng();
        let k = 3;
        let tokens = tokens.iter().map(|&count| Tokens {
            x: random(&[count, hidden], dtype),
            // Some name nobody, and some an expert twice.
            ids: (0..count * k)
                .map(|_| rng.random_range(-1..experts as i64))
                .collect(),
            weights: random(&[count, k], DType::F32),
            k,
        });
        Self {
            tokens: tokens.collect(),
            experts: (0..experts)
                .map(|_| (random(&[5, hidden], dtype), random(&[hidden, 5], dtype)))
                .collect(),
            hidden,
            dtype,
        }
    }

    fn expert(&self, number: usize, rows: &Tensor) -> Result<Tensor> {
        let (a, b) = &self.experts[number];
        rows.matmul(&a.t()?)?.silu()?.matmul(&b.t()?)
    }

    /// What a rank's tokens should become: candle's experts on one device, weighed and added in f64.
    fn want(&self, rank: usize) -> Want {
        let tokens = &self.tokens[rank];
        let weights = values(&tokens.weights);
        let mut want = Want::plain(vec![0.0; tokens.x.elem_count()]);
        for (at, &id) in tokens.ids.iter().enumerate() {
            let Ok(number) = usize::try_from(id) else {
                continue;
            };
            let token = at / tokens.k;
            let row = tokens.x.narrow(0, token, 1).unwrap();
            let made = values(&self.expert(number, &row).unwrap());
            for (column, made) in made.into_iter().enumerate() {
                want.add(token * self.hidden + column, weights[at] * made);
            }
        }
        want
    }

    fn ids(&self, rank: usize, dtype: DType) -> Result<Tensor> {
        let tokens = &self.tokens[rank];
        let shape = (tokens.x.dims()[0], tokens.k);
        let ids = tokens.ids.iter().map(|&id| match (dtype, id) {
            // u32 has no -1; any number that is no expert's does.
            (DType::U32, -1) => 4_000_000_000,
            (_, id) => id,
        });
        Tensor::from_vec(ids.collect::<Vec<i64>>(), shape, &Device::Cpu)?.to_dtype(dtype)
    }

    fn run(&self, p: &Parallel, experts: &ExpertParallel, ids: DType) -> Result<Tensor> {
        let tokens = &self.tokens[p.rank()];
        let own = experts.own()?;
        let ids = self.ids(p.rank(), ids)?;
        experts.forward(&tokens.x, &ids, &tokens.weights, |number, rows| {
            assert!(own.contains(&number) && rows.dims()[0] > 0);
            self.expert(number, rows)
        })
    }
}

#[test]
fn tokens_come_back_with_the_sum_of_their_experts() {
    for (size, dtype) in SIZES.flat_map(|s| FLOATS.map(|d| (s, d))) {
        // Rows that are no multiple of 16 bytes; fewer experts than ranks; a rank without tokens.
        for (count, hidden) in [(8, 16), (3, 7), (5, 20)] {
            let layer = Layer::new(count, &[6, 0, 1, 9][..size], hidden, dtype);
            let got = ranks_of(size, &config(ParallelMode::Ep), |p| {
                let experts = ExpertParallel::new(p, count, 9);
                let by_rank = experts.clone().with_sums_by_rank();
                [
                    layer.run(p, &experts, DType::I64).unwrap(),
                    layer.run(p, &experts, DType::U32).unwrap(),
                    layer.run(p, &by_rank, DType::I32).unwrap(),
                ]
            });
            for (rank, made) in got.into_iter().enumerate() {
                let want = layer.want(rank);
                for y in made {
                    assert_eq!(y.dims(), layer.tokens[rank].x.dims());
                    assert_eq!(y.dtype(), layer.dtype);
                    let name = format!("{size} ranks, {dtype:?}, {count} experts of {hidden}");
                    // candle rounds three times in an expert, alone or among other rows; one more for the sum of a rank.
                    close(&y, &want, 2.0 * tolerance(dtype), &name);
                }
            }
        }
    }
}

#[test]
fn a_rank_whose_expert_fails_stops_the_others_at_once() {
    let layer = Layer::new(3, &[40, 40, 40], 8, DType::F32);
    let began = Instant::now();
    let errors = ranks_of(3, &config(ParallelMode::Ep), |p| {
        let tokens = &layer.tokens[p.rank()];
        let experts = ExpertParallel::new(p, 3, 40);
        let ids = layer.ids(p.rank(), DType::I64).unwrap();
        let made = experts.forward(
            &tokens.x,
            &ids,
            &tokens.weights,
            |number, rows| match number {
                1 => Err(candle_core::Error::msg("no memory for expert 1")),
                _ => layer.expert(number, rows),
            },
        );
        made.expect_err("rank 1 failed")
    });
    assert!(errors[1].to_string().starts_with("no memory for expert 1"));
    for error in [&errors[0], &errors[2]] {
        let record = brigade_error(error).and_then(Error::fault).unwrap();
        assert_eq!(record.kind, FaultKind::Aborted);
    }
    assert!(began.elapsed() < Duration::from_secs(10));
}

#[test]
fn an_expert_that_gives_another_shape_is_named() {
    let layer = Layer::new(1, &[4], 8, DType::F32);
    ranks_of(1, &config(ParallelMode::Ep), |p| {
        let tokens = &layer.tokens[0];
        let ids = Tensor::zeros((4, 3), DType::U32, &Device::Cpu).unwrap();
        let experts = ExpertParallel::new(p, 1, 4);
        let error = experts
            .forward(&tokens.x, &ids, &tokens.weights, |_, rows| {
                rows.narrow(1, 0, 5)
            })
            .err()
            .unwrap();
        let told = brigade_error(&error).unwrap().to_string();
        assert_eq!(told, "expert: got [12, 5] of expert 0, wanted [12, 8]");
    });
}

/// Experts with a gate: their weights one behind the other, `[experts, 2 * inner, hidden]` and `[experts, hidden, inner]`.
struct Gated {
    gate_up: Tensor,
    down: Tensor,
    inner: usize,
}

impl Gated {
    fn new((experts, hidden, inner): (usize, usize, usize), dtype: DType) -> Self {
        let small = |dims: &[usize]| (random(dims, DType::F32) * 0.5)?.to_dtype(dtype);
        Self {
            gate_up: small(&[experts, 2 * inner, hidden]).unwrap(),
            down: small(&[experts, hidden, inner]).unwrap(),
            inner,
        }
    }

    /// Those of a rank.
    fn own(&self, experts: &ExpertParallel) -> Result<GatedExperts> {
        let own = experts.own()?;
        let part = |all: &Tensor| all.narrow(0, own.start, own.len());
        GatedExperts::new(&part(&self.gate_up)?, &part(&self.down)?)
    }

    /// One of them, as candle has it.
    fn expert(&self, number: usize, rows: &Tensor) -> Result<Tensor> {
        let both = rows.matmul(&self.gate_up.get(number)?.t()?)?;
        let gate = both.narrow(1, 0, self.inner)?.contiguous()?.silu()?;
        let up = both.narrow(1, self.inner, self.inner)?;
        (gate * up)?.matmul(&self.down.get(number)?.t()?)
    }

    /// What a rank's tokens should become, in f64.
    fn want(&self, tokens: &Tokens, hidden: usize) -> Want {
        let [gate_up, down, x, weights] =
            [&self.gate_up, &self.down, &tokens.x, &tokens.weights].map(values);
        let inner = self.inner;
        let mut want = Want::plain(vec![0.0; x.len()]);
        for (at, &id) in tokens.ids.iter().enumerate() {
            let Ok(expert) = usize::try_from(id) else {
                continue;
            };
            let token = at / tokens.k;
            let x = &x[token * hidden..][..hidden];
            let dot = |row: usize| -> f64 {
                let row = gate_up[row * hidden..][..hidden].iter();
                row.zip(x).map(|(w, x)| w * x).sum()
            };
            let gated: Vec<f64> = (0..inner)
                .map(|i| {
                    let gate = dot(expert * 2 * inner + i);
                    gate / (1.0 + (-gate).exp()) * dot(expert * 2 * inner + inner + i)
                })
                .collect();
            for column in 0..hidden {
                let row = &down[(expert * hidden + column) * inner..][..inner];
                let made: f64 = row.iter().zip(&gated).map(|(w, g)| w * g).sum();
                want.add(token * hidden + column, weights[at] * made);
            }
        }
        want
    }
}

#[test]
fn grouped_experts_make_what_a_closure_makes() {
    for (size, dtype) in SIZES.flat_map(|s| FLOATS.map(|d| (s, d))) {
        for (count, hidden, inner) in [(8, 16, 24), (3, 7, 5)] {
            let layer = Layer::new(count, &[6, 0, 1, 9][..size], hidden, dtype);
            let gated = Gated::new((count, hidden, inner), dtype);
            let got = ranks_of(size, &config(ParallelMode::Ep), |p| {
                let tokens = &layer.tokens[p.rank()];
                let ids = layer.ids(p.rank(), DType::I32).unwrap();
                let experts = ExpertParallel::new(p, count, 9);
                let roomy = experts.clone().with_max_recv(size * 9 * tokens.k);
                let own = gated.own(&experts).unwrap();
                let grouped = |way: &ExpertParallel| {
                    let made = way.forward_grouped(&tokens.x, &ids, &tokens.weights, &own);
                    made.unwrap()
                };
                let each = |number: usize, rows: &Tensor| gated.expert(number, rows);
                let closure = experts.forward(&tokens.x, &ids, &tokens.weights, each);
                let by_rank = grouped(&roomy.clone().with_sums_by_rank());
                [
                    grouped(&experts),
                    grouped(&roomy),
                    by_rank,
                    closure.unwrap(),
                ]
            });
            for (rank, made) in got.into_iter().enumerate() {
                let want = gated.want(&layer.tokens[rank], hidden);
                let name = format!("{size} ranks, {dtype:?}, {count} experts of {hidden}");
                for y in &made {
                    assert_eq!(y.dims(), layer.tokens[rank].x.dims());
                    assert_eq!(y.dtype(), dtype);
                    // candle rounds four times in an expert.
                    close(y, &want, 3.0 * tolerance(dtype), &name);
                }
                // Room that is left over changes nothing.
                assert_eq!(bits(&made[0]), bits(&made[1]), "{name}");
            }
        }
    }
}

#[test]
fn grouped_experts_that_do_not_fit_are_named() {
    let new = |dims: &[usize]| Tensor::zeros(dims, DType::F32, &Device::Cpu).unwrap();
    let told = |error: candle_core::Error| brigade_error(&error).unwrap().to_string();
    for down in [&[3, 8, 6][..], &[2, 8, 5], &[3, 9, 5]] {
        let error = GatedExperts::new(&new(&[3, 10, 8]), &new(down)).unwrap_err();
        assert!(told(error).starts_with("experts: "), "{down:?}");
    }
    ranks_of(1, &config(ParallelMode::Ep), |p| {
        let layer = Layer::new(4, &[2], 8, DType::F32);
        let (tokens, ids) = (&layer.tokens[0], layer.ids(0, DType::I64).unwrap());
        let refused = |experts: usize, x: &Tensor| {
            let own = GatedExperts::new(&new(&[experts, 10, 8]), &new(&[experts, 8, 5])).unwrap();
            let layer = ExpertParallel::new(p, 4, 2);
            let made = layer.forward_grouped(x, &ids, &tokens.weights, &own);
            told(made.unwrap_err())
        };
        let told = refused(3, &tokens.x);
        assert!(
            told.starts_with("experts: got 3 of 8, wanted 4 of 8"),
            "{told}"
        );
        let half = tokens.x.to_dtype(DType::F16).unwrap();
        assert!(refused(4, &half).starts_with("x.dtype: "));
    });
}
