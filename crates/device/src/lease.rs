//! Exclusive use of a communicator, and what its calls return.

use crate::{turns::Claim, *};
use std::marker::PhantomData;

/// Gathered rows, and their scales if they are quantized.
#[derive(Debug)]
pub struct GatheredParts {
    /// `[sum of rows_per_rank, K]`
    pub kernel: Buffer,
    /// Scales and scheme: per row `[sum of rows_per_rank, ..]`; where a rank's rows share what it has, `[ranks, ..]`.
    pub scales: Option<(Buffer, QScheme)>,
    /// Rows of each rank.
    pub rows: PerRank,
}

impl GatheredParts {
    /// Whether every rank has scales of its own for all of its rows, so that ranks may have quantized differently.
    pub fn scaled_by_rank(&self) -> bool {
        matches!(&self.scales, Some((_, scheme)) if !scheme.per_row()) && self.rows.len() > 1
    }

    /// The rows as a factor of a product.
    ///
    /// # Errors
    /// [`Error::Unsupported`] if ranks have scales of their own: see [`chunk`](Self::chunk).
    pub fn operand(&self) -> Result<Operand<'_>> {
        if self.scaled_by_rank() {
            return Err(Reason::new(
                "scales-by-rank",
                "every rank quantized its rows by a scale of its own",
                "take the rows rank by rank with chunk",
            )
            .into());
        }
        let kernel = self.kernel.view();
        Ok(match &self.scales {
            None => Operand::Plain(kernel),
            Some((scales, scheme)) if scheme.per_row() => {
                Operand::Quantized(QView::new(kernel, scales.view(), None, *scheme)?)
            }
            Some((scales, scheme)) => {
                Operand::Quantized(QView::new(kernel, scales.view().index(0)?, None, *scheme)?)
            }
        })
    }

    /// The rows of one rank as a factor of a product.
    ///
    /// # Errors
    /// [`Error::Invalid`] if there is no such rank.
    pub fn chunk(&self, rank: usize) -> Result<Operand<'_>> {
        let Some(&rows) = self.rows.get(rank) else {
            let want = format!("a rank below {}", self.rows.len());
            return Err(Error::invalid("rank", rank, want));
        };
        let first = self.rows[..rank].iter().sum();
        let kernel = self.kernel.view().slice(first, rows)?;
        Ok(match &self.scales {
            None => Operand::Plain(kernel),
            Some((scales, scheme)) => {
                let scales = if scheme.per_row() {
                    scales.view().slice(first, rows)?
                } else {
                    scales.view().index(rank)?
                };
                Operand::Quantized(QView::new(kernel, scales, None, *scheme)?)
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
    /// Whether a product in front of an all-reduce sent its parts itself, so that the sum began before it had ended. Ranks may differ in it.
    pub sent: bool,
}

/// Proof that own rows lie in the user buffer. By value and not `Clone`: spent by the call that uses the rows, and
/// checked there against the backend's state. Good in later leases of the same communicator too, until a reset.
#[derive(Debug)]
pub struct Filled {
    origin: Origin,
    turn: u64,
    ticket: u64,
    rows: usize,
    columns: usize,
    dtype: DataType,
}

impl Filled {
    /// For backends: of `origin`, whose `ticket` says which use of which half it is.
    pub fn new(
        turn: &Turn,
        (origin, ticket): (Origin, u64),
        rows: usize,
        columns: usize,
        dtype: DataType,
    ) -> Self {
        Self {
            origin,
            turn: turn.number(),
            ticket,
            rows,
            columns,
            dtype,
        }
    }

    /// Checks that it is of this communicator, and was made since its last reset.
    ///
    /// # Errors
    /// [`Error::Invalid`] otherwise.
    pub fn check(&self, now: Origin) -> Result<()> {
        self.origin.check("chunk", now)
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

impl Comm {
    /// Exclusive use on one stream. If the last lease, or launch of a graph that holds calls of the communicator, was on another one, `on`
    /// first waits for its end. While `on` captures, the graph's launches will do that in its place.
    ///
    /// # Errors
    /// [`Error::Busy`] while another lease is live; the fault, if the communicator stopped; [`Error::Closed`].
    pub fn lease(&self, on: &Stream) -> Result<Lease<'_>> {
        self.check()?;
        let claim = self.claim()?;
        Ok(Lease {
            comm: self,
            turn: self.0.turns.next(on)?,
            _claim: claim,
        })
    }
}

/// Exclusive use of a communicator on one stream, until it is dropped.
///
/// Every method is a call that all ranks of the group must make, in the same order; a rank that does not, or that makes
/// another call, becomes a typed error on every rank.
pub struct Lease<'c> {
    pub(crate) comm: &'c Comm,
    turn: Turn,
    _claim: Claim<'c>,
}

impl Drop for Lease<'_> {
    fn drop(&mut self) {
        // Before the claim is given up: fields drop after this.
        self.comm.0.turns.end(&self.turn);
    }
}

impl Lease<'_> {
    pub(crate) fn parts(&mut self) -> (&dyn Communicator, &mut Turn) {
        (&*self.comm.0.backend, &mut self.turn)
    }

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

    /// Every rank gets the sum of all parts, adds its residual, and normalizes the rows.
    ///
    /// # Errors
    /// As [`all_reduce`](Self::all_reduce); [`Error::Unsupported`] if the device has none.
    pub fn all_reduce_norm(&mut self, p: AllReduceNormParams<'_>) -> Result<Plan> {
        self.comm.0.backend.all_reduce_norm(&mut self.turn, p)
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

    /// Every rank sends rows that lists in its memory name to every rank, which puts each where its own lists say.
    ///
    /// # Errors
    /// As [`all_reduce`](Self::all_reduce); a pair that disagrees about its count is a mismatch. [`Error::Unsupported`] if the
    /// communicator has no memory for queues (see [`CommConfig::fifo_bytes`]), or less than a row needs.
    pub fn all_to_all_rows(&mut self, p: AllToAllRowsParams<'_>) -> Result<Plan> {
        self.comm.0.backend.all_to_all_rows(&mut self.turn, p)
    }

    /// Data for one peer. The only calls that not all ranks make are this, [`recv`](Self::recv) and [`send_recv`](Self::send_recv).
    ///
    /// What finds no room in the receiver's slots waits for the receiver: two messages of [`CommConfig::message_bytes`] by the number of ranks
    /// each find it. Ranks that send more to each other, each before it receives, would all wait. [`send_recv`](Self::send_recv) is for them.
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
        p.to.check_writable()?;
        self.comm.0.backend.recv(&mut self.turn, p)
    }

    /// Data for one peer and from one, which may be another, at once (after `MPI_Sendrecv`): whatever each of the two does first, they go
    /// on. A peer may make a [`send`](Self::send) and a [`recv`](Self::recv) of it just as well.
    ///
    /// # Errors
    /// As [`all_reduce`](Self::all_reduce).
    pub fn send_recv(&mut self, send: SendParams<'_>, recv: RecvParams<'_>) -> Result<()> {
        recv.to.check_writable()?;
        resident("to", Some(recv.to.memory()), send.from.memory())?;
        self.comm.0.backend.send_recv(&mut self.turn, send, recv)
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

    /// Multiplies, gives every rank the sum and its residual, and normalizes the rows.
    ///
    /// # Errors
    /// As [`all_reduce_norm`](Self::all_reduce_norm).
    pub fn lora_linear_with_all_reduce_norm(
        &mut self,
        p: LoraLinearAllReduceNormParams<'_>,
    ) -> Result<LinearAllReduceNorm> {
        self.comm
            .0
            .backend
            .lora_linear_with_all_reduce_norm(&mut self.turn, p)
    }

    /// Space for own rows inside the user buffer, to be written by whoever produces them (a norm, a quantizer).
    /// Handed out only when no peer still reads it.
    ///
    /// # Errors
    /// [`Error::Unsupported`] if the rows of all ranks do not fit the user buffer; [`Error::Invalid`] if they fit in no memory.
    pub fn own_chunk(
        &mut self,
        rows_per_rank: &[usize],
        columns: usize,
        dtype: DataType,
    ) -> Result<OwnChunk<'_>> {
        let size = self.comm.group().size;
        let rows = check_rows("rows_per_rank", rows_per_rank, size)?;
        check::countable("columns", &[rows, columns])?;
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
        let (backend, turn) = self.parts();
        let buffers = backend.user_buffers()?;
        Ok(Windows { buffers, turn })
    }

    /// Ends the lease; whoever needs the results elsewhere waits for the event.
    ///
    /// # Errors
    /// Backend errors; the fault, if there was one.
    pub fn finish(self) -> Result<Event> {
        self.turn.stream().record()
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

    /// The rows of one rank as a factor of a product, with the scales that it quantized them by.
    ///
    /// # Errors
    /// [`Error::Invalid`] if there is no such rank.
    pub fn chunk(&self, rank: usize) -> Result<Operand<'_>> {
        self.parts.chunk(rank)
    }
}
