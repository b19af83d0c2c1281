//! Collectives across machines: every element goes where it must, slots are not taken too early, and plans as text.

#![allow(clippy::unwrap_used, reason = "tests")]

use brigade_device::{
    DataType, HierarchicalCall, HierarchicalOperation as Operation, HierarchicalPath as Path,
    HierarchicalPlan, HierarchyConfig, Machines, ParallelMode, PerRank, Phase, ReduceOp, SumOrder,
};
use brigade_plan::{
    hierarchical::{Costs, Schedule, Slices, Step, Whole, Wire, parts_bytes, plan},
    reason,
};
use proptest::{prelude::*, sample::select};
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

/// Seven rows of one element for one of sixteen ranks: slices of one element fit where two do not, and all as a whole fits where no slice does.
#[test]
fn what_fits_at_all_is_planned() {
    let mut rows = PerRank::from_elem(0, 16);
    rows[15] = 7;
    let call = HierarchicalCall {
        machines: machines((2, 8)),
        operation: Operation::ReduceScatter {
            rows,
            row_len: 1,
            op: ReduceOp::Avg,
        },
        dtype: DataType::F32,
        output: DataType::F32,
        choice: None,
    };
    let slices: usize = parts_bytes(&call, 1).iter().sum();
    let whole: usize = Whole::parts_bytes(&call).iter().sum();
    assert!(whole < slices && slices < parts_bytes(&call, 2).iter().sum());
    let of = |staging_bytes, slice_bytes| {
        let config = HierarchyConfig {
            staging_bytes,
            slice_bytes,
            ..config()
        };
        plan(&call, &config, &Costs::host())
    };
    let HierarchicalPlan::Slices(plan) = of(slices, Some(1 << 20)).unwrap() else {
        panic!("slices were asked for");
    };
    assert_eq!((plan.rank_elements, plan.slices), (1, 7));
    for staging_bytes in [slices, whole] {
        let all = of(staging_bytes, None).unwrap();
        assert!(matches!(all, HierarchicalPlan::Whole { .. }));
    }
    assert_eq!(of(slices - 1, Some(4)).unwrap_err().code, reason::CAPACITY);
    assert_eq!(of(whole - 1, None).unwrap_err().code, reason::CAPACITY);
}

