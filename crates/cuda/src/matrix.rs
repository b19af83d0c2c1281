//! Matrices in device memory as factors of products.

use brigade_device::{Buffer, DataType};

/// op of a stored matrix, or of a batch of them: rows of `stride` elements, one after the other.
#[derive(Clone, Debug)]
pub(crate) struct Matrix {
    buffer: Buffer,
    /// Elements from the start of the buffer.
    first: usize,
    /// As stored.
    rows: usize,
    columns: usize,
    stride: usize,
    transposed: bool,
}

impl Matrix {
    /// op of a buffer of two dimensions, or of three with a batch.
    pub(crate) fn of(buffer: &Buffer, transposed: bool) -> Self {
        let shape = buffer.shape();
        let d = shape.dims();
        Self {
            transposed,
            ..Self::shaped(buffer, d[d.len() - 2], d[d.len() - 1])
        }
    }

    /// A buffer seen as `[rows, columns]`, one matrix after the other where there is a batch.
    pub(crate) fn shaped(buffer: &Buffer, rows: usize, columns: usize) -> Self {
        Self {
            buffer: buffer.clone(),
            first: 0,
            rows,
            columns,
            stride: columns,
            transposed: false,
        }
    }

    /// Rows of op of a single matrix.
    pub(crate) fn slice(&self, first: usize, rows: usize) -> Self {
        let mut part = self.clone();
        if self.transposed {
            part.first += first;
            part.columns = rows;
        } else {
            part.first += first * self.stride;
            part.rows = rows;
        }
        part
    }

    pub(crate) fn buffer(&self) -> &Buffer {
        &self.buffer
    }

    pub(crate) fn dtype(&self) -> DataType {
        self.buffer.dtype()
    }

    pub(crate) fn address(&self) -> u64 {
        self.buffer.address() + (self.first * self.dtype().bytes()) as u64
    }

    /// Rows of op.
    pub(crate) fn rows(&self) -> usize {
        if self.transposed {
            self.columns
        } else {
            self.rows
        }
    }

    /// Columns of op.
    pub(crate) fn columns(&self) -> usize {
        if self.transposed {
            self.rows
        } else {
            self.columns
        }
    }

    /// Rows and columns as stored.
    pub(crate) fn stored(&self) -> (usize, usize) {
        (self.rows, self.columns)
    }

    /// Elements from one stored row to the next.
    pub(crate) fn stride(&self) -> usize {
        self.stride
    }

    /// Elements from one matrix of a batch to the next.
    pub(crate) fn batch_stride(&self) -> usize {
        self.rows * self.stride
    }

    pub(crate) fn transposed(&self) -> bool {
        self.transposed
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use brigade_device::MemoryType;
    use std::sync::Arc;

    #[test]
    fn rows_of_a_transposed_matrix_are_columns_of_the_stored_one() {
        let owner = Arc::new([0f32; 12]);
        let address = owner.as_ptr() as u64;
        let (memory, dtype) = (MemoryType::Host, DataType::F32);
        // SAFETY: twelve floats that live as long as their owner.
        let buffer = unsafe { Buffer::adopt(address, memory, dtype, &[3, 4], owner) }.unwrap();
        let plain = Matrix::of(&buffer, false).slice(1, 2);
        assert_eq!((plain.rows(), plain.columns(), plain.stride()), (2, 4, 4));
        assert_eq!(plain.address(), address + 16);
        let turned = Matrix::of(&buffer, true).slice(1, 2);
        assert_eq!((turned.rows(), turned.columns()), (2, 3));
        assert_eq!((turned.stored(), turned.stride()), ((3, 2), 4));
        assert_eq!(turned.address(), address + 4);
    }
}
