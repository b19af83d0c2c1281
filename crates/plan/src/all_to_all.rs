//! All-to-all: in every piece, the scratch memory holds a share for each pair.

use crate::{Topology, scratch};
use brigade_device::{DataType, Plan, Reason};

/// Counts are between pairs, so each pair finds out by itself how many pieces it has: the plan's number is 0.
pub(crate) fn plan(dtype: DataType, topology: &Topology) -> Result<Plan, Reason> {
    Ok(Plan::Copy {
        piece_elements: scratch::per_rank(topology, dtype)?,
        pieces: 0,
        pushed: None,
    })
}
