//! A call that is being enqueued: on the caller's stream, and on two beside it.

use crate::{
    Kernel, Launch,
    core::Core,
    driver::failed,
    in_turn::InTurn,
    inject::Asker,
    lane::Lane,
    mark::{self, CudaMark},
    steps::{Batch, Steps, Use},
    types,
};
use brigade_device::{Buffer, DataType, Operation, Result, Storage};
use brigade_kernels::{
    MADE_IN_TURN, MADE_PAIRWISE, MADE_TOGETHER, MOST_MOVES, MOST_POISONED, MOST_STEPS, MoveParams,
    Parameters, STEP_THREADS, StepsParams,
};
use brigade_sync::{Area, Flag};
use cudarc::driver::sys;
use smallvec::SmallVec;
use std::{cell::Cell, sync::Arc, time::Duration};

/// A stream beside the caller's.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Side {
    /// For copies by copy engines.
    Mover,
    /// For steps, which may wait.
    Waiter,
}

/// Who makes a call.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u32)]
pub(crate) enum Made {
    /// Two ranks.
    Pairwise = MADE_PAIRWISE as u32,
    /// All ranks, and each waits for something of all others.
    Together = MADE_TOGETHER as u32,
    /// All ranks, and they do not meet: a peer that is in a later call together has made this one.
    InTurn = MADE_IN_TURN as u32,
}

/// What kind of call it is, for flags and fault records.
#[derive(Clone, Copy)]
pub(crate) struct Kind {
    pub(crate) operation: Operation,
    pub(crate) signature: u32,
    pub(crate) made: Made,
    pub(crate) within: Option<Duration>,
}

impl Kind {
    pub(crate) const fn pairwise(operation: Operation, signature: u32) -> Self {
        Self {
            operation,
            signature,
            made: Made::Pairwise,
            within: None,
        }
    }
}

/// Memory that is poisoned: its address, size and type.
pub(crate) type Range = (u64, usize, DataType);

/// All of it that a call has.
#[derive(Debug, Default)]
pub(crate) struct Poisoned(pub(crate) Vec<Range>);

impl Poisoned {
    /// What lies behind the last of it is one with that: kernels take a few ranges each.
    pub(crate) fn add(&mut self, (address, bytes, dtype): Range) {
        match self.0.last_mut() {
            _ if bytes == 0 => {}
            Some((start, before, of)) if (*start + *before as u64, *of) == (address, dtype) => {
                *before += bytes;
            }
            _ => self.0.push((address, bytes, dtype)),
        }
    }
}

/// What all kernels that wait are told in a job; the rest of their parameters is the default.
macro_rules! waiting {
    ($parameters:ident, $job:expr) => {{
        let (core, kind) = ($job.core, $job.kind);
        let (config, layout) = (&core.config, core.control.layout());
        let within = |usual| $crate::types::nanoseconds(kind.within.unwrap_or(usual));
        $parameters {
            base: core.memory.symmetric.base(),
            stride: core.memory.symmetric.stride() as u64,
            state: ::brigade_device::Storage::address(&core.memory.state),
            report: core.memory.report.address(),
            deadline_ns: within(config.deadline),
            first_deadline_ns: within(config.first_deadline),
            rank: core.rank() as u32,
            size: core.size() as u32,
            operation: kind.operation as u32,
            barrier: layout.barrier.base as u32,
            stop: layout.abort.base as u32,
            collective: kind.made as u32,
            ..$parameters::default()
        }
    }};
}
pub(crate) use waiting;

/// A call that is being enqueued. Steps gather in `steps` until something else must come behind them.
pub(crate) struct Job<'a> {
    pub(crate) core: &'a Arc<Core>,
    pub(crate) lane: &'a Arc<Lane>,
    pub(crate) stream: sys::CUstream,
    pub(crate) kind: Kind,
    pub(crate) steps: Steps<'a>,
    moved: u64,
    /// Where waits for each rank are added up, or 0.
    pub(crate) waits: u64,
    /// Streams beside the caller's that go on behind what was enqueued there, and are to be joined.
    forked: SmallVec<[Side; 2]>,
    /// A product that begins beside them comes behind the next steps.
    pub(crate) product_follows: bool,
    /// Of a call in turn, which half.
    pub(crate) half: InTurn,
    /// Which work of the lane it is.
    pub(crate) work: u64,
    /// Steps of this call are the last that was enqueued on the caller's stream, or kernels behind them.
    pub(crate) stepped: Cell<bool>,
    /// What is poisoned if the group was stopped.
    poisoned: Poisoned,
    /// What streams beside the caller's read, which is given back on that one: not before they are joined, also after a failure.
    read_beside: Vec<Buffer>,
}

