//! Exchanges by pushing: all that a piece of an all-reduce is, or of a copy or a reduce-scatter, in one kernel
//! (`kernels/push.cuh`). It tells of the arrival, waits for data as its own flag, and counts itself, so no steps stand before or
//! behind it.

use crate::{
    Kernel, KernelSet, Launch, Missing,
    all_reduce::{Kind, Piece},
    core::Core,
    inject::Asker,
    job::{Job, waiting},
    sent::SENT,
    types,
};
use brigade_device::{
    AllReduceAlgorithm, Buffer, DataType, Device, Error, PerRank, Plan, ReduceOp, Result,
};
use brigade_kernels::{
    ALL_REDUCE_THREADS, AllReduceParams, Parameters, PushCombineParams, PushCopyParams,
    PushDispatchParams, RELAYED_PACKETS, ReduceScatterParams,
};
use brigade_plan::{
    moved,
    pushed::{GRANULE_BYTES, Granules, Packets},
    rows,
};
use brigade_sync::{Area, BUFFERS, Half};
use smallvec::SmallVec;
use std::{ops::Range, sync::Arc};

/// Most ranks that a kernel is for, smallest first.
const RANKS: [usize; 3] = [2, 4, 8];

/// Types of inputs and results.
const TYPES: [(DataType, DataType); 5] = [
    (DataType::F32, DataType::F32),
    (DataType::F16, DataType::F16),
    (DataType::BF16, DataType::BF16),
    (DataType::F16, DataType::F32),
    (DataType::BF16, DataType::F32),
];

// Kernels and plans agree on what is passed on.
const _: () = assert!(Packets::RELAYED == RELAYED_PACKETS as usize);

/// Most ranks of a group that can push.
pub(crate) const MOST_RANKS: usize = RANKS[RANKS.len() - 1];

/// Kernels of one algorithm: by types, and by ranks.
pub(crate) type ByTypes<P> = [[Kernel<P>; RANKS.len()]; TYPES.len()];

/// All kernels that push.
#[derive(Debug)]
pub(crate) struct PushKernels {
    one_shot: ByTypes<AllReduceParams>,
    two_shot: ByTypes<AllReduceParams>,
    scatter: ByTypes<ReduceScatterParams>,
    copy: Kernel<PushCopyParams>,
    /// By [type](SENT): one shot that the kernel in front sends.
    sent: [Kernel<AllReduceParams>; SENT.len()],
    /// Of few tokens of a rank, of many, of few by expert, and of rows that stay in place.
    pub(crate) dispatch: [Kernel<PushDispatchParams>; 4],
    /// Blocks of any that find room where the largest one does, however few threads they have: their shared memory is the same.
    pub(crate) dispatch_together: u32,
    /// By rank, of few tokens and of many.
    pub(crate) combine: ByTypes<PushCombineParams>,
    pub(crate) combine_many: ByTypes<PushCombineParams>,
    /// Of rows for experts: of few tokens or any kind, and of many whose ranks each send a sum.
    pub(crate) combine_experts: ByTypes<PushCombineParams>,
    pub(crate) combine_experts_many: ByTypes<PushCombineParams>,
    /// Whether one may start while the kernel before it ends.
    pub(crate) programmatic: bool,
}

impl PushKernels {
    pub(crate) fn load(
        set: impl Fn(&str) -> Result<Arc<KernelSet>, Missing>,
        capability: (u32, u32),
    ) -> Result<Self, Missing> {
        let (all_reduce, combine) = (set("all_reduce")?, set("push_combine")?);
        let combine_many = set("push_combine_many")?;
        let dispatch: [Kernel<PushDispatchParams>; 4] = [
            set("push_dispatch")?.kernel()?,
            set("push_dispatch_many")?.variant("_many")?,
            set("push_dispatch_by_expert")?.variant("_by_expert")?,
            set("push_dispatch_in_place")?.variant("_in_place")?,
        ];
        let mut dispatch_together = u32::MAX;
        for kernel in &dispatch {
            let resident = |threads| kernel.resident_per_sm(Launch::grid(1, threads));
            let together = resident(32)? / resident(ALL_REDUCE_THREADS)?.max(1);
            dispatch_together = dispatch_together.min(together.max(1));
        }
        Ok(Self {
            one_shot: by_types(&all_reduce, "_one")?,
            two_shot: by_types(&all_reduce, "_two")?,
            scatter: by_types(&set("reduce_scatter")?, "")?,
            copy: set("push_copy")?.kernel()?,
            sent: {
                let [f16, bf16] = SENT.map(|dtype| all_reduce.variant(format!("_sent_{dtype}")));
                [f16?, bf16?]
            },
            dispatch,
            dispatch_together,
            combine: by_types(&combine, "")?,
            combine_many: by_types(&combine_many, "_many")?,
            combine_experts: by_types(&combine, "_experts")?,
            combine_experts_many: by_types(&combine_many, "_many_experts")?,
            programmatic: capability >= (9, 0),
        })
    }

