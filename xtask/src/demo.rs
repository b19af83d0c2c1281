//! Runs a real model on Brigade, or a layer of experts.

mod moe;

use crate::workspace::{Workspace, exit_code, status};
use anyhow::Result;
use clap::{Args, Subcommand, ValueEnum};
use std::{
    ffi::OsString,
    num::{NonZeroU64, NonZeroUsize},
    path::PathBuf,
    process::ExitCode,
};

/// Run a real model, split over several ranks, and show what it says and how long it took
///
/// The first time this builds the demo and fetches SmolLM2-135M-Instruct (93 MB); --synthetic needs
/// neither network nor Python. Stdout and the exit code are the demo's own; cargo speaks on stderr.
#[derive(Debug, Args)]
#[command(args_conflicts_with_subcommands = true)]
pub struct Demo {
    #[command(subcommand)]
    other: Option<Other>,
    /// How many ranks to split the model over
    #[arg(long, value_name = "N")]
    ranks: Option<NonZeroUsize>,
    /// What to ask the model; given several times, all are answered side by side
    #[arg(long = "prompt", value_name = "TEXT")]
    prompts: Vec<String>,
    /// Stop after so many tokens
    #[arg(long, value_name = "N")]
    max_tokens: Option<NonZeroUsize>,
    /// Which device carries it out; auto takes the host
    #[arg(long, value_enum)]
    device: Option<Device>,
    /// How communication overlaps with matrix products; auto lets the plan choose
    #[arg(long, value_enum)]
    mode: Option<Mode>,
    /// Make each rank a process instead of a thread
    #[arg(long)]
    processes: bool,
    /// Add low-rank adapters to the linears
    #[arg(long)]
    lora: bool,
    /// Write a timeline of every rank to this file (Chrome trace format)
    #[arg(long, value_name = "FILE")]
    trace: Option<PathBuf>,
    /// Print one JSON object instead of text
    #[arg(long)]
    json: bool,
    /// Take this GGUF file instead of the fetched model
    #[arg(long, value_name = "PATH", conflicts_with = "synthetic")]
    model: Option<PathBuf>,
    /// Take a small random model instead of a real one
    #[arg(long)]
    synthetic: bool,
    /// Seconds after which a rank that waits for another gives up
    #[arg(long, value_name = "SECONDS")]
    deadline: Option<NonZeroU64>,
    /// Type of weights and activations
    #[arg(long, value_enum)]
    dtype: Option<Dtype>,
    /// Compare with the reference on one rank in f32: say where a token is another one
    #[arg(long)]
    check: bool,
    /// Go on without ranks that are lost, in a new group
    #[arg(long)]
    regroup: bool,
    /// Lose a rank after so many tokens, for instance 1@5: a thread goes away without a word, a process aborts
    #[arg(long, value_name = "RANK@TOKENS")]
    lose: Option<String>,
    /// Let a rank hang after so many tokens, likewise, until the others have gone on without it
    #[arg(long, value_name = "RANK@TOKENS")]
    stall: Option<String>,
    /// Capture a step of decoding in a CUDA graph, and launch that for the next ones (tried on GPUs with random weights alone); where that cannot be, say
    /// why, and go on without
    #[arg(long)]
    graph: bool,
}

/// What else it can run.
#[derive(Debug, Subcommand)]
enum Other {
    Moe(Box<moe::Moe>),
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum Device {
    Auto,
    Host,
    Cuda,
}

#[derive(Clone, Copy, Debug, ValueEnum)]
enum Dtype {
    F32,
    F16,
    Bf16,
}

#[derive(Clone, Copy, Debug, ValueEnum)]
enum Mode {
    Auto,
    Off,
    Chunked,
    Ring,
}

impl Demo {
    pub fn run(self, workspace: &Workspace) -> Result<ExitCode> {
        let here = std::env::current_dir()?;
        let mut cargo = workspace.cargo();
        cargo.args(["run", "--release", "--package", "brigade-demo"]);
        if self.other.is_none() && self.device == Some(Device::Cuda) {
            // Of candle's; layers of experts need Brigade's alone.
            cargo.args(["--features", "cuda"]);
        }
        cargo.arg("--");
        // Relative paths stay those of the caller.
        cargo.args(self.arguments()).current_dir(here);
        cargo.env("CARGO_TARGET_DIR", &workspace.target);
        Ok(exit_code(status(&mut cargo)?))
    }

