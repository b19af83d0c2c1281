use crate::Adapter;
use crate::model::Matrix;

/// The index of the greatest value, the first of equals; NaN is never it. 0 for an empty slice.
///
/// Greedy decoding's choice, for all who compare with the reference.
pub fn argmax(values: &[f32]) -> u32 {
    let mut best = (0, f32::NEG_INFINITY);
    for (index, &value) in (0..).zip(values) {
        if value > best.1 {
            best = (index, value);
        }
    }
    best.0
}

/// A dot product, accumulated in f64. Products of f32 are exact there. Sixteen sums side by side,
/// so that the compiler can use vectors; which sum takes which product depends on the length alone.
fn dot(a: &[f32], b: &[f32]) -> f32 {
    const LANES: usize = 16;
    let mut sums = [0.0_f64; LANES];
    let (a_chunks, a_rest) = a.as_chunks::<LANES>();
    let (b_chunks, b_rest) = b.as_chunks::<LANES>();
    for (a, b) in a_chunks.iter().zip(b_chunks) {
        for lane in 0..LANES {
            sums[lane] += f64::from(a[lane]) * f64::from(b[lane]);
        }
    }
    let rest: f64 = a_rest
        .iter()
        .zip(b_rest)
        .map(|(&a, &b)| f64::from(a) * f64::from(b))
        .sum();
    (sums.iter().sum::<f64>() + rest) as f32
}

/// `y = x W^T`: `x` is `[tokens, in]`, `weight` `[out, in]`, the result `[tokens, out]`.
pub(super) fn linear(x: &[f32], weight: &Matrix) -> Vec<f32> {
    let (inputs, outputs) = (weight.columns(), weight.rows());
    let mut y = vec![0.0; x.len() / inputs * outputs];
    // Weights outside, tokens inside: each weight is fetched once.
    for output in 0..outputs {
        let row = weight.row(output);
        for (x, y) in x.chunks_exact(inputs).zip(y.chunks_exact_mut(outputs)) {
            y[output] = dot(x, row);
        }
    }
    y
}

/// `y += scale * (x A) B`.
pub(super) fn add_lora(y: &mut [f32], x: &[f32], adapter: &Adapter) {
    let Adapter { a, b, scale } = adapter;
    for (x, y) in x
        .chunks_exact(a.rows())
        .zip(y.chunks_exact_mut(b.columns()))
    {
        let mut inner = vec![0.0_f64; a.columns()];
        for (input, &x) in x.iter().enumerate() {
            for (inner, &a) in inner.iter_mut().zip(a.row(input)) {
                *inner += f64::from(x) * f64::from(a);
            }
        }
        let mut addition = vec![0.0_f64; b.columns()];
        for (rank, inner) in inner.into_iter().enumerate() {
            for (sum, &b) in addition.iter_mut().zip(b.row(rank)) {
                *sum += inner * f64::from(b);
            }
        }
        for (y, addition) in y.iter_mut().zip(addition) {
            *y = (f64::from(*y) + f64::from(*scale) * addition) as f32;
        }
    }
}

/// `x / sqrt(mean(x^2) + epsilon) * weight` over each row
/// ([RMSNorm](https://arxiv.org/abs/1910.07467)).
pub(super) fn rms_norm(x: &[f32], weight: &[f32], epsilon: f32) -> Vec<f32> {
    let mut y = Vec::with_capacity(x.len());
    for row in x.chunks_exact(weight.len()) {
        let squares: f64 = row.iter().map(|&x| f64::from(x) * f64::from(x)).sum();
        let factor = 1.0 / (squares / row.len() as f64 + f64::from(epsilon)).sqrt();
        y.extend(
            row.iter()
                .zip(weight)
                .map(|(&x, &weight)| (f64::from(x) * factor) as f32 * weight),
        );
    }
    y
}

