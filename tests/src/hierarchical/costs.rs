//! Costs that were measured: plans go by them and say so, bits are the same by any, and ranks with different ones form no hierarchy.

use super::{CHOICES, Case, all_ranks, at, config};
use crate::suite::{Suite, World};
use brigade_device::{CostsBasis, Device, Error, HierarchicalPlan};
use brigade_host::{HostConfig, HostDevice};
use brigade_plan::Entries;
use rand::Rng;
use std::sync::Arc;

/// An entry of so many machines of so many ranks: what a call across takes, and a byte on the wire.
fn entries((machines, ranks): (usize, usize), (call_ns, bytes_per_us): (u64, u64)) -> Entries {
    let text = format!(
        r#"{{"costs_version": 3, "gpu": "host", "links": "shared", "machines": {machines}, "ranks": {ranks},
        "inside_call_ns": 30000, "inside_bytes_per_us": 900, "across_call_ns": {call_ns}, "across_bytes_per_us": 1000000000,
        "wire_latency_ns": 0, "wire_bytes_per_us": {bytes_per_us}, "add_bytes_per_us": 4000, "copy_ns": 300, "connections": 2, "crowded_percent": 100,
        "measured": {{"from_bytes": 4096, "to_bytes": 65536}}, "versions": {{"driver": "none", "cuda": "none", "nccl": null}},
        "source": {{"command": "brigade-perf tune-hierarchical", "date": "2026-01-02", "commit": "0123456"}}}}"#
    );
    Entries::read(&text).unwrap()
}

fn device(entries: &Entries) -> Arc<dyn Device> {
    let config = HostConfig {
        entries: entries.clone(),
        ..HostConfig::default()
    };
    HostDevice::with(&config).unwrap()
}

fn basis(plan: &HierarchicalPlan) -> CostsBasis {
    match plan {
        HierarchicalPlan::Whole { basis, .. } => *basis,
        HierarchicalPlan::Slices(plan) => plan.basis,
        HierarchicalPlan::Inside { .. } => panic!("inside"),
    }
}

/// The same bits on all paths, by costs that cut much and by costs that cut nothing; and what plans say of these.
fn same_bits(world: &World, shape: (usize, usize)) {
    let case = Case::sum(&mut world.rng(), shape, 40_001);
    world.run(&all_ranks(), move |rank| {
        let (machines, ranks) = shape;
        let here = |costs| entries(shape, costs);
        let cases = [
            (Entries::default(), None),
            // Calls take long, or nothing.
            (here((50_000_000, 1_000_000)), Some(1)),
            (here((1, 1000)), Some(2)),
            (entries((machines + 1, ranks), (1, 1000)), Some(2)),
        ];
        for (i, (own, slices)) in cases.into_iter().enumerate() {
            let over = rank.try_join_machines(device(&own), machines, &config());
            let over = over.unwrap();
            for choice in CHOICES {
                let plan = case.run(rank, &over, choice);
                let told = plan.to_string();
                rank.assert_shared(told.as_bytes(), "plan");
                let is_built_in = match shape {
                    (2, 2) => CostsBasis::Measured,
                    _ => CostsBasis::Elsewhere,
                };
                let want = [
                    is_built_in,
                    CostsBasis::Measured,
                    CostsBasis::Measured,
                    CostsBasis::Elsewhere,
                ][i];
                assert_eq!(basis(&plan), want, "{told}");
                if let (None, Some(least)) = (choice, slices) {
                    let made = match &plan {
                        HierarchicalPlan::Slices(plan) => plan.slices,
                        _ => 1,
                    };
                    assert_eq!(made > 1, least > 1, "{told}");
                }
            }
        }
        rank.assert_shared(&case.want, "sums by any costs");
    });
}

/// One rank has another entry, or none: nobody joins, and everybody is told what there should be.
fn votes(world: &World, shape: (usize, usize)) {
    let odd_one = world.rng().random_range(0..world.size);
    let case = Case::sum(&mut world.rng(), shape, 99);
    world.run(&all_ranks(), move |rank| {
        let usual = entries(shape, (1000, 100));
        for other in [entries(shape, (1000, 101)), Entries::default()] {
            let own = if rank.rank == odd_one { &other } else { &usual };
            match rank.try_join_machines(device(own), shape.0, &config()) {
                Err(Error::Group { step, what }) => {
                    assert_eq!(step, "join: machines");
                    assert!(what.contains("the ranks do not agree"), "{what}");
                    assert!(what.contains("costs (entries and wire"), "{what}");
                }
                other => panic!("{:?}", other.map(drop)),
            }
        }
        // An entry of another device's, or of machines that are further away, changes nothing.
        let more = entries((shape.0 + 1, shape.1), (7, 7));
        let own = if rank.rank == odd_one {
            usual.clone().and(more)
        } else {
            usual
        };
        let over = rank.try_join_machines(device(&own), shape.0, &config());
        case.run(rank, &over.unwrap(), None);
    });
}

/// Adds the contracts.
pub fn add(suite: &mut Suite) {
    for shape in [(2, 1), (2, 2), (3, 2)] {
        at(suite, shape, "costs_same_bits", same_bits);
        at(suite, shape, "costs_votes", votes);
    }
}
