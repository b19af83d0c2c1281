//! A router's choice.

use crate::{
    device::HostDevice,
    element,
    memory::{reading, writing},
    queue::HostQueue,
};
use brigade_device::{DataType, Result, Stream, TopK, TopKParams, Weighting};

impl HostDevice {
    pub(crate) fn run_top_k(&self, on: &Stream, p: &TopKParams<'_>) -> Result<TopK> {
        let [tokens, experts] = p.check()?;
        let ids = self.heap(DataType::I32, &[tokens, p.k])?;
        let weights = self.heap(DataType::F32, &[tokens, p.k])?;
        let made = TopK {
            ids: ids.clone(),
            weights: weights.clone(),
        };
        let (scores, k, weighting, factor) = (p.scores.retain(), p.k, p.weights, p.factor);
        HostQueue::of(on)?.run(move || {
            let (mut all_ids, mut all_weights) = (Vec::new(), Vec::new());
            reading(&[&scores], |inputs| {
                let mut row = vec![0.0; experts];
                let mut order: Vec<u32> = Vec::new();
                let of_token = experts * scores.dtype().bytes();
                for bytes in inputs[0].chunks_exact(of_token) {
                    element::load(scores.dtype(), bytes, &mut row);
                    order.clear();
                    order.extend(0..experts as u32);
                    let key = |e: &u32| (std::cmp::Reverse(rank(row[*e as usize])), *e);
                    if k < experts {
                        order.select_nth_unstable_by_key(k - 1, key);
                    }
                    order.truncate(k);
                    order.sort_unstable_by_key(key);
                    let chosen: Vec<f32> = order.iter().map(|&e| row[e as usize]).collect();
                    all_weights.extend(weigh(&chosen, &row, weighting, factor));
                    all_ids.extend(order.iter().map(|&e| e as i32));
                }
                Ok(())
            })?;
            writing(&ids, &[], |out, _| {
                out.copy_from_slice(bytemuck::cast_slice(&all_ids));
                Ok(())
            })?;
            writing(&weights, &[], |out, _| {
                out.copy_from_slice(bytemuck::cast_slice(&all_weights));
                Ok(())
            })
        })?;
        Ok(made)
    }
}

/// A number that is greater for greater scores: 0 for a NaN, and the same for both zeros.
fn rank(score: f32) -> u32 {
    if score.is_nan() {
        return 0;
    }
    let bits = (score + 0.0).to_bits();
    match bits >> 31 {
        0 => bits | 1 << 31,
        _ => !bits,
    }
}

/// The weights of the chosen, which are in order, of all.
fn weigh(chosen: &[f32], all: &[f32], weighting: Weighting, factor: f32) -> Vec<f32> {
    let best = chosen[0];
    let part = |&score: &f32| match weighting {
        Weighting::SoftmaxOfChosen | Weighting::Softmax => (score - best).exp(),
        Weighting::Sigmoid => 1.0 / (1.0 + (-score).exp()),
    };
    let sum: f32 = match weighting {
        Weighting::Softmax => all.iter().map(part).sum(),
        Weighting::SoftmaxOfChosen | Weighting::Sigmoid => chosen.iter().map(part).sum(),
    };
    let weight = |score| element::canonical(factor * (part(score) / sum));
    chosen.iter().map(weight).collect()
}

#[cfg(test)]
mod tests {
    use super::rank;

    #[test]
    fn scores_are_ranked_as_numbers_and_a_nan_is_last() {
        let order = [
            f32::NAN,
            f32::NEG_INFINITY,
            f32::MIN,
            -1.0,
            -f32::from_bits(1),
            0.0,
            f32::from_bits(1),
            1.0,
            f32::INFINITY,
        ];
        assert!(order.windows(2).all(|two| rank(two[0]) < rank(two[1])));
        assert_eq!(rank(0.0), rank(-0.0));
        assert_eq!(rank(-f32::NAN), 0);
    }
}
