//! `brigade-perf`: what operations take on the GPUs of this host, in the manner of nccl-tests, beside NCCL in the same process.

#[cfg(feature = "candle")]
mod block;
mod check;
mod collectives;
mod conformance;
mod data;
mod doctor;
mod factor;
mod few_rows;
mod fit;
mod float;
mod hierarchical;
mod linears;
mod machines;
mod meta;
mod moe;
mod norms;
mod ranks;
mod sample;
mod sendrecv;
mod shape;
mod sizes;
mod trace;

use anyhow::{Context, Result};
use brigade::{cuda::CudaConfig, plan::Entries};
use clap::{Args, Parser, Subcommand, ValueEnum};
use ranks::Ranks;
use serde::Serialize;
use serde_json::{Value, json};
use std::{
    fs,
    path::{Path, PathBuf},
    process::{Command, ExitCode},
};

/// Measure Brigade's operations on GPUs
///
/// Every variant of a row is run in turn, round by round, so that what the machine does meanwhile meets all of them. A time
/// is the median of the rounds, of the slowest rank.
#[derive(Debug, Parser)]
#[command(version)]
struct Line {
    #[command(subcommand)]
    operation: Operation,
}

#[derive(Debug, Subcommand)]
enum Operation {
    /// Gather the rows of all ranks, and multiply them as they come
    GatherLinear(linears::Linears),
    /// Multiply, and give every rank its rows of the sum over all ranks
    ReduceScatterLinear(linears::Linears),
    /// Find how large a product must be for overlap to pay on these GPUs, and write it as an entry of brigade-plan's table
    Crossover(linears::crossover::Options),
    /// Find which all-reduce is quickest at which size on these GPUs, and write it as an entry of brigade-plan's table
    Tune(collectives::tune::Tune),
    /// Find by which transport rows travel quickest to experts on these GPUs, and write it as an entry of brigade-plan's table
    TuneExperts(moe::tune::Tune),
    /// Find what calls and links cost across machines, and inside one, and write it as an entry that plans go by
    TuneHierarchical(hierarchical::tune::Tune),
    /// Send to the next rank, and receive from the one before
    Sendrecv(sendrecv::SendRecv),
    /// Every rank gets the reduction of all inputs
    AllReduce(collectives::AllReduce),
    /// The same with a residual and a norm behind it, beside an all-reduce of the same bytes
    AllReduceNorm(norms::Norms),
    /// Multiply few rows, as each rank does by itself when sequences get a token each, beside the library
    FewRows(few_rows::FewRows),
    /// Every rank gets all rows
    AllGather(collectives::AllGather),
    /// Every rank gets its rows of the reduction
    ReduceScatter(collectives::ReduceScatter),
    /// Every rank gets rank 0's data
    Broadcast(collectives::Broadcast),
    /// Every rank gets a part of every rank's data
    AllToAll(collectives::AllToAll),
    /// Every rank of several machines gets the reduction of all inputs, beside NCCL's over all ranks at once
    Hierarchical(hierarchical::Hierarchical),
    /// A block of a transformer, of brigade-candle's layers, beside candle's own with NCCL
    #[cfg(feature = "candle")]
    Block(block::Block),
    /// Rows to their experts and back, beside grouped sends of rows that are laid out already
    Moe(moe::Moe),
    /// Say what this host has for GPUs and what it lacks: GPUs, links, driver, handles, libraries, and what to do about each
    ///
    /// Exits with 0 unless something is missing that no GPU can be used without.
    Doctor(doctor::Doctor),
    /// Write what a bundle's run.sh showed as a file of results: every trial and how it ended. run.sh does this by itself
    Conformance(conformance::Conformance),
}

/// What all operations are told.
#[derive(Clone, Debug, Args)]
struct Common {
    /// Ranks, a GPU each [default: all GPUs]
    #[arg(short = 'w', long, value_name = "RANKS")]
    ranks: Option<usize>,
    /// Make each rank a process instead of a thread. Where the environment says which rank this one is, as torchrun sets it,
    /// no others are started, with this option or without
    #[arg(long)]
    processes: bool,
    /// Let ranks share GPUs, in turn, where there are fewer GPUs than ranks: to see that it runs, since figures tell little then
    #[arg(long)]
    shared: bool,
    /// Rounds that are measured
    #[arg(short = 'n', long, default_value_t = 20, value_parser = sizes::at_least_one)]
    rounds: usize,
    /// Calls in a round, one after the other
    #[arg(long, default_value_t = 5, value_parser = sizes::at_least_one)]
    calls: usize,
    /// Capture the calls of a round in a CUDA graph, and replay it
    #[arg(long)]
    graph: bool,
    /// Begin no kernel before the one in front of it has ended: without programmatic launch, to see what that is worth
    #[arg(long)]
    serial: bool,
    /// Plan by the entries of this file, which crossover, tune, tune-experts or tune-hierarchical wrote with --entry, before those of
    /// this build
    #[arg(long, value_name = "FILE", num_args = 1..)]
    table: Vec<PathBuf>,
    /// Compare results with what they should be before anything is timed
    #[arg(long)]
    check: bool,
    /// Run this beside it, in the same process
    #[arg(long, value_enum)]
    vs: Option<Peer>,
    /// Write rows and raw samples to this file
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum Peer {
    /// NVIDIA's collectives, without multicast
    Nccl,
}

impl Common {
    fn with_nccl(&self) -> bool {
        self.vs == Some(Peer::Nccl)
    }

