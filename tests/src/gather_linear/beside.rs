//! Products whose tiles wait, in several groups of the same ranks: on one stream, and on streams of their own, where one holds a GPU that the
//! other's steps need.

use super::{
    Case,
    tiles::{Own, TILES, config},
};
use crate::{
    backend::Rank,
    check::{assert_bits, assert_close, expect_unsupported, overlap_of},
    copies::noise,
    faults::AMPLE,
    layer::Spec,
    suite::{Suite, World},
};
use brigade_device::{
    AllGatherLoraLinearParams, Buffer, Chunk, Comm, CommConfig, DataType, Error, Output,
    OverlapMode, ParallelMode, RecvParams, Result, SendParams, Stream,
};
use brigade_plan::reason;
use rand::{Rng, rngs::StdRng};
use std::time::Instant;

/// A second group of the same ranks.
fn other() -> CommConfig {
    let mut other = config();
    other.mode = ParallelMode::FfnTp;
    other
}

fn own(rng: &mut StdRng, spec: Spec) -> Own {
    Own {
        transposed: vec![true; spec.rows.len()],
        aligned: true,
        case: Case::new(rng, spec),
    }
}

/// Tiles for every multiprocessor, with few numbers to check.
fn wide(rng: &mut StdRng, size: usize) -> Case {
    let spec = Spec::even(rng, size).with(|s| {
        s.rows.fill(1536 / size);
        s.k.fill(16);
        s.n.fill(3072);
        (s.dtype, s.output) = (DataType::BF16, DataType::BF16);
    });
    Case::new(rng, spec.taken_by(TILES))
}

/// With more groups than `most` that may have tiles on streams of their own, none has any, and all say so; once one is gone, the others
/// have them. Nobody knows yet what stream a group will use that has made no call.
fn room(world: &World, most: usize) {
    let mut rng = world.rng();
    let spec = Spec::ragged(&mut rng, world.size).taken_by(TILES);
    let own = own(&mut rng, spec);
    world.run(&config(), move |rank| {
        let mut others: Vec<_> = (1..=most)
            .map(|_| {
                own.call(rank, TILES).unwrap();
                rank.meet();
                rank.join_another(&other())
            })
            .collect();
        let mut last = others.pop();
        // The one that is swapped in has the first beside it, of which the stream is known: of three, that leaves it room.
        for _ in most..=2 {
            let refused = own.call(rank, TILES);
            assert_eq!(expect_unsupported(refused, "forced"), reason::TILES_ROOM);
            own.call(rank, None).unwrap();
            rank.swap_comm(&mut last);
        }
        rank.meet();
        drop(last);
        // A thread of the other's may hold it for a moment longer. Whoever is refused has done nothing, and calls again.
        let end = Instant::now() + AMPLE;
        loop {
            match own.call(rank, TILES) {
                Ok(_) => break,
                Err(Error::Unsupported(why)) if why.code == reason::TILES_ROOM => {
                    assert!(Instant::now() < end, "{why}");
                    rank.dawdle(10);
                }
                Err(other) => panic!("{other}"),
            }
        }
    });
}

/// However many groups there are: those that work on one stream leave each other all of the GPU.
fn one_stream(world: &World) {
    let mut rng = world.rng();
    let cases: Vec<_> = (0..3)
        .map(|_| {
            let spec = Spec::ragged(&mut rng, world.size).taken_by(TILES);
            own(&mut rng, spec)
        })
        .collect();
    world.run(&config(), move |rank| {
        let mut others: Vec<_> = (0..2).map(|_| Some(rank.join_another(&other()))).collect();
        for round in 0..3 {
            // After a call of each, which may be anything, all are known to be on this stream.
            let choice = if round == 0 {
                Some(OverlapMode::Off)
            } else {
                TILES
            };
            for i in 0..=others.len() {
                for case in &cases {
                    case.call(rank, choice).unwrap();
                }
                if let Some(other) = others.get_mut(i) {
                    rank.swap_comm(other);
                }
            }
        }
        rank.meet();
    });
}

