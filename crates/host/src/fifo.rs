//! Rows through queues in their receivers' memory. A rank sends and receives in one loop, and does what can be done: it never waits
//! for one thing while another could go on, so that queues which are full in both directions keep nobody.

use crate::{
    core::Pairs,
    dispatch::Came,
    job::{Active, Job},
};
use brigade_device::{FaultKind, Place, Point, Result};
use brigade_plan::fifo::{MOST_CHANNELS, Queues};
use brigade_sync::{Fifo, FifoReceiver, FifoSender, Memory, Verdict, Wait};
use std::ops::Range;

const _: () = assert!(Fifo::CHANNELS == MOST_CHANNELS);

/// What goes to whom, and what becomes of what comes.
pub(crate) trait Rows {
    /// Rows for a rank.
    fn count(&self, to: usize) -> usize;
    /// Writes some of them into an entry, section by section.
    fn write(&self, to: usize, rows: Range<usize>, entry: &mut [u8]);
    /// Rows that a rank says it sends: gives how many were expected.
    fn announced(&mut self, from: usize, rows: usize) -> usize;
    /// Takes some of them out of an entry.
    fn take(&mut self, from: usize, rows: Range<usize>, entry: &[u8]) -> Result<()>;
}

/// One queue, at the side that puts.
struct Going {
    peer: usize,
    channel: usize,
    side: FifoSender,
    rows: usize,
    /// Entries that were put, and how many there are.
    put: usize,
    entries: usize,
    /// Whether the hook was asked about the credit for the next one, and whether it is to be waited for.
    asked: Option<bool>,
    drained: bool,
}

/// One queue, at the side that takes.
struct Coming {
    peer: usize,
    channel: usize,
    side: FifoReceiver,
    taken: usize,
    /// Rows and entries, once the first one has said so.
    all: Option<(usize, usize)>,
}

/// Rows to all ranks, and from all.
pub(crate) fn exchange(
    active: &mut Active<'_>,
    queues: &Queues,
    rows: &mut dyn Rows,
) -> Result<()> {
    let Active { job, state } = active;
    own(job, queues, rows)?;
    let (layout, generation) = (job.core.control.layout(), job.generation());
    let me = job.rank();
    let ends: Vec<_> = job
        .peers()
        .flat_map(|peer| (0..queues.channels).map(move |channel| (peer, channel)))
        .collect();
    let mut going: Vec<_> = ends
        .iter()
        .map(|&(peer, channel)| {
            let count = state.queued.sent[at(peer, channel)] as u32;
            let rows = rows.count(peer);
            Going {
                peer,
                channel,
                side: layout
                    .fifo(me, peer, channel, queues.depth)
                    .sender_from(generation, count),
                rows,
                put: 0,
                entries: queues.entries(rows, channel),
                asked: None,
                drained: false,
            }
        })
        .collect();
    let mut coming: Vec<_> = ends
        .iter()
        .map(|&(peer, channel)| {
            let count = state.queued.received[at(peer, channel)] as u32;
            Coming {
                peer,
                channel,
                side: layout
                    .fifo(peer, me, channel, queues.depth)
                    .receiver_from(generation, count),
                taken: 0,
                all: None,
            }
        })
        .collect();
    let mut pending = Vec::with_capacity(2 * ends.len());
    loop {
        pending.clear();
        let mut moved = false;
        for end in &mut going {
            moved |= end.go_on(job, queues, rows, &mut pending);
        }
        for end in &mut coming {
            moved |= end.go_on(job, queues, rows, &mut pending)?;
        }
        match (pending.is_empty(), moved) {
            (true, false) => break,
            (false, false) => job.wait_any(&pending)?,
            (_, true) => {}
        }
    }
    for end in &going {
        state.queued.sent[at(end.peer, end.channel)] = end.side.count().into();
    }
    for end in &coming {
        state.queued.received[at(end.peer, end.channel)] = end.side.count().into();
    }
    Ok(())
}

