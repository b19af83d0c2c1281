//! Halves of calls that ranks make in turn, without meeting: a send, or a receive. Each is one launch that waits, works, posts and counts
//! (`kernels/in_turn.cuh`). Where a hook is asked, it is steps around a kernel that does no more than work.

use crate::{
    Kernel, Launch,
    core::Core,
    job::{Job, Kind, Made, waiting},
    steps::{Counters, Use},
};
use brigade_device::{Buffer, Call, Device, Result, Stream};
use brigade_kernels::{
    ALL_REDUCE_THREADS, LETS_NEXT_AT_ONCE, LETS_NEXT_AT_THE_END, LowLatencyParams as Parameters,
};
use brigade_plan::absent::check;
use brigade_sync::{Area, Flag, HALVES, Half};
use std::sync::Arc;

/// Threads of a block that fills a place.
pub(crate) const WIDEST: u32 = ALL_REDUCE_THREADS;

impl Core {
    /// Makes half of a call that all ranks make, without meeting them. Kernels poison what they give if the group was stopped.
    pub(crate) fn in_turn(
        self: &Arc<Self>,
        on: &Stream,
        call: &Call,
        buffers: &[&Buffer],
        work: impl FnOnce(&mut Job<'_>) -> Result<()>,
    ) -> Result<()> {
        let absent = self.control.absent();
        check(absent, call)?;
        let kind = Kind {
            operation: call.operation(),
            signature: absent.sign(call.signature()),
            made: Made::InTurn,
            within: None,
        };
        self.enqueue(self.device.lane(on)?, kind, buffers, None, work)
    }

    /// Steps stand around kernels, and ask.
    fn has_hook(&self) -> bool {
        self.memory.desk.is_some()
    }

    /// Blocks of so many threads that may wait in a half.
    pub(crate) fn in_turn_blocks(&self, threads: u32) -> u32 {
        let sms = self.device.info().sms.into();
        let places = match self.size() {
            // Nobody to wait for.
            1 => sms,
            _ => self.exchanging.blocks(),
        };
        let fit = places * self.in_a_place(threads);
        // Blocks go to whichever multiprocessor has room: to stay within a budget, there are no more of them than it has.
        let budget = self.config.sm_budget.map_or(fit, u32::from);
        fit.min(budget).max(1)
    }
}

impl Job<'_> {
    /// Begins a use of a slot, once every peer has taken what this half had last; `work` is one launch that writes to them, behind which they
    /// are told. What the slot was used for last has been packed, or is given up.
    pub(crate) fn send_in_turn(
        &mut self,
        of: Use,
        work: impl FnOnce(&Self) -> Result<()>,
    ) -> Result<()> {
        if !self.core.has_hook() {
            return work(self);
        }
        self.steps.start();
        self.steps.let_go_of_area(of.area);
        self.steps.begin(of);
        self.steps_now()?;
        work(self)?;
        self.steps.filled_to_all(of, self.core.rank(), 0);
        self.steps.finish();
        Ok(())
    }

    /// `work` is one launch that takes all that peers have sent for the use that was begun when this rank sent.
    pub(crate) fn receive_in_turn(
        &mut self,
        of: Use,
        work: impl FnOnce(&Self) -> Result<()>,
    ) -> Result<()> {
        if self.core.has_hook() {
            self.steps.start();
            self.steps.await_all(of, 0);
            self.steps.finish();
            self.steps_now()?;
        }
        work(self)
    }

    /// What the launch is told of its half.
    pub(crate) fn half_in_turn(&self, of: Use) -> Parameters {
        let core = self.core;
        let ring = core.control.layout().ring(of.area);
        let other = Half::of(of.half.index() as u32 + 1);
        let halves = [of.half, other];
        let none = Flag::from_bits(0);
        Parameters {
            waits: self.waits,
            signature: self.kind.signature,
            alone: u32::from(!core.has_hook()),
            counters: halves.map(|half| Counters::uses(Use { half, ..of }) as u32),
            credits: halves.map(|half| ring.credit(half, 0, none).word.index as u32),
            filled: ring.arrival(of.half, 0, 0, 0, none).word.index as u32,
            pieces: ring.pieces as u32,
            ..waiting!(Parameters, self)
        }
    }

    /// Enqueues it in so many blocks, or in as many as have places, for so many granules. It may take these while the launch before it still has
    /// its own, if there are places for both; or while that one ends, if granules are few and nobody waits for the places.
    ///
    /// # Safety
    /// As of [`Kernel::launch`].
    pub(crate) unsafe fn launch_in_turn(
        &self,
        kernel: &Kernel<Parameters>,
        (blocks, threads, granules): (usize, u32, usize),
        mut parameters: Parameters,
    ) -> Result<()> {
        let core = self.core;
        let fit = core.in_turn_blocks(threads);
        let blocks = u32::try_from(blocks).unwrap_or(u32::MAX).clamp(1, fit);
        let both_fit = core.overtakes && 2 * blocks <= fit;
        let shape = Launch {
            programmatic: both_fit,
            ..Launch::grid(blocks, threads)
        };
        // Beyond the group's places no longer than a launch takes to begin: all along, halves take longer.
        let shape = self.early_of_few(shape, granules);
        parameters.lets_next = match (both_fit, shape.programmatic) {
            (true, _) => LETS_NEXT_AT_ONCE,
            (false, true) => LETS_NEXT_AT_THE_END,
            (false, false) => 0,
        };
        // SAFETY: the caller's promise.
        unsafe { kernel.launch(self.stream, shape, parameters) }.map_err(Into::into)
    }
}

/// The use of a slot's half.
pub(crate) fn use_of(slot: u8, half: Half) -> Use {
    let area = Area::of_slot(slot);
    Use { area, half }
}

// Credits are given for both.
const _: () = assert!(HALVES == 2);
