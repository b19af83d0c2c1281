//! Dispatch: every rank writes its rows into its part of the receivers' halves, a piece at a time; who has all of them puts them
//! where the arrangement wants them. Nobody's host hears of a count, unless room is to be made for just so many rows.

mod arrange;
mod fifo;
mod gathered;
mod pieces;

pub(crate) use pieces::own_parts;

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
    Dispatched, Error, Expected, Fp8Cast, Group, Plan, Result, Route, Routing, ScaleFormat,
    Transport, Turn, Ways,
};
use brigade_kernels::{CastParams, DispatchParams as Parameters};
use brigade_plan::{
    dispatch::{Load, Section, Sections, part_bytes, sections, ways_rows},
    fifo::Queues,
    routes::Slots,
};
use brigade_sync::Area;
use gathered::Gathered;
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
    /// What goes through halves before it is known which row is what, and behind that.
    first: Option<Passage>,
    rest: Option<Passage>,
    queues: Option<Queues>,
    rows: Buffer,
    beside: Vec<Buffer>,
    beside_rows: Vec<(DataType, usize)>,
    /// What finds the ways of rows, where they are new.
    pub(crate) router: Option<Router>,
    /// The ids of all ranks, where they are known.
    gathered: Option<Gathered>,
    pub(crate) ways: Ways,
    cast: Option<(Buffer, Buffer)>,
    staged: Option<Buffer>,
}

/// What goes through halves, in pieces.
#[derive(Clone, Copy)]
struct Passage {
    load: Load,
    /// Most rows of a sender at a time.
    rows: usize,
    /// Whether all ranks get all rows.
    gathers: bool,
}

impl Passage {
    /// Where pieces begin: one at least.
    fn starts(self, max_tokens: usize) -> impl Iterator<Item = usize> {
        (0..max_tokens.max(1)).step_by(self.rows.max(1))
    }
}

