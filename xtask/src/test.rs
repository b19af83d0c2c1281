//! The one command that runs every test.

use crate::{
    model, span, toolchain,
    workspace::{Workspace, exit_code, status},
};
use anyhow::Result;
use clap::{Args, ValueEnum};
use std::process::{Command, ExitCode};

/// Run every test of the workspace: unit, contract, model and documentation tests
///
/// Fetches the demo's model first (see `cargo xtask model`). Uses cargo-nextest where it is installed,
/// which ends tests that hang, and cargo's own runner elsewhere.
#[derive(Debug, Args)]
pub struct Test {
    /// Demand this device: with cuda, a missing GPU or kernel is a failure instead of a tested explanation
    #[arg(long, value_enum, default_value_t = Device::Host)]
    device: Device,
    /// Leave out the tests that need the demo's model: no network and no Python
    #[arg(long)]
    quick: bool,
    /// Only put the operations under stress, for so long in all: 90s, 30m or 2h. Calls of all kinds in random order, with
    /// delays and faults; a failure prints the seed that replays it
    #[arg(long, value_name = "TIME", value_parser = time, conflicts_with = "quick")]
    stress: Option<String>,
    /// Passed on to the test runner, for instance a part of a test's name
    #[arg(last = true, value_name = "ARGS")]
    arguments: Vec<String>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum Device {
    Host,
    Cuda,
}

/// The package whose integration tests need the model.
const MODEL_PACKAGE: &str = "brigade-demo";

/// How long the contracts are told to go on with stress.
const STRESS: &str = "BRIGADE_STRESS";

fn time(text: &str) -> Result<String, String> {
    span::parse(text).map(|_| text.trim().to_owned())
}

impl Test {
    pub fn run(self, workspace: &Workspace) -> Result<ExitCode> {
        if self.device == Device::Cuda {
            toolchain::ensure(workspace)?;
        }
        if !self.quick && self.stress.is_none() {
            let fetched = model::fetch(workspace)?;
            if !fetched.success() {
                eprintln!("without the model: cargo xtask test --quick");
                return Ok(exit_code(fetched));
            }
        }
        let mut worst = ExitCode::SUCCESS;
        for arguments in self.runs(workspace.has_nextest()) {
            let mut cargo = workspace.cargo();
            self.set_device(cargo.args(&arguments));
            cargo.envs(self.stress.iter().map(|time| (STRESS, time)));
            eprintln!("$ cargo {}", arguments.join(" "));
            let ended = status(&mut cargo)?;
            if !ended.success() {
                worst = exit_code(ended);
            }
        }
        Ok(worst)
    }

    /// The calls of cargo that make up the tests. A failure in one does not keep the next from running.
    fn runs(&self, nextest: bool) -> Vec<Vec<String>> {
        let own = |words: &str| {
            words
                .split_whitespace()
                .map(str::to_owned)
                .collect::<Vec<_>>()
        };
        let mut runs = Vec::new();
        if self.stress.is_some() {
            // With cargo's runner, which ends nothing that takes long; and one group size after the other.
            let mut run = own(
                "test --package brigade-conformance --no-fail-fast --tests -- --test-threads 1 stress/",
            );
            run.extend(self.arguments.iter().cloned());
            return vec![run];
        }
        if nextest {
            let mut run = own("nextest run --workspace --no-fail-fast");
            if self.quick {
                run.push("--filterset".into());
                run.push(format!("not (package({MODEL_PACKAGE}) & kind(test))"));
            }
            // A filter that leaves nothing in one part is no failure of the whole.
            run.push("--no-tests=pass".into());
            run.extend(self.arguments.iter().cloned());
            runs.push(run);
        } else if self.quick {
            runs.push(own(&format!(
                "test --workspace --exclude {MODEL_PACKAGE} --no-fail-fast --lib --bins --tests"
            )));
            runs.push(own(&format!(
                "test --package {MODEL_PACKAGE} --no-fail-fast --lib --bins"
            )));
        } else {
            runs.push(own("test --workspace --no-fail-fast --lib --bins --tests"));
        }
        runs.push(own("test --workspace --no-fail-fast --doc"));
        if !nextest {
            for run in &mut runs {
                run.extend(self.arguments.iter().cloned());
            }
        } else if let (Some(doc), [filter, ..]) = (runs.last_mut(), &self.arguments[..]) {
            // nextest's own options mean nothing to cargo's runner, a part of a name does.
            if !filter.starts_with('-') {
                doc.push(filter.clone());
            }
        }
        runs
    }

    fn set_device<'a>(&self, cargo: &'a mut Command) -> &'a mut Command {
        match self.device {
            Device::Host => cargo.env("BRIGADE_TEST_DEVICE", "host"),
            Device::Cuda => cargo
                .env("BRIGADE_TEST_DEVICE", "cuda")
                .env("BRIGADE_REQUIRE_CUDA", "1"),
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
        test: Test,
    }

    fn runs(line: &str, nextest: bool) -> String {
        let words = std::iter::once("test").chain(line.split_whitespace());
        let runs = Line::try_parse_from(words).unwrap().test.runs(nextest);
        let lines: Vec<_> = runs.iter().map(|run| run.join(" ")).collect();
        lines.join("\n")
    }

    #[test]
    fn every_test_is_run_with_either_runner() {
        insta::assert_snapshot!(runs("", true), @r"
        nextest run --workspace --no-fail-fast --no-tests=pass
        test --workspace --no-fail-fast --doc
        ");
        insta::assert_snapshot!(runs("", false), @r"
        test --workspace --no-fail-fast --lib --bins --tests
        test --workspace --no-fail-fast --doc
        ");
    }

    #[test]
    fn stress_is_all_that_is_run() {
        for nextest in [true, false] {
            insta::allow_duplicates! {
                insta::assert_snapshot!(
                    runs("--stress 2h -- --nocapture", nextest),
                    @"test --package brigade-conformance --no-fail-fast --tests -- --test-threads 1 stress/ --nocapture"
                );
            }
        }
        let refused = |line: &[&str]| Line::try_parse_from(line).err().unwrap().to_string();
        insta::assert_snapshot!(refused(&["test", "--stress", "long"]), @r#"
        error: invalid value 'long' for '--stress <TIME>': "long" is no time such as 90s, 30m or 2h

        For more information, try '--help'.
        "#);
    }

    #[test]
    fn quick_leaves_out_the_model_and_nothing_else() {
        insta::assert_snapshot!(runs("--quick -- ring", true), @r"
        nextest run --workspace --no-fail-fast --filterset not (package(brigade-demo) & kind(test)) --no-tests=pass ring
        test --workspace --no-fail-fast --doc ring
        ");
        insta::assert_snapshot!(runs("--quick -- ring", false), @r"
        test --workspace --exclude brigade-demo --no-fail-fast --lib --bins --tests ring
        test --package brigade-demo --no-fail-fast --lib --bins ring
        test --workspace --no-fail-fast --doc ring
        ");
    }
}
