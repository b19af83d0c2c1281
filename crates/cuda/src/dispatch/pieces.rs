//! Rows through halves, a piece at a time.

use super::{Arguments, Came, Parameters, Passage, row_blocks, row_threads};
use crate::{job::Job, steps::Use};
use brigade_device::{Buffer, DispatchOutputs, Error, Result};
use brigade_plan::dispatch::{Load, Section, Sections, part_bytes};
use brigade_sync::Area;

/// Every rank's part of a half of this rank.
pub(crate) fn own_parts(job: &Job<'_>, of: Use) -> (u64, usize) {
    let half = job.core.control.layout().half_bytes(of.area);
    (
        job.core.place(job.core.rank(), of, 0),
        part_bytes(half, job.core.size()),
    )
}

impl Came {
    /// In a buffer of the call, in one piece.
    pub(super) fn staged(a: &Arguments, load: Load, staged: &Buffer) -> Self {
        Self {
            load,
            parts: staged.address(),
            stride: staged.shape().columns(),
            first: 0,
            rows: a.call.max_tokens,
            gathers: false,
        }
    }

    /// A piece, in a half.
    fn piece(job: &Job<'_>, of: Use, passage: Passage, first: usize) -> Self {
        let (parts, stride) = own_parts(job, of);
        Self {
            load: passage.load,
            parts,
            stride,
            first,
            rows: passage.rows,
            gathers: passage.gathers,
        }
    }
}

impl Job<'_> {
    /// Takes what goes ahead of all that is known. Says where it lies, and the half that it lies in and that is to be ended.
    pub(super) fn pass(&mut self, a: &Arguments, passage: Passage) -> Result<(Came, Option<Use>)> {
        let mut last = None;
        for first in passage.starts(a.call.max_tokens) {
            let of = self.piece(a, passage, first, first == 0)?;
            match &a.staged {
                Some(staged) => {
                    self.stage(a, Came::piece(self, of, passage, first), staged)?;
                    self.steps.end(of);
                    last = Some((Came::staged(a, passage.load, staged), None));
                }
                None => last = Some((Came::piece(self, of, passage, first), Some(of))),
            }
        }
        last.ok_or_else(|| Error::invalid("pieces", 0, "at least 1"))
    }

    /// Once it is known which row is what, takes each piece of the rest to where it belongs.
    pub(super) fn pass_by(
        &mut self,
        a: &Arguments,
        passage: Passage,
        outputs: &DispatchOutputs,
    ) -> Result<()> {
        for first in passage.starts(a.call.max_tokens) {
            let known = first == 0 && a.first.is_none();
            let of = self.piece(a, passage, first, known && a.gathered.is_none())?;
            let came = Came::piece(self, of, passage, first);
            if known {
                self.count_and_say(a, came, outputs.capacity(), 0)?;
            }
            self.collect(a, came, outputs)?;
            self.steps.end(of);
        }
        Ok(())
    }

    /// Writes a piece of own rows to everybody, and has everybody's here.
    fn piece(
        &mut self,
        a: &Arguments,
        passage: Passage,
        first: usize,
        prepares: bool,
    ) -> Result<Use> {
        let of = self.begin(Area::Dispatch);
        if prepares {
            self.prepare_rows(a)?;
        }
        self.push_rows(a, passage, of, first)?;
        self.steps.filled_to_all(of, a.group.rank, 0);
        self.steps.await_all(of, 0);
        Ok(of)
    }

    /// Writes a piece of own rows into this rank's parts of the halves of all.
    fn push_rows(&mut self, a: &Arguments, passage: Passage, of: Use, first: usize) -> Result<()> {
        self.steps_now()?;
        let sections = Sections::part(&a.call, passage.load, passage.rows);
        let mut parameters: Parameters = self.dispatching(a, &sections, Some(of));
        parameters.from = a.from();
        parameters.first_row = first as u32;
        parameters.piece_rows = passage.rows as u32;
        parameters.gathers = u32::from(passage.gathers);
        let (tokens, size) = (a.rows.shape().rows(), a.group.size);
        let all = match passage.gathers {
            true => tokens * size,
            false => a.ways.layout().sent.shape().len(),
        };
        // Each rank is told how many rows come, if there are none.
        let most = all.max(size).min(passage.rows * size);
        let device = &self.core.device;
        parameters.row_threads = row_threads(device, most, sections.row_bytes(Section::Row));
        let shape = row_blocks(self, most, parameters.row_threads);
        let kernel = &device.opened.kernels.dispatches.push;
        // SAFETY: own rows lie in buffers of the call, and go into the group's memory, which the core keeps.
        unsafe { kernel.launch(self.stream, shape, parameters) }.map_err(Into::into)
    }

    /// Takes a piece of everybody's rows out of this rank's half.
    fn stage(&mut self, a: &Arguments, came: Came, staged: &Buffer) -> Result<()> {
        let sections = Sections::part(&a.call, came.load, came.rows);
        let all = Sections::part(&a.call, came.load, a.call.max_tokens);
        let rows = came.rows.min(a.call.max_tokens - came.first);
        let mut list = Vec::new();
        for source in 0..a.group.size {
            let from = came.parts + (source * came.stride) as u64;
            let to = staged.address() + (source * staged.shape().columns()) as u64;
            list.push((to, from, Sections::COUNTS_BYTES));
            for i in 0..sections.count() {
                let piece = sections.at(i, rows);
                let at = all.at(i, came.first).end;
                list.push((to + at as u64, from + piece.start as u64, piece.len()));
            }
        }
        self.moves(&list)
    }
}
