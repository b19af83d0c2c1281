use std::fmt;

use super::Config;
use crate::{Error, Result};

/// One of a layer's seven linears.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Projection {
    /// Hidden state to query heads, `[heads * head_dim, hidden]`.
    Query,
    /// Hidden state to key heads, `[kv_heads * head_dim, hidden]`.
    Key,
    /// Hidden state to value heads, `[kv_heads * head_dim, hidden]`.
    Value,
    /// Attended heads back to the hidden state, `[hidden, heads * head_dim]`.
    Output,
    /// The feed-forward's gated half, `[feed_forward, hidden]`.
    Gate,
    /// The feed-forward's linear half, `[feed_forward, hidden]`.
    Up,
    /// Feed-forward back to the hidden state, `[hidden, feed_forward]`.
    Down,
}

impl Projection {
    /// All seven, in the order of a layer's forward pass.
    pub const ALL: [Self; 7] = [
        Self::Query,
        Self::Key,
        Self::Value,
        Self::Output,
        Self::Gate,
        Self::Up,
        Self::Down,
    ];

    /// The name that LoRA checkpoints and papers use: `q`, `k`, `v`, `o`, `gate`, `up`, `down`.
    pub fn name(self) -> &'static str {
        match self {
            Self::Query => "q",
            Self::Key => "k",
            Self::Value => "v",
            Self::Output => "o",
            Self::Gate => "gate",
            Self::Up => "up",
            Self::Down => "down",
        }
    }

    /// `[out, in]`.
    pub fn shape(self, config: &Config) -> [usize; 2] {
        match self {
            Self::Query => [config.query_width(), config.hidden],
            Self::Key | Self::Value => [config.kv_width(), config.hidden],
            Self::Output => [config.hidden, config.query_width()],
            Self::Gate | Self::Up => [config.feed_forward, config.hidden],
            Self::Down => [config.hidden, config.feed_forward],
        }
    }
}

/// Names one tensor of a model. Displays as the name that GGUF files give it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum TensorId {
    /// The embedding and, tied to it, the head: `[vocabulary, hidden]`.
    Embedding,
    /// The norm before the head: `[1, hidden]`.
    OutputNorm,
    /// The norm before a layer's attention: `[1, hidden]`.
    AttentionNorm(usize),
    /// The norm before a layer's feed-forward: `[1, hidden]`.
    FeedForwardNorm(usize),
    /// A layer's linear: `[out, in]`.
    Linear(usize, Projection),
}

impl TensorId {
    /// Every tensor of a model, in the order of the forward pass.
    pub fn all(config: &Config) -> impl Iterator<Item = Self> {
        let layer = |layer| {
            let linears = Projection::ALL
                .into_iter()
                .map(move |projection| Self::Linear(layer, projection));
            [Self::AttentionNorm(layer), Self::FeedForwardNorm(layer)]
                .into_iter()
                .chain(linears)
        };
        [Self::Embedding]
            .into_iter()
            .chain((0..config.layers).flat_map(layer))
            .chain([Self::OutputNorm])
    }

    /// `[rows, columns]`; a vector is one row.
    ///
    /// # Errors
    /// [`Error::Field`] when the model has no such layer.
    pub fn shape(self, config: &Config) -> Result<[usize; 2]> {
        match self {
            Self::AttentionNorm(layer) | Self::FeedForwardNorm(layer) | Self::Linear(layer, _)
                if layer >= config.layers =>
            {
                Err(Error::field(
                    "layer",
                    layer,
                    format!("below {}", config.layers),
                ))
            }
            Self::Embedding => Ok([config.vocabulary, config.hidden]),
            Self::OutputNorm | Self::AttentionNorm(_) | Self::FeedForwardNorm(_) => {
                Ok([1, config.hidden])
            }
            Self::Linear(_, projection) => Ok(projection.shape(config)),
        }
    }
}

impl fmt::Display for TensorId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (layer, part) = match *self {
            Self::Embedding => return f.write_str("token_embd.weight"),
            Self::OutputNorm => return f.write_str("output_norm.weight"),
            Self::AttentionNorm(layer) => (layer, "attn_norm"),
            Self::FeedForwardNorm(layer) => (layer, "ffn_norm"),
            Self::Linear(layer, projection) => {
                let part = match projection {
                    Projection::Query => "attn_q",
                    Projection::Key => "attn_k",
                    Projection::Value => "attn_v",
                    Projection::Output => "attn_output",
                    Projection::Gate => "ffn_gate",
                    Projection::Up => "ffn_up",
                    Projection::Down => "ffn_down",
                };
                (layer, part)
            }
        };
        write!(f, "blk.{layer}.{part}.weight")
    }
}
