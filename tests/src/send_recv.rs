//! Send and receive between two ranks.

use crate::{
    backend::Rank,
    check::{assert_bits, expect_fault, expect_invalid, is_poisoned},
    copies::{ANY, noise},
    faults::{AMPLE, impatient},
    gather_linear::config,
    suite::{Suite, World},
};
use brigade_device::{
    AllToAllParams, CommConfig, DataType, FaultKind, RecvParams, Result, SendParams,
};
use rand::Rng;

/// Lengths below and above a slot of the receiver, and many times that.
const LENGTHS: [usize; 6] = [0, 1, 77, 4096, 20_011, 200_003];

fn send(rank: &Rank, peer: usize, dtype: DataType, bytes: &[u8]) -> Result<()> {
    let from = rank.upload_bytes(dtype, &[bytes.len() / dtype.bytes()], bytes);
    let result = rank.lease().send(SendParams {
        from: from.view(),
        peer,
    });
    rank.settle(result)
}

fn receive(rank: &Rank, peer: usize, dtype: DataType, len: usize) -> Result<Vec<u8>> {
    let mut to = rank.poisoned(dtype, &[len]);
    let result = rank.lease().recv(RecvParams {
        to: to.view_mut(),
        peer,
    });
    let result = rank.settle(result);
    let bytes = rank.raw(to.view());
    if result.is_err() {
        assert!(is_poisoned(dtype, &bytes), "a failed receive left data");
    }
    result.map(|()| bytes)
}

/// Bytes for one peer, and so many elements from one, at once.
fn swap(
    rank: &Rank,
    dtype: DataType,
    (to, bytes): (usize, &[u8]),
    (from, len): (usize, usize),
) -> Result<Vec<u8>> {
    let sent = rank.upload_bytes(dtype, &[bytes.len() / dtype.bytes()], bytes);
    let mut came = rank.poisoned(dtype, &[len]);
    let result = rank.lease().send_recv(
        SendParams {
            from: sent.view(),
            peer: to,
        },
        RecvParams {
            to: came.view_mut(),
            peer: from,
        },
    );
    let result = rank.settle(result);
    let bytes = rank.raw(came.view());
    if result.is_err() {
        assert!(is_poisoned(dtype, &bytes), "a failed exchange left data");
    }
    result.map(|()| bytes)
}

/// All send to one peer and receive from another at the same time, also much more than a slot holds, and every rank another length.
fn at_once(world: &World) {
    let mut rng = world.rng();
    let size = world.size;
    let messages: Vec<_> = ANY
        .into_iter()
        .zip(LENGTHS)
        .map(|(dtype, len)| {
            let mut part = |rank| noise(&mut rng, (len + 7 * rank) * dtype.bytes());
            (dtype, (0..size).map(&mut part).collect::<Vec<_>>())
        })
        .collect();
    world.run(&config(), move |rank| {
        for shift in 1..size {
            let to = (rank.rank + shift) % size;
            let from = (rank.rank + size - shift) % size;
            for (dtype, parts) in &messages {
                let len = parts[from].len() / dtype.bytes();
                let came = swap(rank, *dtype, (to, &parts[rank.rank]), (from, len)).unwrap();
                assert_bits(&came, &parts[from], *dtype, "at once");
            }
        }
    });
}

/// Who does both at once goes on with a peer that does one after the other, in any order, and with much data.
fn one_after_the_other(world: &World) {
    let mut rng = world.rng();
    let parts: Vec<_> = [300_001, 500_009].map(|len| noise(&mut rng, len)).into();
    world.run(&config(), move |rank| {
        let dtype = DataType::U8;
        for sends_first in [true, false] {
            let peer = match rank.rank {
                0 => 1,
                1 => 0,
                _ => continue,
            };
            let (own, theirs) = (&parts[rank.rank], &parts[peer]);
            let came = if rank.rank == 0 {
                swap(rank, dtype, (peer, own), (peer, theirs.len())).unwrap()
            } else if sends_first {
                send(rank, peer, dtype, own).unwrap();
                receive(rank, peer, dtype, theirs.len()).unwrap()
            } else {
                let came = receive(rank, peer, dtype, theirs.len()).unwrap();
                send(rank, peer, dtype, own).unwrap();
                came
            };
            assert_bits(&came, theirs, dtype, "one after the other");
        }
    });
}

