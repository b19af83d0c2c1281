//! Dispatch: every rank writes its rows into its part of the receivers' halves, a piece at a time; who has all of them puts them
//! where the arrangement wants them. Nobody's host hears of a count, unless room is to be made for just so many rows.

mod arrange;
mod fifo;

use crate::{
    CudaDevice, Kernel, KernelSet, Launch, Missing,
    comm::{CudaComm, unexpected},
    job::{Job, waiting},
    lane::Lane,
    memory::check_reach,
    routing::{Placed, Router},
    steps::Use,
    types,
};
use brigade_device::{
    Arrangement, Buffer, Call, DataType, Device, DispatchCall, DispatchOutputs, DispatchParams,
    Dispatched, Error, Expected, Fp8Cast, Group, Plan, Result, Route, ScaleFormat, Transport, Turn,
    Ways,
};
use brigade_kernels::{CastParams, DispatchParams as Parameters};
use brigade_plan::{
    dispatch::{Section, Sections, part_bytes, sections},
    fifo::Queues,
    routes::Slots,
};
use brigade_sync::Area;
use std::sync::Arc;

/// Its kernels, in the order in which they run.
#[derive(Debug)]
pub(crate) struct DispatchKernels {
    cast: Kernel<CastParams>,
    push: Kernel<Parameters>,
    count: Kernel<Parameters>,
    place: Kernel<Parameters>,
    arrange: Kernel<Parameters>,
    collect: Kernel<Parameters>,
}

impl DispatchKernels {
    pub(crate) fn load(set: &Arc<KernelSet>) -> Result<Self, Missing> {
        Ok(Self {
            cast: set.kernel()?,
            push: set.variant("_push")?,
            count: set.variant("_count")?,
            place: set.variant("_place")?,
            arrange: set.variant("_arrange")?,
            collect: set.variant("_collect")?,
        })
    }
}

/// Threads of a block that takes rows.
pub(crate) const ROW_THREADS: u32 = 256;
/// Threads of a block that goes through all entries.
const ENTRY_THREADS: u32 = 1024;

/// The number of a format of scales (`kernels/cast.cuh`).
pub(crate) const fn format_code(format: ScaleFormat) -> u32 {
    match format {
        ScaleFormat::F32 => 0,
        ScaleFormat::PowerOfTwo => 1,
        ScaleFormat::Ue8m0 => 2,
    }
}

/// Threads for each of so many rows, so that a few of them keep a GPU busy too.
pub(crate) fn row_threads(device: &CudaDevice, rows: usize, row_bytes: usize) -> u32 {
    /// What keeps a multiprocessor busy.
    const THREADS: usize = 1024;
    let all = usize::from(device.info().sms) * THREADS;
    [ROW_THREADS, 128, 64]
        .into_iter()
        .find(|&t| rows * t as usize <= all && t as usize * 16 <= row_bytes)
        .unwrap_or(32)
}

/// Blocks for so many rows, within the multiprocessors that a communicator may use.
pub(crate) fn row_blocks(job: &Job<'_>, rows: usize, threads: u32) -> Launch {
    let kernels = &job.core.device.opened.kernels;
    let blocks = (rows * threads as usize).div_ceil(ROW_THREADS as usize);
    let budget = job
        .core
        .config
        .sm_budget
        .map_or(usize::MAX, |sms| 8 * usize::from(sms.max(1)));
    Launch {
        threads: ROW_THREADS,
        ..kernels.shape(blocks.min(budget))
    }
}

/// The arguments.
pub(crate) struct Arguments {
    pub(crate) call: DispatchCall,
    pub(crate) group: Group,
    generation: u8,
    piece_rows: usize,
    /// None where rows go through queues.
    pieces: usize,
    queues: Option<Queues>,
    rows: Buffer,
    beside: Vec<Buffer>,
    beside_rows: Vec<(DataType, usize)>,
    /// What finds the ways of rows, where they are new.
    pub(crate) router: Option<Router>,
    pub(crate) ways: Ways,
    cast: Option<(Buffer, Buffer)>,
    staged: Option<Buffer>,
}

/// Where rows lie that have come.
#[derive(Clone, Copy)]
struct Came {
    parts: u64,
    stride: usize,
    /// Rows that a section has room for.
    rows: usize,
}

