//! How much of a call passes through one half of the scratch memory at a time.

use crate::{Topology, reason};
use brigade_device::{DataType, Reason};

/// Parts of the scratch memory begin at multiples of this, a cache line and a sector of GPU memory.
const ALIGN_BYTES: usize = 64;

/// Elements that fit with nothing beside them.
pub(crate) fn whole(topology: &Topology, dtype: DataType) -> Result<usize, Reason> {
    some(
        topology.config.scratch_bytes / dtype.bytes(),
        topology,
        dtype.bytes(),
    )
}

/// Elements of each rank's share, when the memory holds one for every rank.
pub(crate) fn per_rank(topology: &Topology, dtype: DataType) -> Result<usize, Reason> {
    let size = topology.group.size.max(1);
    let share_bytes = topology.config.scratch_bytes / size / ALIGN_BYTES * ALIGN_BYTES;
    some(
        share_bytes / dtype.bytes(),
        topology,
        size.saturating_mul(ALIGN_BYTES),
    )
}

/// Elements that fit twice: as they came, and behind them, aligned, as they go.
pub(crate) fn twice(
    topology: &Topology,
    input: DataType,
    output: DataType,
) -> Result<usize, Reason> {
    let have = topology.config.scratch_bytes;
    let need = |p: usize| need_twice(p * input.bytes(), p * output.bytes());
    let both = input.bytes() + output.bytes();
    // Without the gap between the two; the gap costs less than one alignment.
    let most = have / both;
    let least = have.saturating_sub(ALIGN_BYTES) / both;
    let fits = (least..=most)
        .rev()
        .find(|&p| need(p) <= have)
        .unwrap_or(least);
    some(fits, topology, ALIGN_BYTES + both)
}

/// Bytes for both.
fn need_twice(input: usize, output: usize) -> usize {
    input.next_multiple_of(ALIGN_BYTES) + output
}

/// Whole rows of so many elements that fit twice.
pub(crate) fn rows_twice(
    topology: &Topology,
    hidden: usize,
    dtype: DataType,
) -> Result<usize, Reason> {
    match twice(topology, dtype, dtype)? / hidden.max(1) {
        0 => {
            let row = hidden.saturating_mul(dtype.bytes());
            let need = need_twice(row, row);
            Err(reason::scratch_row(topology.config.scratch_bytes, need))
        }
        rows => Ok(rows),
    }
}

fn some(elements: usize, topology: &Topology, need_bytes: usize) -> Result<usize, Reason> {
    if elements > 0 {
        Ok(elements)
    } else {
        Err(reason::scratch(topology, need_bytes))
    }
}
