use super::{
    Hold, PATIENCE, Theme, World,
    oracle::{FLOATS, Want, biased, bits, cat, close, product, put, random, tolerance, values},
};
use brigade_candle::{
    Adapter, ColumnParallelLinear, GatherLinear, LinearReduceScatter, Parallel, Residual,
    ResidualNorm, RowParallelLinear, Runs,
    brigade::{Activation, Error, OverlapMode},
    brigade_error, cut,
};
use candle_core::{DType, Device, Module, Result, Tensor};

pub const THEMES: &[Theme] = &[
    Theme {
        name: "linears",
        sizes: 1..=4,
        hold: Hold::Everywhere,
        contracts: contracts![
            column_parallel_gives_own_columns_or_all,
            row_parallel_gives_every_rank_the_sum,
            row_parallel_adds_a_residual_and_normalizes,
            tensors_that_are_there_get_the_same_bits,
            gather_linear_and_its_twin_take_any_rows,
            activations_of_more_dimensions_keep_them,
            an_mlp_is_what_candle_makes_of_it_on_one_device,
            rows_have_adapters_of_their_own,
        ],
    },
    Theme {
        name: "linears",
        sizes: 2..=4,
        hold: Hold::Everywhere,
        contracts: contracts![
            overlap_can_be_forced_and_gives_the_same,
            counts_that_overflow_are_named,
        ],
    },
    Theme {
        name: "linears",
        sizes: 1..=1,
        hold: Hold::Everywhere,
        contracts: contracts![what_does_not_fit_is_named],
    },
];

/// Rows, input and output features: divisible, ragged, and fewer features than ranks.
const SHAPES: [(usize, usize, usize); 5] = [
    (8, 16, 24),
    (5, 7, 11),
    (1, 13, 3),
    (6, 3, 10),
    (3, 130, 67),
];

/// More rows and features than a tile of a GPU's product has, neither of them a multiple of one.
const LARGE: (usize, usize, usize) = (300, 72, 130);

/// A linear, its input, and what should come out of it: from sums in f64, and from candle on one device.
struct Case {
    x: Tensor,
    weight: Tensor,
    bias: Tensor,
    /// What is added where a residual is, and the weight of its norm.
    old: Tensor,
    norm: Tensor,
    want: Want,
    /// For one rounding.
    allowed: f64,
    name: String,
}

impl Case {
    /// Features of this shape are cut.
    fn new(world: &World, dtype: DType, (m, k, n): (usize, usize, usize)) -> Self {
        let (k, n) = (world.features(k), world.features(n));
        let (x, weight) = (random(&[m, k], dtype), random(&[n, k], dtype));
        let bias = random(&[n], dtype);
        let want = biased(product(&x, &weight), &bias);
        let case = Self {
            name: format!("{dtype:?}, {m} x {k} x {n}"),
            allowed: world.tolerance(dtype),
            old: random(&[m, n], dtype),
            norm: random(&[n], dtype),
            x,
            weight,
            bias,
            want,
        };
        // The oracle is candle's result, but for candle's roundings.
        let candles = case.candle().unwrap();
        close(&candles, &case.want, 3.0 * tolerance(dtype), &case.name);
        case
    }

    fn candle(&self) -> Result<Tensor> {
        let product = self.x.matmul(&self.weight.t()?)?;
        product.broadcast_add(&self.bias)
    }

    fn n(&self) -> usize {
        self.bias.elem_count()
    }

    fn rows(&self) -> usize {
        self.x.dims()[0]
    }

    fn on(&self, p: &Parallel) -> Result<Placed> {
        Ok(Placed {
            x: put(p, &self.x)?,
            weight: put(p, &self.weight)?,
            bias: put(p, &self.bias)?,
            old: put(p, &self.old)?,
            norm: put(p, &self.norm)?,
        })
    }

    fn check(&self, got: &Tensor, want: &Want) {
        assert_eq!(got.dtype(), self.x.dtype());
        close(got, want, self.allowed, &self.name);
    }

