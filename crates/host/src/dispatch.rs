//! Dispatch: every rank writes its rows into its part of the receivers' halves, a piece at a time; who has all of them puts them
//! where the arrangement wants them.

mod arrange;
mod gather;
mod gathered;

use crate::{
    comm::{HostComm, unexpected},
    device::HostDevice,
    fifo,
    job::{Active, Job, Use},
    memory::{mark, reading},
    pushed, quantize,
    queue::HostQueue,
    routing::{Router, integers},
    window::Window,
};
use brigade_device::{
    Buffer, Call, DataType, DispatchCall, DispatchOutputs, DispatchParams, Dispatched, Error,
    Expected, FaultKind, Group, Origin, Plan, Result, Route, Routing, Transport, Turn, Ways,
    taken_back,
};
use brigade_plan::{
    dispatch::{Load, Section, Sections, part_bytes, sections},
    fifo::Queues,
    routes::Slots,
};
use brigade_sync::Area;
use gathered::Gathered;
use parking_lot::Mutex;
use std::{ops::Range, sync::Arc};

/// The arguments, kept for as long as the call is in flight or captured.
struct Arguments {
    call: DispatchCall,
    group: Group,
    origin: Origin,
    transport: Transport,
    piece_rows: usize,
    rows: Buffer,
    beside: Vec<Buffer>,
    beside_rows: Vec<(DataType, usize)>,
    /// What finds the ways of rows, where they are new.
    router: Option<Router>,
    /// Whose the ids are that it has, if they are those of all ranks.
    gathered: Option<Gathered>,
    ways: Ways,
    /// What slots get is added to it.
    totals: Option<Buffer>,
    device: Arc<HostDevice>,
}

impl HostComm {
    pub(crate) fn run_dispatch(&self, turn: &Turn, p: DispatchParams<'_>) -> Result<Dispatched> {
        let group = *self.core.control.group();
        let origin = self.core.control.origin();
        let absent = self.core.control.absent();
        let call = p.check(&group, origin)?;
        let signed = Call::Dispatch(call.clone());
        let plan = self.core.plan(&signed)?;
        let Plan::Experts {
            transport,
            piece_rows,
            ..
        } = plan
        else {
            return Err(unexpected(&plan));
        };
        let queue = HostQueue::of(turn.stream())?;
        let device = &self.device;
        let new = |dtype, dims: &[usize]| device.heap(dtype, dims);
        let tokens = p.rows.shape().rows();
        let ways_of = |routing: &Routing<'_>, weights| {
            let router = Router::of(routing, call.k, call.placement, group).without(absent);
            let own = (router.allocate(device, tokens)?, weights);
            let slots = Slots::new(call.placement, group.size).of(group.rank).len();
            let expected = Expected::new(&call, (group.size, slots), own, new)?;
            Ok::<_, Error>((Some(router), Ways::New(Box::new(expected))))
        };
        let (router, ways) = match &p.route {
            Route::Experts { routing, weights } => ways_of(routing, weights.map(|w| w.retain()))?,
            Route::Gathered(all) => {
                let own = match call.weights {
                    true => Some(new(DataType::F32, &[tokens, call.k])?),
                    false => None,
                };
                ways_of(&all.routing(), own)?
            }
            Route::Again(handle) => (None, Ways::Again(Box::new(handle.parts().clone()))),
        };
        let gathered = match &p.route {
            Route::Gathered(all) => Some(Gathered::of(all)),
            Route::Experts { .. } | Route::Again(_) => None,
        };
        if let Some(totals) = &p.totals {
            ways.check_totals(totals)?;
        }
        let arguments = Arguments {
            transport,
            piece_rows,
            group,
            origin,
            rows: p.rows.retain(),
            beside: p.beside.iter().map(|v| v.retain()).collect(),
            beside_rows: p
                .beside
                .iter()
                .map(|v| (v.dtype(), v.shape().row_len()))
                .collect(),
            router,
            gathered,
            ways,
            totals: p.totals.map(|totals| totals.as_view().retain()),
            device: Arc::clone(device),
            call,
        };
        self.check_stays("rows", &arguments.rows)?;
        for buffer in &arguments.beside {
            self.check_stays("beside", buffer)?;
        }
        let given = match arguments.ways.room(&arguments.call, group.size) {
            Some(room) => Some(arguments.allocate(room)?),
            None => {
                queue.refuse_capture("a dispatch without max_recv")?;
                None
            }
        };
        // Whoever has rows of an earlier one in place has them no longer.
        let in_place = given.as_ref().and_then(|to| to.parts.in_place.as_ref());
        let in_place = in_place.map(|rows| Arc::downgrade(rows.storage()));
        self.core.issue.lock().in_place = in_place;
        if turn.stream().capturing() && matches!(arguments.ways, Ways::New(_)) {
            // Nobody may take what the handle says for known before a launch has found it out.
            given.iter().for_each(poison_all);
        }
        let waits = p.waits.map(|waits| waits.as_view().retain());
        // What is not known before the rows have come.
        let found = Arc::new(Mutex::new(given.clone()));
        let (core, to) = (Arc::clone(&self.core), Arc::clone(&found));
        queue.run(move || {
            core.is_still_without(absent)?;
            core.waits
                .of_call(waits.as_ref(), || {
                    core.collective(&signed, |active| {
                        let outputs = dispatch(active, &arguments, given.as_ref())?;
                        *to.lock() = Some(outputs);
                        Ok(())
                    })
                })
                .inspect_err(|_| given.iter().for_each(poison_all))
        })?;
        let outputs = found.lock().take().ok_or_else(|| unexpected(&plan))?;
        Ok(outputs.dispatched(plan))
    }

    /// Refuses what a dispatch takes back from the caller, where it is to be sent: once the call has begun, others would wait for it.
    fn check_stays(&self, field: &'static str, buffer: &Buffer) -> Result<()> {
        let storage = buffer.storage();
        let gathered = storage.downcast::<Window>().is_some_and(|window| {
            let mut gates = self.core.gates.iter();
            gates.any(|gates| window.is_of(&gates.all))
        });
        let in_place = self.core.issue.lock().in_place.clone();
        let in_place = in_place.and_then(|rows| rows.upgrade());
        match gathered || in_place.is_some_and(|rows| Arc::ptr_eq(&rows, storage)) {
            true => Err(taken_back(field)),
            false => Ok(()),
        }
    }
}

