//! Waits in regions end: at the deadline, by an abort, or because the peer is gone; and regions outlive a reset.

use super::{WORKING, assert_works, by, peers, read, register, run, transfer, with, write};
use crate::{
    backend::Rank,
    check::{assert_kind, expect_fault},
    faults::{AMPLE, impatient},
    gather_linear::config,
    inject::{Director, Mishap, What},
    suite::{Suite, World},
};
use brigade_device::{
    Action, CommConfig, CopyBy, DataType, FaultKind, FaultRecord, Operation, Point, Region, Result,
};
use rand::{Rng, seq::IndexedRandom};
use std::time::{Duration, Instant};

/// A call that waits for a peer.
type Call = fn(&Rank, Region, usize) -> Result<()>;

/// Every call that waits, and what has to come before it.
const WAITING: [(&str, Call, Call); 4] = [
    (
        "wait",
        |_, _, _| Ok(()),
        |rank, region, peer| with(rank, |w| w.wait(region, peer)),
    ),
    (
        "put",
        |rank, region, peer| with(rank, |w| w.signal(region, peer)),
        |rank, region, peer| with(rank, |w| w.put(transfer(region, peer, 0, 8, 8))),
    ),
    (
        "put by an engine",
        |rank, region, peer| with(rank, |w| w.signal(region, peer)),
        |rank, region, peer| {
            let put = transfer(region, peer, 0, 8, 8);
            with(rank, |w| w.put(by(Some(CopyBy::Engine), put)))
        },
    ),
    (
        "signal",
        |rank, region, peer| with(rank, |w| w.signal(region, peer)),
        |rank, region, peer| with(rank, |w| w.signal(region, peer)),
    ),
];

fn assert_record(record: &FaultRecord, kind: FaultKind, what: &str) {
    assert_kind(record, kind, what);
    assert_eq!(
        record.operation,
        Operation::UserBuffers as u32,
        "{what}: {record}"
    );
}

/// Stopped: nothing is read or written any more, until a reset; then regions are what they were.
fn assert_recovers(rank: &Rank, region: Region, round: usize) {
    rank.meet();
    expect_fault(rank.comm().check(), "everybody hears of it");
    rank.meet();
    rank.comm().reset(AMPLE).unwrap();
    assert_works(rank, region, round);
    let another = register(rank, WORKING);
    assert_works(rank, another, round + 1);
    super::deregister(rank, another);
    rank.meet();
}

/// A peer that does not answer: a timeout that names it.
fn timeouts(world: &World) {
    run(world, &impatient(), |rank| {
        let region = register(rank, WORKING);
        let other = register(rank, WORKING);
        for (round, (name, before, call)) in WAITING.into_iter().enumerate() {
            assert_works(rank, other, round);
            rank.meet();
            if rank.rank == 0 {
                let peer = rank.size - 1;
                before(rank, region, peer).unwrap();
                let start = Instant::now();
                let record = expect_fault(call(rank, region, peer), name);
                assert!(
                    start.elapsed() < impatient().deadline + Duration::from_secs(1),
                    "{name}"
                );
                assert_record(&record, FaultKind::Timeout, name);
                assert_eq!(
                    (record.rank, record.peer),
                    (0, peer as u32),
                    "{name}: {record}"
                );
                assert_eq!(record.slot, u32::from(region.0), "{name}: {record}");
            }
            assert_recovers(rank, region, round);
        }
    });
}

/// A signal that is lost, and a release: whoever waits for it times out.
fn lost(world: &World) {
    let director = Director::new(&world.backend, None);
    world.run_injected(&impatient(), director.clone(), move |rank| {
        let region = register(rank, WORKING);
        let (from, to) = (0, rank.size - 1);
        let losses = [(Point::Announce, from), (Point::Done, to)];
        for (round, (point, culprit)) in losses.into_iter().enumerate() {
            assert_works(rank, region, round);
            rank.meet();
            if rank.rank == culprit {
                let what = What::Act(Action::Drop);
                director.arm(Mishap {
                    culprit,
                    point,
                    what,
                });
            }
            rank.meet();
            let result = if rank.rank == from {
                let signal = || with(rank, |w| w.signal(region, to));
                signal().and_then(|()| signal())
            } else if rank.rank == to {
                let wait = with(rank, |w| w.wait(region, from));
                wait.and_then(|()| with(rank, |w| w.release(region, from)))
            } else {
                Ok(())
            };
            rank.meet();
            let record = expect_fault(rank.comm().check(), point.name());
            assert!(result.err().is_none_or(|e| e.fault() == Some(&record)));
            assert_record(&record, FaultKind::Timeout, point.name());
            let pair = [record.rank, record.peer].map(|r| r as usize);
            assert!(pair.contains(&from) && pair.contains(&to), "{record}");
            assert_recovers(rank, region, round);
        }
    });
}

/// Somebody aborts while all others wait.
fn aborted(world: &World) {
    let mut rng = world.rng();
    let turns: Vec<_> = (0..9)
        .map(|_| (rng.random_range(0..world.size), rng.random_range(0..300)))
        .collect();
    run(world, &config(), move |rank| {
        let region = register(rank, WORKING);
        for (round, &(culprit, rounds)) in turns.iter().enumerate() {
            let (name, before, call) = WAITING[round % 3];
            rank.meet();
            let start = Instant::now();
            let record = if rank.rank == culprit {
                rank.dawdle(rounds);
                rank.comm().abort();
                expect_fault(rank.comm().check(), name)
            } else {
                let result =
                    before(rank, region, culprit).and_then(|()| call(rank, region, culprit));
                expect_fault(result, name)
            };
            assert!(
                start.elapsed() < Duration::from_secs(1),
                "{name}: ended late"
            );
            assert_kind(&record, FaultKind::Aborted, name);
            assert_eq!(record.rank as usize, culprit, "{name}: {record}");
            assert_recovers(rank, region, round);
        }
    });
}

