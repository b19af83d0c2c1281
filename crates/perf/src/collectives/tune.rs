//! Which all-reduce is quickest at which size, and with how many blocks and threads: all of Brigade's and NCCL's in turn, over sizes.

mod verdict;

use super::{
    Asked, Options, Which,
    case::{Case, Measured},
    expected::Inputs,
    names::Choice,
    report,
};
use crate::{
    Common, Peer,
    float::Float,
    meta,
    ranks::{Rank, Ranks},
    sizes,
};
use anyhow::{Result, anyhow, ensure};
use brigade::{
    CommConfig,
    cuda::CudaConfig,
    plan::{
        Entries,
        crossover::Source,
        tuned::{self, Entry, Sizes, Threads, Versions},
    },
};
use clap::Args;
use serde_json::Value;
use std::path::PathBuf;
use verdict::{Medians, Swept, Verdict, table};

/// Sizes at which numbers of blocks are compared: one of latency, one between, one of bandwidth.
const SWEPT: [usize; 3] = [256 << 10, 4 << 20, 64 << 20];

/// The largest size at which numbers of threads are compared: beyond it, blocks are as many as there may be, and full.
const THREADS_BYTES: usize = 4 << 20;

/// Up to this size a round has all its calls, and beyond it fewer, so that no round takes much longer than another.
const ALL_CALLS_BYTES: usize = 1 << 20;

/// From this size on, a choice that took so many times as long as the quickest of them is not measured at larger ones.
const BEHIND: (usize, f64) = (1 << 20, 4.0);

/// What is measured.
#[derive(Clone, Debug, Args)]
pub struct Tune {
    /// Ranks, a GPU each [default: all GPUs]
    #[arg(short = 'w', long, value_name = "RANKS")]
    ranks: Option<usize>,
    /// Make each rank a process instead of a thread, as torchrun does
    #[arg(long)]
    processes: bool,
    /// Rounds that are measured
    #[arg(short = 'n', long, default_value_t = 20, value_parser = sizes::at_least_one)]
    rounds: usize,
    /// Calls in a round, one after the other, in a graph; fewer of inputs beyond 1 MiB
    #[arg(long, default_value_t = 50, value_parser = sizes::at_least_one)]
    calls: usize,
    /// Bytes to begin with; K, M and G count in powers of 1024
    #[arg(short, long, value_parser = sizes::bytes, default_value = "2K")]
    begin: usize,
    /// Bytes to end with, by powers of two
    #[arg(short, long, value_parser = sizes::bytes, default_value = "64M")]
    end: usize,
    /// Type of the numbers, for which alone the entry will hold [default: bf16, and the entry holds for all types]
    #[arg(short, long, value_enum)]
    dtype: Option<Float>,
    /// Capacity of each of the three buffers that all-reduces push through; larger inputs pass in pieces [default: twice the
    /// largest size, at most 128 MiB]
    #[arg(long, value_name = "BYTES", value_parser = sizes::bytes)]
    all_reduce_bytes: Option<usize>,
    /// Most blocks that are tried of kernels that push
    #[arg(long, value_name = "BLOCKS", num_args = 1.., default_values_t = [16, 32, 64, 132])]
    blocks: Vec<u16>,
    /// Threads of a block that are tried of kernels that push, up to 4 MiB: whole warps, at most 512
    #[arg(long, value_name = "THREADS", num_args = 1.., value_parser = threads, default_values_t = [64, 128, 256, 512])]
    threads: Vec<u16>,
    /// Write the entry to this file
    #[arg(long, value_name = "FILE")]
    entry: Option<PathBuf>,
    /// Write rows and raw samples to this file
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,
}

impl Tune {
    pub fn common(&self) -> Common {
        Common {
            ranks: self.ranks,
            processes: self.processes,
            rounds: self.rounds,
            calls: self.calls,
            graph: true,
            // What is wrong is no candidate.
            check: true,
            shared: false,
            serial: false,
            table: Vec::new(),
            vs: None,
            json: self.json.clone(),
        }
    }

    fn float(&self) -> Float {
        self.dtype.unwrap_or(Float::Bf16)
    }

    fn options(&self, nccl: bool, sm_budget: Option<u16>) -> Options {
        Options {
            common: Common {
                vs: nccl.then_some(Peer::Nccl),
                ..self.common()
            },
            begin: self.begin,
            end: self.end,
            factor: 2,
            dtype: self.float(),
            scratch_bytes: None,
            all_reduce_bytes: self.all_reduce_bytes,
            sm_budget,
        }
    }

