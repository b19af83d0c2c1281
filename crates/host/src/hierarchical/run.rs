//! One call as it runs: slices through their phases.

use super::{GRACE, Inner, progress::Progress};
use crate::{
    all_gather::all_gather,
    all_reduce::{Kind, algorithm_of, all_reduce},
    comm::unexpected,
    core::Core,
    element,
    memory::writing,
    mover::{Ticket, both},
    reduce_scatter::reduce_scatter,
};
use brigade_device::{
    Buffer, Call, DataType, Error, FaultKind, FaultRecord, HierarchicalCall,
    HierarchicalOperation as Operation, HierarchicalPlan, Part, PerRank, Phase, Plan, Rail,
    RailParams, ReduceOp, Result, SliceSlot, SlicedPlan, Staging,
};
use brigade_plan::hierarchical::{Piece, Place, Schedule, Slices, Step, Track, Whole, parts_bytes};
use brigade_sync::Deadline;
use std::{ops::Range, sync::Arc, time::Instant};

/// A call in progress.
#[derive(Clone)]
pub(super) struct Run {
    pub(super) inner: Arc<Inner>,
    pub(super) call: Arc<HierarchicalCall>,
    /// The same, as every collective that is part of it signs.
    pub(super) signed: Call,
    pub(super) to: Buffer,
    pub(super) from: Buffer,
    pub(super) deadline: Deadline,
}

impl Run {
    pub(super) fn run(&self, plan: &HierarchicalPlan, staging: &mut Staging) -> Result<()> {
        match plan {
            HierarchicalPlan::Inside { .. } => self.inside(),
            HierarchicalPlan::Whole { .. } => self.whole(staging),
            HierarchicalPlan::Slices(plan) => self.slices(plan, staging),
        }
    }

    /// One machine: one collective.
    fn inside(&self) -> Result<()> {
        match &self.call.operation {
            Operation::AllReduce { .. } => self.reduce_all(&self.to, &self.from),
            Operation::ReduceScatter { .. } => {
                self.reduce_inside(&self.call.elements_of_ranks(), &self.to, &self.from)
            }
            Operation::AllGather { .. } => {
                let elements = self.call.elements_of_ranks();
                self.gather_inside(&self.inner.inside[0], &elements, &self.to, &self.from)
            }
        }
    }

    /// One call inside, and one along the rail.
    fn whole(&self, staging: &mut Staging) -> Result<()> {
        let slot = &self.slots(staging, 1, Whole::parts_bytes(&self.call))?[0];
        let whole = Whole::new(&self.call, self.rank());
        let output = self.call.output;
        let (own, all) = (
            whole.own(&self.call, self.rank()),
            whole.pieces.iter().sum(),
        );
        let collected = || slot.part(Part::Collected, whole.travels, own * whole.pieces.len());
        let share = |elements| slot.part(Part::Share, output, elements);
        match &self.call.operation {
            Operation::AllReduce { .. } => {
                let (share, collected) = (share(own)?, collected()?);
                self.reduce_all(&share, &self.from)?;
                self.along(Phase::Diffuse, 0, &whole.pieces, (&share, &collected))?;
                self.add(&self.to, &collected)
            }
            Operation::ReduceScatter { .. } => {
                let collected = collected()?;
                let share = if whole.takes.is_empty() {
                    self.from.clone()
                } else {
                    let (reduced, share) = (
                        slot.part(Part::Output, output, self.from.shape().len())?,
                        share(all)?,
                    );
                    self.reduce_all(&reduced, &self.from)?;
                    for (piece, take) in whole.places().zip(&whole.takes) {
                        copy(&share, piece, &reduced, take.clone())?;
                    }
                    share
                };
                self.along(Phase::Collect, 0, &whole.pieces, (&share, &collected))?;
                self.add(&self.to, &collected)
            }
            Operation::AllGather { .. } => {
                let share = if whole.inside.len() == 1 {
                    self.from.clone()
                } else {
                    let share = share(own)?;
                    self.gather_inside(&self.inner.inside[0], &whole.inside, &share, &self.from)?;
                    share
                };
                self.along(Phase::Diffuse, 0, &whole.pieces, (&share, &self.to))
            }
        }
    }

    fn rank(&self) -> usize {
        self.inner.across.group().rank
    }

    /// Along the rail, by one of its connections.
    fn along(
        &self,
        phase: Phase,
        connection: usize,
        pieces: &[usize],
        (from, to): (&Buffer, &Buffer),
    ) -> Result<()> {
        let mut to = to.clone();
        let p = RailParams {
            call: &self.signed,
            pieces,
            from: from.view(),
            to: to.view_mut(),
            within: self.deadline.left() + GRACE,
        };
        let rail = &self.inner.rails[connection];
        let on = &self.inner.streams[phase as usize];
        match phase {
            Phase::Collect => rail.collect(on, p),
            _ => rail.diffuse(on, p),
        }
    }

