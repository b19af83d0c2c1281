//! What a rank computes alone: norms, rotary positions, attention over its heads. In f32, whatever type goes in and out.

use crate::{Config, Shard};
use candle_core::{D, DType, Device, Result, Tensor};

/// `x / sqrt(mean(x^2) + epsilon) * weight` over each row of `[rows, hidden]`.
pub(crate) fn rms_norm(x: &Tensor, weight: &Tensor, epsilon: f32) -> Result<Tensor> {
    if x.dim(0)? == 0 {
        return Ok(x.clone());
    }
    let wide = x.to_dtype(DType::F32)?;
    let mean = wide.sqr()?.mean_keepdim(D::Minus1)?;
    let root = (mean + f64::from(epsilon))?.sqrt()?;
    let normed = wide.broadcast_div(&root)?.broadcast_mul(weight)?;
    normed.to_dtype(x.dtype())
}

/// The keys and values of one sequence in one layer, `[KV heads of this rank, tokens, head_dim]` each, in f32.
#[derive(Clone, Debug, Default)]
pub(crate) struct Cache(Option<(Tensor, Tensor)>);

impl Cache {
    /// Tokens so far.
    fn tokens(&self) -> Result<usize> {
        self.0.as_ref().map_or(Ok(0), |(keys, _)| keys.dim(1))
    }

    /// Puts new tokens behind the others; returns all.
    fn extend(&mut self, keys: Tensor, values: Tensor) -> Result<(Tensor, Tensor)> {
        let all = match &self.0 {
            Some((k, v)) => (Tensor::cat(&[k, &keys], 1)?, Tensor::cat(&[v, &values], 1)?),
            None => (keys, values),
        };
        self.0 = Some(all.clone());
        Ok(all)
    }
}

/// The heads of one rank.
pub(crate) struct Heads {
    query: usize,
    kv: usize,
    dim: usize,
    /// For each query head, which of the rank's KV heads it attends with.
    kv_of: Tensor,
    /// Cosines and sines of the rotary angles, `[positions, head_dim / 2]` each.
    angles: (Tensor, Tensor),
}

impl Heads {
    /// For sequences of at most so many tokens.
    pub(crate) fn new(
        config: &Config,
        shard: &Shard,
        positions: usize,
        place: &Device,
    ) -> Result<Self> {
        let pairs = config.head_dim / 2;
        let angle = |i: usize| {
            let exponent = -2.0 * (i % pairs) as f64 / config.head_dim as f64;
            (i / pairs) as f64 * f64::from(config.rope_base).powf(exponent)
        };
        let table = |of: fn(f64) -> f64| {
            let values: Vec<f32> = (0..positions * pairs)
                .map(|i| of(angle(i)) as f32)
                .collect();
            Tensor::from_vec(values, (positions, pairs), place)
        };
        let kv_of = shard.local_kv_heads(config);
        let kv_of: Vec<u32> = kv_of.into_iter().map(|head| head as u32).collect();
        Ok(Self {
            query: shard.query_heads.len(),
            kv: shard.kv_heads.len(),
            dim: config.head_dim,
            kv_of: Tensor::new(kv_of, place)?,
            angles: (table(f64::cos)?, table(f64::sin)?),
        })
    }

    /// Attends for consecutive tokens of one sequence.
    ///
    /// `qkv` holds rows of queries, keys and values, which continue what is in the cache. Returns
    /// `[tokens, query heads of this rank * head_dim]`.
    pub(crate) fn attend(&self, qkv: &Tensor, cache: &mut Cache) -> Result<Tensor> {
        let (rows, past) = (qkv.dim(0)?, cache.tokens()?);
        let wide = qkv.to_dtype(DType::F32)?;
        let heads = |first: usize, count: usize| {
            let part = wide.narrow(1, first * self.dim, count * self.dim)?;
            part.reshape((rows, count, self.dim))?
                .transpose(0, 1)?
                .contiguous()
        };
        let queries = self.turn(&heads(0, self.query)?, past)?;
        let keys = self.turn(&heads(self.query, self.kv)?, past)?;
        let values = heads(self.query + self.kv, self.kv)?;
        let (keys, values) = cache.extend(keys, values)?;
        let keys = keys.index_select(&self.kv_of, 0)?;
        let values = values.index_select(&self.kv_of, 0)?;
        let scores = queries.matmul(&keys.transpose(1, 2)?)?;
        let mut scores = (scores / (self.dim as f64).sqrt())?;
        if rows > 1 {
            let mask: Vec<f32> = (0..rows)
                .flat_map(|row| (0..past + rows).map(move |at| (row, at)))
                .map(|(row, at)| {
                    if at > past + row {
                        f32::NEG_INFINITY
                    } else {
                        0.0
                    }
                })
                .collect();
            let mask = Tensor::from_vec(mask, (rows, past + rows), qkv.device())?;
            scores = scores.broadcast_add(&mask)?;
        }
        let scores = scores
            .broadcast_sub(&scores.max_keepdim(D::Minus1)?)?
            .exp()?;
        let weights = scores.broadcast_div(&scores.sum_keepdim(D::Minus1)?)?;
        let attended = weights.matmul(&values)?.transpose(0, 1)?;
        let attended = attended.reshape((rows, self.query * self.dim))?;
        attended.to_dtype(qkv.dtype())
    }

    /// Turns the interleaved pairs of `[heads, rows, head_dim]`, whose first row is at position `past`.
    fn turn(&self, x: &Tensor, past: usize) -> Result<Tensor> {
        let (heads, rows, dim) = x.dims3()?;
        let pairs = x.reshape((heads, rows, dim / 2, 2))?;
        let (re, im) = (
            pairs.narrow(3, 0, 1)?.squeeze(3)?,
            pairs.narrow(3, 1, 1)?.squeeze(3)?,
        );
        let (cos, sin) = (
            self.angles.0.narrow(0, past, rows)?,
            self.angles.1.narrow(0, past, rows)?,
        );
        let turned_re = (re.broadcast_mul(&cos)? - im.broadcast_mul(&sin)?)?;
        let turned_im = (re.broadcast_mul(&sin)? + im.broadcast_mul(&cos)?)?;
        Tensor::stack(&[turned_re, turned_im], 3)?.reshape((heads, rows, dim))
    }
}