    fn calls(&self, bytes: usize) -> usize {
        let fewer = self.calls.saturating_mul(ALL_CALLS_BYTES) / bytes.max(1);
        fewer.clamp(self.calls.min(5), self.calls)
    }

    /// Those sizes at which numbers of blocks are compared; the largest, if none of them is measured.
    fn swept(&self) -> Vec<usize> {
        let within = |bytes: &usize| (self.begin..=self.end).contains(bytes);
        let swept: Vec<usize> = SWEPT.into_iter().filter(within).collect();
        if swept.is_empty() {
            vec![self.end]
        } else {
            swept
        }
    }

    /// Every size by every choice, in turn, once it was seen to be right; those that fall far behind are left there.
    fn measure(
        &self,
        rank: &Rank,
        options: &Options,
        choices: &[Choice],
        sizes: &[usize],
    ) -> Result<Vec<Measured>> {
        let comm = rank.join(&config(options, sizes))?;
        let inputs = Inputs::fresh(rank, options.dtype)?;
        let mut choices = choices.to_vec();
        let one = |&bytes: &usize| {
            let mut options = options.clone();
            options.common.calls = self.calls(bytes);
            let extent = Which::AllReduce.extent(bytes, options.dtype, rank.size())?;
            let asked = asked(&options, &choices);
            let measured = Case::new(rank, &asked, &comm, &inputs, extent)?.run()?;
            // Times are the slowest rank's: all ranks leave out the same.
            if bytes >= BEHIND.0 {
                let medians = Medians::of(&measured, self.float());
                choices.retain(|&choice| !medians.is_behind(choice, BEHIND.1));
            }
            Ok(measured)
        };
        let measured = sizes.iter().map(one).collect::<Result<Vec<_>>>()?;
        // Nobody leaves the communicator while another still works in it.
        rank.meet()?;
        Ok(measured)
    }

    /// How long sizes take by the quicker push.
    fn pushes(&self, rank: &Rank, sm_budget: Option<u16>, sizes: &[usize]) -> Result<Vec<f64>> {
        let options = self.options(false, sm_budget);
        let measured = self.measure(rank, &options, &Choice::OWN[..2], sizes)?;
        let push = |m| Medians::of(m, self.float()).push().unwrap_or(f64::INFINITY);
        Ok(measured.iter().map(push).collect())
    }

    /// With each number of blocks, how long the sizes take that are swept.
    fn sweep_blocks(&self, rank: &Rank) -> Result<Swept> {
        let sizes = self.swept();
        let with = |&blocks: &u16| Ok((blocks, self.pushes(rank, Some(blocks), &sizes)?));
        let times = self.blocks.iter().map(with).collect::<Result<_>>()?;
        Ok(Swept { sizes, times })
    }

    /// With each number of threads, how long the smaller sizes take; and with what plans take by themselves. Plans go by an entry with that
    /// number and so many blocks.
    fn sweep_threads(
        &self,
        rank: &Rank,
        (meta, sizes): (&Value, &[usize]),
        max_blocks: u16,
    ) -> Result<(Vec<f64>, Swept)> {
        let within = |bytes: &&usize| **bytes <= THREADS_BYTES;
        let small: Vec<usize> = sizes.iter().filter(within).copied().collect();
        if small.is_empty() {
            return Ok((Vec::new(), Swept::default()));
        }
        let with = |threads: Option<u16>| {
            let all = |threads| Threads {
                max_bytes: usize::MAX,
                threads,
            };
            let verdict = Verdict {
                one_shot_max_bytes: 0,
                pull_from_bytes: None,
                nccl_from_bytes: None,
                max_blocks,
                threads: threads.map(all).into_iter().collect(),
            };
            let entry = self.written(meta, rank.size(), sizes, &verdict)?;
            let config = CudaConfig {
                entries: Entries::read(&serde_json::to_string(&entry)?)?,
                ..self.common().cuda()?
            };
            self.pushes(&rank.with(&config)?, None, &small)
        };
        let usual = with(None)?;
        let each = self.threads.iter();
        let times = each.map(|&threads| Ok((threads, with(Some(threads))?)));
        let times = times.collect::<Result<_>>()?;
        let sizes = small.clone();
        Ok((usual, Swept { sizes, times }))
    }

