//! One call as it runs: slices through their phases.

use super::{
    GRACE, Inner,
    progress::Progress,
    staging::{Part, Slot, Staging},
};
use crate::{
    all_gather::all_gather,
    all_reduce::{Kind, algorithm_of, all_reduce},
    comm::unexpected,
    core::Core,
    element,
    memory::writing,
    reduce_scatter::reduce_scatter,
};
use brigade_device::{
    Buffer, Call, DataType, Error, FaultKind, FaultRecord, HierarchicalCall,
    HierarchicalOperation as Operation, HierarchicalPlan, PerRank, Phase, Plan, Rail, RailParams,
    ReduceOp, Result, SlicedPlan,
};
use brigade_plan::hierarchical::{Schedule, Slices, Step, parts_bytes};
use brigade_sync::Deadline;
use std::{ops::Range, sync::Arc, time::Instant};

/// A call in progress.
#[derive(Clone)]
pub(super) struct Run {
    pub(super) inner: Arc<Inner>,
    pub(super) call: Arc<HierarchicalCall>,
    /// The same, as every collective that is part of it signs.
    pub(super) signed: Call,
    pub(super) op: ReduceOp,
    pub(super) to: Buffer,
    pub(super) from: Buffer,
    pub(super) deadline: Deadline,
}

impl Run {
    pub(super) fn run(&self, plan: &HierarchicalPlan, staging: &mut Staging) -> Result<()> {
        match plan {
            HierarchicalPlan::Inside => self.inside(),
            HierarchicalPlan::Whole { .. } => self.whole(staging),
            HierarchicalPlan::Slices(plan) => self.slices(plan, staging),
        }
    }

    /// One machine: one collective.
    fn inside(&self) -> Result<()> {
        match &self.call.operation {
            Operation::AllReduce { .. } => self.reduce_all(&self.to, &self.from),
            Operation::ReduceScatter { rows, row_len, .. } => {
                let elements: PerRank = rows.iter().map(|r| r * row_len).collect();
                self.reduce_inside(&elements, &self.to, &self.from)
            }
            Operation::AllGather { rows, row_len } => {
                let elements: PerRank = rows.iter().map(|r| r * row_len).collect();
                self.gather_inside(&self.inner.inside[0], &elements, &self.to, &self.from)
            }
        }
    }

    /// The machine's result goes to all machines as it is.
    fn whole(&self, staging: &mut Staging) -> Result<()> {
        let (inner, count) = (&self.inner, self.call.machines.count());
        let (dtype, elements) = (self.call.output, self.from.shape().len());
        let bytes = elements * dtype.bytes();
        let parts = [0, bytes, bytes * count, 0, 0, 0];
        let slot = &staging.slots(&inner.device, 1, parts, inner.config.staging_bytes)?[0];
        let own = slot.part(Part::Share, dtype, elements)?;
        let mut all = slot.part(Part::Collected, dtype, elements * count)?;
        self.reduce_all(&own, &self.from)?;
        let pieces = PerRank::from_elem(elements, count);
        let phase = &inner.streams[Phase::Diffuse as usize];
        let p = RailParams {
            call: &self.signed,
            pieces: &pieces,
            from: own.view(),
            to: all.view_mut(),
            within: self.deadline.left() + GRACE,
        };
        inner.rails[0].diffuse(phase, p)?;
        self.add(&self.to, &all)
    }

    /// Slices, one phase after the other; or each phase on its own thread.
    fn slices(&self, plan: &SlicedPlan, staging: &mut Staging) -> Result<()> {
        if plan.phases[0] == Phase::Diffuse && self.call.machines.ranks() > 1 {
            // All calls begin inside: so a machine finds out at once if its ranks make different ones.
            let within = Some(self.deadline.left());
            self.inner.inside[0].collective_within(&self.signed, within, |_| Ok(()))?;
        }
        let bytes = parts_bytes(&self.call, plan.rank_elements);
        let most = self.inner.config.staging_bytes;
        let slots = staging.slots(&self.inner.device, plan.slots, bytes, most)?;
        let schedule = Schedule::of(plan);
        let pipe = Arc::new(Pipe {
            run: self.clone(),
            slices: Slices::new(&self.call, plan.rank_elements),
            phases: plan.phases.clone().into_vec(),
            schedule,
            slots,
            progress: Progress::new(schedule),
        });
        if plan.slices == 1 {
            return (0..schedule.phases).try_for_each(|phase| pipe.step(Step { phase, slice: 0 }));
        }
        let inner = &self.inner;
        let tickets: Vec<_> = plan
            .phases
            .iter()
            .enumerate()
            .map(|(phase, of)| {
                let pipe = Arc::clone(&pipe);
                inner.movers[*of as usize].start(move || {
                    pipe.through(phase);
                    Ok(())
                })
            })
            .collect();
        let result = pipe.progress.watch(|| {
            inner.relay();
        });
        // They have ended, or are about to.
        tickets.into_iter().try_for_each(|ticket| ticket.wait())?;
        result
    }

