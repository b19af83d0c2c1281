//! GPUs, one for each rank that is a process.

use super::{Devices, KILLED};
use crate::{
    cuda::{CROWD, crowds, injected},
    killed,
};
use brigade_cuda::{CudaDevice, Missing, devices};
use brigade_device::{Device, Injector, Result};
use brigade_plan::Engines;
use std::{
    process::Command,
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
};

/// The GPUs of this host: rank 0 has the first.
#[derive(Clone, Copy)]
pub(super) struct Gpus {
    count: usize,
    tiles: bool,
    /// Whether eight ranks are tried, where there are fewer GPUs, with some contracts.
    crowds: bool,
}

impl Gpus {
    /// Those that the driver shows, if any. A process that is no rank opens one first: where
    /// none can be opened, it says so, and no trial starts.
    ///
    /// # Errors
    /// What is missing.
    pub(super) fn find(is_rank: bool) -> Result<Option<Self>, Missing> {
        let count = devices()?.len();
        if count == 0 {
            return Ok(None);
        }
        if !is_rank {
            CudaDevice::new(0)?;
        }
        Ok(Some(Self {
            count,
            tiles: crate::cuda::tiles()?,
            crowds: crowds(),
        }))
    }
}

impl Devices for Gpus {
    fn name(&self) -> &str {
        "cuda-processes"
    }

    fn worlds(&self) -> Vec<usize> {
        let crowd = (self.crowds && self.count < CROWD).then_some(CROWD);
        (2..=self.count).chain(crowd).collect()
    }

    fn engines(&self) -> Engines {
        Engines::cuda(self.tiles, true)
    }

    /// A process on a GPU takes seconds to start. So what is about the group is tried with all GPUs, the linears with some
    /// of their cases, and other group sizes with one. The rest is as it is between threads that have a GPU each.
    fn tries(&self, name: &[&str]) -> bool {
        let largest = format!("w{}", self.count);
        match name {
            [size, rest @ ..] if self.count < CROWD && *size == format!("w{CROWD}") => {
                crowd_tries(rest)
            }
            [size, rest @ ..] if *size != largest => {
                matches!(rest, ["gather_linear", "pull", "even"])
            }
            [_, "faults", "delayed" | "mishaps", op] => {
                matches!(*op, "gather_linear_ring" | "all_to_all")
            }
            [
                _,
                "faults" | "life" | "reset" | "shrink" | "user_buffers" | "send_recv",
                ..,
            ] => true,
            [
                _,
                "all_gather" | "broadcast" | "all_to_all" | "all_to_all_rows" | "barrier",
                ..,
            ] => true,
            [_, "reduce_scatter" | "capture" | KILLED, ..] => true,
            [_, "all_reduce", "auto" | "nccl", ..] | [_, "ledger", "gathered_rows", ..] => true,
            [_, "gather_linear", "pull" | "ring" | "tiles", theme] => {
                matches!(*theme, "even" | "ragged" | "lora" | "resident")
            }
            [
                _,
                "linear_reduce_scatter",
                "chunked" | "ring" | "tiles",
                theme,
            ] => {
                matches!(*theme, "even" | "ragged")
            }
            _ => false,
        }
    }

    /// A device of the trial's own. What takes long to open, the context, the kernels and the library that multiplies, stays in the
    /// rank's process for the next.
    fn open(&self, rank: usize) -> Result<Arc<dyn Device>> {
        Ok(CudaDevice::new(rank % self.count)?)
    }

    fn injects(&self) -> bool {
        true
    }

    fn open_injected(&self, rank: usize, hook: &Injector) -> Result<Arc<dyn Device>> {
        Ok(CudaDevice::with(rank % self.count, &injected(hook))?)
    }

    fn has_nccl(&self) -> bool {
        crate::cuda::has_nccl()
    }

    fn asks_callers(&self) -> bool {
        false
    }

    /// Loading all kernels at the start is for ranks that share a GPU, where what is loaded later waits for the others. Here
    /// nobody else's work is on a rank's GPU, and a process starts more quickly without.
    fn prepare(&self, rank: &mut Command) {
        rank.env_remove("CUDA_MODULE_LOADING");
    }

    fn kills(&self) -> Option<usize> {
        (self.count >= killed::WORLD).then_some(10)
    }

    fn keeps(&self) -> bool {
        true
    }
}

