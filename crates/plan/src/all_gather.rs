//! All-gather: the rows of every rank, through the scratch memory, from where peers fetch them.

use crate::{Topology, overlap, scratch};
use brigade_device::{DataType, Plan, Reason};

pub(crate) fn plan(
    rows: &[usize],
    row_len: usize,
    dtype: DataType,
    topology: &Topology,
) -> Result<Plan, Reason> {
    overlap::check_rows(rows, topology)?;
    let piece_elements = scratch::whole(topology, dtype)?;
    let most_rows = rows.iter().max().copied().unwrap_or(0);
    Ok(Plan::Copy {
        piece_elements,
        pieces: most_rows.saturating_mul(row_len).div_ceil(piece_elements),
    })
}
