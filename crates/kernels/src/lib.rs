//! Brigade's CUDA kernels, compiled when this crate is built, as bytes; and the parameter struct that each of them takes.
//!
//! There is no logic here. The build script looks for nvcc (12.4 or newer) in `NVCC`, `CUDA_HOME`, `CUDA_PATH`, in the
//! folder that `cargo xtask toolchain` fills, on `PATH` and in `/usr/local/cuda`. Without one the crate builds all the
//! same: [`available`] is false and [`fatbin`] says why. `NVCC=none` asks for that, `BRIGADE_REQUIRE_CUDA=1` forbids it.
//!
//! ```
//! match brigade_kernels::fatbin("fill") {
//!     Ok(fill) => assert_eq!(fill.bytes.as_ptr() as usize % 16, 0),
//!     Err(missing) => assert!(missing.to_string().contains("fill")),
//! }
//! ```

mod params;

pub use params::{constants::*, *};

/// The kernels of one source file, for every generation of GPUs: what `cuModuleLoadData` takes.
#[derive(Clone, Copy)]
pub struct Fatbin {
    /// The source file's name without its ending.
    pub name: &'static str,
    /// The fatbin, aligned to 16 bytes.
    pub bytes: &'static [u8],
}

impl std::fmt::Debug for Fatbin {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Fatbin")
            .field("name", &self.name)
            .field("bytes", &self.bytes.len())
            .finish()
    }
}

/// The kernels are not in this build.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("no kernel {name:?} in this build: {why}")]
pub struct Missing {
    /// Which was asked for.
    pub name: String,
    /// Why it is not there.
    pub why: String,
}

#[repr(C, align(16))]
#[allow(dead_code)] // Not constructed where there is no nvcc.
struct Aligned<T: ?Sized>(T);

include!(concat!(env!("OUT_DIR"), "/embedded.rs"));

/// Every fatbin of this build; empty without nvcc.
pub fn kernels() -> &'static [Fatbin] {
    EMBEDDED
}

/// Whether this build holds kernels.
pub fn available() -> bool {
    !EMBEDDED.is_empty()
}

/// Major and minor of the nvcc that compiled them. A driver of an older major cannot load them.
pub const fn compiler() -> Option<(u32, u32)> {
    COMPILER
}

/// The kernels of `kernels/{name}.cu`.
///
/// # Errors
/// [`Missing`] without nvcc at build time, or if there is no such file.
pub fn fatbin(name: &str) -> Result<&'static Fatbin, Missing> {
    EMBEDDED
        .iter()
        .find(|f| f.name == name)
        .ok_or_else(|| Missing {
            name: name.to_owned(),
            why: if available() {
                "there is no such file".to_owned()
            } else {
                ABSENCE.to_owned()
            },
        })
}
