//! Experts of all ranks' tokens, which every rank has: it finds out by itself which rows come to it.

use super::{Arguments, Came, Own};
use crate::{
    job::Job,
    memory::reading,
    routing::{Router, integers, set, tell},
};
use brigade_device::{Buffer, Expected, FaultKind, GatheredRouting, Lengths, Result};
use brigade_plan::{
    dispatch::{Load, Sections},
    routes::{Routes, Slots},
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
        let (me, tokens, most) = (a.group.rank, a.rows.shape().rows(), a.call.max_tokens);
        let run = |source: usize| {
            let at = |i: usize| i64::from(lengths[i]);
            let (first, end) = match self.ragged {
                true => (at(source), at(source + 1)),
                false => ((source * most) as i64, (source * most) as i64 + at(source)),
            };
            let n = end - first;
            let fits = first >= 0 && n >= 0 && end <= self.rows as i64 && n <= most as i64;
            match fits && (source != me || n == tokens as i64) {
                true => Ok(first as usize..end as usize),
                false => {
                    let want = if source == me { tokens } else { most };
                    Err(job.fail(FaultKind::Mismatch, me, source, want as u64, n as u64))
                }
            }
        };
        (0..a.group.size).map(run).collect()
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
        for (source, came) in came.iter_mut().enumerate() {
            let theirs = Own {
                call: &a.call,
                all: Slots::new(a.call.placement, a.group.size),
                rows: &[],
                scales: &[],
                slots: &all[source].slots,
                weights: bytemuck::cast_slice(of_run(&runs[source])),
                beside: &[],
            };
            let tokens = all[source].to(me);
            let sections = Sections::part(&a.call, Load::Ways, tokens.len());
            let mut part = vec![0; sections.bytes];
            for (i, &token) in tokens.iter().enumerate() {
                theirs.write(me, token, i, &sections, &mut part);
            }
            came.rows = tokens.len();
            for (i, section) in came.sections.iter_mut().enumerate() {
                section.extend_from_slice(&part[sections.at(i, tokens.len())]);
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
