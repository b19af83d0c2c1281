//! The gate between two products.

use crate::{device::HostDevice, element, memory::writing, queue::HostQueue};
use brigade_device::{Buffer, Output, Result, SiluMulParams, Stream};

impl HostDevice {
    pub(crate) fn run_silu_mul(
        &self,
        on: &Stream,
        p: &SiluMulParams<'_>,
        output: Output<'_>,
    ) -> Result<Option<Buffer>> {
        let [rows, n] = p.check(&output)?;
        let (d, new) = self.place(output, &[rows, n])?;
        let (from, count, out) = (p.from.retain(), p.rows.map(|r| r.retain()), d.clone());
        HostQueue::of(on)?.run(move || {
            let inputs: Vec<&Buffer> = std::iter::once(&from).chain(&count).collect();
            writing(&out, &inputs, |bytes, inputs| {
                let count = inputs.get(1).map_or(rows, |count| {
                    let count = bytemuck::cast_slice::<_, i32>(count).first();
                    count.map_or(0, |&c| usize::try_from(c).unwrap_or(0))
                });
                if n == 0 {
                    return Ok(());
                }
                let (from_row, to_row) = (2 * n * from.dtype().bytes(), n * out.dtype().bytes());
                let (mut both, mut gated) = (vec![0.0; 2 * n], vec![0.0; n]);
                let each = inputs[0].chunks_exact(from_row).take(count);
                for (row, to) in each.zip(bytes.chunks_exact_mut(to_row)) {
                    element::load(from.dtype(), row, &mut both);
                    let (gate, up) = both.split_at(n);
                    for ((to, gate), up) in gated.iter_mut().zip(gate).zip(up) {
                        *to = element::canonical(gate / (1.0 + (-gate).exp()) * up);
                    }
                    element::store(out.dtype(), &gated, to);
                }
                Ok(())
            })
        })?;
        Ok(new.then_some(d))
    }
}
