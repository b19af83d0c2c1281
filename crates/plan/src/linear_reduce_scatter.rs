//! The twin of gather-linear: parts of sums are computed chunk by chunk, and sent straight to their owners.

use crate::{
    Table, Topology,
    overlap::{self, Product, bytes},
    reason, ring,
};
use brigade_device::{LinearCall, OverlapMode, Plan, Reason};

pub(crate) fn plan(call: &LinearCall, topology: &Topology, table: &Table) -> Result<Plan, Reason> {
    let in_tiles = overlap::in_tiles(call, false);
    // Parts exist only once their gemm is done, so there is nothing to fetch ahead of it.
    let preferred = match table.overlap {
        OverlapMode::Tiles if in_tiles.is_ok() => OverlapMode::Tiles,
        mode @ (OverlapMode::Pull | OverlapMode::Tiles) => overlap::instead(mode),
        mode => mode,
    };
    let (mode, instead_of) = overlap::choose(call, topology, preferred, |forced| {
        if call.choice == Some(OverlapMode::Pull) {
            return Err(reason::pull_twin());
        }
        capacity(call, topology)?;
        if call.choice == Some(OverlapMode::Tiles) {
            in_tiles?;
        }
        if forced {
            return Ok(());
        }
        let have = (overlap::scattered_bytes(call), Product::scattered(call));
        overlap::pays(call, topology, have, &table.scatter)
    })?;
    let order = ring::scatter_order(topology.group.rank, topology.group.size);
    let plan = overlap::finish(call, mode, order, instead_of);
    Ok(Plan::LinearReduceScatter(plan))
}

/// The parts of all ranks for the largest chunk lie in its owner's region at the same time.
fn capacity(call: &LinearCall, topology: &Topology) -> Result<(), Reason> {
    let most = call.rows.iter().max().copied().unwrap_or(0);
    let need = bytes(&[topology.group.size, most, call.n, call.output.bytes()]);
    let have = topology.config.reduce_scatter_bytes;
    if need > have {
        return Err(reason::capacity("reduce_scatter_bytes", need, have));
    }
    Ok(())
}
