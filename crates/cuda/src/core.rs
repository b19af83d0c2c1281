//! What every call of a communicator goes through: entering, the steps of its protocol, failing, resetting, leaving.
//!
//! Calls are enqueued and carried out later, so a rank's counters live in its GPU's memory. What must be fixed when a call is
//! issued, since a captured graph keeps its addresses, is decided here: which half of an area a call uses.

use crate::{
    CudaDevice, Launch,
    driver::failed,
    lane::Lane,
    mark::{self, CudaMark},
    memory::DeviceMemory,
    report::Report,
    residency::Spinning,
    steps::{Counters, Steps, Use},
    symmetric::Symmetric,
    user_buffers::Regions,
    window::{Token, Window},
};
use brigade_device::{
    Buffer, Call, CommConfig, DataType, Device, Error, FaultKind, FaultRecord, Group, Mark,
    Operation, PeerWait, PerRank, Plan, Reason, Result, Shape, Storage, Stream, Traffic,
};
use brigade_group::Control;
use brigade_kernels::{
    MESSAGE_THREADS, MOST_MOVES, MOST_POISONED, MOST_STEPS, MoveParams, STATE_CALLS,
    STATE_COUNTERS, STATE_GENERATION, STATE_MOVED, STATE_WAITED, STATE_WAITS, STEP_THREADS,
    StepsParams,
};
use brigade_plan::{Table, Topology};
use brigade_sync::{Area, Flag, HALVES, Half, Memory};
use cudarc::driver::{result, sys};
use parking_lot::Mutex;
use std::{
    collections::BTreeMap,
    ops::Range,
    sync::{
        Arc, Weak,
        atomic::{AtomicU64, Ordering},
    },
    thread,
    time::{Duration, Instant},
};

/// Longest that a rank whose kernels found the group stopped waits to hear why.
const HEARSAY: Duration = Duration::from_secs(1);

/// Launches of steps that may wait at the same time: on the caller's stream, and beside it.
const STEPS_AT_ONCE: u32 = 2;

/// Longest that a load waits where ranks share a GPU.
const SHARING: Duration = Duration::from_millis(50);

/// Longest that reading a rank's own counters may take.
const COUNTING: Duration = Duration::from_secs(60);

/// What kernels of a communicator use: it must outlive all of them, and all graphs that hold some.
#[derive(Debug)]
pub(crate) struct GroupMemory {
    pub(crate) symmetric: Arc<Symmetric>,
    pub(crate) state: DeviceMemory,
    pub(crate) report: Report,
}

/// One rank's membership in a group.
pub(crate) struct Core {
    pub(crate) device: Arc<CudaDevice>,
    pub(crate) control: Arc<Control>,
    pub(crate) config: CommConfig,
    topology: Topology,
    table: Table,
    pub(crate) memory: Arc<GroupMemory>,
    /// Copies go here beside the caller's stream, which a call may fork from and join.
    pub(crate) mover: Arc<Lane>,
    /// Steps go here, likewise.
    pub(crate) waiter: Arc<Lane>,
    /// For what no caller's stream is for: closing, counting, wiping.
    own: Arc<Lane>,
    /// Streams that did work.
    used: Mutex<Vec<Arc<Lane>>>,
    /// What is decided when a call is issued, or captured. Held while one is.
    pub(crate) issue: Mutex<Issue>,
    pub(crate) views: Views,
    pub(crate) regions: Mutex<Regions>,
    shares: bool,
    _spinning: [Spinning; 2],
}

/// Halves alternate as calls are issued; own rows may be handed out before the call that uses them.
#[derive(Default)]
pub(crate) struct Issue {
    next: [u32; Area::ALL.len()],
    pub(crate) reserved: Option<Reserved>,
    pub(crate) tickets: u64,
}

impl Issue {
    /// A use of the next half.
    pub(crate) fn next(&mut self, area: Area) -> Use {
        let n = &mut self.next[area as usize];
        let half = Half::of(*n);
        *n = n.wrapping_add(1);
        Use { area, half }
    }
}

/// Space for own rows that was handed out.
pub(crate) struct Reserved {
    pub(crate) of: Use,
    pub(crate) ticket: u64,
    /// Rows of every rank, which say where own rows lie.
    pub(crate) rows: PerRank,
}

/// Which views of the gather region's halves are still good: a view knows the number of its time.
#[derive(Default)]
pub(crate) struct Views {
    pub(crate) all: [Arc<AtomicU64>; HALVES],
    pub(crate) own: [Arc<AtomicU64>; HALVES],
}

