//! The low-latency exchange: rows go straight to their places at the receivers, a flag behind them; who receives packs what has come.

use crate::{
    comm::{HostComm, unexpected},
    dispatch::unfilled,
    element,
    job::{Active, Job, Use},
    memory::{mark, reading, writing},
    payload, quantize,
    queue::HostQueue,
    routing::{Router, add_to, integers, set},
};
use brigade_device::{
    Buffer, Call, CombineSum, DataType, Error, LowLatencyBack, LowLatencyCombineCall,
    LowLatencyCombineParams, LowLatencyDispatchCall, LowLatencyDispatchParams, LowLatencyHeld,
    LowLatencyRows, LowLatencySent, Output, Plan, Result, Statistics, Turn, ViewMut,
};
use brigade_plan::{
    dispatch::part_bytes,
    low_latency::{Section, There, back_order, back_place, packed, ranges},
    routes::Slots,
};
use brigade_sync::{Area, Half};
use std::ops::Range;

impl HostComm {
    fn begin_exchange(&self, slot: u8, call: &Call) -> Result<(u64, Half)> {
        match self.core.plan(call)? {
            Plan::LowLatency { .. } => {
                Ok(self.core.issue.lock().exchanges[usize::from(slot)].begin())
            }
            plan => Err(unexpected(&plan)),
        }
    }

    fn receive_exchange(&self, sent: &LowLatencySent) -> Result<Half> {
        sent.check(self.core.control.origin())?;
        let mut issue = self.core.issue.lock();
        issue.exchanges[usize::from(sent.call.slot)].receive(sent.ticket)
    }

    pub(crate) fn send_low_latency(
        &self,
        turn: &Turn,
        slot: u8,
        p: LowLatencyDispatchParams<'_>,
    ) -> Result<LowLatencySent> {
        let queue = HostQueue::of(turn.stream())?;
        let group = *self.core.control.group();
        let call = p.check(slot)?;
        let tokens = p.rows.shape().rows();
        let chosen = self.device.heap(DataType::I32, &[tokens, call.k])?;
        let absent = self.core.control.absent();
        let router = Router::of(&p.routing, call.k, call.placement, group).without(absent);
        let signed = Call::LowLatencyDispatch(call.clone());
        let (ticket, half) = self.begin_exchange(slot, &signed)?;
        let sent = LowLatencySent {
            group,
            origin: self.core.control.origin(),
            ticket,
            call,
            chosen,
        };
        let (core, to, rows) = (self.core.clone(), sent.clone(), p.rows.retain());
        let weights = p.weights.map(|weights| weights.retain());
        queue.run(move || {
            core.is_still_without(absent)?;
            core.in_turn(&signed, |active| {
                let of = begin(active, slot, half)?;
                let routes = router.find()?;
                set(&to.chosen, &routes.slots)?;
                send(
                    active,
                    of,
                    (&to.call, &routes.slots),
                    &rows,
                    weights.as_ref(),
                )
            })
        })?;
        Ok(sent)
    }