    /// What was measured, as `tables/all_reduce.json` of brigade-plan has it.
    fn written(
        &self,
        meta: &Value,
        ranks: usize,
        sizes: &[usize],
        verdict: &Verdict,
    ) -> Result<Entry> {
        let text = |name: &str| meta[name].as_str().unwrap_or("unknown").to_owned();
        let pushed = config(&self.options(false, None), sizes).all_reduce_bytes;
        let list = |numbers: &[u16]| -> String {
            let words: Vec<_> = numbers.iter().map(u16::to_string).collect();
            words.join(" ")
        };
        let note = format!(
            "{}; medians of {} rounds of graphs, every result compared first; {pushed} bytes to push through; blocks {}; threads {}; {}",
            tuned_type(self.float()).name(),
            self.rounds,
            list(&self.blocks),
            list(&self.threads),
            meta::nccl_environment(std::env::vars_os())
        );
        Ok(Entry {
            gpu: text("gpu"),
            links: serde_json::from_value(meta["link"].clone())?,
            ranks,
            dtype: self.dtype.map(tuned_type),
            one_shot_max_bytes: verdict.one_shot_max_bytes,
            pull_from_bytes: verdict.pull_from_bytes,
            max_blocks: verdict.max_blocks,
            threads: verdict.threads.clone(),
            nccl_from_bytes: verdict.nccl_from_bytes,
            measured: Sizes {
                from_bytes: sizes.first().copied().unwrap_or(self.begin),
                to_bytes: sizes.last().copied().unwrap_or(self.end),
            },
            versions: Versions {
                driver: text("driver"),
                cuda: text("cuda"),
                nccl: meta["nccl"].as_str().map(str::to_owned),
            },
            source: Source {
                command: text("command"),
                date: text("date"),
                commit: text("commit"),
                note: Some(note),
            },
        })
    }
}

/// Threads of a block.
fn threads(text: &str) -> Result<u16> {
    let threads = text.parse()?;
    tuned::some_threads(threads)?;
    Ok(threads)
}

fn tuned_type(float: Float) -> tuned::Float {
    match float {
        Float::Bf16 => tuned::Float::Bf16,
        Float::F16 => tuned::Float::F16,
        Float::F32 => tuned::Float::F32,
    }
}

/// An all-reduce by these algorithms.
fn asked<'a>(options: &'a Options, choices: &'a [Choice]) -> Asked<'a> {
    Asked {
        choices,
        ..Asked::plain(options, Which::AllReduce)
    }
}

/// One communicator for these sizes.
fn config(options: &Options, sizes: &[usize]) -> CommConfig {
    let largest = sizes.iter().copied().max().unwrap_or(0);
    asked(options, &[]).config(largest)
}

/// Measures; gives a table, and what it comes to.
pub fn run(tune: &Tune, ranks: &Ranks) -> Result<String> {
    ensure!(ranks.size() > 1, "there must be two ranks");
    let sizes = sizes::steps(tune.begin, tune.end, 2)?;
    let meta = meta::meta(ranks)?;
    let options = tune.options(meta["nccl"].is_string(), None);
    let (measured, blocks, (usual, threads)) = ranks.run(&options.common, |rank| {
        let measured = tune.measure(rank, &options, &Choice::OWN, &sizes)?;
        let blocks = tune.sweep_blocks(rank)?;
        let threads = tune.sweep_threads(rank, (&meta, &sizes), blocks.fewest()?)?;
        Ok((measured, blocks, threads))
    })?;
    let medians: Vec<_> = measured
        .iter()
        .map(|m| Medians::of(m, tune.float()))
        .collect();
    if medians.iter().all(|m| m.push().is_none()) {
        let mut all = measured.iter().flat_map(|m| &m.ours);
        let reason = all.find_map(|ours| ours.plan.clone().err());
        return Err(reason.map_or_else(|| anyhow!("nothing was measured"), Into::into));
    }
    if !ranks.speak() {
        return Ok(String::new());
    }
    let verdict = Verdict::new(&medians, &blocks, (&usual, &threads))?;
    let asked = asked(&options, &Choice::OWN);
    let rows = report::json(&asked, ranks.size(), &measured);
    let mut with_swept = meta.clone();
    with_swept["blocks"] = blocks.json("blocks");
    with_swept["threads"] = threads.json("threads");
    with_swept["threads"]["usual_us"] = usual.into();
    options.common.write(&with_swept, &rows)?;
    if let Some(path) = &tune.entry {
        let entry = tune.written(&meta, ranks.size(), &sizes, &verdict)?;
        crate::write_entry(path, &entry)?;
    }
    Ok(table(&medians)
        + &blocks.table("blocks")
        + &threads.table("threads")
        + &verdict.told(options.common.with_nccl()))
}

#[cfg(test)]
mod tests {
    use super::*;
    use brigade::plan::{
        Table,
        crossover::{Gpus, Links},
        tuned::File,
    };
    use clap::Parser;
    use serde_json::json;

