//! Combine: every rank writes what became of rows into its part of the halves of those that they came from, a piece at a time; who has
//! all of it adds it up.

mod fifo;

use crate::{
    Kernel, KernelSet, Missing,
    comm::{CudaComm, unexpected},
    dispatch::{own_parts, row_blocks, row_threads},
    job::Job,
    memory::check_reach,
    routing::Placed,
    steps::Use,
    types,
};
use brigade_device::{
    Buffer, Call, CombineCall, CombineParams, CombineSum, Combined, DataType, HandleParts, Output,
    Plan, Result, Transport, Turn,
};
use brigade_kernels::CombineParams as Parameters;
use brigade_plan::{
    combine::{Returning, queued_sections},
    dispatch::part_bytes,
    fifo::Queues,
};
use brigade_sync::Area;
use std::sync::Arc;

/// Its kernels, in the order in which they run.
#[derive(Debug)]
pub(crate) struct CombineKernels {
    back: Kernel<Parameters>,
    sum: Kernel<Parameters>,
}

impl CombineKernels {
    pub(crate) fn load(set: &Arc<KernelSet>) -> Result<Self, Missing> {
        Ok(Self {
            back: set.variant("_back")?,
            sum: set.variant("_sum")?,
        })
    }
}

/// The arguments.
pub(crate) struct Arguments {
    pub(crate) call: CombineCall,
    piece_rows: usize,
    /// None where rows go through queues.
    pieces: usize,
    /// The queues, and which rows go back to whom.
    queues: Option<(Queues, Buffer)>,
    pub(crate) rows: Buffer,
    pub(crate) weights: Option<Buffer>,
    pub(crate) biases: Vec<Buffer>,
    pub(crate) parts: HandleParts,
    pub(crate) d: Buffer,
    pub(crate) weights_back: Option<Buffer>,
    staged: Option<Buffer>,
}

impl CudaComm {
    pub(crate) fn run_combine(&self, turn: &Turn, p: CombineParams<'_>) -> Result<Combined> {
        let control = &self.core.control;
        let call = p.check(control.group(), control.generation())?;
        let signed = Call::Combine(call.clone());
        let plan = self.core.plan(&signed)?;
        let Plan::Experts {
            transport,
            piece_rows,
            pieces,
            launch,
        } = plan
        else {
            return Err(unexpected(&plan));
        };
        let queues = match transport {
            Transport::OneSided | Transport::Gather | Transport::Pushed => None,
            Transport::Fifo => Some(Queues::new(
                self.core.config.fifo_bytes,
                self.core.size(),
                &queued_sections(&call),
            )?),
        };
        let pieces = if queues.is_some() { 0 } else { pieces };
        let (device, lane) = (self.gpu(), self.gpu().lane(turn.stream())?);
        let (tokens, size) = (p.handle.tokens(), self.core.size());
        let (d, new) = match &p.output {
            Output::Into(view) => (view.as_view().retain(), false),
            Output::Allocate(dtype) => {
                (device.scratch(lane, *dtype, &[tokens, call.hidden])?, true)
            }
        };
        let weights_back = match call.weights {
            true => Some(device.scratch(lane, DataType::F32, &[tokens, call.k])?),
            false => None,
        };
        let staged = match pieces {
            1 => None,
            _ => {
                let bytes = Returning::new(&call, call.max_rows())
                    .bytes()
                    .next_multiple_of(64);
                Some(device.scratch(lane, DataType::U8, &[size, bytes])?)
            }
        };
        let queues = match queues {
            Some(queues) => {
                let list = device.scratch(lane, DataType::I32, &[size, call.max_rows() + 1])?;
                Some((queues, list))
            }
            None => None,
        };
        let a = Arguments {
            call,
            piece_rows,
            pieces,
            queues,
            rows: p.rows.retain(),
            weights: p.weights.map(|w| w.retain()),
            biases: p.biases.iter().map(|b| b.retain()).collect(),
            parts: p.handle.parts().clone(),
            d: d.clone(),
            weights_back: weights_back.clone(),
            staged,
        };
        check_reach(&device.card, "rows.memory", &a.rows)?;
        check_reach(&device.card, "output.memory", &a.d)?;
        if let Some(weights) = &a.weights {
            check_reach(&device.card, "weights.memory", weights)?;
        }
        for bias in &a.biases {
            check_reach(&device.card, "biases.memory", bias)?;
        }
        let mut kept = a.buffers();
        match transport {
            Transport::OneSided | Transport::Gather | Transport::Fifo => {
                self.core
                    .collective(turn.stream(), &signed, &kept, Some(&d), |job| {
                        combine(job, &a)
                    })?;
            }
            Transport::Pushed => {
                kept.push(&d);
                self.core.exchange(turn.stream(), &signed, &kept, |job| {
                    job.push_combine(launch, &a)
                })?;
            }
        }
        Ok(Combined {
            d: new.then_some(d),
            weights: weights_back,
            plan,
        })
    }
}