    pub(crate) fn receive_low_latency(
        &self,
        turn: &Turn,
        sent: &LowLatencySent,
        to: Statistics<'_>,
    ) -> Result<LowLatencyRows> {
        let queue = HostQueue::of(turn.stream())?;
        let half = self.receive_exchange(sent)?;
        let own = Slots::new(sent.call.placement, sent.group.size).of(sent.group.rank);
        let given = LowLatencyRows::new(sent, own.len(), |t, dims| self.device.heap(t, dims))?;
        if let Some(totals) = &to.totals {
            given.check_totals(totals)?;
        }
        let Statistics { totals, waits } = to;
        let [totals, waits] = [totals, waits].map(|to| to.map(|to| to.as_view().retain()));
        let signed = Call::LowLatencyDispatch(sent.call.clone());
        let (core, to) = (self.core.clone(), given.clone());
        let absent = core.control.absent();
        queue.run(move || {
            core.is_still_without(absent)?;
            let receive = |active: &mut Active<'_>| {
                let of = arrived(active, to.sent.call.slot, half)?;
                let counts = receive(active, of, &to)?;
                match &totals {
                    Some(totals) => add_to(totals, &counts),
                    None => Ok(()),
                }
            };
            core.waits
                .of_call(waits.as_ref(), || core.in_turn(&signed, receive))
                .inspect_err(|_| to.buffers().for_each(mark))
        })?;
        Ok(given)
    }

    pub(crate) fn send_low_latency_back(
        &self,
        turn: &Turn,
        there: &LowLatencyRows,
        p: LowLatencyCombineParams<'_>,
    ) -> Result<LowLatencyBack> {
        let queue = HostQueue::of(turn.stream())?;
        let control = &self.core.control;
        let call = p.check(there, control.group(), control.origin())?;
        let signed = Call::LowLatencyCombine(call.clone());
        let (ticket, half) = self.begin_exchange(call.there.slot, &signed)?;
        let back = LowLatencyBack {
            sent: LowLatencySent {
                ticket,
                ..there.sent.clone()
            },
            call,
            weights: p.weights.map(|weights| weights.retain()),
        };
        let (core, there, of, rows) = (
            self.core.clone(),
            there.clone(),
            back.call.clone(),
            p.rows.retain(),
        );
        let absent = core.control.absent();
        queue.run(move || {
            core.is_still_without(absent)?;
            core.in_turn(&signed, |active| {
                let to = begin(active, of.there.slot, half)?;
                match &there.held {
                    Some(held) if of.sum == CombineSum::ExpertByRank => {
                        send_sums(active, to, (&of, held), &rows)
                    }
                    _ => send_back(active, to, (&of, &there), &rows),
                }
            })
        })?;
        Ok(back)
    }

    pub(crate) fn receive_low_latency_back(
        &self,
        turn: &Turn,
        back: &LowLatencyBack,
        output: Output<'_>,
        waits: Option<ViewMut<'_>>,
    ) -> Result<Option<Buffer>> {
        let queue = HostQueue::of(turn.stream())?;
        let half = self.receive_exchange(&back.sent)?;
        let dims = [back.sent.chosen.shape().rows(), back.call.hidden];
        let (d, new) = match output {
            Output::Into(view) => (view.as_view().retain(), false),
            Output::Allocate(dtype) => (self.device.heap(dtype, &dims)?, true),
        };
        let signed = Call::LowLatencyCombine(back.call.clone());
        let (core, back, to) = (self.core.clone(), back.clone(), d.clone());
        let absent = core.control.absent();
        let waits = waits.map(|waits| waits.as_view().retain());
        queue.run(move || {
            core.is_still_without(absent)?;
            let take = |active: &mut Active<'_>| {
                let of = arrived(active, back.sent.call.slot, half)?;
                add_up(active, of, &back, &to)
            };
            core.waits
                .of_call(waits.as_ref(), || core.in_turn(&signed, take))
                .inspect_err(|_| mark(&to))
        })?;
        Ok(new.then_some(d))
    }
}

/// Begins a use of a slot. What it was used for last has been packed, or is given up.
fn begin(active: &mut Active<'_>, slot: u8, half: Half) -> Result<Use> {
    let area = Area::of_slot(slot);
    for last in [Half::of(0), Half::of(1)] {
        if let Some(of) = active.open(area, last) {
            active.end(of);
        }
    }
    active.begin_half(area, half)
}

/// The use that was begun when an exchange was sent, with all that peers sent for it.
fn arrived(active: &Active<'_>, slot: u8, half: Half) -> Result<Use> {
    let of = active.open(Area::of_slot(slot), half).ok_or_else(|| {
        let got = "an exchange that was not sent";
        Error::invalid("slot", got, "one that was")
    })?;
    let job = &active.job;
    job.peers()
        .try_for_each(|from| job.await_filled(of, from, 0, from))?;
    Ok(of)
}

/// Every sender's part of a half.
fn part(job: &Job, of: Use, from: usize) -> std::ops::Range<usize> {
    let half = job.core.control.layout().half_bytes(of.area);
    let bytes = part_bytes(half, job.size());
    from * bytes..(from + 1) * bytes
}

