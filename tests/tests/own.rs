//! The suite itself.

use std::process::ExitCode;

fn main() -> ExitCode {
    let args = libtest_mimic::Arguments::from_args();
    libtest_mimic::run(&args, brigade_conformance::own()).exit_code()
}
