//! Gather-linear: chunks of rows travel through the user buffer while those that are there are multiplied.
//!
//! After RTP-LLM's overlapped ring all-gather linear. Own rows are multiplied first; in ring mode the communication
//! thread hands every chunk on to the next rank as it arrives, in chunked mode it pushes own rows piece by piece to
//! everybody, in pull mode it fetches chunks from their owners.

use crate::{
    comm::HostComm,
    core::Reserved,
    device::Engine,
    job::{Active, Job, Use},
    linear::{BoundLinear, OwnedLinear},
    memory::{mark, poison, reading, set_gate, writing},
    mover::both,
    operand::{OwnedOperand, Parts},
    queue::HostQueue,
    window::Window,
};
use brigade_device::{
    AllGatherLoraLinearParams, Buffer, Call, Chunk, DataType, Error, Filled, GatherLinearParts,
    GatheredParts, LinearCall, OverlapMode, OverlapPlan, PerRank, Plan, QScheme, Reason, Result,
    Shape, Turn, check_rows,
};
use brigade_plan::gathered::{Span, rows_shape, scale_bytes, scales_shape};
use brigade_sync::{Area, Half, Layout};
use parking_lot::RwLock;
use std::{ops::Range, sync::Arc};

/// Where the rows of one call lie in the user buffer.
#[derive(Clone)]
struct Rows {
    half: Half,
    counts: PerRank,
    values: Span,
    scales: Option<Span>,
    /// Own rows, if they have to be copied there.
    source: Option<OwnedOperand>,
}

impl Rows {
    /// Rows of piece `p` of chunk `c`, counted from the chunk's first.
    fn piece(&self, c: usize, pieces: usize, p: usize) -> Range<usize> {
        brigade_plan::rows::piece(self.counts[c], pieces, p)
    }

    /// Where that piece's values and scales lie.
    fn places(&self, c: usize, pieces: usize, p: usize) -> impl Iterator<Item = Range<usize>> {
        let rows = self.piece(c, pieces, p);
        std::iter::once(&self.values)
            .chain(&self.scales)
            .map(move |span| span.piece(c, &rows, p))
    }
}

/// Opens or shuts a gate for this rank's views.
fn set(gate: &RwLock<bool>, open: bool) -> Result<()> {
    set_gate(gate, open, "the user buffer")
}

impl HostComm {
    fn window(&self, half: Half, range: Range<usize>, gate: &Arc<RwLock<bool>>) -> Arc<Window> {
        let control = &self.core.control;
        let start = control.layout().start(Area::Gather, half);
        let range = start + range.start..start + range.end;
        let segment = Arc::clone(&control.segments()[control.group().rank].0);
        Arc::new(Window::new(segment, range, Arc::clone(gate)))
    }

    pub(crate) fn run_own_chunk(
        &self,
        turn: &Turn,
        rows_per_rank: &[usize],
        columns: usize,
        dtype: DataType,
    ) -> Result<(Buffer, Filled)> {
        let group = self.core.control.group();
        let total = check_rows("rows_per_rank", rows_per_rank, group.size)?;
        let row_bytes = columns * dtype.bytes();
        let capacity = self.core.config.gather_bytes;
        if total.saturating_mul(row_bytes) > capacity {
            return Err(Reason::new(
                "capacity",
                format!("{total} rows of {row_bytes} bytes do not fit a user buffer of {capacity}"),
                "raise gather_bytes",
            )
            .into());
        }
        let origin = self.core.control.origin();
        let (half, ticket) = {
            let mut issue = self.core.issue.lock();
            let half = match &issue.reserved {
                Some(reserved) => reserved.half,
                None => issue.halves.next_half(),
            };
            issue.tickets += 1;
            let ticket = issue.tickets;
            issue.reserved = Some(Reserved {
                half,
                ticket,
                rows: rows_per_rank.into(),
                columns,
                dtype,
            });
            (half, ticket)
        };
        let first: usize = rows_per_rank[..group.rank].iter().sum();
        let own = rows_per_rank[group.rank];
        let range = first * row_bytes..(first + own) * row_bytes;
        let window = self.window(half, range, &self.core.gates[half.index()].own);
        let core = self.core.clone();
        HostQueue::of(turn.stream())?.run(move || {
            core.prepare(|active| {
                if active.state.begun.is_none_or(|of| of.half != half) {
                    active.state.begun = Some(active.begin_half(Area::Gather, half)?);
                }
                set(&core.gates[half.index()].own, true)
            })
        })?;
        let buffer = Buffer::new(window, dtype, Shape::new(&[own, columns])?)?;
        Ok((
            buffer,
            Filled::new(turn, (origin, ticket), own, columns, dtype),
        ))
    }

