//! What is done for rows to experts among eight GPUs, which nobody has measured, and why: of one host, and of several machines.

#![allow(clippy::unwrap_used, reason = "what is not as promised panics")]

mod common;

use brigade_device::*;
use brigade_plan::{Table, Topology, told};
use common::{combine, dispatch, on_gpus};
use std::fmt::Write;

const TOKENS: [usize; 8] = [1, 8, 32, 128, 256, 512, 1024, 4096];

/// So many GPUs with room to push whatever is pushed.
fn with_room(size: usize, sm_budget: Option<u16>) -> (Topology, Table) {
    let config = CommConfig {
        all_reduce_bytes: 512 << 20,
        sm_budget,
        ..CommConfig::new(ParallelMode::Ep)
    };
    on_gpus(size, config)
}

/// Without the transports that are only asked for, which is the same everywhere.
fn short(told: &str) -> &str {
    told.split("; only where asked for").next().unwrap()
}

fn cast() -> Option<Fp8Cast> {
    Some(Fp8Cast {
        format: ScaleFormat::F32,
        column_major: false,
    })
}

#[test]
fn experts_of_this_build_on_eight_h200s() {
    let mut text = String::new();
    for (what, cast, sm_budget) in [
        ("plain", None, None),
        ("fp8", cast(), None),
        ("plain, 24 SMs", None, Some(24)),
    ] {
        let (topology, table) = with_room(8, sm_budget);
        let figures = match cast {
            Some(_) => &table.experts.fp8,
            None => &table.experts.plain,
        };
        writeln!(text, "{what}: {}", figures.source).unwrap();
        for tokens in TOKENS {
            let there = Call::Dispatch(DispatchCall {
                cast,
                ..dispatch(tokens, None)
            });
            let back = Call::Combine(combine(tokens, None));
            for (call, figures) in [(there, figures), (back, &table.experts.plain)] {
                let told = told(&call, &topology, &table).unwrap();
                let (how, rest) = told.split_once(&format!("; {}", figures.source)).unwrap();
                assert!(rest.starts_with("; only where asked for"), "{rest}");
                writeln!(text, "  {tokens:>4} {}: {how}", call.operation()).unwrap();
            }
        }
    }
    insta::assert_snapshot!(text);
}

/// The calls inside a machine that a dispatch and a combine across machines are made of (`hierarchical_experts` in brigade-device): rows to
/// their machines, which stay on the rank, and what came along the rail to its ranks; and both back.
fn across(machines: usize, ranks: usize, tokens: usize) -> [(&'static str, Call); 4] {
    const K: usize = 8;
    let one_by_one = Arrangement::ByExpert { alignment: 1 };
    let there = |max_tokens, k, max_recv| {
        Call::Dispatch(DispatchCall {
            max_tokens,
            k,
            max_recv,
            placement: PlacementCall::Even {
                experts: machines * ranks,
            },
            arrangement: one_by_one,
            ..dispatch(max_tokens, None)
        })
    };
    let back = |max_tokens, k| {
        Call::Combine(CombineCall {
            k,
            arrangement: one_by_one,
            sum: CombineSum::Expert,
            ..combine(max_tokens, None)
        })
    };
    let (out, inside) = (K.min(machines), K.min(ranks));
    let came = machines * tokens;
    [
        ("to machines", there(tokens, out, None)),
        (
            "inside, counted",
            there(came, inside, Some(ranks * came * inside)),
        ),
        ("inside, back", back(came, inside)),
        ("from machines", back(tokens, out)),
    ]
}

#[test]
fn experts_of_two_machines_of_four_and_of_four_of_two() {
    let mut text = String::new();
    for (machines, ranks) in [(2, 4), (4, 2)] {
        let (topology, table) = with_room(ranks, None);
        writeln!(text, "{machines} x {ranks}").unwrap();
        for tokens in TOKENS {
            for (what, call) in across(machines, ranks, tokens) {
                let told = told(&call, &topology, &table).unwrap();
                writeln!(text, "  {tokens:>4} {what:<15} {}", short(&told)).unwrap();
            }
        }
    }
    insta::assert_snapshot!(text);
}
