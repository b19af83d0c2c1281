//! Data that changes every round, readers that are slow, and what it all costs.

use super::{
    CARRIERS, assert_works, by, byte, bytes_of, peers, read, register, run, transfer, with, write,
};
use crate::{
    backend::Rank,
    check::assert_bits,
    gather_linear::config,
    suite::{Suite, World},
};
use brigade_device::{Buffer, CopyBy, DataType, Region, Replay};
use rand::{Rng, rngs::StdRng};

/// Bytes that a rank has for another in a round, at most.
const MOST: usize = 200;

/// Rounds between all pairs.
fn rounds(size: usize) -> usize {
    if size <= 4 { 1000 } else { 250 }
}

/// One round of a pair: how many bytes, from where, and who is late.
#[derive(Clone)]
struct Round {
    bytes: usize,
    offset: usize,
    region: usize,
    slow: usize,
    get: bool,
    choice: Option<CopyBy>,
}

fn draw(rng: &mut StdRng, size: usize, regions: usize) -> Vec<Round> {
    (0..rounds(size))
        .map(|_| Round {
            bytes: rng.random_range(1..=MOST),
            offset: rng.random_range(0..=7),
            region: rng.random_range(0..regions),
            slow: if rng.random_ratio(1, 8) {
                rng.random_range(0..size)
            } else {
                size
            },
            get: rng.random_ratio(1, 4),
            choice: CARRIERS[rng.random_range(0..CARRIERS.len())],
        })
        .collect()
}

/// Bytes for and from every rank, with room for odd offsets.
fn slot(rank: usize) -> usize {
    rank * (MOST + 8)
}

/// Every rank sends to every rank, in as many regions as there are. Nobody tells anybody anything but by signals.
fn pairs(world: &World, count: usize) {
    let rounds = draw(&mut world.rng(), world.size, count);
    run(world, &config(), move |rank| {
        let (me, half) = (rank.rank, slot(rank.size));
        // What is put lies in front, then what comes in, then what others may get.
        let regions: Vec<_> = (0..count).map(|_| register(rank, 3 * half)).collect();
        for (number, round) in rounds.iter().enumerate() {
            let region = regions[round.region];
            for to in peers(rank) {
                let data = bytes_of(me, to, number, round.bytes);
                if round.get {
                    // The peer may still get the bytes of before, until it releases them: a put waits for that.
                    with(rank, |w| w.put(transfer(region, to, 0, 0, 0))).unwrap();
                    write(rank, region, 2 * half + slot(to) + round.offset, &data);
                } else {
                    let out = slot(to) + round.offset;
                    write(rank, region, out, &data);
                    let put = transfer(region, to, out, half + slot(me), round.bytes);
                    let put = by(round.choice, put);
                    with(rank, |w| w.put(put)).unwrap();
                }
                with(rank, |w| w.signal(region, to)).unwrap();
            }
            for from in peers(rank) {
                with(rank, |w| w.wait(region, from)).unwrap();
                if round.slow == me {
                    rank.dawdle(20);
                }
                if round.get {
                    let out = 2 * half + slot(me) + round.offset;
                    let get = transfer(region, from, out, half + slot(from), round.bytes);
                    let get = by(round.choice, get);
                    with(rank, |w| w.get(get)).unwrap();
                }
                let got = read(rank, region, half + slot(from), round.bytes);
                let want = bytes_of(from, me, number, round.bytes);
                let what = format!("round {number} from rank {from}");
                assert_bits(&got, &want, DataType::U8, &what);
                with(rank, |w| w.release(region, from)).unwrap();
            }
        }
    });
}

/// A second put waits for the release: whatever the writer does meanwhile, the reader sees what was signalled. Without the
/// signal between them nothing holds the second back, and the same reader sees it: the guard is what the first part shows.
fn back_pressure(world: &World, choice: Option<CopyBy>) {
    run(world, &config(), move |rank| {
        let region = register(rank, 64);
        let to = |round| by(choice, transfer(region, 1, 8 * round, 32, 8));
        let byte = |round: usize| byte(0, 1, round, 0);
        if rank.rank == 0 {
            for round in 0..2 {
                write(rank, region, 8 * round, &[byte(round); 8]);
            }
        }
        let see = || read(rank, region, 32, 8);
        // Guarded.
        match rank.rank {
            0 => {
                with(rank, |w| w.put(to(0))).unwrap();
                with(rank, |w| w.signal(region, 1)).unwrap();
                // Waits in here until rank 1 has seen enough.
                with(rank, |w| w.put(to(1))).unwrap();
            }
            1 => {
                with(rank, |w| w.wait(region, 0)).unwrap();
                for _ in 0..200 {
                    rank.dawdle(5);
                    assert_eq!(see(), [byte(0); 8], "overwritten before the release");
                }
                with(rank, |w| w.release(region, 0)).unwrap();
            }
            _ => {}
        }
        rank.meet();
        if rank.rank == 1 {
            assert_eq!(see(), [byte(1); 8], "the second put has come");
        }
        rank.meet();
        // Without the guard.
        for round in 0..2 {
            if rank.rank == 0 {
                with(rank, |w| w.put(to(round))).unwrap();
            }
            rank.meet();
            if rank.rank == 1 {
                assert_eq!(see(), [byte(round); 8], "nothing holds a put back");
            }
            rank.meet();
        }
    });
}

