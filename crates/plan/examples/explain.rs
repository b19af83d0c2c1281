//! Prints what would be done for a few calls, on four ranks of one host:
//! `cargo run -p brigade-plan --example explain`.
#![allow(clippy::print_stdout)]

use brigade_device::{
    Call, CommConfig, DataType, Group, LinearCall, OverlapMode, ParallelMode, QScheme, ReduceOp,
};
use brigade_plan::{Engines, Table, Topology, plan, rows};

fn main() {
    let mode = ParallelMode::Tp;
    let (rank, size) = (1, 4);
    let topology = Topology {
        group: Group { mode, rank, size },
        config: CommConfig::new(mode),
        engines: Engines::host(),
    };
    let linear = |rows: usize, k, n, choice| LinearCall {
        rows: rows::split(rows, size),
        k,
        n,
        input: DataType::BF16,
        output: DataType::BF16,
        scheme: QScheme::None,
        lora: false,
        transpose_a: false,
        three_dimensional: false,
        choice,
    };
    let all_reduce = |elements| Call::AllReduce {
        elements,
        dtype: DataType::BF16,
        output: DataType::BF16,
        op: ReduceOp::Sum,
        choice: None,
    };
    let pieces = Some(OverlapMode::Chunked { pieces: 4 });
    let calls = [
        Call::GatherLinear(linear(512, 4096, 6144, None)),
        Call::GatherLinear(linear(510, 4096, 6144, pieces)),
        Call::GatherLinear(linear(4, 1024, 1024, None)),
        Call::GatherLinear(linear(8192, 8192, 7168, None)),
        Call::GatherLinear(linear(8192, 8192, 7168, Some(OverlapMode::Ring))),
        Call::LinearReduceScatter(linear(512, 6144, 4096, None)),
        all_reduce(1 << 10),
        all_reduce(1 << 20),
    ];
    for call in calls {
        let size = match &call {
            Call::GatherLinear(c) | Call::LinearReduceScatter(c) => {
                format!("{} x {} x {}", c.total_rows(), c.k, c.n)
            }
            Call::AllReduce { elements, .. } => format!("{elements} elements"),
            _ => String::new(),
        };
        let answer = match plan(&call, &topology, &Table::host()) {
            Ok(plan) => plan.to_string(),
            Err(reason) => format!("no: {reason}"),
        };
        println!("{:<26} {size:<20} {answer}", call.operation().name());
    }
}
