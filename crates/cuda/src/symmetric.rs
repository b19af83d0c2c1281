//! Symmetric memory: the same part of every rank, side by side at equal distances, so that a kernel reaches the part of rank
//! `r` at `base + r * stride` with one pointer and one number.
//!
//! Parts are physical memory of the driver's virtual memory management (cuMemCreate). In one process each part is mapped
//! once, and access is granted to every GPU; between processes a part travels as a POSIX file descriptor and is mapped again.

use crate::{CudaDevice, card::Card, driver::failed};
use brigade_device::{Buffer, DataType, Error, MemoryType, Result};
use cudarc::driver::sys;
use std::{mem::MaybeUninit, sync::Arc};

/// How memory is exported.
#[cfg(unix)]
const POSIX: sys::CUmemAllocationHandleType =
    sys::CUmemAllocationHandleType::CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR;

/// Physical memory of one GPU, of this process or of another.
#[derive(Debug)]
pub struct Pages {
    card: Arc<Card>,
    handle: sys::CUmemGenericAllocationHandle,
    bytes: usize,
}

/// The number of the handle type [`POSIX`].
const DESCRIPTOR: u32 = 1;

/// Type, handle type, kind of place and its number: how the driver's structs about physical memory begin.
fn place(ordinal: usize, handle_type: u32) -> [i32; 4] {
    let pinned = sys::CUmemAllocationType::CU_MEM_ALLOCATION_TYPE_PINNED as i32;
    let on_device = sys::CUmemLocationType::CU_MEM_LOCATION_TYPE_DEVICE as i32;
    [pinned, handle_type as i32, on_device, ordinal as i32]
}

/// Physical memory of GPU `ordinal` that can be exported as a handle of this type, as the driver numbers them.
pub(crate) fn properties(ordinal: usize, handle_type: u32) -> sys::CUmemAllocationProp {
    let mut properties = MaybeUninit::<sys::CUmemAllocationProp>::zeroed();
    // SAFETY: the struct begins with these four integers in every version of the driver's interface, and zero is a value of
    // all its other fields. Written so because its bindings name the last one differently from version to version.
    unsafe {
        properties
            .as_mut_ptr()
            .cast::<[i32; 4]>()
            .write(place(ordinal, handle_type));
        properties.assume_init()
    }
}

fn exportable(card: &Card) -> sys::CUmemAllocationProp {
    properties(card.context.ordinal(), DESCRIPTOR)
}

impl Pages {
    /// What sizes are multiples of on this GPU, in bytes: 2 MiB where we looked.
    ///
    /// # Errors
    /// [`Error::Backend`].
    pub fn granularity(device: &CudaDevice) -> Result<usize> {
        device.card.bind()?;
        let mut bytes = 0;
        let least = sys::CUmemAllocationGranularity_flags::CU_MEM_ALLOC_GRANULARITY_MINIMUM;
        // SAFETY: both pointers are to live values.
        unsafe {
            sys::cuMemGetAllocationGranularity(&raw mut bytes, &exportable(&device.card), least)
        }
        .result()
        .map_err(failed("cuMemGetAllocationGranularity"))?;
        Ok(bytes)
    }

    /// New memory of at least `bytes` bytes, with unspecified content, which can be exported.
    ///
    /// # Errors
    /// [`Error::Invalid`] for 0 bytes; [`Error::Backend`] when memory is out.
    pub fn new(device: &CudaDevice, bytes: usize) -> Result<Arc<Self>> {
        if bytes == 0 {
            return Err(Error::invalid("bytes", 0, "at least 1"));
        }
        let bytes = bytes.next_multiple_of(Self::granularity(device)?);
        let mut handle = 0;
        // SAFETY: both pointers are to live values.
        unsafe { sys::cuMemCreate(&raw mut handle, bytes, &exportable(&device.card), 0) }
            .result()
            .map_err(failed("cuMemCreate"))?;
        Ok(Arc::new(Self {
            card: Arc::clone(&device.card),
            handle,
            bytes,
        }))
    }

    /// Size in bytes, rounded up to the granularity.
    pub fn bytes(&self) -> usize {
        self.bytes
    }

    /// A descriptor that stands for this memory, for another process.
    ///
    /// # Errors
    /// [`Error::Backend`].
    #[cfg(unix)]
    pub fn export(&self) -> Result<std::os::fd::OwnedFd> {
        use std::os::fd::{FromRawFd, OwnedFd};
        self.card.bind()?;
        let mut fd = -1i32;
        let into = std::ptr::from_mut(&mut fd).cast();
        // SAFETY: for this type of handle the driver writes a descriptor, an int.
        unsafe { sys::cuMemExportToShareableHandle(into, self.handle, POSIX, 0) }
            .result()
            .map_err(failed("cuMemExportToShareableHandle"))?;
        // SAFETY: the driver made the descriptor for us, and nobody else has it.
        Ok(unsafe { OwnedFd::from_raw_fd(fd) })
    }

    /// The memory behind a descriptor, `bytes` of it as its owner says; `device` is the GPU that will reach it.
    ///
    /// # Errors
    /// [`Error::Backend`] if it stands for no such memory.
    #[cfg(unix)]
    pub fn import(
        device: &CudaDevice,
        fd: std::os::fd::BorrowedFd<'_>,
        bytes: usize,
    ) -> Result<Arc<Self>> {
        use std::os::fd::AsRawFd;
        device.card.bind()?;
        let mut handle = 0;
        // The driver wants the descriptor's value in place of a pointer.
        let value = std::ptr::without_provenance_mut::<std::ffi::c_void>(fd.as_raw_fd() as usize);
        // SAFETY: the descriptor is open, and the driver makes its own reference.
        unsafe { sys::cuMemImportFromShareableHandle(&raw mut handle, value, POSIX) }
            .result()
            .map_err(failed("cuMemImportFromShareableHandle"))?;
        Ok(Arc::new(Self {
            card: Arc::clone(&device.card),
            handle,
            bytes,
        }))
    }
}

