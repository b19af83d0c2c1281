//! Tensor-parallel generation on Brigade: the whole model, every linear layer through a device.
//!
//! Prompts are read sequence-parallel ([Korthikanti et al. 2022](https://arxiv.org/abs/2205.05198)): between layers each
//! rank holds its share of the rows, gathers all rows into its column-parallel linears (`all_gather_lora_linear`), and
//! scatters the sums of its row-parallel ones (`lora_linear_reduce_scatter`). Tokens are generated with the hidden state
//! on every rank: a linear, then an all-reduce. Attention and feed-forward have a communicator each, with user buffers of
//! their own. The embedding and the head are split over the vocabulary.

mod attention;
mod graph;
mod rank;
mod run;
mod seat;
mod tally;
mod weights;

pub use graph::Graphs;
pub use seat::{Seat, TcpSeat};
pub use tally::{Kind, LayerReport, Phase};
pub use weights::for_sequence;

use crate::{AdapterSpec, Error, Result, Source};
use brigade::{DataType, DeviceChoice, OverlapMode};
use run::Task;
use seat::ThreadSeat;
use serde::{Deserialize, Serialize};
use std::{sync::mpsc, time::Duration};

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
    /// Whether those who are left go on when ranks are lost: in a new group, with new shards of the model, from where they were.
    pub regroup: bool,
    /// A rank of the first group that goes away without a word, before it chooses its next token after so many: to try that.
    pub leave: Option<(usize, usize)>,
    /// The same of a rank that hangs, and has not gone: the others wait for it until the deadline.
    pub stall: Option<(usize, usize)>,
    /// Capture a step of decoding in a graph, and launch that for the next ones. Where that cannot be, steps run call by call as ever, and
    /// [`Graphs::refused`] says why.
    pub graph: bool,
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
            regroup: false,
            leave: None,
            stall: None,
            graph: false,
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
    /// Each time that ranks were lost on the way.
    pub regrouped: Vec<Regrouped>,
    /// If steps were to be captured.
    pub graphs: Option<Graphs>,
}

/// Ranks were lost, and the others went on.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Regrouped {
    /// Their numbers in the first group.
    pub lost: Vec<usize>,
    /// What those who are left were told.
    pub error: String,
    /// How long after its last step a rank was told.
    pub noticed: Duration,
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
    graphs: Option<Graphs>,
    regrouped: Vec<Regrouped>,
}

/// Told every token as it is chosen: the number of its sequence, its place among the sequence's tokens, and the token.
type OnToken<'a> = &'a mut dyn FnMut(usize, usize, u32);

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
    on_token: &mut dyn FnMut(usize, u32),
) -> Result<Generated> {
    let task = Task {
        source,
        prompts,
        end,
        options,
    }
    .checked()?;
    let (tell, told) = mpsc::channel();
    let results = std::thread::scope(|scope| {
        let mut handles = Vec::new();
        for mut seat in ThreadSeat::all(options.ranks) {
            let tell = tell.clone();
            let handle = std::thread::Builder::new()
                .name(format!("rank {} compute", handles.len()))
                .spawn_scoped(scope, move || {
                    let mut say = |sequence, at, token| {
                        // Nobody listens any more only if the run is over.
                        let _ = tell.send((sequence, at, token));
                    };
                    run::run(task, &mut seat, &mut say)
                })
                .map_err(|e| Error::field("ranks", options.ranks, format!("threads: {e}")))?;
            handles.push(handle);
        }
        drop(tell);
        // All ranks say all tokens, since any of them may be lost: whoever is first is heard.
        let mut heard = vec![0; prompts.len()];
        for (sequence, at, token) in told {
            if at == heard[sequence] {
                heard[sequence] += 1;
                on_token(sequence, token);
            }
        }
        // All are joined, also behind one that failed.
        let join = |h: std::thread::ScopedJoinHandle<'_, Result<RankReport>>| {
            h.join()
                .unwrap_or_else(|_| Err(Error::field("rank", "panicked", "an answer")))
        };
        Ok::<_, Error>(handles.into_iter().map(join).collect())
    })?;
    summarize(those_left(results)?)
}

/// As [`generate`], by a group of processes: this one is the rank of its seat, and all give the same result.
/// `options.ranks` is the group's size.
///
/// # Errors
/// As [`generate`], but each rank has its own error.
pub fn generate_as_rank(
    source: &dyn Source,
    prompts: &[Vec<u32>],
    end: u32,
    options: &Options,
    seat: &mut dyn Seat,
    on_token: &mut dyn FnMut(usize, u32),
) -> Result<Generated> {
    let size = seat.group().size();
    if options.ranks != size {
        return Err(Error::field("ranks", options.ranks, size.to_string()));
    }
    let task = Task {
        source,
        prompts,
        end,
        options,
    }
    .checked()?;
    let report = run::run(task, seat, &mut |sequence, _, token| {
        on_token(sequence, token)
    })?;
    let unreadable = |e: serde_json::Error| Error::field("report of a rank", e, "JSON");
    let mine = serde_json::to_vec(&report).map_err(unreadable)?;
    let all = seat.group().all_gather(&mine, options.deadline)?;
    let all: Result<Vec<RankReport>> = all
        .iter()
        .map(|report| serde_json::from_slice(report).map_err(unreadable))
        .collect();
    summarize(all?)
}

/// The results of those who went on without others, if any did.
fn those_left(results: Vec<Result<RankReport>>) -> Result<Vec<RankReport>> {
    let went_on = |r: &Result<RankReport>| r.as_ref().is_ok_and(|r| !r.regrouped.is_empty());
    match results.iter().any(went_on) {
        true => Ok(results.into_iter().flatten().collect()),
        false => all_or_cause(results),
    }
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

/// Threads that each rank may multiply with: the machine's cores, dealt to the ranks.
pub(crate) fn threads_per_rank(ranks: usize) -> usize {
    let cores = std::thread::available_parallelism().map_or(1, usize::from);
    (cores / ranks).max(1)
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
        regrouped: first.regrouped.clone(),
        graphs: first.graphs.clone(),
        layers: tally::merge(reports.iter().map(|r| &r.tally)),
    })
}
