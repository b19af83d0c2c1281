//! Ranks as threads, random tensors, and what products should be.

use brigade::{CommConfig, ParallelMode};
use brigade_candle::{Parallel, brigade};
use candle_core::{DType, Device, Result, Tensor};
use rand::Rng;
use std::{ops::Range, time::Duration};

pub const FLOATS: [DType; 3] = [DType::F32, DType::F16, DType::BF16];
pub const SIZES: std::ops::RangeInclusive<usize> = 1..=4;

pub fn config(mode: ParallelMode) -> CommConfig {
    CommConfig {
        deadline: Duration::from_secs(20),
        first_deadline: Duration::from_secs(20),
        ..CommConfig::new(mode)
    }
}

/// What each rank of a group makes, in rank order.
pub fn ranks_of<R: Send>(
    size: usize,
    config: &CommConfig,
    work: impl Fn(&Parallel) -> R + Sync,
) -> Vec<R> {
    std::thread::scope(|s| {
        let ranks: Vec<_> = brigade::group::threads(size)
            .into_iter()
            .map(|boot| {
                let work = &work;
                s.spawn(move || work(&Parallel::join(&Device::Cpu, &boot, config).unwrap()))
            })
            .collect();
        ranks.into_iter().map(|r| r.join().unwrap()).collect()
    })
}

/// As [`ranks_of`], for work that succeeds, in a tensor-parallel group.
pub fn ranks<R: Send>(size: usize, work: impl Fn(&Parallel) -> Result<R> + Sync) -> Vec<R> {
    ranks_of(size, &config(ParallelMode::Tp), |p| work(p).unwrap())
}

/// Values around 0, other ones each time.
pub fn random(dims: &[usize], dtype: DType) -> Tensor {
    let mut rng = rand::rng();
    let len = dims.iter().product();
    let values: Vec<f32> = (0..len).map(|_| rng.random_range(-1.0..1.0)).collect();
    let tensor = Tensor::from_vec(values, dims, &Device::Cpu).unwrap();
    tensor.to_dtype(dtype).unwrap()
}

pub fn values(tensor: &Tensor) -> Vec<f64> {
    let flat = tensor.flatten_all().unwrap().to_dtype(DType::F64).unwrap();
    flat.to_vec1().unwrap()
}

/// The bits of a tensor of floats.
pub fn bits(tensor: &Tensor) -> Vec<u64> {
    values(tensor).into_iter().map(f64::to_bits).collect()
}

/// What sums should be, in f64, and how large their addends are: a few sums may all nearly cancel, and are then as exact as what
/// was added, not as what is left.
#[derive(Clone, Default)]
pub struct Want {
    pub values: Vec<f64>,
    /// For each value the sum of its addends' squares.
    pub squares: Vec<f64>,
}

impl Want {
    /// Nothing was added.
    pub fn plain(values: Vec<f64>) -> Self {
        let squares = vec![0.0; values.len()];
        Self { values, squares }
    }

    /// Adds to one value.
    pub fn add(&mut self, at: usize, addend: f64) {
        self.values[at] += addend;
        self.squares[at] += addend * addend;
    }

    /// Columns of a matrix `[m, n]`.
    pub fn columns(&self, n: usize, part: Range<usize>) -> Self {
        let cut = |all: &[f64]| -> Vec<f64> {
            let rows = all.chunks(n.max(1));
            rows.flat_map(|row| row[part.clone()].to_vec()).collect()
        };
        Self {
            values: cut(&self.values),
            squares: cut(&self.squares),
        }
    }

    /// Some of the values.
    pub fn part(&self, part: Range<usize>) -> Self {
        Self {
            values: self.values[part.clone()].to_vec(),
            squares: self.squares[part].to_vec(),
        }
    }
}

/// `x W^T`, of `[m, k]` and `[n, k]`.
pub fn product(x: &Tensor, weight: &Tensor) -> Want {
    let (n, k) = weight.dims2().unwrap();
    let (x, weight) = (values(x), values(weight));
    let m = x.len().checked_div(k).unwrap_or(0);
    let mut want = Want::plain(vec![0.0; m * n]);
    for at in 0..m * n {
        let (i, j) = (at / n, at % n);
        (0..k).for_each(|l| want.add(at, x[i * k + l] * weight[j * k + l]));
    }
    want
}

/// Adds a bias to rows.
pub fn biased(mut rows: Want, bias: &Tensor) -> Want {
    let bias = values(bias);
    for at in 0..rows.values.len() {
        rows.add(at, bias[at % bias.len()]);
    }
    rows
}

/// What the contracts allow: relative error in the Frobenius norm, for one rounding.
pub fn tolerance(dtype: DType) -> f64 {
    match dtype {
        DType::F32 => 1e-5,
        DType::F16 => 1e-3,
        _ => 4e-3,
    }
}

/// Checks values against an oracle.
pub fn close(got: &Tensor, want: &Want, tolerance: f64, case: &str) {
    let got = values(got);
    assert_eq!(got.len(), want.values.len(), "{case}");
    let off = got.iter().zip(&want.values).map(|(g, w)| (g - w).powi(2));
    let off = off.sum::<f64>().sqrt();
    let left: f64 = want.values.iter().map(|w| w * w).sum();
    let size = left.max(want.squares.iter().sum()).sqrt();
    assert!(
        off <= tolerance * size,
        "{case}: {:e} above {tolerance:e}",
        off / size
    );
}
