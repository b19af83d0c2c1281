//! Traffic: what a call moves is what its schedule says.

mod experts;
mod low_latency;

use crate::{
    all_reduce, all_reduce_norm, all_to_all_rows,
    backend::Rank,
    experts::waits::try_all,
    faults::AMPLE,
    gather_linear::{self, config},
    layer::Spec,
    linear_reduce_scatter as twin, ops,
    suite::{Suite, World},
    themes::{modes, scatters},
};
use brigade_device::{
    Action, AllGatherParams, AllReduceAlgorithm, BroadcastParams, Call, DataType, OverlapMode,
    PeerWait, Plan, Point, QScheme, ReduceOp, ReduceScatterParams, Step,
};
use brigade_plan::moved;
use rand::Rng;
use std::{sync::Arc, time::Duration};

/// Bytes that this rank moved in `work`, and the calls that it counted.
fn measure(rank: &Rank, work: impl FnOnce()) -> (u64, u64) {
    let before = rank.comm().traffic();
    work();
    rank.settle(Ok(())).unwrap();
    let after = rank.comm().traffic();
    (
        after.moved_bytes - before.moved_bytes,
        after.calls - before.calls,
    )
}

/// Makes a call that moves so many bytes of this rank's.
#[track_caller]
pub fn assert_moved(rank: &Rank, want: u64, what: &str, work: impl FnOnce()) {
    let (got, calls) = measure(rank, work);
    assert_eq!(
        got, want,
        "{what}: bytes moved by rank {} of {}",
        rank.rank, rank.size
    );
    assert_eq!(calls, 1, "{what}: calls");
}

/// Whether a copy or a reduce-scatter is pushed.
pub fn is_pushed(rank: &Rank, call: &Call) -> bool {
    match rank.comm().explain(call) {
        Ok(Plan::Copy { pushed, .. } | Plan::ReduceScatter { pushed, .. }) => pushed.is_some(),
        other => panic!("{other:?}"),
    }
}

fn linears(world: &World) {
    let mut rng = world.rng();
    let spec = Spec::ragged(&mut rng, world.size);
    let gather = gather_linear::Case::new(&mut rng, spec.clone());
    let scatter = twin::Case::new(&mut rng, spec.clone());
    let engines = world.backend.engines();
    let choices = modes(engines);
    world.run(&config(), move |rank| {
        let me = rank.rank;
        let row_bytes = spec.k[0] * spec.dtype.bytes();
        let chunks: Vec<_> = spec.rows.iter().map(|r| r * row_bytes).collect();
        let part_bytes = spec.n[0] * spec.output.bytes();
        let parts: Vec<_> = spec.rows.iter().map(|r| r * part_bytes).collect();
        for &choice in choices.iter().flat_map(|(_, c)| c) {
            let what = format!("{choice:?}");
            let Some(mode) = choice else { continue };
            let want = match mode {
                OverlapMode::Ring => moved::ring_gather(me, &chunks),
                OverlapMode::Pull => moved::pull_gather(me, &chunks),
                _ => moved::push_gather(me, &chunks),
            };
            let want = if rank.size == 1 { 0 } else { want };
            assert_moved(rank, want, &what, || drop(gather.run(rank, choice)));
            if !scatters(Some(mode)) {
                continue;
            }
            let off = Call::ReduceScatter {
                rows: spec.rows[..].into(),
                row_len: spec.n[0],
                dtype: spec.output,
                output: spec.output,
                op: ReduceOp::Sum,
            };
            let pushes = engines.pushes_parts || is_pushed(rank, &off);
            let want = match mode {
                OverlapMode::Off if !pushes => moved::pull_scatter(me, &parts),
                _ => moved::push_scatter(me, &parts),
            };
            assert_moved(rank, want, &what, || drop(scatter.run(rank, choice)));
        }
    });
}

