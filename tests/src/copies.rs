//! All-gather, broadcast, all-to-all and barrier: what arrives is what was sent, byte for byte.

use crate::{
    backend::Rank,
    check::{assert_bits, expect_fault, expect_invalid},
    faults::AMPLE,
    gather_linear::config,
    ops,
    suite::{Suite, World},
    traffic::{assert_moved, is_pushed},
};
use brigade_device::{
    AllGatherParams, AllToAllParams, BroadcastParams, Call, CommConfig, DataType, FaultKind, Plan,
};
use brigade_plan::{
    moved,
    pushed::{GRANULE_BYTES, Packets},
};
use rand::{Rng, RngCore, rngs::StdRng};
use std::time::{SystemTime, UNIX_EPOCH};

/// Types that data may have when it only moves.
pub const ANY: [DataType; 6] = [
    DataType::U8,
    DataType::F16,
    DataType::BF16,
    DataType::F32,
    DataType::I32,
    DataType::I64,
];

/// Any bytes: copies must not care what they mean. Here and there words are all ones, or all but one, as hardly any of sums is: in some stretches none, in
/// others one, or many.
pub fn noise(rng: &mut StdRng, bytes: usize) -> Vec<u8> {
    const STRETCH: usize = 512;
    let mut noise = vec![0; bytes];
    rng.fill_bytes(&mut noise);
    for stretch in noise.chunks_mut(STRETCH) {
        let (of_4, one) = (rng.random_range(0..4), rng.random_range(0..STRETCH / 4));
        for (i, word) in stretch.chunks_mut(4).enumerate() {
            if of_4 == 2 && i == one || of_4 == 3 && word[0] < 64 {
                let last = if word[word.len() - 1] % 3 == 0 {
                    0xFE
                } else {
                    0xFF
                };
                word.fill(0xFF);
                word[0] = last;
            }
        }
    }
    noise
}

/// Rows of every rank, of any type.
pub struct Gather {
    rows: Vec<usize>,
    tail: Vec<usize>,
    dtype: DataType,
    parts: Vec<Vec<u8>>,
}

impl Gather {
    /// Draws the bytes.
    pub fn new(rng: &mut StdRng, rows: Vec<usize>, tail: &[usize], dtype: DataType) -> Self {
        let row_bytes = tail.iter().product::<usize>() * dtype.bytes();
        Self {
            parts: rows.iter().map(|r| noise(rng, r * row_bytes)).collect(),
            rows,
            tail: tail.to_vec(),
            dtype,
        }
    }

    fn dims(&self, rows: usize) -> Vec<usize> {
        [&[rows], &self.tail[..]].concat()
    }

    /// Makes the call, and asserts what arrives.
    pub fn run(&self, rank: &Rank) {
        let me = rank.rank;
        let from = rank.upload_bytes(self.dtype, &self.dims(self.rows[me]), &self.parts[me]);
        let mut to = rank.poisoned(self.dtype, &self.dims(self.rows.iter().sum()));
        let plan = rank
            .lease()
            .all_gather(AllGatherParams {
                from: from.view(),
                rows_per_rank: &self.rows,
                to: to.view_mut(),
            })
            .unwrap();
        assert!(matches!(plan, Plan::Copy { .. }), "{plan:?}");
        rank.settle(Ok(())).unwrap();
        let what = format!("all-gather of {:?} x {:?}", self.rows, self.tail);
        assert_bits(
            &rank.raw(to.view()),
            &self.parts.concat(),
            self.dtype,
            &what,
        );
    }
}

fn all_gather(world: &World) {
    let mut rng = world.rng();
    let size = world.size;
    let mut cases = vec![];
    for dtype in ANY {
        let ragged = (0..size).map(|_| rng.random_range(0..12)).collect();
        cases.push(Gather::new(&mut rng, ragged, &[7], dtype));
        let mut one = vec![0; size];
        one[rng.random_range(0..size)] = 5;
        cases.push(Gather::new(&mut rng, one, &[3, 2], dtype));
    }
    cases.push(Gather::new(&mut rng, vec![0; size], &[4], DataType::F32));
    cases.push(Gather::new(&mut rng, vec![3; size], &[0], DataType::F32));
    cases.push(Gather::new(&mut rng, vec![1; size], &[], DataType::I64));
    // Several times the scratch memory, in rows that do not divide it.
    let large = (0..size).map(|r| 1000 + 333 * r).collect();
    cases.push(Gather::new(&mut rng, large, &[33], DataType::F32));
    world.run(&config(), move |rank| {
        cases.iter().for_each(|case| case.run(rank));
        let from = rank.poisoned(DataType::F32, &[2, 2]);
        let mut to = rank.poisoned(DataType::F32, &[2 * rank.size, 2]);
        let refused = rank.lease().all_gather(AllGatherParams {
            from: from.view(),
            rows_per_rank: &vec![2; rank.size + 1],
            to: to.view_mut(),
        });
        assert_eq!(expect_invalid(refused, "too many counts"), "rows_per_rank");
        cases[0].run(rank);
    });
}

