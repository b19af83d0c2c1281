//! Which kinds of handles hand this host's GPU memory to other processes: tried, since what a driver promises a container may
//! forbid.

use crate::{Missing, driver::refused, symmetric::properties};
use cudarc::driver::{CudaContext, result, sys};
use std::ffi::c_void;

/// What can stand for GPU memory in another process.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum HandleKind {
    /// A POSIX file descriptor: how ranks of a group find each other's memory.
    Descriptor,
    /// A handle that means something on other hosts of an NVLink domain too.
    Fabric,
    /// CUDA's legacy handle of what cudaMalloc gave.
    Ipc,
}

/// Long enough for every kind.
#[repr(C, align(8))]
struct Handle([u8; 64]);

/// Makes a little memory on GPU `ordinal`, and such a handle of it.
pub(crate) fn try_handle(ordinal: usize, kind: HandleKind) -> Result<(), Missing> {
    let context = CudaContext::new(ordinal).map_err(refused("cuDevicePrimaryCtxRetain"))?;
    context
        .bind_to_thread()
        .map_err(refused("cuCtxSetCurrent"))?;
    match kind {
        HandleKind::Descriptor => export(ordinal, 1),
        HandleKind::Fabric => export(ordinal, 8),
        HandleKind::Ipc => legacy(),
    }
}

/// As physical memory, by the driver's number of the kind.
fn export(ordinal: usize, kind: u32) -> Result<(), Missing> {
    let wanted = properties(ordinal, kind);
    let least = sys::CUmemAllocationGranularity_flags::CU_MEM_ALLOC_GRANULARITY_MINIMUM;
    let (mut bytes, mut memory) = (0, 0);
    // SAFETY: both pointers are to live values.
    unsafe { sys::cuMemGetAllocationGranularity(&raw mut bytes, &raw const wanted, least) }
        .result()
        .map_err(refused("cuMemGetAllocationGranularity"))?;
    // SAFETY: as above.
    unsafe { sys::cuMemCreate(&raw mut memory, bytes, &raw const wanted, 0) }
        .result()
        .map_err(refused("cuMemCreate"))?;
    let mut handle = Handle([0xFF; 64]);
    let into = (&raw mut handle).cast::<c_void>();
    let kind = sys::CUmemAllocationHandleType_enum(kind);
    // SAFETY: the driver writes 4 bytes for a descriptor and 64 for the fabric.
    let exported = unsafe { sys::cuMemExportToShareableHandle(into, memory, kind, 0) }
        .result()
        .map_err(refused("cuMemExportToShareableHandle"));
    // SAFETY: created above, released once.
    let _ = unsafe { sys::cuMemRelease(memory) };
    exported?;
    #[cfg(unix)]
    if kind == sys::CUmemAllocationHandleType::CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR {
        use std::os::fd::{FromRawFd, OwnedFd};
        let [a, b, c, d, ..] = handle.0;
        // SAFETY: the driver made the descriptor for us, and nobody else has it.
        drop(unsafe { OwnedFd::from_raw_fd(i32::from_ne_bytes([a, b, c, d])) });
    }
    Ok(())
}

/// As memory of cuMemAlloc.
fn legacy() -> Result<(), Missing> {
    const BYTES: usize = 4096;
    // SAFETY: a context is current; freed below.
    let address = unsafe { result::malloc_sync(BYTES) }.map_err(refused("cuMemAlloc"))?;
    let mut handle = sys::CUipcMemHandle { reserved: [0; 64] };
    // SAFETY: the pointer is to a live struct.
    let made = unsafe { sys::cuIpcGetMemHandle(&raw mut handle, address) }
        .result()
        .map_err(refused("cuIpcGetMemHandle"));
    // SAFETY: allocated above, freed once.
    let _ = unsafe { result::free_sync(address) };
    made
}