fn all_reduces(world: &World) {
    let mut rng = world.rng();
    let choices = all_reduce::algorithms(world.backend.engines());
    let cases: Vec<_> = [0, 5, 1000, 40_001]
        .map(|len| {
            let kind = (DataType::BF16, ReduceOp::Sum, all_reduce::Place::Widened);
            (
                len,
                all_reduce::Case::random(&mut rng, world.size, len, kind),
            )
        })
        .into();
    world.run(&config(), move |rank| {
        for (len, case) in &cases {
            for &(name, choice) in &choices {
                let call = Call::AllReduce {
                    elements: *len,
                    dtype: DataType::BF16,
                    output: DataType::F32,
                    op: ReduceOp::Sum,
                    choice,
                };
                let Ok(Plan::AllReduce {
                    algorithm,
                    piece_elements,
                    ..
                }) = rank.comm().explain(&call)
                else {
                    panic!("no plan for {name}");
                };
                let want = match algorithm {
                    AllReduceAlgorithm::TwoShot => {
                        moved::two_shot(rank.rank, rank.size, *len, piece_elements, 2, 4)
                    }
                    AllReduceAlgorithm::TwoShotPush => {
                        let types = (DataType::BF16, DataType::F32);
                        moved::two_shot_push(rank.rank, rank.size, *len, piece_elements, types)
                    }
                    _ => moved::one_shot(rank.size, 2 * len),
                };
                assert_moved(rank, want, name, || {
                    case.run(rank, choice);
                });
            }
        }
    });
}

/// As all-reduces, but that shares which are pushed are whole rows.
fn norms(world: &World) {
    const BYTES: usize = 2;
    let mut rng = world.rng();
    let choices = all_reduce::algorithms(world.backend.engines());
    let cases: Vec<_> = [[0, 8], [1, 5], [33, 100], [250, 130]]
        .map(|dims| {
            let kind = (DataType::BF16, QScheme::None);
            let case = all_reduce_norm::Case::random(&mut rng, world.size, dims, kind);
            (dims, case)
        })
        .into();
    world.run(&config(), move |rank| {
        for ([rows, hidden], case) in &cases {
            let (me, size, len) = (rank.rank, rank.size, rows * hidden);
            for &(name, choice) in &choices {
                let Ok(Plan::AllReduce {
                    algorithm,
                    piece_elements: piece,
                    ..
                }) = rank.comm().explain(&case.explained(choice))
                else {
                    panic!("no plan for {name}");
                };
                let want = match algorithm {
                    AllReduceAlgorithm::TwoShot => {
                        moved::two_shot(me, size, len, piece, BYTES, BYTES)
                    }
                    AllReduceAlgorithm::TwoShotPush => {
                        let dims = (*rows, *hidden);
                        moved::two_shot_push_rows(me, size, dims, piece, DataType::BF16)
                    }
                    _ => moved::one_shot(size, BYTES * len),
                };
                assert_moved(rank, want, name, || case.run(rank, choice));
            }
        }
    });
}

fn copies(world: &World) {
    let engines = world.backend.engines();
    world.run(&config(), move |rank| {
        let (me, size) = (rank.rank, rank.size);
        let rows: Vec<_> = (0..size).map(|r| 100 * r + 3).collect();
        let bytes: Vec<_> = rows.iter().map(|r| r * 28).collect();
        let total = rows.iter().sum();
        let all = rank.poisoned(DataType::F32, &[total, 7]);
        let own = rank.poisoned(DataType::F32, &[rows[me], 7]);
        let (mut to_all, mut to_own) = (all.clone(), own.clone());
        let (from_all, from_own) = (
            rank.poisoned(DataType::F32, &[total, 7]),
            rank.poisoned(DataType::F32, &[rows[me], 7]),
        );
        let gathers = Call::AllGather {
            rows: rows[..].into(),
            row_len: 7,
            dtype: DataType::F32,
        };
        let gathered = match is_pushed(rank, &gathers) {
            true => moved::push_gather(me, &bytes),
            false => moved::pull_gather(me, &bytes),
        };
        assert_moved(rank, gathered, "all-gather", || {
            rank.lease()
                .all_gather(AllGatherParams {
                    from: from_own.view(),
                    rows_per_rank: &rows,
                    to: to_all.view_mut(),
                })
                .map(drop)
                .unwrap();
        });
        let scatters = Call::ReduceScatter {
            rows: rows[..].into(),
            row_len: 7,
            dtype: DataType::F32,
            output: DataType::F32,
            op: ReduceOp::Sum,
        };
        let scattered = if engines.pushes_parts || is_pushed(rank, &scatters) {
            moved::push_scatter(me, &bytes)
        } else {
            moved::pull_scatter(me, &bytes)
        };
        assert_moved(rank, scattered, "reduce-scatter", || {
            rank.lease()
                .reduce_scatter(ReduceScatterParams {
                    from: from_all.view(),
                    rows_per_rank: &rows,
                    to: to_own.view_mut(),
                    op: ReduceOp::Sum,
                })
                .map(drop)
                .unwrap();
        });
        let root = size - 1;
        let broadcasts = Call::Broadcast {
            elements: total * 7,
            dtype: DataType::F32,
            root,
        };
        let sent = match is_pushed(rank, &broadcasts) {
            true => moved::push_broadcast(me, root, size, total * 28),
            false => moved::broadcast(me, root, total * 28),
        };
        assert_moved(rank, sent, "broadcast", || {
            let data = to_all.view_mut();
            rank.lease()
                .broadcast(BroadcastParams { data, root })
                .map(drop)
                .unwrap();
        });
        assert_moved(rank, 0, "barrier", || rank.lease().barrier().unwrap());
    });
}