fn send(
    active: &Active<'_>,
    of: Use,
    (call, slots): (&LowLatencyDispatchCall, &[i32]),
    rows: &Buffer,
    weights: Option<&Buffer>,
) -> Result<()> {
    let inputs: Vec<&Buffer> = [rows].into_iter().chain(weights).collect();
    reading(&inputs, |inputs| {
        let (cast, scales) = match call.cast {
            Some(cast) => quantize::cast_rows(cast, call.dtype, call.hidden, inputs[0]),
            None => (Vec::new(), Vec::new()),
        };
        let rows = if call.cast.is_some() {
            &cast
        } else {
            inputs[0]
        };
        let weights = inputs.get(1).copied().unwrap_or_default();
        let job = &active.job;
        for to in job.peers().chain([job.rank()]) {
            // SAFETY: all peers have given their credit for this use of their halves, only this rank fills this part, and it is announced
            // below.
            let out = unsafe { job.bytes_mut(to, of, part(job, of, job.rank())) };
            write(job, call, to, ([rows, &scales, weights], slots), out);
        }
        Ok(())
    })?;
    active.job.say_filled_to_all(of, active.job.rank(), 0);
    Ok(())
}

/// Writes own tokens into a receiver's part.
fn write(
    job: &Job,
    call: &LowLatencyDispatchCall,
    to: usize,
    ([rows, scales, weights], slots): ([&[u8]; 3], &[i32]),
    out: &mut [u8],
) {
    let there = There::new(call);
    let theirs = Slots::new(call.placement, job.size()).of(to);
    let tokens = slots.len() / call.k;
    out[..8].copy_from_slice(&(tokens as u64).to_le_bytes());
    let local = |&slot: &i32| match usize::try_from(slot) {
        Ok(slot) if theirs.contains(&slot) => (slot - theirs.start) as i32,
        _ => -1,
    };
    for (token, slots) in slots.chunks_exact(call.k).enumerate() {
        let experts: Vec<i32> = slots.iter().map(local).collect();
        out[there.place(Section::Experts, token)].copy_from_slice(bytemuck::cast_slice(&experts));
        if experts.iter().all(|&e| e < 0) {
            continue;
        }
        let mut moved = 0;
        for (section, from) in [
            (Section::Row, rows),
            (Section::Scales, scales),
            (Section::Weights, weights),
        ] {
            let (_, each) = there.of(section);
            out[there.place(section, token)].copy_from_slice(&from[token * each..][..each]);
            moved += each;
        }
        if to != job.rank() {
            job.count_moved(moved);
        }
    }
}

