//! Reduce-scatter: shares are pushed to their owners, at once or in pieces; or in every piece, the scratch memory holds a share for
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
    let otherwise = scratch::per_rank(topology, input)?;
    let most = elements.iter().max().copied().unwrap_or(0);
    let pushed = pushed::scatter(&elements, (input, otherwise), topology, table);
    // What holds the parts of all ranks takes them in one step.
    let parts = most
        .saturating_mul(topology.group.size)
        .saturating_mul(input.bytes());
    let in_steps =
        match topology.engines.pushes_parts && parts <= topology.config.reduce_scatter_bytes {
            true => 1,
            false => most.div_ceil(otherwise),
        };
    Ok(Plan::ReduceScatter {
        order: SumOrder::Flat,
        piece_elements: pushed.map_or(otherwise, |p| p.piece_elements),
        pieces: pushed.map_or(in_steps, |p| p.pieces),
        pushed: pushed.map(|p| p.launch),
    })
}