/// Everything that a communicator is made of.
pub(crate) struct Parts {
    pub(crate) device: Arc<CudaDevice>,
    pub(crate) control: Control,
    pub(crate) config: CommConfig,
    pub(crate) topology: Topology,
    pub(crate) table: Table,
    /// Every rank's part.
    pub(crate) symmetric: Arc<Symmetric>,
    /// Whether another rank of the group has this GPU too.
    pub(crate) shares: bool,
    /// Where the heap of registered regions begins in a part.
    pub(crate) regions_start: usize,
}

/// Words of a rank's own state.
pub(crate) fn state_words(config: &CommConfig, size: usize) -> usize {
    STATE_COUNTERS + 2 * Counters::new(size).count(config.regions)
}

/// Communicators of this process on each GPU.
static HERE: Mutex<BTreeMap<usize, Vec<Weak<Core>>>> = Mutex::new(BTreeMap::new());

/// Waits until the work of all communicators on a GPU is done: before something is loaded there. Loading waits for the GPU, and
/// whoever calls the driver meanwhile waits with it, peers of this process too, for whom the GPU's kernels may be waiting.
///
/// Where several ranks of a group share the GPU, they may be waiting for this very rank: then not for long.
pub(crate) fn quiet(ordinal: usize) {
    let cores: Vec<_> = {
        let mut here = HERE.lock();
        let list = here.entry(ordinal).or_default();
        list.retain(|core| core.strong_count() > 0);
        list.iter().filter_map(Weak::upgrade).collect()
    };
    let patience = if cores.iter().any(|core| core.shares) {
        SHARING
    } else {
        let longest = cores.iter().map(|core| core.config.first_deadline).max();
        longest.unwrap_or_default() + HEARSAY
    };
    let end = Instant::now() + patience;
    for mark in cores.iter().flat_map(|core| core.marks()) {
        // Whatever ended the work, it ended.
        let _ = mark.reached(end.saturating_duration_since(Instant::now()));
    }
}

impl std::fmt::Debug for Core {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Core({:?})", self.control.group())
    }
}

impl Core {
    pub(crate) fn new(parts: Parts) -> Result<Arc<Self>> {
        let Parts {
            device,
            control,
            config,
            topology,
            table,
            symmetric,
            shares,
            regions_start,
        } = parts;
        let size = control.group().size;
        let kernels = &device.opened.kernels;
        let steps = Launch::grid(STEPS_AT_ONCE, STEP_THREADS);
        let messages = Launch::grid(crate::messages::most_blocks(size), MESSAGE_THREADS);
        let spinning = [
            device.reserve_spinning(&kernels.steps, steps)?,
            device.reserve_spinning(&kernels.messages, messages)?,
        ];
        let state_bytes = 8 * state_words(&config, size);
        let memory = GroupMemory {
            state: DeviceMemory::outside_of_streams(&device.card, state_bytes)?,
            report: Report::new(&device.card)?,
            symmetric,
        };
        let core = Self {
            mover: Lane::new(&device.card, i8::MAX)?,
            waiter: Lane::new(&device.card, i8::MAX)?,
            own: Lane::new(&device.card, 0)?,
            control: Arc::new(control),
            topology,
            table,
            memory: Arc::new(memory),
            used: Mutex::default(),
            issue: Mutex::default(),
            views: Views::default(),
            regions: Mutex::new(Regions::new(regions_start, &config)),
            config,
            device,
            shares,
            _spinning: spinning,
        };
        core.write_state(STATE_GENERATION, &[core.control.generation().into()])?;
        let core = Arc::new(core);
        watch(&core)?;
        let ordinal = core.device.card.context.ordinal();
        let mut here = HERE.lock();
        here.entry(ordinal).or_default().push(Arc::downgrade(&core));
        drop(here);
        Ok(core)
    }

    pub(crate) fn rank(&self) -> usize {
        self.control.group().rank
    }

    pub(crate) fn size(&self) -> usize {
        self.control.group().size
    }

    pub(crate) fn peers(&self) -> impl Iterator<Item = usize> + use<> {
        let (rank, size) = (self.rank(), self.size());
        (1..size).map(move |i| (rank + i) % size)
    }

    pub(crate) fn plan(&self, call: &Call) -> Result<Plan, Reason> {
        brigade_plan::plan(call, &self.topology, &self.table)
    }

    /// What products may use while protocol steps run beside them, where the group keeps some of the GPU from them. By default
    /// they have all of it: steps find room between a product's blocks, and the library does better on a whole GPU.
    pub(crate) fn product_sms(&self) -> Option<u16> {
        let sms = self.device.info().sms;
        let kept = self.config.sm_budget.filter(|&kept| kept > 0 && kept < sms);
        kept.map(|kept| sms - kept)
    }