/// The root's data, of any type.
pub struct Broadcast {
    root: usize,
    dtype: DataType,
    bytes: Vec<u8>,
}

impl Broadcast {
    /// Draws the bytes.
    pub fn new(rng: &mut StdRng, root: usize, len: usize, dtype: DataType) -> Self {
        Self {
            root,
            dtype,
            bytes: noise(rng, len * dtype.bytes()),
        }
    }

    /// Makes the call, and asserts what arrives.
    pub fn run(&self, rank: &Rank) {
        let dims = [self.bytes.len() / self.dtype.bytes()];
        let mut data = if rank.rank == self.root {
            rank.upload_bytes(self.dtype, &dims, &self.bytes)
        } else {
            rank.poisoned(self.dtype, &dims)
        };
        let params = BroadcastParams {
            data: data.view_mut(),
            root: self.root,
        };
        rank.lease().broadcast(params).unwrap();
        let what = format!("broadcast of {dims:?} from {}", self.root);
        assert_bits(&rank.raw(data.view()), &self.bytes, self.dtype, &what);
    }
}

fn broadcast(world: &World) {
    let mut rng = world.rng();
    let mut cases = vec![];
    for root in 0..world.size {
        for (len, dtype) in [
            (0, DataType::F32),
            (1, DataType::U8),
            (1000, DataType::BF16),
        ] {
            cases.push(Broadcast::new(&mut rng, root, len, dtype));
        }
        cases.push(Broadcast::new(&mut rng, root, 20_011, DataType::I64));
    }
    world.run(&config(), move |rank| {
        cases.iter().for_each(|case| case.run(rank));
        let mut data = rank.poisoned(DataType::F32, &[1]);
        let refused = rank.lease().broadcast(BroadcastParams {
            data: data.view_mut(),
            root: rank.size,
        });
        assert_eq!(expect_invalid(refused, "no such root"), "root");
    });
}

/// About as many packets as peers pass on from, where the device pushes so many at once: fewer, as many, and a last one that is not whole.
/// Each rank moves what its schedule says, so the device does what the plan does.
fn as_much_as_is_passed_on(world: &World) {
    const FROM: usize = Packets::RELAYED * Packets::GRANULES * GRANULE_BYTES;
    const PACKET: usize = FROM / Packets::RELAYED;
    let mut rng = world.rng();
    let pool = noise(&mut rng, 2 * FROM);
    let mut cases = vec![];
    for root in 0..world.size {
        let ragged = FROM + rng.random_range(1..40 * PACKET);
        for bytes in [FROM - PACKET, FROM - PACKET + 1, FROM, ragged] {
            let start = rng.random_range(0..pool.len() - bytes);
            cases.push(Broadcast {
                root,
                dtype: DataType::U8,
                bytes: pool[start..][..bytes].to_vec(),
            });
        }
    }
    let config = CommConfig {
        all_reduce_bytes: 2 << 20,
        ..config()
    };
    world.run(&config, move |rank| {
        for case in &cases {
            let (me, size, root) = (rank.rank, rank.size, case.root);
            let bytes = case.bytes.len();
            let packets = Packets::broadcast(bytes, size);
            assert_eq!(packets.are_relayed(size), bytes > FROM - PACKET);
            let call = Call::Broadcast {
                elements: bytes,
                dtype: case.dtype,
                root,
            };
            let moved = match (is_pushed(rank, &call), packets.are_relayed(size)) {
                (true, true) => moved::relayed_broadcast(me, root, size, packets),
                (true, false) => moved::push_broadcast(me, root, size, bytes),
                (false, _) => moved::broadcast(me, root, bytes),
            };
            let what = format!("{bytes} bytes from {root}");
            assert_moved(rank, moved, &what, || case.run(rank));
        }
    });
}

/// Rows from every rank to every rank, of any type.
pub struct Exchange {
    /// Rows from (first index) to (second index).
    rows: Vec<Vec<usize>>,
    columns: usize,
    dtype: DataType,
    parts: Vec<Vec<Vec<u8>>>,
}

impl Exchange {
    /// Draws the bytes.
    pub fn new(rng: &mut StdRng, rows: Vec<Vec<usize>>, columns: usize, dtype: DataType) -> Self {
        let mut part = |r: &usize| noise(rng, r * columns * dtype.bytes());
        Self {
            parts: rows
                .iter()
                .map(|to| to.iter().map(&mut part).collect())
                .collect(),
            rows,
            columns,
            dtype,
        }
    }

