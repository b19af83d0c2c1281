//! Memory that somebody else lends for a while, and wants back.

use crate::{Adopted, Buffer, DataType, Error, MemoryType, Result, Storage, View, ViewMut};
use parking_lot::RwLock;
use std::{any::Any, sync::Arc};

/// What may be done with memory that belongs to somebody else.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Access {
    /// Nothing any more: it was given back.
    None,
    /// It may be read.
    Read,
    /// It may be read and written.
    Write,
}

/// Who may use adopted or lent memory. The host's operations hold it for as long as they look at the bytes, so that whoever
/// gives the memory back knows when they are done.
#[derive(Debug)]
pub struct Gate(RwLock<Access>);

impl Gate {
    pub(crate) fn new(access: Access) -> Self {
        Self(RwLock::new(access))
    }

    /// What may be done now. For backends, which keep the lock while they read (shared) or write (alone).
    pub fn lock(&self) -> &RwLock<Access> {
        &self.0
    }

    /// Checks that the memory was not given back.
    ///
    /// # Errors
    /// [`Error::Invalid`] naming `buffer`.
    pub fn check(access: Access, want: Access) -> Result<()> {
        match (access, want) {
            (Access::None, _) => Err(Error::invalid(
                "buffer",
                "memory that was lent and is given back",
                "memory that is still lent",
            )),
            (Access::Read, Access::Write) => Err(Error::invalid(
                "buffer",
                "memory that was lent for reading",
                "memory that may be written",
            )),
            _ => Ok(()),
        }
    }
}

/// Memory of somebody else's, until this is dropped.
///
/// Views of it may be kept ([`View::retain`]), as all views; what is done with them later is [`Error::Invalid`]. So who lends
/// memory need not know who has looked at it. Made by [`Buffer::lend`].
#[derive(Debug)]
pub struct Loan {
    storage: Arc<Adopted>,
    buffer: Buffer,
}

impl Loan {
    /// Look at it for reading.
    pub fn view(&self) -> View<'_> {
        self.buffer.view()
    }

    /// Look at it for writing. What was lent for reading is refused by the operation that would write it.
    pub fn view_mut(&mut self) -> ViewMut<'_> {
        self.buffer.view_mut()
    }
}

impl Drop for Loan {
    /// Waits for operations of the host that are at it, on whatever thread; each of them ends by its deadline.
    fn drop(&mut self) {
        *self.storage.gate().lock().write() = Access::None;
    }
}

impl Buffer {
    /// Brings in memory for a while, without a copy.
    ///
    /// # Errors
    /// [`Error::Invalid`] if the address is 0 or not aligned to the element.
    ///
    /// # Safety
    /// Until the loan is dropped, and for ever if it is not: `address` must be the start of `shape` elements of `dtype` in
    /// `memory`, valid while `owner` lives; nobody else may write there, and, if it was lent for writing, nobody read.
    /// In device memory, where work goes on when calls have returned, the same must hold until work that was enqueued before
    /// is done, also if `owner` is dropped by then: memory that is freed in the order of that work's stream does so. Graphs that
    /// were captured keep `owner`.
    pub unsafe fn lend(
        address: u64,
        memory: MemoryType,
        dtype: DataType,
        shape: &[usize],
        access: Access,
        owner: Arc<dyn Any + Send + Sync>,
    ) -> Result<Loan> {
        let (storage, shape) = Adopted::new(address, memory, dtype, shape, Some(access), owner)?;
        let storage = Arc::new(storage);
        let shared: Arc<dyn Storage> = storage.clone();
        Ok(Loan {
            buffer: Self::new(shared, dtype, shape)?,
            storage,
        })
    }
}
