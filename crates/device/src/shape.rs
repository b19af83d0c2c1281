//! Shapes of at most six dimensions, inline.

use crate::{Error, Result};
use std::fmt;

/// Dimensions of a contiguous, row-major buffer. A dimension of 0 is legal; no dimensions is a scalar.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub struct Shape {
    dims: [usize; Shape::MAX_RANK],
    rank: u8,
}

impl Shape {
    /// Most dimensions a shape can have.
    pub const MAX_RANK: usize = 6;

    /// # Errors
    /// [`Error::Invalid`] for more than six dimensions, or when the element count overflows `usize`.
    pub fn new(d: &[usize]) -> Result<Self> {
        let mut dims = [1; Self::MAX_RANK];
        dims.get_mut(..d.len())
            .ok_or_else(|| Error::invalid("shape", format!("{d:?}"), "at most 6 dimensions"))?
            .copy_from_slice(d);
        d.iter()
            .try_fold(1usize, |product, &n| product.checked_mul(n.max(1)))
            .filter(|&n| n <= isize::MAX as usize / 8)
            .ok_or_else(|| {
                Error::invalid("shape", format!("{d:?}"), "a size that fits in memory")
            })?;
        Ok(Self {
            dims,
            rank: d.len() as u8,
        })
    }

    /// The dimensions, outermost first.
    pub fn dims(&self) -> &[usize] {
        &self.dims[..usize::from(self.rank)]
    }

    /// Elements.
    pub fn len(&self) -> usize {
        self.dims().iter().product()
    }

    /// Whether there is no element.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Size of dimension 0 (1 for a scalar).
    pub fn rows(&self) -> usize {
        self.dims().first().copied().unwrap_or(1)
    }

    /// Elements in one row: the product of all dimensions but the first.
    pub fn row_len(&self) -> usize {
        self.dims().iter().skip(1).product()
    }

    /// Size of the last dimension (1 for a scalar).
    pub fn columns(&self) -> usize {
        self.dims().last().copied().unwrap_or(1)
    }

    /// The same shape with another number of rows.
    pub(crate) fn with_rows(mut self, rows: usize) -> Self {
        self.dims[0] = rows;
        self.rank = self.rank.max(1);
        self
    }

    /// The same shape without dimension 0.
    pub(crate) fn without_rows(self) -> Self {
        let mut dims = [1; Self::MAX_RANK];
        let rest = &self.dims()[1.min(self.dims().len())..];
        dims[..rest.len()].copy_from_slice(rest);
        Self {
            dims,
            rank: rest.len() as u8,
        }
    }
}

impl fmt::Debug for Shape {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_list().entries(self.dims()).finish()
    }
}

impl fmt::Display for Shape {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Debug::fmt(self, f)
    }
}
