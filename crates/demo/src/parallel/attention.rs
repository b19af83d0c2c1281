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

/// The keys and values of one sequence in one layer, `[KV heads of this rank, most tokens, head_dim]` each, in f32. They stay where they are,
/// so that a step that writes into them can be captured.
#[derive(Clone, Debug)]
pub(crate) struct Cache {
    keys: Tensor,
    values: Tensor,
}

/// What a token's place in its sequence decides, in all layers: how it is turned, where its keys and values go, and what it sees.
pub(crate) struct Spot {
    /// `[1, head_dim / 2]` each.
    angles: (Tensor, Tensor),
    /// The place, once for each number that goes there: `[KV heads, 1, head_dim]`.
    index: Tensor,
    /// Negative infinity for places that have no token yet, `[span]`.
    mask: Tensor,
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
    /// All positions, u32.
    positions: Tensor,
    /// What a mask adds: to what is seen, and to what is not.
    masks: [Tensor; 2],
}

/// Places that a step looks at, of which the first so many have a token: a step of many tokens has the shapes of the last one, until their
/// number doubles, and what is masked is never more than what is not, but in short sequences.
pub(crate) fn span(tokens: usize, most: usize) -> usize {
    const LEAST: usize = 64;
    tokens.next_power_of_two().max(LEAST).min(most)
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
            positions: Tensor::arange(0, positions as u32, place)?,
            masks: [
                Tensor::new(0f32, place)?,
                Tensor::new(f32::NEG_INFINITY, place)?,
            ],
        })
    }

    /// Tokens that a sequence can have.
    pub(crate) fn most(&self) -> usize {
        self.positions.elem_count()
    }

    /// Of a sequence without tokens.
    pub(crate) fn cache(&self) -> Result<Cache> {
        let zeros = || {
            let dims = (self.kv, self.most(), self.dim);
            Tensor::zeros(dims, DType::F32, self.positions.device())
        };
        Ok(Cache {
            keys: zeros()?,
            values: zeros()?,
        })
    }

    /// Of the token at a position, u32 `[1]`, which is below `span`. No number is read or uploaded.
    pub(crate) fn spot(&self, position: &Tensor, span: usize) -> Result<Spot> {
        let (cos, sin) = &self.angles;
        let index = position.reshape((1, 1, 1))?;
        let behind = self.positions.narrow(0, 0, span)?;
        let behind = behind.broadcast_gt(position)?;
        let [seen, hidden] = &self.masks;
        let mask = behind.where_cond(&hidden.broadcast_as(span)?, &seen.broadcast_as(span)?)?;
        Ok(Spot {
            angles: (
                cos.index_select(position, 0)?,
                sin.index_select(position, 0)?,
            ),
            index: index.broadcast_as((self.kv, 1, self.dim))?.contiguous()?,
            mask,
        })
    }

    /// Attends for a whole prompt, and keeps its keys and values.
    ///
    /// `qkv` holds a row of queries, keys and values for each token. Returns `[tokens, query heads of this rank * head_dim]`.
    pub(crate) fn prompt(&self, qkv: &Tensor, cache: &Cache) -> Result<Tensor> {
        let rows = qkv.dim(0)?;
        let (cos, sin) = &self.angles;
        let angles = (cos.narrow(0, 0, rows)?, sin.narrow(0, 0, rows)?);
        let [queries, keys, values] = self.parts(qkv, &angles)?;
        cache.keys.slice_set(&keys, 1, 0)?;
        cache.values.slice_set(&values, 1, 0)?;
        let hidden = |i: usize| match i % rows > i / rows {
            true => f32::NEG_INFINITY,
            false => 0.0,
        };
        let mask: Vec<f32> = (0..rows * rows).map(hidden).collect();
        let mask = Tensor::from_vec(mask, (rows, rows), qkv.device())?;
        let attended = self.attend(&queries, (&keys, &values), &mask)?;
        attended.to_dtype(qkv.dtype())
    }

    /// The same for the token of a spot, `[1, ..]`, behind those that are in the cache. All shapes and addresses are those of any other step of
    /// the same span.
    pub(crate) fn step(&self, qkv: &Tensor, cache: &Cache, spot: &Spot) -> Result<Tensor> {
        let [queries, keys, values] = self.parts(qkv, &spot.angles)?;
        cache.keys.scatter_set(&spot.index, &keys, 1)?;
        cache.values.scatter_set(&spot.index, &values, 1)?;
        let span = spot.mask.elem_count();
        let keys = cache.keys.narrow(1, 0, span)?.contiguous()?;
        let values = cache.values.narrow(1, 0, span)?.contiguous()?;
        let attended = self.attend(&queries, (&keys, &values), &spot.mask)?;
        attended.to_dtype(qkv.dtype())
    }

    /// Queries, keys and values, `[heads, rows, head_dim]` each, the first two turned.
    fn parts(&self, qkv: &Tensor, angles: &(Tensor, Tensor)) -> Result<[Tensor; 3]> {
        let rows = qkv.dim(0)?;
        let wide = qkv.to_dtype(DType::F32)?;
        let heads = |first: usize, count: usize| {
            let part = wide.narrow(1, first * self.dim, count * self.dim)?;
            part.reshape((rows, count, self.dim))?
                .transpose(0, 1)?
                .contiguous()
        };
        Ok([
            turn(&heads(0, self.query)?, angles)?,
            turn(&heads(self.query, self.kv)?, angles)?,
            heads(self.query + self.kv, self.kv)?,
        ])
    }

    /// `[query heads, rows, head_dim]` of queries with `[KV heads, seen, head_dim]` of keys and values, where scores have a mask added that
    /// is `[seen]` or `[rows, seen]`. Returns `[rows, query heads * head_dim]`.
    fn attend(
        &self,
        queries: &Tensor,
        (keys, values): (&Tensor, &Tensor),
        mask: &Tensor,
    ) -> Result<Tensor> {
        let keys = keys.index_select(&self.kv_of, 0)?;
        let values = values.index_select(&self.kv_of, 0)?;
        let scores = queries.matmul(&keys.transpose(1, 2)?)?;
        let scores = (scores / (self.dim as f64).sqrt())?.broadcast_add(mask)?;
        let scores = scores
            .broadcast_sub(&scores.max_keepdim(D::Minus1)?)?
            .exp()?;
        let weights = scores.broadcast_div(&scores.sum_keepdim(D::Minus1)?)?;
        let attended = weights.matmul(&values)?.transpose(0, 1)?;
        attended.reshape((queries.dim(1)?, self.query * self.dim))
    }
}

