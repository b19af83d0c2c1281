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
    /// What goes by one of the rail's [`Schedule::connections`].
    Connection(usize),
}

impl Track {
    /// How many homes there are, where a rank has so many connections to its rail.
    pub const fn homes(connections: usize) -> usize {
        Phase::ALL.len() + connections.saturating_sub(2)
    }

    /// Which of [`homes`](Self::homes) threads or streams it has: one for each of all phases, and behind them those of connections beyond the
    /// second. The first two have those of the phases along the rail, in a call of one of them, too.
    pub fn home(self, phases: &[Phase]) -> Option<usize> {
        match self {
            Self::Phase(phase) => phases.get(phase).map(|phase| *phase as usize),
            Self::Connection(0) => Some(Phase::Collect as usize),
            Self::Connection(1) => Some(Phase::Diffuse as usize),
            Self::Connection(which) => Some(Phase::ALL.len() + which - 2),
        }
    }
}

/// Every track takes its steps in order. Beyond that, a step waits for the one before it in its slice; and the first step of a slice for the
/// last step of the slice that had its slot before.
///
/// Steps along the rail stand in one row: collect 0, collect 1, diffuse 0, collect 2, diffuse 1, .., or, where one phase goes along it, slice
/// by slice; and go by all connections in turn. So of two, one has the first collect and all diffuses but the last, and the other the rest:
/// while what one of them sent is on its way, the other has the link, at both ends of the call as well. The order is the same on all
/// ranks, since nothing else decides it.
///
/// ```
/// use brigade_plan::hierarchical::{Track, Schedule, Step};
/// let schedule = Schedule { phases: 3, slices: 9, slots: 2, rail: Some((0, 2)), connections: 2 };
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
    /// Connections to the rail that are used. At least 2 of two phases along it: a collect is in front of the diffuse that may have to end first.
    pub connections: usize,
}

impl Schedule {
    /// Of a plan.
    pub fn of(plan: &SlicedPlan) -> Self {
        Self::new(&plan.phases, (plan.slices, plan.slots), plan.connections)
    }

    /// Of so many slices, in so many slots, that go through these phases.
    pub(super) fn new(
        phases: &[Phase],
        (slices, slots): (usize, usize),
        connections: usize,
    ) -> Self {
        let along = |p: &Phase| matches!(p, Phase::Collect | Phase::Diffuse);
        let mut of = phases.iter();
        let rail = of.position(along).zip(phases.iter().rposition(along));
        let least = match rail {
            Some((first, last)) if first != last => 2,
            _ => 1,
        };
        Self {
            phases: phases.len(),
            slices,
            slots,
            rail,
            connections: connections.max(least),
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

    /// All tracks that have steps, as a slice comes by them.
    pub fn tracks(&self) -> impl Iterator<Item = Track> + use<> {
        let schedule = *self;
        let of = move |phase| {
            let connections = match schedule.rail {
                Some((first, last)) if first == last && phase == first => 0..schedule.connections,
                Some((first, _)) if phase == first => 0..schedule.connections - 1,
                Some((_, last)) if phase == last => schedule.connections - 1..schedule.connections,
                _ => 0..0,
            };
            let inside = (!schedule.is_along(phase)).then_some(Track::Phase(phase));
            inside.into_iter().chain(connections.map(Track::Connection))
        };
        let all = (0..self.phases).flat_map(of);
        all.filter(move |track| schedule.steps_of(*track) > 0)
    }

    /// Whether a phase goes along the rail.
    pub(super) fn is_along(&self, phase: usize) -> bool {
        self.rail
            .is_some_and(|(first, last)| phase == first || phase == last)
    }

    /// The place of a step in the row of those along the rail.
    fn place(&self, step: Step) -> Option<usize> {
        let Step { phase, slice } = step;
        let (first, last) = self.rail?;
        match (phase == first, phase == last) {
            (true, true) => Some(slice),
            (true, false) => Some((2 * slice).saturating_sub(1)),
            (false, true) => Some((2 * slice + 2).min(2 * self.slices - 1)),
            (false, false) => None,
        }
    }

    /// The step at a place of that row.
    fn at(&self, place: usize) -> Option<Step> {
        let (first, last) = self.rail?;
        let (phase, slice) = match place {
            _ if first == last => (first, place),
            0 => (first, 0),
            _ if place + 1 == 2 * self.slices => (last, self.slices - 1),
            _ if place % 2 == 1 => (first, place.div_ceil(2)),
            _ => (last, place / 2 - 1),
        };
        (slice < self.slices).then_some(Step { phase, slice })
    }

    /// The track of a step.
    pub fn track(&self, step: Step) -> Track {
        match self.place(step) {
            Some(place) => Track::Connection(place % self.connections),
            None => Track::Phase(step.phase),
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
        let along = match self.rail {
            Some((first, last)) if first == last => self.slices,
            Some(_) => 2 * self.slices,
            None => 0,
        };
        match track {
            Track::Phase(_) => self.slices,
            Track::Connection(which) => {
                (along + self.connections - 1).saturating_sub(which) / self.connections
            }
        }
    }

    /// The `n`-th step of a track, if it has so many.
    pub fn step(&self, track: Track, n: usize) -> Option<Step> {
        if n >= self.steps_of(track) {
            return None;
        }
        match track {
            Track::Phase(phase) => Some(Step { phase, slice: n }),
            Track::Connection(which) => self.at(n * self.connections + which),
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
