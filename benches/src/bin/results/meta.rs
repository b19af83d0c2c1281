//! When, where, and from which sources.

#[path = "../../../../xtask/src/doctor/today.rs"]
mod today;

use anyhow::{Context, Result, ensure};
use serde_json::{Value, json};
use std::{fs, process::Command};
use today::today;

/// The `meta` of a file of results.
pub fn meta() -> Result<Value> {
    let unsaved = said(
        "git",
        &[
            "status",
            "--porcelain",
            "--",
            "*.rs",
            "*.toml",
            "Cargo.lock",
        ],
    )?;
    let mut meta = json!({
        "date": today(),
        "commit": said("git", &["rev-parse", "--short=12", "HEAD"])?,
        "cpu": cpu(),
        "cores": std::thread::available_parallelism()?.get(),
        "rustc": said("rustc", &["--version"])?,
        "command": command(std::env::args().skip(1)),
    });
    if !unsaved.is_empty() {
        meta["uncommitted_changes"] = json!(true);
    }
    Ok(meta)
}

fn command(arguments: impl Iterator<Item = String>) -> String {
    let told: Vec<String> = arguments.collect();
    let dashes = if told.is_empty() { "" } else { " -- " };
    format!("cargo xtask bench results{dashes}{}", told.join(" "))
}

fn said(program: &str, arguments: &[&str]) -> Result<String> {
    let output = Command::new(program)
        .args(arguments)
        .output()
        .with_context(|| format!("{program} does not start"))?;
    ensure!(
        output.status.success(),
        "{program} {}: {}",
        arguments.join(" "),
        String::from_utf8_lossy(&output.stderr).trim()
    );
    Ok(String::from_utf8_lossy(&output.stdout).trim().to_owned())
}

fn cpu() -> String {
    let info = fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
    let name = info.lines().find_map(|l| l.strip_prefix("model name"));
    name.and_then(|n| Some(n.split_once(':')?.1.trim().to_owned()))
        .unwrap_or_else(|| std::env::consts::ARCH.to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_command_is_what_a_person_would_type() {
        let told = |words: &[&str]| command(words.iter().map(ToString::to_string));
        assert_eq!(told(&[]), "cargo xtask bench results");
        assert_eq!(
            told(&["--only", "gemm"]),
            "cargo xtask bench results -- --only gemm"
        );
    }
}
