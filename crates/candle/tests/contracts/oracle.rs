//! Random tensors, and what products should be.

use brigade_candle::Parallel;
use candle_core::{DType, Device, Result, Tensor};
use rand::Rng;
use std::ops::Range;

pub const FLOATS: [DType; 3] = [DType::F32, DType::F16, DType::BF16];

/// Values around 0, other ones each time.
pub fn random(dims: &[usize], dtype: DType) -> Tensor {
    let mut rng = rand::rng();
    let len = dims.iter().product();
    let values: Vec<f32> = (0..len).map(|_| rng.random_range(-1.0..1.0)).collect();
    let tensor = Tensor::from_vec(values, dims, &Device::Cpu).unwrap();
    tensor.to_dtype(dtype).unwrap()
}

/// A tensor where a rank has its own.
pub fn put(p: &Parallel, tensor: &Tensor) -> Result<Tensor> {
    // candle would ask a GPU's driver to copy no bytes.
    if tensor.elem_count() == 0 {
        return p.make(tensor.dtype(), tensor.shape(), |_| Ok(()));
    }
    tensor.to_device(p.place())
}

/// A rank's tensor in the host's memory. What makes it is waited for before it is copied: the driver would wait in the copy, and other
/// threads with it.
pub fn home(tensor: &Tensor) -> Tensor {
    tensor.device().synchronize().unwrap();
    tensor.to_device(&Device::Cpu).unwrap()
}

/// Ranks' tensors behind each other.
pub fn cat(parts: &[Tensor], dim: usize) -> Tensor {
    let parts: Vec<_> = parts.iter().map(home).collect();
    Tensor::cat(&parts, dim).unwrap()
}

pub fn values(tensor: &Tensor) -> Vec<f64> {
    let flat = home(tensor).flatten_all().unwrap();
    flat.to_dtype(DType::F64).unwrap().to_vec1().unwrap()
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
