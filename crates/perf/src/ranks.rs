//! The ranks of a measurement, each with a GPU, a communicator, and NCCL's beside it: threads of this process, or processes.

use crate::Common;
use anyhow::{Result, anyhow, bail, ensure};
use brigade::{
    Bootstrap, Comm, CommConfig, Device, Queues, Stream,
    cuda::{CudaConfig, CudaDevice, NcclComm, devices},
    group::{TcpConfig, TcpGroup},
};
use std::{sync::Arc, thread, time::Duration};

/// Longest that ranks wait for each other.
pub const PATIENCE: Duration = Duration::from_secs(120);

/// What makes this process a rank, as torchrun sets it. MASTER_PORT too, unless MASTER_ADDR is a Unix socket.
const VARIABLES: [&str; 4] = ["RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR"];

/// One rank of a measurement.
pub struct Rank {
    pub device: Arc<CudaDevice>,
    pub boot: Arc<dyn Bootstrap>,
    pub on: Stream,

    pub nccl: Option<NcclComm>,
}

impl Rank {
    fn new(
        boot: Arc<dyn Bootstrap>,
        gpu: usize,
        config: &CudaConfig,
        with_nccl: bool,
    ) -> Result<Self> {
        let device = CudaDevice::with(gpu, config).map_err(brigade::Error::from)?;
        let nccl = with_nccl
            .then(|| NcclComm::join(&device, &*boot, PATIENCE))
            .transpose()?;
        Ok(Self {
            on: device.stream(0)?,
            device,
            boot,
            nccl,
        })
    }

    pub fn number(&self) -> usize {
        self.boot.rank()
    }

    pub fn size(&self) -> usize {
        self.boot.size()
    }

    /// This rank with another device of its GPU, and without NCCL.
    pub fn with(&self, config: &CudaConfig) -> Result<Self> {
        let gpu = self.device.info().ordinal as usize;
        Self::new(Arc::clone(&self.boot), gpu, config, false)
    }

