//! Broadcast: the root's data, pushed to all, at once or in pieces; or through its scratch memory.

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
    let otherwise = scratch::whole(topology, dtype)?;
    let bytes = elements.saturating_mul(dtype.bytes());
    let packets = Packets::broadcast(bytes, topology.group.size);
    let pushed = pushed::copy(packets, (dtype, otherwise), topology, table);
    Ok(pushed::copied_as(pushed, (elements, otherwise)))
}
