//! When the steps of a pipeline end, if each takes what it should: an event simulation in whole numbers, and a bound to hold it against.

use super::{Schedule, Step, Track};
use smallvec::SmallVec;

/// What one phase takes for one slice.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct StepCost {
    /// Nanoseconds for which it keeps the link, of which there is one for all phases. Steps get it in the order in which they ask.
    pub link_ns: u64,
    /// Nanoseconds after that, or of a step that needs no link. Its phase is busy, the link is not.
    pub then_ns: u64,
}

impl StepCost {
    /// Of a step that nobody keeps from the link.
    pub fn ns(self) -> u64 {
        self.link_ns.saturating_add(self.then_ns)
    }
}

/// A multiple of every number of slots that is of use, so that the pattern in which slices follow each other repeats in it.
const PERIOD: usize = 60;

impl Schedule {
    /// Nanoseconds until the last step is done, with one cost for each phase. Each step begins when the schedule lets it; of two that ask for
    /// the link at the same time, that of the older slice goes first. Where a host enqueues the steps of all phases, each slice takes it
    /// `enqueue_ns`, so that those after it begin later.
    ///
    /// Of more than two periods of slices, all beyond the second are taken to be like it.
    pub fn ns(&self, costs: &[StepCost], enqueue_ns: u64) -> u64 {
        let of = |slices| Self { slices, ..*self }.simulate(costs, enqueue_ns);
        if self.slices <= 2 * PERIOD {
            return of(self.slices);
        }
        let (one, two) = (of(PERIOD), of(2 * PERIOD));
        let more = (self.slices - 2 * PERIOD) as u128;
        let ns = u128::from(two) + u128::from(two.saturating_sub(one)) * more / PERIOD as u128;
        let ns = u64::try_from(ns).unwrap_or(u64::MAX);
        // The host enqueues the last slice no sooner, whatever the pattern.
        let begins = enqueue_ns.saturating_mul(self.slices as u64 - 1);
        let alone = costs.iter().fold(begins, |ns, c| ns.saturating_add(c.ns()));
        ns.max(self.bound_ns(costs)).max(alone)
    }

    /// No order of steps ends sooner: what takes longest for all slices, and everything else for one. What takes longest is a phase inside, or
    /// the link for all phases that need it, or all connections, which share what goes along the rail.
    pub fn bound_ns(&self, costs: &[StepCost]) -> u64 {
        let all = |each: u64| each.saturating_mul(self.slices as u64);
        let sum = |costs: &[StepCost]| costs.iter().fold(0, |ns: u64, c| ns.saturating_add(c.ns()));
        let one = sum(costs);
        let more = |each: u64| each.saturating_mul(self.slices.saturating_sub(1) as u64);
        let inside = costs.iter().enumerate();
        let inside = inside.filter(|(phase, _)| !self.is_along(*phase));
        let longest = inside.map(|(_, c)| c.ns()).max().unwrap_or(0);
        let phases = one.saturating_add(more(longest));
        let ends = |first: usize, last: usize| {
            sum(&costs[..first]).saturating_add(sum(&costs[last + 1..]))
        };
        let needs_link = |c: &StepCost| c.link_ns > 0;
        let link = costs.iter().position(needs_link);
        let link = link
            .zip(costs.iter().rposition(needs_link))
            .map_or(0, |(first, last)| {
                let busy = costs.iter().map(|c| c.link_ns).fold(0, u64::saturating_add);
                let after = ends(first, last).saturating_add(costs[last].then_ns);
                all(busy).saturating_add(after)
            });
        let connections = self.rail.map_or(0, |(first, last)| {
            let along = (first..=last).filter(|phase| self.is_along(*phase));
            let along = along
                .map(|phase| costs[phase].ns())
                .fold(0, u64::saturating_add);
            all(along)
                .div_ceil(self.connections as u64)
                .saturating_add(ends(first, last))
        });
        phases.max(link).max(connections)
    }

    fn simulate(&self, costs: &[StepCost], enqueue_ns: u64) -> u64 {
        let of = Self {
            slots: self.slots.clamp(1, self.slices.max(1)),
            ..*self
        };
        let at = |step: Step| step.slice * of.phases + step.phase;
        let mut ended: Vec<Option<u64>> = vec![None; of.slices * of.phases];
        // Each track with the number of steps that it has done, and when it ended the last one.
        let mut tracks: SmallVec<[(Track, usize, u64); 8]> =
            of.tracks().map(|track| (track, 0, 0)).collect();
        let mut link_free = 0u64;
        // The step that may begin first; it asks for the link before all others do.
        while let Some((start, step, track)) = tracks
            .iter()
            .enumerate()
            .filter_map(|(i, &(track, done, free))| {
                let step = of.step(track, done)?;
                let needs = of.needs(step).map_or(Some(0), |n| ended[at(n)])?;
                let enqueued = enqueue_ns.saturating_mul(step.slice as u64);
                Some((free.max(needs).max(enqueued), step, i))
            })
            .min_by_key(|(start, step, _)| (*start, step.slice, step.phase))
        {
            let StepCost { link_ns, then_ns } = costs[step.phase];
            let mut end = start;
            if link_ns > 0 {
                end = start.max(link_free).saturating_add(link_ns);
                link_free = end;
            }
            end = end.saturating_add(then_ns);
            ended[at(step)] = Some(end);
            let (_, done, free) = &mut tracks[track];
            (*done, *free) = (*done + 1, end);
        }
        ended.into_iter().flatten().max().unwrap_or(0)
    }
}
