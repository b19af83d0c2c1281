//! Dispatch: every rank writes its rows into its part of the receivers' halves, a piece at a time; who has all of them puts them
//! where the arrangement wants them. Nobody's host hears of a count, unless room is to be made for just so many rows.

mod arrange;
mod blocks;
mod fifo;
mod gathered;
mod in_place;
mod pieces;

pub(crate) use blocks::{
    Side, WIDEST, Work, row_blocks, row_blocks_alone, row_blocks_on, row_threads,
};
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
    window::Window,
};
use brigade_device::{
    Arrangement, Buffer, Call, DataType, DispatchCall, DispatchOutputs, DispatchParams, Dispatched,
    Error, Expected, Fp8Cast, Group, Origin, Plan, Result, Route, Routing, ScaleFormat, Transport,
    Turn, Ways, taken_back,
};
use brigade_kernels::{CastParams, DispatchParams as Parameters};
use brigade_plan::{
    dispatch::{InPlace, Load, Section, Sections, part_bytes, sections, ways_rows},
    fifo::Queues,
    routes::Slots,
};
use brigade_sync::Area;
use gathered::Gathered;
use pieces::{Passing, Piece};
use std::sync::{Arc, atomic::Ordering};

/// Its kernels, in the order in which they run.
#[derive(Debug)]
pub(crate) struct DispatchKernels {
    cast: Kernel<CastParams>,
    push: Kernel<Parameters>,
    /// A block of it that shares its multiprocessor with nobody.
    push_alone: Launch,
    count: Kernel<Parameters>,
    place: Kernel<Parameters>,
    arrange: Kernel<Parameters>,
    collect: Kernel<Parameters>,
}

impl DispatchKernels {
    pub(crate) fn load(set: &Arc<KernelSet>) -> Result<Self, Missing> {
        /// Of a block that has a multiprocessor to write from.
        const THREADS: u32 = 1024;
        let push: Kernel<Parameters> = set.variant("_push")?;
        Ok(Self {
            cast: set.kernel()?,
            push_alone: push.alone(THREADS)?,
            push,
            count: set.variant("_count")?,
            place: set.variant("_place")?,
            arrange: set.variant("_arrange")?,
            collect: set.variant("_collect")?,
        })
    }
}

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

/// The arguments.
pub(crate) struct Arguments {
    pub(crate) call: DispatchCall,
    pub(crate) group: Group,
    origin: Origin,
    /// What goes through halves.
    pieces: Vec<Piece>,
    queues: Option<Queues>,
    rows: Buffer,
    beside: Vec<Buffer>,
    beside_rows: Vec<(DataType, usize)>,
    /// What finds the ways of rows, where they are new.
    pub(crate) router: Option<Router>,
    /// The ids of all ranks, where they are known.
    gathered: Option<Gathered>,
    pub(crate) ways: Ways,
    /// What slots get is added to it.
    pub(crate) totals: Option<Buffer>,
    /// Waits for each rank are added to it.
    waits: Option<Buffer>,
    cast: Option<(Buffer, Buffer)>,
    staged: Option<Buffer>,
    /// How the half lies, where rows stay in it.
    pub(crate) in_place: Option<InPlace>,
}

/// Where rows lie that have come.
#[derive(Clone, Copy)]
struct Came {
    parts: u64,
    stride: usize,
    piece: Piece,
    /// Whether own rows lie there, too, and not only what says which they are.
    with_own: bool,
}

