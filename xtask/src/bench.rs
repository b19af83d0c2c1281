//! Runs the host micro-benchmarks.

use crate::workspace::{Workspace, exit_code, status};
use anyhow::Result;
use clap::{Args, ValueEnum};
use std::{
    ffi::OsString,
    process::{Command, ExitCode},
};

/// Run the host micro-benchmarks
///
/// Without `results` they are criterion's, whose reports stay in the target folder. With it, what the host device reaches
/// is measured and written to docs/results, from where the book takes its figures: on a quiet machine, from a commit.
#[derive(Debug, Args)]
pub struct Bench {
    /// What to run, if not criterion
    #[arg(value_enum)]
    what: Option<What>,
    /// Passed on to cargo bench, for instance a part of a benchmark's name; or to results, which tell theirs by --help
    #[arg(last = true, value_name = "ARGS")]
    arguments: Vec<OsString>,
}

#[derive(Clone, Copy, Debug, ValueEnum)]
enum What {
    /// Measure, and write docs/results
    Results,
}

impl Bench {
    pub fn run(self, workspace: &Workspace) -> Result<ExitCode> {
        let mut cargo = workspace.cargo();
        self.fill(&mut cargo);
        Ok(exit_code(status(&mut cargo)?))
    }

    fn fill(self, cargo: &mut Command) {
        match self.what {
            None => cargo.args(["bench", "--package", "brigade-benches", "--bench", "host"]),
            Some(What::Results) => cargo
                .args(["run", "--release", "--package", "brigade-benches"])
                .args(["--bin", "results"]),
        };
        if !self.arguments.is_empty() {
            cargo.arg("--").args(self.arguments);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::Parser;

    #[derive(Parser)]
    struct Line {
        #[command(flatten)]
        bench: Bench,
    }

    fn started(line: &str) -> String {
        let words = std::iter::once("bench").chain(line.split_whitespace());
        let mut cargo = Command::new("cargo");
        Line::try_parse_from(words).unwrap().bench.fill(&mut cargo);
        let words: Vec<_> = cargo.get_args().map(|a| a.to_string_lossy()).collect();
        words.join(" ")
    }

    #[test]
    fn criterion_or_results_get_their_arguments() {
        let criterion = "bench --package brigade-benches --bench host";
        assert_eq!(started(""), criterion);
        assert_eq!(started("-- gemm"), format!("{criterion} -- gemm"));
        let results = "run --release --package brigade-benches --bin results";
        assert_eq!(started("results"), results);
        assert_eq!(
            started("results -- --only gemm"),
            format!("{results} -- --only gemm")
        );
    }
}
