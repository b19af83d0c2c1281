//! Rails of GPUs: what goes along one is NCCL's to carry, and what NCCL cannot do is done beside it.
//!
//! NCCL waits without a bound and tells nobody, so each of its kernels stands between two copies of a few bytes into a page of the
//! host's, where the hierarchy's watch sees for how long it has been under way. It carries no signatures, so the first exchange of a call
//! carries one more word to each machine, and a kernel behind it compares; what differs in size as well, and would not end, hosts find out
//! (`line.rs`). What stops the rail gives NCCL's communicators up, and a reset makes new ones.

use crate::{
    CudaDevice, Missing,
    core::Core,
    devices,
    driver::failed,
    lane::Lane,
    line::Line,
    mark::CudaMark,
    memory::{DeviceMemory, Pinned, check_reach},
    nccl_bounded::{Bounded, Usable, late, remains, shared},
    nccl_comm::{Functions, Handle, Status},
    quiet,
};
use brigade_device::{
    Bootstrap, Buffer, Device, Error, FaultKind, FaultRecord, Group, Rail, RailParams, Result,
    Storage, Stream, check_rows,
};
use brigade_group::{Stoppable, agree};
use brigade_plan::rows;
use cudarc::driver::sys;
use parking_lot::Mutex;
use std::{
    net::IpAddr,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
    time::{Duration, Instant},
};

const STEP: &str = "join: rails";

/// Two connections, so that what is collected and what is diffused need not wait for each other.
pub(crate) const CONNECTIONS: usize = 2;

/// Waits along rails may be so much longer than those inside: where a rank is missing, its own machine is to find out first, and say who.
pub(crate) const GRACE: Duration = Duration::from_millis(300);

/// How long what NCCL fails with may wait for what stopped the peer that it failed for.
const HEARSAY: Duration = Duration::from_millis(200);

/// How long a wait for a machine that is gone may go on: what it sent before may still come.
const LAST_WORDS: Duration = Duration::from_millis(20);

/// Words of the page: for each connection, whether NCCL is under way, and whether it has got through since the host looked.
const fn under_way(connection: usize) -> usize {
    2 * connection
}
const PASSED: usize = 1;
/// The machine that made another call, from 1.
const DIFFERS: usize = 2 * CONNECTIONS;
const PAGE_WORDS: usize = DIFFERS + 1;

/// Words of the GPU's: what is copied to the page, and from there on what each machine signed.
const COPIED: [u64; 3] = [1, 0, 1];
const SIGNED: usize = COPIED.len();

/// A page of the host's that the GPU writes, and what it writes.
struct Page {
    page: Pinned,
    words: DeviceMemory,
}

impl Page {
    fn new(core: &Core, machines: usize) -> Result<Self> {
        let card = &core.device.card;
        let words = DeviceMemory::outside_of_streams(card, 8 * (SIGNED + machines))?;
        for (i, word) in COPIED.into_iter().enumerate() {
            core.write_word(words.address() + 8 * i as u64, word)?;
        }
        Ok(Self {
            page: Pinned::new(card, 8 * PAGE_WORDS)?,
            words,
        })
    }

    /// Address of a word of the page, for both.
    fn at(&self, word: usize) -> u64 {
        self.page.address() + 8 * word as u64
    }

    /// Address of a word of the GPU's.
    fn word(&self, word: usize) -> u64 {
        self.words.address() + 8 * word as u64
    }

    fn cell(&self, word: usize) -> &AtomicU64 {
        debug_assert!(word < PAGE_WORDS);
        // SAFETY: inside the page, which lives as long as `self`; its words are only ever used as atomics here.
        unsafe { AtomicU64::from_ptr(self.at(word) as *mut u64) }
    }

    fn clear(&self) {
        (0..PAGE_WORDS).for_each(|word| self.cell(word).store(0, Ordering::Release));
    }

    /// Enqueues a copy of `count` words, from one of the GPU's to one of the page.
    fn show(&self, stream: sys::CUstream, to: usize, from: usize, count: usize) -> Result<()> {
        // SAFETY: both lie in memory of the rail's, which outlives its work.
        unsafe { sys::cuMemcpyAsync(self.at(to), self.word(from), 8 * count, stream) }
            .result()
            .map_err(failed("cuMemcpyAsync"))
    }
}

/// Bytes at an address, to or from a machine.
type Part = (usize, u64, usize);

