//! Gather-linear: chunks of rows travel through the user buffer while those that are there are multiplied.
//!
//! After RTP-LLM's overlapped ring all-gather linear. Own rows are multiplied first, on the caller's stream; beside it, copy
//! engines move chunks, on a stream of greater priority. In ring mode every chunk is handed on to the next rank as it arrives,
//! in chunked mode own rows are pushed piece by piece to everybody, in pull mode chunks are fetched from their owners.

use crate::{
    comm::CudaComm,
    gathered::Rows,
    gemm_flags::{self, Part, Tiled},
    gemm_send::{FEW_BYTES, Sends},
    job::{Job, Side},
    mark::CudaMark,
    tiles::{Operands, Taken},
};
use brigade_device::{
    Activation, AllGatherLoraLinearParams, Buffer, Call, Chunk, DataType, Error, GatherLinearParts,
    GatheredParts, GemmParams, Linear, LinearCall, LoraLinearParams, LoraRun, Operand, Output,
    OverlapMode, OverlapPlan, PerRank, Plan, QView, Result, Shape, Turn, View, fallback,
};
use brigade_plan::gathered::{Span, rows_shape, scales_shape};
use std::{ops::Range, sync::atomic::Ordering};

impl CudaComm {
    pub(crate) fn run_gather_chunk(
        &self,
        turn: &Turn,
        call: &LinearCall,
        chunk: Chunk<'_>,
    ) -> Result<GatheredParts> {
        let shape = rows_shape(call, &chunk)?;
        let Some(rows) = self.reserve(call, &chunk)? else {
            return self.gather_through_scratch(turn, call, &chunk, shape);
        };
        let signed = Call::GatherLinear(call.clone());
        let sources: Vec<&Buffer> = rows.source.iter().flatten().collect();
        self.core
            .collective(turn.stream(), &signed, &sources, None, |job| {
                push_own(job, &rows)
            })?;
        self.gathered(call, &rows, shape)
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
        let from = self.own_rows(rows)?;
        let lane = self.gpu().lane(turn.stream())?;
        let mut spans = vec![(Span::values(call), call.input, shape)];
        if let Some(span) = Span::scales(0, call) {
            spans.push((span, DataType::F32, scales_shape(call)?));
        }
        let to: Vec<Buffer> = spans
            .iter()
            .map(|(_, dtype, shape)| self.gpu().scratch(lane, *dtype, shape.dims()))
            .collect::<Result<_>>()?;
        let buffers: Vec<&Buffer> = from.iter().chain(&to).collect();
        let piece = self.core.config.scratch_bytes;
        let signed = Call::GatherLinear(call.clone());
        self.core
            .collective(turn.stream(), &signed, &buffers, None, |job| {
                let parts = spans.iter().zip(&to).zip(&from);
                for (((span, ..), to), from) in parts {
                    let bytes: PerRank =
                        (0..job.core.size()).map(|c| span.chunk(c).len()).collect();
                    crate::all_gather::all_gather(job, &bytes, piece, to, from)?;
                }
                Ok(())
            })?;
        let mut to = to.into_iter();
        let kernel = to.next().ok_or(Error::Closed)?;
        Ok(GatheredParts {
            kernel,
            scales: to.next().map(|s| (s, call.scheme)),
            rows: call.rows.clone(),
        })
    }

