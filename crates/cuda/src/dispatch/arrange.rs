//! What has come of a dispatch: counted, arranged, and taken to where it belongs.

use super::{Arguments, Came, ENTRY_THREADS, Parameters, row_blocks, row_threads, to};
use crate::{Launch, job::Job, memory::Pinned};
use brigade_device::{Arrangement, Buffer, DispatchOutputs, Error, Result, Storage};
use brigade_plan::{
    dispatch::{Load, Section, Sections},
    routes::Slots,
};
use std::time::Duration;

impl Job<'_> {
    /// What kernels are told of rows that have come.
    fn received(&self, a: &Arguments, came: Came) -> Parameters {
        let sections = Sections::part(&a.call, came.load, came.rows);
        let mut parameters = self.dispatching(a, &sections, None);
        (parameters.parts, parameters.parts_stride) = (came.parts, came.stride as u64);
        (parameters.first_row, parameters.piece_rows) = (came.first as u32, came.rows as u32);
        parameters.gathers = u32::from(came.gathers);
        parameters.known = u32::from(came.load == Load::Rest);
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
        let kernels = &self.core.device.opened.kernels.dispatches;
        if parameters.own_slots > 0 && came.load != Load::Rest {
            let shape = Launch::grid(parameters.own_slots, ENTRY_THREADS);
            // SAFETY: what has come lies in the group's memory or in a buffer of the call, and counts go into one.
            unsafe { kernels.count.launch(self.stream, shape, parameters) }.map_err(Error::from)?;
        }
        // SAFETY: as above.
        unsafe {
            kernels
                .place
                .launch(self.stream, Launch::grid(1, 32), parameters)
        }
        .map_err(Into::into)
    }

    /// Waits until all rows have come, and says how much room they take.
    pub(super) fn room(&mut self, a: &Arguments, came: Came) -> Result<usize> {
        /// How much later than its kernels, which end by themselves, a host gives up.
        const LATER: Duration = Duration::from_secs(5);
        let said = Pinned::new(&self.core.device.card, 8)?;
        self.count_and_say(a, came, 0, said.address())?;
        let config = &self.core.config;
        let ended = self
            .mark()?
            .reached(config.first_deadline.max(config.deadline) + LATER)?;
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

    /// Says which row is what, and takes rows to where they belong.
    pub(super) fn collect(
        &mut self,
        a: &Arguments,
        came: Came,
        outputs: &DispatchOutputs,
    ) -> Result<()> {
        self.steps_now()?;
        let parts = &outputs.parts;
        let capacity = outputs.capacity();
        if capacity == 0 {
            return Ok(());
        }
        let mut parameters = self.received(a, came);
        parameters.sources = parts.sources.address();
        parameters.ids = parts.ids.address();
        parameters.weights = parts.weights.as_ref().map_or(0, Buffer::address);
        parameters.capacity = u32::try_from(capacity).unwrap_or(u32::MAX);
        parameters.rows_of = parts.rows_of.as_ref().map_or(0, Buffer::address);
        parameters.to = to(outputs);
        parameters.scale_words = a.scale_words();
        let core = self.core;
        let kernels = &core.device.opened.kernels;
        if came.load != Load::Rest {
            let shape = match a.call.arrangement {
                Arrangement::ByExpert { .. } => {
                    Launch::grid(parameters.own_slots.max(1), ENTRY_THREADS)
                }
                _ => kernels.shape(capacity.div_ceil(256)),
            };
            // SAFETY: what has come lies in the group's memory or in a buffer of the call, and goes into buffers of the call.
            unsafe {
                kernels
                    .dispatches
                    .arrange
                    .launch(self.stream, shape, parameters)
            }
            .map_err(Error::from)?;
        }
        if came.load == Load::Ways {
            return Ok(());
        }
        let row_bytes = Sections::part(&a.call, came.load, 1).row_bytes(Section::Row);
        parameters.row_threads = row_threads(&core.device, capacity, row_bytes);
        let shape = row_blocks(self, capacity, parameters.row_threads);
        // SAFETY: as above.
        unsafe {
            kernels
                .dispatches
                .collect
                .launch(self.stream, shape, parameters)
        }
        .map_err(Into::into)
    }
}
