//! One rank's layer: a chain of calls, of which the host reads nothing until it has ended. Only the first pass stops behind the dispatch, to
//! see which experts' weights it must load.

use super::{ExpertSource, Options, RankReport, Sampled, Scoring, Sum};
use crate::{Error, Result};
use brigade::{
    Arrangement, Bootstrap, Buffer, CombineParams, Comm, CommConfig, DataType, Device, DeviceExt,
    DispatchParams, Dispatched, Fp8Cast, GemmParams, GroupedGemmParams, Groups, MemoryType,
    Operand, Output, ParallelMode, Placement, PlacementCall, QScheme, QView, ReceivedIds, Route,
    Routing, ScaleFormat, SiluMulParams, Stream, TopK, TopKParams, View, Weighting,
    plan::routes::Slots,
};
use half::bf16;
use std::{
    ops::Range,
    sync::Arc,
    time::{Duration, Instant},
};

/// What a slot gets begins at a multiple of so many rows, as tiles of matrix products like it.
const ALIGNMENT: usize = 16;

/// Longest that ranks wait for each other's weights.
const LOADING: Duration = Duration::from_secs(600);

/// Powers of two, so that a value times its scale is a bf16.
const CAST: Fp8Cast = Fp8Cast {
    format: ScaleFormat::PowerOfTwo,
    column_major: false,
};

/// Weights of this rank's experts that rows have come for.
struct Loaded {
    /// How many.
    experts: usize,
    /// `[experts, 2 * feed_forward, hidden]`
    gate_up: Buffer,
    /// `[experts, hidden, feed_forward]`
    down: Buffer,
    /// Which of them each slot has, i32 `[slots]`; -1 for those that nobody has chosen.
    which: Buffer,
    /// Most rows that came to any rank: room for so many is there in all further passes, which choose the same experts.
    room: usize,
}

/// One rank, with what stays on its device.
pub(super) struct Layer<'a> {
    source: &'a dyn ExpertSource,
    options: &'a Options,
    boot: &'a dyn Bootstrap,
    device: Arc<dyn Device>,
    on: Stream,
    comm: Comm,
    /// Own tokens, counted over all ranks.
    tokens: Range<usize>,
    /// `[tokens, hidden]`
    rows: Buffer,
    /// `[experts, hidden]`, f32.
    router: Buffer,
    slots: Range<usize>,
    /// From the first pass on.
    loaded: Option<Loaded>,
    plans: [String; 2],
}

/// What one pass gives.
struct Pass {
    /// `[tokens, hidden]`
    out: Vec<bf16>,
    experts: Vec<Vec<u32>>,
    /// Rows for each slot.
    counts: Vec<i32>,
    /// Of router, dispatch, experts and combine.
    times: [Duration; 4],
}

impl<'a> Layer<'a> {
    pub(super) fn new(
        source: &'a dyn ExpertSource,
        options: &'a Options,
        boot: &'a dyn Bootstrap,
        device: Arc<dyn Device>,
    ) -> Result<Self> {
        let shape = source.shape();
        let (rank, size) = (boot.rank(), boot.size());
        let on = device.stream(0)?;
        let comm = device.clone().join(boot, &config(source, options))?;
        let first: usize = options.tokens[..rank].iter().sum();
        let tokens = first..first + options.tokens[rank];
        let dims = [tokens.len(), shape.hidden];
        let experts = shape.experts;
        let slots = Slots::new(PlacementCall::Even { experts }, size).of(rank);
        Ok(Self {
            rows: device.upload(&on, &source.tokens(tokens.clone()), &dims)?,
            router: device.upload(&on, &source.router(), &[experts, shape.hidden])?,
            loaded: None,
            plans: Default::default(),
            source,
            options,
            boot,
            device,
            on,
            comm,
            tokens,
            slots,
        })
    }

    /// Runs the layer once to load what its tokens choose, and then as often as was asked.
    pub(super) fn run(mut self, sample: &[usize]) -> Result<RankReport> {
        let first = self.pass()?;
        let (mut times, mut differing) = (Vec::new(), None);
        for repeat in 1..=self.options.repeats {
            let next = self.pass()?;
            let bits = |out: &[bf16]| out.iter().map(|v| v.to_bits()).collect::<Vec<_>>();
            if bits(&next.out) != bits(&first.out) {
                differing = differing.or(Some(repeat));
            }
            times.push(next.times);
        }
        self.comm.close(self.options.deadline)?;
        let hidden = self.source.shape().hidden;
        let own = sample.iter().filter(|token| self.tokens.contains(token));
        let sampled = own.map(|&token| {
            let at = token - self.tokens.start;
            let row = &first.out[at * hidden..][..hidden];
            Sampled {
                token,
                experts: first.experts[at].clone(),
                bits: row.iter().map(|v| v.to_bits()).collect(),
            }
        });
        let loaded = self.loaded.as_ref().map_or(0, |loaded| loaded.experts);
        Ok(RankReport {
            device: self.device.info().name.clone(),
            sampled: sampled.collect(),
            rows_per_slot: first.counts.iter().map(|&n| n as usize).collect(),
            weight_bytes: loaded as u64 * self.source.shape().expert_bytes(),
            plans: self.plans,
            differing,
            times,
        })
    }