impl Arguments {
    /// What work must keep, beside the result.
    fn buffers(&self) -> Vec<&Buffer> {
        let mut list = vec![&self.rows];
        list.extend(&self.weights);
        list.extend(&self.biases);
        list.extend(&self.weights_back);
        list.extend(&self.staged);
        list.extend(self.queues.iter().map(|(_, rows)| rows));
        list.extend(self.parts.buffers());
        list
    }
}

fn combine(job: &mut Job<'_>, a: &Arguments) -> Result<()> {
    if let Some(out) = &a.weights_back {
        job.poisons(out.address(), out.bytes(), out.dtype());
    }
    let mut open = None;
    if let (Some((queues, list)), Some(staged)) = (&a.queues, &a.staged) {
        job.queue_back(a, queues, (staged, list))?;
    }
    for piece in 0..a.pieces {
        let of = job.begin(Area::Combine);
        job.back(a, of, piece)?;
        job.steps.filled_to_all(of, job.core.rank(), 0);
        job.steps.await_all(of, 0);
        match &a.staged {
            Some(staged) => {
                job.stage_back(a, of, piece, staged)?;
                job.steps.end(of);
            }
            None => open = Some(of),
        }
    }
    let (parts, stride, rows) = match (&a.staged, open) {
        (Some(staged), _) => (
            staged.address(),
            staged.shape().columns(),
            a.call.max_rows(),
        ),
        (None, Some(of)) => {
            let (parts, stride) = own_parts(job, of);
            (parts, stride, a.piece_rows)
        }
        (None, None) => return Ok(()),
    };
    job.add_up(a, (parts, stride), rows)?;
    if let Some(of) = open {
        job.steps.end(of);
    }
    Ok(())
}

/// A sum as kernels know it.
pub(crate) fn sum_code(sum: CombineSum) -> u32 {
    match sum {
        CombineSum::Rank => 0,
        CombineSum::Expert => 1,
        CombineSum::ExpertByRank => 2,
    }
}

