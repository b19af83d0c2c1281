use super::{Config, Matrix, Projection, Source, TensorId};
use crate::Result;

/// A whole model in memory, in f32: for the single-rank reference.
#[derive(Clone, Debug)]
pub struct Weights {
    /// The model's dimensions and constants.
    pub config: Config,
    /// Embedding and head, `[vocabulary, hidden]`.
    pub embedding: Matrix,
    /// The layers, first to last.
    pub layers: Vec<LayerWeights>,
    /// The norm before the head, `hidden` values.
    pub output_norm: Vec<f32>,
}

/// The weights of one layer.
#[derive(Clone, Debug)]
pub struct LayerWeights {
    /// The norm before attention, `hidden` values.
    pub attention_norm: Vec<f32>,
    /// The norm before the feed-forward, `hidden` values.
    pub feed_forward_norm: Vec<f32>,
    linears: [Matrix; 7],
}

impl Weights {
    /// Loads everything.
    ///
    /// # Errors
    /// As [`Source::tensor`].
    pub fn load(source: &dyn Source) -> Result<Self> {
        let config = source.config().clone();
        Ok(Self {
            embedding: source.tensor(TensorId::Embedding)?,
            layers: (0..config.layers)
                .map(|layer| LayerWeights::load(source, layer))
                .collect::<Result<_>>()?,
            output_norm: source.tensor(TensorId::OutputNorm)?.into_data(),
            config,
        })
    }
}

impl LayerWeights {
    fn load(source: &dyn Source, layer: usize) -> Result<Self> {
        let linear = |projection| source.tensor(TensorId::Linear(layer, projection));
        let [q, k, v, o, gate, up, down] = Projection::ALL.map(linear);
        Ok(Self {
            attention_norm: source.tensor(TensorId::AttentionNorm(layer))?.into_data(),
            feed_forward_norm: source.tensor(TensorId::FeedForwardNorm(layer))?.into_data(),
            linears: [q?, k?, v?, o?, gate?, up?, down?],
        })
    }

    /// One of the layer's linears, `[out, in]`.
    pub fn linear(&self, projection: Projection) -> &Matrix {
        &self.linears[projection as usize]
    }
}
