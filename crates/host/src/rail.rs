//! The host's rails: a communicator among the ranks with one local number, and links between them that can be made as slow as a network's.

use crate::{
    core::Core,
    job::{Active, Job},
    memory::{poison, writing},
    queue::HostQueue,
};
use brigade_device::{
    Buffer, Call, Error, FaultKind, FaultRecord, Group, PerRank, Rail, RailParams, Result, Stream,
    check_rows,
};
use brigade_plan::{hierarchical::Wire, rows};
use brigade_sync::{Area, Budget};
use parking_lot::Mutex;
use std::{
    ops::Range,
    sync::Arc,
    thread,
    time::{Duration, Instant},
};

/// How fast the links between machines are, where a host plays several.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RailModel {
    /// The way of a byte: at most a day.
    pub latency: Duration,
    /// What each rank's link carries in a microsecond, out of its machine. At least 1.
    pub bytes_per_us: u64,
}

impl RailModel {
    /// # Errors
    /// [`Error::Invalid`] naming the field.
    pub(crate) fn check(self) -> Result<()> {
        const DAY: Duration = Duration::from_secs(86_400);
        if self.latency > DAY {
            let got = format!("{:?}", self.latency);
            return Err(Error::invalid("rail.latency", got, "at most a day"));
        }
        if self.bytes_per_us == 0 {
            return Err(Error::invalid("rail.bytes_per_us", 0, "at least 1"));
        }
        Ok(())
    }

    /// The same as plans have it.
    pub(crate) fn wire(self) -> Wire {
        Wire {
            latency_ns: u64::try_from(self.latency.as_nanos()).unwrap_or(u64::MAX),
            bytes_per_us: self.bytes_per_us,
        }
    }

    fn time(self, bytes: usize) -> Duration {
        Duration::from_nanos(self.wire().link_ns(bytes as u64))
    }
}

/// A rank's link out of its machine. What is collected and what is diffused take turns on it.
pub(crate) struct Link {
    model: RailModel,
    free: Mutex<Instant>,
}

impl Link {
    pub(crate) fn new(model: RailModel) -> Self {
        Self {
            model,
            free: Mutex::new(Instant::now()),
        }
    }

    /// Takes the link for so many bytes. Gives when they begin to move.
    fn take(&self, bytes: usize) -> Instant {
        let mut free = self.free.lock();
        let start = (*free).max(Instant::now());
        *free = start + self.model.time(bytes);
        start
    }
}

/// What one message waits for, by the model.
struct Flight<'l> {
    link: Option<(&'l Link, Instant)>,
    sent: usize,
}

impl<'l> Flight<'l> {
    /// A message of so many bytes sets out.
    fn new(link: Option<&'l Link>, bytes: usize) -> Self {
        Self {
            link: link.map(|link| (link, link.take(bytes))),
            sent: 0,
        }
    }

    /// Waits until the next `bytes` of it are there.
    fn land(&mut self, job: &Job, bytes: usize) -> Result<()> {
        /// How soon a wait ends once the group is stopped.
        const REST: Duration = Duration::from_millis(10);
        /// How late a sleep may end: it is not a network that would be measured then.
        const LATE: Duration = Duration::from_micros(80);
        self.sent += bytes;
        let Some((link, start)) = self.link else {
            return Ok(());
        };
        let there = start + link.model.time(self.sent) + link.model.latency;
        let mut deadline = job.deadline;
        loop {
            let left = there.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return Ok(());
            }
            if let Some(record) = job.core.control.fault() {
                return Err(Error::Fault(record));
            }
            if deadline.spent() {
                return Err(job.fail(FaultKind::Timeout, job.rank(), 0, 0, 0));
            }
            match left.checked_sub(LATE) {
                // tidy: sleeps because a slow link is what is modelled
                Some(rest) => thread::sleep(rest.min(REST)),
                // Whoever has work goes first.
                None => thread::yield_now(),
            }
        }
    }
}

/// One of a rank's connections to its rail.
pub(crate) struct HostRail {
    pub(crate) core: Arc<Core>,
    link: Option<Arc<Link>>,
}

