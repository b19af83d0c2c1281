//! Rails that are as slow as a network's: what the pipeline gains there, and that the model holds.

use super::{Case, all_ranks, at, config};
use crate::suite::{Suite, World};
use brigade_device::{
    Device, HierarchicalPath, HierarchicalPlan, HierarchyConfig, Phase, SlicedPlan,
};
use brigade_host::{HostConfig, HostDevice, RailModel};
use parking_lot::Mutex;
use std::{
    sync::Arc,
    time::{Duration, Instant},
};

/// A device whose rails are slow.
fn slow(model: RailModel) -> Arc<dyn Device> {
    let config = HostConfig {
        rail: Some(model),
        ..HostConfig::default()
    };
    HostDevice::with(&config).unwrap()
}

const SLICES: u32 = 8;

/// Where slices wait for the network, a phase's wait is beside the others': eight slices that go one after the other wait twice for each, and in
/// the pipeline once. And nothing comes sooner than the model lets it. Both are judged by the best of some runs, as machines
/// that test have other things to do.
fn slices_overlap(world: &World, shape: (usize, usize)) {
    let latency = Duration::from_millis(12);
    let model = RailModel {
        latency,
        bytes_per_us: 1000,
    };
    let case = Case::sum(&mut world.rng(), shape, 4096);
    let times = Arc::new(Mutex::new([Duration::MAX; 2]));
    let (best, device_of) = (Arc::clone(&times), slow);
    world.run(&all_ranks(), move |rank| {
        let choice = Some(HierarchicalPath::Slices { count: SLICES });
        for (which, parallelism) in [Some(1), None].into_iter().enumerate() {
            let config = HierarchyConfig {
                parallelism,
                ..config()
            };
            let device = device_of(model);
            let over = rank.try_join_machines(device, shape.0, &config).unwrap();
            for _ in 0..3 {
                rank.meet();
                let start = Instant::now();
                case.run(rank, &over, choice);
                let took = start.elapsed();
                // Two connections have two exchanges of each slice between them.
                assert!(took >= latency * SLICES, "{took:?}");
                let mut best = best.lock();
                best[which] = best[which].min(took);
            }
        }
        rank.meet();
        let [one_by_one, together] = *best.lock();
        assert!(one_by_one >= 2 * latency * SLICES, "{one_by_one:?}");
        let most = one_by_one.mul_f64(0.75);
        assert!(together < most, "{together:?} of {one_by_one:?}");
    });
}

/// A link carries no more than its bandwidth, whatever shares it.
fn links_are_shared(world: &World, shape: (usize, usize)) {
    let model = RailModel {
        latency: Duration::ZERO,
        bytes_per_us: 2,
    };
    let elements = 30_000;
    let case = Case::sum(&mut world.rng(), shape, elements);
    world.run(&all_ranks(), move |rank| {
        let device = slow(model);
        let over = rank.try_join_machines(device, shape.0, &config()).unwrap();
        for count in [1, 6] {
            rank.meet();
            let start = Instant::now();
            let choice = Some(HierarchicalPath::Slices { count });
            case.run(rank, &over, choice);
            let took = start.elapsed();
            // A rank sends the others' pieces of its share, and its own to all others: as many bytes again.
            let (machines, ranks) = shape;
            let bytes = 2 * elements / ranks / machines * (machines - 1) * 4;
            let least = Duration::from_micros(bytes as u64 / model.bytes_per_us);
            assert!(took >= least, "{took:?} for {bytes} bytes");
        }
    });
}

/// What the links are decides on the path, alike on all ranks.
fn plans_know_the_links(world: &World, shape: (usize, usize)) {
    let case = Case::sum(&mut world.rng(), shape, 1 << 17);
    world.run(&all_ranks(), move |rank| {
        let plan = |latency| {
            let model = RailModel {
                latency,
                bytes_per_us: 100,
            };
            let over = rank.try_join_machines(slow(model), shape.0, &config());
            let plan = case.run(rank, &over.unwrap(), None);
            rank.assert_shared(plan.to_string().as_bytes(), "plan");
            plan
        };
        let slices = |plan: &HierarchicalPlan| match plan {
            HierarchicalPlan::Slices(p) => p.slices,
            _ => 1,
        };
        let near = plan(Duration::ZERO);
        let far = plan(Duration::from_millis(20));
        assert!(slices(&near) > 1, "{near}");
        // As many as are on their way at once: none waits for another, and nothing goes along the rail twice.
        assert!(slices(&far) <= 2.min(slices(&near)), "{far}");
        let collects = |p: &SlicedPlan| p.phases.contains(&Phase::Collect);
        let twice = matches!(&far, HierarchicalPlan::Slices(p) if collects(p));
        assert!(!twice, "{far}");
    });
}

/// Adds the contracts.
pub fn add(suite: &mut Suite) {
    at(suite, (2, 2), "slices_overlap", slices_overlap);
    at(suite, (3, 1), "slices_overlap", slices_overlap);
    at(suite, (2, 2), "links_are_shared", links_are_shared);
    at(suite, (3, 2), "links_are_shared", links_are_shared);
    at(suite, (2, 2), "plans_know_the_links", plans_know_the_links);
}
