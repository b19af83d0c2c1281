//! Three ranks as threads: they exchange messages, vote, and notice that one stays away.
//! `cargo run -p brigade-group --example threads`.
#![allow(clippy::print_stdout)]

use brigade_device::{Bootstrap, Result};
use brigade_group::{ThreadGroup, threads, vote};
use std::time::Duration;

fn rank(boot: &ThreadGroup) -> Result<()> {
    let within = Duration::from_secs(10);
    let all = boot.all_gather(format!("hello from {}", boot.rank()).as_bytes(), within)?;
    if boot.rank() == 0 {
        for message in &all {
            println!("{}", String::from_utf8_lossy(message));
        }
    }
    vote(boot, "scratch size", b"1 MiB", within)?;
    let scratch = if boot.rank() == 1 { "2 MiB" } else { "1 MiB" };
    if let Err(error) = vote(boot, "scratch size", scratch.as_bytes(), within) {
        println!("rank {}: {error}", boot.rank());
    }
    if boot.rank() == 2 {
        return Ok(());
    }
    if let Err(error) = boot.all_gather(b"anybody?", Duration::from_millis(200)) {
        println!("rank {}: {error}", boot.rank());
    }
    Ok(())
}

fn main() -> Result<()> {
    let ranks: Vec<_> = threads(3)
        .into_iter()
        .map(|boot| std::thread::spawn(move || rank(&boot)))
        .collect();
    for handle in ranks {
        if let Ok(result) = handle.join() {
            result?;
        }
    }
    Ok(())
}
