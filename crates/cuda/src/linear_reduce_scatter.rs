//! The twin of gather-linear: parts of the product travel to their owners while the next part is multiplied, and every owner
//! adds what it got in rank order.

use crate::{
    comm::CudaComm,
    finish::{End, Sums},
    gemm_flags::{self, Part, Tiled},
    job::{Job, Side},
    memory::check_reach,
    reduce_scatter::Reduction,
    steps::Use,
    tiles::{Operands, Taken},
};
use brigade_device::{
    Activation, Buffer, Call, DataType, Error, GemmParams, Linear, LoraLinearParams,
    LoraLinearReduceScatterParams, Output, OverlapPlan, Plan, ReduceOp, Reduced, Result, Shape,
    Stream, Turn, View, fallback,
};
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
        // C and the activation come after the sum, and D is written there; tiles write parts to their owners.
        let operands = Operands {
            dtype: linear_call.input,
            scheme: linear_call.scheme,
            rows: linear_call.total_rows(),
            parts: linear_call.rows.len(),
            own: Some(p.x),
            weight: p.weight,
            transpose_weight: p.transpose_weight,
            bias: None,
            runs: p.runs,
            batch_invariant: p.batch_invariant,
            output: d.dtype(),
            d: None,
        };
        if p.batch_invariant {
            self.gpu().check_batch_invariant(&operands)?;
        }
        let tiles = self.core.tiles(&mut plan, p.choice, &operands, lane)?;
        if tiles.is_some() {
            check_reach(&self.gpu().card, "x.memory", &p.x.kernel().retain())?;
        }
        let buffers: Vec<&Buffer> = bias.iter().collect();
        self.core.collective(on, &call, &buffers, Some(&d), |job| {
            let product = Product {
                comm: self,
                on,
                plan: &plan,
                linear: LoraLinearParams { gemm, runs: p.runs },
                n,
                dtype: d.dtype(),
            };
            product.run(job, tiles, (bias.as_ref(), p.activation), &d)
        })?;
        Ok(Reduced {
            d: new.then_some(d),
            plan: Plan::LinearReduceScatter(plan),
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
}

impl Product<'_> {
    fn row_bytes(&self) -> usize {
        self.n * self.dtype.bytes()
    }

    /// Where `source`'s part of rows `rows` of a chunk lies in its owner's half.
    fn slot(&self, source: usize, chunk: &Range<usize>, rows: &Range<usize>) -> Range<usize> {
        let first = source * chunk.len();
        (first + rows.start) * self.row_bytes()..(first + rows.end) * self.row_bytes()
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
            let tiled = self.tiled(job, of, taken);
            let low = job.adapters(&tiled)?;
            // Tiles go straight to their owners, so the credits for that must be there before the first.
            job.steps_now()?;
            job.traced(|| "multiply".into(), || job.tiled(of, &tiled, low))?;
            job.steps.filled_to_all(of, me, 0);
            job.steps.await_all(of, 0);
            self.sum(job, of, me, (bias, activation), d)?;
            job.steps.end(of);
            return Ok(());
        }
        let pieces = self.plan.pieces();
        // Own words hold the flags that are copied to the owners.
        for p in 0..pieces {
            job.steps.filled(me, of, me, p);
        }
        job.fork()?;
        // Kept until the mover has been joined: the copies read them.
        let mut parts = Vec::new();
        for p in 0..pieces {
            for &c in &self.plan.order {
                parts.extend(self.multiply(job, of, usize::from(c), p)?);
            }
        }
        // Behind all products, on their stream: a wait beside them could keep a place that a product needs, while peers do
        // the same and wait for its result.
        for source in job.core.peers() {
            for p in 0..pieces {
                job.steps.await_filled(of, source, p, source);
            }
        }
        job.join()?;
        self.sum(job, of, me, (bias, activation), d)?;
        job.steps.end(of);
        Ok(())
    }

    /// The product of all rows by tiles that are written where their owners add them up.
    fn tiled(&self, job: &mut Job<'_>, of: Use, taken: Taken) -> Tiled {
        let (core, me) = (job.core, job.core.rank());
        let x = self.linear.gemm.a.kernel();
        let rows = |v: View<'_>| gemm_flags::Rows {
            address: v.address(),
            rows: v.shape().rows(),
            columns: v.shape().columns(),
        };
        let part = |&c: &u16| {
            let chunk = self.plan.chunk(usize::from(c));
            let slot = self.slot(me, &chunk, &(0..chunk.len()));
            Part {
                first: chunk.start,
                out: core.place(usize::from(c), of, slot.start),
                scales: 0,
                from: None,
                rows: chunk,
            }
        };
        for c in core.peers() {
            job.count_moved(self.plan.chunk(c).len() * self.row_bytes());
        }
        let buffers = [x.retain()].into_iter().chain(taken.buffers);
        Tiled {
            blocks: taken.blocks,
            dtype: self.dtype,
            output: self.dtype,
            scales: taken.scales,
            all: rows(x),
            own: rows(x),
            weight: rows(self.linear.gemm.b.kernel()),
            bias: None,
            activation: Activation::None,
            parts: self.plan.order.iter().map(part).collect(),
            runs: taken.runs,
            buffers: buffers.collect(),
        }
    }

    /// Multiplies a piece of a chunk, and sends it to its owner. Gives what must stay until the copy is done.
    fn multiply(&self, job: &mut Job<'_>, of: Use, c: usize, p: usize) -> Result<Option<Buffer>> {
        let chunk = self.plan.chunk(c);
        let piece = brigade_plan::rows::piece(chunk.len(), self.plan.pieces(), p);
        let (core, me) = (job.core, job.core.rank());
        let slot = self.slot(me, &chunk, &piece);
        let shape = Shape::new(&[piece.len(), self.n])?;
        let rows = chunk.start + piece.start..chunk.start + piece.end;
        if c == me {
            let views = &core.views.own[0];
            let mut part = core.window(of, slot, views, self.dtype, shape)?;
            let output = Output::Into(part.view_mut());
            job.traced(|| format!("multiply {c}"), || self.product(rows, output))?;
            return Ok(None);
        }
        let gpu = self.comm.gpu();
        let mut part = gpu.scratch(job.lane, self.dtype, shape.dims())?;
        let output = Output::Into(part.view_mut());
        job.traced(|| format!("multiply {c}"), || self.product(rows, output))?;
        // The mover goes on once this part is there.
        job.side_after(Side::Mover, &job.mark()?)?;
        let to = core.place(c, of, slot.start);
        let copy = || job.copy_on(Side::Mover, to, part.address(), slot.len());
        job.beside(Side::Mover, || format!("{c} from {me} to {c}"), copy)?;
        job.copy_flag(c, of, me, p)?;
        job.count_moved(slot.len());
        Ok(Some(part))
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
        gpu.finish(job.lane, &sums, end, d, self.n)
    }
}