/// Where rows lie that have come.
#[derive(Clone, Copy)]
struct Came {
    load: Load,
    parts: u64,
    stride: usize,
    /// The first of them: of a sender's rows for this rank, or of its tokens.
    first: usize,
    /// Rows that a section has room for.
    rows: usize,
    /// Whether they are all of the sender's.
    gathers: bool,
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
            launch,
            ..
        } = plan
        else {
            return Err(unexpected(&plan));
        };
        let (device, lane) = (self.gpu(), self.gpu().lane(turn.stream())?);
        let mut a = Arguments::new(device, lane, &p, (call, group, generation))?;
        a.travel(self, lane, (transport, piece_rows))?;
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
    ) -> Result<Self> {
        let rows = p.rows.retain();
        check_reach(&device.card, "rows.memory", &rows)?;
        let beside: Vec<Buffer> = p.beside.iter().map(|v| v.retain()).collect();
        for buffer in &beside {
            check_reach(&device.card, "beside.memory", buffer)?;
        }
        let new = |dtype, dims: &[usize]| device.scratch(lane, dtype, dims);
        let ways_of = |routing: &Routing<'_>, weights: Option<Buffer>| {
            let router = Router::of(device, lane, routing, (call.k, call.placement), group)?;
            if let Some(weights) = &weights {
                check_reach(&device.card, "weights.memory", weights)?;
            }
            let own = (router.allocate(device, lane)?, weights);
            let slots = Slots::new(call.placement, group.size).of(group.rank).len();
            let expected = Expected::new(&call, (group.size, slots), own, new)?;
            Ok::<_, Error>((Some(router), Ways::New(Box::new(expected))))
        };
        let (router, ways) = match &p.route {
            Route::Experts { routing, weights } => ways_of(routing, weights.map(|w| w.retain()))?,
            Route::Gathered(all) => {
                let dims = [rows.shape().rows(), call.k];
                let ids = new(all.ids.dtype(), &dims)?;
                let weights = match call.weights {
                    true => Some(new(DataType::F32, &dims)?),
                    false => None,
                };
                let own = Routing {
                    ids: ids.view(),
                    placement: all.placement,
                };
                ways_of(&own, weights)?
            }
            Route::Again(handle) => (None, Ways::Again(Box::new(handle.parts().clone()))),
        };
        let gathered = match &p.route {
            Route::Gathered(all) => Some(Gathered::new(device, lane, (&call, group.size), all)?),
            Route::Experts { .. } | Route::Again(_) => None,
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
        Ok(Self {
            group,
            generation,
            first: None,
            rest: None,
            queues: None,
            beside_rows: p
                .beside
                .iter()
                .map(|v| (v.dtype(), v.shape().row_len()))
                .collect(),
            rows,
            beside,
            router,
            gathered,
            ways,
            cast,
            staged: None,
            call,
        })
    }

    /// Says what goes through halves or queues, and what has to be kept until all of it is there.
    fn travel(
        &mut self,
        comm: &CudaComm,
        lane: &Arc<Lane>,
        (transport, rows): (Transport, usize),
    ) -> Result<()> {
        let (call, size) = (&self.call, self.group.size);
        let load = Load::of(call);
        let gathers = transport == Transport::Gather;
        let rest = Passage {
            load: Load::Rest,
            rows,
            gathers,
        };
        (self.first, self.rest) = match (transport, load) {
            (Transport::Pushed | Transport::Fifo, _) => (None, None),
            (_, Load::Rest) => (None, Some(rest)),
            (Transport::OneSided, _) => (Some(Passage { load, ..rest }), None),
            (Transport::Gather, _) => {
                let half = comm.core.control.layout().half_bytes(Area::Dispatch);
                let ways = Passage {
                    load: Load::Ways,
                    rows: ways_rows(call, half, size),
                    gathers: false,
                };
                (Some(ways), Some(rest))
            }
        };
        let kept = match (transport, self.first) {
            (Transport::Fifo, _) => {
                let bytes = comm.core.config.fifo_bytes;
                self.queues = Some(Queues::new(bytes, size, &sections(call))?);
                Some(load)
            }
            (_, Some(first)) if first.rows < call.max_tokens => Some(first.load),
            _ => None,
        };
        if let Some(load) = kept {
            let bytes = Sections::part(call, load, call.max_tokens).bytes;
            let dims = [size, bytes.next_multiple_of(64)];
            self.staged = Some(comm.gpu().scratch(lane, DataType::U8, &dims)?);
        }
        Ok(())
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
        list.extend(self.gathered.iter().flat_map(Gathered::buffers));
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

/// What says which row is what comes first; the rows come with it, or else behind it.
fn dispatch(
    job: &mut Job<'_>,
    a: &Arguments,
    given: Option<DispatchOutputs>,
) -> Result<DispatchOutputs> {
    let device = Arc::clone(&job.core.device);
    let poisons = |job: &mut Job<'_>, outputs: &DispatchOutputs| {
        for out in outputs.poisoned() {
            job.poisons(out.address(), out.bytes(), out.dtype());
        }
    };
    let first = match (&a.queues, &a.staged, a.first) {
        (Some(queues), Some(staged), _) => {
            job.prepare_rows(a)?;
            job.queue_rows(a, queues, staged)?;
            Some((Came::staged(a, Load::of(&a.call), staged), None))
        }
        (_, _, Some(passage)) => Some(job.pass(a, passage)?),
        (_, _, None) => match &a.gathered {
            Some(all) => {
                job.prepare_rows(a)?;
                Some((Came::staged(a, Load::Ways, &all.ways), None))
            }
            None => None,
        },
    };
    if let Some(outputs) = &given {
        poisons(job, outputs);
    }
    let outputs = match (given, first) {
        (Some(outputs), Some((came, _))) => {
            job.count_and_say(a, came, outputs.capacity(), 0)?;
            outputs
        }
        (Some(outputs), None) => outputs,
        (None, Some((came, _))) => {
            let room = job.room(a, came)?;
            let outputs = a.allocate(&device, job.lane, room)?;
            poisons(job, &outputs);
            outputs
        }
        (None, None) => return Err(Error::invalid("route", "again", "room for its rows")),
    };
    if let Some((came, open)) = first {
        job.collect(a, came, &outputs)?;
        if let Some(of) = open {
            job.steps.end(of);
        }
    }
    if let Some(passage) = a.rest {
        job.pass_by(a, passage, &outputs)?;
    }
    Ok(outputs)
}

impl Job<'_> {
    /// Peers hear of the arrival before anything is worked on here.
    fn prepare_rows(&mut self, a: &Arguments) -> Result<()> {
        self.steps_now()?;
        if let Some(all) = &a.gathered {
            self.find_rows(a, all)?;
        }
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
            tokens: a.rows.shape().rows() as u32,
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
}
