//! When steps of a pipeline end: the simulation against one that looks at every tick of a clock, and against what must hold of any.

#![allow(clippy::unwrap_used, reason = "tests")]

use brigade_plan::hierarchical::{Schedule, Step, StepCost};
use proptest::prelude::*;
use std::collections::{BTreeMap, BTreeSet, VecDeque};

/// What is done one after the other: slices of each phase that stays inside, and what goes along the rail, dealt to its connections.
fn rows_of(schedule: Schedule) -> Vec<Vec<Step>> {
    let Schedule {
        phases,
        slices,
        rail,
        connections,
        ..
    } = schedule;
    let along = |phase| rail.is_some_and(|(first, last)| phase == first || phase == last);
    let inside = (0..phases).filter(|&phase| !along(phase));
    let mut rows: Vec<Vec<Step>> = inside
        .map(|phase| (0..slices).map(|slice| Step { phase, slice }).collect())
        .collect();
    if let Some((first, last)) = rail {
        let mut row: Vec<(usize, Step)> = Vec::new();
        for slice in 0..slices {
            row.push((
                2 * slice,
                Step {
                    phase: first,
                    slice,
                },
            ));
            if first != last {
                // Behind the collect of the next slice.
                row.push((2 * slice + 3, Step { phase: last, slice }));
            }
        }
        row.sort();
        let steps: Vec<Step> = row.into_iter().map(|(_, step)| step).collect();
        let dealt = |which| steps.iter().skip(which).step_by(connections);
        rows.extend((0..connections).map(|which| dealt(which).copied().collect()));
    }
    rows
}

/// Goes through time tick by tick, with a queue in front of the link.
fn by_the_clock(schedule: Schedule, costs: &[StepCost]) -> u64 {
    let rows = rows_of(schedule);
    let mut steps: Vec<Step> = rows.iter().flatten().copied().collect();
    steps.sort_by_key(|s| (s.slice, s.phase));
    let before: BTreeMap<Step, Step> = rows
        .iter()
        .flat_map(|row| row.windows(2).map(|w| (w[1], w[0])).collect::<Vec<_>>())
        .collect();
    let mut queue: VecDeque<Step> = VecDeque::new();
    // Ticks that the link is still kept, and that each step needs after it.
    let mut holds: Option<(Step, u64)> = None;
    let mut after: BTreeMap<Step, u64> = BTreeMap::new();
    let mut begun: BTreeSet<Step> = BTreeSet::new();
    let mut done: BTreeSet<Step> = BTreeSet::new();
    for tick in 0.. {
        // All that happens at this tick, one thing after the other.
        loop {
            if holds.is_none() {
                holds = queue.pop_front().map(|s| (s, costs[s.phase].link_ns));
            }
            if let Some((step, 0)) = holds {
                after.insert(step, costs[step.phase].then_ns);
                holds = None;
                continue;
            }
            if let Some((&step, _)) = after.iter().find(|(_, left)| **left == 0) {
                after.remove(&step);
                done.insert(step);
                continue;
            }
            let is_done = |phase, slice| done.contains(&Step { phase, slice });
            let may_begin = |s: &&Step| {
                let free = match s.phase {
                    0 => {
                        s.slice < schedule.slots || {
                            is_done(schedule.phases - 1, s.slice - schedule.slots)
                        }
                    }
                    p => is_done(p - 1, s.slice),
                };
                free && !begun.contains(s) && before.get(s).is_none_or(|b| done.contains(b))
            };
            let Some(&step) = steps
                .iter()
                .filter(|s| !begun.contains(s))
                .take(64)
                .find(may_begin)
            else {
                break;
            };
            begun.insert(step);
            match costs[step.phase] {
                StepCost {
                    link_ns: 0,
                    then_ns,
                } => {
                    after.insert(step, then_ns);
                }
                _ => queue.push_back(step),
            }
        }
        if done.len() == steps.len() {
            return tick;
        }
        if let Some((_, left)) = &mut holds {
            *left -= 1;
        }
        after.values_mut().for_each(|left| *left -= 1);
    }
    unreachable!("there is always another tick");
}

fn cost() -> impl Strategy<Value = StepCost> {
    let link_ns = prop_oneof![3 => Just(0), 2 => 0u64..9];
    (link_ns, 0u64..12).prop_map(|(link_ns, then_ns)| StepCost { link_ns, then_ns })
}

