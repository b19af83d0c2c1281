//! All-reduce with a norm: pushed, it is one kernel (`kernels/all_reduce_norm.cu`); pulled, the sums come first, and the same
//! kernel takes them as a rank alone. A product in front of it may [send](crate::sent) what it would push.

use crate::{
    Kernel, KernelSet, Launch, Missing, all_reduce,
    card::Card,
    comm::{CudaComm, unexpected},
    core::Core,
    inject::Asker,
    job::{Job, waiting},
    memory::check_reach,
    pushed::MOST_ELEMENTS,
    sent::SENT,
    types,
};
use brigade_device::{
    AllReduceAlgorithm, AllReduceNormParams, Buffer, Call, DataType, Device, Error, Normed, Plan,
    Reason, ReduceOp, Result, Turn, View,
};
use brigade_kernels::{
    ALL_REDUCE_THREADS, AllReduceNormParams as Parameters, NORM_CLUSTER_THREADS, NORM_COLUMNS,
    NORM_FP8, NORM_INT8, NORM_PLAIN, NORM_THREADS,
};
use brigade_plan::{
    moved,
    norm::{self, Blocks, Room},
    pushed::RowShares,
};
use brigade_sync::BUFFERS;
use std::sync::Arc;

/// Most ranks that a kernel is for, smallest first.
const RANKS: [usize; 2] = [4, 8];

/// Types of rows.
pub(crate) const TYPES: [DataType; 3] = [DataType::F32, DataType::F16, DataType::BF16];

/// A call whose blocks share the work begins [early](Job::early) if there are at most so many rows of a block. Of more, calls take longer where the next
/// one lies in wait, as measured on two GPUs; why is not known.
const FEW_ROWS: usize = 2;

// Kernels and plans agree on what a launch is made of.
const _: () = assert!(norm::MOST_THREADS == NORM_THREADS);
const _: () = assert!(norm::PLACE_THREADS == ALL_REDUCE_THREADS);
const _: () = assert!(norm::MOST_RANKS_IN_CLUSTERS == RANKS[0]);
const _: () = assert!(norm::MOST_THREADS_IN_CLUSTERS == NORM_CLUSTER_THREADS);

/// Kernels of one algorithm: by type, and by ranks.
type ByTypes = [[Kernel<Parameters>; RANKS.len()]; TYPES.len()];

fn by_types(
    load: impl Fn(DataType, usize) -> Result<Kernel<Parameters>, Missing>,
) -> Result<ByTypes, Missing> {
    let ranks = |dtype| -> Result<_, Missing> {
        let [a, b] = RANKS;
        Ok([load(dtype, a)?, load(dtype, b)?])
    };
    let [a, b, c] = TYPES;
    Ok([ranks(a)?, ranks(b)?, ranks(c)?])
}

/// Kernels of one algorithm.
#[derive(Debug)]
struct Kernels {
    alone: ByTypes,
    /// By type: blocks that share rows, of up to [`norm::MOST_RANKS_IN_CLUSTERS`] ranks.
    in_clusters: [Kernel<Parameters>; TYPES.len()],
}

/// All kernels that norm what they reduce.
#[derive(Debug)]
pub(crate) struct NormKernels {
    one_shot: Kernels,
    two_shot: Kernels,
    /// In two shots, of many rows.
    many: ByTypes,
    /// In one shot that was sent, by clusters, of few rows of [`SENT`].
    sent: [Kernel<Parameters>; SENT.len()],
}

impl NormKernels {
    pub(crate) fn load(set: &Arc<KernelSet>) -> Result<Self, Missing> {
        let algorithm = |name: &str| -> Result<Kernels, Missing> {
            let clusters = |dtype: DataType| set.variant(format!("_{name}_{dtype}_cluster"));
            let [a, b, c] = TYPES;
            Ok(Kernels {
                alone: by_types(|dtype, ranks| set.variant(format!("_{name}_{dtype}_{ranks}")))?,
                in_clusters: [clusters(a)?, clusters(b)?, clusters(c)?],
            })
        };
        let many = |dtype, ranks| set.variant(format!("_two_{dtype}_many_{ranks}"));
        let sent = |dtype: DataType| set.variant(format!("_sent_{dtype}"));
        let [f16, bf16] = SENT;
        Ok(Self {
            one_shot: algorithm("one")?,
            two_shot: algorithm("two")?,
            many: by_types(many)?,
            sent: [sent(f16)?, sent(bf16)?],
        })
    }

