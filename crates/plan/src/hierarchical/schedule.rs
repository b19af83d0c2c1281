//! Which phase of which slice comes after which: the events of the pipeline, as data.

use brigade_device::SlicedPlan;

/// One phase of one slice.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Step {
    /// A position in [`SlicedPlan::phases`].
    pub phase: usize,
    /// Which slice.
    pub slice: usize,
}

/// Every phase takes slices in order. Beyond that, a step waits for the one before it in its slice; and the first step of a slice for the
/// last step of the slice that had its slot before.
///
/// ```
/// use brigade_plan::hierarchical::{Schedule, Step};
/// let schedule = Schedule { phases: 3, slices: 9, slots: 2 };
/// let needs = |phase, slice| schedule.needs(Step { phase, slice });
/// assert_eq!(needs(0, 1), None);
/// assert_eq!(needs(0, 5), Some(Step { phase: 2, slice: 3 }));
/// assert_eq!(needs(2, 5), Some(Step { phase: 1, slice: 5 }));
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Schedule {
    /// Phases of each slice.
    pub phases: usize,
    /// Slices in all.
    pub slices: usize,
    /// Slots that they take turns in.
    pub slots: usize,
}

impl Schedule {
    /// Of a plan.
    pub fn of(plan: &SlicedPlan) -> Self {
        Self {
            phases: plan.phases.len(),
            slices: plan.slices,
            slots: plan.slots,
        }
    }

    /// The slot of a slice: they go round.
    pub fn slot(&self, slice: usize) -> usize {
        slice % self.slots.max(1)
    }

    /// What must be done before a step, besides the same phase of the slice before.
    pub fn needs(&self, step: Step) -> Option<Step> {
        let Step { phase, slice } = step;
        match phase.checked_sub(1) {
            Some(phase) => Some(Step { phase, slice }),
            None => Some(Step {
                phase: self.phases.checked_sub(1)?,
                slice: slice.checked_sub(self.slots.max(1))?,
            }),
        }
    }
}
