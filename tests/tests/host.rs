//! The contracts on the host device.

use brigade_conformance::{HostThreads, trials};
use std::{process::ExitCode, sync::Arc};

fn main() -> ExitCode {
    let args = libtest_mimic::Arguments::from_args();
    libtest_mimic::run(&args, trials(Arc::new(HostThreads))).exit_code()
}
