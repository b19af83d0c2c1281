//! One call as it is enqueued: slices through their phases, each on its own stream.

use super::Inner;
use crate::{
    comm::CudaComm,
    lane::Lane,
    mark::{self, CudaMark},
    memory::DeviceMemory,
    rail::Exchange,
    rails::Rails,
    reduce_scatter::Reduction,
};
use brigade_device::{
    AllGatherParams, AllReduceParams, Buffer, Call, DataType, Error, HierarchicalCall,
    HierarchicalOperation as Operation, HierarchicalPlan, Part, Phase, RailParams,
    ReduceScatterParams, Result, Shape, SliceSlot, SlicedPlan, Staging, Stream,
};
use brigade_plan::hierarchical::{
    Piece, Place, Schedule, Slices, Step, Track, Whole, Work, parts_bytes,
};
use std::{ops::Range, sync::Arc};

/// Fewer bytes of a rail's ranks go by one connection: two calls of NCCL's take longer.
pub(super) const BOTH_BYTES: usize = 256 << 10;

/// A call on its way to its streams.
pub(super) struct Run<'a> {
    pub(super) inner: &'a Inner,
    pub(super) call: &'a HierarchicalCall,
    /// The same, as everything that is part of it signs.
    pub(super) signed: &'a Call,
    /// The caller's stream.
    pub(super) on: &'a Stream,
    pub(super) lane: &'a Arc<Lane>,
    pub(super) to: &'a Buffer,
    pub(super) from: &'a Buffer,
}

