//! Memory, and moving what lies in it: allocation, copies, fills, conversions, transposes.

use crate::{
    CudaDevice,
    driver::failed,
    kernels::blocks_for,
    lane::Lane,
    mark::CudaMark,
    memory::{DeviceMemory, HostMemory, Pinned, Place, check_reach, overlap},
    types,
};
use brigade_device::moves::{same_bytes, same_shape, same_type, transposed};
use brigade_device::{
    Allocate, Buffer, DataType, Mark, MemoryStatus, MemoryType, Reason, Result, Shape, Storage,
    Stream, View, ViewMut,
};
use brigade_kernels::{ConvertParams, TransposeParams};
use cudarc::driver::{result, sys};
use std::{
    ffi::c_void,
    ptr,
    sync::{Arc, atomic::Ordering},
    time::Duration,
};

/// Longest that a copy to or from the caller's memory waits for the work before it. Communicators give up much earlier.
const PATIENCE: Duration = Duration::from_secs(600);

/// Side of a tile in `kernels/transpose.cu`.
const TILE: usize = 32;

/// Whether the caller's memory is page-locked: the driver then reads it after its call has returned.
fn is_pinned(address: u64) -> bool {
    let mut kind = 0u32;
    let mut attribute = sys::CUpointer_attribute_enum::CU_POINTER_ATTRIBUTE_MEMORY_TYPE;
    let mut into = ptr::from_mut(&mut kind).cast::<c_void>();
    // SAFETY: one attribute, which is a u32; it stays 0 for an address that the driver does not know.
    let asked =
        unsafe { sys::cuPointerGetAttributes(1, &raw mut attribute, &raw mut into, address) };
    asked.result().is_ok() && kind != 0
}

/// The context of memory from a device's pool, which another GPU reaches by a copy between peers alone.
fn context_of(buffer: &Buffer) -> Option<sys::CUcontext> {
    match Place::of(buffer.storage()) {
        Ok(Place::Device(memory)) => Some(memory.context()),
        _ => None,
    }
}

impl CudaDevice {
    /// A buffer in device memory with unspecified content.
    pub(crate) fn scratch(
        &self,
        lane: &Arc<Lane>,
        dtype: DataType,
        shape: &[usize],
    ) -> Result<Buffer> {
        let shape = Shape::new(shape)?;
        let bytes = shape.len() * dtype.bytes();
        let memory = if lane.capturing() {
            DeviceMemory::outside_of_streams(&self.card, bytes)?
        } else {
            DeviceMemory::on(lane, bytes)?
        };
        Buffer::new(Arc::new(memory), dtype, shape)
    }

    /// Copies bytes between buffers of the same size that do not overlap.
    pub(crate) fn copy_bytes(&self, lane: &Arc<Lane>, to: &Buffer, from: &Buffer) -> Result<()> {
        if to.bytes() == 0 {
            return Ok(());
        }
        for buffer in [to, from] {
            if Place::of(buffer.storage())?.is_pageable() {
                lane.refuse_capture("a copy of ordinary host memory")?;
            }
        }
        let contexts = [to, from].map(context_of);
        lane.run(&[to, from], |stream| {
            let (into, out_of, bytes) = (to.address(), from.address(), to.bytes());
            // SAFETY: both are at least this long, and kept until the copy is done; ordinary host memory is read or written
            // before the call returns.
            unsafe {
                match contexts {
                    [Some(to), Some(from)] if to != from => {
                        sys::cuMemcpyPeerAsync(into, to, out_of, from, bytes, stream)
                    }
                    _ => sys::cuMemcpyAsync(into, out_of, bytes, stream),
                }
            }
            .result()
            .map_err(failed("cuMemcpyAsync"))
        })
    }