impl Arguments {
    fn carrier(&self, area: Area) -> Carrier {
        match self.transport {
            // What passes through queues has gone.
            Transport::OneSided | Transport::Fifo | Transport::Gather | Transport::InPlace => {
                Carrier::Half(area)
            }
            Transport::Pushed => {
                Carrier::Pushed(Sections::dispatch(&self.call, self.call.max_tokens).bytes)
            }
        }
    }

    /// Buffers for so many rows.
    fn allocate(&self, room: usize) -> Result<DispatchOutputs> {
        let (call, group) = (&self.call, self.group);
        let outputs = DispatchOutputs::new(
            call,
            (group, self.origin),
            room,
            &self.beside_rows,
            &self.ways,
            None,
            |dtype, dims| self.device.heap(dtype, dims),
        )?;
        // Rows are copied out here; that they are those which go back is the same.
        let rows = (self.transport == Transport::InPlace).then(|| outputs.rows.clone());
        Ok(outputs.in_place(rows))
    }
}

/// Marks everything that a call writes.
fn poison_all(outputs: &DispatchOutputs) {
    outputs.poisoned().for_each(mark);
}

/// What came from one rank, section by section.
#[derive(Clone, Default)]
pub(crate) struct Came {
    /// How many rows are to come.
    pub(crate) rows: usize,
    /// What came of them so far.
    pub(crate) sections: Vec<Vec<u8>>,
}

fn dispatch(
    active: &mut Active<'_>,
    a: &Arguments,
    given: Option<&DispatchOutputs>,
) -> Result<DispatchOutputs> {
    let size = a.group.size;
    let mut came = vec![
        Came {
            rows: 0,
            sections: vec![Vec::new(); sections(&a.call).len()],
        };
        size
    ];
    let (sent, slots, weights) = match &a.ways {
        Ways::New(expected) => {
            let router = a.router.as_ref().ok_or(Error::Closed)?;
            let routes = match &a.gathered {
                Some(all) => all.route(&active.job, a, (router, expected), &mut came)?,
                None => router.route(&expected.layout)?,
            };
            let lists = (0..size).map(|r| routes.to(r).to_vec()).collect();
            (lists, routes.slots, expected.own_weights.as_ref())
        }
        Ways::Again(parts) => {
            let layout = &parts.layout;
            let (job, tokens) = (&active.job, a.rows.shape().rows());
            let lists = reading(&[&layout.sent, &layout.sent_offsets], |inputs| {
                let (sent, offsets) = (integers::<i32>(inputs[0]), integers::<i32>(inputs[1]));
                let own = |token: &i32| usize::try_from(*token).is_ok_and(|t| t < tokens);
                let of = |(to, w): (usize, &[i32])| {
                    let list = sent.get(w[0] as u32 as usize..w[1] as u32 as usize);
                    let list = list.filter(|list| list.iter().all(own));
                    list.map(<[i32]>::to_vec)
                        .ok_or_else(|| unfilled(job, to, tokens, w[1]))
                };
                let lists = offsets.windows(2).enumerate().map(of);
                lists.collect::<Result<Vec<Vec<i32>>>>()
            })?;
            (lists, Vec::new(), None)
        }
    };
    let beside: Vec<&Buffer> = a.beside.iter().collect();
    let inputs: Vec<&Buffer> = [&a.rows].into_iter().chain(weights).chain(beside).collect();
    let came = reading(&inputs, |inputs| {
        let (rows, scales) = match a.call.cast {
            Some(cast) => quantize::cast_rows(cast, a.call.dtype, a.call.hidden, inputs[0]),
            None => (Vec::new(), Vec::new()),
        };
        let own = Own {
            call: &a.call,
            all: Slots::new(a.call.placement, size),
            rows: if a.call.cast.is_some() {
                &rows
            } else {
                inputs[0]
            },
            scales: &scales,
            slots: &slots,
            weights: weights.map_or(&[][..], |_| inputs[1]),
            beside: &inputs[1 + usize::from(weights.is_some())..],
        };
        exchange(active, a, &sent, &own, came)
    })?;
    arrange::arrange(&active.job, a, given, &came)
}

