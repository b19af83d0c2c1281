//! A communicator is shared; *using* it takes a [`Lease`], and a lease has one stream.
//!
//! `&mut` alone would order the host's calls, not the device's work: a lease on another stream therefore first waits for
//! the event that the last lease left behind.

use crate::{
    low_latency::Lender,
    turns::{Claim, Turns},
    *,
};
use parking_lot::Mutex;
use std::{
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    time::Duration,
};

/// The backend's side of a communicator. Object-safe, and `&self`: whoever holds the [`Turn`] is alone.
pub trait Communicator: Send + Sync {
    /// Which ranks, as this one sees them.
    fn group(&self) -> &Group;
    /// This rank's accelerator.
    fn device(&self) -> &dyn Device;
    /// A stream for calls [beside](Comm::lease_beside) the caller's.
    ///
    /// # Errors
    /// Backend errors.
    fn own_stream(&self) -> Result<Stream> {
        self.device().stream(i8::MAX)
    }
    /// What would be done for `call`.
    ///
    /// # Errors
    /// Why it cannot be done.
    fn plan(&self, call: &Call) -> Result<Plan, Reason>;
    /// See [`Comm::told`]: what a backend without figures says.
    ///
    /// # Errors
    /// As [`plan`](Self::plan).
    fn told(&self, call: &Call) -> Result<String, Reason> {
        self.plan(call).map(|plan| plan.to_string())
    }
    /// The fault that stopped the communicator, if one did.
    fn fault(&self) -> Option<FaultRecord>;
    /// Ends every wait of every rank with [`FaultKind::Aborted`].
    fn abort(&self);
    /// See [`Comm::reset`].
    ///
    /// # Errors
    /// [`Error::Group`] naming the ranks that did not come.
    fn reset(&self, within: Duration) -> Result<()>;
    /// See [`Comm::shrink`]: what a backend without it says.
    ///
    /// # Errors
    /// As there.
    fn shrink(&self, _within: Duration) -> Result<Absent> {
        Err(Reason::new(
            "no-engine",
            "this device's groups do not shrink",
            "make a new group of those who are left",
        )
        .into())
    }
    /// See [`Comm::absent`].
    fn absent(&self) -> Absent {
        Absent::default()
    }
    /// See [`Comm::close`].
    ///
    /// # Errors
    /// As a call.
    fn close(&self, within: Duration) -> Result<()>;
    /// What was done so far.
    fn traffic(&self) -> Traffic;
    /// See [`Lease::barrier`].
    ///
    /// # Errors
    /// As every call on a communicator: see the crate's page on errors.
    fn barrier(&self, turn: &mut Turn) -> Result<()>;
    /// See [`Lease::all_reduce`].
    ///
    /// # Errors
    /// As every call.
    fn all_reduce(&self, turn: &mut Turn, p: AllReduceParams<'_>) -> Result<Plan>;
    /// See [`Lease::all_reduce_norm`]: what a backend without it says.
    ///
    /// # Errors
    /// As every call.
    fn all_reduce_norm(&self, _turn: &mut Turn, p: AllReduceNormParams<'_>) -> Result<Plan> {
        p.check()?;
        Err(Reason::new(
            "no-engine",
            "this device has no all-reduce with a norm",
            "call all_reduce, then add and normalize",
        )
        .into())
    }
    /// See [`Lease::all_gather`].
    ///
    /// # Errors
    /// As every call.
    fn all_gather(&self, turn: &mut Turn, p: AllGatherParams<'_>) -> Result<Plan>;
    /// See [`Lease::reduce_scatter`].
    ///
    /// # Errors
    /// As every call.
    fn reduce_scatter(&self, turn: &mut Turn, p: ReduceScatterParams<'_>) -> Result<Plan>;
    /// See [`Lease::broadcast`].
    ///
    /// # Errors
    /// As every call.
    fn broadcast(&self, turn: &mut Turn, p: BroadcastParams<'_>) -> Result<Plan>;
    /// See [`Lease::all_to_all`].
    ///
    /// # Errors
    /// As every call.
    fn all_to_all(&self, turn: &mut Turn, p: AllToAllParams<'_>) -> Result<Plan>;
    /// See [`Lease::all_to_all_rows`]: what a backend without it says.
    ///
    /// # Errors
    /// As every call.
    fn all_to_all_rows(&self, _turn: &mut Turn, p: AllToAllRowsParams<'_>) -> Result<Plan> {
        p.check(self.group().size)?;
        Err(Reason::new(
            "no-engine",
            "this device has no all-to-all of rows that lists name",
            "gather the rows, and use all_to_all",
        )
        .into())
    }
    /// See [`Lease::send`].
    ///
    /// # Errors
    /// As every call.
    fn send(&self, turn: &mut Turn, p: SendParams<'_>) -> Result<()>;
    /// See [`Lease::recv`].
    ///
    /// # Errors
    /// As every call.
    fn recv(&self, turn: &mut Turn, p: RecvParams<'_>) -> Result<()>;
    /// See [`Lease::send_recv`].
    ///
    /// # Errors
    /// As every call.
    fn send_recv(&self, turn: &mut Turn, send: SendParams<'_>, recv: RecvParams<'_>) -> Result<()>;
    /// Space for this rank's rows in the user buffer, and the proof that they were written there.
    ///
    /// # Errors
    /// [`Error::Unsupported`] if they do not fit.
    fn own_chunk(
        &self,
        turn: &mut Turn,
        rows_per_rank: &[usize],
        columns: usize,
        dtype: DataType,
    ) -> Result<(Buffer, Filled)>;
    /// Gathers the rows of all ranks as part of `call`, without overlap: into the user buffer, or into a new buffer if
    /// they do not fit.
    ///
    /// # Errors
    /// As every call.
    fn gather_chunk(
        &self,
        turn: &mut Turn,
        call: &LinearCall,
        chunk: Chunk<'_>,
    ) -> Result<GatheredParts>;
    /// As [`reduce_scatter`](Self::reduce_scatter), as part of `call`, whose signature it bears: a rank that makes another
    /// call is noticed.
    ///
    /// # Errors
    /// As every call.
    fn reduce_scatter_parts(
        &self,
        turn: &mut Turn,
        call: &LinearCall,
        p: ReduceScatterParams<'_>,
    ) -> Result<Plan>;
    /// See [`Lease::all_gather_lora_linear`]. A backend overrides it to overlap; the override can still call the
    /// fallback.
    ///
    /// # Errors
    /// As every call.
    fn all_gather_lora_linear(
        &self,
        turn: &mut Turn,
        p: AllGatherLoraLinearParams<'_>,
    ) -> Result<GatherLinearParts> {
        fallback::all_gather_lora_linear(self, turn, p)
    }
    /// See [`Lease::lora_linear_reduce_scatter`].
    ///
    /// # Errors
    /// As every call.
    fn lora_linear_reduce_scatter(
        &self,
        turn: &mut Turn,
        p: LoraLinearReduceScatterParams<'_>,
    ) -> Result<Reduced> {
        fallback::lora_linear_reduce_scatter(self, turn, p)
    }
    /// See [`Lease::lora_linear_with_all_reduce`].
    ///
    /// # Errors
    /// As every call.
    fn lora_linear_with_all_reduce(
        &self,
        turn: &mut Turn,
        p: LoraLinearAllReduceParams<'_>,
    ) -> Result<Reduced> {
        fallback::lora_linear_with_all_reduce(self, turn, p)
    }
    /// See [`Lease::lora_linear_with_all_reduce_norm`].
    ///
    /// # Errors
    /// As every call.
    fn lora_linear_with_all_reduce_norm(
        &self,
        turn: &mut Turn,
        p: LoraLinearAllReduceNormParams<'_>,
    ) -> Result<LinearAllReduceNorm> {
        fallback::lora_linear_with_all_reduce_norm(self, turn, p)
    }
    /// Registered regions, where the backend has them.
    ///
    /// # Errors
    /// Why it has none.
    fn user_buffers(&self) -> Result<&dyn UserBuffers, Reason> {
        Err(Reason::new(
            "no-user-buffers",
            "this device registers no regions",
            "use send and recv",
        ))
    }
    /// Expert-parallel dispatch and combine, where the backend has them.
    ///
    /// # Errors
    /// Why it has none.
    fn experts(&self) -> Result<&dyn Experts, Reason> {
        Err(Reason::new(
            "no-experts",
            "this device has no expert-parallel dispatch",
            "use all_to_all",
        ))
    }
}

/// What a communicator has done since it was joined.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Traffic {
    /// Calls that ended well.
    pub calls: u64,
    /// Bytes that this rank itself moved to or from other ranks' memory.
    pub moved_bytes: u64,
    /// Nanoseconds that this rank waited for others, over all of its threads.
    pub waited_ns: u64,
    /// The same for every rank of the group, in rank order: whom this rank waits for. Its own entry stays zero.
    pub waits: Vec<PeerWait>,
}

/// How a rank waited for one other.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct PeerWait {
    /// Waits for something that was not there yet: an arrival, data or a credit. (On a GPU not for rows of the low-latency exchange, but for the beginning of their sends.)
    pub waits: u64,
    /// Nanoseconds that they took.
    pub waited_ns: u64,
}

pub(crate) struct Shared {
    pub(crate) backend: Arc<dyn Communicator>,
    pub(crate) turns: Arc<Turns>,
    closed: AtomicBool,
    /// The communicator's own stream, once there is one.
    pub(crate) beside: Mutex<Option<Stream>>,
    /// Of the low-latency exchange.
    pub(crate) slots: Lender,
}

/// A communicator: one rank's membership in a group. Clones are the same communicator.
///
/// Dropping it parks its resources and never waits; [`close`](Self::close) is the collective end.
#[derive(Clone)]
pub struct Comm(pub(crate) Arc<Shared>);

impl Comm {
    /// Wraps a backend's communicator.
    pub fn new(backend: Arc<dyn Communicator>) -> Self {
        Self(Arc::new(Shared {
            backend,
            turns: Arc::default(),
            closed: AtomicBool::new(false),
            beside: Mutex::new(None),
            slots: Lender::default(),
        }))
    }

    /// Which ranks, as this one sees them.
    pub fn group(&self) -> Group {
        *self.0.backend.group()
    }

    /// What would be done for `call`, without doing it.
    ///
    /// # Errors
    /// Why it cannot be done.
    pub fn explain(&self, call: &Call) -> Result<Plan, Reason> {
        self.0.backend.plan(call)
    }

    /// What would be done for `call` and why, in one line for people: mode, algorithm or transport, its launch, the figure that decided, and
    /// where that is from, or that nobody has measured it.
    ///
    /// # Errors
    /// Why it cannot be done, as [`explain`](Self::explain).
    pub fn told(&self, call: &Call) -> Result<String, Reason> {
        self.0.backend.told(call)
    }

    /// What was done so far.
    pub fn traffic(&self) -> Traffic {
        self.0.backend.traffic()
    }

    /// # Errors
    /// The fault that stopped the communicator, if one did; [`Error::Closed`] after [`close`](Self::close).
    pub fn check(&self) -> Result<()> {
        if self.0.closed.load(Ordering::Acquire) {
            return Err(Error::Closed);
        }
        self.0
            .backend
            .fault()
            .map_or(Ok(()), |f| Err(Error::Fault(f)))
    }

    /// Ends every wait of every rank with [`FaultKind::Aborted`]. Needs no lease.
    pub fn abort(&self) {
        self.0.backend.abort();
    }

    /// After a fault: all ranks come together and start a new generation, in which old flags mean nothing.
    ///
    /// # Errors
    /// [`Error::Busy`] while a lease is live; [`Error::Group`] naming the ranks that did not come `within` the time
    /// (it may be called again).
    pub fn reset(&self, within: Duration) -> Result<()> {
        let _claim = self.claim()?;
        self.0.backend.reset(within)
    }

    /// After ranks were lost: those who are left agree on who that is, and start a new generation without the others. Ranks keep their
    /// numbers, and the group its size. [`dispatch`](Lease::dispatch), [`combine`](Lease::combine), the low-latency exchange,
    /// [`barrier`](Lease::barrier) and [`close`](Self::close) go on; every other call is [`Error::Unsupported`] with `absent-ranks` from
    /// then on. May be called again when more are lost; absent ranks do not come back.
    ///
    /// All who are left call it, and no [`reset`](Self::reset). It ends as soon as all have come but those who are known to be gone; whoever
    /// else has not come `within` the time of any other is left out, and gets [`Error::Unsupported`] with `left-out` for all calls. It takes
    /// three times the time at most: for own work to end, for the others to come, and for them to start anew.
    ///
    /// # Errors
    /// [`Error::Busy`] while a lease is live; [`Error::Unsupported`] with `left-out` if the others went on without this rank, with
    /// `no-engine` if the device's groups do not shrink, with `ranks` for more than [`Absent::MOST_RANKS`].
    pub fn shrink(&self, within: Duration) -> Result<Absent> {
        let _claim = self.claim()?;
        self.0.backend.shrink(within)
    }

    /// The ranks that this group was shrunk by.
    pub fn absent(&self) -> Absent {
        self.0.backend.absent()
    }

    /// The collective end: all ranks come, and then nobody waits for this one any more. Later leases are [`Error::Closed`].
    /// Memory goes with the last clone, and the last view of gathered rows.
    ///
    /// # Errors
    /// [`Error::Busy`] while a lease is live; the fault, if ranks did not come.
    pub fn close(&self, within: Duration) -> Result<()> {
        let _claim = self.claim()?;
        self.0.backend.close(within)?;
        self.0.closed.store(true, Ordering::Release);
        Ok(())
    }

    pub(crate) fn claim(&self) -> Result<Claim<'_>> {
        self.0.turns.claim("the communicator")
    }
}

impl std::fmt::Debug for Comm {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_tuple("Comm").field(self.0.backend.group()).finish()
    }
}
