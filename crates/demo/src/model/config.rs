use super::{Metadata, TensorId};
use crate::{Error, Result};

/// The dimensions and constants of a llama-architecture model.
#[derive(Clone, Debug, PartialEq)]
pub struct Config {
    /// Transformer layers.
    pub layers: usize,
    /// Width of the hidden state.
    pub hidden: usize,
    /// Query heads.
    pub heads: usize,
    /// Key and value heads; each serves `heads / kv_heads` query heads.
    pub kv_heads: usize,
    /// Width of one head.
    pub head_dim: usize,
    /// Width of the feed-forward's inner state.
    pub feed_forward: usize,
    /// Tokens that the model knows, which is the embedding's rows.
    pub vocabulary: usize,
    /// Base of the rotary frequencies.
    pub rope_base: f32,
    /// What the RMS norms add to the mean square.
    pub rms_epsilon: f32,
    /// Longest sequence in tokens that the model was made for.
    pub context: usize,
}

impl Config {
    /// Reads the fields that GGUF defines for `general.architecture = llama`, and refuses what the
    /// demo does not compute: scaled or partial rotary positions, and other architectures.
    ///
    /// # Errors
    /// [`Error::MissingField`] or [`Error::Field`], naming the field.
    pub fn from_metadata(metadata: &Metadata) -> Result<Self> {
        let architecture = metadata.text("general.architecture")?;
        if architecture != "llama" {
            return Err(Error::field("general.architecture", architecture, "llama"));
        }
        if let Some(scaling) = metadata.optional_text("llama.rope.scaling.type")?
            && scaling != "none"
        {
            return Err(Error::field("llama.rope.scaling.type", scaling, "none"));
        }
        let hidden = metadata.count("llama.embedding_length")?;
        let heads = metadata.count("llama.attention.head_count")?;
        let rope_dim = metadata.optional_count("llama.rope.dimension_count")?;
        let key_dim = metadata.optional_count("llama.attention.key_length")?;
        let value_dim = metadata.optional_count("llama.attention.value_length")?;
        let head_dim = key_dim.or_else(|| hidden.checked_div(heads)).unwrap_or(0);
        let vocabulary = match metadata.optional_count("llama.vocab_size")? {
            Some(vocabulary) => vocabulary,
            None => metadata.texts("tokenizer.ggml.tokens")?.len(),
        };
        let config = Self {
            layers: metadata.count("llama.block_count")?,
            hidden,
            heads,
            kv_heads: metadata
                .optional_count("llama.attention.head_count_kv")?
                .unwrap_or(heads),
            head_dim,
            feed_forward: metadata.count("llama.feed_forward_length")?,
            vocabulary,
            rope_base: metadata.real("llama.rope.freq_base")?,
            rms_epsilon: metadata.real("llama.attention.layer_norm_rms_epsilon")?,
            context: metadata.count("llama.context_length")?,
        };
        config.check()?;
        for (field, dim) in [
            ("llama.rope.dimension_count", rope_dim),
            ("llama.attention.value_length", value_dim),
        ] {
            if let Some(dim) = dim.filter(|&dim| dim != head_dim) {
                return Err(Error::field(
                    field,
                    dim,
                    format!("the heads' width, {head_dim}"),
                ));
            }
        }
        Ok(config)
    }

    /// Checks that the dimensions fit each other and are of a size that sums of them cannot
    /// overflow.
    ///
    /// # Errors
    /// [`Error::Field`], naming the field.
    pub fn check(&self) -> Result<()> {
        for (field, got, most) in [
            ("layers", self.layers, 1 << 10),
            ("hidden", self.hidden, 1 << 20),
            ("heads", self.heads, 1 << 10),
            ("kv_heads", self.kv_heads, 1 << 10),
            ("head_dim", self.head_dim, 1 << 10),
            ("feed_forward", self.feed_forward, 1 << 20),
            ("vocabulary", self.vocabulary, 1 << 24),
            ("context", self.context, 1 << 24),
        ] {
            if !(1..=most).contains(&got) {
                return Err(Error::field(field, got, format!("1 to {most}")));
            }
        }
        if !self.heads.is_multiple_of(self.kv_heads) {
            return Err(Error::field(
                "kv_heads",
                self.kv_heads,
                format!("a divisor of the {} heads", self.heads),
            ));
        }
        if !self.head_dim.is_multiple_of(2) {
            return Err(Error::field(
                "head_dim",
                self.head_dim,
                "an even number: rotary positions turn pairs",
            ));
        }
        if !(self.rope_base.is_finite() && self.rope_base > 0.0) {
            return Err(Error::field(
                "rope_base",
                self.rope_base,
                "positive and finite",
            ));
        }
        if !(self.rms_epsilon.is_finite() && self.rms_epsilon >= 0.0) {
            return Err(Error::field(
                "rms_epsilon",
                self.rms_epsilon,
                "zero or positive, and finite",
            ));
        }
        Ok(())
    }

    /// Width of all query heads together.
    pub fn query_width(&self) -> usize {
        self.heads * self.head_dim
    }

    /// Width of all key heads, or of all value heads, together.
    pub fn kv_width(&self) -> usize {
        self.kv_heads * self.head_dim
    }

    /// The key and value head that query head `head` attends with.
    pub fn kv_head_of(&self, head: usize) -> usize {
        head / (self.heads / self.kv_heads)
    }

    /// Parameters of the whole model; the tied embedding counts once.
    pub fn parameters(&self) -> u64 {
        let size = |id: TensorId| {
            id.shape(self)
                .map_or(0, |[rows, columns]| rows as u64 * columns as u64)
        };
        TensorId::all(self).map(size).sum()
    }
}
