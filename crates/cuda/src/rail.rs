//! Rails of GPUs: what goes along one is NCCL's to carry, and what NCCL cannot do is done beside it.
//!
//! NCCL waits without a bound and tells nobody, so each of its kernels stands between two copies of a few bytes into a page of the
//! host's, where the hierarchy's watch sees for how long it has been under way. It carries no signatures, so the first exchange of a call
//! and each connection's last carry one more word to each machine, and a kernel behind them compares; what differs in size as well, and would
//! not end, hosts find out (`line.rs`). Who was stopped does not sign, so that nobody takes what it sent all the same for its part. What stops the rail gives NCCL's communicators up, and a reset makes new ones.

mod page;

pub(crate) use page::{Pace, Page};

use crate::{
    core::Core,
    driver::failed,
    lane::Lane,
    line::Line,
    mark::CudaMark,
    memory::check_reach,
    nccl_bounded::{Bounded, ROUND, gone, late, remains},
    nccl_comm::{Functions, Handle, Status},
};
use brigade_device::{
    Bootstrap, Buffer, Error, FaultRecord, Group, Rail, RailParams, Result, Stream, check_rows,
};
use brigade_plan::{hierarchical::Costs, rows};
use brigade_sync::Deadline;
use cudarc::driver::sys;
use parking_lot::Mutex;
use std::{
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicI32, AtomicU64, Ordering},
    },
    thread,
    time::{Duration, Instant},
};

/// Several connections, so that what goes by one need not wait for what is on its way by another; and since one thread of NCCL's carries what
/// goes by one of them.
pub(crate) const CONNECTIONS: usize = Costs::cuda().connections;

/// Waits along rails may be so much longer than those inside: where a rank is missing, its own machine is to find out first, and say who.
pub(crate) const GRACE: Duration = Duration::from_millis(300);

/// A bit of a signature's word, so that none is 0, as a word is that did not come. Signatures have 24.
const CAME: u32 = 1 << 31;

/// How long an error of NCCL's may take to be explained: longer than the watch waits for news of peers.
pub(crate) const EXPLAINING: Duration = Duration::from_secs(1);

/// Bytes of every machine that are gathered at `join`: NCCL connects ranks when it first takes a way, which goes by size.
pub(crate) const FIRST: [usize; 4] = [8, 64 << 10, 1 << 20, 4 << 20];

/// `ncclInvalidUsage`: what NCCL refuses a collective with for which it has no algorithm.
const INVALID_USAGE: i64 = 5;

/// What NCCL is called for, in errors.
const CALLS: &str = "ncclSend, ncclRecv and ncclAllGather";

/// Bytes at an address, to or from a machine.
type Part = (usize, u64, usize);

/// What every machine gets of every machine, as much of each: from, to, bytes of one.
type Gather = (u64, u64, usize);

/// What a rank sends along its rail and receives there.
pub(crate) struct Exchange {
    /// What it reads and writes.
    buffers: [Buffer; 2],
    /// What stays here: to, from, bytes.
    own: (u64, u64, usize),
    sent: Vec<Part>,
    received: Vec<Part>,
    /// NCCL's all-gather, in place of all that.
    gathered: Option<Gather>,
}

impl Exchange {
    /// Whether it is one of NCCL's collectives, which is not cut: what it gathers would lie in another order.
    pub(crate) const fn is_whole(&self) -> bool {
        self.gathered.is_some()
    }

    /// Half of every part for each of two connections.
    pub(crate) fn halves(self) -> [Self; 2] {
        let half = |bytes: usize| (bytes / 2).next_multiple_of(16).min(bytes);
        let first = |parts: &[Part]| parts.iter().map(|&(m, at, n)| (m, at, half(n))).collect();
        let second = |parts: &[Part]| {
            let rest = |&(m, at, n): &Part| (m, at + half(n) as u64, n - half(n));
            parts.iter().map(rest).collect()
        };
        let other = Self {
            buffers: self.buffers.clone(),
            own: (0, 0, 0),
            sent: second(&self.sent),
            received: second(&self.received),
            gathered: None,
        };
        let sent = first(&self.sent);
        let received = first(&self.received);
        [
            Self {
                sent,
                received,
                ..self
            },
            other,
        ]
    }
}

/// One of a rank's connections to its rail: a communicator of NCCL's.
pub(crate) struct NcclRail {
    /// Rank and size are numbers of machines.
    group: Group,
    connection: usize,
    /// Whose kernels stop with the rail, and compare signatures.
    core: Arc<Core>,
    /// Those of all connections, of which this has one.
    comms: Mutex<Arc<Bounded>>,
    page: Arc<Page>,
    line: Arc<Line>,
    /// Whether NCCL gathers, as all ranks of the rail have found.
    gathers: AtomicBool,
    /// What NCCL refused a call with, or 0.
    refused: AtomicI32,
    /// Nanoseconds that a call had to be taken in by NCCL, which did not; or 0.
    overdue_ns: AtomicU64,
}