/// Turns the interleaved pairs of `[heads, rows, head_dim]` by angles of `[rows, head_dim / 2]`.
fn turn(x: &Tensor, (cos, sin): &(Tensor, Tensor)) -> Result<Tensor> {
    let (heads, rows, dim) = x.dims3()?;
    let pairs = x.reshape((heads, rows, dim / 2, 2))?;
    let (re, im) = (
        pairs.narrow(3, 0, 1)?.squeeze(3)?,
        pairs.narrow(3, 1, 1)?.squeeze(3)?,
    );
    let turned_re = (re.broadcast_mul(cos)? - im.broadcast_mul(sin)?)?;
    let turned_im = (re.broadcast_mul(sin)? + im.broadcast_mul(cos)?)?;
    Tensor::stack(&[turned_re, turned_im], 3)?.reshape((heads, rows, dim))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Synthetic, shard};

    const TOKENS: usize = 140;

    fn values(x: &Tensor) -> Vec<f32> {
        x.flatten_all().unwrap().to_vec1().unwrap()
    }

    /// The greatest difference of two rows.
    fn off(a: &Tensor, b: &Tensor) -> f32 {
        let (a, b) = (values(a), values(b));
        assert_eq!(a.len(), b.len());
        let off = a.iter().zip(&b).map(|(a, b)| (a - b).abs());
        off.fold(0.0, f32::max)
    }

    /// Room for a few more tokens than there are, in which great numbers lie.
    fn poisoned(heads: &Heads) -> Cache {
        let cache = heads.cache().unwrap();
        for part in [&cache.keys, &cache.values] {
            let poison = Tensor::randn(0f32, 1e3, part.dims(), part.device()).unwrap();
            part.slice_set(&poison, 1, 0).unwrap();
        }
        cache
    }

    /// Step by step, from several beginnings on and across the ends of spans, what a prompt of all tokens gives. Without the mask it is not so.
    #[test]
    fn steps_attend_as_the_prompt_does_that_they_make() {
        let config = Synthetic::small_config();
        for shard in shard::plan(&config, 4).unwrap() {
            let place = &Device::Cpu;
            let heads = Heads::new(&config, &shard, TOKENS + 7, place).unwrap();
            let width = (heads.query + 2 * heads.kv) * heads.dim;
            let qkv = Tensor::randn(0f32, 1.0, (TOKENS, width), place).unwrap();
            let want = heads.prompt(&qkv, &poisoned(&heads)).unwrap();
            for read in [1, 63, 100] {
                let cache = poisoned(&heads);
                let prompt = qkv.narrow(0, 0, read).unwrap();
                let begun = heads.prompt(&prompt, &cache).unwrap();
                assert!(off(&begun, &want.narrow(0, 0, read).unwrap()) < 1e-4);
                for at in read..TOKENS {
                    let row = qkv.narrow(0, at, 1).unwrap();
                    let position = Tensor::new(&[at as u32], place).unwrap();
                    let span = span(at + 1, heads.most());
                    let spot = heads.spot(&position, span).unwrap();
                    let got = heads.step(&row, &cache, &spot).unwrap();
                    let want = want.narrow(0, at, 1).unwrap();
                    let off_by = off(&got, &want);
                    assert!(off_by < 1e-4, "token {at} of {read}: {off_by}");
                    // Of so many great numbers one has a great score.
                    if span - (at + 1) >= 40 {
                        let mask = spot.mask.zeros_like().unwrap();
                        let open = Spot { mask, ..spot };
                        let got = heads.step(&row, &cache, &open).unwrap();
                        let off_by = off(&got, &want);
                        assert!(off_by > 1.0, "token {at} of {read} unmasked: {off_by}");
                    }
                }
            }
        }
    }

    #[test]
    fn a_span_doubles_as_a_sequence_outgrows_it() {
        for (tokens, most, want) in [
            (1, 20, 20),
            (1, 500, 64),
            (64, 500, 64),
            (65, 500, 128),
            (129, 500, 256),
            (257, 500, 500),
            (500, 500, 500),
        ] {
            assert_eq!(span(tokens, most), want, "{tokens} of {most}");
        }
    }
}
