//! A thing that makes N ranks, and what a rank is to a contract.

use crate::matrix::Matrix;
use brigade_cuda::CudaDevice;
use brigade_device::{
    Bootstrap, Buffer, Comm, CommConfig, DataType, Device, DeviceExt, Error, ExpertLayout, Group,
    Hierarchy, HierarchyConfig, Injector, Lease, LowLatency, Machines, MemoryType, Reason, Result,
    Routing, Stream, View,
};
use brigade_host::HostDevice;
use brigade_plan::Engines;
use parking_lot::{Condvar, Mutex};
use std::{
    any::Any,
    panic::{AssertUnwindSafe, catch_unwind, resume_unwind},
    sync::Arc,
    thread,
    time::{Duration, Instant},
};

/// What one rank needs to join a group.
pub struct Seat {
    /// Its accelerator.
    pub device: Arc<dyn Device>,
    /// How it finds the others.
    pub boot: Box<dyn Bootstrap>,
}

/// A device that says where rows would go in a group that nobody has joined.
pub trait Routes: Device {
    /// As [`Lease::expert_layout`].
    ///
    /// # Errors
    /// As there.
    fn layout(&self, on: &Stream, routing: Routing<'_>, group: Group) -> Result<ExpertLayout>;
}

impl Routes for CudaDevice {
    fn layout(&self, on: &Stream, routing: Routing<'_>, group: Group) -> Result<ExpertLayout> {
        self.expert_layout(on, routing, group)
    }
}

impl Routes for HostDevice {
    fn layout(&self, on: &Stream, routing: Routing<'_>, group: Group) -> Result<ExpertLayout> {
        self.expert_layout(on, routing, group)
    }
}

/// A device under test: it makes the ranks that contracts run on.
pub trait Backend: Send + Sync {
    /// The first part of every trial's name.
    fn name(&self) -> &str;
    /// Group sizes to run every contract at.
    fn worlds(&self) -> Vec<usize>;
    /// Whether a contract is tried at all. Its name comes in parts, from the group size on: `w8`, `faults`, ..
    fn tries(&self, _name: &[&str]) -> bool {
        true
    }
    /// Modes and algorithms that can be forced.
    fn engines(&self) -> Engines;
    /// Whether ranks may multiply different shapes. Where several share a GPU, a product that only one of them makes has to
    /// be loaded when it is first made, which waits for the others, who wait for that rank.
    fn differs(&self) -> bool {
        true
    }
    /// Whether products of few rows send their parts themselves to the sum behind them, and to a sum with a norm.
    fn sends_products(&self) -> [bool; 2] {
        [false; 2]
    }
    /// Whether linears of all types and sizes can be batch-invariant: a GPU has a kernel for some of them.
    fn is_batch_invariant(&self) -> bool {
        true
    }
    /// Whether groups can be joined with NCCL.
    fn has_nccl(&self) -> bool {
        false
    }
    /// Whether sums of millions of elements take it no time to speak of.
    fn reduces_millions(&self) -> bool {
        false
    }
    /// Fresh ranks for a group of `size`: all that are threads of this process, in rank order.
    ///
    /// # Errors
    /// What keeps the device from having so many ranks; the trial fails with it.
    fn seats(&self, size: usize) -> Result<Vec<Seat>>;

    /// A device alone, if it says where rows would go in groups of any size; contracts of that are left out otherwise.
    ///
    /// # Errors
    /// What keeps it from being opened.
    fn routes(&self) -> Result<Option<Arc<dyn Routes>>> {
        Ok(None)
    }

    /// Whether its groups can span so many machines, of so many ranks each.
    fn spans(&self, _shape: (usize, usize)) -> bool {
        false
    }

    /// Whether its rails can be made slow.
    fn slows_rails(&self) -> bool {
        false
    }

    /// As [`seats`](Self::seats), for machines: how many, and ranks of each. Machines may have accelerators of their own.
    ///
    /// # Errors
    /// As [`seats`](Self::seats).
    fn machine_seats(&self, (machines, ranks): (usize, usize)) -> Result<Vec<Seat>> {
        self.seats(machines * ranks)
    }

    /// The same with this hook in every rank's device.
    ///
    /// # Errors
    /// As [`injected_seats`](Self::injected_seats).
    fn injected_machine_seats(
        &self,
        (machines, ranks): (usize, usize),
        hook: &Injector,
    ) -> Result<Vec<Seat>> {
        self.injected_seats(machines * ranks, hook)
    }

    /// Whether its devices take a hook for fault injection; contracts that need one are left out otherwise.
    fn injects(&self) -> bool {
        false
    }

    /// As [`seats`](Self::seats), with this hook in every rank's device.
    ///
    /// # Errors
    /// As [`seats`](Self::seats); a reason where [`injects`](Self::injects) is false.
    fn injected_seats(&self, _size: usize, _hook: &Injector) -> Result<Vec<Seat>> {
        Err(takes_no_hook(self.name()))
    }

