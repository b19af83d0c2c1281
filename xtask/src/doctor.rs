//! What this machine has, what it lacks, and what to do about it.

// Shared with brigade-perf, which says the same of hosts without Rust.
pub(crate) mod row;
mod today;

use crate::{
    bundle, model, nvcc, progress,
    workspace::{Workspace, python},
};
use anyhow::Result;
use clap::Args;
use row::{Row, State, readable};
use serde_json::{Value, json};
use std::{
    fs,
    path::Path,
    process::{Command, ExitCode},
};
use today::today;

/// Say what this machine has and lacks: compilers, model, driver, GPUs, and what to do about each
///
/// Exits with 0 unless something is missing that nothing works without: that is a Rust compiler
/// or a C compiler, not a GPU.
#[derive(Debug, Args)]
pub struct Doctor {
    /// Print one JSON object instead of text
    #[arg(long)]
    json: bool,
}

/// The oldest compiler that users need, as the root Cargo.toml says.
const OLDEST_RUST: (u32, u32) = (1, 88);
const NEEDED_MEMORY_MIB: u64 = 4096;

impl Doctor {
    pub fn run(self, workspace: &Workspace) -> Result<ExitCode> {
        let spinner = progress::spinner("looking around");
        let mut rows = vec![
            rust(workspace),
            nextest(workspace),
            cores(),
            memory(fs::read_to_string("/proc/meminfo").ok().as_deref()),
            c_compiler(),
            python_row(),
            nvcc_row(workspace),
            model_row(),
        ];
        spinner.set_message("asking brigade-cuda (builds it the first time)");
        rows.extend(cuda_rows(&ask_cuda(workspace)));
        spinner.finish_and_clear();
        if self.json {
            println!("{:#}", file(&bundle::commit(workspace), &rows));
        } else {
            print!("{}", readable(&rows));
        }
        let broken = rows.iter().any(|row| row.state == State::Missing);
        Ok(if broken {
            ExitCode::FAILURE
        } else {
            ExitCode::SUCCESS
        })
    }
}

/// The report as a file of results.
pub(crate) fn file(commit: &str, rows: &[Row]) -> Value {
    json!({
        "meta": { "date": today(), "commit": commit, "command": "cargo xtask doctor --json" },
        "rows": rows,
    })
}

/// The first line that a command prints, if it runs.
fn first_line(command: &mut Command) -> Option<String> {
    let output = command.output().ok().filter(|o| o.status.success())?;
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    Some(text.lines().next()?.trim().to_owned())
}

fn rust(workspace: &Workspace) -> Row {
    let rustc = std::env::var_os("RUSTC").unwrap_or_else(|| "rustc".into());
    let found = first_line(
        Command::new(rustc)
            .arg("--version")
            .current_dir(&workspace.root),
    );
    judge_rust(found.as_deref())
}

fn judge_rust(found: Option<&str>) -> Row {
    let (major, minor) = OLDEST_RUST;
    let todo = format!(
        "install rustup from https://rustup.rs; Brigade needs Rust {major}.{minor} or newer"
    );
    let Some(found) = found else {
        return Row::missing("rustc", "does not run", todo);
    };
    let version = found.split(' ').nth(1).unwrap_or_default();
    let mut numbers = version.split('.').map_while(|n| n.parse::<u32>().ok());
    match (numbers.next(), numbers.next()) {
        (Some(a), Some(b)) if (a, b) >= OLDEST_RUST => Row::ok("rustc", found),
        _ => Row::missing("rustc", found, todo),
    }
}

fn nextest(workspace: &Workspace) -> Row {
    match first_line(workspace.cargo().args(["nextest", "--version"])) {
        Some(found) => Row::ok("nextest", found),
        None => Row::absent(
            "nextest",
            "not installed: cargo's own test runner is used, which cannot end a test that hangs",
            "cargo install cargo-nextest --locked",
        ),
    }
}

fn cores() -> Row {
    match std::thread::available_parallelism() {
        Ok(cores) => Row::ok("cores", cores.to_string()),
        Err(e) => Row::absent("cores", e.to_string(), "nothing: 1 is assumed"),
    }
}

