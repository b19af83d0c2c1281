//! Matrices of contracts: values already rounded to their type, so that an oracle is fed with what the device gets.

use brigade_device::DataType;
use half::{bf16, f16};
use rand::{Rng, SeedableRng, rngs::StdRng, seq::index};

/// Values in row-major order.
#[derive(Clone, Debug)]
pub struct Matrix {
    /// Their type.
    pub dtype: DataType,
    /// Their shape.
    pub dims: Vec<usize>,
    /// Exact in `dtype`.
    pub values: Vec<f64>,
}

impl Matrix {
    /// Rows with so many ones or minus ones, the same for the same seed: of a few of them all products are whole numbers.
    pub fn few(seed: u64, dtype: DataType, [rows, columns]: [usize; 2], ones: usize) -> Self {
        let mut rng = StdRng::seed_from_u64(seed);
        let mut values = vec![0.0; rows * columns];
        for row in values.chunks_mut(columns) {
            for at in index::sample(&mut rng, columns, ones) {
                row[at] = if rng.random() { 1.0 } else { -1.0 };
            }
        }
        Self {
            dtype,
            dims: vec![rows, columns],
            values,
        }
    }

    /// Random values of magnitude up to `scale`, none of them zero.
    pub fn random(rng: &mut StdRng, dtype: DataType, dims: &[usize], scale: f64) -> Self {
        let draw = |_| {
            let magnitude = rng.random_range(0.05..1.0) * scale;
            let sign = if rng.random() { 1.0 } else { -1.0 };
            round(dtype, sign * magnitude)
        };
        Self {
            dtype,
            dims: dims.to_vec(),
            values: (0..dims.iter().product()).map(draw).collect(),
        }
    }

    /// Size of dimension 0.
    pub fn rows(&self) -> usize {
        self.dims[0]
    }

    /// Size of the last dimension.
    pub fn columns(&self) -> usize {
        self.dims.last().copied().unwrap_or(1)
    }

    /// Element `(i, j)` of the matrix, or of its transpose.
    pub fn at(&self, i: usize, j: usize, transposed: bool) -> f64 {
        let (i, j) = if transposed { (j, i) } else { (i, j) };
        self.values[i * self.columns() + j]
    }

    /// As the device stores them.
    pub fn bytes(&self) -> Vec<u8> {
        to_bytes(self.dtype, &self.values)
    }

    /// Some of the rows.
    pub fn slice(&self, first: usize, rows: usize) -> Self {
        let columns = self.columns();
        Self {
            dtype: self.dtype,
            dims: vec![rows, columns],
            values: self.values[first * columns..(first + rows) * columns].to_vec(),
        }
    }

    /// Rows of several matrices below each other.
    pub fn stack(parts: &[Self]) -> Self {
        let mut all = parts[0].clone();
        all.dims[0] = parts.iter().map(Self::rows).sum();
        all.values = parts.iter().flat_map(|p| p.values.clone()).collect();
        all
    }

    /// The same values, transposed in memory.
    pub fn transposed(&self) -> Self {
        let (rows, columns) = (self.rows(), self.columns());
        let values = (0..columns).flat_map(|j| (0..rows).map(move |i| self.at(i, j, false)));
        Self {
            dtype: self.dtype,
            dims: vec![columns, rows],
            values: values.collect(),
        }
    }
}

/// The nearest value of a floating-point type.
pub fn round(dtype: DataType, x: f64) -> f64 {
    match dtype {
        DataType::F16 => f16::from_f64(x).to_f64(),
        DataType::BF16 => bf16::from_f64(x).to_f64(),
        DataType::F32 => f64::from(x as f32),
        _ => x,
    }
}

/// Values as a floating-point type stores them.
pub fn to_bytes(dtype: DataType, values: &[f64]) -> Vec<u8> {
    match dtype {
        DataType::F16 => stored(values, f16::from_f64),
        DataType::BF16 => stored(values, bf16::from_f64),
        DataType::F32 => stored(values, |x| x as f32),
        DataType::F64 => stored(values, |x| x),
        other => panic!("{other} is no floating-point type of these contracts"),
    }
}

fn stored<T: bytemuck::NoUninit>(values: &[f64], nearest: impl Fn(f64) -> T) -> Vec<u8> {
    let values: Vec<T> = values.iter().map(|&x| nearest(x)).collect();
    bytemuck::cast_slice(&values).to_vec()
}

/// Stored floating-point values.
pub fn to_f64(dtype: DataType, bytes: &[u8]) -> Vec<f64> {
    match dtype {
        DataType::F64 => bytemuck::pod_collect_to_vec(bytes),
        _ => to_f32(dtype, bytes).into_iter().map(f64::from).collect(),
    }
}

/// Stored floating-point values of at most 32 bits.
pub fn to_f32(dtype: DataType, bytes: &[u8]) -> Vec<f32> {
    match dtype {
        DataType::F16 => bytes
            .chunks_exact(2)
            .map(|b| f16::from_ne_bytes([b[0], b[1]]).to_f32())
            .collect(),
        DataType::BF16 => bytes
            .chunks_exact(2)
            .map(|b| bf16::from_ne_bytes([b[0], b[1]]).to_f32())
            .collect(),
        DataType::F32 => bytemuck::pod_collect_to_vec(bytes),
        other => panic!("{other} is no floating-point type of these contracts"),
    }
}
