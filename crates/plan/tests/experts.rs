//! What calls with experts need, and what is told of them.

#![allow(clippy::unwrap_used, reason = "what is not as promised panics")]

mod common;

use brigade_device::*;
use brigade_plan::{
    Table, Topology,
    absent::plan_without,
    experts::{Need, given_bytes, need, told},
    plan,
};
use common::{combine, dispatch, on_gpus};
use std::fmt::Write;

fn low_latency(max_tokens: usize) -> [Call; 2] {
    let there = LowLatencyDispatchCall {
        slot: 0,
        max_tokens,
        hidden: 7168,
        dtype: DataType::BF16,
        k: 8,
        weights: false,
        placement: PlacementCall::Even { experts: 256 },
        cast: None,
    };
    let back = LowLatencyCombineCall {
        hidden: 7168,
        dtype: DataType::BF16,
        sum: CombineSum::Expert,
        cast: None,
        there: there.clone(),
    };
    [
        Call::LowLatencyDispatch(there),
        Call::LowLatencyCombine(back),
    ]
}

const CHOICES: [Transport; 4] = [
    Transport::OneSided,
    Transport::Pushed,
    Transport::Fifo,
    Transport::Gather,
];

fn calls(max_tokens: usize) -> Vec<(String, Call)> {
    let mut calls = Vec::new();
    for choice in CHOICES {
        let (there, back) = (
            dispatch(max_tokens, Some(choice)),
            combine(max_tokens, Some(choice)),
        );
        calls.push((format!("dispatch {choice:?}"), Call::Dispatch(there)));
        calls.push((format!("combine {choice:?}"), Call::Combine(back)));
    }
    for call in low_latency(max_tokens) {
        calls.push((call.operation().to_string(), call));
    }
    calls
}

/// Rows that are no whole lines, and those that go back one for each expert.
fn others() -> Vec<(String, Call)> {
    let mut calls = Vec::new();
    for choice in [Transport::OneSided, Transport::Fifo, Transport::Gather] {
        for hidden in [8, 7160] {
            let there = DispatchCall {
                hidden,
                k: 1,
                weights: false,
                ..dispatch(100, Some(choice))
            };
            calls.push((
                format!("dispatch {choice:?} of {hidden}"),
                Call::Dispatch(there),
            ));
        }
    }
    for (hidden, sum) in [
        (8, CombineSum::Rank),
        (8, CombineSum::Expert),
        (7168, CombineSum::Expert),
    ] {
        let back = CombineCall {
            hidden,
            sum,
            ..combine(100, Some(Transport::OneSided))
        };
        calls.push((
            format!("combine by {sum:?} of {hidden}"),
            Call::Combine(back),
        ));
    }
    calls
}

fn nothing() -> CommConfig {
    CommConfig {
        all_reduce_bytes: 0,
        dispatch_bytes: 0,
        combine_bytes: 0,
        fifo_bytes: 0,
        ..CommConfig::new(ParallelMode::Ep)
    }
}

#[test]
fn what_is_needed_is_enough_and_less_is_not() {
    for size in [1, 2, 3, 8] {
        for (what, call) in calls(128).into_iter().chain(others()) {
            let what = format!("{what} of {size}");
            let need = need(&call, size).unwrap();
            let planned = |bytes: usize| {
                let with = Need { bytes, ..need };
                let (topology, table) = on_gpus(size, with.fit(nothing()));
                plan(&call, &topology, &table)
            };
            let at_once = |plan: &Plan| !matches!(plan, Plan::Experts { pieces: 2.., .. });
            let fifo = need.field == "fifo_bytes";
            let enough = planned(need.bytes).unwrap_or_else(|why| panic!("{what}: {why}"));
            assert!(fifo || at_once(&enough), "{what}: {enough}");
            let least = planned(need.least_bytes);
            assert!(least.is_ok(), "{what}: {least:?}");
            let Some(less) = need.least_bytes.checked_sub(1) else {
                continue;
            };
            let why = planned(less).unwrap_err();
            assert_eq!(why.code, "capacity", "{what}");
            // Who is told what is missing gets along with that.
            let told = format!("needs {} bytes of {}", need.least_bytes, need.field);
            assert!(why.what.contains(&told), "{what}: {told}: {why}");
            if need.bytes > need.least_bytes && !fifo {
                let pieces = planned(need.bytes - 1).unwrap();
                assert!(!at_once(&pieces), "{what}: {pieces}");
            }
        }
    }
}

