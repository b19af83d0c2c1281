//! Three ranks as processes; one of them dies without a word, and the others go on as a group of two.
//! `cargo run -p brigade --example survivors`.
#![allow(clippy::print_stdout)]

use std::{error::Error, process::ExitCode};

#[cfg(unix)]
fn main() -> Result<ExitCode, Box<dyn Error>> {
    if std::env::var_os("RANK").is_some() {
        rank::run()?;
        return Ok(ExitCode::SUCCESS);
    }
    start()
}

#[cfg(not(unix))]
fn main() -> Result<ExitCode, Box<dyn Error>> {
    Err("processes share no memory on this system".into())
}

/// This program once for each rank.
#[cfg(unix)]
fn start() -> Result<ExitCode, Box<dyn Error>> {
    use std::{process::Command, time::Duration};

    // ANCHOR: launch
    let program = std::env::current_exe()?;
    let ranks = brigade::group::Launch::new(3)?.start(|_| Command::new(&program))?;
    for (rank, status) in ranks.wait(Duration::from_secs(60))?.iter().enumerate() {
        println!("rank {rank} ended: {status}");
    }
    // ANCHOR_END: launch
    Ok(ExitCode::SUCCESS)
}

#[cfg(unix)]
mod rank {
    use brigade::{
        AllReduceParams, Bootstrap, Comm, CommConfig, Device, DeviceChoice, DeviceExt, Error,
        FaultKind, OpenConfig, ParallelMode, ReduceOp, Result,
        group::{Address, TcpConfig, TcpGroup},
    };
    use std::sync::Arc;

    const VICTIM: usize = 1;

    /// One rank.
    pub fn run() -> Result<()> {
        let device = brigade::open(&OpenConfig {
            device: DeviceChoice::Host,
            ..OpenConfig::default()
        })?;
        // ANCHOR: survivors
        let place = TcpConfig::from_env()?;
        let lost = work_until_a_rank_is_lost(&device, &place)?;
        // All who are left found the same record, so they all make the same group.
        let Address::Unix(path) = &place.address else {
            return Err(Error::invalid("address", &place.address, "a Unix socket"));
        };
        let path = path.with_extension(format!("without-{lost}"));
        let place = place.without(&[lost], Address::Unix(path))?;
        let group = TcpGroup::join(&place)?;
        let comm = Arc::clone(&device).join(&group, &CommConfig::new(ParallelMode::Tp))?;
        // ANCHOR_END: survivors
        let all = sum(&device, &comm)?;
        println!(
            "rank {} of {}: the sum is {all}",
            group.rank(),
            group.size()
        );
        Ok(())
    }

    // ANCHOR: work
    /// Makes calls until a rank is lost, and says which. What the communicator and its group took is given back.
    fn work_until_a_rank_is_lost(device: &Arc<dyn Device>, place: &TcpConfig) -> Result<usize> {
        let group = TcpGroup::join(place)?;
        let comm = Arc::clone(device).join(&group, &CommConfig::new(ParallelMode::Tp))?;
        loop {
            match sum(device, &comm) {
                Ok(_) if group.rank() == VICTIM => std::process::abort(),
                Ok(all) => println!(
                    "rank {} of {}: the sum is {all}",
                    group.rank(),
                    group.size()
                ),
                Err(Error::Fault(record)) if record.kind == FaultKind::PeerLost => {
                    println!("{record}");
                    return Ok(record.peer as usize);
                }
                Err(other) => return Err(other),
            }
        }
    }
    // ANCHOR_END: work

    /// Every rank gives a 1.
    fn sum(device: &Arc<dyn Device>, comm: &Comm) -> Result<f32> {
        let on = device.stream(0)?;
        let mut one = device.upload(&on, &[1f32], &[1])?;
        comm.lease(&on)?.all_reduce(AllReduceParams {
            data: one.view_mut(),
            from: None,
            op: ReduceOp::Sum,
            choice: None,
        })?;
        Ok(device.download(&on, one.view())?[0])
    }
}
