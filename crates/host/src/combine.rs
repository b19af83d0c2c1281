//! Combine: every rank writes what became of rows into its part of the halves of those that they came from, a piece at a time; who has
//! all of it adds it up.

use crate::{
    comm::{HostComm, unexpected},
    dispatch::{Came, Carrier, Written, round},
    element, fifo,
    job::{Active, Job},
    memory::{mark, reading, writing},
    queue::HostQueue,
    routing::{integers, set},
};
use brigade_device::{
    Buffer, Call, CombineCall, CombineParams, CombineSum, Combined, DataType, FaultKind,
    HandleParts, Output, Plan, Result, Transport, Turn,
};
use brigade_plan::{
    combine::{Returning, queued_sections, returned},
    fifo::Queues,
    routes::{Row, Slots, rows_of_sources},
};
use brigade_sync::Area;

/// The arguments, kept for as long as the call is in flight or captured.
struct Arguments {
    call: CombineCall,
    transport: Transport,
    piece_rows: usize,
    pieces: usize,
    rows: Buffer,
    weights: Option<Buffer>,
    biases: Vec<Buffer>,
    parts: HandleParts,
    d: Buffer,
    weights_back: Option<Buffer>,
}

impl HostComm {
    pub(crate) fn run_combine(&self, turn: &Turn, p: CombineParams<'_>) -> Result<Combined> {
        let control = &self.core.control;
        let call = p.check(control.group(), control.origin())?;
        let signed = Call::Combine(call.clone());
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
        let parts = p.handle.parts().clone();
        let (tokens, k) = (p.handle.tokens(), call.k);
        let (d, new) = match &p.output {
            Output::Into(view) => (view.as_view().retain(), false),
            Output::Allocate(dtype) => (self.device.heap(*dtype, &[tokens, call.hidden])?, true),
        };
        let weights_back = match call.weights {
            true => Some(self.device.heap(DataType::F32, &[tokens, k])?),
            false => None,
        };
        let combined = Combined {
            d: new.then(|| d.clone()),
            weights: weights_back.clone(),
            plan,
        };
        let arguments = Arguments {
            call,
            transport,
            piece_rows,
            pieces,
            rows: p.rows.retain(),
            weights: p.weights.map(|w| w.retain()),
            biases: p.biases.iter().map(|b| b.retain()).collect(),
            parts,
            d,
            weights_back,
        };
        let waits = p.waits.map(|waits| waits.as_view().retain());
        let core = self.core.clone();
        let absent = core.control.absent();
        HostQueue::of(turn.stream())?.run(move || {
            core.is_still_without(absent)?;
            core.waits
                .of_call(waits.as_ref(), || {
                    core.collective(&signed, |active| combine(active, &arguments))
                })
                .inspect_err(|_| arguments.poison())
        })?;
        Ok(combined)
    }
}

impl Arguments {
    /// Marks everything that a call writes.
    fn poison(&self) {
        for out in [&self.d].into_iter().chain(&self.weights_back) {
            mark(out);
        }
    }
}

fn combine(active: &mut Active<'_>, a: &Arguments) -> Result<()> {
    let size = active.job.size();
    let going = going(a, size)?;
    let came = exchange(active, a, &going)?;
    add_up(&active.job, a, &came)
}

/// What goes back to each rank: rows, and weights with them.
struct Going {
    count: usize,
    rows: Vec<u8>,
    weights: Vec<f32>,
}

