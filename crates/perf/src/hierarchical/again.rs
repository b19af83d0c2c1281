//! The same once more for each algorithm that NCCL is told, in processes of its own.
//!
//! NCCL reads `NCCL_ALGO` as it makes each communicator, and keeps it for none but that. But it has threads that read other variables when
//! they please, beside which a process must not change its environment. So each run is a process that finds the variable in it, or
//! starts ranks that do, and measures ours beside it, too.

use super::{Algo, Hierarchical, Operation, report};
use crate::ranks;
use anyhow::{Context, Result, bail, ensure};
use serde_json::{Map, Value};
use std::{
    env, fs,
    path::{Path, PathBuf},
    process::{Command, Stdio},
};

/// Where a run, which this variable makes one of several, writes its rows.
const PART: &str = "BRIGADE_PERF_PART";

/// The file of this run, if it is one of several.
pub fn part() -> Option<PathBuf> {
    env::var_os(PART).map(PathBuf::from)
}

/// What a run wrote.
fn read(path: &Path) -> Result<(Value, Vec<Value>)> {
    let text = fs::read_to_string(path)?;
    let mut found: Map<String, Value> = serde_json::from_str(&text)?;
    let rows = match found.remove("rows") {
        Some(Value::Array(rows)) => rows,
        _ => bail!("no rows"),
    };
    Ok((found.remove("meta").unwrap_or_default(), rows))
}

/// One run, with this process's arguments. Bounded as a run alone is.
fn run_one(algo: Option<(Algo, Operation)>, to: &Path) -> Result<(Value, Vec<Value>)> {
    let mut command = Command::new(env::current_exe()?);
    command
        .args(env::args_os().skip(1))
        .env(PART, to)
        // It is shown once all of it is there.
        .stdout(Stdio::null());
    if let Some((algo, operation)) = algo {
        // For that operation alone: ours may have NCCL do others.
        let of = operation.of_nccl();
        command.env("NCCL_ALGO", format!("{of}:{}", algo.of_nccl()));
    }
    let status = command.status()?;
    ensure!(status.success(), "it ended by {status}");
    read(to)
}

/// Measures with NCCL as it is, and then with each algorithm; gives the table of all.
pub fn run(options: &Hierarchical) -> Result<String> {
    ensure!(
        !ranks::is_rank(),
        "--nccl-algo starts runs of its own; a rank that something else started takes NCCL_ALGO from there"
    );
    ensure!(
        options.common.with_nccl() && options.trace.is_none(),
        "--nccl-algo goes with --vs nccl, and without --trace"
    );
    let to = env::temp_dir().join(format!("brigade-perf-{}.json", std::process::id()));
    let named = |algo: Option<Algo>| {
        let name = algo.map_or("NCCL as it is", Algo::of_nccl);
        let algo = algo.map(|algo| (algo, options.operation));
        run_one(algo, &to).with_context(|| name.to_owned())
    };
    let all = || -> Result<_> {
        let (mut meta, mut rows) = named(None)?;
        for &algo in &options.nccl_algo {
            report::merge(&mut rows, algo, &named(Some(algo))?.1);
        }
        let told = options.nccl_algo.iter().map(|algo| algo.of_nccl());
        meta["nccl_algo"] = told.collect();
        Ok((meta, rows))
    };
    let done = all();
    // Written by none of them if the first failed.
    let _ = fs::remove_file(&to);
    let (meta, rows) = done?;
    options.common.write(&meta, &rows)?;
    Ok(report::table(&rows, &options.nccl_algo))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_a_run_wrote_is_read() {
        let path = env::temp_dir().join(format!("brigade-again-{}", std::process::id()));
        let of = |text: &str| {
            fs::write(&path, text).unwrap();
            read(&path)
        };
        let (meta, rows) = of(r#"{"meta": {"gpu": "A"}, "rows": [{"bytes": 1}]}"#).unwrap();
        assert_eq!((&meta["gpu"], rows.len()), (&Value::from("A"), 1));
        assert!(of(r#"{"meta": {}}"#).is_err() && of("").is_err());
        fs::remove_file(&path).unwrap();
        assert!(read(&path).is_err());
    }
}
