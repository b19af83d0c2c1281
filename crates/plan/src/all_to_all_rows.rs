//! All-to-all of rows that lists name: through queues, so that nobody has to know how many there are.

use crate::{Topology, fifo::Queues, reason};
use brigade_device::{AllToAllRowsCall, Plan, Reason};

pub(crate) fn plan(call: &AllToAllRowsCall, topology: &Topology) -> Result<Plan, Reason> {
    if !topology.engines.dispatches {
        return Err(reason::no_rows());
    }
    let each: Vec<usize> = call.row_bytes().collect();
    Ok(Queues::of(topology, &each)?.plan())
}
