//! Collectives across machines: every element goes where it must, slots are not taken too early, and plans as text.

#![allow(clippy::unwrap_used, reason = "tests")]

mod properties;

use brigade_device::{
    DataType, HierarchicalCall, HierarchicalOperation as Operation, HierarchicalPath as Path,
    HierarchicalPlan, HierarchyConfig, Machines, ParallelMode, PerRank, ReduceOp, SumOrder,
};
use brigade_plan::{
    hierarchical::{Costs, Schedule, Wire, plan},
    reason,
};
use std::{collections::BTreeSet, fmt::Write};

const SHAPES: [(usize, usize); 10] = [
    (1, 1),
    (2, 1),
    (1, 4),
    (2, 2),
    (4, 1),
    (3, 2),
    (2, 4),
    (4, 2),
    (2, 8),
    (4, 4),
];

fn machines((count, ranks): (usize, usize)) -> Machines {
    Machines::cut(count * ranks, count).unwrap()
}

fn all_reduce(machines: Machines, elements: usize) -> HierarchicalCall {
    HierarchicalCall {
        machines,
        operation: Operation::AllReduce {
            elements,
            op: ReduceOp::Sum,
        },
        dtype: DataType::BF16,
        output: DataType::BF16,
        choice: None,
    }
}

fn config() -> HierarchyConfig {
    HierarchyConfig::new(ParallelMode::Tp)
}

fn wire(latency_ns: u64, bytes_per_us: u64) -> Costs {
    Costs::host().with_wire(Wire {
        latency_ns,
        bytes_per_us,
    })
}

/// What GPUs are taken for: few bytes go in one call, many in slices of which several are under way, over sockets as well, since one connection
/// carries less than all.
#[test]
fn gpus_cut_what_keeps_more_than_the_wire_busy() {
    let sockets = Costs::cuda();
    let quick = Costs::cuda_over(Wire {
        latency_ns: 5_000,
        bytes_per_us: 50_000,
    });
    for shape in [(2, 2), (4, 1), (2, 8)] {
        let of = |bytes: usize, costs| {
            let call = all_reduce(machines(shape), bytes / 2);
            plan(&call, &config(), costs).unwrap()
        };
        for bytes in [2, 2 << 10] {
            let plan = of(bytes, &sockets);
            let one_call = match &plan {
                HierarchicalPlan::Slices(p) => p.slices == 1,
                _ => true,
            };
            assert!(one_call, "{shape:?}: {plan}");
        }
        for costs in [&sockets, &quick] {
            let plan = of(64 << 20, costs);
            let HierarchicalPlan::Slices(p) = &plan else {
                panic!("{shape:?}: {plan}");
            };
            assert!(p.slices > 1 && p.slots > 1, "{shape:?}: {plan}");
        }
    }
}

/// Long latencies do not keep the link waiting, neither at the ends of a call nor in between: what is planned is as quick as what takes
/// longest for all slices, with one slice through the rest.
#[test]
fn slow_rails_are_kept_busy() {
    let rails = [
        (2, 1, 200, 200),
        (2, 1, 1000, 200),
        (2, 1, 5000, 100),
        (2, 2, 200, 50),
        (2, 2, 1000, 50),
        (2, 2, 5000, 25),
        (4, 1, 5000, 100),
        (3, 2, 5000, 25),
        (2, 4, 5000, 25),
    ];
    for (count, ranks, latency_us, bytes_per_us) in rails {
        let costs = wire(latency_us * 1000, bytes_per_us);
        for mib in [4, 8, 16] {
            let call = HierarchicalCall {
                dtype: DataType::F32,
                output: DataType::F32,
                ..all_reduce(machines((count, ranks)), mib << 18)
            };
            let HierarchicalPlan::Slices(p) = plan(&call, &config(), &costs).unwrap() else {
                panic!("{mib} MiB as a whole");
            };
            let steps = costs.steps(&call, &p.phases, p.rank_elements);
            let bound = Schedule::of(&p).bound_ns(&steps) as f64;
            let ratio = p.expected.as_nanos() as f64 / bound;
            assert!(
                ratio <= 1.03,
                "{count}x{ranks}, {latency_us} us, {mib} MiB: {ratio}"
            );
        }
    }
}

/// Rails of 10 us and 1 GB/s.
fn costs() -> Costs {
    wire(10_000, 1000)
}

fn line(call: &HierarchicalCall, config: &HierarchyConfig, costs: &Costs) -> String {
    match plan(call, config, costs) {
        Ok(plan) => plan.to_string(),
        Err(reason) => format!("{}: {reason}", reason.code),
    }
}

#[test]
fn what_is_planned_for_which_machines_and_lengths() {
    let mut text = String::new();
    for shape in SHAPES {
        let machines = machines(shape);
        writeln!(text, "{machines}").unwrap();
        for elements in [0, 1, 1 << 10, 1 << 16, 1 << 20, 1 << 24] {
            let plan = line(&all_reduce(machines, elements), &config(), &costs());
            writeln!(text, "  {elements:>8}: {plan}").unwrap();
        }
    }
    insta::assert_snapshot!(text);
}

