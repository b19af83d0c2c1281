//! A multi-GPU inference device layer for LLM serving.
//!
//! Parameters go in, a pure *plan* is made from them, a *device* carries the plan out, and every rank either gets the
//! result or a typed error. This crate is the one to depend on: it re-exports the vocabulary and picks a device.
//!
//! ```
//! use brigade::{AllReduceParams, CommConfig, Device, DeviceExt, ParallelMode, Queues, ReduceOp};
//!
//! # fn main() -> brigade::Result<()> {
//! // Two ranks, as threads of this process.
//! let ranks = brigade::group::threads(2);
//! std::thread::scope(|s| {
//!     let ranks: Vec<_> = ranks
//!         .into_iter()
//!         .map(|boot| {
//!             s.spawn(move || -> brigade::Result<Vec<f32>> {
//!                 let device = brigade::open(&brigade::OpenConfig::default())?;
//!                 let on = device.stream(0)?;
//!                 let comm = device.clone().join(&boot, &CommConfig::new(ParallelMode::Tp))?;
//!                 let mine = [1.0f32, 2.0, 3.0];
//!                 let mut x = device.upload(&on, &mine, &[3])?;
//!                 let mut lease = comm.lease(&on)?;
//!                 lease.all_reduce(AllReduceParams {
//!                     data: x.view_mut(),
//!                     from: None,
//!                     op: ReduceOp::Sum,
//!                     choice: None,
//!                 })?;
//!                 device.download(&on, x.view())
//!             })
//!         })
//!         .collect();
//!     for rank in ranks {
//!         assert_eq!(rank.join().unwrap()?, [2.0, 4.0, 6.0]);
//!     }
//!     Ok(())
//! })
//! # }
//! ```

#[cfg(feature = "cuda")]
pub use brigade_cuda as cuda;
pub use brigade_device::*;
pub use brigade_group as group;
pub use brigade_host as host;
pub use brigade_plan as plan;

use std::{str::FromStr, sync::Arc};

/// Which device to open.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum DeviceChoice {
    /// The host, also where there is a GPU.
    #[default]
    Auto,
    /// The CPU.
    Host,
    /// A GPU, or an error that says what is missing. [`OpenConfig::gpu`] says which: each rank of a group takes its own.
    Cuda,
}

impl FromStr for DeviceChoice {
    type Err = Error;

    fn from_str(s: &str) -> Result<Self> {
        match s {
            "auto" => Ok(Self::Auto),
            "host" => Ok(Self::Host),
            "cuda" => Ok(Self::Cuda),
            _ => Err(Error::invalid("device", s, "auto, host or cuda")),
        }
    }
}

/// What to open, and how.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct OpenConfig {
    /// Which device.
    pub device: DeviceChoice,
    /// For the host.
    pub host: host::HostConfig,
    /// Which GPU, as CUDA counts.
    pub gpu: usize,
}

/// Opens one rank's accelerator.
///
/// # Errors
/// [`Error::Unsupported`] with what is missing and what to do, if CUDA was asked for and cannot be used.
pub fn open(config: &OpenConfig) -> Result<Arc<dyn Device>> {
    match config.device {
        // A GPU that is there does not change what `Auto` means: ranks that are to have one say which.
        DeviceChoice::Auto | DeviceChoice::Host => Ok(host::HostDevice::with(&config.host)?),
        DeviceChoice::Cuda => open_cuda(config.gpu),
    }
}

#[cfg(feature = "cuda")]
fn open_cuda(gpu: usize) -> Result<Arc<dyn Device>> {
    Ok(cuda::CudaDevice::new(gpu)?)
}

#[cfg(not(feature = "cuda"))]
fn open_cuda(_: usize) -> Result<Arc<dyn Device>> {
    Err(Reason::new(
        "no-cuda-feature",
        "this build has no CUDA device",
        "build brigade with its cuda feature, or use the host device",
    )
    .into())
}