fn memory(meminfo: Option<&str>) -> Row {
    let field = |name: &str| {
        let line = meminfo?.lines().find(|l| l.starts_with(name))?;
        let kib: u64 = line.split_whitespace().nth(1)?.parse().ok()?;
        Some(kib / 1024)
    };
    match (field("MemAvailable:"), field("MemTotal:")) {
        (Some(free), Some(total)) if free < NEEDED_MEMORY_MIB => Row::absent(
            "memory",
            format!("{free} MiB free of {total} MiB"),
            format!(
                "free some: builds and the demo want {NEEDED_MEMORY_MIB} MiB (CARGO_BUILD_JOBS=1 needs less)"
            ),
        ),
        (Some(free), Some(total)) => Row::ok("memory", format!("{free} MiB free of {total} MiB")),
        _ => Row::absent("memory", "this system does not say", "nothing"),
    }
}

fn c_compiler() -> Row {
    let compiler = std::env::var("CC").unwrap_or_else(|_| "cc".into());
    match first_line(Command::new(&compiler).arg("--version")) {
        Some(found) => Row::ok("c compiler", found),
        None if cfg!(windows) => Row::absent(
            "c compiler",
            "cc does not run",
            "nothing: Rust brings MSVC's",
        ),
        None => Row::missing(
            "c compiler",
            format!("{compiler} does not run"),
            "install one (Debian: apt install gcc), or name it in CC",
        ),
    }
}

fn python_row() -> Row {
    let todo = "install Python 3 with pip and venv (Debian: apt install python3-pip python3-venv); without it: --quick, --synthetic";
    let Some(found) = first_line(Command::new(python()).arg("--version")) else {
        return Row::absent("python", format!("{} does not run", python()), todo);
    };
    let modules = Command::new(python())
        .args(["-c", "import pip, venv, ensurepip"])
        .output();
    if modules.is_ok_and(|o| o.status.success()) {
        Row::ok("python", found)
    } else {
        Row::absent("python", format!("{found}, without pip or venv"), todo)
    }
}

fn nvcc_row(workspace: &Workspace) -> Row {
    match nvcc::find(&[workspace.toolchain()]) {
        Ok(found) => {
            let (major, minor) = found.version;
            Row::ok(
                "nvcc",
                format!("{major}.{minor} at {}", found.path.display()),
            )
        }
        Err(why) => Row::absent(
            "nvcc",
            format!("{why}: builds hold no CUDA kernels"),
            "cargo xtask toolchain (105 MB by pip), or set CUDA_HOME",
        ),
    }
}

fn model_row() -> Row {
    judge_model(model::cache().as_deref())
}

fn judge_model(cache: Option<&Path>) -> Row {
    let Some(cache) = cache else {
        return Row::absent("model", "there is no place for it", "set BRIGADE_CACHE");
    };
    let found = fs::read_dir(cache)
        .into_iter()
        .flatten()
        .filter_map(|entry| entry.ok().map(|e| e.path()))
        .find(|path| path.extension().is_some_and(|e| e == "gguf"));
    match found {
        Some(path) => Row::ok("model", path.display().to_string()),
        None => Row::absent(
            "model",
            format!("not in {}", cache.display()),
            "cargo xtask model (93 MB); demo and test fetch it too",
        ),
    }
}

/// The report of brigade-cuda's example, run in a process of its own: xtask itself builds fast and never depends on it.
fn ask_cuda(workspace: &Workspace) -> Result<Value, String> {
    let mut cargo = workspace.cargo();
    cargo.args([
        "run",
        "--quiet",
        "--package",
        "brigade-cuda",
        "--example",
        "devices",
        "--",
        "--json",
    ]);
    let output = cargo.output().map_err(|e| e.to_string())?;
    if !output.status.success() {
        let said = String::from_utf8_lossy(&output.stderr);
        return Err(said.lines().last().unwrap_or("it failed").to_owned());
    }
    serde_json::from_slice(&output.stdout).map_err(|e| e.to_string())
}

