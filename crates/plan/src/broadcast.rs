//! Broadcast: the root's data, pushed to all while it is little; or through its scratch memory.

use crate::{
    Table, Topology,
    pushed::{self, Packets},
    reason, scratch,
};
use brigade_device::{DataType, Plan, Reason};

pub(crate) fn plan(
    elements: usize,
    dtype: DataType,
    root: usize,
    topology: &Topology,
    table: &Table,
) -> Result<Plan, Reason> {
    if root >= topology.group.size {
        return Err(reason::root(root, topology.group.size));
    }
    let piece_elements = scratch::whole(topology, dtype)?;
    let bytes = elements.saturating_mul(dtype.bytes());
    Ok(Plan::Copy {
        piece_elements,
        pieces: elements.div_ceil(piece_elements),
        pushed: pushed::copy(
            Packets::broadcast(bytes, topology.group.size),
            dtype,
            topology,
            table,
        ),
    })
}