/// Sizes that cannot be counted are refused for any memory, however they came about.
#[test]
fn what_cannot_be_counted_is_more_than_there_is() {
    for size in [2, 16] {
        let there = DispatchCall {
            max_tokens: 1 << 59,
            ..dispatch(1, Some(Transport::OneSided))
        };
        let wide = DispatchCall {
            hidden: 1 << 62,
            ..dispatch(1, Some(Transport::Gather))
        };
        let [mut low, _] = low_latency(16);
        if let Call::LowLatencyDispatch(call) = &mut low {
            call.hidden = 1 << 62;
        }
        let (topology, table) = on_gpus(size, CommConfig::new(ParallelMode::Ep));
        assert_eq!(
            need(&Call::Dispatch(there), size).unwrap().joined_bytes(),
            usize::MAX
        );
        for call in [Call::Dispatch(wide), low] {
            let why = plan(&call, &topology, &table).unwrap_err();
            assert_eq!(why.code, "capacity", "{call:?}");
            let needs = format!("needs {} bytes", usize::MAX);
            assert!(why.what.contains(&needs), "{why}");
        }
    }
}

/// Rows of a rank's experts are told of in 32 bits.
#[test]
fn rows_of_low_latency_that_cannot_be_counted_are_refused() {
    for (max_tokens, refused) in [(1 << 22, true), ((1 << 22) - 1, false)] {
        let [mut there, _] = low_latency(max_tokens);
        if let Call::LowLatencyDispatch(call) = &mut there {
            (call.hidden, call.placement) = (8, PlacementCall::Even { experts: 512 });
        }
        let (topology, table) = on_gpus(1, need(&there, 1).unwrap().fit(nothing()));
        let planned = plan(&there, &topology, &table);
        match refused {
            true => assert_eq!(planned.unwrap_err().code, "rows"),
            false => drop(planned.unwrap()),
        }
    }
}

#[test]
fn needs_of_decoding_and_of_prefill() {
    let mut text = String::new();
    for (size, max_tokens) in [(1, 128), (4, 128), (8, 128), (8, 1024)] {
        writeln!(text, "{size} ranks, {max_tokens} tokens").unwrap();
        for (what, call) in calls(max_tokens) {
            let need = need(&call, size).unwrap();
            let group = on_gpus(size, nothing()).0.group;
            let given = given_bytes(&call, &group, max_tokens).unwrap();
            writeln!(
                text,
                "  {what:<20} {:>17} {:>10}, at least {:>9}; at join {:>10}; gives {given:>10}",
                need.field,
                need.bytes,
                need.least_bytes,
                need.joined_bytes(),
            )
            .unwrap();
        }
    }
    insta::assert_snapshot!(text);
}

