//! A block of a tensor-parallel transformer with Llama-3-70B's dimensions, in bf16 with random weights: of brigade-candle's layers, and of
//! candle's own with NCCL's all-reduce behind two of them, which is what stacks on candle do.
//!
//! Both have the same weights, norms before both halves of a block, and one function for what a rank does alone: attention. A pass takes
//! the residual and its norm, and gives those of the next block. Prompts go sequence-parallel here, so each rank adds and normalizes
//! its own rows; beside it every rank does so with all rows.

mod attention;

use crate::{
    Common, meta,
    ranks::{PATIENCE, Rank, Ranks},
    sample::{Times, Variant, measure},
    trace::{self, Spans},
};
use anyhow::{Context, Result, ensure};
use attention::{Attention, Past};
use brigade::{CommConfig, DataType, ParallelMode, ReduceOp, cuda::NcclComm, plan::rows};
use brigade_candle::{
    ColumnParallelLinear, GatherLinear, LinearReduceScatter, Parallel, Residual, ResidualNorm,
    RowParallelLinear, Runs, brigade_error,
};
use candle_core::{DType, Device, Module, Tensor};
use candle_nn::{
    Linear,
    ops::{rms_norm, swiglu},
};
use clap::Args;
use serde_json::{Value, json};
use std::{path::PathBuf, sync::Arc};

const HIDDEN: usize = 8192;
const FEED_FORWARD: usize = 28672;
const EPS: f32 = 1e-5;

/// What is measured.
#[derive(Clone, Debug, Args)]
pub struct Block {
    #[command(flatten)]
    pub common: Common,
    /// Tokens of a prompt that is read
    #[arg(long, num_args = 0.., value_delimiter = ',', default_values_t = [2048, 8192])]
    prefill: Vec<usize>,
    /// Sequences that each get a token
    #[arg(long, num_args = 0.., value_delimiter = ',', default_values_t = [1, 16, 64])]
    decode: Vec<usize>,
    /// Tokens that sequences have had before
    #[arg(long, default_value_t = 1024)]
    past: usize,
    /// Write a timeline of one pass of the first row here, and its picture beside it
    #[arg(long, value_name = "FILE")]
    trace: Option<PathBuf>,
}

/// One row of the table.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Case {
    Prefill(usize),
    Decode(usize),
}

impl Case {
    const fn name(self) -> &'static str {
        match self {
            Self::Prefill(_) => "prefill",
            Self::Decode(_) => "decode",
        }
    }

    const fn tokens(self) -> usize {
        match self {
            Self::Prefill(tokens) | Self::Decode(tokens) => tokens,
        }
    }
}

/// A rank's part of the weights, `[out, in]` each.
struct Weights {
    qkv: Tensor,
    output: Tensor,
    gate_up: Tensor,
    down: Tensor,
    /// In front of the feed-forward half, and of the next block.
    norms: [Tensor; 2],
}

impl Weights {
    fn new(
        place: &Device,
        attention: &Attention,
        size: usize,
        norms: [Tensor; 2],
    ) -> candle_core::Result<Self> {
        let random = |outputs: usize, inputs: usize| {
            let spread = (inputs as f64).sqrt().recip();
            Tensor::randn(0f32, spread as f32, (outputs, inputs), place)?.to_dtype(DType::BF16)
        };
        let own = FEED_FORWARD / size;
        Ok(Self {
            qkv: random(attention.qkv_width(), HIDDEN)?,
            output: random(HIDDEN, attention.width())?,
            gate_up: random(2 * own, HIDDEN)?,
            down: random(HIDDEN, own)?,
            norms,
        })
    }
}

/// The residual, and its norm.
type State = (Tensor, Tensor);

/// Everything that a rank has for one row of the table.
struct Setup {
    case: Case,
    attention: Attention,
    past: Past,
    weights: Weights,
    /// All rows, the same on every rank.
    whole: State,
    /// Rows of each rank, where they are spread.
    shares: Vec<usize>,
    /// This rank's rows, where they are spread; else all.
    own: State,
}