/// Rows to all ranks, `counts` to each, of which `write` writes some into an entry; and what comes from all: of each row as many
/// sections as `kept` says, in the order of their sender.
pub(crate) fn collect<W: Fn(usize, Range<usize>, &mut [u8])>(
    active: &mut Active<'_>,
    queues: &Queues,
    counts: Vec<usize>,
    kept: usize,
    write: W,
) -> Result<Vec<Came>> {
    let mut rows = Sent {
        queues,
        came: vec![Came::default(); counts.len()],
        counts,
        kept,
        write,
    };
    exchange(active, queues, &mut rows)?;
    Ok(rows.came)
}

struct Sent<'a, W> {
    queues: &'a Queues,
    counts: Vec<usize>,
    kept: usize,
    write: W,
    came: Vec<Came>,
}

impl<W: Fn(usize, Range<usize>, &mut [u8])> Rows for Sent<'_, W> {
    fn count(&self, to: usize) -> usize {
        self.counts[to]
    }

    fn write(&self, to: usize, rows: Range<usize>, entry: &mut [u8]) {
        (self.write)(to, rows, entry);
    }

    fn announced(&mut self, from: usize, rows: usize) -> usize {
        // Every channel says so.
        if self.came[from].sections.is_empty() {
            let bytes = |i: usize| self.queues.sections.at(i, rows).len();
            self.came[from] = Came {
                rows,
                sections: (0..self.kept).map(|i| vec![0; bytes(i)]).collect(),
            };
        }
        self.came[from].rows
    }

    fn take(&mut self, from: usize, rows: Range<usize>, entry: &[u8]) -> Result<()> {
        let sections = &self.queues.sections;
        for (i, kept) in self.came[from].sections.iter_mut().enumerate() {
            let each = sections.at(i, 1).len();
            let to = &mut kept[each * rows.start..each * rows.end];
            to.copy_from_slice(&entry[sections.at(i, rows.len())]);
        }
        Ok(())
    }
}

/// What pairs of ranks count in their queues.
pub(crate) fn none_queued(size: usize) -> Pairs {
    Pairs::none(size * MOST_CHANNELS)
}

const fn at(peer: usize, channel: usize) -> usize {
    peer * MOST_CHANNELS + channel
}

/// Own rows for this rank itself: through an entry that nobody else has.
fn own(job: &Job, queues: &Queues, rows: &mut dyn Rows) -> Result<()> {
    let (me, all) = (job.rank(), rows.count(job.rank()));
    let expected = rows.announced(me, all);
    if expected != all {
        return Err(job.fail(FaultKind::Mismatch, me, 0, expected as u64, all as u64));
    }
    let mut entry = vec![0; queues.sections.bytes];
    for first in (0..all).step_by(queues.entry_rows) {
        let part = first..(first + queues.entry_rows).min(all);
        rows.write(me, part.clone(), &mut entry);
        rows.take(me, part, &entry)?;
    }
    Ok(())
}

impl Job {
    /// Where an entry of the queues from `from` lies in their receiver's data.
    fn entry(&self, queues: &Queues, from: usize, channel: usize, entry: usize) -> Range<usize> {
        let layout = self.core.control.layout();
        let part = brigade_plan::dispatch::part_bytes(layout.fifo_bytes(), self.size());
        let start = from * part + queues.start(channel, entry);
        let end = start + queues.entry_bytes;
        assert!(end <= layout.fifo_bytes(), "an entry behind all queues");
        layout.fifo_start() + start..layout.fifo_start() + end
    }

    fn is_there(&self, w: &Wait) -> bool {
        w.want.verdict(self.core.control.memory().load(w.word)) == Verdict::Ready
    }
}

/// An item of a queue, as hooks are told of it.
fn place(slot: usize, piece: usize, epoch: u32) -> Option<Place> {
    Some(Place {
        slot,
        piece,
        half: 0,
        epoch,
    })
}

