//! What is done for a call, and why, in one line for people.

use crate::{
    Table, Topology,
    crossover::Crossover,
    experts,
    fifo::Queues,
    overlap::{self, Product},
    plan,
    pushed::{self, Arriving, Packets},
    tuned,
};
use brigade_device::{Call, LinearCall, OverlapPlan, PerRank, Plan, Reason};

/// What is done for any call, and what the choice rests on, in one line for people: mode, algorithm or transport, its launch, the figure
/// that decided and where it is from. Calls with experts are told by [`experts::told`].
///
/// # Errors
/// As [`plan`](crate::plan()).
pub fn told(call: &Call, topology: &Topology, table: &Table) -> Result<String, Reason> {
    let plan = plan(call, topology, table)?;
    let parts = match (call, &plan) {
        (
            Call::Dispatch(_)
            | Call::Combine(_)
            | Call::LowLatencyDispatch(_)
            | Call::LowLatencyCombine(_),
            _,
        ) => return experts::told(call, topology, table),
        (Call::GatherLinear(c), Plan::GatherLinear(p)) => {
            let have = (overlap::gathered_bytes(c), Product::gathered(c));
            linear(c, p, have, table.gather.of(c.scheme))
        }
        (Call::LinearReduceScatter(c), Plan::LinearReduceScatter(p)) => {
            let have = (overlap::scattered_bytes(c), Product::scattered(c));
            linear(c, p, have, table.scatter.of(c.scheme))
        }
        (
            Call::AllReduce { dtype, choice, .. } | Call::AllReduceNorm { dtype, choice, .. },
            Plan::AllReduce {
                algorithm, launch, ..
            },
        ) => {
            let told = tuned::told(*algorithm, *launch, table.all_reduce.of(*dtype));
            let forced = choice.map_or("", |_| "forced");
            vec![plan.to_string(), forced.to_owned(), told]
        }
        (
            Call::AllGather {
                rows,
                row_len,
                dtype,
            },
            _,
        ) => {
            let bytes = |rows: usize| rows.saturating_mul(row_len * dtype.bytes());
            let bytes: PerRank = rows.iter().map(|&rows| bytes(rows)).collect();
            copied(
                &plan,
                &pushed::copied(Packets::gathered(&bytes), topology),
                topology,
                table,
            )
        }
        (
            Call::Broadcast {
                elements, dtype, ..
            },
            _,
        ) => {
            let bytes = elements.saturating_mul(dtype.bytes());
            let packets = Packets::broadcast(bytes, topology.group.size);
            copied(&plan, &pushed::copied(packets, topology), topology, table)
        }
        (
            Call::ReduceScatter {
                rows,
                row_len,
                dtype,
                ..
            },
            _,
        ) => {
            let most = rows.iter().max().copied().unwrap_or(0);
            let arriving = pushed::scattered(most.saturating_mul(*row_len), *dtype, topology);
            copied(&plan, &arriving, topology, table)
        }
        (Call::AllToAllRows(c), _) => {
            let each: Vec<usize> = c.row_bytes().collect();
            vec![Queues::of(topology, &each)?.told(&topology.config)]
        }
        _ => vec![plan.to_string()],
    };
    let parts: Vec<_> = parts.into_iter().filter(|part| !part.is_empty()).collect();
    Ok(parts.join("; "))
}

/// Mode or why there is none, the mean chunk, what the product has, and from where on overlap pays.
fn linear(
    call: &LinearCall,
    plan: &OverlapPlan,
    (travels_bytes, product): (usize, Product),
    crossover: &Crossover,
) -> Vec<String> {
    let mean = travels_bytes / call.rows.len().max(1);
    let why = match (&plan.instead_of, call.choice) {
        (Some(reason), _) => format!("{} ({})", plan.mode, reason.what),
        (None, Some(_)) => format!("{}, forced", plan.mode),
        (None, None) => plan.mode.to_string(),
    };
    let from = match crossover.least {
        Some(least) => format!("overlap pays from {least} on"),
        None => "overlap paid at no size".to_owned(),
    };
    vec![
        why,
        format!("mean chunk of {mean} bytes"),
        format!(
            "product of {} elements, {} multiplications",
            product.outputs, product.multiplications
        ),
        from,
        crossover.source.to_string(),
    ]
}

/// Whether a copy or a reduce-scatter is pushed, by which launch, and why or why not.
fn copied(plan: &Plan, arriving: &Arriving, topology: &Topology, table: &Table) -> Vec<String> {
    let (launch, pieces) = match plan {
        Plan::Copy { pushed, pieces, .. } | Plan::ReduceScatter { pushed, pieces, .. } => {
            (*pushed, *pieces)
        }
        _ => (None, 0),
    };
    let launched = launch.map_or(String::new(), |launch| {
        let s = if launch.blocks == 1 { "" } else { "s" };
        format!("{} block{s} of {} threads", launch.blocks, launch.threads)
    });
    vec![
        plan.to_string(),
        launched,
        arriving.why(launch.map(|_| pieces), topology, table),
        table.copies.source.to_string(),
    ]
}
