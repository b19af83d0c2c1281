//! Rows of several machines, few and many: which path plans take.

#![allow(clippy::unwrap_used, reason = "tests")]

use brigade_device::{
    DataType, HierarchicalCall, HierarchicalOperation as Operation, HierarchicalPlan,
    HierarchyConfig, Machines, ParallelMode, PerRank, ReduceOp,
};
use brigade_plan::hierarchical::{Costs, Wire, plan};

/// One call inside and one across, where slices would have ranks meet first, or copy rows of all ranks one by one; of many bytes, rows of the
/// whole machine keep the rail for too long.
#[test]
fn few_rows_are_scattered_and_gathered_as_a_whole() {
    let config = HierarchyConfig::new(ParallelMode::Tp);
    // Rails of 10 us and 1 GB/s.
    let host = Costs::host().with_wire(Wire {
        latency_ns: 10_000,
        bytes_per_us: 1000,
    });
    let of = |rows: usize, gathers: bool, costs: &Costs| {
        let machines = Machines::cut(8, 2).unwrap();
        let rows = PerRank::from_elem(rows, machines.size());
        let op = ReduceOp::Sum;
        let operation = match gathers {
            true => Operation::AllGather { rows, row_len: 64 },
            false => Operation::ReduceScatter {
                rows,
                row_len: 64,
                op,
            },
        };
        let call = HierarchicalCall {
            machines,
            operation,
            dtype: DataType::BF16,
            output: DataType::BF16,
            choice: None,
        };
        let plan = plan(&call, &config, costs).unwrap();
        matches!(plan, HierarchicalPlan::Whole { .. })
    };
    assert!(of(1, true, &host) && of(1, true, &Costs::cuda()));
    assert!(!of(1 << 12, true, &host) && !of(1 << 14, true, &Costs::cuda()));
    // A copy costs nothing on a host.
    assert!(!of(1, false, &host) && of(1, false, &Costs::cuda()));
    assert!(!of(1 << 14, false, &Costs::cuda()));
}
