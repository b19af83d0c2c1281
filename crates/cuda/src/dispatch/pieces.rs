//! Rows through halves, a piece at a time.

use super::{
    Arguments, Came, Parameters, Side, WIDEST, in_place, row_blocks, row_blocks_alone,
    row_blocks_on, row_threads,
};
use crate::{job::Job, relay::Pieces, steps::Use};
use brigade_device::{Buffer, DispatchOutputs, Error, Result};
use brigade_plan::dispatch::{InPlace, Load, Section, Sections, part_bytes};
use brigade_sync::Area;
use cudarc::driver::sys;

/// Every rank's part of a half of this rank.
pub(crate) fn own_parts(job: &Job<'_>, of: Use) -> (u64, usize) {
    let half = job.core.control.layout().half_bytes(of.area);
    (
        job.core.place(job.core.rank(), of, 0),
        part_bytes(half, job.core.size()),
    )
}

/// What goes through a half at once.
#[derive(Clone, Copy)]
pub(super) struct Piece {
    pub(super) load: Load,
    /// The first of a sender's rows for a rank, or of its tokens.
    pub(super) first: usize,
    /// Most rows of a sender.
    pub(super) rows: usize,
    /// Whether all ranks get all rows.
    pub(super) gathers: bool,
}

impl Piece {
    /// All of a load, so many rows at a time: one piece at least, with room for one at least, since counts go with the first.
    pub(super) fn all(
        load: Load,
        (most, rows): (usize, usize),
        gathers: bool,
    ) -> impl Iterator<Item = Self> {
        let rows = rows.max(1);
        (0..most.max(1)).step_by(rows).map(move |first| Self {
            load,
            first,
            rows,
            gathers,
        })
    }
}

impl Came {
    /// In a buffer of the call, in one piece.
    pub(super) fn staged(a: &Arguments, load: Load, staged: &Buffer) -> Self {
        Self {
            parts: staged.address(),
            stride: staged.shape().columns(),
            piece: Piece {
                load,
                first: 0,
                rows: a.call.max_tokens,
                gathers: false,
            },
            with_own: true,
        }
    }

    /// In a half, but for what own rows have where the caller has them.
    fn of(job: &Job<'_>, a: &Arguments, of: Use, piece: Piece) -> Self {
        if let Some(layout) = a.stays(piece) {
            return Self::behind_rows(job, of, layout, piece);
        }
        let (parts, stride) = own_parts(job, of);
        Self {
            parts,
            stride,
            piece,
            with_own: false,
        }
    }
}

/// A dispatch through halves, and what comes out of it once that is known.
pub(super) struct Passing<'a> {
    pub(super) a: &'a Arguments,
    pub(super) outputs: Option<DispatchOutputs>,
}

impl Passing<'_> {
    /// Says how many rows come, and which row is what.
    fn say(&mut self, job: &mut Job<'_>, came: Came) -> Result<()> {
        let outputs = job.say(self.a, came, self.outputs.take())?;
        job.arrange(self.a, came, &outputs)?;
        self.outputs = Some(outputs);
        Ok(())
    }
}

impl Pieces for Passing<'_> {
    const AREA: Area = Area::Dispatch;

    fn count(&self) -> usize {
        self.a.pieces.len()
    }

    fn begins_with_little(&self) -> bool {
        self.a.pieces.first().is_some_and(|p| p.load == Load::Ways)
    }

    fn stays(&self, piece: usize) -> bool {
        self.a.stays(self.a.pieces[piece]).is_some()
    }

    fn prepare(&mut self, job: &mut Job<'_>) -> Result<()> {
        job.prepare_rows(self.a)?;
        match &self.a.gathered {
            Some(all) => self.say(job, Came::staged(self.a, Load::Ways, &all.ways)),
            None => Ok(()),
        }
    }

    fn push(&self, job: &Job<'_>, of: Use, piece: usize, on: sys::CUstream) -> Result<()> {
        job.push_rows(self.a, self.a.pieces[piece], of, on)
    }

    /// What says which row is what comes first; the rows come with it, or else behind it.
    fn take(&mut self, job: &mut Job<'_>, of: Use, piece: usize) -> Result<()> {
        let (a, piece) = (self.a, self.a.pieces[piece]);
        let came = Came::of(job, a, of, piece);
        match (piece.load, &a.staged) {
            (Load::Ways, Some(staged)) => {
                job.stage(a, came, staged)?;
                if piece.first + piece.rows >= a.call.max_tokens {
                    self.say(job, Came::staged(a, Load::Ways, staged))?;
                }
                return Ok(());
            }
            // There is nothing else in it.
            (Load::Ways, None) => return self.say(job, came),
            (Load::Whole, _) => self.say(job, came)?,
            (Load::Rest, _) => {
                let first = piece.first == 0 && (a.call.again || a.call.gathered);
                if let Some(outputs) = self.outputs.as_ref().filter(|_| first) {
                    job.count_and_say(a, came, outputs.capacity(), 0)?;
                }
            }
        }
        let mut outputs = self
            .outputs
            .take()
            .ok_or_else(|| Error::invalid("route", "again", "room for its rows"))?;
        let stays = a.stays(piece);
        if let Some(layout) = stays {
            outputs = job.leave_in_place(a, of, layout, outputs)?;
            job.poison_all(&outputs);
        }
        if stays.is_none() || outputs.scales.is_some() || !outputs.beside.is_empty() {
            job.collect(a, came, &outputs)?;
        }
        self.outputs = Some(outputs);
        Ok(())
    }
}