    fn sent_of(&self, dtype: DataType) -> Option<&Kernel<Parameters>> {
        let of_type = SENT.iter().position(|&t| t == dtype)?;
        Some(&self.sent[of_type])
    }

    fn of(
        &self,
        algorithm: AllReduceAlgorithm,
        dtype: DataType,
        size: usize,
        blocks: &Blocks,
    ) -> Option<&Kernel<Parameters>> {
        let kernels = match algorithm {
            AllReduceAlgorithm::TwoShotPush => &self.two_shot,
            _ => &self.one_shot,
        };
        let of_type = TYPES.iter().position(|&t| t == dtype)?;
        if blocks.cluster > 1 {
            return Some(&kernels.in_clusters[of_type]);
        }
        let ranks = RANKS.iter().position(|&ranks| size <= ranks)?;
        let kernels = if blocks.split {
            &self.many
        } else {
            &kernels.alone
        };
        Some(&kernels[of_type][ranks])
    }
}

/// The arguments but for the rows, and what follows from them.
pub(crate) struct Arguments {
    pub(crate) residual: Buffer,
    pub(crate) weight: Buffer,
    pub(crate) sum: Buffer,
    pub(crate) normed: Buffer,
    pub(crate) scales: Option<Buffer>,
    pub(crate) eps: f32,
    pub(crate) scale: f32,
    pub(crate) form: u32,
    pub(crate) hidden: usize,
}

impl Arguments {
    /// Of the residual, the weight and the new residual, if all is within reach of the GPU.
    pub(crate) fn of(
        card: &Card,
        [residual, weight, sum]: [View<'_>; 3],
        eps: f32,
        normed: &Normed<'_>,
    ) -> Result<Self> {
        let (scales, scale, form) = match normed {
            Normed::Plain(_) => (None, 0.0, NORM_PLAIN),
            Normed::Int8PerToken { scales, .. } => {
                (Some(scales.as_view().retain()), 0.0, NORM_INT8)
            }
            Normed::Fp8PerTensor { scale, .. } => (None, *scale, NORM_FP8),
        };
        let of = Self {
            residual: residual.retain(),
            weight: weight.retain(),
            sum: sum.retain(),
            normed: normed.values().retain(),
            scales,
            eps,
            scale,
            form,
            hidden: residual.shape().columns(),
        };
        for (field, buffer) in [
            ("residual.memory", &of.residual),
            ("weight.memory", &of.weight),
            ("sum.memory", &of.sum),
            ("normed.memory", &of.normed),
        ] {
            check_reach(card, field, buffer)?;
        }
        if let Some(scales) = &of.scales {
            check_reach(card, "normed.scales.memory", scales)?;
        }
        Ok(of)
    }

    /// Whether all rows of these, and of what they are added to, can be taken in whole granules.
    pub(crate) fn are_wide(&self, from: Option<&Buffer>) -> bool {
        let row_bytes = self.hidden * self.residual.dtype().bytes();
        [&self.residual, &self.weight, &self.sum, &self.normed]
            .into_iter()
            .chain(from)
            .all(|b| b.address() % 16 == 0)
            && row_bytes.is_multiple_of(16)
    }

    fn outputs(&self) -> impl Iterator<Item = &Buffer> {
        [&self.sum, &self.normed].into_iter().chain(&self.scales)
    }

    /// All of them.
    pub(crate) fn all(&self) -> Vec<&Buffer> {
        let inputs = [&self.residual, &self.weight];
        inputs.into_iter().chain(self.outputs()).collect()
    }

    /// And the rows.
    pub(crate) fn with<'a>(&'a self, from: &'a Buffer) -> Vec<&'a Buffer> {
        let mut all = self.all();
        all.push(from);
        all
    }
}

/// Where a kernel has the rows from.
#[derive(Clone, Copy)]
pub(crate) enum Source<'a> {
    /// Its own, which it pushes.
    Pushed(AllReduceAlgorithm, &'a Buffer),
    /// They are sums already.
    Sums(&'a Buffer),
    /// The kernel in front sends them, of all ranks.
    Sent,
}

impl<'a> Source<'a> {
    fn buffer(self) -> Option<&'a Buffer> {
        match self {
            Self::Pushed(_, from) | Self::Sums(from) => Some(from),
            Self::Sent => None,
        }
    }
}

/// Rows of a call that are taken at once.
#[derive(Clone, Copy)]
pub(crate) struct Rows {
    pub(crate) first: usize,
    pub(crate) count: usize,
    pub(crate) last: bool,
}

impl CudaComm {
    pub(crate) fn run_all_reduce_norm(
        &self,
        turn: &Turn,
        p: AllReduceNormParams<'_>,
    ) -> Result<Plan> {
        let call = p.check()?;
        let (from, views) = (p.from.retain(), [p.residual, p.weight, p.sum.as_view()]);
        check_reach(&self.gpu().card, "from.memory", &from)?;
        let of = Arguments::of(&self.gpu().card, views, p.eps, &p.normed)?;
        let plan = self.core.plan(&call)?;
        let (
            &Call::AllReduceNorm {
                rows,
                hidden,
                dtype,
                ..
            },
            &Plan::AllReduce {
                algorithm,
                piece_elements,
                ..
            },
        ) = (&call, &plan)
        else {
            return Err(unexpected(&plan));
        };
        let most = NORM_COLUMNS as usize * 2 / dtype.bytes();
        if hidden > most {
            return Err(Reason::new(
                "cuda-norm",
                format!("rows of {hidden} {dtype} are normed at once, {most} at most"),
                "call all_reduce, then residual_norm, which takes rows of any length",
            )
            .into());
        }
        let step = (piece_elements.min(MOST_ELEMENTS) / hidden).clamp(1, rows.max(1));
        // With no rows in it, too: all ranks meet.
        let pieces = (0..rows.max(1)).step_by(step).map(|first| Rows {
            first,
            count: step.min(rows - first),
            last: first + step >= rows,
        });
        match algorithm {
            AllReduceAlgorithm::OneShotPush | AllReduceAlgorithm::TwoShotPush => {
                let source = Source::Pushed(algorithm, &from);
                self.core
                    .exchange(turn.stream(), &call, &of.with(&from), |job| {
                        let mut pieces = pieces;
                        pieces.try_for_each(|rows| job.norm(source, &of, rows))
                    })?;
            }
            _ => self.pulled(turn, &call, (algorithm, piece_elements), &from, &of)?,
        }
        Ok(plan)
    }