/// How bytes are exchanged: `(active, link, bytes of pieces, from, to)`.
type Exchange = fn(&mut Active<'_>, Option<&Link>, &[usize], &[u8], &mut [u8]) -> Result<()>;

impl HostRail {
    pub(crate) fn new(core: Arc<Core>, link: Option<Arc<Link>>) -> Self {
        Self { core, link }
    }

    fn run(
        &self,
        on: &Stream,
        p: &RailParams<'_>,
        pieces: &[usize],
        exchange: Exchange,
    ) -> Result<()> {
        let (to, from): (Buffer, Buffer) = (p.to.as_view().retain(), p.from.retain());
        let pieces: PerRank = pieces.iter().map(|n| n * from.dtype().bytes()).collect();
        let (core, link) = (Arc::clone(&self.core), self.link.clone());
        let (call, within): (Call, Duration) = (p.call.clone(), p.within);
        let signature = p.signature();
        HostQueue::of(on)?.run(move || {
            core.collective_signed((&call, signature), Some(within), |active| {
                writing(&to, &[&from], |out, inputs| {
                    exchange(active, link.as_deref(), &pieces, inputs[0], out)
                        .inspect_err(|_| poison(to.dtype(), out))
                })
            })
        })
    }
}

impl Rail for HostRail {
    fn group(&self) -> &Group {
        self.core.control.group()
    }

    fn collect(&self, on: &Stream, p: RailParams<'_>) -> Result<()> {
        let size = self.group().size;
        check_rows("pieces", p.pieces, size)?;
        // Every machine has the same piece for each.
        let pieces = p.pieces.repeat(size);
        self.exchange(
            on,
            RailParams {
                pieces: &pieces,
                ..p
            },
        )
    }

    fn diffuse(&self, on: &Stream, p: RailParams<'_>) -> Result<()> {
        let all = check_rows("pieces", p.pieces, self.group().size)?;
        sized("from", p.from.shape().len(), p.pieces[self.group().rank])?;
        sized("to", p.to.shape().len(), all)?;
        self.run(on, &p, p.pieces, diffuse)
    }

    fn exchange(&self, on: &Stream, p: RailParams<'_>) -> Result<()> {
        let Group { rank, size, .. } = *self.group();
        check_rows("pieces", p.pieces, size * size)?;
        let (sent, received) = rows::of_square(p.pieces, rank, size);
        sized("from", p.from.shape().len(), sent.iter().sum())?;
        sized("to", p.to.shape().len(), received.iter().sum())?;
        self.run(on, &p, p.pieces, exchange)
    }

    fn stop(&self, record: FaultRecord) {
        self.core.stop(record);
    }
}

fn sized(field: &'static str, got: usize, want: usize) -> Result<()> {
    if got == want {
        return Ok(());
    }
    Err(Error::invalid(field, got, format!("{want} elements")))
}

/// Lays this machine's piece for every other one out for it, and reads what the others have for this one.
fn exchange(
    active: &mut Active<'_>,
    link: Option<&Link>,
    pieces: &[usize],
    from: &[u8],
    to: &mut [u8],
) -> Result<()> {
    const LINE: usize = 64;
    let (me, size) = (active.job.rank(), active.job.size());
    let (sent, received) = rows::of_square(pieces, me, size);
    let (out, into) = (rows::offsets(&sent), rows::offsets(&received));
    let mut flight = Flight::new(link, from.len() - sent[me]);
    to[into[me]..into[me + 1]].copy_from_slice(&from[out[me]..out[me + 1]]);
    let half = active.job.core.control.layout().half_bytes(Area::Scratch);
    let room = (half / size / LINE * LINE).max(1);
    // Of what goes to others.
    let others = pieces
        .iter()
        .enumerate()
        .filter(|(i, _)| i / size != i % size);
    let most = others.map(|(_, &piece)| piece).max().unwrap_or(0);
    for start in (0..most).step_by(room) {
        let cut = |piece: usize| -> Range<usize> { start.min(piece)..(start + room).min(piece) };
        let of = active.begin(Area::Scratch)?;
        let job = &active.job;
        let mut bytes = 0;
        for peer in job.peers() {
            let part = cut(sent[peer]);
            let place = peer * room..peer * room + part.len();
            let part = &from[out[peer] + part.start..out[peer] + part.end];
            // SAFETY: own half: all peers have given their credit for it, and it is announced below.
            unsafe { job.bytes_mut(me, of, place) }.copy_from_slice(part);
            bytes += part.len();
        }
        flight.land(job, bytes)?;
        job.say_filled_to_all(of, me, 0);
        for peer in job.peers() {
            job.await_filled(of, peer, 0, peer)?;
            let part = cut(received[peer]);
            job.count_moved(part.len());
            // SAFETY: announced by its owner for this use, which this rank has not ended.
            let piece = unsafe { job.bytes(peer, of, me * room..me * room + part.len()) };
            to[into[peer] + part.start..into[peer] + part.end].copy_from_slice(piece);
        }
        active.end(of);
    }
    Ok(())
}

/// Lays this machine's piece out for all, and reads everybody's.
fn diffuse(
    active: &mut Active<'_>,
    link: Option<&Link>,
    pieces: &[usize],
    from: &[u8],
    to: &mut [u8],
) -> Result<()> {
    let (me, size) = (active.job.rank(), active.job.size());
    let offsets = rows::offsets(pieces);
    let mut flight = Flight::new(link, from.len() * (size - 1));
    to[offsets[me]..offsets[me + 1]].copy_from_slice(from);
    let room = active.job.core.control.layout().half_bytes(Area::Scratch);
    let most = pieces.iter().copied().max().unwrap_or(0);
    for start in (0..most).step_by(room) {
        let cut = |machine: usize| -> Range<usize> {
            start.min(pieces[machine])..(start + room).min(pieces[machine])
        };
        let of = active.begin(Area::Scratch)?;
        let job = &active.job;
        let part = &from[cut(me)];
        // SAFETY: own half: all peers have given their credit for it, and it is announced below.
        unsafe { job.bytes_mut(me, of, 0..part.len()) }.copy_from_slice(part);
        flight.land(job, part.len() * (size - 1))?;
        job.say_filled_to_all(of, me, 0);
        for peer in job.peers() {
            job.await_filled(of, peer, 0, peer)?;
            let part = cut(peer);
            job.count_moved(part.len());
            // SAFETY: announced by its owner for this use, which this rank has not ended.
            let piece = unsafe { job.bytes(peer, of, 0..part.len()) };
            to[offsets[peer] + part.start..offsets[peer] + part.end].copy_from_slice(piece);
        }
        active.end(of);
    }
    Ok(())
}
