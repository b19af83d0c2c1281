//! All-gather: the rows of every rank, pushed to all while they are few; or through the scratch memory, from where peers fetch
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
    let piece_elements = scratch::whole(topology, dtype)?;
    let bytes = |rows: usize| rows.saturating_mul(row_len).saturating_mul(dtype.bytes());
    let bytes: PerRank = rows.iter().map(|&rows| bytes(rows)).collect();
    let most_rows = rows.iter().max().copied().unwrap_or(0);
    Ok(Plan::Copy {
        piece_elements,
        pieces: most_rows.saturating_mul(row_len).div_ceil(piece_elements),
        pushed: pushed::copy(Packets::gathered(&bytes), dtype, topology, table),
    })
}
