//! The same as `memory.rs` does, for tensors on a GPU.
//!
//! Brigade opens the GPU by its primary context, as candle does, and works on the stream of candle's device: so whatever either
//! enqueues comes behind what the other has enqueued, and memory that candle frees is freed behind Brigade's work. Where candle
//! tracks uses by events (tensors that several streams use), its own bookkeeping is asked for every address, before Brigade's work is
//! enqueued and behind it.

use crate::{
    error::{OrCandle, invalid},
    memory::{contiguous, data_type},
};
use brigade::{Access, Buffer, Loan, MemoryType, Stream, View, ViewMut, cuda::CudaDevice as Gpu};
use candle_core::{
    CudaDevice, CudaStorage, DType, Layout, Result,
    backend::BackendStorage,
    cuda_backend::{
        CudaStorageSlice as Slice,
        cudarc::driver::{CudaSlice, CudaStream, DevicePtr, DevicePtrMut, DeviceRepr},
    },
};
use half::{bf16, f16};
use std::{any::Any, ffi::c_void, sync::Arc};

/// Opens Brigade's device on the GPU of candle's.
pub(crate) fn open(place: &CudaDevice) -> Result<Arc<Gpu>> {
    let device = Gpu::new(ordinal(place)).map_err(brigade::Error::from);
    device.or_candle()
}

fn ordinal(place: &CudaDevice) -> usize {
    place.cuda_stream().context().ordinal()
}

/// The stream of candle's device, as one of Brigade's.
pub(crate) fn stream(device: &Gpu, place: &CudaDevice) -> Result<Stream> {
    let opened = brigade::Device::info(device).ordinal as usize;
    if opened != ordinal(place) {
        let want = format!("GPU {}, where the tensors are", ordinal(place));
        return Err(invalid("device", format!("GPU {opened}"), want));
    }
    let theirs = place.cuda_stream();
    let raw: *mut c_void = theirs.cu_stream().cast();
    // SAFETY: a stream of this GPU's primary context (cudarc makes no other contexts), which `theirs` keeps.
    unsafe { device.adopt_stream(raw, Arc::new(Kept(theirs))) }.or_candle()
}

