//! What this host has for GPUs, and what it lacks: `cargo xtask doctor` for hosts that have no Rust.

#[path = "../../kernels/build/nvcc.rs"]
#[expect(dead_code, reason = "nothing is compiled here")]
mod nvcc;
#[path = "../../../xtask/src/doctor/row.rs"]
mod row;

use crate::meta;
use anyhow::Result;
use brigade::cuda::{Finding, survey};
use clap::Args;
use row::{Row, State, readable};
use serde_json::json;
use std::process::ExitCode;

/// How it is told.
#[derive(Clone, Debug, Args)]
pub struct Doctor {
    /// Print one JSON object instead of text: a file of results
    #[arg(long)]
    json: bool,
}

/// What no GPU can be used without.
const NEEDED: [&str; 4] = ["driver", "gpus", "cuda kernels", "cublas"];

/// The report, and whether something is missing that no GPU can be used without.
///
/// # Errors
/// Why this program cannot be read, whose digest is in the JSON.
pub fn run(options: &Doctor) -> Result<(String, ExitCode)> {
    let mut rows: Vec<Row> = survey().into_iter().map(row).collect();
    rows.push(nvcc_row());
    let broken = rows.iter().any(|row| row.state == State::Missing);
    let text = if options.json {
        let meta = meta::here("brigade-perf doctor --json")?;
        format!("{:#}\n", json!({ "meta": meta, "rows": rows }))
    } else {
        readable(&rows)
    };
    Ok((text, ExitCode::from(u8::from(broken))))
}

fn row(Finding { name, found }: Finding) -> Row {
    match found {
        Ok(found) => Row::ok(name, found),
        Err(why) if NEEDED.contains(&&*name) => {
            Row::missing(name, why.what, why.remedy).with_code(why.code)
        }
        Err(why) => Row::absent(name, why.what, why.remedy).with_code(why.code),
    }
}

fn nvcc_row() -> Row {
    match nvcc::find(&[]) {
        Ok(found) => {
            let (major, minor) = found.version;
            let text = format!("{major}.{minor} at {}", found.path.display());
            Row::ok("nvcc", text)
        }
        Err(why) => Row::absent(
            "nvcc",
            why,
            "nothing to do: this program holds its kernels; only building needs nvcc",
        ),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use brigade::Reason;

    #[test]
    fn what_is_needed_is_missing_and_the_rest_absent() {
        let finding = |name: &str| Finding {
            name: name.into(),
            found: Err(Reason::new("code", "it is not there", "install it")),
        };
        for (name, state) in [
            ("driver", State::Missing),
            ("cublas", State::Missing),
            ("nccl", State::Absent),
            ("fabric handles", State::Absent),
        ] {
            let row = row(finding(name));
            assert_eq!((row.state, row.code.as_deref()), (state, Some("code")));
        }
    }

    /// On any host, and as JSON too.
    #[test]
    fn a_report_has_a_row_for_everything() {
        let (text, _) = run(&Doctor { json: false }).unwrap();
        let (json, _) = run(&Doctor { json: true }).unwrap();
        let json: serde_json::Value = serde_json::from_str(&json).unwrap();
        let meta = &json["meta"];
        assert_eq!(meta["command"], "brigade-perf doctor --json");
        assert_eq!(meta["date"].as_str().unwrap().len(), 10);
        assert!(
            meta["commit"].is_string() && meta["gpus"].is_u64(),
            "{meta}"
        );
        let rows = json["rows"].as_array().unwrap();
        for name in ["driver", "cuda kernels", "cublas", "nccl", "nvcc"] {
            assert!(text.contains(name), "{text}");
            assert!(rows.iter().any(|row| row["name"] == name), "{json}");
        }
    }
}
