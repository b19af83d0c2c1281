use crate::common::*;
use brigade_candle::{
    Adapter, ColumnParallelLinear, GatherLinear, LinearReduceScatter, Parallel, ResidualNorm,
    RowParallelLinear, Runs,
    brigade::{Activation, OverlapMode},
    brigade_error, cut,
};
use candle_core::{DType, Device, Module, Result, Tensor};

/// Rows, input and output features: divisible, ragged, and fewer features than ranks.
const SHAPES: [(usize, usize, usize); 5] = [
    (8, 16, 24),
    (5, 7, 11),
    (1, 13, 3),
    (6, 3, 10),
    (3, 130, 67),
];

/// A linear, its input, and what should come out of it: from sums in f64, and from candle on one device.
struct Case {
    x: Tensor,
    weight: Tensor,
    bias: Tensor,
    want: Want,
    dtype: DType,
    name: String,
}

impl Case {
    fn new(size: usize, dtype: DType, (m, k, n): (usize, usize, usize)) -> Self {
        let (x, weight) = (random(&[m, k], dtype), random(&[n, k], dtype));
        let bias = random(&[n], dtype);
        let want = biased(product(&x, &weight), &bias);
        let case = Self {
            name: format!("{size} ranks, {dtype:?}, {m} x {k} x {n}"),
            x,
            weight,
            bias,
            want,
            dtype,
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

    fn check(&self, got: &Tensor, want: &Want) {
        assert_eq!(got.dtype(), self.dtype);
        close(got, want, tolerance(self.dtype), &self.name);
    }

    /// As [`check`](Self::check), of a sum over ranks: parts are rounded before they travel, their sum once more, and three values
    /// may all be unlucky.
    fn check_sum(&self, got: &Tensor, want: &Want) {
        assert_eq!(got.dtype(), self.dtype);
        close(got, want, 2.0 * tolerance(self.dtype), &self.name);
    }

    /// What goes into a row-parallel linear.
    fn own_columns(&self, p: &Parallel) -> Result<Tensor> {
        cut::tensor(p, &self.x, 1)
    }
}

fn cases() -> impl Iterator<Item = (usize, Case)> {
    let types = SIZES.flat_map(|s| FLOATS.map(|d| (s, d)));
    types.flat_map(|(s, d)| SHAPES.map(|shape| (s, Case::new(s, d, shape))))
}

#[test]
fn column_parallel_gives_own_columns_or_all() {
    for (size, case) in cases() {
        let n = case.n();
        ranks(size, |p| {
            let own = cut::share(n, 1, p.size(), p.rank())?;
            let linear = ColumnParallelLinear::new(p, &case.weight, Some(&case.bias))?;
            let y = linear.forward(&case.x)?;
            assert_eq!(y.dims(), [case.x.dims()[0], own.len()]);
            case.check(&y, &case.want.columns(n, own));
            let all = linear.gathered(n, None)?.forward(&case.x)?;
            assert_eq!(all.dims(), [case.x.dims()[0], n]);
            case.check(&all, &case.want);
            Ok(())
        });
    }
}

#[test]
fn row_parallel_gives_every_rank_the_sum() {
    for (size, case) in cases() {
        let got = ranks(size, |p| {
            let linear = RowParallelLinear::new(p, &case.weight, Some(&case.bias))?;
            linear.forward(&case.own_columns(p)?)
        });
        for y in &got {
            case.check_sum(y, &case.want);
            assert_eq!(bits(y), bits(&got[0]));
        }
    }
}

#[test]
fn row_parallel_adds_a_residual_and_normalizes() {
    for (size, case) in cases() {
        let dtype = case.x.dtype();
        let dims = [case.x.dims()[0], case.n()];
        let (old, weight) = (random(&dims, dtype), random(&dims[1..], dtype));
        let got = ranks(size, |p| {
            let norm = ResidualNorm::new(&weight, 1e-5)?;
            let linear = RowParallelLinear::new(p, &case.weight, None)?;
            let own = case.own_columns(p)?;
            let both = linear.forward_norm(&own, &Runs::none(), &old, &norm)?;
            // The same as one after the other.
            let part = linear.forward_norm(&own, &Runs::none(), &old.zeros_like()?, &norm)?;
            let biased = RowParallelLinear::new(p, &case.weight, Some(&case.bias))?;
            let refused = biased.forward_norm(&own, &Runs::none(), &old, &norm);
            assert!(refused.unwrap_err().to_string().contains("bias"));
            Ok((both, part.sum))
        });
        let mut want = product(&case.x, &case.weight);
        for (at, &value) in values(&old).iter().enumerate() {
            want.add(at, value);
        }
        for (both, _) in &got {
            case.check_sum(&both.sum, &want);
            assert_eq!(bits(&both.sum), bits(&got[0].0.sum));
            assert_eq!(bits(&both.normed), bits(&got[0].0.normed));
        }
        for (_, part) in &got {
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

#[test]
fn gather_linear_and_its_twin_take_any_rows() {
    for (size, case) in cases() {
        let (m, n) = (case.x.dims()[0], case.n());
        let own_rows = |p: &Parallel, rows: &[usize], all: &Tensor| {
            all.narrow(0, rows[..p.rank()].iter().sum(), rows[p.rank()])
        };
        for rows in [ragged(m, size), brigade_rows(m, size)] {
            let back = ranks(size, |p| {
                let own = cut::share(n, 1, p.size(), p.rank())?;
                let linear = GatherLinear::new(p, &case.weight, Some(&case.bias))?;
                let x = own_rows(p, &rows, &case.x)?;
                let y = linear.forward_rows(&x, Some(&rows), &Runs::none())?;
                assert_eq!(y.dims(), [m, own.len()]);
                case.check(&y, &case.want.columns(n, own));
                let twin = LinearReduceScatter::new(p, &case.weight, Some(&case.bias))?;
                let back = twin.forward_rows(&case.own_columns(p)?, Some(&rows), &Runs::none())?;
                assert_eq!(back.dims(), [rows[p.rank()], n]);
                Ok(back)
            });
            case.check_sum(&Tensor::cat(&back, 0).unwrap(), &case.want);
        }
    }
}

fn brigade_rows(m: usize, size: usize) -> Vec<usize> {
    (0..size)
        .map(|rank| cut::share(m, 1, size, rank).unwrap().len())
        .collect()
}

#[test]
fn overlap_can_be_forced_and_gives_the_same() {
    let case = Case::new(3, DType::F32, (48, 40, 31));
    for mode in [
        OverlapMode::Off,
        OverlapMode::Ring,
        OverlapMode::Chunked { pieces: 2 },
    ] {
        let back = ranks(3, |p| {
            let own = cut::share(case.n(), 1, 3, p.rank())?;
            let x = cut::tensor(p, &case.x, 0)?;
            let linear = GatherLinear::new(p, &case.weight, Some(&case.bias))?;
            let y = linear.with_mode(mode).forward(&x)?;
            case.check(&y, &case.want.columns(case.n(), own));
            let twin = LinearReduceScatter::new(p, &case.weight, Some(&case.bias))?;
            twin.with_mode(mode).forward(&case.own_columns(p)?)
        });
        case.check_sum(&Tensor::cat(&back, 0).unwrap(), &case.want);
    }
}

#[test]
fn activations_of_more_dimensions_keep_them() {
    let (weight, x) = (random(&[9, 6], DType::F32), random(&[4, 3, 6], DType::F32));
    let want = product(&x, &weight);
    ranks(2, |p| {
        let own = cut::share(9, 1, 2, p.rank())?;
        let part = want.columns(9, own.clone());
        let y = ColumnParallelLinear::new(p, &weight, None)?.forward(&x)?;
        assert_eq!(y.dims(), [4, 3, own.len()]);
        close(&y, &part, 1e-5, "column");
        let y = RowParallelLinear::new(p, &weight, None)?.forward(&cut::tensor(p, &x, 2)?)?;
        assert_eq!(y.dims(), [4, 3, 9]);
        close(&y, &want, 1e-5, "row");
        // Rows of the first dimension are those that travel.
        let y = GatherLinear::new(p, &weight, None)?.forward(&cut::tensor(p, &x, 0)?)?;
        assert_eq!(y.dims(), [4, 3, own.len()]);
        close(&y, &part, 1e-5, "gather");
        let twin = LinearReduceScatter::new(p, &weight, None)?;
        let y = twin.forward(&cut::tensor(p, &x, 2)?)?;
        assert_eq!(y.dims(), [2, 3, 9]);
        let first = p.rank() * 2 * 3 * 9;
        close(&y, &want.part(first..first + 2 * 3 * 9), 1e-5, "scatter");
        Ok(())
    });
}

#[test]
fn an_mlp_is_what_candle_makes_of_it_on_one_device() {
    for (size, dtype) in SIZES.flat_map(|s| FLOATS.map(|d| (s, d))) {
        let (x, up) = (random(&[6, 10], dtype), random(&[23, 10], dtype));
        let (down, bias) = (random(&[10, 23], dtype), random(&[10], dtype));
        let inner: Vec<f64> = product(&x, &up).values.into_iter().map(silu).collect();
        let inner = Tensor::from_vec(inner, (6, 23), &Device::Cpu).unwrap();
        let want = biased(product(&inner, &down), &bias);
        let candles = || -> Result<Tensor> {
            let inner = x.matmul(&up.t()?)?.silu()?;
            inner.matmul(&down.t()?)?.broadcast_add(&bias)
        };
        let name = format!("{size} ranks, {dtype:?}");
        // Two linears, so twice the roundings.
        let allowed = 2.0 * tolerance(dtype);
        close(&candles().unwrap(), &want, 2.0 * allowed, &name);
        ranks(size, |p| {
            let up = ColumnParallelLinear::new(p, &up, None)?.with_activation(Activation::Silu);
            let down = RowParallelLinear::new(p, &down, Some(&bias))?;
            close(&down.forward(&up.forward(&x)?)?, &want, allowed, &name);
            Ok(())
        });
    }
}

fn silu(x: f64) -> f64 {
    x / (1.0 + (-x).exp())
}

/// Two adapters of different ranks, as PEFT stores them, and what they add to each row of `x W^T`.
fn adapters(k: usize, n: usize, dtype: DType) -> (Vec<Adapter>, [(Tensor, Tensor, f64); 2]) {
    let of = |r: usize, alpha: f64| {
        let (a, b) = (random(&[r, k], dtype), random(&[n, r], dtype));
        (a, b, alpha / r as f64)
    };
    let parts = [of(2, 1.0), of(5, 3.0)];
    let adapter = |(a, b, scale): &(Tensor, Tensor, f64)| {
        let alpha = *scale * a.dim(0).unwrap() as f64;
        Adapter::from_peft(a, b, alpha as f32).unwrap()
    };
    (parts.iter().map(adapter).collect(), parts)
}

#[test]
fn rows_have_adapters_of_their_own() {
    for (size, dtype) in SIZES.flat_map(|s| FLOATS.map(|d| (s, d))) {
        let case = Case::new(size, dtype, (7, 9, 10));
        let (full, parts) = adapters(9, 10, dtype);
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
                want.add(i * 10 + j, scale * added);
            }
        }
        let back = ranks(size, |p| {
            let (outs, ins) = (
                cut::share(10, 1, p.size(), p.rank())?,
                cut::share(9, 1, p.size(), p.rank())?,
            );
            let by_columns =
                || -> Result<Vec<_>> { full.iter().map(|a| a.columns(outs.clone())).collect() };
            let by_rows =
                || -> Result<Vec<_>> { full.iter().map(|a| a.rows(ins.clone())).collect() };
            let own = want.columns(10, outs.clone());

            let linear = ColumnParallelLinear::new(p, &case.weight, Some(&case.bias))?;
            let y = linear
                .with_adapters(by_columns()?)?
                .forward_lora(&case.x, &runs)?;
            case.check(&y, &own);

            let linear = RowParallelLinear::new(p, &case.weight, Some(&case.bias))?;
            let linear = linear.with_adapters(by_rows()?)?;
            case.check_sum(&linear.forward_lora(&case.own_columns(p)?, &runs)?, &want);

            let linear = GatherLinear::new(p, &case.weight, Some(&case.bias))?;
            let linear = linear.with_adapters(by_columns()?)?;
            let x = cut::tensor(p, &case.x, 0)?;
            let rows = brigade_rows(7, p.size());
            case.check(&linear.forward_rows(&x, Some(&rows), &runs)?, &own);

            let linear = LinearReduceScatter::new(p, &case.weight, Some(&case.bias))?;
            let linear = linear.with_adapters(by_rows()?)?;
            linear.forward_rows(&case.own_columns(p)?, None, &runs)
        });
        case.check_sum(&Tensor::cat(&back, 0).unwrap(), &want);
    }
}

#[test]
fn what_does_not_fit_is_named() {
    let case = Case::new(1, DType::F32, (4, 6, 5));
    let names = ranks(1, |p| {
        let linear = ColumnParallelLinear::new(p, &case.weight, None)?;
        let row = RowParallelLinear::new(p, &case.weight, None)?;
        let short = random(&[5, 4], DType::F32);
        let adapter = Adapter::new(&random(&[6, 2], DType::F32), &short.t()?, 1.0);
        let fits = Adapter::new(
            &random(&[6, 2], DType::F32),
            &random(&[2, 5], DType::F32),
            1.0,
        )?;
        let with = linear.clone().with_adapters(vec![fits])?;
        let errors = [
            linear.forward(&random(&[4, 7], DType::F32)).err(),
            row.forward(&random(&[4, 7], DType::F32)).err(),
            linear.forward(&random(&[4, 6], DType::F64)).err(),
            ColumnParallelLinear::new(p, &case.x, Some(&case.x)).err(),
            RowParallelLinear::new(p, &case.weight, Some(&random(&[6], DType::F32))).err(),
            linear.clone().gathered(6, None).err(),
            adapter.err(),
            linear
                .clone()
                .with_adapters(vec![Adapter::new(
                    &random(&[7, 2], DType::F32),
                    &random(&[2, 5], DType::F32),
                    1.0,
                )?])
                .err(),
            linear
                .forward_lora(&case.x, &Runs::of([(4, Some(0))]))
                .err(),
            with.forward_lora(&case.x, &Runs::of([(3, Some(0))])).err(),
        ];
        let field = |e: Option<candle_core::Error>| match brigade_error(&e?) {
            Some(brigade_candle::brigade::Error::Invalid { field, .. }) => Some(*field),
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