    fn of(
        &self,
        algorithm: AllReduceAlgorithm,
        kind: Kind,
        size: usize,
    ) -> Option<&Kernel<AllReduceParams>> {
        let kernels = match algorithm {
            AllReduceAlgorithm::TwoShotPush => &self.two_shot,
            _ => &self.one_shot,
        };
        one_of(kernels, kind, size)
    }
}

fn by_types<P: Parameters>(set: &Arc<KernelSet>, name: &str) -> Result<ByTypes<P>, Missing> {
    let types = |(input, output): (DataType, DataType)| -> Result<_, Missing> {
        let [a, b, c] = RANKS;
        let load = |ranks| set.variant(format!("{name}_{input}_{output}_{ranks}"));
        Ok([load(a)?, load(b)?, load(c)?])
    };
    let [a, b, c, d, e] = TYPES;
    Ok([types(a)?, types(b)?, types(c)?, types(d)?, types(e)?])
}

pub(crate) fn one_of<P>(kernels: &ByTypes<P>, kind: Kind, size: usize) -> Option<&Kernel<P>> {
    let types = TYPES
        .iter()
        .position(|&types| types == (kind.dtype, kind.output))?;
    let ranks = RANKS.iter().position(|&ranks| size <= ranks)?;
    Some(&kernels[types][ranks])
}

/// Granules of rows for a thread up to which an exchange with experts may be early. Of more, combines take longer, and those behind such a
/// dispatch most, as measured on two GPUs; why is not known.
const FEW_TURNS: usize = 2;

/// Most elements of a piece, whose granules kernels count in 32 bits.
pub(crate) const MOST_ELEMENTS: usize = 1 << 31;

impl Core {
    /// Byte of a rank's memory where the first buffer of sums begins, and bytes from one to the next.
    pub(crate) fn sum_buffers(&self) -> (u64, u64) {
        let layout = self.control.layout();
        let [first, second] = [0, 1].map(|n| (self.data_start() + layout.sums_start(n)) as u64);
        (first, second - first)
    }

    /// Makes empty where data is its own flag, which no kernel uses now: the buffers of sums, and the slots of messages.
    pub(crate) fn empty_slots(&self) -> Result<()> {
        let layout = self.control.layout();
        let of_mail = |n| layout.start(Area::Mail, Half::of(n));
        let mail = layout.half_bytes(Area::Mail);
        let sums = layout.sums_start(BUFFERS) - layout.sums_start(0);
        let all = [
            (layout.sums_start(0), sums),
            (of_mail(0), mail),
            (of_mail(1), mail),
        ];
        let own = |start| self.address(self.rank(), self.data_start() + start);
        for (start, bytes) in all {
            self.set_now(own(start), 0xFF, bytes)?;
        }
        let told = layout.all_told();
        self.set_now(own(told.start), 0, told.len())
    }
}

/// What all kernels that push are told in a job; the rest of their parameters is the default.
macro_rules! pushing {
    ($parameters:ident, $job:expr) => {{
        let (slots, buffer_bytes) = $job.core.sum_buffers();
        $parameters {
            slots,
            buffer_bytes,
            buffers: BUFFERS as u32,
            ..waiting!($parameters, $job)
        }
    }};
}

pub(crate) use pushing;

