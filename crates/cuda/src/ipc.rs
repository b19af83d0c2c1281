//! Memory of another process on this host, by CUDA's legacy handles: for what its owner allocated with cuMemAlloc (cudaMalloc)
//! and cannot allocate otherwise. Memory from a pool has no such handle; [`Pages`](crate::Pages) travel as descriptors.

use crate::{CudaDevice, card::Card, driver::failed};
use brigade_device::{Buffer, DataType, Error, MemoryType, Result, Shape};
use cudarc::driver::sys;
use std::{ffi::c_char, sync::Arc};

/// What stands for an allocation in another process.
pub type IpcHandle = [u8; 64];

/// An allocation of another process, mapped here.
#[derive(Debug)]
pub struct IpcMemory {
    card: Arc<Card>,
    address: u64,
    bytes: usize,
}

impl CudaDevice {
    /// The handle of the allocation that `address` lies in. It stands for the whole allocation, from its start.
    ///
    /// # Errors
    /// [`Error::Backend`] for memory that cannot be handed out so, for instance from a pool.
    pub fn ipc_handle(&self, address: u64) -> Result<IpcHandle> {
        self.card.bind()?;
        let mut handle = sys::CUipcMemHandle { reserved: [0; 64] };
        // SAFETY: the pointer is to a live struct; an address that the driver does not know is an error.
        unsafe { sys::cuIpcGetMemHandle(&raw mut handle, address) }
            .result()
            .map_err(failed("cuIpcGetMemHandle"))?;
        Ok(handle.reserved.map(|byte| byte as u8))
    }
}

impl IpcMemory {
    /// Maps the allocation behind a handle of another process; `bytes` is its size, as its owner says.
    ///
    /// # Errors
    /// [`Error::Backend`], also for a handle of this process.
    pub fn open(device: &CudaDevice, handle: IpcHandle, bytes: usize) -> Result<Arc<Self>> {
        device.card.bind()?;
        let reserved = handle.map(|byte| byte as c_char);
        let mut address = 0;
        let lazily = sys::CUipcMem_flags_enum::CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS as u32;
        // SAFETY: the pointer is to a live value; the driver checks the handle.
        unsafe {
            sys::cuIpcOpenMemHandle_v2(&raw mut address, sys::CUipcMemHandle { reserved }, lazily)
        }
        .result()
        .map_err(failed("cuIpcOpenMemHandle"))?;
        Ok(Arc::new(Self {
            card: Arc::clone(&device.card),
            address,
            bytes,
        }))
    }

    /// Elements from byte `offset` on, without a copy.
    ///
    /// # Errors
    /// [`Error::Invalid`] if they do not lie inside, or are not aligned.
    ///
    /// # Safety
    /// As [`Buffer::adopt`]; and the owner must keep the allocation, of the size that was said, while the buffer is in use.
    pub unsafe fn buffer(
        self: &Arc<Self>,
        offset: usize,
        dtype: DataType,
        shape: &[usize],
    ) -> Result<Buffer> {
        let bytes = Shape::new(shape)?.len() * dtype.bytes();
        if bytes.checked_add(offset).is_none_or(|end| end > self.bytes) {
            let got = format!("{shape:?} of {dtype} at byte {offset}");
            return Err(Error::invalid(
                "shape",
                got,
                format!("{} bytes", self.bytes),
            ));
        }
        let owner = Arc::clone(self);
        // SAFETY: inside the mapping, which `owner` keeps; the rest is the caller's promise.
        unsafe {
            let address = self.address + offset as u64;
            Buffer::adopt(address, MemoryType::Device, dtype, shape, owner)
        }
    }
}

impl Drop for IpcMemory {
    fn drop(&mut self) {
        if self.card.bind().is_ok() {
            // SAFETY: opened once, closed once; buffers keep `self` until the work that uses them is done.
            let _ = unsafe { sys::cuIpcCloseMemHandle(self.address) };
        }
    }
}