    /// Slices, one phase after the other; or each track on its own thread.
    fn slices(&self, plan: &SlicedPlan, staging: &mut Staging) -> Result<()> {
        if plan.phases[0] == Phase::Diffuse && self.call.machines.ranks() > 1 {
            // All calls begin inside: so a machine finds out at once if its ranks make different ones.
            let within = Some(self.deadline.left());
            self.inner.inside[0].collective_within(&self.signed, within, |_| Ok(()))?;
        }
        let bytes = parts_bytes(&self.call, (&plan.phases, plan.rank_elements), false);
        let slots = self.slots(staging, plan.slots, bytes)?;
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
        let tickets: Vec<_> = schedule
            .tracks()
            .filter_map(|track| {
                let mover = inner.movers.get(track.home(&plan.phases)?)?;
                let (pipe, witness) = (Arc::clone(&pipe), Arc::clone(&pipe));
                Some(mover.start(
                    move || pipe.through(track),
                    move |result| witness.ended(result),
                ))
            })
            .collect();
        let result = pipe.progress.watch(|| {
            inner.across.relay();
        });
        // They have ended, or are about to.
        tickets.into_iter().map(Ticket::wait).fold(result, both)
    }

    /// So many slots with such parts.
    fn slots(
        &self,
        staging: &mut Staging,
        count: usize,
        bytes: [usize; Part::COUNT],
    ) -> Result<Vec<SliceSlot>> {
        let inner = &self.inner;
        let make = |bytes| inner.device.heap(DataType::U8, &[bytes]);
        staging.slots(make, count, bytes, inner.config.staging_bytes)
    }

    fn op(&self) -> ReduceOp {
        self.call.op()
    }

    /// Every rank gets the machine's reduction.
    fn reduce_all(&self, to: &Buffer, from: &Buffer) -> Result<()> {
        let core = &self.inner.inside[0];
        let (elements, dtype, output) = (from.shape().len(), from.dtype(), to.dtype());
        let op = self.op();
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
            op: self.op(),
        })?;
        let Plan::ReduceScatter {
            piece_elements,
            pushed: None,
            ..
        } = plan
        else {
            return Err(unexpected(&plan));
        };
        core.collective_within(&self.signed, Some(self.deadline.left()), |active| {
            reduce_scatter(active, self.op(), elements, piece_elements, to, from)
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
        let Plan::Copy {
            piece_elements,
            pushed: None,
            ..
        } = plan
        else {
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
                element::reduce(self.op(), dtype, &parts, to.dtype(), out);
            }
            Ok(())
        })
    }

    /// Stops all groups because a phase was never let go on.
    fn stuck(&self, phase: Phase) -> Error {
        let across = &self.inner.across;
        let record = across.fault().unwrap_or_else(|| FaultRecord {
            operation: self.signed.operation() as u32,
            slot: phase as u32,
            waited_ns: u64::try_from(self.deadline.elapsed().as_nanos()).unwrap_or(u64::MAX),
            ..across.record(FaultKind::Timeout)
        });
        Error::Fault(across.stop(record))
    }
}

/// Slices and where they lie.
struct Pipe {
    run: Run,
    slices: Slices,
    phases: Vec<Phase>,
    schedule: Schedule,
    slots: Vec<SliceSlot>,
    progress: Progress,
}

impl Pipe {
    /// All steps of a track.
    fn through(&self, track: Track) -> Result<()> {
        let run = &self.run;
        let end = Instant::now() + run.deadline.left() + 2 * GRACE;
        self.schedule.steps(track).try_for_each(|step| {
            if !self.progress.may_begin(step, end)? {
                return Err(run.stuck(self.phases[step.phase]));
            }
            self.step(step)?;
            self.progress.done(step);
            Ok(())
        })
    }

    /// A track has ended.
    fn ended(&self, result: &Result<()>) {
        if let Err(error) = result {
            // Peers wait for all tracks of this rank, and its other tracks for peers.
            self.run.inner.across.give_up(error.clone());
        }
        self.progress.end(result.clone());
    }

    /// One slice through one phase.
    fn step(&self, step: Step) -> Result<()> {
        let run = &self.run;
        let rank = run.rank();
        let Some(work) = self.slices.work(&run.call, &self.phases, rank, step) else {
            return Ok(());
        };
        let Step { slice, .. } = step;
        let phase = work.phase.name();
        let _span =
            tracing::info_span!(target: "brigade::comm", "slice", phase, slice, rank).entered();
        let slot = &self.slots[self.schedule.slot(slice)];
        let part = |p: &Place| slot.part(p.part, p.dtype, p.elements);
        let (from, to) = (part(&work.from)?, part(&work.to)?);
        for Piece { place, tensor } in &work.take {
            copy(&from, place.clone(), &run.from, tensor.clone())?;
        }
        match work.phase {
            Phase::ReduceInside => run.reduce_inside(&work.pieces, &to, &from),
            Phase::Collect | Phase::Diffuse => {
                let connection = self.schedule.connection(step);
                run.along(work.phase, connection, &work.pieces, (&from, &to))
            }
            Phase::Add => run.add(&to, &from),
            Phase::GatherInside => {
                run.gather_inside(&run.inner.inside[1], &work.pieces, &to, &from)
            }
        }?;
        let mut give = work.give.iter();
        give.try_for_each(|p| copy(&run.to, p.tensor.clone(), &to, p.place.clone()))
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
