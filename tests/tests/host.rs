//! The contracts on the host device.

use brigade_conformance::{HostThreads, asked, trials};
use std::{process::ExitCode, sync::Arc};

fn main() -> ExitCode {
    let args = libtest_mimic::Arguments::from_args();
    let trials = trials(Arc::new(HostThreads), asked(&args));
    libtest_mimic::run(&args, trials).exit_code()
}
