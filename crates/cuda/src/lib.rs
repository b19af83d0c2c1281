//! The CUDA device of Brigade.
//!
//! The driver is opened at run time, so that one binary serves hosts with and without a GPU: [`devices`] lists the GPUs or
//! says what is missing and what would help, and [`Probe`] shows that this build's kernels run on one of them.
//!
//! ```
//! match brigade_cuda::devices() {
//!     Ok(gpus) => assert!(gpus.iter().all(|gpu| gpu.memory_bytes > 0)),
//!     Err(missing) => assert!(!missing.remedy().is_empty()),
//! }
//! ```
//!
//! A [`CudaDevice`] joins a group of up to 16 ranks, threads or processes of one machine, each with a GPU that reaches the others'
//! memory. Calls of its communicator are enqueued: what ranks post and wait for is handed to kernels as data, counters lie in
//! GPU memory, so that calls can be captured, and copy engines move rows beside products. Every wait ends by its deadline, in
//! kernels too; a fault stops the kernels of all ranks, poisons outputs, and is the same record on every rank. Groups on several
//! machines join as a hierarchy, between whose machines NCCL carries the bytes.

mod adapters;
mod all_gather;
mod all_reduce;
mod all_to_all;
mod all_to_all_rows;
mod barrier;
mod batch_invariant;
mod broadcast;
mod card;
mod combine;
mod comm;
mod core;
mod desk;
mod device;
mod devices;
mod dispatch;
mod driver;
mod errands;
mod factors;
mod few_rows;
mod fifo;
mod finish;
mod gather_linear;
mod gathered;
mod gemm_flags;
mod gemm_send;
mod gemm_sums;
mod graph;
mod grouped;
mod handles;
mod hierarchical;
mod in_turn;
mod inject;
mod ipc;
mod job;
mod kept;
mod kernel;
mod kernels;
mod lane;
mod line;
mod linear;
mod linear_all_reduce;
mod linear_all_reduce_norm;
mod linear_reduce_scatter;
mod linear_silu_mul;
mod loading;
mod lora;
mod low_latency;
mod lt;
mod lt_call;
mod mark;
mod matrix;
mod meeting;
mod memory;
mod messages;
mod missing;
mod moves;
mod nccl;
mod nccl_bounded;
mod nccl_comm;
mod nccl_sums;
mod norm;
mod opened;
mod peers;
mod pools;
mod probe;
mod push_combine;
mod push_dispatch;
mod pushed;
mod quantize;
mod quiet;
mod rail;
mod rails;
mod reduce_scatter;
mod relay;
mod rendezvous;
mod report;
mod reset;
mod residency;
mod residual_norm;
mod retired;
mod routing;
mod send_recv;
mod sent;
mod silu_mul;
mod state;
mod steps;
mod stopping;
mod stopwatch;
mod survey;
mod symmetric;
mod tiles;
mod top_k;
mod trace;
mod types;
mod user_buffers;
mod watch;
mod window;

pub use device::{CudaConfig, CudaDevice};
pub use devices::{DeviceInfo, devices};
pub use driver::{driver_package, driver_version, needed_driver};
pub use ipc::{IpcHandle, IpcMemory};
pub use kernel::{Kernel, KernelSet, Launch};
pub use missing::{Missing, Version};
pub use nccl::{NCCL_WITH_CHANNELS, Nccl, find_nccl};
pub use nccl_comm::NcclComm;
pub use peers::{Link, link};
pub use probe::{Probe, Sight, WaitCase};
pub use residency::Spinning;
pub use stopwatch::Stopwatch;
pub use survey::{Finding, survey};
pub use symmetric::{Pages, Symmetric};
pub use trace::Span;