prop_compose! {
    fn pipelines(most: usize)(costs in prop::collection::vec(cost(), 1..=5))(
        slices in 0..=most,
        slots in 1usize..=6,
        along in prop::option::of((0..costs.len(), 0..costs.len())),
        connections in 1usize..=5,
        costs in Just(costs),
    ) -> (Schedule, Vec<StepCost>) {
        let rail = along.map(|(a, b)| (a.min(b), a.max(b)));
        let two = rail.is_some_and(|(first, last)| first != last);
        let connections = connections.max(1 + usize::from(two));
        (Schedule { phases: costs.len(), slices, slots, rail, connections }, costs)
    }
}

fn one(costs: &[StepCost]) -> u64 {
    costs.iter().map(|c| c.ns()).sum()
}

proptest! {
    #[test]
    fn steps_end_when_a_clock_says_so((schedule, costs) in pipelines(9)) {
        prop_assert_eq!(schedule.ns(&costs, 0), by_the_clock(schedule, &costs));
    }

    /// Between the bound and one slice after the other, and what a slice's way takes for those that share a slot.
    #[test]
    fn no_order_beats_the_bound((schedule, costs) in pipelines(400)) {
        let ns = schedule.ns(&costs, 0);
        let slices = schedule.slices as u64;
        prop_assert!(ns <= one(&costs) * slices);
        if slices > 0 {
            prop_assert!(ns >= schedule.bound_ns(&costs));
            if slices <= 120 {
                prop_assert!(ns >= one(&costs) * slices.div_ceil(schedule.slots as u64));
            }
        }
    }

    /// The last slice begins no sooner than the host has enqueued it.
    #[test]
    fn slices_wait_for_the_host((schedule, costs) in pipelines(300), enqueue_ns in 0u64..50) {
        let last = (schedule.slices as u64).saturating_sub(1) * enqueue_ns;
        let ns = schedule.ns(&costs, enqueue_ns);
        let least = (last + one(&costs)).max(schedule.bound_ns(&costs));
        prop_assert!(schedule.slices == 0 || ns >= least);
    }

    #[test]
    fn one_slice_or_one_slot_is_one_step_after_the_other((schedule, costs) in pipelines(300)) {
        let alone = Schedule { slices: 1, ..schedule };
        prop_assert_eq!(alone.ns(&costs, 0), one(&costs));
        prop_assert_eq!(alone.bound_ns(&costs), one(&costs));
        let in_turn = Schedule { slots: 1, ..schedule };
        prop_assert_eq!(in_turn.ns(&costs, 0), one(&costs) * schedule.slices as u64);
    }

    /// Where no phase keeps another from the link, the bound is reached with enough slots, and whatever takes less makes nothing slower.
    /// (Where they do, it may: an order of steps that is worse for all may come of it.)
    #[test]
    fn without_a_link_to_share_the_bound_is_reached(
        (schedule, costs) in pipelines(300),
        which in any::<prop::sample::Index>(),
        less in 0u64..12,
    ) {
        let costs: Vec<_> = costs.iter().map(|c| StepCost { link_ns: 0, then_ns: c.ns() }).collect();
        let schedule = Schedule { rail: None, ..schedule };
        let enough = Schedule { slots: 6 * costs.len().max(schedule.slices), ..schedule };
        if schedule.slices > 0 {
            prop_assert_eq!(enough.ns(&costs, 0), enough.bound_ns(&costs));
        }
        let ns = schedule.ns(&costs, 0);
        let more_slots = Schedule { slots: schedule.slots + 1, ..schedule };
        prop_assert!(more_slots.ns(&costs, 0) <= ns);
        let mut quicker = costs.clone();
        let step = &mut quicker[which.index(costs.len())];
        step.then_ns = step.then_ns.saturating_sub(less);
        prop_assert!(schedule.ns(&quicker, 0) <= ns);
    }

    /// Another slice takes longer, on both sides of where slices are not looked at one by one any more.
    #[test]
    fn more_slices_take_longer((schedule, costs) in pipelines(150)) {
        let more = Schedule { slices: schedule.slices + 1, ..schedule };
        let (now, then) = (schedule.ns(&costs, 0), more.ns(&costs, 0));
        prop_assert!(now <= then && then <= now + one(&costs));
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(24))]

    /// Slices beyond the second period are as those in it.
    #[test]
    fn many_slices_go_on_as_they_began((schedule, costs) in pipelines(9), more in 121usize..260) {
        let many = Schedule { slices: more, ..schedule };
        let (got, exact) = (many.ns(&costs, 0), by_the_clock(many, &costs));
        // The pattern may end in the middle.
        prop_assert!(got.abs_diff(exact) <= one(&costs), "{got} for {exact}");
    }
}