/// Where pieces of all begin, the first one last. With nothing in it there is one, too: all ranks meet.
pub(crate) fn pieces(all: usize, piece: usize) -> impl Iterator<Item = usize> {
    (0..all.max(1)).step_by(piece.max(1)).rev()
}

impl Job<'_> {
    /// Enqueues one exchange, launched as the plan has it. With the last one, which is told how many bytes from its result on the
    /// call gives, the call ends.
    pub(crate) fn push(
        &mut self,
        (algorithm, launch): (AllReduceAlgorithm, brigade_device::Launch),
        kind: Kind,
        piece: Piece,
        last: Option<usize>,
    ) -> Result<()> {
        self.steps_now()?;
        let core = self.core;
        let (rank, size) = (core.rank(), core.size());
        let kernels = &core.device.opened.kernels.pushes;
        let kernel = kernels.of(algorithm, kind, size).ok_or_else(|| {
            let got = format!("{algorithm:?} {kind:?}");
            Error::invalid("algorithm", got, "one that there is a kernel for")
        })?;
        let types = (kind.dtype, kind.output);
        let cut = Granules::new(algorithm, piece.elements, types, size);
        let moved = match algorithm {
            AllReduceAlgorithm::TwoShotPush => {
                moved::two_shot_push(rank, size, piece.elements, piece.elements, types)
            }
            _ => moved::one_shot(size, piece.elements * kind.dtype.bytes()),
        };
        let parameters = AllReduceParams {
            desk: core.memory.desk(Asker::Messages),
            moved_bytes: moved,
            from: piece.from,
            out: piece.to,
            // What is poisoned.
            out_bytes: last.unwrap_or(piece.elements * kind.output.bytes()) as u64,
            poison: types::poison_pattern(kind.output),
            elements: piece.elements as u64,
            granules: cut.all as u32,
            share: cut.share as u32,
            op: types::op_code(kind.op),
            signature: self.kind.signature,
            last: u32::from(last.is_some()),
            ..pushing!(AllReduceParams, self)
        };
        let shape = self.early(core.push_shape(launch, cut.share));
        // SAFETY: input and result lie in buffers of the call, the rest in the group's memory, which the core keeps.
        unsafe { kernel.launch(self.stream, shape, parameters) }.map_err(Into::into)
    }

    /// The launch of an exchange with experts, of so many granules of this rank's rows, where a place has room for so many blocks at most. It may be
    /// [early](Self::early) if granules are few.
    ///
    /// A block of all threads of a multiprocessor has room on an empty one alone, whatever places are reserved. Where blocks of another communicator may be
    /// in its way, who wait for a peer in whose way such a block is, there is none.
    pub(crate) fn rows_shape(
        &self,
        launch: brigade_device::Launch,
        together: u32,
        granules: usize,
    ) -> Launch {
        let core = self.core;
        let places = core.exchanging.blocks();
        let blocks = u32::from(launch.blocks).min(places / 2);
        // More threads than so many narrow blocks have.
        let pays =
            u32::from(launch.threads) > ALL_REDUCE_THREADS && 2 * blocks > u32::from(launch.blocks);
        let asks = core.memory.desk.is_some();
        if pays && core.size() > 1 && !asks && core.device.overtakes(self.lane) {
            return Launch {
                programmatic: core.overtakes && 4 * blocks <= places,
                ..Launch::grid(blocks, 2 * ALL_REDUCE_THREADS)
            };
        }
        let shape = core.push_shape_beside(launch, usize::MAX, together);
        match granules <= FEW_TURNS * (shape.blocks * shape.threads) as usize {
            true => self.early(shape),
            false => shape,
        }
    }

    /// Enqueues a reduce-scatter in pieces of so many elements of each share, an exchange each, launched as the plan has it. `elements` are
    /// those that every rank gets. The first piece goes last: behind its address lies all of the result.
    pub(crate) fn push_shares(
        &mut self,
        (launch, piece): (brigade_device::Launch, usize),
        kind: Kind,
        elements: &[usize],
        to_and_from: (&Buffer, &Buffer),
    ) -> Result<()> {
        let most = elements.iter().max().copied().unwrap_or(0);
        pieces(most, piece).try_for_each(|start| {
            let cut = |&all: &usize| start.min(all)..start.saturating_add(piece).min(all);
            let cut: SmallVec<[Range<usize>; 8]> = elements.iter().map(cut).collect();
            self.push_part_of_shares(launch, kind, (elements, &cut), to_and_from)
        })
    }

    /// Of every rank's share, that part.
    fn push_part_of_shares(
        &mut self,
        launch: brigade_device::Launch,
        kind: Kind,
        (elements, cut): (&[usize], &[Range<usize>]),
        (to, from): (&Buffer, &Buffer),
    ) -> Result<()> {
        self.steps_now()?;
        let core = self.core;
        let (rank, size) = (core.rank(), core.size());
        let kernels = &core.device.opened.kernels.pushes;
        let kernel = one_of(&kernels.scatter, kind, size)
            .ok_or_else(|| Error::invalid("from", format!("{kind:?}"), "a kernel for it"))?;
        let bytes: PerRank = cut.iter().map(|c| c.len() * kind.dtype.bytes()).collect();
        let most = bytes.iter().max().copied().unwrap_or(0);
        let share = most.div_ceil(GRANULE_BYTES);
        let (own, out_bytes) = (&cut[rank], kind.output.bytes());
        let last = cut.iter().all(|c| c.start == 0);
        let mut parameters = ReduceScatterParams {
            desk: core.memory.desk(Asker::Messages),
            moved_bytes: moved::push_scatter(rank, &bytes),
            from: from.address(),
            out: to.address() + (own.start * out_bytes) as u64,
            out_bytes: if last {
                to.bytes()
            } else {
                own.len() * out_bytes
            } as u64,
            poison: types::poison_pattern(kind.output),
            share: share as u32,
            op: types::op_code(kind.op),
            signature: self.kind.signature,
            last: u32::from(last),
            ..pushing!(ReduceScatterParams, self)
        };
        for (r, (part, offset)) in cut.iter().zip(rows::offsets(elements)).enumerate() {
            parameters.first[r] = (offset + part.start) as u64;
            parameters.elements[r] = part.len() as u64;
        }
        let shape = self.early(core.push_shape(launch, share));
        // SAFETY: input and result lie in buffers of the call, the rest in the group's memory, which the core keeps.
        unsafe { kernel.launch(self.stream, shape, parameters) }.map_err(Into::into)
    }

    /// Enqueues a copy to all in pieces of so many bytes of each rank, an exchange each, launched as the plan has it. For each rank, the bytes
    /// that it has, and the address where they go: 0 if they stay where they are. What a piece is, and what this rank moves of it, follows from
    /// the bytes that each rank has in it. The first piece goes last, with which all is poisoned.
    pub(crate) fn push_copy(
        &mut self,
        (launch, piece): (brigade_device::Launch, usize),
        from: &Buffer,
        parts: &[(usize, u64)],
        how: impl Fn(&[usize]) -> (Packets, u64),
    ) -> Result<()> {
        let most = parts.iter().map(|(bytes, _)| *bytes).max().unwrap_or(0);
        pieces(most, piece).try_for_each(|start| {
            let cut = |&(all, _): &(usize, u64)| piece.min(all.saturating_sub(start));
            let cut: PerRank = parts.iter().map(cut).collect();
            self.push_part_of_copy(launch, (from, start), (parts, &cut), how(&cut))
        })
    }

    /// Of what every rank has, so many bytes from there on.
    fn push_part_of_copy(
        &mut self,
        launch: brigade_device::Launch,
        (from, start): (&Buffer, usize),
        (parts, cut): (&[(usize, u64)], &[usize]),
        (packets, moved_bytes): (Packets, u64),
    ) -> Result<()> {
        self.steps_now()?;
        let core = self.core;
        let last = start == 0;
        let mut parameters = PushCopyParams {
            desk: core.memory.desk(Asker::Messages),
            moved_bytes,
            from: from.address() + start as u64,
            poison: types::poison_pattern(from.dtype()),
            packets: packets.most as u32,
            // Where only one rank has something, all have its slot.
            slot: if packets.slots > 1 {
                packets.slot as u32
            } else {
                0
            },
            filled: packets.granules() as u32,
            signature: self.kind.signature,
            last: u32::from(last),
            ..pushing!(PushCopyParams, self)
        };
        for (r, (&(all, out), &bytes)) in parts.iter().zip(cut).enumerate() {
            parameters.bytes[r] = bytes as u64;
            parameters.poisoned[r] = if last { all } else { bytes } as u64;
            parameters.out[r] = match out {
                0 => 0,
                out => out + start as u64,
            };
        }
        let threads = packets.most * core.size().saturating_sub(1).max(1);
        let shape = core.push_shape(launch, threads);
        let kernel = &core.device.opened.kernels.pushes.copy;
        // SAFETY: all parts lie in buffers of the call, the rest in the group's memory, which the core keeps.
        unsafe { kernel.launch(self.stream, shape, parameters) }.map_err(Into::into)
    }

    /// Enqueues a sum of so many elements of [a type](SENT) that the kernel in front sends, launched [so](Core::sent_shape).
    pub(crate) fn sum_sent(&mut self, shape: Launch, elements: usize, to: &Buffer) -> Result<()> {
        self.steps_now()?;
        let (core, dtype) = (self.core, to.dtype());
        let kernels = &core.device.opened.kernels.pushes;
        let of_type = SENT.iter().position(|&t| t == dtype);
        let kernel = of_type.map(|i| &kernels.sent[i]).ok_or_else(|| {
            Error::invalid("output.dtype", dtype, "one that there is a kernel for")
        })?;
        let granules = (elements * dtype.bytes()).div_ceil(GRANULE_BYTES) as u32;
        let parameters = AllReduceParams {
            moved_bytes: moved::one_shot(core.size(), elements * dtype.bytes()),
            out: to.address(),
            out_bytes: to.bytes() as u64,
            poison: types::poison_pattern(dtype),
            elements: elements as u64,
            granules,
            share: granules,
            op: types::op_code(ReduceOp::Sum),
            signature: self.kind.signature,
            last: 1,
            ..pushing!(AllReduceParams, self)
        };
        // SAFETY: the result lies in a buffer of the call, the rest in the group's memory, which the core keeps.
        unsafe { kernel.launch(self.stream, shape, parameters) }.map_err(Into::into)
    }
}