    pub(crate) fn run_gather_linear(
        &self,
        turn: &Turn,
        p: AllGatherLoraLinearParams<'_>,
        call: Call,
        mut plan: OverlapPlan,
    ) -> Result<GatherLinearParts> {
        let Call::GatherLinear(linear_call) = &call else {
            return Err(Error::invalid("call", call.operation(), "gather-linear"));
        };
        let lane = self.gpu().lane(turn.stream())?;
        let layer = Layer {
            weight: p.weight,
            transpose_weight: p.transpose_weight,
            bias: p.bias,
            activation: p.activation,
            runs: p.runs,
            batch_invariant: p.batch_invariant,
        };
        let n = layer.n();
        let (d, new) = self
            .gpu()
            .place(lane, p.output, &[linear_call.total_rows(), n])?;
        let shape = rows_shape(linear_call, &p.chunk)?;
        let own = match &p.chunk {
            Chunk::Copy(own) => Some(*own),
            Chunk::Resident(_) => None,
        };
        let operands = Operands {
            dtype: linear_call.input,
            scheme: linear_call.scheme,
            rows: linear_call.total_rows(),
            parts: linear_call.rows.len(),
            own,
            weight: p.weight,
            transpose_weight: p.transpose_weight,
            bias: p.bias,
            runs: p.runs,
            batch_invariant: p.batch_invariant,
            output: d.dtype(),
            d: Some(&d),
        };
        if p.batch_invariant {
            self.gpu().check_batch_invariant(&operands)?;
        }
        // Before it is asked who waits on other streams: long messages look for tiles there.
        self.core.note(lane);
        let tiles = self.core.tiles(&mut plan, p.choice, &operands, 1, lane)?;
        let Some(rows) = self.reserve(linear_call, &p.chunk)? else {
            return Err(Error::invalid(
                "plan",
                plan.mode,
                "a plan for rows that fit",
            ));
        };
        let sources: Vec<&Buffer> = rows.source.iter().flatten().collect();
        let on = turn.stream();
        let a = self.core.collective(on, &call, &sources, Some(&d), |job| {
            let a = self.gathered(linear_call, &rows, shape)?;
            take(job, &rows);
            let product = Product {
                comm: self,
                on,
                plan: &plan,
                rows: &rows,
                a: &a,
                own,
                layer: &layer,
                d: &d,
                n,
            };
            product.run(job, tiles)?;
            Ok(a)
        })?;
        Ok(GatherLinearParts {
            d: new.then_some(d),
            a,
            plan: Plan::GatherLinear(plan),
        })
    }
}

/// Writes own rows into every rank's half, and waits for everybody's.
fn push_own(job: &mut Job<'_>, rows: &Rows) -> Result<()> {
    take(job, rows);
    let (core, me) = (job.core, job.core.rank());
    let mut list = Vec::new();
    for (i, place) in rows.places(me, 1, 0).enumerate() {
        let at = |rank| core.place(rank, rows.of, place.start);
        let from = match &rows.source {
            Some(source) => {
                list.push((at(me), source[i].address(), place.len()));
                source[i].address()
            }
            None => at(me),
        };
        list.extend(core.peers().map(|to| (at(to), from, place.len())));
        job.count_moved((core.size() - 1) * place.len());
    }
    job.moves(&list)?;
    job.steps.filled_to_all(rows.of, me, 0);
    job.steps.await_all(rows.of, 0);
    Ok(())
}

/// Takes the half. What others have there is poisoned if the group is stopped; own rows are not, since peers may read them.
fn take(job: &mut Job<'_>, rows: &Rows) {
    job.steps.take(rows.of);
    let (core, me) = (job.core, job.core.rank());
    core.views.own[rows.of.half.index()].fetch_add(1, Ordering::AcqRel);
    for (span, dtype) in std::iter::once((&rows.values, rows.dtype))
        .chain(rows.scales.iter().map(|s| (s, DataType::F32)))
    {
        let (all, own) = (span.all(), span.chunk(me));
        for part in [all.start..own.start, own.end..all.end] {
            job.poisons(core.place(me, rows.of, part.start), part.len(), dtype);
        }
    }
}

/// Copies own rows to their place on the mover, if they are not there.
fn fill_own(job: &Job<'_>, rows: &Rows) -> Result<()> {
    let (core, me) = (job.core, job.core.rank());
    let Some(source) = &rows.source else {
        return Ok(());
    };
    let mut parts = rows.places(me, 1, 0).zip(source);
    parts.try_for_each(|(place, from)| {
        let to = core.place(me, rows.of, place.start);
        job.copy_on(Side::Mover, to, from.address(), place.len())
    })
}

/// What is applied to every chunk.
struct Layer<'a> {
    weight: Operand<'a>,
    transpose_weight: bool,
    bias: Option<View<'a>>,
    activation: Activation,
    runs: &'a [LoraRun<'a>],
    batch_invariant: bool,
}

