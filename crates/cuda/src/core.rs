//! What every call of a communicator goes through: entering, the steps of its protocol, failing, resetting, leaving.
//!
//! Calls are enqueued and carried out later, so a rank's counters live in its GPU's memory. What must be fixed when a call is
//! issued, since a captured graph keeps its addresses, is decided here: which half of an area a call uses.

use crate::{
    CudaDevice, Launch,
    desk::Desk,
    in_turn::Sent,
    inject::Asker,
    job::{Job, Kind, Made},
    kept::{Kept, Token},
    lane::Lane,
    mark::CudaMark,
    memory::DeviceMemory,
    nccl_sums::NcclSums,
    quiet,
    report::Report,
    residency::{Spinning, most_messages},
    state::state_words,
    steps::{Steps, Use},
    symmetric::Symmetric,
    user_buffers::Regions,
    watch::watch,
    window::Window,
};
use brigade_device::{
    Buffer, Call, CommConfig, DataType, Error, FaultKind, FaultRecord, LinearCall, Operation,
    PerRank, Plan, Reason, Result, Shape, Stream, SumOrder,
};
use brigade_group::{Control, Stoppable};
use brigade_kernels::{MESSAGE_THREADS, STATE_GENERATION, STEP_THREADS};
use brigade_plan::{
    Table, Topology,
    absent::{check, plan_without, told_without},
    reason,
};
use brigade_sync::{Area, Exchanges, HALVES, Half};
use parking_lot::Mutex;
use std::{
    borrow::Cow,
    collections::VecDeque,
    ops::Range,
    sync::{
        Arc, OnceLock, Weak,
        atomic::{AtomicU32, AtomicU64, Ordering},
    },
    time::Duration,
};

/// Longest that a rank whose kernels found the group stopped waits to hear why.
pub(crate) const HEARSAY: Duration = Duration::from_secs(1);

/// Launches of steps that may wait at the same time: on the caller's stream, and beside it. Where a hook is asked, one more.
const STEPS_AT_ONCE: u32 = 2;

/// What kernels of a communicator use: it must outlive all of them, and all graphs that hold some.
#[derive(Debug)]
pub(crate) struct GroupMemory {
    pub(crate) symmetric: Arc<Symmetric>,
    pub(crate) state: DeviceMemory,
    pub(crate) report: Report,
    /// Where kernels ask the hook of fault injection, if there is one.
    pub(crate) desk: Option<Desk>,
    /// What carries NCCL's sums, if the group was joined with it.
    pub(crate) nccl: Option<Arc<NcclSums>>,
}

impl GroupMemory {
    /// Where a launch asks the hook; 0 if there is none.
    pub(crate) fn desk(&self, asker: Asker) -> u64 {
        self.desk.as_ref().map_or(0, |desk| desk.address(asker))
    }
}

/// One rank's membership in a group.
pub(crate) struct Core {
    pub(crate) device: Arc<CudaDevice>,
    pub(crate) control: Arc<Control>,
    pub(crate) config: CommConfig,
    pub(crate) topology: Topology,
    pub(crate) table: Table,
    pub(crate) memory: Arc<GroupMemory>,
    /// Copies go here beside the caller's stream, which a call may fork from and join.
    pub(crate) mover: Arc<Lane>,
    /// Steps go here, likewise; and calls that no caller's stream is for: meeting at first, closing.
    pub(crate) waiter: Arc<Lane>,
    /// Streams that did work.
    pub(crate) used: Mutex<Vec<Arc<Lane>>>,
    /// What is decided when a call is issued, or captured. Held while one is.
    pub(crate) issue: Mutex<Issue>,
    pub(crate) views: Views,
    pub(crate) regions: Mutex<Regions>,
    /// Most ranks of the group that have one GPU.
    pub(crate) sharing: usize,
    /// The last calls, where that is so.
    pub(crate) ahead: Mutex<VecDeque<CudaMark>>,
    pub(crate) stepping: Spinning,
    /// Places for the blocks of messages, of exchanges by pushing, and of those in turn.
    pub(crate) exchanging: Spinning,
    /// Most blocks of messages that a call has had, where those were more than have places in any case.
    pub(crate) widest: AtomicU32,
    /// The hierarchy that this is a part of, if it is one: its faults are what waits for a stream are told.
    pub(crate) whole: OnceLock<Weak<dyn Stoppable>>,
    /// The last generation whose kernels this host told to stop. Whoever finds it told may enqueue what asks for that.
    pub(crate) stopped: Mutex<u8>,
    /// Whether a product of tiles may take its place on the GPU while the steps before it still wait.
    pub(crate) begins_early: bool,
    /// Whether an exchange may take its place on the GPU while the one before it still waits.
    pub(crate) overtakes: bool,
    /// For calls beside the caller's stream. Made before anybody waits, as the others, since making a stream may wait for the GPU; but where ranks share
    /// one, when it is asked for, since streams beyond 32 share queues, in which one rank's work would wait behind what waits for it.
    beside: OnceLock<Arc<Lane>>,
}

