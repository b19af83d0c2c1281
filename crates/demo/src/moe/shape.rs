//! Dimensions of layers of experts, and how their routers choose.

use crate::{Error, Result};

/// How a router makes weights of the scores of the experts that it chose.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Scoring {
    /// Softmax over the chosen.
    SoftmaxOfChosen,
    /// Softmax over all, and the chosen divided by their sum. But for rounding, the same numbers as
    /// [`SoftmaxOfChosen`](Self::SoftmaxOfChosen).
    SoftmaxRenormalized,
    /// Sigmoid of each, the chosen divided by their sum, times a factor.
    Sigmoid {
        /// That factor.
        factor: f64,
    },
}

/// A layer of experts, each a gated feed-forward network: `down(silu(gate(x)) * up(x))`.
#[derive(Clone, Debug, PartialEq)]
pub struct MoeShape {
    /// Whose it is.
    pub name: &'static str,
    /// Columns of a token.
    pub hidden: usize,
    /// Inner width of an expert.
    pub feed_forward: usize,
    /// Experts, over all ranks.
    pub experts: usize,
    /// Experts of a token.
    pub top_k: usize,
    /// Weights of a token's experts.
    pub scoring: Scoring,
}

impl MoeShape {
    /// Of [Mixtral 8x7B](https://arxiv.org/abs/2401.04088).
    pub const fn mixtral() -> Self {
        Self {
            name: "Mixtral-8x7B",
            hidden: 4096,
            feed_forward: 14336,
            experts: 8,
            top_k: 2,
            scoring: Scoring::SoftmaxOfChosen,
        }
    }

    /// Of [Qwen3-30B-A3B](https://arxiv.org/abs/2505.09388).
    pub const fn qwen3() -> Self {
        Self {
            name: "Qwen3-30B-A3B",
            hidden: 2048,
            feed_forward: 768,
            experts: 128,
            top_k: 8,
            scoring: Scoring::SoftmaxRenormalized,
        }
    }

    /// Of the routed experts of [DeepSeek-V3](https://arxiv.org/abs/2412.19437). Its choice among groups of experts, the bias of that
    /// choice, and the expert that all tokens share are left out.
    pub const fn deepseek() -> Self {
        Self {
            name: "DeepSeek-V3",
            hidden: 7168,
            feed_forward: 2048,
            experts: 256,
            top_k: 8,
            scoring: Scoring::Sigmoid { factor: 2.5 },
        }
    }

    /// One that runs anywhere in no time, with a number of experts that most numbers of ranks do not divide.
    pub const fn small() -> Self {
        Self {
            name: "small",
            hidden: 64,
            feed_forward: 96,
            experts: 7,
            top_k: 3,
            scoring: Scoring::SoftmaxRenormalized,
        }
    }

    /// Checks that it can be.
    ///
    /// # Errors
    /// [`Error::Field`] naming the dimension.
    pub fn check(&self) -> Result<()> {
        for (field, got) in [
            ("hidden", self.hidden),
            ("feed_forward", self.feed_forward),
            ("experts", self.experts),
        ] {
            if got == 0 {
                return Err(Error::field(field, got, "at least 1"));
            }
        }
        let most = self.experts.min(brigade::Routing::MOST_K);
        if !(1..=most).contains(&self.top_k) {
            let want = format!("from 1 to {most}, of {} experts", self.experts);
            return Err(Error::field("top_k", self.top_k, want));
        }
        Ok(())
    }

    /// Bytes of an expert's weights in bf16.
    pub const fn expert_bytes(&self) -> u64 {
        (3 * self.hidden * self.feed_forward * 2) as u64
    }

    /// The experts of a token and their weights, best first, from the scores of all of them. Of equal ones the lower number is the
    /// better.
    pub fn choose(&self, scores: &[f64]) -> Vec<(usize, f64)> {
        let mut order: Vec<usize> = (0..scores.len()).collect();
        order.sort_by(|&a, &b| scores[b].total_cmp(&scores[a]).then(a.cmp(&b)));
        let best = order.first().map_or(0.0, |&first| scores[first]);
        let softmax = |e: usize| (scores[e] - best).exp();
        let of = |e: usize| match self.scoring {
            Scoring::SoftmaxOfChosen => softmax(e),
            Scoring::SoftmaxRenormalized => {
                softmax(e) / order.iter().map(|&o| softmax(o)).sum::<f64>()
            }
            Scoring::Sigmoid { .. } => 1.0 / (1.0 + (-scores[e]).exp()),
        };
        let factor = match self.scoring {
            Scoring::Sigmoid { factor } => factor,
            _ => 1.0,
        };
        let chosen: Vec<(usize, f64)> =
            order.iter().take(self.top_k).map(|&e| (e, of(e))).collect();
        let sum: f64 = chosen.iter().map(|c| c.1).sum();
        let weighted = |(e, w)| (e, factor * w / sum);
        chosen.into_iter().map(weighted).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn shape(top_k: usize, scoring: Scoring) -> MoeShape {
        MoeShape {
            top_k,
            scoring,
            ..MoeShape::small()
        }
    }

    #[test]
    fn the_best_are_chosen_and_of_equal_ones_the_lower() {
        let chosen = |scores: &[f64], k| -> Vec<usize> {
            let chosen = shape(k, Scoring::SoftmaxOfChosen).choose(scores);
            chosen.iter().map(|c| c.0).collect()
        };
        assert_eq!(chosen(&[0.5, 2.0, -1.0, 1.0], 2), [1, 3]);
        assert_eq!(chosen(&[1.0, 3.0, 1.0, 1.0], 3), [1, 0, 2]);
        assert_eq!(chosen(&[0.0; 5], 4), [0, 1, 2, 3]);
    }

    #[test]
    fn weights_are_what_the_papers_say() {
        let scores = [0.0, 4f64.ln(), 2f64.ln(), -1.0];
        let cases = [
            (Scoring::SoftmaxOfChosen, [4.0 / 6.0, 2.0 / 6.0]),
            (Scoring::SoftmaxRenormalized, [4.0 / 6.0, 2.0 / 6.0]),
            // Sigmoids of 4/5 and 2/3.
            (Scoring::Sigmoid { factor: 2.5 }, [30.0 / 22.0, 25.0 / 22.0]),
        ];
        for (scoring, want) in cases {
            let got = shape(2, scoring).choose(&scores);
            assert_eq!((got[0].0, got[1].0), (1, 2));
            for (got, want) in got.iter().zip(want) {
                assert!((got.1 - want).abs() < 1e-12, "{scoring:?}: {got:?}");
            }
        }
    }

    #[test]
    fn published_shapes_can_be_and_others_are_refused() {
        for shape in [
            MoeShape::mixtral(),
            MoeShape::qwen3(),
            MoeShape::deepseek(),
            MoeShape::small(),
        ] {
            shape.check().unwrap();
        }
        for top_k in [0, 8] {
            let error = shape(top_k, Scoring::SoftmaxOfChosen).check().unwrap_err();
            assert!(error.to_string().contains("of 7 experts"), "{error}");
        }
    }
}