    /// Address of byte `at` of a rank's part.
    pub(crate) fn address(&self, rank: usize, at: usize) -> u64 {
        let symmetric = &self.memory.symmetric;
        symmetric.base() + (rank * symmetric.stride() + at) as u64
    }

    /// Byte of a part where data lies: behind the words.
    pub(crate) fn data_offset(&self, of: Use) -> usize {
        let layout = self.control.layout();
        layout.total_bytes() - layout.bytes + layout.start(of.area, of.half)
    }

    /// Address of a byte of a rank's half.
    pub(crate) fn place(&self, rank: usize, of: Use, at: usize) -> u64 {
        self.address(rank, self.data_offset(of) + at)
    }

    /// Bytes of this rank's own half, as a buffer for as long as `views` stays what it is.
    pub(crate) fn window(
        self: &Arc<Self>,
        of: Use,
        range: Range<usize>,
        views: &Arc<AtomicU64>,
        dtype: DataType,
        shape: Shape,
    ) -> Result<Buffer> {
        let address = self.place(self.rank(), of, range.start);
        let window = Window::new(Arc::clone(self), address, range.len(), Arc::clone(views));
        Buffer::new(Arc::new(window), dtype, shape)
    }

    fn generation(&self) -> u8 {
        self.control.generation()
    }

    /// The fault that stopped the group in this generation, whoever found it.
    pub(crate) fn fault(&self) -> Option<FaultRecord> {
        let generation = self.generation();
        let report = &self.memory.report;
        if let Some(record) = self.control.fault() {
            return Some(record);
        }
        if let Some(record) = report.fault(generation) {
            return Some(self.raise(record));
        }
        if report.stopped(generation) {
            return Some(self.hear_of_fault());
        }
        None
    }

    /// A kernel of this rank found the group stopped: whoever stopped it is about to say why.
    fn hear_of_fault(&self) -> FaultRecord {
        let end = Instant::now() + HEARSAY;
        let (memory, rank) = (self.control.memory(), self.rank());
        loop {
            let events = memory.events(rank);
            if let Some(record) = self.control.fault() {
                return record;
            }
            if Instant::now() >= end {
                return self.raise(self.record(FaultKind::Aborted));
            }
            memory.rest(rank, events, Some(end));
        }
    }

    /// Stops the group; everybody's waits end with the record that won.
    fn raise(&self, record: FaultRecord) -> FaultRecord {
        let record = self.control.raise(record);
        self.memory.report.ask_to_stop(self.generation());
        record
    }

    fn record(&self, kind: FaultKind) -> FaultRecord {
        let rank = self.rank() as u32;
        FaultRecord {
            kind,
            operation: 0,
            rank,
            peer: rank,
            slot: 0,
            generation: self.generation().into(),
            expected: 0,
            seen: 0,
            waited_ns: 0,
            call: self.calls(),
            claimed: 1,
            reserved: 0,
        }
    }

    pub(crate) fn abort(&self) {
        self.control.abort(self.calls());
        self.memory.report.ask_to_stop(self.generation());
    }

    /// Calls that ended well, as far as they are known without waiting for the GPU long.
    fn calls(&self) -> u64 {
        self.read_state().map_or(0, |state| state[STATE_CALLS])
    }

    fn read_state(&self) -> Result<Vec<u64>> {
        let card = &self.device.card;
        card.bind()?;
        let mut words = vec![0u64; STATE_COUNTERS];
        let from = self.memory.state.address();
        // SAFETY: the state is at least this long, and the words outlive the wait below.
        unsafe { result::memcpy_dtoh_async(&mut words, from, self.own.stream) }
            .map_err(failed("cuMemcpyDtoHAsync"))?;
        CudaMark::record(card, self.own.stream)?.sync(COUNTING)?;
        Ok(words)
    }

    fn write_state(&self, first: usize, words: &[u64]) -> Result<()> {
        let card = &self.device.card;
        card.bind()?;
        let to = self.memory.state.address() + 8 * first as u64;
        // SAFETY: inside the state, and the words outlive the wait below.
        unsafe { result::memcpy_htod_async(to, words, self.own.stream) }
            .map_err(failed("cuMemcpyHtoDAsync"))?;
        CudaMark::record(card, self.own.stream)?.sync(COUNTING)
    }

