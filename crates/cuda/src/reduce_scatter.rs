//! Reduce-scatter: every rank pushes every share to its owner, in one kernel, or one for each piece; or between steps, into a slot of the owner's; or
//! lays a slot out for every rank. Everybody reduces its own share of all.

use crate::{
    Launch,
    all_reduce::Kind,
    comm::{CudaComm, unexpected},
    job::Job,
    memory::check_reach,
    types,
};
use brigade_device::{
    Buffer, Call, DataType, PerRank, Plan, ReduceOp, ReduceScatterParams, Result, Stream,
};
use brigade_kernels::ReduceParams;
use brigade_sync::Area;

impl CudaComm {
    /// As a call of its own, or as part of one whose signature it bears.
    pub(crate) fn run_reduce_scatter(
        &self,
        on: &Stream,
        part_of: Option<&Call>,
        p: ReduceScatterParams<'_>,
    ) -> Result<Plan> {
        p.check(self.core.rank(), self.core.size())?;
        let (to, from) = (p.to.as_view().retain(), p.from.retain());
        check_reach(&self.gpu().card, "to.memory", &to)?;
        check_reach(&self.gpu().card, "from.memory", &from)?;
        let row_len = from.shape().row_len();
        let call = Call::ReduceScatter {
            rows: p.rows_per_rank.into(),
            row_len,
            dtype: from.dtype(),
            output: to.dtype(),
            op: p.op,
        };
        let plan = self.core.plan(&call)?;
        let Plan::ReduceScatter {
            piece_elements,
            pushed,
            ..
        } = plan
        else {
            return Err(unexpected(&plan));
        };
        let elements: PerRank = p.rows_per_rank.iter().map(|r| r * row_len).collect();
        let from = self.apart(on, from, &to)?;
        let signed = part_of.unwrap_or(&call);
        if let Some(launch) = pushed {
            let kind = Kind {
                dtype: from.dtype(),
                output: to.dtype(),
                op: p.op,
            };
            self.core.exchange(on, signed, &[&from, &to], |job| {
                job.push_shares((launch, piece_elements), kind, &elements, (&to, &from))
            })?;
            return Ok(plan);
        }
        self.core
            .collective(on, signed, &[&from], Some(&to), |job| {
                let most = elements.iter().max().copied().unwrap_or(0);
                let all = self.core.size() * most * from.dtype().bytes();
                if all <= self.core.config.reduce_scatter_bytes {
                    return push_and_reduce(job, p.op, &elements, &to, &from);
                }
                reduce_scatter(job, p.op, &elements, piece_elements, &to, &from)
            })?;
        Ok(plan)
    }
}

/// Every rank writes everybody's part into its owner's memory, where all of them have room, and the owner reduces them.
fn push_and_reduce(
    job: &mut Job<'_>,
    op: ReduceOp,
    elements: &[usize],
    to: &Buffer,
    from: &Buffer,
) -> Result<()> {
    let core = job.core;
    let (me, size) = (core.rank(), core.size());
    let offsets = brigade_plan::rows::offsets(elements);
    let bytes = |elements: usize| elements * from.dtype().bytes();
    let of = job.begin(Area::ReduceScatter);
    // The next rank first, so that not all write to one.
    let list: Vec<_> = (0..size)
        .map(|i| (me + i) % size)
        .map(|owner| {
            let part = bytes(elements[owner]);
            let source = from.address() + bytes(offsets[owner]) as u64;
            (core.place(owner, of, me * part), source, part)
        })
        .collect();
    for owner in core.peers() {
        job.count_moved(bytes(elements[owner]));
    }
    job.moves(&list)?;
    job.steps.filled_to_all(of, me, 0);
    job.steps.await_all(of, 0);
    job.reduce(Reduction {
        parts: size,
        op,
        from: core.place(me, of, 0),
        stride: bytes(elements[me]),
        dtype: from.dtype(),
        elements: elements[me],
        out: to.address(),
        output: to.dtype(),
    })?;
    job.steps.end(of);
    Ok(())
}

