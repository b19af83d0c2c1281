//! Who is in: how ranks find each other, agree, and notice that somebody is missing.
//!
//! Everything here waits with a bound and ends in a result or a typed error on every rank.
//!
//! - [`threads`]: a [`Bootstrap`](brigade_device::Bootstrap) for ranks that are threads of one process.
//! - [`TcpGroup`]: one for ranks that are processes, on one machine or several, started by torchrun or in its manner.
//! - `Launch`: starts ranks as processes of this machine (Unix).
//! - [`Liveness`]: who is lost, noticed within a second of a process's death.
//! - `exchange_fds`: file descriptors from every rank to every rank of one machine (Unix).
//! - [`messages`]: what a bootstrap gives, once it was seen to be a message from each rank.
//! - [`vote`]: all ranks have the same, or all fail and see what everybody had.
//! - [`agree`]: all ranks succeeded, or all fail and see everybody's reason.
//! - [`Deadline`]: one bound for a wait of several steps.
//! - [`Sharing`]: memory of the host that all ranks reach, as [`Segment`]s: between threads and, on Linux, processes.
//! - [`split`]: a group as several, for machines and what is between them.
//! - [`Across`]: the groups of a hierarchy, each of which stops the others.
//! - [`machine`]: which one this is, and how much memory it has; which ranks share one.
//! - [`Control`]: what a communicator knows of its group once it has that memory: who stopped it, who left, when all start
//!   anew.
//!
//! ```
//! use brigade_device::Bootstrap;
//! use std::time::Duration;
//!
//! let ranks = brigade_group::threads(3);
//! std::thread::scope(|s| {
//!     for boot in &ranks {
//!         s.spawn(move || {
//!             let all = boot.all_gather(&[boot.rank() as u8], Duration::from_secs(10));
//!             assert_eq!(all.unwrap(), [[0], [1], [2]]);
//!         });
//!     }
//! });
//! ```

mod across;
mod control;
#[cfg(unix)]
mod fds;
#[cfg(unix)]
mod folder;
pub mod frame;
#[cfg(unix)]
mod launch;
mod liveness;
pub mod machine;
mod proof;
mod rounds;
mod shared;
mod split;
mod tcp;
mod threads;
mod vote;

pub use across::{Across, Stoppable};
pub use brigade_sync::Deadline;
pub use control::Control;
#[cfg(unix)]
pub use fds::exchange_fds;
#[cfg(unix)]
pub use launch::{Launch, Ranks};
pub use liveness::{Liveness, Loss, Watch};
pub use proof::Secret;
pub use shared::{Offer, Segment, SharedSegment, Sharing};
pub use split::split;
pub use tcp::{Address, TcpConfig, TcpGroup};
pub use threads::{ThreadGroup, threads};
pub use vote::{agree, messages, vote};
