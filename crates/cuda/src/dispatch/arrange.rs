//! What has come of a dispatch: counted, arranged, and taken to where it belongs.

use super::{
    Arguments, Came, ENTRY_THREADS, Parameters, Piece, Side, WIDEST, blocks::row_blocks_on,
    in_place, row_threads, to,
};
use crate::{
    Launch,
    job::Job,
    memory::{Pinned, Place},
};
use brigade_device::{Arrangement, Buffer, DispatchOutputs, Error, Result, Storage};
use brigade_plan::{
    dispatch::{Load, Section, Sections},
    routes::Slots,
};
use std::time::Duration;

/// The first of own rows that are taken with a piece, and how many are. They lie where the caller has them from the start, so they go with all
/// pieces but the last: whoever takes that keeps the call waiting.
fn own_share(a: &Arguments, piece: Piece) -> (u32, u32) {
    let pieces = a.pieces.iter().filter(|p| p.load == Load::Rest).count();
    if piece.load != Load::Rest || pieces < 2 {
        return (piece.first as u32, piece.rows as u32);
    }
    let share = a.call.max_tokens.div_ceil(pieces - 1);
    ((piece.first / piece.rows * share) as u32, share as u32)
}

impl Job<'_> {
    /// What kernels are told of rows that have come.
    fn received(&self, a: &Arguments, came: Came) -> Parameters {
        let piece = came.piece;
        let sections = Sections::part(&a.call, piece.load, piece.rows);
        let mut parameters = self.dispatching(a, &sections, None);
        (parameters.parts, parameters.parts_stride) = (came.parts, came.stride as u64);
        (parameters.first_row, parameters.piece_rows) = (piece.first as u32, piece.rows as u32);
        (parameters.own_first, parameters.own_rows) = own_share(a, piece);
        parameters.gathers = u32::from(piece.gathers);
        parameters.known = u32::from(piece.load == Load::Rest);
        if !came.with_own {
            parameters.from = a.from();
        }
        if let Some(layout) = a.stays(piece).filter(|_| !came.with_own) {
            in_place::but_rows(&mut parameters, layout);
        }
        parameters.came = parameters.section;
        let slots = Slots::new(a.call.placement, a.group.size).of(a.group.rank);
        parameters.own_slots = slots.len() as u32;
        let [received, offsets, counts] = a.ways.counted().map(Buffer::address);
        (parameters.received, parameters.offsets) = (received, offsets);
        parameters.counts = counts;
        parameters
    }

    /// Counts what has come, and says where it goes; or, with an address for it, how much room that takes. Of rows that are known, whether
    /// as many come.
    pub(super) fn count_and_say(
        &mut self,
        a: &Arguments,
        came: Came,
        capacity: usize,
        room: u64,
    ) -> Result<()> {
        self.steps_now()?;
        let mut parameters = self.received(a, came);
        (parameters.capacity, parameters.room) =
            (u32::try_from(capacity).unwrap_or(u32::MAX), room);
        // Rows that are known come once more, behind what says which they are.
        if came.piece.load != Load::Rest || a.call.again {
            parameters.totals = a.totals.as_ref().map_or(0, Buffer::address);
        }
        let kernels = &self.core.device.opened.kernels.dispatches;
        if parameters.own_slots > 0 && came.piece.load != Load::Rest {
            let shape = self.entry_blocks(a, parameters.own_slots as usize);
            // SAFETY: what has come lies in the group's memory or in a buffer of the call, and counts go into one.
            unsafe { self.follow(self.stream, &kernels.count, shape, parameters) }?;
        }
        // SAFETY: as above.
        unsafe { self.follow(self.stream, &kernels.place, Launch::grid(1, 32), parameters) }
    }

    /// Blocks that go through entries, and no more of them than `most`.
    fn entry_blocks(&self, a: &Arguments, most: usize) -> Launch {
        let sms = a.work().budgeted_sms(self, Side::Takes);
        Launch::grid(most.clamp(1, sms) as u32, ENTRY_THREADS)
    }

    /// The same, with room for just so many rows if there is none yet.
    pub(super) fn say(
        &mut self,
        a: &Arguments,
        came: Came,
        given: Option<DispatchOutputs>,
    ) -> Result<DispatchOutputs> {
        if let Some(outputs) = given {
            self.count_and_say(a, came, outputs.capacity(), 0)?;
            return Ok(outputs);
        }
        let room = self.room(a, came)?;
        let outputs = a.allocate(&self.core.device, self.lane, room)?;
        self.poison_all(&outputs);
        Ok(outputs)
    }

    /// Waits until all rows have come, and says how much room they take.
    fn room(&mut self, a: &Arguments, came: Came) -> Result<usize> {
        /// How much later than its kernels, which end by themselves, a host gives up.
        const LATER: Duration = Duration::from_secs(5);
        let said = Pinned::new(&self.core.device.card, 8)?;
        self.count_and_say(a, came, 0, said.address())?;
        let config = &self.core.config;
        let within = config.first_deadline.max(config.deadline) + LATER;
        let ended = self.mark().and_then(|mark| mark.reached(within));
        if !matches!(ended, Ok(true)) {
            // The kernel may write yet: nobody else has the page before.
            Place::Pinned(&said).used_on(self.lane);
        }
        let ended = ended?;
        self.core.usable()?;
        if !ended {
            return Err(Error::Group {
                step: "dispatch",
                what: "this rank's GPU has not come to the end of it".into(),
            });
        }
        // SAFETY: eight bytes of pinned memory that a kernel wrote, which has ended.
        let room = unsafe { std::ptr::read_volatile(said.address() as *const u64) };
        Ok(usize::try_from(room).unwrap_or(usize::MAX))
    }

    /// What kernels are told of rows that go to where they belong.
    fn belonging(&self, a: &Arguments, came: Came, outputs: &DispatchOutputs) -> Parameters {
        let parts = &outputs.parts;
        let (first_id, no_id) = a.called();
        Parameters {
            first_id,
            no_id,
            sources: parts.sources.address(),
            ids: parts.ids.address(),
            weights: parts.weights.as_ref().map_or(0, Buffer::address),
            capacity: u32::try_from(outputs.capacity()).unwrap_or(u32::MAX),
            rows_of: parts.rows_of.as_ref().map_or(0, Buffer::address),
            to: to(outputs),
            scale_words: a.scale_words(),
            ..self.received(a, came)
        }
    }

    /// Says which row is what, of rows of which that is not known.
    pub(super) fn arrange(
        &mut self,
        a: &Arguments,
        came: Came,
        outputs: &DispatchOutputs,
    ) -> Result<()> {
        self.steps_now()?;
        let capacity = outputs.capacity();
        if capacity == 0 || came.piece.load == Load::Rest {
            return Ok(());
        }
        let parameters = self.belonging(a, came, outputs);
        let kernels = &self.core.device.opened.kernels;
        let shape = match a.call.arrangement {
            Arrangement::ByExpert { .. } => {
                let entries = a.group.size * a.call.max_tokens * a.call.k;
                self.entry_blocks(a, entries.div_ceil(ENTRY_THREADS as usize))
            }
            _ => {
                let sms = a.work().budgeted_sms(self, Side::Takes);
                row_blocks_on(self, sms, (capacity, 1), WIDEST)
            }
        };
        let kernel = &kernels.dispatches.arrange;
        // SAFETY: what has come lies in the group's memory or in a buffer of the call, and goes into buffers of the call.
        unsafe { self.follow(self.stream, kernel, shape, parameters) }
    }

    /// Takes rows to where they belong.
    pub(super) fn collect(
        &mut self,
        a: &Arguments,
        came: Came,
        outputs: &DispatchOutputs,
    ) -> Result<()> {
        self.steps_now()?;
        let capacity = outputs.capacity();
        if capacity == 0 {
            return Ok(());
        }
        let mut parameters = self.belonging(a, came, outputs);
        let row_bytes = Sections::part(&a.call, came.piece.load, 1).row_bytes(Section::Row);
        // By expert each goes to all of its own.
        let rows = capacity.min(came.piece.rows * a.group.size);
        parameters.row_threads = row_threads(self.core, rows, row_bytes);
        let sms = a.work().sms(self, Side::Takes);
        let shape = row_blocks_on(self, sms, (rows, parameters.row_threads), WIDEST);
        let kernel = &self.core.device.opened.kernels.dispatches.collect;
        // SAFETY: as above.
        unsafe { self.follow(self.stream, kernel, shape, parameters) }
    }
}
