//! Random LoRA adapters, the same for whoever asks with the same [`AdapterSpec`].

use std::ops::Range;

use rand::rngs::StdRng;
use rand::{Rng, SeedableRng};
use sha2::{Digest, Sha256};

use crate::model::{Config, Matrix, Projection};
use crate::{Error, Result};

/// Which adapters there are: one for every linear of the model, made from the seed.
#[derive(Clone, Debug, PartialEq)]
pub struct AdapterSpec {
    /// Makes the weights.
    pub seed: u64,
    /// Inner width `r` of each adapter.
    pub rank: usize,
    /// Factor on the adapters' contribution.
    pub scale: f32,
    /// The linears that have an adapter, in every layer.
    pub targets: Vec<Projection>,
}

impl AdapterSpec {
    /// Adapters of rank `rank` on all seven linears.
    pub fn new(seed: u64, rank: usize, scale: f32) -> Self {
        Self {
            seed,
            rank,
            scale,
            targets: Projection::ALL.to_vec(),
        }
    }
}

/// A low-rank addition to one linear: `y += scale * (x A) B`
/// ([LoRA](https://arxiv.org/abs/2106.09685)).
#[derive(Clone, Debug, PartialEq)]
pub struct Adapter {
    /// `[in, r]`.
    pub a: Matrix,
    /// `[r, out]`.
    pub b: Matrix,
    /// Factor on the contribution.
    pub scale: f32,
}

impl Adapter {
    /// The adapter of a layer's linear, or `None` where `spec` targets others.
    ///
    /// With unit-variance inputs, `(x A) B` has about unit variance too, so `scale` says how
    /// strongly the adapter speaks beside the linear.
    ///
    /// # Errors
    /// [`Error::Field`] when the rank is zero or wider than the linear, or the layer is not of this
    /// model.
    pub fn generate(
        spec: &AdapterSpec,
        config: &Config,
        layer: usize,
        projection: Projection,
    ) -> Result<Option<Self>> {
        if layer >= config.layers {
            return Err(Error::field(
                "layer",
                layer,
                format!("below {}", config.layers),
            ));
        }
        if !spec.targets.contains(&projection) {
            return Ok(None);
        }
        let [outputs, inputs] = projection.shape(config);
        let widest = outputs.min(inputs);
        if !(1..=widest).contains(&spec.rank) {
            let field = format!("adapter rank for `{}`", projection.name());
            return Err(Error::field(field, spec.rank, format!("1 to {widest}")));
        }
        let matrix = |half: &str, rows: usize, columns: usize| {
            let spread = (3.0 / rows as f32).sqrt();
            let mut random = random_stream(
                spec.seed,
                &format!("adapter {layer} {} {half}", projection.name()),
            );
            let data = (0..rows * columns)
                .map(|_| random.random_range(-spread..=spread))
                .collect();
            Matrix::new(rows, columns, data)
        };
        Ok(Some(Self {
            a: matrix("a", inputs, spec.rank)?,
            b: matrix("b", spec.rank, outputs)?,
            scale: spec.scale,
        }))
    }

    /// The part for a rank that computes the outputs `outputs` from all inputs: all of A, and B's
    /// columns.
    ///
    /// # Errors
    /// [`Error::Field`] when the adapter has no such outputs.
    pub fn cut_outputs(&self, outputs: Range<usize>) -> Result<Self> {
        Ok(Self {
            a: self.a.clone(),
            b: self.b.cut_columns(outputs)?,
            scale: self.scale,
        })
    }

    /// The part for a rank that computes a summand of all outputs from the inputs `inputs`: A's
    /// rows, and all of B.
    ///
    /// # Errors
    /// [`Error::Field`] when the adapter has no such inputs.
    pub fn cut_inputs(&self, inputs: Range<usize>) -> Result<Self> {
        Ok(Self {
            a: self.a.cut_rows(inputs)?,
            b: self.b.clone(),
            scale: self.scale,
        })
    }
}

/// A random stream of its own for every label.
pub(crate) fn random_stream(seed: u64, label: &str) -> StdRng {
    let digest = Sha256::new()
        .chain_update(seed.to_le_bytes())
        .chain_update(label)
        .finalize();
    StdRng::from_seed(digest.into())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Synthetic;

    #[test]
    fn seed_layer_and_projection_make_the_adapter() {
        let config = Synthetic::small_config();
        let make = |seed, layer, projection| {
            Adapter::generate(&AdapterSpec::new(seed, 4, 0.5), &config, layer, projection)
                .unwrap()
                .unwrap()
        };
        let one = make(1, 0, Projection::Key);
        assert_eq!(
            [one.a.rows(), one.a.columns(), one.b.rows(), one.b.columns()],
            [96, 4, 4, 32]
        );
        assert_eq!(one, make(1, 0, Projection::Key));
        for other in [
            make(2, 0, Projection::Key),
            make(1, 1, Projection::Key),
            make(1, 0, Projection::Value),
        ] {
            assert_ne!(one, other);
        }
    }

    #[test]
    fn untargeted_linears_have_none_and_bad_ranks_are_refused() {
        let config = Synthetic::small_config();
        let spec = AdapterSpec {
            targets: vec![Projection::Query],
            ..AdapterSpec::new(1, 33, 1.0)
        };
        assert_eq!(
            Adapter::generate(&spec, &config, 0, Projection::Key).unwrap(),
            None
        );
        let narrow = Adapter::generate(&AdapterSpec::new(1, 33, 1.0), &config, 0, Projection::Key)
            .unwrap_err();
        assert_eq!(
            narrow.to_string(),
            "adapter rank for `k` is 33, wanted 1 to 32"
        );
        let layer = Adapter::generate(&spec, &config, 4, Projection::Query).unwrap_err();
        assert_eq!(layer.to_string(), "layer is 4, wanted below 4");
    }

    #[test]
    fn shards_cut_a_by_inputs_and_b_by_outputs() {
        let config = Synthetic::small_config();
        let whole = Adapter::generate(&AdapterSpec::new(1, 4, 0.5), &config, 0, Projection::Down)
            .unwrap()
            .unwrap();
        let inputs = whole.cut_inputs(100..256).unwrap();
        assert_eq!([inputs.a.rows(), inputs.b.columns()], [156, 96]);
        assert_eq!(inputs.a.row(0), whole.a.row(100));
        let outputs = whole.cut_outputs(90..96).unwrap();
        assert_eq!([outputs.a.rows(), outputs.b.columns()], [256, 6]);
        assert_eq!(outputs.b.row(3), &whole.b.row(3)[90..]);
        assert!(whole.cut_outputs(0..97).is_err());
    }
}
