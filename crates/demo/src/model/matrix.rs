use std::ops::Range;

use crate::{Error, Result};

/// A row-major f32 matrix, `[rows, columns]`; a vector is one row.
#[derive(Clone, Debug, PartialEq)]
pub struct Matrix {
    rows: usize,
    columns: usize,
    data: Vec<f32>,
}

impl Matrix {
    /// A matrix over `data`, which holds `rows * columns` values row by row.
    ///
    /// # Errors
    /// [`Error::Field`] when `data` has another length.
    pub fn new(rows: usize, columns: usize, data: Vec<f32>) -> Result<Self> {
        if rows.checked_mul(columns) != Some(data.len()) {
            return Err(Error::field(
                "matrix length",
                data.len(),
                format!("{rows} x {columns}"),
            ));
        }
        Ok(Self {
            rows,
            columns,
            data,
        })
    }

    /// The number of rows.
    pub fn rows(&self) -> usize {
        self.rows
    }

    /// The number of values in a row.
    pub fn columns(&self) -> usize {
        self.columns
    }

    /// All values, row by row.
    pub fn data(&self) -> &[f32] {
        &self.data
    }

    /// The values, given away.
    pub fn into_data(self) -> Vec<f32> {
        self.data
    }

    /// Row `row`.
    ///
    /// # Panics
    /// When there is no such row, as slices do.
    pub fn row(&self, row: usize) -> &[f32] {
        &self.data[row * self.columns..(row + 1) * self.columns]
    }

    /// A copy of some rows, `[rows.len(), columns]`.
    ///
    /// # Errors
    /// [`Error::Field`] when the rows are not all here.
    pub fn cut_rows(&self, rows: Range<usize>) -> Result<Self> {
        check_range("rows", &rows, self.rows)?;
        let data = self.data[rows.start * self.columns..rows.end * self.columns].to_vec();
        Self::new(rows.len(), self.columns, data)
    }

    /// A copy of some columns, `[rows, columns.len()]`.
    ///
    /// # Errors
    /// [`Error::Field`] when the columns are not all here.
    pub fn cut_columns(&self, columns: Range<usize>) -> Result<Self> {
        check_range("columns", &columns, self.columns)?;
        let data = (0..self.rows)
            .flat_map(|row| &self.row(row)[columns.clone()])
            .copied()
            .collect();
        Self::new(self.rows, columns.len(), data)
    }
}

/// Checks that `range` runs forward and ends within `limit`.
pub(crate) fn check_range(what: &str, range: &Range<usize>, limit: usize) -> Result<()> {
    if range.start <= range.end && range.end <= limit {
        return Ok(());
    }
    Err(Error::field(
        what,
        format!("{range:?}"),
        format!("a range within 0..{limit}"),
    ))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn cuts_are_copies_of_the_named_rows_and_columns() {
        let matrix = Matrix::new(3, 2, vec![0., 1., 10., 11., 20., 21.]).unwrap();
        assert_eq!(
            matrix.cut_rows(1..3).unwrap(),
            Matrix::new(2, 2, vec![10., 11., 20., 21.]).unwrap()
        );
        assert_eq!(
            matrix.cut_columns(1..2).unwrap(),
            Matrix::new(3, 1, vec![1., 11., 21.]).unwrap()
        );
        assert_eq!(matrix.cut_rows(3..3).unwrap().rows(), 0);
    }

    #[test]
    fn what_does_not_fit_is_an_error() {
        let matrix = Matrix::new(1, 2, vec![0., 1.]).unwrap();
        assert_eq!(
            matrix.cut_rows(0..2).unwrap_err().to_string(),
            "rows is 0..2, wanted a range within 0..1"
        );
        assert!(matrix.cut_columns(1..3).is_err());
        assert_eq!(
            Matrix::new(2, 2, vec![0.]).unwrap_err().to_string(),
            "matrix length is 1, wanted 2 x 2"
        );
    }
}
