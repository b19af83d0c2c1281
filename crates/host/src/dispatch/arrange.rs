//! What has come of a dispatch, to where the arrangement wants it.

use super::{Arguments, Came, check_counts, unfilled};
use crate::{
    job::Job,
    memory::{reading, writing},
    routing::{add_to, integers, set},
};
use brigade_device::{Buffer, DispatchOutputs, FaultKind, HandleParts, Result, Ways};
use brigade_plan::{
    dispatch::{Section, Sections},
    routes::{Arranged, Coming, Slots, rows_of_sources},
};

/// Puts what has come where it belongs.
pub(super) fn arrange(
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
                let received = integers::<i32>(inputs[1]);
                check_counts(job, received.into_iter().map(|n| n as usize), came)?;
                let rows = rows_of_sources(&integers(inputs[0]));
                let each = Sections::dispatch(call, 1).row_bytes(Section::Row);
                for row in &rows {
                    let from = came.get(row.source);
                    let there = from.map_or(0, |c| {
                        let rows = c.sections[of(Section::Row)].len() / each;
                        rows.min(c.rows)
                    });
                    if row.position >= there {
                        let peer = from.map_or(job.rank(), |_| row.source);
                        return Err(unfilled(job, peer, there, row.position as i32));
                    }
                }
                Ok(Arranged {
                    rows,
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
            let n = cast.words_by_columns(call.hidden).unwrap_or(0);
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
    if let Some(totals) = &a.totals {
        add_to(totals, &arranged.counts)?;
    }
    Ok(outputs)
}

/// Says which row is what.
fn keep(parts: &HandleParts, arranged: &Arranged, came: &[Came]) -> Result<()> {
    let (call, group) = (&parts.call, parts.group);
    let lists = |section: Section| came.iter().map(move |c| &c.sections[section.index()][..]);
    let (tokens, slots) = (lists(Section::Token), lists(Section::Slots));
    let coming = tokens.zip(slots).map(|(tokens, slots)| Coming {
        tokens: integers(tokens),
        slots: integers(slots),
    });
    let coming: Vec<Coming> = coming.collect();
    let weights: Vec<Vec<f32>> = match parts.weights {
        Some(_) => lists(Section::Weights).map(integers).collect(),
        None => Vec::new(),
    };
    let called = Slots::new(call.placement, group.size).called(group.rank, call.received_ids);
    let room = parts.sources.shape().rows();
    let told = arranged.told(call, room, called, &coming, &weights);
    let received: Vec<i32> = came.iter().map(|c| c.rows as i32).collect();
    set(&parts.received, &received)?;
    set(&parts.sources, &told.sources)?;
    set(&parts.offsets, &arranged.offsets)?;
    set(&parts.ids, &told.ids)?;
    set(&parts.counts, &arranged.counts)?;
    if let Some(to) = &parts.rows_of {
        set(to, &told.rows_of)?;
    }
    match &parts.weights {
        Some(to) => set(to, &told.weights),
        None => Ok(()),
    }
}
