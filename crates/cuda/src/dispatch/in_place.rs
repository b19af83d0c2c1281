//! A dispatch whose rows stay where they come: in a half, which stays this rank's until its next dispatch.

use super::{Arguments, Came, Parameters};
use crate::job::Job;
use brigade_device::{DispatchOutputs, Result, Shape};
use brigade_plan::dispatch::{InPlace, Load, Section};
use brigade_sync::Area;

/// Writes own rows into their places in all halves, and says which row is what. The use of the half goes on: the next dispatch ends it.
pub(super) fn dispatch(
    job: &mut Job<'_>,
    a: &Arguments,
    layout: &InPlace,
    outputs: DispatchOutputs,
) -> Result<DispatchOutputs> {
    let (core, me) = (job.core, job.core.rank());
    let of = job.begin(Area::Dispatch);
    let rows = core.window(
        of,
        0..layout.source_bytes * core.size(),
        &core.views.dispatched,
        a.call.wire_type(),
        Shape::new(&[core.size(), a.call.max_tokens, a.call.hidden])?,
    )?;
    let outputs = outputs.in_place(Some(rows));
    job.poison_all(&outputs);
    job.prepare_rows(a)?;
    if let Some(all) = &a.gathered {
        let came = Came::staged(a, Load::Ways, &all.ways);
        job.count_and_say(a, came, outputs.capacity(), 0)?;
        job.arrange(a, came, &outputs)?;
    }
    job.steps_now()?;
    let piece = a.pieces[0];
    job.push_rows(a, piece, of, job.stream)?;
    job.steps.filled_to_all(of, me, 0);
    job.steps.await_all(of, 0);
    let came = Came {
        parts: core.place(me, of, layout.parts_start),
        stride: layout.part_bytes,
        piece,
        with_own: false,
    };
    job.count_and_say(a, came, outputs.capacity(), 0)?;
    job.arrange(a, came, &outputs)?;
    if outputs.scales.is_some() || !outputs.beside.is_empty() {
        job.collect(a, came, &outputs)?;
    }
    Ok(outputs)
}

/// Where a sender finds places: parts lie behind the rows, and its rows so far before its part.
pub(super) fn to_places(parameters: &mut Parameters, layout: &InPlace) {
    but_rows(parameters, layout);
    let row = Section::Row.index();
    let sender = u64::from(parameters.rank);
    let part = layout.parts_start as u64 + sender * layout.part_bytes as u64;
    parameters.section[row] = (sender * layout.source_bytes as u64).wrapping_sub(part);
    parameters.row_bytes[row] = layout.row_bytes as u64;
    parameters.part_bytes = layout.part_bytes as u64;
    parameters.half += layout.parts_start as u64;
}

/// Where all lies that has come but rows, of which nothing is taken.
pub(super) fn but_rows(parameters: &mut Parameters, layout: &InPlace) {
    for i in 0..layout.sections.count() {
        parameters.section[i] = layout.sections.at(i, 0).start as u64;
    }
    parameters.row_bytes[Section::Row.index()] = 0;
}
