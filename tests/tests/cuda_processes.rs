//! The contracts on GPUs, with a process and a GPU for each rank; where there is no GPU, one trial: opening says what is missing.
//! With BRIGADE_TEST_DEVICE=cuda a GPU must be there. One GPU makes no group, and no trials.
//!
//! Trials run one after the other: kernels of two processes on one GPU take turns, also while they wait for their peers.

use std::process::ExitCode;

fn main() -> ExitCode {
    let mut args = libtest_mimic::Arguments::from_args();
    args.test_threads = Some(1);
    #[cfg(target_os = "linux")]
    return brigade_conformance::processes::on_gpus(&args).unwrap_or_else(|missing| {
        let trial = brigade_conformance::missing_trial("cuda-processes", missing);
        libtest_mimic::run(&args, vec![trial]).exit_code()
    });
    #[cfg(not(target_os = "linux"))]
    libtest_mimic::run(&args, Vec::new()).exit_code()
}