/// Two messages that fill a sender's slots of a half wait for nobody, also behind others.
fn eager(world: &World) {
    let mut rng = world.rng();
    let len = config().message_bytes / world.size;
    let data: Vec<Vec<_>> = (0..3)
        .map(|_| (0..world.size).map(|_| noise(&mut rng, len)).collect())
        .collect();
    world.run(&config(), move |rank| {
        let (me, size, dtype) = (rank.rank, rank.size, DataType::U8);
        let (to, from) = ((me + 1) % size, (me + size - 1) % size);
        for before in [1, 2, 3] {
            for parts in &data[..before] {
                swap(rank, dtype, (to, &parts[me]), (from, len)).unwrap();
            }
            for parts in &data[..2] {
                send(rank, to, dtype, &parts[me]).unwrap();
            }
            for parts in &data[..2] {
                let came = receive(rank, from, dtype, len).unwrap();
                assert_bits(&came, &parts[from], dtype, "eager");
            }
        }
    });
}

/// Long messages through slots that hold much of them, of another length from each rank, and parts for all ranks: both ends may carry one with
/// different numbers of blocks.
fn long(world: &World) {
    let mut rng = world.rng();
    let size = world.size;
    let of_rank = |r: usize| 1 + r % 3;
    let parts: Vec<_> = (0..size)
        .map(|r| noise(&mut rng, 700_001 * of_rank(r)))
        .collect();
    let rows: Vec<usize> = (0..size).map(|r| 100_003 * of_rank(r)).collect();
    let all: usize = rows.iter().sum();
    let shares: Vec<_> = (0..size).map(|_| noise(&mut rng, all)).collect();
    let large_slots = CommConfig {
        message_bytes: 4 << 20,
        ..config()
    };
    world.run(&large_slots, move |rank| {
        let (me, dtype) = (rank.rank, DataType::U8);
        let (to, from) = ((me + 1) % size, (me + size - 1) % size);
        let sent = rank.upload_bytes(dtype, &[all], &shares[me]);
        let before: usize = rows[..me].iter().sum();
        let mine = shares.iter().map(|s| &s[before..before + rows[me]]);
        let want = mine.collect::<Vec<_>>().concat();
        for _ in 0..3 {
            let came = swap(rank, dtype, (to, &parts[me]), (from, parts[from].len())).unwrap();
            assert_bits(&came, &parts[from], dtype, "a long message");
            let mut came = rank.poisoned(dtype, &[want.len()]);
            let result = rank.lease().all_to_all(AllToAllParams {
                from: sent.view(),
                send_rows: &rows,
                to: came.view_mut(),
                recv_rows: &vec![rows[me]; size],
            });
            rank.settle(result.map(drop)).unwrap();
            assert_bits(&rank.raw(came.view()), &want, dtype, "long parts");
        }
    });
}

/// Messages of one piece, two and a few more, each length several times in a row, so that each credit is needed; of pieces that some blocks
/// take at once, and of larger ones.
fn few_pieces(world: &World) {
    let mut rng = world.rng();
    let size = world.size;
    for message_bytes in [(64 << 10) * size, 512 << 10] {
        let slots = CommConfig {
            message_bytes,
            ..config()
        };
        let step = message_bytes / (4 * size);
        let lengths: Vec<_> = (1..=10)
            .map(|i| i * step - rng.random_range(0..64))
            .collect();
        let parts: Vec<_> = (0..size).map(|_| noise(&mut rng, 10 * step)).collect();
        world.run(&slots, move |rank| {
            let (me, dtype) = (rank.rank, DataType::U8);
            let (to, from) = ((me + 1) % size, (me + size - 1) % size);
            for &len in lengths.iter().flat_map(|len| [len; 6]) {
                let came = swap(rank, dtype, (to, &parts[me][..len]), (from, len)).unwrap();
                assert_bits(&came, &parts[from][..len], dtype, "a message of few pieces");
            }
        });
    }
}

/// One of two ranks sends and receives at once what the other one sends and receives one after the other: so the blocks of one side of a message of
/// a few pieces may be many, and those of the other few, and an odd number.
fn at_once_and_one_by_one(world: &World) {
    let mut rng = world.rng();
    let slots = CommConfig {
        message_bytes: (16 << 10) * world.size,
        ..config()
    };
    let (short, long) = (noise(&mut rng, 20 << 10), noise(&mut rng, 60 << 10));
    world.run(&slots, move |rank| {
        let (me, dtype) = (rank.rank, DataType::U8);
        if me > 1 {
            return;
        }
        let peer = 1 - me;
        for round in 0..8 {
            if me == round % 2 {
                let came = swap(rank, dtype, (peer, &short), (peer, long.len())).unwrap();
                assert_bits(&came, &long, dtype, "the long message");
            } else {
                send(rank, peer, dtype, &long).unwrap();
                let came = receive(rank, peer, dtype, short.len()).unwrap();
                assert_bits(&came, &short, dtype, "the short message");
            }
        }
    });
}

