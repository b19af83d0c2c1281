//! The gate between two products.

use crate::{CudaDevice, Launch, memory::check_reach, types};
use brigade_device::{Buffer, Output, Result, SiluMulParams, Stream};
use brigade_kernels::SiluMulParams as Parameters;

/// Columns that a block of `kernels/silu_mul.cu` takes at once.
const TILE: usize = 2048;

impl CudaDevice {
    pub(crate) fn run_silu_mul(
        &self,
        on: &Stream,
        p: &SiluMulParams<'_>,
        output: Output<'_>,
    ) -> Result<Option<Buffer>> {
        let [rows, n] = p.check(&output)?;
        let lane = self.lane(on)?;
        let (from, count) = (p.from.retain(), p.rows.map(|r| r.retain()));
        check_reach(&self.card, "from.memory", &from)?;
        if let Some(count) = &count {
            check_reach(&self.card, "rows", count)?;
        }
        let (d, new) = self.place(lane, output, &[rows, n])?;
        if d.shape().is_empty() {
            return Ok(new.then_some(d));
        }
        let parameters = Parameters {
            out: d.address(),
            from: from.address(),
            count: count.as_ref().map_or(0, Buffer::address),
            rows: rows as u64,
            columns: n as u64,
            out_type: types::float_code(d.dtype()),
            from_type: types::float_code(from.dtype()),
        };
        let mut buffers = vec![&d, &from];
        buffers.extend(&count);
        let k = &self.opened.kernels;
        let shape = Launch {
            programmatic: self.overtakes(lane),
            ..k.shape(rows * n.div_ceil(TILE))
        };
        lane.run(&buffers, |stream| {
            // SAFETY: the shapes were checked: there are twice as many columns as in the result, and one number of rows. `run` keeps the
            // buffers until the work is done, and the stream is of the lane's context, in which the kernel was loaded.
            unsafe { k.silu_mul.launch(stream, shape, parameters) }.map_err(Into::into)
        })?;
        Ok(new.then_some(d))
    }
}
