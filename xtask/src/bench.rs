//! Runs the host micro-benchmarks.

use crate::workspace::{Workspace, exit_code, status};
use anyhow::Result;
use clap::Args;
use std::process::ExitCode;

/// Run the host micro-benchmarks (criterion)
#[derive(Debug, Args)]
pub struct Bench {
    /// Passed on to cargo bench, for instance a part of a benchmark's name
    #[arg(last = true, value_name = "ARGS")]
    arguments: Vec<String>,
}

impl Bench {
    pub fn run(self, workspace: &Workspace) -> Result<ExitCode> {
        let mut cargo = workspace.cargo();
        cargo.args(["bench", "--package", "brigade-benches"]);
        cargo.args(self.arguments);
        Ok(exit_code(status(&mut cargo)?))
    }
}
