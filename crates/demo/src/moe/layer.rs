//! One rank's layer.

use super::{ExpertSource, Options, RankReport, Sampled, Sum};
use crate::{Error, Result};
use brigade::{
    Arrangement, Bootstrap, Buffer, CombineParams, Comm, CommConfig, DataType, Device, DeviceExt,
    DispatchParams, Dispatched, Fp8Cast, GemmParams, MemoryType, Output, ParallelMode, Placement,
    PlacementCall, ReceivedIds, Route, Routing, ScaleFormat, Stream, plan::routes::Slots,
};
use float8::F8E4M3;
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

/// An expert's weights on the device.
struct DeviceExpert {
    gate_up: Buffer,
    down: Buffer,
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
    /// For each slot; those that nobody has chosen are not made.
    experts: Vec<Option<DeviceExpert>>,
    plans: [String; 2],
}

/// What a router decides, as it goes to the device.
struct Chosen {
    ids: Buffer,
    weights: Buffer,
    /// Of every token.
    experts: Vec<Vec<u32>>,
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
            experts: slots.clone().map(|_| None).collect(),
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
        let first = self.pass(true)?;
        let (mut times, mut differing) = (Vec::new(), None);
        for repeat in 1..=self.options.repeats {
            let next = self.pass(false)?;
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
        let loaded = self.experts.iter().flatten().count();
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

    fn pass(&mut self, first: bool) -> Result<Pass> {
        let began = self.sync()?;
        let chosen = self.choose()?;
        let routed = self.sync()?;
        let there = self.dispatch(&chosen)?;
        let counts: Vec<i32> = self.device.download(&self.on, there.counts.view())?;
        let sent = self.sync()?;
        if first {
            self.load(&counts)?;
        }
        let loaded = self.sync()?;
        let made = self.experts(&there, &counts)?;
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
            choice: None,
        })?;
        let combined = self.sync()?;
        self.plans = [there.plan.to_string(), back.plan.to_string()];
        Ok(Pass {
            out: self
                .device
                .download(&self.on, given(back.d, "combine")?.view())?,
            experts: chosen.experts,
            counts,
            times: [
                routed - began,
                sent - routed,
                multiplied - loaded,
                combined - multiplied,
            ],
        })
    }

    fn new_buffer(&self, dtype: DataType, shape: &[usize]) -> Result<Buffer> {
        let memory = MemoryType::Device;
        Ok(self.device.allocate(&self.on, memory, dtype, shape)?)
    }

    /// Scores every token in f32 on the device, and chooses its experts on the host.
    fn choose(&self) -> Result<Chosen> {
        let shape = self.source.shape();
        let (tokens, k) = (self.tokens.len(), shape.top_k);
        let mut scores: Vec<f32> = Vec::new();
        if tokens > 0 {
            let mut wide = self.new_buffer(DataType::F32, &[tokens, shape.hidden])?;
            self.device
                .convert(&self.on, wide.view_mut(), self.rows.view())?;
            let product = GemmParams {
                transpose_b: true,
                ..GemmParams::new(&wide, &self.router)
            };
            let output = Output::Allocate(DataType::F32);
            let made = self.device.gemm(&self.on, &product, output)?;
            scores = self
                .device
                .download(&self.on, given(made, "router")?.view())?;
        }
        let (mut ids, mut weights) = (Vec::new(), Vec::new());
        let mut experts = Vec::new();
        for scores in scores.chunks(shape.experts) {
            let scores: Vec<f64> = scores.iter().map(|&s| f64::from(s)).collect();
            let chosen = shape.choose(&scores);
            ids.extend(chosen.iter().map(|c| c.0 as i32));
            weights.extend(chosen.iter().map(|c| c.1 as f32));
            experts.push(chosen.iter().map(|c| c.0 as u32).collect());
        }
        Ok(Chosen {
            ids: self.device.upload(&self.on, &ids, &[tokens, k])?,
            weights: self.device.upload(&self.on, &weights, &[tokens, k])?,
            experts,
        })
    }

    fn dispatch(&self, chosen: &Chosen) -> Result<Dispatched> {
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
            // Products need the counts on the host anyway.
            max_recv: None,
            received_ids: ReceivedIds::Local,
            totals: None,
            cast: self.options.fp8.then_some(CAST),
            choice: None,
        })?)
    }

    /// Makes the weights of the experts that rows have come for, if all ranks together have memory for them.
    fn load(&mut self, counts: &[i32]) -> Result<()> {
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
        for slot in wanted {
            let made = self.source.expert(self.slots.start + slot);
            let (hidden, inner) = (shape.hidden, shape.feed_forward);
            self.experts[slot] = Some(DeviceExpert {
                gate_up: self
                    .device
                    .upload(&self.on, &made.gate_up, &[2 * inner, hidden])?,
                down: self.device.upload(&self.on, &made.down, &[hidden, inner])?,
            });
        }
        // Deadlines of calls are not for loading.
        self.boot.all_gather(&[], LOADING)?;
        Ok(())
    }

    /// What every expert makes of its rows, as they lie.
    fn experts(&self, there: &Dispatched, counts: &[i32]) -> Result<Buffer> {
        let shape = self.source.shape();
        let offsets: Vec<i32> = self.device.download(&self.on, there.handle.offsets())?;
        let wide;
        let rows = match &there.scales {
            None => &there.rows,
            Some(scales) => {
                wide = self.widened(&there.rows, scales)?;
                &wide
            }
        };
        let dims = there.handle.shape(shape.hidden)?;
        let mut made = self.new_buffer(DataType::BF16, dims.dims())?;
        for (slot, &count) in counts.iter().enumerate().filter(|c| *c.1 > 0) {
            let expert = self.experts[slot]
                .as_ref()
                .ok_or_else(|| Error::field("expert", "not loaded", "as in the first pass"))?;
            let (first, count) = (offsets[slot] as usize, count as usize);
            let x = rows.slice(first, count)?;
            let inner = self.inner(&x, &expert.gate_up)?;
            let product = GemmParams {
                transpose_b: true,
                ..GemmParams::new(&inner, &expert.down)
            };
            let mut to = made.view_mut();
            let to = Output::Into(to.rows(first..first + count)?);
            self.device.gemm(&self.on, &product, to)?;
        }
        Ok(made)
    }

    /// `silu(gate(x)) * up(x)`: the product on the device, gating on the host, and one rounding.
    fn inner(&self, x: &Buffer, gate_up: &Buffer) -> Result<Buffer> {
        let inner = self.source.shape().feed_forward;
        let product = GemmParams {
            transpose_b: true,
            ..GemmParams::new(x, gate_up)
        };
        let both = self
            .device
            .gemm(&self.on, &product, Output::Allocate(DataType::F32))?;
        let both: Vec<f32> = self
            .device
            .download(&self.on, given(both, "expert")?.view())?;
        let gated: Vec<bf16> = both
            .chunks_exact(2 * inner)
            .flat_map(|row| {
                let (gate, up) = row.split_at(inner);
                gate.iter().zip(up)
            })
            .map(|(&g, &u)| bf16::from_f32(g / (1.0 + (-g).exp()) * u))
            .collect();
        let shape = [x.shape().rows(), inner];
        Ok(self.device.upload(&self.on, &gated, &shape)?)
    }

    /// Rows that came in fp8, times their scales, on the host.
    fn widened(&self, rows: &Buffer, scales: &Buffer) -> Result<Buffer> {
        let mut bytes = vec![0u8; rows.bytes()];
        self.device.read(&self.on, rows.view(), &mut bytes)?;
        let scales: Vec<f32> = self.device.download(&self.on, scales.view())?;
        let hidden = self.source.shape().hidden;
        let blocks = CAST.scales(hidden).1;
        let wide: Vec<bf16> = bytes
            .chunks(hidden)
            .zip(scales.chunks(blocks))
            .flat_map(|(row, scales)| {
                let value = |(at, &bits): (usize, &u8)| {
                    let value = F8E4M3::from_bits(bits).to_f32();
                    bf16::from_f32(value * scales[at / Fp8Cast::BLOCK])
                };
                row.iter().enumerate().map(value).collect::<Vec<_>>()
            })
            .collect();
        let dims = rows.shape();
        Ok(self.device.upload(&self.on, &wide, dims.dims())?)
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