impl Layer<'_> {
    fn n(&self) -> usize {
        let shape = self.weight.shape();
        if self.transpose_weight {
            shape.rows()
        } else {
            shape.columns()
        }
    }
}

/// The product of one call.
struct Product<'a> {
    comm: &'a CudaComm,
    on: &'a brigade_device::Stream,
    plan: &'a OverlapPlan,
    rows: &'a Rows,
    a: &'a GatheredParts,
    /// Own rows where the caller has them: they are multiplied there, while they are copied.
    own: Option<Operand<'a>>,
    layer: &'a Layer<'a>,
    d: &'a Buffer,
    n: usize,
}

/// A piece of a chunk is there once the streams beside the caller's have come to the mark.
struct There {
    chunk: usize,
    piece: usize,
    mark: CudaMark,
}

impl Product<'_> {
    fn run(&self, job: &mut Job<'_>, tiles: Option<Taken>) -> Result<()> {
        let (me, pieces) = (job.core.rank(), self.plan.pieces());
        if let Some(taken) = tiles {
            let alone = taken.room.alone;
            return self.run_tiled(job, &self.tiled(taken), alone);
        }
        self.own_words(job, pieces);
        job.fork()?;
        // All that moves is enqueued before the first product: should a product have to load something, which waits for the
        // GPU, nobody waits for this rank meanwhile.
        let there = match self.plan.mode {
            OverlapMode::Ring => self.pass_round(job)?,
            OverlapMode::Pull => self.fetch(job)?,
            _ => self.push(job, pieces)?,
        };
        let multiply = |c, p| job.traced(|| format!("multiply {c}"), || self.multiply(c, p));
        for p in 0..pieces {
            multiply(me, p)?;
            for t in there.iter().filter(|t| t.piece == p) {
                job.after(&t.mark)?;
                multiply(t.chunk, p)?;
            }
        }
        Ok(())
    }

    /// Lets own words hold the flags that are copied to the peers.
    fn own_words(&self, job: &mut Job<'_>, pieces: usize) {
        let me = job.core.rank();
        for p in 0..pieces {
            job.steps.filled(me, self.rows.of, me, p);
        }
    }

    /// All rows as one product whose tiles wait.
    fn tiled(&self, taken: Taken) -> Tiled {
        let me = self.comm.core.rank();
        let plain = |v: View<'_>, rows: usize, columns: usize| gemm_flags::Rows {
            address: v.address(),
            rows,
            columns,
        };
        let (weight, kernel) = (self.layer.weight.kernel(), self.a.kernel.view());
        let (dtype, output) = (kernel.dtype(), self.d.dtype());
        let k = weight.shape().columns();
        let all = plain(kernel, kernel.shape().rows(), k);
        let rows = self.plan.chunk(me);
        let own = match self.own {
            Some(own) => plain(own.kernel(), rows.len(), k),
            None => gemm_flags::Rows {
                address: all.address + (rows.start * k * dtype.bytes()) as u64,
                rows: rows.len(),
                ..all
            },
        };
        let part = |c: usize| {
            let rows = self.plan.chunk(c);
            Part {
                first: if c == me { 0 } else { rows.start },
                out: self.d.address() + (rows.start * self.n * output.bytes()) as u64,
                scales: self.row_scales(c, rows.start),
                from: (c != me).then_some(c),
                rows,
            }
        };
        Tiled {
            blocks: taken.room.blocks,
            dtype,
            output,
            scales: taken.scales,
            all,
            own,
            weight: plain(weight, self.n, k),
            bias: self.layer.bias.map(|c| c.retain()),
            activation: self.layer.activation,
            parts: std::iter::once(me).chain(self.others()).map(part).collect(),
            runs: taken.runs,
            buffers: taken.buffers,
        }
    }

    /// Address of the scale of row `first` of all, which rank `c` has. Own rows' are read where the caller has them.
    fn row_scales(&self, c: usize, first: usize) -> u64 {
        let Some((all, scheme)) = &self.a.scales else {
            return 0;
        };
        match self.own {
            Some(Operand::Quantized(own)) if c == self.comm.core.rank() => own.scales().address(),
            _ => {
                let place = if scheme.per_row() { first } else { c };
                all.address() + (place * DataType::F32.bytes()) as u64
            }
        }
    }

    /// The product holds every multiprocessor while it waits. So the steps by which this rank enters the call come before it,
    /// and what others wait for is sent by itself, or by copy engines alone.
    fn run_tiled(&self, job: &mut Job<'_>, tiled: &Tiled, alone: bool) -> Result<()> {
        let low = job.adapters(tiled)?;
        job.product_follows = true;
        let sends = self.sends(job).filter(|_| alone && !tiled.is_empty());
        match &sends {
            Some(sends) => {
                job.count_moved(sends.total_bytes() * job.core.peers().count());
                job.steps_now()?;
            }
            None => {
                self.own_words(job, 1);
                job.fork_behind_steps(&[Side::Mover])?;
                self.push_piece(job, 1, 0)?;
                fill_own(job, self.rows)?;
            }
        }
        let of = self.rows.of;
        job.traced(|| "multiply".into(), || job.tiled(of, tiled, low, sends))?;
        job.product_follows = false;
        Ok(())
    }

    /// Own rows, if they are few enough for the product to send them itself.
    fn sends(&self, job: &Job<'_>) -> Option<Sends> {
        let (core, me, of) = (job.core, job.core.rank(), self.rows.of);
        let mut sends = Sends {
            word: core.steps().filled_word(of, me, 0, me),
            keeps_own: self.rows.source.is_some(),
            ..Sends::default()
        };
        for (i, place) in self.rows.places(me, 1, 0).enumerate() {
            sends.from[i] = match &self.rows.source {
                Some(source) => source[i].address(),
                None => core.place(me, of, place.start),
            };
            sends.to[i] = (core.data_offset(of) + place.start) as u64;
            sends.bytes[i] = place.len() as u64;
        }
        (sends.total_bytes() * core.size() <= FEW_BYTES).then_some(sends)
    }

    /// Chunks of others, in the order in which they are multiplied.
    fn others(&self) -> impl Iterator<Item = usize> {
        let me = self.comm.core.rank();
        let order = self.plan.order.iter().map(|&c| usize::from(c));
        order.filter(move |&c| c != me)
    }

    /// Copies the places of a piece of a chunk from one rank's half to the same places of another's. Own rows are taken from
    /// where the caller has them.
    fn transfer(
        &self,
        job: &mut Job<'_>,
        (from, to): (usize, usize),
        (c, pieces, p): (usize, usize, usize),
    ) -> Result<()> {
        let me = job.core.rank();
        let (span, of) = (|i: usize| self.rows.span(i), self.rows.of);
        for (i, place) in self.rows.places(c, pieces, p).enumerate() {
            let at = |rank| job.core.place(rank, of, place.start);
            let source = match &self.rows.source {
                Some(source) if c == me && from == me => {
                    source[i].address() + (place.start - span(i).chunk(me).start) as u64
                }
                _ => at(from),
            };
            let target = at(to);
            let copy = || job.copy_on(Side::Mover, target, source, place.len());
            job.beside(Side::Mover, || format!("{c} from {from} to {to}"), copy)?;
            job.count_moved(place.len());
        }
        Ok(())
    }

    /// Lets the waiter wait for a piece of a chunk that `from` sends or announces.
    fn awaited(&self, job: &Job<'_>, c: usize, p: usize, from: usize) -> Result<There> {
        let mut steps = job.core.steps();
        steps.await_filled(self.rows.of, c, p, from);
        let wait = || job.steps_on(Side::Waiter, steps);
        job.beside(Side::Waiter, || format!("await {c}"), wait)?;
        Ok(There {
            chunk: c,
            piece: p,
            mark: job.side_mark(Side::Waiter)?,
        })
    }

    /// Hands chunks on to the next rank as they come, own rows first.
    fn pass_round(&self, job: &mut Job<'_>) -> Result<Vec<There>> {
        let (me, size) = (job.core.rank(), job.core.size());
        let (next, prev) = (
            brigade_plan::ring::next(me, size),
            brigade_plan::ring::prev(me, size),
        );
        self.transfer(job, (me, next), (me, 1, 0))?;
        job.copy_flag(next, self.rows.of, me, 0)?;
        let mut there = Vec::new();
        for c in self.others() {
            let arrived = self.awaited(job, c, 0, prev)?;
            // The last one would come home.
            if c != next {
                job.side_after(Side::Mover, &arrived.mark)?;
                self.transfer(job, (me, next), (c, 1, 0))?;
                job.copy_flag(next, self.rows.of, c, 0)?;
            }
            there.push(arrived);
        }
        fill_own(job, self.rows)?;
        Ok(there)
    }

    /// Fetches chunks from their owners, in the order in which they are multiplied.
    fn fetch(&self, job: &mut Job<'_>) -> Result<Vec<There>> {
        let me = job.core.rank();
        fill_own(job, self.rows)?;
        for to in job.core.peers() {
            job.copy_flag(to, self.rows.of, me, 0)?;
        }
        let mut there = Vec::new();
        for c in self.others() {
            let announced = self.awaited(job, c, 0, c)?;
            job.side_after(Side::Mover, &announced.mark)?;
            self.transfer(job, (c, me), (c, 1, 0))?;
            there.push(There {
                mark: job.side_mark(Side::Mover)?,
                ..announced
            });
        }
        Ok(there)
    }

    /// Writes own rows into every peer's half, piece by piece.
    fn push(&self, job: &mut Job<'_>, pieces: usize) -> Result<Vec<There>> {
        let mut there = Vec::new();
        for p in 0..pieces {
            self.push_piece(job, pieces, p)?;
            for c in self.others() {
                there.push(self.awaited(job, c, p, c)?);
            }
        }
        fill_own(job, self.rows)?;
        Ok(there)
    }

    /// Writes a piece of own rows into every peer's half.
    fn push_piece(&self, job: &mut Job<'_>, pieces: usize, p: usize) -> Result<()> {
        let me = job.core.rank();
        for to in job.core.peers() {
            self.transfer(job, (me, to), (me, pieces, p))?;
            job.copy_flag(to, self.rows.of, me, p)?;
        }
        Ok(())
    }

    /// Rows of a chunk in the user buffer.
    fn arrived(&self, c: usize, rows: Range<usize>) -> Result<Operand<'_>> {
        let kernel = self.a.kernel.view().rows(rows.clone())?;
        let Some((scales, scheme)) = &self.a.scales else {
            return Ok(Operand::Plain(kernel));
        };
        let scales = if scheme.per_row() {
            scales.view().rows(rows)?
        } else {
            scales.view().index(c)?
        };
        let rows = QView::new(kernel, scales, None, *scheme)?;
        Ok(Operand::Quantized(rows))
    }

    /// Multiplies a piece of a chunk that is there.
    fn multiply(&self, c: usize, p: usize) -> Result<()> {
        let chunk = self.plan.chunk(c);
        let piece = brigade_plan::rows::piece(chunk.len(), self.plan.pieces(), p);
        let rows = chunk.start + piece.start..chunk.start + piece.end;
        if rows.is_empty() {
            return Ok(());
        }
        let Layer {
            weight,
            transpose_weight,
            bias,
            activation,
            runs,
            batch_invariant,
        } = *self.layer;
        let x = match self.own.filter(|_| c == self.comm.core.rank()) {
            Some(own) => own.rows(piece)?,
            None => self.arrived(c, rows.clone())?,
        };
        let runs = fallback::clip_runs(runs, rows.start, rows.len());
        let gemm = GemmParams {
            c: fallback::cut_bias(bias, self.n, rows.start, rows.len())?,
            activation,
            transpose_b: transpose_weight,
            sm_cap: self.comm.core.product_sms(),
            batch_invariant,
            ..GemmParams::new(x, weight)
        };
        let linear = LoraLinearParams { gemm, runs: &runs };
        let mut d = self.d.clone();
        let mut d = d.view_mut();
        let output = Output::Into(d.rows(rows)?);
        self.comm.gpu().lora_linear(self.on, &linear, output)?;
        Ok(())
    }
}
