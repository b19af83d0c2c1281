//! Halves of calls that ranks make in turn, without meeting: a send, or a receive. Each is one launch that waits, works, posts and counts
//! (`kernels/in_turn.cuh`). Where a hook is asked, it is steps around a kernel that does no more than work.

use crate::{
    Kernel, Launch,
    core::Core,
    job::{Job, Kind, Made, waiting},
    lane::Lane,
    memory::{bytes_of, meet},
    steps::{Counters, Use},
};
use brigade_device::{Buffer, Call, Result, Stream};
use brigade_kernels::{
    ALL_REDUCE_THREADS, LETS_NEXT_AT_ONCE, LETS_NEXT_AT_THE_END, LowLatencyParams as Parameters,
    STATE_BEGUN,
};
use brigade_plan::absent::check;
use brigade_sync::{Area, Flag, HALVES, Half};
use std::{ops::Range, sync::Arc};

/// Threads of a block that fills a place.
pub(crate) const WIDEST: u32 = ALL_REDUCE_THREADS;

/// One of the halves of a call.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum InTurn {
    Send,
    Receive,
    /// A receive right behind its send, which may begin while that one still writes.
    ReceiveBeside,
}

/// A send that was enqueued: where, as which work of the lane, for which use, and memory that it reads.
pub(crate) struct Sent {
    lane: *const Lane,
    work: u64,
    of: Use,
    reads: Vec<Range<u64>>,
}

// SAFETY: the lane is compared, and never looked at.
unsafe impl Send for Sent {}

impl Sent {
    /// Whether a receive of that use that is being enqueued here, as this work, comes right behind it, and none of its memory is what the send
    /// still reads.
    fn is_in_front_of(
        &self,
        (lane, work): (*const Lane, u64),
        of: Use,
        memory: &[Range<u64>],
    ) -> bool {
        let apart = |mine: &Range<u64>| !self.reads.iter().any(|read| meet(mine, read));
        std::ptr::eq(self.lane, lane)
            && (self.work + 1, self.of) == (work, of)
            && memory.iter().all(apart)
    }
}

/// Shared memory that a send asks for and leaves alone. A multiprocessor seems to be given as much as the first kernel on it needs: with little, blocks
/// of a receive found no room beside it until it had ended.
const FOR_RECEIVES: u32 = 8192;

impl Core {
    /// Makes half of a call that all ranks make, without meeting them. Kernels poison what they give if the group was stopped.
    pub(crate) fn in_turn(
        self: &Arc<Self>,
        on: &Stream,
        call: &Call,
        (half, of): (InTurn, Use),
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
        let lane = self.device.lane(on)?;
        let memory: Vec<_> = buffers.iter().map(|buffer| bytes_of(buffer)).collect();
        self.enqueue(lane, kind, buffers, None, |job| {
            let sent = self.issue.lock().sent.take();
            let now = (Arc::as_ptr(lane), job.work);
            let in_front = |sent: &Sent| sent.is_in_front_of(now, of, &memory);
            // Nor has another thread enqueued something meanwhile.
            let last = job.work == lane.enqueued();
            let beside = half == InTurn::Receive && last && self.begins_beside(lane);
            job.half = match beside && sent.as_ref().is_some_and(in_front) {
                true => InTurn::ReceiveBeside,
                false => half,
            };
            work(job)?;
            if half == InTurn::Send {
                self.issue.lock().sent = Some(Sent {
                    lane: Arc::as_ptr(lane),
                    work: job.work,
                    of,
                    reads: memory,
                });
            }
            Ok(())
        })
    }

    /// Whether a receive may begin beside its send on this lane: as long as nobody else has kernels there, of which one may come between them.
    fn begins_beside(&self, lane: &Arc<Lane>) -> bool {
        self.overtakes && !self.has_hook() && lane.is_ours() && !self.is_own_lane(lane)
    }

    /// Steps stand around kernels, and ask.
    fn has_hook(&self) -> bool {
        self.memory.desk.is_some()
    }

    /// Blocks of so many threads that may wait in a half.
    pub(crate) fn in_turn_blocks(&self, threads: u32) -> u32 {
        let fit = self.exchanging.blocks() * self.in_a_place(threads);
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

    /// Threads of a send that write, at most: the first block sees to the protocol, if there is another.
    pub(crate) fn writers(&self) -> usize {
        let blocks = self.core.in_turn_blocks(WIDEST).max(2) - 1;
        (blocks * WIDEST) as usize
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
            begun: (STATE_BEGUN + HALVES * of.area.slot() + of.half.index()) as u32,
            filled: ring.arrival(of.half, 0, 0, 0, none).word.index as u32,
            pieces: ring.pieces as u32,
            ..waiting!(Parameters, self)
        }
    }

    /// Enqueues it in so many blocks, or in as many as have places. It may take these while the launch before it still has its own, if there are
    /// places for both; or while that one ends, if nobody waits for the places; or beside its own send, which waits for nobody then and so soon
    /// has none. What is behind it may begin where it waits for nobody any more.
    ///
    /// # Safety
    /// As of [`Kernel::launch`].
    pub(crate) unsafe fn launch_in_turn(
        &self,
        kernel: &Kernel<Parameters>,
        blocks: usize,
        mut parameters: Parameters,
    ) -> Result<()> {
        let core = self.core;
        let fit = core.in_turn_blocks(WIDEST);
        // The first block of a send sees to the protocol.
        let blocks = blocks.saturating_add(usize::from(self.half == InTurn::Send));
        let blocks = u32::try_from(blocks).unwrap_or(u32::MAX).clamp(1, fit);
        let both_fit = core.overtakes && 2 * blocks <= fit;
        let within = both_fit || core.config.sm_budget.is_none();
        let beside = self.half == InTurn::ReceiveBeside && within;
        let shape = Launch {
            programmatic: both_fit || beside,
            ..Launch::grid(blocks, WIDEST)
        };
        let mut shape = self.early(shape);
        if self.half == InTurn::Send {
            shape.shared_bytes = FOR_RECEIVES;
        }
        parameters.beside = beside.into();
        parameters.lets_next = match self.half {
            _ if !core.overtakes => 0,
            // Within a budget, no more than what it allows.
            InTurn::Send if !within => 0,
            InTurn::Send => LETS_NEXT_AT_ONCE,
            InTurn::Receive if both_fit => LETS_NEXT_AT_ONCE,
            InTurn::Receive | InTurn::ReceiveBeside => LETS_NEXT_AT_THE_END,
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_receive_is_beside_its_own_send_alone_and_where_it_takes_none_of_its_memory() {
        let lane = std::ptr::without_provenance::<Lane>(64);
        let other = std::ptr::without_provenance::<Lane>(128);
        let of = use_of(0, Half::of(0));
        let sent = Sent {
            lane,
            work: 7,
            of,
            reads: vec![100..200, 300..400],
        };
        let begins =
            |lane, work, of, memory: &[Range<u64>]| sent.is_in_front_of((lane, work), of, memory);
        let apart = [0..100, 200..300, 400..500];
        assert!(begins(lane, 8, of, &apart));
        assert!(!begins(other, 8, of, &apart), "another stream");
        assert!(!begins(lane, 9, of, &apart), "something between them");
        let later = use_of(0, Half::of(1));
        assert!(!begins(lane, 8, later, &apart), "another use");
        let slot = use_of(1, Half::of(0));
        assert!(!begins(lane, 8, slot, &apart), "another slot");
        for memory in [199..201, 50..101, 320..330, 0..1000] {
            assert!(!begins(lane, 8, of, &[0..10, memory.clone()]), "{memory:?}");
        }
    }
}
