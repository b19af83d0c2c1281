//! The conformance suite of Brigade: every operation's contract, stated once, and run on every device and group size.
//!
//! Whoever writes a backend implements [`Backend`], a thing that makes N ranks, and runs [`trials`] with libtest-mimic:
//!
//! ```no_run
//! let args = libtest_mimic::Arguments::from_args();
//! let trials = brigade_conformance::trials(std::sync::Arc::new(brigade_conformance::HostThreads));
//! libtest_mimic::run(&args, trials).exit();
//! ```
//!
//! A trial is named `device/w<ranks>/<operation>/..`. Data is fresh in every run and never zero, outputs are poisoned
//! before every call, and a failure prints the seed that replays it (`BRIGADE_SEED`).
#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    reason = "contracts are tests: what is not as promised panics"
)]

mod all_reduce;
pub mod backend;
pub mod check;
mod faults;
mod gather_linear;
mod host;
mod layer;
pub mod matrix;
mod ops;
pub mod oracle;
pub mod suite;

pub use backend::{Backend, Rank, Seat};
pub use host::HostThreads;

use std::sync::Arc;

/// Every contract at every group size of a device.
pub fn trials(backend: Arc<dyn Backend>) -> Vec<libtest_mimic::Trial> {
    let mut suite = suite::Suite::new(backend);
    gather_linear::add(&mut suite);
    all_reduce::add(&mut suite);
    faults::add(&mut suite);
    suite.into_trials()
}