    /// How devices are set up.
    fn cuda(&self) -> Result<CudaConfig> {
        let mut entries = Entries::default();
        for path in &self.table {
            let read = fs::read_to_string(path).map_err(anyhow::Error::from);
            let read = read.and_then(|text| Ok(Entries::read(&text)?));
            entries = entries.and(read.with_context(|| format!("table {}", path.display()))?);
        }
        Ok(CudaConfig {
            serial: self.serial,
            entries,
            ..CudaConfig::default()
        })
    }

    /// Measures on the ranks that there are, in this process or in others; gives a table where this process is to show one.
    fn run(&self, measure: impl FnOnce(&Ranks) -> Result<String>) -> Result<String> {
        self.run_prepared(|_, _, _| Ok(()), measure)
    }

    /// The same where processes that this one starts find something in their environment: `prepare` is given how many ranks there are, and
    /// which one it is.
    fn run_prepared(
        &self,
        prepare: impl Fn(usize, usize, &mut Command) -> Result<()>,
        measure: impl FnOnce(&Ranks) -> Result<String>,
    ) -> Result<String> {
        if self.processes && !ranks::is_rank() {
            let count = ranks::count(self.ranks, self.shared)?;
            ranks::start(count, |rank, command| prepare(count, rank, command))?;
            return Ok(String::new());
        }
        measure(&Ranks::find(self)?)
    }

    /// Writes the rows of a run.
    fn write(&self, meta: &Value, rows: &[Value]) -> Result<()> {
        match &self.json {
            Some(path) => write_rows(path, meta, rows),
            None => Ok(()),
        }
    }
}

/// Writes a file of results.
fn write_rows(path: &Path, meta: &Value, rows: &[Value]) -> Result<()> {
    let mut text = format!("{{\n  \"meta\": {meta},\n  \"rows\": [\n");
    for (i, row) in rows.iter().enumerate() {
        let comma = if i + 1 < rows.len() { "," } else { "" };
        text += &format!("    {row}{comma}\n");
    }
    text += "  ]\n}\n";
    fs::write(path, text).with_context(|| format!("writing {}", path.display()))
}

/// Writes an entry of a table of figures.
fn write_entry(path: &Path, entry: &impl Serialize) -> Result<()> {
    let text = serde_json::to_string_pretty(entry)? + "\n";
    fs::write(path, text).with_context(|| format!("writing {}", path.display()))
}

#[expect(
    clippy::print_stdout,
    clippy::print_stderr,
    reason = "a program for people"
)]
fn main() -> ExitCode {
    let line = Line::parse();
    // To tune is to compare with NCCL as its user has it; whatever else is compared has it without multicast of NVLink.
    let as_it_is = matches!(line.operation, Operation::Tune(_));
    if !as_it_is || std::env::var_os("NCCL_NVLS_ENABLE").is_none() {
        // SAFETY: no other thread runs yet.
        unsafe { std::env::set_var("NCCL_NVLS_ENABLE", "0") };
    }
    let collective =
        |asked: &collectives::Asked<'_>| asked.common().run(|r| collectives::run(asked, r));
    let result = match &line.operation {
        Operation::GatherLinear(l) => l.common.run(|r| linears::run(l, linears::Which::Gather, r)),
        Operation::ReduceScatterLinear(l) => l
            .common
            .run(|r| linears::run(l, linears::Which::Scatter, r)),
        Operation::Crossover(c) => c.common.run(|r| linears::crossover::run(c, r)),
        Operation::Tune(t) => t.common().run(|r| collectives::tune::run(t, r)),
        Operation::TuneExperts(t) => t.common().run(|r| moe::tune::run(t, r)),
        Operation::TuneHierarchical(t) => hierarchical::tune::start(t),
        Operation::Sendrecv(s) => s.common.run(|r| sendrecv::run(s, r)),
        Operation::AllReduce(c) => collective(&c.asked()),
        Operation::AllReduceNorm(n) => n.common.run(|r| norms::run(n, r)),
        Operation::FewRows(f) => f.common.run(|r| few_rows::run(f, r)),
        Operation::AllGather(c) => collective(&c.asked()),
        Operation::ReduceScatter(c) => collective(&c.asked()),
        Operation::Broadcast(c) => collective(&c.asked()),
        Operation::AllToAll(c) => collective(&c.asked()),
        Operation::Hierarchical(h) => hierarchical::start(h),
        #[cfg(feature = "candle")]
        Operation::Block(b) => b.common.run(|r| block::run(b, r)),
        Operation::Moe(m) => {
            let prepare = |ranks, rank, command: &mut Command| m.prepare(ranks, rank, command);
            m.common.run_prepared(prepare, |r| moe::run(m, r))
        }
        Operation::Doctor(d) => match doctor::run(d) {
            Ok((report, code)) => {
                print!("{report}");
                return code;
            }
            Err(error) => Err(error),
        },
        Operation::Conformance(c) => conformance::run(c),
    };
    match result {
        Ok(table) => {
            print!("{table}");
            ExitCode::SUCCESS
        }
        Err(error) => {
            eprintln!("brigade-perf: {error:#}");
            ExitCode::FAILURE
        }
    }
}

