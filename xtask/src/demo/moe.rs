//! Runs a layer of experts on Brigade.

use super::{Device, forwarded, name};
use clap::{Args, ValueEnum};
use std::{
    ffi::OsString,
    num::{NonZeroU64, NonZeroUsize},
};

/// Run a layer of experts, spread over several ranks, and compare it with f64
///
/// Weights are random, dimensions those of a published model or small ones: nothing is fetched. The exit code is 1 if the layer is
/// further from its evaluation in f64 than roundings explain, or a repeat gives other bits.
#[derive(Debug, Args)]
pub struct Moe {
    /// Whose dimensions the layer has
    #[arg(long, value_enum)]
    shape: Option<Shape>,
    /// Take only so many of its experts
    #[arg(long, value_name = "N")]
    experts: Option<NonZeroUsize>,
    /// How many ranks to spread the experts over
    #[arg(long, value_name = "N")]
    ranks: Option<NonZeroUsize>,
    /// Tokens: a number for every rank, or one for each, as in 3,0,5
    #[arg(long, value_name = "N", value_delimiter = ',')]
    tokens: Vec<usize>,
    /// Which device carries it out; on cuda each rank takes a GPU of its own, where there are enough
    #[arg(long, value_enum)]
    device: Option<Device>,
    /// What travels back: a row of each expert, or the sum of each rank's
    #[arg(long, value_enum)]
    sum: Option<Sum>,
    /// Cast rows to fp8 on the way to their experts
    #[arg(long)]
    fp8: bool,
    /// Timed passes, after one that loads the weights; all must give the same bits
    #[arg(long, value_name = "N")]
    repeats: Option<NonZeroUsize>,
    /// Makes weights and tokens
    #[arg(long, value_name = "N")]
    seed: Option<u64>,
    /// Make each rank a process instead of a thread
    #[arg(long)]
    processes: bool,
    /// Print one JSON object instead of text
    #[arg(long)]
    json: bool,
    /// Seconds after which a rank that waits for another gives up
    #[arg(long, value_name = "SECONDS")]
    deadline: Option<NonZeroU64>,
}

#[derive(Clone, Copy, Debug, ValueEnum)]
enum Shape {
    Mixtral,
    Qwen3,
    Deepseek,
    Small,
}

#[derive(Clone, Copy, Debug, ValueEnum)]
enum Sum {
    Expert,
    Rank,
}

impl Moe {
    pub(super) fn arguments(self) -> Vec<OsString> {
        fn number(value: Option<impl ToString>) -> Option<OsString> {
            Some(value?.to_string().into())
        }
        let tokens: Vec<String> = self.tokens.iter().map(ToString::to_string).collect();
        let tokens = (!tokens.is_empty()).then(|| tokens.join(","));
        let valued = [
            ("--shape", self.shape.and_then(name)),
            ("--experts", number(self.experts)),
            ("--ranks", number(self.ranks)),
            ("--tokens", number(tokens)),
            ("--device", self.device.and_then(name)),
            ("--sum", self.sum.and_then(name)),
            ("--repeats", number(self.repeats)),
            ("--seed", number(self.seed)),
            ("--deadline", number(self.deadline)),
        ];
        let flags = [
            ("--fp8", self.fp8),
            ("--processes", self.processes),
            ("--json", self.json),
        ];
        forwarded(valued, &flags)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::Parser;

    #[derive(Parser)]
    struct Line {
        #[command(flatten)]
        moe: Moe,
    }

    fn parsed(line: &str) -> Result<Vec<OsString>, clap::Error> {
        let words = std::iter::once("moe").chain(line.split_whitespace());
        Ok(Line::try_parse_from(words)?.moe.arguments())
    }

    #[test]
    fn what_is_given_is_passed_on_and_nothing_else() {
        assert_eq!(parsed("").unwrap(), Vec::<OsString>::new());
        let all = "--shape=qwen3 --experts=64 --ranks=3 --tokens=3,0,5 --device=host --sum=expert --repeats=2 --seed=7 --deadline=5 --fp8 --processes --json";
        let want: Vec<&str> = all.split_whitespace().collect();
        assert_eq!(parsed(all).unwrap(), want);
    }

    #[test]
    fn wrong_options_are_refused_before_anything_is_built() {
        for line in ["--shape gpt", "--ranks 0", "--sum all", "--repeats 0"] {
            assert!(parsed(line).is_err(), "{line}");
        }
    }
}
