//! The CPU device of Brigade: reference, CI device and embedded default in one.
//!
//! Every operation of `brigade-device` runs here with no GPU. Ranks are threads of one process, with a `Bootstrap` like
//! `brigade_group::threads`, or on Linux processes of one machine, with one like `brigade_group::TcpGroup`; each makes a
//! [`HostDevice`] and joins its group with it. Streams run their work at once on the calling thread; what overlaps is the
//! communication thread that every communicator has.
//!
//! Processes share memory that has no name, and nothing of it is left when they are gone. A process that dies is noticed by
//! whoever waits for it, at once or within a tenth of a second.
//!
//! How ranks share memory, and how a group is stopped, reset and left, is the same for every device: that is
//! `brigade_group::Sharing` and `brigade_group::Control`.
//!
//! Sums are taken in rank order in f32 with one rounding, so that all ranks, algorithms and repeats give the same bits.

mod all_gather;
mod all_reduce;
mod all_to_all;
mod all_to_all_rows;
mod barrier;
mod broadcast;
mod combine;
mod comm;
mod core;
mod device;
mod dispatch;
mod element;
mod fifo;
mod gather_linear;
mod gemm;
mod grouped;
mod hierarchical;
mod inject;
mod job;
mod linear;
mod linear_reduce_scatter;
mod low_latency;
mod memory;
mod mover;
mod norm;
mod operand;
mod payload;
mod pushed;
mod quantize;
mod queue;
mod rail;
mod reduce_scatter;
mod rendezvous;
mod routing;
mod send_recv;
mod silu_mul;
mod top_k;
mod user_buffers;
mod waits;
mod window;

pub use device::{HostConfig, HostDevice};
pub use rail::RailModel;