/// Halves alternate as calls are issued; own rows may be handed out before the call that uses them.
#[derive(Default)]
pub(crate) struct Issue {
    next: [u32; Area::ALL.len()],
    pub(crate) reserved: Option<Reserved>,
    pub(crate) tickets: u64,
    /// The exchanges of each slot of the low-latency exchange.
    pub(crate) exchanges: [Exchanges; 2],
    /// The last of their sends.
    pub(crate) sent: Option<Sent>,
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
    pub(crate) columns: usize,
    pub(crate) dtype: DataType,
}

impl Reserved {
    /// Whether rows of the call lie as those that it was handed out for.
    pub(crate) fn holds(&self, call: &LinearCall) -> bool {
        (&self.rows, self.columns, self.dtype) == (&call.rows, call.k, call.input)
    }
}

/// Which views of halves are still good: a view knows the number of its time.
#[derive(Default)]
pub(crate) struct Views {
    pub(crate) all: [Arc<AtomicU64>; HALVES],
    pub(crate) own: [Arc<AtomicU64>; HALVES],
    /// Rows of a dispatch that stay in place, whichever half they lie in.
    pub(crate) dispatched: Arc<AtomicU64>,
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
    pub(crate) nccl: Option<Arc<NcclSums>>,
    /// Most ranks of the group that have one GPU.
    pub(crate) sharing: usize,
    /// Where the heap of registered regions begins in a part.
    pub(crate) regions_start: usize,
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
            nccl,
            sharing,
            regions_start,
        } = parts;
        let shares = sharing > 1;
        let size = control.group().size;
        let kernels = &device.opened.kernels;
        let hook = device.inject.as_ref();
        let steps = Launch::grid(STEPS_AT_ONCE + u32::from(hook.is_some()), STEP_THREADS);
        let most = most_messages(&topology);
        let messages = Launch::grid(most, MESSAGE_THREADS);
        let stepping = device.reserve_spinning(&kernels.steps, steps)?;
        // Messages, sums that are pushed and low-latency exchanges take the same places in turn.
        let exchanges = config.all_reduce_bytes > 0 || config.low_latency_bytes > 0;
        // Who is alone waits for nobody. Low latency takes as many blocks as have places, which for the rest would be few.
        let alone = size < 2 && config.low_latency_bytes == 0;
        let exchanging = if shares || alone || !exchanges {
            device.reserve_spinning(&kernels.messages, messages)?
        } else {
            device.reserve_half(&kernels.messages, messages)?
        };
        let state_bytes = 8 * state_words(&config, size);
        let control = Arc::new(control);
        let desk = hook.map(|hook| Desk::new(&device.card, hook, &control, most));
        let memory = GroupMemory {
            state: DeviceMemory::outside_of_streams(&device.card, state_bytes)?,
            report: Report::new(&device.card)?,
            symmetric,
            desk: desk.transpose()?,
            nccl,
        };
        let programmatic = device.launches_early();
        let core = Self {
            mover: Lane::new(&device.card, i8::MAX)?,
            waiter: Lane::new(&device.card, i8::MAX)?,
            control,
            topology,
            table,
            memory: Arc::new(memory),
            used: Mutex::default(),
            issue: Mutex::default(),
            views: Views::default(),
            regions: Mutex::new(Regions::new(regions_start, &config)),
            config,
            sharing,
            ahead: Mutex::default(),
            stepping,
            exchanging,
            widest: AtomicU32::new(0),
            whole: OnceLock::new(),
            stopped: Mutex::default(),
            begins_early: programmatic,
            overtakes: programmatic && !shares,
            beside: OnceLock::new(),
            device,
        };
        if !shares {
            core.own_lane()?;
        }
        core.empty_slots()?;
        core.write_state(STATE_GENERATION, &[core.control.generation().into()])?;
        let core = Arc::new(core);
        watch(&core)?;
        quiet::heed(&core);
        Ok(core)
    }

    /// The stream for calls beside the caller's.
    pub(crate) fn own_lane(&self) -> Result<&Arc<Lane>> {
        if self.beside.get().is_none() {
            let lane = Lane::new(&self.device.card, i8::MAX)?;
            self.beside.get_or_init(|| lane);
        }
        self.beside.get().ok_or(Error::Closed)
    }

    /// Whether this is that stream.
    pub(crate) fn is_own_lane(&self, lane: &Arc<Lane>) -> bool {
        self.beside.get().is_some_and(|own| Arc::ptr_eq(own, lane))
    }

    /// Whether another rank of the group has this rank's GPU, or that of a peer.
    pub(crate) fn shares(&self) -> bool {
        self.sharing > 1
    }

    pub(crate) fn rank(&self) -> usize {
        self.control.group().rank
    }

    pub(crate) fn size(&self) -> usize {
        self.control.group().size
    }

    /// Other ranks that take part, the next one first.
    pub(crate) fn peers(&self) -> impl Iterator<Item = usize> + use<> {
        self.control.peers()
    }

    pub(crate) fn plan(&self, call: &Call) -> Result<Plan, Reason> {
        self.planned(call).map(|(plan, _)| plan)
    }

    pub(crate) fn told(&self, call: &Call) -> Result<String, Reason> {
        let (_, by) = self.planned(call)?;
        told_without(self.control.absent(), call, &by, &self.table)
    }

    /// The plan, and the topology by which it is made.
    fn planned(&self, call: &Call) -> Result<(Plan, Cow<'_, Topology>), Reason> {
        let by = |topology: &_| plan_without(self.control.absent(), call, topology, &self.table);
        let plan = by(&self.topology)?;
        let usual = Cow::Borrowed(&self.topology);
        let (&Plan::AllReduce { order, .. }, Some(nccl)) = (&plan, &self.memory.nccl) else {
            return Ok((plan, usual));
        };
        if order != SumOrder::Foreign {
            return Ok((plan, usual));
        }
        match (nccl.check(), call) {
            // Nobody asked for it, and all ranks know that it is gone.
            (Err(_), Call::AllReduce { choice: None, .. }) => {
                let without = Topology {
                    engines: self.topology.engines.with_nccl(false),
                    ..self.topology.clone()
                };
                Ok((by(&without)?, Cow::Owned(without)))
            }
            (checked, _) => checked.map(|()| (plan, usual)),
        }
    }

    /// Address of byte `at` of a rank's part.
    pub(crate) fn address(&self, rank: usize, at: usize) -> u64 {
        let symmetric = &self.memory.symmetric;
        symmetric.base() + (rank * symmetric.stride() + at) as u64
    }

    /// Byte of a part where data lies: behind the words.
    pub(crate) fn data_offset(&self, of: Use) -> usize {
        self.data_start() + self.control.layout().start(of.area, of.half)
    }

    /// Byte of a part where all data begins.
    pub(crate) fn data_start(&self) -> usize {
        let layout = self.control.layout();
        layout.total_bytes() - layout.bytes
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
        let most = self.control.layout().half_bytes(of.area);
        if range.start > range.end || range.end > most {
            let want = format!("a place within a half's {most} bytes");
            return Err(Error::invalid("range", format!("{range:?}"), want));
        }
        let address = self.place(self.rank(), of, range.start);
        let window = Window::new(Arc::clone(self), address, range.len(), Arc::clone(views));
        Buffer::new(Arc::new(window), dtype, shape)
    }

    pub(crate) fn generation(&self) -> u8 {
        self.control.generation()
    }

    /// Whether calls can be made: no fault, and not closed.
    pub(crate) fn usable(&self) -> Result<()> {
        if self.control.is_closed() {
            return Err(Error::Closed);
        }
        self.control.is_in()?;
        self.fault().map_or(Ok(()), |f| Err(Error::Fault(f)))
    }

    /// Whether no rank is absent.
    fn is_whole(&self, operation: Operation) -> Result<()> {
        match self.control.absent() {
            absent if absent.is_empty() => Ok(()),
            absent => Err(reason::absent_ranks(absent, operation).into()),
        }
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

    pub(crate) fn collective_within<R>(
        self: &Arc<Self>,
        lane: &Arc<Lane>,
        call: &Call,
        within: Option<Duration>,
        buffers: &[&Buffer],
        out: Option<&Buffer>,
        work: impl FnOnce(&mut Job<'_>) -> Result<R>,
    ) -> Result<R> {
        let absent = self.control.absent();
        check(absent, call)?;
        self.outdate_views();
        let kind = Kind {
            operation: call.operation(),
            signature: absent.sign(call.signature()),
            made: Made::Together,
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

    /// Views of halves that were handed out are good until the next call.
    fn outdate_views(&self) {
        for views in &self.views.all {
            views.fetch_add(1, Ordering::AcqRel);
        }
    }

    /// A collective call of kernels that tell of the arrival, see to it that all are in the same call, poison what they give, and
    /// count it: exchanges by pushing, or messages. Where a hook is asked, it hears of the beginning first.
    pub(crate) fn exchange<R>(
        self: &Arc<Self>,
        on: &Stream,
        call: &Call,
        buffers: &[&Buffer],
        work: impl FnOnce(&mut Job<'_>) -> Result<R>,
    ) -> Result<R> {
        self.outdate_views();
        let kind = Kind {
            made: Made::Together,
            ..Kind::pairwise(call.operation(), call.signature())
        };
        self.enqueue(self.device.lane(on)?, kind, buffers, None, |job| {
            if self.memory.desk.is_some() {
                job.steps.start();
            }
            work(job)
        })
    }

    /// Gets ready for a call that will come: no call itself, but what the last one left is let go of.
    pub(crate) fn prepare(
        self: &Arc<Self>,
        on: &Stream,
        work: impl FnOnce(&mut Job<'_>) -> Result<()>,
    ) -> Result<()> {
        self.is_whole(Operation::GatherLinear)?;
        self.outdate_views();
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
        signed: (Operation, u32),
        buffers: &[&Buffer],
        work: impl FnOnce(&mut Job<'_>) -> Result<()>,
    ) -> Result<()> {
        self.pairwise_alone(on, signed, buffers, |job| {
            job.steps.start();
            work(job)?;
            job.steps.finish();
            Ok(())
        })
    }

    /// A call between two ranks whose work begins and counts it.
    pub(crate) fn pairwise_alone(
        self: &Arc<Self>,
        on: &Stream,
        (operation, signature): (Operation, u32),
        buffers: &[&Buffer],
        work: impl FnOnce(&mut Job<'_>) -> Result<()>,
    ) -> Result<()> {
        self.is_whole(operation)?;
        let kind = Kind::pairwise(operation, signature);
        self.enqueue(self.device.lane(on)?, kind, buffers, None, work)
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

    pub(crate) fn enqueue<R>(
        self: &Arc<Self>,
        lane: &Arc<Lane>,
        kind: Kind,
        buffers: &[&Buffer],
        out: Option<&Buffer>,
        work: impl FnOnce(&mut Job<'_>) -> Result<R>,
    ) -> Result<R> {
        self.usable()?;
        self.note(lane);
        let token = Kept::Group(Token::new(Arc::clone(self))).buffer()?;
        let mut kept = buffers.to_vec();
        kept.extend(out);
        kept.push(&token);
        let mut done = None;
        let result = lane.run_numbered(&kept, |stream, number| {
            let mut job = Job::new(self, lane, stream, kind);
            job.work = number;
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
        self.keep_pace(lane);
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
        Steps::new(self.control.layout(), *self.control.group()).without(self.control.absent())
    }

    /// Work of this communicator goes to a stream: its faults are that stream's from here on.
    pub(crate) fn note(self: &Arc<Self>, lane: &Arc<Lane>) {
        let mut used = self.used.lock();
        if !used.iter().any(|l| Arc::ptr_eq(l, lane)) {
            match self.whole.get() {
                Some(whole) => lane.belongs_to(Weak::clone(whole)),
                None => lane.belongs_to(Arc::downgrade(self) as _),
            }
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

    /// Marks of all work so far, but for what is being captured.
    pub(crate) fn marks(&self) -> Vec<Arc<CudaMark>> {
        let used = self.used.lock();
        used.iter()
            .chain([&self.mover, &self.waiter])
            .filter_map(|lane| lane.mark())
            .collect()
    }
}
