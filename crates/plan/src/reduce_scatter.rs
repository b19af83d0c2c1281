//! Reduce-scatter: shares are pushed to their owners while they are small; or in every piece, the scratch memory holds a share for
//! each rank.

use crate::{Table, Topology, overlap, pushed, reason, scratch};
use brigade_device::{DataType, PerRank, Plan, Reason, SumOrder};

pub(crate) fn plan(
    rows: &[usize],
    row_len: usize,
    (input, output): (DataType, DataType),
    topology: &Topology,
    table: &Table,
) -> Result<Plan, Reason> {
    overlap::check_rows(rows, topology)?;
    reason::check_sum(input, output)?;
    let elements: PerRank = rows.iter().map(|r| r.saturating_mul(row_len)).collect();
    Ok(Plan::ReduceScatter {
        order: SumOrder::Flat,
        piece_elements: scratch::per_rank(topology, input)?,
        pushed: pushed::scatter(&elements, input, topology, table),
    })
}
