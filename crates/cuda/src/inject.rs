//! Fault injection: what kernels ask the hook about, and in which slots.
//!
//! A question lies in a slot of the [desk](crate::desk). Whatever may ask at the same time has a slot of its own.

use crate::job::Side;
use brigade_device::{Operation, Place, Point, Step};
use brigade_kernels::{
    MOST_STEPS, STEP_ARRIVE, STEP_CLEAR, STEP_CREDIT, STEP_MEET, STEP_POST, STEP_POST_OPEN,
    STEP_READ, STEP_RELEASED, STEP_START, STEP_WAIT,
};
use brigade_sync::{Layout, Role};

/// Launches of a communicator that may run at the same time.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Asker {
    /// Steps on the caller's stream.
    Caller,
    /// Steps beside it.
    Waiter,
    /// Flags behind copies.
    Mover,
    /// Messages: a slot for each block that may wait.
    Messages,
}

impl Asker {
    /// Steps on a stream beside the caller's, or on that.
    pub(crate) const fn of(side: Option<Side>) -> Self {
        match side {
            None => Self::Caller,
            Some(Side::Waiter) => Self::Waiter,
            Some(Side::Mover) => Self::Mover,
        }
    }

    /// The slot of its first step or block.
    pub(crate) const fn first_slot(self) -> usize {
        self as usize * MOST_STEPS
    }
}

/// A question, as kernels write it.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Words {
    /// Packed, as `StepsParams` has it.
    pub(crate) step: u64,
    /// Which use or signal it is about.
    pub(crate) epoch: u64,
    pub(crate) call: u64,
    pub(crate) operation: u64,
}

impl Words {
    /// The step that it is about, as hooks are told of it; nothing if it is no point of a call.
    pub(crate) fn step(&self, layout: &Layout, rank: usize) -> Option<Step> {
        let bits = self.step;
        let (peer, word) = ((bits >> 20 & 0xFF) as usize, (bits & 0xF_FFFF) as usize);
        let place = || self.place(layout, rank, word);
        let (point, place) = match bits >> 60 {
            STEP_START => (Point::Begin, None),
            STEP_ARRIVE => (Point::Arrive, None),
            STEP_MEET => (Point::Meet, None),
            STEP_CLEAR => (Point::Clear, Some(self.pushed(rank, word))),
            STEP_READ => (Point::Read, Some(self.pushed(peer, word))),
            STEP_CREDIT | STEP_RELEASED => (Point::Credit, Some(place()?.1)),
            STEP_WAIT => (Point::Read, Some(place()?.1)),
            STEP_POST | STEP_POST_OPEN => match place()? {
                (Role::Filled { .. }, place) => (Point::Announce, Some(place)),
                (Role::Credit { .. }, place) => (Point::Done, Some(place)),
            },
            _ => return None,
        };
        Some(Step {
            point,
            operation: Operation::from_code(self.operation as u32)?,
            call: self.call,
            rank,
            peer,
            place,
        })
    }

    /// What `from` has pushed into a buffer of sums.
    fn pushed(&self, from: usize, word: usize) -> Place {
        Place {
            slot: from,
            piece: word >> 8,
            half: word & 0xFF,
            epoch: self.epoch as u32,
        }
    }

