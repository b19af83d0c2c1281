//! A residual and a norm behind a sum that another call made (`kernels/residual_norm.cu`).

use crate::{
    CudaDevice, Kernel, KernelSet, Launch, Missing,
    memory::check_reach,
    norm::{Arguments, TYPES},
    pushed::MOST_ELEMENTS,
};
use brigade_device::{Device, Error, ResidualNormParams, Result, Stream};
use brigade_kernels::{NORM_COLUMNS, NORM_THREADS, ResidualNormParams as Parameters};
use brigade_plan::pushed::GRANULE_BYTES;
use std::sync::Arc;

/// Granules of a row that a thread holds at most.
const HELD: u32 = NORM_COLUMNS / 8 / NORM_THREADS;

/// By type.
#[derive(Debug)]
pub(crate) struct ResidualNormKernels([Kernel<Parameters>; TYPES.len()]);

impl ResidualNormKernels {
    pub(crate) fn load(set: &Arc<KernelSet>) -> Result<Self, Missing> {
        let [a, b, c] = TYPES.map(|dtype| set.variant(format!("_{dtype}")));
        Ok(Self([a?, b?, c?]))
    }
}

impl CudaDevice {
    pub(crate) fn run_residual_norm(&self, on: &Stream, p: &ResidualNormParams<'_>) -> Result<()> {
        let [rows, hidden] = p.check()?;
        let lane = self.lane(on)?;
        let (from, views) = (p.from.retain(), [p.residual, p.weight, p.sum.as_view()]);
        check_reach(&self.card, "from.memory", &from)?;
        let of = Arguments::of(&self.card, views, p.eps, &p.normed)?;
        if hidden > MOST_ELEMENTS {
            let want = format!("rows of at most {MOST_ELEMENTS} elements");
            return Err(Error::invalid("from.shape", p.from.shape(), want));
        }
        let dtype = from.dtype();
        let granules = (hidden * dtype.bytes()).div_ceil(GRANULE_BYTES) as u32;
        let wide = of.are_wide(Some(&from));
        let kernels = &self.opened.kernels.residual_norms.0;
        let kernel = TYPES.iter().position(|&t| t == dtype).map(|i| &kernels[i]);
        let kernel =
            kernel.ok_or_else(|| Error::invalid("from.dtype", dtype, "f32, f16 or bf16"))?;
        // No piece has more granules than numbers of 32 bits count.
        let step = (MOST_ELEMENTS / hidden).max(1);
        lane.run(&of.with(&from), |stream| {
            for first in (0..rows).step_by(step) {
                let count = step.min(rows - first);
                let at = |address: u64, bytes: usize| address + (first * bytes) as u64;
                let row_bytes = hidden * dtype.bytes();
                let parameters = Parameters {
                    from: at(from.address(), row_bytes),
                    residual: at(of.residual.address(), row_bytes),
                    weight: of.weight.address(),
                    sum: at(of.sum.address(), row_bytes),
                    normed: at(of.normed.address(), hidden * of.normed.dtype().bytes()),
                    scales: of
                        .scales
                        .as_ref()
                        .map_or(0, |s| at(s.address(), size_of::<f32>())),
                    rows: count as u32,
                    hidden: hidden as u32,
                    granules,
                    wide: u32::from(wide),
                    eps: of.eps.to_bits(),
                    scale: of.scale.to_bits(),
                    form: of.form,
                    reserved: 0,
                };
                let shape = shape(count, granules, wide, u32::from(self.info().sms));
                // SAFETY: shapes, types and reach were checked, and `run` keeps the buffers until the work is done; the stream is
                // of the lane's context, in which the kernel was loaded.
                unsafe { kernel.launch(stream, shape, parameters) }?;
            }
            Ok(())
        })
    }
}

/// A block for each row, as many as multiprocessors hold. Where there are few rows, a thread has a granule, and else two; threads of
/// rows that do not fit registers, or are not whole granules, are a power of two.
fn shape(rows: usize, granules: u32, wide: bool, sms: u32) -> Launch {
    let held = if rows <= sms as usize { 1 } else { HELD };
    let threads = match wide && granules <= HELD * NORM_THREADS {
        true => granules.div_ceil(held).next_multiple_of(32),
        false => granules.min(NORM_THREADS).next_power_of_two(),
    }
    .clamp(32, NORM_THREADS);
    let most = sms * (NORM_THREADS / threads);
    Launch::grid(u32::try_from(rows).unwrap_or(most).min(most), threads)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// What the kernel relies on: rows that it holds fit its threads, and all others have a power of two of them.
    #[test]
    fn threads_suit_rows() {
        for granules in [1, 31, 32, 33, 96, 512, 700, 1024, 1025, 2048, 2049, 1 << 20] {
            for wide in [false, true] {
                for rows in [1, 132, 133, 10_000] {
                    let Launch {
                        blocks, threads, ..
                    } = shape(rows, granules, wide, 132);
                    let what = format!("{rows} rows of {granules}, {wide}: {blocks} of {threads}");
                    assert!(
                        threads.is_multiple_of(32) && threads <= NORM_THREADS,
                        "{what}"
                    );
                    assert!(blocks >= 1 && blocks as usize <= rows, "{what}");
                    if !(wide && granules <= HELD * threads) {
                        assert!(threads.is_power_of_two(), "{what}");
                    }
                }
            }
        }
    }
}