impl Job<'_> {
    /// What all kernels of a combine are told.
    fn combining(&self, a: &Arguments) -> Parameters {
        let core = self.core;
        let (stop, state) = self.stop();
        let placed = Placed::from(a.parts.call.placement);
        let half = core.control.layout().half_bytes(Area::Combine);
        Parameters {
            stop,
            state,
            base: core.memory.symmetric.base(),
            stride: core.memory.symmetric.stride() as u64,
            part_bytes: part_bytes(half, core.size()) as u64,
            from: a.rows.address(),
            back: a.weights.as_ref().map_or(0, Buffer::address),
            sources: a.parts.sources.address(),
            held: a.parts.weights.as_ref().map_or(0, Buffer::address),
            rows_of: a.parts.rows_of.as_ref().map_or(0, Buffer::address),
            slots: a.parts.layout.slots.address(),
            positions: a.parts.layout.positions.address(),
            own_weights: a.parts.own_weights.as_ref().map_or(0, Buffer::address),
            out: a.d.address(),
            weights_out: a.weights_back.as_ref().map_or(0, Buffer::address),
            capacity: a.parts.sources.shape().rows() as u32,
            hidden: a.call.hidden as u32,
            from_type: types::float_code(a.call.dtype),
            out_type: types::float_code(a.call.output),
            sum: sum_code(a.call.sum),
            max_tokens: a.call.max_tokens as u32,
            tokens: a.parts.layout.slots.shape().rows() as u64,
            k: a.call.k as u32,
            bias_count: a.biases.len() as u32,
            placement: placed.code,
            experts: placed.experts,
            per_rank: placed.per_rank,
            rank: core.rank() as u32,
            size: core.size() as u32,
            ..Parameters::default()
        }
    }

    fn row_bytes(a: &Arguments) -> usize {
        a.call.hidden * a.call.dtype.bytes()
    }

    /// Writes a piece of what became of rows to where they came from.
    fn back(&mut self, a: &Arguments, of: Use, piece: usize) -> Result<()> {
        self.steps_now()?;
        let capacity = a.parts.sources.shape().rows();
        if capacity == 0 {
            return Ok(());
        }
        let sections = Returning::new(&a.call, a.piece_rows);
        let threads = row_threads(&self.core.device, capacity, Self::row_bytes(a));
        let parameters = Parameters {
            half: self.core.data_offset(of) as u64,
            rows_at: sections.rows(0).start as u64,
            weights_at: sections.weights(0).start as u64,
            first_row: (piece * a.piece_rows) as u32,
            piece_rows: a.piece_rows as u32,
            row_threads: threads,
            ..self.combining(a)
        };
        let shape = row_blocks(self, capacity, threads);
        let kernel = &self.core.device.opened.kernels.combines.back;
        // SAFETY: rows lie in a buffer of the call, and go into the group's memory, which the core keeps.
        unsafe { kernel.launch(self.stream, shape, parameters) }.map_err(Into::into)
    }

    /// Takes a piece of what has come back out of this rank's half.
    fn stage_back(&mut self, a: &Arguments, of: Use, piece: usize, staged: &Buffer) -> Result<()> {
        let all = Returning::new(&a.call, a.call.max_rows());
        let sections = Returning::new(&a.call, a.piece_rows);
        let (parts, stride) = own_parts(self, of);
        let first = piece * a.piece_rows;
        let rows = a.piece_rows.min(a.call.max_rows() - first);
        let list: Vec<_> = (0..self.core.size())
            .flat_map(|source| {
                let from = parts + (source * stride) as u64;
                let to = staged.address() + (source * staged.shape().columns()) as u64;
                [
                    (all.rows(first).end, sections.rows(rows)),
                    (all.weights(first).end, sections.weights(rows)),
                ]
                .map(|(at, piece)| (to + at as u64, from + piece.start as u64, piece.len()))
            })
            .collect();
        self.moves(&list)
    }

    /// Adds up what has come back.
    fn add_up(&mut self, a: &Arguments, (parts, stride): (u64, usize), rows: usize) -> Result<()> {
        self.steps_now()?;
        let sections = Returning::new(&a.call, rows);
        let tokens = a.parts.layout.slots.shape().rows();
        if tokens == 0 {
            return Ok(());
        }
        let threads = row_threads(&self.core.device, tokens, Self::row_bytes(a));
        let mut parameters = Parameters {
            parts,
            parts_stride: stride as u64,
            came_rows: sections.rows(0).start as u64,
            came_weights: sections.weights(0).start as u64,
            row_threads: threads,
            ..self.combining(a)
        };
        for (to, bias) in parameters.biases.iter_mut().zip(&a.biases) {
            *to = bias.address();
        }
        let shape = row_blocks(self, tokens, threads);
        let kernel = &self.core.device.opened.kernels.combines.sum;
        // SAFETY: what has come back lies in the group's memory, or in a buffer of the call, as all else.
        unsafe { kernel.launch(self.stream, shape, parameters) }.map_err(Into::into)
    }
}
