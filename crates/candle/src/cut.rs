//! Which part of a weight is whose.
//!
//! The rule is that of Brigade's plans: as even as can be, and the first ranks get one more. So any number of features goes over any
//! number of ranks, and a rank may have none.

use crate::{
    Parallel,
    error::{OrCandle, invalid},
};
use candle_core::{DType, Result, Tensor, safetensors::MmapedSafetensors, shape::Dim};
use std::ops::Range;

/// This rank's part of `total` features that are cut between any two of them.
///
/// ```
/// assert_eq!(brigade_candle::cut::share(10, 1, 4, 1).unwrap(), 3..6);
/// // Nine heads of 64 over two ranks: five and four.
/// assert_eq!(brigade_candle::cut::share(576, 64, 2, 0).unwrap(), 0..320);
/// ```
///
/// # Errors
/// [`brigade::Error::Invalid`] if `total` is no multiple of `unit` (a head's width, where heads must stay whole; else 1), or there
/// is no such rank.
pub fn share(total: usize, unit: usize, size: usize, rank: usize) -> Result<Range<usize>> {
    if rank >= size {
        return Err(invalid("rank", rank, format!("a rank below {size}")));
    }
    if unit == 0 || !total.is_multiple_of(unit) {
        return Err(invalid("total", total, format!("a multiple of {unit}")));
    }
    let units = brigade::plan::rows::piece(total / unit, size, rank);
    Ok(units.start * unit..units.end * unit)
}

/// How many features each rank has.
pub(crate) fn counts(total: usize, size: usize) -> Vec<usize> {
    brigade::plan::rows::split(total, size).to_vec()
}

/// This rank's part of a tensor along `dim`: memory of its own, so that the whole tensor can be dropped.
///
/// # Errors
/// As [`share`]; candle's, for a tensor that has no such dimension.
pub fn tensor<D: Dim>(parallel: &Parallel, full: &Tensor, dim: D) -> Result<Tensor> {
    let dim = dim.to_index(full.shape(), "cut")?;
    let part = share(full.dim(dim)?, 1, parallel.size(), parallel.rank())?;
    range(full, dim, part)
}

/// As [`tensor`], of several weights that were fused along `dim` (query, key and value; gate and up): each is cut by itself, and this
/// rank's parts are put together again. `widths` and `unit` say how wide each is, and what must stay whole.
///
/// # Errors
/// As [`share`]; [`brigade::Error::Invalid`] if the widths do not make up the dimension.
pub fn fused<D: Dim>(
    parallel: &Parallel,
    full: &Tensor,
    dim: D,
    widths: &[usize],
    unit: usize,
) -> Result<Tensor> {
    let dim = dim.to_index(full.shape(), "cut")?;
    let all = widths.iter().try_fold(0usize, |sum, &w| sum.checked_add(w));
    if all != Some(full.dim(dim)?) {
        let want = format!("parts of {} in all", full.dim(dim)?);
        return Err(invalid("widths", format!("{widths:?}"), want));
    }
    let mut first = 0;
    let mut parts = Vec::with_capacity(widths.len());
    for &width in widths {
        let part = share(width, unit, parallel.size(), parallel.rank())?;
        parts.push(full.narrow(dim, first + part.start, part.len())?);
        first += width;
    }
    Tensor::cat(&parts, dim)
}

/// A range of a dimension, in memory of its own.
pub(crate) fn range(full: &Tensor, dim: usize, part: Range<usize>) -> Result<Tensor> {
    full.narrow(dim, part.start, part.len())?.force_contiguous()
}

/// This rank's part along `dim` (0 or 1) of a matrix or a vector that lies in safetensors files: nothing else of it is read.
///
/// # Errors
/// As [`tensor`]; candle's, if the name is not there.
pub fn load(
    parallel: &Parallel,
    files: &MmapedSafetensors,
    name: &str,
    dim: usize,
) -> Result<Tensor> {
    let found = files.get(name)?;
    let dtype = DType::try_from(found.dtype())?;
    let shape = found.shape();
    let Some(&total) = shape.get(dim).filter(|_| dim < 2) else {
        let want = format!("a dimension of {shape:?}, 0 or 1");
        return Err(invalid("dim", dim, want));
    };
    let part = share(total, 1, parallel.size(), parallel.rank())?;
    let mut dims = shape.to_vec();
    dims[dim] = part.len();
    let width = brigade::Shape::new(&shape[dim + 1..]).or_candle()?.len() * dtype.size_in_bytes();
    let (from, to) = (part.start * width, part.end * width);
    let data = found.data();
    let short = || invalid("data", data.len(), format!("{shape:?} of {dtype:?}"));
    if dim == 0 {
        let bytes = data.get(from..to).ok_or_else(short)?;
        return from_bytes(parallel, bytes, dtype, &dims);
    }
    let row = total * width;
    let mut bytes = Vec::with_capacity(shape[0] * (to - from));
    for first in (0..shape[0]).map(|r| r * row) {
        bytes.extend_from_slice(data.get(first + from..first + to).ok_or_else(short)?);
    }
    from_bytes(parallel, &bytes, dtype, &dims)
}

/// As [`load`], if the name is there.
pub(crate) fn load_if_there(
    parallel: &Parallel,
    files: &MmapedSafetensors,
    name: &str,
    dim: usize,
) -> Result<Option<Tensor>> {
    match files.get(name) {
        Ok(_) => load(parallel, files, name, dim).map(Some),
        Err(_) => Ok(None),
    }
}

/// All of a tensor, if the name is there.
pub(crate) fn whole_if_there(
    parallel: &Parallel,
    files: &MmapedSafetensors,
    name: &str,
) -> Result<Option<Tensor>> {
    match files.get(name) {
        Ok(_) => files.load(name, parallel.place()).map(Some),
        Err(_) => Ok(None),
    }
}

/// How wide a tensor is as a whole.
pub(crate) fn total(files: &MmapedSafetensors, name: &str, dim: usize) -> Result<usize> {
    let found = files.get(name)?;
    let width = found.shape().get(dim).copied();
    width.ok_or_else(|| invalid("shape", format!("{:?}", found.shape()), "2 dimensions"))
}

fn from_bytes(parallel: &Parallel, bytes: &[u8], dtype: DType, dims: &[usize]) -> Result<Tensor> {
    if bytes.is_empty() {
        return parallel.make(dtype, dims, |_| Ok(()));
    }
    Tensor::from_raw_buffer(bytes, dtype, dims, parallel.place())
}
