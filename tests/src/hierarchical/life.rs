//! Joining, leases, graphs and the end of a hierarchy.

use super::{Case, Made, SHAPES, What, all_ranks, at, config, make};
use crate::{
    check::{assert_bits, expect_invalid},
    faults::AMPLE,
    suite::{Suite, World},
};
use brigade_device::{
    DataType, Error, HierarchicalPath, HierarchyConfig, Machines, NcclUse, ReduceOp,
};
use rand::Rng;
use std::sync::Arc;

/// One lease at a time; another stream may have the next one; after the end there are none.
fn leases_and_end(world: &World, shape: (usize, usize)) {
    let case = Case::sum(&mut world.rng(), shape, 99);
    world.run(&all_ranks(), move |rank| {
        let over = rank.join_machines(shape.0, &config());
        let busy = |result: Result<(), Error>| matches!(result, Err(Error::Busy(_)));
        let lease = over.lease(&rank.stream).unwrap();
        assert!(busy(over.lease(&rank.stream).map(drop)));
        assert!(busy(over.reset(AMPLE)));
        assert!(busy(over.close(AMPLE)));
        lease.finish().unwrap().sync(AMPLE).unwrap();
        let other = rank.device.stream(1).unwrap();
        drop(over.lease(&other).unwrap());
        case.run(rank, &over, None);
        over.close(AMPLE).unwrap();
        for closed in [
            over.check(),
            over.lease(&rank.stream).map(drop),
            over.reset(AMPLE),
            over.close(AMPLE),
        ] {
            assert!(matches!(closed, Err(Error::Closed)), "{closed:?}");
        }
    });
}

/// All ranks pass the same machines and settings, and machines of all ranks.
fn votes(world: &World, shape: (usize, usize)) {
    let odd_one = world.rng().random_range(0..world.size);
    world.run(&all_ranks(), move |rank| {
        let device = || Arc::clone(&rank.device);
        let other = HierarchyConfig {
            staging_bytes: config().staging_bytes + usize::from(rank.rank == odd_one),
            ..config()
        };
        let refused = rank.try_join_machines(device(), shape.0, &other);
        assert!(
            matches!(&refused, Err(Error::Group { what, .. })
            if what.contains("do not agree")),
            "{refused:?}"
        );
        let too_many = Machines::cut(2 * rank.size, 2).unwrap();
        let refused = rank.try_join_any(too_many, &config());
        assert!(
            matches!(
                &refused,
                Err(Error::Invalid {
                    field: "machines",
                    ..
                })
            ),
            "{refused:?}"
        );
        let machines = Machines::cut(rank.size, shape.0).unwrap();
        type Change = fn(&mut HierarchyConfig);
        let changes: [(&str, Change); 6] = [
            ("slice_bytes", |c| c.slice_bytes = Some(0)),
            ("parallelism", |c| c.parallelism = Some(0)),
            ("connections", |c| c.connections = Some(1)),
            ("channels", |c| c.channels = Some(65)),
            ("comm.nccl", |c| c.comm.nccl = NcclUse::Forced),
            ("comm.nccl", |c| c.comm.nccl = NcclUse::Quicker),
        ];
        for (named, change) in changes {
            let mut wrong = config();
            change(&mut wrong);
            let refused = rank.try_join_machines(device(), shape.0, &wrong);
            assert!(
                matches!(&refused, Err(Error::Invalid { field, .. }) if *field == named),
                "{refused:?}"
            );
            let need = rank.device.machines_memory_need(machines, &wrong);
            assert_eq!(expect_invalid(need, named), named);
        }
    });
}

/// A captured call runs again and again with the data of the day.
fn replayed(world: &World, shape: (usize, usize)) {
    let mut rng = world.rng();
    let mut rows: Vec<usize> = (0..world.size).map(|_| rng.random_range(0..700)).collect();
    rows[0] += 1000;
    let all = rows.iter().sum();
    let days: Vec<Case> = (0..4).map(|_| Case::sum(&mut rng, shape, all)).collect();
    world.run(&all_ranks(), move |rank| {
        let over = rank.join_machines(shape.0, &config());
        let slices = Some(HierarchicalPath::Slices { count: 6 });
        let ways = [None, slices, Some(HierarchicalPath::Whole)];
        let calls = What::ALL.map(|what| ways.map(|choice| (what, choice)));
        for (what, choice) in calls.into_iter().flatten() {
            let made = Made {
                what,
                op: ReduceOp::Sum,
                choice,
                rows: &rows,
            };
            let (brings, gets) = made.elements(rank.rank, all);
            let mut from = rank.poisoned(DataType::F32, &[brings]);
            let mut to = rank.poisoned(DataType::F32, &[gets]);
            let mut enqueue = || make(rank, &over, made, (Some(&from), &mut to)).map(drop);
            let graph = rank.device.capture(&rank.stream, &mut enqueue).unwrap();
            for day in &days {
                let [mine, want] = day.sides(made, rank.rank);
                rank.device
                    .write(&rank.stream, from.view_mut(), &mine)
                    .unwrap();
                rank.device.fill(&rank.stream, to.view_mut(), 0xFF).unwrap();
                graph.launch(&rank.stream).unwrap();
                let got = rank.raw(to.view());
                assert_bits(&got, &want, DataType::F32, &format!("a replay of {made:?}"));
                // Eager calls in between.
                day.run_as(made, rank, &over);
            }
        }
    });
}

/// Adds the contracts.
pub fn add(suite: &mut Suite) {
    for shape in SHAPES {
        at(suite, shape, "leases_and_end", leases_and_end);
    }
    for shape in [(2, 1), (2, 2)] {
        at(suite, shape, "votes", votes);
        at(suite, shape, "replayed", replayed);
    }
}