/// Rows that lists name: what is sent to others counts, of all payloads.
fn rows_of_lists(world: &World) {
    let mut rng = world.rng();
    let cases: Vec<_> = (0..4)
        .map(|_| all_to_all_rows::draw(&mut rng, world.size))
        .collect();
    world.run(&config(), move |rank| {
        for case in &cases {
            let want = case.moved(rank.rank) as u64;
            assert_moved(rank, want, "all-to-all of rows", || case.run(rank));
        }
    });
}

/// A rank that waits for another says so; a call that a fault ended is not counted.
fn waits_and_faults(world: &World) {
    const ROUNDS: u64 = 30;
    world.run(&config(), |rank| {
        rank.lease().barrier().unwrap();
        rank.settle(Ok(())).unwrap();
        rank.meet();
        let before = rank.comm().traffic();
        for _ in 0..ROUNDS {
            if rank.rank == 0 {
                rank.dawdle(1000);
            }
            rank.lease().barrier().unwrap();
        }
        rank.settle(Ok(())).unwrap();
        let after = rank.comm().traffic();
        assert_eq!(after.calls, before.calls + ROUNDS);
        assert!(after.waited_ns >= before.waited_ns);
        if rank.rank != 0 {
            assert!(
                after.waited_ns > before.waited_ns,
                "never waited for rank 0"
            );
        }
        rank.meet();
        if rank.rank == 0 {
            rank.comm().abort();
        } else {
            assert!(ops::barrier().run(rank).result.is_err());
        }
        assert_eq!(rank.comm().traffic().calls, after.calls);
        rank.comm().reset(AMPLE).unwrap();
    });
}

/// A rank that is late shows in the others' waits for it, and in nobody's for anybody else, unless those are late, too.
fn waits_per_peer(world: &World) {
    const ROUNDS: u32 = 12;
    const STALL: Duration = Duration::from_millis(15);
    let late = world.rng().random_range(0..world.size);
    let hook = move |step: &Step| match step.point {
        Point::Begin if step.rank == late => Action::Stall(STALL),
        _ => Action::GoOn,
    };
    let half = u64::try_from((STALL * ROUNDS / 2).as_nanos()).unwrap();
    world.run_injected(&config(), Arc::new(hook), move |rank| {
        ops::barrier().run(rank).result.unwrap();
        try_all(rank, "waits for each rank", || {
            let before = rank.comm().traffic();
            for round in 0..ROUNDS {
                let op = if round % 2 == 0 {
                    ops::barrier()
                } else {
                    ops::all_to_all(3)
                };
                op.run(rank).result.unwrap();
            }
            let after = rank.comm().traffic();
            let all: u64 = after.waits.iter().map(|w| w.waited_ns).sum();
            assert_eq!(all, after.waited_ns, "{after:?}");
            assert_eq!(after.waits[rank.rank], PeerWait::default(), "{after:?}");
            (0..rank.size).all(|peer| {
                let waits = after.waits[peer].waits - before.waits[peer].waits;
                let waited = after.waits[peer].waited_ns - before.waits[peer].waited_ns;
                if peer == late && rank.rank != late {
                    assert!(waits >= u64::from(ROUNDS / 2), "{waits} waits for {late}");
                    assert!(waited >= half, "{waited} ns for rank {late}");
                    true
                } else {
                    waited < half
                }
            })
        });
    });
}

/// Adds the contracts.
pub fn add(suite: &mut Suite) {
    suite.add("traffic/linears", linears);
    suite.add("traffic/all_reduce", all_reduces);
    if suite.backend().engines().norms {
        suite.add("traffic/all_reduce_norm", norms);
    }
    suite.add("traffic/copies", copies);
    if suite.backend().engines().dispatches {
        suite.add("traffic/all_to_all_rows", rows_of_lists);
        suite.add("traffic/experts", experts::whole);
        suite.add("traffic/low_latency", low_latency::exchanged);
        suite.add("traffic/experts_in_pieces", experts::pieces);
    }
    suite.add_from(2, "traffic/waits_and_faults", waits_and_faults);
    if suite.backend().injects() {
        suite.add_from(2, "traffic/waits_per_peer", waits_per_peer);
    }
}