    /// Sets every byte.
    pub(crate) fn fill_bytes(&self, lane: &Arc<Lane>, to: &Buffer, byte: u8) -> Result<()> {
        if to.bytes() == 0 {
            return Ok(());
        }
        lane.run(&[to], |stream| {
            // SAFETY: the buffer is this long, and kept until the fill is done.
            unsafe { result::memset_d8_async(to.address(), byte, to.bytes(), stream) }
                .map_err(failed("cuMemsetD8Async"))
        })
    }

    /// Converts numbers of types that `types::code` knows.
    pub(crate) fn convert_numbers(
        &self,
        lane: &Arc<Lane>,
        to: &Buffer,
        from: &Buffer,
    ) -> Result<()> {
        let (Some(out_type), Some(from_type)) = (number(to.dtype()), number(from.dtype())) else {
            let bad = if number(to.dtype()).is_some() {
                from
            } else {
                to
            };
            return Err(Reason::new(
                "conversion",
                format!("the CUDA device does not convert {}", bad.dtype()),
                "use an integer or f16, bf16, f32, f64",
            )
            .into());
        };
        if to.bytes() == 0 {
            return Ok(());
        }
        let parameters = ConvertParams {
            out: to.address(),
            from: from.address(),
            elements: to.shape().len() as u64,
            out_type,
            from_type,
        };
        let blocks = blocks_for(to.shape().len());
        // SAFETY: both buffers hold as many elements of their types, within reach.
        unsafe {
            self.opened.kernels.launch(
                &self.opened.kernels.convert,
                lane,
                &[to, from],
                blocks,
                parameters,
            )
        }
    }
}

/// The number of a type that converts.
fn number(dtype: DataType) -> Option<u32> {
    types::code(dtype).filter(|_| dtype != DataType::F8E4M3)
}

impl Allocate for CudaDevice {
    fn allocate(
        &self,
        on: &Stream,
        memory: MemoryType,
        dtype: DataType,
        shape: &[usize],
    ) -> Result<Buffer> {
        let lane = self.lane(on)?;
        let shape = Shape::new(shape)?;
        let bytes = shape.len() * dtype.bytes();
        let storage: Arc<dyn Storage> = match memory {
            MemoryType::Host => Arc::new(HostMemory::new(&self.card, bytes)),
            MemoryType::HostPinned => Arc::new(Pinned::new(&self.card, bytes)?),
            // What a capture allocates is there, and zero, before the graph first runs.
            MemoryType::Device if lane.capturing() => {
                Arc::new(DeviceMemory::outside_of_streams(&self.card, bytes)?)
            }
            MemoryType::Device => {
                let buffer = self.scratch(lane, dtype, shape.dims())?;
                self.fill_bytes(lane, &buffer, 0)?;
                return Ok(buffer);
            }
        };
        Buffer::new(storage, dtype, shape)
    }

    fn copy(&self, on: &Stream, to: ViewMut<'_>, from: View<'_>) -> Result<()> {
        to.check_writable()?;
        same_shape(to.as_view(), from)?;
        same_type(to.as_view(), from)?;
        let lane = self.lane(on)?;
        let (to, from) = (to.as_view().retain(), from.retain());
        if !overlap(&to, &from) {
            return self.copy_bytes(lane, &to, &from);
        }
        let between = self.scratch(lane, from.dtype(), from.shape().dims())?;
        self.copy_bytes(lane, &between, &from)?;
        self.copy_bytes(lane, &to, &between)
    }

    fn write(&self, on: &Stream, to: ViewMut<'_>, bytes: &[u8]) -> Result<()> {
        to.check_writable()?;
        let to = to.as_view().retain();
        same_bytes(&to, bytes.len())?;
        let lane = self.lane(on)?;
        lane.refuse_capture("a write from the caller's memory")?;
        if bytes.is_empty() {
            return Ok(());
        }
        let from = bytes.as_ptr() as u64;
        lane.run(&[&to], |stream| {
            // SAFETY: both are this long; pageable memory has been read when the call returns, and page-locked memory is
            // waited for below.
            unsafe { sys::cuMemcpyAsync(to.address(), from, bytes.len(), stream) }
                .result()
                .map_err(failed("cuMemcpyAsync"))
        })?;
        if is_pinned(from) {
            CudaMark::record(&self.card, lane.stream)?.sync(PATIENCE)?;
        }
        Ok(())
    }