/// One of a rank's connections to its rail: a communicator of NCCL's.
pub(crate) struct NcclRail {
    /// Rank and size are numbers of machines.
    group: Group,
    connection: usize,
    /// Whose kernels stop with the rail, and compare signatures.
    core: Arc<Core>,
    comm: Mutex<Arc<Bounded>>,
    page: Arc<Page>,
    line: Arc<Line>,
}

impl NcclRail {
    /// The communicator of now.
    fn comm(&self) -> Arc<Bounded> {
        Arc::clone(&self.comm.lock())
    }

    /// Enqueues sends and receives, one of NCCL's kernels, with a copy of what stays here before. With a signature, one goes to each
    /// machine and comes from each, and all are compared.
    fn exchange(
        &self,
        on: &Stream,
        buffers: [&Buffer; 2],
        own: (u64, u64, usize),
        (sent, received): (Vec<Part>, Vec<Part>),
        (signature, within): (Option<u32>, Duration),
    ) -> Result<()> {
        let core = &self.core;
        let lane = core.device.lane(on)?;
        let (me, size) = (self.group.rank, self.group.size);
        let end = Instant::now() + within;
        let goes_on = || match core.fault() {
            Some(fault) => Err(Error::Fault(fault)),
            None => remains(end),
        };
        let (mut sent, mut received) = (sent, received);
        if signature.is_some() {
            let others = || (0..size).filter(|&machine| machine != me);
            sent.extend(others().map(|to| (to, self.page.word(SIGNED + me), 8)));
            received.extend(others().map(|from| (from, self.page.word(SIGNED + from), 8)));
        }
        for list in [&mut sent, &mut received] {
            list.retain(|(machine, _, bytes)| *machine != me && *bytes > 0);
        }
        lane.run(&buffers, |stream| {
            let (to, from, bytes) = own;
            if bytes > 0 {
                // SAFETY: both ranges lie in buffers of the call, which `run` keeps.
                unsafe { sys::cuMemcpyDtoDAsync_v2(to, from, bytes, stream) }
                    .result()
                    .map_err(failed("cuMemcpyDtoDAsync"))?;
            }
            if let Some(signature) = signature {
                let word = self.page.word(SIGNED + me);
                // SAFETY: a word of the rail's memory, which outlives its work.
                unsafe { sys::cuMemsetD32Async(word, signature, 1, stream) }
                    .result()
                    .map_err(failed("cuMemsetD32Async"))?;
            }
            if sent.is_empty() && received.is_empty() {
                return Ok(());
            }
            let under_way = under_way(self.connection);
            self.page.show(stream, under_way, 0, 1)?;
            let done = self
                .comm()
                .call("ncclSend and ncclRecv", goes_on, |f, comm| {
                    // SAFETY: all parts lie in buffers of the call or in the rail's memory, which are kept until the work is done.
                    unsafe { grouped(f, comm, stream.cast(), &sent, &received) }
                });
            // Also after a failure: nothing is under way then.
            let shown = self.page.show(stream, under_way, 1, 2);
            done.and(shown)
        })?;
        match signature {
            Some(_) => core.locally(on, &[], |job| {
                let signed = self.page.word(SIGNED);
                job.compare_words(signed, size, me, self.page.at(DIFFERS))
            }),
            None => Ok(()),
        }
    }

    /// As [`Rail::collect`]; with `signs`, ranks of other machines that make another call are found out.
    pub(crate) fn collect_signed(
        &self,
        on: &Stream,
        p: &RailParams<'_>,
        signs: bool,
    ) -> Result<()> {
        let Group { rank, size, .. } = self.group;
        check_rows("pieces", p.pieces, size)?;
        let own = p.pieces[rank];
        sized("from", p.from.shape().len(), p.pieces.iter().sum())?;
        sized("to", p.to.as_view().shape().len(), own * size)?;
        let (from, to, bytes) = self.ends(p)?;
        let offsets = rows::offsets(p.pieces);
        let sent = (0..size)
            .map(|m| {
                (
                    m,
                    from.address() + (offsets[m] * bytes) as u64,
                    p.pieces[m] * bytes,
                )
            })
            .collect();
        let place = |machine: usize| to.address() + (machine * own * bytes) as u64;
        let received = (0..size).map(|m| (m, place(m), own * bytes)).collect();
        let mine = from.address() + (offsets[rank] * bytes) as u64;
        let stays = (place(rank), mine, own * bytes);
        let how = (signs.then(|| p.call.signature()), p.within);
        self.exchange(on, [&from, &to], stays, (sent, received), how)
    }

