//! Dispatch: every rank writes its rows into its part of the receivers' halves, a piece at a time; who has all of them puts them
//! where the arrangement wants them.

use crate::{
    comm::{HostComm, unexpected},
    device::HostDevice,
    fifo,
    job::{Active, Job, Use},
    memory::{poison, reading, writing},
    pushed, quantize,
    queue::HostQueue,
    routing::{Router, integers, set},
};
use brigade_device::{
    Buffer, Call, DataType, DispatchCall, DispatchOutputs, DispatchParams, Dispatched, Error,
    Expected, FaultKind, Group, HandleParts, Plan, Result, Route, Transport, Turn, Ways,
};
use brigade_plan::{
    dispatch::{Section, Sections, part_bytes, sections},
    fifo::Queues,
    routes::{Arranged, Slots, rows_of_sources},
};
use brigade_sync::Area;
use parking_lot::Mutex;
use std::sync::Arc;

/// The arguments, kept for as long as the call is in flight or captured.
struct Arguments {
    call: DispatchCall,
    group: Group,
    generation: u8,
    transport: Transport,
    piece_rows: usize,
    pieces: usize,
    rows: Buffer,
    beside: Vec<Buffer>,
    beside_rows: Vec<(DataType, usize)>,
    /// What finds the ways of rows, where they are new.
    router: Option<Router>,
    ways: Ways,
    device: Arc<HostDevice>,
}

impl HostComm {
    pub(crate) fn run_dispatch(&self, turn: &Turn, p: DispatchParams<'_>) -> Result<Dispatched> {
        let group = *self.core.control.group();
        let generation = self.core.control.generation();
        let absent = self.core.control.absent();
        let call = p.check(&group, generation)?;
        let signed = Call::Dispatch(call.clone());
        let plan = self.core.plan(&signed)?;
        let Plan::Experts {
            transport,
            piece_rows,
            pieces,
            ..
        } = plan
        else {
            return Err(unexpected(&plan));
        };
        let queue = HostQueue::of(turn.stream())?;
        let device = &self.device;
        let new = |dtype, dims: &[usize]| device.heap(dtype, dims);
        let (router, ways) = match &p.route {
            Route::Experts { routing, weights } => {
                let router = Router::of(routing, call.k, call.placement, group).without(absent);
                let own = (router.allocate(device)?, weights.map(|w| w.retain()));
                let slots = Slots::new(call.placement, group.size).of(group.rank).len();
                let expected = Expected::new(&call, (group.size, slots), own, new)?;
                (Some(router), Ways::New(Box::new(expected)))
            }
            Route::Again(handle) => (None, Ways::Again(Box::new(handle.parts().clone()))),
        };
        let arguments = Arguments {
            transport,
            piece_rows,
            pieces,
            group,
            generation,
            rows: p.rows.retain(),
            beside: p.beside.iter().map(|v| v.retain()).collect(),
            beside_rows: p
                .beside
                .iter()
                .map(|v| (v.dtype(), v.shape().row_len()))
                .collect(),
            router,
            ways,
            device: Arc::clone(device),
            call,
        };
        let given = match arguments.ways.room(&arguments.call, group.size) {
            Some(room) => Some(arguments.allocate(room)?),
            None => {
                queue.refuse_capture("a dispatch without max_recv")?;
                None
            }
        };
        // What is not known before the rows have come.
        let found = Arc::new(Mutex::new(given.clone()));
        let (core, to) = (Arc::clone(&self.core), Arc::clone(&found));
        queue.run(move || {
            core.is_still_without(absent)?;
            core.collective(&signed, |active| {
                let outputs = dispatch(active, &arguments, given.as_ref())?;
                *to.lock() = Some(outputs);
                Ok(())
            })
            .inspect_err(|_| given.iter().for_each(poison_all))
        })?;
        let outputs = found.lock().take().ok_or_else(|| unexpected(&plan))?;
        Ok(outputs.dispatched(plan))
    }
}

impl Arguments {
    fn carrier(&self, area: Area) -> Carrier {
        match self.transport {
            // What passes through queues has gone.
            Transport::OneSided | Transport::Fifo => Carrier::Half(area),
            Transport::Pushed => {
                Carrier::Pushed(Sections::dispatch(&self.call, self.call.max_tokens).bytes)
            }
        }
    }

