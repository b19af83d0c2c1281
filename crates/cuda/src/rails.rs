//! A rank's connections to its rail, and the line beside them: making them, looking after them, stopping and renewing them.

mod seen;

use crate::{
    CudaDevice, Missing,
    core::Core,
    devices,
    line::Line,
    mark::{self, CudaMark},
    memory::DeviceMemory,
    nccl_bounded::{Bounded, Latch, Usable, shared},
    quiet,
    rail::{CONNECTIONS, Exchange, FIRST, NcclRail, Pace, Page},
};
use brigade_device::{Bootstrap, Device, Error, FaultKind, FaultRecord, Result, Storage, Stream};
use brigade_group::{Stoppable, agree};
use brigade_sync::Deadline;
use parking_lot::Mutex;
use seen::{Failing, Seen};
use std::{
    net::IpAddr,
    sync::Arc,
    time::{Duration, Instant},
};

const STEP: &str = "join: rails";

/// What the watch remembers from one look to the next.
#[derive(Default)]
struct Watched {
    pace: [Pace; CONNECTIONS],
    failing: Failing,
    /// Whether what stopped the rail was told.
    stopped: bool,
    /// Opened once what is inside the machine was stopped.
    inside_stopped: Arc<Latch>,
}

/// What was found on a rail.
pub(crate) struct Found {
    pub(crate) kind: FaultKind,
    /// The machine that is to blame.
    pub(crate) machine: usize,
    pub(crate) waited: Duration,
    pub(crate) seen: u64,
}

impl Found {
    pub(crate) const fn by(kind: FaultKind, machine: usize) -> Self {
        Self {
            kind,
            machine,
            waited: Duration::ZERO,
            seen: 0,
        }
    }
}

/// A rank's connections to its rail, and the line beside them.
pub(crate) struct Rails {
    pub(crate) line: Arc<Line>,
    pub(crate) connections: Vec<NcclRail>,
    /// Of NCCL's, of each connection.
    channels: Option<u16>,
    page: Arc<Page>,
    device: Arc<CudaDevice>,
    watched: Mutex<Watched>,
}

impl Rails {
    /// All ranks of a rail make all, so many connections of so many channels, or all fail. `core` is a communicator inside the machine.
    pub(crate) fn join(
        rail: &dyn Bootstrap,
        core: &Arc<Core>,
        (connections, channels): (usize, Option<u16>),
        at: Option<IpAddr>,
        within: Duration,
    ) -> Result<Self> {
        let end = Deadline::after(within);
        let left = || end.left();
        let line = Line::join(rail, at, left())?;
        own_gpus(&line, &core.device, left())?;
        let page = Page::new(core, rail.size()).map(Arc::new);
        let page = agree(line.group(), STEP, page, left())?;
        let comms = comms(&line, (connections, channels), &core.device, left())?;
        let new = |number| NcclRail::new(number, core, &comms, &page, &line);
        Ok(Self {
            connections: (0..connections).map(new).collect(),
            channels,
            device: Arc::clone(&core.device),
            line,
            page,
            watched: Mutex::default(),
        })
    }

    /// To be done when all ranks have made their connections, since NCCL's first kernels wait for each other.
    pub(crate) fn warm_up(&self, within: Duration) -> Result<()> {
        let end = Deadline::after(within).end();
        let group = self.line.group();
        let most = FIRST.into_iter().max().unwrap_or(0) * group.size();
        let memory = DeviceMemory::outside_of_streams(&self.device.card, most);
        let done = memory.as_ref().map_err(Clone::clone).and_then(|memory| {
            let mut all = self.connections.iter();
            all.try_fold(true, |gathers, rail| {
                Ok(rail.warm_up(memory.address(), end)? && gathers)
            })
        });
        let done = agree(group, STEP, done, within).and_then(|gathers| {
            let left = end.saturating_duration_since(Instant::now());
            let all = group.all_gather(&[u8::from(gathers)], left)?;
            let gather = all.iter().all(|word| word[..] == [1]);
            self.connections
                .iter()
                .for_each(|rail| rail.let_gather(gather));
            Ok(())
        });
        if done.is_err() {
            // What still waits keeps it.
            std::mem::forget(memory);
        }
        // Else it is freed once all ranks are through: the driver waits for kernels of others on this GPU.
        done
    }

    /// An exchange by two connections, half of it by each, which carry more together than one does: on a stream, and on another beside it.
    pub(crate) fn exchange(
        &self,
        (on, beside): (&Stream, &Stream),
        what: Exchange,
        how: (Option<u32>, Duration),
    ) -> Result<()> {
        let card = &self.device.card;
        let (lane, other) = (self.device.lane(on)?, self.device.lane(beside)?);
        let begun = CudaMark::record(card, lane.stream)?;
        other.branch(lane);
        other.wait(&begun)?;
        let [first, second] = what.halves();
        let done = self.connections[0].exchange(on, first, how);
        let done = done.and_then(|()| self.connections[1].exchange(beside, second, how));
        // Also after a failure, since a capture cannot end while another stream is forked from it.
        other.unbranch(lane);
        mark::wait(card, lane.stream, &CudaMark::record(card, other.stream)?)?;
        done
    }

