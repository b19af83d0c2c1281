//! The twin of gather-linear: parts of the product travel to their owners while the next part is multiplied, and every owner
//! adds what it got in rank order.

use crate::{
    comm::CudaComm,
    finish::{End, Sums, same_elements},
    gemm_flags::{self, Part, Tiled},
    gemm_send::{FEW_BYTES, Sent},
    job::{Job, Side},
    loading,
    memory::{check_reach, overlap},
    reduce_scatter::Reduction,
    steps::Use,
    tiles::{BIAS_GRAIN, GRAIN, Operands, Taken},
};
use brigade_device::{
    Activation, Buffer, Call, DataType, Error, GemmParams, Linear, LoraLinearParams,
    LoraLinearReduceScatterParams, Output, OverlapMode, OverlapPlan, Plan, ReduceOp, Reduced,
    Result, Shape, Stream, Turn, View, fallback,
};
use brigade_plan::{MAX_PIECES, twin_pieces};
use brigade_sync::Area;
use std::ops::Range;

impl CudaComm {
    pub(crate) fn run_linear_reduce_scatter(
        &self,
        turn: &Turn,
        p: LoraLinearReduceScatterParams<'_>,
        call: Call,
        mut plan: OverlapPlan,
    ) -> Result<Reduced> {
        let Call::LinearReduceScatter(linear_call) = &call else {
            return Err(Error::invalid(
                "call",
                call.operation(),
                "linear-reduce-scatter",
            ));
        };
        let on = turn.stream();
        let lane = self.gpu().lane(on)?;
        let n = linear_call.n;
        let own = plan.chunk(self.core.rank());
        let bias = fallback::cut_bias(p.bias, n, own.start, own.len())?.map(|c| c.retain());
        if let Some(c) = &bias {
            check_reach(&self.gpu().card, "bias.memory", c)?;
        }
        let gemm = GemmParams {
            transpose_b: p.transpose_weight,
            sm_cap: self.core.product_sms(),
            batch_invariant: p.batch_invariant,
            ..GemmParams::new(p.x, p.weight)
        };
        let (d, new) = self.gpu().place(lane, p.output, &[own.len(), n])?;
        let tiled_pieces = twin_pieces(&linear_call.rows);
        let operands = Operands {
            dtype: linear_call.input,
            scheme: linear_call.scheme,
            rows: linear_call.total_rows(),
            parts: linear_call.rows.len() * usize::from(tiled_pieces),
            own: Some(p.x),
            weight: p.weight,
            transpose_weight: p.transpose_weight,
            // Where tiles cannot end in D, what they made is added up behind them.
            bias: None,
            runs: p.runs,
            batch_invariant: p.batch_invariant,
            output: d.dtype(),
            d: None,
        };
        if p.batch_invariant {
            self.gpu().check_batch_invariant(&operands)?;
        }
        // Before it is asked who waits on other streams: long messages look for tiles there.
        self.core.note(lane);
        let tiles = self
            .core
            .tiles(&mut plan, p.choice, &operands, tiled_pieces, lane)?;
        if tiles.is_some() {
            check_reach(&self.gpu().card, "x.memory", &p.x.kernel().retain())?;
        }
        let pieces = match plan.mode {
            OverlapMode::Tiles => tiled_pieces.into(),
            _ => plan.pieces(),
        };
        let buffers: Vec<&Buffer> = bias.iter().collect();
        self.core.collective(on, &call, &buffers, Some(&d), |job| {
            let product = Product {
                comm: self,
                on,
                plan: &plan,
                linear: LoraLinearParams { gemm, runs: p.runs },
                n,
                dtype: d.dtype(),
                pieces,
            };
            product.run(job, tiles, (bias.as_ref(), p.activation), &d)
        })?;
        Ok(Reduced {
            d: new.then_some(d),
            plan: Plan::LinearReduceScatter(plan),
            sent: false,
        })
    }
}

/// The product of one call.
struct Product<'a> {
    comm: &'a CudaComm,
    on: &'a Stream,
    plan: &'a OverlapPlan,
    linear: LoraLinearParams<'a>,
    n: usize,
    /// Of the parts, and of the result.
    dtype: DataType,
    /// Of each part.
    pieces: usize,
}

