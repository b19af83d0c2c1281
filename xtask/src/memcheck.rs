//! Runs the tests of unsafe host code under valgrind.

use crate::workspace::{Workspace, exit_code, status};
use anyhow::{Result, bail};
use clap::Args;
use std::process::{Command, ExitCode};

/// Run the tests of unsafe host code under valgrind's memcheck
///
/// A planted fault comes first, which valgrind must find. Needs valgrind, and a processor that it knows.
#[derive(Debug, Args)]
pub struct Memcheck {}

/// What valgrind ends with if it found something: no test program does.
const FOUND: i32 = 99;

/// The program that reads what is not its own.
const PLANTED: &str = "planted_fault";

/// Tests of the crates that have unsafe host code: arguments of cargo. Where they can, they name the whole workspace, as the
/// other tests do: for a single package cargo may choose other features, and build all of it anew. Under valgrind memory costs
/// something before it is used, since the allocator there writes the zeros itself.
const CRATES: [&str; 4] = [
    "--workspace --test protocols --test exchange",
    "--package brigade-group --lib -- shared:: --skip memory_costs_nothing",
    "--package brigade-host --lib",
    "--workspace --test layers -- lending:: ops::in_place",
];

/// Contracts of memory that ranks share, of regions, of sums, and of linears in every mode: which program, and which part of
/// it. Of sums every algorithm, at every length and shape, beside and in place, in pieces and after a reset; other operations,
/// forms and values go the same ways through memory.
const CONTRACTS: [(&str, &str); 8] = [
    ("host", "host/w3/gather_linear"),
    ("host", "host/w3/linear_reduce_scatter"),
    ("host", "host/w3/quantized"),
    ("host", "host/w3/user_buffers"),
    ("host", "host/w3/send_recv"),
    (
        "host",
        "host/w3/all_ --skip /auto/ --skip /max --skip /min --skip /prod --skip special_values --skip same_bits \
         --skip captured --skip fp8pertensor --skip one_shot_pull/int8 --skip two_shot/int8",
    ),
    ("processes", "processes/w2/gather_linear/ring/ragged"),
    ("processes", "processes/w3/user_buffers/let_go"),
];

impl Memcheck {
    pub fn run(self, workspace: &Workspace) -> Result<ExitCode> {
        if !Command::new("valgrind")
            .arg("--version")
            .output()
            .is_ok_and(|out| out.status.success())
        {
            bail!("valgrind is missing: Debian has it as apt install valgrind");
        }
        let triple = triple(workspace)?;
        if !finds_planted_fault(workspace)? {
            bail!("valgrind did not find the planted fault");
        }
        eprintln!("the planted fault was found");
        let contracts =
            CONTRACTS.map(|(program, part)| format!("--workspace --test {program} -- {part}"));
        for tests in CRATES.map(str::to_owned).iter().chain(&contracts) {
            let ended = under_valgrind(workspace, &triple, &format!("test {tests}"))?;
            if !ended.success() {
                return Ok(exit_code(ended));
            }
        }
        Ok(ExitCode::SUCCESS)
    }
}

/// This machine's name among cargo's targets, as its variables have it.
fn triple(workspace: &Workspace) -> Result<String> {
    let version = workspace.cargo().arg("-vV").output()?;
    let text = String::from_utf8_lossy(&version.stdout).into_owned();
    match text.lines().find_map(|line| line.strip_prefix("host: ")) {
        Some(host) => Ok(host.to_uppercase().replace('-', "_")),
        None => bail!("cargo -vV does not tell its host: {text}"),
    }
}

/// Whether valgrind finds the fault that is there to be found.
fn finds_planted_fault(workspace: &Workspace) -> Result<bool> {
    let build = ["build", "--workspace", "--example", PLANTED];
    if !status(workspace.cargo().args(build))?.success() {
        bail!("the program with the planted fault does not build");
    }
    let program = workspace.target.join("debug/examples").join(PLANTED);
    let mut command = Command::new("valgrind");
    command
        .args(["--quiet", &format!("--error-exitcode={FOUND}")])
        .arg(program);
    Ok(status(&mut command)?.code() == Some(FOUND))
}

fn under_valgrind(
    workspace: &Workspace,
    triple: &str,
    arguments: &str,
) -> Result<std::process::ExitStatus> {
    eprintln!("$ cargo {arguments}");
    let runner =
        format!("valgrind --quiet --fair-sched=yes --trace-children=yes --error-exitcode={FOUND}");
    let mut cargo = workspace.cargo();
    cargo
        .args(arguments.split_whitespace())
        .env(format!("CARGO_TARGET_{triple}_RUNNER"), runner);
    status(&mut cargo)
}