    /// As [`Rail::diffuse`], likewise.
    pub(crate) fn diffuse_signed(
        &self,
        on: &Stream,
        p: &RailParams<'_>,
        signs: bool,
    ) -> Result<()> {
        let Group { rank, size, .. } = self.group;
        check_rows("pieces", p.pieces, size)?;
        let own = p.pieces[rank];
        sized("from", p.from.shape().len(), own)?;
        sized("to", p.to.as_view().shape().len(), p.pieces.iter().sum())?;
        let (from, to, bytes) = self.ends(p)?;
        let offsets = rows::offsets(p.pieces);
        let place = |machine: usize| to.address() + (offsets[machine] * bytes) as u64;
        let sent = (0..size)
            .map(|m| (m, from.address(), own * bytes))
            .collect();
        let received = (0..size)
            .map(|m| (m, place(m), p.pieces[m] * bytes))
            .collect();
        let stays = (place(rank), from.address(), own * bytes);
        let how = (signs.then(|| p.call.signature()), p.within);
        self.exchange(on, [&from, &to], stays, (sent, received), how)
    }

    /// What goes and what comes, and bytes of an element.
    fn ends(&self, p: &RailParams<'_>) -> Result<(Buffer, Buffer, usize)> {
        let (from, to) = (p.from.retain(), p.to.as_view().retain());
        check_reach(&self.core.device.card, "from.memory", &from)?;
        check_reach(&self.core.device.card, "to.memory", &to)?;
        if to.dtype() != from.dtype() {
            return Err(Error::invalid("to", to.dtype(), from.dtype()));
        }
        let bytes = from.dtype().bytes();
        Ok((from, to, bytes))
    }

    /// Sends a word each way, which makes NCCL connect and load, and waits for it.
    fn warm_up(&self, end: Instant) -> Result<()> {
        let lane = Lane::new(&self.core.device.card, 0)?;
        let (me, size) = (self.group.rank, self.group.size);
        let word = |machine: usize| (machine, self.page.word(SIGNED + machine), 8);
        let others = || (0..size).filter(|&machine| machine != me);
        let sent: Vec<Part> = others().map(|m| (m, word(me).1, 8)).collect();
        let received: Vec<Part> = others().map(word).collect();
        let stream = lane.stream;
        let comm = self.comm();
        let called = comm.call(
            "ncclSend and ncclRecv",
            || remains(end),
            |f, comm| {
                // SAFETY: words of the rail's memory.
                unsafe { grouped(f, comm, stream.cast(), &sent, &received) }
            },
        );
        let left = end.saturating_duration_since(Instant::now());
        let done = called.and_then(|()| {
            match CudaMark::record(&self.core.device.card, stream)?.reached(left)? {
                true => Ok(()),
                false => Err(late()),
            }
        });
        if done.is_err() {
            // A kernel that still waits there ends when NCCL is given up.
            comm.give_up();
            std::mem::forget(lane);
        }
        done
    }
}

/// One group of NCCL's calls.
///
/// # Safety
/// All parts must lie in memory within reach until the work is done.
unsafe fn grouped(
    f: &Functions,
    comm: Handle,
    stream: Handle,
    sent: &[Part],
    received: &[Part],
) -> Status {
    /// NCCL's number of bytes.
    const BYTES: i32 = 1;
    /// What a call that has begun gives where communicators do not block.
    const BEGUN: [Status; 2] = [0, crate::nccl_comm::IN_PROGRESS];
    // SAFETY: the caller's promise; a group that was begun is always ended.
    unsafe {
        let begun = (f.group_start)();
        let sent = sent.iter().map(|&(to, at, bytes)| {
            (f.send)(at as *const _, bytes, BYTES, to as i32, comm, stream)
        });
        let sent: Vec<Status> = sent.collect();
        let received = received.iter().map(|&(from, at, bytes)| {
            (f.recv)(at as *mut _, bytes, BYTES, from as i32, comm, stream)
        });
        let received: Vec<Status> = received.collect();
        let ended = (f.group_end)();
        let mut all = std::iter::once(begun).chain(sent).chain(received);
        all.find(|s| !BEGUN.contains(s)).unwrap_or(ended)
    }
}

fn sized(field: &'static str, got: usize, want: usize) -> Result<()> {
    if got == want {
        return Ok(());
    }
    Err(Error::invalid(field, got, format!("{want} elements")))
}