/// What eight ranks try where some share a GPU. Their kernels take turns of the driver's, so that each wait of one for another costs some: a call
/// of each kind.
fn crowd_tries(name: &[&str]) -> bool {
    match name {
        ["all_reduce", algorithm, ..] => *algorithm != "nccl",
        ["experts", "pushed" | "ragged" | "in_place", theme] => {
            matches!(*theme, "dense" | "by_expert" | "round_trips")
        }
        ["gather_linear", "pull" | "ring" | "tiles", theme]
        | ["linear_reduce_scatter", "chunked" | "ring" | "tiles", theme] => *theme == "even",
        [
            "all_gather" | "broadcast" | "all_to_all" | "all_to_all_rows" | "barrier"
            | "reduce_scatter" | "low_latency" | "all_reduce_norm",
            ..,
        ] => true,
        _ => false,
    }
}

/// Ranks of all machines together, where machines share GPUs.
const MOST_SHARING: usize = 4;

/// The same GPUs as several machines. A process is one of NCCL's hosts, since ranks of one rail are of different machines, and all else is not
/// NCCL's: so it goes through sockets, also where machines share a GPU. There their processes take turns.
pub(super) struct Machines {
    gpus: Gpus,
    /// Processes so far.
    started: AtomicUsize,
}

impl Machines {
    pub(super) fn of(gpus: Gpus) -> Self {
        Self {
            gpus,
            started: AtomicUsize::new(0),
        }
    }
}

impl Devices for Machines {
    fn name(&self) -> &str {
        "cuda-machines"
    }

    /// None for contracts inside a machine.
    fn worlds(&self) -> Vec<usize> {
        Vec::new()
    }

    fn engines(&self) -> Engines {
        self.gpus.engines()
    }

    /// All, and ranks that are killed.
    fn tries(&self, name: &[&str]) -> bool {
        match name {
            [_, "hierarchical", _, _] | [_, "hierarchical", _, "experts", _] => true,
            [_, KILLED, op] => op.starts_with("hierarchical_"),
            _ => false,
        }
    }

    fn open(&self, rank: usize) -> Result<Arc<dyn Device>> {
        self.gpus.open(rank)
    }

    fn spans(&self, (machines, ranks): (usize, usize)) -> bool {
        let gpus = self.gpus.count;
        // Ranks of one machine wait for each other's kernels, which have no turns to spare.
        let fits = ranks <= gpus && machines * ranks <= gpus.max(MOST_SHARING);
        machines > 1 && fits && self.gpus.has_nccl()
    }

    fn injects(&self) -> bool {
        true
    }

    fn open_injected(&self, rank: usize, hook: &Injector) -> Result<Arc<dyn Device>> {
        self.gpus.open_injected(rank, hook)
    }

    fn asks_callers(&self) -> bool {
        false
    }

    fn prepare(&self, rank: &mut Command) {
        let host = self.started.fetch_add(1, Ordering::Relaxed);
        self.gpus.prepare(rank);
        rank.env("NCCL_HOSTID", format!("{}-{host}", std::process::id()))
            .env("NCCL_SOCKET_IFNAME", "lo")
            .env("NCCL_IB_DISABLE", "1")
            .env("NCCL_NVLS_ENABLE", "0");
    }

    fn kills(&self) -> Option<usize> {
        None
    }

    fn keeps(&self) -> bool {
        true
    }
}

pub(crate) mod tests {
    use super::*;
    use crate::own::{Case, cases};
    use std::collections::BTreeSet;

    pub(crate) const ALL: &[Case] = cases![
        the_group_is_tried_at_the_largest_size,
        eight_ranks_share_gpus_where_that_is_asked_for,
        machines_share_gpus_and_their_ranks_do_not_where_there_is_nccl,
        kills_in_a_row_need_a_gpu_for_each_rank,
    ];

    fn tried(count: usize) -> Vec<String> {
        tried_by(Gpus {
            count,
            tiles: true,
            crowds: false,
        })
    }

    fn tried_by(gpus: Gpus) -> Vec<String> {
        let gpus: Arc<dyn Devices> = Arc::new(gpus);
        let names = crate::processes::names(&gpus, None);
        let many = killed::trial(&gpus, false, 0);
        names.chain(many.map(|t| t.name().to_owned())).collect()
    }