/// Packs what has come; gives the rows of each expert.
fn receive(active: &Active<'_>, of: Use, to: &LowLatencyRows) -> Result<Vec<i32>> {
    let call = &to.sent.call;
    let (there, room) = (There::new(call), call.room(to.sent.group.size));
    let job = &active.job;
    let me = job.rank();
    // SAFETY: announced by its sender for this use, which this rank ends when it uses the slot again.
    let came = |from: usize| unsafe { job.bytes(me, of, part(job, of, from)) };
    let parts: Vec<&[u8]> = (0..job.size()).map(came).collect();
    let absent = job.core.control.absent();
    let named: Vec<Vec<i32>> = parts
        .iter()
        .enumerate()
        .map(|(from, part)| {
            if absent.contains(from) {
                return Vec::new();
            }
            let tokens = u64::from_le_bytes(part[..8].try_into().unwrap_or_default()) as usize;
            let (start, each) = there.of(Section::Experts);
            integers(&part[start..start + each * tokens.min(call.max_tokens)])
        })
        .collect();
    let named: Vec<&[i32]> = named.iter().map(Vec::as_slice).collect();
    let rows = packed(&named, call.k, to.counts.shape().len());
    // A row's bytes are in so many pieces, which lie `room` places apart.
    let pack = |out: &Buffer, section: Section, pieces: usize| {
        let (_, each) = there.of(section);
        let piece = each / pieces;
        writing(out, &[], |out, _| {
            for (expert, rows) in rows.iter().enumerate() {
                for (i, &[source, token, _]) in rows.iter().enumerate() {
                    let row = &parts[source as usize][there.place(section, token as usize)];
                    for (n, from) in row.chunks_exact(piece).enumerate() {
                        let place = (expert * pieces + n) * room + i;
                        out[place * piece..][..piece].copy_from_slice(from);
                    }
                }
            }
            Ok(())
        })
    };
    pack(&to.rows, Section::Row, 1)?;
    if let (Some(scales), Some(cast)) = (&to.scales, call.cast) {
        let pieces = cast.words_by_columns(call.hidden).unwrap_or(1);
        pack(scales, Section::Scales, pieces)?;
    }
    let of_ranks: Vec<_> = rows.iter().map(|rows| ranges(rows, job.size())).collect();
    set(&to.ranges, of_ranks.concat().as_flattened())?;
    let counts: Vec<i32> = rows.iter().map(|rows| rows.len() as i32).collect();
    set(&to.counts, &counts)?;
    if let Some(held) = &to.held {
        hold(held, call, &rows, room, |source, token| {
            integers(&parts[source][there.place(Section::Weights, token)])
        })?;
    }
    writing(&to.sources, &[], |out, _| {
        for (expert, rows) in rows.iter().enumerate() {
            let bytes: &[u8] = bytemuck::cast_slice(rows);
            out[expert * room * 12..][..bytes.len()].copy_from_slice(bytes);
        }
        Ok(())
    })?;
    Ok(counts)
}

/// Keeps which row each expert of a token got, and its weight.
fn hold(
    held: &LowLatencyHeld,
    call: &LowLatencyDispatchCall,
    rows: &[Vec<[i32; 3]>],
    room: usize,
    weights_of: impl Fn(usize, usize) -> Vec<f32>,
) -> Result<()> {
    let entries = held.rows.shape().len();
    let (mut at, mut weights) = (vec![-1i32; entries], vec![0f32; entries]);
    for (expert, rows) in rows.iter().enumerate() {
        for (i, &[source, token, bits]) in rows.iter().enumerate() {
            let (source, token) = (source as usize, token as usize);
            let of_token = weights_of(source, token);
            for entry in (0..call.k).filter(|entry| bits >> entry & 1 == 1) {
                let place = (source * call.max_tokens + token) * call.k + entry;
                at[place] = (expert * room + i) as i32;
                weights[place] = of_token[entry];
            }
        }
    }
    set(&held.rows, &at)?;
    set(&held.weights, &weights)
}

/// Puts what goes back of a row into its place at a rank.
///
/// # Safety
/// All peers have given their credit for this use of their halves, and until it is announced only this rank fills the place, once.
unsafe fn put_back(job: &Job, of: Use, (to, place): (usize, Range<usize>), packed: &[u8]) {
    // SAFETY: the caller's promise.
    unsafe { job.bytes_mut(to, of, place) }.copy_from_slice(packed);
    if to != job.rank() {
        job.count_moved(packed.len());
    }
}

fn send_back(
    active: &Active<'_>,
    of: Use,
    (call, there): (&LowLatencyCombineCall, &LowLatencyRows),
    rows: &Buffer,
) -> Result<()> {
    let size = there.sent.group.size;
    let (room, each) = (call.there.room(size), call.hidden * call.dtype.bytes());
    let mut packed = Vec::new();
    let job = &active.job;
    reading(&[rows, &there.counts, &there.sources], |inputs| {
        let counts = integers::<i32>(inputs[1]);
        for (expert, count) in counts.into_iter().enumerate() {
            let sources = integers::<[i32; 3]>(&inputs[2][expert * room * 12..][..room * 12]);
            for (i, [source, token, entries]) in
                sources.into_iter().take(count as usize).enumerate()
            {
                let row = &inputs[0][(expert * room + i) * each..][..each];
                payload::pack(call, row, &mut packed);
                let (to, most) = (source as u32 as usize, call.there.max_tokens);
                if to >= size {
                    return Err(unfilled(job, job.rank(), size, source));
                }
                if token as u32 as usize >= most {
                    return Err(unfilled(job, to, most, token));
                }
                for entry in (0..call.there.k).filter(|entry| entries >> entry & 1 == 1) {
                    let place = back_place(call, token as usize, entry);
                    // SAFETY: credits came before this call; only the rank that has an expert fills its tokens' places, and it announces them
                    // below.
                    unsafe { put_back(job, of, (to, place), &packed) };
                }
            }
        }
        Ok(())
    })?;
    job.say_filled_to_all(of, job.rank(), 0);
    Ok(())
}