impl Product<'_> {
    fn row_bytes(&self) -> usize {
        self.n * self.dtype.bytes()
    }

    /// Where `source`'s part of piece `p` of chunk `c` lies in its owner's half.
    fn slot(&self, source: usize, c: usize, p: usize) -> Range<usize> {
        let (chunk, rows) = (self.plan.chunk(c), self.piece(c, p));
        let at = |row: usize| (source * chunk.len() + row - chunk.start) * self.row_bytes();
        at(rows.start)..at(rows.end)
    }

    fn run(
        &self,
        job: &mut Job<'_>,
        tiles: Option<Taken>,
        (bias, activation): (Option<&Buffer>, Activation),
        d: &Buffer,
    ) -> Result<()> {
        let of = job.begin(Area::ReduceScatter);
        let me = job.core.rank();
        if let Some(taken) = tiles {
            let summed = self.run_tiled(job, of, taken, (bias, activation), d)?;
            self.await_all(job, of)?;
            if !summed {
                self.sum(job, of, me, (bias, activation), d)?;
            }
            job.steps.end(of);
            return Ok(());
        }
        // Own words hold the flags that are copied to the owners.
        for p in 0..self.pieces {
            job.steps.filled(me, of, me, p);
        }
        job.fork()?;
        for p in 0..self.pieces {
            for &c in &self.plan.order {
                self.multiply(job, of, usize::from(c), p)?;
            }
        }
        self.await_all(job, of)?;
        self.sum(job, of, me, (bias, activation), d)?;
        job.steps.end(of);
        Ok(())
    }

    /// Waits for all parts of own rows: behind all products, on their stream, since a wait beside them could keep a place that a product needs,
    /// while peers do the same and wait for its result.
    fn await_all(&self, job: &mut Job<'_>, of: Use) -> Result<()> {
        for source in job.core.peers() {
            for p in 0..self.pieces {
                job.steps.await_filled(of, source, p, source);
            }
        }
        job.join()
    }

    /// Rows of piece `p` of chunk `c`.
    fn piece(&self, c: usize, p: usize) -> Range<usize> {
        let chunk = self.plan.chunk(c);
        let piece = brigade_plan::rows::piece(chunk.len(), self.pieces, p);
        chunk.start + piece.start..chunk.start + piece.end
    }

    /// One product of tiles: parts of others first, and then own rows, whose tiles end with what others made of them, if D may be written so early.
    /// Gives whether they did. It also sends what others get, tile by tile, unless that is much: then copy engines carry it, piece by piece.
    fn run_tiled(
        &self,
        job: &mut Job<'_>,
        of: Use,
        mut taken: Taken,
        (bias, activation): (Option<&Buffer>, Activation),
        d: &Buffer,
    ) -> Result<bool> {
        let (core, me) = (job.core, job.core.rank());
        let order = self.plan.order.iter().map(|&c| usize::from(c));
        let pieces: Vec<_> = order
            .flat_map(|c| (0..self.pieces).map(move |p| (c, p)))
            .collect();
        let made = |&(c, p): &(usize, usize)| {
            let shape = [self.piece(c, p).len(), self.n];
            let part = || self.comm.gpu().scratch(job.lane, self.dtype, &shape);
            (c != me).then(part).transpose()
        };
        let made: Vec<_> = pieces.iter().map(made).collect::<Result<_>>()?;
        job.keeps(made.iter().flatten().cloned());
        let bytes = made.iter().flatten().map(Buffer::bytes).sum();
        // What waits until a piece is made needs a place, which another communicator's blocks could take, and to be launched while the product
        // goes on; and an own word for each piece.
        let carried = bytes > FEW_BYTES
            && taken.room.sole
            && !loading::launches_block()
            && pieces.len() <= usize::from(MAX_PIECES);
        if carried {
            taken.room.blocks = core.beside_steps(taken.room.blocks);
        }
        let own = core.place(me, of, self.slot(me, me, 0).start);
        let mut tiled = self.tiled(&pieces, &made, taken, own);
        let sums = may_be_written_early(&tiled, bias, d);
        if sums {
            self.end_in(d, &mut tiled, (bias, activation));
        }
        let low = job.adapters(&tiled)?;
        // Own rows come last.
        let own = pieces.len() - self.pieces..pieces.len();
        let sent = if sums { own.start } else { own.end };
        let sent = self.sent(job, of, &pieces[..sent], carried);
        job.count_moved(bytes);
        job.product_follows = true;
        match carried {
            true => job.fork_behind_steps(&[Side::Mover])?,
            false => job.steps_now()?,
        }
        let parts = gemm_flags::Rows {
            address: core.place(me, of, 0),
            rows: core.size() * self.plan.chunk(me).len(),
            columns: self.n,
        };
        let multiply = || job.tiled_sums(of, &tiled, low, &sent, own, sums.then_some(&parts));
        job.traced(|| "multiply".into(), multiply)?;
        job.product_follows = false;
        if carried {
            self.carry(job, of, &pieces, &made)?;
        }
        Ok(sums)
    }

    /// Where the pieces go that are not added up here: to their owners, where others have them and the product sends itself; else the product tells
    /// this rank, by one of its own words for each. Of those without rows the steps in front of it tell.
    fn sent(
        &self,
        job: &mut Job<'_>,
        of: Use,
        pieces: &[(usize, usize)],
        carried: bool,
    ) -> Vec<Sent> {
        let (core, me) = (job.core, job.core.rank());
        let mut all = Vec::with_capacity(pieces.len());
        for (i, &(owner, p)) in pieces.iter().enumerate() {
            let slot = self.slot(me, owner, p);
            if slot.is_empty() && owner != me {
                job.steps.filled(owner, of, me, p);
            }
            let sends = !carried && owner != me;
            all.push(Sent {
                to: if sends {
                    core.place(owner, of, slot.start)
                } else {
                    0
                },
                told: if sends { owner } else { me },
                word: core
                    .steps()
                    .filled_word(of, me, if carried { i } else { p }, me),
            });
        }
        all
    }

    /// Sends each piece to its owner as soon as the product has told of it.
    fn carry(
        &self,
        job: &Job<'_>,
        of: Use,
        pieces: &[(usize, usize)],
        made: &[Option<Buffer>],
    ) -> Result<()> {
        let (core, me) = (job.core, job.core.rank());
        for (i, (&(owner, p), part)) in pieces.iter().zip(made).enumerate() {
            let Some(part) = part.as_ref().filter(|part| part.bytes() > 0) else {
                continue;
            };
            let mut steps = core.steps();
            steps.await_filled(of, me, i, me);
            let wait = || job.steps_on(Side::Mover, steps);
            job.beside(Side::Mover, || format!("await {owner}"), wait)?;
            let to = core.place(owner, of, self.slot(me, owner, p).start);
            let copy = || job.copy_on(Side::Mover, to, part.address(), part.bytes());
            job.beside(
                Side::Mover,
                || format!("{owner} from {me} to {owner}"),
                copy,
            )?;
            job.copy_flag_of(owner, of, (me, p), (me, i))?;
        }
        Ok(())
    }

    /// Lets own tiles end in D.
    fn end_in(
        &self,
        d: &Buffer,
        tiled: &mut Tiled,
        (bias, activation): (Option<&Buffer>, Activation),
    ) {
        let own = tiled.parts.len() - self.pieces;
        let mut out = d.address();
        for part in &mut tiled.parts[own..] {
            part.out = out;
            out += (part.rows.len() * self.row_bytes()) as u64;
        }
        (tiled.bias, tiled.activation) = (bias.cloned(), activation);
        tiled
            .buffers
            .extend(bias.cloned().into_iter().chain([d.clone()]));
    }

    /// Sends a piece of a part to its owner, once it is made. Gives how many bytes that is.
    fn send(&self, job: &Job<'_>, of: Use, (c, p): (usize, usize), part: &Buffer) -> Result<usize> {
        let (core, me) = (job.core, job.core.rank());
        let slot = self.slot(me, c, p);
        // The mover goes on once this part is there.
        job.side_after(Side::Mover, &job.mark()?)?;
        let to = core.place(c, of, slot.start);
        let copy = || job.copy_on(Side::Mover, to, part.address(), slot.len());
        job.beside(Side::Mover, || format!("{c} from {me} to {c}"), copy)?;
        job.copy_flag(c, of, me, p)?;
        Ok(slot.len())
    }

    /// The product of all rows by tiles, piece by piece, into memory of this rank; own rows' from an address on.
    fn tiled(
        &self,
        pieces: &[(usize, usize)],
        made: &[Option<Buffer>],
        taken: Taken,
        own: u64,
    ) -> Tiled {
        let x = self.linear.gemm.a.kernel();
        let rows = |v: View<'_>| gemm_flags::Rows {
            address: v.address(),
            rows: v.shape().rows(),
            columns: v.shape().columns(),
        };
        let part = |(&(c, p), made): (&(usize, usize), &Option<Buffer>)| {
            let rows = self.piece(c, p);
            let in_chunk = rows.start - self.plan.chunk(c).start;
            let own = || own + (in_chunk * self.row_bytes()) as u64;
            Part {
                first: rows.start,
                out: made.as_ref().map_or_else(own, Buffer::address),
                scales: 0,
                from: None,
                rows,
            }
        };
        let made_here = made.iter().flatten().cloned();
        let buffers = [x.retain()]
            .into_iter()
            .chain(taken.buffers)
            .chain(made_here);
        Tiled {
            blocks: taken.room.blocks,
            dtype: self.dtype,
            output: self.dtype,
            scales: taken.scales,
            all: rows(x),
            own: rows(x),
            weight: rows(self.linear.gemm.b.kernel()),
            bias: None,
            activation: Activation::None,
            parts: pieces.iter().zip(made).map(part).collect(),
            runs: taken.runs,
            buffers: buffers.collect(),
        }
    }

    /// Multiplies a piece of a chunk, and sends it to its owner.
    fn multiply(&self, job: &mut Job<'_>, of: Use, c: usize, p: usize) -> Result<()> {
        let (core, me) = (job.core, job.core.rank());
        let rows = self.piece(c, p);
        let shape = Shape::new(&[rows.len(), self.n])?;
        if c == me {
            let views = &core.views.own[0];
            let slot = self.slot(me, c, p);
            let mut part = core.window(of, slot, views, self.dtype, shape)?;
            let output = Output::Into(part.view_mut());
            return job.traced(|| format!("multiply {c}"), || self.product(rows, output));
        }
        let gpu = self.comm.gpu();
        let mut part = gpu.scratch(job.lane, self.dtype, shape.dims())?;
        let output = Output::Into(part.view_mut());
        job.traced(|| format!("multiply {c}"), || self.product(rows, output))?;
        let moved = self.send(job, of, (c, p), &part);
        job.keeps([part]);
        job.count_moved(moved?);
        Ok(())
    }

    fn product(&self, rows: Range<usize>, output: Output<'_>) -> Result<()> {
        if rows.is_empty() {
            return Ok(());
        }
        let runs = fallback::clip_runs(self.linear.runs, rows.start, rows.len());
        let gemm = GemmParams {
            a: self.linear.gemm.a.rows(rows)?,
            ..self.linear.gemm
        };
        let linear = LoraLinearParams { gemm, runs: &runs };
        self.comm.gpu().lora_linear(self.on, &linear, output)?;
        Ok(())
    }

    /// Adds the parts of own rows in rank order, and finishes them.
    fn sum(
        &self,
        job: &mut Job<'_>,
        of: Use,
        me: usize,
        (bias, activation): (Option<&Buffer>, Activation),
        d: &Buffer,
    ) -> Result<()> {
        let own = self.plan.chunk(me);
        let gpu = self.comm.gpu();
        let ends = bias.is_some() || activation != Activation::None;
        let out = if ends {
            gpu.scratch(job.lane, DataType::F32, &[own.len(), self.n])?
        } else {
            d.clone()
        };
        job.reduce(Reduction {
            parts: job.core.size(),
            op: ReduceOp::Sum,
            from: job.core.place(me, of, 0),
            stride: own.len() * self.row_bytes(),
            dtype: self.dtype,
            elements: own.len() * self.n,
            out: out.address(),
            output: out.dtype(),
        })?;
        if !ends {
            return Ok(());
        }
        let sums = Sums::Float {
            values: out,
            stride: self.n,
        };
        let end = End {
            bias,
            beta: 1.0,
            activation,
        };
        // C may be a row of D, which others still read.
        let apart = bias.is_none_or(|c| !overlap(c, d) || same_elements(c, d));
        gpu.beside(job.lane, d, apart, |d| {
            gpu.finish(job.lane, &sums, end, d, self.n)
        })
    }
}

/// Whether D may be written, by wide stores, while the product still reads what it is made of.
fn may_be_written_early(tiled: &Tiled, bias: Option<&Buffer>, d: &Buffer) -> bool {
    let aligned = |b: &Buffer, grain: usize| b.address().is_multiple_of(grain as u64);
    let apart = |b: &Buffer| !overlap(b, d);
    aligned(d, GRAIN)
        && bias.is_none_or(|c| aligned(c, BIAS_GRAIN * c.dtype().bytes()))
        && tiled.buffers.iter().chain(bias).all(apart)
}
