//! Tensor-parallel generation on Brigade: the whole model, every linear layer through a device.
//!
//! Prompts are read sequence-parallel ([Korthikanti et al. 2022](https://arxiv.org/abs/2205.05198)): between layers each
//! rank holds its share of the rows, gathers all rows into its column-parallel linears (`all_gather_lora_linear`), and
//! scatters the sums of its row-parallel ones (`lora_linear_reduce_scatter`). Tokens are generated with the hidden state
//! on every rank: a linear, then an all-reduce. Attention and feed-forward have a communicator each, with user buffers of
//! their own. The embedding and the head are split over the vocabulary.

mod attention;
mod rank;
mod tally;
mod weights;

pub use tally::{Kind, LayerReport, Phase};

use crate::{
    AdapterSpec, Error, Result, Source,
    shard::{self, Shard},
};
use brigade::{
    Bootstrap, CommConfig, DataType, DeviceChoice, OverlapMode, ParallelMode,
    host::{HostConfig, HostDevice},
};
use brigade_candle::Parallel;
use serde::{Deserialize, Serialize};
use std::{
    sync::mpsc,
    time::{Duration, Instant},
};

/// How to generate.
#[derive(Clone, Debug)]
pub struct Options {
    /// Ranks.
    pub ranks: usize,
    /// Most tokens to generate for each prompt.
    pub max_tokens: usize,
    /// Where ranks compute: with CUDA each on the GPU of its number.
    pub device: DeviceChoice,
    /// Type of weights and activations: f32, f16 or bf16. Norms and attention are in f32 in any case.
    pub dtype: DataType,
    /// Forced overlap mode; `None` lets the plan choose.
    pub mode: Option<OverlapMode>,
    /// A random adapter for each sequence: the n-th is made from the seed plus n.
    pub lora: Option<AdapterSpec>,
    /// Every wait between ranks ends after this.
    pub deadline: Duration,
}

impl Default for Options {
    fn default() -> Self {
        Self {
            ranks: 1,
            max_tokens: 64,
            device: DeviceChoice::Auto,
            dtype: DataType::F32,
            mode: None,
            lora: None,
            deadline: Duration::from_secs(60),
        }
    }
}

/// What came out.
#[derive(Clone, Debug)]
pub struct Generated {
    /// Tokens of each prompt's continuation. The end token, if it came, is the last one.
    pub tokens: Vec<Vec<u32>>,
    /// Name of the device that ran it.
    pub device: String,
    /// Time to read the prompts and to choose the first tokens.
    pub prefill: Duration,
    /// Time of all later tokens.
    pub decode: Duration,
    /// Tokens generated in that time, over all sequences.
    pub decoded_tokens: usize,
    /// What was done for each kind of layer.
    pub layers: Vec<LayerReport>,
    /// Bytes of weights that each rank holds.
    pub weight_bytes: Vec<u64>,
}

/// What one rank has to say at the end.
#[derive(Serialize, Deserialize)]
struct RankReport {
    tokens: Vec<Vec<u32>>,
    device: String,
    prefill: Duration,
    decode: Duration,
    decoded_tokens: usize,
    tally: tally::Tally,
    weight_bytes: u64,
}

/// Told every token as it is chosen, with the number of its sequence.
type OnToken<'a> = &'a mut dyn FnMut(usize, u32);

/// Continues prompts greedily until `end` or `max_tokens` on several ranks. `on_token` is told every token as it is
/// chosen, with the number of its sequence.
///
/// # Errors
/// [`Error::Field`] for prompts or ranks that cannot be; else the error of the first rank that has one of its own, rather
/// than one that only saw another rank leave.
pub fn generate(
    source: &dyn Source,
    prompts: &[Vec<u32>],
    end: u32,
    options: &Options,
    on_token: OnToken<'_>,
) -> Result<Generated> {
    let config = source.config();
    let shards = shard::plan(config, options.ranks)?;
    check(source, prompts, options)?;
    let (tell, told) = mpsc::channel();
    let ranks = brigade::group::threads(options.ranks);
    let reports = std::thread::scope(|scope| {
        let mut handles = Vec::new();
        for boot in ranks {
            let (shards, tell) = (&shards, tell.clone());
            let handle = std::thread::Builder::new()
                .name(format!("rank {} compute", boot.rank()))
                .spawn_scoped(scope, move || {
                    let mut say = |sequence, token| {
                        // Nobody listens any more only if the run is over.
                        let _ = tell.send((sequence, token));
                    };
                    let say: Option<OnToken<'_>> = (boot.rank() == 0).then_some(&mut say);
                    run_rank(source, shards, prompts, end, options, &boot, say)
                })
                .map_err(|e| Error::field("ranks", options.ranks, format!("threads: {e}")))?;
            handles.push(handle);
        }
        drop(tell);
        for (sequence, token) in told {
            on_token(sequence, token);
        }
        // All are joined, also behind one that failed.
        let results: Vec<_> = handles
            .into_iter()
            .map(|h| {
                h.join()
                    .unwrap_or_else(|_| Err(Error::field("rank", "panicked", "an answer")))
            })
            .collect();
        all_or_cause(results)
    })?;
    summarize(reports)
}