impl CudaComm {
    pub(crate) fn run_dispatch(&self, turn: &Turn, p: DispatchParams<'_>) -> Result<Dispatched> {
        let group = *self.core.control.group();
        let origin = self.core.control.origin();
        let call = p.check(&group, origin)?;
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
        let mut a = Arguments::new(device, lane, &p, (call, group, origin))?;
        a.travel(self, lane, (transport, piece_rows))?;
        self.check_stays("rows", &a.rows)?;
        for buffer in &a.beside {
            self.check_stays("beside", buffer)?;
        }
        // Whoever has rows of an earlier one in place has them no longer.
        self.core.views.dispatched.fetch_add(1, Ordering::AcqRel);
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
                job.adds_waits(a.waits.as_ref());
                job.cast(&a)?;
                job.push_dispatch(launch, &a, outputs, None)
            })?;
            return Ok(outputs.clone().dispatched(plan));
        }
        if let (Some(layout), true, Some(outputs)) = (&a.in_place, launch.blocks > 0, &given) {
            let outputs = self.core.exchange(turn.stream(), &signed, &kept, |job| {
                job.adds_waits(a.waits.as_ref());
                job.cast(&a)?;
                job.push_in_place(launch, &a, layout, outputs.clone())
            })?;
            return Ok(outputs.dispatched(plan));
        }
        let outputs = self
            .core
            .collective(turn.stream(), &signed, &kept, None, |job| {
                job.adds_waits(a.waits.as_ref());
                dispatch(job, &a, given.clone())
            })?;
        Ok(outputs.dispatched(plan))
    }

    /// Refuses what a dispatch takes back from the caller, where it is to be sent: once the call has begun, others would wait for it.
    fn check_stays(&self, field: &'static str, buffer: &Buffer) -> Result<()> {
        let views = &self.core.views;
        let window = buffer.storage().downcast::<Window>();
        let mut ending = views.all.iter().chain([&views.dispatched]);
        if !window.is_some_and(|window| ending.any(|views| window.is_of(views))) {
            return Ok(());
        }
        Err(taken_back(field))
    }
}