    /// Whether a hook is asked on the thread that makes the call, where calls come to all their points: to end that thread
    /// there ends the rank in the middle of it. What was enqueued goes on without its thread.
    fn asks_callers(&self) -> bool {
        true
    }

    /// Ends the rank that calls this, from within a call, as hard as it can be done. A thread unwinds; where ranks are
    /// processes, the process should be killed.
    fn kill(&self) -> ! {
        resume_unwind(Box::new(Killed))
    }
}

/// Why there is no device with a hook.
pub fn takes_no_hook(name: &str) -> Error {
    Reason::new(
        "no-injection",
        format!("{name} takes no hook"),
        "leave these contracts out",
    )
    .into()
}

/// What a rank that was killed unwinds with.
struct Killed;

/// One rank of a contract: a thread with a device, a communicator and a stream.
pub struct Rank {
    /// Its number.
    pub rank: usize,
    /// Ranks in the group.
    pub size: usize,
    /// Its accelerator.
    pub device: Arc<dyn Device>,
    /// A stream of that device.
    pub stream: Stream,
    boot: Box<dyn Bootstrap>,
    comm: Option<Comm>,
}

/// Longest that ranks wait for each other outside of the communicator.
const PATIENCE: Duration = Duration::from_secs(40);

/// Longest that the ranks of one contract may run.
const LIMIT: Duration = Duration::from_secs(150);

impl Rank {
    /// Joins the seat's group.
    ///
    /// # Panics
    /// If it cannot.
    pub fn join(seat: Seat, config: &CommConfig) -> Self {
        Self::new(seat, Some(config))
    }

    /// A rank without a configuration has a device, and no communicator.
    fn new(seat: Seat, config: Option<&CommConfig>) -> Self {
        let Seat { device, boot } = seat;
        let comm = config.map(|config| Arc::clone(&device).join(&*boot, config).unwrap());
        Self {
            rank: boot.rank(),
            size: boot.size(),
            stream: device.stream(0).unwrap(),
            device,
            boot,
            comm,
        }
    }

    /// The communicator.
    pub fn comm(&self) -> &Comm {
        self.comm.as_ref().unwrap()
    }

    /// A lease on the rank's stream.
    pub fn lease(&self) -> Lease<'_> {
        self.comm().lease(&self.stream).unwrap()
    }

    /// The slots of the communicator's low-latency exchange, which nobody may have now.
    pub fn low_latency(&self) -> LowLatency {
        self.comm().low_latency().unwrap()
    }

    /// How a call ended, on devices that work later too: waits for the stream, and asks the communicator.
    pub fn settle(&self, result: Result<()>) -> Result<()> {
        result?;
        self.stream.sync(PATIENCE)?;
        self.comm().check()
    }

    /// Drops the communicator.
    pub fn leave(&mut self) {
        self.comm = None;
    }

    /// Joins another group of the same ranks.
    pub fn join_another(&self, config: &CommConfig) -> Comm {
        self.try_join_another(config).unwrap()
    }

    /// As [`join_another`](Self::join_another), and gives the error.
    ///
    /// # Errors
    /// As [`Device::join`].
    pub fn try_join_another(&self, config: &CommConfig) -> Result<Comm> {
        Arc::clone(&self.device).join(&*self.boot, config)
    }

    /// Joins the same ranks as so many machines.
    pub fn join_machines(&self, machines: usize, config: &HierarchyConfig) -> Hierarchy {
        let joined = self.try_join_machines(Arc::clone(&self.device), machines, config);
        joined.unwrap()
    }

    /// As [`join_machines`](Self::join_machines) with another device, and gives the error.
    ///
    /// # Errors
    /// As [`Device::join_machines`].
    pub fn try_join_machines(
        &self,
        device: Arc<dyn Device>,
        machines: usize,
        config: &HierarchyConfig,
    ) -> Result<Hierarchy> {
        device.join_machines(&*self.boot, Machines::cut(self.size, machines)?, config)
    }

    /// Joins machines of any size.
    ///
    /// # Errors
    /// As [`Device::join_machines`].
    pub fn try_join_any(&self, machines: Machines, config: &HierarchyConfig) -> Result<Hierarchy> {
        Arc::clone(&self.device).join_machines(&*self.boot, machines, config)
    }

    /// Goes on with another communicator, and keeps this one in its place.
    pub fn swap_comm(&mut self, other: &mut Option<Comm>) {
        std::mem::swap(&mut self.comm, other);
    }

    /// Shows every rank's bytes to every rank, outside of the communicator.
    pub fn share(&self, mine: &[u8]) -> Vec<Vec<u8>> {
        self.boot.all_gather(mine, PATIENCE).unwrap()
    }

    /// All ranks meet, outside of the communicator.
    pub fn meet(&self) {
        self.share(&[]);
    }

    /// Asserts that every rank has the same bytes.
    pub fn assert_shared(&self, mine: &[u8], what: &str) {
        for (other, theirs) in self.share(mine).iter().enumerate() {
            assert!(
                theirs == mine,
                "{what}: ranks {} and {other} differ",
                self.rank
            );
        }
    }

