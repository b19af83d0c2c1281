//! Experts of all ranks' tokens, which every rank has: it finds out by itself which rows come to it.

use super::{Arguments, Came};
use crate::{
    job::Job,
    memory::reading,
    routing::{Router, integers, set, tell},
};
use brigade_device::{Buffer, Expected, FaultKind, GatheredRouting, Lengths, Result};
use brigade_plan::{
    dispatch::Section,
    known::{self, Unfit},
    routes::{Coming, Routes, Slots},
};
use std::ops::Range;

/// Whose they are, and their weights.
pub(super) struct Gathered {
    lengths: Buffer,
    ragged: bool,
    weights: Option<Buffer>,
    /// Rows of ids.
    rows: usize,
}

impl Gathered {
    pub(super) fn of(all: &GatheredRouting<'_>) -> Self {
        let (lengths, ragged) = match all.lengths {
            Lengths::Ragged { offsets } => (offsets, true),
            Lengths::Padded { counts } => (counts, false),
        };
        let k = all.ids.shape().dims().last().copied().unwrap_or(1);
        Self {
            lengths: lengths.retain(),
            ragged,
            weights: all.weights.map(|w| w.retain()),
            rows: all.ids.shape().len() / k.max(1),
        }
    }

    /// The rows of every rank. What cannot be stops the group, before anything of it is read.
    fn runs(&self, job: &Job, a: &Arguments) -> Result<Vec<Range<usize>>> {
        let lengths = reading(&[&self.lengths], |inputs| Ok(integers::<i32>(inputs[0])))?;
        let (me, tokens) = (a.group.rank, a.rows.shape().rows());
        let lengths = known::Lengths {
            lengths: &lengths,
            ragged: self.ragged,
            rows: self.rows,
            max_tokens: a.call.max_tokens,
        };
        let runs = lengths.runs(a.group.size, (me, tokens));
        runs.map_err(|Unfit { source, want, seen }| {
            job.fail(FaultKind::Mismatch, me, source, want as u64, seen as u64)
        })
    }

    /// Where own rows go; and into `came`, what is told otherwise of the rows that come.
    pub(super) fn route(
        &self,
        job: &Job,
        a: &Arguments,
        (router, expected): (&Router, &Expected),
        came: &mut [Came],
    ) -> Result<Routes> {
        let runs = self.runs(job, a)?;
        let mut all = router.find_all(&runs)?;
        let weights = match &self.weights {
            Some(weights) => reading(&[weights], |inputs| Ok(integers::<f32>(inputs[0])))?,
            None => Vec::new(),
        };
        let (me, k) = (a.group.rank, a.call.k);
        let of_run = |run: &Range<usize>| match self.weights {
            Some(_) => &weights[run.start * k..run.end * k],
            None => &[],
        };
        let slots = Slots::new(a.call.placement, a.group.size);
        for (source, came) in came.iter_mut().enumerate() {
            let coming = Coming::new(&all[source], k, &slots, me);
            came.rows = coming.tokens.len();
            let mut put = |section: Section, bytes: &[u8]| {
                came.sections[section.index()].extend_from_slice(bytes);
            };
            put(Section::Token, bytemuck::cast_slice(&coming.tokens));
            put(Section::Slots, bytemuck::cast_slice(&coming.slots));
            if self.weights.is_some() {
                let weights = coming.weights(k, of_run(&runs[source]));
                put(Section::Weights, bytemuck::cast_slice(&weights));
            }
        }
        if let Some(own) = &expected.own_weights {
            set(own, of_run(&runs[me]))?;
        }
        let routes = all.swap_remove(me);
        tell(&routes, &expected.layout)?;
        Ok(routes)
    }
}
