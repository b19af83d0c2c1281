//! A communicator is shared; *using* it takes a [`Lease`], and a lease has one stream.
//!
//! `&mut` alone would order the host's calls, not the device's work: a lease on another stream therefore first waits for
//! the event that the last lease left behind.

use crate::*;
use parking_lot::Mutex;
use std::{
    marker::PhantomData,
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
    /// What would be done for `call`.
    ///
    /// # Errors
    /// Why it cannot be done.
    fn plan(&self, call: &Call) -> Result<Plan, Reason>;
    /// The fault that stopped the communicator, if one did.
    fn fault(&self) -> Option<FaultRecord>;
    /// Ends every wait of every rank with [`FaultKind::Aborted`].
    fn abort(&self);
    /// See [`Comm::reset`].
    ///
    /// # Errors
    /// [`Error::Group`] naming the ranks that did not come.
    fn reset(&self, within: Duration) -> Result<()>;
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
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Traffic {
    /// Calls that ended well.
    pub calls: u64,
    /// Bytes that this rank itself moved to or from other ranks' memory.
    pub moved_bytes: u64,
    /// Nanoseconds that this rank waited for others, over all of its threads.
    pub waited_ns: u64,
}

/// Gathered rows, and their scales if they are quantized.
#[derive(Debug)]
pub struct GatheredParts {
    /// `[sum of rows_per_rank, K]`
    pub kernel: Buffer,
    /// Scales and scheme.
    pub scales: Option<(Buffer, QScheme)>,
}

impl GatheredParts {
    /// The rows as a factor of a product.
    ///
    /// # Errors
    /// [`Error::Invalid`] if kernel and scales do not belong together.
    pub fn operand(&self) -> Result<Operand<'_>> {
        let kernel = self.kernel.view();
        Ok(match &self.scales {
            None => Operand::Plain(kernel),
            Some((scales, scheme)) => {
                Operand::Quantized(QView::new(kernel, scales.view(), None, *scheme)?)
            }
        })
    }
}

/// What a backend returns from gather-linear.
#[derive(Debug)]
pub struct GatherLinearParts {
    /// The result, unless it went into the caller's buffer.
    pub d: Option<Buffer>,
    /// The gathered rows.
    pub a: GatheredParts,
    /// What was done.
    pub plan: Plan,
}

/// A result, and what was done for it.
#[derive(Debug)]
pub struct Reduced {
    /// The result, unless it went into the caller's buffer.
    pub d: Option<Buffer>,
    /// What was done.
    pub plan: Plan,
}

/// Proof of exclusive use, and the order of the work: made by [`Comm::lease`] alone.
#[derive(Debug)]
pub struct Turn {
    number: u64,
    on: Stream,
}

impl Turn {
    /// Where the work goes.
    pub fn stream(&self) -> &Stream {
        &self.on
    }

    /// Which lease of the communicator it is, from 1.
    pub fn number(&self) -> u64 {
        self.number
    }
}

/// Proof that own rows lie in the user buffer. By value and not `Clone`: spent by the call that uses the rows, and
/// checked there against the backend's state.
#[derive(Debug)]
pub struct Filled {
    turn: u64,
    ticket: u64,
    rows: usize,
    columns: usize,
    dtype: DataType,
}

impl Filled {
    /// For backends: `ticket` says which use of which half it is.
    pub fn new(turn: &Turn, ticket: u64, rows: usize, columns: usize, dtype: DataType) -> Self {
        Self {
            turn: turn.number(),
            ticket,
            rows,
            columns,
            dtype,
        }
    }

    /// The lease it was made in.
    pub fn turn(&self) -> u64 {
        self.turn
    }

    /// The backend's own number.
    pub fn ticket(&self) -> u64 {
        self.ticket
    }

    /// Own rows.
    pub fn rows(&self) -> usize {
        self.rows
    }

    /// Their width.
    pub fn columns(&self) -> usize {
        self.columns
    }

    /// Their type.
    pub fn dtype(&self) -> DataType {
        self.dtype
    }
}

struct Shared {
    backend: Arc<dyn Communicator>,
    busy: AtomicBool,
    closed: AtomicBool,
    last: Mutex<(u64, Option<(Stream, Event)>)>,
}

