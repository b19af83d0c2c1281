//! How long a reset takes, once all ranks have the fault: with threads, and with a process for each rank.

use super::{Rounds, rounded};
use anyhow::{Result, ensure};
use brigade::{Error, ParallelMode, group::TcpConfig, group::TcpGroup};
use brigade_benches::{Rank, as_rank, median, on_ranks};
use serde_json::{Value, json};
use std::time::{Duration, Instant};

const WORLDS: [usize; 3] = [2, 4, 8];

/// What ranks are.
const THREADS: &str = "threads";
const PROCESSES: &str = "processes";

/// Far more than any step takes.
const WITHIN: Duration = Duration::from_secs(60);

pub fn measure(rounds: Rounds) -> Result<Vec<Value>> {
    let kinds: &[&str] = if cfg!(unix) {
        &[THREADS, PROCESSES]
    } else {
        &[THREADS]
    };
    let cases = || {
        kinds
            .iter()
            .flat_map(|&kind| WORLDS.map(|ranks| (kind, ranks)))
    };
    let mut found = vec![Vec::new(); cases().count()];
    // Group after group of every case in turn, so that all meet the machine in the same states.
    for _ in 0..rounds.groups {
        for ((kind, ranks), found) in cases().zip(&mut found) {
            found.push(slowest(&one_group(kind, ranks, rounds)?));
        }
    }
    let rows = cases()
        .zip(&found)
        .map(|((kind, ranks), groups)| row(kind, ranks, groups));
    Ok(rows.collect())
}

fn one_group(kind: &str, ranks: usize, rounds: Rounds) -> Result<Vec<Vec<f64>>> {
    #[cfg(unix)]
    if kind == PROCESSES {
        return processes::on_processes(ranks);
    }
    ensure!(kind == THREADS, "{kind} cannot be ranks here");
    on_ranks(ranks, &config(), |rank| all(rank, rounds))
}

fn config() -> brigade::CommConfig {
    brigade::CommConfig::new(ParallelMode::Tp)
}

/// Whether the environment makes this process a rank of the measurement.
pub fn is_rank() -> bool {
    std::env::var_os("RANK").is_some()
}

/// Such a process: prints what it has measured.
pub fn run_as_rank(rounds: Rounds) -> Result<Value> {
    let group = TcpGroup::join(&TcpConfig::from_env()?)?;
    Ok(json!(as_rank(&group, &config(), |rank| all(rank, rounds))?))
}

/// Microseconds of every reset on this rank, each after a fault: rank 0 aborts, while the others are in a call.
fn all(rank: &Rank, rounds: Rounds) -> Result<Vec<f64>> {
    let mut us = Vec::new();
    for round in 0..rounds.resets + 1 {
        if rank.number() == 0 {
            rank.meet()?;
            rank.comm.abort();
        } else {
            // Who is slow hears of it before it is back from the first one.
            let ended = rank.meet().and_then(|()| rank.meet());
            let fault = ended.as_ref().err().and_then(|e| e.downcast_ref::<Error>());
            let is_fault = fault.is_some_and(|e| e.fault().is_some());
            ensure!(is_fault, "{ended:?} instead of a fault");
        }
        let start = Instant::now();
        rank.comm.reset(WITHIN)?;
        // The first one touches memory for the first time.
        if round > 0 {
            us.push(start.elapsed().as_secs_f64() * 1e6);
        }
    }
    Ok(us)
}

/// The slowest rank of every reset.
fn slowest(ranks: &[Vec<f64>]) -> Vec<f64> {
    let resets = ranks.first().map_or(0, Vec::len);
    let slowest = |i| ranks.iter().map(|us| us[i]).fold(0.0, f64::max);
    (0..resets).map(slowest).collect()
}

/// The median of each group, and then the middle, the least and the most of those.
fn row(kind: &str, ranks: usize, groups: &[Vec<f64>]) -> Value {
    let medians: Vec<f64> = groups.iter().map(|us| median(us)).collect();
    json!({
        "ranks_are": kind,
        "ranks": ranks,
        "groups": groups.len(),
        "resets_each": groups.first().map_or(0, Vec::len),
        "us": rounded(median(&medians)),
        "least_us": rounded(medians.iter().copied().fold(f64::INFINITY, f64::min)),
        "most_us": rounded(medians.iter().copied().fold(0.0, f64::max)),
    })
}

#[cfg(unix)]
mod processes {
    use anyhow::{Context, Result, anyhow, ensure};
    use brigade::group::Launch;
    use std::{
        io::Read,
        process::{Command, Stdio},
        thread,
        time::Duration,
    };

    /// Longest that the processes may run.
    const LIMIT: Duration = Duration::from_secs(300);

    /// This program once for each rank, with the same arguments. What each prints is what it has measured.
    pub fn on_processes(ranks: usize) -> Result<Vec<Vec<f64>>> {
        let program = std::env::current_exe()?;
        let mut started = Launch::new(ranks)?.start(|_| {
            let mut command = Command::new(&program);
            command
                .args(std::env::args_os().skip(1))
                .stdin(Stdio::null())
                .stdout(Stdio::piped());
            command
        })?;
        let read: Vec<_> = (0..ranks)
            .map(|rank| {
                let out = started.child(rank)?.stdout.take();
                Ok(thread::spawn(move || {
                    let mut text = String::new();
                    out.context("no output")?.read_to_string(&mut text)?;
                    Ok(serde_json::from_str(&text)?)
                }))
            })
            .collect::<Result<_>>()?;
        for (rank, status) in started.wait(LIMIT)?.into_iter().enumerate() {
            ensure!(status.success(), "rank {rank} ended by {status}");
        }
        read.into_iter()
            .map(|r| r.join().map_err(|_| anyhow!("a reader panicked"))?)
            .collect()
    }
}
