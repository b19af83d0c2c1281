//! Ranks that are processes: this program, started once for each.

use anyhow::Result;
use brigade::group::{TcpConfig, TcpGroup};
use std::{
    path::{Path, PathBuf},
    process::ExitCode,
};

const RANK: &str = "RANK";

/// Whether the environment makes this process a rank.
pub fn is_rank() -> bool {
    std::env::var_os(RANK).is_some()
}

/// For messages of several processes: which one.
pub fn who() -> String {
    let rank = std::env::var(RANK);
    rank.map_or_else(|_| String::new(), |rank| format!("rank {rank}: "))
}

/// The group that the environment names.
pub fn join() -> Result<TcpGroup> {
    Ok(TcpGroup::join(&TcpConfig::from_env()?)?)
}

/// Where one rank's timeline goes: `trace.json` becomes `trace.rank2.json`.
pub fn beside(path: &Path, rank: usize) -> PathBuf {
    let extension = path
        .extension()
        .map_or_else(String::new, |e| format!(".{}", e.to_string_lossy()));
    path.with_extension(format!("rank{rank}{extension}"))
}

/// Starts all ranks with this process's own arguments, and waits for them. They speak for themselves. Those that are `lost` are to fail.
#[cfg(unix)]
pub fn start(ranks: usize, lost: &[usize]) -> Result<ExitCode> {
    use brigade::group::Launch;
    use std::{io::Write, process::Command, time::Duration};

    let program = std::env::current_exe()?;
    let mut ranks = Launch::new(ranks)?.start(|_| {
        let mut command = Command::new(&program);
        command.args(std::env::args_os().skip(1));
        command
    })?;
    let mut code = ExitCode::SUCCESS;
    // Each rank has deadlines of its own.
    while let Some((rank, status)) = ranks.next(Duration::MAX)? {
        if !status.success() && !lost.contains(&rank) {
            code = ExitCode::FAILURE;
            if status.code().is_none() {
                // It could not say so itself.
                let _ = writeln!(std::io::stderr(), "error: rank {rank} ended by {status}");
            }
        }
    }
    Ok(code)
}

#[cfg(not(unix))]
pub fn start(_: usize, _: &[usize]) -> Result<ExitCode> {
    anyhow::bail!("--processes needs a system on which processes share memory")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_rank_has_a_timeline_of_its_own() {
        let of = |path: &str, rank| beside(Path::new(path), rank).display().to_string();
        assert_eq!(of("a/trace.json", 2), "a/trace.rank2.json");
        assert_eq!(of("trace", 0), "trace.rank0");
    }
}
