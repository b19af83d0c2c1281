//! The gate between the two halves of a feed-forward network.

use crate::{Parallel, error::invalid};
use brigade::{Output, SiluMulParams};
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
            let from = lent.view().reshape(&[rows, both])?;
            let params = SiluMulParams::new(from);
            self.device()
                .silu_mul(self.stream(), &params, Output::Into(to))
                .map(drop)
        })?;
        made.reshape([outer, &[both / 2]].concat())
    }
}