/// A communicator: one rank's membership in a group. Clones are the same communicator.
///
/// Dropping it parks its resources and never waits; [`close`](Self::close) is the collective end.
#[derive(Clone)]
pub struct Comm(Arc<Shared>);

impl Comm {
    /// Wraps a backend's communicator.
    pub fn new(backend: Arc<dyn Communicator>) -> Self {
        Self(Arc::new(Shared {
            backend,
            busy: AtomicBool::new(false),
            closed: AtomicBool::new(false),
            last: Mutex::new((0, None)),
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

    /// The collective end: all ranks come, then everything is freed. Later leases are [`Error::Closed`].
    ///
    /// # Errors
    /// [`Error::Busy`] while a lease is live; the fault, if ranks did not come.
    pub fn close(&self, within: Duration) -> Result<()> {
        let _claim = self.claim()?;
        self.0.backend.close(within)?;
        self.0.closed.store(true, Ordering::Release);
        Ok(())
    }

    fn claim(&self) -> Result<Claim<'_>> {
        if self.0.busy.swap(true, Ordering::Acquire) {
            return Err(Error::Busy("the communicator"));
        }
        Ok(Claim(&self.0.busy))
    }

    /// Exclusive use on one stream. If the last lease was on another one, `on` first waits for its end.
    ///
    /// # Errors
    /// [`Error::Busy`] while another lease is live; the fault, if the communicator stopped; [`Error::Closed`].
    pub fn lease(&self, on: &Stream) -> Result<Lease<'_>> {
        self.check()?;
        let claim = self.claim()?;
        let number = {
            let mut last = self.0.last.lock();
            // If the wait fails, the event stays for the next lease.
            if let Some((stream, end)) = &last.1
                && !stream.same(on)
            {
                on.wait(end)?;
            }
            last.1 = None;
            last.0 += 1;
            last.0
        };
        Ok(Lease {
            comm: self,
            turn: Turn {
                number,
                on: on.clone(),
            },
            _claim: claim,
        })
    }
}

impl std::fmt::Debug for Comm {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_tuple("Comm").field(self.0.backend.group()).finish()
    }
}

struct Claim<'c>(&'c AtomicBool);

impl Drop for Claim<'_> {
    fn drop(&mut self) {
        self.0.store(false, Ordering::Release);
    }
}

/// Exclusive use of a communicator on one stream, until it is dropped.
///
/// Every method is a call that all ranks of the group must make, in the same order; a rank that does not, or that makes
/// another call, becomes a typed error on every rank.
pub struct Lease<'c> {
    comm: &'c Comm,
    turn: Turn,
    _claim: Claim<'c>,
}

impl Drop for Lease<'_> {
    fn drop(&mut self) {
        // Before the claim is given up (fields drop after this), so that the next lease finds the event.
        if let Ok(end) = self.turn.on.record() {
            self.comm.0.last.lock().1 = Some((self.turn.on.clone(), end));
        }
    }
}

