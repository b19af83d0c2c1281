//! A norm with a residual, written down step by step: every step is one f32 operation, so that bits can be compared.

use crate::{
    matrix::{to_bytes, to_f32},
    oracle,
    quantized::{Quantized, quantize},
};
use brigade_device::{DataType, QScheme, ReduceOp};

/// The new residual: the sum and the old one, rounded once.
pub fn add(dtype: DataType, sum: &[u8], residual: &[u8]) -> Vec<u8> {
    let parts = [to_f32(dtype, sum), to_f32(dtype, residual)];
    oracle::reduce(ReduceOp::Sum, &parts, dtype)
}

/// Every row by its root mean square, times the weight.
pub fn norm(dtype: DataType, h: &[u8], weight: &[u8], eps: f32) -> Vec<u8> {
    let (h, weight) = (to_f32(dtype, h), to_f32(dtype, weight));
    let hidden = weight.len();
    let mut out = vec![];
    for row in h.chunks(hidden) {
        let mean = squares(row, 16 / dtype.bytes()) / hidden as f32;
        let root = (mean + eps).sqrt();
        let inverse = 1.0 / root;
        for (x, w) in row.iter().zip(&weight) {
            let scaled = x * inverse;
            let y = scaled * w;
            // A sum of one part is rounded, and canonical.
            out.extend(oracle::reduce(ReduceOp::Sum, &[vec![y]], dtype));
        }
    }
    out
}

/// The row with zeros behind it, until granules are a power of two: their sums by halves.
fn squares(row: &[f32], granule: usize) -> f32 {
    let granules = row.len().div_ceil(granule).next_power_of_two();
    let mut padded = row.to_vec();
    padded.resize(granules * granule, 0.0);
    let sums: Vec<f32> = padded
        .chunks(granule)
        .map(|g| {
            let mut sum = g[0] * g[0];
            for x in &g[1..] {
                let square = x * x;
                sum += square;
            }
            sum
        })
        .collect();
    halves(&sums)
}

fn halves(sums: &[f32]) -> f32 {
    match sums {
        [one] => *one,
        _ => {
            let (left, right) = sums.split_at(sums.len() / 2);
            halves(left) + halves(right)
        }
    }
}

/// Rows of int8 with their scales.
pub fn per_token(dtype: DataType, y: &[u8], dims: [usize; 2]) -> Quantized {
    quantize::oracle(QScheme::Int8PerToken, dims, &to_f32(dtype, y))
}

/// Values of fp8 by a given scale.
pub fn per_tensor(dtype: DataType, y: &[u8], scale: f32) -> Vec<u8> {
    let y = to_f32(dtype, y).into_iter();
    y.map(|y| quantize::to_fp8(y / scale)).collect()
}

/// The new residual and the normalized rows in f64, and the magnitudes of what was added up to get them.
pub struct Exact {
    pub sum: Vec<f64>,
    pub normed: Vec<f64>,
    pub parts: [f64; 2],
}

pub fn exact(parts: &[Vec<f64>], weight: &[f64], eps: f32) -> Exact {
    let hidden = weight.len();
    let total = |i: usize| parts.iter().map(|p| p[i]).sum::<f64>();
    let sizes = |i: usize| parts.iter().map(|p| p[i].abs()).sum::<f64>();
    let (mut normed, mut scaled) = (vec![], vec![]);
    let len = parts[0].len();
    let sum: Vec<_> = (0..len).map(total).collect();
    let size: Vec<_> = (0..len).map(sizes).collect();
    for (row, size) in sum.chunks(hidden).zip(size.chunks(hidden)) {
        let mean = row.iter().map(|x| x * x).sum::<f64>() / hidden as f64;
        let inverse = 1.0 / (mean + f64::from(eps)).sqrt();
        normed.extend(row.iter().zip(weight).map(|(x, w)| x * inverse * w));
        scaled.extend(size.iter().zip(weight).map(|(x, w)| x * inverse * w.abs()));
    }
    let parts = [size, scaled].map(|all| crate::check::norm(&all));
    Exact { sum, normed, parts }
}

/// Values of a type, out of numbers that it may have to round.
pub fn stored(dtype: DataType, values: &[f32]) -> Vec<u8> {
    let wide: Vec<_> = values.iter().copied().map(f64::from).collect();
    to_bytes(dtype, &wide)
}