    /// Where the rows of a call go, if they fit.
    fn reserve(&self, call: &LinearCall, chunk: &Chunk<'_>) -> Result<Option<Rows>> {
        let config = &self.core.config;
        let values = Span::values(call);
        let scales_start = Layout::scales_offset(config);
        let scales = Span::scales(scales_start, call);
        let fits = values.all().len() <= config.gather_bytes
            && scales
                .as_ref()
                .is_none_or(|s| s.all().len() <= config.gather_scale_bytes);
        let mut issue = self.core.issue.lock();
        let source = match chunk {
            Chunk::Resident(filled) => {
                filled.check(self.core.control.origin())?;
                let handed_out = |r: &Reserved| r.ticket == filled.ticket() && r.holds(call);
                if !issue.reserved.as_ref().is_some_and(handed_out) {
                    return Err(Error::invalid(
                        "chunk",
                        "a token of own rows that were used, handed out anew, or meant for other shapes",
                        "the token of the last own_chunk, with the same rows_per_rank, columns and type",
                    ));
                }
                None
            }
            Chunk::Copy(_) if !fits => return Ok(None),
            Chunk::Copy(rows) => Some(OwnedOperand::new(rows)?),
        };
        let half = match issue.reserved.take() {
            Some(reserved) => reserved.half,
            None => issue.halves.next_half(),
        };
        Ok(Some(Rows {
            half,
            counts: call.rows.clone(),
            values,
            scales,
            source,
        }))
    }

    /// The gathered rows, as this rank's views see them after the call.
    fn gathered(&self, call: &LinearCall, rows: &Rows, shape: Shape) -> Result<GatheredParts> {
        let gate = &self.core.gates[rows.half.index()].all;
        let kernel = self.window(rows.half, rows.values.all(), gate);
        let scales = rows.scales.as_ref().map(|span| {
            let window = self.window(rows.half, span.all(), gate);
            Buffer::new(window, DataType::F32, scales_shape(call)?)
        });
        Ok(GatheredParts {
            kernel: Buffer::new(kernel, call.input, shape)?,
            scales: scales.transpose()?.map(|s| (s, call.scheme)),
            rows: call.rows.clone(),
        })
    }

    pub(crate) fn run_gather_chunk(
        &self,
        turn: &Turn,
        call: &LinearCall,
        chunk: Chunk<'_>,
    ) -> Result<GatheredParts> {
        let shape = rows_shape(call, &chunk)?;
        let queue = HostQueue::of(turn.stream())?;
        let core = self.core.clone();
        let signed = Call::GatherLinear(call.clone());
        let Some(rows) = self.reserve(call, &chunk)? else {
            return self.gather_through_scratch(turn, call, &chunk, shape);
        };
        let parts = self.gathered(call, &rows, shape)?;
        queue.run(move || {
            core.collective(&signed, |active| {
                let of = fill_own(active, &rows)?;
                push_own(&active.job, of, &rows, 1)?;
                for peer in active.job.peers() {
                    active.job.await_filled(of, peer, 0, peer)?;
                }
                set(&active.job.core.gates[rows.half.index()].all, true)
            })
        })?;
        Ok(parts)
    }

    /// Rows that do not fit the user buffer go through the scratch memory into a new buffer.
    fn gather_through_scratch(
        &self,
        turn: &Turn,
        call: &LinearCall,
        chunk: &Chunk<'_>,
        shape: Shape,
    ) -> Result<GatheredParts> {
        let Chunk::Copy(rows) = chunk else {
            return Err(Error::invalid("chunk", "a token", "rows to be copied"));
        };
        let from = OwnedOperand::new(rows)?;
        let kernel = self.device.heap(call.input, shape.dims())?;
        let scales = scale_bytes(call)
            .map(|_| self.device.heap(DataType::F32, scales_shape(call)?.dims()))
            .transpose()?;
        let values = Span::values(call);
        let mut parts = vec![(values, kernel.clone(), from.kernel)];
        if let (Some(span), Some(to), Some(from)) = (Span::scales(0, call), &scales, from.scales) {
            parts.push((span, to.clone(), from));
        }
        let piece = self.core.config.scratch_bytes;
        let core = self.core.clone();
        let signed = Call::GatherLinear(call.clone());
        HostQueue::of(turn.stream())?.run(move || {
            core.collective(&signed, |active| {
                parts.iter().try_for_each(|(span, to, from)| {
                    let bytes: PerRank = (0..active.job.size())
                        .map(|c| span.chunk(c).len())
                        .collect();
                    crate::all_gather::all_gather(active, &bytes, piece, to, from)
                })
            })
        })?;
        Ok(GatheredParts {
            kernel,
            scales: scales.map(|s| (s, call.scheme)),
            rows: call.rows.clone(),
        })
    }

