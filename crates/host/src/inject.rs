//! Asking the hook of fault injection, and doing what it says.

use crate::job::{Job, Use};
use brigade_device::{Action, Injector, Place, Point, Step};
use std::{
    thread,
    time::{Duration, Instant},
};

impl Use {
    /// A piece of a slot of this use, as hooks are told of it.
    pub(crate) fn place(self, slot: usize, piece: usize) -> Place {
        Place {
            slot,
            piece,
            half: self.half.index(),
            epoch: self.epoch,
        }
    }
}

impl Job {
    /// Comes to a step of the call. False if it is to be left out: a post that gets lost, or a guard that is not there.
    pub(crate) fn step(&self, point: Point, peer: usize, place: Option<Place>) -> bool {
        match &self.core.inject {
            None => true,
            Some(hook) => self.ask(hook, point, peer, place),
        }
    }

    #[cold]
    fn ask(&self, hook: &Injector, point: Point, peer: usize, place: Option<Place>) -> bool {
        let step = Step {
            point,
            operation: self.operation,
            call: self.number,
            rank: self.rank(),
            peer,
            place,
        };
        let action = hook.at(&step);
        if let Action::Stall(time) = action {
            self.stall(time);
        }
        !action.leaves_out(point)
    }

    fn stall(&self, time: Duration) {
        /// How soon a stall ends once the group is stopped.
        const REST: Duration = Duration::from_millis(10);
        let start = Instant::now();
        while let Some(left) = time.checked_sub(start.elapsed())
            && !left.is_zero()
            && self.core.control.fault().is_none()
        {
            // tidy: sleeps because the delay is what was asked for
            thread::sleep(left.min(REST));
        }
    }
}
