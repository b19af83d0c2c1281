//! A communicator's life: joining, leases, and the end.

mod reset;

use crate::{
    check::{assert_kind, expect_fault},
    faults::{AMPLE, GRACE, Probe, impatient},
    gather_linear::config,
    ops,
    suite::{Suite, World},
};
use brigade_device::{AllReduceAlgorithm, Call, DataType, Error, FaultKind, ReduceOp};
use rand::Rng;
use std::time::{Duration, Instant};

/// One lease at a time; it excludes a reset and the end, too, and another stream may have the next one.
fn leases(world: &World) {
    let probe = Probe::new(&mut world.rng(), world.size);
    world.run(&config(), move |rank| {
        let busy = |result: Result<(), Error>| matches!(result, Err(Error::Busy(_)));
        let lease = rank.lease();
        assert!(busy(rank.comm().lease(&rank.stream).map(drop)));
        assert!(busy(rank.comm().reset(AMPLE)));
        assert!(busy(rank.comm().close(AMPLE)));
        lease.finish().unwrap().sync(AMPLE).unwrap();
        let other = rank.device.stream(1).unwrap();
        for stream in [&other, &rank.stream, &other] {
            let mut lease = rank.comm().lease(stream).unwrap();
            lease.barrier().unwrap();
        }
        probe.run(rank);
    });
}

/// After the end there are no leases, on any rank.
fn closed(world: &World) {
    let probe = Probe::new(&mut world.rng(), world.size);
    world.run(&config(), move |rank| {
        probe.run(rank);
        rank.comm().close(AMPLE).unwrap();
        for _ in 0..2 {
            let lease = rank.comm().lease(&rank.stream).map(drop);
            assert!(matches!(lease, Err(Error::Closed)), "{lease:?}");
            let reset = rank.comm().reset(AMPLE);
            assert!(matches!(reset, Err(Error::Closed)), "{reset:?}");
            let again = rank.comm().close(AMPLE);
            assert!(matches!(again, Err(Error::Closed)), "{again:?}");
        }
        assert!(matches!(rank.comm().check(), Err(Error::Closed)));
        let another = rank.join_another(&config());
        another.lease(&rank.stream).unwrap().barrier().unwrap();
    });
}

/// A rank that does not come to the end is a fault, in time.
fn close_without_a_rank(world: &World) {
    let missing = world.rng().random_range(0..world.size);
    world.run(&impatient(), move |rank| {
        rank.lease().barrier().unwrap();
        if rank.rank != missing {
            let start = Instant::now();
            let record = expect_fault(rank.comm().close(Duration::from_millis(200)), "close");
            assert_kind(&record, FaultKind::Timeout, "close");
            assert_eq!(record.peer as usize, missing, "{record}");
            assert!(start.elapsed() < Duration::from_millis(1200));
        }
        rank.meet();
        rank.comm().reset(AMPLE).unwrap();
        rank.comm().close(AMPLE).unwrap();
    });
}

/// A rank that closes while the others make a call: a mismatch on every rank, and nobody is closed.
fn close_in_another_call(world: &World) {
    let mut rng = world.rng();
    let probe = Probe::new(&mut rng, world.size);
    let culprit = rng.random_range(0..world.size);
    world.run(&config(), move |rank| {
        probe.run(rank);
        rank.meet();
        let start = Instant::now();
        let ended = if rank.rank == culprit {
            rank.comm().close(AMPLE)
        } else {
            ops::barrier().run(rank).result
        };
        let record = expect_fault(ended, "close against a barrier");
        assert_kind(&record, FaultKind::Mismatch, "close against a barrier");
        assert!(start.elapsed() < GRACE, "took {:?}", start.elapsed());
        rank.meet();
        rank.comm().reset(AMPLE).unwrap();
        probe.run(rank);
    });
}

/// Whoever has all the time in the world says so: a wait may then take long, but has an end that a clock can tell.
fn all_the_time_in_the_world(world: &World) {
    let probe = Probe::new(&mut world.rng(), world.size);
    world.run(&config(), move |rank| {
        probe.run(rank);
        rank.lease().finish().unwrap().sync(Duration::MAX).unwrap();
        rank.comm().reset(Duration::MAX).unwrap();
        probe.run(rank);
        rank.comm().close(Duration::MAX).unwrap();
    });
}

