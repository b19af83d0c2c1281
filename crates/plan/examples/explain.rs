//! Prints what would be done for a few calls, on four ranks of one host, and from which chunk on overlap pays there:
//! `cargo run -p brigade-plan --example explain`. With a model of GPU, as the driver calls it, for four of those, linked by
//! NVLink or else as said: `cargo run -p brigade-plan --example explain -- "NVIDIA H200" pcie`.
#![allow(clippy::print_stdout)]

use brigade_device::{
    Call, CommConfig, DataType, Group, LinearCall, OverlapMode, ParallelMode, QScheme, Reason,
    ReduceOp,
};
use brigade_plan::{
    Engines, Table, Topology,
    crossover::{Gpus, Links},
    plan, rows,
};

fn main() {
    let mode = ParallelMode::Tp;
    let (rank, size) = (1, 4);
    let (engines, table) = match device(size) {
        Ok(device) => device,
        Err(why) => {
            println!("{why}");
            return;
        }
    };
    let topology = Topology {
        group: Group { mode, rank, size },
        config: CommConfig::new(mode),
        engines,
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
        let answer = match plan(&call, &topology, &table) {
            Ok(plan) => plan.to_string(),
            Err(reason) => format!("no: {reason}"),
        };
        println!("{:<26} {size:<20} {answer}", call.operation().name());
    }
    for (operation, crossovers) in [
        ("gather-linear", &table.gather),
        ("its twin", &table.scatter),
    ] {
        for (dtype, crossover) in crossovers.each() {
            let from = match crossover.min_chunk_bytes {
                Some(bytes) => format!("from {bytes} bytes"),
                None => "never".to_owned(),
            };
            let (dtype, source) = (format!("{dtype:?}").to_lowercase(), &crossover.source);
            println!("{operation:<26} {dtype:<4} overlap pays {from:<20} {source}");
        }
    }
    println!("the ranks vote on {:016x}", table.digest());
}

/// The host, or GPUs of the model that the first argument names, by the links that the second one names.
fn device(ranks: usize) -> Result<(Engines, Table), Reason> {
    let mut arguments = std::env::args().skip(1);
    let Some(model) = arguments.next() else {
        return Ok((Engines::host(), Table::host()));
    };
    let links = match arguments.next().as_deref() {
        None | Some("nvlink") => Links::Nvlink,
        Some("pcie") => Links::Pcie,
        Some(_) => Links::Unknown,
    };
    // GPUs of compute capability 9.0.
    let hopper = ["H100", "H200", "H20"]
        .iter()
        .any(|name| model.contains(name));
    let gpus = Gpus {
        model: Some(model),
        links,
        ranks,
    };
    Ok((Engines::cuda(hopper, true), Table::cuda(&gpus)?))
}
