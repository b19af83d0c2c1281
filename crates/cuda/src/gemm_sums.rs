//! A product of rows that are there, whose end adds what others made of own rows, by the kernel of `kernels/gemm_sums.cu`: one launch that sends what it
//! makes for others, or several, each of which begins where the one before has no tile left.

use crate::{
    adapters::Low,
    gemm_flags::{Ready, Rows, Tiled, tensor_map},
    gemm_send::Sent,
    job::Job,
    steps::Use,
    types,
};
use brigade_device::{Activation, Result};
use brigade_kernels::{STATE_ABSENT, STATE_TILES};
use std::ops::Range;

/// Launches between which no multiprocessor waits. Each counts its tiles apart, since two may be under way.
pub(crate) struct InTurn<'a, 'j> {
    job: &'a Job<'j>,
    of: Use,
    p: &'a Tiled,
    /// `None` if there is nothing to multiply.
    ready: Option<Ready<'a>>,
    /// Where the tiles of each part begin, and those of the last one end.
    first: Vec<u32>,
    launches: u32,
}

/// Half words of the state in which launches count their tiles.
const COUNTS: u32 = 2 * (STATE_ABSENT - STATE_TILES) as u32;

impl<'a, 'j> InTurn<'a, 'j> {
    pub(crate) fn new(job: &'a Job<'j>, of: Use, p: &'a Tiled, low: Option<Low>) -> Result<Self> {
        let ready = job.ready(of, p, low)?;
        let first = ready.as_ref().map_or_else(Vec::new, |ready| {
            let begin = &ready.parameters.part_first[..p.parts.len()];
            begin
                .iter()
                .copied()
                .chain([ready.parameters.tiles])
                .collect()
        });
        Ok(Self {
            job,
            of,
            p,
            ready,
            first,
            launches: 0,
        })
    }

    /// The tiles of some parts, if they have some.
    fn next(&mut self, parts: &Range<usize>) -> Option<(&mut Ready<'a>, bool)> {
        let ready = self.ready.as_mut()?;
        let (begin, end) = (self.first[parts.start], self.first[parts.end]);
        if begin == end {
            return None;
        }
        let parameters = &mut ready.parameters;
        (parameters.first_tile, parameters.tiles) = (begin, end);
        parameters.tile_count = self.launches % COUNTS;
        // What is in front of the first are steps; of the others, one of these, which lets the next begin. One that counts where another
        // has counted begins when all of those have ended: small ones may all be under way, each with blocks that wait for the one before.
        let programmatic = match self.launches {
            0 => self.job.behind_steps(),
            launches => self.job.core.begins_early && !launches.is_multiple_of(COUNTS),
        };
        self.launches += 1;
        Some((ready, programmatic))
    }

    /// Enqueues the product of some parts, without C and activation.
    pub(crate) fn product(&mut self, parts: Range<usize>) -> Result<()> {
        let (job, p) = (self.job, self.p);
        let Some((ready, programmatic)) = self.next(&parts) else {
            return Ok(());
        };
        let ends = ready.parameters;
        ready.parameters.bias = 0;
        ready.parameters.activation = types::activation_code(Activation::None);
        let launched = ready.launch(job.lane, p, programmatic);
        ready.parameters = ends;
        launched
    }

    /// Enqueues all of it: the parts of others, each of which goes where it is `sent`, at a pace or as quickly as may be, and then `own`, as
    /// [`sums`](Self::sums) does.
    pub(crate) fn all(
        &mut self,
        own: Range<usize>,
        made: &Rows,
        sent: &[Sent],
        paces: bool,
    ) -> Result<()> {
        if let Some(ready) = &mut self.ready {
            let parameters = &mut ready.parameters;
            parameters.paces = u32::from(paces);
            for (i, part) in sent.iter().enumerate() {
                part.tell(i, parameters);
            }
        }
        self.launch_sums(0..own.end, own, made)
    }

    /// Enqueues that of the last parts, own rows in pieces, and adds `made`: what all ranks made of own rows, which others tell of piece by piece;
    /// then C, and the activation.
    pub(crate) fn sums(&mut self, own: Range<usize>, made: &Rows) -> Result<()> {
        self.launch_sums(own.clone(), own, made)
    }

    fn launch_sums(&mut self, parts: Range<usize>, own: Range<usize>, made: &Rows) -> Result<()> {
        let (job, p, of) = (self.job, self.p, self.of);
        let (core, steps) = (job.core, job.core.steps());
        let Some((ready, programmatic)) = self.next(&parts) else {
            return Ok(());
        };
        let parameters = &mut ready.parameters;
        // A rank without rows of its own adds nothing up, and its map is not looked at.
        let map = if made.rows > 0 { made } else { &p.all };
        parameters.parts_map = tensor_map(map, p.dtype, parameters.band_rows)?;
        parameters.sum_part = own.start as u32;
        parameters.sum_rows = (made.rows / core.size()) as u32;
        for piece in 0..own.len() {
            for peer in core.peers() {
                let word = &mut parameters.sum_word[piece * core.size() + peer];
                *word = steps.filled_word(of, peer, piece, peer);
            }
        }
        // C is of own rows, and the kernel counts all.
        if let Some(c) = &p.bias {
            let before = p.parts[own.start].rows.start * parameters.bias_stride as usize;
            let bytes = (before * c.dtype().bytes()) as u64;
            parameters.bias = parameters.bias.wrapping_sub(bytes);
        }
        ready.launch_sums(job.lane, p, programmatic)
    }
}
