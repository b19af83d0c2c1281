//! How rows travel to experts, by figures that are data.

#![allow(clippy::unwrap_used, reason = "what is not as promised panics")]

mod common;

use brigade_device::*;
use brigade_plan::{
    Engines, Entries, Table, Topology,
    crossover::{Gpus, Links},
    experts::{arriving_bytes, told},
    plan, reason,
    transports::{File, Rows},
};
use common::dispatch;
use serde_json::{Value, json};

fn gpus(model: &str, ranks: usize) -> Gpus {
    Gpus {
        model: Some(model.into()),
        links: Links::Nvlink,
        ranks,
    }
}

/// An entry of four GPUs `A`, with these fields instead.
fn entry(changes: &Value) -> Value {
    let mut entry = json!({
        "gpu": "A", "links": "nvlink", "ranks": 4, "push_max_bytes": 1000,
        "measured": { "from_tokens": 1, "to_tokens": 64, "hidden": 7168 },
        "versions": { "driver": "1", "cuda": "2", "nccl": null },
        "source": { "command": "c", "date": "2026-01-02", "commit": "0123456" },
    });
    for (name, value) in changes.as_object().unwrap() {
        entry[name] = value.clone();
    }
    entry
}

fn file(entries: &[Value]) -> Result<File, Reason> {
    let untuned = json!({
        "push_max_bytes": 10, "push_back_max_bytes": 20, "push_max_bytes_per_sm": 2, "rows_at_a_time": 3,
        "why": "so",
    });
    File::read(&json!({ "untuned": untuned, "entries": entries }).to_string())
}

fn call(max_tokens: usize, cast: bool, choice: Option<Transport>) -> DispatchCall {
    DispatchCall {
        cast: cast.then_some(Fp8Cast {
            format: ScaleFormat::F32,
            column_major: false,
        }),
        ..dispatch(max_tokens, choice)
    }
}

fn topology(size: usize, sm_budget: Option<u16>) -> Topology {
    let mode = ParallelMode::Ep;
    Topology {
        group: Group {
            mode,
            rank: 0,
            size,
        },
        config: CommConfig {
            all_reduce_bytes: 512 << 20,
            dispatch_bytes: 1 << 30,
            combine_bytes: 1 << 30,
            sm_budget,
            ..CommConfig::new(mode)
        },
        engines: Engines::cuda(true, true),
    }
}

#[test]
fn entries_are_chosen_by_model_ranks_and_rows() {
    let all = entry(&json!({ "rows_at_a_time": 7, "push_back_max_bytes": 8 }));
    let cast = entry(&json!({ "rows": "fp8", "push_max_bytes": 0, "push_max_bytes_per_sm": 5 }));
    let file = file(&[all, cast]).unwrap();
    let of = |gpus: &Gpus| {
        let by_rows = file.of(gpus);
        by_rows.each().map(|(_, f)| {
            (
                f.push_max_bytes,
                f.push_back_max_bytes,
                f.push_max_bytes_per_sm,
                f.rows_at_a_time,
                f.source.starts_with("untuned: nobody has measured"),
            )
        })
    };
    assert_eq!(
        of(&gpus("A", 4)),
        [
            (Some(1000), Some(8), 2, Some(7), false),
            (Some(0), Some(20), 5, Some(3), false)
        ]
    );
    let usual = (Some(10), Some(20), 2, Some(3), true);
    let pcie = Gpus {
        links: Links::Pcie,
        ..gpus("A", 4)
    };
    for other in [gpus("A", 8), gpus("B", 4), pcie] {
        assert_eq!(of(&other), [usual; 2], "{other:?}");
    }
    let found = file.of(&gpus("A", 4));
    assert!(
        found
            .plain
            .source
            .ends_with("untuned: push_max_bytes_per_sm")
    );
    assert!(
        found.fp8.source.contains(" of fp8 rows ")
            && found
                .fp8
                .source
                .contains("untuned: push_back_max_bytes rows_at_a_time")
    );
}

#[test]
fn a_budget_has_so_much_for_each_multiprocessor_and_never_more_than_all() {
    let file = file(&[entry(
        &json!({ "push_max_bytes_per_sm": 10, "push_back_max_bytes": 995 }),
    )])
    .unwrap();
    let figures = file.of(&gpus("A", 4)).plain;
    for (budget, there, back) in [
        (None, 1000, 995),
        (Some(1), 10, 10),
        (Some(99), 990, 990),
        (Some(101), 1000, 995),
        (Some(132), 1000, 995),
        (Some(u16::MAX), 1000, 995),
    ] {
        assert_eq!(figures.push_limit(budget), Some(there), "{budget:?}");
        assert_eq!(figures.push_back_limit(budget), Some(back), "{budget:?}");
    }
}