/// What comes takes the place of what goes.
fn in_place(world: &World) {
    let mut rng = world.rng();
    let parts: Vec<_> = (0..world.size).map(|_| noise(&mut rng, 400_004)).collect();
    world.run(&config(), move |rank| {
        let (me, size, dtype) = (rank.rank, rank.size, DataType::F32);
        let (to, from) = ((me + 1) % size, (me + size - 1) % size);
        let data = rank.upload_bytes(dtype, &[parts[me].len() / 4], &parts[me]);
        let mut same = data.clone();
        let result = rank.lease().send_recv(
            SendParams {
                from: data.view(),
                peer: to,
            },
            RecvParams {
                to: same.view_mut(),
                peer: from,
            },
        );
        rank.settle(result).unwrap();
        assert_bits(&rank.raw(same.view()), &parts[from], dtype, "in place");
    });
}

/// Data goes round the ring, and comes home.
fn ring(world: &World) {
    let mut rng = world.rng();
    let messages: Vec<_> = ANY
        .into_iter()
        .zip(LENGTHS)
        .map(|(dtype, len)| (dtype, noise(&mut rng, len * dtype.bytes())))
        .collect();
    world.run(&config(), move |rank| {
        let next = (rank.rank + 1) % rank.size;
        let prev = (rank.rank + rank.size - 1) % rank.size;
        for (dtype, bytes) in &messages {
            let len = bytes.len() / dtype.bytes();
            if rank.rank == 0 {
                send(rank, next, *dtype, bytes).unwrap();
                let home = receive(rank, prev, *dtype, len).unwrap();
                assert_bits(&home, bytes, *dtype, "once round the ring");
            } else {
                let passing = receive(rank, prev, *dtype, len).unwrap();
                send(rank, next, *dtype, &passing).unwrap();
            }
        }
    });
}

/// What was sent in one generation is not received in the one that has the same eight bits.
fn nothing_old_counts_again(world: &World) {
    const LAP: usize = 255;
    let mut rng = world.rng();
    let old = noise(&mut rng, 64);
    world.run(&impatient(), move |rank| {
        match rank.rank {
            0 => send(rank, 1, DataType::U8, &old).unwrap(),
            1 => drop(receive(rank, 0, DataType::U8, old.len()).unwrap()),
            _ => {}
        }
        for _ in 0..LAP {
            rank.comm().reset(AMPLE).unwrap();
        }
        if rank.rank == 1 {
            let result = receive(rank, 0, DataType::U8, old.len());
            let record = expect_fault(result, "nothing was sent");
            assert_eq!((record.kind, record.peer), (FaultKind::Timeout, 0));
        }
        rank.meet();
    });
}

/// Every rank sends its bytes to every rank, lower ranks first, and asserts what it gets. All have equally many.
pub fn swap_all(rank: &Rank, data: &[Vec<u8>]) {
    let (me, dtype) = (rank.rank, DataType::U8);
    for peer in (0..rank.size).filter(|&p| p != me) {
        let len = data[peer].len();
        if me < peer {
            send(rank, peer, dtype, &data[me]).unwrap();
        }
        let theirs = receive(rank, peer, dtype, len).unwrap();
        if me > peer {
            send(rank, peer, dtype, &data[me]).unwrap();
        }
        assert_bits(&theirs, &data[peer], dtype, "swapped");
    }
}

/// A draw for the stress of all calls: all at once, to the next rank and from the one before.
pub fn swap_around(rank: &Rank, data: &[Vec<u8>]) {
    let (me, size) = (rank.rank, rank.size);
    let (to, from) = ((me + 1) % size, (me + size - 1) % size);
    if size < 2 {
        return;
    }
    let len = data[from].len();
    let came = swap(rank, DataType::U8, (to, &data[me]), (from, len)).unwrap();
    assert_bits(&came, &data[from], DataType::U8, "around");
}

/// Every rank swaps with every rank, over and over.
fn all_pairs(world: &World) {
    let mut rng = world.rng();
    let len = rng.random_range(1..3000);
    let data: Vec<_> = (0..world.size).map(|_| noise(&mut rng, len)).collect();
    world.run(&config(), move |rank| {
        for _ in 0..20 {
            swap_all(rank, &data);
        }
    });
}

