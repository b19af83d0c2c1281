//! Fault injection: a hook that a device calls at the points of its protocols, so that a server can be tried with delays,
//! lost messages and ranks that die, and so that a guard can be shown to guard something.
//!
//! A device takes an [`Injector`] where it is configured, and asks it at every [`Step`] of every call. Without one, a step
//! costs a branch.

use crate::Operation;
use std::{fmt, sync::Arc, time::Duration};

/// Points of a call at which the hook is asked. A call passes [`Begin`](Self::Begin) once and the others as often as it
/// has peers, chunks and pieces.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Point {
    /// The call begins; no peer has heard of it.
    Begin,
    /// This rank is about to tell the peer that it is in the call. A post.
    Arrive,
    /// This rank is about to wait for the peer's credit: until the peer is done with the last use of the same place.
    /// A guard.
    Credit,
    /// Data for the peer is in place, and about to be announced to it. A post.
    Announce,
    /// Data from the peer was announced, and is about to be read.
    Read,
    /// This rank is done with a use, and about to tell the peer. A post.
    Done,
    /// This rank is about to empty a buffer of sums that it has read, before peers push into it again. A guard.
    Clear,
    /// The work is done, and this rank is about to see whether the peer was in the same call.
    Meet,
}

impl Point {
    /// All of them, in the order in which a call comes to them.
    pub const ALL: [Self; 8] = [
        Self::Begin,
        Self::Arrive,
        Self::Credit,
        Self::Announce,
        Self::Read,
        Self::Done,
        Self::Clear,
        Self::Meet,
    ];

    /// Its name in lists and reports.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Begin => "begin",
            Self::Arrive => "arrive",
            Self::Credit => "credit",
            Self::Announce => "announce",
            Self::Read => "read",
            Self::Done => "done",
            Self::Clear => "clear",
            Self::Meet => "meet",
        }
    }

    /// Whether [`Action::Drop`] means something here.
    pub const fn is_post(self) -> bool {
        matches!(self, Self::Arrive | Self::Announce | Self::Done)
    }
}

impl fmt::Display for Point {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// Which data a step is about.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Place {
    /// Chunk, source rank or region, as the operation counts.
    pub slot: usize,
    /// Piece of it.
    pub piece: usize,
    /// Which of the two alternating halves it lies in, or of the three buffers of sums.
    pub half: usize,
    /// Use of that half, or of the buffers, counted from 1 in every generation; wraps.
    pub epoch: u32,
}

/// Where a call is when the hook is asked.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Step {
    /// The point.
    pub point: Point,
    /// Which operation, or the part of it that the rank is in.
    pub operation: Operation,
    /// Number of the call on this communicator, from 1. Calls that a fault ended do not count.
    pub call: u64,
    /// The rank that asks.
    pub rank: usize,
    /// The rank that it is about to tell or to wait for, or whose data it has; its own at [`Point::Begin`] and
    /// [`Point::Clear`].
    pub peer: usize,
    /// The data, where the point is about some.
    pub place: Option<Place>,
}

/// The promise that leaving out a guard harms nobody: see [`Action::Skip`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Unguarded(());

impl Unguarded {
    /// Makes the promise.
    ///
    /// # Safety
    /// Guards keep ranks from writing what another one reads. Whoever leaves one out orders these accesses by other
    /// means, for instance by holding the reader in its hook until the writer has come to a later step. At
    /// [`Point::Clear`] there is nothing to order, since buffers of sums are atomics: sums are wrong, and nothing worse.
    pub const unsafe fn promise() -> Self {
        Self(())
    }
}

/// What a hook wants done. What makes no sense at a point is ignored there. To die, a hook ends the thread that makes
/// the call, or the process.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Action {
    /// Nothing out of the ordinary.
    #[default]
    GoOn,
    /// Rest so long, or until the group is stopped; then go on.
    Stall(Duration),
    /// At a post: never send this flag.
    Drop,
    /// At a guard: do not wait, or do not clear.
    Skip(Unguarded),
}

impl Action {
    /// For devices: whether this leaves a step of the call out, a post that gets lost or a guard that is not there.
    pub const fn leaves_out(self, point: Point) -> bool {
        match self {
            Self::GoOn | Self::Stall(_) => false,
            Self::Drop => point.is_post(),
            Self::Skip(_) => matches!(point, Point::Credit | Point::Clear),
        }
    }
}

/// A hook, asked by several threads at a time: on the host by the thread that comes to the step, for a GPU by threads that
/// do nothing else.
pub trait Inject: Send + Sync {
    /// What to do at a step.
    fn at(&self, step: &Step) -> Action;
}

impl<F: Fn(&Step) -> Action + Send + Sync> Inject for F {
    fn at(&self, step: &Step) -> Action {
        self(step)
    }
}

/// A hook, shared, as configurations hold it. Two are equal if they are the same hook.
///
/// ```
/// use brigade_device::{Action, Injector, Operation, Point, Step};
/// use std::{sync::Arc, time::Duration};
///
/// let late = Action::Stall(Duration::from_millis(2));
/// let hook = Injector::new(Arc::new(move |step: &Step| match step.point {
///     Point::Begin if step.rank == 1 => late,
///     _ => Action::GoOn,
/// }));
/// let mut step = Step {
///     point: Point::Begin,
///     operation: Operation::Barrier,
///     call: 1,
///     rank: 1,
///     peer: 1,
///     place: None,
/// };
/// assert_eq!(hook.at(&step), late);
/// step.rank = 0;
/// assert_eq!(hook.at(&step), Action::GoOn);
/// ```
#[derive(Clone)]
pub struct Injector(Arc<dyn Inject>);

impl Injector {
    /// Shares a hook.
    pub fn new(hook: Arc<dyn Inject>) -> Self {
        Self(hook)
    }

    /// Asks it.
    pub fn at(&self, step: &Step) -> Action {
        self.0.at(step)
    }
}

impl fmt::Debug for Injector {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Injector")
    }
}

impl PartialEq for Injector {
    fn eq(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.0, &other.0)
    }
}

impl Eq for Injector {}