    /// Makes the call, and asserts what arrives.
    pub fn run(&self, rank: &Rank) {
        let me = rank.rank;
        let send = &self.rows[me];
        let recv: Vec<_> = self.rows.iter().map(|to| to[me]).collect();
        let dims = |rows: &[usize]| [rows.iter().sum(), self.columns];
        let from = rank.upload_bytes(self.dtype, &dims(send), &self.parts[me].concat());
        let mut to = rank.poisoned(self.dtype, &dims(&recv));
        rank.lease()
            .all_to_all(AllToAllParams {
                from: from.view(),
                send_rows: send,
                to: to.view_mut(),
                recv_rows: &recv,
            })
            .unwrap();
        let want: Vec<_> = self.parts.iter().flat_map(|to| to[me].clone()).collect();
        let what = format!("all-to-all of {:?} x {}", self.rows, self.columns);
        assert_bits(&rank.raw(to.view()), &want, self.dtype, &what);
    }
}

fn all_to_all(world: &World) {
    let mut rng = world.rng();
    let size = world.size;
    let table = |rng: &mut StdRng, most: usize| {
        let row = |_| (0..size).map(|_| rng.random_range(0..=most)).collect();
        (0..size).map(row).collect::<Vec<Vec<usize>>>()
    };
    let mut cases = vec![];
    for dtype in ANY {
        let rows = table(&mut rng, 5);
        cases.push(Exchange::new(&mut rng, rows, 9, dtype));
    }
    let to_one = (0..size).map(|r| (0..size).map(|to| if to == 0 { r } else { 0 }).collect());
    cases.push(Exchange::new(&mut rng, to_one.collect(), 5, DataType::F32));
    cases.push(Exchange::new(
        &mut rng,
        vec![vec![0; size]; size],
        5,
        DataType::F32,
    ));
    cases.push(Exchange::new(
        &mut rng,
        vec![vec![2; size]; size],
        0,
        DataType::F32,
    ));
    let large = table(&mut rng, 700);
    cases.push(Exchange::new(&mut rng, large, 21, DataType::F32));
    world.run(&config(), move |rank| {
        cases.iter().for_each(|case| case.run(rank));
    });
}

/// A pair that disagrees about its count is a mismatch on every rank, and nothing is written.
fn disagreeing_pair(world: &World) {
    let mut rng = world.rng();
    let size = world.size;
    let (receiver, sender) = (rng.random_range(0..size), rng.random_range(1..size));
    let sender = (receiver + sender) % size;
    let case = Exchange::new(&mut rng, vec![vec![2; size]; size], 3, DataType::F32);
    world.run(&config(), move |rank| {
        let send = vec![2; rank.size];
        let mut recv = send.clone();
        if rank.rank == receiver {
            recv[sender] = 3;
        }
        let from = rank.poisoned(DataType::F32, &[2 * rank.size, 3]);
        let mut to = rank.poisoned(DataType::F32, &[recv.iter().sum(), 3]);
        let params = AllToAllParams {
            from: from.view(),
            send_rows: &send,
            to: to.view_mut(),
            recv_rows: &recv,
        };
        let lease = rank.comm().lease(&rank.stream);
        let result = lease.and_then(|mut lease| lease.all_to_all(params));
        let result = rank.settle(result.map(drop));
        // A rank that had no part in it may have ended the call, and hears of it in the next one.
        let result = result.and_then(|()| ops::barrier().run(rank).result);
        let record = expect_fault(result, "a pair that disagrees");
        assert_eq!(record.kind, FaultKind::Mismatch, "{record}");
        let pair = (record.rank as usize, record.peer as usize);
        assert_eq!(pair, (receiver, sender), "{record}");
        rank.comm().reset(AMPLE).unwrap();
        case.run(rank);
    });
}

/// Time on the clock that all ranks of a machine look at, in ns.
fn now() -> u128 {
    SystemTime::now()
        .duration_since(UNIX_EPOCH)
        .unwrap()
        .as_nanos()
}

/// Nobody leaves a barrier before everybody has come.
fn barrier(world: &World) {
    let mut rng = world.rng();
    let late: Vec<usize> = (0..50).map(|_| rng.random_range(0..world.size)).collect();
    world.run(&config(), move |rank| {
        for (i, &late) in late.iter().enumerate() {
            if rank.rank == late {
                rank.dawdle(200);
            }
            let came = now();
            let result = rank.lease().barrier();
            rank.settle(result).unwrap();
            let left = now();
            let came = rank.share(&came.to_ne_bytes());
            let last = came.iter().map(|t| bytemuck::pod_read_unaligned(t)).max();
            assert!(last <= Some(left), "barrier {i} was left too early");
        }
    });
}

/// Adds the contracts.
pub fn add(suite: &mut Suite) {
    suite.add("all_gather/ragged", all_gather);
    suite.add("broadcast/every_root", broadcast);
    suite.add_from(3, "broadcast/passed_on", as_much_as_is_passed_on);
    suite.add("all_to_all/uneven", all_to_all);
    suite.add_from(2, "all_to_all/disagreeing_pair", disagreeing_pair);
    suite.add("barrier/nobody_leaves_early", barrier);
}