    /// Only what was given: the demo has its own defaults.
    fn arguments(self) -> Vec<OsString> {
        if let Some(Other::Moe(moe)) = self.other {
            return [vec!["moe".into()], moe.arguments()].concat();
        }
        let mut valued = vec![("--ranks", self.ranks.map(|n| n.to_string().into()))];
        let prompts = self.prompts.into_iter().map(|p| Some(p.into()));
        valued.extend(prompts.map(|p| ("--prompt", p)));
        valued.extend([
            (
                "--max-tokens",
                self.max_tokens.map(|n| n.to_string().into()),
            ),
            ("--device", self.device.and_then(name)),
            ("--mode", self.mode.and_then(name)),
            ("--trace", self.trace.map(Into::into)),
            ("--model", self.model.map(Into::into)),
            ("--deadline", self.deadline.map(|n| n.to_string().into())),
            ("--dtype", self.dtype.and_then(name)),
            ("--lose", self.lose.map(Into::into)),
            ("--stall", self.stall.map(Into::into)),
        ]);
        let flags = [
            ("--processes", self.processes),
            ("--lora", self.lora),
            ("--json", self.json),
            ("--synthetic", self.synthetic),
            ("--check", self.check),
            ("--regroup", self.regroup),
            ("--graph", self.graph),
        ];
        [vec!["run".into()], forwarded(valued, &flags)].concat()
    }
}

/// As it is given on the command line.
fn name(value: impl ValueEnum) -> Option<OsString> {
    Some(value.to_possible_value()?.get_name().into())
}

/// Options that have a value, and flags that are set.
fn forwarded(
    valued: impl IntoIterator<Item = (&'static str, Option<OsString>)>,
    flags: &[(&'static str, bool)],
) -> Vec<OsString> {
    let mut arguments: Vec<OsString> = Vec::new();
    for (option, value) in valued {
        if let Some(value) = value {
            // As one word, since a value may begin as an option does.
            let mut word = OsString::from(option);
            word.push("=");
            word.push(value);
            arguments.push(word);
        }
    }
    arguments.extend(flags.iter().filter(|f| f.1).map(|f| f.0.into()));
    arguments
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::Parser;

    #[derive(Parser)]
    struct Line {
        #[command(flatten)]
        demo: Demo,
    }

    fn passed(line: &str) -> Vec<OsString> {
        let words = std::iter::once("demo").chain(line.split_whitespace());
        Line::try_parse_from(words).unwrap().demo.arguments()
    }

    #[test]
    fn what_is_given_is_passed_on_and_nothing_else() {
        assert_eq!(passed(""), ["run"]);
        let all = "--ranks=3 --prompt=hello --max-tokens=8 --device=host --mode=ring --trace=t.json --deadline=5 --dtype=bf16 --lose=1@5 --stall=2@3 --processes --lora --json --synthetic --check --regroup --graph";
        let same = |line: &str| {
            let want: Vec<&str> = std::iter::once("run")
                .chain(line.split_whitespace())
                .collect();
            assert_eq!(passed(line), want);
        };
        same(all);
        same("--model=m.gguf");
        same("--prompt=one --prompt=-5");
        let moe = "moe --shape=small --ranks=4";
        let want: Vec<&str> = moe.split_whitespace().collect();
        assert_eq!(passed(moe), want);
    }

    #[test]
    fn wrong_options_are_refused_before_anything_is_built() {
        for line in [
            "--ranks 0",
            "--deadline 0",
            "--device tpu",
            "--mode fast",
            "--model m --synthetic",
            "--lora moe",
            "moe --lora",
        ] {
            let words = std::iter::once("demo").chain(line.split_whitespace());
            assert!(Line::try_parse_from(words).is_err(), "{line}");
        }
    }
}