impl Lease<'_> {
    /// Which ranks, as this one sees them.
    pub fn group(&self) -> Group {
        self.comm.group()
    }

    /// All ranks meet.
    ///
    /// # Errors
    /// [`Error::Fault`] if one does not come.
    pub fn barrier(&mut self) -> Result<()> {
        self.comm.0.backend.barrier(&mut self.turn)
    }

    /// Every rank gets the reduction of all inputs.
    ///
    /// # Errors
    /// [`Error::Invalid`] naming the field; [`Error::Fault`] if a rank does not come or calls something else.
    pub fn all_reduce(&mut self, p: AllReduceParams<'_>) -> Result<Plan> {
        self.comm.0.backend.all_reduce(&mut self.turn, p)
    }

    /// Every rank gets all rows, in rank order.
    ///
    /// # Errors
    /// As [`all_reduce`](Self::all_reduce).
    pub fn all_gather(&mut self, p: AllGatherParams<'_>) -> Result<Plan> {
        self.comm.0.backend.all_gather(&mut self.turn, p)
    }

    /// Every rank gets its rows of the reduction of all inputs.
    ///
    /// # Errors
    /// As [`all_reduce`](Self::all_reduce).
    pub fn reduce_scatter(&mut self, p: ReduceScatterParams<'_>) -> Result<Plan> {
        self.comm.0.backend.reduce_scatter(&mut self.turn, p)
    }

    /// Every rank gets the root's data.
    ///
    /// # Errors
    /// As [`all_reduce`](Self::all_reduce).
    pub fn broadcast(&mut self, p: BroadcastParams<'_>) -> Result<Plan> {
        self.comm.0.backend.broadcast(&mut self.turn, p)
    }

    /// Every rank sends rows to every rank.
    ///
    /// # Errors
    /// As [`all_reduce`](Self::all_reduce); a pair that disagrees about its count is a mismatch.
    pub fn all_to_all(&mut self, p: AllToAllParams<'_>) -> Result<Plan> {
        self.comm.0.backend.all_to_all(&mut self.turn, p)
    }

    /// Data for one peer. The only calls that not all ranks make are this and [`recv`](Self::recv).
    ///
    /// # Errors
    /// As [`all_reduce`](Self::all_reduce).
    pub fn send(&mut self, p: SendParams<'_>) -> Result<()> {
        self.comm.0.backend.send(&mut self.turn, p)
    }

    /// Data from one peer.
    ///
    /// # Errors
    /// As [`all_reduce`](Self::all_reduce).
    pub fn recv(&mut self, p: RecvParams<'_>) -> Result<()> {
        self.comm.0.backend.recv(&mut self.turn, p)
    }

    /// Gathers rows of all ranks, and multiplies them as they come.
    ///
    /// # Errors
    /// [`Error::Invalid`] naming the field; [`Error::Unsupported`] if a forced mode cannot be; [`Error::Fault`] as
    /// [`all_reduce`](Self::all_reduce).
    pub fn all_gather_lora_linear(
        &mut self,
        p: AllGatherLoraLinearParams<'_>,
    ) -> Result<GatherLinear<'_>> {
        let parts = self
            .comm
            .0
            .backend
            .all_gather_lora_linear(&mut self.turn, p)?;
        Ok(GatherLinear {
            d: parts.d,
            a: Gathered {
                parts: parts.a,
                lease: PhantomData,
            },
            plan: parts.plan,
        })
    }

    /// Multiplies, and leaves every rank its rows of the sum.
    ///
    /// # Errors
    /// As [`all_gather_lora_linear`](Self::all_gather_lora_linear).
    pub fn lora_linear_reduce_scatter(
        &mut self,
        p: LoraLinearReduceScatterParams<'_>,
    ) -> Result<Reduced> {
        self.comm
            .0
            .backend
            .lora_linear_reduce_scatter(&mut self.turn, p)
    }

    /// Multiplies, and gives every rank the sum.
    ///
    /// # Errors
    /// As [`all_gather_lora_linear`](Self::all_gather_lora_linear).
    pub fn lora_linear_with_all_reduce(
        &mut self,
        p: LoraLinearAllReduceParams<'_>,
    ) -> Result<Reduced> {
        self.comm
            .0
            .backend
            .lora_linear_with_all_reduce(&mut self.turn, p)
    }

    /// Space for own rows inside the user buffer, to be written by whoever produces them (a norm, a quantizer).
    /// Handed out only when no peer still reads it.
    ///
    /// # Errors
    /// [`Error::Unsupported`] if the rows of all ranks do not fit the user buffer.
    pub fn own_chunk(
        &mut self,
        rows_per_rank: &[usize],
        columns: usize,
        dtype: DataType,
    ) -> Result<OwnChunk<'_>> {
        let (buffer, filled) =
            self.comm
                .0
                .backend
                .own_chunk(&mut self.turn, rows_per_rank, columns, dtype)?;
        Ok(OwnChunk {
            buffer,
            filled,
            lease: PhantomData,
        })
    }

    /// Registered regions.
    ///
    /// # Errors
    /// [`Error::Unsupported`] if the device has none.
    pub fn windows(&mut self) -> Result<Windows<'_>> {
        let buffers = self.comm.0.backend.user_buffers()?;
        Ok(Windows {
            buffers,
            turn: &mut self.turn,
        })
    }

    /// Sends rows to their experts by the low-latency transport.
    ///
    /// # Errors
    /// [`Error::Unsupported`] if the device has no experts; otherwise as [`all_reduce`](Self::all_reduce).
    pub fn low_latency_dispatch<'s>(
        &mut self,
        slot: &'s mut Slot,
        p: LowLatencyDispatchParams<'_>,
    ) -> Result<Pending<'s>> {
        let experts = self.comm.0.backend.experts()?;
        experts.dispatch(&mut self.turn, slot.0, p)?;
        Ok(Pending { slot })
    }

    /// Ends the lease; whoever needs the results elsewhere waits for the event.
    ///
    /// # Errors
    /// Backend errors; the fault, if there was one.
    pub fn finish(self) -> Result<Event> {
        self.turn.on.record()
    }
}