    /// Whether the rail is as it should be; what was found, else, until it is stopped. NCCL may be under way for `most` at a time.
    pub(crate) fn look(&self, most: Duration) -> Option<Found> {
        let mut watched = self.watched.lock();
        if watched.stopped {
            return None;
        }
        let paces = watched.pace.iter_mut().enumerate();
        let under_way = paces.map(|(connection, pace)| pace.look(&self.page, connection));
        let seen = Seen {
            me: self.line.group().rank(),
            differs: self.page.differs().or_else(|| self.line.differs()),
            gone: self.line.gone(),
            awaited: self.line.awaited(),
            under_way: under_way.max().unwrap_or_default(),
            overdue: self.connections.iter().filter_map(NcclRail::overdue).max(),
            cut_short: self.page.is_cut_short(),
            refused: self.connections.iter().any(NcclRail::was_refused),
            failed: self.connections.iter().find_map(NcclRail::failed),
        };
        seen.verdict(most, Instant::now(), &mut watched.failing)
    }

    /// Whether NCCL's kernel ended without what it should have brought, and why is to be heard.
    pub(crate) fn is_cut_short(&self) -> bool {
        self.page.is_cut_short()
    }

    /// New connections for a new generation, behind a reset of what is inside the machine; all ranks of the rail make them, or all fail.
    pub(crate) fn renew(&self, generation: u32, within: Duration) -> Result<()> {
        let end = Deadline::after(within);
        let left = || end.left();
        // What NCCL frees may hold up the driver: better now, while no kernel waits.
        self.give_up();
        let group = self.line.group();
        group.all_gather(&[], left())?;
        let own = (self.connections.len(), self.channels);
        let made = comms(&self.line, own, &self.device, left())?;
        for rail in &self.connections {
            rail.renew(&made);
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
        self.give_up();
    }

    /// Ends NCCL's communicators.
    fn give_up(&self) {
        let comms = self.comms();
        comms.give_up();
        comms.settle();
    }

    /// NCCL's communicators of now.
    fn comms(&self) -> Arc<Bounded> {
        self.connections[0].comms()
    }
}

impl Stoppable for Rails {
    fn fault(&self) -> Option<FaultRecord> {
        self.line.fault()
    }

    /// NCCL is given up behind what stops the kernels inside the machine, which would take what it leaves for a result. But that is the driver's to
    /// do, whom another rank's communicator can hold up that waits for a kernel of this one's: so it has a while, and no more.
    fn tell(&self, record: FaultRecord) {
        let inside_stopped = {
            let mut watched = self.watched.lock();
            if std::mem::replace(&mut watched.stopped, true) {
                return;
            }
            Arc::clone(&watched.inside_stopped)
        };
        // In this order: whom NCCL fails then has heard why.
        self.line.tell_fault(record);
        self.comms().give_up_behind(Some(inside_stopped));
    }

    fn stop(&self, record: FaultRecord) {
        self.tell(record);
        self.watched.lock().inside_stopped.open();
    }
}

/// NCCL serves no ranks of one host that share a GPU: all ranks of the rail show theirs, and which host they are to NCCL, where they
/// were told to be others.
fn own_gpus(line: &Line, device: &CudaDevice, within: Duration) -> Result<()> {
    let group = line.group();
    let here: Result<_, Missing> = devices();
    let here = agree(group, STEP, here.map_err(Error::from), within)?;
    let uuid = here.get(device.info().ordinal as usize).map(|gpu| gpu.uuid);
    // NCCL's own variable, which it goes by itself.
    let host = std::env::var_os("NCCL_HOSTID").unwrap_or_default();
    let shown = [&uuid.unwrap_or_default(), host.as_encoded_bytes()].concat();
    let mut all = group.all_gather(&shown, within)?;
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
    (connections, channels): (usize, Option<u16>),
    device: &CudaDevice,
    within: Duration,
) -> Result<Arc<Bounded>> {
    let group = line.group();
    let end = Deadline::after(within);
    let left = || end.left();
    let found = Usable::find(channels);
    // Where it is missing or too old, the reason with its remedy says more than the ranks' list.
    let own = found.as_ref().err().cloned();
    let usable = agree(group, STEP, found, left()).map_err(|ranks| own.unwrap_or(ranks))?;
    let names = (0..connections).map(|_| usable.name(group, left()));
    let names = names.collect::<Result<_>>()?;
    quiet::quiet(device.card.context.ordinal());
    let place = (group.rank(), group.size());
    let made = Bounded::make(&device.card, usable, names, place, end.end());
    agree(group, STEP, made, left())
}