fn going(a: &Arguments, size: usize) -> Result<Vec<Going>> {
    let (call, parts) = (&a.call, &a.parts);
    let bytes = call.hidden * call.dtype.bytes();
    let mut sources = reading(&[&parts.sources], |inputs| {
        Ok(rows_of_sources(&integers(inputs[0])))
    })?;
    // Of experts that no token has nothing goes back, and whoever waits for it counts too few.
    sources.retain(|row| row.entry.is_none_or(|entry| entry < call.k));
    let optional: Vec<&Buffer> = a.weights.iter().chain(&parts.weights).collect();
    let inputs: Vec<&Buffer> = [&a.rows].into_iter().chain(optional).collect();
    reading(&inputs, |inputs| {
        let rows = inputs[0];
        let back = a.weights.as_ref().map(|_| integers::<f32>(inputs[1]));
        let held = parts
            .weights
            .as_ref()
            .map(|_| integers::<f32>(inputs[inputs.len() - 1]));
        let row = |r: &Row| &rows[r.at * bytes..][..bytes];
        let per_row = call.row_weights();
        let of_source = |source: usize| {
            let mut list: Vec<&Row> = sources.iter().filter(|r| r.source == source).collect();
            list.sort_by_key(|r| (r.position, r.entry));
            let mut going = Going {
                count: 0,
                rows: Vec::new(),
                weights: Vec::new(),
            };
            for group in list
                .chunk_by(|x, y| call.sum == CombineSum::ExpertByRank && x.position == y.position)
            {
                going.count += 1;
                if call.sum == CombineSum::ExpertByRank {
                    let held = held.as_deref().unwrap_or_default();
                    let factors: Vec<_> =
                        group.iter().map(|r| (row(r), Some(held[r.at]))).collect();
                    let mut sum = vec![0.0; call.hidden];
                    element::add(call.dtype, &factors, &mut sum);
                    let start = going.rows.len();
                    going.rows.resize(start + bytes, 0);
                    element::store(call.dtype, &sum, &mut going.rows[start..]);
                } else {
                    going.rows.extend_from_slice(row(group[0]));
                }
                let Some(back) = &back else { continue };
                match call.sum {
                    CombineSum::ExpertByRank => {
                        let start = going.weights.len();
                        going.weights.resize(start + per_row, 0.0);
                        for r in group {
                            going.weights[start + r.entry.unwrap_or(0)] = back[r.at];
                        }
                    }
                    CombineSum::Rank | CombineSum::Expert => {
                        going
                            .weights
                            .extend_from_slice(&back[group[0].at * per_row..][..per_row]);
                    }
                }
            }
            going
        };
        Ok((0..size).map(of_source).collect())
    })
}

fn exchange(active: &mut Active<'_>, a: &Arguments, going: &[Going]) -> Result<Vec<Came>> {
    let (bytes, per_row) = (a.call.hidden * a.call.dtype.bytes(), a.call.row_weights());
    if a.transport == Transport::Fifo {
        let queues = Queues::for_rows(
            &active.job.core.topology,
            &queued_sections(&a.call),
            a.call.max_rows(),
        )?;
        let counts = going.iter().map(|g| g.count).collect();
        // They come in an order that their receiver knows, so none brings its place.
        return fifo::collect(active, &queues, counts, 2, |to, part, entry| {
            let Going { rows, weights, .. } = &going[to];
            let rows = &rows[part.start * bytes..part.end * bytes];
            let weights = &weights[part.start * per_row..part.end * per_row];
            entry[queues.sections.at(0, part.len())].copy_from_slice(rows);
            entry[queues.sections.at(1, part.len())].copy_from_slice(bytemuck::cast_slice(weights));
        });
    }
    let mut came = vec![
        Came {
            rows: 0,
            sections: vec![Vec::new(); 2],
        };
        going.len()
    ];
    let by = match a.transport {
        // What passes through queues has gone.
        Transport::OneSided | Transport::Fifo | Transport::Gather | Transport::InPlace => {
            Carrier::Half(Area::Combine)
        }
        Transport::Pushed => Carrier::Pushed(Returning::new(&a.call, a.call.max_rows()).bytes()),
    };
    for piece in 0..a.pieces {
        let _span = tracing::info_span!(target: "brigade::comm", "combine", piece).entered();
        let first = piece * a.piece_rows;
        let there = |all: usize| all.saturating_sub(first).min(a.piece_rows);
        round(
            active,
            by,
            |to, out| {
                let Going {
                    count,
                    rows,
                    weights,
                } = &going[to];
                let n = there(*count);
                let sections = Returning::new(&a.call, n);
                out[..8].copy_from_slice(&(*count as u64).to_le_bytes());
                if n > 0 {
                    out[sections.rows(n)].copy_from_slice(&rows[first * bytes..][..n * bytes]);
                    let weights = &weights[first * per_row..][..n * per_row];
                    out[sections.weights(n)].copy_from_slice(bytemuck::cast_slice(weights));
                }
                Written {
                    bytes: sections.bytes(),
                    moved: n * (bytes + 4 * per_row),
                }
            },
            |from, part| {
                let all = u64::from_le_bytes(part[..8].try_into().unwrap_or_default()) as usize;
                let (came, n) = (&mut came[from], there(all));
                let sections = Returning::new(&a.call, n);
                came.rows = all;
                came.sections[0].extend_from_slice(&part[sections.rows(n)]);
                came.sections[1].extend_from_slice(&part[sections.weights(n)]);
            },
        )?;
    }
    Ok(came)
}