impl Run<'_> {
    pub(super) fn run(&self, plan: &HierarchicalPlan, staging: &mut Staging) -> Result<()> {
        let done = match plan {
            // Its one collective poisons what it gives.
            HierarchicalPlan::Inside { .. } => return self.inside(),
            HierarchicalPlan::Whole { .. } => self.whole(staging),
            HierarchicalPlan::Slices(plan) => self.slices(plan, staging),
        };
        if let Err(error) = done {
            self.inner.across.give_up(error.clone());
            self.poisons()?;
            return Err(error);
        }
        self.poisons()
    }

    /// If it was stopped by then, nobody takes the output for a result.
    fn poisons(&self) -> Result<()> {
        self.inner.inside[0]
            .core
            .poison_if_stopped(self.on, self.to)
    }

    /// One machine: one collective.
    fn inside(&self) -> Result<()> {
        let comm = &self.inner.inside[0];
        let (to, from) = (flat(self.to)?, flat(self.from)?);
        let elements = self.call.elements_of_ranks();
        match &self.call.operation {
            Operation::AllReduce { .. } => self.reduce_all(to, &from),
            Operation::ReduceScatter { .. } => self.reduce_inside(self.on, &elements, to, &from),
            Operation::AllGather { .. } => self.gather_inside(comm, self.on, &elements, to, &from),
        }
    }

    /// One call inside, and one along the rail.
    fn whole(&self, staging: &mut Staging) -> Result<()> {
        let slot = &self.slots(staging, 1, Whole::parts_bytes(self.call))?[0];
        let rank = self.inner.across.group().rank;
        let whole = Whole::new(self.call, rank);
        let (own, output) = (whole.own(self.call, rank), self.call.output);
        let (from, to) = (flat(self.from)?, flat(self.to)?);
        let collected = || slot.part(Part::Collected, whole.travels, own * whole.pieces.len());
        let share = |elements| slot.part(Part::Share, output, elements);
        let alone = self.call.machines.ranks() == 1;
        match &self.call.operation {
            Operation::AllReduce { .. } => {
                // With nobody else inside, it is as it is.
                let share = if alone && from.dtype() == output {
                    from
                } else {
                    let share = share(own)?;
                    self.reduce_all(share.clone(), &from)?;
                    share
                };
                let collected = collected()?;
                self.alone_along(Phase::Diffuse, &whole.pieces, &share, &collected)?;
                self.add(self.on, &to, &collected)
            }
            Operation::ReduceScatter { .. } => {
                let share = if whole.takes.is_empty() {
                    from
                } else {
                    let reduced = slot.part(Part::Output, output, from.shape().len())?;
                    self.reduce_all(reduced.clone(), &from)?;
                    let share = share(whole.pieces.iter().sum())?;
                    for (piece, take) in whole.places().zip(&whole.takes) {
                        let (piece, take) = (part(&share, &piece)?, part(&reduced, take)?);
                        self.inner.device.copy_bytes(self.lane, &piece, &take)?;
                    }
                    share
                };
                let collected = collected()?;
                self.alone_along(Phase::Collect, &whole.pieces, &share, &collected)?;
                self.add(self.on, &to, &collected)
            }
            Operation::AllGather { .. } => {
                let share = if alone {
                    from
                } else {
                    let (share, inside) = (share(own)?, &self.inner.inside[0]);
                    self.gather_inside(inside, self.on, &whole.inside, share.clone(), &from)?;
                    share
                };
                self.alone_along(Phase::Diffuse, &whole.pieces, &share, &to)
            }
        }
    }

    /// The one exchange of a call, on the caller's stream.
    fn alone_along(
        &self,
        phase: Phase,
        pieces: &[usize],
        from: &Buffer,
        to: &Buffer,
    ) -> Result<()> {
        let Some(rails) = &self.inner.rails else {
            return Ok(());
        };
        let mut to = to.clone();
        let p = self.along(pieces, from, &mut to);
        let rail = &rails.connections[0];
        let (what, idle) = match phase {
            Phase::Collect => (rail.collects(&p)?, Phase::Diffuse),
            _ => (rail.diffuses(&p)?, Phase::Collect),
        };
        self.exchange(rails, (self.on, idle), (&p, what), true)
    }

    /// An exchange while no other one is under way: by two connections, unless it is small or NCCL gathers it. The stream of a phase that does
    /// nothing then is the second one's.
    fn exchange(
        &self,
        rails: &Rails,
        (on, idle): (&Stream, Phase),
        (p, what): (&RailParams<'_>, Exchange),
        signs: bool,
    ) -> Result<()> {
        let how = (signs.then(|| p.signature()), p.within);
        let bytes = p.pieces.iter().sum::<usize>() * p.from.dtype().bytes();
        if what.is_whole() || bytes < BOTH_BYTES {
            return rails.connections[0].exchange(on, what, how);
        }
        let beside = &self.inner.streams[idle as usize];
        rails.exchange((on, beside), what, how)
    }

    /// Slices of which only one is under way on the caller's stream, one phase after the other; or each track of several on its own.
    fn slices(&self, plan: &SlicedPlan, staging: &mut Staging) -> Result<()> {
        if plan.phases[0] == Phase::Diffuse && self.call.machines.ranks() > 1 {
            // All calls begin inside: so a machine finds out at once if its ranks make different ones.
            let core = &self.inner.inside[0].core;
            core.collective(self.on, self.signed, &[], None, |_| Ok(()))?;
        }
        let bytes = parts_bytes(self.call, (&plan.phases, plan.rank_elements), true);
        let schedule = Schedule::of(plan);
        let pipe = Pipe {
            run: self,
            slices: Slices::new(self.call, plan.rank_elements),
            phases: &plan.phases,
            schedule,
            slots: self.slots(staging, plan.slots, bytes)?,
        };
        if plan.slots == 1 {
            let slices = 0..schedule.slices;
            let mut steps = slices
                .flat_map(|slice| (0..schedule.phases).map(move |phase| Step { phase, slice }));
            return steps.try_for_each(|step| pipe.step(self.on, step));
        }
        let tracks = schedule.tracks().filter_map(|track| {
            let on = self.inner.streams.get(track.home(&plan.phases)?)?;
            Some(self.inner.device.lane(on).map(|lane| (track, on, lane)))
        });
        let tracks: Vec<OnTrack<'_>> = tracks.collect::<Result<_>>()?;
        let card = &self.inner.device.card;
        let begun = CudaMark::record(card, self.lane.stream)?;
        for (_, _, lane) in &tracks {
            lane.branch(self.lane);
            lane.wait(&begun)?;
        }
        let done = pipe.through(&tracks);
        // Also after a failure, since a capture cannot end while another stream is forked from it.
        for (_, _, lane) in &tracks {
            lane.unbranch(self.lane);
            mark::wait(
                card,
                self.lane.stream,
                &CudaMark::record(card, lane.stream)?,
            )?;
        }
        done
    }

    /// So many slots with such parts. Streams wait for each other before they use them, and graphs may.
    fn slots(
        &self,
        staging: &mut Staging,
        count: usize,
        bytes: [usize; Part::COUNT],
    ) -> Result<Vec<SliceSlot>> {
        let inner = self.inner;
        let make = |bytes| {
            let memory = DeviceMemory::outside_of_streams(&inner.device.card, bytes)?;
            Buffer::new(Arc::new(memory), DataType::U8, Shape::new(&[bytes])?)
        };
        staging.slots(make, count, bytes, inner.config.staging_bytes)
    }

    /// Every rank gets the machine's reduction.
    fn reduce_all(&self, mut to: Buffer, from: &Buffer) -> Result<()> {
        let p = AllReduceParams {
            data: to.view_mut(),
            from: Some(from.view()),
            op: self.call.op(),
            choice: None,
        };
        let comm = &self.inner.inside[0];
        comm.run_all_reduce(self.on, Some(self.signed), p).map(drop)
    }

    /// Every rank of the machine gets so many elements of its reduction.
    fn reduce_inside(
        &self,
        on: &Stream,
        elements: &[usize],
        mut to: Buffer,
        from: &Buffer,
    ) -> Result<()> {
        let p = ReduceScatterParams {
            from: from.view(),
            rows_per_rank: elements,
            to: to.view_mut(),
            op: self.call.op(),
        };
        let comm = &self.inner.inside[0];
        comm.run_reduce_scatter(on, Some(self.signed), p).map(drop)
    }

    /// Every rank of the machine gets all that its ranks have, which is so many elements of each.
    fn gather_inside(
        &self,
        comm: &CudaComm,
        on: &Stream,
        elements: &[usize],
        mut to: Buffer,
        from: &Buffer,
    ) -> Result<()> {
        let p = AllGatherParams {
            from: from.view(),
            rows_per_rank: elements,
            to: to.view_mut(),
        };
        comm.run_all_gather(on, Some(self.signed), p).map(drop)
    }

    /// What goes along the rail.
    fn along<'p>(
        &'p self,
        pieces: &'p [usize],
        from: &'p Buffer,
        to: &'p mut Buffer,
    ) -> RailParams<'p> {
        RailParams {
            call: self.signed,
            pieces,
            from: from.view(),
            to: to.view_mut(),
            // The first call's is longer, as the watch has it.
            within: self.inner.most(),
        }
    }

    /// Reduces what all machines have, which lies one after the other.
    fn add(&self, on: &Stream, to: &Buffer, from: &Buffer) -> Result<()> {
        let elements = to.shape().len();
        let core = &self.inner.inside[0].core;
        core.locally(on, &[to, from], |job| {
            job.reduce(Reduction {
                op: self.call.op(),
                parts: self.call.machines.count(),
                from: from.address(),
                stride: elements * from.dtype().bytes(),
                dtype: from.dtype(),
                elements,
                out: to.address(),
                output: to.dtype(),
            })
        })
    }
}

