//! Parameters of the gate between the two products of an expert.

use crate::{
    DataType, Error, Output, Result, View,
    params::{apart, float, resident},
};

/// `d[i, j] = silu(from[i, j]) * from[i, n + j]`, with `silu(x) = x / (1 + exp(-x))`: the gate of a feed-forward network whose first
/// product makes the values of gate and up side by side (SwiGLU; Shazeer: GLU Variants Improve Transformer, 2020).
///
/// In f32, with one rounding.
#[derive(Clone, Copy, Debug)]
pub struct SiluMulParams<'a> {
    /// `[rows, 2 n]`: f32, f16 or bf16.
    pub from: View<'a>,
    /// How many of the rows count, i32 `[1]` in the device's memory: what is behind them is not read, and not written. The last of a
    /// dispatch's [`offsets`](crate::Handle::offsets), for instance. `None`: all.
    pub rows: Option<View<'a>>,
}

impl<'a> SiluMulParams<'a> {
    /// Of all rows.
    pub const fn new(from: View<'a>) -> Self {
        Self { from, rows: None }
    }

    /// Checks types, shapes and places, and gives rows and columns of the result.
    ///
    /// # Errors
    /// [`Error::Invalid`] naming the field, what it was and what it should have been.
    pub fn check(&self, output: &Output<'_>) -> Result<[usize; 2]> {
        let from = self.from;
        float("from.dtype", from.dtype())?;
        let &[rows, both] = from.shape().dims() else {
            let want = "2 dimensions, [rows, 2 n]";
            return Err(Error::invalid("from.shape", from.shape(), want));
        };
        if both % 2 != 0 {
            let want = "an even number of columns";
            return Err(Error::invalid("from.shape", from.shape(), want));
        }
        if let Some(rows) = self.rows {
            if rows.dtype() != DataType::I32 {
                return Err(Error::invalid("rows", rows.dtype(), DataType::I32));
            }
            if rows.shape().dims() != [1] {
                return Err(Error::invalid("rows", rows.shape(), "[1]"));
            }
            resident("rows", Some(rows.memory()), from.memory())?;
        }
        let d = [rows, both / 2];
        output.check(&d)?;
        if let Output::Into(to) = output {
            resident("output.memory", Some(to.memory()), from.memory())?;
            apart(to, from)?;
            self.rows.map_or(Ok(()), |rows| apart(to, rows))?;
        }
        Ok(d)
    }
}