impl<'a> Job<'a> {
    pub(crate) fn new(
        core: &'a Arc<Core>,
        lane: &'a Arc<Lane>,
        stream: sys::CUstream,
        kind: Kind,
    ) -> Self {
        Self {
            core,
            lane,
            stream,
            kind,
            steps: core.steps(),
            moved: 0,
            waits: 0,
            forked: SmallVec::new(),
            product_follows: false,
            half: InTurn::Send,
            work: 0,
            stepped: Cell::new(false),
            poisoned: Poisoned::default(),
            read_beside: Vec::new(),
        }
    }

    /// Keeps what streams beside the caller's read.
    pub(crate) fn keeps(&mut self, buffers: impl IntoIterator<Item = Buffer>) {
        self.read_beside.extend(buffers);
    }

    /// At the end of the call this memory is poisoned, if the group was stopped.
    pub(crate) fn poisons(&mut self, address: u64, bytes: usize, dtype: DataType) {
        self.poisoned.add((address, bytes, dtype));
    }

    /// What this call's kernels wait for each rank, from here on, is added to this tensor, which the call's `run` keeps.
    pub(crate) fn adds_waits(&mut self, to: Option<&Buffer>) {
        self.waits = to.map_or(0, Buffer::address);
    }

    /// Enqueues the steps so far.
    pub(crate) fn steps_now(&mut self) -> Result<()> {
        let batches = self.steps.batches();
        batches
            .into_iter()
            .try_for_each(|batch| self.launch(None, batch, &[]))
    }

    /// Enqueues the last steps, and what is to be poisoned behind them.
    pub(crate) fn end(&mut self) -> Result<()> {
        let mut batches = self.steps.batches();
        let Some(last) = batches
            .pop()
            .or_else(|| (!self.poisoned.0.is_empty()).then_some(([0; MOST_STEPS], 0)))
        else {
            return Ok(());
        };
        for batch in batches {
            self.launch(None, batch, &[])?;
        }
        let Poisoned(poisoned) = std::mem::take(&mut self.poisoned);
        let mut parts = poisoned.chunks(MOST_POISONED);
        self.launch(None, last, parts.next().unwrap_or(&[]))?;
        parts.try_for_each(|part| self.launch(None, ([0; MOST_STEPS], 0), part))
    }

    /// Enqueues steps beside the caller's stream.
    pub(crate) fn steps_on(&self, side: Side, mut steps: Steps<'_>) -> Result<()> {
        steps
            .batches()
            .into_iter()
            .try_for_each(|batch| self.launch(Some(side), batch, &[]))
    }

    /// Enqueues a launch of steps, on a stream beside the caller's or on that.
    fn launch(&self, side: Option<Side>, (steps, count): Batch, poisoned: &[Range]) -> Result<()> {
        let core = self.core;
        let mut parameters = StepsParams {
            desk: core.memory.desk(Asker::of(side)),
            moved_bytes: self.moved,
            waits: self.waits,
            signature: self.kind.signature,
            product_begins: u32::from(self.product_follows && side.is_none()),
            count,
            steps,
            ..waiting!(StepsParams, self)
        };
        for (i, &(address, bytes, dtype)) in poisoned.iter().enumerate() {
            parameters.poison[i] = address;
            parameters.poison_bytes[i] = bytes as u64;
            parameters.poison_pattern[i] = types::poison_pattern(dtype);
        }
        let kernel = &core.device.opened.kernels.steps;
        // One block, which has its place, may lie in wait for the end of any kernel.
        let shape = Launch {
            programmatic: core.overtakes && side.is_none(),
            ..Launch::grid(1, STEP_THREADS)
        };
        let stream = side.map_or(self.stream, |side| self.stream_of(side));
        self.stepped.set(self.stepped.get() || side.is_none());
        // SAFETY: all addresses lie in the group's memory, which the core keeps until this work is done (and a graph keeps
        // the core), or in buffers that the call's `run` keeps.
        unsafe { kernel.launch(stream, shape, parameters) }.map_err(Into::into)
    }

    /// The launch, which may take its places while the one in front of it still has its own: where it says so, as this group has places for both, or
    /// where nobody on this GPU waits for the places that it takes of others, and the caller has no work beside.
    pub(crate) fn early(&self, shape: Launch) -> Launch {
        let core = self.core;
        let beside = core.is_own_lane(self.lane);
        let alone = core.overtakes && !beside && core.config.sm_budget.is_none();
        Launch {
            programmatic: shape.programmatic || (alone && core.device.overtakes(self.lane)),
            ..shape
        }
    }

