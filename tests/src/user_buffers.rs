//! Registered regions under pressure: many rounds, slow readers, several regions, faults in the middle.

mod faults;
mod pressure;

use crate::{
    backend::Rank,
    check::{assert_bits, expect_fault, expect_invalid, expect_unsupported},
    copies::noise,
    gather_linear::config,
    suite::{Suite, World},
};
use brigade_device::{
    Buffer, CommConfig, CopyBy, DataType, Error, FaultKind, Region, Result, TransferParams, Windows,
};
use rand::Rng;

/// Runs `body` on every rank if the device has regions at all.
fn run(world: &World, config: &CommConfig, body: impl Fn(&mut Rank) + Send + Sync + 'static) {
    world.run(config, move |rank| {
        let has = rank.lease().windows().map(drop);
        match has {
            Ok(()) => body(rank),
            other => drop(expect_unsupported(other, "regions")),
        }
    });
}

/// One call, under a lease of its own, and how it ended.
fn with<R>(rank: &Rank, call: impl FnOnce(&mut Windows<'_>) -> Result<R>) -> Result<R> {
    let mut lease = rank.comm().lease(&rank.stream)?;
    let result = call(&mut lease.windows()?);
    drop(lease);
    if rank.stream.capturing() {
        return result;
    }
    let result = result?;
    rank.settle(Ok(()))?;
    Ok(result)
}

fn register(rank: &Rank, bytes: usize) -> Region {
    with(rank, |w| w.register(bytes)).unwrap()
}

fn deregister(rank: &Rank, region: Region) {
    with(rank, |w| w.deregister(region)).unwrap();
}

fn write(rank: &Rank, region: Region, offset: usize, bytes: &[u8]) {
    let from = rank.upload_bytes(DataType::U8, &[bytes.len()], bytes);
    with(rank, |w| w.write(region, offset, from.view())).unwrap();
}

fn read(rank: &Rank, region: Region, offset: usize, bytes: usize) -> Vec<u8> {
    let mut to = rank.poisoned(DataType::U8, &[bytes]);
    with(rank, |w| w.read(region, offset, to.view_mut())).unwrap();
    rank.raw(to.view())
}

/// `bytes` from byte `source` of one's own part to byte `target` of the peer's, or the other way round.
fn transfer(
    region: Region,
    peer: usize,
    source: usize,
    target: usize,
    bytes: usize,
) -> TransferParams {
    TransferParams {
        region,
        peer,
        source_offset: source,
        target_offset: target,
        bytes,
        choice: None,
    }
}

/// All that a caller may name to carry a copy.
const CARRIERS: [Option<CopyBy>; 3] = [None, Some(CopyBy::Engine), Some(CopyBy::Kernel)];

/// The same by a carrier.
fn by(choice: Option<CopyBy>, transfer: TransferParams) -> TransferParams {
    TransferParams { choice, ..transfer }
}

/// The ranks beside this one.
fn peers(rank: &Rank) -> impl Iterator<Item = usize> + use<> {
    let (me, size) = (rank.rank, rank.size);
    (1..size).map(move |i| (me + i) % size)
}

/// A byte of round `round` that `from` has for `to`.
fn byte(from: usize, to: usize, round: usize, at: usize) -> u8 {
    (from * 37 + to * 101 + round * 13 + at * 7) as u8
}

fn bytes_of(from: usize, to: usize, round: usize, bytes: usize) -> Vec<u8> {
    (0..bytes).map(|at| byte(from, to, round, at)).collect()
}

/// A region comes, works and goes.
pub fn come_and_go(rank: &Rank, round: usize) {
    let region = register(rank, WORKING);
    assert_works(rank, region, round);
    deregister(rank, region);
}

/// A region that works: every rank puts to every rank.
fn assert_works(rank: &Rank, region: Region, round: usize) {
    for to in peers(rank) {
        write(rank, region, 8, &bytes_of(rank.rank, to, round, 8));
        let put = transfer(region, to, 8, 16 + 8 * rank.rank, 8);
        with(rank, |w| w.put(put)).unwrap();
        with(rank, |w| w.signal(region, to)).unwrap();
    }
    for from in peers(rank) {
        with(rank, |w| w.wait(region, from)).unwrap();
        let want = bytes_of(from, rank.rank, round, 8);
        let got = read(rank, region, 16 + 8 * from, 8);
        assert_bits(&got, &want, DataType::U8, "a region that works");
        with(rank, |w| w.release(region, from)).unwrap();
    }
}

/// Bytes that [`assert_works`] needs.
const WORKING: usize = 128;

/// Pieces of any size at any place, first into one's own part and back, then to a peer's and back by get.
fn places(world: &World) {
    let mut rng = world.rng();
    const BYTES: usize = 10_000;
    let mut moves: Vec<_> = (0..60)
        .map(|_| {
            let bytes = match rng.random_range(0..3) {
                0 => rng.random_range(0..20),
                1 => rng.random_range(4090..4105),
                _ => rng.random_range(0..BYTES / 2),
            };
            let mut offset = || rng.random_range(0..=BYTES - bytes);
            let places = [offset(), offset(), offset()];
            (bytes, places, noise(&mut rng, bytes))
        })
        .collect();
    moves.push((
        BYTES / 2,
        [0, BYTES / 2, BYTES / 2],
        noise(&mut rng, BYTES / 2),
    ));
    moves.push((BYTES, [0; 3], noise(&mut rng, BYTES)));
    moves.push((0, [BYTES; 3], vec![]));
    run(world, &config(), move |rank| {
        let region = register(rank, BYTES);
        let mut model = vec![0; BYTES];
        let me = rank.rank;
        let (next, prev) = ((me + 1) % rank.size, (me + rank.size - 1) % rank.size);
        for (bytes, [mine, theirs, back], data) in &moves {
            let data: Vec<u8> = data.iter().map(|b| b ^ me as u8).collect();
            write(rank, region, *mine, &data);
            model[*mine..mine + bytes].copy_from_slice(&data);
            assert_bits(
                &read(rank, region, 0, BYTES),
                &model,
                DataType::U8,
                "own part",
            );
            if rank.size == 1 {
                continue;
            }
            // What the previous rank wrote lies where it was to be, fetched or sent, and nothing beside it changes.
            let want: Vec<u8> = data.iter().map(|b| b ^ me as u8 ^ prev as u8).collect();
            let apart = |a: usize, b: usize| a + bytes <= b || b + bytes <= a;
            rank.meet();
            if apart(*mine, *back) {
                let get = transfer(region, prev, *mine, *back, *bytes);
                with(rank, |w| w.get(get)).unwrap();
                model[*back..back + bytes].copy_from_slice(&want);
            }
            rank.meet();
            assert_bits(
                &read(rank, region, 0, BYTES),
                &model,
                DataType::U8,
                "after a get",
            );
            rank.meet();
            if apart(*mine, *theirs) {
                let put = transfer(region, next, *mine, *theirs, *bytes);
                with(rank, |w| w.put(put)).unwrap();
                // Which the get may have changed, on every rank alike.
                let sent = rank.share(&model[*mine..mine + bytes]);
                model[*theirs..theirs + bytes].copy_from_slice(&sent[prev]);
            }
            rank.meet();
            assert_bits(
                &read(rank, region, 0, BYTES),
                &model,
                DataType::U8,
                "after a put",
            );
            rank.meet();
        }
        deregister(rank, region);
    });
}

/// Whatever carries a copy, and however long it is, the bytes lie where they should and nothing beside them changes. From 1 MiB on a GPU's copy
/// engine carries what nobody forces.
fn carriers(world: &World) {
    const MIB: usize = 1 << 20;
    const MOST: usize = MIB + 4177;
    const LENGTHS: [usize; 9] = [0, 1, 15, 16, 4097, MOST, MIB - 1, MIB, MIB + 1];
    // Own bytes, then what is put there, then what is got, with some bytes between.
    const PUT: usize = MOST + 65;
    const GOT: usize = 2 * MOST + 142;
    const BYTES: usize = 3 * MOST + 200;
    let mut rng = world.rng();
    let data: Vec<_> = (0..world.size).map(|_| noise(&mut rng, BYTES)).collect();
    let mut config = config();
    config.region_bytes = BYTES + MIB;
    // Pairs are what matters, so one of the long ones is enough for larger groups.
    let lengths = if world.size == 2 {
        &LENGTHS[..]
    } else {
        &LENGTHS[..6]
    };
    run(world, &config, move |rank| {
        let (me, size) = (rank.rank, rank.size);
        let (next, prev) = ((me + 1) % size, (me + size - 1) % size);
        let region = register(rank, BYTES);
        let mut model = data[me].clone();
        write(rank, region, 0, &model);
        for (round, &bytes) in lengths.iter().enumerate() {
            for (i, choice) in CARRIERS.into_iter().enumerate() {
                // Other bytes each time, so that it shows who brought none.
                let source = (CARRIERS.len() * round + i) % 7;
                let params =
                    |peer, target| by(choice, transfer(region, peer, source, target, bytes));
                rank.meet();
                with(rank, |w| w.put(params(next, PUT))).unwrap();
                with(rank, |w| w.get(params(prev, GOT))).unwrap();
                rank.meet();
                let theirs = &data[prev][source..source + bytes];
                for at in [PUT, GOT] {
                    model[at..at + bytes].copy_from_slice(theirs);
                    let (first, len) = (at - 8, bytes + 16);
                    let got = read(rank, region, first, len);
                    let what = format!("{bytes} bytes to {at} by {choice:?}");
                    assert_bits(&got, &model[first..first + len], DataType::U8, &what);
                }
            }
        }
        deregister(rank, region);
    });
}

/// Numbers come back, lowest first, with memory that is zero; the regions beside them are left alone.
fn reuse(world: &World) {
    run(world, &config(), |rank| {
        let regions: Vec<_> = (0..4).map(|i| register(rank, WORKING + i)).collect();
        assert_eq!(regions, [0, 1, 2, 3].map(Region));
        write(rank, regions[3], 0, &[7; WORKING + 3]);
        for freed in [[1, 2], [2, 1], [0, 1]] {
            let freed = freed.map(|i| regions[i]);
            freed.iter().for_each(|&r| write(rank, r, 0, &[9; WORKING]));
            freed.iter().for_each(|&r| deregister(rank, r));
            let mut again = freed.map(|_| register(rank, WORKING + 9));
            assert!(again[0] < again[1], "lowest first: {again:?}");
            for region in again {
                let zeros = read(rank, region, 0, WORKING + 9);
                assert!(zeros.iter().all(|&b| b == 0), "{region:?} is not zero");
                rank.meet();
                assert_works(rank, region, 3);
            }
            again.sort_unstable();
            let mut freed = freed;
            freed.sort_unstable();
            assert_eq!(again, freed);
        }
        assert_eq!(read(rank, regions[3], 0, WORKING), [7; WORKING]);
        regions.into_iter().for_each(|r| deregister(rank, r));
    });
}

/// What was signalled and never waited for does not reach the next who has the number.
fn let_go(world: &World) {
    run(world, &config(), |rank| {
        for round in 0..20 {
            let region = register(rank, WORKING);
            assert_eq!(region, Region(0));
            if round % 3 != 0 {
                assert_works(rank, region, round);
            }
            for to in peers(rank).filter(|to| (to + round) % 2 == 0) {
                with(rank, |w| w.signal(region, to)).unwrap();
            }
            for from in peers(rank).filter(|_| round % 4 == 0 && (rank.rank + round) % 2 == 0) {
                with(rank, |w| w.wait(region, from)).unwrap();
            }
            deregister(rank, region);
            let gone = with(rank, |w| {
                w.signal(region, (rank.rank + 1) % rank.size.max(2))
            });
            assert!(matches!(gone, Err(Error::Invalid { .. })), "{gone:?}");
        }
    });
}

/// One call in a region, captured.
type Captured = fn(&mut Windows<'_>, Region, usize, &mut Buffer) -> Result<()>;

const CAPTURED: [(&str, Captured); 7] = [
    ("write", |w, r, _, own| w.write(r, 0, own.view())),
    ("read", |w, r, _, own| w.read(r, 0, own.view_mut())),
    ("put", |w, r, peer, _| w.put(transfer(r, peer, 0, 8, 8))),
    ("get", |w, r, peer, _| w.get(transfer(r, peer, 0, 8, 8))),
    ("signal", |w, r, peer, _| w.signal(r, peer)),
    ("wait", |w, r, peer, _| w.wait(r, peer)),
    ("release", |w, r, peer, _| w.release(r, peer)),
];

/// A graph that works in a region is launched while the region is registered, and no longer: whoever has its number then is another, in
/// which nothing is written or signalled, and nothing else that is in the graph is done either.
fn outlived(world: &World) {
    run(world, &config(), |rank| {
        let (device, on) = (&rank.device, &rank.stream);
        let (me, size) = (rank.rank, rank.size);
        let (next, last) = ((me + 1) % size, (me + size - 1) % size);
        let region = register(rank, WORKING);
        let from = rank.upload_bytes(DataType::U8, &[8], &[5; 8]);
        let mut day = rank.poisoned(DataType::U8, &[1]);
        let mut to = rank.poisoned(DataType::U8, &[8]);
        let graph = device.capture(on, &mut || {
            device.fill(on, day.view_mut(), 7)?;
            with(rank, |w| {
                w.write(region, 0, from.view())?;
                w.put(transfer(region, next, 0, 8, 8))?;
                w.signal(region, next)?;
                w.wait(region, last)?;
                w.read(region, 8, to.view_mut())?;
                w.release(region, last)
            })
        });
        let graph = graph.unwrap();
        let mut alone = Vec::new();
        for (name, call) in CAPTURED {
            let mut own = rank.poisoned(DataType::U8, &[8]);
            let mut work = || with(rank, |w| call(w, region, next, &mut own));
            alone.push((name, device.capture(on, &mut work).unwrap()));
        }
        for _ in 0..2 {
            for buffer in [&mut day, &mut to] {
                device.fill(on, buffer.view_mut(), 0xFF).unwrap();
            }
            rank.settle(graph.launch(on).map(drop)).unwrap();
            assert_eq!(rank.raw(day.view()), [7]);
            assert_eq!(rank.raw(to.view()), [5; 8]);
        }
        device.fill(on, day.view_mut(), 0xFF).unwrap();
        rank.meet();
        deregister(rank, region);
        for round in 0..2 {
            let refused = graph.launch(on).map(drop);
            assert_eq!(expect_invalid(refused, "a graph"), "region");
            for (name, graph) in &alone {
                let refused = graph.launch(on).map(drop);
                assert_eq!(expect_invalid(refused, name), "region");
            }
            assert_eq!(rank.raw(day.view()), [0xFF], "the rest of the graph");
            rank.meet();
            // And then the number is another's.
            if round == 0 {
                assert_eq!(register(rank, WORKING), region);
            }
        }
        assert_eq!(read(rank, region, 0, WORKING), [0; WORKING]);
        rank.meet();
        assert_works(rank, region, 1);
    });
}

/// A rank that asks for another size: a mismatch on all ranks, and nothing is registered.
fn other_size(world: &World) {
    let culprit = world.rng().random_range(0..world.size);
    run(world, &config(), move |rank| {
        let kept = register(rank, WORKING);
        rank.meet();
        let bytes = if rank.rank == culprit { 65 } else { 64 };
        let record = expect_fault(with(rank, |w| w.register(bytes)), "another size");
        assert_eq!(record.kind, FaultKind::Mismatch, "{record}");
        rank.meet();
        rank.comm().reset(crate::faults::AMPLE).unwrap();
        assert_works(rank, kept, 1);
        let region = register(rank, WORKING);
        assert_eq!(region, Region(1));
        assert_works(rank, region, 2);
    });
}

/// Sizes that nobody has memory for: an error on all ranks, and the communicator goes on.
fn too_large(world: &World) {
    run(world, &config(), |rank| {
        for bytes in [1 << 60, usize::MAX, usize::MAX - 6, 1 << 63] {
            match with(rank, |w| w.register(bytes)) {
                Err(Error::Group { .. }) => {}
                other => panic!("{bytes} bytes: {other:?}"),
            }
        }
        let empty = register(rank, 0);
        assert_eq!(read(rank, empty, 0, 0), [0u8; 0]);
        let region = register(rank, WORKING);
        assert_works(rank, region, 1);
    });
}

/// Regions and peers that do not exist, and places outside, are refused by name.
fn refusals(world: &World) {
    run(world, &config(), |rank| {
        let region = register(rank, WORKING);
        let me = rank.rank;
        let none = Region(1);
        let put = |p| expect_invalid(with(rank, |w| w.put(p)), "put");
        let get = |p| expect_invalid(with(rank, |w| w.get(p)), "get");
        let cases = [
            (transfer(none, 0, 0, 0, 1), "region"),
            (transfer(region, me, 0, 0, 1), "peer"),
            (transfer(region, rank.size, 0, 0, 1), "peer"),
            (transfer(region, 0, WORKING, 0, 1), "source_offset"),
            (transfer(region, 0, 0, WORKING + 1, 0), "target_offset"),
            (transfer(region, 0, 1, 0, usize::MAX), "source_offset"),
            (transfer(region, 0, 0, usize::MAX, 1), "target_offset"),
        ];
        for (p, field) in cases {
            assert_eq!((put(p), get(p)), (field, field), "{p:?}");
        }
        let refused = |call: &dyn Fn(&mut Windows<'_>) -> Result<()>| {
            expect_invalid(with(rank, |w| call(w)), "a call")
        };
        let mut buffer = rank.poisoned(DataType::U8, &[WORKING + 1]);
        assert_eq!(refused(&|w| w.write(region, 0, buffer.view())), "offset");
        assert_eq!(refused(&|w| w.write(none, 0, buffer.view())), "region");
        assert_eq!(refused(&|w| w.signal(region, me)), "peer");
        assert_eq!(refused(&|w| w.wait(region, rank.size)), "peer");
        assert_eq!(
            refused(&|w| w.release(none, (me + 1) % rank.size.max(2))),
            match rank.size {
                1 => "peer",
                _ => "region",
            }
        );
        assert_eq!(refused(&|w| w.deregister(none)), "region");
        let outside = with(rank, |w| w.read(region, 0, buffer.view_mut()));
        assert_eq!(expect_invalid(outside, "read"), "offset");
        assert_works(rank, region, 5);
    });
}

/// Adds the contracts.
pub fn add(suite: &mut Suite) {
    suite.add("user_buffers/places", places);
    suite.add_from(2, "user_buffers/carriers", carriers);
    suite.add("user_buffers/reuse", reuse);
    suite.add("user_buffers/let_go", let_go);
    suite.add_from(2, "user_buffers/outlived", outlived);
    suite.add_from(2, "user_buffers/other_size", other_size);
    suite.add("user_buffers/too_large", too_large);
    suite.add("user_buffers/refusals", refusals);
    pressure::add(suite);
    faults::add(suite);
}
