//! All-to-all: in every piece, the scratch memory holds a share for each pair; or a message to each peer, of pieces that a slot holds.

use crate::{Topology, scratch};
use brigade_device::{DataType, Plan, Reason};

/// Counts are between pairs, so each pair finds out by itself how many pieces it has: the plan's number is 0.
pub(crate) fn plan(dtype: DataType, topology: &Topology) -> Result<Plan, Reason> {
    let piece_elements = match topology.engines.sends_parts {
        true => slot_bytes(topology) / dtype.bytes(),
        false => scratch::per_rank(topology, dtype)?,
    };
    Ok(Plan::Copy {
        piece_elements,
        pieces: 0,
        pushed: None,
    })
}

/// Bytes of a message that its sender's slot holds: whole packets (`kernels/escaped.cuh`).
fn slot_bytes(topology: &Topology) -> usize {
    const PACKET: usize = 64;
    let share = topology.config.message_bytes / topology.group.size.max(1);
    share.next_multiple_of(PACKET).max(PACKET)
}