    /// Enqueues a kernel that waits for nobody. Behind this call's steps, which let no other kernel begin before they end, its launch
    /// takes place while they do.
    ///
    /// # Safety
    /// As of [`Kernel::launch`].
    pub(crate) unsafe fn follow<P: Parameters>(
        &self,
        on: sys::CUstream,
        kernel: &Kernel<P>,
        shape: Launch,
        parameters: P,
    ) -> Result<()> {
        let shape = Launch {
            programmatic: self.core.overtakes && self.stepped.get() && on == self.stream,
            ..shape
        };
        // SAFETY: the caller's promise.
        unsafe { kernel.launch(on, shape, parameters) }.map_err(Into::into)
    }

    /// Where this rank is told to stop, and the state that says for which generation.
    pub(crate) fn stop(&self) -> (u64, u64) {
        let stop = self.core.control.layout().abort.base;
        (
            self.core.address(self.core.rank(), 8 * stop),
            self.core.memory.state.address(),
        )
    }

    /// Enqueues copies of `(to, from, bytes)` by a kernel, behind the steps so far; these wait for what comes next if there is nothing to copy.
    pub(crate) fn moves(&mut self, list: &[(u64, u64, usize)]) -> Result<()> {
        let list: Vec<_> = list.iter().filter(|(.., bytes)| *bytes > 0).collect();
        if list.is_empty() {
            return Ok(());
        }
        self.steps_now()?;
        for part in list.chunks(MOST_MOVES) {
            let (stop, state) = self.stop();
            let mut parameters = MoveParams {
                stop,
                state,
                count: part.len() as u64,
                ..MoveParams::default()
            };
            let mut most = 0;
            for (i, &&(to, from, bytes)) in part.iter().enumerate() {
                parameters.to[i] = to;
                parameters.from[i] = from;
                parameters.bytes[i] = bytes as u64;
                most = most.max(bytes);
            }
            let kernels = &self.core.device.opened.kernels;
            // A thread for each 16 bytes of the longest.
            let shape = kernels.shape(most.div_ceil(16 * 256));
            // SAFETY: the caller's ranges lie in buffers of the call, or in the group's memory.
            unsafe { self.follow(self.stream, &kernels.moves, shape, parameters) }?;
        }
        Ok(())
    }

    /// Counts bytes that this rank moves to or from another rank's memory in this call.
    pub(crate) fn count_moved(&mut self, bytes: usize) {
        self.moved += bytes as u64;
    }

    /// A use of the next half of an area, once every peer is done with the one before.
    pub(crate) fn begin(&mut self, area: Area) -> Use {
        let of = self.core.issue.lock().next(area);
        self.steps.begin(of);
        of
    }

    /// Lets the streams beside the caller's go on behind what is enqueued there so far. The steps so far are enqueued on the
    /// waiter, so that the caller's stream is free for products; copies come behind them.
    pub(crate) fn fork(&mut self) -> Result<()> {
        let card = &self.core.device.card;
        let begun = CudaMark::record(card, self.stream)?;
        self.fork_behind(&begun, &[Side::Waiter, Side::Mover])?;
        let steps = std::mem::replace(&mut self.steps, self.core.steps());
        let begin = || self.steps_on(Side::Waiter, steps);
        self.beside(Side::Waiter, || "begin".into(), begin)?;
        self.side_after(Side::Mover, &self.side_mark(Side::Waiter)?)
    }

    /// The same of some of them, behind the steps so far on the caller's stream, where what comes next would leave them no room.
    pub(crate) fn fork_behind_steps(&mut self, sides: &[Side]) -> Result<()> {
        self.steps_now()?;
        self.fork_behind(&self.mark()?, sides)
    }

    fn fork_behind(&mut self, begun: &CudaMark, sides: &[Side]) -> Result<()> {
        for &side in sides {
            if !self.forked.contains(&side) {
                self.forked.push(side);
            }
        }
        sides
            .iter()
            .try_for_each(|&side| self.side_after(side, begun))
    }

    pub(crate) fn stream_of(&self, side: Side) -> sys::CUstream {
        self.lane_of(side).stream
    }

    fn lane_of(&self, side: Side) -> &Lane {
        match side {
            Side::Mover => &self.core.mover,
            Side::Waiter => &self.core.waiter,
        }
    }

    /// A mark of what a stream beside the caller's has been given so far.
    pub(crate) fn side_mark(&self, side: Side) -> Result<CudaMark> {
        CudaMark::record(&self.core.device.card, self.stream_of(side))
    }

    /// A mark of what the caller's stream has been given so far.
    pub(crate) fn mark(&self) -> Result<CudaMark> {
        CudaMark::record(&self.core.device.card, self.stream)
    }

