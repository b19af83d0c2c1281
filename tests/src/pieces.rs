//! Copies and reduce-scatters of more than fits the buffers of sums at once: the same bytes, whatever pieces the plan cuts.

use crate::{
    backend::Rank,
    check::{assert_kind, expect_fault, is_poisoned},
    copies::{Broadcast, Gather},
    faults::{AMPLE, GRACE, impatient},
    gather_linear::config,
    reduce_scatter,
    suite::{Suite, World},
    traffic::assert_moved,
};
use brigade_device::{
    AllGatherParams, BroadcastParams, Buffer, Call, CommConfig, DataType, FaultKind, Plan,
    ReduceOp, ReduceScatterParams, Result,
};
use brigade_plan::{
    moved,
    pushed::{GRANULE_BYTES, Packets},
};
use rand::Rng;
use std::time::Instant;

/// What a device that pushes in pieces cuts at.
pub const UNIT: usize = 64 << 10;

/// Room for a unit of each peer and the words behind it, and for no two.
pub fn small(base: &CommConfig, size: usize) -> CommConfig {
    CommConfig {
        all_reduce_bytes: (UNIT + UNIT / 8) * (size - 1).max(1),
        scratch_bytes: 16 << 10,
        ..base.clone()
    }
}

/// Pieces of a call, and whether they are pushed.
fn pieces(rank: &Rank, call: &Call) -> (usize, bool) {
    match rank.comm().explain(call) {
        Ok(Plan::Copy { pieces, pushed, .. } | Plan::ReduceScatter { pieces, pushed, .. }) => {
            (pieces, pushed.is_some())
        }
        other => panic!("{other:?}"),
    }
}

/// At once where that fits, otherwise in as many as there are units.
fn assert_pieces(pieces: usize, size: usize, bytes: &[usize]) {
    let most = bytes.iter().max().copied().unwrap_or(0);
    let fits = size == 1 || most <= UNIT + UNIT / 8;
    assert!(
        pieces == most.div_ceil(UNIT) || pieces == 1 && fits,
        "{pieces} of {bytes:?}"
    );
}

/// Bytes of ranks: alike and ragged, whole units and not, of a rank that has most of it, and none.
fn amounts(world: &World) -> Vec<Vec<usize>> {
    let (mut rng, size) = (world.rng(), world.size);
    let mut ragged = || (0..size).map(|_| rng.random_range(0..4 * UNIT)).collect();
    let (one, another): (Vec<usize>, Vec<usize>) = (ragged(), ragged());
    let mut most = vec![5; size];
    most[size - 1] = 3 * UNIT + 7;
    let mut none = vec![2 * UNIT + 64; size];
    none[0] = 0;
    vec![vec![2 * UNIT; size], one, another, most, none]
}

fn copies(world: &World) {
    let mut rng = world.rng();
    let mut gathers = Vec::new();
    for bytes in amounts(world) {
        let gather = Gather::new(&mut rng, bytes.clone(), &[1], DataType::U8);
        gathers.push((bytes, gather));
    }
    let mut broadcasts = Vec::new();
    for root in 0..world.size {
        for bytes in [2 * UNIT, 3 * UNIT + 1, rng.random_range(UNIT..5 * UNIT)] {
            let broadcast = Broadcast::new(&mut rng, root, bytes, DataType::U8);
            broadcasts.push((root, bytes, broadcast));
        }
    }
    world.run(&small(&config(), world.size), move |rank| {
        let (me, size) = (rank.rank, rank.size);
        for (bytes, gather) in &gathers {
            let call = Call::AllGather {
                rows: bytes[..].into(),
                row_len: 1,
                dtype: DataType::U8,
            };
            let moved = match pieces(rank, &call) {
                (pieces, true) => {
                    assert_pieces(pieces, size, bytes);
                    moved::push_gather(me, bytes)
                }
                _ => moved::pull_gather(me, bytes),
            };
            assert_moved(rank, moved, "all-gather", || gather.run(rank));
        }
        for (root, bytes, broadcast) in &broadcasts {
            let call = Call::Broadcast {
                elements: *bytes,
                dtype: DataType::U8,
                root: *root,
            };
            let moved = match pieces(rank, &call) {
                (_, true) => moved::push_broadcast(me, *root, size, *bytes),
                _ => moved::broadcast(me, *root, *bytes),
            };
            assert_moved(rank, moved, "broadcast", || broadcast.run(rank));
        }
    });
}

