//! A linear and the gate behind it: of few rows one kernel (`kernels/few_rows.cu`), whose blocks have both columns of which one is made.

use crate::{
    CudaDevice,
    few_rows::FewRows,
    memory::overlap,
    types::{self, GATED},
};
use brigade_device::{Buffer, LoraLinearParams, Output, Result, Stream, fallback};
use brigade_kernels::FewRowsParams;

impl CudaDevice {
    pub(crate) fn run_linear_silu_mul(
        &self,
        on: &Stream,
        p: &LoraLinearParams<'_>,
        output: Output<'_>,
    ) -> Result<Option<Buffer>> {
        let [rows, n] = fallback::gated_shape(p)?;
        let apart = |output| fallback::lora_linear_silu_mul(self, on, p, output);
        let Some([x, weight]) = self.few_factors(p, &p.check()?, output.dtype())? else {
            return apart(output);
        };
        let few = FewRows::plain([&x, &weight], &p.gemm);
        let lane = self.lane(on)?;
        let Some((kernel, shape)) = self.few_rows_kernel(lane, &few, n).filter(|_| n > 0) else {
            return apart(output);
        };
        if let Output::Into(to) = &output
            && [&x, &weight]
                .into_iter()
                .any(|of| overlap(of.buffer(), &to.as_view().retain()))
        {
            return apart(output);
        }
        let (d, new) = self.place(lane, output, &[rows, n])?;
        let parameters = FewRowsParams {
            out: d.address(),
            columns: n as u32,
            out_type: types::float_code(d.dtype()),
            activation: GATED,
            ..few.parameters()
        };
        lane.run(&[&d, x.buffer(), weight.buffer()], |stream| {
            // SAFETY: shapes, strides and reach were checked, the result overlaps no factor, and `run` keeps the buffers until the work is done; the
            // stream is of the lane's context, in which the kernel was loaded.
            unsafe { kernel.launch(stream, shape, parameters) }.map_err(Into::into)
        })?;
        Ok(new.then_some(d))
    }
}
