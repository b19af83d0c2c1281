//! Prints what would be done for a few calls, on four ranks of one host, from which chunk on overlap pays there, and what
//! the choice of all-reduces rests on: `cargo run -p brigade-plan --example explain`. With a model of GPU, as the driver
//! calls it, for four of those, linked by NVLink or else as said, or for as many as are said:
//! `cargo run -p brigade-plan --example explain -- "NVIDIA H200" nvlink 2`. A number behind that is the most multiprocessors
//! that communication may use.
#![allow(clippy::print_stdout)]

use brigade_device::{
    Arrangement, Call, CombineCall, CombineSum, CommConfig, DataType, DispatchCall, Group,
    LinearCall, OverlapMode, ParallelMode, PerRank, PlacementCall, Plan, QScheme, Reason,
    ReceivedIds, ReduceOp,
};
use brigade_plan::{
    Engines, Table, Topology,
    crossover::{Gpus, Links},
    experts, plan, rows, tuned,
};

fn main() {
    let mode = ParallelMode::Tp;
    let words: Vec<String> = std::env::args().skip(1).collect();
    let number = |at: usize| words.get(at).and_then(|word| word.parse().ok());
    let (rank, size) = (1, number(2).unwrap_or(4).max(2));
    let (engines, table) = match device(&words, size) {
        Ok(device) => device,
        Err(why) => {
            println!("{why}");
            return;
        }
    };
    let mut topology = Topology {
        group: Group { mode, rank, size },
        config: CommConfig::new(mode),
        engines,
    };
    topology.config.sm_budget = number(3).and_then(|sms| u16::try_from(sms).ok());
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
        all_reduce(1 << 17),
        all_reduce(1 << 20),
        all_reduce(1 << 25),
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
            Ok(plan) => told(&plan, &table),
            Err(reason) => format!("no: {reason}"),
        };
        println!("{:<26} {size:<20} {answer}", call.operation().name());
    }
    topology.config = CommConfig {
        sm_budget: topology.config.sm_budget,
        ..CommConfig::new(ParallelMode::Ep)
    };
    for call in [16, 128, 4096].into_iter().flat_map(with_experts) {
        let answer = match experts::told(&call, &topology, &table) {
            Ok(told) => told,
            Err(reason) => format!("no: {reason}"),
        };
        println!("{:<26} {answer}", call.operation().name());
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
    for (dtype, figures) in table.all_reduce.each() {
        let blocks = figures.max_blocks;
        let pushes = match figures.pull_from_bytes {
            Some(0) => "pushes nothing".to_owned(),
            Some(bytes) => format!("pushes less than {bytes} bytes, {blocks} blocks at most"),
            None => format!("pushes all sizes, {blocks} blocks at most"),
        };
        let shots = format!("one shot up to {} bytes", figures.one_shot_max_bytes);
        let (dtype, source) = (dtype.name(), &figures.source);
        println!("all_reduce                 {dtype:<4} {shots:<32} {pushes}  {source}");
    }
    println!("the ranks vote on {:016x}", table.digest());
}

/// Rows of so many tokens of DeepSeek-V3 to their experts, and back.
fn with_experts(max_tokens: usize) -> [Call; 2] {
    let (hidden, dtype, k) = (7168, DataType::BF16, 8);
    let arrangement = Arrangement::BySource;
    let there = DispatchCall {
        max_tokens,
        hidden,
        dtype,
        beside_bytes: PerRank::new(),
        k,
        weights: true,
        placement: PlacementCall::Even { experts: 256 },
        arrangement,
        max_recv: None,
        received_ids: ReceivedIds::Local,
        again: false,
        gathered: false,
        cast: None,
        choice: None,
    };
    let back = CombineCall {
        max_tokens,
        hidden,
        dtype,
        output: dtype,
        k,
        arrangement,
        sum: CombineSum::Rank,
        weights: false,
        choice: None,
    };
    [Call::Dispatch(there), Call::Combine(back)]
}

/// A plan, and of an all-reduce its launch and what the choice rests on.
fn told(plan: &Plan, table: &Table) -> String {
    match plan {
        Plan::AllReduce {
            algorithm, launch, ..
        } => {
            let figures = table.all_reduce.of(DataType::BF16);
            match &tuned::told(*algorithm, *launch, figures)[..] {
                "" => plan.to_string(),
                told => format!("{plan}; {told}"),
            }
        }
        plan => plan.to_string(),
    }
}

/// The host, or GPUs of the model that the first word names, by the links that the second one names.
fn device(words: &[String], ranks: usize) -> Result<(Engines, Table), Reason> {
    let Some(model) = words.first() else {
        return Ok((Engines::host(), Table::host()));
    };
    let links = match words.get(1).map(String::as_str) {
        None | Some("nvlink") => Links::Nvlink,
        Some("pcie") => Links::Pcie,
        Some(_) => Links::Unknown,
    };
    // GPUs of compute capability 9.0.
    let hopper = ["H100", "H200", "H20"]
        .iter()
        .any(|name| model.contains(name));
    let gpus = Gpus {
        model: Some(model.clone()),
        links,
        ranks,
    };
    Ok((Engines::cuda(hopper, ranks <= 8), Table::cuda(&gpus)?))
}
