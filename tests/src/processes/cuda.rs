//! GPUs, one for each rank that is a process.

use super::{Devices, KILLED};
use crate::killed;
use brigade_cuda::{CudaDevice, Missing, devices};
use brigade_device::{Device, Result};
use brigade_plan::Engines;
use std::{process::Command, sync::Arc};

/// The GPUs of this host: rank 0 has the first.
pub(super) struct Gpus {
    count: usize,
}

impl Gpus {
    /// Those that the driver shows, if there are enough for a group. A process that is no rank opens one first: where
    /// none can be opened, it says so, and no trial starts.
    ///
    /// # Errors
    /// What is missing.
    pub(super) fn find(is_rank: bool) -> Result<Option<Self>, Missing> {
        let count = devices()?.len();
        if count < 2 {
            return Ok(None);
        }
        if !is_rank {
            CudaDevice::new(0)?;
        }
        Ok(Some(Self { count }))
    }
}

impl Devices for Gpus {
    fn name(&self) -> &str {
        "cuda-processes"
    }

    fn worlds(&self) -> Vec<usize> {
        (2..=self.count).collect()
    }

    fn engines(&self) -> Engines {
        Engines::cuda()
    }

    /// A process on a GPU takes seconds to start. So what is about the group is tried with all GPUs, the linears with some
    /// of their cases, and other group sizes with one. The rest is as it is between threads that have a GPU each.
    fn tries(&self, name: &[&str]) -> bool {
        let largest = format!("w{}", self.count);
        match name {
            [size, rest @ ..] if *size != largest => {
                matches!(rest, ["gather_linear", "pull", "even"])
            }
            [
                _,
                "faults" | "life" | "reset" | "user_buffers" | "send_recv",
                ..,
            ] => true,
            [_, "all_gather" | "broadcast" | "all_to_all" | "barrier", ..] => true,
            [_, "reduce_scatter" | "capture" | KILLED, ..] => true,
            [_, "all_reduce", "auto", ..] | [_, "ledger", "gathered_rows", ..] => true,
            [_, "gather_linear", "pull" | "ring", theme] => {
                matches!(*theme, "even" | "ragged" | "lora" | "resident")
            }
            [_, "linear_reduce_scatter", "ring", theme] => matches!(*theme, "even" | "ragged"),
            _ => false,
        }
    }

    fn open(&self, rank: usize) -> Result<Arc<dyn Device>> {
        Ok(CudaDevice::new(rank % self.count)?)
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