/// Every transfer counts its bytes once, at the rank that makes it; every call counts.
fn traffic(world: &World) {
    run(world, &config(), |rank| {
        let region = register(rank, 300);
        let measure = |moved: u64, calls: u64, what: &str, work: &dyn Fn()| {
            let before = rank.comm().traffic();
            work();
            let after = rank.comm().traffic();
            let got = (
                after.moved_bytes - before.moved_bytes,
                after.calls - before.calls,
            );
            assert_eq!(got, (moved, calls), "{what}: bytes and calls");
        };
        let next = (rank.rank + 1) % rank.size;
        let prev = (rank.rank + rank.size - 1) % rank.size;
        measure(0, 0, "write", &|| write(rank, region, 0, &[1; 77]));
        measure(0, 0, "read", &|| drop(read(rank, region, 0, 77)));
        rank.meet();
        measure(77, 1, "put", &|| {
            with(rank, |w| w.put(transfer(region, next, 0, 100, 77))).unwrap()
        });
        measure(0, 1, "an empty put", &|| {
            with(rank, |w| w.put(transfer(region, next, 0, 0, 0))).unwrap()
        });
        measure(0, 1, "signal", &|| {
            with(rank, |w| w.signal(region, next)).unwrap()
        });
        measure(0, 1, "wait", &|| {
            with(rank, |w| w.wait(region, prev)).unwrap()
        });
        measure(33, 1, "get", &|| {
            with(rank, |w| w.get(transfer(region, prev, 0, 200, 33))).unwrap()
        });
        measure(0, 1, "release", &|| {
            with(rank, |w| w.release(region, prev)).unwrap()
        });
        measure(0, 1, "deregister", &|| super::deregister(rank, region));
    });
}

/// What is put around the ring by a captured graph, and where it comes from and goes to.
struct Captured {
    graph: Box<dyn Replay>,
    from: Buffer,
    to: Buffer,
}

fn capture(rank: &Rank, region: Region, choice: CopyBy) -> Captured {
    let next = (rank.rank + 1) % rank.size;
    let prev = (rank.rank + rank.size - 1) % rank.size;
    let from = rank.poisoned(DataType::U8, &[MOST]);
    let mut to = rank.poisoned(DataType::U8, &[MOST]);
    let graph = rank.device.capture(&rank.stream, &mut || {
        let mut lease = rank.lease();
        let mut w = lease.windows()?;
        w.write(region, 3, from.view())?;
        w.put(by(Some(choice), transfer(region, next, 3, 2 * MOST, MOST)))?;
        w.signal(region, next)?;
        w.wait(region, prev)?;
        w.read(region, 2 * MOST, to.view_mut())?;
        w.release(region, prev)
    });
    Captured {
        graph: graph.unwrap(),
        from,
        to,
    }
}

/// A captured exchange runs again and again with the data of the day, in turn with another and with eager ones.
fn replayed(world: &World) {
    run(world, &config(), |rank| {
        let regions = [register(rank, 4 * MOST), register(rank, 4 * MOST)];
        let eager = register(rank, super::WORKING);
        let mut graphs = [(regions[0], CopyBy::Engine), (regions[1], CopyBy::Kernel)]
            .map(|(region, choice)| capture(rank, region, choice));
        let prev = (rank.rank + rank.size - 1) % rank.size;
        for day in 0..200 {
            let captured = &mut graphs[day % 3 % 2];
            let data = bytes_of(rank.rank, 0, day, MOST);
            let device = &rank.device;
            device
                .write(&rank.stream, captured.from.view_mut(), &data)
                .unwrap();
            device
                .fill(&rank.stream, captured.to.view_mut(), 0xFF)
                .unwrap();
            let end = captured.graph.launch(&rank.stream).unwrap();
            end.sync(crate::faults::AMPLE).unwrap();
            let want = bytes_of(prev, 0, day, MOST);
            assert_bits(
                &rank.raw(captured.to.view()),
                &want,
                DataType::U8,
                "replayed",
            );
            if day % 5 == 0 {
                assert_works(rank, eager, day);
            }
        }
        // Registering answers to the caller, which a graph cannot.
        let refused = rank.device.capture(&rank.stream, &mut || {
            with(rank, |w| w.register(64)).map(drop)
        });
        let refused = refused.map(drop);
        assert_eq!(
            crate::check::expect_unsupported(refused, "register"),
            "not-capturable"
        );
    });
}

pub(super) fn add(suite: &mut Suite) {
    suite.add_from(2, "user_buffers/pairs", |w| pairs(w, 1));
    suite.add_from(2, "user_buffers/several_regions", |w| pairs(w, 5));
    suite.add_from(2, "user_buffers/back_pressure", |w| back_pressure(w, None));
    suite.add_from(2, "user_buffers/back_pressure/engine", |w| {
        back_pressure(w, Some(CopyBy::Engine));
    });
    suite.add_from(2, "user_buffers/traffic", traffic);
    suite.add_from(2, "user_buffers/replayed", replayed);
}