    /// Buffers for so many rows.
    fn allocate(&self, room: usize) -> Result<DispatchOutputs> {
        let (call, group) = (&self.call, self.group);
        DispatchOutputs::new(
            call,
            (group, self.generation),
            room,
            &self.beside_rows,
            &self.ways,
            |dtype, dims| self.device.heap(dtype, dims),
        )
    }
}

/// Marks everything that a call writes.
fn poison_all(outputs: &DispatchOutputs) {
    for out in outputs.poisoned() {
        // Whoever keeps the buffer busy writes to it anyhow.
        let _ = writing(out, &[], |bytes, _| {
            poison(out.dtype(), bytes);
            Ok(())
        });
    }
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
    let (sent, slots, weights) = match &a.ways {
        Ways::New(expected) => {
            let router = a.router.as_ref().ok_or(Error::Closed)?;
            let routes = router.route(&expected.layout)?;
            let lists = (0..size).map(|r| routes.to(r).to_vec()).collect();
            (lists, routes.slots, expected.own_weights.as_ref())
        }
        Ways::Again(parts) => {
            let layout = &parts.layout;
            let lists = reading(&[&layout.sent, &layout.sent_offsets], |inputs| {
                let (sent, offsets) = (integers::<i32>(inputs[0]), integers::<i32>(inputs[1]));
                let of = |w: &[i32]| sent[w[0] as usize..w[1] as usize].to_vec();
                Ok(offsets.windows(2).map(of).collect::<Vec<Vec<i32>>>())
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
        exchange(active, a, &sent, &own)
    })?;
    arrange(&active.job, a, given, &came)
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
        if self.call.again {
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
) -> Result<Vec<Came>> {
    if a.transport == Transport::Fifo {
        let config = &active.job.core.config;
        let queues = Queues::new(config.fifo_bytes, a.group.size, &sections(&a.call))?;
        let counts = sent.iter().map(Vec::len).collect();
        let kept = queues.sections.count();
        return fifo::collect(active, &queues, counts, kept, |to, rows, entry| {
            for (i, &token) in sent[to][rows].iter().enumerate() {
                own.write(to, token, i, &queues.sections, entry);
            }
        });
    }
    let lists: Vec<usize> = (0..Sections::dispatch(&a.call, 0).count()).collect();
    let mut came = vec![
        Came {
            rows: 0,
            sections: vec![Vec::new(); lists.len()],
        };
        a.group.size
    ];
    let by = a.carrier(Area::Dispatch);
    for piece in 0..a.pieces {
        let _span = tracing::info_span!(target: "brigade::comm", "dispatch", piece).entered();
        round(
            active,
            by,
            |to, out| {
                let list = &sent[to];
                let first = (piece * a.piece_rows).min(list.len());
                let rows = &list[first..(first + a.piece_rows).min(list.len())];
                let sections = Sections::dispatch(&a.call, rows.len());
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
                let all = u64::from_le_bytes(part[..8].try_into().unwrap_or_default()) as usize;
                let rows = all.saturating_sub(piece * a.piece_rows).min(a.piece_rows);
                let sections = Sections::dispatch(&a.call, rows);
                came[from].rows = all;
                for (section, of) in came[from].sections.iter_mut().zip(&lists) {
                    section.extend_from_slice(&part[sections.at(*of, rows)]);
                }
            },
        )?;
    }
    Ok(came)
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

/// Puts what has come where it belongs.
fn arrange(
    job: &Job,
    a: &Arguments,
    given: Option<&DispatchOutputs>,
    came: &[Came],
) -> Result<DispatchOutputs> {
    let call = &a.call;
    let of = |section: Section| section.index();
    let arranged = match &a.ways {
        Ways::New(_) => {
            let slots: Vec<Vec<i32>> = came
                .iter()
                .map(|c| integers(&c.sections[of(Section::Slots)]))
                .collect();
            let slots: Vec<&[i32]> = slots.iter().map(Vec::as_slice).collect();
            let own = Slots::new(call.placement, a.group.size)
                .of(a.group.rank)
                .len();
            Arranged::new(call.arrangement, call.max_tokens, &slots, call.k, own)
        }
        Ways::Again(parts) => {
            let lists = [
                &parts.sources,
                &parts.received,
                &parts.offsets,
                &parts.counts,
            ];
            reading(&lists, |inputs| {
                for (from, (&want, came)) in integers::<i32>(inputs[1]).iter().zip(came).enumerate()
                {
                    if came.rows != want as usize {
                        let (want, seen) = (want as u64, came.rows as u64);
                        return Err(job.fail(FaultKind::Mismatch, from, from, want, seen));
                    }
                }
                Ok(Arranged {
                    rows: rows_of_sources(&integers(inputs[0])),
                    offsets: integers(inputs[2]),
                    counts: integers(inputs[3]),
                })
            })?
        }
    };
    let room = arranged.room();
    let outputs = match given {
        Some(given) => {
            let have = given.capacity();
            if room > have {
                let (have, room) = (have as u64, room as u64);
                return Err(job.fail(FaultKind::Overflow, job.rank(), 0, have, room));
            }
            given.clone()
        }
        None => a.allocate(room)?,
    };
    let scatter = |to: &Buffer, section: Section| {
        writing(to, &[], |out, _| {
            let each = Sections::dispatch(call, 1).row_bytes(section);
            for row in &arranged.rows {
                let from = &came[row.source].sections[of(section)][row.position * each..][..each];
                out[row.at * each..][..each].copy_from_slice(from);
            }
            Ok(())
        })
    };
    scatter(&outputs.rows, Section::Row)?;
    for (i, to) in outputs.beside.iter().enumerate() {
        scatter(to, Section::Beside(i))?;
    }
    match (&outputs.scales, call.cast) {
        (Some(to), Some(cast)) if cast.column_major => {
            // A scale, or four of them that are packed.
            let each = 4;
            let n = Sections::dispatch(call, 1).row_bytes(Section::Scales) / each;
            let rows = outputs.capacity();
            writing(to, &[], |out, _| {
                for row in &arranged.rows {
                    let from =
                        &came[row.source].sections[of(Section::Scales)][row.position * n * each..];
                    for (block, scale) in from.chunks_exact(each).take(n).enumerate() {
                        out[(block * rows + row.at) * each..][..each].copy_from_slice(scale);
                    }
                }
                Ok(())
            })?;
        }
        (Some(to), _) => scatter(to, Section::Scales)?,
        (None, _) => {}
    }
    if matches!(a.ways, Ways::New(_)) {
        keep(&outputs.parts, &arranged, came)?;
    }
    Ok(outputs)
}

/// Says which row is what.
fn keep(parts: &HandleParts, arranged: &Arranged, came: &[Came]) -> Result<()> {
    let k = parts.call.k;
    let rows = parts.sources.shape().rows();
    let per_row = parts.ids.shape().len() / rows.max(1);
    let (mut sources, mut ids, mut weights) = (
        vec![-1; rows * 4],
        vec![-1; rows * per_row],
        vec![0f32; rows * per_row],
    );
    let lists = |section: Section| came.iter().map(move |c| &c.sections[section.index()][..]);
    let tokens: Vec<Vec<i32>> = lists(Section::Token).map(integers).collect();
    let slots: Vec<Vec<i32>> = lists(Section::Slots).map(integers).collect();
    let their_weights: Vec<Vec<f32>> = lists(Section::Weights).map(integers).collect();
    for row in &arranged.rows {
        let entry = row.entry.map_or(-1, |e| e as i32);
        let token = tokens[row.source][row.position];
        let source = [row.source as i32, token, entry, row.position as i32];
        sources[row.at * 4..][..4].copy_from_slice(&source);
        let of = match row.entry {
            Some(entry) => row.position * k + entry..row.position * k + entry + 1,
            None => row.position * k..(row.position + 1) * k,
        };
        ids[row.at * per_row..][..per_row].copy_from_slice(&slots[row.source][of.clone()]);
        if parts.weights.is_some() {
            weights[row.at * per_row..][..per_row].copy_from_slice(&their_weights[row.source][of]);
        }
    }
    let received: Vec<i32> = came.iter().map(|c| c.rows as i32).collect();
    set(&parts.received, &received)?;
    set(&parts.sources, &sources)?;
    set(&parts.offsets, &arranged.offsets)?;
    set(&parts.ids, &ids)?;
    set(&parts.counts, &arranged.counts)?;
    if let Some(to) = &parts.rows_of {
        let mut rows_of = vec![-1; to.shape().len()];
        for row in &arranged.rows {
            let token = row.source * parts.call.max_tokens + row.position;
            rows_of[token * k + row.entry.unwrap_or(0)] = row.at as i32;
        }
        set(to, &rows_of)?;
    }
    match &parts.weights {
        Some(to) => set(to, &weights),
        None => Ok(()),
    }
}