/// A rank's own rows, and what belongs to them.
struct Own<'a> {
    call: &'a DispatchCall,
    all: Slots,
    rows: &'a [u8],
    scales: &'a [u8],
    slots: &'a [i32],
    weights: &'a [u8],
    beside: &'a [&'a [u8]],
}

impl Own<'_> {
    /// Writes what a receiver gets of one token, as row `i` of a piece.
    fn write(&self, to: usize, token: i32, i: usize, sections: &Sections, out: &mut [u8]) {
        let mut put = |section, bytes: &[u8]| {
            let each = sections.row_bytes(section);
            let start = sections.of(section, i).end;
            out[start..start + each].copy_from_slice(&bytes[..each]);
        };
        let at = |section| token as usize * sections.row_bytes(section);
        put(Section::Row, &self.rows[at(Section::Row)..]);
        put(Section::Scales, &self.scales[at(Section::Scales)..]);
        for (n, bytes) in self.beside.iter().enumerate() {
            put(Section::Beside(n), &bytes[at(Section::Beside(n))..]);
        }
        if sections.row_bytes(Section::Slots) == 0 {
            return;
        }
        put(Section::Token, &token.to_le_bytes());
        let theirs = self.all.of(to);
        let local = |&slot: &i32| match usize::try_from(slot) {
            Ok(slot) if theirs.contains(&slot) => (slot - theirs.start) as i32,
            _ => -1,
        };
        let k = self.call.k;
        let slots: Vec<i32> = self.slots[token as usize * k..][..k]
            .iter()
            .map(local)
            .collect();
        put(Section::Slots, bytemuck::cast_slice(&slots));
        if self.call.weights {
            let own = integers::<f32>(&self.weights[at(Section::Weights)..][..4 * k]);
            let weights: Vec<f32> = slots
                .iter()
                .zip(own)
                .map(|(&slot, w)| if slot < 0 { 0.0 } else { w })
                .collect();
            put(Section::Weights, bytemuck::cast_slice(&weights));
        }
    }
}

/// Writes own rows to their receivers, and takes what comes.
fn exchange(
    active: &mut Active<'_>,
    a: &Arguments,
    sent: &[Vec<i32>],
    own: &Own<'_>,
    mut came: Vec<Came>,
) -> Result<Vec<Came>> {
    if a.transport == Transport::Fifo {
        let queues = Queues::for_rows(
            &active.job.core.topology,
            &sections(&a.call),
            a.call.max_tokens,
        )?;
        let counts = sent.iter().map(Vec::len).collect();
        let kept = queues.sections.count();
        return fifo::collect(active, &queues, counts, kept, |to, rows, entry| {
            for (i, &token) in sent[to][rows].iter().enumerate() {
                own.write(to, token, i, &queues.sections, entry);
            }
        });
    }
    let expected: Vec<usize> = came.iter().map(|c| c.rows).collect();
    if a.transport == Transport::Gather {
        gather::gather(active, a, sent, own, &mut came)?;
    } else {
        let cut = (Load::of(&a.call), a.piece_rows);
        in_pieces(active, a, cut, sent, own, &mut came)?;
    }
    if a.gathered.is_some() {
        check_counts(&active.job, expected, &came)?;
    }
    Ok(came)
}

