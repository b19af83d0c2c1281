//! One rank of a run: it loads its shard, makes steps, and starts anew with those who are left when ranks are lost.

use super::{
    OnToken, Options, RankReport, Regrouped, Seat, attention,
    graph::{self, Graphs},
    rank,
    tally::Tally,
    weights,
};
use crate::{Error, Result, Source, shard};
use brigade::{
    Bootstrap, CommConfig, DataType, DeviceChoice, FaultKind, ParallelMode,
    host::{HostConfig, HostDevice},
};
use brigade_candle::Parallel;
use candle_core::Device;
use std::time::{Duration, Instant};

/// What is asked of all ranks.
#[derive(Clone, Copy)]
pub(super) struct Task<'a> {
    pub(super) source: &'a dyn Source,
    pub(super) prompts: &'a [Vec<u32>],
    pub(super) end: u32,
    pub(super) options: &'a Options,
}

impl Task<'_> {
    /// Refuses what cannot be before a rank starts.
    pub(super) fn checked(self) -> Result<Self> {
        let Self {
            source,
            prompts,
            options,
            ..
        } = self;
        let config = source.config();
        shard::plan(config, options.ranks)?;
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
            if prompt.len().saturating_add(options.max_tokens) > config.context {
                return Err(Error::field(
                    "prompt and max_tokens",
                    format!("{} + {}", prompt.len(), options.max_tokens),
                    format!("at most the context of {}", config.context),
                ));
            }
        }
        Ok(self)
    }
}

/// How far a rank has come.
struct Progress {
    tokens: Vec<Vec<u32>>,
    prefill: Duration,
    decode: Duration,
    decoded_tokens: usize,
    /// When its last step ended.
    stepped: Instant,
}

pub(super) fn run(
    task: Task<'_>,
    seat: &mut dyn Seat,
    on_token: OnToken<'_>,
) -> Result<RankReport> {
    let options = task.options;
    let place = place(seat.group().rank(), options)?;
    let _kept = options.graph.then(|| graph::keep_uploads(&place));
    let mut left: Vec<usize> = (0..seat.group().size()).collect();
    let me = seat.group().rank();
    let mut regrouped = Vec::new();
    let mut progress = Progress {
        tokens: vec![Vec::new(); task.prompts.len()],
        prefill: Duration::ZERO,
        decode: Duration::ZERO,
        decoded_tokens: 0,
        stepped: Instant::now(),
    };
    let mut counts = (Tally::default(), options.graph.then(Graphs::default));
    let mut refused = None;
    loop {
        let (attention, mut rank) = set_up(task, seat, &place, counts)?;
        let ended = steps(task, (&mut rank, me, seat.group()), &mut progress, on_token)
            // Who is lost by then may have been needed by others, for their last step.
            .and_then(|()| rank.close());
        let error = match ended {
            Ok(()) => {
                let (device, weight_bytes) = (rank.device_name(), rank.weight_bytes());
                let (tally, graphs) = rank.into_counts();
                return Ok(RankReport {
                    tokens: progress.tokens,
                    device,
                    prefill: progress.prefill,
                    decode: progress.decode,
                    decoded_tokens: progress.decoded_tokens,
                    weight_bytes,
                    tally,
                    graphs: graphs.or(refused),
                    regrouped,
                });
            }
            // On all ranks, which have nothing in common any more that could be gone on with.
            Err(Error::NotCaptured(reason)) => {
                let (tally, graphs) = rank.into_counts();
                refused = graphs.map(|graphs| Graphs {
                    refused: Some(reason),
                    ..graphs
                });
                counts = (tally, None);
                continue;
            }
            Err(error) if options.regroup && is_loss(&error) => error,
            Err(error) => return Err(error),
        };
        let noticed = progress.stepped.elapsed();
        // Those who are left agree on who that is. Others hear of the fault within their own deadline.
        let absent = attention.comm().shrink(2 * options.deadline)?;
        counts = rank.into_counts();
        let lost: Vec<usize> = absent.ranks().collect();
        seat.regroup(&lost)?;
        adopt(task, seat, &mut progress, on_token)?;
        let all = std::mem::take(&mut left).into_iter().enumerate();
        let (gone, stay): (Vec<_>, Vec<_>) = all.partition(|(rank, _)| lost.contains(rank));
        left = stay.into_iter().map(|(_, first)| first).collect();
        regrouped.push(Regrouped {
            lost: gone.into_iter().map(|(_, first)| first).collect(),
            error: error.to_string(),
            noticed,
        });
    }
}

/// A rank that did not come, or is gone: not one that asked for something else, which would do so again.
fn is_loss(error: &Error) -> bool {
    match error {
        Error::Brigade(brigade::Error::Fault(record)) => {
            matches!(record.kind, FaultKind::PeerLost | FaultKind::Timeout)
        }
        _ => false,
    }
}

/// The tokens of the rank that has come furthest, on all ranks: some may have ended a step that others did not.
fn adopt(
    task: Task<'_>,
    seat: &dyn Seat,
    progress: &mut Progress,
    on_token: OnToken<'_>,
) -> Result<()> {
    let unreadable = |e: serde_json::Error| Error::field("tokens of a rank", e, "JSON");
    let mine = serde_json::to_vec(&progress.tokens).map_err(unreadable)?;
    // Ranks come from the vote at different times, and this is no call of a step: it has the time that joining has.
    let within = CommConfig::new(ParallelMode::Tp).first_deadline;
    let within = within.max(2 * task.options.deadline);
    for theirs in seat.group().all_gather(&mine, within)? {
        let theirs: Vec<Vec<u32>> = serde_json::from_slice(&theirs).map_err(unreadable)?;
        for (sequence, (mine, theirs)) in progress.tokens.iter_mut().zip(theirs).enumerate() {
            for &token in theirs.iter().skip(mine.len()) {
                mine.push(token);
                on_token(sequence, mine.len() - 1, token);
            }
        }
    }
    Ok(())
}