    /// The sums first, by an all-reduce that pulls.
    fn pulled(
        &self,
        turn: &Turn,
        call: &Call,
        (algorithm, piece_elements): (AllReduceAlgorithm, usize),
        from: &Buffer,
        of: &Arguments,
    ) -> Result<()> {
        let lane = self.gpu().lane(turn.stream())?;
        let (dtype, shape) = (from.dtype(), from.shape());
        let sums = self.gpu().scratch(lane, dtype, shape.dims())?;
        let mut kept = of.with(from);
        kept.push(&sums);
        self.core
            .collective(turn.stream(), call, &kept, None, |job| {
                for out in of.outputs() {
                    job.poisons(out.address(), out.bytes(), out.dtype());
                }
                let kind = all_reduce::Kind {
                    dtype,
                    output: dtype,
                    op: ReduceOp::Sum,
                };
                all_reduce::pulled(job, algorithm, kind, piece_elements, from, &sums)?;
                let rows = Rows {
                    first: 0,
                    count: shape.rows(),
                    last: false,
                };
                job.norm(Source::Sums(&sums), of, rows)
            })
    }
}

impl Job<'_> {
    /// Enqueues one exchange; or what comes behind sums.
    pub(crate) fn norm(&mut self, source: Source<'_>, of: &Arguments, rows: Rows) -> Result<()> {
        self.steps_now()?;
        let core = self.core;
        let (from, dtype) = (source.buffer(), of.residual.dtype());
        let algorithm = match source {
            Source::Pushed(algorithm, _) => Some(algorithm),
            Source::Sums(_) => None,
            Source::Sent => Some(AllReduceAlgorithm::OneShotPush),
        };
        let (rank, size) = algorithm.map_or((0, 1), |_| (core.rank(), core.size()));
        let (slots, buffer_bytes) = core.sum_buffers();
        // A rank alone takes no use of a buffer, through which the sums of two shots go.
        let pushed = algorithm.filter(|_| size > 1);
        let pushed = pushed.unwrap_or(AllReduceAlgorithm::OneShotPush);
        let cut = RowShares::new(pushed, (rows.count, of.hidden), dtype, size);
        let at = |buffer: &Buffer, columns: usize| {
            buffer.address() + (rows.first * columns * buffer.dtype().bytes()) as u64
        };
        let row_bytes = of.hidden * dtype.bytes();
        let wide = of.are_wide(from);
        let own = of.hidden * cut.of(rank).len() * dtype.bytes();
        let all = row_bytes * rows.count;
        let moved = match pushed {
            AllReduceAlgorithm::TwoShotPush => (all - own + own * (size - 1)) as u64,
            _ => moved::one_shot(size, all),
        };
        let mut parameters = Parameters {
            desk: algorithm.map_or(0, |_| core.memory.desk(Asker::Messages)),
            moved_bytes: moved,
            from: from.map_or(0, |from| at(from, of.hidden)),
            residual: at(&of.residual, of.hidden),
            weight: of.weight.address(),
            sum: at(&of.sum, of.hidden),
            normed: at(&of.normed, of.hidden),
            scales: of.scales.as_ref().map_or(0, |s| at(s, 1)),
            slots,
            buffer_bytes,
            buffers: BUFFERS as u32,
            rows: rows.count as u32,
            hidden: of.hidden as u32,
            granules: cut.row_granules as u32,
            share: cut.share as u32,
            wide: u32::from(wide),
            eps: of.eps.to_bits(),
            scale: of.scale.to_bits(),
            form: of.form,
            signature: self.kind.signature,
            last: u32::from(rows.last),
            ..waiting!(Parameters, self)
        };
        if algorithm.is_none() {
            parameters.base = core.address(core.rank(), 0);
            (parameters.rank, parameters.size) = (0, 1);
        }
        for (i, out) in of.outputs().enumerate() {
            parameters.poisoned[i] = out.address();
            parameters.poisoned_bytes[i] = out.bytes() as u64;
            parameters.poison[i] = types::poison_pattern(out.dtype());
        }
        let room = core.norm_room(algorithm.is_some(), dtype, wide);
        let blocks = Blocks::new(pushed, &cut, size, &room);
        let kernels = &core.device.opened.kernels.norms;
        let kernel = match source {
            Source::Sent => kernels.sent_of(dtype),
            _ => kernels.of(pushed, dtype, size, &blocks),
        };
        let kernel = kernel
            .ok_or_else(|| Error::invalid("algorithm", format!("{pushed:?}"), "a kernel for it"))?;
        let mut shape = Launch {
            programmatic: blocks.programmatic,
            cluster: blocks.cluster,
            ..Launch::grid(blocks.blocks, blocks.threads)
        };
        if !blocks.split || rows.count <= FEW_ROWS * blocks.blocks as usize {
            shape = self.early(shape);
        }
        // SAFETY: all arguments lie in buffers of the call, the rest in the group's memory, which the core keeps.
        unsafe { kernel.launch(self.stream, shape, parameters) }.map_err(Into::into)
    }
}

