//! When the steps of a pipeline end, if each takes what it should: an event simulation in whole numbers, and a bound to hold it against.

use super::{Schedule, Step};

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
    /// the link at the same time, that of the older slice goes first.
    ///
    /// Of more than two periods of slices, all beyond the second are taken to be like it.
    pub fn ns(&self, costs: &[StepCost]) -> u64 {
        let of = |slices| Self { slices, ..*self }.simulate(costs);
        if self.slices <= 2 * PERIOD {
            return of(self.slices);
        }
        let (one, two) = (of(PERIOD), of(2 * PERIOD));
        let more = (self.slices - 2 * PERIOD) as u128;
        let ns = u128::from(two) + u128::from(two.saturating_sub(one)) * more / PERIOD as u128;
        let ns = u64::try_from(ns).unwrap_or(u64::MAX);
        ns.max(self.bound_ns(costs))
    }

    /// No order of steps ends sooner: what takes longest for all slices, and everything else for one. What takes longest is a phase, or the
    /// link for all phases that need it.
    pub fn bound_ns(&self, costs: &[StepCost]) -> u64 {
        let all = |ns: u64, each: u64| {
            ns.saturating_add(each.saturating_mul(self.slices.saturating_sub(1) as u64))
        };
        let sum = |costs: &[StepCost]| costs.iter().fold(0, |ns: u64, c| ns.saturating_add(c.ns()));
        let longest = costs.iter().map(|c| c.ns()).max().unwrap_or(0);
        let phases = all(sum(costs), longest);
        let needs_link = |c: &StepCost| c.link_ns > 0;
        let (Some(first), Some(last)) = (
            costs.iter().position(needs_link),
            costs.iter().rposition(needs_link),
        ) else {
            return phases;
        };
        let busy = costs.iter().map(|c| c.link_ns).fold(0, u64::saturating_add);
        let link = all(busy, busy)
            .saturating_add(sum(&costs[..first]))
            .saturating_add(costs[last].then_ns)
            .saturating_add(sum(&costs[last + 1..]));
        phases.max(link)
    }

    fn simulate(&self, costs: &[StepCost]) -> u64 {
        let slots = self.slots.clamp(1, self.slices.max(1));
        // When each phase ended its last step in each slot: nobody asks for one before that.
        let mut ended = vec![0u64; costs.len() * slots];
        let at = |step: Step| step.phase * slots + step.slice % slots;
        let mut done = vec![0usize; costs.len()];
        let mut link_free = 0u64;
        let mut last = 0u64;
        // The step that may begin first; it asks for the link before all others do.
        while let Some((start, step)) = (0..costs.len())
            .filter(|&phase| done[phase] < self.slices)
            .filter_map(|phase| {
                let step = Step {
                    phase,
                    slice: done[phase],
                };
                let before = step.slice.checked_sub(1);
                let before = before.map_or(0, |slice| ended[at(Step { phase, slice })]);
                match self.needs(step) {
                    Some(n) if done[n.phase] <= n.slice => None,
                    Some(n) => Some((before.max(ended[at(n)]), step)),
                    None => Some((before, step)),
                }
            })
            .min_by_key(|(start, step)| (*start, step.slice, step.phase))
        {
            let StepCost { link_ns, then_ns } = costs[step.phase];
            let mut end = start;
            if link_ns > 0 {
                end = start.max(link_free).saturating_add(link_ns);
                link_free = end;
            }
            end = end.saturating_add(then_ns);
            ended[at(step)] = end;
            done[step.phase] += 1;
            last = last.max(end);
        }
        last
    }
}
