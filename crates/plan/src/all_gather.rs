//! All-gather: the rows of every rank, pushed to all, at once or in pieces; or through the scratch memory, from where peers fetch
//! them.

use crate::{
    Table, Topology, overlap,
    pushed::{self, Packets},
    scratch,
};
use brigade_device::{DataType, PerRank, Plan, Reason};

pub(crate) fn plan(
    rows: &[usize],
    row_len: usize,
    dtype: DataType,
    topology: &Topology,
    table: &Table,
) -> Result<Plan, Reason> {
    overlap::check_rows(rows, topology)?;
    let otherwise = scratch::whole(topology, dtype)?;
    let bytes = |rows: usize| rows.saturating_mul(row_len).saturating_mul(dtype.bytes());
    let bytes: PerRank = rows.iter().map(|&rows| bytes(rows)).collect();
    let most_rows = rows.iter().max().copied().unwrap_or(0);
    let all = most_rows.saturating_mul(row_len);
    let packets = Packets::gathered(&bytes);
    let pushed = pushed::copy(packets, (dtype, otherwise), topology, table);
    Ok(pushed::copied_as(pushed, (all, otherwise)))
}
