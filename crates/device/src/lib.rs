//! The vocabulary of Brigade: buffers, parameters, plans, errors, and the traits that every device implements.
//!
//! Parameters go in, a pure *plan* is made from them, a *device* carries the plan out, and every rank either gets the
//! result or a typed error. This crate has no CUDA, no threads and no I/O; `brigade-host` and `brigade-cuda` implement
//! its traits, and `brigade` is the crate to depend on.
//!
//! - [`Buffer`] owns, [`View`] borrows; parameters take views.
//! - [`Device`] is one rank's accelerator; [`Comm`] is one rank's membership in a group.
//! - Using a communicator takes a [`Lease`], which has one stream.
//! - Across machines, a [`Hierarchy`] has the place of a communicator.
//! - [`fallback`] has the non-overlapped versions of what backends overlap.

mod absent;
mod all_to_all_rows;
mod beside;
mod buffer;
mod check;
mod collectives;
mod combine;
mod comm;
mod device;
mod dispatch;
mod dispatched;
mod dtype;
mod experts;
pub mod fallback;
mod fault;
mod gemm;
mod group;
mod grouped;
mod hierarchical;
mod hierarchical_experts;
mod hierarchy;
mod inject;
mod lease;
mod linear_all_reduce_norm;
mod loan;
mod low_latency;
mod low_latency_back;
mod machines;
pub mod moves;
mod norm;
mod origin;
mod overlap;
mod params;
mod plan;
mod quant;
mod queue;
mod rail;
mod rail_ways;
mod routing;
mod shape;
mod silu_mul;
mod staging;
mod statistics;
mod top_k;
mod turns;
mod windows;

pub use absent::Absent;
pub use all_to_all_rows::*;
pub use beside::{Beside, Finished};
pub use buffer::{Adopted, Buffer, Storage, View, ViewMut};
pub use collectives::*;
pub use combine::*;
pub use comm::{Comm, Communicator, PeerWait, Traffic};
pub use device::*;
pub use dispatch::*;
pub use dispatched::*;
pub use dtype::{DataType, Element, MemoryType};
pub use experts::*;
pub use fault::{Error, FaultKind, FaultRecord, Result};
pub use gemm::*;
pub use group::Group;
pub use grouped::*;
pub use hierarchical::*;
pub use hierarchical_experts::*;
pub use hierarchy::*;
pub use inject::*;
pub use lease::*;
pub use linear_all_reduce_norm::*;
pub use loan::{Access, Gate, Loan};
pub use low_latency::*;
pub use low_latency_back::*;
pub use machines::{Machines, Numbers};
pub use norm::*;
pub use origin::{Identity, Origin};
pub use overlap::*;
pub use params::*;
pub use plan::*;
pub use quant::{Operand, QBuffer, QScheme, QView};
pub use queue::*;
pub use rail::{Rail, RailParams};
pub use routing::*;
pub use shape::Shape;
pub use silu_mul::*;
pub use staging::{Part, SliceSlot, Staging};
pub use statistics::Statistics;
pub use top_k::*;
pub use turns::{GraphTurns, Turn};
pub use windows::*;
