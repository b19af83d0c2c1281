//! The contracts on the host device, with a process for each rank.

use std::process::ExitCode;

fn main() -> ExitCode {
    let args = libtest_mimic::Arguments::from_args();
    #[cfg(target_os = "linux")]
    let trials = brigade_conformance::processes::on_host();
    #[cfg(not(target_os = "linux"))]
    let trials = Vec::new();
    libtest_mimic::run(&args, trials).exit_code()
}
