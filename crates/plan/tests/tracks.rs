//! Tracks of a pipeline: every step is in one of them, in an order that is the same on all ranks, and no slot is taken too early.

use brigade_plan::hierarchical::{Schedule, Step, Track};
use proptest::prelude::*;
use std::collections::BTreeSet;

prop_compose! {
    /// Phases, and which of them go along the rail.
    fn rails(least: usize)(phases in least..=5)(
        along in prop::option::of((0..phases, 0..phases)),
        phases in Just(phases),
    ) -> (usize, Option<(usize, usize)>) {
        (phases, along.map(|(a, b)| (a.min(b), a.max(b))))
    }
}

/// Fewest connections of such a rail.
fn least(rail: Option<(usize, usize)>) -> usize {
    1 + usize::from(rail.is_some_and(|(first, last)| first != last))
}

proptest! {
    /// Every step is in one track, each track has its steps in the order in which they are enqueued slice by slice, which is that of all ranks, and
    /// no step comes before one that it needs.
    #[test]
    fn tracks_are_followed_in_one_order(
        (phases, rail) in rails(1),
        slices in 0usize..12,
        slots in 1usize..=6,
        connections in 1usize..=5,
    ) {
        let connections = connections.max(least(rail));
        let schedule = Schedule { phases, slices, slots, rail, connections };
        let steps = (0..slices).flat_map(|slice| (0..phases).map(move |phase| Step { phase, slice }));
        let steps: Vec<Step> = steps.collect();
        let mut seen = 0;
        for track in schedule.tracks() {
            let of = |s: &&Step| schedule.track(**s) == track;
            let enqueued: Vec<Step> = steps.iter().filter(of).copied().collect();
            let own: Vec<Step> = schedule.steps(track).collect();
            prop_assert_eq!(&own, &enqueued);
            prop_assert_eq!(own.len(), schedule.steps_of(track));
            let last: Vec<Step> = own.iter().copied().filter(|s| schedule.is_last(*s)).collect();
            prop_assert_eq!(last.as_slice(), &own[own.len().saturating_sub(1)..]);
            seen += own.len();
        }
        prop_assert_eq!(seen, steps.len());
        for (at, step) in steps.iter().enumerate() {
            if let Some(needs) = schedule.needs(*step) {
                prop_assert!(steps[..at].contains(&needs));
                prop_assert_eq!(schedule.needed_by(needs), Some(*step));
                prop_assert_eq!(schedule.slot(needs.slice), schedule.slot(step.slice));
            }
            if let Some(next) = schedule.needed_by(*step) {
                prop_assert_eq!(schedule.needs(next), Some(*step));
            }
        }
        // By turns: no connection has two steps more than another.
        let of = |which| schedule.steps_of(Track::Connection(which));
        prop_assert!(rail.is_none() || of(0) - of(connections - 1) < 2);
    }

    /// Whatever order threads run in, every phase finds its own slice in its slot; and with one slot fewer than the schedule thinks,
    /// some order shows it.
    #[test]
    fn slots_are_not_taken_before_their_last_reader(
        (phases, rail) in rails(2),
        slots in 2usize..=6,
        more in 1usize..8,
        connections in 1usize..=5,
        seed in any::<u64>(),
    ) {
        let connections = connections.max(least(rail));
        let schedule = Schedule { phases, slices: slots + more, slots, rail, connections };
        prop_assert_eq!(run(schedule, slots, seed), Ok(schedule.slices));
        let caught = (0..64).any(|i| run(schedule, slots - 1, seed ^ i).is_err());
        // Of more connections, one may have to wait for what would show it.
        prop_assert!(caught || connections > 2, "{schedule:?} with a slot fewer");
    }
}

/// Runs tracks as threads that are scheduled at random, with so many slots, and looks what each finds in its slot. Gives the slices that
/// came out.
fn run(schedule: Schedule, slots: usize, seed: u64) -> Result<usize, Step> {
    let mut random = seed | 1;
    let tracks: Vec<Track> = schedule.tracks().collect();
    let mut taken = vec![0; tracks.len()];
    let mut done = BTreeSet::new();
    // Which slice's data lies in each slot, as which phase left it.
    let mut content: Vec<Option<Step>> = vec![None; slots];
    loop {
        let mut ready: Vec<(usize, Step)> = tracks
            .iter()
            .enumerate()
            .filter_map(|(at, &track)| Some((at, schedule.step(track, taken[at])?)))
            .filter(|(_, s)| schedule.needs(*s).is_none_or(|n| done.contains(&n)))
            .collect();
        if ready.is_empty() {
            return Ok(done.len() / schedule.phases);
        }
        ready.sort_by_key(|(_, step)| *step);
        random = random
            .wrapping_mul(6_364_136_223_846_793_005)
            .wrapping_add(1);
        // Mostly the earliest phase, which is what fills slots.
        let pick = (random >> 33) as usize % (2 * ready.len());
        let (at, step) = ready[if pick < ready.len() { pick } else { 0 }];
        let slot = &mut content[step.slice % slots];
        let found = step
            .phase
            .checked_sub(1)
            .map(|phase| Step { phase, ..step });
        if step.phase > 0 && *slot != found {
            return Err(step);
        }
        *slot = Some(step);
        // A slice that begins where another has not ended.
        let last = Step {
            phase: schedule.phases - 1,
            slice: step.slice.wrapping_sub(slots),
        };
        if step.phase == 0 && step.slice >= slots && !done.contains(&last) {
            return Err(step);
        }
        taken[at] += 1;
        done.insert(step);
    }
}
