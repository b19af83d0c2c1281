//! Ranks that are processes: this program starts itself once for each rank, as torchrun would, and one of them dies.
//! `cargo run -p brigade-group --example processes -- 4`; or `torchrun --no-python --nproc-per-node 4 <this program>`.
#![allow(clippy::print_stdout)]

use brigade_device::Bootstrap;
use brigade_group::{TcpConfig, TcpGroup};
use std::{
    error::Error,
    net::TcpListener,
    process::{Command, ExitCode},
    time::{Duration, Instant},
};

const WITHIN: Duration = Duration::from_secs(20);

fn main() -> Result<ExitCode, Box<dyn Error>> {
    if std::env::var_os("RANK").is_some() {
        rank()
    } else {
        let size = std::env::args().nth(1).map_or(Ok(4), |n| n.parse())?;
        start(size)
    }
}

/// One rank.
fn rank() -> Result<ExitCode, Box<dyn Error>> {
    let group = TcpGroup::join(&TcpConfig::from_env()?)?;
    let me = group.rank();
    let hello = format!("process {} is rank {me}", std::process::id());
    for message in group.all_gather(hello.as_bytes(), WITHIN)? {
        if me == 0 {
            println!("{}", String::from_utf8_lossy(&message));
        }
    }
    let last = group.size() - 1;
    if last > 0 && me == last {
        // No goodbye: the others must notice on their own.
        std::process::exit(3);
    }
    if last > 0 {
        let start = Instant::now();
        let error = group.all_gather(b"anybody?", WITHIN).err();
        let took = start.elapsed().as_millis();
        println!(
            "rank {me}: {} after {took} ms",
            error.map_or_else(|| "all are there".into(), |e| e.to_string())
        );
    }
    Ok(ExitCode::SUCCESS)
}

/// All ranks, at a loopback address, with a secret that only they know.
fn start(size: usize) -> Result<ExitCode, Box<dyn Error>> {
    let port = TcpListener::bind("127.0.0.1:0")?.local_addr()?.port();
    let mut secret = [0; 16];
    getrandom::fill(&mut secret).map_err(|e| e.to_string())?;
    let secret: String = secret.iter().map(|byte| format!("{byte:02x}")).collect();
    let program = std::env::current_exe()?;
    let start = |rank: usize| {
        Command::new(&program)
            .env("RANK", rank.to_string())
            .env("LOCAL_RANK", rank.to_string())
            .env("WORLD_SIZE", size.to_string())
            .env("MASTER_ADDR", "127.0.0.1")
            .env("MASTER_PORT", port.to_string())
            .env("BRIGADE_SECRET", &secret)
            .spawn()
    };
    let ranks: Result<Vec<_>, _> = (0..size).map(start).collect();
    for (rank, mut child) in ranks?.into_iter().enumerate() {
        let status = child.wait()?;
        if !status.success() {
            println!("rank {rank} ended with {status}");
        }
    }
    Ok(ExitCode::SUCCESS)
}
