//! The conformance suite of Brigade: every operation's contract, stated once, and run on every device and group size.
//!
//! Whoever writes a backend implements [`Backend`], a thing that makes N ranks, and runs [`trials`] with libtest-mimic:
//!
//! ```no_run
//! let args = libtest_mimic::Arguments::from_args();
//! let host = std::sync::Arc::new(brigade_conformance::HostThreads);
//! let trials = brigade_conformance::trials(host, brigade_conformance::asked(&args));
//! libtest_mimic::run(&args, trials).exit();
//! ```
//!
//! A trial is named `device/w<ranks>/<operation>/..`. Data is fresh in every run and never zero, outputs are poisoned
//! before every call, and a failure prints the seed that replays it (`BRIGADE_SEED`). `BRIGADE_STRESS=2h` lets the trials
//! of stress go on for so long.
#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    reason = "contracts are tests: what is not as promised panics"
)]

mod all_reduce;
mod all_reduce_norm;
mod all_to_all_rows;
pub mod backend;
mod batch_invariant;
mod beside;
mod capture;
mod chains;
pub mod check;
mod control;
mod copies;
mod cover;
mod cuda;
mod device;
mod exchanges;
mod experts;
mod faults;
mod few_rows;
mod gather_linear;
mod hierarchical;
mod host;
pub mod inject;
#[cfg(target_os = "linux")]
mod killed;
mod layer;
mod ledger;
mod life;
mod linear_all_reduce;
mod linear_all_reduce_norm;
mod linear_reduce_scatter;
mod low_latency;
pub mod matrix;
mod ops;
pub mod oracle;
mod own;
mod pieces;
#[cfg(target_os = "linux")]
pub mod processes;
mod quantized;
mod reduce_scatter;
mod replays;
mod send_recv;
mod shrink;
mod stress;
pub mod suite;
mod themes;
mod traffic;
mod user_buffers;

pub use backend::{Backend, Rank, Seat};
pub use cuda::{CudaBackend, missing_trial};
pub use host::HostThreads;
pub use own::own;
pub use suite::asked;

use std::sync::Arc;

/// Every contract at every group size of a device, or the one of this name.
pub fn trials(backend: Arc<dyn Backend>, only: Option<&str>) -> Vec<libtest_mimic::Trial> {
    suite(backend, only).into_trials()
}

fn suite(backend: Arc<dyn Backend>, only: Option<&str>) -> suite::Suite {
    let mut suite = suite::Suite::new(backend).only(only);
    gather_linear::add(&mut suite);
    linear_reduce_scatter::add(&mut suite);
    linear_all_reduce::add(&mut suite);
    linear_all_reduce_norm::add(&mut suite);
    few_rows::add(&mut suite);
    batch_invariant::add(&mut suite);
    all_reduce::add(&mut suite);
    all_reduce_norm::add(&mut suite);
    reduce_scatter::add(&mut suite);
    pieces::add(&mut suite);
    copies::add(&mut suite);
    all_to_all_rows::add(&mut suite);
    experts::add(&mut suite);
    low_latency::add(&mut suite);
    hierarchical::add(&mut suite);
    beside::add(&mut suite);
    exchanges::add(&mut suite);
    send_recv::add(&mut suite);
    shrink::add(&mut suite);
    life::add(&mut suite);
    capture::add(&mut suite);
    chains::add(&mut suite);
    quantized::add(&mut suite);
    traffic::add(&mut suite);
    user_buffers::add(&mut suite);
    ledger::add(&mut suite);
    device::add(&mut suite);
    control::add(&mut suite);
    faults::add(&mut suite);
    replays::add(&mut suite);
    stress::add(&mut suite);
    suite
}

/// The contracts of groups that span machines, and nothing else.
pub fn machine_trials(backend: Arc<dyn Backend>) -> Vec<libtest_mimic::Trial> {
    let mut suite = suite::Suite::new(backend);
    hierarchical::add(&mut suite);
    ledger::add_machines(&mut suite);
    suite.into_trials()
}

/// The contracts that need no communicator, at one rank.
pub fn device_trials(backend: Arc<dyn Backend>) -> Vec<libtest_mimic::Trial> {
    let mut suite = suite::Suite::new(backend);
    device::add(&mut suite);
    quantized::add_alone(&mut suite);
    ledger::add_alone(&mut suite);
    suite.into_trials()
}