/// Space for own rows in the user buffer.
pub struct OwnChunk<'l> {
    buffer: Buffer,
    filled: Filled,
    lease: PhantomData<&'l mut ()>,
}

impl OwnChunk<'_> {
    /// Where to write them.
    pub fn view_mut(&mut self) -> ViewMut<'_> {
        self.buffer.view_mut()
    }

    /// They are written.
    pub fn filled(self) -> Filled {
        self.filled
    }
}

/// What [`Lease::all_gather_lora_linear`] gives: `d` is the caller's, `a` lies in the user buffer and ends with the
/// lease's next call.
pub struct GatherLinear<'l> {
    /// The result, unless it went into the caller's buffer.
    pub d: Option<Buffer>,
    /// The gathered rows, for further products.
    pub a: Gathered<'l>,
    /// What was done.
    pub plan: Plan,
}

/// Gathered rows in the user buffer.
pub struct Gathered<'l> {
    parts: GatheredParts,
    lease: PhantomData<&'l mut ()>,
}

impl Gathered<'_> {
    /// The rows as a factor of a product. To be used on the lease's stream.
    ///
    /// # Errors
    /// [`Error::Invalid`] if kernel and scales do not belong together.
    pub fn operand(&self) -> Result<Operand<'_>> {
        self.parts.operand()
    }
}

/// One of two places for low-latency results: two can be live, and a third has no slot to borrow.
pub struct Slot(u8);

/// The two slots of a low-latency exchange.
pub struct LowLatency {
    slots: [Slot; 2],
}

impl LowLatency {
    /// Both slots.
    pub fn slots(&mut self) -> (&mut Slot, &mut Slot) {
        let [a, b] = &mut self.slots;
        (a, b)
    }
}

impl Default for LowLatency {
    fn default() -> Self {
        Self {
            slots: [Slot(0), Slot(1)],
        }
    }
}

/// Rows that have been sent, and not yet received.
#[must_use = "the rows have been asked for, not received"]
pub struct Pending<'s> {
    slot: &'s mut Slot,
}

impl<'s> Pending<'s> {
    /// Waits for them.
    ///
    /// # Errors
    /// As every call on a communicator.
    pub fn receive(self, lease: &mut Lease<'_>) -> Result<LowLatencyDispatched<'s>> {
        let experts = lease.comm.0.backend.experts()?;
        let (rows, counts) = experts.receive(&mut lease.turn, self.slot.0)?;
        Ok(LowLatencyDispatched {
            rows,
            counts,
            _slot: self.slot,
        })
    }
}

/// Received rows, in their slot.
pub struct LowLatencyDispatched<'s> {
    rows: Buffer,
    counts: Buffer,
    _slot: &'s mut Slot,
}

impl LowLatencyDispatched<'_> {
    /// `[local experts, max tokens x ranks, hidden]`
    pub fn rows(&self) -> View<'_> {
        self.rows.view()
    }

    /// Rows of each local expert.
    pub fn counts(&self) -> View<'_> {
        self.counts.view()
    }
}

/// Rows for their experts.
#[derive(Clone, Copy, Debug)]
pub struct LowLatencyDispatchParams<'a> {
    /// `[tokens, hidden]`
    pub rows: View<'a>,
    /// `[tokens, k]`, -1 for none.
    pub ids: View<'a>,
    /// Whether rows are cast to fp8 with a scale per 128 columns on the way.
    pub fp8: bool,
}

/// The backend's side of expert parallelism.
pub trait Experts: Send + Sync {
    /// See [`Lease::low_latency_dispatch`].
    ///
    /// # Errors
    /// As every call.
    fn dispatch(&self, turn: &mut Turn, slot: u8, p: LowLatencyDispatchParams<'_>) -> Result<()>;
    /// See [`Pending::receive`].
    ///
    /// # Errors
    /// As every call.
    fn receive(&self, turn: &mut Turn, slot: u8) -> Result<(Buffer, Buffer)>;
}
