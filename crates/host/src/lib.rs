//! The CPU device of Brigade: reference, CI device and embedded default in one.
//!
//! Every operation of `brigade-device` runs here with no GPU. Ranks are threads of one process; each makes a
//! [`HostDevice`] and joins its group with a `Bootstrap`, for instance `brigade_group::threads`. Streams run their work
//! at once on the calling thread; what overlaps is the communication thread that every communicator has.
//!
//! Sums are taken in rank order in f32 with one rounding, so that all ranks, algorithms and repeats give the same bits.

mod all_gather;
mod all_reduce;
mod all_to_all;
mod barrier;
mod broadcast;
mod comm;
mod core;
mod device;
mod element;
mod gather_linear;
mod gemm;
mod inject;
mod job;
mod layout;
mod linear;
mod linear_reduce_scatter;
mod memory;
mod mover;
mod operand;
mod quantize;
mod queue;
mod reduce_scatter;
mod rendezvous;
mod segment;
mod send_recv;
mod user_buffers;
mod waits;

pub use device::{HostConfig, HostDevice};