    /// As [`check`](Self::check), of a sum over ranks: parts are rounded before they travel, their sum once more, and three values
    /// may all be unlucky.
    fn check_sum(&self, got: &Tensor, want: &Want) {
        assert_eq!(got.dtype(), self.x.dtype());
        close(got, want, 2.0 * self.allowed, &self.name);
    }
}

/// A case where a rank's tensors lie.
struct Placed {
    x: Tensor,
    weight: Tensor,
    bias: Tensor,
    old: Tensor,
    norm: Tensor,
}

impl Placed {
    /// What goes into a row-parallel linear.
    fn own_columns(&self, p: &Parallel) -> Result<Tensor> {
        cut::tensor(p, &self.x, 1)
    }
}

fn cases(world: &World) -> Vec<Case> {
    let large = (!world.on_host()).then_some(LARGE);
    let shapes = SHAPES.into_iter().chain(large);
    let shapes = shapes.flat_map(|shape| FLOATS.map(|dtype| (dtype, shape)));
    shapes
        .map(|(dtype, shape)| Case::new(world, dtype, shape))
        .collect()
}

/// What every rank makes of each case, in rank order.
fn each<R: Send>(
    world: &World,
    cases: &[Case],
    work: impl Fn(&Parallel, &Case, &Placed) -> Result<R> + Sync,
) -> Vec<Vec<R>> {
    let made = world.ranks(|p| {
        // All of it before the first call. Where ranks share a GPU, what is brought there behind a call has to wait for it, and while it
        // waits it can keep another rank, for whom the call waits, from bringing its own.
        let placed = cases.iter().map(|case| case.on(p));
        let placed = placed.collect::<Result<Vec<_>>>()?;
        p.sync(PATIENCE)?;
        let made = cases
            .iter()
            .zip(&placed)
            .map(|(case, at)| work(p, case, at));
        made.collect::<Result<Vec<_>>>()
    });
    let mut ranks: Vec<_> = made.into_iter().map(Vec::into_iter).collect();
    let of_all = |_| ranks.iter_mut().filter_map(Iterator::next).collect();
    cases.iter().map(of_all).collect()
}

fn column_parallel_gives_own_columns_or_all(world: &World) {
    each(world, &cases(world), |p, case, at| {
        let (m, n) = (case.rows(), case.n());
        let own = cut::share(n, 1, p.size(), p.rank())?;
        let linear = ColumnParallelLinear::new(p, &at.weight, Some(&at.bias))?;
        let y = linear.forward(&at.x)?;
        assert_eq!(y.dims(), [m, own.len()]);
        case.check(&y, &case.want.columns(n, own));
        let all = linear.gathered(n, None)?.forward(&at.x)?;
        assert_eq!(all.dims(), [m, n]);
        case.check(&all, &case.want);
        Ok(())
    });
}

fn row_parallel_gives_every_rank_the_sum(world: &World) {
    let cases = cases(world);
    let got = each(world, &cases, |p, _, at| {
        let linear = RowParallelLinear::new(p, &at.weight, Some(&at.bias))?;
        linear.forward(&at.own_columns(p)?)
    });
    for (case, got) in cases.iter().zip(&got) {
        for y in got {
            case.check_sum(y, &case.want);
            assert_eq!(bits(y), bits(&got[0]));
        }
    }
}