/// Sends back one row for each token that has some here: their sum.
fn send_sums(
    active: &Active<'_>,
    of: Use,
    (call, held): (&LowLatencyCombineCall, &LowLatencyHeld),
    rows: &Buffer,
) -> Result<()> {
    let (k, each) = (call.there.k, call.hidden * call.dtype.bytes());
    let job = &active.job;
    reading(&[rows, &held.rows, &held.weights], |inputs| {
        let (at, weights) = (integers::<i32>(inputs[1]), integers::<f32>(inputs[2]));
        let (mut sum, mut row) = (vec![0.0; call.hidden], vec![0; each]);
        let mut packed = Vec::new();
        for (i, (at, weights)) in at.chunks_exact(k).zip(weights.chunks_exact(k)).enumerate() {
            let (to, token) = (i / call.there.max_tokens, i % call.there.max_tokens);
            let Some(first) = at.iter().position(|&row| row >= 0) else {
                continue;
            };
            let parts =
                at.iter()
                    .zip(weights)
                    .filter(|(row, _)| **row >= 0)
                    .map(|(&row, &weight)| {
                        let (bytes, all) = (inputs[0], inputs[0].len() / each);
                        match row as usize {
                            at if at < all => Ok((&bytes[at * each..][..each], Some(weight))),
                            _ => Err(unfilled(job, to, all, row)),
                        }
                    });
            let parts = parts.collect::<Result<Vec<_>>>()?;
            element::add(call.dtype, &parts, &mut sum);
            element::store(call.dtype, &sum, &mut row);
            payload::pack(call, &row, &mut packed);
            let place = back_place(call, token, first);
            // SAFETY: credits came before this call; of a token's places only the rank that has the place's expert fills it, and it announces
            // them below.
            unsafe { put_back(job, of, (to, place), &packed) };
        }
        Ok(())
    })?;
    job.say_filled_to_all(of, job.rank(), 0);
    Ok(())
}

fn add_up(active: &Active<'_>, of: Use, back: &LowLatencyBack, d: &Buffer) -> Result<()> {
    let (call, k) = (&back.call, back.call.there.k);
    let job = &active.job;
    let all = Slots::new(call.there.placement, job.size());
    let inputs: Vec<&Buffer> = [&back.sent.chosen]
        .into_iter()
        .chain(&back.weights)
        .collect();
    writing(d, &inputs, |out, inputs| {
        let slots = integers::<i32>(inputs[0]);
        let weights = inputs.get(1).map(|weights| integers::<f32>(weights));
        let mut sum = vec![0.0; call.hidden];
        let each = call.hidden * d.dtype().bytes();
        for (token, out) in out.chunks_exact_mut(each).enumerate() {
            let order = back_order(call.sum, &slots[token * k..][..k], &all);
            let rows: Vec<(Vec<f32>, Option<f32>)> = order
                .into_iter()
                .map(|entry| {
                    let place = back_place(call, token, entry);
                    // SAFETY: announced for this use by whoever has the expert, and this rank ends it when it uses the slot again.
                    let row = payload::unpack(call, unsafe { job.bytes(job.rank(), of, place) });
                    (row, weights.as_ref().map(|w| w[token * k + entry]))
                })
                .collect();
            let rows: Vec<(&[u8], Option<f32>)> = rows
                .iter()
                .map(|(row, weight)| (bytemuck::cast_slice(row), *weight))
                .collect();
            element::add(DataType::F32, &rows, &mut sum);
            element::store(d.dtype(), &sum, out);
        }
        Ok(())
    })
}
