//! Adapters laid out for products by tiles, by the kernel of `kernels/adapters.cu`.

use crate::{
    CudaDevice,
    gemm_flags::{Rows, Tiled},
    job::Job,
    kernels::blocks_for,
    lane::Lane,
};
use brigade_device::{Buffer, DataType, Result};
use brigade_kernels::AdaptersParams;
use std::sync::Arc;

/// Adapters as the kernel takes them, in memory of its own.
pub(crate) struct Low {
    /// All first factors, transposed: `[columns of all, inner]`.
    pub(crate) down: Rows,
    /// All second factors, transposed: `[columns, stride]`.
    pub(crate) up: Rows,
    /// Rows times first factors.
    pub(crate) low: Rows,
    pub(crate) flags: u64,
    /// What holds all of these.
    pub(crate) memory: Buffer,
}

/// The bits of an element's exponent. Adapters have a type of two bytes.
fn exponent(dtype: DataType) -> u64 {
    match dtype {
        DataType::F16 => 0x7c00,
        _ => 0x7f80,
    }
}

impl Job<'_> {
    /// Lays the adapters of a product out, if there are any: in front of the call's steps, since a product that begins beside them has
    /// waited for nothing else. Steps must come between the two: they wait for this.
    pub(crate) fn adapters(&self, p: &Tiled) -> Result<Option<Low>> {
        self.core.device.low(self.lane, p, None)
    }
}

impl CudaDevice {
    /// Lays the adapters out, if there are any, and something to add them to; and makes a state for a product that has no group.
    pub(crate) fn low(
        &self,
        lane: &Arc<Lane>,
        p: &Tiled,
        state: Option<&Buffer>,
    ) -> Result<Option<Low>> {
        if p.runs.is_empty() || p.is_empty() {
            return Ok(None);
        }
        let (used, bytes) = (p.low_columns(), p.dtype.bytes());
        let stride = used.next_multiple_of(16 / bytes);
        let (rows, columns, inner) = (p.all.rows, p.weight.rows, p.weight.columns);
        let mut end = 0;
        let starts = [
            used * inner * bytes,
            columns * stride * bytes,
            rows * stride * bytes,
            p.bands() * size_of::<u32>(),
        ]
        .map(|bytes| {
            let start = end;
            end = (start + bytes).next_multiple_of(128);
            start as u64
        });
        let memory = self.scratch(lane, DataType::U8, &[end])?;
        let [down, up, low, flags] = starts.map(|start| memory.address() + start);
        let mut parameters = AdaptersParams {
            down,
            up,
            flags,
            flag_count: p.bands() as u64,
            state: state.map_or(0, Buffer::address),
            inner: inner as u64,
            columns: columns as u64,
            stride: stride as u64,
            exponent: exponent(p.dtype),
            count: p.runs.len() as u64,
            ..AdaptersParams::default()
        };
        for (i, run) in p.runs.iter().enumerate() {
            parameters.first[i] = run.first;
            parameters.second[i] = run.second;
            parameters.column[i] = run.column as u32;
            parameters.width[i] = run.width as u32;
        }
        let kernels = &self.opened.kernels;
        // A thread for each eight elements of a row of a first factor, and of `up`; and a block for each column of `down`.
        let eights: usize = p.runs.iter().map(|run| run.width.div_ceil(8)).sum();
        let blocks = blocks_for(eights * inner + columns * stride / 8) + stride;
        let kept: Vec<_> = p.buffers.iter().chain([&memory]).chain(state).collect();
        // Launched plainly: it lets the next kernel start, which may begin before it waits, since all in front of this one has ended then.
        // SAFETY: factors lie in buffers of the call, the rest in the memory just taken.
        unsafe { kernels.launch(&kernels.adapters, lane, &kept, blocks, parameters)? };
        let of = |address, rows, columns| Rows {
            address,
            rows,
            columns,
        };
        Ok(Some(Low {
            down: of(down, used, inner),
            up: of(up, columns, stride),
            low: of(low, rows, stride),
            flags,
            memory,
        }))
    }
}
