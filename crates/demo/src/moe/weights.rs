//! Weights of a layer of experts, and tokens for it.

use super::MoeShape;
use crate::adapter::random_stream;
use half::bf16;
use rand::Rng;
use std::ops::Range;

/// The weights of one expert.
#[derive(Clone, Debug)]
pub struct ExpertWeights {
    /// `[2 * feed_forward, hidden]`: the rows of gate, then those of up.
    pub gate_up: Vec<bf16>,
    /// `[hidden, feed_forward]`
    pub down: Vec<bf16>,
}

/// What gives out weights and tokens, each part without the others, and the same at every call.
pub trait ExpertSource: Sync {
    /// The layer's dimensions.
    fn shape(&self) -> &MoeShape;

    /// The router, `[experts, hidden]`.
    fn router(&self) -> Vec<f32>;

    /// One expert.
    fn expert(&self, number: usize) -> ExpertWeights;

    /// Some of the tokens, counted over all ranks: `[tokens, hidden]`.
    fn tokens(&self, which: Range<usize>) -> Vec<bf16>;
}

/// Random ones. Every expert and every token has a random stream of its own, made from the seed and its number, so that a rank makes only
/// those that it has.
///
/// Tokens have unit variance, and scales are such that scores, the inner values of experts and their results are about one too.
#[derive(Clone, Debug)]
pub struct RandomExperts {
    /// Dimensions.
    pub shape: MoeShape,
    /// The same seed gives the same weights.
    pub seed: u64,
}

/// Root mean square of `silu(a) * b` for normal a and b.
const GATED: f32 = 0.6;

impl ExpertSource for RandomExperts {
    fn shape(&self) -> &MoeShape {
        &self.shape
    }

    fn router(&self) -> Vec<f32> {
        let (hidden, experts) = (self.shape.hidden, self.shape.experts);
        let spread = uniform(1.0, hidden);
        let mut random = random_stream(self.seed, "router");
        (0..experts * hidden)
            .map(|_| random.random_range(-spread..=spread))
            .collect()
    }

    fn expert(&self, number: usize) -> ExpertWeights {
        let (hidden, inner) = (self.shape.hidden, self.shape.feed_forward);
        let part = |name: &str, len, spread| {
            numbers(self.seed, &format!("expert {number} {name}"), len, spread)
        };
        ExpertWeights {
            gate_up: part("gate and up", 2 * inner * hidden, uniform(1.0, hidden)),
            down: part("down", hidden * inner, uniform(1.0 / GATED, inner)),
        }
    }

    fn tokens(&self, which: Range<usize>) -> Vec<bf16> {
        let one = |t| {
            let label = format!("token {t}");
            numbers(self.seed, &label, self.shape.hidden, uniform(1.0, 1))
        };
        which.flat_map(one).collect()
    }
}

/// Greatest magnitude of evenly spread numbers, `inputs` of which make a sum with this deviation.
fn uniform(deviation: f32, inputs: usize) -> f32 {
    deviation * (3.0 / inputs as f32).sqrt()
}

/// Evenly spread numbers: two random bytes each, which is more than bf16 tells apart.
fn numbers(seed: u64, label: &str, len: usize, spread: f32) -> Vec<bf16> {
    const AT_ONCE: usize = 4096;
    let mut random = random_stream(seed, label);
    let (mut bits, mut all) = ([0i16; AT_ONCE], Vec::with_capacity(len));
    while all.len() < len {
        let n = AT_ONCE.min(len - all.len());
        random.fill(&mut bits[..n]);
        let number = |&b: &i16| bf16::from_f32((f32::from(b) + 0.5) / 32768.0 * spread);
        all.extend(bits[..n].iter().map(number));
    }
    all
}

#[cfg(test)]
mod tests {
    use super::*;

    fn deviation(values: &[bf16]) -> f64 {
        let squares = values.iter().map(|v| v.to_f64() * v.to_f64());
        (squares.sum::<f64>() / values.len() as f64).sqrt()
    }

    #[test]
    fn seed_and_number_make_an_expert_and_its_size_is_about_one() {
        let of = |seed| RandomExperts {
            shape: MoeShape::small(),
            seed,
        };
        let (one, again, other) = (of(1).expert(3), of(1).expert(3), of(2).expert(3));
        assert_eq!((&one.gate_up, &one.down), (&again.gate_up, &again.down));
        assert_ne!(one.gate_up, other.gate_up);
        assert_ne!(one.gate_up, of(1).expert(4).gate_up);
        assert_eq!((one.gate_up.len(), one.down.len()), (2 * 96 * 64, 64 * 96));
        let summed = |values: &[bf16], inputs: usize| deviation(values) * (inputs as f64).sqrt();
        assert!((summed(&one.gate_up, 64) - 1.0).abs() < 0.03);
        assert!((summed(&one.down, 96) - 1.0 / 0.6).abs() < 0.05);
        assert!((deviation(&of(1).tokens(0..50)) - 1.0).abs() < 0.03);
    }

    #[test]
    fn tokens_do_not_depend_on_what_is_asked_with_them() {
        let source = RandomExperts {
            shape: MoeShape::small(),
            seed: 9,
        };
        let all = source.tokens(0..5);
        assert_eq!(source.tokens(2..4), all[2 * 64..4 * 64]);
        assert!(source.tokens(3..3).is_empty());
    }
}