    #[derive(Parser)]
    struct Line {
        #[command(flatten)]
        tune: Tune,
    }

    fn read(words: &str) -> Result<Tune, clap::Error> {
        let words = std::iter::once("tune").chain(words.split_whitespace());
        Line::try_parse_from(words).map(|line| line.tune)
    }

    fn tune(words: &str) -> Tune {
        read(words).unwrap()
    }

    #[test]
    fn without_options_all_sizes_are_checked_and_replayed() {
        let line = tune("");
        let common = line.common();
        assert!(common.graph && common.check);
        let sizes = sizes::steps(line.begin, line.end, 2).unwrap();
        assert_eq!((sizes.len(), sizes[0], sizes[15]), (16, 2 << 10, 64 << 20));
        assert_eq!(line.blocks, [16, 32, 64, 132]);
        assert_eq!(line.swept(), SWEPT);
        assert_eq!(line.threads, [64, 128, 256, 512]);
        for wrong in ["0", "48", "544", "all"] {
            assert!(read(&format!("--threads {wrong}")).is_err(), "{wrong}");
        }
        assert_eq!(tune("-e 8M --blocks 8").swept(), SWEPT[..2]);
        assert_eq!(tune("-e 8K --blocks 8 16").swept(), [8 << 10]);
        let options = line.options(true, Some(16));
        assert!(options.common.with_nccl() && options.sm_budget == Some(16));
    }

    #[test]
    fn large_inputs_are_called_less_often() {
        let line = tune("");
        let calls = [2 << 10, 1 << 20, 4 << 20, 64 << 20].map(|bytes| line.calls(bytes));
        assert_eq!(calls, [50, 50, 12, 5]);
        assert_eq!(tune("--calls 2").calls(64 << 20), 2);
    }

    /// What is written can be put into the file of brigade-plan as it is, and given to a device.
    #[test]
    fn an_entry_is_one_of_the_table() {
        let verdict = Verdict {
            one_shot_max_bytes: 1000,
            pull_from_bytes: None,
            nccl_from_bytes: Some(5000),
            max_blocks: 64,
            threads: vec![Threads {
                max_bytes: 4096,
                threads: 96,
            }],
        };
        let meta = json!({
            "gpu": "NVIDIA H200", "link": "nvlink", "date": "2026-01-02", "commit": "0123456789ab",
            "command": "brigade-perf tune", "driver": "13.0", "cuda": "13.0", "nccl": "2.28.3",
        });
        let gpus = Gpus {
            model: Some("NVIDIA H200".into()),
            links: Links::Nvlink,
            ranks: 4,
        };
        for (words, holds_for_all) in [("", true), ("-d f32", false)] {
            let entry = tune(words)
                .written(&meta, 4, &[2048, 4096], &verdict)
                .unwrap();
            let text = format!(
                r#"{{"untuned": [{{"one_shot_max_bytes": 1, "pull_from_bytes": null, "max_blocks": 1, "why": "so"}}], "entries": [{}]}}"#,
                serde_json::to_string(&entry).unwrap()
            );
            let file = File::read(&text).unwrap();
            // And to a device as it is.
            let own = Entries::read(&serde_json::to_string(&entry).unwrap()).unwrap();
            let table = Table::cuda(&gpus, &own).unwrap();
            assert_eq!(table.all_reduce.f32.max_blocks, 64);
            assert!(table.all_reduce.f32.source.ends_with("in the user's table"));
            let measured = entry.measured;
            assert_eq!((measured.from_bytes, measured.to_bytes), (2048, 4096));
            assert_eq!(file.entries(), [entry]);
            let found = file.of(&gpus);
            assert_eq!(
                (found.f32.one_shot_max_bytes, found.f32.max_blocks),
                (1000, 64)
            );
            assert_eq!(found.f32.pull_from_bytes, None);
            assert_eq!(found.f32.threads, verdict.threads);
            assert_eq!(found.bf16.one_shot_max_bytes == 1000, holds_for_all);
        }
    }

    #[test]
    fn what_nccl_was_told_is_noted() {
        let told = |all: &[(&str, &str)]| {
            let all = all
                .iter()
                .map(|(n, v)| (std::ffi::OsString::from(n), std::ffi::OsString::from(v)));
            meta::nccl_environment(all)
        };
        assert_eq!(told(&[("HOME", "/")]), "NCCL as it is");
        assert_eq!(
            told(&[
                ("NCCL_NVLS_ENABLE", "0"),
                ("HOME", "/"),
                ("NCCL_ALGO", "Ring")
            ]),
            "NCCL_ALGO=Ring NCCL_NVLS_ENABLE=0"
        );
    }
}