/// Keeps candle's stream alive.
struct Kept(#[expect(dead_code, reason = "held for its Drop")] Arc<CudaStream>);

/// An address for no elements: candle has none for them, and nobody reads it.
const NOWHERE: u64 = 256;

macro_rules! each {
    ($slice:expr, $values:ident => $work:expr) => {
        match $slice {
            Slice::U8($values) => Some($work),
            Slice::U32($values) => Some($work),
            Slice::I16($values) => Some($work),
            Slice::I32($values) => Some($work),
            Slice::I64($values) => Some($work),
            Slice::BF16($values) => Some($work),
            Slice::F16($values) => Some($work),
            Slice::F32($values) => Some($work),
            Slice::F64($values) => Some($work),
            Slice::F8E4M3($values) => Some($work),
            _ => None,
        }
    };
}

/// Address of element `from` of a slice of at least `to`, for reading.
fn read_address<T: DeviceRepr>(
    values: &CudaSlice<T>,
    (from, to): (usize, usize),
    on: &CudaStream,
) -> Option<u64> {
    if from == to {
        return Some(NOWHERE);
    }
    let part = values.try_slice(from..to)?;
    // candle's bookkeeping: the stream now waits for writes by others, and once the guard is dropped, writes by others wait for
    // the stream. What Brigade reads stands in the same stream; see `behind` for uses after this.
    let (address, _guard) = part.device_ptr(on);
    Some(address)
}

/// Lends what `layout` covers of a storage for reading.
///
/// # Safety
/// As [`Buffer::lend`].
pub(crate) unsafe fn lend(
    storage: &CudaStorage,
    layout: &Layout,
    owner: Arc<dyn Any + Send + Sync>,
) -> Result<Loan> {
    let range = contiguous(layout)?;
    let on = storage.device().cuda_stream();
    let address = each!(&storage.slice, values => read_address(values, range, &on));
    let address = address
        .flatten()
        .ok_or_else(|| invalid("layout", format!("{layout:?}"), "a part of the storage"))?;
    let dtype = data_type(storage.dtype())?;
    // SAFETY: so many elements of the type lie there, as the slice shows; the rest is the caller's promise.
    unsafe {
        Buffer::lend(
            address,
            MemoryType::Device,
            dtype,
            layout.dims(),
            Access::Read,
            owner,
        )
    }
    .or_candle()
}

/// Tells candle's bookkeeping that work which reads the storage was enqueued.
pub(crate) fn behind(storage: &CudaStorage) {
    let on = storage.device().cuda_stream();
    // Dropping the guard records the event.
    let _told = each!(&storage.slice, values => drop(values.device_ptr(&on)));
}

/// Lends what `layout` covers of a storage for reading, to `work`, which is on the stream of the storage's device: the caller has
/// checked that.
pub(crate) fn borrowed<R>(
    storage: &CudaStorage,
    layout: &Layout,
    work: impl FnOnce(View<'_>) -> Result<R>,
) -> Result<R> {
    // SAFETY: candle has lent the storage for this call; what it enqueues there later, freeing included, comes behind. Nothing here
    // keeps it for a graph: whoever captures the call does, as candle's own operations ask (see `AllReduce`).
    let loan = unsafe { lend(storage, layout, Arc::new(()))? };
    let result = work(loan.view());
    behind(storage);
    result
}

/// Lends so many elements of a slice for writing, to `work`.
fn write_into<T: DeviceRepr, R>(
    values: &mut CudaSlice<T>,
    (from, to): (usize, usize),
    (dtype, dims): (DType, &[usize]),
    (on, owner): (&CudaStream, Arc<dyn Any + Send + Sync>),
    work: impl FnOnce(ViewMut<'_>) -> brigade::Result<R>,
) -> Result<R> {
    let outside = || invalid("layout", format!("{from}..{to}"), "a part of the storage");
    let mut part = values.try_slice_mut(from..to).ok_or_else(outside)?;
    // The guard records the event of the write when it is dropped, behind the work.
    let (address, _guard) = part.device_ptr_mut(on);
    let address = if from == to { NOWHERE } else { address };
    // SAFETY: so many elements lie there, borrowed from the caller for longer than the loan, which ends in this function; what
    // anybody does with them later on this stream, freeing included, comes behind the work. For a graph the owner keeps them, if
    // there is one: memory that is allocated in a capture is the graph's own, and for other memory see `borrowed`.
    let mut loan = unsafe {
        Buffer::lend(
            address,
            MemoryType::Device,
            data_type(dtype)?,
            dims,
            Access::Write,
            owner,
        )
    }
    .or_candle()?;
    work(loan.view_mut()).or_candle()
}

/// Lends what `layout` covers of a storage for reading and writing, to `work`, which is on the stream of the storage's device: the
/// caller has checked that. The owner is kept by a graph that captures the work.
pub(crate) fn change<R>(
    storage: &mut CudaStorage,
    layout: &Layout,
    owner: Arc<dyn Any + Send + Sync>,
    work: impl FnOnce(ViewMut<'_>) -> brigade::Result<R>,
) -> Result<R> {
    let range = contiguous(layout)?;
    let dtype = storage.dtype();
    let on = storage.device().cuda_stream();
    let to = (dtype, layout.dims());
    let result =
        each!(&mut storage.slice, values => write_into(values, range, to, (&on, owner), work));
    result.unwrap_or_else(|| Err(invalid("dtype", format!("{dtype:?}"), "f32, f16 or bf16")))
}

/// New values on the GPU, unspecified until `write` has written them.
pub(crate) fn make<R>(
    place: &CudaDevice,
    dtype: DType,
    dims: &[usize],
    write: impl FnOnce(ViewMut<'_>) -> brigade::Result<R>,
) -> Result<(CudaStorage, R)> {
    let len = brigade::Shape::new(dims).or_candle()?.len();
    let on = place.cuda_stream();
    macro_rules! make {
        ($($kind:ident $t:ty),*) => {
            match dtype {
                $(DType::$kind => {
                    // SAFETY: `write` writes all of it before anybody reads, in stream order; if it fails, the memory is dropped.
                    let mut values = unsafe { place.alloc::<$t>(len)? };
                    let nobody = Arc::new(());
                    let result = write_into(&mut values, (0, len), (dtype, dims), (&on, nobody), write)?;
                    let slice = Slice::$kind(values);
                    Ok((CudaStorage { slice, device: place.clone() }, result))
                })*
                other => Err(invalid("dtype", format!("{other:?}"), "integers, or f64, f32, f16, bf16")),
            }
        };
    }
    make!(U8 u8, U32 u32, I16 i16, I32 i32, I64 i64, BF16 bf16, F16 f16, F32 f32, F64 f64)
}