impl Going {
    /// Puts what there is room for, a queue's worth at most. What must be waited for goes to `pending`. Gives whether anything was
    /// done.
    fn go_on(
        &mut self,
        job: &Job,
        queues: &Queues,
        rows: &dyn Rows,
        pending: &mut Vec<(Wait, usize)>,
    ) -> bool {
        let mut moved = false;
        for _ in 0..queues.depth {
            if self.put == self.entries {
                break;
            }
            let next = self.side.count().wrapping_add(1);
            if let Some(room) = self.side.room() {
                let asks = || job.step(Point::Credit, self.peer, place(job.rank(), 0, next));
                let waits = *self.asked.get_or_insert_with(asks);
                if waits && !job.is_there(&room) {
                    pending.push((room, self.channel));
                    return moved;
                }
            }
            let part = queues.rows(self.rows, self.channel, self.put);
            let n = part.len();
            let range = job.entry(queues, job.rank(), self.channel, self.side.entry());
            // SAFETY: this rank's queue at the peer: only this rank fills its entries, the peer has taken what was in this one, as
            // the credit says, and hears of what is put there below.
            let entry = unsafe { job.core.control.segments()[self.peer].0.write(range) };
            entry[..8].copy_from_slice(&(self.rows as u64).to_le_bytes());
            rows.write(self.peer, part, entry);
            job.count_moved(n * queues.sections.all_bytes());
            let announced = job.step(
                Point::Announce,
                self.peer,
                place(job.rank(), self.channel, next),
            );
            let put = self.side.put(job.flag.signature());
            if announced {
                job.post(put);
            }
            (self.put, self.asked, moved) = (self.put + 1, None, true);
        }
        if self.put == self.entries && !self.drained {
            let drained = self.side.drained();
            self.drained = job.is_there(&drained);
            match self.drained {
                true => moved = true,
                false => pending.push((drained, self.channel)),
            }
        }
        moved
    }
}

impl Coming {
    /// Takes what is there, a queue's worth at most.
    fn go_on(
        &mut self,
        job: &Job,
        queues: &Queues,
        rows: &mut dyn Rows,
        pending: &mut Vec<(Wait, usize)>,
    ) -> Result<bool> {
        let mut moved = false;
        for _ in 0..queues.depth {
            if self.all.is_some_and(|(_, entries)| self.taken == entries) {
                return Ok(moved);
            }
            let arrival = self.side.arrival_of(job.flag.signature());
            let seen = job.core.control.memory().load(arrival.word);
            match arrival.want.verdict(seen) {
                Verdict::Ready => {}
                Verdict::NotYet => {
                    pending.push((arrival, self.channel));
                    return Ok(moved);
                }
                Verdict::Mismatch => {
                    let expected = arrival.want.flag().bits();
                    let kind = FaultKind::Mismatch;
                    return Err(job.fail(kind, self.peer, self.channel, expected, seen));
                }
            }
            let next = self.side.count().wrapping_add(1);
            job.step(Point::Read, self.peer, place(self.peer, self.channel, next));
            let range = job.entry(queues, self.peer, self.channel, self.side.entry());
            // SAFETY: announced by its sender, which writes there again when it hears that this was taken.
            let entry = unsafe { job.core.control.segments()[job.rank()].0.read(range) };
            let all = match self.all {
                Some((all, _)) => all,
                None => {
                    let said = u64::from_le_bytes(entry[..8].try_into().unwrap_or_default());
                    let all = usize::try_from(said).unwrap_or(usize::MAX);
                    let expected = rows.announced(self.peer, all);
                    if all != expected {
                        let kind = FaultKind::Mismatch;
                        let expected = expected as u64;
                        return Err(job.fail(kind, self.peer, self.channel, expected, said));
                    }
                    self.all = Some((all, queues.entries(all, self.channel)));
                    all
                }
            };
            rows.take(self.peer, queues.rows(all, self.channel, self.taken), entry)?;
            let taken = self.side.taken(job.flag.signature());
            if job.step(Point::Done, self.peer, place(job.rank(), 0, next)) {
                job.post(taken);
            }
            (self.taken, moved) = (self.taken + 1, true);
        }
        Ok(moved)
    }
}
