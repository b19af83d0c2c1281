use std::ops::Range;

use rand::Rng;

use super::{Config, Matrix, Source, TensorId, check_range};
use crate::Result;
use crate::adapter::random_stream;

/// A small model of random weights, for runs without a model file. The same seed gives the same
/// weights.
///
/// Each row has its own random stream, so that pieces cost what they hold. The text it writes means
/// nothing.
#[derive(Clone, Debug)]
pub struct Synthetic {
    config: Config,
    seed: u64,
}

impl Synthetic {
    /// A model of the given dimensions.
    ///
    /// # Errors
    /// [`crate::Error::Field`] when the dimensions do not fit each other.
    pub fn new(config: Config, seed: u64) -> Result<Self> {
        config.check()?;
        Ok(Self { config, seed })
    }

    /// Dimensions small enough to run anywhere in no time, with heads that do not divide by most
    /// rank counts: 4 layers, hidden 96, 6 heads and 2 KV heads of 16, feed-forward 256, vocabulary
    /// 512.
    pub fn small_config() -> Config {
        Config {
            layers: 4,
            hidden: 96,
            heads: 6,
            kv_heads: 2,
            head_dim: 16,
            feed_forward: 256,
            vocabulary: 512,
            rope_base: 10_000.0,
            rms_epsilon: 1e-5,
            context: 2048,
        }
    }
}

impl Source for Synthetic {
    fn config(&self) -> &Config {
        &self.config
    }

    fn rows(&self, id: TensorId, rows: Range<usize>) -> Result<Matrix> {
        let [all_rows, columns] = id.shape(&self.config)?;
        check_range(&format!("rows of {id}"), &rows, all_rows)?;
        // Norms are about one; a linear of unit-variance input has unit-variance output.
        let (middle, spread) = match id {
            TensorId::OutputNorm | TensorId::AttentionNorm(_) | TensorId::FeedForwardNorm(_) => {
                (1.0, 0.1)
            }
            TensorId::Embedding | TensorId::Linear(..) => (0.0, (3.0 / columns as f32).sqrt()),
        };
        let mut data = Vec::with_capacity(rows.len() * columns);
        for row in rows.clone() {
            let mut random = random_stream(self.seed, &format!("{id} row {row}"));
            data.extend((0..columns).map(|_| middle + random.random_range(-spread..=spread)));
        }
        Matrix::new(rows.len(), columns, data)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Projection;

    #[test]
    fn the_seed_makes_the_weights() {
        let id = TensorId::Linear(1, Projection::Gate);
        let weights = |seed| {
            Synthetic::new(Synthetic::small_config(), seed)
                .unwrap()
                .tensor(id)
                .unwrap()
        };
        assert_eq!(weights(7), weights(7));
        assert_ne!(weights(7), weights(8));
    }

    #[test]
    fn pieces_agree_with_the_whole() {
        let model = Synthetic::new(Synthetic::small_config(), 1).unwrap();
        let id = TensorId::Linear(0, Projection::Down);
        let whole = model.tensor(id).unwrap();
        assert_eq!(
            model.rows(id, 5..40).unwrap(),
            whole.cut_rows(5..40).unwrap()
        );
        assert_eq!(
            model.columns(id, 100..201).unwrap(),
            whole.cut_columns(100..201).unwrap()
        );
        assert!(model.columns(id, 100..257).is_err());
    }

    #[test]
    fn dimensions_that_do_not_fit_are_refused() {
        let config = Config {
            kv_heads: 4,
            ..Synthetic::small_config()
        };
        assert_eq!(
            Synthetic::new(config, 0).unwrap_err().to_string(),
            "kv_heads is 4, wanted a divisor of the 6 heads"
        );
    }
}
