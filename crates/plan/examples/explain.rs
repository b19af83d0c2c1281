//! Prints what would be done for a few calls of every operation, on four ranks of one host, and what the choice rests on: `cargo run -p brigade-plan --example explain`. With a model of GPU, as the driver
//! calls it, for four of those, linked by NVLink or else as said, or for as many as are said:
//! `cargo run -p brigade-plan --example explain -- "NVIDIA H200" nvlink 2`. A number behind that is the most multiprocessors
//! that communication may use, and behind that come files of entries that `brigade-perf` wrote:
//! `cargo run -p brigade-plan --example explain -- "NVIDIA H200" nvlink 2 132 entry.json`.
#![allow(clippy::print_stdout)]

use brigade_device::{
    Arrangement, Call, CombineCall, CombineSum, CommConfig, DataType, DispatchCall, Fp8Cast, Group,
    LinearCall, LowLatencyCombineCall, LowLatencyDispatchCall, OverlapMode, ParallelMode, PerRank,
    PlacementCall, QScheme, ReceivedIds, ReduceOp, ScaleFormat, Transport,
};
use brigade_plan::{
    Engines, Entries, Table, Topology,
    crossover::{Gpus, Links},
    experts, rows, told,
};
use std::{error::Error, fs};

const BF16: DataType = DataType::BF16;

fn main() {
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
    let sm_budget = number(3).and_then(|sms| u16::try_from(sms).ok());
    let topology = |mode| Topology {
        group: Group { mode, rank, size },
        config: CommConfig {
            sm_budget,
            ..CommConfig::new(mode)
        },
        engines,
    };
    let mut tp = topology(ParallelMode::Tp);
    (tp.config.gather_bytes, tp.config.reduce_scatter_bytes) = (128 << 20, 128 << 20);
    for (what, call) in linears(size).into_iter().chain(collectives(size)) {
        print(&what, &call, &tp, &table);
    }
    let calls: Vec<_> = [16, 128, 4096].into_iter().flat_map(with_experts).collect();
    // As much memory as lets all rows go at once, but for queues.
    let mut ep = topology(ParallelMode::Ep);
    for (_, call) in &calls {
        if let Ok(need) = experts::need(call, size) {
            ep.config = need.fit(ep.config);
        }
    }
    for (what, call) in &calls {
        print(what, call, &ep, &table);
    }
    figures(&table);
    println!("the ranks vote on {:016x}", table.digest());
}

fn print(what: &str, call: &Call, topology: &Topology, table: &Table) {
    let answer = match told(call, topology, table) {
        Ok(told) => told,
        Err(reason) => format!("no: {reason}"),
    };
    println!("{:<26} {what:<24} {answer}", call.operation().name());
}

fn linears(size: usize) -> Vec<(String, Call)> {
    let linear = |rows: usize, k, n, choice| LinearCall {
        rows: rows::split(rows, size),
        k,
        n,
        input: BF16,
        output: BF16,
        scheme: QScheme::None,
        lora: false,
        transpose_a: false,
        inner: None,
        choice,
    };
    let pieces = Some(OverlapMode::Chunked { pieces: 4 });
    [
        Call::GatherLinear(linear(512, 4096, 6144, None)),
        Call::GatherLinear(linear(510, 4096, 6144, pieces)),
        Call::GatherLinear(linear(4, 1024, 1024, None)),
        Call::GatherLinear(linear(8192, 8192, 7168, None)),
        Call::GatherLinear(linear(8192, 8192, 7168, Some(OverlapMode::Ring))),
        Call::LinearReduceScatter(linear(512, 6144, 4096, None)),
        Call::LinearReduceScatter(linear(8192, 8192, 7168, None)),
    ]
    .into_iter()
    .map(|call| {
        let what = match &call {
            Call::GatherLinear(c) | Call::LinearReduceScatter(c) => {
                format!("{} x {} x {}", c.total_rows(), c.k, c.n)
            }
            _ => String::new(),
        };
        (what, call)
    })
    .collect()
}

/// Each of a few sizes, in elements of the whole.
fn collectives(size: usize) -> Vec<(String, Call)> {
    let op = ReduceOp::Sum;
    let mut calls = Vec::new();
    for elements in [1 << 10, 1 << 17, 1 << 20, 1 << 25] {
        calls.push(Call::AllReduce {
            elements,
            dtype: BF16,
            output: BF16,
            op,
            choice: None,
        });
    }
    for rows in [1, 64, 512] {
        calls.push(Call::AllReduceNorm {
            rows,
            hidden: 8192,
            dtype: BF16,
            scheme: QScheme::None,
            eps_bits: 1e-5f32.to_bits(),
            scale_bits: None,
            choice: None,
        });
    }
    for elements in [1 << 10, 1 << 20, 1 << 25] {
        let rows = rows::split(elements, size);
        calls.push(Call::AllGather {
            rows: rows.clone(),
            row_len: 1,
            dtype: BF16,
        });
        calls.push(Call::ReduceScatter {
            rows,
            row_len: 1,
            dtype: BF16,
            output: BF16,
            op,
        });
        calls.push(Call::Broadcast {
            elements,
            dtype: BF16,
            root: 0,
        });
    }
    let what = |call: &Call| match call {
        Call::AllReduce { elements, .. } | Call::Broadcast { elements, .. } => {
            format!("{elements} elements")
        }
        Call::AllReduceNorm { rows, hidden, .. } => format!("{rows} rows of {hidden}"),
        Call::AllGather { rows, .. } | Call::ReduceScatter { rows, .. } => {
            format!("{} elements", rows.iter().sum::<usize>())
        }
        _ => String::new(),
    };
    calls.into_iter().map(|call| (what(&call), call)).collect()
}

