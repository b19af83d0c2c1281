//! Parameters of a router's choice.

use crate::{Buffer, Error, Result, Routing, View, params::float};

/// The experts of every token: those of the greatest scores, best first.
///
/// Of equal scores the lower number is the better (-0 and +0 are equal), and a NaN is worse than all numbers. Which experts are chosen
/// is the same on all devices, to the last tie; weights are a library's `exp` apart.
#[derive(Clone, Copy, Debug)]
pub struct TopKParams<'a> {
    /// `[tokens, experts]`: f32, f16 or bf16, up to [`TopKParams::MOST_EXPERTS`].
    pub scores: View<'a>,
    /// Experts of a token, from 1 to [`Routing::MOST_K`].
    pub k: usize,
    /// What weights are made of.
    pub weights: Weighting,
    /// Every weight is multiplied by it.
    pub factor: f32,
}

/// How the weights of chosen experts come from their scores. In f32.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Weighting {
    /// Softmax over the chosen (Mixtral). What a softmax over all is, divided by the sum of the chosen (Qwen3), but for rounding.
    SoftmaxOfChosen,
    /// Softmax over all experts of the token (DeepSeek-V2, OLMoE): the sum of the chosen is less than 1.
    Softmax,
    /// Sigmoid of each, divided by the sum of the chosen (DeepSeek-V3).
    Sigmoid,
}

/// What a router decides, as [`DispatchParams`](crate::DispatchParams) take it.
#[derive(Clone, Debug)]
pub struct TopK {
    /// Experts of every token, i32 `[tokens, k]`.
    pub ids: Buffer,
    /// Their weights, f32 `[tokens, k]`.
    pub weights: Buffer,
}

impl<'a> TopKParams<'a> {
    /// Most experts that are chosen from.
    pub const MOST_EXPERTS: usize = 1024;

    /// The best `k`, with a softmax over them.
    pub const fn new(scores: View<'a>, k: usize) -> Self {
        Self {
            scores,
            k,
            weights: Weighting::SoftmaxOfChosen,
            factor: 1.0,
        }
    }

    /// Checks types and shapes, and gives tokens and experts.
    ///
    /// # Errors
    /// [`Error::Invalid`] naming the field, what it was and what it should have been.
    pub fn check(&self) -> Result<[usize; 2]> {
        let scores = self.scores;
        float("scores.dtype", scores.dtype())?;
        let &[tokens, experts] = scores.shape().dims() else {
            let want = "2 dimensions, [tokens, experts]";
            return Err(Error::invalid("scores.shape", scores.shape(), want));
        };
        if !(1..=Self::MOST_EXPERTS).contains(&experts) {
            let want = format!("from 1 to {} experts", Self::MOST_EXPERTS);
            return Err(Error::invalid("scores.shape", scores.shape(), want));
        }
        let most = experts.min(Routing::MOST_K);
        if !(1..=most).contains(&self.k) {
            let want = format!("from 1 to {most}, of {experts} experts");
            return Err(Error::invalid("k", self.k, want));
        }
        if !self.factor.is_finite() {
            return Err(Error::invalid("factor", self.factor, "a finite factor"));
        }
        Ok([tokens, experts])
    }
}