    /// A communicator of its own for a shape.
    pub fn join(&self, config: &CommConfig) -> Result<Comm> {
        Ok(Arc::clone(&self.device).join(&*self.boot, config)?)
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

    /// Ends all ranks with the same words if one of them found something wrong: none is left to wait for it, and to tell of
    /// nothing but that.
    pub fn agree(&self, mine: Result<()>) -> Result<()> {
        let words = mine.err().map(|e| format!("rank {}: {e:#}", self.number()));
        let all = self.share(words.unwrap_or_default().as_bytes())?;
        match all.iter().find(|words| !words.is_empty()) {
            Some(words) => bail!("{}", String::from_utf8_lossy(words)),
            None => Ok(()),
        }
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

/// Whether the environment makes this process a rank.
pub fn is_rank() -> bool {
    VARIABLES
        .iter()
        .all(|name| std::env::var_os(name).is_some())
}

/// Where the ranks are.
pub enum Ranks {
    /// So many threads of this process, on the first GPUs.
    Threads(usize),
    /// This process is one, on the GPU of its local rank.
    Process(Arc<TcpGroup>),
}

impl Ranks {
    /// As the environment says, or else the options.
    pub fn find(options: &Common) -> Result<Self> {
        Self::or_threads(options.ranks, || count(options.ranks, options.shared))
    }

    /// As the environment says, or else so many threads.
    pub fn or_threads(
        asked: Option<usize>,
        threads: impl FnOnce() -> Result<usize>,
    ) -> Result<Self> {
        if !is_rank() {
            return threads().map(Self::Threads);
        }
        let config = TcpConfig::from_env()?;
        if let Some(asked) = asked {
            let size = config.size;
            ensure!(
                asked == size,
                "{asked} ranks, and WORLD_SIZE says that there are {size}"
            );
        }
        Ok(Self::Process(Arc::new(TcpGroup::join(&config)?)))
    }

    /// How many there are.
    pub fn size(&self) -> usize {
        match self {
            Self::Threads(size) => *size,
            Self::Process(group) => group.size(),
        }
    }

    /// Whether they are processes.
    pub fn are_processes(&self) -> bool {
        matches!(self, Self::Process(_))
    }

    /// Whether this process tells what was measured: that of rank 0 does.
    pub fn speak(&self) -> bool {
        match self {
            Self::Threads(_) => true,
            Self::Process(group) => group.rank() == 0,
        }
    }

    /// Runs `work` on every rank of this process, and gives what the first of them gives. What ranks found is the same for
    /// all, as far as they have shared it.
    pub fn run<R: Send>(
        &self,
        options: &Common,
        work: impl Fn(&Rank) -> Result<R> + Send + Sync,
    ) -> Result<R> {
        let config = options.cuda()?;
        let gpus = devices().map_err(brigade::Error::from)?.len();
        // Those that are too many share.
        let gpu_of = |rank: usize| match options.shared && gpus > 0 {
            true => rank % gpus,
            false => rank,
        };
        self.each(|boot, local| {
            let rank = Rank::new(boot, gpu_of(local), &config, options.with_nccl())?;
            let result = work(&rank)?;
            // Who goes first takes nothing away from the others.
            rank.meet()?;
            Ok(result)
        })
    }

    /// The same on any device: `work` is given how its rank finds the others, and its number among those of its host.
    pub fn each<R: Send>(
        &self,
        work: impl Fn(Arc<dyn Bootstrap>, usize) -> Result<R> + Send + Sync,
    ) -> Result<R> {
        let work = &work;
        let named = |rank: usize, result: Result<R>| {
            result.map_err(|error| error.context(format!("rank {rank}")))
        };
        match self {
            Self::Threads(size) => {
                let results: Vec<Result<R>> = thread::scope(|scope| {
                    let ranks: Vec<_> = brigade::group::threads(*size)
                        .into_iter()
                        .map(|boot| {
                            let rank = boot.rank();
                            scope.spawn(move || work(Arc::new(boot), rank))
                        })
                        .collect();
                    let ended = ranks.into_iter().map(|rank| rank.join());
                    ended
                        .map(|r| r.unwrap_or_else(|_| Err(anyhow!("a rank panicked"))))
                        .collect()
                });
                let all = results.into_iter().enumerate();
                let all: Result<Vec<R>> = all.map(|(rank, result)| named(rank, result)).collect();
                let first = all?.into_iter().next();
                first.ok_or_else(|| anyhow!("there must be a rank"))
            }
            Self::Process(group) => {
                let local = group.local_rank().unwrap_or(group.rank());
                named(group.rank(), work(Arc::clone(group) as _, local))
            }
        }
    }
}

/// How many ranks there are: as many as asked for, or one for each GPU.
pub fn count(asked: Option<usize>, shared: bool) -> Result<usize> {
    let found = devices().map_err(brigade::Error::from)?.len();
    match asked {
        Some(0) => bail!("there must be a rank"),
        Some(n) if n > found && (!shared || found == 0) => {
            bail!("{n} ranks, and {found} GPUs")
        }
        Some(n) => Ok(n),
        None => Ok(found),
    }
}

/// Starts a process for each rank, with this one's arguments and what `prepare` adds for the rank, and waits for all of them. Rank 0's
/// speaks.
#[cfg(unix)]
pub fn start(
    ranks: usize,
    prepare: impl Fn(usize, &mut std::process::Command) -> Result<()>,
) -> Result<()> {
    use brigade::group::Launch;
    use std::process::Command;

    /// How long the others may go on after one has failed.
    const GRACE: Duration = Duration::from_secs(30);

    let program = std::env::current_exe()?;
    let command = |rank: usize| {
        let mut command = Command::new(&program);
        command.args(std::env::args_os().skip(1));
        prepare(rank, &mut command).map(|()| command)
    };
    let commands: Result<Vec<_>> = (0..ranks).map(command).collect();
    let mut commands = commands?.into_iter();
    let mut ranks =
        Launch::new(ranks)?.start(|_| commands.next().unwrap_or_else(|| Command::new(&program)))?;
    // While none has failed, each has bounds of its own; NCCL has none for one that waits for a rank that is gone.
    let mut within = Duration::MAX;
    let mut failed = Vec::new();
    while let Some((rank, status)) = ranks.next(within)? {
        if !status.success() {
            within = GRACE;
            failed.push(format!("rank {rank} ended by {status}"));
        }
    }
    // Dropping it ends those that are left.
    drop(ranks);
    ensure!(failed.is_empty(), "{}", failed.join("; "));
    Ok(())
}

#[cfg(not(unix))]
pub fn start(_: usize, _: impl Fn(usize, &mut std::process::Command) -> Result<()>) -> Result<()> {
    bail!("--processes needs a system on which processes share memory")
}