fn cuda_rows(report: &Result<Value, String>) -> Vec<Row> {
    let report = match report {
        Ok(report) => report,
        Err(why) => {
            let found = format!("brigade-cuda did not answer: {why}");
            return vec![Row::absent(
                "cuda",
                found,
                "cargo run -p brigade-cuda --example devices",
            )];
        }
    };
    let findings = report["findings"].as_array();
    let rows = findings.into_iter().flatten().map(|finding| {
        let (name, missing) = (text(&finding["name"]), &finding["missing"]);
        if missing.is_null() {
            return Row::ok(name, text(&finding["found"]));
        }
        let row = Row::absent(name, text(&missing["what"]), text(&missing["remedy"]));
        row.with_code(text(&missing["code"]))
    });
    rows.collect()
}

fn text(value: &Value) -> String {
    value.as_str().unwrap_or_default().to_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_old_or_absent_compiler_is_missing() {
        assert_eq!(
            judge_rust(Some("rustc 1.88.0 (6b00bc388 2025-06-23)")).state,
            State::Ok
        );
        assert_eq!(
            judge_rust(Some("rustc 1.87.0 (17067e9ac 2025-05-09)")).state,
            State::Missing
        );
        assert_eq!(judge_rust(Some("nonsense")).state, State::Missing);
        assert_eq!(judge_rust(None).state, State::Missing);
    }

    #[test]
    fn little_memory_is_said_and_fails_nothing() {
        let enough = memory(Some(
            "MemTotal:       24000000 kB\nMemAvailable:   20000000 kB\n",
        ));
        assert_eq!(
            (enough.state, &enough.found[..]),
            (State::Ok, "19531 MiB free of 23437 MiB")
        );
        let little = memory(Some("MemTotal: 2000000 kB\nMemAvailable: 1000000 kB\n"));
        assert_eq!(little.state, State::Absent);
        assert_eq!(memory(None).state, State::Absent);
    }

    #[test]
    fn every_row_of_a_machine_without_a_gpu_says_what_to_do() {
        let missing = json!({ "code": "c", "what": "there is no driver", "remedy": "install one" });
        let finding = |name| json!({ "name": name, "missing": missing });
        let report = json!({ "findings": [finding("driver"), finding("gpus"), finding("nccl")] });
        let rows = cuda_rows(&Ok(report));
        assert_eq!(rows.len(), 3);
        assert!(
            rows.iter()
                .all(|r| r.state == State::Absent && r.todo.as_deref() == Some("install one"))
        );
        let rows = cuda_rows(&Err("it does not build".into()));
        assert_eq!((rows.len(), rows[0].state), (1, State::Absent));
    }

    #[test]
    fn readable_rows_line_up() {
        let gpu = "NVIDIA H200, capability 9.0, 143771 MiB, 132 multiprocessors";
        let links =
            "NVLink, peer access both ways: GPUs 0-1\nPCIe, peer access both ways: GPUs 0-2, 1-2";
        let refused = json!({ "code": "cuda_call_refused", "what": "not on GPU 0", "remedy": "nothing to do" });
        let report = json!({ "findings": [
            { "name": "driver", "found": "580.95.05, CUDA 13.0 (this build needs 13.0)" },
            { "name": "gpu 0", "found": gpu },
            { "name": "links", "found": links },
            { "name": "fabric handles", "missing": refused },
        ] });
        let mut rows = cuda_rows(&Ok(report));
        rows.push(Row::missing("rustc", "does not run", "install it"));
        rows.push(Row::absent(
            "model",
            "not in the cache",
            "cargo xtask model",
        ));
        insta::assert_snapshot!("doctor_readable", readable(&rows));
        insta::assert_snapshot!("doctor_json", format!("{:#}", json!({ "rows": rows })));
    }

    #[test]
    fn a_model_in_the_cache_is_found() {
        let folder = xshell::Shell::new().unwrap().create_temp_dir().unwrap();
        assert_eq!(judge_model(Some(folder.path())).state, State::Absent);
        assert_eq!(judge_model(None).state, State::Absent);
        fs::write(folder.path().join("m.gguf"), "").unwrap();
        assert_eq!(judge_model(Some(folder.path())).state, State::Ok);
    }
}