    fn sync(&self) -> Result<Instant> {
        self.on.sync(self.options.deadline)?;
        Ok(Instant::now())
    }

    fn pass(&mut self) -> Result<Pass> {
        let began = self.sync()?;
        let chosen = self.choose()?;
        let routed = self.sync()?;
        let there = self.dispatch(&chosen)?;
        let sent = self.sync()?;
        let loaded = match self.loaded.take() {
            Some(loaded) => loaded,
            None => self.load(&there)?,
        };
        let ready = self.sync()?;
        let made = self.experts(&there, &loaded)?;
        self.loaded = Some(loaded);
        let multiplied = self.sync()?;
        let back = self.comm.lease(&self.on)?.combine(CombineParams {
            rows: made.view(),
            handle: &there.handle,
            sum: match self.options.sum {
                Sum::Expert => brigade::CombineSum::Expert,
                Sum::Rank => brigade::CombineSum::ExpertByRank,
            },
            weights: None,
            biases: &[],
            output: Output::Allocate(DataType::BF16),
            waits: None,
            choice: None,
        })?;
        let combined = self.sync()?;
        self.plans = [there.plan.to_string(), back.plan.to_string()];
        let (device, on) = (&self.device, &self.on);
        let ids: Vec<i32> = device.download(on, chosen.ids.view())?;
        let of_token = |ids: &[i32]| ids.iter().map(|&id| id as u32).collect();
        Ok(Pass {
            out: device.download(on, given(back.d, "combine")?.view())?,
            experts: ids
                .chunks(self.source.shape().top_k)
                .map(of_token)
                .collect(),
            counts: device.download(on, there.counts.view())?,
            times: [
                routed - began,
                sent - routed,
                multiplied - ready,
                combined - multiplied,
            ],
        })
    }

    fn new_buffer(&self, dtype: DataType, shape: &[usize]) -> Result<Buffer> {
        let memory = MemoryType::Device;
        Ok(self.device.allocate(&self.on, memory, dtype, shape)?)
    }

    /// Scores every token in f32, and chooses its experts.
    fn choose(&self) -> Result<TopK> {
        let shape = self.source.shape();
        let (device, on) = (&self.device, &self.on);
        let mut wide = self.new_buffer(DataType::F32, &[self.tokens.len(), shape.hidden])?;
        device.convert(on, wide.view_mut(), self.rows.view())?;
        let product = GemmParams {
            transpose_b: true,
            ..GemmParams::new(&wide, &self.router)
        };
        let scores = device.gemm(on, &product, Output::Allocate(DataType::F32))?;
        let scores = given(scores, "router")?;
        let (weights, factor) = match shape.scoring {
            Scoring::SoftmaxOfChosen | Scoring::SoftmaxRenormalized => {
                (Weighting::SoftmaxOfChosen, 1.0)
            }
            Scoring::Sigmoid { factor } => (Weighting::Sigmoid, factor as f32),
        };
        let params = TopKParams {
            weights,
            factor,
            ..TopKParams::new(scores.view(), shape.top_k)
        };
        Ok(device.top_k(on, &params)?)
    }

    fn dispatch(&self, chosen: &TopK) -> Result<Dispatched> {
        let experts = self.source.shape().experts;
        Ok(self.comm.lease(&self.on)?.dispatch(DispatchParams {
            rows: self.rows.view(),
            beside: &[],
            route: Route::Experts {
                routing: Routing {
                    ids: chosen.ids.view(),
                    placement: Placement::Even { experts },
                },
                weights: Some(chosen.weights.view()),
            },
            arrangement: Arrangement::ByExpert {
                alignment: ALIGNMENT,
            },
            max_tokens: self.options.max_tokens(),
            max_recv: self.loaded.as_ref().map(|loaded| loaded.room),
            received_ids: ReceivedIds::Local,
            totals: None,
            waits: None,
            cast: self.options.fp8.then_some(CAST),
            choice: None,
        })?)
    }

