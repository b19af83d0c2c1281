//! The oracle: a llama-architecture model evaluated on one rank, in plain loops, as the definition
//! reads.
//!
//! Weights and what passes between operations are f32. Every sum (dot products, norms, attention)
//! is accumulated in f64, in an order that depends on nothing but the operation's own width: a
//! token's logits are the same bits whether it came in a prompt or alone.

mod math;

use std::ops::Range;

pub use math::argmax;

use crate::model::{Config, LayerWeights, Matrix, Projection, Source, Weights};
use crate::{Adapter, AdapterSpec, Error, Result};

/// A model with its adapters, and the sequence that it has read so far.
#[derive(Debug)]
pub struct Reference {
    weights: Weights,
    adapters: Vec<[Option<Adapter>; 7]>,
    cache: Vec<LayerCache>,
    position: usize,
}

/// The keys and values of a layer, `[tokens, kv_heads * head_dim]` each.
#[derive(Clone, Debug, Default)]
struct LayerCache {
    keys: Vec<f32>,
    values: Vec<f32>,
}

/// Generates greedily after a prompt, until `end` (which is not returned) or `max_tokens`.
///
/// # Errors
/// As [`Reference::new`] and [`Reference::generate`].
pub fn generate(
    source: &dyn Source,
    prompt: &[u32],
    max_tokens: usize,
    end: u32,
) -> Result<Vec<u32>> {
    Reference::new(source)?.generate(prompt, max_tokens, end)
}

impl Reference {
    /// Loads a whole model.
    ///
    /// # Errors
    /// As [`Source::tensor`].
    pub fn new(source: &dyn Source) -> Result<Self> {
        let weights = Weights::load(source)?;
        let layers = weights.config.layers;
        let adapters = (0..layers).map(|_| [const { None }; 7]).collect();
        Ok(Self {
            weights,
            adapters,
            cache: vec![LayerCache::default(); layers],
            position: 0,
        })
    }

    /// Puts adapters beside the linears in place of those there were, and forgets the sequence.
    ///
    /// # Errors
    /// As [`Adapter::generate`].
    pub fn set_adapters(&mut self, spec: &AdapterSpec) -> Result<()> {
        let config = &self.weights.config;
        let layer = |layer| {
            let mut adapters = [const { None }; 7];
            for projection in Projection::ALL {
                adapters[projection as usize] = Adapter::generate(spec, config, layer, projection)?;
            }
            Ok(adapters)
        };
        self.adapters = (0..config.layers).map(layer).collect::<Result<_>>()?;
        self.reset();
        Ok(())
    }

    /// The model's dimensions and constants.
    pub fn config(&self) -> &Config {
        &self.weights.config
    }

    /// Tokens read so far.
    pub fn position(&self) -> usize {
        self.position
    }

    /// Forgets the sequence.
    pub fn reset(&mut self) {
        self.cache.fill(LayerCache::default());
        self.position = 0;
    }

    /// Reads tokens, after those read before, and returns the last one's logits, `vocabulary`
    /// values.
    ///
    /// # Errors
    /// [`Error::Field`] when there are no tokens, one of them is not in the vocabulary, or they do
    /// not fit in the context.
    pub fn forward(&mut self, tokens: &[u32]) -> Result<Vec<f32>> {
        let last = tokens.len().saturating_sub(1);
        Ok(self.run(tokens, last..tokens.len())?.into_data())
    }

    /// As [`Reference::forward`], with the logits of every token, `[tokens, vocabulary]`.
    ///
    /// # Errors
    /// As [`Reference::forward`].
    pub fn forward_all(&mut self, tokens: &[u32]) -> Result<Matrix> {
        self.run(tokens, 0..tokens.len())
    }

    /// Forgets the sequence, reads a prompt, and generates greedily until `end` (which is not
    /// returned), `max_tokens`, or the end of the context.
    ///
    /// # Errors
    /// As [`Reference::forward`].
    pub fn generate(&mut self, prompt: &[u32], max_tokens: usize, end: u32) -> Result<Vec<u32>> {
        self.reset();
        let mut logits = self.forward(prompt)?;
        let mut generated = Vec::new();
        while generated.len() < max_tokens {
            let token = argmax(&logits);
            if token == end {
                break;
            }
            generated.push(token);
            if generated.len() == max_tokens || self.position == self.config().context {
                break;
            }
            logits = self.forward(&[token])?;
        }
        Ok(generated)
    }

