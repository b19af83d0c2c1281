//! Ranks on GPUs: one GPU for each, or several ranks on one.

use crate::backend::{Backend, Routes, Seat};
use brigade_cuda::{CudaConfig, CudaDevice, Missing, devices, find_nccl};
use brigade_device::{Error, Injector, Result};
use brigade_plan::Engines;
use libtest_mimic::{Failed, Trial};
use std::sync::Arc;

/// GPUs of this host, for groups of ranks. Every rank opens its GPU anew, so that trials count their own memory.
pub struct CudaBackend {
    name: String,
    ordinals: Vec<usize>,
    worlds: Vec<usize>,
    /// Whether these GPUs have the kernels for tiles that wait.
    tiles: bool,
    across: Across,
}

/// Which machines groups span, as which virtual machines their GPUs are taken.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Across {
    /// Every rank has a GPU, whatever machine it is of.
    OwnGpus,
    /// There is one machine, and one GPU.
    OneGpu,
    /// The ranks of a machine share its GPU, where there are not enough for each: NCCL serves no two ranks of a rail on one.
    GpuEach,
}

/// Whether all GPUs of this host have the kernels for tiles that wait.
pub fn tiles() -> Result<bool, Missing> {
    Ok(devices()?.iter().all(|gpu| gpu.capability == (9, 0)))
}

/// Whether this host has an NCCL that Brigade takes.
pub(crate) fn has_nccl() -> bool {
    find_nccl(&[]).is_some_and(|nccl| (nccl.version.major, nccl.version.minor) >= (2, 14))
}

/// Most ranks that share a GPU.
const SHARED: usize = 4;

impl CudaBackend {
    /// Every GPU that can be opened, alone.
    ///
    /// # Errors
    /// What is missing, on hosts where none can be.
    pub fn all() -> Result<Vec<Self>, Missing> {
        let list = devices()?;
        list.iter()
            .map(|gpu| {
                CudaDevice::new(gpu.ordinal)?;
                Ok(Self {
                    name: format!("cuda{}", gpu.ordinal),
                    ordinals: vec![gpu.ordinal],
                    worlds: vec![1],
                    tiles: false,
                    across: Across::OneGpu,
                })
            })
            .collect()
    }

    /// Groups: of ranks with a GPU each, as large as there are GPUs; and of some that share the first.
    ///
    /// # Errors
    /// As [`all`](Self::all).
    pub fn groups() -> Result<Vec<Self>, Missing> {
        let ordinals: Vec<_> = devices()?.iter().map(|gpu| gpu.ordinal).collect();
        Ok(vec![
            Self {
                name: "cuda".into(),
                worlds: (1..=ordinals.len()).collect(),
                tiles: tiles()?,
                ordinals: ordinals.clone(),
                across: Across::OwnGpus,
            },
            Self {
                name: "shared".into(),
                worlds: (2..=SHARED).collect(),
                ordinals: ordinals[..1].to_vec(),
                // They would hold the whole GPU, each for itself.
                tiles: false,
                across: Across::OneGpu,
            },
        ])
    }

    /// Machines that are a GPU each, for [`machine_trials`](crate::machine_trials).
    ///
    /// # Errors
    /// As [`all`](Self::all).
    pub fn machines() -> Result<Self, Missing> {
        Ok(Self {
            name: "machines".into(),
            ordinals: devices()?.iter().map(|gpu| gpu.ordinal).collect(),
            worlds: Vec::new(),
            tiles: false,
            across: Across::GpuEach,
        })
    }
}

impl Backend for CudaBackend {
    fn name(&self) -> &str {
        &self.name
    }

    fn worlds(&self) -> Vec<usize> {
        self.worlds.clone()
    }

    fn differs(&self) -> bool {
        self.worlds.iter().all(|&size| size <= self.ordinals.len())
    }

    fn engines(&self) -> Engines {
        Engines::cuda(self.tiles, true)
    }

    fn reduces_millions(&self) -> bool {
        self.differs()
    }

    fn has_nccl(&self) -> bool {
        has_nccl() && self.differs()
    }

    fn spans(&self, (machines, ranks): (usize, usize)) -> bool {
        let gpus = self.ordinals.len();
        match self.across {
            Across::OwnGpus => machines * ranks <= gpus && (machines == 1 || has_nccl()),
            Across::OneGpu => machines == 1 && self.worlds.contains(&ranks),
            Across::GpuEach => {
                let each = machines * ranks <= gpus;
                (2..=gpus).contains(&machines) && ranks <= SHARED && !each && has_nccl()
            }
        }
    }

    fn machine_seats(&self, shape: (usize, usize)) -> Result<Vec<Seat>> {
        self.machine_seats_with(shape, &CudaConfig::default())
    }

    fn injected_machine_seats(&self, shape: (usize, usize), hook: &Injector) -> Result<Vec<Seat>> {
        self.machine_seats_with(shape, &injected(hook))
    }

    fn seats(&self, size: usize) -> Result<Vec<Seat>> {
        self.seats_with(size, &CudaConfig::default())
    }

    fn routes(&self) -> Result<Option<Arc<dyn Routes>>> {
        Ok(Some(CudaDevice::new(self.ordinals[0])?))
    }

    fn injects(&self) -> bool {
        true
    }

    fn injected_seats(&self, size: usize, hook: &Injector) -> Result<Vec<Seat>> {
        self.seats_with(size, &injected(hook))
    }

    fn asks_callers(&self) -> bool {
        false
    }
}

impl CudaBackend {
    fn seats_with(&self, size: usize, config: &CudaConfig) -> Result<Vec<Seat>> {
        self.placed(size, config, |rank| rank)
    }

    fn machine_seats_with(
        &self,
        (machines, ranks): (usize, usize),
        config: &CudaConfig,
    ) -> Result<Vec<Seat>> {
        let shares = self.across == Across::GpuEach;
        self.placed(machines * ranks, config, |rank| {
            if shares { rank / ranks } else { rank }
        })
    }

    /// Ranks with these GPUs, which go round.
    fn placed(
        &self,
        size: usize,
        config: &CudaConfig,
        gpu: impl Fn(usize) -> usize,
    ) -> Result<Vec<Seat>> {
        brigade_group::threads(size)
            .into_iter()
            .enumerate()
            .map(|(rank, boot)| {
                let ordinal = self.ordinals[gpu(rank) % self.ordinals.len()];
                Ok(Seat {
                    device: CudaDevice::with(ordinal, config)?,
                    boot: Box::new(boot),
                })
            })
            .collect()
    }
}

/// A device with this hook.
pub(crate) fn injected(hook: &Injector) -> CudaConfig {
    CudaConfig {
        inject: Some(hook.clone()),
        ..CudaConfig::default()
    }
}

/// The one trial where no GPU can be opened: opening says what is missing. With BRIGADE_TEST_DEVICE=cuda a GPU must be there.
pub fn missing_trial(backend: &str, missing: Missing) -> Trial {
    Trial::test(format!("{backend}/missing"), move || explains(&missing))
}

fn explains(missing: &Missing) -> Result<(), Failed> {
    if std::env::var_os("BRIGADE_TEST_DEVICE").is_some_and(|d| d == "cuda") {
        return Err(format!("a GPU is demanded: {missing}").into());
    }
    let opened = CudaDevice::new(0).map(drop).map_err(Error::from);
    match opened {
        Err(Error::Unsupported(reason))
            if reason.code == missing.code() && reason.remedy == missing.remedy() =>
        {
            Ok(())
        }
        other => Err(format!("{other:?} instead of {missing}").into()),
    }
}