/// A rank that is gone: the others hear of it long before the deadline.
fn peer_lost(world: &World) {
    let culprit = world.rng().random_range(0..world.size);
    run(world, &config(), move |rank| {
        let region = register(rank, WORKING);
        assert_works(rank, region, 0);
        rank.meet();
        if rank.rank == culprit {
            rank.leave();
        } else {
            let start = Instant::now();
            let record = expect_fault(with(rank, |w| w.wait(region, culprit)), "a lost peer");
            assert!(start.elapsed() < Duration::from_secs(1), "ended late");
            assert_record(&record, FaultKind::PeerLost, "a lost peer");
            assert_eq!(record.peer as usize, culprit, "{record}");
        }
        rank.meet();
    });
}

/// After a fault nothing is read or written, even within the lease that it ended.
fn stays_stopped(world: &World) {
    run(world, &config(), |rank| {
        let region = register(rank, WORKING);
        write(rank, region, 0, &[5; 8]);
        rank.meet();
        let from = rank.upload_bytes(DataType::U8, &[8], &[6; 8]);
        let mut to = rank.poisoned(DataType::U8, &[8]);
        let mut lease = rank.lease();
        rank.meet();
        rank.comm().abort();
        let mut w = lease.windows().unwrap();
        let next = (rank.rank + 1) % rank.size;
        expect_fault(w.write(region, 0, from.view()), "write");
        expect_fault(w.read(region, 0, to.view_mut()), "read");
        expect_fault(w.put(transfer(region, next, 0, 0, 8)), "put");
        expect_fault(w.get(transfer(region, next, 0, 0, 8)), "get");
        expect_fault(w.signal(region, next), "signal");
        expect_fault(w.wait(region, next), "wait");
        expect_fault(w.release(region, next), "release");
        expect_fault(w.register(8), "register");
        expect_fault(w.deregister(region), "deregister");
        drop(lease);
        assert_eq!(rank.raw(to.view()), [0xFF; 8], "read after a fault");
        rank.meet();
        rank.comm().reset(AMPLE).unwrap();
        assert_eq!(read(rank, region, 0, 8), [5; 8], "written after a fault");
        rank.meet();
        assert_works(rank, region, 1);
    });
}

/// A fault may end a registration on some ranks and not on others; all agree on the next number all the same.
fn torn_registration(world: &World) {
    let mut rng = world.rng();
    let mut config: CommConfig = config();
    config.regions = 48;
    let turns: Vec<_> = (0..40)
        .map(|_| {
            let rounds = *[0, 1, 2, 5, 10, 20].choose(&mut rng).unwrap();
            (rng.random_range(0..world.size), rounds)
        })
        .collect();
    run(world, &config, move |rank| {
        let mut mine = 0;
        for &(culprit, rounds) in &turns {
            rank.meet();
            // The culprit's abort comes from aside while it registers, too.
            std::thread::scope(|scope| {
                let comm = rank.comm();
                if rank.rank == culprit {
                    let spin = move || {
                        (0..rounds * 200).for_each(|_| std::hint::spin_loop());
                        comm.abort();
                    };
                    scope.spawn(spin);
                }
                if let Ok(mut lease) = comm.lease(&rank.stream) {
                    let result = lease.windows().unwrap().register(WORKING);
                    mine += usize::from(result.is_ok());
                }
            });
            rank.meet();
            rank.comm().reset(AMPLE).unwrap();
            let region = register(rank, WORKING);
            rank.assert_shared(&region.0.to_le_bytes(), "the number of a region");
            assert_works(rank, region, 1);
            super::deregister(rank, region);
        }
        assert!(mine <= turns.len());
    });
}

/// Signals of before a reset are forgotten.
fn forgotten(world: &World) {
    run(world, &impatient(), |rank| {
        let region = register(rank, WORKING);
        for to in peers(rank) {
            with(rank, |w| w.signal(region, to)).unwrap();
        }
        rank.meet();
        rank.comm().reset(AMPLE).unwrap();
        rank.meet();
        if rank.rank == 0 {
            let record = expect_fault(with(rank, |w| w.wait(region, 1)), "an old signal");
            assert_record(&record, FaultKind::Timeout, "an old signal");
        }
        assert_recovers(rank, region, 2);
    });
}

pub(super) fn add(suite: &mut Suite) {
    suite.add_from(2, "user_buffers/timeouts", timeouts);
    if suite.backend().injects() {
        suite.add_from(2, "user_buffers/lost", lost);
    }
    suite.add_from(2, "user_buffers/aborted", aborted);
    suite.add_from(2, "user_buffers/peer_lost", peer_lost);
    suite.add_from(2, "user_buffers/stays_stopped", stays_stopped);
    suite.add_from(2, "user_buffers/torn_registration", torn_registration);
    suite.add_from(2, "user_buffers/forgotten", forgotten);
}