impl Rail for NcclRail {
    fn group(&self) -> &Group {
        &self.group
    }

    fn collect(&self, on: &Stream, p: RailParams<'_>) -> Result<()> {
        self.collect_signed(on, &p, true)
    }

    fn diffuse(&self, on: &Stream, p: RailParams<'_>) -> Result<()> {
        self.diffuse_signed(on, &p, true)
    }

    fn poll(&self) -> Result<()> {
        match (self.line.fault(), self.comm().failed()) {
            (Some(record), _) => Err(Error::Fault(record)),
            (None, Some(status)) => crate::nccl_comm::check("ncclCommGetAsyncError", status),
            (None, None) => Ok(()),
        }
    }

    fn stop(&self, record: FaultRecord) {
        self.line.tell_fault(record);
        self.comm().give_up();
    }
}

/// What the watch knows of a connection.
#[derive(Default)]
struct Pace {
    /// Since when NCCL has been under way without getting through.
    since: Option<Instant>,
}

impl Pace {
    /// Looks, and says for how long NCCL has been under way.
    fn look(&mut self, page: &Page, connection: usize) -> Duration {
        let at = under_way(connection);
        let now = Instant::now();
        // If it gets through again in between, it has all the same just got through.
        if page.cell(at + PASSED).load(Ordering::Acquire) != 0 {
            page.cell(at + PASSED).store(0, Ordering::Release);
            self.since = None;
        }
        if page.cell(at).load(Ordering::Acquire) == 0 {
            self.since = None;
            return Duration::ZERO;
        }
        now.saturating_duration_since(*self.since.get_or_insert(now))
    }
}

/// What the watch remembers from one look to the next.
#[derive(Default)]
struct Watched {
    pace: [Pace; CONNECTIONS],
    failed: Option<(Status, Instant)>,
    /// Whether what stopped the rail was told.
    stopped: bool,
}

/// What was found on a rail.
pub(crate) struct Found {
    pub(crate) kind: FaultKind,
    /// The machine that is to blame.
    pub(crate) machine: usize,
    pub(crate) waited: Duration,
    pub(crate) seen: u64,
}

/// Both connections of a rank to its rail, and the line beside them.
pub(crate) struct Rails {
    pub(crate) line: Arc<Line>,
    pub(crate) pair: [NcclRail; CONNECTIONS],
    page: Arc<Page>,
    watched: Mutex<Watched>,
}

impl Rails {
    /// All ranks of a rail make both, or all fail. `core` is a communicator inside the machine.
    pub(crate) fn join(
        rail: &dyn Bootstrap,
        core: &Arc<Core>,
        at: Option<IpAddr>,
        within: Duration,
    ) -> Result<Self> {
        let end = Instant::now() + within;
        let left = || end.saturating_duration_since(Instant::now());
        let line = Line::join(rail, at, left())?;
        own_gpus(&line, &core.device, left())?;
        let page = Page::new(core, rail.size()).map(Arc::new);
        let page = agree(line.group(), STEP, page, left())?;
        let group = Group {
            mode: core.control.group().mode,
            rank: rail.rank(),
            size: rail.size(),
        };
        let pair = comms(&line, &core.device, left())?;
        let mut connection = 0..CONNECTIONS;
        let pair = pair.map(|comm| NcclRail {
            group,
            connection: connection.next().unwrap_or(0),
            core: Arc::clone(core),
            comm: Mutex::new(comm),
            page: Arc::clone(&page),
            line: Arc::clone(&line),
        });
        Ok(Self {
            line,
            pair,
            page,
            watched: Mutex::default(),
        })
    }

    /// To be done when all ranks have made their connections, since NCCL's first kernels wait for each other.
    pub(crate) fn warm_up(&self, within: Duration) -> Result<()> {
        let end = Instant::now() + within;
        let done = self.pair.iter().try_for_each(|rail| rail.warm_up(end));
        agree(self.line.group(), STEP, done, within)
    }