    pub(crate) fn traffic(&self) -> Traffic {
        let state = self.read_state().unwrap_or(vec![0; STATE_COUNTERS]);
        let waits: Vec<_> = (0..self.size())
            .map(|r| PeerWait {
                waits: state[STATE_WAITS + r],
                waited_ns: state[STATE_WAITED + r],
            })
            .collect();
        Traffic {
            calls: state[STATE_CALLS],
            moved_bytes: state[STATE_MOVED],
            waited_ns: waits.iter().map(|w| w.waited_ns).sum(),
            waits,
        }
    }

    /// Whether calls can be made: no fault, and not closed.
    pub(crate) fn usable(&self) -> Result<()> {
        if self.control.is_closed() {
            return Err(Error::Closed);
        }
        self.fault().map_or(Ok(()), |f| Err(Error::Fault(f)))
    }

    /// Makes a call that all ranks make: tells them which, works, and sees to it that all were in the same one. `buffers` are
    /// kept until the work is done, and `out` is poisoned if the group is stopped.
    ///
    /// An error in `work` stops the group, since the others wait for this rank.
    pub(crate) fn collective<R>(
        self: &Arc<Self>,
        on: &Stream,
        call: &Call,
        buffers: &[&Buffer],
        out: Option<&Buffer>,
        work: impl FnOnce(&mut Job<'_>) -> Result<R>,
    ) -> Result<R> {
        let lane = self.device.lane(on)?;
        self.collective_within(lane, call, None, buffers, out, work)
    }

    fn collective_within<R>(
        self: &Arc<Self>,
        lane: &Arc<Lane>,
        call: &Call,
        within: Option<Duration>,
        buffers: &[&Buffer],
        out: Option<&Buffer>,
        work: impl FnOnce(&mut Job<'_>) -> Result<R>,
    ) -> Result<R> {
        for half in 0..HALVES {
            self.views.all[half].fetch_add(1, Ordering::AcqRel);
        }
        let kind = Kind {
            operation: call.operation(),
            signature: call.signature(),
            collective: true,
            within,
        };
        self.enqueue(lane, kind, buffers, out, |job| {
            job.steps.start();
            job.steps.let_go();
            job.steps.arrive();
            let done = work(job)?;
            job.steps.meet();
            job.steps.finish();
            Ok(done)
        })
    }

    /// Gets ready for a call that will come: no call itself, but what the last one left is let go of.
    pub(crate) fn prepare(
        self: &Arc<Self>,
        on: &Stream,
        work: impl FnOnce(&mut Job<'_>) -> Result<()>,
    ) -> Result<()> {
        for half in 0..HALVES {
            self.views.all[half].fetch_add(1, Ordering::AcqRel);
        }
        let kind = Kind::pairwise(Operation::GatherLinear, 0);
        self.enqueue(self.device.lane(on)?, kind, &[], None, |job| {
            job.steps.start();
            job.steps.let_go();
            work(job)?;
            job.steps.finish();
            Ok(())
        })
    }

    /// Makes a call between two ranks.
    pub(crate) fn pairwise(
        self: &Arc<Self>,
        on: &Stream,
        (operation, signature): (Operation, u32),
        buffers: &[&Buffer],
        out: Option<&Buffer>,
        work: impl FnOnce(&mut Job<'_>) -> Result<()>,
    ) -> Result<()> {
        let kind = Kind::pairwise(operation, signature);
        self.enqueue(self.device.lane(on)?, kind, buffers, out, |job| {
            job.steps.start();
            work(job)?;
            job.steps.finish();
            Ok(())
        })
    }

    /// Works with this rank's own memory, if the group was not stopped; no call.
    pub(crate) fn locally(
        self: &Arc<Self>,
        on: &Stream,
        buffers: &[&Buffer],
        work: impl FnOnce(&mut Job<'_>) -> Result<()>,
    ) -> Result<()> {
        let kind = Kind::pairwise(Operation::UserBuffers, 0);
        self.enqueue(self.device.lane(on)?, kind, buffers, None, work)
    }

    /// All ranks meet on their GPUs: what a group does first.
    pub(crate) fn meet_once(self: &Arc<Self>) -> Result<()> {
        let own = Arc::clone(&self.own);
        self.collective_within(&own, &Call::Barrier, None, &[], None, |_| Ok(()))?;
        CudaMark::record(&self.device.card, own.stream)?
            .reached(self.config.first_deadline + HEARSAY)?;
        self.usable()
    }

    fn enqueue<R>(
        self: &Arc<Self>,
        lane: &Arc<Lane>,
        kind: Kind,
        buffers: &[&Buffer],
        out: Option<&Buffer>,
        work: impl FnOnce(&mut Job<'_>) -> Result<R>,
    ) -> Result<R> {
        self.usable()?;
        self.note(lane);
        let token = Buffer::new(
            Arc::new(Token::new(Arc::clone(self))),
            DataType::U8,
            Shape::new(&[0])?,
        )?;
        let mut kept = buffers.to_vec();
        kept.extend(out);
        kept.push(&token);
        let mut done = None;
        let result = lane.run(&kept, |stream| {
            let mut job = Job::new(self, lane, stream, kind);
            if let Some(d) = out {
                job.poisons(d.address(), d.bytes(), d.dtype());
            }
            let worked = work(&mut job);
            // Also after a failure, since a capture cannot end while another stream is forked from it.
            let joined = job.join();
            done = Some(worked?);
            joined?;
            job.end()
        });
        match (result, done) {
            (Ok(()), Some(done)) => Ok(done),
            (Err(error), _) => {
                if !matches!(error, Error::Fault(_)) {
                    self.raise(FaultRecord {
                        operation: kind.operation as u32,
                        ..self.record(FaultKind::Aborted)
                    });
                }
                Err(error)
            }
            (Ok(()), None) => Err(Error::Closed),
        }
    }

    /// Steps with nothing in them yet.
    pub(crate) fn steps(&self) -> Steps<'_> {
        Steps::new(self.control.layout(), *self.control.group())
    }

    fn note(self: &Arc<Self>, lane: &Arc<Lane>) {
        let mut used = self.used.lock();
        if !used.iter().any(|l| Arc::ptr_eq(l, lane)) {
            lane.belongs_to(self);
            used.push(Arc::clone(lane));
        }
    }

    /// Poisons what a call gives, if the group was stopped. For calls that go on after their last protocol step.
    pub(crate) fn poison_if_stopped(self: &Arc<Self>, on: &Stream, out: &Buffer) -> Result<()> {
        let lane = self.device.lane(on)?;
        lane.run(&[out], |stream| {
            let mut job = Job::new(self, lane, stream, Kind::pairwise(Operation::Barrier, 0));
            job.poisons(out.address(), out.bytes(), out.dtype());
            job.end()
        })
    }

    /// Marks of all work so far, on streams that do not capture.
    fn marks(&self) -> Vec<CudaMark> {
        let used = self.used.lock();
        used.iter()
            .chain([&self.mover, &self.waiter])
            .filter(|lane| !lane.capturing())
            .filter_map(|lane| CudaMark::record(&self.device.card, lane.stream).ok())
            .collect()
    }

    /// All ranks let go of the old generation, then start a new one.
    pub(crate) fn reset(&self, within: Duration) -> Result<()> {
        let mut issue = self
            .issue
            .try_lock()
            .ok_or(Error::Busy("the communicator"))?;
        let end = Instant::now() + within;
        let let_go = || {
            for mark in self.marks() {
                if !mark.reached(end.saturating_duration_since(Instant::now()))? {
                    return Err(Error::Group {
                        step: "reset",
                        what: format!("work of this rank has not ended within {within:?}"),
                    });
                }
            }
            for views in self.views.all.iter().chain(&self.views.own) {
                views.fetch_add(1, Ordering::AcqRel);
            }
            Ok(())
        };
        self.control.reset(
            within,
            self.calls(),
            |_| let_go(),
            || self.wipe(),
            || *issue = Issue::default(),
        )
    }

    /// Forgets flags and counters of the old generation; the state is that of the next one from here on.
    fn wipe(&self) -> Result<()> {
        let card = &self.device.card;
        card.bind()?;
        let layout = self.control.layout();
        let kept = self.read_state()?;
        let words = self.address(self.rank(), 0);
        let state = self.memory.state.address();
        let next = self.generation().checked_add(1).unwrap_or(1);
        // SAFETY: own words and own state, which no kernel uses now: all ranks have let go of the old generation.
        unsafe {
            result::memset_d8_async(words, 0, 8 * layout.words, self.own.stream)
                .and_then(|()| {
                    result::memset_d8_async(state, 0, self.memory.state.bytes(), self.own.stream)
                })
                .map_err(failed("cuMemsetD8Async"))?;
        }
        let mut fresh = vec![0; STATE_COUNTERS];
        fresh[STATE_GENERATION] = next.into();
        for at in [STATE_CALLS, STATE_MOVED] {
            fresh[at] = kept[at];
        }
        let waits = STATE_WAITS..STATE_COUNTERS;
        fresh[waits.clone()].copy_from_slice(&kept[waits]);
        self.write_state(0, &fresh)?;
        self.memory.report.clear();
        Ok(())
    }

    pub(crate) fn close(self: &Arc<Self>, within: Duration) -> Result<()> {
        self.usable()?;
        let end = Instant::now() + within;
        let left = || end.saturating_duration_since(Instant::now());
        // Work of the last lease first, whatever stream it is on.
        for mark in self.marks() {
            mark::wait(&self.device.card, self.own.stream, &mark)?;
        }
        let own = Arc::clone(&self.own);
        self.collective_within(&own, &Call::Close, Some(left()), &[], None, |_| Ok(()))?;
        let ended = CudaMark::record(&self.device.card, own.stream)?
            .reached(left() + HEARSAY)
            .map(drop);
        self.usable()?;
        ended?;
        self.control.set_closed();
        Ok(())
    }
}

impl Drop for Core {
    /// Waits for nobody. Memory stays, and the peers hear that this rank has left, when its work is done: they may be
    /// waiting for what it has yet to say.
    fn drop(&mut self) {
        let leaving = Leaving {
            marks: self.marks(),
            control: Arc::clone(&self.control),
            memory: Arc::clone(&self.memory),
            _lanes: std::mem::take(self.used.get_mut()),
            _sides: [&self.mover, &self.waiter].map(Arc::clone),
        };
        if leaving.done() {
            return;
        }
        let patience = self.config.first_deadline + HEARSAY;
        // Without a thread it leaves at once: what its kernels still have to say, they say.
        let _ = thread::Builder::new()
            .name(format!("rank {} leaves", self.rank()))
            .spawn(move || leaving.wait(patience));
    }
}

/// A rank whose communicator is dropped while work of it is still going on.
struct Leaving {
    marks: Vec<CudaMark>,
    control: Arc<Control>,
    memory: Arc<GroupMemory>,
    _lanes: Vec<Arc<Lane>>,
    _sides: [Arc<Lane>; 2],
}

impl Leaving {
    fn done(&self) -> bool {
        self.marks.iter().all(|mark| mark.done().unwrap_or(true))
    }

    fn wait(self, patience: Duration) {
        let end = Instant::now() + patience;
        while !self.done() && Instant::now() < end {
            relay(&self.control, &self.memory.report);
            thread::park_timeout(ROUND);
        }
    }
}

impl Drop for Leaving {
    fn drop(&mut self) {
        self.control.leave();
    }
}

/// Hands on what kernels, peers and this rank's host say to each other: a kernel cannot wake a thread, nor hear of a process
/// that died.
fn relay(control: &Control, report: &Report) {
    let generation = control.generation();
    if let Some(record) = report.fault(generation)
        && control.fault().is_none()
    {
        control.raise(record);
    }
    if control.fault().is_some() {
        report.ask_to_stop(generation);
    }
    let Group { rank, size, .. } = *control.group();
    let gone = (0..size).filter(|&p| p != rank && control.departed(p));
    report.say_departed(gone.fold(0, |mask, p| mask | 1 << p));
}

/// How long a kernel's record may lie unread. What hosts say wakes the watch at once.
const ROUND: Duration = Duration::from_millis(5);

/// Starts the watch of a communicator: a thread that relays. It ends with the communicator.
fn watch(core: &Arc<Core>) -> Result<()> {
    if core.size() == 1 {
        return Ok(());
    }
    let (watched, control) = (Arc::downgrade(core), Arc::clone(&core.control));
    let rank = core.rank();
    let rounds = move || {
        loop {
            let events = control.memory().events(rank);
            let Some(core) = watched.upgrade() else {
                return;
            };
            relay(&core.control, &core.memory.report);
            drop(core);
            let until = Instant::now().checked_add(ROUND);
            control.memory().rest(rank, events, until);
        }
    };
    thread::Builder::new()
        .name(format!("rank {rank} watch"))
        .spawn(rounds)
        .map(drop)
        .map_err(|e| Error::Backend {
            call: "start the watch of a communicator",
            code: e.raw_os_error().unwrap_or(0).into(),
            source: Some(Arc::new(e)),
        })
}

/// A stream beside the caller's.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Side {
    /// For copies by copy engines.
    Mover,
    /// For steps, which may wait.
    Waiter,
}

/// What kind of call it is, for flags and fault records.
#[derive(Clone, Copy)]
pub(crate) struct Kind {
    pub(crate) operation: Operation,
    pub(crate) signature: u32,
    pub(crate) collective: bool,
    within: Option<Duration>,
}

impl Kind {
    const fn pairwise(operation: Operation, signature: u32) -> Self {
        Self {
            operation,
            signature,
            collective: false,
            within: None,
        }
    }
}

/// A call that is being enqueued. Steps gather in `steps` until something else must come behind them.
pub(crate) struct Job<'a> {
    pub(crate) core: &'a Arc<Core>,
    pub(crate) lane: &'a Arc<Lane>,
    pub(crate) stream: sys::CUstream,
    pub(crate) kind: Kind,
    pub(crate) steps: Steps<'a>,
    moved: u64,
    forked: bool,
    /// What is poisoned if the group was stopped: addresses, sizes and types.
    poisoned: Vec<(u64, usize, DataType)>,
}

impl<'a> Job<'a> {
    fn new(core: &'a Arc<Core>, lane: &'a Arc<Lane>, stream: sys::CUstream, kind: Kind) -> Self {
        Self {
            core,
            lane,
            stream,
            kind,
            steps: core.steps(),
            moved: 0,
            forked: false,
            poisoned: Vec::new(),
        }
    }

    /// At the end of the call this memory is poisoned, if the group was stopped.
    pub(crate) fn poisons(&mut self, address: u64, bytes: usize, dtype: DataType) {
        if bytes > 0 {
            self.poisoned.push((address, bytes, dtype));
        }
    }

    /// Enqueues the steps so far.
    pub(crate) fn steps_now(&mut self) -> Result<()> {
        let batches = self.steps.batches();
        batches
            .into_iter()
            .try_for_each(|batch| self.launch(self.stream, batch, &[]))
    }

    /// Enqueues the last steps, and what is to be poisoned behind them.
    fn end(&mut self) -> Result<()> {
        let mut batches = self.steps.batches();
        let last = batches.pop().unwrap_or(([0; MOST_STEPS], 0));
        for batch in batches {
            self.launch(self.stream, batch, &[])?;
        }
        let poisoned = std::mem::take(&mut self.poisoned);
        let mut parts = poisoned.chunks(MOST_POISONED);
        self.launch(self.stream, last, parts.next().unwrap_or(&[]))?;
        parts.try_for_each(|part| self.launch(self.stream, ([0; MOST_STEPS], 0), part))
    }

    /// Enqueues steps beside the caller's stream.
    pub(crate) fn steps_on(&self, side: Side, mut steps: Steps<'_>) -> Result<()> {
        steps
            .batches()
            .into_iter()
            .try_for_each(|batch| self.launch(self.stream_of(side), batch, &[]))
    }

    fn launch(
        &self,
        stream: sys::CUstream,
        (steps, count): crate::steps::Batch,
        poisoned: &[(u64, usize, DataType)],
    ) -> Result<()> {
        let (core, kind) = (self.core, self.kind);
        let layout = core.control.layout();
        let deadline = kind.within.unwrap_or(core.config.deadline);
        let first = kind.within.unwrap_or(core.config.first_deadline);
        let mut parameters = StepsParams {
            base: core.memory.symmetric.base(),
            stride: core.memory.symmetric.stride() as u64,
            state: core.memory.state.address(),
            report: core.memory.report.address(),
            deadline_ns: crate::probe::nanoseconds(deadline),
            first_deadline_ns: crate::probe::nanoseconds(first),
            moved_bytes: self.moved,
            rank: core.rank() as u32,
            size: core.size() as u32,
            operation: kind.operation as u32,
            signature: kind.signature,
            barrier: layout.barrier.base as u32,
            stop: layout.abort.base as u32,
            count,
            collective: u32::from(kind.collective),
            steps,
            ..StepsParams::default()
        };
        for (i, &(address, bytes, dtype)) in poisoned.iter().enumerate() {
            parameters.poison[i] = address;
            parameters.poison_bytes[i] = bytes as u64;
            parameters.poison_pattern[i] = crate::probe::repeated(dtype);
        }
        let kernel = &core.device.opened.kernels.steps;
        let shape = Launch::grid(1, STEP_THREADS);
        // SAFETY: all addresses lie in the group's memory, which the core keeps until this work is done (and a graph keeps
        // the core), or in buffers that the call's `run` keeps.
        unsafe { kernel.launch(stream, shape, parameters) }.map_err(Into::into)
    }

    /// Where this rank is told to stop, and the state that says for which generation.
    pub(crate) fn stop(&self) -> (u64, u64) {
        let stop = self.core.control.layout().abort.base;
        (
            self.core.address(self.core.rank(), 8 * stop),
            self.core.memory.state.address(),
        )
    }

    /// Enqueues copies of `(to, from, bytes)` by a kernel, behind the steps so far.
    pub(crate) fn moves(&mut self, list: &[(u64, u64, usize)]) -> Result<()> {
        self.steps_now()?;
        let list: Vec<_> = list.iter().filter(|(.., bytes)| *bytes > 0).collect();
        for part in list.chunks(MOST_MOVES) {
            let (stop, state) = self.stop();
            let mut parameters = MoveParams {
                stop,
                state,
                count: part.len() as u64,
                ..MoveParams::default()
            };
            let mut most = 0;
            for (i, &&(to, from, bytes)) in part.iter().enumerate() {
                parameters.to[i] = to;
                parameters.from[i] = from;
                parameters.bytes[i] = bytes as u64;
                most = most.max(bytes);
            }
            let kernels = &self.core.device.opened.kernels;
            // A thread for each 16 bytes of the longest.
            let shape = kernels.shape(most.div_ceil(16 * 256));
            // SAFETY: the caller's ranges lie in buffers of the call, or in the group's memory.
            unsafe { kernels.moves.launch(self.stream, shape, parameters) }.map_err(Error::from)?;
        }
        Ok(())
    }

    /// Counts bytes that this rank moves to or from another rank's memory in this call.
    pub(crate) fn count_moved(&mut self, bytes: usize) {
        self.moved += bytes as u64;
    }

    /// A use of the next half of an area, once every peer is done with the one before.
    pub(crate) fn begin(&mut self, area: Area) -> Use {
        let of = self.core.issue.lock().next(area);
        self.steps.begin(of);
        of
    }

    /// Lets the streams beside the caller's go on behind what is enqueued there so far. The steps so far are enqueued on the
    /// waiter, so that the caller's stream is free for products; copies come behind them.
    pub(crate) fn fork(&mut self) -> Result<()> {
        let card = &self.core.device.card;
        let begun = CudaMark::record(card, self.stream)?;
        self.forked = true;
        for side in [Side::Waiter, Side::Mover] {
            self.side_after(side, &begun)?;
        }
        let steps = std::mem::replace(&mut self.steps, self.core.steps());
        self.steps_on(Side::Waiter, steps)?;
        self.side_after(Side::Mover, &self.side_mark(Side::Waiter)?)
    }

    fn stream_of(&self, side: Side) -> sys::CUstream {
        match side {
            Side::Mover => self.core.mover.stream,
            Side::Waiter => self.core.waiter.stream,
        }
    }

    /// A mark of what a stream beside the caller's has been given so far.
    pub(crate) fn side_mark(&self, side: Side) -> Result<CudaMark> {
        CudaMark::record(&self.core.device.card, self.stream_of(side))
    }

    /// A mark of what the caller's stream has been given so far.
    pub(crate) fn mark(&self) -> Result<CudaMark> {
        CudaMark::record(&self.core.device.card, self.stream)
    }

    /// Lets a stream beside the caller's wait for a mark.
    pub(crate) fn side_after(&self, side: Side, mark: &CudaMark) -> Result<()> {
        mark::wait(&self.core.device.card, self.stream_of(side), mark)
    }

    /// Lets the caller's stream wait for a mark.
    pub(crate) fn after(&self, mark: &CudaMark) -> Result<()> {
        mark::wait(&self.core.device.card, self.stream, mark)
    }

    /// Lets the caller's stream wait for those beside it.
    pub(crate) fn join(&mut self) -> Result<()> {
        if std::mem::take(&mut self.forked) {
            for side in [Side::Waiter, Side::Mover] {
                self.after(&self.side_mark(side)?)?;
            }
        }
        Ok(())
    }

    /// Says that piece `piece` of `slot` lies in `to`'s half, by a copy of the flag that this rank has in its own word for it:
    /// behind the copies on the mover, and without a kernel, which would have to find room beside a product.
    pub(crate) fn copy_flag(&self, to: usize, of: Use, slot: usize, piece: usize) -> Result<()> {
        let core = self.core;
        let ring = core.control.layout().ring(of.area);
        let word = ring
            .filled(to, of.half, slot, piece, Flag::from_bits(0))
            .word;
        let at = |rank| core.address(rank, 8 * word.index);
        self.copy_on(Side::Mover, at(to), at(core.rank()), 8)
    }

    /// A copy by the copy engine beside the caller's stream.
    pub(crate) fn copy_on(&self, side: Side, to: u64, from: u64, bytes: usize) -> Result<()> {
        self.copy(self.stream_of(side), to, from, bytes)
    }

    /// A copy by the copy engine.
    pub(crate) fn copy(
        &self,
        stream: sys::CUstream,
        to: u64,
        from: u64,
        bytes: usize,
    ) -> Result<()> {
        if bytes == 0 {
            return Ok(());
        }
        // SAFETY: the caller's ranges lie in the group's memory, or in buffers of the call.
        unsafe { sys::cuMemcpyDtoDAsync_v2(to, from, bytes, stream) }
            .result()
            .map_err(failed("cuMemcpyDtoDAsync"))
    }
}