/// What GPUs are taken for: few bytes go as a whole, many in phases. Over sockets one slice is as good as many, for the wire is all that takes
/// time; where it is quick, several are under way. (Two machines of one rank carry as many bytes either way.)
#[test]
fn gpus_cut_what_keeps_more_than_the_wire_busy() {
    let sockets = Costs::cuda();
    let quick = sockets.with_wire(Wire {
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
            assert!(
                matches!(plan, HierarchicalPlan::Whole { .. }),
                "{shape:?}: {plan}"
            );
        }
        for costs in [&sockets, &quick] {
            let plan = of(64 << 20, costs);
            let HierarchicalPlan::Slices(p) = &plan else {
                panic!("{shape:?}: {plan}");
            };
            assert!(
                costs == &sockets || p.slices > 1 && p.slots > 1,
                "{shape:?}: {plan}"
            );
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
    ];
    let digests: BTreeSet<u64> = all.iter().map(Costs::digest).collect();
    assert_eq!(digests.len(), all.len());
}

/// Who reads a plan learns what of it was measured on so many machines and ranks, and what was not.
#[test]
fn costs_that_were_not_measured_on_these_machines_say_so() {
    let sockets = Costs::cuda();
    let own = sockets.with_wire(Wire {
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

fn shapes() -> impl Strategy<Value = Machines> {
    select(&SHAPES[..]).prop_map(machines)
}

prop_compose! {
    /// Any call, with pieces of its slices.
    fn calls()(machines in shapes())(
        which in 0..3,
        elements in 0usize..5000,
        rows in prop::collection::vec(0usize..40, machines.size()),
        row_len in 0usize..9,
        rank_elements in 1usize..70,
        (dtype, output) in select(vec![
            (DataType::BF16, DataType::BF16),
            (DataType::F16, DataType::F32),
            (DataType::F32, DataType::F32),
        ]),
        machines in Just(machines),
    ) -> (HierarchicalCall, usize) {
        let (rows, op): (PerRank, _) = (rows.into_iter().collect(), ReduceOp::Avg);
        let (operation, output) = match which {
            0 => (Operation::AllReduce { elements, op }, output),
            1 => (Operation::ReduceScatter { rows, row_len, op }, output),
            _ => (Operation::AllGather { rows, row_len }, dtype),
        };
        (HierarchicalCall { machines, operation, dtype, output, choice: None }, rank_elements)
    }
}

fn elements(call: &HierarchicalCall) -> usize {
    match &call.operation {
        Operation::AllReduce { elements, .. } => *elements,
        Operation::ReduceScatter { rows, row_len, .. } | Operation::AllGather { rows, row_len } => {
            rows.iter().sum::<usize>() * row_len
        }
    }
}

/// Slices until nothing is left.
fn slices_of(call: &HierarchicalCall, rank_elements: usize) -> usize {
    let most = match &call.operation {
        Operation::AllReduce { elements, .. } => elements.div_ceil(call.machines.size()),
        Operation::ReduceScatter { rows, row_len, .. } | Operation::AllGather { rows, row_len } => {
            rows.iter().max().unwrap() * row_len
        }
    };
    most.div_ceil(rank_elements)
}

proptest! {
    #[test]
    fn every_element_is_in_one_piece((call, rank_elements) in calls()) {
        let slices = Slices::new(&call, rank_elements);
        let mut seen = vec![0u8; elements(&call)];
        for slice in 0..slices_of(&call, rank_elements) {
            for rank in 0..call.machines.size() {
                let piece = slices.piece(slice, rank);
                prop_assert!(piece.len() <= rank_elements);
                prop_assert_eq!(slices.own(slice, rank).len(), piece.len());
                piece.for_each(|i| seen[i] += 1);
            }
        }
        prop_assert!(seen.iter().all(|&n| n == 1));
    }

    /// Pieces lie so that a reduce-scatter inside gives each rank what its rail collects.
    #[test]
    fn shares_are_what_rails_carry((call, rank_elements) in calls()) {
        let slices = Slices::new(&call, rank_elements);
        let machines = call.machines;
        for slice in 0..slices_of(&call, rank_elements) {
            let mut pieces = slices.pieces(slice);
            let shares = slices.shares(slice);
            for (local, &share) in shares.iter().enumerate() {
                let rail = slices.rail(slice, local);
                prop_assert_eq!(rail.iter().sum::<usize>(), share);
                for (machine, &len) in rail.iter().enumerate() {
                    let piece = slices.piece(slice, machines.rank(machine, local));
                    prop_assert_eq!(piece.len(), len);
                    prop_assert_eq!(pieces.next(), Some(piece));
                }
            }
            prop_assert_eq!(pieces.next(), None);
            let [whole, share, collected, sum, parts, gathered] = parts_bytes(&call, rank_elements);
            let bytes = |elements: usize, dtype: DataType| elements * dtype.bytes();
            let all: usize = shares.iter().sum();
            for local in 0..machines.ranks() {
                let rail = slices.rail(slice, local);
                let most = rail.iter().copied().max().unwrap();
                let has = brigade_plan::hierarchical::phases(&call);
                for (phase, room, need) in [
                    (Phase::ReduceInside, whole, bytes(all, call.dtype)),
                    (Phase::Collect, share, bytes(shares[local], call.dtype)),
                    (Phase::Add, collected, bytes(most * machines.count(), call.dtype)),
                    (Phase::Add, sum, bytes(most, call.output)),
                    (Phase::Diffuse, sum, bytes(most, call.output)),
                    (Phase::Diffuse, parts, bytes(shares[local], call.output)),
                    (Phase::GatherInside, gathered, bytes(all, call.output)),
                ] {
                    prop_assert!(!has.contains(&phase) || need <= room, "{phase:?}: {need} in {room}");
                }
            }
        }
    }

    /// Every rank takes what there is of its input once, gives its whole output once, and what goes into a phase is what came out of the
    /// one before.
    #[test]
    fn steps_take_all_and_give_all((call, rank_elements) in calls()) {
        let slices = Slices::new(&call, rank_elements);
        let phases = brigade_plan::hierarchical::phases(&call);
        let rank = call.machines.size() - 1;
        let own = call.elements_of_ranks().last().copied().unwrap_or(0);
        let all = elements(&call);
        let (input, output) = match call.operation {
            Operation::AllReduce { .. } => (all, all),
            Operation::ReduceScatter { .. } => (all, own),
            Operation::AllGather { .. } => (own, all),
        };
        let (mut taken, mut given) = (vec![0u8; input], vec![0u8; output]);
        let parts = parts_bytes(&call, rank_elements);
        for slice in 0..slices_of(&call, rank_elements) {
            let mut before = None;
            for phase in 0..phases.len() {
                let work = slices.work(&call, &phases, rank, Step { phase, slice }).unwrap();
                prop_assert!(before.is_none_or(|p| p == work.from), "{work:?} after {before:?}");
                before = Some(work.to);
                for place in [work.from, work.to] {
                    let bytes = place.elements * place.dtype.bytes();
                    prop_assert!(bytes <= parts[place.part as usize], "{work:?}");
                }
                for (pieces, count, room) in [
                    (&work.take, &mut taken, work.from.elements),
                    (&work.give, &mut given, work.to.elements),
                ] {
                    for piece in pieces {
                        prop_assert_eq!(piece.place.len(), piece.tensor.len());
                        prop_assert!(piece.place.end <= room);
                        piece.tensor.clone().for_each(|i| count[i] += 1);
                    }
                }
            }
            let beyond = Step { phase: phases.len(), slice };
            prop_assert!(slices.work(&call, &phases, rank, beyond).is_none());
        }
        // With a machine alone, nothing goes through phases that there are not.
        if !phases.is_empty() {
            prop_assert!(taken.iter().chain(&given).all(|&n| n == 1));
        }
    }

    /// As a whole, every machine gets along its rail what is its own, and memory that is the same on all ranks holds it.
    #[test]
    fn a_whole_call_brings_every_rank_what_is_its_own((call, _) in calls()) {
        let machines = call.machines;
        let all = elements(&call);
        let own = call.elements_of_ranks();
        let offsets: Vec<usize> = std::iter::once(0)
            .chain(own.iter().scan(0, |sum, n| {
                *sum += n;
                Some(*sum)
            }))
            .collect();
        let bytes = Whole::parts_bytes(&call);
        let wholes: Vec<_> = (0..machines.size()).map(|rank| Whole::new(&call, rank)).collect();
        for (rank, whole) in wholes.iter().enumerate() {
            let (machine, local) = (machines.machine_of(rank), machines.local_of(rank));
            let mine = whole.own(&call, rank);
            let each = whole.travels.bytes();
            let comes = mine * machines.count() * each;
            let sent: usize = whole.pieces.iter().sum();
            match call.operation {
                Operation::AllReduce { .. } => {
                    prop_assert!(whole.pieces.iter().all(|&n| n == all));
                    prop_assert!(comes <= bytes[2] && mine * each <= bytes[1]);
                }
                Operation::ReduceScatter { .. } => {
                    prop_assert_eq!(mine, own[rank]);
                    prop_assert!(comes <= bytes[2]);
                    // What every rank of the rail takes out of its machine's sums for this one.
                    for peer in machines.rail(local) {
                        let of = &wholes[peer];
                        let place = of.places().nth(machine).unwrap();
                        let takes = of.takes.get(machine).unwrap_or(&place);
                        prop_assert_eq!(takes, &(offsets[rank]..offsets[rank + 1]));
                    }
                    if !whole.takes.is_empty() {
                        prop_assert!(sent * each <= bytes[1] && all * each <= bytes[5]);
                    }
                }
                Operation::AllGather { .. } => {
                    prop_assert_eq!(sent, all);
                    prop_assert_eq!(mine, whole.inside.iter().sum::<usize>());
                    let first = machines.inside(machine).start;
                    prop_assert_eq!(whole.places().nth(machine).unwrap().start, offsets[first]);
                    prop_assert!(machines.ranks() == 1 || mine * each <= bytes[1]);
                }
            }
        }
    }

    /// A plan keeps to its settings; its expectation is what its schedule takes.
    #[test]
    fn plans_keep_to_their_settings(
        (call, _) in calls(),
        staging_bytes in 0usize..200_000,
        parallelism in prop::option::of(1u16..9),
        slice_bytes in prop::option::of(1usize..20_000),
        choice in prop::option::of(prop_oneof![
            1 => Just(Path::Whole),
            5 => (1u32..40).prop_map(|count| Path::Slices { count }),
        ]),
    ) {
        let call = HierarchicalCall { choice, ..call };
        let config = HierarchyConfig { staging_bytes, slice_bytes, parallelism, ..config() };
        let costs = costs();
        match plan(&call, &config, &costs) {
            Err(r) => {
                prop_assert_eq!(r.code, reason::CAPACITY);
                let whole: usize = Whole::parts_bytes(&call).iter().sum();
                let slices: usize = parts_bytes(&call, 1).iter().sum();
                let whole_may = choice.map_or(slice_bytes.is_none(), |c| c == Path::Whole);
                prop_assert!(!whole_may || whole > staging_bytes);
                prop_assert!(choice == Some(Path::Whole) || slices > staging_bytes);
            }
            Ok(HierarchicalPlan::Inside { instead_of, .. }) => {
                prop_assert_eq!(call.machines.count(), 1);
                prop_assert_eq!(instead_of.is_some(), choice.is_some());
            }
            Ok(HierarchicalPlan::Whole { staging_bytes: need, .. }) => {
                let asked = choice == Some(Path::Whole);
                prop_assert!(need <= staging_bytes);
                prop_assert!(asked || choice.is_none() && slice_bytes.is_none());
            }
            Ok(HierarchicalPlan::Slices(p)) => {
                prop_assert!(choice != Some(Path::Whole));
                let slot: usize = parts_bytes(&call, p.rank_elements).iter().sum();
                prop_assert_eq!(p.staging_bytes, slot * p.slots);
                prop_assert!(p.staging_bytes <= staging_bytes);
                let tracks = Schedule::of(&p).tracks().count();
                prop_assert!(p.slots >= 1 && p.slots <= tracks && p.slots <= p.slices);
                prop_assert!(parallelism.is_none_or(|n| p.slots <= n.into()));
                prop_assert_eq!(p.slices, slices_of(&call, p.rank_elements).max(1));
                let ranks = call.machines.ranks() as u16;
                let gathers = matches!(call.operation, Operation::AllGather { .. });
                prop_assert_eq!(p.order, (!gathers).then_some(SumOrder::ByMachine { ranks }));
                let steps = costs.steps(&call, &p.phases, p.rank_elements);
                let ns = costs.begins_ns(&call) + Schedule::of(&p).ns(&steps);
                prop_assert_eq!(p.expected.as_nanos(), u128::from(ns));
            }
        }
    }
}