    fn read(&self, on: &Stream, from: View<'_>, bytes: &mut [u8]) -> Result<()> {
        let from = from.retain();
        same_bytes(&from, bytes.len())?;
        let lane = self.lane(on)?;
        lane.refuse_capture("a read into the caller's memory")?;
        Place::of(from.storage())?;
        // First a wait that has an end: the copy itself would wait without one.
        CudaMark::record(&self.card, lane.stream)?.sync(PATIENCE)?;
        if bytes.is_empty() {
            return Ok(());
        }
        let to = bytes.as_mut_ptr() as u64;
        // SAFETY: both are this long and outlive the wait below; nothing else uses the caller's bytes meanwhile.
        unsafe { sys::cuMemcpyAsync(to, from.address(), bytes.len(), lane.stream) }
            .result()
            .map_err(failed("cuMemcpyAsync"))?;
        CudaMark::record(&self.card, lane.stream)?.sync(PATIENCE)
    }

    fn fill(&self, on: &Stream, to: ViewMut<'_>, byte: u8) -> Result<()> {
        to.check_writable()?;
        let to = to.as_view().retain();
        let lane = self.lane(on)?;
        check_reach(&self.card, "to.memory", &to)?;
        self.fill_bytes(lane, &to, byte)
    }

    fn convert(&self, on: &Stream, to: ViewMut<'_>, from: View<'_>) -> Result<()> {
        to.check_writable()?;
        same_shape(to.as_view(), from)?;
        if to.dtype() == from.dtype() {
            return self.copy(on, to, from);
        }
        let lane = self.lane(on)?;
        let (to, from) = (to.as_view().retain(), from.retain());
        check_reach(&self.card, "to.memory", &to)?;
        check_reach(&self.card, "from.memory", &from)?;
        if !overlap(&to, &from) {
            return self.convert_numbers(lane, &to, &from);
        }
        let between = self.scratch(lane, from.dtype(), from.shape().dims())?;
        self.copy_bytes(lane, &between, &from)?;
        self.convert_numbers(lane, &to, &between)
    }

    fn transpose(&self, on: &Stream, to: ViewMut<'_>, from: View<'_>) -> Result<()> {
        to.check_writable()?;
        let (rows, columns) = transposed(to.as_view(), from)?;
        let lane = self.lane(on)?;
        let (to, mut from) = (to.as_view().retain(), from.retain());
        check_reach(&self.card, "to.memory", &to)?;
        check_reach(&self.card, "from.memory", &from)?;
        if to.bytes() == 0 {
            return Ok(());
        }
        if overlap(&to, &from) {
            let copy = self.scratch(lane, from.dtype(), from.shape().dims())?;
            self.copy_bytes(lane, &copy, &from)?;
            from = copy;
        }
        let parameters = TransposeParams {
            out: to.address(),
            from: from.address(),
            rows: rows as u64,
            columns: columns as u64,
            element_bytes: from.dtype().bytes() as u32,
            reserved: 0,
        };
        let tiles = rows.div_ceil(TILE) * columns.div_ceil(TILE);
        // SAFETY: both buffers hold `rows * columns` elements of this size, within reach, and do not overlap.
        unsafe {
            self.opened.kernels.launch(
                &self.opened.kernels.transpose,
                lane,
                &[&to, &from],
                tiles,
                parameters,
            )
        }
    }

    fn memory_status(&self) -> Result<MemoryStatus> {
        self.card.bind()?;
        let (free, total) = result::mem_get_info().map_err(failed("cuMemGetInfo"))?;
        Ok(MemoryStatus {
            total_bytes: total as u64,
            free_bytes: free as u64,
            held_bytes: self.card.held.load(Ordering::Relaxed),
        })
    }
}