/// Turns each pair `(2i, 2i + 1)` of a head by `position * base^(-2i / head_dim)`: the interleaved
/// form of [RoPE](https://arxiv.org/abs/2104.09864), which is how GGUF stores llama's heads.
pub(super) fn rope(head: &mut [f32], position: usize, base: f32) {
    let head_dim = head.len() as f64;
    for (pair, values) in head.as_chunks_mut::<2>().0.iter_mut().enumerate() {
        let angle = position as f64 * f64::from(base).powf(-2.0 * pair as f64 / head_dim);
        let (sin, cos) = angle.sin_cos();
        let [x, y] = values.map(f64::from);
        *values = [(x * cos - y * sin) as f32, (x * sin + y * cos) as f32];
    }
}

/// `softmax(q K^T / sqrt(head_dim)) V` for one query head: keys and values from the first token to
/// its own.
pub(super) fn attend<'a>(
    query: &[f32],
    keys: impl Iterator<Item = &'a [f32]>,
    values: impl Iterator<Item = &'a [f32]>,
    out: &mut [f32],
) {
    let scale = 1.0 / (query.len() as f64).sqrt();
    let scores: Vec<f64> = keys.map(|key| f64::from(dot(query, key)) * scale).collect();
    let most = scores.iter().copied().fold(f64::NEG_INFINITY, f64::max);
    let mut total = 0.0;
    let mut sums = vec![0.0_f64; out.len()];
    for (score, value) in scores.into_iter().zip(values) {
        let weight = (score - most).exp();
        total += weight;
        for (sum, &value) in sums.iter_mut().zip(value) {
            *sum += weight * f64::from(value);
        }
    }
    for (out, sum) in out.iter_mut().zip(sums) {
        *out = (sum / total) as f32;
    }
}

/// `x * sigmoid(x)`.
pub(super) fn silu(x: f32) -> f32 {
    let x = f64::from(x);
    (x / (1.0 + (-x).exp())) as f32
}

/// `y += x`.
pub(super) fn add(y: &mut [f32], x: &[f32]) {
    for (y, x) in y.iter_mut().zip(x) {
        *y += x;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn argmax_takes_the_first_of_the_greatest_and_never_nan() {
        assert_eq!(argmax(&[1.0, 3.0, 3.0, 2.0]), 1);
        assert_eq!(argmax(&[f32::NAN, -1.0, f32::NAN]), 1);
        assert_eq!(argmax(&[]), 0);
    }

    #[test]
    fn rope_turns_neighbours_by_position_and_frequency() {
        let mut head = [1.0, 0.0, 0.0, 1.0];
        rope(&mut head, 2, 100.0);
        let (near, far) = (2.0_f32, 0.2_f32);
        let want = [near.cos(), near.sin(), -far.sin(), far.cos()];
        for (got, want) in head.iter().zip(want) {
            assert!((got - want).abs() < 1e-6, "{head:?}");
        }
    }

    #[test]
    fn scores_depend_on_the_distance_of_positions_alone() {
        let score = |query_at, key_at| {
            let (mut query, mut key) = ([0.3, -1.2, 0.7, 0.1], [1.1, 0.4, -0.6, 0.9]);
            rope(&mut query, query_at, 10.0);
            rope(&mut key, key_at, 10.0);
            dot(&query, &key)
        };
        assert!((score(7, 3) - score(104, 100)).abs() < 1e-5);
        assert!((score(7, 3) - score(7, 4)).abs() > 1e-2);
    }

    #[test]
    fn dot_takes_every_product_of_any_length() {
        for length in [0, 1, 15, 16, 17, 100] {
            let a: Vec<f32> = (0..length).map(|i| i as f32).collect();
            let want: u32 = (0..length).map(|i| i * i).sum();
            assert_eq!(dot(&a, &a), want as f32);
        }
    }

    #[test]
    fn norm_has_unit_mean_square_times_weight() {
        let y = rms_norm(&[3.0, 4.0, 0.3, 0.4], &[1.0, 2.0], 0.0);
        let root = 12.5_f32.sqrt();
        for (got, want) in y
            .iter()
            .zip([3.0 / root, 8.0 / root, 3.0 / root, 8.0 / root])
        {
            assert!((got - want).abs() < 1e-6, "{y:?}");
        }
    }
}