impl CudaComm {
    pub(crate) fn run_dispatch(&self, turn: &Turn, p: DispatchParams<'_>) -> Result<Dispatched> {
        let group = *self.core.control.group();
        let generation = self.core.control.generation();
        let call = p.check(&group, generation)?;
        let signed = Call::Dispatch(call.clone());
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
            Transport::OneSided | Transport::Pushed => None,
            Transport::Fifo => Some(Queues::new(
                self.core.config.fifo_bytes,
                group.size,
                &sections(&call),
            )?),
        };
        let pieces = if queues.is_some() { 0 } else { pieces };
        let (device, lane) = (self.gpu(), self.gpu().lane(turn.stream())?);
        let mut a = Arguments::new(
            device,
            lane,
            &p,
            (call, group, generation),
            (piece_rows, pieces),
        )?;
        a.queues = queues;
        let absent = self.core.control.absent();
        a.router = a.router.map(|router| router.without(absent));
        let given = match a.ways.room(&a.call, group.size) {
            Some(room) => Some(a.allocate(device, lane, room)?),
            None => {
                lane.refuse_capture("a dispatch without max_recv")?;
                None
            }
        };
        let mut kept = a.buffers();
        kept.extend(given.iter().flat_map(DispatchOutputs::buffers));
        if let (Transport::Pushed, Some(outputs)) = (transport, &given) {
            self.core.exchange(turn.stream(), &signed, &kept, |job| {
                job.cast(&a)?;
                job.push_dispatch(launch, &a, outputs)
            })?;
            return Ok(outputs.clone().dispatched(plan));
        }
        let outputs = self
            .core
            .collective(turn.stream(), &signed, &kept, None, |job| {
                dispatch(job, &a, given.clone())
            })?;
        Ok(outputs.dispatched(plan))
    }
}

impl Arguments {
    fn new(
        device: &CudaDevice,
        lane: &Arc<Lane>,
        p: &DispatchParams<'_>,
        (call, group, generation): (DispatchCall, Group, u8),
        (piece_rows, pieces): (usize, usize),
    ) -> Result<Self> {
        let rows = p.rows.retain();
        check_reach(&device.card, "rows.memory", &rows)?;
        let beside: Vec<Buffer> = p.beside.iter().map(|v| v.retain()).collect();
        for buffer in &beside {
            check_reach(&device.card, "beside.memory", buffer)?;
        }
        let new = |dtype, dims: &[usize]| device.scratch(lane, dtype, dims);
        let (router, ways) = match &p.route {
            Route::Experts { routing, weights } => {
                let router = Router::of(device, lane, routing, (call.k, call.placement), group)?;
                let weights = weights.map(|w| w.retain());
                if let Some(weights) = &weights {
                    check_reach(&device.card, "weights.memory", weights)?;
                }
                let own = (router.allocate(device, lane)?, weights);
                let slots = Slots::new(call.placement, group.size).of(group.rank).len();
                let expected = Expected::new(&call, (group.size, slots), own, new)?;
                (Some(router), Ways::New(Box::new(expected)))
            }
            Route::Again(handle) => (None, Ways::Again(Box::new(handle.parts().clone()))),
        };
        let cast = match call.cast {
            Some(cast) => {
                let tokens = rows.shape().rows();
                let (dtype, n) = cast.scales(call.hidden);
                let values = device.scratch(lane, DataType::F8E4M3, &[tokens, call.hidden])?;
                Some((values, device.scratch(lane, dtype, &[tokens, n])?))
            }
            None => None,
        };
        let staged = match pieces {
            1 => None,
            _ => {
                let bytes = Sections::dispatch(&call, call.max_tokens)
                    .bytes
                    .next_multiple_of(64);
                Some(device.scratch(lane, DataType::U8, &[group.size, bytes])?)
            }
        };
        Ok(Self {
            group,
            generation,
            piece_rows,
            pieces,
            queues: None,
            beside_rows: p
                .beside
                .iter()
                .map(|v| (v.dtype(), v.shape().row_len()))
                .collect(),
            rows,
            beside,
            router,
            ways,
            cast,
            staged,
            call,
        })
    }

    /// What work must keep.
    fn buffers(&self) -> Vec<&Buffer> {
        let mut list = vec![&self.rows];
        list.extend(&self.beside);
        list.extend(&self.staged);
        list.extend(
            self.cast
                .iter()
                .flat_map(|(values, scales)| [values, scales]),
        );
        list.extend(self.router.iter().flat_map(Router::buffers));
        list.extend(self.ways.buffers());
        list
    }

    /// What goes into each section of own rows.
    pub(crate) fn from(&self) -> [u64; 9] {
        let mut all = [0; 9];
        let mut set = |section: Section, buffer: Option<&Buffer>| {
            all[section.index()] = buffer.map_or(0, Buffer::address);
        };
        set(
            Section::Row,
            Some(self.cast.as_ref().map_or(&self.rows, |(values, _)| values)),
        );
        set(
            Section::Scales,
            self.cast.as_ref().map(|(_, scales)| scales),
        );
        set(Section::Slots, Some(&self.ways.layout().slots));
        if let Ways::New(expected) = &self.ways {
            set(Section::Weights, expected.own_weights.as_ref());
        }
        for (i, buffer) in self.beside.iter().enumerate() {
            set(Section::Beside(i), Some(buffer));
        }
        all
    }

