//! What a rank does alone: attention with its heads, of candle's operations.

use candle_core::{D, DType, Device, Result, Tensor};
use candle_nn::{ops::softmax_last_dim, rotary_emb::rope};

const HEADS: usize = 64;
const KV_HEADS: usize = 8;
const HEAD_DIM: usize = 128;
const ROPE_BASE: f64 = 500_000.0;

/// Rows of a prompt that attend at a time: scores of all rows at once would take gigabytes.
const ROWS: usize = 1024;

/// A rank's heads.
pub struct Attention {
    heads: usize,
    kv_heads: usize,
    /// Cosines and sines, `[positions, HEAD_DIM / 2]`, bf16.
    angles: (Tensor, Tensor),
    /// What a row of a piece must not see of the piece itself, `[ROWS, ROWS]`.
    mask: Tensor,
}

/// Keys and values of a batch, `[batch, KV heads, tokens, HEAD_DIM]`; the last token's place is that of the step.
pub struct Past(Option<(Tensor, Tensor)>);

impl Past {
    /// A prompt has none.
    pub const fn none() -> Self {
        Self(None)
    }
}

impl Attention {
    /// For so many ranks and positions.
    pub fn new(size: usize, place: &Device, positions: usize) -> Result<Self> {
        let pairs = HEAD_DIM / 2;
        let angle = |i: usize| {
            let exponent = -2.0 * (i % pairs) as f64 / HEAD_DIM as f64;
            (i / pairs) as f64 * ROPE_BASE.powf(exponent)
        };
        let table = |of: fn(f64) -> f64| {
            let values: Vec<f32> = (0..positions * pairs)
                .map(|i| of(angle(i)) as f32)
                .collect();
            Tensor::from_vec(values, (positions, pairs), place)?.to_dtype(DType::BF16)
        };
        let hidden = |i: usize| {
            if i % ROWS > i / ROWS {
                f32::NEG_INFINITY
            } else {
                0.0
            }
        };
        let mask: Vec<f32> = (0..ROWS * ROWS).map(hidden).collect();
        Ok(Self {
            heads: HEADS / size,
            kv_heads: KV_HEADS / size,
            angles: (table(f64::cos)?, table(f64::sin)?),
            mask: Tensor::from_vec(mask, (ROWS, ROWS), place)?.to_dtype(DType::BF16)?,
        })
    }

    /// Columns of what the rank attends with.
    pub const fn width(&self) -> usize {
        self.heads * HEAD_DIM
    }

    /// Columns of queries, keys and values.
    pub const fn qkv_width(&self) -> usize {
        (self.heads + 2 * self.kv_heads) * HEAD_DIM
    }

    /// Random keys and values.
    pub fn past(&self, batch: usize, tokens: usize, place: &Device) -> Result<Past> {
        let dims = (batch, self.kv_heads, tokens, HEAD_DIM);
        let random = || Tensor::randn(0f32, 1.0, dims, place)?.to_dtype(DType::BF16);
        Ok(Past(Some((random()?, random()?))))
    }

    /// Queries, keys and values of `[batch, tokens, width]`: `[batch, heads, tokens, HEAD_DIM]` each, the first two turned by their
    /// positions from `first` on.
    fn parts(&self, qkv: &Tensor, first: usize) -> Result<[Tensor; 3]> {
        let (batch, tokens, _) = qkv.dims3()?;
        let part = |from: usize, heads: usize| {
            let part = qkv.narrow(2, from * HEAD_DIM, heads * HEAD_DIM)?;
            let part = part.reshape((batch, tokens, heads, HEAD_DIM))?;
            part.transpose(1, 2)?.contiguous()
        };
        let (cos, sin) = (&self.angles.0, &self.angles.1);
        let (cos, sin) = (cos.narrow(0, first, tokens)?, sin.narrow(0, first, tokens)?);
        Ok([
            rope(&part(0, self.heads)?, &cos, &sin)?,
            rope(&part(self.heads, self.kv_heads)?, &cos, &sin)?,
            part(self.heads + self.kv_heads, self.kv_heads)?,
        ])
    }

    /// A prompt's rows, `[tokens, width]`, of queries, keys and values: what each attends to, `[tokens, own heads]`.
    pub fn prompt(&self, qkv: &Tensor) -> Result<Tensor> {
        let (tokens, group) = (qkv.dim(0)?, self.heads / self.kv_heads);
        let [queries, keys, values] = self.parts(&qkv.unsqueeze(0)?, 0)?;
        // Queries of one head of keys side by side.
        let queries = queries.reshape((self.kv_heads, group, tokens, HEAD_DIM))?;
        let (keys, values) = (keys.squeeze(0)?, values.squeeze(0)?);
        let mut out = Vec::new();
        for first in (0..tokens).step_by(ROWS) {
            let rows = ROWS.min(tokens - first);
            let queries = queries.narrow(2, first, rows)?.contiguous()?;
            let queries = queries.reshape((self.kv_heads, group * rows, HEAD_DIM))?;
            let seen = first + rows;
            let keys = keys.narrow(1, 0, seen)?.transpose(1, 2)?;
            let scores = (queries.matmul(&keys)? / (HEAD_DIM as f64).sqrt())?;
            let scores = scores.reshape((self.kv_heads, group, rows, seen))?;
            let own = scores.narrow(D::Minus1, first, rows)?;
            let mask = self.mask.narrow(0, 0, rows)?.narrow(1, 0, rows)?;
            let own = own.broadcast_add(&mask)?;
            let scores = match first {
                0 => own,
                _ => Tensor::cat(&[&scores.narrow(D::Minus1, 0, first)?, &own], D::Minus1)?,
            };
            let weights = softmax_last_dim(&scores.contiguous()?)?;
            let weights = weights.reshape((self.kv_heads, group * rows, seen))?;
            let attended = weights.matmul(&values.narrow(1, 0, seen)?.contiguous()?)?;
            let attended = attended.reshape((self.heads, rows, HEAD_DIM))?;
            out.push(attended.transpose(0, 1)?.reshape((rows, self.width()))?);
        }
        Tensor::cat(&out, 0)
    }

    /// A token of each sequence, `[batch, width]`, which is the last of its past: `[batch, own heads]`, and what was made on the way, for who would
    /// rather drop it later.
    pub fn step(&self, qkv: &Tensor, past: &Past) -> Result<(Tensor, [Tensor; 4])> {
        let Past(Some((keys, values))) = past else {
            candle_core::bail!("a step has a past");
        };
        let (batch, tokens) = (keys.dim(0)?, keys.dim(2)?);
        let [queries, key, value] = self.parts(&qkv.unsqueeze(1)?, tokens - 1)?;
        keys.slice_set(&key, 2, tokens - 1)?;
        values.slice_set(&value, 2, tokens - 1)?;
        drop((key, value));
        let group = self.heads / self.kv_heads;
        let queries = queries.reshape((batch, self.kv_heads, group, HEAD_DIM))?;
        let scores = queries.matmul(&keys.transpose(2, 3)?)?;
        let scaled = (&scores / (HEAD_DIM as f64).sqrt())?;
        let weights = softmax_last_dim(&scaled)?;
        let attended = weights.matmul(values)?;
        let attended = attended.reshape((batch, self.width()))?;
        Ok((attended, [queries, scores, scaled, weights]))
    }
}