/// What a handle, or rows that were received, say of a peer cannot be: no call has filled them, since its graph was never launched, or
/// somebody wrote there.
pub(crate) fn unfilled(job: &Job, peer: usize, want: usize, seen: i32) -> Error {
    let (want, seen) = (want as u64, u64::from(seen as u32));
    job.fail(FaultKind::Mismatch, peer, peer, want, seen)
}

/// As many rows must come as were expected.
fn check_counts(job: &Job, expected: impl IntoIterator<Item = usize>, came: &[Came]) -> Result<()> {
    for (from, (want, came)) in expected.into_iter().zip(came).enumerate() {
        if came.rows != want {
            let (want, seen) = (want as u64, came.rows as u64);
            return Err(job.fail(FaultKind::Mismatch, from, from, want, seen));
        }
    }
    Ok(())
}

/// Writes to every receiver what is for it, so many rows at a time.
fn in_pieces(
    active: &mut Active<'_>,
    a: &Arguments,
    (load, piece_rows): (Load, usize),
    sent: &[Vec<i32>],
    own: &Own<'_>,
    came: &mut [Came],
) -> Result<()> {
    let by = a.carrier(Area::Dispatch);
    for first in starts(a.call.max_tokens, piece_rows) {
        let _span = tracing::info_span!(target: "brigade::comm", "dispatch", first).entered();
        round(
            active,
            by,
            |to, out| {
                let list = &sent[to];
                let rows = &list[cut(first, piece_rows, list.len())];
                let sections = Sections::part(&a.call, load, rows.len());
                out[..8].copy_from_slice(&(list.len() as u64).to_le_bytes());
                for (i, &token) in rows.iter().enumerate() {
                    own.write(to, token, i, &sections, out);
                }
                Written {
                    bytes: sections.bytes,
                    moved: rows.len() * sections.all_bytes(),
                }
            },
            |from, part| {
                let all = count_of(part);
                let rows = cut(first, piece_rows, all).len();
                let sections = Sections::part(&a.call, load, rows);
                came[from].rows = all;
                for (i, section) in came[from].sections.iter_mut().enumerate() {
                    section.extend_from_slice(&part[sections.at(i, rows)]);
                }
            },
        )?;
    }
    Ok(())
}

/// Where pieces of so many rows begin: one at least.
fn starts(rows: usize, piece_rows: usize) -> impl Iterator<Item = usize> {
    (0..rows.max(1)).step_by(piece_rows.max(1))
}

/// Rows of a piece, of as many as there are.
fn cut(first: usize, piece_rows: usize, all: usize) -> Range<usize> {
    first.min(all)..(first + piece_rows).min(all)
}

/// Rows that a sender says it has for this rank.
fn count_of(part: &[u8]) -> usize {
    u64::from_le_bytes(part[..8].try_into().unwrap_or_default()) as usize
}

/// What carries parts to all ranks.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Carrier {
    /// A half of an area, of which every rank has its part.
    Half(Area),
    /// An exchange that pushes, of parts of at most so many bytes.
    Pushed(usize),
}

/// What was written of a part.
pub(crate) struct Written {
    /// How far, from its beginning.
    pub(crate) bytes: usize,
    /// Bytes of rows.
    pub(crate) moved: usize,
}

/// Every rank has a part at each: `write` fills this rank's at every receiver, and `take` reads what every sender has written for this
/// rank.
pub(crate) fn round(
    active: &mut Active<'_>,
    by: Carrier,
    mut write: impl FnMut(usize, &mut [u8]) -> Written,
    mut take: impl FnMut(usize, &[u8]),
) -> Result<()> {
    let area = match by {
        Carrier::Half(area) => area,
        Carrier::Pushed(most) => return pushed::parts(active, most, write, take),
    };
    let of: Use = active.begin(area)?;
    let job = &active.job;
    let (me, size) = (job.rank(), job.size());
    let half = job.core.control.layout().half_bytes(area);
    let bytes = part_bytes(half, size);
    let part = |from: usize| from * bytes..(from + 1) * bytes;
    for to in job.peers().chain([me]) {
        // SAFETY: all peers have given their credit for this use of their halves, only this rank fills this part, and it is announced below.
        let out = unsafe { job.bytes_mut(to, of, part(me)) };
        let written = write(to, out);
        if to != me {
            job.count_moved(written.moved);
            job.say_filled(to, of, me, 0);
        }
    }
    for from in [me].into_iter().chain(job.peers()) {
        if from != me {
            job.await_filled(of, from, 0, from)?;
        }
        // SAFETY: announced by its sender for this use, which this rank has not ended.
        take(from, unsafe { job.bytes(me, of, part(from)) });
    }
    active.end(of);
    Ok(())
}