/// As [`generate`], by a group of processes: this one is the rank that `boot` says, and all give the same result.
/// `options.ranks` is the group's size.
///
/// # Errors
/// As [`generate`], but each rank has its own error.
pub fn generate_as_rank(
    source: &dyn Source,
    prompts: &[Vec<u32>],
    end: u32,
    options: &Options,
    boot: &dyn Bootstrap,
    on_token: OnToken<'_>,
) -> Result<Generated> {
    if options.ranks != boot.size() {
        return Err(Error::field(
            "ranks",
            options.ranks,
            boot.size().to_string(),
        ));
    }
    let shards = shard::plan(source.config(), options.ranks)?;
    check(source, prompts, options)?;
    let report = run_rank(source, &shards, prompts, end, options, boot, Some(on_token))?;
    let unreadable = |e: serde_json::Error| Error::field("report of a rank", e, "JSON");
    let mine = serde_json::to_vec(&report).map_err(unreadable)?;
    let all = boot.all_gather(&mine, options.deadline)?;
    let all: Result<Vec<RankReport>> = all
        .iter()
        .map(|report| serde_json::from_slice(report).map_err(unreadable))
        .collect();
    summarize(all?)
}

/// Everybody's result, or the error that came first: faults are what other ranks see of a rank that left.
pub(crate) fn all_or_cause<T>(results: Vec<Result<T>>) -> Result<Vec<T>> {
    let (mut all, mut fault) = (Vec::new(), None);
    for result in results {
        match result {
            Ok(one) => all.push(one),
            Err(e @ Error::Brigade(brigade::Error::Fault(_))) => fault = fault.or(Some(e)),
            Err(cause) => return Err(cause),
        }
    }
    fault.map_or(Ok(all), Err)
}

fn check(source: &dyn Source, prompts: &[Vec<u32>], options: &Options) -> Result<()> {
    let config = source.config();
    if prompts.is_empty() {
        return Err(Error::field("prompts", 0, "at least one"));
    }
    for prompt in prompts {
        if prompt.is_empty() {
            return Err(Error::field("prompt", "empty", "at least one token"));
        }
        if let Some(id) = prompt.iter().find(|&&id| id as usize >= config.vocabulary) {
            let want = format!("below {}", config.vocabulary);
            return Err(Error::field("prompt token", id, want));
        }
        if prompt.len() + options.max_tokens > config.context {
            return Err(Error::field(
                "prompt and max_tokens",
                format!("{} + {}", prompt.len(), options.max_tokens),
                format!("at most the context of {}", config.context),
            ));
        }
    }
    Ok(())
}

/// Threads that each rank may multiply with: the machine's cores, dealt to the ranks.
pub(crate) fn threads_per_rank(ranks: usize) -> usize {
    let cores = std::thread::available_parallelism().map_or(1, usize::from);
    (cores / ranks).max(1)
}

