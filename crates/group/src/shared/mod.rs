//! Memory of the host that all ranks of a group reach: between threads and, on Linux, between processes.

#[cfg(target_os = "linux")]
mod memfd;
#[cfg(target_os = "linux")]
mod pulse;
mod segment;
mod sharing;

pub use segment::{Segment, SharedSegment};
pub use sharing::{Offer, Sharing};
