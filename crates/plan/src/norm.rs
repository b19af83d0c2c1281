//! All-reduce with a norm: as an all-reduce of one type, but rows stay whole.

use crate::{
    Table, Topology, all_reduce,
    pushed::{self, RowShares},
    reason, scratch,
};
use brigade_device::{AllReduceAlgorithm as A, DataType, Launch, Plan, Reason, SumOrder};

pub(crate) fn plan(
    (rows, hidden): (usize, usize),
    dtype: DataType,
    choice: Option<A>,
    topology: &Topology,
    table: &Table,
) -> Result<Plan, Reason> {
    reason::check_sum(dtype, dtype)?;
    if !topology.engines.norms {
        return Err(reason::no_norm());
    }
    let figures = table.all_reduce.of(dtype);
    let (room, size) = (topology.config.all_reduce_bytes, topology.group.size);
    let piece_rows = |algorithm| match algorithm {
        A::OneShotPush | A::TwoShotPush => {
            pushed::piece_rows(algorithm, room, (hidden, dtype), size)
        }
        _ => scratch::rows_twice(topology, hidden, dtype),
    };
    let algorithm = match choice {
        Some(a) if topology.engines.reduces(a) && a != A::Nccl => a,
        Some(a) => return Err(reason::no_algorithm(a)),
        None => {
            let bytes = rows.saturating_mul(hidden).saturating_mul(dtype.bytes());
            let pushes = |a| figures.pushes(bytes) && piece_rows(a).is_ok();
            all_reduce::choose(bytes, topology, figures, pushes)?
        }
    };
    let most = piece_rows(algorithm)?;
    Ok(Plan::AllReduce {
        algorithm,
        order: SumOrder::Flat,
        piece_elements: most
            .checked_mul(hidden)
            .unwrap_or_else(|| usize::MAX / hidden * hidden),
        launch: match algorithm {
            A::OneShotPush | A::TwoShotPush => {
                let cut = RowShares::new(algorithm, (rows.min(most), hidden), dtype, size);
                launch(&cut, figures.max_blocks, topology.config.sm_budget)
            }
            _ => Launch::default(),
        },
    })
}

/// A block for each row, with a thread for each granule, as far as there are so many. A GPU that finds more places may add blocks that push
/// alone, or blocks with half of the threads where rows are many: results do not depend on it.
fn launch(cut: &RowShares, max_blocks: u16, sm_budget: Option<u16>) -> Launch {
    let most = usize::from(max_blocks.min(sm_budget.unwrap_or(u16::MAX)).max(1));
    let threads = [128, 256, 512, 1024]
        .into_iter()
        .find(|threads| cut.row_granules <= *threads);
    Launch {
        blocks: cut.rows.clamp(1, most) as u16,
        threads: threads.unwrap_or(1024) as u16,
    }
}
