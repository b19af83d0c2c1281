//! One thread for each rank, with a GPU, a communicator, and NCCL's beside it.

use anyhow::{Result, anyhow, bail};
use brigade::{
    Bootstrap, Comm, CommConfig, Device, Queues, Stream,
    cuda::{CudaDevice, NcclComm, devices},
    group::ThreadGroup,
};
use std::{sync::Arc, thread, time::Duration};

/// Longest that ranks wait for each other.
pub const PATIENCE: Duration = Duration::from_secs(120);

/// One rank of a measurement.
pub struct Rank {
    pub device: Arc<CudaDevice>,
    pub boot: ThreadGroup,
    pub on: Stream,

    pub nccl: Option<NcclComm>,
}

impl Rank {
    pub fn number(&self) -> usize {
        self.boot.rank()
    }

    pub fn size(&self) -> usize {
        self.boot.size()
    }

    /// A communicator of its own for a shape.
    pub fn join(&self, config: &CommConfig) -> Result<Comm> {
        Ok(Arc::clone(&self.device).join(&self.boot, config)?)
    }

    /// All ranks meet.
    pub fn meet(&self) -> Result<()> {
        self.boot.all_gather(&[], PATIENCE)?;
        Ok(())
    }

    /// Every rank's bytes, in rank order.
    pub fn share(&self, mine: &[u8]) -> Result<Vec<Vec<u8>>> {
        Ok(self.boot.all_gather(mine, PATIENCE)?)
    }

    /// The slowest rank's number.
    pub fn slowest(&self, mine: f64) -> Result<f64> {
        let all = self.boot.all_gather(&mine.to_le_bytes(), PATIENCE)?;
        let number = |b: &Vec<u8>| b.as_slice().try_into().map(f64::from_le_bytes);
        let numbers: Result<Vec<_>, _> = all.iter().map(number).collect();
        let numbers = numbers.map_err(|_| anyhow!("a rank sent something else than a number"))?;
        Ok(numbers.into_iter().fold(f64::MIN, f64::max))
    }
}

/// How many ranks there are: as many as asked for, or one for each GPU.
pub fn count(asked: Option<usize>) -> Result<usize> {
    let found = devices().map_err(brigade::Error::from)?.len();
    match asked {
        Some(0) => bail!("there must be a rank"),
        Some(n) if n > found => bail!("{n} ranks, and {found} GPUs"),
        Some(n) => Ok(n),
        None => Ok(found),
    }
}

/// Runs `work` on every rank, and gives what each gives.
pub fn run<R: Send>(
    size: usize,
    with_nccl: bool,
    work: impl Fn(&Rank) -> Result<R> + Send + Sync,
) -> Result<Vec<R>> {
    let one = |boot: ThreadGroup| -> Result<R> {
        let device = CudaDevice::new(boot.rank()).map_err(brigade::Error::from)?;
        let nccl = with_nccl
            .then(|| NcclComm::join(&device, &boot, PATIENCE))
            .transpose()?;
        work(&Rank {
            on: device.stream(0)?,
            device,
            boot,
            nccl,
        })
    };
    let results: Vec<Result<R>> = thread::scope(|scope| {
        let ranks: Vec<_> = brigade::group::threads(size)
            .into_iter()
            .map(|boot| scope.spawn(|| one(boot)))
            .collect();
        let ended = ranks.into_iter().map(|rank| rank.join());
        ended
            .map(|r| r.unwrap_or_else(|_| Err(anyhow!("a rank panicked"))))
            .collect()
    });
    let named = results.into_iter().enumerate();
    named
        .map(|(rank, result)| result.map_err(|e| e.context(format!("rank {rank}"))))
        .collect()
}
