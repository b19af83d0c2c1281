//! Which phase of which slice comes after which: the events of the pipeline, as data.

use brigade_device::{Phase, SlicedPlan};

/// One phase of one slice.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Step {
    /// A position in [`SlicedPlan::phases`].
    pub phase: usize,
    /// Which slice.
    pub slice: usize,
}

/// What does one step after the other: a thread, or a stream.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Track {
    /// All slices of the phase at this position, which stays inside.
    Phase(usize),
    /// What goes by one of the rail's [`Schedule::CONNECTIONS`].
    Connection(usize),
}

impl Track {
    /// The phase whose thread or stream it has; the connections have those of the phases along the rail, in a call of one of them, too.
    pub fn home(self, phases: &[Phase]) -> Option<Phase> {
        match self {
            Self::Phase(phase) => phases.get(phase).copied(),
            Self::Connection(0) => Some(Phase::Collect),
            Self::Connection(_) => Some(Phase::Diffuse),
        }
    }
}

/// Every track takes its steps in order. Beyond that, a step waits for the one before it in its slice; and the first step of a slice for the
/// last step of the slice that had its slot before.
///
/// Steps along the rail stand in one row: collect 0, collect 1, diffuse 0, collect 2, diffuse 1, .., and go by both connections in turn. So
/// one connection has the first collect and all diffuses but the last, and the other the rest: while what one of them sent is on
/// its way, the other has the link, at both ends of the call as well. The order is the same on all ranks, since nothing else decides it.
///
/// ```
/// use brigade_plan::hierarchical::{Track, Schedule, Step};
/// let schedule = Schedule { phases: 3, slices: 9, slots: 2, rail: Some((0, 2)) };
/// let needs = |phase, slice| schedule.needs(Step { phase, slice });
/// assert_eq!(needs(0, 1), None);
/// assert_eq!(needs(0, 5), Some(Step { phase: 2, slice: 3 }));
/// assert_eq!(needs(2, 5), Some(Step { phase: 1, slice: 5 }));
/// let last = Step { phase: 2, slice: 8 };
/// assert_eq!(schedule.step(Track::Connection(1), 8), Some(last));
/// assert_eq!(schedule.track(last), Track::Connection(1));
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Schedule {
    /// Phases of each slice.
    pub phases: usize,
    /// Slices in all.
    pub slices: usize,
    /// Slots that they take turns in.
    pub slots: usize,
    /// The first and the last phase that goes along the rail, which are the same where there is one.
    pub rail: Option<(usize, usize)>,
}

impl Schedule {
    /// Connections that each rank has to its rail.
    pub const CONNECTIONS: usize = 2;

    /// Of a plan.
    pub fn of(plan: &SlicedPlan) -> Self {
        Self::new(&plan.phases, plan.slices, plan.slots)
    }

    /// Of so many slices that go through these phases.
    pub(super) fn new(phases: &[Phase], slices: usize, slots: usize) -> Self {
        let along = |p: &Phase| matches!(p, Phase::Collect | Phase::Diffuse);
        Self {
            phases: phases.len(),
            slices,
            slots,
            rail: phases
                .iter()
                .position(along)
                .zip(phases.iter().rposition(along)),
        }
    }

    /// The slot of a slice: they go round.
    pub fn slot(&self, slice: usize) -> usize {
        slice % self.slots.max(1)
    }

    /// What must be done before a step, besides what its track has before it.
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

    /// What [`needs`](Self::needs) a step.
    pub fn needed_by(&self, step: Step) -> Option<Step> {
        let Step { phase, slice } = step;
        let next = match phase + 1 < self.phases {
            true => Step {
                phase: phase + 1,
                slice,
            },
            false => Step {
                phase: 0,
                slice: slice + self.slots.max(1),
            },
        };
        (next.slice < self.slices).then_some(next)
    }

    /// All tracks, as a slice comes by them.
    pub fn tracks(&self) -> impl Iterator<Item = Track> + use<> {
        let rail = self.rail;
        (0..self.phases).flat_map(move |phase| {
            let [first, last] = match rail {
                Some((first, last)) => [phase == first, phase == last],
                None => [false; 2],
            };
            let inside = (!first && !last).then_some(Track::Phase(phase));
            let connections = [
                first.then_some(Track::Connection(0)),
                last.then_some(Track::Connection(1)),
            ];
            inside.into_iter().chain(connections.into_iter().flatten())
        })
    }

    /// The track of a step.
    pub fn track(&self, step: Step) -> Track {
        let Step { phase, slice } = step;
        match self.rail {
            Some((first, last)) if first == last && phase == first => {
                Track::Connection(slice % Self::CONNECTIONS)
            }
            Some((first, _)) if phase == first => Track::Connection(usize::from(slice > 0)),
            Some((_, last)) if phase == last => {
                Track::Connection(usize::from(slice + 1 == self.slices))
            }
            _ => Track::Phase(phase),
        }
    }

    /// The connection of a step along the rail.
    pub fn connection(&self, step: Step) -> usize {
        match self.track(step) {
            Track::Connection(which) => which,
            Track::Phase(_) => 0,
        }
    }

    /// How many steps a track has.
    pub fn steps_of(&self, track: Track) -> usize {
        match (track, self.rail) {
            (Track::Connection(which), Some((first, last))) if first == last => {
                (self.slices + Self::CONNECTIONS - 1 - which) / Self::CONNECTIONS
            }
            // Of two phases as well: each connection has half of twice as many.
            _ => self.slices,
        }
    }

    /// The `n`-th step of a track, if it has so many.
    pub fn step(&self, track: Track, n: usize) -> Option<Step> {
        let step = |phase, slice| Some(Step { phase, slice });
        if n >= self.steps_of(track) {
            return None;
        }
        match track {
            Track::Phase(phase) => step(phase, n),
            Track::Connection(which) => {
                let (first, last) = self.rail?;
                match which {
                    _ if first == last => step(first, n * Self::CONNECTIONS + which),
                    0 if n == 0 => step(first, 0),
                    0 => step(last, n - 1),
                    _ if n + 1 == self.slices => step(last, n),
                    _ => step(first, n + 1),
                }
            }
        }
    }

    /// All steps of a track, in order.
    pub fn steps(&self, track: Track) -> impl Iterator<Item = Step> + use<> {
        let schedule = *self;
        (0..).map_while(move |n| schedule.step(track, n))
    }

    /// Whether a step is the last of its track.
    pub fn is_last(&self, step: Step) -> bool {
        let track = self.track(step);
        let last = self.steps_of(track).checked_sub(1);
        last.and_then(|n| self.step(track, n)) == Some(step)
    }
}
