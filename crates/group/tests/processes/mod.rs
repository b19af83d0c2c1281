//! What every rank's process does; the trials are in a file of their own.

mod ranks;
mod trials;

#[path = "../common/mod.rs"]
mod common;

use brigade_device::Bootstrap;
use brigade_group::{TcpConfig, TcpGroup, exchange_fds};
use common::LONG;
use libtest_mimic::{Arguments, Trial};
use std::{
    fs::File,
    io::{BufRead, Write},
    os::unix::fs::FileExt,
    time::Duration,
};

pub fn main() {
    if std::env::var_os("RANK").is_some() {
        rank();
        return;
    }
    let trials = trials::ALL.iter().map(|(name, run)| {
        Trial::test(*name, || {
            run();
            Ok(())
        })
    });
    let mut arguments = Arguments::from_args();
    // Each of them has several processes and looks at the clock.
    arguments.test_threads = Some(1);
    libtest_mimic::run(&arguments, trials.collect()).exit();
}

/// Reads orders, line by line, and says what came of each.
fn rank() {
    let mut config = TcpConfig::from_env().unwrap();
    let number = |name: &str, default: u64| {
        let value = std::env::var(name).ok().and_then(|v| v.parse().ok());
        Duration::from_millis(value.unwrap_or(default))
    };
    config.join_within = number("JOIN_MS", 20_000);
    let within = number("GATHER_MS", 20_000);
    config.silent_after = number("SILENT_MS", 3_000);
    say("started");
    let group = match TcpGroup::join(&config) {
        Ok(group) => group,
        Err(error) => return say(&error.to_string()),
    };
    let _watch = group.on_loss(|loss| say(&loss.to_string()));
    say("joined");
    for line in std::io::stdin().lock().lines() {
        match line.unwrap().split_once(' ').unwrap() {
            ("gather", rounds) => say(&gather(&group, rounds.parse().unwrap(), within)),
            ("pass", _) => say(&pass(&group)),
            _ => break,
        }
    }
    drop(group);
    say("bye");
}

fn say(what: &str) {
    let mut out = std::io::stdout().lock();
    out.write_all(format!("{what}\n").as_bytes()).unwrap();
    out.flush().unwrap();
}

fn gather(group: &TcpGroup, rounds: u64, within: Duration) -> String {
    for round in 0..rounds {
        let message = |rank: usize| format!("{round} of {rank}").into_bytes();
        match group.all_gather(&message(group.rank()), within) {
            Ok(all) => assert!(all.into_iter().eq((0..group.size()).map(message))),
            Err(error) => return error.to_string(),
        }
    }
    format!("gathered {rounds}")
}

/// Every rank's descriptor is a file that the rank wrote to, and that no other rank could open.
fn pass(group: &TcpGroup) -> String {
    let name = format!("rank {}", group.rank());
    let mut mine = File::from(memory());
    mine.write_all(name.as_bytes()).unwrap();
    let all = match exchange_fds(group, &mine, LONG) {
        Ok(all) => all,
        Err(error) => return error.to_string(),
    };
    let read = |fd| {
        let file = File::from(fd);
        let mut text = vec![0; file.metadata().unwrap().len() as usize];
        // Duplicates share one position: it is left alone.
        file.read_exact_at(&mut text, 0).unwrap();
        String::from_utf8(text).unwrap()
    };
    let texts: Vec<_> = all.into_iter().map(read).collect();
    format!("passed {}", texts.join(", "))
}

#[cfg(target_os = "linux")]
fn memory() -> std::os::fd::OwnedFd {
    let flags = rustix::fs::MemfdFlags::CLOEXEC;
    rustix::fs::memfd_create("brigade-test", flags).unwrap()
}

#[cfg(not(target_os = "linux"))]
fn memory() -> std::os::fd::OwnedFd {
    let path = std::env::temp_dir().join(format!("brigade-test-{}", std::process::id()));
    let file = File::options()
        .read(true)
        .write(true)
        .create_new(true)
        .open(&path)
        .unwrap();
    std::fs::remove_file(&path).unwrap();
    file.into()
}
