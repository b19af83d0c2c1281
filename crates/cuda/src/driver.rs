//! Opening the driver. Everything is checked here, on a handle of our own, before cudarc is asked: cudarc panics where the
//! library or one of its functions is not there.

use crate::{Missing, Version};
use brigade_device::Error;
use cudarc::{cublaslt::result::CublasError, driver::result::DriverError};
use libloading::Library;
use std::{
    path::Path,
    sync::{Arc, OnceLock},
};

/// No driver older than this will do, whatever the kernels were compiled with.
pub(crate) const OLDEST: Version = Version::of(12, 4);

/// The version that the driver offers. Touches no GPU.
///
/// # Errors
/// [`Missing::Driver`] or [`Missing::NotADriver`].
pub fn driver_version() -> Result<Version, Missing> {
    static LOADED: OnceLock<Result<Version, Missing>> = OnceLock::new();
    LOADED.get_or_init(load).clone()
}

/// The version of NVIDIA's package, 580.95.05, where Linux tells. Asks the driver nothing.
pub fn driver_package() -> Option<String> {
    let text = std::fs::read_to_string(Path::new("/sys/module/nvidia/version")).ok()?;
    Some(text.trim().to_owned())
}

/// The oldest driver that can load this build's kernels. Machine code of a compiler loads on every driver of its major version.
pub fn needed_driver() -> Version {
    match brigade_kernels::compiler() {
        Some((major, _)) if major > OLDEST.major => Version::of(major, 0),
        _ => OLDEST,
    }
}

/// The driver is there, is new enough, and is initialized.
pub(crate) fn start() -> Result<Version, Missing> {
    let driver = driver_version()?;
    accept(driver, needed_driver())?;
    match cudarc::driver::result::init() {
        Ok(()) => Ok(driver),
        // Also what an empty CUDA_VISIBLE_DEVICES gives.
        Err(DriverError(e)) if e as u32 == 100 => Err(Missing::Device),
        Err(DriverError(e)) if e as u32 == 34 => Err(Missing::NotADriver {
            lacks: "everything (it is the toolkit's stub)",
        }),
        Err(e) => Err(refused("cuInit")(e)),
    }
}

pub(crate) fn accept(driver: Version, needed: Version) -> Result<(), Missing> {
    if driver < needed {
        return Err(Missing::DriverTooOld { driver, needed });
    }
    Ok(())
}

/// For `map_err`: which call it was.
pub(crate) fn refused(call: &'static str) -> impl Fn(DriverError) -> Missing {
    move |DriverError(code)| Missing::Refused {
        call,
        code: code as u32,
    }
}

/// For `map_err` in operations: the call and its code.
pub(crate) fn failed(call: &'static str) -> impl Fn(DriverError) -> Error {
    move |error| Error::Backend {
        call,
        code: error.0 as i64,
        source: Some(Arc::new(error)),
    }
}

/// The same for the library that multiplies.
pub(crate) fn failed_library(call: &'static str) -> impl Fn(CublasError) -> Error {
    move |error| Error::Backend {
        call,
        code: error.0 as i64,
        source: Some(Arc::new(error)),
    }
}

fn load() -> Result<Version, Missing> {
    // The order of cudarc, so that both ask the same library.
    let names: &[&str] = if cfg!(windows) {
        &["nvcuda.dll"]
    } else {
        &["libcuda.so", "libcuda.so.1"]
    };
    let library = names
        .iter()
        // SAFETY: loading runs the initializers of NVIDIA's driver library, which ask nothing of the caller.
        .find_map(|name| unsafe { Library::new(*name) }.ok())
        .ok_or_else(|| Missing::Driver {
            gpu_seen: gpu_seen(),
        })?;
    // SAFETY: cuDriverGetVersion has this signature in every driver.
    // https://docs.nvidia.com/cuda/cuda-driver-api/group__CUDA__VERSION.html
    let get_version: libloading::Symbol<'_, unsafe extern "C" fn(*mut i32) -> i32> =
        unsafe { library.get(b"cuDriverGetVersion") }.map_err(|_| Missing::NotADriver {
            lacks: "cuDriverGetVersion",
        })?;
    let mut code = 0;
    // SAFETY: the pointer is to a live i32; the call needs no initialization.
    let status = unsafe { get_version(&mut code) };
    if status != 0 {
        return Err(Missing::Refused {
            call: "cuDriverGetVersion",
            code: status.unsigned_abs(),
        });
    }
    let version = Version::from_code(code.unsigned_abs());
    tracing::debug!(%version, "NVIDIA driver");
    // Drivers do not survive being unloaded.
    std::mem::forget(library);
    Ok(version)
}

/// Whether the kernel side of a driver shows, be it without its library.
fn gpu_seen() -> bool {
    ["/proc/driver/nvidia/version", "/dev/nvidiactl", "/dev/dxg"]
        .iter()
        .any(|path| Path::new(path).exists())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_driver_older_than_the_kernels_is_refused_with_both_versions() {
        let (old, new) = (Version::from_code(12040), Version::from_code(13000));
        assert_eq!(accept(new, old), Ok(()));
        assert_eq!(accept(new, new), Ok(()));
        let refused = accept(old, new).expect_err("too old");
        assert_eq!(refused.code(), "cuda_driver_too_old");
        assert_eq!(
            refused.to_string(),
            "the NVIDIA driver offers CUDA 12.4, and this build needs 13.0; \
             install NVIDIA driver 580 or newer, or build with an older nvcc (CUDA_HOME, from 12.4 on)"
        );
    }

    #[test]
    fn what_is_needed_follows_the_compiler() {
        match brigade_kernels::compiler() {
            Some((13, _)) => assert_eq!(needed_driver().to_string(), "13.0"),
            Some((12, _)) | None => assert_eq!(needed_driver(), OLDEST),
            Some((major, _)) => assert_eq!(needed_driver().major, major),
        }
    }
}