impl NcclRail {
    pub(crate) fn new(
        connection: usize,
        core: &Arc<Core>,
        comms: &Arc<Bounded>,
        page: &Arc<Page>,
        line: &Arc<Line>,
    ) -> Self {
        let hosts = line.group();
        Self {
            group: Group {
                mode: core.control.group().mode,
                rank: hosts.rank(),
                size: hosts.size(),
            },
            connection,
            core: Arc::clone(core),
            comms: Mutex::new(Arc::clone(comms)),
            page: Arc::clone(page),
            line: Arc::clone(line),
            gathers: AtomicBool::new(false),
            refused: AtomicI32::new(0),
            overdue_ns: AtomicU64::new(0),
        }
    }

    /// Other communicators, behind a reset.
    pub(crate) fn renew(&self, comms: &Arc<Bounded>) {
        self.refused.store(0, Ordering::Release);
        self.overdue_ns.store(0, Ordering::Release);
        let before = std::mem::replace(&mut *self.comms.lock(), Arc::clone(comms));
        drop(before);
    }

    /// The communicators of now.
    pub(crate) fn comms(&self) -> Arc<Bounded> {
        Arc::clone(&self.comms.lock())
    }

    /// Whether it did not take a call.
    pub(crate) fn was_refused(&self) -> bool {
        self.refused.load(Ordering::Acquire) != 0
    }

    /// How long a call had waited that NCCL did not take in time.
    pub(crate) fn overdue(&self) -> Option<Duration> {
        let ns = self.overdue_ns.load(Ordering::Acquire);
        (ns > 0).then_some(Duration::from_nanos(ns))
    }

    /// What NCCL has failed with, in a call or beside them.
    pub(crate) fn failed(&self) -> Option<Status> {
        let refused = Some(self.refused.load(Ordering::Acquire)).filter(|&code| code != 0);
        refused.or_else(|| self.comms().failed(self.connection))
    }

    /// What became of a call that NCCL did not take, `within` that time or at all. Mostly that is for something that another rank did, and which is known
    /// soon: the watch finds out what, or hears of it.
    fn explained(&self, error: Error, within: Duration) -> Error {
        match &error {
            Error::Backend { code, .. } => self.refused.store(*code as Status, Ordering::Release),
            // It was late: a timeout, whose watch knows who is waited for.
            Error::Group { .. } => {
                let ns = u64::try_from(within.as_nanos()).unwrap_or(u64::MAX);
                self.overdue_ns.store(ns.max(1), Ordering::Release);
            }
            Error::Unsupported(reason) if reason.code == gone().code => {}
            _ => return error,
        }
        let end = Instant::now() + EXPLAINING;
        while Instant::now() < end {
            if let Some(fault) = self.core.fault() {
                return Error::Fault(fault);
            }
            // tidy: sleeps because the watch looks from time to time.
            thread::sleep(ROUND);
        }
        error
    }

    /// Enqueues an exchange, one of NCCL's kernels, with a copy of what stays here before. With a signature, one goes to each
    /// machine and comes from each, and all are compared.
    pub(crate) fn exchange(
        &self,
        on: &Stream,
        what: Exchange,
        (signature, within): (Option<u32>, Duration),
    ) -> Result<()> {
        let Exchange {
            buffers,
            own,
            mut sent,
            mut received,
            gathered,
        } = what;
        let mut gathers: Vec<Gather> = gathered.into_iter().collect();
        let core = &self.core;
        let lane = core.device.lane(on)?;
        let (me, size) = (self.group.rank, self.group.size);
        let end = Deadline::after(within).end();
        let goes_on = || match core.fault() {
            Some(fault) => Err(Error::Fault(fault)),
            None => remains(end),
        };
        let signed = |machine| self.page.signed(self.connection, machine);
        if let Some(signature) = signature {
            if gathers.is_empty() {
                let others = || (0..size).filter(|&machine| machine != me);
                sent.extend(others().map(|to| (to, signed(me), 8)));
                received.extend(others().map(|from| (from, signed(from), 8)));
            } else {
                // In the same group, and by the same kernel.
                gathers.push((signed(me), signed(0), 8));
            }
            let word = u64::from(signature | CAME);
            core.locally(on, &[], |job| job.sign(signed(me), word))?;
        }
        for list in [&mut sent, &mut received] {
            list.retain(|(machine, _, bytes)| *machine != me && *bytes > 0);
        }
        lane.run(&buffers.each_ref(), |stream| {
            let (to, from, bytes) = own;
            if bytes > 0 {
                // SAFETY: both ranges lie in buffers of the call, which `run` keeps.
                unsafe { sys::cuMemcpyDtoDAsync_v2(to, from, bytes, stream) }
                    .result()
                    .map_err(failed("cuMemcpyDtoDAsync"))?;
            }
            if sent.is_empty() && received.is_empty() && gathers.is_empty() {
                return Ok(());
            }
            self.page.begins(self.connection, stream)?;
            let group = Grouped {
                sent,
                received,
                gathers,
                keeps: Some((Arc::clone(lane), buffers.clone())),
            };
            // SAFETY: all parts lie in buffers of the call or in the rail's memory, which are kept until the work is done.
            let done = unsafe { group.call((&self.comms(), self.connection), stream, goes_on) };
            // Also after a failure: nothing is under way then.
            let shown = self.page.ends(self.connection, stream);
            done.and(shown)
        })
        .map_err(|error| self.explained(error, within))?;
        match signature {
            Some(_) => core.locally(on, &[], |job| {
                job.compare_words(signed(0), size, me, self.page.tells(self.connection))
            }),
            None => Ok(()),
        }
    }

