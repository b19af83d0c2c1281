//! What is told of calls without experts.

#![allow(clippy::unwrap_used, reason = "what is not as promised panics")]

mod common;

use brigade_device::*;
use brigade_plan::{
    Engines, Entries, Table, Topology,
    crossover::{Gpus, Links},
    plan, told,
};
use common::{linear, topology};
use std::fmt::Write;

fn calls() -> Vec<(&'static str, Call)> {
    let dtype = DataType::BF16;
    let gather = |rows, row_len| Call::AllGather {
        rows: [rows; 4].into_iter().collect(),
        row_len,
        dtype,
    };
    let scatter = |rows, row_len| Call::ReduceScatter {
        rows: [rows; 4].into_iter().collect(),
        row_len,
        dtype,
        output: dtype,
        op: ReduceOp::Sum,
    };
    let broadcast = |elements| Call::Broadcast {
        elements,
        dtype,
        root: 0,
    };
    let forced = LinearCall {
        choice: Some(OverlapMode::Ring),
        ..linear(&[64; 4])
    };
    let int8 = LinearCall {
        scheme: QScheme::Int8PerToken,
        ..linear(&[2048; 4])
    };
    let all_reduce = |elements, choice| Call::AllReduce {
        elements,
        dtype,
        output: dtype,
        op: ReduceOp::Sum,
        choice,
    };
    vec![
        (
            "gather-linear, 256 rows",
            Call::GatherLinear(linear(&[64; 4])),
        ),
        (
            "gather-linear, 8192 rows",
            Call::GatherLinear(linear(&[2048; 4])),
        ),
        ("gather-linear, forced", Call::GatherLinear(forced)),
        ("gather-linear, int8", Call::GatherLinear(int8)),
        (
            "its twin, 8192 rows",
            Call::LinearReduceScatter(linear(&[2048; 4])),
        ),
        ("all-reduce", all_reduce(1 << 10, None)),
        (
            "all-reduce, forced",
            all_reduce(1 << 10, Some(AllReduceAlgorithm::TwoShot)),
        ),
        ("all-gather", gather(4, 1024)),
        ("all-gather, large", gather(4096, 8192)),
        ("reduce-scatter", scatter(4, 1024)),
        ("reduce-scatter, large", scatter(4096, 8192)),
        ("broadcast", broadcast(1 << 10)),
        ("broadcast, large", broadcast(1 << 24)),
        ("barrier", Call::Barrier),
        (
            "all-to-all of rows",
            Call::AllToAllRows(AllToAllRowsCall {
                payloads: [(7168, dtype)].into_iter().collect(),
            }),
        ),
    ]
}

#[test]
fn every_call_is_told_with_what_decided() {
    let gpus = Gpus {
        model: Some("NVIDIA H200".into()),
        links: Links::Nvlink,
        ranks: 4,
    };
    let mut on_gpus = Topology {
        engines: Engines::cuda(true, true),
        ..topology(0, 4)
    };
    on_gpus.config.fifo_bytes = 1 << 20;
    on_gpus.config.fifo_depth = Some(4);
    let mut none = on_gpus.clone();
    none.config.all_reduce_bytes = 0;
    let cuda = Table::cuda(&gpus, &Entries::default()).unwrap();
    let mut text = String::new();
    for (device, topology, table) in [
        ("host", topology(0, 4), Table::host()),
        ("cuda", on_gpus, cuda.clone()),
        ("cuda without buffers", none, cuda),
    ] {
        writeln!(text, "{device}").unwrap();
        for (what, call) in calls() {
            let told = told(&call, &topology, &table);
            assert_eq!(told.is_ok(), plan(&call, &topology, &table).is_ok());
            let told = told.unwrap_or_else(|why| format!("no: {why}"));
            writeln!(text, "  {what:<26} {told}").unwrap();
        }
    }
    insta::assert_snapshot!(text);
}