    /// Lets a stream beside the caller's wait for a mark.
    pub(crate) fn side_after(&self, side: Side, mark: &CudaMark) -> Result<()> {
        self.lane_of(side).wait(mark)
    }

    /// Lets the caller's stream wait for a mark.
    pub(crate) fn after(&self, mark: &CudaMark) -> Result<()> {
        mark::wait(&self.core.device.card, self.stream, mark)
    }

    /// Lets the caller's stream wait for those that were forked from it.
    pub(crate) fn join(&mut self) -> Result<()> {
        for side in std::mem::take(&mut self.forked) {
            self.after(&self.side_mark(side)?)?;
        }
        Ok(())
    }

    /// Says that piece `piece` of `slot` lies in `to`'s half, by a copy of the flag that this rank has in its own word for it:
    /// behind the copies on the mover, and without a kernel, which would have to find room beside a product. Where a hook is
    /// asked, a kernel does it: no copy can ask.
    pub(crate) fn copy_flag(&self, to: usize, of: Use, slot: usize, piece: usize) -> Result<()> {
        self.copy_flag_of(to, of, (slot, piece), (slot, piece))
    }

    /// The same of the flag that this rank has in its own word for another slot and piece.
    pub(crate) fn copy_flag_of(
        &self,
        to: usize,
        of: Use,
        (slot, piece): (usize, usize),
        own: (usize, usize),
    ) -> Result<()> {
        let core = self.core;
        if core.memory.desk.is_some() {
            let mut steps = core.steps();
            steps.filled(to, of, slot, piece);
            return self.steps_on(Side::Mover, steps);
        }
        let ring = core.control.layout().ring(of.area);
        let at = |rank, (slot, piece)| {
            let word = ring
                .filled(rank, of.half, slot, piece, Flag::from_bits(0))
                .word;
            core.address(rank, 8 * word.index)
        };
        self.copy_on(Side::Mover, at(to, (slot, piece)), at(core.rank(), own), 8)
    }

    /// A copy by the copy engine beside the caller's stream.
    pub(crate) fn copy_on(&self, side: Side, to: u64, from: u64, bytes: usize) -> Result<()> {
        self.copy(self.stream_of(side), to, from, bytes)
    }

    /// Runs `work`, which enqueues beside the caller's stream, under a name for traces.
    pub(crate) fn beside<R>(
        &self,
        side: Side,
        name: impl FnOnce() -> String,
        work: impl FnOnce() -> Result<R>,
    ) -> Result<R> {
        let name_of_stream = match side {
            Side::Mover => "copy",
            Side::Waiter => "wait",
        };
        let on = (name_of_stream, self.stream_of(side));
        let capturing = || self.lane.capturing();
        self.core.device.tracer.span(on, name, capturing, work)
    }

    /// Runs `work`, which enqueues on the caller's stream, under a name for traces.
    pub(crate) fn traced<R>(
        &self,
        name: impl FnOnce() -> String,
        work: impl FnOnce() -> Result<R>,
    ) -> Result<R> {
        let on = ("compute", self.stream);
        let capturing = || self.lane.capturing();
        self.core.device.tracer.span(on, name, capturing, work)
    }

    /// The same for work that adds steps.
    pub(crate) fn traced_all<R>(
        &mut self,
        name: impl FnOnce() -> String,
        work: impl FnOnce(&mut Self) -> Result<R>,
    ) -> Result<R> {
        let (core, lane, on) = (self.core, self.lane, ("compute", self.stream));
        let capturing = || lane.capturing();
        core.device.tracer.span(on, name, capturing, || work(self))
    }

    /// A copy by the copy engine.
    pub(crate) fn copy(
        &self,
        stream: sys::CUstream,
        to: u64,
        from: u64,
        bytes: usize,
    ) -> Result<()> {
        if bytes == 0 {
            return Ok(());
        }
        // SAFETY: the caller's ranges lie in the group's memory, or in buffers of the call.
        unsafe { sys::cuMemcpyDtoDAsync_v2(to, from, bytes, stream) }
            .result()
            .map_err(failed("cuMemcpyDtoDAsync"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_lies_together_is_poisoned_as_one() {
        let (i32, f32) = (DataType::I32, DataType::F32);
        let mut all = Poisoned::default();
        for range in [
            (64, 16, f32),
            (80, 8, i32),
            (88, 0, i32),
            (88, 12, i32),
            (100, 4, i32),
            (108, 4, i32),
            (112, 4, f32),
        ] {
            all.add(range);
        }
        let want = [(64, 16, f32), (80, 24, i32), (108, 4, i32), (112, 4, f32)];
        assert_eq!(all.0, want);
    }
}
