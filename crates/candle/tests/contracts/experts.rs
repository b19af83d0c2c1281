use super::{
    Hold, PATIENCE, Theme, World, config,
    oracle::{FLOATS, Want, bits, close, product, put, random, tolerance, values},
};
use brigade_candle::{
    ExpertParallel, GatedExperts, Parallel,
    brigade::{Error, FaultKind, ParallelMode},
    brigade_error, to_candle,
};
use candle_core::{DType, Device, Result, Tensor};
use rand::Rng;
use std::{
    sync::Barrier,
    time::{Duration, Instant},
};

pub const THEMES: &[Theme] = &[
    Theme {
        name: "experts",
        sizes: 1..=4,
        hold: Hold::Everywhere,
        contracts: contracts![
            tokens_come_back_with_the_sum_of_their_experts,
            grouped_experts_make_what_a_closure_makes,
        ],
    },
    Theme {
        name: "experts",
        sizes: 2..=4,
        hold: Hold::Everywhere,
        contracts: contracts![
            a_rank_whose_expert_fails_stops_the_others_at_once,
            a_rank_whose_rows_cannot_go_back_stops_the_others_at_once,
            a_type_that_a_rank_without_rows_cannot_know_is_refused,
            a_group_that_shrank_goes_on_without_the_experts_that_are_lost,
        ],
    },
    Theme {
        name: "experts",
        sizes: 1..=1,
        hold: Hold::Everywhere,
        contracts: contracts![
            an_expert_that_gives_something_else_is_named,
            grouped_experts_that_do_not_fit_are_named,
        ],
    },
];

/// Tokens of each rank, one of which has none.
const TOKENS: [usize; 4] = [6, 0, 1, 9];

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

/// A rank's tokens where it has them.
struct Placed {
    x: Tensor,
    ids: Tensor,
    weights: Tensor,
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

    /// Experts where a device has them.
    fn on(&self, place: &Device) -> Result<Vec<(Tensor, Tensor)>> {
        let experts = self.experts.iter();
        experts
            .map(|(a, b)| Ok((a.to_device(place)?, b.to_device(place)?)))
            .collect()
    }

    fn name(&self) -> String {
        let (count, hidden) = (self.experts.len(), self.hidden);
        format!("{:?}, {count} experts of {hidden}", self.dtype)
    }

    /// Holds every one that a rank made against what is wanted, to so many roundings of its type.
    fn check(&self, rank: usize, made: &[Tensor], want: &Want, roundings: f64) {
        for y in made {
            assert_eq!(y.dims(), self.tokens[rank].x.dims());
            assert_eq!(y.dtype(), self.dtype);
            close(y, want, roundings * tolerance(self.dtype), &self.name());
        }
    }

    /// What a rank's tokens should become, of what an expert should make of a row.
    fn want(&self, rank: usize, expert: impl Fn(usize, &Tensor) -> Vec<f64>) -> Want {
        let tokens = &self.tokens[rank];
        let weights = values(&tokens.weights);
        let mut want = Want::plain(vec![0.0; tokens.x.elem_count()]);
        for (at, &id) in tokens.ids.iter().enumerate() {
            let Ok(number) = usize::try_from(id) else {
                continue;
            };
            let token = at / tokens.k;
            let made = expert(number, &tokens.x.narrow(0, token, 1).unwrap());
            for (column, made) in made.into_iter().enumerate() {
                want.add(token * self.hidden + column, weights[at] * made);
            }
        }
        want
    }