/// Results that go where others were, and what is refused of such places: nothing waits there for a lock that it has itself.
fn tensors_that_are_there_get_the_same_bits(world: &World) {
    let cases = cases(world);
    each(world, &cases, |p, _, at| {
        let none = Runs::none();
        let same = |made: &Tensor, there: &Tensor| {
            assert_eq!(made.dims(), there.dims());
            assert_eq!(bits(made), bits(there));
        };
        let other = |tensor: &Tensor| match tensor.elem_count() {
            // On a GPU candle computes nothing with a tensor of nothing.
            0 => Ok(tensor.clone()),
            _ => (tensor.ones_like()? * 3.0).and_then(|t| t.contiguous()),
        };
        let column = ColumnParallelLinear::new(p, &at.weight, Some(&at.bias))?;
        let made = column.forward(&at.x)?;
        let there = other(&made)?;
        column.forward_into(&at.x, &none, &there)?;
        same(&made, &there);
        let wrong = Tensor::zeros((made.dim(0)?, made.dim(1)? + 1), made.dtype(), p.place())?;
        let refused = |result: Result<()>, words: &str| {
            let text = result.unwrap_err().to_string();
            assert!(text.contains(words), "{text}");
        };
        refused(column.forward_into(&at.x, &none, &wrong), "out");
        let own = at.own_columns(p)?;
        let norm = ResidualNorm::new(&at.norm, 1e-5)?;
        let row = RowParallelLinear::new(p, &at.weight, None)?;
        let made = row.forward_norm(&own, &none, &at.old, &norm)?;
        let there = Residual {
            sum: other(&made.sum)?,
            normed: other(&made.normed)?,
        };
        row.forward_norm_into(&own, &none, &at.old, &norm, &there)?;
        same(&made.sum, &there.sum);
        same(&made.normed, &there.normed);
        // Nobody makes a call of these.
        let into = |out: &Residual| row.forward_norm_into(&own, &none, &at.old, &norm, out);
        let old = Residual {
            sum: at.old.clone(),
            ..there.clone()
        };
        refused(into(&old), "out.sum");
        let twice = Residual {
            sum: there.normed.clone(),
            ..there.clone()
        };
        refused(into(&twice), "out.sum");
        let own_outputs = column.weight().dim(0)?;
        // candle makes no tensor of nothing.
        if own_outputs > 0 && own_outputs.is_multiple_of(2) {
            let made = p.silu_mul(&column.forward_lora(&at.x, &none)?)?;
            same(&made, &column.forward_silu_mul(&at.x, &none)?);
            let there = other(&made)?;
            column.forward_silu_mul_into(&at.x, &none, &there)?;
            same(&made, &there);
            refused(column.forward_silu_mul_into(&at.x, &none, &at.x), "out");
        }
        if at.x.dim(1)? % 2 == 0 {
            let made = p.silu_mul(&at.x)?;
            let there = other(&made)?;
            p.silu_mul_into(&at.x, &there)?;
            same(&made, &there);
            refused(
                p.silu_mul_into(&at.x, &at.x.narrow(1, 0, made.dim(1)?)?),
                "out",
            );
        }
        Ok(())
    });
}

fn row_parallel_adds_a_residual_and_normalizes(world: &World) {
    let cases = cases(world);
    let got = each(world, &cases, |p, _, at| {
        let old = &at.old;
        let norm = ResidualNorm::new(&at.norm, 1e-5)?;
        let linear = RowParallelLinear::new(p, &at.weight, None)?;
        let own = at.own_columns(p)?;
        let both = linear.forward_norm(&own, &Runs::none(), old, &norm)?;
        // The same as one after the other.
        let part = linear.forward_norm(&own, &Runs::none(), &old.zeros_like()?, &norm)?;
        let biased = RowParallelLinear::new(p, &at.weight, Some(&at.bias))?;
        let refused = biased.forward_norm(&own, &Runs::none(), old, &norm);
        assert!(refused.unwrap_err().to_string().contains("bias"));
        Ok((both, part.sum))
    });
    for (case, got) in cases.iter().zip(&got) {
        let mut want = product(&case.x, &case.weight);
        for (at, &value) in values(&case.old).iter().enumerate() {
            want.add(at, value);
        }
        for (both, part) in got {
            case.check_sum(&both.sum, &want);
            assert_eq!(bits(&both.sum), bits(&got[0].0.sum));
            assert_eq!(bits(&both.normed), bits(&got[0].0.normed));
            case.check_sum(part, &product(&case.x, &case.weight));
        }
    }
}

/// Ragged rows for up to four ranks, with a rank that has none.
fn ragged(m: usize, size: usize) -> Vec<usize> {
    let mut rows = vec![0; size];
    rows[size - 1] = m / 2;
    rows[0] += m - m / 2;
    rows
}

fn brigade_rows(m: usize, size: usize) -> Vec<usize> {
    (0..size)
        .map(|rank| cut::share(m, 1, size, rank).unwrap().len())
        .collect()
}

