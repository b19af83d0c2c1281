//! One shape on one rank: what it has, its calls, and their times.

use super::{Linears, Which, expected, preferred::preferred};
use crate::{
    data,
    factor::{Factor, Gathered},
    ranks::{PATIENCE, Rank},
    sample::{Times, Variant, measure},
    shape::Shape,
    trace::{self, Spans},
};
use anyhow::{Result, anyhow};
use brigade::{
    AllGatherLoraLinearParams, Allocate, Buffer, Call, Chunk, Comm, CommConfig, DataType,
    GemmParams, Lease, Linear, Lora, LoraLinearReduceScatterParams, LoraRun, Output, OverlapMode,
    ParallelMode, Plan, ReduceOp,
};
use half::bf16;

/// What adapters are multiplied by.
pub const ADAPTER_SCALE: f32 = 0.5;

/// What one rank has of a shape.
pub struct Measured {
    pub times: Vec<Times>,
    pub plan: String,
    /// Of one call on every rank.
    pub spans: Vec<Spans>,
}

/// One shape on one rank.
pub struct Case<'a> {
    pub rank: &'a Rank,
    pub options: &'a Linears,
    pub shape: Shape,
    pub counts: Vec<usize>,
    /// Own rows `[m / ranks, k]` for gather-linear, all rows `[m, k]` for its twin.
    pub x: Factor,
    /// `[n, k]`, as layers store it.
    pub weight: Factor,
    pub adapters: Vec<[Buffer; 2]>,
    pub d: Buffer,
}

/// How a call of ours is made.
#[derive(Clone, Copy)]
struct How {
    mode: Option<OverlapMode>,
    /// Whether adapters take part, where there are some.
    adapters: bool,
}

impl How {
    /// As it is asked for, in a mode.
    const fn by(mode: Option<OverlapMode>) -> Self {
        Self {
            mode,
            adapters: true,
        }
    }
}

/// Seeds of what ranks have, so that every rank can make every rank's.
fn seed(rank: usize, of: u64) -> u64 {
    1000 * of + rank as u64
}

impl<'a> Case<'a> {
    pub fn new(rank: &'a Rank, options: &'a Linears, which: Which, shape: Shape) -> Result<Self> {
        let Shape { m, k, n } = shape;
        let (me, size) = (rank.number(), rank.size());
        let counts = brigade::plan::rows::split(m, size).to_vec();
        let own = counts[me];
        let (rows, out_rows) = match which {
            Which::Gather => (own, m),
            Which::Scatter => (m, own),
        };
        let numbers = |of: u64, dims: [usize; 2]| data::numbers(seed(me, of), dims[0] * dims[1]);
        let upload = |of: u64, dims| data::upload(&rank.device, &rank.on, &numbers(of, dims), dims);
        let factor = |of: u64, dims| {
            let values = numbers(of, dims);
            Factor::new(&rank.device, &rank.on, options.scheme, &values, dims)
        };
        let adapters = (0..options.adapters() as u64)
            .map(|i| {
                Ok([
                    upload(10 + 2 * i, [k, options.lora])?,
                    upload(11 + 2 * i, [options.lora, n])?,
                ])
            })
            .collect::<Result<_>>()?;
        Ok(Self {
            rank,
            options,
            shape,
            counts,
            x: factor(1, [rows, k])?,
            weight: factor(2, [n, k])?,
            adapters,
            d: data::poisoned(&rank.device, &rank.on, [out_rows, n])?,
        })
    }

    fn config(&self, which: Which) -> CommConfig {
        let Shape { m, k, n } = self.shape;
        let mut config = CommConfig::new(ParallelMode::Tp);
        config.sm_budget = self.options.sm_budget;
        let (scheme, size) = (self.options.scheme, self.rank.size());
        let padded = m.div_ceil(size) * size;
        (config.gather_bytes, config.reduce_scatter_bytes) = match which {
            Which::Gather => (m * k * scheme.bytes(), 0),
            Which::Scatter => (0, padded * n * DataType::BF16.bytes()),
        };
        config.gather_scale_bytes = match which {
            Which::Gather => scheme.scale_bytes(m, size),
            Which::Scatter => 0,
        };
        config
    }