    /// What [`Rail::collect`] exchanges.
    pub(crate) fn collects(&self, p: &RailParams<'_>) -> Result<Exchange> {
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
        Ok(Exchange {
            own: (place(rank), mine, own * bytes),
            buffers: [from, to],
            sent,
            received,
            gathered: None,
        })
    }

    /// What [`Rail::diffuse`] exchanges.
    pub(crate) fn diffuses(&self, p: &RailParams<'_>) -> Result<Exchange> {
        let Group { rank, size, .. } = self.group;
        check_rows("pieces", p.pieces, size)?;
        let own = p.pieces[rank];
        sized("from", p.from.shape().len(), own)?;
        sized("to", p.to.as_view().shape().len(), p.pieces.iter().sum())?;
        let (from, to, bytes) = self.ends(p)?;
        let offsets = rows::offsets(p.pieces);
        let place = |machine: usize| to.address() + (offsets[machine] * bytes) as u64;
        let alike = own > 0 && size > 1 && p.pieces.iter().all(|&piece| piece == own);
        if alike && self.gathers.load(Ordering::Acquire) {
            return Ok(Exchange {
                own: (0, 0, 0),
                gathered: Some((from.address(), to.address(), own * bytes)),
                buffers: [from, to],
                sent: Vec::new(),
                received: Vec::new(),
            });
        }
        let sent = (0..size)
            .map(|m| (m, from.address(), own * bytes))
            .collect();
        let received = (0..size)
            .map(|m| (m, place(m), p.pieces[m] * bytes))
            .collect();
        Ok(Exchange {
            own: (place(rank), from.address(), own * bytes),
            buffers: [from, to],
            sent,
            received,
            gathered: None,
        })
    }