/// A token's part: by rank or by expert, the row that it is, and what that is multiplied by.
type Part<'a> = (usize, &'a [u8], Option<f32>);

fn add_up(job: &Job, a: &Arguments, came: &[Came]) -> Result<()> {
    let (call, parts) = (&a.call, &a.parts);
    let (k, hidden, bytes) = (call.k, call.hidden, call.hidden * call.dtype.bytes());
    let slots = reading(&[&parts.layout.slots], |inputs| {
        Ok(integers::<i32>(inputs[0]))
    })?;
    let all = Slots::new(parts.call.placement, came.len());
    let ranks: Vec<Option<usize>> = slots
        .iter()
        .map(|&slot| {
            usize::try_from(slot)
                .ok()
                .and_then(|slot| all.rank_of(slot))
        })
        .collect();
    let own_weights = match (&parts.own_weights, call.sum) {
        (Some(weights), CombineSum::Expert) => {
            reading(&[weights], |inputs| Ok(integers::<f32>(inputs[0])))?
        }
        _ => Vec::new(),
    };
    let tokens = slots.len() / k;
    let mut of_tokens: Vec<Vec<Part<'_>>> = vec![Vec::new(); tokens];
    let mut back = vec![0f32; slots.len()];
    for (from, came) in came.iter().enumerate() {
        let list = returned(call.sum, &ranks, k, from);
        if list.len() != came.rows {
            let (want, seen) = (list.len() as u64, came.rows as u64);
            return Err(job.fail(FaultKind::Mismatch, from, from, want, seen));
        }
        let weights: Vec<f32> = integers(&came.sections[1]);
        for (i, &(token, entry)) in list.iter().enumerate() {
            let row = &came.sections[0][i * bytes..][..bytes];
            of_tokens[token].push(match entry {
                Some(entry) => (entry, row, Some(own_weights[token * k + entry])),
                None => (from, row, None),
            });
            match entry {
                _ if !call.weights => {}
                Some(entry) => back[token * k + entry] = weights[i],
                None => {
                    for entry in (0..k).filter(|e| ranks[token * k + e] == Some(from)) {
                        back[token * k + entry] = weights[i * k + entry];
                    }
                }
            }
        }
    }
    let biases: Vec<&Buffer> = a.biases.iter().collect();
    writing(&a.d, &biases, |out, biases| {
        let row_bytes = hidden * call.output.bytes();
        let mut sum = vec![0.0; hidden];
        for (token, (parts, out)) in of_tokens
            .iter_mut()
            .zip(out.chunks_exact_mut(row_bytes))
            .enumerate()
        {
            parts.sort_by_key(|part| part.0);
            let biases = biases
                .iter()
                .map(|bias| (&bias[token * bytes..][..bytes], None));
            let all: Vec<_> = parts
                .iter()
                .map(|&(_, row, w)| (row, w))
                .chain(biases)
                .collect();
            element::add(call.dtype, &all, &mut sum);
            element::store(call.output, &sum, out);
        }
        Ok(())
    })?;
    match &a.weights_back {
        Some(to) => set(to, &back),
        None => Ok(()),
    }
}