    /// Makes the weights of the experts that rows have come for, if all ranks together have memory for them.
    fn load(&self, there: &Dispatched) -> Result<Loaded> {
        let counts: Vec<i32> = self.device.download(&self.on, there.counts.view())?;
        let shape = self.source.shape();
        let wanted: Vec<usize> = (0..counts.len()).filter(|&s| counts[s] > 0).collect();
        // While they are made, and while the host multiplies by them in f32, one expert is there up to three times more.
        let need = (wanted.len() as u64 + 3) * shape.expert_bytes();
        let status = self.device.memory_status()?;
        let free = match status.free_bytes {
            // Not known.
            0 => u64::MAX,
            // A little is left to others.
            bytes => bytes - bytes / 20,
        };
        let told = [need.to_le_bytes(), free.to_le_bytes()].concat();
        let all = self.boot.all_gather(&told, LOADING)?;
        let number = |told: &[u8], at: usize| {
            let bytes = told.get(at..at + 8).and_then(|b| b.try_into().ok());
            bytes.map_or(0, u64::from_le_bytes)
        };
        let of_all: Vec<(u64, u64)> = all.iter().map(|t| (number(t, 0), number(t, 8))).collect();
        // Ranks on the host share its memory. All find the same, so that none waits for one that gave up.
        let short = if self.options.on_gpus() {
            of_all.into_iter().find(|(need, free)| need > free)
        } else {
            let need: u64 = of_all.iter().map(|o| o.0).sum();
            let free = of_all.iter().map(|o| o.1).min().unwrap_or(0);
            (need > free).then_some((need, free))
        };
        if let Some((need, free)) = short {
            let gb = |bytes: u64| format!("{:.1} GB", bytes as f64 / 1e9);
            let field = "memory for the weights of chosen experts";
            let want = format!(
                "at most {}, of what is free: fewer tokens or experts",
                gb(free)
            );
            return Err(Error::field(field, gb(need), want));
        }
        let (device, on) = (&self.device, &self.on);
        let (hidden, inner, experts) = (shape.hidden, shape.feed_forward, wanted.len());
        let mut gate_up = self.new_buffer(DataType::BF16, &[experts, 2 * inner, hidden])?;
        let mut down = self.new_buffer(DataType::BF16, &[experts, hidden, inner])?;
        let mut which = vec![-1i32; counts.len()];
        for (at, &slot) in wanted.iter().enumerate() {
            let made = self.source.expert(self.slots.start + slot);
            for (to, values) in [(&mut gate_up, &made.gate_up), (&mut down, &made.down)] {
                let mut to = to.view_mut();
                device.write(on, to.rows(at..at + 1)?, bytemuck::cast_slice(values))?;
            }
            which[slot] = at as i32;
        }
        // Deadlines of calls are not for loading.
        let came = (there.handle.capacity() as u64).to_le_bytes();
        let of_all = self.boot.all_gather(&came, LOADING)?;
        let room = of_all.iter().map(|told| number(told, 0)).max();
        Ok(Loaded {
            experts,
            gate_up,
            down,
            which: device.upload(on, &which, &[counts.len()])?,
            room: room.unwrap_or(0) as usize,
        })
    }

    /// What every expert makes of its rows, as they lie: `down(silu(gate(x)) * up(x))`, the inner value rounded once.
    fn experts(&self, there: &Dispatched, loaded: &Loaded) -> Result<Buffer> {
        let (device, on) = (&self.device, &self.on);
        let offsets = there.handle.offsets();
        let grouped = |x: Operand<'_>, weights: View<'_>, output: DataType| {
            let params = GroupedGemmParams {
                which: Some(loaded.which.view()),
                ..GroupedGemmParams::new(
                    x,
                    weights,
                    Groups::Behind {
                        offsets,
                        counts: Some(there.counts.view()),
                    },
                )
            };
            given(
                device.grouped_gemm(on, &params, Output::Allocate(output))?,
                "experts",
            )
        };
        // What came in fp8 is what was quantized block by block.
        let rows = match &there.scales {
            None => Operand::Plain(there.rows.view()),
            Some(scales) => Operand::Quantized(QView::new(
                there.rows.view(),
                scales.view(),
                None,
                QScheme::Fp8PerTokenBlock,
            )?),
        };
        let both = grouped(rows, loaded.gate_up.view(), DataType::F32)?;
        let gate = SiluMulParams {
            from: both.view(),
            rows: Some(offsets.slice(self.slots.len(), 1)?),
        };
        let inner = device.silu_mul(on, &gate, Output::Allocate(DataType::BF16))?;
        let inner = given(inner, "gate")?;
        grouped((&inner).into(), loaded.down.view(), DataType::BF16)
    }
}

/// What was to be allocated.
fn given(made: Option<Buffer>, by: &'static str) -> Result<Buffer> {
    made.ok_or_else(|| Error::field(by, "without a result", "a new buffer"))
}

/// Room for the rows of all ranks in one piece, within reason.
fn config(source: &dyn ExpertSource, options: &Options) -> CommConfig {
    const MOST: usize = 64 << 20;
    let shape = source.shape();
    let row_bytes = 2 * shape.hidden + 16 * shape.top_k + 64;
    let room = options.tokens.len() * (options.max_tokens() * row_bytes + 8192);
    let bytes = room.min(MOST);
    CommConfig {
        dispatch_bytes: bytes,
        combine_bytes: bytes,
        gather_bytes: 0,
        reduce_scatter_bytes: 0,
        deadline: options.deadline,
        first_deadline: options.deadline.max(Duration::from_secs(120)),
        ..CommConfig::new(ParallelMode::Ep)
    }
}
