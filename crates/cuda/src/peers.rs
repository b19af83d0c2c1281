//! What two GPUs of this host are to each other.

use crate::{
    Missing,
    driver::{refused, start},
};
use cudarc::driver::{result::device, sys};

/// How one GPU reaches the memory of another.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Link {
    /// Whether it can map the other's memory at all.
    pub access: bool,
    /// Whether atomics on the other's memory are the link's own.
    pub native_atomics: bool,
    /// The driver's rank among the links of this host: 0 is the fastest kind.
    pub performance_rank: u32,
}

/// The link from GPU `from` to GPU `to`; a GPU reaches itself.
///
/// # Errors
/// What is missing: driver, or GPUs of these numbers.
pub fn link(from: usize, to: usize) -> Result<Link, Missing> {
    start()?;
    let count = device::get_count().map_err(refused("cuDeviceGetCount"))? as usize;
    if let Some(&ordinal) = [from, to].iter().find(|&&o| o >= count) {
        return Err(Missing::Ordinal { ordinal, count });
    }
    if from == to {
        return Ok(Link {
            access: true,
            native_atomics: true,
            performance_rank: 0,
        });
    }
    let gpu = |ordinal: usize| device::get(ordinal as i32).map_err(refused("cuDeviceGet"));
    let (from, to) = (gpu(from)?, gpu(to)?);
    let ask = |attribute| -> Result<i32, Missing> {
        let mut value = 0;
        // SAFETY: both came from cuDeviceGet, and the pointer is to a live integer.
        unsafe { sys::cuDeviceGetP2PAttribute(&raw mut value, attribute, from, to) }
            .result()
            .map_err(refused("cuDeviceGetP2PAttribute"))?;
        Ok(value)
    };
    use sys::CUdevice_P2PAttribute_enum as Attribute;
    Ok(Link {
        access: ask(Attribute::CU_DEVICE_P2P_ATTRIBUTE_ACCESS_SUPPORTED)? != 0,
        native_atomics: ask(Attribute::CU_DEVICE_P2P_ATTRIBUTE_NATIVE_ATOMIC_SUPPORTED)? != 0,
        performance_rank: ask(Attribute::CU_DEVICE_P2P_ATTRIBUTE_PERFORMANCE_RANK)?.unsigned_abs(),
    })
}