    /// What is chosen by name is still there under that name.
    fn the_group_is_tried_at_the_largest_size() {
        let all = tried(4);
        let at = |size: &str| -> BTreeSet<String> {
            let prefix = format!("cuda-processes/{size}/");
            let names = all.iter().filter_map(|name| name.strip_prefix(&prefix));
            names.map(str::to_owned).collect()
        };
        assert_eq!(at("w2"), ["gather_linear/pull/even".to_owned()].into());
        assert!(at("w1").is_empty(), "one GPU makes no group");
        let largest = at("w4");
        for part in [
            "faults/never_calls/gather_linear_ring",
            "faults/mishaps/gather_linear_ring",
            "faults/delayed/all_to_all",
            "user_buffers/lost",
            "killed/gather_linear_ring",
            "killed/barrier",
            "life/",
            "reset/",
            "user_buffers/",
            "send_recv/",
            "all_gather/",
            "broadcast/",
            "all_to_all/",
            "all_to_all_rows/",
            "barrier/",
            "reduce_scatter/",
            "all_reduce/auto/",
            "capture/gather_linear/ring",
            "gather_linear/ring/resident",
            "gather_linear/pull/lora",
            "linear_reduce_scatter/chunked/ragged",
            "linear_reduce_scatter/ring/ragged",
            "linear_reduce_scatter/tiles/even",
            "ledger/gathered_rows/",
        ] {
            assert!(largest.iter().any(|n| n.starts_with(part)), "no {part}");
        }
        for part in ["stress", "device", "control", "faults/killed", "quantized"] {
            assert!(!largest.iter().any(|n| n.starts_with(part)), "{part}");
        }
    }

    fn eight_ranks_share_gpus_where_that_is_asked_for() {
        let crowd = |count, crowds| -> Vec<String> {
            let tiles = true;
            let all = tried_by(Gpus {
                count,
                tiles,
                crowds,
            });
            let prefix = format!("cuda-processes/w{CROWD}/");
            let names = all.iter().filter_map(|name| name.strip_prefix(&prefix));
            names.map(str::to_owned).collect()
        };
        for count in [1, 2, 4] {
            assert_eq!(crowd(count, false), Vec::<String>::new());
            let all = crowd(count, true);
            for part in [
                "all_reduce/one_shot",
                "all_gather/",
                "reduce_scatter/",
                "broadcast/",
                "all_to_all/",
                "experts/pushed/dense",
                "experts/in_place/round_trips",
                "low_latency/",
                "all_reduce_norm/",
                "gather_linear/tiles/even",
                "linear_reduce_scatter/tiles/even",
            ] {
                assert!(all.iter().any(|n| n.starts_with(part)), "no {part}");
            }
            assert!(!all.iter().any(|n| n.starts_with("faults")));
        }
        assert!(
            crowd(CROWD, true).contains(&"faults/never_calls/gather_linear_ring".to_owned()),
            "a GPU for each is no crowd"
        );
    }

    fn machines_share_gpus_and_their_ranks_do_not_where_there_is_nccl() {
        let gpus = Gpus {
            count: 1,
            tiles: true,
            crowds: false,
        };
        let all: Arc<dyn Devices> = Arc::new(Machines::of(gpus));
        let names: Vec<_> = crate::processes::names(&all, None).collect();
        let has = |name: &str| names.iter().any(|n| n == name);
        let sums = "cuda-machines/w2/hierarchical/2x1/sums";
        assert_eq!(has(sums), crate::cuda::has_nccl());
        let wrong = names
            .iter()
            .find(|n| !n.contains("hierarchical") || n.contains("2x2"));
        assert_eq!(wrong, None);
        // Processes are hosts of their own.
        let host = || {
            let mut command = Command::new("none");
            all.prepare(&mut command);
            let mut variables = command.get_envs();
            let host = variables.find(|(name, _)| *name == "NCCL_HOSTID");
            host.and_then(|(_, value)| Some(value?.to_owned()))
        };
        let (first, second) = (host(), host());
        assert!(first.is_some() && first != second);
    }

    fn kills_in_a_row_need_a_gpu_for_each_rank() {
        let name = "cuda-processes/w3/killed_again_and_again".to_owned();
        assert!(!tried(2).contains(&name));
        assert!(tried(3).contains(&name));
    }
}