    /// Every rank gets the machine's reduction.
    fn reduce_all(&self, to: &Buffer, from: &Buffer) -> Result<()> {
        let core = &self.inner.inside[0];
        let (elements, dtype, output) = (from.shape().len(), from.dtype(), to.dtype());
        let op = self.op;
        let plan = core.plan(&Call::AllReduce {
            elements,
            dtype,
            output,
            op,
            choice: None,
        })?;
        let Plan::AllReduce {
            algorithm,
            piece_elements,
            ..
        } = plan
        else {
            return Err(unexpected(&plan));
        };
        let algorithm = algorithm_of(algorithm).ok_or_else(|| unexpected(&plan))?;
        let kind = Kind {
            dtype,
            output,
            op,
            row: None,
        };
        core.collective_within(&self.signed, Some(self.deadline.left()), |active| {
            all_reduce(active, (algorithm, kind), piece_elements, to, from)
        })
    }

    /// Every rank of the machine gets so many elements of its reduction.
    fn reduce_inside(&self, elements: &[usize], to: &Buffer, from: &Buffer) -> Result<()> {
        let core = &self.inner.inside[0];
        let plan = core.plan(&Call::ReduceScatter {
            rows: elements.into(),
            row_len: 1,
            dtype: from.dtype(),
            output: to.dtype(),
            op: self.op,
        })?;
        let Plan::ReduceScatter { piece_elements, .. } = plan else {
            return Err(unexpected(&plan));
        };
        core.collective_within(&self.signed, Some(self.deadline.left()), |active| {
            reduce_scatter(active, self.op, elements, piece_elements, to, from)
        })
    }

    /// Every rank of the machine gets all that its ranks have, which is so many elements of each.
    fn gather_inside(
        &self,
        core: &Arc<Core>,
        elements: &[usize],
        to: &Buffer,
        from: &Buffer,
    ) -> Result<()> {
        let dtype = to.dtype();
        let plan = core.plan(&Call::AllGather {
            rows: elements.into(),
            row_len: 1,
            dtype,
        })?;
        let Plan::Copy { piece_elements, .. } = plan else {
            return Err(unexpected(&plan));
        };
        let bytes: PerRank = elements.iter().map(|n| n * dtype.bytes()).collect();
        core.collective_within(&self.signed, Some(self.deadline.left()), |active| {
            all_gather(active, &bytes, piece_elements * dtype.bytes(), to, from)
        })
    }

    /// Reduces what all machines have, which lies one after the other.
    fn add(&self, to: &Buffer, from: &Buffer) -> Result<()> {
        let _span = tracing::info_span!(target: "brigade::compute", "add machines").entered();
        let (dtype, bytes) = (from.dtype(), from.bytes() / self.call.machines.count());
        writing(to, &[from], |out, inputs| {
            if bytes > 0 {
                let parts: Vec<&[u8]> = inputs[0].chunks(bytes).collect();
                element::reduce(self.op, dtype, &parts, to.dtype(), out);
            }
            Ok(())
        })
    }

    /// The record of a phase that was never let go on.
    fn stuck(&self, phase: Phase) -> Error {
        Error::Fault(FaultRecord {
            kind: FaultKind::Timeout,
            operation: self.signed.operation() as u32,
            slot: phase as u32,
            waited_ns: u64::try_from(self.deadline.elapsed().as_nanos()).unwrap_or(u64::MAX),
            ..self.inner.aborted()
        })
    }
}

/// Slices and where they lie.
struct Pipe {
    run: Run,
    slices: Slices,
    phases: Vec<Phase>,
    schedule: Schedule,
    slots: Vec<Slot>,
    progress: Progress,
}

impl Pipe {
    /// All slices through one phase.
    fn through(&self, phase: usize) {
        let steps = (0..self.schedule.slices).map(|slice| Step { phase, slice });
        let run = &self.run;
        let end = Instant::now() + run.deadline.left() + 2 * GRACE;
        let result = steps.map(|step| {
            if !self.progress.may_begin(step, end)? {
                return Err(run.stuck(self.phases[phase]));
            }
            self.step(step)?;
            self.progress.done(step);
            Ok(())
        });
        let result = result.collect::<Result<()>>();
        if result.is_err() {
            // Peers wait for the other phases of this rank.
            run.inner.relay();
        }
        self.progress.end(result);
    }

