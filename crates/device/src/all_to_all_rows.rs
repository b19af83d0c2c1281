//! All-to-all of rows that lists name, with the lists in the device's memory: what rows of experts, of a cache or of a table
//! travel by.

use crate::{
    DataType, Error, Result, View, ViewMut,
    params::{plain, resident},
};
use smallvec::SmallVec;

/// Rows that are sent, and where those that come go.
#[derive(Debug)]
pub struct RowPayload<'a> {
    /// `[rows, ..]` of any type.
    pub from: View<'a>,
    /// `[rows, ..]` of the same type, with as many elements in a row. Rows that nothing comes for stay as they are.
    pub to: ViewMut<'a>,
}

/// Every rank sends rows that it names to every rank, which puts each where it wants it.
///
/// Lists lie in the device's memory, and no host reads them: a captured call follows what they say when it is replayed. The rows
/// for rank r are those that `send_rows` names from `send_offsets[r]` to `send_offsets[r + 1]`, in this order; the i-th row from
/// rank r goes to the row of `to` that `recv_rows` names at `recv_offsets[r] + i`. A row may be sent more than once.
///
/// - A number in `send_rows` that names no row of `from` sends a row of zeros; one in `recv_rows` that names no row of `to` drops
///   what comes for it. -1 is meant for both.
/// - If `recv_rows` names a row twice, either may be there in the end.
/// - A pair that disagrees about its count is a [`Mismatch`](crate::FaultKind::Mismatch) on all ranks. Offsets that decrease, or go
///   beyond the list, are an [`Overflow`](crate::FaultKind::Overflow). After a fault nobody may trust any `to`.
#[derive(Debug)]
pub struct AllToAllRowsParams<'a> {
    /// What travels: from 1 to [`AllToAllRowsParams::MOST_PAYLOADS`], all by the same lists. Each has its own row; all `from` have as
    /// many rows, and so have all `to`.
    pub payloads: &'a [RowPayload<'a>],
    /// Where the rows for each rank begin in `send_rows`, and where the last one's end: i32 `[ranks + 1]`.
    pub send_offsets: View<'a>,
    /// Rows of `from`, i32 `[..]`. There may be room for more than the offsets take.
    pub send_rows: View<'a>,
    /// Where the rows of each rank begin in `recv_rows`, and where the last one's end: i32 `[ranks + 1]`.
    pub recv_offsets: View<'a>,
    /// Rows of `to`, i32 `[..]`.
    pub recv_rows: View<'a>,
}

/// The signed part of an all-to-all of rows.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct AllToAllRowsCall {
    /// Elements in a row of each payload, and their type.
    pub payloads: SmallVec<[(usize, DataType); AllToAllRowsParams::MOST_PAYLOADS]>,
}

impl AllToAllRowsCall {
    /// Bytes of a row of each payload.
    pub fn row_bytes(&self) -> impl Iterator<Item = usize> {
        self.payloads.iter().map(|(len, dtype)| len * dtype.bytes())
    }
}

impl AllToAllRowsParams<'_> {
    /// Most payloads of a call.
    pub const MOST_PAYLOADS: usize = 4;

    /// Checks types, shapes and places, and gives the signed call.
    ///
    /// # Errors
    /// [`Error::Invalid`] naming the field, what it was and what it should have been.
    pub fn check(&self, size: usize) -> Result<AllToAllRowsCall> {
        let Some(first) = self.payloads.first() else {
            return Err(Error::invalid("payloads", 0, "at least 1"));
        };
        if self.payloads.len() > Self::MOST_PAYLOADS {
            let want = format!("at most {}", Self::MOST_PAYLOADS);
            return Err(Error::invalid("payloads", self.payloads.len(), want));
        }
        let rows = |view: View<'_>| view.shape().dims().first().copied();
        let counted = |field, view: View<'_>, like: View<'_>| match rows(view) {
            None => Err(Error::invalid(field, view.shape(), "[rows, ..]")),
            // Rows are counted in 32 bits.
            Some(n) if i32::try_from(n).is_err() => {
                let want = format!("at most {} rows", i32::MAX);
                Err(Error::invalid(field, view.shape(), want))
            }
            n if n != rows(like) => {
                let want = format!("[{}, ..]", rows(like).unwrap_or(0));
                Err(Error::invalid(field, view.shape(), want))
            }
            _ => resident(field, Some(view.memory()), first.from.memory()),
        };
        let mut payloads = SmallVec::new();
        for payload in self.payloads {
            let (from, to) = (payload.from, payload.to.as_view());
            plain("payloads.from", from.dtype())?;
            counted("payloads.from", from, first.from)?;
            counted("payloads.to", to, first.to.as_view())?;
            payload.to.check_writable()?;
            if to.dtype() != from.dtype() {
                return Err(Error::invalid("payloads.to", to.dtype(), from.dtype()));
            }
            let row_len = from.shape().row_len();
            if to.shape().row_len() != row_len {
                let want = format!("rows of {row_len}");
                return Err(Error::invalid("payloads.to", to.shape(), want));
            }
            payloads.push((row_len, from.dtype()));
        }
        let list = |field, view: View<'_>, length: Option<usize>| {
            if view.dtype() != DataType::I32 {
                return Err(Error::invalid(field, view.dtype(), DataType::I32));
            }
            let &[n] = view.shape().dims() else {
                return Err(Error::invalid(field, view.shape(), "1 dimension"));
            };
            match length {
                Some(length) if n != length => {
                    let want = format!("[{length}], one for each rank and the end");
                    Err(Error::invalid(field, view.shape(), want))
                }
                _ if i32::try_from(n).is_err() => {
                    let want = format!("at most {}", i32::MAX);
                    Err(Error::invalid(field, view.shape(), want))
                }
                _ => resident(field, Some(view.memory()), first.from.memory()),
            }
        };
        list("send_offsets", self.send_offsets, Some(size + 1))?;
        list("send_rows", self.send_rows, None)?;
        list("recv_offsets", self.recv_offsets, Some(size + 1))?;
        list("recv_rows", self.recv_rows, None)?;
        Ok(AllToAllRowsCall { payloads })
    }
}