/// `elements` are those that every rank gets; they pass through the scratch memory in pieces of `piece` elements.
fn reduce_scatter(
    job: &mut Job<'_>,
    op: ReduceOp,
    elements: &[usize],
    piece: usize,
    to: &Buffer,
    from: &Buffer,
) -> Result<()> {
    let core = job.core;
    let (me, size) = (core.rank(), core.size());
    let (in_bytes, out_bytes) = (from.dtype().bytes(), to.dtype().bytes());
    let offsets = brigade_plan::rows::offsets(elements);
    let most = elements.iter().copied().max().unwrap_or(0);
    for start in (0..most).step_by(piece.max(1)) {
        let cut = |rank: usize| start.min(elements[rank])..(start + piece).min(elements[rank]);
        let slot = |rank: usize| rank * piece * in_bytes;
        let of = job.begin(Area::Scratch);
        let list: Vec<_> = (0..size)
            .map(|r| {
                let part = cut(r);
                let source = from.address() + ((offsets[r] + part.start) * in_bytes) as u64;
                (core.place(me, of, slot(r)), source, part.len() * in_bytes)
            })
            .collect();
        job.moves(&list)?;
        job.steps.filled_to_all(of, me, 0);
        job.steps.await_all(of, 0);
        let own = cut(me);
        job.count_moved((size - 1) * own.len() * in_bytes);
        job.reduce(Reduction {
            parts: size,
            op,
            from: core.place(0, of, slot(me)),
            stride: core.memory.symmetric.stride(),
            dtype: from.dtype(),
            elements: own.len(),
            out: to.address() + (own.start * out_bytes) as u64,
            output: to.dtype(),
        })?;
        job.steps.end(of);
    }
    Ok(())
}

/// One value of every rank for each element, combined in rank order; or of every machine.
pub(crate) struct Reduction {
    pub(crate) op: ReduceOp,
    /// How many values.
    pub(crate) parts: usize,
    /// Address of rank 0's elements, and bytes to the next rank's.
    pub(crate) from: u64,
    pub(crate) stride: usize,
    pub(crate) dtype: DataType,
    pub(crate) elements: usize,
    pub(crate) out: u64,
    pub(crate) output: DataType,
}

impl Job<'_> {
    /// Writes a word that says that this rank has not been stopped until here, or 0.
    pub(crate) fn sign(&mut self, word: u64, value: u64) -> Result<()> {
        self.steps_now()?;
        let (stop, state) = self.stop();
        let parameters = ReduceParams {
            stop,
            state,
            out: word,
            elements: value,
            ..ReduceParams::default()
        };
        let shape = Launch::grid(1, 32);
        let kernel = &self.core.device.opened.kernels.sign;
        // SAFETY: as of the words that are compared.
        unsafe { kernel.launch(self.stream, shape, parameters) }.map_err(Into::into)
    }

    /// Compares words that machines wrote one after the other with that of machine `mine`. Where one differs, this rank stops, and the
    /// host's word `tell` says which, from 1.
    pub(crate) fn compare_words(
        &mut self,
        words: u64,
        machines: usize,
        mine: usize,
        tell: u64,
    ) -> Result<()> {
        self.steps_now()?;
        let (stop, state) = self.stop();
        let parameters = ReduceParams {
            stop,
            state,
            out: tell,
            from: words,
            parts: machines as u32,
            op: mine as u32,
            ..ReduceParams::default()
        };
        let shape = Launch::grid(1, 32);
        let kernel = &self.core.device.opened.kernels.compare;
        // SAFETY: the words are the rail's, which outlives its work; the rest is the group's memory.
        unsafe { kernel.launch(self.stream, shape, parameters) }.map_err(Into::into)
    }

    /// Enqueues a reduction behind the steps so far.
    pub(crate) fn reduce(&mut self, r: Reduction) -> Result<()> {
        self.steps_now()?;
        if r.elements == 0 {
            return Ok(());
        }
        let (stop, state) = self.stop();
        let parameters = ReduceParams {
            stop,
            state,
            out: r.out,
            from: r.from,
            stride: r.stride as u64,
            elements: r.elements as u64,
            out_type: types::float_code(r.output),
            from_type: types::float_code(r.dtype),
            parts: r.parts as u32,
            op: types::op_code(r.op),
        };
        let kernels = &self.core.device.opened.kernels;
        // A thread for each eight elements.
        let shape = kernels.shape(r.elements.div_ceil(8 * 256));
        // SAFETY: the elements lie in the group's memory, which the core keeps, and the result in a buffer of the call, or in
        // own memory of the group.
        unsafe { self.follow(self.stream, &kernels.reduce, shape, parameters) }
    }
}