impl Drop for Pages {
    fn drop(&mut self) {
        if self.card.bind().is_ok() {
            // SAFETY: created or imported once, released once; mappings keep the memory itself.
            let _ = unsafe { sys::cuMemRelease(self.handle) };
        }
    }
}

/// Parts of equal size, mapped one after the other.
#[derive(Debug)]
pub struct Symmetric {
    card: Arc<Card>,
    base: u64,
    stride: usize,
    mapped: usize,
    parts: Vec<Arc<Pages>>,
}

impl Symmetric {
    /// Maps `parts`, in rank order, for all `devices` to read and write: one process's view of the memory of all ranks.
    ///
    /// # Errors
    /// [`Error::Invalid`] if there are no parts or devices, or parts of different sizes; [`Error::Backend`], for instance
    /// where a GPU cannot reach another's memory.
    pub fn map(parts: &[Arc<Pages>], devices: &[&CudaDevice]) -> Result<Arc<Self>> {
        let (Some(first), Some(device)) = (parts.first(), devices.first()) else {
            let got = format!("{} parts and {} devices", parts.len(), devices.len());
            return Err(Error::invalid("parts", got, "at least one of each"));
        };
        if let Some(other) = parts.iter().find(|p| p.bytes != first.bytes) {
            let want = format!("{}, as all others", first.bytes);
            return Err(Error::invalid("parts.bytes", other.bytes, want));
        }
        device.card.bind()?;
        let (stride, total) = (first.bytes, first.bytes * parts.len());
        let mut base = 0;
        // SAFETY: the pointer is to a live value; the driver chooses the addresses.
        unsafe { sys::cuMemAddressReserve(&raw mut base, total, 0, 0, 0) }
            .result()
            .map_err(failed("cuMemAddressReserve"))?;
        // From here on, dropping it undoes what was done.
        let mut symmetric = Self {
            card: Arc::clone(&device.card),
            base,
            stride,
            mapped: 0,
            parts: parts.to_vec(),
        };
        for (i, part) in parts.iter().enumerate() {
            let at = base + (i * stride) as u64;
            // SAFETY: reserved above, and not mapped yet.
            unsafe { sys::cuMemMap(at, stride, 0, part.handle, 0) }
                .result()
                .map_err(failed("cuMemMap"))?;
            symmetric.mapped += 1;
        }
        let access: Vec<_> = devices.iter().map(|d| access(&d.card)).collect();
        // SAFETY: all of the range is mapped, and the list is this long.
        unsafe { sys::cuMemSetAccess(base, total, access.as_ptr(), access.len()) }
            .result()
            .map_err(failed("cuMemSetAccess"))?;
        Ok(Arc::new(symmetric))
    }

    /// Address of part 0.
    pub fn base(&self) -> u64 {
        self.base
    }

    /// Bytes from one part to the next.
    pub fn stride(&self) -> usize {
        self.stride
    }

    /// How many parts there are.
    pub fn parts(&self) -> usize {
        self.parts.len()
    }

    /// Elements of part `part` from byte `offset` on, without a copy.
    ///
    /// # Errors
    /// [`Error::Invalid`] if they do not lie inside, or are not aligned.
    ///
    /// # Safety
    /// As [`Buffer::adopt`]: while an operation that was given this buffer runs, nobody else, peers included, may write to it,
    /// nor read what it writes.
    pub unsafe fn buffer(
        self: &Arc<Self>,
        part: usize,
        offset: usize,
        dtype: DataType,
        shape: &[usize],
    ) -> Result<Buffer> {
        let count = brigade_device::Shape::new(shape)?.len();
        let end = count
            .checked_mul(dtype.bytes())
            .and_then(|b| b.checked_add(offset));
        if part >= self.parts() || end.is_none_or(|end| end > self.stride) {
            return Err(Error::invalid(
                "shape",
                format!("{shape:?} of {dtype} at byte {offset} of part {part}"),
                format!("{} parts of {} bytes", self.parts(), self.stride),
            ));
        }
        let address = self.base + (part * self.stride + offset) as u64;
        let owner = Arc::clone(self);
        // SAFETY: inside the mapping, which `owner` keeps; the rest is the caller's promise.
        unsafe { Buffer::adopt(address, MemoryType::Device, dtype, shape, owner) }
    }
}

/// Reading and writing, for one GPU.
fn access(card: &Card) -> sys::CUmemAccessDesc {
    let read_write = sys::CUmemAccess_flags::CU_MEM_ACCESS_FLAGS_PROT_READWRITE as i32;
    let [_, _, kind, number] = place(card.context.ordinal(), DESCRIPTOR);
    let mut access = MaybeUninit::<sys::CUmemAccessDesc>::zeroed();
    // SAFETY: the struct is these three integers in every version of the driver's interface.
    unsafe {
        access
            .as_mut_ptr()
            .cast::<[i32; 3]>()
            .write([kind, number, read_write]);
        access.assume_init()
    }
}

impl Drop for Symmetric {
    fn drop(&mut self) {
        if self.card.bind().is_err() {
            return;
        }
        for i in 0..self.mapped {
            let at = self.base + (i * self.stride) as u64;
            // SAFETY: mapped above, unmapped once; buffers of it keep `self` until the work that uses them is done.
            let _ = unsafe { sys::cuMemUnmap(at, self.stride) };
        }
        // SAFETY: reserved above, with this size, freed once.
        let _ = unsafe { sys::cuMemAddressFree(self.base, self.stride * self.parts.len()) };
    }
}
