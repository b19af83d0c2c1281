//! All-reduce: one shot while latency decides, two shots when bytes do.

use crate::{Table, Topology, pushed, reason, scratch};
use brigade_device::{AllReduceAlgorithm as A, DataType, Launch, Plan, Reason, SumOrder};

pub(crate) fn plan(
    elements: usize,
    (input, output): (DataType, DataType),
    choice: Option<A>,
    topology: &Topology,
    table: &Table,
) -> Result<Plan, Reason> {
    reason::check_sum(input, output)?;
    let algorithm = match choice {
        Some(a) if topology.engines.reduces(a) => a,
        Some(a) => return Err(reason::no_algorithm(a)),
        None => choose(elements.saturating_mul(input.bytes()), topology, table)?,
    };
    let piece_elements = match algorithm {
        A::OneShotPush | A::TwoShotPush => pushed::piece_elements(
            algorithm,
            topology.config.all_reduce_bytes,
            (input, output),
            topology.group.size,
        )?,
        _ => scratch::twice(topology, input, output)?,
    };
    Ok(Plan::AllReduce {
        algorithm,
        order: match algorithm {
            A::Nccl => SumOrder::Foreign,
            _ => SumOrder::Flat,
        },
        piece_elements,
        launch: Launch::default(),
    })
}

/// Never NCCL: its sums have an order of their own, which only the caller can allow.
fn choose(bytes: usize, topology: &Topology, table: &Table) -> Result<A, Reason> {
    let by_size = if bytes <= table.one_shot_max_bytes {
        [A::OneShotPush, A::OneShotPull, A::TwoShot]
    } else {
        [A::TwoShot, A::OneShotPush, A::OneShotPull]
    };
    by_size
        .into_iter()
        .find(|&a| topology.engines.reduces(a))
        .ok_or_else(reason::no_all_reduce)
}
