//! The contracts on every GPU of this host, alone and in groups; where there is none, one trial: opening says what is missing.
//! With BRIGADE_TEST_DEVICE=cuda a GPU must be there.

use brigade_conformance::{CudaBackend, device_trials, missing_trial, trials};
use std::{process::ExitCode, sync::Arc};

fn main() -> ExitCode {
    let args = libtest_mimic::Arguments::from_args();
    let found = CudaBackend::all().and_then(|gpus| Ok((gpus, CudaBackend::groups()?)));
    let list = match found {
        Ok((gpus, groups)) => {
            let alone = gpus.into_iter().flat_map(|g| device_trials(Arc::new(g)));
            let together = groups.into_iter().flat_map(|g| trials(Arc::new(g)));
            alone.chain(together).collect()
        }
        Err(missing) => vec![missing_trial("cuda", missing)],
    };
    libtest_mimic::run(&args, list).exit_code()
}