    /// Words of a row's scales if they lie by columns, or 0.
    pub(crate) fn scale_words(&self) -> u32 {
        match self.call.cast.filter(|cast| cast.column_major) {
            Some(cast) => {
                let (dtype, n) = cast.scales(self.call.hidden);
                (n * dtype.bytes() / 4) as u32
            }
            None => 0,
        }
    }

    /// Buffers for so many rows.
    fn allocate(
        &self,
        device: &CudaDevice,
        lane: &Arc<Lane>,
        room: usize,
    ) -> Result<DispatchOutputs> {
        let (call, group) = (&self.call, self.group);
        DispatchOutputs::new(
            call,
            (group, self.generation),
            room,
            &self.beside_rows,
            &self.ways,
            |dtype, dims| device.scratch(lane, dtype, dims),
        )
    }
}

/// An arrangement as kernels know it, and what a slot's rows begin at a multiple of.
pub(crate) fn codes(arrangement: Arrangement) -> (u32, u32) {
    match arrangement {
        Arrangement::Dense => (0, 1),
        Arrangement::BySource => (1, 1),
        // Checked to be small.
        Arrangement::ByExpert { alignment } => (2, alignment as u32),
    }
}

/// Where the rows of each section go.
pub(crate) fn to(outputs: &DispatchOutputs) -> [u64; 9] {
    let mut all = [0; 9];
    let mut set = |section: Section, buffer: Option<&Buffer>| {
        all[section.index()] = buffer.map_or(0, Buffer::address);
    };
    set(Section::Row, Some(&outputs.rows));
    set(Section::Scales, outputs.scales.as_ref());
    set(Section::Weights, outputs.parts.weights.as_ref());
    for (i, buffer) in outputs.beside.iter().enumerate() {
        set(Section::Beside(i), Some(buffer));
    }
    all
}

/// Every rank's part of a half of this rank.
pub(crate) fn own_parts(job: &Job<'_>, of: Use) -> (u64, usize) {
    let half = job.core.control.layout().half_bytes(of.area);
    (
        job.core.place(job.core.rank(), of, 0),
        part_bytes(half, job.core.size()),
    )
}

fn dispatch(
    job: &mut Job<'_>,
    a: &Arguments,
    given: Option<DispatchOutputs>,
) -> Result<DispatchOutputs> {
    let device = Arc::clone(&job.core.device);
    let sections = Sections::dispatch(&a.call, a.piece_rows);
    let mut open = None;
    if let (Some(queues), Some(staged)) = (&a.queues, &a.staged) {
        job.prepare_rows(a)?;
        job.queue_rows(a, queues, staged)?;
    }
    for piece in 0..a.pieces {
        let of = job.begin(Area::Dispatch);
        if piece == 0 {
            job.prepare_rows(a)?;
        }
        job.push_rows(a, &sections, of, piece)?;
        job.steps.filled_to_all(of, a.group.rank, 0);
        job.steps.await_all(of, 0);
        match &a.staged {
            Some(staged) => {
                job.stage(a, &sections, of, piece, staged)?;
                job.steps.end(of);
            }
            None => open = Some(of),
        }
    }
    let came = match (&a.staged, open) {
        (None, Some(of)) => {
            let (parts, stride) = own_parts(job, of);
            Came {
                parts,
                stride,
                rows: a.piece_rows,
            }
        }
        (Some(staged), _) => Came {
            parts: staged.address(),
            stride: staged.shape().columns(),
            rows: a.call.max_tokens,
        },
        (None, None) => return Err(Error::invalid("pieces", a.pieces, "at least 1")),
    };
    if let Some(outputs) = &given {
        for out in outputs.poisoned() {
            job.poisons(out.address(), out.bytes(), out.dtype());
        }
    }
    let outputs = match given {
        Some(outputs) => {
            job.count_and_say(a, came, outputs.capacity(), 0)?;
            outputs
        }
        None => {
            let room = job.room(a, came)?;
            let outputs = a.allocate(&device, job.lane, room)?;
            for out in outputs.poisoned() {
                job.poisons(out.address(), out.bytes(), out.dtype());
            }
            outputs
        }
    };
    job.collect(a, came, &outputs)?;
    if let Some(of) = open {
        job.steps.end(of);
    }
    Ok(outputs)
}