    /// An expert's row in f64, which candle's on one device is but for its roundings.
    fn expert(&self, number: usize, row: &Tensor) -> Vec<f64> {
        let (a, b) = &self.experts[number];
        let inner: Vec<f64> = product(row, a).values.into_iter().map(silu).collect();
        let inner = Tensor::from_vec(inner, (1, a.dims()[0]), &Device::Cpu).unwrap();
        let want = product(&inner, b);
        let candles = expert(&self.experts[number], row).unwrap();
        close(&candles, &want, 4.0 * tolerance(self.dtype), "candle's");
        want.values
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

    fn placed(&self, p: &Parallel, ids: DType) -> Result<Placed> {
        let tokens = &self.tokens[p.rank()];
        Ok(Placed {
            x: put(p, &tokens.x)?,
            ids: put(p, &self.ids(p.rank(), ids)?)?,
            weights: put(p, &tokens.weights)?,
        })
    }
}

/// An expert, as candle has it.
fn expert((a, b): &(Tensor, Tensor), rows: &Tensor) -> Result<Tensor> {
    rows.matmul(&a.t()?)?.silu()?.matmul(&b.t()?)
}

fn silu(x: f64) -> f64 {
    x / (1.0 + (-x).exp())
}

/// Loads what candle multiplies with, for as many rows as may come to an expert.
fn multiply_ahead(
    world: &World,
    (hidden, dtype): (usize, DType),
    work: impl Fn(&Device, &Tensor) -> Result<Tensor>,
) {
    world.ahead(|place| {
        for rows in 1..=3 * TOKENS.iter().sum::<usize>() {
            work(place, &random(&[rows, hidden], dtype).to_device(place)?)?;
        }
        Ok(())
    });
}

fn tokens_come_back_with_the_sum_of_their_experts(world: &World) {
    // Rows that are no multiple of 16 bytes; fewer experts than ranks; a rank without tokens.
    let shapes = [(8, 16), (3, 7), (5, 20)];
    let new = |dtype, (count, hidden)| Layer::new(count, &TOKENS[..world.size], hidden, dtype);
    let layers = FLOATS.map(|dtype| shapes.map(|shape| new(dtype, shape)));
    for layer in layers.iter().flatten() {
        multiply_ahead(world, (layer.hidden, layer.dtype), |place, rows| {
            expert(&layer.on(place)?[0], rows)
        });
    }
    let got = world.ranks_in(ParallelMode::Ep, |p| {
        let made = layers.iter().flatten().map(|layer| {
            let there = layer.on(p.place())?;
            let experts = ExpertParallel::new(p, there.len(), 9);
            let own = experts.own()?;
            let run = |experts: &ExpertParallel, ids| {
                let at = layer.placed(p, ids)?;
                experts.forward(&at.x, &at.ids, &at.weights, |number, rows| {
                    assert!(own.contains(&number) && rows.dims()[0] > 0);
                    expert(&there[number], rows)
                })
            };
            Ok([
                run(&experts, DType::I64)?,
                run(&experts, DType::U32)?,
                run(&experts.clone().with_sums_by_rank(), DType::I32)?,
            ])
        });
        made.collect::<Result<Vec<_>>>()
    });
    for (rank, made) in got.iter().enumerate() {
        for (layer, made) in layers.iter().flatten().zip(made) {
            let want = layer.want(rank, |number, row| layer.expert(number, row));
            // candle rounds five times in an expert, three of them in silu, and one of these tokens may be all that a rank has; once
            // more for the sum of a rank.
            layer.check(rank, made, &want, 4.0);
        }
    }
}

fn a_rank_whose_expert_fails_stops_the_others_at_once(world: &World) {
    let layer = Layer::new(3, &[40; 4][..world.size], 8, DType::F32);
    let told = stopped(world, |p| {
        let at = layer.placed(p, DType::I64)?;
        let each = |number, rows: &Tensor| match number {
            1 => Err(candle_core::Error::msg("no memory for expert 1")),
            _ => Ok(rows.clone()),
        };
        ExpertParallel::new(p, 3, 40).forward(&at.x, &at.ids, &at.weights, each)
    });
    let told = told
        .iter()
        .filter(|t| t.starts_with("no memory for expert 1"));
    assert_eq!(told.count(), 1);
}

/// The rank's expert succeeds, and leaves the communicator in use, so that the combine cannot begin.
fn a_rank_whose_rows_cannot_go_back_stops_the_others_at_once(world: &World) {
    let layer = Layer::new(world.size, &[40; 4][..world.size], 8, DType::F32);
    let told = stopped(world, |p| {
        let at = layer.placed(p, DType::I64)?;
        let mut held = None;
        let each = |number, rows: &Tensor| {
            if number == 1 {
                held = Some(p.comm().lease(p.stream()).map_err(to_candle)?);
            }
            Ok(rows.clone())
        };
        ExpertParallel::new(p, p.size(), 40).forward(&at.x, &at.ids, &at.weights, each)
    });
    assert_eq!(told.len(), 1, "{told:?}");
}

/// All tokens go to the first rank, whose expert gives another type than that of its rows: the others never see that type.
fn a_type_that_a_rank_without_rows_cannot_know_is_refused(world: &World) {
    let x = random(&[4, 8], DType::BF16);
    let weights = random(&[4, 1], DType::F32);
    let told = stopped(world, |p| {
        let (x, weights) = (put(p, &x)?, put(p, &weights)?);
        let ids = put(p, &Tensor::zeros((4, 1), DType::U32, &Device::Cpu)?)?;
        let each = |_, rows: &Tensor| rows.to_dtype(DType::F32);
        ExpertParallel::new(p, p.size(), 4).forward(&x, &ids, &weights, each)
    });
    assert_eq!(
        told,
        ["expert.dtype: got F32 of expert 0, wanted BF16, as its rows"]
    );
}

/// What ranks tell that could not go on, where the others are told at once that the group was stopped.
fn stopped(world: &World, work: impl Fn(&Parallel) -> Result<Tensor> + Sync) -> Vec<String> {
    let errors = world.ranks_of(&config(ParallelMode::Ep), |p| {
        let began = Instant::now();
        let ended = work(p).and_then(|_| p.sync(PATIENCE));
        assert!(began.elapsed() < Duration::from_secs(10));
        ended.expect_err("one rank failed")
    });
    let aborted = |error: &candle_core::Error| {
        let record = brigade_error(error).and_then(Error::fault);
        record.is_some_and(|record| record.kind == FaultKind::Aborted)
    };
    let (others, failed): (Vec<_>, Vec<_>) = errors.iter().partition(|error| aborted(error));
    assert_eq!(others.len(), world.size - 1, "{failed:?}");
    failed.iter().map(ToString::to_string).collect()
}

fn a_group_that_shrank_goes_on_without_the_experts_that_are_lost(world: &World) {
    let (count, size) = (5, world.size);
    let layer = Layer::new(count, &[6, 2, 1, 9][..size], 8, DType::F32);
    for lost in [0, size - 1] {
        let first = Barrier::new(size);
        let made = world.ranks_of(&config(ParallelMode::Ep), |p| {
            let at = layer.placed(p, DType::I64).unwrap();
            let experts = ExpertParallel::new(p, count, 9);
            let step = || {
                let each = |number, rows: &Tensor| rows.affine(1.0 + number as f64, 0.0);
                let made = experts.forward(&at.x, &at.ids, &at.weights, each)?;
                p.sync(PATIENCE)?;
                Ok::<_, candle_core::Error>(made)
            };
            step().unwrap();
            first.wait();
            if p.rank() == lost {
                return None;
            }
            let error = step().expect_err("a rank is lost");
            let record = brigade_error(&error).and_then(Error::fault).unwrap();
            assert_eq!(
                (record.kind, record.peer),
                (FaultKind::PeerLost, lost as u32)
            );
            let absent = p.comm().shrink(PATIENCE).unwrap();
            assert_eq!(absent.ranks().collect::<Vec<_>>(), [lost]);
            Some(step().unwrap())
        });
        assert_eq!(made.iter().flatten().count(), size - 1);
        let gone = brigade_candle::cut::share(count, 1, size, lost).unwrap();
        for (rank, made) in made.iter().enumerate() {
            let Some(made) = made else { continue };
            let want = layer.want(rank, |number, row| {
                let factor = if gone.contains(&number) {
                    0.0
                } else {
                    1.0 + number as f64
                };
                values(row).into_iter().map(|x| factor * x).collect()
            });
            close(made, &want, tolerance(DType::F32), "without the lost");
        }
    }
}

fn an_expert_that_gives_something_else_is_named(world: &World) {
    type Expert = fn(&Tensor) -> Result<Tensor>;
    let cases: [(Expert, &str); 2] = [
        (
            |rows| rows.narrow(1, 0, 5),
            "expert: got [12, 5] of expert 0, wanted [12, 8]",
        ),
        (
            |rows| rows.to_dtype(DType::BF16),
            "expert.dtype: got BF16 of expert 0, wanted F32, as its rows",
        ),
    ];
    let layer = Layer::new(1, &[4], 8, DType::F32);
    world.ranks_in(ParallelMode::Ep, |p| {
        let at = layer.placed(p, DType::I64)?;
        let ids = put(p, &Tensor::zeros((4, 3), DType::U32, &Device::Cpu)?)?;
        let experts = ExpertParallel::new(p, 1, 4);
        let told = |x: &Tensor, expert: Expert| {
            let made = experts.forward(x, &ids, &at.weights, |_, rows| expert(rows));
            brigade_error(&made.expect_err("something else"))
                .unwrap()
                .to_string()
        };
        for (expert, want) in cases {
            assert_eq!(told(&at.x, expert), want);
            p.reset(PATIENCE)?;
        }
        // Before anybody waits, so nobody is stopped.
        let x = at.x.to_dtype(DType::F64)?;
        let want = "x.dtype: got F64, wanted f32, f16 or bf16";
        assert_eq!(told(&x, |rows| Ok(rows.clone())), want);
        p.check()
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
    fn own(&self, p: &Parallel, experts: &ExpertParallel) -> Result<GatedExperts> {
        let own = experts.own()?;
        let part = |all: &Tensor| put(p, &all.narrow(0, own.start, own.len())?.contiguous()?);
        GatedExperts::new(&part(&self.gate_up)?, &part(&self.down)?)
    }

    fn on(&self, place: &Device) -> Result<Self> {
        Ok(Self {
            gate_up: self.gate_up.to_device(place)?,
            down: self.down.to_device(place)?,
            inner: self.inner,
        })
    }

    /// One of them, as candle has it.
    fn expert(&self, number: usize, rows: &Tensor) -> Result<Tensor> {
        let both = rows.matmul(&self.gate_up.get(number)?.t()?)?;
        let gate = both.narrow(1, 0, self.inner)?.contiguous()?.silu()?;
        let up = both.narrow(1, self.inner, self.inner)?;
        (gate * up)?.matmul(&self.down.get(number)?.t()?)
    }

    /// An expert's row, in f64.
    fn want(&self, number: usize, row: &Tensor) -> Vec<f64> {
        let both = product(row, &self.gate_up.get(number).unwrap()).values;
        let (gate, up) = both.split_at(self.inner);
        let gated: Vec<f64> = gate.iter().zip(up).map(|(g, u)| silu(*g) * u).collect();
        let gated = Tensor::from_vec(gated, (1, self.inner), &Device::Cpu).unwrap();
        product(&gated, &self.down.get(number).unwrap()).values
    }
}

fn grouped_experts_make_what_a_closure_makes(world: &World) {
    let shapes = [(8, 16, 24), (3, 7, 5)];
    let new = |dtype, (count, hidden, inner)| {
        let layer = Layer::new(count, &TOKENS[..world.size], hidden, dtype);
        (layer, Gated::new((count, hidden, inner), dtype))
    };
    let cases = FLOATS.map(|dtype| shapes.map(|shape| new(dtype, shape)));
    for (layer, gated) in cases.iter().flatten() {
        multiply_ahead(world, (layer.hidden, layer.dtype), |place, rows| {
            gated.on(place)?.expert(0, rows)
        });
    }
    let got = world.ranks_in(ParallelMode::Ep, |p| {
        let made = cases.iter().flatten().map(|(layer, gated)| {
            let at = layer.placed(p, DType::I32)?;
            let experts = ExpertParallel::new(p, layer.experts.len(), 9);
            let roomy = experts.clone().with_max_recv(p.size() * 9 * 3);
            let own = gated.own(p, &experts)?;
            let grouped =
                |way: &ExpertParallel| way.forward_grouped(&at.x, &at.ids, &at.weights, &own);
            let there = gated.on(p.place())?;
            let each = |number: usize, rows: &Tensor| there.expert(number, rows);
            Ok([
                grouped(&experts)?,
                grouped(&roomy)?,
                grouped(&roomy.clone().with_sums_by_rank())?,
                experts.forward(&at.x, &at.ids, &at.weights, each)?,
            ])
        });
        made.collect::<Result<Vec<_>>>()
    });
    for (rank, made) in got.iter().enumerate() {
        for ((layer, gated), made) in cases.iter().flatten().zip(made) {
            let want = layer.want(rank, |number, row| gated.want(number, row));
            // candle rounds six times in an expert.
            layer.check(rank, made, &want, 4.0);
            // Room that is left over changes nothing.
            assert_eq!(bits(&made[0]), bits(&made[1]), "{}", layer.name());
        }
    }
}

fn grouped_experts_that_do_not_fit_are_named(world: &World) {
    let told = |error: candle_core::Error| brigade_error(&error).unwrap().to_string();
    world.ranks_in(ParallelMode::Ep, |p| {
        let new = |dims: &[usize]| Tensor::zeros(dims, DType::F32, p.place());
        for down in [&[3, 8, 6][..], &[2, 8, 5], &[3, 9, 5]] {
            let error = GatedExperts::new(&new(&[3, 10, 8])?, &new(down)?).unwrap_err();
            assert!(told(error).starts_with("experts: "), "{down:?}");
        }
        let at = Layer::new(4, &[2], 8, DType::F32).placed(p, DType::I64)?;
        let refused = |experts: usize, x: &Tensor| -> Result<String> {
            let own = GatedExperts::new(&new(&[experts, 10, 8])?, &new(&[experts, 8, 5])?)?;
            let made = ExpertParallel::new(p, 4, 2).forward_grouped(x, &at.ids, &at.weights, &own);
            Ok(told(made.unwrap_err()))
        };
        let told = refused(3, &at.x)?;
        assert!(
            told.starts_with("experts: got 3 of 8, wanted 4 of 8"),
            "{told}"
        );
        assert!(refused(4, &at.x.to_dtype(DType::F16)?)?.starts_with("x.dtype: "));
        Ok(())
    });
}