#[test]
fn what_goes_on_without_some_ranks() {
    let [there, back] = low_latency(128);
    let config = CommConfig {
        all_reduce_bytes: 64 << 20,
        ..need(&there, 4)
            .unwrap()
            .fit(CommConfig::new(ParallelMode::Ep))
    };
    let (topology, table) = on_gpus(4, config);
    let (nobody, gone) = (Absent::default(), Absent::from_bits(0b0110, 0b0110));
    let alive = Absent::from_bits(0b0110, 0b0100);
    let mut calls = calls(128);
    calls.push(("dispatch".into(), Call::Dispatch(dispatch(128, None))));
    calls.push(("combine".into(), Call::Combine(combine(128, None))));
    calls.push(("barrier".into(), Call::Barrier));
    calls.push(("close".into(), Call::Close));
    calls.push(("register".into(), Call::Register { bytes: 64 }));
    let (dtype, op, choice) = (DataType::F32, ReduceOp::Sum, None);
    calls.push((
        "all_reduce".into(),
        Call::AllReduce {
            elements: 64,
            dtype,
            output: dtype,
            op,
            choice,
        },
    ));
    let mut text = String::new();
    for (what, call) in &calls {
        let with_all = plan_without(nobody, call, &topology, &table);
        assert_eq!(with_all, plan(call, &topology, &table), "{what}");
        for (who, absent) in [("gone", gone), ("one may live", alive)] {
            let planned = match plan_without(absent, call, &topology, &table) {
                Ok(plan) => plan.to_string(),
                Err(why) => format!("{}: {why}", why.code),
            };
            writeln!(text, "{what:<20} {who:<12} {planned}").unwrap();
        }
    }
    assert_eq!(calls[8].1, there);
    assert_eq!(calls[9].1, back);
    insta::assert_snapshot!(text);
}

#[test]
fn other_calls_are_not_told() {
    let (topology, table) = on_gpus(2, nothing());
    assert_eq!(
        need(&Call::Barrier, 2).unwrap_err().code,
        "unknown-operation"
    );
    let why = told(&Call::Barrier, &topology, &table).unwrap_err();
    assert_eq!(why.code, "unknown-operation");
    assert!(given_bytes(&Call::Barrier, &topology.group, 1).is_err());
}

#[test]
fn what_is_told_says_how_and_why() {
    let mut text = String::new();
    let mut tell = |what: &str, call: Call, (topology, table): &(Topology, Table)| {
        let told = told(&call, topology, table).unwrap_or_else(|why| format!("no: {why}"));
        writeln!(text, "{what:<28} {told}").unwrap();
    };
    let low_latency_of_128 = low_latency(128);
    let config = low_latency_of_128
        .iter()
        .fold(CommConfig::new(ParallelMode::Ep), |c, call| {
            need(call, 8).unwrap().fit(c)
        });
    let config = CommConfig {
        all_reduce_bytes: 256 << 20,
        ..config
    };
    let usual = on_gpus(8, config.clone());
    let budget = on_gpus(
        8,
        CommConfig {
            sm_budget: Some(24),
            ..config
        },
    );
    for tokens in [1, 128, 1024, 4096] {
        tell(
            &format!("dispatch {tokens}"),
            Call::Dispatch(dispatch(tokens, None)),
            &usual,
        );
        tell(
            &format!("combine {tokens}"),
            Call::Combine(combine(tokens, None)),
            &usual,
        );
    }
    tell(
        "dispatch 128, 24 SMs",
        Call::Dispatch(dispatch(128, None)),
        &budget,
    );
    for choice in CHOICES {
        tell(
            "dispatch 128, forced",
            Call::Dispatch(dispatch(128, Some(choice))),
            &usual,
        );
    }
    let set = |fifo_depth, fifo_entry_bytes| {
        let config = CommConfig {
            fifo_depth,
            fifo_entry_bytes,
            ..usual.0.config.clone()
        };
        on_gpus(8, config)
    };
    for (depth, entry_bytes) in [
        (Some(1), None),
        (None, Some(29056)),
        (Some(16), Some(14528)),
        (Some(16), Some(14464)),
        (Some(64), Some(32768)),
    ] {
        tell(
            "dispatch 128, queues set",
            Call::Dispatch(dispatch(128, Some(Transport::Fifo))),
            &set(depth, entry_bytes),
        );
    }
    for call in low_latency_of_128 {
        tell(&format!("{} 128", call.operation()), call, &usual);
    }
    for call in low_latency(256) {
        tell(&format!("{} 256", call.operation()), call, &usual);
    }
    let mut host = common::topology(0, 4);
    host.config = CommConfig::new(ParallelMode::Ep);
    tell(
        "on the host: dispatch 128",
        Call::Dispatch(dispatch(128, None)),
        &(host, Table::host()),
    );
    insta::assert_snapshot!(text);
}