/// Joins the groups of the present ranks, and loads the shard that this rank has among them.
fn set_up(
    task: Task<'_>,
    seat: &dyn Seat,
    place: &Device,
    (tally, graphs): (Tally, Option<Graphs>),
) -> Result<(Parallel, rank::Rank)> {
    let Task {
        source,
        prompts,
        options,
        ..
    } = task;
    let (config, boot) = (source.config(), seat.group());
    let shards = shard::plan(config, boot.size())?;
    let dtype = match options.dtype {
        DataType::F32 | DataType::F16 | DataType::BF16 => brigade_candle::dtype_of(options.dtype)?,
        other => return Err(Error::field("dtype", other, "f32, f16 or bf16")),
    };
    let longest = prompts.iter().map(Vec::len).max().unwrap_or(0) + options.max_tokens;
    // With a new group, what was said so far is read again.
    let said = match options.regroup || options.graph {
        true => options.max_tokens,
        false => 0,
    };
    let rows = prompts.iter().map(|p| p.len() + said).sum::<usize>().max(1);
    let comm = |mode| {
        let mut comm =
            CommConfig::new(mode).for_linears(rows, config.hidden, options.dtype, boot.size());
        comm.deadline = options.deadline;
        comm
    };
    let attention = join(place, boot, options, &comm(ParallelMode::Tp))?;
    let feed_forward = attention.and(boot, &comm(ParallelMode::FfnTp))?;
    let adapters = options.lora.iter().flat_map(|spec| {
        let sequences = 0..prompts.len();
        sequences.map(|sequence| weights::for_sequence(spec, sequence))
    });
    let weights = weights::Loader {
        source,
        shards: &shards,
        attention: &attention,
        feed_forward: &feed_forward,
        dtype,
        mode: options.mode,
        adapters: adapters.collect(),
        bytes: 0,
    }
    .load()?;
    let heads = attention::Heads::new(config, &shards[boot.rank()], longest, place)?;
    let groups = (attention.clone(), feed_forward);
    let rank = rank::Rank::new(
        config.clone(),
        groups,
        (weights, heads),
        prompts.len(),
        (options.deadline, graphs, tally),
    )?;
    Ok((attention, rank))
}

/// Until no sequence goes on. The first step reads all that is known of each; the others, its last token.
fn steps(
    task: Task<'_>,
    (rank, me, boot): (&mut rank::Rank, usize, &dyn Bootstrap),
    progress: &mut Progress,
    on_token: OnToken<'_>,
) -> Result<()> {
    let options = task.options;
    let goes_on = |t: &Vec<u32>| t.len() < options.max_tokens && t.last() != Some(&task.end);
    let mut first = true;
    loop {
        let tokens = &progress.tokens;
        let steps = tokens.iter().map(Vec::len).max().unwrap_or(0);
        if options.leave == Some((me, steps)) {
            return Err(Error::Left { rank: me });
        }
        if options.stall == Some((me, steps)) {
            return Err(rank.stall(me));
        }
        let active: Vec<usize> = (0..tokens.len()).filter(|&s| goes_on(&tokens[s])).collect();
        if active.is_empty() {
            return Ok(());
        }
        let start = Instant::now();
        let chosen = if first {
            let all = |&s: &usize| (s, [&task.prompts[s][..], &tokens[s][..]].concat());
            rank.prefill(&active.iter().map(all).collect::<Vec<_>>())?
        } else {
            let last = |&s: &usize| Some((s, *tokens[s].last()?));
            rank.decode(&active.iter().filter_map(last).collect::<Vec<_>>(), boot)?
        };
        progress.stepped = Instant::now();
        if std::mem::take(&mut first) {
            progress.prefill += start.elapsed();
        } else {
            progress.decode += start.elapsed();
            progress.decoded_tokens += chosen.len();
        }
        for (&sequence, token) in active.iter().zip(chosen) {
            progress.tokens[sequence].push(token);
            on_token(sequence, progress.tokens[sequence].len() - 1, token);
        }
    }
}

/// Where a rank's tensors lie, whatever becomes of its group.
fn place(rank: usize, options: &Options) -> Result<Device> {
    match options.device {
        DeviceChoice::Cuda => gpu(rank, options.graph),
        DeviceChoice::Auto | DeviceChoice::Host => Ok(Device::Cpu),
    }
}

#[cfg(feature = "cuda")]
fn gpu(rank: usize, graph: bool) -> Result<Device> {
    let place = Device::new_cuda_with_stream(rank)?;
    if let Device::Cuda(gpu) = &place
        && graph
    {
        // A capture cannot wait for events from before it.
        // SAFETY: all tensors of a rank are used on one stream, which orders what is done with them.
        unsafe { gpu.disable_event_tracking() };
    }
    Ok(place)
}

#[cfg(not(feature = "cuda"))]
fn gpu(_: usize, _: bool) -> Result<Device> {
    Err(brigade::Error::from(brigade::Reason::new(
        "no-candle-cuda",
        "this build has candle without its CUDA kernels",
        "build with --features cuda where nvcc and CUDA's libraries are, or use the host device",
    ))
    .into())
}

fn join(
    place: &Device,
    boot: &dyn brigade::Bootstrap,
    options: &Options,
    config: &CommConfig,
) -> Result<Parallel> {
    if !place.is_cpu() {
        return Ok(Parallel::join(place, boot, config)?);
    }
    let device = HostDevice::with(&HostConfig {
        threads: super::threads_per_rank(options.ranks),
        ..HostConfig::default()
    })?;
    Ok(Parallel::on_host(device, boot, config)?)
}
