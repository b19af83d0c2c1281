//! What a machine's rank needs between machines.

use crate::{Call, FaultRecord, Group, Result, Stream, View, ViewMut, plan::signature_of};
use std::time::Duration;

/// Pieces that travel along a rail.
#[derive(Debug)]
pub struct RailParams<'a> {
    /// The call that they belong to: where a rail can tell, ranks that make another one are noticed.
    pub call: &'a Call,
    /// Elements of each machine's piece, the same list on every rank of the rail. Of an [`exchange`](Rail::exchange), those of each for
    /// each.
    pub pieces: &'a [usize],
    /// What goes.
    pub from: View<'a>,
    /// What comes.
    pub to: ViewMut<'a>,
    /// The longest that it may wait.
    pub within: Duration,
}

impl RailParams<'_> {
    /// As [`Call::signature`], of the call and the pieces: ranks that have others for an equal call are noticed as well.
    pub fn signature(&self) -> u32 {
        signature_of(&(self.call, self.pieces))
    }
}

/// One rank's connection to the ranks with its local number on all other machines.
///
/// Work is enqueued on a stream, and runs in the order in which it was enqueued on all of them, which is the same on all ranks; the host
/// need not wait for it. Work that waits for others on a rail that stopped ends, and what it gives is poison. (A host's stream
/// runs its work at once. On GPUs, a rail is a communicator of NCCL's.)
pub trait Rail: Send + Sync {
    /// The rail: rank and size are numbers of machines.
    fn group(&self) -> &Group;

    /// Every machine gets its piece from all: `from` holds a piece for each machine, in machine order; `to` gets this machine's
    /// piece as each machine has it, in machine order.
    ///
    /// # Errors
    /// [`Error::Fault`](crate::Error::Fault) with ranks numbered by machine, if the rail stopped.
    fn collect(&self, on: &Stream, p: RailParams<'_>) -> Result<()>;

    /// Every machine's piece goes to all: `from` is this machine's, `to` gets all, in machine order.
    ///
    /// # Errors
    /// As [`collect`](Self::collect).
    fn diffuse(&self, on: &Stream, p: RailParams<'_>) -> Result<()>;

    /// Every machine sends each a piece of its own: `pieces` has elements of machine i for machine j at `i * machines + j`. `from` holds this
    /// machine's pieces for all, in machine order; `to` gets what all have for this one, in machine order.
    ///
    /// # Errors
    /// As [`collect`](Self::collect).
    fn exchange(&self, on: &Stream, p: RailParams<'_>) -> Result<()>;

    /// Stops the rail on all machines, which end with this record.
    fn stop(&self, record: FaultRecord);
}
