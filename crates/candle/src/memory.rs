//! candle's memory as Brigade's views, without a copy. All `unsafe` of this crate is here and in `cuda.rs`.
//!
//! candle keeps a tensor's values behind a lock that every tensor of the same storage shares, and in-place operations take that
//! lock for writing. So an input is lent under a read guard, which is held for as long as the loan is out; a result is lent for
//! writing before any tensor has it. Loans end before guards are given up and before results become tensors (see
//! [`brigade::Loan`]): who kept a view has nothing then.

use crate::error::{OrCandle, invalid};
use brigade::{Access, Buffer, DataType, Element, Loan, MemoryType, View, ViewMut};
use bytemuck::allocation::try_zeroed_vec;
use candle_core::{
    CpuStorage, DType, Device, Layout, Result, Storage, StorageRef, Tensor, WithDType,
};
use half::{bf16, f16};
use std::{any::Any, sync::Arc};

/// candle's name of an element's type, as Brigade's.
///
/// # Errors
/// [`brigade::Error::Invalid`] for types that are smaller than a byte.
pub fn data_type(dtype: DType) -> Result<DataType> {
    Ok(match dtype {
        DType::U8 => DataType::U8,
        DType::U32 => DataType::U32,
        DType::I16 => DataType::I16,
        DType::I32 => DataType::I32,
        DType::I64 => DataType::I64,
        DType::BF16 => DataType::BF16,
        DType::F16 => DataType::F16,
        DType::F32 => DataType::F32,
        DType::F64 => DataType::F64,
        DType::F8E4M3 => DataType::F8E4M3,
        other => {
            let want = "a type whose elements have a whole number of bytes";
            return Err(invalid("dtype", format!("{other:?}"), want));
        }
    })
}

/// The other way round.
///
/// # Errors
/// [`brigade::Error::Invalid`] for types that candle has not.
pub fn dtype_of(data_type: DataType) -> Result<DType> {
    Ok(match data_type {
        DataType::U8 => DType::U8,
        DataType::U32 => DType::U32,
        DataType::I16 => DType::I16,
        DataType::I32 => DType::I32,
        DataType::I64 => DType::I64,
        DataType::BF16 => DType::BF16,
        DataType::F16 => DType::F16,
        DataType::F32 => DType::F32,
        DataType::F64 => DType::F64,
        DataType::F8E4M3 => DType::F8E4M3,
        other => return Err(invalid("dtype", other, "a type of candle's")),
    })
}

/// A tensor's memory, lent to Brigade until this is dropped. Made by [`Parallel::lend`](crate::Parallel::lend).
///
/// The tensor cannot be written meanwhile: candle's in-place operations on it wait.
#[derive(Debug)]
pub struct Lent<'t> {
    // The order matters: the loan ends before the guard is given up.
    loan: Loan,
    #[cfg_attr(not(feature = "cuda"), expect(dead_code, reason = "held for its Drop"))]
    guard: StorageRef<'t>,
}

impl<'t> Lent<'t> {
    /// Lends a contiguous tensor as it lies.
    pub(crate) fn new(tensor: &'t Tensor) -> Result<Self> {
        let (guard, layout) = tensor.storage_and_layout();
        // If the guard is never dropped, the lock is held for ever; the owner keeps the memory for as long.
        let owner = Arc::new(tensor.clone());
        let loan = match &*guard {
            // SAFETY: the guard, which outlives the loan, keeps everybody from writing; the owner keeps the memory.
            Storage::Cpu(storage) => unsafe { lend_cpu(storage, layout, owner)? },
            #[cfg(feature = "cuda")]
            // SAFETY: as above; and what candle enqueues later on this storage comes behind Brigade's work, since both use
            // the stream of the tensor's device.
            Storage::Cuda(storage) => unsafe { crate::cuda::lend(storage, layout, owner)? },
            other => return Err(no_device(&other.device())),
        };
        Ok(Self { loan, guard })
    }

    /// The tensor's elements.
    pub fn view(&self) -> View<'_> {
        self.loan.view()
    }
}

#[cfg(feature = "cuda")]
impl Drop for Lent<'_> {
    /// By now work that reads the tensor was enqueued.
    fn drop(&mut self) {
        if let Storage::Cuda(storage) = &*self.guard {
            crate::cuda::behind(storage);
        }
    }
}

pub(crate) fn no_device(device: &Device) -> candle_core::Error {
    let got = format!("{:?}", device.location());
    invalid("device", got, "the CPU, or a GPU with the feature cuda")
}

/// Elements `from..to` that a contiguous layout covers.
pub(crate) fn contiguous(layout: &Layout) -> Result<(usize, usize)> {
    layout
        .contiguous_offsets()
        .ok_or_else(|| invalid("layout", format!("{layout:?}"), "a contiguous tensor"))
}