impl Setup {
    fn new(parallel: &Parallel, case: Case, options: &Block) -> candle_core::Result<Self> {
        let (place, size, rank) = (parallel.place(), parallel.size(), parallel.rank());
        let tokens = case.tokens();
        let attention = Attention::new(size, place, tokens.max(options.past))?;
        // What all ranks have, and then a seed of the rank's.
        place.set_seed(1000)?;
        let norm = || Tensor::rand(0.5f32, 1.5, HIDDEN, place)?.to_dtype(DType::BF16);
        let norms = [norm()?, norm()?];
        let residual = Tensor::randn(0f32, 1.0, (tokens, HIDDEN), place)?.to_dtype(DType::BF16)?;
        let normed = rms_norm(&residual, &norms[1], EPS)?;
        place.set_seed(1 + rank as u64)?;
        let weights = Weights::new(place, &attention, size, norms)?;
        let past = match case {
            Case::Prefill(_) => Past::none(),
            Case::Decode(batch) => attention.past(batch, options.past, place)?,
        };
        let shares = rows::split(tokens, size).to_vec();
        let first = rows::offsets(&shares)[rank];
        let own = |all: &Tensor| all.narrow(0, first, shares[rank])?.contiguous();
        let own = match case {
            Case::Prefill(_) => (own(&residual)?, own(&normed)?),
            Case::Decode(_) => (residual.clone(), normed.clone()),
        };
        Ok(Self {
            case,
            attention,
            past,
            weights,
            whole: (residual, normed),
            shares,
            own,
        })
    }

    /// A pass of brigade-candle's layers.
    fn ours<'a>(
        &'a self,
        parallel: &Parallel,
    ) -> candle_core::Result<Box<dyn Fn() -> candle_core::Result<State> + 'a>> {
        let w = &self.weights;
        let parallel = parallel.clone();
        let [inner, next] = w.norms.each_ref().map(|w| ResidualNorm::new(w, EPS));
        let (inner, next, none) = (inner?, next?, Runs::none());
        if let Case::Decode(_) = self.case {
            let qkv = ColumnParallelLinear::from_shard(&parallel, &w.qkv, None)?;
            let output = RowParallelLinear::from_shard(&parallel, &w.output, None)?;
            let gate_up = ColumnParallelLinear::from_shard(&parallel, &w.gate_up, None)?;
            let down = RowParallelLinear::from_shard(&parallel, &w.down, None)?;
            let (residual, normed) = &self.own;
            let like = || -> candle_core::Result<Residual> {
                Ok(Residual {
                    sum: residual.zeros_like()?,
                    normed: normed.zeros_like()?,
                })
            };
            let (middle, out) = (like()?, like()?);
            let batch = residual.dim(0)?;
            let new = |columns: usize| {
                Tensor::zeros((batch, columns), residual.dtype(), residual.device())
            };
            let own = w.down.dim(1)?;
            let (queries, inside) = (new(w.qkv.dim(0)?)?, new(own)?);
            // Everything but attention writes where the step before did.
            return Ok(Box::new(move || {
                qkv.forward_into(normed, &none, &queries)?;
                let attended = self.attention.step(&queries, &self.past)?;
                output.forward_norm_into(&attended.0, &none, residual, &inner, &middle)?;
                gate_up.forward_silu_mul_into(&middle.normed, &none, &inside)?;
                down.forward_norm_into(&inside, &none, &middle.sum, &next, &out)?;
                // Freed here, it is in the way of nothing that gains by an early start.
                drop(attended);
                Ok((out.sum.clone(), out.normed.clone()))
            }));
        }
        let size = parallel.size();
        let qkv = GatherLinear::from_shard(&parallel, &w.qkv, None, w.qkv.dim(0)? * size)?;
        let output = LinearReduceScatter::from_shard(
            &parallel,
            &w.output,
            None,
            self.attention.width() * size,
        )?;
        let gate_up = GatherLinear::from_shard(&parallel, &w.gate_up, None, 2 * FEED_FORWARD)?;
        let down = LinearReduceScatter::from_shard(&parallel, &w.down, None, FEED_FORWARD)?;
        Ok(Box::new(move || {
            let (residual, normed) = &self.own;
            let shares = Some(self.shares.as_slice());
            let attended = qkv.forward_rows(normed, shares, &none)?;
            let attended = self.attention.prompt(&attended)?;
            let rows = output.forward_rows(&attended, shares, &none)?;
            let middle = parallel.residual_norm(&rows, residual, &inner)?;
            let inside = gate_up.forward_rows(&middle.normed, shares, &none)?;
            let rows = down.forward_rows(&parallel.silu_mul(&inside)?, shares, &none)?;
            let out = parallel.residual_norm(&rows, &middle.sum, &next)?;
            Ok((out.sum, out.normed))
        }))
    }

    /// The same of candle's linears and norms, with NCCL's all-reduce.
    fn candles<'a>(
        &'a self,
        parallel: &'a Parallel,
        nccl: &'a NcclComm,
    ) -> impl Fn() -> candle_core::Result<State> + 'a {
        let w = &self.weights;
        let [qkv, output, gate_up, down] = [&w.qkv, &w.output, &w.gate_up, &w.down]
            .map(|weight| Linear::new(weight.clone(), None));
        // A new tensor for each sum, as custom operations around NCCL make it.
        let all_reduce = move |x: &Tensor| {
            let from = parallel.lend(x)?;
            parallel.make(x.dtype(), x.dims(), |to| {
                nccl.all_reduce(parallel.stream(), from.view(), to, ReduceOp::Sum)
            })
        };
        move || {
            let (residual, normed) = &self.whole;
            let qkv = qkv.forward(normed)?;
            let attended = match self.case {
                Case::Prefill(_) => self.attention.prompt(&qkv)?,
                Case::Decode(_) => self.attention.step(&qkv, &self.past)?.0,
            };
            let middle = (residual + all_reduce(&output.forward(&attended)?)?)?;
            let normed = rms_norm(&middle, &w.norms[0], EPS)?;
            let inside = swiglu(&gate_up.forward(&normed)?)?;
            let out = (middle + all_reduce(&down.forward(&inside)?)?)?;
            let normed = rms_norm(&out, &w.norms[1], EPS)?;
            Ok((out, normed))
        }
    }

    /// Rows of both against each other: they add in other orders, and round at other places.
    fn check(&self, parallel: &Parallel, ours: &State, candles: &State) -> Result<()> {
        const TOLERANCE: f64 = 2e-2;
        let first = match self.case {
            Case::Prefill(_) => rows::offsets(&self.shares)[parallel.rank()],
            Case::Decode(_) => 0,
        };
        for (name, ours, all) in [
            ("residual", &ours.0, &candles.0),
            ("norm", &ours.1, &candles.1),
        ] {
            let want = all.narrow(0, first, ours.dim(0)?)?.to_dtype(DType::F32)?;
            let norm = |t: &Tensor| t.sqr()?.sum_all()?.to_scalar::<f32>();
            let off = norm(&(ours.to_dtype(DType::F32)? - &want)?)?;
            let size = norm(&want)?;
            let relative = f64::from(off / size).sqrt();
            ensure!(
                relative <= TOLERANCE,
                "{name}: relative difference {relative:.1e} of {:?}",
                ours.dims()
            );
        }
        Ok(())
    }
}