fn gather_linear_and_its_twin_take_any_rows(world: &World) {
    let cases = cases(world);
    for spread in [ragged, brigade_rows] {
        let got = each(world, &cases, |p, case, at| {
            let (m, n) = (case.rows(), case.n());
            let rows = spread(m, p.size());
            let own = cut::share(n, 1, p.size(), p.rank())?;
            let linear = GatherLinear::new(p, &at.weight, Some(&at.bias))?;
            let first = rows[..p.rank()].iter().sum();
            let x = at.x.narrow(0, first, rows[p.rank()])?;
            let y = linear.forward_rows(&x, Some(&rows), &Runs::none())?;
            assert_eq!(y.dims(), [m, own.len()]);
            case.check(&y, &case.want.columns(n, own));
            let twin = LinearReduceScatter::new(p, &at.weight, Some(&at.bias))?;
            let back = twin.forward_rows(&at.own_columns(p)?, Some(&rows), &Runs::none())?;
            assert_eq!(back.dims(), [rows[p.rank()], n]);
            Ok(back)
        });
        for (case, back) in cases.iter().zip(&got) {
            case.check_sum(&cat(back, 0), &case.want);
        }
    }
}

fn overlap_can_be_forced_and_gives_the_same(world: &World) {
    let cases = FLOATS.map(|dtype| Case::new(world, dtype, (48, 40, 31)));
    for mode in [
        OverlapMode::Off,
        OverlapMode::Ring,
        OverlapMode::Chunked { pieces: 2 },
    ] {
        let got = each(world, &cases, |p, case, at| {
            let own = cut::share(case.n(), 1, p.size(), p.rank())?;
            let x = cut::tensor(p, &at.x, 0)?;
            let linear = GatherLinear::new(p, &at.weight, Some(&at.bias))?;
            let y = linear.with_mode(mode).forward(&x)?;
            case.check(&y, &case.want.columns(case.n(), own));
            let twin = LinearReduceScatter::new(p, &at.weight, Some(&at.bias))?;
            twin.with_mode(mode).forward(&at.own_columns(p)?)
        });
        for (case, back) in cases.iter().zip(&got) {
            case.check_sum(&cat(back, 0), &case.want);
        }
    }
}

fn activations_of_more_dimensions_keep_them(world: &World) {
    let size = world.size;
    let (n, k) = (world.features(9), world.features(6));
    let (weight, x) = (
        random(&[n, k], DType::F32),
        random(&[2 * size, 3, k], DType::F32),
    );
    let want = product(&x, &weight);
    world.ranks(|p| {
        let (weight, x) = (put(p, &weight)?, put(p, &x)?);
        let own = cut::share(n, 1, size, p.rank())?;
        let part = want.columns(n, own.clone());
        let y = ColumnParallelLinear::new(p, &weight, None)?.forward(&x)?;
        assert_eq!(y.dims(), [2 * size, 3, own.len()]);
        close(&y, &part, 1e-5, "column");
        let y = RowParallelLinear::new(p, &weight, None)?.forward(&cut::tensor(p, &x, 2)?)?;
        assert_eq!(y.dims(), [2 * size, 3, n]);
        close(&y, &want, 1e-5, "row");
        // Rows of the first dimension are those that travel.
        let y = GatherLinear::new(p, &weight, None)?.forward(&cut::tensor(p, &x, 0)?)?;
        assert_eq!(y.dims(), [2 * size, 3, own.len()]);
        close(&y, &part, 1e-5, "gather");
        let twin = LinearReduceScatter::new(p, &weight, None)?;
        let y = twin.forward(&cut::tensor(p, &x, 2)?)?;
        assert_eq!(y.dims(), [2, 3, n]);
        let first = p.rank() * 2 * 3 * n;
        close(&y, &want.part(first..first + 2 * 3 * n), 1e-5, "scatter");
        Ok(())
    });
}