    /// What a word is for, and which data its flag is about. Credits are about all that a rank has in a half.
    fn place(&self, layout: &Layout, rank: usize, word: usize) -> Option<(Role, Place)> {
        let (region, role) = layout.role(word)?;
        let (half, slot, piece) = match role {
            Role::Filled { half, slot, piece } => (half, slot, piece),
            Role::Credit { half, .. } => (half, rank, 0),
        };
        let place = Place {
            slot: region.map_or(slot, |region| region.0.into()),
            piece,
            half: half.index(),
            // Epochs wrap; what kernels count does not.
            epoch: self.epoch as u32,
        };
        Some((role, place))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::steps::{Steps, Use};
    use brigade_device::{CommConfig, Group, ParallelMode, Region};
    use brigade_sync::{Area, Half};

    /// What asks: as all ranks count, rank 1 of 3.
    fn layout() -> (Layout, Group) {
        let config = CommConfig {
            regions: 4,
            ..CommConfig::new(ParallelMode::Tp)
        };
        let group = Group {
            mode: config.mode,
            rank: 1,
            size: 3,
        };
        (Layout::new(&config, 16, 1, 3).unwrap(), group)
    }

    /// The steps of a launch, as hooks are told of them.
    fn told(make: impl FnOnce(&mut Steps<'_>)) -> Vec<Option<Step>> {
        let (layout, group) = layout();
        let mut steps = Steps::new(&layout, group);
        make(&mut steps);
        let batches = steps.batches();
        let list = batches.iter().flat_map(|b| &b.0[..b.1 as usize]);
        let words = |&step| Words {
            step,
            epoch: (7 << 32) + 5,
            call: 9,
            operation: Operation::GatherLinear as u64,
        };
        list.map(|step| words(step).step(&layout, 1)).collect()
    }

    fn at(point: Point, peer: usize, place: Option<[usize; 3]>) -> Option<Step> {
        Some(Step {
            point,
            operation: Operation::GatherLinear,
            call: 9,
            rank: 1,
            peer,
            place: place.map(|[slot, piece, half]| Place {
                slot,
                piece,
                half,
                epoch: 5,
            }),
        })
    }

    #[test]
    fn steps_are_told_as_the_host_tells_them() {
        let of = Use {
            area: Area::ReduceScatter,
            half: Half::of(1),
        };
        let call = told(|steps| {
            steps.start();
            steps.arrive();
            steps.begin(of);
            steps.filled(0, of, 2, 3);
            steps.await_filled(of, 0, 15, 2);
            steps.end(of);
            steps.meet();
            steps.finish();
        });
        let both = |point, place| [2, 0].map(|peer| at(point, peer, place));
        let want = [
            vec![at(Point::Begin, 1, None), None],
            both(Point::Arrive, None).into(),
            vec![None],
            both(Point::Credit, Some([1, 0, 1])).into(),
            vec![at(Point::Announce, 0, Some([2, 3, 1]))],
            vec![at(Point::Read, 2, Some([0, 15, 1]))],
            both(Point::Done, Some([1, 0, 1])).into(),
            vec![None],
            both(Point::Meet, None).into(),
            vec![None],
        ];
        assert_eq!(call, want.concat());
    }

    #[test]
    fn signals_are_told_by_their_region() {
        let region = Region(3);
        let signals = told(|steps| {
            steps.signal(region, 2).unwrap();
            steps.await_signal(region, 0).unwrap();
            steps.release(region, 0).unwrap();
        });
        let place = Some([3, 0, 0]);
        let want = [
            at(Point::Credit, 2, place),
            None,
            at(Point::Announce, 2, place),
            None,
            at(Point::Read, 0, place),
            at(Point::Done, 0, place),
        ];
        assert_eq!(signals, want);
    }

    #[test]
    fn what_is_no_point_is_not_told() {
        let (layout, _) = layout();
        let words = |step, operation| Words {
            step,
            epoch: 1,
            call: 1,
            operation,
        };
        let barrier = Operation::Barrier as u64;
        let start = STEP_START << 60;
        assert!(words(start, barrier).step(&layout, 1).is_some());
        assert!(words(start, 99).step(&layout, 1).is_none(), "no operation");
        // The first word is one of the barrier's.
        let post = words(STEP_POST << 60, barrier);
        assert!(post.step(&layout, 1).is_none(), "no flag of data");
    }

    #[test]
    fn launches_that_may_run_at_once_share_no_slot() {
        let steps = [Some(Side::Waiter), Some(Side::Mover), None].map(Asker::of);
        let mut first: Vec<_> = steps.map(Asker::first_slot).into();
        first.push(Asker::Messages.first_slot());
        first.sort_unstable();
        assert!(first.windows(2).all(|w| w[1] - w[0] == MOST_STEPS));
        assert_eq!(*first.last().unwrap(), Asker::Messages.first_slot());
    }
}