impl Arguments {
    fn new(
        device: &CudaDevice,
        lane: &Arc<Lane>,
        p: &DispatchParams<'_>,
        (call, group, origin): (DispatchCall, Group, Origin),
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
        let totals = match &p.totals {
            Some(totals) => {
                ways.check_totals(totals)?;
                let totals = totals.as_view().retain();
                check_reach(&device.card, "totals.memory", &totals)?;
                Some(totals)
            }
            None => None,
        };
        let waits = p.waits.as_ref().map(|waits| waits.as_view().retain());
        if let Some(waits) = &waits {
            check_reach(&device.card, "waits.memory", waits)?;
        }
        Ok(Self {
            group,
            origin,
            pieces: Vec::new(),
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
            totals,
            waits,
            cast,
            staged: None,
            in_place: None,
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
        let (load, tokens) = (Load::of(call), call.max_tokens);
        let gathers = transport == Transport::Gather;
        let ways = || {
            let half = comm.core.control.layout().half_bytes(Area::Dispatch);
            (tokens, ways_rows(call, half, size))
        };
        self.pieces = match (transport, load) {
            (Transport::Pushed | Transport::Fifo, _) => Vec::new(),
            (Transport::InPlace, load) => {
                self.in_place = Some(InPlace::of(call, size));
                in_place::pieces(load, tokens, comm.core.config.sm_budget)
            }
            (Transport::OneSided, Load::Whole) if rows >= tokens => {
                Piece::all(Load::Whole, (tokens, rows), false).collect()
            }
            // What says which row is what goes ahead, so that each piece of the others can be taken to where it belongs.
            (_, Load::Whole) => Piece::all(Load::Ways, ways(), false)
                .chain(Piece::all(Load::Rest, (tokens, rows), gathers))
                .collect(),
            (_, Load::Rest | Load::Ways) => {
                Piece::all(Load::Rest, (tokens, rows), gathers).collect()
            }
        };
        let kept = match transport {
            Transport::Fifo => {
                self.queues = Some(Queues::for_rows(
                    &comm.core.topology,
                    &sections(call),
                    tokens,
                )?);
                Some(load)
            }
            _ => self
                .pieces
                .first()
                .filter(|first| first.load == Load::Ways && first.rows < tokens)
                .map(|first| first.load),
        };
        if let Some(load) = kept {
            let bytes = Sections::part(call, load, tokens).bytes;
            let dims = [size, bytes.next_multiple_of(64)];
            self.staged = Some(comm.gpu().scratch(lane, DataType::U8, &dims)?);
        }
        Ok(())
    }

    /// What each side does of a token's rows.
    fn work(&self) -> Work {
        let (size, k) = (self.group.size, self.call.k);
        // By expert a row is read once, and written for each of the token's experts here.
        let takes = match self.call.arrangement {
            Arrangement::ByExpert { .. } => Work::HALF * (1 + k.div_ceil(size)),
            Arrangement::Dense | Arrangement::BySource => Work::COPY,
        };
        // Where rows stay in place, own ones are written there, too, and nothing is taken but what says which is what.
        let stays = self.in_place.is_some();
        Work {
            pieces: self.pieces.len(),
            targets: if stays { size } else { size - 1 },
            pushes: Work::PUSH * (size - 1),
            makes: 0,
            takes: if stays { takes } else { takes * size },
        }
    }

    /// What work must keep.
    fn buffers(&self) -> Vec<&Buffer> {
        let mut list = vec![&self.rows];
        list.extend(&self.beside);
        list.extend(self.staged.iter().chain(&self.totals).chain(&self.waits));
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

    /// What this rank's first slot is called in ids, and what none is, as kernels take them.
    pub(crate) fn called(&self) -> (u32, u32) {
        let slots = Slots::new(self.call.placement, self.group.size);
        let (first, none) = slots.called(self.group.rank, self.call.received_ids);
        (first as u32, none as u32)
    }

    /// Words of a row's scales if they lie by columns, or 0.
    pub(crate) fn scale_words(&self) -> u32 {
        let words = self
            .call
            .cast
            .and_then(|c| c.words_by_columns(self.call.hidden));
        words.unwrap_or(0) as u32
    }

    /// Buffers for so many rows.
    fn allocate(
        &self,
        device: &CudaDevice,
        lane: &Arc<Lane>,
        room: usize,
    ) -> Result<DispatchOutputs> {
        let (call, group) = (&self.call, self.group);
        // Rows that stay in place have theirs.
        let none = self.in_place.as_ref();
        let none = none.map(|_| device.scratch(lane, call.wire_type(), &[0]));
        DispatchOutputs::new(
            call,
            (group, self.origin),
            room,
            &self.beside_rows,
            &self.ways,
            none.transpose()?,
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

fn dispatch(
    job: &mut Job<'_>,
    a: &Arguments,
    outputs: Option<DispatchOutputs>,
) -> Result<DispatchOutputs> {
    if let Some(outputs) = outputs.as_ref().filter(|_| a.in_place.is_none()) {
        job.poison_all(outputs);
    }
    if let (Some(queues), Some(staged)) = (&a.queues, &a.staged) {
        job.prepare_rows(a)?;
        job.queue_rows(a, queues, staged)?;
        let came = Came::staged(a, Load::of(&a.call), staged);
        let outputs = job.say(a, came, outputs)?;
        job.arrange(a, came, &outputs)?;
        job.collect(a, came, &outputs)?;
        return Ok(outputs);
    }
    // Where rows stayed in place, they are not needed any more.
    job.steps.let_go_of_area(Area::Dispatch);
    let mut passing = Passing { a, outputs };
    job.relay(&mut passing)?;
    let outputs = passing.outputs;
    outputs.ok_or_else(|| Error::invalid("route", "again", "room for its rows"))
}

impl Job<'_> {
    /// Marks all that a dispatch writes, should it fail.
    fn poison_all(&mut self, outputs: &DispatchOutputs) {
        for out in outputs.poisoned() {
            self.poisons(out.address(), out.bytes(), out.dtype());
        }
    }

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
        let shape = row_blocks(self, rows * per_row, 32, WIDEST);
        let kernel = &self.core.device.opened.kernels.dispatches.cast;
        // SAFETY: all of it lies in buffers of the right sizes, which the call keeps.
        unsafe { self.follow(self.stream, kernel, shape, parameters) }
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
