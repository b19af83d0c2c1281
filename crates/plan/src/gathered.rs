//! Where the rows of a gather-linear lie in the user buffer: the same on every rank and device.

use crate::rows;
use brigade_device::{Chunk, LinearCall, PerRank, QScheme, Result, Shape};
use std::ops::Range;

/// Values, or scales, of all ranks' rows: one rank's behind the other's.
#[derive(Clone, Debug)]
pub struct Span {
    /// First byte of every rank's share, and at the end of all of them.
    offsets: PerRank,
    /// Bytes of a row; 0 where a rank's rows share what it has.
    row_bytes: usize,
}

impl Span {
    /// From byte `start` on, with so many bytes for each row and so many for a rank's rows together.
    pub fn new(start: usize, counts: &[usize], row_bytes: usize, shared_bytes: usize) -> Self {
        let bytes: PerRank = counts
            .iter()
            .map(|rows| rows * row_bytes + shared_bytes)
            .collect();
        let mut offsets = rows::offsets(&bytes);
        offsets.iter_mut().for_each(|o| *o += start);
        Self { offsets, row_bytes }
    }

    /// The values of a call, from the start of the region on.
    pub fn values(call: &LinearCall) -> Self {
        Self::new(0, &call.rows, call.k * call.input.bytes(), 0)
    }

    /// The scales of a call from byte `start` on, if its rows have some.
    pub fn scales(start: usize, call: &LinearCall) -> Option<Self> {
        scale_bytes(call).map(|(row, shared)| Self::new(start, &call.rows, row, shared))
    }

    /// Bytes of rank `c`'s share.
    pub fn chunk(&self, c: usize) -> Range<usize> {
        self.offsets[c]..self.offsets[c + 1]
    }

    /// Bytes of all of it.
    pub fn all(&self) -> Range<usize> {
        self.offsets[0]..self.offsets[self.offsets.len() - 1]
    }

    /// Bytes that travel with rows `rows` of chunk `c`, which are its piece `p`. What rows share goes with the first one.
    pub fn piece(&self, c: usize, rows: &Range<usize>, p: usize) -> Range<usize> {
        let start = self.offsets[c];
        match self.row_bytes {
            0 if p == 0 => self.chunk(c),
            0 => start..start,
            bytes => start + rows.start * bytes..start + rows.end * bytes,
        }
    }

    /// Bytes that rows `rows` of chunk `c` need to be multiplied.
    pub fn needed(&self, c: usize, rows: &Range<usize>) -> Range<usize> {
        self.piece(c, rows, 0)
    }
}

/// Bytes of a row's scales, and of those that a rank's rows share.
pub fn scale_bytes(call: &LinearCall) -> Option<(usize, usize)> {
    match call.scheme {
        QScheme::None => None,
        QScheme::Int8PerToken => Some((4, 0)),
        QScheme::Fp8PerTokenBlock => Some((4 * call.k.div_ceil(QScheme::BLOCK), 0)),
        QScheme::Int8WeightOnly => Some((0, 4 * call.k)),
        QScheme::Int8PerTensor | QScheme::Fp8PerTensor => Some((0, 4)),
    }
}

/// Shape of all ranks' scales: per row, or what every rank has for all of its rows.
///
/// # Errors
/// As [`Shape::new`].
pub fn scales_shape(call: &LinearCall) -> Result<Shape> {
    match scale_bytes(call) {
        Some((row, _)) if call.scheme.per_row() => Shape::new(&[call.total_rows(), row / 4]),
        Some((_, shared)) => Shape::new(&[call.rows.len(), shared / 4]),
        None => Shape::new(&[0]),
    }
}

/// Shape of all ranks' rows.
///
/// # Errors
/// As [`Shape::new`].
pub fn rows_shape(call: &LinearCall, chunk: &Chunk<'_>) -> Result<Shape> {
    let rows = call.total_rows();
    match chunk {
        Chunk::Copy(o) if o.shape().dims().len() == 3 => {
            Shape::new(&[rows, o.shape().dims()[1], o.shape().dims()[2]])
        }
        _ => Shape::new(&[rows, call.k]),
    }
}