impl Core {
    /// Whether so many rows, pushed in one shot, are normed by clusters.
    pub(crate) fn norms_in_clusters(&self, of: &Arguments, rows: usize) -> bool {
        let (one_shot, dtype, size) = (
            AllReduceAlgorithm::OneShotPush,
            of.residual.dtype(),
            self.size(),
        );
        let cut = RowShares::new(one_shot, (rows, of.hidden), dtype, size);
        let room = self.norm_room(true, dtype, of.are_wide(None));
        Blocks::new(one_shot, &cut, size, &room).cluster > 1
    }

    /// What this rank has for a kernel: within the figures of kernels that push, if it pushes.
    fn norm_room(&self, pushes: bool, dtype: DataType, wide: bool) -> Room {
        let sms = u32::from(self.device.info().sms);
        let budget = self.config.sm_budget.map_or(sms, u32::from);
        let most = match pushes {
            true => budget.min(self.table.all_reduce.of(dtype).max_blocks.into()),
            false => budget,
        };
        Room {
            sms,
            most: most.max(1),
            budget: self.config.sm_budget.is_some(),
            places: self.exchanging.blocks(),
            shared: self.shares(),
            overtakes: self.overtakes,
            wide,
            hooked: self.memory.desk.is_some(),
        }
    }
}
