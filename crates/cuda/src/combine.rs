//! Combine: every rank writes what became of rows into its part of the halves of those that they came from, so many tokens at a time;
//! who has all of a token's adds them up.

mod fifo;

use crate::{
    Kernel, KernelSet, Launch, Missing,
    comm::{CudaComm, unexpected},
    core::Core,
    dispatch::{
        Side, WIDEST, Work, own_parts, row_blocks, row_blocks_alone, row_blocks_on, row_threads,
    },
    finish::same_elements,
    job::Job,
    memory::check_reach,
    relay::Pieces,
    routing::Placed,
    steps::Use,
    types,
};
use brigade_device::{
    Buffer, Call, CombineCall, CombineParams, CombineSum, Combined, DataType, Error, HandleParts,
    Output, Plan, Result, Transport, Turn,
};
use brigade_kernels::CombineParams as Parameters;
use brigade_plan::{
    combine::{Returning, queued_sections},
    dispatch::part_bytes,
    fifo::Queues,
};
use brigade_sync::Area;
use cudarc::driver::sys;
use std::{
    ops::Range,
    sync::{Arc, atomic::Ordering},
};

/// Its kernels, in the order in which they run.
#[derive(Debug)]
pub(crate) struct CombineKernels {
    back: Kernel<Parameters>,
    back_sums: Kernel<Parameters>,
    /// A block of either that shares its multiprocessor with nobody.
    alone: [Launch; 2],
    sum: Kernel<Parameters>,
    pull: Kernel<Parameters>,
}