#[test]
fn settings_and_links_change_the_plan() {
    let call = all_reduce(machines((2, 2)), 1 << 20);
    let with = |change: &dyn Fn(&mut HierarchyConfig)| {
        let mut config = config();
        change(&mut config);
        config
    };
    let rows: PerRank = [300, 0, 7, 1000].into_iter().collect();
    let of = |operation| HierarchicalCall {
        operation,
        ..call.clone()
    };
    let scatter = of(Operation::ReduceScatter {
        rows: rows.clone(),
        row_len: 1024,
        op: ReduceOp::Max,
    });
    let gather = of(Operation::AllGather {
        rows,
        row_len: 1024,
    });
    let forced = |choice| HierarchicalCall {
        choice: Some(choice),
        ..call.clone()
    };
    let wide = HierarchicalCall {
        output: DataType::F32,
        ..call.clone()
    };
    let usual = config();
    let slow = wire(1_000_000, 1000);
    let lines = [
        ("as usual", line(&call, &usual, &costs())),
        ("rails are memory", line(&call, &usual, &Costs::host())),
        ("rails of 1 ms", line(&call, &usual, &slow)),
        ("sums of f32", line(&wide, &usual, &costs())),
        (
            "1 MiB of staging memory",
            line(&call, &with(&|c| c.staging_bytes = 1 << 20), &costs()),
        ),
        (
            "one slice at a time",
            line(&call, &with(&|c| c.parallelism = Some(1)), &costs()),
        ),
        (
            "slices of 64 KiB",
            line(&call, &with(&|c| c.slice_bytes = Some(1 << 16)), &costs()),
        ),
        (
            "whole, forced",
            line(&forced(Path::Whole), &usual, &costs()),
        ),
        (
            "7 slices, forced",
            line(&forced(Path::Slices { count: 7 }), &usual, &costs()),
        ),
        (
            "1 slice, forced, in 100 KB",
            line(
                &forced(Path::Slices { count: 1 }),
                &with(&|c| c.staging_bytes = 100_000),
                &costs(),
            ),
        ),
        (
            "whole, forced, in 100 KB",
            line(
                &forced(Path::Whole),
                &with(&|c| c.staging_bytes = 100_000),
                &costs(),
            ),
        ),
        (
            "no staging memory",
            line(&call, &with(&|c| c.staging_bytes = 0), &costs()),
        ),
        ("reduce-scatter", line(&scatter, &usual, &costs())),
        ("all-gather", line(&gather, &usual, &costs())),
        (
            "reduce-scatter, whole",
            line(
                &HierarchicalCall {
                    choice: Some(Path::Whole),
                    ..scatter.clone()
                },
                &usual,
                &costs(),
            ),
        ),
        (
            "rows of other machines",
            line(
                &HierarchicalCall {
                    machines: machines((3, 2)),
                    ..gather.clone()
                },
                &usual,
                &costs(),
            ),
        ),
    ];
    let text: String = lines.iter().map(|(n, l)| format!("{n}: {l}\n")).collect();
    insta::assert_snapshot!(text);
}

#[test]
fn few_bytes_take_the_path_of_fewest_calls() {
    let of = |elements| {
        let call = all_reduce(machines((2, 2)), elements);
        plan(&call, &config(), &costs()).unwrap()
    };
    assert!(matches!(of(16), HierarchicalPlan::Whole { .. }));
    assert!(matches!(of(1 << 22), HierarchicalPlan::Slices(p) if p.slices > 1 && p.slots > 1));
}

/// One machine has its collective's order, and says so where a path to others is forced.
#[test]
fn one_machine_has_one_way() {
    let sum = all_reduce(machines((1, 4)), 16);
    let gather = HierarchicalCall {
        operation: Operation::AllGather {
            rows: [4; 4].into_iter().collect(),
            row_len: 1,
        },
        ..sum.clone()
    };
    for (call, order) in [(sum, Some(SumOrder::Flat)), (gather, None)] {
        for choice in [None, Some(Path::Whole), Some(Path::Slices { count: 1 })] {
            let call = HierarchicalCall {
                choice,
                ..call.clone()
            };
            let inside = plan(&call, &config(), &costs()).unwrap();
            assert_eq!(inside.order(), order);
            let HierarchicalPlan::Inside { instead_of, .. } = inside else {
                panic!("{inside}");
            };
            let why = instead_of.map(|reason| reason.code);
            assert_eq!(why, choice.map(|_| reason::ONE_MACHINE));
        }
    }
}

#[test]
fn costs_that_decide_differently_have_other_digests() {
    let all = [
        Costs::host(),
        costs(),
        wire(10_000, 999),
        wire(9_999, 1000),
        Costs {
            add_bytes_per_us: 7,
            ..Costs::host()
        },
        Costs {
            copy_ns: 7,
            ..Costs::host()
        },
        Costs {
            enqueue_ns: 7,
            ..Costs::host()
        },
        Costs {
            connections: 7,
            ..Costs::host()
        },
        Costs {
            crowded_percent: 170,
            ..Costs::host()
        },
        Costs {
            in_place: true,
            ..Costs::host()
        },
    ];
    let digests: BTreeSet<u64> = all.iter().map(Costs::digest).collect();
    assert_eq!(digests.len(), all.len());
}

/// Who reads a plan learns what of it was measured on so many machines and ranks, and what was not.
#[test]
fn costs_that_were_not_measured_on_these_machines_say_so() {
    let sockets = Costs::cuda();
    let own = Costs::cuda_over(Wire {
        latency_ns: 5_000,
        bytes_per_us: 50_000,
    });
    let lines = [
        ("host", Costs::host()),
        ("host, slow rails", costs()),
        ("GPUs", sockets),
        ("GPUs, a wire that is known", own),
    ];
    let mut text = String::new();
    for shape in [(2, 2), (2, 4), (4, 2)] {
        for (name, costs) in &lines {
            let told = costs.told(machines(shape));
            writeln!(text, "{} x {}, {name}: {told}", shape.0, shape.1).unwrap();
        }
        for bytes in [1 << 10, 1 << 20, 64 << 20] {
            let call = all_reduce(machines(shape), bytes / 2);
            let plan = line(&call, &config(), &sockets);
            writeln!(text, "  {bytes:>8} bytes on GPUs: {plan}").unwrap();
        }
    }
    insta::assert_snapshot!(text);
}
