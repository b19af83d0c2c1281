//! All-reduce: one shot while latency decides, two shots when bytes do.

use crate::{
    Table, Topology,
    pushed::{self, Granules},
    reason, scratch,
};
use brigade_device::{AllReduceAlgorithm as A, DataType, Launch, NcclUse, Plan, Reason, SumOrder};

pub(crate) fn plan(
    elements: usize,
    (input, output): (DataType, DataType),
    choice: Option<A>,
    topology: &Topology,
    table: &Table,
) -> Result<Plan, Reason> {
    reason::check_sum(input, output)?;
    let table = table.all_reduce.of(input);
    let (room, size) = (topology.config.all_reduce_bytes, topology.group.size);
    let piece_elements = |algorithm| match algorithm {
        A::OneShotPush | A::TwoShotPush => {
            pushed::piece_elements(algorithm, room, (input, output), size)
                .map(|most| pushed::even(elements, most))
        }
        A::Nccl if input != output => Err(reason::nccl_output(input, output)),
        A::Nccl => Ok(elements),
        _ => scratch::twice(topology, input, output),
    };
    let algorithm = match choice {
        Some(a) if topology.engines.reduces(a) => a,
        Some(A::Nccl) => return Err(reason::no_nccl()),
        Some(a) => return Err(reason::no_algorithm(a)),
        None => {
            let bytes = elements.saturating_mul(input.bytes());
            let pushes = |a| table.pushes(bytes) && piece_elements(a).is_ok();
            let own = by_shots(bytes <= table.one_shot_max_bytes, topology)
                .find(|&a| is_pull(a) || pushes(a));
            let foreign = topology.config.nccl == NcclUse::Quicker
                && topology.engines.nccl
                && input == output
                && table.nccl_from_bytes.is_some_and(|from| bytes >= from);
            match foreign {
                true => A::Nccl,
                false => own.ok_or_else(reason::no_all_reduce)?,
            }
        }
    };
    Ok(Plan::AllReduce {
        algorithm,
        order: match algorithm {
            A::Nccl => SumOrder::Foreign,
            _ => SumOrder::Flat,
        },
        piece_elements: piece_elements(algorithm)?,
        launch: match algorithm {
            A::OneShotPush | A::TwoShotPush => {
                let piece = elements.min(piece_elements(algorithm)?);
                let cut = Granules::new(algorithm, piece, (input, output), size);
                let bytes = elements.saturating_mul(input.bytes());
                table.launch((bytes, size), cut.share, topology.config.sm_budget)
            }
            _ => Launch::default(),
        },
    })
}

/// Those of Brigade that a group has, which all give the same bits: those of one shot first, or those of two.
pub(crate) fn by_shots(one_first: bool, topology: &Topology) -> impl Iterator<Item = A> + Clone {
    let one_shot = [A::OneShotPush, A::OneShotPull];
    let two_shot = [A::TwoShotPush, A::TwoShot];
    let by_shots = if one_first {
        [one_shot, two_shot]
    } else {
        [two_shot, one_shot]
    };
    let engines = topology.engines;
    let ways = by_shots.into_iter().flatten();
    ways.filter(move |&a| engines.reduces(a))
}

/// Whether ranks read each other's scratch memory.
pub(crate) const fn is_pull(algorithm: A) -> bool {
    matches!(algorithm, A::OneShotPull | A::TwoShot)
}
