//! What holds for any call, machines and settings.

use super::{SHAPES, config, costs, machines};
use brigade_device::{
    DataType, HierarchicalCall, HierarchicalOperation as Operation, HierarchicalPath as Path,
    HierarchicalPlan, HierarchyConfig, Machines, PerRank, Phase, ReduceOp, SumOrder,
};
use brigade_plan::{
    hierarchical::{
        Costs, Schedule, Slices, Step, Whole, one_shot_phases, parts_bytes, phases, plan,
    },
    reason,
};
use proptest::{prelude::*, sample::select};

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
    let bytes = |n| {
        parts_bytes(&call, (&phases(&call), n), false)
            .iter()
            .sum::<usize>()
    };
    let slices = bytes(1);
    let whole: usize = Whole::parts_bytes(&call).iter().sum();
    assert!(whole < slices && slices < bytes(2));
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
    let why = of(whole - 1, None).unwrap_err();
    assert_eq!(why.code, reason::CAPACITY);
    let told = format!("needs {whole} bytes of staging_bytes");
    assert!(why.what.contains(&told), "{why}");
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
            let has = phases(&call);
            let [whole, share, collected, sum, parts, gathered] =
                parts_bytes(&call, (&has, rank_elements), false);
            let bytes = |elements: usize, dtype: DataType| elements * dtype.bytes();
            let all: usize = shares.iter().sum();
            for local in 0..machines.ranks() {
                let rail = slices.rail(slice, local);
                let most = rail.iter().copied().max().unwrap();
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
    fn steps_take_all_and_give_all(
        (call, rank_elements) in calls(),
        one_shot: bool,
        in_place: bool,
    ) {
        let slices = Slices::new(&call, rank_elements);
        let others = one_shot_phases(&call).filter(|_| one_shot);
        let phases = others.unwrap_or_else(|| phases(&call));
        let rank = call.machines.size() - 1;
        let own = call.elements_of_ranks().last().copied().unwrap_or(0);
        let all = elements(&call);
        let (input, output) = match call.operation {
            Operation::AllReduce { .. } => (all, all),
            Operation::ReduceScatter { .. } => (all, own),
            Operation::AllGather { .. } => (own, all),
        };
        let (mut taken, mut given) = (vec![0u8; input], vec![0u8; output]);
        let parts = parts_bytes(&call, (&phases, rank_elements), in_place);
        for slice in 0..slices_of(&call, rank_elements) {
            let mut before = None;
            for phase in 0..phases.len() {
                let work = slices.work(&call, &phases, rank, Step { phase, slice }).unwrap();
                prop_assert!(before.is_none_or(|p| p == work.from), "{work:?} after {before:?}");
                before = Some(work.to);
                for (place, pieces) in [(work.from, &work.take), (work.to, &work.give)] {
                    // What lies in one piece in the caller's tensor needs no place of its own.
                    let whole = matches!(&pieces[..], [p] if p.place == (0..place.elements));
                    if in_place && whole {
                        continue;
                    }
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
        connections in prop::option::of(2u16..6),
        slice_bytes in prop::option::of(1usize..20_000),
        choice in prop::option::of(prop_oneof![
            1 => Just(Path::Whole),
            5 => (1u32..40).prop_map(|count| Path::Slices { count }),
            5 => (1u32..40).prop_map(|count| Path::OneShot { count }),
        ]),
    ) {
        let call = HierarchicalCall { choice, ..call };
        let config = HierarchyConfig { staging_bytes, slice_bytes, parallelism, connections, ..config() };
        let costs = Costs { connections: 4, ..costs() };
        // Whoever names the size of slices wants slices, if there is anything to slice.
        let usual = slice_bytes.is_none() || elements(&call) == 0;
        match plan(&call, &config, &costs) {
            Err(r) => {
                prop_assert_eq!(r.code, reason::CAPACITY);
                let whole: usize = Whole::parts_bytes(&call).iter().sum();
                let shot = matches!(choice, Some(Path::OneShot { .. }));
                let of = one_shot_phases(&call).filter(|_| shot);
                let of = of.unwrap_or_else(|| phases(&call));
                let slices: usize = parts_bytes(&call, (&of, 1), false).iter().sum();
                let whole_may = choice.map_or(usual, |c| c == Path::Whole);
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
                prop_assert!(asked || choice.is_none() && usual);
            }
            Ok(HierarchicalPlan::Slices(p)) => {
                prop_assert!(choice != Some(Path::Whole));
                let one_shot = one_shot_phases(&call);
                let has = |path: Option<Path>| match path {
                    Some(Path::Slices { .. }) => p.phases == phases(&call),
                    Some(Path::OneShot { .. }) => one_shot.is_none() || one_shot.as_ref() == Some(&p.phases),
                    _ => true,
                };
                prop_assert!(has(choice), "{p:?}");
                let slot: usize = parts_bytes(&call, (&p.phases, p.rank_elements), false).iter().sum();
                prop_assert_eq!(p.staging_bytes, slot * p.slots);
                prop_assert!(p.staging_bytes <= staging_bytes);
                let tracks = Schedule::of(&p).tracks().count();
                prop_assert!(p.slots >= 1 && p.slots <= tracks && p.slots <= p.slices);
                prop_assert!(parallelism.is_none_or(|n| p.slots <= n.into()));
                prop_assert!(connections.is_none_or(|n| p.connections <= n.into()) && p.connections <= 4);
                prop_assert_eq!(p.slices, slices_of(&call, p.rank_elements).max(1));
                let ranks = call.machines.ranks() as u16;
                let gathers = matches!(call.operation, Operation::AllGather { .. });
                prop_assert_eq!(p.order, (!gathers).then_some(SumOrder::ByMachine { ranks }));
                let steps = costs.steps(&call, &p.phases, p.rank_elements);
                let ns = costs.begins_ns(&call) + Schedule::of(&p).ns(&steps, costs.enqueue_ns);
                prop_assert_eq!(p.expected.as_nanos(), u128::from(ns));
            }
        }
    }
}
