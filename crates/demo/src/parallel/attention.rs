//! What a rank computes alone: norms, rotary positions, attention over its heads. f32 throughout.

use crate::{Config, Shard};

/// The keys and values of one sequence in one layer, `[tokens, KV heads of this rank, head_dim]` each.
#[derive(Clone, Debug, Default)]
pub(crate) struct Cache {
    keys: Vec<f32>,
    values: Vec<f32>,
}

/// `x / sqrt(mean(x^2) + epsilon) * weight` over each row.
pub(crate) fn rms_norm(x: &[f32], weight: &[f32], epsilon: f32) -> Vec<f32> {
    let mut y = Vec::with_capacity(x.len());
    for row in x.chunks_exact(weight.len()) {
        let factor = (dot(row, row) / row.len() as f32 + epsilon).sqrt().recip();
        y.extend(row.iter().zip(weight).map(|(x, w)| x * factor * w));
    }
    y
}

/// `silu(gate) * up` for rows that hold both halves.
pub(crate) fn gated(gate_up: &[f32], width: usize) -> Vec<f32> {
    gate_up
        .chunks_exact((2 * width).max(1))
        .flat_map(|row| {
            let (gate, up) = row.split_at(width);
            gate.iter()
                .zip(up)
                .map(|(&g, &u)| g / (1.0 + (-g).exp()) * u)
        })
        .collect()
}

/// A dot product with sixteen sums side by side, which the compiler turns into vectors.
fn dot(a: &[f32], b: &[f32]) -> f32 {
    const LANES: usize = 16;
    let mut sums = [0f32; LANES];
    let (a, a_rest) = a.as_chunks::<LANES>();
    let (b, b_rest) = b.as_chunks::<LANES>();
    for (a, b) in a.iter().zip(b) {
        for lane in 0..LANES {
            sums[lane] += a[lane] * b[lane];
        }
    }
    let rest: f32 = a_rest.iter().zip(b_rest).map(|(a, b)| a * b).sum();
    sums.iter().sum::<f32>() + rest
}

/// Cosines and sines of the rotary angles at one position, for each pair of a head.
fn angles(config: &Config, position: usize) -> Vec<(f32, f32)> {
    (0..config.head_dim / 2)
        .map(|pair| {
            let exponent = -2.0 * pair as f64 / config.head_dim as f64;
            let angle = position as f64 * f64::from(config.rope_base).powf(exponent);
            (angle.cos() as f32, angle.sin() as f32)
        })
        .collect()
}

/// Turns the interleaved pairs of every head in a row.
fn turn(heads: &mut [f32], angles: &[(f32, f32)]) {
    for head in heads.chunks_exact_mut(2 * angles.len()) {
        for (pair, (cos, sin)) in head.as_chunks_mut::<2>().0.iter_mut().zip(angles) {
            let [x, y] = *pair;
            *pair = [x * cos - y * sin, x * sin + y * cos];
        }
    }
}

/// Attends with the heads of one rank for consecutive tokens of one sequence.
///
/// `qkv` holds rows of queries, keys and values, which continue what is in the cache. Returns
/// `[tokens, query heads of this rank, head_dim]`.
pub(crate) fn attend(config: &Config, shard: &Shard, qkv: &[f32], cache: &mut Cache) -> Vec<f32> {
    let dim = config.head_dim;
    let (query_width, kv_width) = (shard.query_heads.len() * dim, shard.kv_heads.len() * dim);
    let kv_head_of = shard.local_kv_heads(config);
    let scale = (dim as f32).sqrt().recip();
    let mut out = Vec::with_capacity(qkv.len());
    for row in qkv.chunks_exact(query_width + 2 * kv_width) {
        let position = cache.keys.len() / kv_width;
        let (queries, kv) = row.split_at(query_width);
        let (keys, values) = kv.split_at(kv_width);
        let angles = angles(config, position);
        let (mut queries, mut keys) = (queries.to_vec(), keys.to_vec());
        turn(&mut queries, &angles);
        turn(&mut keys, &angles);
        cache.keys.extend(keys);
        cache.values.extend(values);
        for (query, &kv_head) in queries.chunks_exact(dim).zip(&kv_head_of) {
            let at = |past: usize| {
                past * kv_width + kv_head * dim..past * kv_width + (kv_head + 1) * dim
            };
            let mut weights: Vec<f32> = (0..=position)
                .map(|past| dot(query, &cache.keys[at(past)]) * scale)
                .collect();
            let most = weights.iter().copied().fold(f32::NEG_INFINITY, f32::max);
            let mut total = 0.0;
            for w in &mut weights {
                *w = (*w - most).exp();
                total += *w;
            }
            let start = out.len();
            out.resize(start + dim, 0.0);
            for (past, w) in weights.iter().enumerate() {
                let w = w / total;
                for (o, v) in out[start..].iter_mut().zip(&cache.values[at(past)]) {
                    *o += w * v;
                }
            }
        }
    }
    out
}