    /// One slice through one phase.
    fn step(&self, step: Step) -> Result<()> {
        let Step { phase, slice } = step;
        let run = &self.run;
        let (machines, rank) = (run.call.machines, run.inner.group.rank);
        let (local, machine) = (machines.local_of(rank), machines.machine_of(rank));
        let of = self.phases[phase];
        let (first, last) = (phase == 0, phase + 1 == self.phases.len());
        let _span = tracing::info_span!(target: "brigade::comm", "slice", phase = of.name(), slice)
            .entered();
        let slot = &self.slots[self.schedule.slot(slice)];
        let (input, output) = (run.call.dtype, run.call.output);
        let travels = if machines.ranks() == 1 { input } else { output };
        let rail = self.slices.rail(slice, local);
        let share: usize = rail.iter().sum();
        let own = rail[machine];
        let shares = self.slices.shares(slice);
        let all: usize = shares.iter().sum();
        match of {
            Phase::ReduceInside => {
                let input = slot.part(Part::Input, input, all)?;
                self.take(slice, &input)?;
                let to = slot.part(Part::Share, output, share)?;
                run.reduce_inside(&shares, &to, &input)
            }
            Phase::Collect => {
                let from = slot.part(Part::Share, travels, share)?;
                if first {
                    self.take(slice, &from)?;
                }
                let to = slot.part(Part::Collected, travels, own * machines.count())?;
                self.along(0, of, &rail, to, &from)
            }
            Phase::Add => {
                let from = slot.part(Part::Collected, travels, own * machines.count())?;
                let sum = slot.part(Part::Sum, output, own)?;
                run.add(&sum, &from)?;
                if last {
                    copy(&run.to, self.slices.own(slice, rank), &sum, 0..own)?;
                }
                Ok(())
            }
            Phase::Diffuse => {
                let sum = slot.part(Part::Sum, output, own)?;
                if first {
                    copy(&sum, 0..own, &run.from, self.slices.own(slice, rank))?;
                }
                let to = slot.part(Part::Rail, output, share)?;
                // The first that goes along the rail takes the first of both, whatever it is.
                self.along(usize::from(!first), of, &rail, to.clone(), &sum)?;
                if last {
                    self.give(slice, &to)?;
                }
                Ok(())
            }
            Phase::GatherInside => {
                let from = slot.part(Part::Rail, output, share)?;
                let to = slot.part(Part::Output, output, all)?;
                run.gather_inside(&run.inner.inside[1], &shares, &to, &from)?;
                self.give(slice, &to)
            }
        }
    }

    /// Along the rail.
    fn along(
        &self,
        which: usize,
        phase: Phase,
        pieces: &[usize],
        mut to: Buffer,
        from: &Buffer,
    ) -> Result<()> {
        let inner = &self.run.inner;
        let p = RailParams {
            call: &self.run.signed,
            pieces,
            from: from.view(),
            to: to.view_mut(),
            within: self.run.deadline.left() + GRACE,
        };
        let (rail, on) = (&inner.rails[which], &inner.streams[phase as usize]);
        match phase {
            Phase::Collect => rail.collect(on, p),
            _ => rail.diffuse(on, p),
        }
    }

    /// All pieces of a slice out of the caller's input.
    fn take(&self, slice: usize, to: &Buffer) -> Result<()> {
        self.pieces(slice, |place, piece| copy(to, place, &self.run.from, piece))
    }

    /// All pieces of a slice into the caller's output.
    fn give(&self, slice: usize, from: &Buffer) -> Result<()> {
        self.pieces(slice, |place, piece| copy(&self.run.to, piece, from, place))
    }

    /// Where each piece lies in a slot and in the tensor. Neighbours in both count as one.
    fn pieces(
        &self,
        slice: usize,
        mut each: impl FnMut(Range<usize>, Range<usize>) -> Result<()>,
    ) -> Result<()> {
        let (mut place, mut run) = (0, 0..0);
        for piece in self.slices.pieces(slice) {
            if piece.start != run.end {
                each(place..place + run.len(), run.clone())?;
                place += run.len();
                run = piece;
            } else {
                run.end = piece.end;
            }
        }
        each(place..place + run.len(), run)
    }
}

/// Elements from one buffer to another.
fn copy(to: &Buffer, there: Range<usize>, from: &Buffer, here: Range<usize>) -> Result<()> {
    if here.is_empty() {
        return Ok(());
    }
    let bytes = |dtype: DataType, r: Range<usize>| r.start * dtype.bytes()..r.end * dtype.bytes();
    let (there, here) = (bytes(to.dtype(), there), bytes(from.dtype(), here));
    writing(to, &[from], |out, inputs| {
        out[there].copy_from_slice(&inputs[0][here]);
        Ok(())
    })
}