impl Arguments {
    /// How the half of a piece lies, if its rows stay there.
    pub(super) fn stays(&self, piece: Piece) -> Option<&InPlace> {
        self.in_place.as_ref().filter(|_| piece.load != Load::Ways)
    }
}

impl Job<'_> {
    /// Writes a piece of own rows into this rank's parts of the halves of all.
    pub(super) fn push_rows(
        &self,
        a: &Arguments,
        piece: Piece,
        of: Use,
        on: sys::CUstream,
    ) -> Result<()> {
        let sections = Sections::part(&a.call, piece.load, piece.rows);
        let mut parameters: Parameters = self.dispatching(a, &sections, Some(of));
        if let Some(layout) = a.stays(piece) {
            in_place::to_places(&mut parameters, layout);
        }
        parameters.from = a.from();
        parameters.first_row = piece.first as u32;
        parameters.piece_rows = piece.rows as u32;
        parameters.gathers = u32::from(piece.gathers);
        let (tokens, size) = (a.rows.shape().rows(), a.group.size);
        let all = match piece.gathers {
            true => tokens * size,
            false => a.ways.layout().sent.shape().len(),
        };
        // Each rank is told how many rows come, if there are none.
        let most = all.max(size).min(piece.rows * size);
        parameters.row_threads = match piece.load {
            // One for each entry.
            Load::Ways => a.call.k.next_power_of_two().min(32) as u32,
            Load::Rest | Load::Whole => {
                row_threads(self.core, most, sections.row_bytes(Section::Row))
            }
        };
        let kernels = &self.core.device.opened.kernels.dispatches;
        let shape = match a.pieces.len() {
            0 | 1 => row_blocks(self, most, parameters.row_threads, WIDEST),
            _ => {
                let rows = (most, parameters.row_threads);
                match piece.load {
                    // Before there is anything to take.
                    Load::Ways if piece.first == 0 => {
                        row_blocks_on(self, a.work().sms(self, Side::Takes), rows, WIDEST)
                    }
                    _ => {
                        row_blocks_alone(kernels.push_alone, rows, a.work().sms(self, Side::Writes))
                    }
                }
            }
        };
        // SAFETY: own rows lie in buffers of the call, and go into the group's memory, which the core keeps.
        unsafe { self.follow(on, &kernels.push, shape, parameters) }
    }

    /// Takes a piece of everybody's rows out of this rank's half.
    fn stage(&mut self, a: &Arguments, came: Came, staged: &Buffer) -> Result<()> {
        let Piece {
            load, first, rows, ..
        } = came.piece;
        let sections = Sections::part(&a.call, load, rows);
        let all = Sections::part(&a.call, load, a.call.max_tokens);
        let rows = rows.min(a.call.max_tokens - first);
        let mut list = Vec::new();
        for source in 0..a.group.size {
            let from = came.parts + (source * came.stride) as u64;
            let to = staged.address() + (source * staged.shape().columns()) as u64;
            list.push((to, from, Sections::COUNTS_BYTES));
            for i in 0..sections.count() {
                let piece = sections.at(i, rows);
                let at = all.at(i, first).end;
                list.push((to + at as u64, from + piece.start as u64, piece.len()));
            }
        }
        self.moves(&list)
    }
}
