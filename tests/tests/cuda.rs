//! The contracts on every GPU of this host, alone and in groups; where there is none, one trial: opening says what is missing.
//! With BRIGADE_TEST_DEVICE=cuda a GPU must be there.

use brigade_conformance::{
    CudaBackend, asked, device_trials, machine_trials, missing_trial, trials,
};
use std::{process::ExitCode, sync::Arc};

/// Trials at a time, where neither `--test-threads` nor `RUST_TEST_THREADS` says how many. Trials have the same GPUs: blocks of
/// all groups that wait must find a place there, a product's kernels are loaded while nobody waits, and tiles that wait are
/// one group's.
const AT_ONCE: usize = 1;

fn main() -> ExitCode {
    let mut args = libtest_mimic::Arguments::from_args();
    if args.test_threads.is_none() {
        let named = std::env::var("RUST_TEST_THREADS").ok();
        let named = named.and_then(|n| n.parse().ok());
        args.test_threads = Some(named.unwrap_or(AT_ONCE));
    }
    let found = CudaBackend::all()
        .and_then(|gpus| Ok((gpus, CudaBackend::groups()?, CudaBackend::machines()?)));
    let list = match found {
        Ok((gpus, groups, machines)) => {
            let alone = gpus.into_iter().flat_map(|g| device_trials(Arc::new(g)));
            let together = groups
                .into_iter()
                .flat_map(|g| trials(Arc::new(g), asked(&args)));
            let across = machine_trials(Arc::new(machines));
            alone.chain(together).chain(across).collect()
        }
        Err(missing) => vec![missing_trial("cuda", missing)],
    };
    libtest_mimic::run(&args, list).exit_code()
}
