//! The gate between the two halves of a feed-forward network.

use crate::{
    Parallel,
    error::invalid,
    into::{Form, Place},
};
use brigade::{Output, SiluMulParams, View, ViewMut};
use candle_core::{Result, Tensor};

impl Parallel {
    /// `silu(gate) * up` of gate and up side by side, `[.., 2 n]`, in one operation of this rank's alone; `[.., n]` (SwiGLU; Shazeer: GLU
    /// Variants Improve Transformer, 2020). In f32, with one rounding.
    ///
    /// # Errors
    /// [`brigade::Error::Invalid`] for an odd number of features, or a type that is no float.
    pub fn silu_mul(&self, gate_up: &Tensor) -> Result<Tensor> {
        let Some((&both, outer)) = gate_up.dims().split_last() else {
            return Err(invalid("gate_up.shape", "a scalar", "[.., 2 n]"));
        };
        let rows = outer.iter().product();
        let gate_up = gate_up.contiguous()?;
        let lent = self.lend(&gate_up)?;
        let made = self.make(gate_up.dtype(), [rows, both / 2].as_slice(), |to| {
            self.gate(lent.view(), [rows, both], to)
        })?;
        made.reshape([outer, &[both / 2]].concat())
    }

    /// The same into a tensor that is there, `[.., n]`: of a step that is captured, which allocates nothing then.
    ///
    /// # Errors
    /// As [`silu_mul`](Self::silu_mul); [`brigade::Error::Invalid`] for an `out` of another shape or type, or with memory of `gate_up`.
    pub fn silu_mul_into(&self, gate_up: &Tensor, out: &Tensor) -> Result<()> {
        let Some((&both, outer)) = gate_up.dims().split_last() else {
            return Err(invalid("gate_up.shape", "a scalar", "[.., 2 n]"));
        };
        let rows = outer.iter().product();
        let gate_up = gate_up.contiguous()?;
        let form = Form {
            dtype: gate_up.dtype(),
            dims: &[outer, &[both / 2]].concat(),
            rows: [rows, both / 2],
        };
        let to = Place {
            field: "out",
            tensor: out,
        };
        self.check_into(to, form, &[&gate_up])?;
        let lent = self.lend(&gate_up)?;
        self.write(out, form, |to| self.gate(lent.view(), [rows, both], to))
    }

    fn gate(&self, from: View<'_>, rows: [usize; 2], to: ViewMut<'_>) -> brigade::Result<()> {
        let params = SiluMulParams::new(from.reshape(&rows)?);
        self.device()
            .silu_mul(self.stream(), &params, Output::Into(to))
            .map(drop)
    }
}