impl Job<'_> {
    /// Peers hear of the arrival before anything is worked on here.
    fn prepare_rows(&mut self, a: &Arguments) -> Result<()> {
        self.steps_now()?;
        if let Some(router) = &a.router {
            router.route(&self.core.device, self.stream, a.ways.layout())?;
        }
        self.cast(a)
    }

    pub(crate) fn cast(&mut self, a: &Arguments) -> Result<()> {
        match (a.call.cast, &a.cast) {
            (Some(cast), Some((values, scales))) => self.cast_rows(cast, &a.rows, values, scales),
            _ => Ok(()),
        }
    }

    /// Rows become fp8, with their scales by rows.
    pub(crate) fn cast_rows(
        &self,
        cast: Fp8Cast,
        from: &Buffer,
        values: &Buffer,
        scales: &Buffer,
    ) -> Result<()> {
        let (rows, hidden) = (from.shape().rows(), from.shape().row_len());
        let (_, per_row) = cast.scales(hidden);
        if rows == 0 {
            return Ok(());
        }
        let parameters = CastParams {
            from: from.address(),
            values: values.address(),
            scales: scales.address(),
            rows: rows as u64,
            hidden: hidden as u32,
            from_type: types::float_code(from.dtype()),
            format: format_code(cast.format),
            per_row: per_row as u32,
        };
        let shape = row_blocks(self, rows * per_row, 32);
        let kernel = &self.core.device.opened.kernels.dispatches.cast;
        // SAFETY: all of it lies in buffers of the right sizes, which the call keeps.
        unsafe { kernel.launch(self.stream, shape, parameters) }.map_err(Into::into)
    }

    /// What all kernels of a dispatch are told.
    fn dispatching(&self, a: &Arguments, sections: &Sections, of: Option<Use>) -> Parameters {
        let core = self.core;
        let placed = Placed::from(a.call.placement);
        let half = core.control.layout().half_bytes(Area::Dispatch);
        let mut parameters = Parameters {
            half: of.map_or(0, |of| core.data_offset(of)) as u64,
            part_bytes: part_bytes(half, core.size()) as u64,
            sent: a.ways.layout().sent.address(),
            sent_offsets: a.ways.layout().sent_offsets.address(),
            max_tokens: a.call.max_tokens as u32,
            k: a.call.k as u32,
            again: u32::from(a.call.again),
            sections: sections.count() as u32,
            placement: placed.code,
            experts: placed.experts,
            per_rank: placed.per_rank,
            signature: self.kind.signature,
            ..waiting!(Parameters, self)
        };
        (parameters.arrangement, parameters.alignment) = codes(a.call.arrangement);
        for i in 0..sections.count() {
            parameters.section[i] = sections.at(i, 0).start as u64;
            parameters.row_bytes[i] = sections.at(i, 1).len() as u64;
        }
        parameters
    }

    /// Writes a piece of own rows into this rank's parts of the halves of all.
    fn push_rows(
        &mut self,
        a: &Arguments,
        sections: &Sections,
        of: Use,
        piece: usize,
    ) -> Result<()> {
        self.steps_now()?;
        let mut parameters = self.dispatching(a, sections, Some(of));
        parameters.from = a.from();
        parameters.first_row = (piece * a.piece_rows) as u32;
        parameters.piece_rows = a.piece_rows as u32;
        let rows = a.piece_rows * a.group.size;
        let most = rows.min(a.ways.layout().sent.shape().len().max(a.group.size));
        parameters.row_threads =
            row_threads(&self.core.device, most, sections.row_bytes(Section::Row));
        let shape = row_blocks(self, most, parameters.row_threads);
        let kernel = &self.core.device.opened.kernels.dispatches.push;
        // SAFETY: own rows lie in buffers of the call, and go into the group's memory, which the core keeps.
        unsafe { kernel.launch(self.stream, shape, parameters) }.map_err(Into::into)
    }

    /// Takes a piece of everybody's rows out of this rank's half.
    fn stage(
        &mut self,
        a: &Arguments,
        sections: &Sections,
        of: Use,
        piece: usize,
        staged: &Buffer,
    ) -> Result<()> {
        let all = Sections::dispatch(&a.call, a.call.max_tokens);
        let (parts, stride) = own_parts(self, of);
        let first = piece * a.piece_rows;
        let rows = a.piece_rows.min(a.call.max_tokens - first);
        let mut list = Vec::new();
        for source in 0..a.group.size {
            let from = parts + (source * stride) as u64;
            let to = staged.address() + (source * staged.shape().columns()) as u64;
            list.push((to, from, Sections::COUNTS_BYTES));
            for i in 0..sections.count() {
                let piece = sections.at(i, rows);
                let at = all.at(i, first).end;
                list.push((to + at as u64, from + piece.start as u64, piece.len()));
            }
        }
        self.moves(&list)
    }
}
