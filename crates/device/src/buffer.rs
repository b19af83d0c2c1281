//! Buffers own, views borrow. Every parameter takes views: a [`View`] is `Copy` and cannot outlive what it looks at.

use crate::{
    DataType, Element, Error, MemoryType, Result, Shape,
    loan::{Access, Gate},
};
use std::{any::Any, fmt, ops::Range, sync::Arc};

/// One allocation. Dropping it frees it after the work that uses it, and never blocks.
pub trait Storage: Send + Sync + fmt::Debug {
    /// Address of the first byte, in the address space of [`memory`](Self::memory).
    fn address(&self) -> u64;
    /// Size in bytes.
    fn bytes(&self) -> usize;
    /// Which memory it is.
    fn memory(&self) -> MemoryType;
    /// Itself, for the backend that made it.
    fn as_any(&self) -> &dyn Any;
}

impl dyn Storage {
    /// The backend's own type, if this is one. What only holds one and gives that for itself is none: it may say anything of its size
    /// and its address, and backends believe their own types in that.
    pub fn downcast<T: Storage + 'static>(&self) -> Option<&T> {
        let found = self.as_any().downcast_ref::<T>()?;
        std::ptr::addr_eq(found, self).then_some(found)
    }
}

/// Memory that belongs to somebody else, kept alive by `owner`. See [`Buffer::adopt`] and [`Buffer::lend`].
#[derive(Debug)]
pub struct Adopted {
    address: u64,
    bytes: usize,
    memory: MemoryType,
    gate: Gate,
    lent: bool,
    _owner: Owner,
}

impl Adopted {
    pub(crate) fn new(
        address: u64,
        memory: MemoryType,
        dtype: DataType,
        shape: &[usize],
        lent: Option<Access>,
        owner: Arc<dyn Any + Send + Sync>,
    ) -> Result<(Self, Shape)> {
        let shape = Shape::new(shape)?;
        if address == 0 || !address.is_multiple_of(dtype.bytes() as u64) {
            return Err(Error::invalid(
                "address",
                format!("{address:#x}"),
                format!("not null, and a multiple of {} for {dtype}", dtype.bytes()),
            ));
        }
        let adopted = Self {
            address,
            bytes: shape.len() * dtype.bytes(),
            memory,
            gate: Gate::new(lent.unwrap_or(Access::Write)),
            lent: lent.is_some(),
            _owner: Owner(owner),
        };
        Ok((adopted, shape))
    }

    /// Who may use it, for backends.
    pub fn gate(&self) -> &Gate {
        &self.gate
    }

    /// Whether who lent it sees to it that it outlives work that was enqueued, as [`Buffer::lend`] asks; else its owner must be kept.
    pub fn is_lent(&self) -> bool {
        self.lent
    }
}

struct Owner(#[allow(dead_code, reason = "held for its Drop")] Arc<dyn Any + Send + Sync>);

impl fmt::Debug for Owner {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Owner")
    }
}

impl Storage for Adopted {
    fn address(&self) -> u64 {
        self.address
    }
    fn bytes(&self) -> usize {
        self.bytes
    }
    fn memory(&self) -> MemoryType {
        self.memory
    }
    fn as_any(&self) -> &dyn Any {
        self
    }
}

/// Owned, shared, contiguous, row-major: a slice of an allocation with a type and a shape.
///
/// Clones and slices share the allocation, so a parent cannot die under them.
#[derive(Clone, Debug)]
pub struct Buffer {
    storage: Arc<dyn Storage>,
    dtype: DataType,
    shape: Shape,
    offset_bytes: usize,
}

/// A borrowed look at a [`Buffer`].
#[derive(Clone, Copy, Debug)]
pub struct View<'a> {
    storage: &'a Arc<dyn Storage>,
    dtype: DataType,
    shape: Shape,
    offset_bytes: usize,
}

/// A borrowed look at a [`Buffer`] for writing.
#[derive(Debug)]
pub struct ViewMut<'a> {
    view: View<'a>,
}

/// Elements `start..end` rows down from the front of `shape`: the new shape and the byte offset to add.
fn cut(shape: Shape, dtype: DataType, rows: &Range<usize>) -> Result<(Shape, usize)> {
    if shape.dims().is_empty() || rows.start > rows.end || rows.end > shape.rows() {
        return Err(Error::invalid(
            "rows",
            format!("{rows:?}"),
            format!("a range within the {} rows of {shape}", shape.rows()),
        ));
    }
    let row_bytes = shape.row_len() * dtype.bytes();
    Ok((shape.with_rows(rows.len()), rows.start * row_bytes))
}

