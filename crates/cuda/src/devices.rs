//! The GPUs of this host.

use crate::{
    Missing,
    driver::{refused, start},
};
use cudarc::driver::{result::device, sys::CUdevice_attribute_enum as Attribute};

/// What the driver says about one GPU.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct DeviceInfo {
    /// Its number, as CUDA counts.
    pub ordinal: usize,
    /// Its name, `NVIDIA H200` for instance.
    pub name: String,
    /// Identifies the GPU across processes and restarts.
    pub uuid: [u8; 16],
    /// Compute capability: (9, 0) on Hopper.
    pub capability: (u32, u32),
    /// Memory in all.
    pub memory_bytes: u64,
    /// Streaming multiprocessors.
    pub multiprocessors: u32,
    /// Whether its memory can be mapped by address range (cuMemCreate), which symmetric memory needs.
    pub virtual_memory: bool,
    /// Whether blocks of one grid can be made resident together.
    pub cooperative_launch: bool,
}

impl DeviceInfo {
    /// Whether this build's kernels are meant for it: compute capability 8.0 and later.
    pub fn is_supported(&self) -> bool {
        self.capability >= (8, 0)
    }
}

/// Every GPU that the driver shows, in its order.
///
/// # Errors
/// What is missing: driver, GPU, or a driver that is new enough. Never panics.
pub fn devices() -> Result<Vec<DeviceInfo>, Missing> {
    start()?;
    let count = device::get_count().map_err(refused("cuDeviceGetCount"))?;
    if count <= 0 {
        return Err(Missing::Device);
    }
    (0..count).map(describe).collect()
}

fn describe(ordinal: i32) -> Result<DeviceInfo, Missing> {
    let gpu = device::get(ordinal).map_err(refused("cuDeviceGet"))?;
    let attribute = |which| {
        // SAFETY: `gpu` came from cuDeviceGet.
        unsafe { device::get_attribute(gpu, which) }
            .map(i32::unsigned_abs)
            .map_err(refused("cuDeviceGetAttribute"))
    };
    // SAFETY: as above.
    let memory_bytes = unsafe { device::total_mem(gpu) }.map_err(refused("cuDeviceTotalMem"))?;
    let uuid = device::get_uuid(gpu).map_err(refused("cuDeviceGetUuid"))?;
    Ok(DeviceInfo {
        ordinal: ordinal.unsigned_abs() as usize,
        name: device::get_name(gpu).map_err(refused("cuDeviceGetName"))?,
        uuid: uuid.bytes.map(|byte| byte as u8),
        capability: (
            attribute(Attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR)?,
            attribute(Attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR)?,
        ),
        memory_bytes: memory_bytes as u64,
        multiprocessors: attribute(Attribute::CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT)?,
        virtual_memory: attribute(
            Attribute::CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED,
        )? != 0,
        cooperative_launch: attribute(Attribute::CU_DEVICE_ATTRIBUTE_COOPERATIVE_LAUNCH)? != 0,
    })
}
