//! A router's choice.

use crate::{CudaDevice, kernels::blocks_for, memory::check_reach, types};
use brigade_device::{DataType, Result, Stream, TopK, TopKParams, Weighting};
use brigade_kernels::TopKParams as Parameters;

impl CudaDevice {
    pub(crate) fn run_top_k(&self, on: &Stream, p: &TopKParams<'_>) -> Result<TopK> {
        let [tokens, experts] = p.check()?;
        let lane = self.lane(on)?;
        let scores = p.scores.retain();
        check_reach(&self.card, "scores.memory", &scores)?;
        let made = TopK {
            ids: self.scratch(lane, DataType::I32, &[tokens, p.k])?,
            weights: self.scratch(lane, DataType::F32, &[tokens, p.k])?,
        };
        if tokens == 0 {
            return Ok(made);
        }
        let parameters = Parameters {
            ids: made.ids.address(),
            weights: made.weights.address(),
            scores: scores.address(),
            tokens: tokens as u64,
            experts: experts as u32,
            k: p.k as u32,
            scores_type: types::float_code(scores.dtype()),
            weighting: match p.weights {
                Weighting::SoftmaxOfChosen => 0,
                Weighting::Softmax => 1,
                Weighting::Sigmoid => 2,
            },
            factor: p.factor,
            reserved: 0,
        };
        let k = &self.opened.kernels;
        let buffers = [&made.ids, &made.weights, &scores];
        // A warp for each token.
        let blocks = blocks_for(tokens * 32);
        // SAFETY: the shapes were checked, and there are k experts and weights for each token.
        unsafe { k.launch(&k.top_k, lane, &buffers, blocks, parameters) }?;
        Ok(made)
    }
}
