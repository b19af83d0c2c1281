//! The gate between the two halves of a feed-forward network.

use crate::{Parallel, error::invalid, into::Form};
use brigade::{Output, SiluMulParams, View, ViewMut};
use candle_core::{Result, Tensor};

impl Parallel {
    /// `silu(gate) * up` of gate and up side by side, `[.., 2 n]`, in one operation of this rank's alone; `[.., n]` (SwiGLU; Shazeer: GLU
    /// Variants Improve Transformer, 2020). In f32, with one rounding.
    ///
    /// # Errors
    /// [`brigade::Error::Invalid`] for an odd number of features, or a type that is no float.
    pub fn silu_mul(&self, gate_up: &Tensor) -> Result<Tensor> {
        let (dims, rows) = gated(gate_up)?;
        let gate_up = gate_up.contiguous()?;
        let lent = self.lend(&gate_up)?;
        let made = self.make(gate_up.dtype(), rows.as_slice(), |to| {
            self.gate(lent.view(), to)
        })?;
        made.reshape(dims)
    }

    /// The same into a tensor that is there, `[.., n]`: of a step that is captured, which allocates nothing then.
    ///
    /// # Errors
    /// As [`silu_mul`](Self::silu_mul); [`brigade::Error::Invalid`] for an `out` of another shape or type, or with memory of `gate_up`.
    pub fn silu_mul_into(&self, gate_up: &Tensor, out: &Tensor) -> Result<()> {
        let (dims, rows) = gated(gate_up)?;
        let gate_up = gate_up.contiguous()?;
        let form = Form {
            dtype: gate_up.dtype(),
            dims: &dims,
            rows,
        };
        self.check_into(("out", out), form, &[&gate_up])?;
        let lent = self.lend(&gate_up)?;
        self.write(out, form, |to| self.gate(lent.view(), to))
    }

    fn gate(&self, from: View<'_>, to: ViewMut<'_>) -> brigade::Result<()> {
        let both = from.shape().columns();
        let rows = to.shape().rows();
        let params = SiluMulParams::new(from.reshape(&[rows, both])?);
        self.device()
            .silu_mul(self.stream(), &params, Output::Into(to))
            .map(drop)
    }
}

/// The shape of what comes of gate and up, and its rows and columns.
fn gated(gate_up: &Tensor) -> Result<(Vec<usize>, [usize; 2])> {
    let Some((&both, outer)) = gate_up.dims().split_last() else {
        return Err(invalid("gate_up.shape", "a scalar", "[.., 2 n]"));
    };
    let dims = [outer, &[both / 2]].concat();
    Ok((dims, [outer.iter().product(), both / 2]))
}
