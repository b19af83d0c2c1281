//! Broadcast: the root's data, through its scratch memory.

use crate::{Topology, reason, scratch};
use brigade_device::{DataType, Plan, Reason};

pub(crate) fn plan(
    elements: usize,
    dtype: DataType,
    root: usize,
    topology: &Topology,
) -> Result<Plan, Reason> {
    if root >= topology.group.size {
        return Err(reason::root(root, topology.group.size));
    }
    let piece_elements = scratch::whole(topology, dtype)?;
    Ok(Plan::Copy {
        piece_elements,
        pieces: elements.div_ceil(piece_elements),
    })
}