/// An abort while nobody is in a call stops the next one.
fn abort_between_calls(world: &World) {
    let probe = Probe::new(&mut world.rng(), world.size);
    world.run(&config(), move |rank| {
        probe.run(rank);
        rank.meet();
        if rank.rank == 0 {
            rank.comm().abort();
            rank.comm().abort();
        }
        rank.meet();
        for _ in 0..2 {
            let record = expect_fault(rank.comm().lease(&rank.stream).map(drop), "a lease");
            assert_kind(&record, FaultKind::Aborted, "a lease");
        }
        rank.comm().reset(AMPLE).unwrap();
        probe.run(rank);
    });
}

/// Ranks that join with different settings hear of it, all of them.
fn disagreement_at_join(world: &World) {
    world.run(&config(), |rank| {
        let mut other = config();
        if rank.rank == 0 {
            other.scratch_bytes += 4096;
        }
        match rank.try_join_another(&other) {
            Err(Error::Group { .. }) => {}
            other => panic!("{other:?} instead of a disagreement"),
        }
        rank.join_another(&config())
            .lease(&rank.stream)
            .unwrap()
            .barrier()
            .unwrap();
    });
}

/// Joining takes the memory that was foretold.
fn memory_need(world: &World) {
    world.run(&config(), |rank| {
        let need = rank.device.memory_need(&config(), rank.size).unwrap();
        let floor = 2 * (config().gather_bytes + config().reduce_scatter_bytes);
        assert!(
            need >= floor as u64,
            "{need} bytes for halves of {floor} in all"
        );
        let mut wrong = config();
        wrong.scratch_bytes = 1;
        assert!(rank.device.memory_need(&wrong, rank.size).is_err());
        let call = Call::Barrier;
        assert!(rank.comm().explain(&call).is_ok());
    });
}

/// A communicator says in words what it would do, and why: what its plan says, and behind it whether that was forced and by which figures. What
/// cannot be has the same reason.
fn told(world: &World) {
    world.run(&config(), |rank| {
        let all_reduce = |elements, choice| Call::AllReduce {
            elements,
            dtype: DataType::BF16,
            output: DataType::BF16,
            op: ReduceOp::Sum,
            choice,
        };
        let comm = rank.comm();
        for elements in [0, 1, 1000, 1 << 20] {
            for choice in [None, Some(AllReduceAlgorithm::TwoShot)] {
                let call = all_reduce(elements, choice);
                let (plan, told) = (comm.explain(&call).unwrap(), comm.told(&call).unwrap());
                let parts: Vec<_> = told.split("; ").collect();
                assert_eq!(parts[0], plan.to_string());
                assert_eq!(parts.contains(&"forced"), choice.is_some(), "{told}");
            }
        }
        let broadcast = Call::Broadcast {
            elements: 1,
            dtype: DataType::BF16,
            root: 0,
        };
        let told = comm.told(&broadcast).unwrap();
        let plan = comm.explain(&broadcast).unwrap().to_string();
        let why = told.strip_prefix(&plan).map(|rest| rest.contains("pushe"));
        assert_eq!(why, Some(true), "{told}");
        let nowhere = Call::Broadcast {
            elements: 1,
            dtype: DataType::BF16,
            root: rank.size,
        };
        assert_eq!(
            comm.told(&nowhere),
            Err(comm.explain(&nowhere).unwrap_err())
        );
    });
}

/// Adds the contracts.
pub fn add(suite: &mut Suite) {
    reset::add(suite);
    suite.add("life/leases", leases);
    suite.add("life/closed", closed);
    suite.add_from(2, "life/close_without_a_rank", close_without_a_rank);
    suite.add_from(2, "life/close_in_another_call", close_in_another_call);
    suite.add("life/all_the_time_in_the_world", all_the_time_in_the_world);
    suite.add("life/abort_between_calls", abort_between_calls);
    suite.add_from(2, "life/disagreement_at_join", disagreement_at_join);
    suite.add("life/memory_need", memory_need);
    suite.add("life/told", told);
}
