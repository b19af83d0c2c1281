//! Checks of what moves between buffers, for whoever implements [`Allocate`](crate::Allocate).

use crate::{Buffer, Error, Result, View};

/// # Errors
/// [`Error::Invalid`] for `from.shape`.
pub fn same_shape(to: View<'_>, from: View<'_>) -> Result<()> {
    if to.shape() == from.shape() {
        Ok(())
    } else {
        Err(Error::invalid("from.shape", from.shape(), to.shape()))
    }
}

/// # Errors
/// [`Error::Invalid`] for `from.dtype`.
pub fn same_type(to: View<'_>, from: View<'_>) -> Result<()> {
    if to.dtype() == from.dtype() {
        Ok(())
    } else {
        Err(Error::invalid("from.dtype", from.dtype(), to.dtype()))
    }
}

/// That the caller's memory is as long as the buffer.
///
/// # Errors
/// [`Error::Invalid`] for `bytes`.
pub fn same_bytes(buffer: &Buffer, bytes: usize) -> Result<()> {
    if buffer.bytes() == bytes {
        return Ok(());
    }
    let (all, shape, dtype) = (buffer.bytes(), buffer.shape(), buffer.dtype());
    let want = format!("{all} for {shape} of {dtype}");
    Err(Error::invalid("bytes", bytes, want))
}

/// Rows and columns of `from`, whose transpose `to` is to be.
///
/// # Errors
/// [`Error::Invalid`] for `to.shape` or `from.dtype`.
pub fn transposed(to: View<'_>, from: View<'_>) -> Result<(usize, usize)> {
    same_type(to, from)?;
    match (from.shape().dims(), to.shape().dims()) {
        (&[r, c], &[c2, r2]) if (r, c) == (r2, c2) => Ok((r, c)),
        _ => Err(Error::invalid(
            "to.shape",
            to.shape(),
            format!("the transpose of {}", from.shape()),
        )),
    }
}
