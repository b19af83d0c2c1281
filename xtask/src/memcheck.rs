//! Runs the tests of unsafe host code under valgrind.

use crate::workspace::{Workspace, exit_code, status};
use anyhow::{Context, Result, anyhow, bail};
use cargo_metadata::{Artifact, Message};
use clap::Args;
use std::{
    process::{Command, ExitCode, Stdio},
    sync::{Mutex, PoisonError},
    thread,
};

/// Run the tests of unsafe host code under valgrind's memcheck
///
/// A planted fault comes first, which valgrind must find. Needs valgrind, and a processor that it knows.
#[derive(Debug, Args)]
pub struct Memcheck {}

/// What valgrind ends with if it found something: no test program does.
const FOUND: i32 = 99;

/// The program that reads what is not its own.
const PLANTED: &str = "planted_fault";

/// Tests of the crates that have unsafe host code: arguments of cargo. They name the whole workspace, as the other tests do: for a
/// single package cargo may choose other features, and build all of it anew.
const CRATES: [&str; 3] = [
    "--workspace --test protocols --test exchange",
    "--workspace --test layers -- /lending/ --skip /w3/ --skip /w4/",
    "--workspace --test layers -- host/w2/ops/in_place",
];

/// Unit tests of such crates: which library, and arguments of its test program. Under valgrind memory costs something before it is
/// used, since the allocator there writes the zeros itself.
const LIBRARIES: [(&str, &str); 2] = [
    ("brigade_group", "shared:: --skip memory_costs_nothing"),
    ("brigade_host", ""),
];

/// Contracts of memory that ranks share, of regions, of sums, and of linears in every mode: which program, and which part of
/// it. Of sums every algorithm, at every length and shape, beside and in place, in pieces and after a reset; other operations,
/// forms and values go the same ways through memory. Linears whose rows do not depend on the batch do, too, with shapes of a GPU's tiles,
/// which are too large here.
const CONTRACTS: [(&str, &str); 8] = [
    ("host", "host/w3/gather_linear --skip batch_invariant"),
    (
        "host",
        "host/w3/linear_reduce_scatter --skip batch_invariant",
    ),
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
        let mut jobs = Vec::new();
        for program in test_programs(workspace)? {
            let of_this = |(name, _): &&(&str, &str)| *name == program.target.name;
            let (Some((name, arguments)), Some(path)) =
                (LIBRARIES.iter().find(of_this), &program.executable)
            else {
                continue;
            };
            let mut command = valgrind();
            command.arg(path).args(arguments.split_whitespace());
            command.current_dir(program.manifest_path.parent().unwrap_or(path));
            jobs.push((format!("valgrind {name} {arguments}"), command));
        }
        let contracts =
            CONTRACTS.map(|(program, part)| format!("--workspace --test {program} -- {part}"));
        for tests in contracts.into_iter().chain(CRATES.map(str::to_owned)) {
            let arguments = format!("test {tests}");
            let command = under_valgrind(workspace, &triple, &arguments);
            jobs.push((format!("cargo {arguments}"), command));
        }
        run_all(jobs)
    }
}

/// Runs them side by side, as many as there are cores: valgrind lets one thread of a program run at a time. Shows each one's output when it
/// has ended; once one has failed, begins no other.
fn run_all(jobs: Vec<(String, Command)>) -> Result<ExitCode> {
    let workers = thread::available_parallelism().map_or(1, usize::from);
    let left = Mutex::new(jobs.into_iter());
    let worst: Mutex<Option<Result<ExitCode>>> = Mutex::new(None);
    let next = || {
        let failed = worst
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .is_some();
        let mut left = left.lock().unwrap_or_else(PoisonError::into_inner);
        if failed { None } else { left.next() }
    };
    thread::scope(|scope| {
        for _ in 0..workers {
            scope.spawn(|| {
                while let Some((what, mut command)) = next() {
                    let ended = command
                        .output()
                        .with_context(|| format!("{what} does not start"));
                    let mut worst = worst.lock().unwrap_or_else(PoisonError::into_inner);
                    let failure = match ended {
                        Ok(out) => {
                            let text = [&out.stderr[..], &out.stdout].concat();
                            eprintln!("$ {what}\n{}", String::from_utf8_lossy(&text));
                            match out.status.success() {
                                true if has_run(&out.stdout) => None,
                                true => Some(Err(anyhow!("{what} has run no test"))),
                                false => Some(Ok(exit_code(out.status))),
                            }
                        }
                        Err(error) => Some(Err(error)),
                    };
                    *worst = worst.take().or(failure);
                }
            });
        }
    });
    let worst = worst.into_inner().unwrap_or_else(PoisonError::into_inner);
    worst.unwrap_or(Ok(ExitCode::SUCCESS))
}