impl CombineKernels {
    pub(crate) fn load(set: &Arc<KernelSet>) -> Result<Self, Missing> {
        let back: Kernel<Parameters> = set.variant("_back")?;
        let back_sums: Kernel<Parameters> = set.variant("_back_sums")?;
        Ok(Self {
            alone: [back.alone(WIDEST)?, back_sums.alone(WIDEST)?],
            back,
            back_sums,
            sum: set.variant("_sum")?,
            pull: set.variant("_pull")?,
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
    /// Waits for each rank are added to it.
    waits: Option<Buffer>,
}

impl CudaComm {
    pub(crate) fn run_combine(&self, turn: &Turn, p: CombineParams<'_>) -> Result<Combined> {
        let control = &self.core.control;
        let call = p.check(control.group(), control.origin())?;
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
            Transport::OneSided | Transport::Gather | Transport::Pushed | Transport::InPlace => {
                None
            }
            Transport::Fifo => Some(Queues::for_rows(
                &self.core.topology,
                &queued_sections(&call),
                call.max_rows(),
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
        let staged = match &queues {
            None => None,
            Some(_) => {
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
        let (rows, weights) = (p.rows.retain(), p.weights.map(|w| w.retain()));
        let biases: Vec<Buffer> = p.biases.iter().map(|b| b.retain()).collect();
        check_reach(&device.card, "rows.memory", &rows)?;
        check_reach(&device.card, "output.memory", &d)?;
        if let Some(weights) = &weights {
            check_reach(&device.card, "weights.memory", weights)?;
        }
        for bias in &biases {
            check_reach(&device.card, "biases.memory", bias)?;
        }
        // Sums are written while others are still made. Whoever reads an element of a bias writes that of the sum.
        let apart = |from: Buffer| self.apart(turn.stream(), from, &d);
        let bias_apart = |bias: Buffer| match same_elements(&bias, &d) {
            true => Ok(bias),
            false => apart(bias),
        };
        let a = Arguments {
            call,
            piece_rows,
            pieces,
            queues,
            rows: apart(rows)?,
            weights: weights.map(apart).transpose()?,
            biases: biases.into_iter().map(bias_apart).collect::<Result<_>>()?,
            parts: p.handle.parts().clone(),
            d: d.clone(),
            weights_back: weights_back.clone(),
            staged,
            waits: p.waits.map(|waits| waits.as_view().retain()),
        };
        if let Some(waits) = &a.waits {
            check_reach(&device.card, "waits.memory", waits)?;
        }
        let mut kept = a.buffers();
        match transport {
            Transport::OneSided | Transport::Gather | Transport::Fifo => {
                self.core
                    .collective(turn.stream(), &signed, &kept, Some(&d), |job| {
                        job.adds_waits(a.waits.as_ref());
                        combine(job, &a)
                    })?;
            }
            Transport::InPlace => {
                let rows = self.core.parts_in_place(&a)?;
                self.core
                    .collective(turn.stream(), &signed, &kept, Some(&d), |job| {
                        job.adds_waits(a.waits.as_ref());
                        // Whoever is in the call has written its rows.
                        job.steps.meet();
                        job.add_up_in_place(&a, rows)
                    })?;
                // Peers may still be reading.
                self.core.views.dispatched.fetch_add(1, Ordering::AcqRel);
            }
            Transport::Pushed => {
                kept.push(&d);
                self.core.exchange(turn.stream(), &signed, &kept, |job| {
                    job.adds_waits(a.waits.as_ref());
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
    /// Whether own rows are added from where they lie: sums of them, and what comes through queues, lie where others' do.
    fn adds_own(&self) -> bool {
        self.pieces > 0
            && self.call.choice != Some(Transport::InPlace)
            && self.call.sum != CombineSum::ExpertByRank
    }

    /// What each side does of a token's rows.
    fn work(&self, job: &Job<'_>) -> Work {
        let size = job.core.size();
        let here = self.call.k.div_ceil(size);
        let (rows, makes, come) = match self.call.sum {
            CombineSum::Rank => (1, 0, size),
            CombineSum::Expert => (here, 0, self.call.k),
            CombineSum::ExpertByRank => (1, Work::ADD * (1 + here) * size, size),
        };
        Work {
            pieces: self.pieces,
            targets: size - 1,
            pushes: Work::PUSH * rows * (size - 1),
            makes,
            takes: Work::ADD * (1 + come),
        }
    }

    /// What work must keep, beside the result.
    fn buffers(&self) -> Vec<&Buffer> {
        let mut list = vec![&self.rows];
        list.extend(&self.weights);
        list.extend(&self.biases);
        list.extend(&self.weights_back);
        list.extend(&self.staged);
        list.extend(&self.waits);
        list.extend(self.queues.iter().map(|(_, rows)| rows));
        list.extend(self.parts.buffers());
        list
    }
}

fn combine(job: &mut Job<'_>, a: &Arguments) -> Result<()> {
    if let Some(out) = &a.weights_back {
        job.poisons(out.address(), out.bytes(), out.dtype());
    }
    let (Some((queues, list)), Some(staged)) = (&a.queues, &a.staged) else {
        return job.relay(&mut Returned { a });
    };
    job.queue_back(a, queues, (staged, list))?;
    let parts = (staged.address(), staged.shape().columns());
    job.add_up(a, parts, 0..a.call.max_rows())
}

/// A combine through halves, so many tokens of every rank at a time.
struct Returned<'a> {
    a: &'a Arguments,
}

impl Returned<'_> {
    /// Places of a piece.
    fn places(&self, piece: usize) -> Range<usize> {
        let rows = self.a.piece_rows;
        piece * rows..(piece + 1) * rows
    }
}

impl Pieces for Returned<'_> {
    const AREA: Area = Area::Combine;

    fn count(&self) -> usize {
        self.a.pieces
    }

    fn prepare(&mut self, _: &mut Job<'_>) -> Result<()> {
        Ok(())
    }

    fn push(&self, job: &Job<'_>, of: Use, piece: usize, on: sys::CUstream) -> Result<()> {
        job.back(self.a, of, self.places(piece), on)
    }

    fn take(&mut self, job: &mut Job<'_>, of: Use, piece: usize) -> Result<()> {
        let parts = own_parts(job, of);
        job.add_up(self.a, parts, self.places(piece))
    }
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
            own_from: if a.adds_own() { a.rows.address() } else { 0 },
            offsets: a.parts.offsets.address(),
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

    /// Writes what became of the rows of these places to where they came from.
    fn back(&self, a: &Arguments, of: Use, places: Range<usize>, on: sys::CUstream) -> Result<()> {
        let capacity = a.parts.sources.shape().rows();
        if capacity == 0 {
            return Ok(());
        }
        let sections = Returning::new(&a.call, places.len());
        let rows = capacity.min(places.len() * self.core.size());
        let threads = row_threads(self.core, rows, Self::row_bytes(a));
        let parameters = Parameters {
            half: self.core.data_offset(of) as u64,
            rows_at: sections.rows(0).start as u64,
            weights_at: sections.weights(0).start as u64,
            first_row: places.start as u32,
            piece_rows: places.len() as u32,
            row_threads: threads,
            ..self.combining(a)
        };
        let kernels = &self.core.device.opened.kernels.combines;
        let (kernel, alone) = match a.call.sum {
            CombineSum::Rank | CombineSum::Expert => (&kernels.back, kernels.alone[0]),
            CombineSum::ExpertByRank => (&kernels.back_sums, kernels.alone[1]),
        };
        let shape = match a.pieces {
            0 | 1 => row_blocks(self, rows, threads, WIDEST),
            _ => row_blocks_alone(alone, (rows, threads), a.work(self).sms(self, Side::Writes)),
        };
        // SAFETY: rows lie in a buffer of the call, and go into the group's memory, which the core keeps.
        unsafe { self.follow(on, kernel, shape, parameters) }
    }

    /// Adds up what has come back of the tokens of these places.
    fn add_up(
        &mut self,
        a: &Arguments,
        (parts, stride): (u64, usize),
        places: Range<usize>,
    ) -> Result<()> {
        self.steps_now()?;
        let sections = Returning::new(&a.call, places.len());
        let tokens = a.parts.layout.slots.shape().rows();
        if tokens == 0 {
            return Ok(());
        }
        let tokens = tokens.min(places.len() / a.call.rows_per_token());
        let parameters = Parameters {
            parts,
            parts_stride: stride as u64,
            came_rows: sections.rows(0).start as u64,
            came_weights: sections.weights(0).start as u64,
            first_row: places.start as u32,
            piece_rows: places.len() as u32,
            ..self.combining(a)
        };
        let kernel = &self.core.device.opened.kernels.combines.sum;
        self.add(a, kernel, tokens, parameters)
    }

    /// Adds up so many tokens' rows.
    fn add(
        &self,
        a: &Arguments,
        kernel: &Kernel<Parameters>,
        tokens: usize,
        mut parameters: Parameters,
    ) -> Result<()> {
        let threads = row_threads(self.core, tokens, Self::row_bytes(a));
        parameters.row_threads = threads;
        for (to, bias) in parameters.biases.iter_mut().zip(&a.biases) {
            *to = bias.address();
        }
        let sms = a.work(self).sms(self, Side::Takes);
        let shape = row_blocks_on(self, sms, (tokens, threads), WIDEST);
        // SAFETY: rows lie in the group's memory, at the same place of each rank's, or in a buffer of the call, as all else.
        unsafe { self.follow(self.stream, kernel, shape, parameters) }
    }

    /// The same of rows that stayed in place: what this rank has sent to each begins at `parts` of it.
    fn add_up_in_place(&mut self, a: &Arguments, parts: u64) -> Result<()> {
        self.steps_now()?;
        let tokens = a.parts.layout.slots.shape().rows();
        if tokens == 0 {
            return Ok(());
        }
        let parameters = Parameters {
            parts,
            parts_stride: self.core.memory.symmetric.stride() as u64,
            piece_rows: a.call.max_rows() as u32,
            ..self.combining(a)
        };
        let kernel = &self.core.device.opened.kernels.combines.pull;
        self.add(a, kernel, tokens, parameters)
    }
}

impl Core {
    /// Where rank 0 has what this rank has sent to it, in place; each other rank's lies a stride further.
    fn parts_in_place(&self, a: &Arguments) -> Result<u64> {
        let symmetric = &self.memory.symmetric;
        let own = symmetric.base() + (self.rank() * symmetric.stride()) as u64;
        let bytes = a.rows.bytes() as u64;
        let inside = |at: &u64| at + bytes <= symmetric.stride() as u64;
        let at = a.rows.address().checked_sub(own).filter(inside);
        let at = at.ok_or_else(|| {
            let want = "memory of this communicator";
            Error::invalid("rows.memory", "rows of another communicator", want)
        })?;
        let of_source = bytes / self.size() as u64;
        Ok(symmetric.base() + at + self.rank() as u64 * of_source)
    }
}