    pub(crate) fn run_gather_linear(
        &self,
        turn: &Turn,
        p: AllGatherLoraLinearParams<'_>,
        call: Call,
        plan: OverlapPlan,
    ) -> Result<GatherLinearParts> {
        let Call::GatherLinear(linear_call) = &call else {
            return Err(Error::invalid("call", call.operation(), "gather-linear"));
        };
        let linear = OwnedLinear::from_parts(
            p.weight,
            p.transpose_weight,
            p.bias,
            p.activation,
            p.runs,
            p.batch_invariant,
        )?;
        let shape = rows_shape(linear_call, &p.chunk)?;
        let n = linear.n();
        // Before a half is taken: a call that is refused here alone must not leave this rank a half ahead of its peers.
        let (d, new) = self
            .device
            .place(p.output, &[linear_call.total_rows(), n])?;
        let Some(rows) = self.reserve(linear_call, &p.chunk)? else {
            return Err(Error::invalid(
                "plan",
                plan.mode,
                "a plan for rows that fit",
            ));
        };
        let a = self.gathered(linear_call, &rows, shape)?;
        let (core, engine) = (self.core.clone(), self.device.engine.clone());
        let (out, steps) = (d.clone(), plan.clone());
        let (input, scheme) = (linear_call.input, linear_call.scheme);
        HostQueue::of(turn.stream())?.run(move || {
            core.collective(&call, |active| {
                // Before the output is locked, which may lie in one allocation with own rows.
                let of = fill_own(active, &rows).inspect_err(|_| mark(&out))?;
                writing(&out, &linear.buffers(), |bytes, inputs| {
                    let linear = linear.bind(inputs, integers(scheme), &engine.scratch)?;
                    let product = Product {
                        plan: &steps,
                        rows: &rows,
                        engine: &engine,
                        linear: &linear,
                        input,
                        scheme,
                        output: out.dtype(),
                    };
                    product
                        .run(active, of, bytes)
                        .inspect_err(|_| poison(out.dtype(), bytes))
                })
            })
        })?;
        Ok(GatherLinearParts {
            d: new.then_some(d),
            a,
            plan: Plan::GatherLinear(plan),
        })
    }
}

/// Whether rows of this scheme are multiplied as integers.
fn integers(scheme: QScheme) -> bool {
    matches!(scheme, QScheme::Int8PerToken | QScheme::Int8PerTensor)
}

/// Begins the use of the half, and sees to it that own rows lie there.
fn fill_own(active: &mut Active<'_>, rows: &Rows) -> Result<Use> {
    let of = match active.state.begun.take_if(|of| of.half == rows.half) {
        Some(of) => of,
        None => active.begin_half(Area::Gather, rows.half)?,
    };
    let job = &active.job;
    set(&job.core.gates[rows.half.index()].own, false)?;
    if let Some(source) = &rows.source {
        let buffers: Vec<&Buffer> = source.buffers().collect();
        reading(&buffers, |inputs| {
            for (place, input) in rows.places(job.rank(), 1, 0).zip(inputs) {
                // SAFETY: own rows in own half: all peers have given their credit for it, and it is announced later.
                unsafe { job.bytes_mut(job.rank(), of, place) }.copy_from_slice(input);
            }
            Ok(())
        })?;
    }
    Ok(of)
}

/// Writes own rows into every peer's half, piece by piece.
fn push_own(job: &Job, of: Use, rows: &Rows, pieces: usize) -> Result<()> {
    for p in 0..pieces {
        for to in job.peers() {
            let _span =
                tracing::info_span!(target: "brigade::comm", "push", to, piece = p).entered();
            rows.places(job.rank(), pieces, p)
                .for_each(|place| transfer(job, of, job.rank(), to, place));
            job.say_filled(to, of, job.rank(), p);
        }
    }
    Ok(())
}

/// Copies the same place from one rank's half to another's.
fn transfer(job: &Job, of: Use, from: usize, to: usize, range: Range<usize>) {
    // SAFETY: these bytes of `from` have been announced to this rank for this use (or are its own rows), and stay until
    // this rank ends it. In `to`, who gave its credit before the use began, only this rank fills them, by the order of
    // the mode: own rows when pushing, what the next rank waits for in a ring, own half when pulling.
    unsafe {
        let source = job.bytes(from, of, range.clone());
        job.bytes_mut(to, of, range.clone()).copy_from_slice(source);
    }
    job.count_moved(range.len());
}