/// Among three, a broadcast's pieces are so large that peers pass them on.
fn passed_on(world: &World) {
    const PACKET: usize = Packets::GRANULES * GRANULE_BYTES;
    const PIECE: usize = Packets::RELAYED * PACKET;
    let mut rng = world.rng();
    let cases: Vec<_> = (0..world.size)
        .map(|root| {
            // Two pieces that peers pass on, and one that has a few packets fewer.
            let bytes = 3 * PIECE - rng.random_range(PACKET..3000);
            let broadcast = Broadcast::new(&mut rng, root, bytes, DataType::U8);
            (root, bytes, broadcast)
        })
        .collect();
    let config = CommConfig {
        all_reduce_bytes: PIECE + PIECE / 8,
        ..config()
    };
    world.run(&config, move |rank| {
        let (me, size) = (rank.rank, rank.size);
        for (root, bytes, case) in &cases {
            let (root, bytes) = (*root, *bytes);
            let call = Call::Broadcast {
                elements: bytes,
                dtype: DataType::U8,
                root,
            };
            let moved = match pieces(rank, &call) {
                (_, false) => moved::broadcast(me, root, bytes),
                (1, true) => moved::push_broadcast(me, root, size, bytes),
                (pieces, true) => {
                    let of = |piece: usize| {
                        let packets = Packets::broadcast(PIECE.min(bytes - piece * PIECE), size);
                        assert_eq!(packets.are_relayed(size), size > 2 && piece < 2);
                        match packets.are_relayed(size) {
                            true => moved::relayed_broadcast(me, root, size, packets),
                            false => moved::push_broadcast(me, root, size, packets.bytes),
                        }
                    };
                    (0..pieces).map(of).sum()
                }
            };
            assert_moved(rank, moved, "broadcast", || case.run(rank));
        }
    });
}

fn shares(world: &World) {
    let mut rng = world.rng();
    let mut cases = Vec::new();
    for bytes in amounts(world) {
        for kind in [
            (DataType::BF16, DataType::BF16, ReduceOp::Sum),
            (DataType::F16, DataType::F32, ReduceOp::Avg),
            (DataType::F32, DataType::F32, ReduceOp::Max),
        ] {
            let rows: Vec<usize> = bytes.iter().map(|b| b / kind.0.bytes()).collect();
            let case = reduce_scatter::Case::new(&mut rng, rows.clone(), 1, kind);
            cases.push((rows, kind, case));
        }
    }
    world.run(&small(&config(), world.size), move |rank| {
        for (rows, (dtype, output, op), case) in &cases {
            let call = Call::ReduceScatter {
                rows: rows[..].into(),
                row_len: 1,
                dtype: *dtype,
                output: *output,
                op: *op,
            };
            if let (pieces, true) = pieces(rank, &call) {
                let bytes: Vec<_> = rows.iter().map(|n| n * dtype.bytes()).collect();
                assert_pieces(pieces, rank.size, &bytes);
            }
            case.run(rank);
        }
    });
}

/// A rank that never calls: all of the others' output is poison, and a root's is its own.
fn a_rank_is_missing(world: &World) {
    let mut rng = world.rng();
    let culprit = rng.random_range(0..world.size);
    let elements = 3 * UNIT / DataType::F32.bytes() + rng.random_range(1..100);
    world.run(&small(&impatient(), world.size), move |rank| {
        type Make = fn(&Rank, usize) -> (Buffer, Result<()>);
        let calls: [(&str, Make); 3] = [
            ("all-gather", |rank, elements| {
                let from = filled(rank, elements);
                let mut to = filled(rank, elements * rank.size);
                let made = rank.lease().all_gather(AllGatherParams {
                    from: from.view(),
                    rows_per_rank: &vec![elements; rank.size],
                    to: to.view_mut(),
                });
                (to, made.map(drop))
            }),
            ("reduce-scatter", |rank, elements| {
                let from = filled(rank, elements * rank.size);
                let mut to = filled(rank, elements);
                let made = rank.lease().reduce_scatter(ReduceScatterParams {
                    from: from.view(),
                    rows_per_rank: &vec![elements; rank.size],
                    to: to.view_mut(),
                    op: ReduceOp::Sum,
                });
                (to, made.map(drop))
            }),
            ("broadcast", |rank, elements| {
                let mut data = filled(rank, elements);
                let root = 0;
                let made = rank.lease().broadcast(BroadcastParams {
                    data: data.view_mut(),
                    root,
                });
                (data, made.map(drop))
            }),
        ];
        for (name, make) in calls {
            // The first call has a longer deadline.
            let (_, done) = make(rank, elements);
            rank.settle(done).unwrap();
            rank.meet();
            if rank.rank == culprit {
                rank.meet();
            } else {
                let start = Instant::now();
                let (output, made) = make(rank, elements);
                let record = expect_fault(rank.settle(made), name);
                assert!(start.elapsed() < GRACE + impatient().deadline, "{name}");
                assert_kind(&record, FaultKind::Timeout, name);
                let bytes = rank.raw(output.view());
                if name == "broadcast" && rank.rank == 0 {
                    assert!(bytes.iter().all(|&byte| byte == FILLED), "{name}");
                } else {
                    assert!(is_poisoned(DataType::F32, &bytes), "{name}");
                }
                rank.meet();
            }
            rank.comm().reset(AMPLE).unwrap();
        }
    });
}

/// Every byte of them.
const FILLED: u8 = 0x3C;

/// Numbers that are no poison.
fn filled(rank: &Rank, elements: usize) -> Buffer {
    let mut buffer = rank.poisoned(DataType::F32, &[elements]);
    let data = buffer.view_mut();
    rank.device.fill(&rank.stream, data, FILLED).unwrap();
    buffer
}

/// Adds the contracts.
pub fn add(suite: &mut Suite) {
    suite.add("pieces/copies", copies);
    suite.add("pieces/passed_on", passed_on);
    suite.add("pieces/shares", shares);
    suite.add_from(2, "pieces/a_rank_is_missing", a_rank_is_missing);
}