/// Lengths or types that differ are a mismatch for the receiver, and for the sender at the latest in its next call.
fn mismatch(world: &World) {
    const SENT: DataType = DataType::F32;
    let other = [(DataType::F32, 31), (DataType::I32, 30)];
    for ((dtype, len), both) in other.into_iter().flat_map(|o| [(o, false), (o, true)]) {
        world.run(&config(), move |rank| {
            let bytes = vec![1; if rank.rank == 0 { 120 } else { len * 4 }];
            let result = match (rank.rank, both) {
                (0, false) => send(rank, 1, SENT, &bytes),
                (1, false) => receive(rank, 0, dtype, len).map(drop),
                // What rank 0 gets is as it wants it.
                (0, true) => {
                    let sent = rank.upload_bytes(SENT, &[30], &bytes);
                    let mut came = rank.poisoned(dtype, &[len]);
                    let result = rank.lease().send_recv(
                        SendParams {
                            from: sent.view(),
                            peer: 1,
                        },
                        RecvParams {
                            to: came.view_mut(),
                            peer: 1,
                        },
                    );
                    rank.settle(result)
                }
                (1, true) => swap(rank, dtype, (0, &bytes), (0, len)).map(drop),
                _ => Ok(()),
            };
            if rank.rank == 1 {
                let record = expect_fault(result, "the receiver");
                assert_eq!(record.kind, FaultKind::Mismatch, "{record}");
                assert_eq!((record.rank, record.peer), (1, 0), "{record}");
            }
            rank.meet();
            let later = rank.comm().check();
            assert_eq!(expect_fault(later, "all others").kind, FaultKind::Mismatch);
            rank.comm().reset(AMPLE).unwrap();
            rank.meet();
        });
    }
}

/// A receiver without a sender, and a sender of much without a receiver, time out.
fn alone(world: &World) {
    world.run(&impatient(), |rank| {
        for which in 0..3 {
            if rank.rank == 0 {
                let (dtype, much) = (DataType::U8, vec![1; 1 << 20]);
                let result = match which {
                    0 => send(rank, 1, dtype, &much),
                    1 => receive(rank, 1, dtype, 10).map(drop),
                    _ => swap(rank, dtype, (1, &much), (1, 10)).map(drop),
                };
                let record = expect_fault(result, "alone");
                assert_eq!(
                    (record.kind, record.peer),
                    (FaultKind::Timeout, 1),
                    "{record}"
                );
            }
            rank.meet();
            rank.comm().reset(AMPLE).unwrap();
        }
    });
}

/// No rank is its own peer.
fn no_peer(world: &World) {
    world.run(&config(), |rank| {
        for peer in [rank.rank, rank.size] {
            let sent = send(rank, peer, DataType::U8, &[1]);
            assert_eq!(expect_invalid(sent, "send"), "peer");
            let mut to = rank.poisoned(DataType::U8, &[1]);
            let received = rank.lease().recv(RecvParams {
                to: to.view_mut(),
                peer,
            });
            assert_eq!(expect_invalid(received, "receive"), "peer");
            let from = rank.upload_bytes(DataType::U8, &[1], &[1]);
            let both = rank.lease().send_recv(
                SendParams {
                    from: from.view(),
                    peer,
                },
                RecvParams {
                    to: to.view_mut(),
                    peer,
                },
            );
            assert_eq!(expect_invalid(both, "both"), "peer");
        }
        rank.lease().barrier().unwrap();
    });
}

/// Adds the contracts.
pub fn add(suite: &mut Suite) {
    suite.add_from(2, "send_recv/ring", ring);
    suite.add_from(2, "send_recv/all_pairs", all_pairs);
    suite.add_from(2, "send_recv/at_once", at_once);
    suite.add_from(2, "send_recv/one_after_the_other", one_after_the_other);
    suite.add_from(2, "send_recv/eager", eager);
    suite.add_from(2, "send_recv/long", long);
    suite.add_from(2, "send_recv/few_pieces", few_pieces);
    suite.add_from(
        2,
        "send_recv/at_once_and_one_by_one",
        at_once_and_one_by_one,
    );
    suite.add_from(2, "send_recv/in_place", in_place);
    suite.add_from(2, "send_recv/mismatch", mismatch);
    suite.add_from(2, "send_recv/alone", alone);
    suite.add("send_recv/no_peer", no_peer);
    suite.add_from(
        2,
        "send_recv/nothing_old_counts_again",
        nothing_old_counts_again,
    );
}