fn reshaped(from: Shape, dims: &[usize]) -> Result<Shape> {
    let to = Shape::new(dims)?;
    if to.len() != from.len() {
        return Err(Error::invalid(
            "shape",
            to,
            format!("{} elements, as in {from}", from.len()),
        ));
    }
    Ok(to)
}

impl Buffer {
    /// The front of `storage`, seen as `shape` elements of `dtype`.
    ///
    /// # Errors
    /// [`Error::Invalid`] if the storage is too small.
    pub fn new(storage: Arc<dyn Storage>, dtype: DataType, shape: Shape) -> Result<Self> {
        Self::at(storage, 0, dtype, shape)
    }

    /// As [`new`](Self::new), starting `offset_bytes` into the storage.
    ///
    /// # Errors
    /// [`Error::Invalid`] if the storage is too small, or the offset is no multiple of the element's size.
    pub fn at(
        storage: Arc<dyn Storage>,
        offset_bytes: usize,
        dtype: DataType,
        shape: Shape,
    ) -> Result<Self> {
        let need = shape.len() * dtype.bytes();
        if !offset_bytes.is_multiple_of(dtype.bytes()) {
            return Err(Error::invalid(
                "offset_bytes",
                offset_bytes,
                format!("a multiple of {} for {dtype}", dtype.bytes()),
            ));
        }
        match offset_bytes.checked_add(need) {
            Some(end) if end <= storage.bytes() => Ok(Self {
                storage,
                dtype,
                shape,
                offset_bytes,
            }),
            _ => Err(Error::invalid(
                "shape",
                format!("{shape} of {dtype} at byte {offset_bytes}"),
                format!("at most the storage's {} bytes", storage.bytes()),
            )),
        }
    }

    /// Brings in memory that Brigade did not allocate, without a copy.
    ///
    /// # Errors
    /// [`Error::Invalid`] if the address is 0 or not aligned to the element.
    ///
    /// # Safety
    /// `address` must be the start of `shape` elements of `dtype` in `memory`, valid while `owner` lives. While any
    /// operation that was given this buffer is running, nobody else may write to it, nor read what the operation writes.
    pub unsafe fn adopt(
        address: u64,
        memory: MemoryType,
        dtype: DataType,
        shape: &[usize],
        owner: Arc<dyn Any + Send + Sync>,
    ) -> Result<Self> {
        let (storage, shape) = Adopted::new(address, memory, dtype, shape, None, owner)?;
        Self::new(Arc::new(storage), dtype, shape)
    }

    /// Element type.
    pub fn dtype(&self) -> DataType {
        self.dtype
    }

    /// Shape.
    pub fn shape(&self) -> Shape {
        self.shape
    }

    /// Which memory it lies in.
    pub fn memory(&self) -> MemoryType {
        self.storage.memory()
    }

    /// Size in bytes of what this buffer covers.
    pub fn bytes(&self) -> usize {
        self.shape.len() * self.dtype.bytes()
    }

    /// Bytes from the start of the allocation.
    pub fn offset_bytes(&self) -> usize {
        self.offset_bytes
    }

    /// The allocation, for backends.
    pub fn storage(&self) -> &Arc<dyn Storage> {
        &self.storage
    }

    /// Address of the first element.
    pub fn address(&self) -> u64 {
        self.storage.address() + self.offset_bytes as u64
    }

    /// Borrow for reading.
    pub fn view(&self) -> View<'_> {
        View {
            storage: &self.storage,
            dtype: self.dtype,
            shape: self.shape,
            offset_bytes: self.offset_bytes,
        }
    }

    /// Borrow for writing.
    pub fn view_mut(&mut self) -> ViewMut<'_> {
        ViewMut { view: self.view() }
    }

    /// `rows` rows from row `offset` on, sharing the allocation.
    ///
    /// # Errors
    /// [`Error::Invalid`] if they do not lie inside.
    pub fn slice(&self, offset: usize, rows: usize) -> Result<Self> {
        Ok(self.view().slice(offset, rows)?.retain())
    }

    /// Row `row`, with dimension 0 removed.
    ///
    /// # Errors
    /// [`Error::Invalid`] if there is no such row.
    pub fn index(&self, row: usize) -> Result<Self> {
        Ok(self.view().index(row)?.retain())
    }

    /// The same elements in another shape.
    ///
    /// # Errors
    /// [`Error::Invalid`] if the element counts differ.
    pub fn reshape(&self, dims: &[usize]) -> Result<Self> {
        Ok(self.view().reshape(dims)?.retain())
    }

    /// Checks that elements are `T`.
    ///
    /// # Errors
    /// [`Error::Invalid`] naming `field` if they are not.
    pub fn expect_type<T: Element>(&self, field: &'static str) -> Result<()> {
        self.view().expect_type::<T>(field)
    }
}