/// A track, and the stream that its steps are on.
type OnTrack<'r> = (Track, &'r Stream, &'r Arc<Lane>);

/// Slices and where they lie.
struct Pipe<'r> {
    run: &'r Run<'r>,
    slices: Slices,
    phases: &'r [Phase],
    schedule: Schedule,
    slots: Vec<SliceSlot>,
}

impl Pipe<'_> {
    /// All slices through all phases: each step on its track's stream, behind what it needs. So each stream gets its track's steps in their
    /// order.
    fn through(&self, tracks: &[OnTrack<'_>]) -> Result<()> {
        let card = &self.run.inner.device.card;
        let Schedule {
            phases,
            slices,
            slots,
            ..
        } = self.schedule;
        // Ends of steps, by phase and slot: a step asks for none that a later one has taken the place of.
        let mut ends: Vec<Option<CudaMark>> = (0..phases * slots).map(|_| None).collect();
        let at = |step: Step| step.phase * slots + self.schedule.slot(step.slice);
        for slice in 0..slices {
            for phase in 0..phases {
                let step = Step { phase, slice };
                let track = self.schedule.track(step);
                let Some((_, on, lane)) = tracks.iter().find(|(t, ..)| *t == track) else {
                    let got = format!("{track:?}");
                    return Err(Error::invalid("plan.phases", got, "phases with streams"));
                };
                let needs = self.schedule.needs(step).map(at);
                if let Some(end) = needs.and_then(|n| ends[n].as_ref()) {
                    mark::wait(card, lane.stream, end)?;
                }
                self.step(on, step)?;
                ends[at(step)] = Some(CudaMark::record(card, lane.stream)?);
            }
        }
        Ok(())
    }

    /// One slice through one phase.
    fn step(&self, on: &Stream, step: Step) -> Result<()> {
        let run = self.run;
        let rank = run.inner.across.group().rank;
        let Some(work) = self.slices.work(run.call, self.phases, rank, step) else {
            return Ok(());
        };
        let lane = run.inner.device.lane(on)?;
        let name = || format!("{} {}", work.phase.name(), step.slice);
        let traced = (work.phase.name(), lane.stream);
        let capturing = || lane.capturing();
        run.inner
            .device
            .tracer
            .span(traced, name, capturing, || self.work(on, lane, &work, step))
    }

    fn work(&self, on: &Stream, lane: &Arc<Lane>, work: &Work, step: Step) -> Result<()> {
        let run = self.run;
        let slot = &self.slots[self.schedule.slot(step.slice)];
        let from = self.end(slot, &work.from, &work.take, run.from)?;
        let mut to = self.end(slot, &work.to, &work.give, run.to)?;
        if !from.is_callers {
            self.copies(&work.take, |p| {
                let (place, tensor) = (part(&from.buffer, &p.place)?, part(run.from, &p.tensor)?);
                run.inner.device.copy_bytes(lane, &place, &tensor)
            })?;
        }
        let pieces = &work.pieces;
        match work.phase {
            Phase::ReduceInside => run.reduce_inside(on, pieces, to.buffer.clone(), &from.buffer),
            Phase::Add => run.add(on, &to.buffer, &from.buffer),
            Phase::GatherInside => {
                let comm = &run.inner.inside[1];
                run.gather_inside(comm, on, pieces, to.buffer.clone(), &from.buffer)
            }
            Phase::Collect | Phase::Diffuse => {
                let Some(rails) = &run.inner.rails else {
                    return Ok(());
                };
                let connection = self.schedule.connection(step);
                let rail = &rails.connections[connection];
                // The first thing of a call that goes along the rail takes its signature with it; and the last by each connection, so that nobody
                // who was stopped in between is taken to have sent all of it.
                let first = step.slice == 0 && connection == 0;
                let signs = first || self.schedule.is_last(step);
                let p = run.along(pieces, &from.buffer, &mut to.buffer);
                let (what, idle) = match work.phase {
                    Phase::Collect => (rail.collects(&p)?, Phase::Diffuse),
                    _ => (rail.diffuses(&p)?, Phase::Collect),
                };
                if self.schedule.slots == 1 {
                    run.exchange(rails, (on, idle), (&p, what), signs)
                } else {
                    let how = (signs.then(|| p.signature()), p.within);
                    rail.exchange(on, what, how)
                }
            }
        }?;
        if to.is_callers {
            return Ok(());
        }
        self.copies(&work.give, |p| {
            let (tensor, place) = (part(run.to, &p.tensor)?, part(&to.buffer, &p.place)?);
            run.inner.device.copy_bytes(lane, &tensor, &place)
        })
    }

    fn copies(&self, pieces: &[Piece], copy: impl Fn(&Piece) -> Result<()>) -> Result<()> {
        pieces.iter().try_for_each(copy)
    }

    /// Where a step reads or writes: in the caller's tensor itself, where all of it lies there in one piece.
    fn end(&self, slot: &SliceSlot, place: &Place, pieces: &[Piece], of: &Buffer) -> Result<End> {
        if let [Piece { place: all, tensor }] = pieces
            && *all == (0..place.elements)
        {
            return Ok(End {
                buffer: part(of, tensor)?,
                is_callers: true,
            });
        }
        Ok(End {
            buffer: slot.part(place.part, place.dtype, place.elements)?,
            is_callers: false,
        })
    }
}

/// What a step reads or writes.
struct End {
    buffer: Buffer,
    is_callers: bool,
}

/// All elements in a row.
fn flat(of: &Buffer) -> Result<Buffer> {
    of.reshape(&[of.shape().len()])
}

/// Some elements.
fn part(of: &Buffer, elements: &Range<usize>) -> Result<Buffer> {
    flat(of)?.slice(elements.start, elements.len())
}