/// Rows of so many tokens of DeepSeek-V3 to their experts, and back: as the plan has it, in fp8, by expert, in place, and in two halves.
fn with_experts(max_tokens: usize) -> Vec<(String, Call)> {
    let (hidden, k) = (7168, 8);
    let placement = PlacementCall::Even { experts: 256 };
    let cast = Some(Fp8Cast {
        format: ScaleFormat::F32,
        column_major: false,
    });
    let there = DispatchCall {
        max_tokens,
        hidden,
        dtype: BF16,
        beside_bytes: PerRank::new(),
        k,
        weights: true,
        placement,
        arrangement: Arrangement::BySource,
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
        dtype: BF16,
        output: BF16,
        k,
        arrangement: Arrangement::BySource,
        sum: CombineSum::Rank,
        weights: false,
        choice: None,
    };
    let by_expert = Arrangement::ByExpert { alignment: 1 };
    let in_place = Some(Transport::InPlace);
    let apart = LowLatencyDispatchCall {
        slot: 0,
        max_tokens,
        hidden,
        dtype: BF16,
        k,
        weights: false,
        placement,
        cast,
    };
    let mut calls = vec![
        ("", Call::Dispatch(there.clone())),
        ("", Call::Combine(back.clone())),
        (
            ", fp8",
            Call::Dispatch(DispatchCall {
                cast,
                ..there.clone()
            }),
        ),
        (
            ", by expert",
            Call::Dispatch(DispatchCall {
                arrangement: by_expert,
                max_recv: Some(k * max_tokens),
                ..there.clone()
            }),
        ),
        (
            ", by expert",
            Call::Combine(CombineCall {
                arrangement: by_expert,
                sum: CombineSum::ExpertByRank,
                ..back.clone()
            }),
        ),
        (
            ", in place",
            Call::Dispatch(DispatchCall {
                choice: in_place,
                ..there
            }),
        ),
        (
            ", in place",
            Call::Combine(CombineCall {
                choice: in_place,
                ..back
            }),
        ),
    ];
    // What is sent apart is for decoding.
    if max_tokens <= 128 {
        let low_latency_back = LowLatencyCombineCall {
            hidden,
            dtype: BF16,
            sum: CombineSum::Expert,
            cast: None,
            there: apart.clone(),
        };
        calls.push((", fp8", Call::LowLatencyDispatch(apart)));
        calls.push(("", Call::LowLatencyCombine(low_latency_back)));
    }
    calls
        .into_iter()
        .map(|(what, call)| (format!("{max_tokens} tokens{what}"), call))
        .collect()
}

/// All figures that count on this device.
fn figures(table: &Table) {
    for (operation, crossovers) in [
        ("gather-linear", &table.gather),
        ("its twin", &table.scatter),
    ] {
        for (dtype, crossover) in crossovers.each() {
            let from = match crossover.least {
                Some(least) => format!("from {least}"),
                None => "never".to_owned(),
            };
            let (dtype, source) = (format!("{dtype:?}").to_lowercase(), &crossover.source);
            println!("{operation:<26} {dtype:<5} overlap pays {from:<34} {source}");
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
        println!("all_reduce                 {dtype:<5} {shots:<32} {pushes}  {source}");
    }
    for (rows, figures) in table.experts.each() {
        let pushes = match figures.push_max_bytes {
            None => "pushes nothing".to_owned(),
            Some(bytes) => format!(
                "pushes up to {bytes} bytes, {} back, {} for each multiprocessor of a budget",
                figures.push_back_max_bytes.unwrap_or(0),
                figures.push_max_bytes_per_sm
            ),
        };
        let at_a_time = figures.rows_at_a_time.map_or_else(
            || "as many rows at a time as fit".to_owned(),
            |rows| format!("about {rows} rows at a time"),
        );
        let (rows, source) = (rows.name(), &figures.source);
        println!("dispatch and combine       {rows:<5} {pushes}, {at_a_time}  {source}");
    }
    let pushes = match table.copies.push_max_bytes {
        None => "push nothing".to_owned(),
        Some(bytes) => format!("push up to {bytes} bytes at once"),
    };
    println!(
        "copies                           {pushes}  {}",
        table.copies.source
    );
}

/// The host, or GPUs of the model that the first word names, by the links that the second one names, with entries of the files that the
/// fifth and later ones name.
fn device(words: &[String], ranks: usize) -> Result<(Engines, Table), Box<dyn Error>> {
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
    let mut own = Entries::default();
    for path in words.iter().skip(4) {
        own = own.and(Entries::read(&fs::read_to_string(path)?)?);
    }
    let table = Table::cuda(&gpus, &own)?;
    Ok((Engines::cuda(hopper, ranks <= 8), table))
}