/// What was measured of a row.
struct Measured {
    case: Case,
    ours: Times,
    candles: Option<Times>,
    spans: Option<Vec<Spans>>,
}

/// A call as samples take them.
fn as_call<'a>(
    pass: impl Fn() -> candle_core::Result<State> + 'a,
) -> impl FnMut() -> brigade::Result<()> + 'a {
    move || {
        pass()
            .map(drop)
            .map_err(|error| match brigade_error(&error) {
                Some(ours) => ours.clone(),
                None => brigade::Error::Backend {
                    call: "candle",
                    code: 0,
                    source: Some(Arc::new(std::io::Error::other(error.to_string()))),
                },
            })
    }
}

fn run_case(rank: &Rank, parallel: &Parallel, case: Case, options: &Block) -> Result<Measured> {
    let setup = Setup::new(parallel, case, options)?;
    let ours = setup.ours(parallel)?;
    if options.common.check {
        let nccl = rank.nccl.as_ref().context("--check needs --vs nccl")?;
        let (mine, candles) = (ours()?, setup.candles(parallel, nccl)()?);
        rank.agree(setup.check(parallel, &mine, &candles))?;
    }
    let how = (options.common.calls, options.common.graph);
    let spans = match &options.trace {
        Some(_) => Some(trace::record(rank, as_call(&ours))?),
        None => None,
    };
    let mut variants = vec![Variant::new(rank, "ours", how, as_call(&ours))?];
    if let Some(nccl) = &rank.nccl {
        let candles = as_call(setup.candles(parallel, nccl));
        variants.push(Variant::new(rank, "nccl", how, candles)?);
    }
    let mut times = measure(rank, &mut variants, options.common.rounds)?.into_iter();
    rank.on.sync(PATIENCE)?;
    parallel.check()?;
    Ok(Measured {
        case,
        ours: times.next().context("nothing was measured")?,
        candles: times.next(),
        spans,
    })
}