fn run_rank(
    source: &dyn Source,
    shards: &[Shard],
    prompts: &[Vec<u32>],
    end: u32,
    options: &Options,
    boot: &dyn Bootstrap,
    mut on_token: Option<OnToken<'_>>,
) -> Result<RankReport> {
    let config = source.config();
    let dtype = match options.dtype {
        DataType::F32 | DataType::F16 | DataType::BF16 => brigade_candle::dtype_of(options.dtype)?,
        other => return Err(Error::field("dtype", other, "f32, f16 or bf16")),
    };
    let rows = prompts.iter().map(Vec::len).sum::<usize>().max(1);
    let comm = |mode| {
        let mut comm =
            CommConfig::new(mode).for_linears(rows, config.hidden, options.dtype, options.ranks);
        comm.deadline = options.deadline;
        comm
    };
    let attention = join(boot, options, &comm(ParallelMode::Tp))?;
    let feed_forward = attention.and(boot, &comm(ParallelMode::FfnTp))?;
    let sequences = 0..prompts.len();
    let loader = weights::Loader {
        source,
        shards,
        attention: &attention,
        feed_forward: &feed_forward,
        dtype,
        mode: options.mode,
        adapters: options
            .lora
            .iter()
            .flat_map(|spec| sequences.clone().map(|s| weights::for_sequence(spec, s)))
            .collect(),
        bytes: 0,
    };
    let weights = loader.load()?;
    let longest = prompts.iter().map(Vec::len).max().unwrap_or(0);
    let heads = attention::Heads::new(
        config,
        &shards[boot.rank()],
        longest + options.max_tokens,
        attention.place(),
    )?;
    let mut rank = rank::Rank::new(
        config.clone(),
        (attention, feed_forward),
        weights,
        heads,
        prompts.len(),
    );
    let mut say = |sequence, token| {
        if let Some(on_token) = &mut on_token {
            on_token(sequence, token);
        }
    };
    let start = Instant::now();
    let mut tokens: Vec<Vec<u32>> = vec![Vec::new(); prompts.len()];
    if options.max_tokens > 0 {
        for (sequence, token) in rank.prefill(prompts)?.into_iter().enumerate() {
            tokens[sequence].push(token);
            say(sequence, token);
        }
    }
    let prefill = start.elapsed();
    let start = Instant::now();
    let mut decoded_tokens = 0;
    loop {
        let goes_on = |t: &Vec<u32>| t.len() < options.max_tokens && t.last() != Some(&end);
        let active: Vec<(usize, u32)> = (0..tokens.len())
            .filter(|&s| goes_on(&tokens[s]))
            .filter_map(|s| Some((s, *tokens[s].last()?)))
            .collect();
        if active.is_empty() {
            break;
        }
        for (&(sequence, _), token) in active.iter().zip(rank.decode(&active)?) {
            tokens[sequence].push(token);
            decoded_tokens += 1;
            say(sequence, token);
        }
    }
    let decode = start.elapsed();
    rank.close(options.deadline)?;
    Ok(RankReport {
        tokens,
        device: rank.device_name(),
        prefill,
        decode,
        decoded_tokens,
        weight_bytes: rank.weight_bytes(),
        tally: rank.into_tally(),
    })
}

/// Opens the rank's device, and joins its first group.
fn join(boot: &dyn Bootstrap, options: &Options, config: &CommConfig) -> Result<Parallel> {
    if options.device == DeviceChoice::Cuda {
        return on_gpu(boot, config);
    }
    let device = HostDevice::with(&HostConfig {
        threads: threads_per_rank(options.ranks),
        ..HostConfig::default()
    })?;
    Ok(Parallel::on_host(device, boot, config)?)
}

#[cfg(feature = "cuda")]
fn on_gpu(boot: &dyn Bootstrap, config: &CommConfig) -> Result<Parallel> {
    let place = candle_core::Device::new_cuda_with_stream(boot.rank())?;
    Ok(Parallel::join(&place, boot, config)?)
}

#[cfg(not(feature = "cuda"))]
fn on_gpu(_: &dyn Bootstrap, _: &CommConfig) -> Result<Parallel> {
    Err(brigade::Error::from(brigade::Reason::new(
        "no-candle-cuda",
        "this build has candle without its CUDA kernels",
        "build with --features cuda, where nvcc and CUDA's libraries are; or use the host device",
    ))
    .into())
}

fn summarize(reports: Vec<RankReport>) -> Result<Generated> {
    let first = &reports[0];
    if let Some(other) = reports.iter().find(|r| r.tokens != first.tokens) {
        return Err(Error::field(
            "tokens of a rank",
            format!("{:?}", other.tokens),
            format!("{:?}, as on rank 0", first.tokens),
        ));
    }
    Ok(Generated {
        tokens: first.tokens.clone(),
        device: first.device.clone(),
        prefill: first.prefill,
        decode: first.decode,
        decoded_tokens: first.decoded_tokens,
        weight_bytes: reports.iter().map(|r| r.weight_bytes).collect(),
        layers: tally::merge(reports.iter().map(|r| &r.tally)),
    })
}