    fn check(&self, tokens: &[u32]) -> Result<()> {
        let config = &self.weights.config;
        let room = config.context - self.position;
        if tokens.is_empty() || tokens.len() > room {
            return Err(Error::field(
                "number of tokens",
                tokens.len(),
                format!("1 to {room}, the room in the context"),
            ));
        }
        match tokens
            .iter()
            .find(|&&token| token as usize >= config.vocabulary)
        {
            Some(token) => Err(Error::field(
                "token",
                token,
                format!("below {}", config.vocabulary),
            )),
            None => Ok(()),
        }
    }

    fn run(&mut self, tokens: &[u32], logits_of: Range<usize>) -> Result<Matrix> {
        self.check(tokens)?;
        let Self {
            weights,
            adapters,
            cache,
            position,
        } = self;
        let config = &weights.config;
        let width = config.hidden;
        let embed = |&token: &u32| weights.embedding.row(token as usize);
        let mut hidden: Vec<f32> = tokens.iter().flat_map(embed).copied().collect();
        for ((layer, adapters), cache) in weights.layers.iter().zip(adapters).zip(cache) {
            let layer = Layer {
                config,
                weights: layer,
                adapters,
                first_position: *position,
            };
            layer.attention(&mut hidden, cache);
            layer.feed_forward(&mut hidden);
        }
        *position += tokens.len();
        let wanted = &hidden[logits_of.start * width..logits_of.end * width];
        let wanted = math::rms_norm(wanted, &weights.output_norm, config.rms_epsilon);
        Matrix::new(
            logits_of.len(),
            config.vocabulary,
            math::linear(&wanted, &weights.embedding),
        )
    }
}

/// One layer, for tokens that begin at `first_position`. Its activations are `[tokens, width]`,
/// row-major.
struct Layer<'a> {
    config: &'a Config,
    weights: &'a LayerWeights,
    adapters: &'a [Option<Adapter>; 7],
    first_position: usize,
}

impl Layer<'_> {
    fn linear(&self, x: &[f32], projection: Projection) -> Vec<f32> {
        let mut y = math::linear(x, self.weights.linear(projection));
        if let Some(adapter) = &self.adapters[projection as usize] {
            math::add_lora(&mut y, x, adapter);
        }
        y
    }

    fn attention(&self, hidden: &mut [f32], cache: &mut LayerCache) {
        let config = self.config;
        let (head_dim, query_width, kv_width) =
            (config.head_dim, config.query_width(), config.kv_width());
        let x = math::rms_norm(hidden, &self.weights.attention_norm, config.rms_epsilon);
        let mut queries = self.linear(&x, Projection::Query);
        let mut keys = self.linear(&x, Projection::Key);
        for (rows, width) in [(&mut queries, query_width), (&mut keys, kv_width)] {
            for (row, position) in rows.chunks_exact_mut(width).zip(self.first_position..) {
                for head in row.chunks_exact_mut(head_dim) {
                    math::rope(head, position, config.rope_base);
                }
            }
        }
        cache.keys.extend(keys);
        cache.values.extend(self.linear(&x, Projection::Value));

        let mut attended = vec![0.0; queries.len()];
        let rows = queries
            .chunks_exact(query_width)
            .zip(attended.chunks_exact_mut(query_width));
        for ((query, out), position) in rows.zip(self.first_position..) {
            let heads = query
                .chunks_exact(head_dim)
                .zip(out.chunks_exact_mut(head_dim));
            for (head, (query, out)) in heads.enumerate() {
                let start = config.kv_head_of(head) * head_dim;
                let place = |past| past * kv_width + start..past * kv_width + start + head_dim;
                let keys = (0..=position).map(|past| &cache.keys[place(past)]);
                let values = (0..=position).map(|past| &cache.values[place(past)]);
                math::attend(query, keys, values, out);
            }
        }
        math::add(hidden, &self.linear(&attended, Projection::Output));
    }

    fn feed_forward(&self, hidden: &mut [f32]) {
        let x = math::rms_norm(
            hidden,
            &self.weights.feed_forward_norm,
            self.config.rms_epsilon,
        );
        let mut inner = self.linear(&x, Projection::Gate);
        for (gate, up) in inner.iter_mut().zip(self.linear(&x, Projection::Up)) {
            *gate = math::silu(*gate) * up;
        }
        math::add(hidden, &self.linear(&inner, Projection::Down));
    }
}

#[cfg(test)]
mod tests;
