//! The contracts on every GPU of this host, alone and in groups; where there is none, one trial: opening says what is missing.
//! With BRIGADE_TEST_DEVICE=cuda a GPU must be there.

use brigade_conformance::{CudaBackend, device_trials, trials};
use brigade_cuda::{CudaDevice, Missing};
use brigade_device::Error;
use libtest_mimic::{Failed, Trial};
use std::{process::ExitCode, sync::Arc};

fn explains(missing: &Missing) -> Result<(), Failed> {
    if std::env::var_os("BRIGADE_TEST_DEVICE").is_some_and(|d| d == "cuda") {
        return Err(format!("a GPU is demanded: {missing}").into());
    }
    let opened = CudaDevice::new(0).map(drop).map_err(Error::from);
    match opened {
        Err(Error::Unsupported(reason))
            if reason.code == missing.code() && reason.remedy == missing.remedy() =>
        {
            Ok(())
        }
        other => Err(format!("{other:?} instead of {missing}").into()),
    }
}

fn main() -> ExitCode {
    let args = libtest_mimic::Arguments::from_args();
    let found = CudaBackend::all().and_then(|gpus| Ok((gpus, CudaBackend::groups()?)));
    let list = match found {
        Ok((gpus, groups)) => {
            let alone = gpus.into_iter().flat_map(|g| device_trials(Arc::new(g)));
            let together = groups.into_iter().flat_map(|g| trials(Arc::new(g)));
            alone.chain(together).collect()
        }
        Err(missing) => vec![Trial::test("cuda/missing", move || explains(&missing))],
    };
    libtest_mimic::run(&args, list).exit_code()
}
