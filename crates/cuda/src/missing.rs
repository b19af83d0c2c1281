//! What keeps this host from running the CUDA device, and what would help.

use brigade_device::{Error, Reason};
use std::{fmt, sync::Arc};

/// A version of CUDA, as drivers and compilers count it, or of one of its libraries.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Version {
    /// 13 of 13.0.
    pub major: u32,
    /// 0 of 13.0.
    pub minor: u32,
    /// 3 of 2.28.3; 0 where releases are counted by the other two alone.
    pub patch: u32,
}

impl Version {
    /// Of two numbers.
    pub(crate) const fn of(major: u32, minor: u32) -> Self {
        Self {
            major,
            minor,
            patch: 0,
        }
    }

    /// From the driver's own number: 13000 is 13.0.
    pub const fn from_code(code: u32) -> Self {
        Self::of(code / 1000, code % 1000 / 10)
    }

    /// The oldest NVIDIA driver that offers this version.
    const fn driver_package(self) -> &'static str {
        match self.major {
            ..=11 => "450",
            12 => "525",
            _ => "580",
        }
    }
}

impl fmt::Display for Version {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}.{}", self.major, self.minor)?;
        match self.patch {
            0 => Ok(()),
            patch => write!(f, ".{patch}"),
        }
    }
}

/// What is missing.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Missing {
    /// There is no NVIDIA driver library to load.
    Driver {
        /// The host shows an NVIDIA GPU all the same: its driver library was not handed in, as in a plain container.
        gpu_seen: bool,
    },
    /// A library of that name is there, but it is not a driver.
    NotADriver {
        /// What it lacks.
        lacks: &'static str,
    },
    /// The driver cannot load what this build holds.
    DriverTooOld {
        /// What the driver offers.
        driver: Version,
        /// What this build needs.
        needed: Version,
    },
    /// The driver is there and shows no GPU.
    Device,
    /// No GPU has this number.
    Ordinal {
        /// Which was asked for.
        ordinal: usize,
        /// How many there are.
        count: usize,
    },
    /// This build holds no kernels.
    Kernels {
        /// Why not.
        why: String,
    },
    /// The library that multiplies, cuBLASLt, does not load.
    Cublas,
    /// The driver refused a call.
    Refused {
        /// Which.
        call: &'static str,
        /// Its code.
        code: u32,
    },
}

impl Missing {
    /// Short and stable, for programs.
    pub const fn code(&self) -> &'static str {
        match self {
            Self::Driver { .. } => "cuda_driver_missing",
            Self::NotADriver { .. } => "cuda_driver_broken",
            Self::DriverTooOld { .. } => "cuda_driver_too_old",
            Self::Device => "cuda_device_missing",
            Self::Ordinal { .. } => "cuda_device_number",
            Self::Kernels { .. } => "cuda_kernels_missing",
            Self::Cublas => "cuda_cublas_missing",
            Self::Refused { .. } => "cuda_call_refused",
        }
    }

    /// What is the matter.
    pub fn what(&self) -> String {
        match self {
            Self::Driver { gpu_seen: false } => {
                "there is no NVIDIA driver on this host (libcuda does not load)".into()
            }
            Self::Driver { gpu_seen: true } => {
                "this host has an NVIDIA GPU, but its driver library is not here (libcuda does not load)".into()
            }
            Self::NotADriver { lacks } => {
                format!("the libcuda that loads here is not a driver: it lacks {lacks}")
            }
            Self::DriverTooOld { driver, needed } => {
                format!("the NVIDIA driver offers CUDA {driver}, and this build needs {needed}")
            }
            Self::Device => "the NVIDIA driver shows no GPU".into(),
            Self::Ordinal { ordinal, count } => {
                format!("there is no GPU {ordinal}: the driver shows {count}")
            }
            Self::Kernels { why } => format!("this build holds no CUDA kernels: {why}"),
            Self::Cublas => "cuBLASLt, which multiplies, does not load (libcublasLt)".into(),
            Self::Refused { call, code } => format!("the NVIDIA driver refused {call} with code {code}"),
        }
    }

    /// What would help.
    pub fn remedy(&self) -> String {
        match self {
            Self::Driver { gpu_seen: false } => {
                "install an NVIDIA driver where there is a GPU, or use the host device".into()
            }
            Self::Driver { gpu_seen: true } => {
                "start the container with its GPUs (docker run --gpus all), or install the driver".into()
            }
            Self::NotADriver { .. } => {
                "remove the toolkit's stubs folder from LD_LIBRARY_PATH, or install an NVIDIA driver".into()
            }
            Self::DriverTooOld { needed, .. } => format!(
                "install NVIDIA driver {} or newer, or build with an older nvcc (CUDA_HOME, from {}.{} on)",
                needed.driver_package(),
                crate::driver::OLDEST.major,
                crate::driver::OLDEST.minor
            ),
            Self::Device => {
                "check nvidia-smi and CUDA_VISIBLE_DEVICES, or use the host device".into()
            }
            Self::Ordinal { .. } => "choose one that `cargo xtask doctor` or `brigade-perf doctor` lists".into(),
            Self::Kernels { .. } => {
                "run `cargo xtask toolchain` in Brigade's repository, or set CUDA_HOME, and build again".into()
            }
            Self::Cublas => format!(
                "install cuBLAS {major} (pip: nvidia-cublas; Debian: libcublas-{major}-0), or put its folder into LD_LIBRARY_PATH",
                major = crate::driver::needed_driver().major
            ),
            Self::Refused { code, .. } => refusal_remedy(*code).into(),
        }
    }
}

/// Codes that say something about the host rather than about the call.
const fn refusal_remedy(code: u32) -> &'static str {
    match code {
        2 => "free memory on the GPU",
        802 => "start nvidia-fabricmanager, or wait until it has started",
        803 => {
            "reboot, or reload the kernel module: it and the driver library are of different versions"
        }
        804 => "remove the compatibility library: this GPU cannot use it",
        209 | 218 | 222 => "build on a host with an nvcc that knows this GPU",
        _ => "look at nvidia-smi and the kernel's log (dmesg)",
    }
}

impl fmt::Display for Missing {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}; {}", self.what(), self.remedy())
    }
}

impl std::error::Error for Missing {}

impl From<Missing> for Reason {
    fn from(missing: Missing) -> Self {
        Self::new(missing.code(), missing.what(), missing.remedy())
    }
}

impl From<Missing> for Error {
    fn from(missing: Missing) -> Self {
        match missing {
            Missing::Refused { call, code } => Self::Backend {
                call,
                code: i64::from(code),
                source: Some(Arc::new(missing)),
            },
            other => Self::Unsupported(other.into()),
        }
    }
}

impl From<brigade_kernels::Missing> for Missing {
    fn from(missing: brigade_kernels::Missing) -> Self {
        Self::Kernels { why: missing.why }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// What a build without nvcc answers, whoever opens a device hears, with what to do about it.
    #[test]
    fn a_build_without_kernels_says_what_to_do() {
        let missing = brigade_kernels::Missing {
            name: "fill".into(),
            why: "no nvcc was found".into(),
        };
        match Error::from(Missing::from(missing)) {
            Error::Unsupported(reason) => {
                assert_eq!(reason.code, "cuda_kernels_missing");
                assert!(reason.what.ends_with("no nvcc was found"), "{reason}");
                assert!(reason.remedy.contains("cargo xtask toolchain"), "{reason}");
            }
            other => panic!("{other:?}"),
        }
    }
}
