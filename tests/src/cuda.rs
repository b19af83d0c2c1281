//! Ranks on GPUs: one GPU for each, or several ranks on one.

use crate::{
    backend::{Backend, Routes, Seat},
    cover::covers,
};
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
    /// None: that is tried otherwise.
    None,
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

/// Most ranks that share a GPU, and are tried with everything.
const SHARED: usize = 4;

/// Ranks of the groups that share a GPU, or several, and are tried with some contracts alone: there are no eight GPUs to be had.
pub(crate) const CROWD: usize = 8;

/// Whether they are tried at all, which must be asked for: with more than 8 connections, kernels of eight threads on one GPU may not begin.
pub(crate) fn crowds() -> bool {
    std::env::var_os("BRIGADE_TEST_CROWDS").is_some_and(|asked| asked == "1")
}

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

    /// Groups: of ranks with a GPU each, as large as there are GPUs; of some that share the first; and, if that is asked for, of more than there
    /// are GPUs, which are spread over all of these. In the last a process loads lazily, as where it has a GPU for each rank.
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
                worlds: (2..=SHARED).chain(crowds().then_some(CROWD)).collect(),
                ordinals: ordinals[..1].to_vec(),
                tiles: tiles()?,
                across: Across::OneGpu,
            },
            Self {
                name: "spread".into(),
                worlds: if crowds() {
                    spread(ordinals.len())
                } else {
                    Vec::new()
                },
                ordinals,
                tiles: false,
                across: Across::None,
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

    fn tries(&self, name: &[&str]) -> bool {
        let crowd = format!("w{CROWD}");
        match name {
            [_, rest @ ..] if self.across == Across::None => covers(rest),
            [size, rest @ ..] if self.across == Across::OneGpu && *size == crowd => {
                covers(rest) && !overlaps(rest)
            }
            _ => true,
        }
    }

    fn differs(&self) -> bool {
        self.worlds.iter().all(|&size| size <= self.ordinals.len())
    }

    fn engines(&self) -> Engines {
        Engines::cuda(self.tiles, true)
    }

    fn sends_products(&self) -> [bool; 2] {
        // Norms by clusters are for ranks with a GPU each.
        [self.tiles, self.tiles && self.across == Across::OwnGpus]
    }

    fn is_batch_invariant(&self) -> bool {
        false
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
            Across::None => false,
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

/// Groups of four and eight over so many GPUs, where each has as many ranks as the others, and more than one.
fn spread(gpus: usize) -> Vec<usize> {
    let shared = |&size: &usize| gpus > 1 && size > gpus && size.is_multiple_of(gpus);
    [SHARED, CROWD].into_iter().filter(shared).collect()
}

/// Whether a linear multiplies while rows move, for which each rank has three streams on its GPU. A process has 32 queues into a GPU, and
/// eight ranks more streams than that: one that waits for a peer would stand before what that peer is to do.
fn overlaps(name: &[&str]) -> bool {
    matches!(
        name,
        ["gather_linear" | "linear_reduce_scatter", mode, ..] if !matches!(*mode, "off" | "auto")
    )
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

pub(crate) mod tests {
    use super::*;
    use crate::own::{Case, cases};
    use crate::suite;

    pub(crate) const ALL: &[Case] = cases![
        ranks_are_spread_evenly_over_gpus_that_they_share,
        large_groups_are_tried_with_some_of_each_operation,
        what_a_bundle_checks_for_faults_of_memory_is_there,
    ];

    /// GPUs that nobody opens.
    fn names(name: &str, gpus: usize, worlds: Vec<usize>, across: Across) -> Vec<String> {
        let backend = CudaBackend {
            name: name.into(),
            ordinals: (0..gpus).collect(),
            worlds,
            tiles: true,
            across,
        };
        let suite: suite::Suite = crate::suite(Arc::new(backend), None);
        suite.into_names().collect()
    }

    /// What its `run.sh memcheck` names, of this program.
    fn what_a_bundle_checks_for_faults_of_memory_is_there() {
        let mut all = names("cuda", 1, vec![1], Across::OwnGpus);
        all.extend(names("shared", 1, vec![2, 3], Across::OneGpu));
        // One is there only where a GPU can be opened, and on the host.
        let host = crate::suite(Arc::new(crate::HostThreads), None).into_names();
        let routes = host.filter(|name| name.contains("/experts/routes"));
        all.extend(routes.map(|name| name.replacen("host/", "cuda/", 1)));
        let list = include_str!("../../xtask/src/bundle/memcheck.txt");
        let of_this = |line: &'static str| line.strip_prefix("cuda ");
        for part in list.lines().filter_map(of_this) {
            let there = all.iter().any(|name| name.contains(part));
            assert!(there, "no trial of a name with {part}");
        }
    }

    fn ranks_are_spread_evenly_over_gpus_that_they_share() {
        let worlds = [1, 2, 3, 4, 8].map(spread);
        assert_eq!(worlds, [vec![], vec![4, 8], vec![], vec![8], vec![]]);
    }

    /// What is chosen by name is still there under that name, and each operation is among it.
    fn large_groups_are_tried_with_some_of_each_operation() {
        let shared = names("shared", 1, vec![2, 8], Across::OneGpu);
        let spread = names("spread", 2, vec![4, 8], Across::None);
        for (all, prefix) in [
            (&shared, "shared/w8/"),
            (&spread, "spread/w4/"),
            (&spread, "spread/w8/"),
        ] {
            let here: Vec<_> = all.iter().filter_map(|n| n.strip_prefix(prefix)).collect();
            for part in [
                "barrier/nobody_leaves_early",
                "all_gather/ragged",
                "broadcast/every_root",
                "reduce_scatter/ragged",
                "all_to_all/uneven",
                "all_to_all_rows/ragged",
                "all_reduce/same_bits",
                "all_reduce/one_shot_push/exact_integers",
                "all_reduce/two_shot_push/exact_integers",
                "all_reduce_norm/auto/none",
                "exchanges/in_turn",
                "send_recv/all_pairs",
                "send_recv/at_once",
                "experts/dense",
                "experts/by_expert",
                "experts/in_place/round_trips",
                "experts/pushed/dense",
                "experts/fifo/dense",
                "experts/gather/captured",
                "low_latency/sizes",
                "low_latency/casts_back",
                "user_buffers/pairs",
                "gather_linear/auto/even",
                "linear_reduce_scatter/off/even",
                "linear_all_reduce/auto/even",
                "faults/never_calls/all_reduce_auto",
                "faults/peer_lost/experts",
                "faults/mishaps/gather_linear_auto",
                "life/leases",
                "reset/generations",
                "capture/all_reduce/auto",
            ] {
                assert!(here.contains(&part), "no {prefix}{part} in {here:#?}");
            }
            let ring = here.contains(&"gather_linear/ring/even");
            assert_eq!(ring, prefix.starts_with("spread"));
            assert!(here.len() < 100, "{}", here.len());
        }
        // Smaller groups are tried with everything.
        assert!(shared.contains(&"shared/w2/gather_linear/ring/ragged".to_owned()));
        assert!(!spread.iter().any(|n| n.contains("hierarchical")));
    }
}
