//! A dispatch whose rows stay where they come: in a half, which stays this rank's until its next dispatch.

use super::{Arguments, Came, Parameters, pieces::Piece};
use crate::{job::Job, steps::Use};
use brigade_device::{DispatchOutputs, Launch, Result, Shape};
use brigade_plan::dispatch::{InPlace, Load, Section};
use brigade_sync::Area;

/// From so many tokens on, what says which row is what goes ahead of the rows, and is looked through while they are on their way.
const AHEAD: usize = 1025;

/// What goes at once, of a load of so many tokens. Not within a budget, of which who looks through it would have a part.
pub(super) fn pieces(load: Load, tokens: usize, sm_budget: Option<u16>) -> Vec<Piece> {
    let one = |load| Piece::all(load, (tokens, tokens), false);
    let ahead = tokens >= AHEAD && sm_budget.is_none();
    match load {
        Load::Whole if ahead => one(Load::Ways).chain(one(Load::Rest)).collect(),
        other => one(other).collect(),
    }
}

impl Came {
    /// Behind rows that stay in place.
    pub(super) fn behind_rows(job: &Job<'_>, of: Use, layout: &InPlace, piece: Piece) -> Self {
        Self {
            parts: job.core.place(job.core.rank(), of, layout.parts_start),
            stride: layout.part_bytes,
            piece,
            with_own: false,
        }
    }
}

impl Job<'_> {
    /// Rows have come to where they stay, or will.
    pub(super) fn leave_in_place(
        &mut self,
        a: &Arguments,
        of: Use,
        layout: &InPlace,
        outputs: DispatchOutputs,
    ) -> Result<DispatchOutputs> {
        let core = self.core;
        let rows = core.window(
            of,
            0..layout.source_bytes * core.size(),
            &core.views.dispatched,
            a.call.wire_type(),
            Shape::new(&[core.size(), a.call.max_tokens, a.call.hidden])?,
        )?;
        Ok(outputs.in_place(Some(rows)))
    }

    /// Pushes what belongs to rows, and stores those where they stay: in a half whose use begins with steps before.
    pub(super) fn push_in_place(
        &mut self,
        launch: Launch,
        a: &Arguments,
        layout: &InPlace,
        outputs: DispatchOutputs,
    ) -> Result<DispatchOutputs> {
        self.steps.let_go_of_area(Area::Dispatch);
        let of = self.core.issue.lock().next(Area::Dispatch);
        self.steps.begin_at_once(of);
        let outputs = self.leave_in_place(a, of, layout, outputs)?;
        self.push_dispatch(launch, a, &outputs, Some(of))?;
        Ok(outputs)
    }
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