    fn runs(&self, how: How) -> Vec<LoraRun<'_>> {
        let adapters = self.adapters.iter().filter(|_| how.adapters);
        adapters
            .zip(self.run_rows())
            .map(|([a, b], rows)| LoraRun {
                rows,
                adapter: Some(Lora {
                    a: a.view(),
                    b: b.view(),
                    scale: ADAPTER_SCALE,
                }),
            })
            .collect()
    }

    /// One gather-linear into `d`.
    fn gather(
        &self,
        lease: &mut Lease<'_>,
        weight: &Factor,
        d: &mut Buffer,
        how: How,
    ) -> brigade::Result<Plan> {
        let chunk = if self.options.resident {
            let (rows, k) = (&self.counts, self.shape.k);
            // The rows were written there before: what is measured begins behind that.
            Chunk::Resident(lease.own_chunk(rows, k, DataType::BF16)?.filled())
        } else {
            Chunk::Copy(self.x.operand())
        };
        let runs = self.runs(how);
        let result = lease.all_gather_lora_linear(AllGatherLoraLinearParams {
            transpose_weight: true,
            runs: &runs,
            output: Output::Into(d.view_mut()),
            choice: how.mode,
            batch_invariant: self.options.batch_invariant,
            ..AllGatherLoraLinearParams::new(chunk, &self.counts, weight.operand())
        })?;
        Ok(result.plan)
    }

    /// One of the twin.
    fn scatter(&self, lease: &mut Lease<'_>, d: &mut Buffer, how: How) -> brigade::Result<Plan> {
        let runs = self.runs(how);
        let result = lease.lora_linear_reduce_scatter(LoraLinearReduceScatterParams {
            transpose_weight: true,
            runs: &runs,
            output: Output::Into(d.view_mut()),
            choice: how.mode,
            batch_invariant: self.options.batch_invariant,
            ..LoraLinearReduceScatterParams::new(
                self.x.operand(),
                &self.counts,
                self.weight.operand(),
            )
        })?;
        Ok(result.plan)
    }

    /// Own rows into the user buffer, both halves.
    fn fill(&self, comm: &Comm) -> brigade::Result<()> {
        for _ in 0..2 {
            let mut lease = comm.lease(&self.rank.on)?;
            let mut own = lease.own_chunk(&self.counts, self.shape.k, DataType::BF16)?;
            self.rank
                .device
                .copy(&self.rank.on, own.view_mut(), self.x.operand().kernel())?;
            let filled = own.filled();
            let mut d = self.d.clone();
            lease.all_gather_lora_linear(AllGatherLoraLinearParams {
                transpose_weight: true,
                output: Output::Into(d.view_mut()),
                ..AllGatherLoraLinearParams::new(
                    Chunk::Resident(filled),
                    &self.counts,
                    self.weight.operand(),
                )
            })?;
        }
        Ok(())
    }

    /// Row `i` of x, as [`Factor::row`] gives it.
    pub fn row(&self, i: usize) -> Result<Vec<u8>> {
        self.x.row(&self.rank.device, &self.rank.on, i)
    }

    /// Column `j` of the weight, likewise.
    pub fn weight_row(&self, j: usize) -> Result<Vec<u8>> {
        self.weight.row(&self.rank.device, &self.rank.on, j)
    }

    /// An adapter's A `[k, lora]` or B `[lora, n]`.
    pub fn adapter(&self, i: usize, of: usize) -> Result<Vec<bf16>> {
        let buffer = &self.adapters[i][of];
        let mut values = vec![bf16::ZERO; buffer.shape().len()];
        let bytes = bytemuck::cast_slice_mut(&mut values);
        self.rank.device.read(&self.rank.on, buffer.view(), bytes)?;
        Ok(values)
    }

    /// Rows that go by each adapter.
    pub fn run_rows(&self) -> Vec<usize> {
        let count = self.adapters.len().max(1);
        brigade::plan::rows::split(self.shape.m, count).to_vec()
    }

    /// D.
    pub fn result(&self) -> Result<Vec<bf16>> {
        let mut values = vec![bf16::ZERO; self.d.shape().len()];
        let bytes = bytemuck::cast_slice_mut(&mut values);
        self.rank.device.read(&self.rank.on, self.d.view(), bytes)?;
        Ok(values)
    }

    /// What the operation is made of, and cannot be faster than: the product alone, and the collective alone.
    fn parts<'v>(
        &'v self,
        which: Which,
        comm: &Comm,
        variants: &mut Vec<Variant<'v>>,
    ) -> Result<()> {
        let (rank, options) = (self.rank, self.options);
        let (how, scheme) = ((options.common.calls, options.common.graph), options.scheme);
        let Shape { m, k, n } = self.shape;
        let numbers = |of, count| data::numbers(seed(rank.number(), of), count);
        let (device, on) = (&rank.device, &rank.on);
        let gathered = match which {
            Which::Gather => {
                let values = numbers(3, m * k);
                let size = rank.size();
                Some(Gathered::new(device, on, scheme, &values, ([m, k], size))?)
            }
            Which::Scatter => None,
        };
        let full = gathered.as_ref().map_or(&self.x, |g| &g.whole).clone();
        let whole = data::poisoned(device, on, [m, n])?;
        let product = {
            let mut whole = whole.clone();
            move || {
                let gemm = GemmParams {
                    transpose_b: true,
                    ..GemmParams::new(full.operand(), self.weight.operand())
                };
                rank.device
                    .gemm(&rank.on, &gemm, Output::Into(whole.view_mut()))
                    .map(drop)
            }
        };
        variants.push(Variant::new(rank, "gemm", how, product.clone())?);
        if which == Which::Gather {
            let narrow = Factor::new(device, on, scheme, &numbers(4, 16 * k), [16, k])?;
            let mut out = data::poisoned(device, on, [m, 16])?;
            let comm = comm.clone();
            let gather = move || {
                let mut lease = comm.lease(&rank.on)?;
                // Adapters have the columns of the weight.
                let how = How {
                    mode: Some(OverlapMode::Pull).filter(|_| rank.size() > 1),
                    adapters: false,
                };
                self.gather(&mut lease, &narrow, &mut out, how).map(drop)
            };
            variants.push(Variant::new(rank, "gather", how, gather)?);
        }
        if let Some(nccl) = &rank.nccl {
            let mut d = self.d.clone();
            let alone = move || match &mut gathered.clone() {
                Some(all) => all.gather(nccl, &rank.on, &self.x),
                None => nccl.reduce_scatter(&rank.on, whole.view(), d.view_mut(), ReduceOp::Sum),
            };
            variants.push(Variant::new(rank, "nccl", how, alone.clone())?);
            let (mut collective, mut product) = (alone, product);
            let both = move || match which {
                Which::Gather => collective().and_then(|()| product()),
                Which::Scatter => product().and_then(|()| collective()),
            };
            variants.push(Variant::new(rank, "nccl_and_gemm", how, both)?);
        }
        Ok(())
    }

    /// What all ranks have in common of a call in this mode, if one is forced.
    fn call(
        &self,
        which: Which,
        comm: &Comm,
        choice: Option<OverlapMode>,
    ) -> brigade::Result<Call> {
        let (group, x, weight) = (comm.group(), self.x.operand(), self.weight.operand());
        let runs = self.runs(How::by(choice));
        let output = Output::Allocate(DataType::BF16);
        match which {
            Which::Gather => AllGatherLoraLinearParams {
                transpose_weight: true,
                runs: &runs,
                output,
                choice,
                ..AllGatherLoraLinearParams::new(Chunk::Copy(x), &self.counts, weight)
            }
            .check(&group)
            .map(Call::GatherLinear),
            Which::Scatter => LoraLinearReduceScatterParams {
                transpose_weight: true,
                runs: &runs,
                output,
                choice,
                ..LoraLinearReduceScatterParams::new(x, &self.counts, weight)
            }
            .check(&group)
            .map(Call::LinearReduceScatter),
        }
    }

    /// The first call, in this mode if one is forced: what was planned, with a result that is right.
    fn first(&self, which: Which, comm: &Comm, forced: Option<OverlapMode>) -> Result<Plan> {
        let (rank, options) = (self.rank, self.options);
        let mut d = self.d.clone();
        let plan = {
            let mut lease = comm.lease(&rank.on)?;
            match which {
                Which::Gather => self.gather(&mut lease, &self.weight, &mut d, How::by(forced))?,
                Which::Scatter => self.scatter(&mut lease, &mut d, How::by(forced))?,
            }
        };
        rank.on.sync(PATIENCE)?;
        if options.common.check {
            expected::check(self, which)?;
        }
        rank.meet()?;
        Ok(plan)
    }

    /// Further calls.
    fn again<'v>(
        &'v self,
        which: Which,
        comm: &Comm,
        how: How,
    ) -> impl FnMut() -> brigade::Result<()> + use<'v, 'a> {
        let (comm, mut d) = (comm.clone(), self.d.clone());
        move || {
            let mut lease = comm.lease(&self.rank.on)?;
            match which {
                Which::Gather => self.gather(&mut lease, &self.weight, &mut d, how),
                Which::Scatter => self.scatter(&mut lease, &mut d, how),
            }
            .map(drop)
        }
    }

    /// Times, and what was planned.
    pub fn run(&self, which: Which) -> Result<Measured> {
        let (rank, options) = (self.rank, self.options);
        let comm = rank.join(&self.config(which))?;
        if options.resident && which == Which::Gather {
            self.fill(&comm)?;
        }
        let how = (options.common.calls, options.common.graph);
        let forced = options.mode.0;
        let plan = self.first(which, &comm, forced)?;
        // On all ranks the same, also where one of them cannot have the mode that was planned.
        let planned = comm.explain(&self.call(which, &comm, forced)?)?;
        let ours = How::by(forced);
        let mut all = vec![("ours", ours), ("off", How::by(Some(OverlapMode::Off)))];
        if !self.adapters.is_empty() {
            let adapters = false;
            all.push(("plain", How { adapters, ..ours }));
        }
        if is_in_tiles(&planned) {
            let piece = OverlapMode::Chunked { pieces: 1 };
            all.push(("chunked", How::by(Some(piece))));
        }
        let variant = |(name, one)| Variant::new(rank, name, how, self.again(which, &comm, one));
        let mut variants = all.into_iter().map(variant).collect::<Result<Vec<_>>>()?;
        self.parts(which, &comm, &mut variants)?;
        let times = measure(rank, &mut variants, options.common.rounds)?;
        let spans = trace::record(rank, self.again(which, &comm, ours))?;
        comm.check()?;
        Ok(Measured {
            times,
            plan: plan.to_string(),
            spans,
        })
    }

    /// Times with overlap off, and of the mode that is forced or preferred, in turn.
    pub fn pairs(&self, which: Which) -> Result<(OverlapMode, [Times; 2])> {
        let (rank, options) = (self.rank, self.options);
        let config = self.config(which);
        let comm = rank.join(&config)?;
        let how = (options.common.calls, options.common.graph);
        let mode = match options.mode.0 {
            Some(mode) => mode,
            None => preferred(&comm, &config, &self.call(which, &comm, None)?)?,
        };
        self.first(which, &comm, Some(mode))?;
        let variant = |name, mode| {
            let one = How::by(Some(mode));
            Variant::new(rank, name, how, self.again(which, &comm, one))
        };
        let mut variants = [variant("off", OverlapMode::Off)?, variant("overlap", mode)?];
        let times = measure(rank, &mut variants, options.common.rounds)?;
        comm.check()?;
        let times = times.try_into();
        let times = times.map_err(|_| anyhow!("other than two variants were measured"))?;
        Ok((mode, times))
    }
}

/// Whether products of this plan have tiles that wait.
fn is_in_tiles(plan: &Plan) -> bool {
    matches!(plan, Plan::GatherLinear(p) | Plan::LinearReduceScatter(p) if p.mode == OverlapMode::Tiles)
}