fn an_mlp_is_what_candle_makes_of_it_on_one_device(world: &World) {
    for dtype in FLOATS {
        let inner = world.features(23);
        let (x, up) = (random(&[6, 10], dtype), random(&[inner, 10], dtype));
        let (down, bias) = (random(&[10, inner], dtype), random(&[10], dtype));
        let between: Vec<f64> = product(&x, &up).values.into_iter().map(silu).collect();
        let between = Tensor::from_vec(between, (6, inner), &Device::Cpu).unwrap();
        let want = biased(product(&between, &down), &bias);
        let candles = || -> Result<Tensor> {
            let inner = x.matmul(&up.t()?)?.silu()?;
            inner.matmul(&down.t()?)?.broadcast_add(&bias)
        };
        let name = format!("{dtype:?}");
        // Two linears, so twice the roundings.
        let allowed = 2.0 * world.tolerance(dtype);
        close(&candles().unwrap(), &want, 4.0 * tolerance(dtype), &name);
        world.ranks(|p| {
            let (x, bias) = (put(p, &x)?, put(p, &bias)?);
            let up = ColumnParallelLinear::new(p, &put(p, &up)?, None)?;
            let up = up.with_activation(Activation::Silu);
            let down = RowParallelLinear::new(p, &put(p, &down)?, Some(&bias))?;
            close(&down.forward(&up.forward(&x)?)?, &want, allowed, &name);
            Ok(())
        });
    }
}

fn silu(x: f64) -> f64 {
    x / (1.0 + (-x).exp())
}

/// Two adapters of different ranks, as PEFT stores them, with their scales.
fn adapters(k: usize, n: usize, dtype: DType) -> [(Tensor, Tensor, f64); 2] {
    let of = |r: usize, alpha: f64| {
        let (a, b) = (random(&[r, k], dtype), random(&[n, r], dtype));
        (a, b, alpha / r as f64)
    };
    [of(2, 1.0), of(5, 3.0)]
}

fn rows_have_adapters_of_their_own(world: &World) {
    for dtype in FLOATS {
        let case = Case::new(world, dtype, (7, 9, 10));
        let (k, n) = (case.weight.dims()[1], case.n());
        let parts = adapters(k, n, dtype);
        let rows = [Some(1), Some(1), None, Some(0), Some(0), Some(0), Some(1)];
        let runs = Runs::per_row(rows);
        let mut want = case.want.clone();
        for (i, index) in rows.iter().enumerate() {
            let Some(index) = *index else { continue };
            let (a, b, scale) = &parts[index];
            let low = product(&case.x.narrow(0, i, 1).unwrap(), a);
            let low = Tensor::from_vec(low.values, (1, a.dims()[0]), &Device::Cpu).unwrap();
            let added = product(&low, b).values;
            for (j, added) in added.into_iter().enumerate() {
                want.add(i * n + j, scale * added);
            }
        }
        let back = world.ranks(|p| {
            let at = case.on(p)?;
            let (outs, ins) = (
                cut::share(n, 1, p.size(), p.rank())?,
                cut::share(k, 1, p.size(), p.rank())?,
            );
            let full = parts.iter().map(|(a, b, scale)| {
                let alpha = scale * a.dims()[0] as f64;
                Adapter::from_peft(&put(p, a)?, &put(p, b)?, alpha as f32)
            });
            let full = full.collect::<Result<Vec<_>>>()?;
            let by_columns =
                || -> Result<Vec<_>> { full.iter().map(|a| a.columns(outs.clone())).collect() };
            let by_rows =
                || -> Result<Vec<_>> { full.iter().map(|a| a.rows(ins.clone())).collect() };
            let own = want.columns(n, outs.clone());

            let linear = ColumnParallelLinear::new(p, &at.weight, Some(&at.bias))?;
            let y = linear
                .with_adapters(by_columns()?)?
                .forward_lora(&at.x, &runs)?;
            case.check(&y, &own);

            let linear = RowParallelLinear::new(p, &at.weight, Some(&at.bias))?;
            let linear = linear.with_adapters(by_rows()?)?;
            case.check_sum(&linear.forward_lora(&at.own_columns(p)?, &runs)?, &want);

            let linear = GatherLinear::new(p, &at.weight, Some(&at.bias))?;
            let linear = linear.with_adapters(by_columns()?)?;
            let x = cut::tensor(p, &at.x, 0)?;
            let rows = brigade_rows(7, p.size());
            case.check(&linear.forward_rows(&x, Some(&rows), &runs)?, &own);

            let linear = LinearReduceScatter::new(p, &at.weight, Some(&at.bias))?;
            let linear = linear.with_adapters(by_rows()?)?;
            linear.forward_rows(&at.own_columns(p)?, None, &runs)
        });
        case.check_sum(&cat(&back, 0), &want);
    }
}