/// Whether a program of tests says that one at least has passed.
fn has_run(stdout: &[u8]) -> bool {
    let text = String::from_utf8_lossy(stdout);
    let mut results = text
        .lines()
        .filter_map(|line| line.strip_prefix("test result: ok. "));
    results.any(|result| !result.starts_with("0 passed"))
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
    Ok(status(valgrind().arg(program))?.code() == Some(FOUND))
}

/// Test programs of all libraries, as the other tests have them.
fn test_programs(workspace: &Workspace) -> Result<Vec<Artifact>> {
    let mut cargo = workspace.cargo();
    cargo.args(["test", "--workspace", "--lib", "--no-run"]);
    let built = cargo.arg("--message-format=json").stderr(Stdio::inherit());
    let built = built.output()?;
    if !built.status.success() {
        bail!("the libraries' tests do not build");
    }
    let mut programs = Vec::new();
    for message in Message::parse_stream(&built.stdout[..]) {
        if let Message::CompilerArtifact(artifact) = message? {
            programs.push(artifact);
        }
    }
    for (name, _) in LIBRARIES {
        let is_this = |a: &Artifact| a.target.name == name && a.executable.is_some();
        if !programs.iter().any(is_this) {
            bail!("{name} has no tests");
        }
    }
    Ok(programs)
}

/// With all that comes before the program.
fn valgrind() -> Command {
    let mut command = Command::new("valgrind");
    command.args(["--quiet", "--fair-sched=yes", "--trace-children=yes"]);
    command.arg(format!("--error-exitcode={FOUND}"));
    command
}

fn under_valgrind(workspace: &Workspace, triple: &str, arguments: &str) -> Command {
    let before = valgrind();
    let words = [before.get_program()].into_iter().chain(before.get_args());
    let words: Vec<_> = words.map(|word| word.to_string_lossy()).collect();
    let runner = words.join(" ");
    let mut cargo = workspace.cargo();
    cargo
        .args(arguments.split_whitespace())
        .env(format!("CARGO_TARGET_{triple}_RUNNER"), runner);
    cargo
}

#[cfg(test)]
mod tests {
    use super::*;

    fn all(scripts: &[&str]) -> String {
        let job = |script: &&str| {
            let mut command = Command::new("sh");
            command.args(["-c", script]);
            (format!("sh {script}"), command)
        };
        format!("{:?}", run_all(scripts.iter().map(job).collect()).unwrap())
    }

    /// A test program of which all is well.
    const WELL: &str = "echo 'test result: ok. 2 passed; 0 failed'";

    #[test]
    fn one_failure_among_all_is_the_result() {
        let code = |code| format!("{:?}", ExitCode::from(code));
        assert_eq!(all(&[WELL; 5]), code(0));
        assert_eq!(all(&[WELL, WELL, "exit 99", WELL]), code(99));
        assert_eq!(all(&[WELL, WELL, "exit 99"]), code(99));
    }

    #[test]
    fn who_has_run_no_test_has_shown_nothing() {
        for nothing in ["exit 0", "echo 'test result: ok. 0 passed; 0 failed'"] {
            let mut command = Command::new("sh");
            command.args(["-c", nothing]);
            let said = run_all(vec![("it".to_owned(), command)]).unwrap_err();
            assert_eq!(said.to_string(), "it has run no test");
        }
    }

    #[test]
    fn what_does_not_start_is_an_error() {
        let jobs = vec![("none".to_owned(), Command::new("/there/is/none"))];
        let said = run_all(jobs).unwrap_err().to_string();
        assert_eq!(said, "none does not start");
    }
}
