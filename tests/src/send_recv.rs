//! Send and receive between two ranks.

use crate::{
    backend::Rank,
    check::{assert_bits, expect_fault, expect_invalid, is_poisoned},
    copies::{ANY, noise},
    faults::{AMPLE, impatient},
    gather_linear::config,
    suite::{Suite, World},
};
use brigade_device::{DataType, FaultKind, RecvParams, Result, SendParams};
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
    let other = [(DataType::F32, 31), (DataType::I32, 30)];
    for (dtype, len) in other {
        world.run(&config(), move |rank| {
            let result = match rank.rank {
                0 => send(rank, 1, DataType::F32, &[1; 120]),
                1 => receive(rank, 0, dtype, len).map(drop),
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
        for sends in [false, true] {
            if rank.rank == 0 {
                let result = if sends {
                    send(rank, 1, DataType::U8, &vec![1; 1 << 20])
                } else {
                    receive(rank, 1, DataType::U8, 10).map(drop)
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
        }
        rank.lease().barrier().unwrap();
    });
}

/// Adds the contracts.
pub fn add(suite: &mut Suite) {
    suite.add_from(2, "send_recv/ring", ring);
    suite.add_from(2, "send_recv/all_pairs", all_pairs);
    suite.add_from(2, "send_recv/mismatch", mismatch);
    suite.add_from(2, "send_recv/alone", alone);
    suite.add("send_recv/no_peer", no_peer);
    suite.add_from(
        2,
        "send_recv/nothing_old_counts_again",
        nothing_old_counts_again,
    );
}
