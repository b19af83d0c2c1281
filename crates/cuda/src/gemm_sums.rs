//! The twin's product, whose sums go to the owners of their rows, by the kernel of `kernels/gemm_sums.cu`.

use crate::{
    gemm_flags::{Rows, Tiled, tensor_map},
    job::Job,
    steps::Use,
};
use brigade_device::Result;
use std::ops::Range;

/// What becomes of the sums of a product.
#[derive(Clone, Debug)]
pub(crate) struct Owners {
    /// Who owns each part.
    pub(crate) of_parts: Vec<usize>,
    /// What all ranks have made of own rows, in their order.
    pub(crate) parts: Rows,
    /// Own rows among all.
    pub(crate) rows: Range<usize>,
}

impl Job<'_> {
    /// Enqueues a product of rows that are there. Its own part becomes the result, of which the rest of `p` speaks; the others go to their owners,
    /// who are told of the use `of`.
    pub(crate) fn tiled_sums(&self, of: Use, p: &Tiled, owners: &Owners) -> Result<()> {
        let Some(mut ready) = self.ready(of, p)? else {
            return Ok(());
        };
        let (core, steps) = (self.core, self.core.steps());
        let parameters = &mut ready.parameters;
        // Without own rows nobody looks at the map.
        if !owners.rows.is_empty() {
            parameters.parts_map = tensor_map(&owners.parts, p.dtype, parameters.band_rows)?;
            parameters.sum_rows = owners.rows.len() as u32;
        }
        for (i, &owner) in owners.of_parts.iter().enumerate() {
            if owner != core.rank() {
                parameters.part_peer[i] = owner as u32;
                parameters.part_told[i] = steps.told_word(of, owner, 0);
            }
        }
        for peer in core.peers() {
            parameters.sum_word[peer] = steps.filled_word(of, peer, 0, peer);
        }
        // C is of own rows, and the kernel counts all.
        if let Some(c) = &p.bias {
            let before = owners.rows.start * parameters.bias_stride as usize * c.dtype().bytes();
            parameters.bias = parameters.bias.wrapping_sub(before as u64);
        }
        ready.launch_sums(self.lane, p, self.behind_steps())
    }
}
