//! Runs the host micro-benchmarks, and what tunes GPUs.

use crate::{
    bundle, toolchain,
    workspace::{Workspace, exit_code, status},
};
use anyhow::Result;
use clap::{Args, ValueEnum};
use std::{
    ffi::OsString,
    process::{Command, ExitCode},
};

/// Run the host micro-benchmarks
///
/// Without `results` they are criterion's, whose reports stay in the target folder. With it, what the host device reaches
/// is measured and written to docs/results, from where the book takes its figures: on a quiet machine, from a commit. With
/// `tune`, brigade-perf finds which all-reduce is quickest at which size on the GPUs of this host, and with `tune-experts`, by
/// which transport rows travel quickest to experts; with `tune-hierarchical`, what calls and links cost across machines. For a GPU host without Rust, `cargo xtask bundle` packs brigade-perf: run
/// `./brigade-perf tune` there.
#[derive(Debug, Args)]
pub struct Bench {
    /// What to run, if not criterion
    #[arg(value_enum)]
    what: Option<What>,
    /// Passed on to cargo bench, for instance a part of a benchmark's name; or to results and what tunes, which tell theirs by --help
    #[arg(last = true, value_name = "ARGS")]
    arguments: Vec<OsString>,
}

#[derive(Clone, Copy, Debug, ValueEnum)]
enum What {
    /// Measure, and write docs/results
    Results,
    /// Tune all-reduces on the GPUs of this host: --entry FILE writes an entry for CudaConfig::entries
    Tune,
    /// Tune rows to experts on the GPUs of this host: --entry FILE writes an entry for CudaConfig::entries
    TuneExperts,
    /// Measure what calls and links cost across machines: --entry FILE writes an entry for CudaConfig::entries
    TuneHierarchical,
}

impl What {
    /// The subcommand of brigade-perf, if it is one.
    const fn tunes(self) -> Option<&'static str> {
        match self {
            Self::Results => None,
            Self::Tune => Some("tune"),
            Self::TuneExperts => Some("tune-experts"),
            Self::TuneHierarchical => Some("tune-hierarchical"),
        }
    }
}

impl Bench {
    pub fn run(self, workspace: &Workspace) -> Result<ExitCode> {
        let mut cargo = workspace.cargo();
        if self.what.and_then(What::tunes).is_some() {
            // Without an nvcc brigade-perf would be built with no kernels.
            toolchain::ensure(workspace)?;
            cargo.env("BRIGADE_REQUIRE_CUDA", "1");
            // An entry names the commit that it was measured at.
            cargo.env("BRIGADE_COMMIT", bundle::commit(workspace));
        }
        self.fill(&mut cargo);
        Ok(exit_code(status(&mut cargo)?))
    }

    fn fill(self, cargo: &mut Command) {
        match self.what {
            None => cargo.args(["bench", "--package", "brigade-benches", "--bench", "host"]),
            Some(What::Results) => cargo
                .args(["run", "--release", "--package", "brigade-benches"])
                .args(["--bin", "results"]),
            Some(What::Tune | What::TuneExperts | What::TuneHierarchical) => {
                cargo.args(["run", "--release", "--package", "brigade-perf"])
            }
        };
        match self.what.and_then(What::tunes) {
            // Its name for what is asked of it.
            Some(name) => cargo.args(["--", name]),
            None if self.arguments.is_empty() => return,
            None => cargo.arg("--"),
        };
        cargo.args(self.arguments);
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
    fn tune_is_a_subcommand_of_brigade_perf() {
        let tune = "run --release --package brigade-perf -- tune";
        assert_eq!(started("tune"), tune);
        assert_eq!(started("tune -- -w 2"), format!("{tune} -w 2"));
        assert_eq!(
            started("tune-experts -- --fp8"),
            format!("{tune}-experts --fp8")
        );
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