#[test]
fn what_is_no_such_file_is_refused() {
    let refused = |changes: Value| file(&[entry(&changes)]).unwrap_err().code;
    for wrong in [
        json!({ "push_max_bytes": -1 }),
        json!({ "rows": "bf16" }),
        json!({ "others": [{ "transport": "one-sided", "from_bytes": 1 }] }),
        json!({ "faster": true }),
        json!({ "rows_at_a_time": 0 }),
    ] {
        assert_eq!(refused(wrong.clone()), reason::EXPERTS, "{wrong}");
    }
    assert_eq!(File::read("{").unwrap_err().code, reason::EXPERTS);
    assert!(file(&[entry(&json!({ "rows_at_a_time": 1 }))]).is_ok());
}

/// The entries of this build: every plan is the quicker one in the files that they name; within a budget, on two GPUs and up to 2048 tokens.
#[test]
fn on_h200s_the_plan_is_what_was_measured_to_be_quicker() {
    let table = |ranks| Table::cuda(&gpus("NVIDIA H200", ranks), &Entries::default()).unwrap();
    let by = |ranks, tokens, sm_budget| {
        let call = Call::Dispatch(call(tokens, false, None));
        match plan(&call, &topology(ranks, sm_budget), &table(ranks)) {
            Ok(Plan::Experts { transport, .. }) => transport,
            other => panic!("{other:?}"),
        }
    };
    let quicker = |pushed: f64, one_sided: f64| match pushed < one_sided {
        true => Transport::Pushed,
        false => Transport::OneSided,
    };
    // Of docs/results/tune-experts.h200x2.json.
    let measured = [
        (32, [(29.3, 58.6), (20.1, 53.9), (18.6, 56.6)]),
        (128, [(73.2, 100.0), (32.0, 76.0), (26.5, 69.2)]),
        (256, [(126.6, 134.7), (49.0, 100.5), (38.2, 86.0)]),
        (512, [(236.9, 207.9), (85.0, 151.3), (63.5, 123.7)]),
        (1024, [(470.2, 326.1), (157.1, 229.3), (114.3, 187.1)]),
        (2048, [(912.0, 826.2), (295.9, 373.9), (210.6, 291.4)]),
    ];
    for (tokens, of_budgets) in measured {
        for (sms, (pushed, one_sided)) in [8, 24, 64].into_iter().zip(of_budgets) {
            // One figure for each multiprocessor cannot be right for 2048 tokens within 24 of them, and for 512 within 8.
            if [(512, 8), (2048, 24)].contains(&(tokens, sms)) {
                continue;
            }
            let wanted = quicker(pushed, one_sided);
            assert_eq!(
                by(2, tokens, Some(sms)),
                wanted,
                "{tokens} tokens, {sms} SMs"
            );
        }
    }
    // Of rows by expert, whose blocks are narrow, a quarter as much is pushed within a budget.
    let by_expert = |tokens| {
        let arrangement = Arrangement::ByExpert { alignment: 1 };
        let call = Call::Dispatch(DispatchCall {
            arrangement,
            max_recv: Some(1 << 20),
            ..call(tokens, false, None)
        });
        match plan(&call, &topology(2, Some(24)), &table(2)) {
            Ok(Plan::Experts { transport, .. }) => transport,
            other => panic!("{other:?}"),
        }
    };
    assert_eq!(by_expert(128), Transport::Pushed);
    assert_eq!(by_expert(512), Transport::OneSided);
    for ranks in [2, 4] {
        for tokens in [1, 8, 32, 128, 512, 1024, 2048, 4096, 8192, 16384] {
            let wanted = match tokens <= 8192 {
                true => Transport::Pushed,
                false => Transport::OneSided,
            };
            assert_eq!(by(ranks, tokens, None), wanted, "{ranks}, {tokens}");
        }
    }
}

/// However many tokens: what keeps many from being pushed there is that each block finds their ways.
#[test]
fn rows_are_pushed_back_up_to_a_figure_of_their_own() {
    let by = |ranks, max_tokens| {
        let table = Table::cuda(&gpus("NVIDIA H200", ranks), &Entries::default()).unwrap();
        let call = Call::Combine(CombineCall {
            max_tokens,
            hidden: 7168,
            dtype: DataType::BF16,
            output: DataType::BF16,
            k: 8,
            arrangement: Arrangement::BySource,
            sum: CombineSum::Rank,
            weights: false,
            choice: None,
        });
        match plan(&call, &topology(ranks, None), &table).unwrap() {
            Plan::Experts { transport, .. } => transport,
            other => panic!("{other:?}"),
        }
    };
    for (ranks, tokens) in [(2, 1024), (2, 4096), (2, 32768), (4, 8192)] {
        assert_eq!(by(ranks, tokens), Transport::Pushed, "{ranks}, {tokens}");
    }
    for (ranks, tokens) in [(2, 65536), (4, 16384)] {
        assert_eq!(by(ranks, tokens), Transport::OneSided, "{ranks}, {tokens}");
    }
}