fn what_does_not_fit_is_named(world: &World) {
    let case = Case::new(world, DType::F32, (4, 6, 5));
    let names = world.ranks(|p| {
        let at = case.on(p)?;
        let new = |dims: &[usize]| put(p, &random(dims, DType::F32));
        let linear = ColumnParallelLinear::new(p, &at.weight, None)?;
        let row = RowParallelLinear::new(p, &at.weight, None)?;
        let adapter = Adapter::new(&new(&[6, 2])?, &new(&[5, 4])?.t()?, 1.0);
        let fits = Adapter::new(&new(&[6, 2])?, &new(&[2, 5])?, 1.0)?;
        let with = linear.clone().with_adapters(vec![fits])?;
        let other = Adapter::new(&new(&[7, 2])?, &new(&[2, 5])?, 1.0)?;
        let wide = put(p, &random(&[4, 6], DType::F64))?;
        let errors = [
            linear.forward(&new(&[4, 7])?).err(),
            row.forward(&new(&[4, 7])?).err(),
            linear.forward(&wide).err(),
            ColumnParallelLinear::new(p, &at.x, Some(&at.x)).err(),
            RowParallelLinear::new(p, &at.weight, Some(&new(&[6])?)).err(),
            linear.clone().gathered(6, None).err(),
            adapter.err(),
            linear.clone().with_adapters(vec![other]).err(),
            linear.forward_lora(&at.x, &Runs::of([(4, Some(0))])).err(),
            with.forward_lora(&at.x, &Runs::of([(3, Some(0))])).err(),
        ];
        let field = |e: Option<candle_core::Error>| match brigade_error(&e?) {
            Some(Error::Invalid { field, .. }) => Some(*field),
            other => panic!("{other:?}"),
        };
        Ok(errors.map(field))
    });
    let want = [
        "x.shape",
        "x.shape",
        "a.dtype",
        "bias.shape",
        "bias.shape",
        "out_per_rank",
        "adapter",
        "adapters",
        "runs.adapter",
        "runs",
    ];
    assert_eq!(names[0], want.map(Some));
}

/// What all ranks are told at once, and nobody waits for.
fn counts_that_overflow_are_named(world: &World) {
    let size = world.size;
    let (weight, x) = (random(&[size, 6], DType::F32), random(&[1, 6], DType::F32));
    let counts = |first: usize| -> Vec<usize> {
        let rest = std::iter::repeat_n(1, size - 1);
        [first].into_iter().chain(rest).collect()
    };
    let (sum, product) = (counts(usize::MAX), counts(usize::MAX / 4));
    world.ranks(|p| {
        let (weight, x) = (put(p, &weight)?, put(p, &x)?);
        let column = ColumnParallelLinear::new(p, &weight, None)?;
        let gather = GatherLinear::new(p, &weight, None)?;
        let turned = x.t()?;
        let errors = [
            ("rows_per_rank", p.all_gather(&x, 0, Some(&sum)).err()),
            ("shape", p.all_gather(&x, 0, Some(&product)).err()),
            ("counts", p.all_gather(&turned, 1, Some(&sum)).err()),
            ("counts", p.all_gather(&turned, 1, Some(&product)).err()),
            ("out_per_rank", column.gathered(size, Some(&sum)).err()),
            (
                "rows_per_rank",
                gather.forward_rows(&x, Some(&sum), &Runs::none()).err(),
            ),
            (
                "widths",
                cut::fused(p, &weight, 0, &[usize::MAX, size + 1], 1).err(),
            ),
        ];
        for (number, (want, error)) in errors.into_iter().enumerate() {
            match brigade_error(&error.unwrap()) {
                Some(Error::Invalid { field, .. }) => assert_eq!(*field, want, "{number}"),
                other => panic!("{number}: {other:?}"),
            }
        }
        p.barrier()
    });
}
