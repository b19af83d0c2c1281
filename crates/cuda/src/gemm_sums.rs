//! A product of rows that are there, whose end adds what others made of own rows, by the kernel of `kernels/gemm_sums.cu`.

use crate::{
    adapters::Low,
    gemm_flags::{Rows, Tiled, tensor_map},
    gemm_send::Sent,
    job::Job,
    steps::Use,
};
use brigade_device::Result;
use std::ops::Range;

impl Job<'_> {
    /// Enqueues the product of all parts: those of others, each of which is `sent`, and then own rows, the last parts. To these it adds `made`, what
    /// all ranks made of them, which others tell of piece by piece, then C, and the activation. Without it they are `sent` as well.
    pub(crate) fn tiled_sums(
        &self,
        of: Use,
        p: &Tiled,
        low: Option<Low>,
        sent: &[Sent],
        own: Range<usize>,
        made: Option<&Rows>,
    ) -> Result<()> {
        let Some(mut ready) = self.ready(of, p, low)? else {
            return Ok(());
        };
        let (core, steps) = (self.core, self.core.steps());
        let parameters = &mut ready.parameters;
        for (i, part) in sent.iter().enumerate() {
            part.tell(i, parameters);
        }
        // A rank without rows of its own adds nothing up, and its map is not looked at.
        let map = made.filter(|made| made.rows > 0).unwrap_or(&p.all);
        parameters.parts_map = tensor_map(map, p.dtype, parameters.band_rows)?;
        parameters.sum_part = sent.len() as u32;
        if let Some(made) = made {
            parameters.sum_rows = (made.rows / core.size()) as u32;
            for piece in 0..own.len() {
                for peer in core.peers() {
                    let word = &mut parameters.sum_word[piece * core.size() + peer];
                    *word = steps.filled_word(of, peer, piece, peer);
                }
            }
        }
        // C is of own rows, and the kernel counts all.
        if let Some(c) = &p.bias {
            let before = p.parts[own.start].rows.start * parameters.bias_stride as usize;
            let bytes = (before * c.dtype().bytes()) as u64;
            parameters.bias = parameters.bias.wrapping_sub(bytes);
        }
        ready.launch_sums(self.lane, p, self.behind_steps())
    }
}