/// A number with one decimal, as results have them.
fn rounded(us: f64) -> Value {
    json!((us * 10.0).round() / 10.0)
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::CommandFactory;

    #[test]
    fn the_command_line_is_whole() {
        Line::command().debug_assert();
    }

    #[test]
    fn options_are_read() {
        let words =
            "brigade-perf gather-linear -w 2 -n 3 --graph --vs nccl --shapes 512,64,32 --mode ring";
        let line = Line::try_parse_from(words.split(' ')).unwrap();
        let Operation::GatherLinear(l) = line.operation else {
            panic!("another operation");
        };
        assert_eq!((l.common.ranks, l.common.rounds), (Some(2), 3));
        assert!(l.common.graph && l.common.with_nccl());
    }

    /// Every rank reads the tables before it opens a GPU.
    #[test]
    fn tables_are_read_or_named() {
        let folder = std::env::temp_dir().join(format!("brigade-tables-{}", std::process::id()));
        fs::create_dir_all(&folder).unwrap();
        let written = |name: &str, text: &str| {
            let path = folder.join(name);
            fs::write(&path, text).unwrap();
            path
        };
        let entry = |ranks: usize| {
            json!({
                "gpu": "A", "links": "nvlink", "ranks": ranks, "operation": "gather-linear", "dtype": "bf16",
                "least": {"outputs": 1}, "source": {"command": "c", "date": "2026-01-02", "commit": "0123456"},
            })
            .to_string()
        };
        let (one, two) = (written("one", &entry(2)), written("two", &entry(4)));
        let of = |paths: &[PathBuf]| {
            let words = ["brigade-perf", "all-reduce", "--serial", "--table"].map(Into::into);
            let line = Line::try_parse_from(words.into_iter().chain(paths.iter().cloned()));
            match line.unwrap().operation {
                Operation::AllReduce(all_reduce) => all_reduce.asked().common().cuda(),
                _ => panic!("another operation"),
            }
        };
        let config = of(&[one, two]).unwrap();
        let read = |text: &str| Entries::read(text).unwrap();
        assert_eq!(config.entries, read(&entry(2)).and(read(&entry(4))));
        assert!(config.serial);
        let empty = written("empty", "{}");
        for (path, why) in [(empty, "entries: got"), (folder.join("none"), "")] {
            let refused = format!("{:#}", of(std::slice::from_ref(&path)).unwrap_err());
            let named = format!("table {}: {why}", path.display());
            assert!(refused.starts_with(&named), "{refused}");
        }
        fs::remove_dir_all(&folder).unwrap();
    }

    #[test]
    fn ranks_may_be_processes() {
        let words = "brigade-perf sendrecv --processes -w 2 -b 4096";
        let line = Line::try_parse_from(words.split(' ')).unwrap();
        assert!(matches!(line.operation, Operation::Sendrecv(s) if s.common.processes));
    }

    #[test]
    fn schemes_have_their_names() {
        use clap::ValueEnum;
        for scheme in factor::Scheme::value_variants() {
            let words = [
                "brigade-perf",
                "reduce-scatter-linear",
                "--scheme",
                scheme.name(),
            ];
            let line = Line::try_parse_from(words).unwrap();
            assert!(matches!(line.operation, Operation::ReduceScatterLinear(_)));
        }
        let words = ["brigade-perf", "gather-linear", "--scheme", "int4"];
        assert!(Line::try_parse_from(words).is_err());
    }
}
