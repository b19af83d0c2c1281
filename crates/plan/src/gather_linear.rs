//! Gather-linear: rows of all ranks meet this rank's weight.

use crate::{
    Table, Topology,
    overlap::{self, Product, bytes},
    reason, ring,
};
use brigade_device::{LinearCall, OverlapMode, Plan, QScheme, Reason};

/// Bytes of one f32 scale.
const SCALE_BYTES: usize = 4;

pub(crate) fn plan(call: &LinearCall, topology: &Topology, table: &Table) -> Result<Plan, Reason> {
    let in_tiles = overlap::in_tiles(call, true);
    // Tiles of fp8 take a tenth longer than the library's products, which is more than they save.
    let slow = call.scheme == QScheme::Fp8PerTensor;
    let preferred = match table.overlap {
        OverlapMode::Tiles if in_tiles.is_err() || slow => overlap::instead(OverlapMode::Tiles),
        mode => mode,
    };
    let (mode, instead_of) = overlap::choose(call, topology, preferred, |forced| {
        capacity(call, topology)?;
        if call.choice == Some(OverlapMode::Tiles) {
            in_tiles?;
        }
        if forced {
            return Ok(());
        }
        let have = (overlap::gathered_bytes(call), Product::gathered(call));
        overlap::pays(call, topology, have, &table.gather)
    })?;
    let (rank, size) = (topology.group.rank, topology.group.size);
    let order = match mode {
        OverlapMode::Pull => ring::pull_order(rank, size),
        // Who pushes begins with the next rank, so the chunk of the one before comes first.
        _ => ring::gather_order(rank, size),
    };
    let plan = overlap::finish(call, mode, order, instead_of);
    Ok(Plan::GatherLinear(plan))
}

/// Rows and scales of all ranks lie in one half of their regions at the same time.
fn capacity(call: &LinearCall, topology: &Topology) -> Result<(), Reason> {
    let config = &topology.config;
    let rows = call.total_rows();
    let need = overlap::gathered_bytes(call);
    if need > config.gather_bytes {
        return Err(reason::capacity("gather_bytes", need, config.gather_bytes));
    }
    let scales = match call.scheme {
        QScheme::Int8PerToken => rows,
        QScheme::Fp8PerTensor => topology.group.size,
        _ => 0,
    };
    let need = bytes(&[scales, SCALE_BYTES]);
    if need > config.gather_scale_bytes {
        return Err(reason::capacity(
            "gather_scale_bytes",
            need,
            config.gather_scale_bytes,
        ));
    }
    Ok(())
}
