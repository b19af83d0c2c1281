//! What results should be: linears in f64, reductions in rank order in f32.

use crate::{
    layer::Layer,
    matrix::{Matrix, to_f32},
};
use brigade_device::{Activation, DataType, ReduceOp};
use half::{bf16, f16};

/// Rows of a product that are made at a time.
const ROWS: usize = 8;

/// `[M, N] = op(x) op(w)`
pub fn multiply(x: &Matrix, transpose_x: bool, w: &Matrix, transpose_w: bool) -> Vec<f64> {
    let (m, k) = if transpose_x {
        (x.columns(), x.rows())
    } else {
        (x.rows(), x.columns())
    };
    let plain = transpose_w.then(|| w.transposed());
    let w = plain.as_ref().unwrap_or(w);
    let n = w.columns();
    let mut out = vec![0.0; m * n];
    // A row of W is added to some rows while it is in the nearest cache. Every sum goes from the first of W's rows to the last.
    for first in (0..m).step_by(ROWS) {
        for l in 0..k {
            let added = &w.values[l * n..(l + 1) * n];
            for i in first..m.min(first + ROWS) {
                let factor = x.at(i, l, transpose_x);
                for (sum, &value) in out[i * n..(i + 1) * n].iter_mut().zip(added) {
                    *sum += factor * value;
                }
            }
        }
    }
    out
}

/// Norm of all that a product adds up: what it is rounded for, however much of it cancels.
pub fn addends(x: &Matrix, transpose_x: bool, w: &Matrix, transpose_w: bool) -> f64 {
    // How much each of the inner dimension's elements has of it.
    let along = |matrix: &Matrix, by_row: bool| -> Vec<f64> {
        let (rows, columns) = (matrix.rows(), matrix.columns());
        let mut all = vec![0.0; if by_row { rows } else { columns }];
        for (i, x) in matrix.values.iter().enumerate() {
            all[if by_row { i / columns } else { i % columns }] += x * x;
        }
        all
    };
    let (of_x, of_w) = (along(x, transpose_x), along(w, !transpose_w));
    of_x.iter()
        .zip(of_w)
        .map(|(x, w)| x * w)
        .sum::<f64>()
        .sqrt()
}

/// Base product and adapters, without C and activation.
pub fn product(x: &Matrix, transpose_x: bool, layer: &Layer) -> Vec<f64> {
    let mut out = multiply(x, transpose_x, &layer.weight, layer.transpose);
    let plain = transpose_x.then(|| x.transposed());
    let x = plain.as_ref().unwrap_or(x);
    let (k, n) = (x.columns(), layer.n());
    let mut first = 0;
    for run in &layer.runs {
        if let Some(adapter) = &run.adapter {
            let rows = Matrix {
                dtype: x.dtype,
                dims: vec![run.rows, k],
                values: x.values[first * k..(first + run.rows) * k].to_vec(),
            };
            let low = Matrix {
                dtype: DataType::F64,
                dims: vec![run.rows, adapter.a.columns()],
                values: multiply(&rows, false, &adapter.a, false),
            };
            let high = multiply(&low, false, &adapter.b, false);
            for (sum, value) in out[first * n..].iter_mut().zip(high) {
                *sum += f64::from(adapter.scale) * value;
            }
        }
        first += run.rows;
    }
    out
}

/// `act(values + C)`, where row 0 of `values` is row `first` of a full C.
pub fn finish(values: &mut [f64], layer: &Layer, first: usize) {
    let n = layer.n();
    if let Some(c) = layer.bias.as_ref().filter(|_| n > 0) {
        for (i, row) in values.chunks_mut(n).enumerate() {
            let start = if c.values.len() == n {
                0
            } else {
                (first + i) * n
            };
            for (x, c) in row.iter_mut().zip(&c.values[start..start + n]) {
                *x += c;
            }
        }
    }
    for x in values {
        *x = activate(layer.activation, *x);
    }
}

/// Base product, adapters, C, activation.
pub fn linear(x: &Matrix, transpose_x: bool, layer: &Layer) -> Vec<f64> {
    let mut out = product(x, transpose_x, layer);
    finish(&mut out, layer, 0);
    out
}

/// An activation of one value.
pub fn activate(activation: Activation, x: f64) -> f64 {
    match activation {
        Activation::None => x,
        Activation::Relu => x.max(0.0),
        Activation::GeluTanh => {
            let inner = (2.0 / std::f64::consts::PI).sqrt() * (x + 0.044_715 * x.powi(3));
            0.5 * x * (1.0 + inner.tanh())
        }
        Activation::GeluErf => 0.5 * x * (1.0 + libm::erf(x / std::f64::consts::SQRT_2)),
        Activation::Silu => x / (1.0 + (-x).exp()),
    }
}

/// The reduction that every rank must get, bit for bit: in f32, in rank order, starting from rank 0's value, one rounding.
pub fn reduce(op: ReduceOp, inputs: &[Vec<f32>], output: DataType) -> Vec<u8> {
    let ranks = inputs.len() as f32;
    let element = |i: usize| {
        let mut acc = inputs[0][i];
        for input in &inputs[1..] {
            acc = combine(op, acc, input[i]);
        }
        if op == ReduceOp::Avg {
            acc /= ranks;
        }
        acc
    };
    let mut out = Vec::with_capacity(inputs[0].len() * output.bytes());
    for i in 0..inputs[0].len() {
        store(element(i), output, &mut out);
    }
    out
}

/// The same across machines of so many ranks: every machine's reduction, and then that of the machines', each rounded once.
pub fn reduce_by_machine(
    op: ReduceOp,
    inputs: &[Vec<f32>],
    ranks: usize,
    output: DataType,
) -> Vec<u8> {
    let machines = inputs.chunks(ranks);
    let machines: Vec<_> = machines
        .map(|inside| to_f32(output, &reduce(op, inside, output)))
        .collect();
    reduce(op, &machines, output)
}

fn combine(op: ReduceOp, a: f32, b: f32) -> f32 {
    let first_is_greater = |a: f32, b: f32| a > b || a == b && a.is_sign_positive();
    match op {
        ReduceOp::Sum | ReduceOp::Avg => a + b,
        ReduceOp::Prod => a * b,
        _ if a.is_nan() || b.is_nan() => f32::NAN,
        ReduceOp::Max if first_is_greater(a, b) => a,
        ReduceOp::Max => b,
        ReduceOp::Min if first_is_greater(a, b) => b,
        ReduceOp::Min => a,
    }
}

/// One rounding; a NaN becomes the type's canonical one.
fn store(x: f32, dtype: DataType, out: &mut Vec<u8>) {
    match dtype {
        _ if x.is_nan() => out.extend(&dtype.poison().to_le_bytes()[..dtype.bytes()]),
        DataType::F16 => out.extend(f16::from_f32(x).to_ne_bytes()),
        DataType::BF16 => out.extend(bf16::from_f32(x).to_ne_bytes()),
        _ => out.extend(x.to_ne_bytes()),
    }
}