    /// What [`Rail::exchange`] exchanges.
    pub(crate) fn exchanges(&self, p: &RailParams<'_>) -> Result<Exchange> {
        let Group { rank, size, .. } = self.group;
        check_rows("pieces", p.pieces, size * size)?;
        let (sent, received) = rows::of_square(p.pieces, rank, size);
        sized("from", p.from.shape().len(), sent.iter().sum())?;
        sized("to", p.to.as_view().shape().len(), received.iter().sum())?;
        let (from, to, bytes) = self.ends(p)?;
        let (out, into) = (rows::offsets(&sent), rows::offsets(&received));
        let parts = |of: &Buffer, offsets: &[usize], elements: &[usize]| -> Vec<Part> {
            let at = |m: usize| of.address() + (offsets[m] * bytes) as u64;
            (0..size).map(|m| (m, at(m), elements[m] * bytes)).collect()
        };
        let (sent, received) = (parts(&from, &out, &sent), parts(&to, &into, &received));
        Ok(Exchange {
            own: (received[rank].1, sent[rank].1, sent[rank].2),
            buffers: [from, to],
            sent,
            received,
            gathered: None,
        })
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

    /// Says whether NCCL is to gather: what all ranks of the rail have found.
    pub(crate) fn let_gather(&self, gathers: bool) {
        self.gathers.store(gathers, Ordering::Release);
    }

    /// Sends a word each way, and gathers [`FIRST`] from all into this memory, which makes NCCL connect and load, and waits for it. Gives whether NCCL
    /// gathers: where it was told algorithms that are none for that (`NCCL_ALGO=Tree`), it refuses to.
    pub(crate) fn warm_up(&self, memory: u64, end: Instant) -> Result<bool> {
        let lane = Lane::new(&self.core.device.card, 0)?;
        let (me, size) = (self.group.rank, self.group.size);
        let word = |machine: usize| (machine, self.page.signed(self.connection, machine), 8);
        let others = || (0..size).filter(|&machine| machine != me);
        let sent: Vec<Part> = others().map(|m| (m, word(me).1, 8)).collect();
        let received: Vec<Part> = others().map(word).collect();
        let gathers = FIRST.map(|bytes| vec![(memory + (me * bytes) as u64, memory, bytes)]);
        let stream = lane.stream;
        let comms = self.comms();
        let goes_on = || remains(end);
        let exchange = Grouped {
            sent,
            received,
            gathers: Vec::new(),
            keeps: None,
        };
        let gathers = gathers.into_iter().map(|gathers| Grouped {
            sent: Vec::new(),
            received: Vec::new(),
            gathers,
            keeps: None,
        });
        let call = |group: Grouped| {
            // SAFETY: words of the rail's memory, and memory that is kept if anything of it fails.
            unsafe { group.call((&comms, self.connection), stream, goes_on) }
        };
        let called = call(exchange).and_then(|()| {
            for (i, gather) in gathers.into_iter().enumerate() {
                match call(gather) {
                    Err(Error::Backend { code, .. }) if i == 0 && code == INVALID_USAGE => {
                        return Ok(false);
                    }
                    done => done?,
                }
            }
            Ok(true)
        });
        let left = end.saturating_duration_since(Instant::now());
        let done = called.and_then(|gathers| {
            match CudaMark::record(&self.core.device.card, stream)?.reached(left)? {
                true => Ok(gathers),
                false => Err(late()),
            }
        });
        if done.is_err() {
            // A kernel that still waits there ends when NCCL is given up.
            comms.give_up();
            std::mem::forget(lane);
        }
        // What was sent was what the last call signed, before a reset.
        done.and_then(|gathers| self.page.unsign(&self.core).map(|()| gathers))
    }
}

/// One group of NCCL's calls.
struct Grouped {
    sent: Vec<Part>,
    received: Vec<Part>,
    gathers: Vec<Gather>,
    /// What NCCL may still turn to when whoever wanted the call waits for it no longer.
    keeps: Option<(Arc<Lane>, [Buffer; 2])>,
}

impl Grouped {
    /// Has NCCL enqueue it.
    ///
    /// # Safety
    /// All parts must lie in memory within reach until the work is done.
    unsafe fn call(
        self,
        (comms, connection): (&Bounded, usize),
        stream: sys::CUstream,
        goes_on: impl Fn() -> Result<()>,
    ) -> Result<()> {
        let stream = stream as usize;
        comms.call(connection, CALLS, goes_on, move |f, comm| {
            // SAFETY: the caller's promise.
            let status = unsafe { self.enqueue(f, comm, stream as Handle) };
            drop(self.keeps);
            status
        })
    }

    /// # Safety
    /// As [`call`](Self::call).
    unsafe fn enqueue(&self, f: &Functions, comm: Handle, stream: Handle) -> Status {
        /// NCCL's number of bytes.
        const BYTES: i32 = 1;
        // SAFETY: the caller's promise; a group that was begun is always ended.
        unsafe {
            let begun = (f.group_start)();
            let sent = self.sent.iter().map(|&(to, at, bytes)| {
                (f.send)(at as *const _, bytes, BYTES, to as i32, comm, stream)
            });
            let sent: Vec<Status> = sent.collect();
            let received = self.received.iter().map(|&(from, at, bytes)| {
                (f.recv)(at as *mut _, bytes, BYTES, from as i32, comm, stream)
            });
            let received: Vec<Status> = received.collect();
            let gathered = self.gathers.iter().map(|&(from, to, bytes)| {
                (f.all_gather)(from as *const _, to as *mut _, bytes, BYTES, comm, stream)
            });
            let gathered: Vec<Status> = gathered.collect();
            let ended = (f.group_end)();
            let all = std::iter::once(begun).chain(sent).chain(received);
            let mut all = all.chain(gathered);
            all.find(|s| *s != 0).unwrap_or(ended)
        }
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
        let how = (Some(p.signature()), p.within);
        self.exchange(on, self.collects(&p)?, how)
    }

    fn diffuse(&self, on: &Stream, p: RailParams<'_>) -> Result<()> {
        let how = (Some(p.signature()), p.within);
        self.exchange(on, self.diffuses(&p)?, how)
    }

    fn exchange(&self, on: &Stream, p: RailParams<'_>) -> Result<()> {
        let how = (Some(p.signature()), p.within);
        self.exchange(on, self.exchanges(&p)?, how)
    }

    fn stop(&self, record: FaultRecord) {
        self.line.tell_fault(record);
        self.comms().give_up();
    }
}