impl Core {
    /// The launch that a plan has for so many elements in one shot, if each thread has one of their granules at most.
    pub(crate) fn sent_shape(
        &self,
        plan: &Plan,
        elements: usize,
        dtype: DataType,
    ) -> Option<Launch> {
        let &Plan::AllReduce { launch, .. } = plan else {
            return None;
        };
        let granules = (elements * dtype.bytes()).div_ceil(GRANULE_BYTES);
        let shape = self.push_shape(launch, granules);
        (granules <= (shape.blocks * shape.threads) as usize).then_some(shape)
    }

    /// As the plan has it, within the places that this rank reserved, and no more than there are granules for. The kernel may
    /// take its place while the one before it still waits, if there are places for both.
    pub(crate) fn push_shape(&self, launch: brigade_device::Launch, granules: usize) -> Launch {
        self.push_shape_beside(launch, granules, ALL_REDUCE_THREADS)
    }

    /// The same where a place has room for so many blocks at most, however few threads they have.
    pub(crate) fn push_shape_beside(
        &self,
        launch: brigade_device::Launch,
        granules: usize,
        together: u32,
    ) -> Launch {
        let core = self;
        let places = match core.size() {
            // Nobody to wait for.
            1 => core.device.info().sms.into(),
            _ => core.exchanging.blocks(),
        };
        let threads = u32::from(launch.threads).clamp(32, ALL_REDUCE_THREADS);
        let fit = places * core.in_a_place(threads).min(together);
        let needed = u32::try_from(granules.div_ceil(threads as usize)).unwrap_or(u32::MAX);
        // Where there is a hook, one block asks it.
        let most = if core.memory.desk.is_some() { 1 } else { fit };
        let blocks = u32::from(launch.blocks.max(1))
            .min(needed)
            .clamp(1, most.max(1));
        Launch {
            programmatic: core.overtakes && 2 * blocks <= fit,
            ..Launch::grid(blocks, threads)
        }
    }
}