/// Hands chunks on to the next rank as they come, own rows first.
fn pass_round(job: &Job, of: Use, rows: &Rows) -> Result<()> {
    let (rank, size) = (job.rank(), job.size());
    let (next, prev) = ((rank + 1) % size, (rank + size - 1) % size);
    for c in brigade_plan::ring::ring_sends(rank, size) {
        let c = usize::from(c);
        if c != rank {
            job.await_filled(of, c, 0, prev)?;
        }
        let _span =
            tracing::info_span!(target: "brigade::comm", "pass", chunk = c, to = next).entered();
        rows.places(c, 1, 0)
            .for_each(|place| transfer(job, of, rank, next, place));
        job.say_filled(next, of, c, 0);
    }
    Ok(())
}

/// Piece of a slot by which the communication thread tells its own rank that a chunk was fetched.
const FETCHED: usize = 1;

/// Fetches chunks from their owners, in the order in which they are multiplied.
fn fetch(job: &Job, of: Use, rows: &Rows, order: &[u16]) -> Result<()> {
    for c in order
        .iter()
        .map(|&c| usize::from(c))
        .filter(|&c| c != job.rank())
    {
        job.await_filled(of, c, 0, c)?;
        let _span = tracing::info_span!(target: "brigade::comm", "fetch", chunk = c).entered();
        rows.places(c, 1, 0)
            .for_each(|place| transfer(job, of, c, job.rank(), place));
        job.say_filled(job.rank(), of, c, FETCHED);
    }
    Ok(())
}

/// The product of one call.
struct Product<'a> {
    plan: &'a OverlapPlan,
    rows: &'a Rows,
    engine: &'a Engine,
    linear: &'a BoundLinear<'a>,
    input: DataType,
    scheme: QScheme,
    output: DataType,
}

impl Product<'_> {
    fn run(&self, active: &mut Active<'_>, of: Use, out: &mut [u8]) -> Result<()> {
        let job = &active.job;
        let (mode, pieces) = (self.plan.mode, self.plan.pieces());
        if mode == OverlapMode::Pull {
            job.say_filled_to_all(of, job.rank(), 0);
        }
        let moving = {
            let (rows, order) = (self.rows.clone(), self.plan.order.clone());
            job.hand_over(move |job| match mode {
                OverlapMode::Ring => pass_round(job, of, &rows),
                OverlapMode::Pull => fetch(job, of, &rows, &order),
                _ => push_own(job, of, &rows, pieces),
            })
        };
        let multiplied = (0..pieces).try_for_each(|p| {
            self.plan
                .order
                .iter()
                .try_for_each(|&c| self.multiply(&active.job, of, usize::from(c), p, out))
        });
        // The communication thread ends soon after this one, also on a fault, since both wait on the same group.
        both(multiplied, moving.wait())?;
        set(&active.job.core.gates[self.rows.half.index()].all, true)
    }

    /// Waits for a piece of a chunk, and multiplies it.
    fn multiply(&self, job: &Job, of: Use, c: usize, p: usize, out: &mut [u8]) -> Result<()> {
        let pieces = self.plan.pieces();
        if c != job.rank() {
            match self.plan.mode {
                OverlapMode::Ring => {
                    let prev = (job.rank() + job.size() - 1) % job.size();
                    job.await_filled(of, c, 0, prev)?;
                }
                OverlapMode::Pull => job.await_fetched(of, c, FETCHED, c)?,
                _ => job.await_filled(of, c, p, c)?,
            }
        }
        let chunk = self.plan.chunk(c);
        let piece = brigade_plan::rows::piece(chunk.len(), pieces, p);
        let rows = chunk.start + piece.start..chunk.start + piece.end;
        let _span = tracing::info_span!(
            target: "brigade::compute", "multiply", chunk = c, piece = p, rows = rows.len()
        )
        .entered();
        // SAFETY: own rows, or announced for this use; nobody writes them until this rank ends it.
        let bytes = |place| unsafe { job.bytes(job.rank(), of, place) };
        let scales = self.rows.scales.as_ref().map(|s| s.needed(c, &piece));
        let x = Parts {
            dtype: self.input,
            scheme: self.scheme,
            kernel: bytes(self.rows.values.piece(c, &piece, p)),
            scales: scales.map_or(&[], |place| bytemuck::cast_slice(bytes(place))),
            dims: [rows.len(), self.linear.k()],
        };
        let x = x.factor(false, &self.engine.scratch)?;
        let row_bytes = self.linear.n() * self.output.bytes();
        let out = &mut out[rows.start * row_bytes..rows.end * row_bytes];
        self.linear
            .multiply(&self.engine.workers, &x, rows, self.output, out)
    }
}