/// A call whose result is looked at later.
fn begin(rank: &Rank, comm: &Comm, on: &Stream, case: &Case) -> Result<impl FnOnce(&Rank)> {
    let (spec, me) = (case.spec.clone(), rank.rank);
    let layer = case.layers[me].upload(rank);
    let x = rank.upload(&case.x[me]);
    let mut d = rank.poisoned(spec.output, &[spec.total_rows(), spec.n[me]]);
    // What is uploaded is there for any stream.
    rank.settle(Ok(()))?;
    let params = AllGatherLoraLinearParams {
        transpose_weight: true,
        bias: layer.bias.as_ref().map(Buffer::view),
        output: Output::Into(d.view_mut()),
        choice: TILES,
        ..AllGatherLoraLinearParams::new(Chunk::Copy((&x).into()), &spec.rows, &layer.weight)
    };
    let plan = comm.lease(on)?.all_gather_lora_linear(params)?.plan;
    assert_eq!(overlap_of(&plan).mode, OverlapMode::Tiles);
    let (on, want) = (on.clone(), case.want[me].clone());
    Ok(move |rank: &Rank| {
        let _keeps = (layer, x);
        on.sync(AMPLE).unwrap();
        assert_close(&rank.values(d.view()), &want, spec.output, "two streams");
    })
}

/// Two groups on two streams, and ranks that call them in different orders: each product leaves room for what the other's peers wait for.
fn two_streams(world: &World) {
    let mut rng = world.rng();
    let rounds: Vec<_> = (0..6)
        .map(|_| {
            let cases = [wide(&mut rng, world.size), wide(&mut rng, world.size)];
            let turns: Vec<bool> = (0..world.size).map(|_| rng.random()).collect();
            (cases, turns)
        })
        .collect();
    world.run(&config(), move |rank| {
        let other = rank.join_another(&other());
        let streams = [rank.stream.clone(), rank.device.stream(0).unwrap()];
        for (cases, turns) in &rounds {
            let mut order = [0, 1];
            if turns[rank.rank] {
                order.reverse();
            }
            let begun = order.map(|i| {
                let comm = [rank.comm(), &other][i];
                begin(rank, comm, &streams[i], &cases[i]).unwrap()
            });
            for ended in begun {
                ended(rank);
            }
        }
        rank.meet();
    });
}

/// Long messages of a group that was alone on its GPU, in a graph, which is replayed on a stream of its own beside products of a group that came
/// later: in any order, different from rank to rank.
fn beside_messages(world: &World) {
    let mut rng = world.rng();
    let messages: Vec<_> = (0..world.size).map(|_| noise(&mut rng, 2 << 20)).collect();
    let rounds: Vec<_> = (0..6)
        .map(|_| {
            let firsts: Vec<bool> = (0..world.size).map(|_| rng.random()).collect();
            (wide(&mut rng, world.size), firsts)
        })
        .collect();
    let without_tiles = CommConfig {
        gather_bytes: 0,
        reduce_scatter_bytes: 0,
        message_bytes: 4 << 20,
        ..config()
    };
    world.run(&without_tiles, move |rank| {
        let (me, size, dtype) = (rank.rank, rank.size, DataType::U8);
        let (to, from) = ((me + 1) % size, (me + size - 1) % size);
        let sent = rank.upload_bytes(dtype, &[messages[me].len()], &messages[me]);
        let mut came = rank.poisoned(dtype, &[messages[from].len()]);
        rank.settle(Ok(())).unwrap();
        let stream = rank.device.stream(0).unwrap();
        let graph = rank.device.capture(&stream, &mut || {
            let send = SendParams {
                from: sent.view(),
                peer: to,
            };
            let recv = RecvParams {
                to: came.view_mut(),
                peer: from,
            };
            rank.comm().lease(&stream)?.send_recv(send, recv)
        });
        let graph = graph.unwrap();
        let other = rank.join_another(&other());
        for (case, firsts) in &rounds {
            rank.device.fill(&stream, came.view_mut(), 0xFF).unwrap();
            let launch = || graph.launch(&stream).unwrap();
            if firsts[me] {
                launch();
            }
            let ended = begin(rank, &other, &rank.stream, case).unwrap();
            if !firsts[me] {
                launch();
            }
            ended(rank);
            stream.sync(AMPLE).unwrap();
            assert_bits(&rank.raw(came.view()), &messages[from], dtype, "a message");
        }
        rank.meet();
    });
}

pub(super) fn add(suite: &mut Suite) {
    // Where ranks share a GPU, a peer is what tiles may be beside.
    let own_gpus = suite.backend().differs();
    let most = if own_gpus { 2 } else { 1 };
    suite.add_from(2, "gather_linear/tiles/room", move |world| {
        room(world, most);
    });
    if own_gpus {
        suite.add_from(2, "gather_linear/tiles/one_stream", one_stream);
        suite.add_from(2, "gather_linear/tiles/two_streams", two_streams);
        suite.add_from(2, "gather_linear/tiles/beside_messages", beside_messages);
    }
}