    /// A matrix in the device's memory.
    pub fn upload(&self, m: &Matrix) -> Buffer {
        self.upload_bytes(m.dtype, &m.dims, &m.bytes())
    }

    /// Any bytes in the device's memory.
    pub fn upload_bytes(&self, dtype: DataType, dims: &[usize], bytes: &[u8]) -> Buffer {
        let mut buffer = self
            .device
            .allocate(&self.stream, MemoryType::Device, dtype, dims)
            .unwrap();
        self.device
            .write(&self.stream, buffer.view_mut(), bytes)
            .unwrap();
        buffer
    }

    /// Floats in the device's memory.
    pub fn upload_f32(&self, values: &[f32]) -> Buffer {
        self.device
            .upload(&self.stream, values, &[values.len()])
            .unwrap()
    }

    /// An output that nothing has been written to: every byte is 0xFF, so every float a NaN.
    pub fn poisoned(&self, dtype: DataType, dims: &[usize]) -> Buffer {
        let mut buffer = self
            .device
            .allocate(&self.stream, MemoryType::Device, dtype, dims)
            .unwrap();
        self.device
            .fill(&self.stream, buffer.view_mut(), 0xFF)
            .unwrap();
        buffer
    }

    /// The bytes of a buffer.
    pub fn raw(&self, from: View<'_>) -> Vec<u8> {
        let mut bytes = vec![0; from.bytes()];
        self.device.read(&self.stream, from, &mut bytes).unwrap();
        bytes
    }

    /// The values of a buffer.
    pub fn values(&self, from: View<'_>) -> Vec<f64> {
        crate::matrix::to_f64(from.dtype(), &self.raw(from))
    }

    /// Keeps this rank's core busy for a while, to be late without sleeping.
    pub fn dawdle(&self, rounds: u32) {
        let mut x = 1u64;
        for i in 0..u64::from(rounds) * 1000 {
            x = std::hint::black_box(x.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(i));
        }
    }
}

/// The text of a panic.
pub fn panic_text(payload: &(dyn Any + Send)) -> String {
    payload
        .downcast_ref::<String>()
        .cloned()
        .or_else(|| payload.downcast_ref::<&str>().map(ToString::to_string))
        .unwrap_or_else(|| "a panic without a text".into())
}

#[derive(Default)]
struct Progress {
    ended: Vec<usize>,
    /// The first rank that failed, and how: what other ranks fail with comes of it.
    failure: Option<(usize, String)>,
}

/// Runs `body` on every rank of a group that is a thread of this process, each on a thread of its own. A rank that panics
/// aborts the communicator, so that no other waits for it; one that was [killed](Backend::kill) is just gone. Without a
/// configuration the ranks join nothing.
///
/// # Panics
/// With the number of the rank that failed first, and what it failed with.
pub fn run(
    seats: Vec<Seat>,
    config: Option<&CommConfig>,
    body: impl Fn(&mut Rank) + Send + Sync + 'static,
) {
    run_each(seats, config, Arc::new(body));
}

/// One function for all bodies: there are hundreds, and it is large.
fn run_each(
    seats: Vec<Seat>,
    config: Option<&CommConfig>,
    body: Arc<dyn Fn(&mut Rank) + Send + Sync>,
) {
    let size = seats.first().map_or(0, |seat| seat.boot.size());
    let progress = Arc::new((Mutex::new(Progress::default()), Condvar::new()));
    let here: Vec<usize> = seats.iter().map(|seat| seat.boot.rank()).collect();
    for (&number, seat) in here.iter().zip(seats) {
        let (body, progress, config) = (Arc::clone(&body), Arc::clone(&progress), config.cloned());
        let work = move || {
            let mut joined = None;
            let result = catch_unwind(AssertUnwindSafe(|| {
                body(joined.insert(Rank::new(seat, config.as_ref())));
            }));
            let mut state = progress.0.lock();
            if let Err(payload) = result
                && !payload.is::<Killed>()
            {
                state
                    .failure
                    .get_or_insert_with(|| (number, panic_text(&*payload)));
                if let Some(comm) = joined.as_ref().and_then(|r| r.comm.as_ref()) {
                    comm.abort();
                }
            }
            drop(joined);
            state.ended.push(number);
            progress.1.notify_all();
        };
        thread::Builder::new()
            .name(format!("rank {number} of {size}"))
            .spawn(work)
            .unwrap();
    }
    let mut state = progress.0.lock();
    let end = Instant::now() + LIMIT;
    while state.ended.len() < here.len() {
        let late = progress.1.wait_until(&mut state, end).timed_out();
        let is_missing = |r: &&usize| !state.ended.contains(r);
        let missing: Vec<_> = here.iter().filter(is_missing).collect();
        assert!(
            !late || missing.is_empty(),
            "ranks {missing:?} have not ended after {LIMIT:?}; failed first: {:?}",
            state.failure
        );
    }
    if let Some((rank, text)) = &state.failure {
        panic!("rank {rank} of {size}: {text}");
    }
}
