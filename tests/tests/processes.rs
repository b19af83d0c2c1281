//! The contracts on the host device, with a process for each rank.

use std::process::ExitCode;

fn main() -> ExitCode {
    let args = libtest_mimic::Arguments::from_args();
    #[cfg(target_os = "linux")]
    return brigade_conformance::processes::on_host(&args);
    #[cfg(not(target_os = "linux"))]
    libtest_mimic::run(&args, Vec::new()).exit_code()
}