impl<'a> View<'a> {
    /// Element type.
    pub fn dtype(&self) -> DataType {
        self.dtype
    }

    /// Shape.
    pub fn shape(&self) -> Shape {
        self.shape
    }

    /// Which memory it lies in.
    pub fn memory(&self) -> MemoryType {
        self.storage.memory()
    }

    /// Size in bytes.
    pub fn bytes(&self) -> usize {
        self.shape.len() * self.dtype.bytes()
    }

    /// Address of the first element.
    pub fn address(&self) -> u64 {
        self.storage.address() + self.offset_bytes as u64
    }

    /// Rows `r` of dimension 0.
    ///
    /// # Errors
    /// [`Error::Invalid`] if they do not lie inside.
    pub fn rows(&self, r: Range<usize>) -> Result<View<'a>> {
        let (shape, offset) = cut(self.shape, self.dtype, &r)?;
        Ok(View {
            shape,
            offset_bytes: self.offset_bytes + offset,
            ..*self
        })
    }

    /// `rows` rows from row `offset` on.
    ///
    /// # Errors
    /// [`Error::Invalid`] if they do not lie inside.
    pub fn slice(&self, offset: usize, rows: usize) -> Result<View<'a>> {
        let end = offset
            .checked_add(rows)
            .ok_or_else(|| Error::invalid("rows", rows, "a count that does not overflow"))?;
        self.rows(offset..end)
    }

    /// Row `row`, with dimension 0 removed.
    ///
    /// # Errors
    /// [`Error::Invalid`] if there is no such row.
    pub fn index(&self, row: usize) -> Result<View<'a>> {
        let mut one = self.slice(row, 1)?;
        one.shape = one.shape.without_rows();
        Ok(one)
    }

    /// The same elements in another shape.
    ///
    /// # Errors
    /// [`Error::Invalid`] if the element counts differ.
    pub fn reshape(&self, dims: &[usize]) -> Result<View<'a>> {
        Ok(View {
            shape: reshaped(self.shape, dims)?,
            ..*self
        })
    }

    /// Checks that elements are `T`.
    ///
    /// # Errors
    /// [`Error::Invalid`] naming `field` if they are not.
    pub fn expect_type<T: Element>(&self, field: &'static str) -> Result<()> {
        if self.dtype == T::DTYPE {
            Ok(())
        } else {
            Err(Error::invalid(field, self.dtype, T::DTYPE))
        }
    }

    /// For backends: an owner of the same elements, for work that is in flight or captured in a graph.
    /// What lies in a communicator's user buffer may change under it as soon as the lease goes on.
    pub fn retain(&self) -> Buffer {
        Buffer {
            storage: Arc::clone(self.storage),
            dtype: self.dtype,
            shape: self.shape,
            offset_bytes: self.offset_bytes,
        }
    }
}

impl ViewMut<'_> {
    /// Checks that it may be written: that it is no memory that was lent for reading alone, or given back.
    ///
    /// # Errors
    /// [`Error::Invalid`] naming `buffer`.
    pub fn check_writable(&self) -> Result<()> {
        let adopted = self.view.storage.downcast::<Adopted>();
        // Whoever holds it alone writes there.
        match adopted.and_then(|memory| memory.gate.lock().try_read_recursive()) {
            Some(access) => Gate::check(*access, Access::Write),
            None => Ok(()),
        }
    }

    /// Look at it for reading.
    pub fn as_view(&self) -> View<'_> {
        self.view
    }

    /// A shorter borrow of the same elements.
    pub fn reborrow(&mut self) -> ViewMut<'_> {
        ViewMut { view: self.view }
    }

    /// Rows `r` of dimension 0.
    ///
    /// # Errors
    /// [`Error::Invalid`] if they do not lie inside.
    pub fn rows(&mut self, r: Range<usize>) -> Result<ViewMut<'_>> {
        Ok(ViewMut {
            view: self.view.rows(r)?,
        })
    }

    /// The same elements in another shape.
    ///
    /// # Errors
    /// [`Error::Invalid`] if the element counts differ.
    pub fn reshape(&mut self, dims: &[usize]) -> Result<ViewMut<'_>> {
        Ok(ViewMut {
            view: self.view.reshape(dims)?,
        })
    }

    /// Element type.
    pub fn dtype(&self) -> DataType {
        self.view.dtype
    }

    /// Shape.
    pub fn shape(&self) -> Shape {
        self.view.shape
    }

    /// Which memory it lies in.
    pub fn memory(&self) -> MemoryType {
        self.view.memory()
    }
}