#[test]
fn what_is_told_names_the_source_and_what_the_caller_may_ask_for() {
    let told_on = |gpu, ranks, tokens, choice| {
        let table = Table::cuda(&gpus(gpu, ranks), &Entries::default()).unwrap();
        let call = Call::Dispatch(call(tokens, false, choice));
        told(&call, &topology(ranks, None), &table).unwrap()
    };
    let told = |ranks, tokens, choice| told_on("NVIDIA H200", ranks, tokens, choice);
    let measured = told_on("NVIDIA H100 80GB HBM3", 2, 4096, None);
    let bytes = arriving_bytes(&Call::Dispatch(call(4096, false, None)), 2).unwrap();
    for part in [
        "measured on NVIDIA H100 80GB HBM3 by nvlink of 2 ranks, 1 to 8192 tokens of plain rows of 7168 columns, 2026-11-28",
        &format!(
            "InPlace (rows are lent until the next dispatch, which the caller must allow; quicker from {bytes} bytes on)"
        ),
        "Gather (it sends every row to every rank; quicker at no size)",
        "Fifo (it is for little memory; quicker at no size)",
    ] {
        assert!(measured.contains(part), "{part} in {measured}");
    }
    let eight = told(8, 128, None);
    let untuned = "untuned: nobody has measured plain rows on NVIDIA H200 by nvlink of 8 ranks";
    assert!(
        eight.contains(untuned) && eight.contains("InPlace"),
        "{eight}"
    );
    assert!(!told(8, 128, Some(Transport::OneSided)).contains("untuned"));
}

#[test]
fn rows_that_are_cast_have_their_own_figures() {
    let file = file(&[
        entry(&json!({ "push_max_bytes": 1 << 30, "push_max_bytes_per_sm": 1 << 30 })),
        entry(&json!({ "rows": "fp8", "push_max_bytes": 0 })),
    ]);
    let table = Table {
        experts: file.unwrap().of(&gpus("A", 4)),
        ..Table::host()
    };
    let by = |cast| {
        let call = Call::Dispatch(call(64, cast, None));
        plan(&call, &topology(4, None), &table).unwrap()
    };
    let pushed = |plan: &Plan| matches!(plan, Plan::Experts { transport, .. } if *transport == Transport::Pushed);
    assert_eq!([false, true].map(|cast| pushed(&by(cast))), [true, false]);
    assert_eq!(Rows::Fp8.name(), "fp8");
}

/// Rows are pushed where halves hold none of them, on devices that push nothing by themselves too, and told so; what cannot be pushed, or is
/// forced one-sided, is refused for want of halves.
#[test]
fn rows_without_halves_are_pushed_where_that_fits() {
    let without = |all_reduce_bytes| {
        let mut without = topology(4, Some(1));
        without.config.dispatch_bytes = 0;
        without.config.combine_bytes = 0;
        without.config.all_reduce_bytes = all_reduce_bytes;
        without
    };
    let back = |choice| Call::Combine(common::combine(1024, choice));
    let there = |choice| Call::Dispatch(call(1024, false, choice));
    let tables = [
        common::on_gpus(4, topology(4, None).config).1,
        Table::host(),
    ];
    for table in &tables {
        for (call, field) in [
            (there(None), "dispatch_bytes"),
            (back(None), "combine_bytes"),
        ] {
            let enough = without(256 << 20);
            let Ok(Plan::Experts { transport, .. }) = plan(&call, &enough, table) else {
                panic!("{field}: no plan for experts");
            };
            assert_eq!(transport, Transport::Pushed, "{field}");
            let told = told(&call, &enough, table).unwrap();
            let why = format!("pushed, since the halves of {field} hold no row");
            assert!(told.contains(&why), "{told}");
            let why = plan(&call, &without(1 << 20), table).unwrap_err();
            assert_eq!(why.code, reason::CAPACITY);
            assert!(why.what.contains(field), "{why}");
        }
        for forced in [there, back].map(|call| call(Some(Transport::OneSided))) {
            let why = plan(&forced, &without(256 << 20), table).unwrap_err();
            assert_eq!(why.code, reason::CAPACITY);
        }
    }
}