    /// Whether the rail is as it should be; what was found, else, until it is stopped. NCCL may be under way for `most` at a time.
    pub(crate) fn look(&self, most: Duration) -> Option<Found> {
        let mut watched = self.watched.lock();
        if watched.stopped {
            return None;
        }
        let found = |kind, machine| Found {
            kind,
            machine,
            waited: Duration::ZERO,
            seen: 0,
        };
        let differs = self.page.cell(DIFFERS).load(Ordering::Acquire);
        if differs > 0 {
            return Some(found(FaultKind::Mismatch, differs as usize - 1));
        }
        if let Some(machine) = self.line.differs() {
            return Some(found(FaultKind::Mismatch, machine));
        }
        let paces = watched.pace.iter_mut().enumerate();
        let waited = paces.map(|(connection, pace)| pace.look(&self.page, connection));
        let waited = waited.max().unwrap_or_default();
        if waited >= LAST_WORDS
            && let Some(machine) = self.line.gone()
        {
            return Some(Found {
                waited,
                ..found(FaultKind::PeerLost, machine)
            });
        }
        if waited >= most {
            return Some(Found {
                waited,
                ..found(FaultKind::Timeout, self.line.awaited())
            });
        }
        // A machine that is gone has ended its part of NCCL's communicators: where nothing is under way, nobody minds.
        let status = self.pair.iter().find_map(|rail| rail.comm().failed());
        let Some(status) = status.filter(|_| self.line.gone().is_none()) else {
            watched.failed = None;
            return None;
        };
        let (_, since) = *watched.failed.get_or_insert((status, Instant::now()));
        (since.elapsed() >= HEARSAY).then(|| Found {
            seen: status as u64,
            ..found(FaultKind::Aborted, self.pair[0].group.rank)
        })
    }

    /// New connections for a new generation, behind a reset of what is inside the machine; all ranks of the rail make them, or all fail.
    pub(crate) fn renew(&self, generation: u32, within: Duration) -> Result<()> {
        let end = Instant::now() + within;
        let left = || end.saturating_duration_since(Instant::now());
        for rail in &self.pair {
            rail.comm().give_up();
            // What NCCL frees may hold up the driver: better now, while no kernel waits.
            rail.comm().settle();
        }
        let group = self.line.group();
        group.all_gather(&[], left())?;
        let made = comms(&self.line, &self.pair[0].core.device, left())?;
        for (rail, comm) in self.pair.iter().zip(made) {
            *rail.comm.lock() = comm;
        }
        self.page.clear();
        self.warm_up(left())?;
        self.line.renew(generation);
        *self.watched.lock() = Watched::default();
        Ok(())
    }

    /// Ends this rank's part, once its work is done.
    pub(crate) fn leave(&self) {
        self.line.leave();
        for rail in &self.pair {
            rail.comm().give_up();
            rail.comm().settle();
        }
    }
}

impl Stoppable for Rails {
    fn fault(&self) -> Option<FaultRecord> {
        self.line.fault()
    }

    fn stop(&self, record: FaultRecord) {
        if std::mem::replace(&mut self.watched.lock().stopped, true) {
            return;
        }
        // In this order: whom NCCL fails then has heard why.
        self.line.tell_fault(record);
        for rail in &self.pair {
            rail.comm().give_up();
        }
    }
}

/// NCCL serves no ranks that share a GPU: all ranks of the rail show theirs.
fn own_gpus(line: &Line, device: &CudaDevice, within: Duration) -> Result<()> {
    let group = line.group();
    let here: Result<_, Missing> = devices();
    let here = agree(group, STEP, here.map_err(Error::from), within)?;
    let uuid = here.get(device.info().ordinal as usize).map(|gpu| gpu.uuid);
    let mut all = group.all_gather(&uuid.unwrap_or_default(), within)?;
    all.sort_unstable();
    all.dedup();
    match all.len() == group.size() {
        true => Ok(()),
        false => Err(shared()),
    }
}

/// A communicator of NCCL's for each connection.
fn comms(
    line: &Line,
    device: &CudaDevice,
    within: Duration,
) -> Result<[Arc<Bounded>; CONNECTIONS]> {
    let group = line.group();
    let end = Instant::now() + within;
    let left = || end.saturating_duration_since(Instant::now());
    let make = || -> Result<Arc<Bounded>> {
        let found = Usable::find();
        // Where it is missing, the reason with its remedy says more than the ranks' list.
        let own = found.as_ref().err().cloned();
        let usable = agree(group, STEP, found, left()).map_err(|ranks| own.unwrap_or(ranks))?;
        let id = usable.name(group, left())?;
        quiet::quiet(device.card.context.ordinal());
        let place = (group.rank(), group.size());
        let made = Bounded::make(&device.card, usable, id, place, end);
        agree(group, STEP, made, left())
    };
    Ok([make()?, make()?])
}
