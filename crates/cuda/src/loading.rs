//! When the driver loads kernels: all of a module at once (eager), or each when it first runs (lazy, as is usual).
//!
//! Whatever loads waits for the kernels that run meanwhile: lazily for those of its own GPU, and eagerly for those of every GPU that
//! the process uses. Seen on two H200s with CUDA 13.0: with `CUDA_MODULE_LOADING=EAGER` the first run of a product by cuBLASLt took as long as
//! a kernel on the other GPU spun, and without it did not wait for that one. (cuBLASLt loads some kernels one by one, eagerly too.)

use crate::{Missing, driver::refused};
use brigade_device::{Reason, Result};
use cudarc::driver::sys;
use std::{env, ffi::OsString, sync::LazyLock};

/// Whether this process loads eagerly. The driver has been initialized.
pub(crate) fn is_eager() -> Result<bool, Missing> {
    let mut mode = sys::CUmoduleLoadingMode::CU_MODULE_LAZY_LOADING;
    // SAFETY: the driver writes the mode, and reads nothing.
    unsafe { sys::cuModuleGetLoadingMode(&raw mut mode) }
        .result()
        .map_err(refused("cuModuleGetLoadingMode"))?;
    Ok(mode == sys::CUmoduleLoadingMode::CU_MODULE_EAGER_LOADING)
}

/// Whether every launch of a kernel waits for the kernel's end, as people who look for faults have it.
pub(crate) fn launches_block() -> bool {
    static BLOCK: LazyLock<bool> = LazyLock::new(|| blocks(env::var_os("CUDA_LAUNCH_BLOCKING")));
    *BLOCK
}

fn blocks(asked: Option<OsString>) -> bool {
    asked.is_some_and(|asked| asked != "0" && !asked.is_empty())
}

/// Refuses a group whose ranks are threads of one process, with several GPUs, where that process loads eagerly: a rank that loads
/// would wait for kernels of others, which wait for it.
pub(crate) fn check(one_process: bool, gpus: usize) -> Result<()> {
    judge(one_process, gpus, is_eager()?).map_err(Into::into)
}

fn judge(one_process: bool, gpus: usize, eager: bool) -> Result<(), Reason> {
    if !(one_process && gpus > 1 && eager) {
        return Ok(());
    }
    Err(Reason::new(
        "cuda-eager",
        format!(
            "CUDA_MODULE_LOADING=EAGER in a process with ranks on {gpus} GPUs: what loads on one waits for the others"
        ),
        "unset CUDA_MODULE_LOADING, or give each rank a process of its own",
    ))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn launches_block_where_that_is_asked_for() {
        assert!(blocks(Some("1".into())));
        for asked in [None, Some("0".into()), Some("".into())] {
            assert!(!blocks(asked));
        }
    }

    #[test]
    fn only_ranks_that_would_wait_for_each_other_are_refused() {
        for one_process in [false, true] {
            for gpus in [1, 2, 4] {
                for eager in [false, true] {
                    let refused = judge(one_process, gpus, eager).map_err(|r| r.code).err();
                    let wait = one_process && gpus > 1 && eager;
                    assert_eq!(refused, wait.then_some("cuda-eager"));
                }
            }
        }
    }
}
