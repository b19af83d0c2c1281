//! Reduce-scatter: in every piece, the scratch memory holds a share for each rank.

use crate::{Topology, overlap, reason, scratch};
use brigade_device::{DataType, Plan, Reason, SumOrder};

pub(crate) fn plan(
    rows: &[usize],
    (input, output): (DataType, DataType),
    topology: &Topology,
) -> Result<Plan, Reason> {
    overlap::check_rows(rows, topology)?;
    reason::check_sum(input, output)?;
    Ok(Plan::ReduceScatter {
        order: SumOrder::Flat,
        piece_elements: scratch::per_rank(topology, input)?,
    })
}