/// Lends what `layout` covers of a storage for reading.
///
/// # Safety
/// As [`Buffer::lend`]: until the loan is dropped, nobody writes to the storage. If the loan is never dropped, the owner keeps
/// the storage.
pub(crate) unsafe fn lend_cpu(
    storage: &CpuStorage,
    layout: &Layout,
    owner: Arc<dyn Any + Send + Sync>,
) -> Result<Loan> {
    let (from, to) = contiguous(layout)?;
    macro_rules! address {
        ($($kind:ident)*) => {
            match storage {
                $(CpuStorage::$kind(values) => values.get(from..to).map(|v| v.as_ptr() as u64),)*
                _ => None,
            }
        };
    }
    let address = address!(U8 U32 I16 I32 I64 BF16 F16 F32 F64 F8E4M3);
    let dtype = data_type(candle_core::backend::BackendStorage::dtype(storage))?;
    let address =
        address.ok_or_else(|| invalid("layout", format!("{layout:?}"), "a part of the storage"))?;
    // SAFETY: so many elements of the type lie there, as the slice shows; the rest is the caller's promise.
    unsafe {
        Buffer::lend(
            address,
            MemoryType::Host,
            dtype,
            layout.dims(),
            Access::Read,
            owner,
        )
    }
    .or_candle()
}

/// Lends what `layout` covers of a storage for reading and writing, to `work`.
pub(crate) fn change_cpu<R>(
    storage: &mut CpuStorage,
    layout: &Layout,
    work: impl FnOnce(ViewMut<'_>) -> brigade::Result<R>,
) -> Result<R> {
    let (from, to) = contiguous(layout)?;
    let outside = || invalid("layout", format!("{layout:?}"), "a part of the storage");
    macro_rules! with {
        ($($kind:ident)*) => {
            match storage {
                $(CpuStorage::$kind(values) => {
                    write_into(values.get_mut(from..to).ok_or_else(outside)?, layout.dims(), work)
                })*
                other => {
                    let dtype = candle_core::backend::BackendStorage::dtype(other);
                    Err(invalid("dtype", format!("{dtype:?}"), "f32, f16 or bf16"))
                }
            }
        };
    }
    with!(U8 U32 I16 I32 I64 BF16 F16 F32 F64)
}

/// Lends a slice for writing, to `work`.
fn write_into<T: Element, R>(
    values: &mut [T],
    dims: &[usize],
    work: impl FnOnce(ViewMut<'_>) -> brigade::Result<R>,
) -> Result<R> {
    let address = values.as_mut_ptr() as u64;
    if values.len() != dims.iter().product::<usize>() {
        return Err(invalid("shape", format!("{dims:?}"), values.len()));
    }
    // SAFETY: so many elements lie there, borrowed from the caller for longer than the loan, which ends in this function, also
    // if `work` panics; nobody else has them meanwhile.
    let mut loan = unsafe {
        Buffer::lend(
            address,
            MemoryType::Host,
            T::DTYPE,
            dims,
            Access::Write,
            Arc::new(()),
        )
    }
    .or_candle()?;
    work(loan.view_mut()).or_candle()
}

/// New values in the host's memory, zero until `write` has written them.
pub(crate) fn make_cpu<R>(
    dtype: DType,
    dims: &[usize],
    write: impl FnOnce(ViewMut<'_>) -> brigade::Result<R>,
) -> Result<(CpuStorage, R)> {
    macro_rules! make {
        ($($kind:ident $t:ty),*) => {
            match dtype {
                $(DType::$kind => {
                    let mut values = new_values::<$t>(dims)?;
                    let result = write_into(&mut values, dims, write)?;
                    Ok((CpuStorage::$kind(values), result))
                })*
                other => Err(invalid("dtype", format!("{other:?}"), "integers, or f64, f32, f16, bf16")),
            }
        };
    }
    make!(U8 u8, U32 u32, I16 i16, I32 i32, I64 i64, BF16 bf16, F16 f16, F32 f32, F64 f64)
}

fn new_values<T: Element + WithDType>(dims: &[usize]) -> Result<Vec<T>> {
    let shape = brigade::Shape::new(dims).or_candle()?;
    try_zeroed_vec(shape.len()).map_err(|()| {
        crate::to_candle(brigade::Error::Backend {
            call: "allocate",
            code: i64::try_from(shape.len()).unwrap_or(i64::MAX),
            source: None,
        })
    })
}

/// Lends what `layout` covers of a storage for reading, to `work`.
pub(crate) fn borrowed_cpu<R>(
    storage: &CpuStorage,
    layout: &Layout,
    work: impl FnOnce(View<'_>) -> Result<R>,
) -> Result<R> {
    // SAFETY: the storage is borrowed for longer than the loan, which ends in this function, also if `work` panics.
    let loan = unsafe { lend_cpu(storage, layout, Arc::new(()))? };
    work(loan.view())
}
