//! When, where, and from which sources.

use anyhow::{Context, Result, ensure};
use serde_json::{Value, json};
use std::{
    fs,
    process::Command,
    time::{SystemTime, UNIX_EPOCH},
};

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
    let since = SystemTime::now().duration_since(UNIX_EPOCH)?;
    let mut meta = json!({
        "date": date(since.as_secs() / 86_400),
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

/// A day since 1970 as YYYY-MM-DD, by Howard Hinnant's `civil_from_days`.
fn date(days: u64) -> String {
    let days = days + 719_468;
    let (era, day_of_era) = (days / 146_097, days % 146_097);
    let year_of_era =
        (day_of_era - day_of_era / 1460 + day_of_era / 36_524 - day_of_era / 146_096) / 365;
    let day_of_year = day_of_era - (365 * year_of_era + year_of_era / 4 - year_of_era / 100);
    // Months from March on.
    let month = (5 * day_of_year + 2) / 153;
    let day = day_of_year - (153 * month + 2) / 5 + 1;
    let (month, next) = if month < 10 {
        (month + 3, 0)
    } else {
        (month - 9, 1)
    };
    format!("{:04}-{month:02}-{day:02}", era * 400 + year_of_era + next)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn days_are_dates() {
        let days = [0, 58, 59, 789, 11_016, 11_017, 20_818];
        assert_eq!(
            days.map(date),
            [
                "1970-01-01",
                "1970-02-28",
                "1970-03-01",
                "1972-02-29",
                "2000-02-29",
                "2000-03-01",
                "2026-12-31",
            ]
        );
    }

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
