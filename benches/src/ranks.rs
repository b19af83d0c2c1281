//! Ranks as threads that start each measurement together.

use anyhow::{Result, anyhow};
use brigade::{Bootstrap, Comm, CommConfig, Device, DeviceChoice, OpenConfig, Stream};
use std::{sync::Arc, thread};

/// One rank, ready to work.
pub struct Rank {
    /// Where it computes, with one thread.
    pub device: Arc<dyn Device>,
    /// In which order.
    pub on: Stream,
    /// With whom.
    pub comm: Comm,
}

impl Rank {
    /// Its number.
    pub fn number(&self) -> usize {
        self.comm.group().rank
    }

    /// Waits for the other ranks.
    ///
    /// # Errors
    /// A fault, where one of them is gone.
    pub fn meet(&self) -> Result<()> {
        Ok(self.comm.lease(&self.on)?.barrier()?)
    }
}

/// Does the same on so many ranks, and gives what each has to say.
///
/// # Errors
/// The first rank's that fails.
pub fn on_ranks<R: Send>(
    ranks: usize,
    config: &CommConfig,
    work: impl Fn(&Rank) -> Result<R> + Sync,
) -> Result<Vec<R>> {
    thread::scope(|scope| {
        let handles: Vec<_> = brigade::group::threads(ranks)
            .into_iter()
            .map(|boot| scope.spawn(|| as_rank(&{ boot }, config, &work)))
            .collect();
        let joined = handles
            .into_iter()
            .map(|h| h.join().unwrap_or_else(|_| Err(anyhow!("a rank panicked"))));
        joined.collect::<Vec<_>>().into_iter().collect()
    })
}

/// Does it as one rank of a group that is there.
///
/// # Errors
/// Whatever fails on this rank.
pub fn as_rank<R>(
    boot: &dyn Bootstrap,
    config: &CommConfig,
    work: impl Fn(&Rank) -> Result<R>,
) -> Result<R> {
    let device = brigade::open(&OpenConfig {
        device: DeviceChoice::Host,
        ..OpenConfig::default()
    })?;
    let rank = Rank {
        on: device.stream(0)?,
        comm: Arc::clone(&device).join(boot, config)?,
        device,
    };
    let result = work(&rank)?;
    rank.comm.close(config.deadline)?;
    Ok(result)
}