/// Measures all rows; gives a table.
pub fn run(options: &Block, ranks: &Ranks) -> Result<String> {
    let size = ranks.size();
    ensure!(
        [2, 4, 8].contains(&size),
        "2, 4 or 8 ranks share the 8 heads of keys and values, not {size}"
    );
    let prefill = options.prefill.iter().map(|&tokens| Case::Prefill(tokens));
    let decode = options.decode.iter().map(|&batch| Case::Decode(batch));
    let cases: Vec<Case> = prefill.chain(decode).collect();
    ensure!(
        cases.iter().all(|case| case.tokens() > 0) && options.past > 0,
        "there must be tokens"
    );
    let most = cases.iter().map(|case| case.tokens()).max().unwrap_or(0);
    let config = CommConfig::new(ParallelMode::Tp).for_linears(most, HIDDEN, DataType::BF16, size);
    let meta = meta::meta(ranks)?;
    let measured = ranks.run(&options.common, |given| {
        let gpu = brigade::Device::info(&*given.device).ordinal as usize;
        let place = Device::new_cuda_with_stream(gpu)?;
        let Device::Cuda(stream_of) = &place else {
            anyhow::bail!("candle has no CUDA here");
        };
        // SAFETY: all tensors of a rank are used on one stream, which orders what is done with them.
        unsafe { stream_of.disable_event_tracking() };
        let device = Arc::clone(&given.device);
        let parallel = Parallel::on_gpu(device, stream_of, &*given.boot, &config)?;
        // What candle uploads of tensors' dims has to stay where graphs read it.
        let graph = options.common.graph;
        let _kept = graph.then(|| stream_of.enable_cuda_graph_htod_cache());
        // All of it on candle's stream.
        let nccl = options.common.with_nccl();
        let rank = Rank {
            device: Arc::clone(&given.device),
            boot: Arc::clone(&given.boot),
            on: parallel.stream().clone(),
            nccl: nccl
                .then(|| NcclComm::join(&given.device, &*given.boot, PATIENCE))
                .transpose()?,
        };
        let all = cases.iter();
        all.map(|&case| run_case(&rank, &parallel, case, options))
            .collect::<Result<Vec<_>>>()
    })?;
    if !ranks.speak() {
        return Ok(String::new());
    }
    if let (Some(path), Some(first)) = (&options.trace, measured.first()) {
        let title = format!(
            "{} of {} tokens, {size} ranks",
            first.case.name(),
            first.case.tokens()
        );
        trace::draw(path, &title, first.spans.as_deref().unwrap_or(&[]))?;
    }
    let rows: Vec<_> = measured.iter().map(|m| m.json(options, size)).collect();
    options.common.write(&meta, &rows)?;
    let heading = format!(
        "{:>8} {:>7} {:>10} {:>10} {:>10} {:>7}\n",
        "phase", "tokens", "us", "p99 us", "nccl us", "ratio"
    );
    Ok(heading + &measured.iter().map(Measured::line).collect::<String>())
}

impl Measured {
    fn line(&self) -> String {
        let (nccl, ratio) = match &self.candles {
            Some(nccl) => (
                format!("{:.1}", nccl.median),
                format!("{:.3}", nccl.median / self.ours.median),
            ),
            None => ("-".into(), "-".into()),
        };
        format!(
            "{:>8} {:>7} {:>10.1} {:>10.1} {nccl:>10} {ratio:>7}\n",
            self.case.name(),
            self.case.tokens(),
            self.ours.median,
            self.ours.p99
        )
    }

    fn json(&self, options: &Block, ranks: usize) -> Value {
        let hundredths = |x: f64| json!((x * 100.0).round() / 100.0);
        let samples = |t: &Times| -> Value { t.samples.iter().map(|&us| hundredths(us)).collect() };
        let mut row = json!({
            "phase": self.case.name(), "tokens": self.case.tokens(), "past": options.past, "ranks": ranks,
            "hidden": HIDDEN, "feed_forward": FEED_FORWARD, "dtype": "bf16", "graph": options.common.graph,
            "us": hundredths(self.ours.median), "us_p99": hundredths(self.ours.p99),
            "samples": {"ours": samples(&self.ours)},
        });
        if let Some(nccl) = &self.candles {
            row["nccl_us"] = hundredths(nccl.median);
            row["samples"]["nccl"] = samples(nccl);
        }
        row
    }
}
