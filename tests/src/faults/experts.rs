//! Calls with experts that differ in one thing, by each transport: ranks that lay memory out in other ways write to each other, and must
//! find out before anybody takes what came for rows.

use super::{AMPLE, Probe, differ, impatient};
use crate::{
    check::{assert_kind, expect_fault, is_poisoned},
    experts::{
        arrangements,
        case::{By, Case},
        own::{Own, check},
        transports,
    },
    gather_linear::config,
    ops::{Exchange, Op},
    suite::{Suite, World},
};
use brigade_device::{
    Arrangement, CombineCast, CombineSum, CommConfig, DataType, FaultKind, Fp8Cast, ReceivedIds,
    ScaleFormat, Transport,
};
use brigade_plan::Engines;
use rand::Rng;

/// What all make, what one makes, and in what that is different.
type Pair = (&'static str, Op, Op);

const PLAIN: Exchange = Exchange::of(16);

const fn cast(format: ScaleFormat) -> Option<Fp8Cast> {
    Some(Fp8Cast {
        format,
        column_major: false,
    })
}

const CAST: Exchange = Exchange {
    cast: cast(ScaleFormat::F32),
    ..PLAIN
};
const NARROW: Exchange = Exchange {
    dtype: DataType::BF16,
    back: DataType::BF16,
    output: DataType::BF16,
    ..PLAIN
};
const BY_EXPERT: Exchange = Exchange {
    weighted: true,
    arrangement: Arrangement::ByExpert { alignment: 1 },
    sum: CombineSum::Expert,
    ..PLAIN
};
const HALVES: Exchange = Exchange {
    sum: CombineSum::Expert,
    weighted: true,
    ..PLAIN
};

/// What must agree on the way there, whatever the transport.
fn of_all() -> Vec<(&'static str, Exchange, Exchange)> {
    [
        (
            "hidden",
            PLAIN,
            Exchange {
                hidden: 32,
                ..PLAIN
            },
        ),
        (
            "much_more",
            PLAIN,
            Exchange {
                hidden: 256,
                ..PLAIN
            },
        ),
        (
            "dtype",
            PLAIN,
            Exchange {
                dtype: DataType::F16,
                back: DataType::F16,
                ..PLAIN
            },
        ),
        ("k", PLAIN, Exchange { nobody: 1, ..PLAIN }),
        (
            "max_tokens",
            PLAIN,
            Exchange {
                max_tokens: 2,
                ..PLAIN
            },
        ),
        (
            "weights",
            PLAIN,
            Exchange {
                weighted: true,
                ..PLAIN
            },
        ),
        ("cast", PLAIN, CAST),
        (
            "format",
            CAST,
            Exchange {
                cast: cast(ScaleFormat::Ue8m0),
                ..PLAIN
            },
        ),
    ]
    .to_vec()
}

/// The same for a dispatch and a combine, by one transport.
fn at_once(choice: Transport, gathered: bool) -> Vec<Pair> {
    let in_place = choice == Transport::InPlace;
    let mut pairs = of_all();
    pairs.push(("beside", PLAIN, Exchange { beside: 3, ..PLAIN }));
    let received_ids = ReceivedIds::Global;
    pairs.push((
        "ids",
        PLAIN,
        Exchange {
            received_ids,
            ..PLAIN
        },
    ));
    pairs.push((
        "output",
        NARROW,
        Exchange {
            output: DataType::F32,
            ..NARROW
        },
    ));
    // Rows that stay in place lie by source, and go back as they are.
    if !in_place {
        let arrangement = Arrangement::Dense;
        pairs.push((
            "arrangement",
            PLAIN,
            Exchange {
                arrangement,
                ..PLAIN
            },
        ));
        let arrangement = Arrangement::ByExpert { alignment: 1 };
        pairs.push((
            "by_expert",
            Exchange {
                weighted: true,
                ..PLAIN
            },
            Exchange {
                arrangement,
                ..BY_EXPERT
            },
        ));
        let back = DataType::BF16;
        pairs.push(("back", PLAIN, Exchange { back, ..PLAIN }));
        let sum = CombineSum::ExpertByRank;
        pairs.push(("sum", BY_EXPERT, Exchange { sum, ..BY_EXPERT }));
    }
    let mut by: Vec<Pair> = pairs
        .into_iter()
        .map(|(what, op, other)| {
            let of = |exchange| Exchange {
                choice: Some(choice),
                gathered,
                ..exchange
            };
            (what, of(op).at_once(), of(other).at_once())
        })
        .collect();
    let mine = Exchange {
        choice: Some(choice),
        gathered,
        ..PLAIN
    };
    let choice = match choice {
        Transport::OneSided => Transport::Gather,
        _ => Transport::OneSided,
    };
    by.push((
        "choice",
        mine.at_once(),
        Exchange {
            choice: Some(choice),
            ..mine
        }
        .at_once(),
    ));
    if gathered {
        let own = Exchange {
            gathered: false,
            ..mine
        };
        by.push(("gathered", mine.at_once(), own.at_once()));
    }
    by
}

/// The same for an exchange in two halves.
fn in_halves() -> Vec<Pair> {
    let there = of_all().into_iter().map(|(what, op, other)| {
        let of = |exchange| Exchange {
            sum: CombineSum::Expert,
            ..exchange
        };
        (what, of(op), of(other))
    });
    let (sum, back) = (CombineSum::ExpertByRank, DataType::BF16);
    let cast_back = Some(CombineCast::Fp8(ScaleFormat::F32));
    let back = [
        ("sum", HALVES, Exchange { sum, ..HALVES }),
        ("back", HALVES, Exchange { back, ..HALVES }),
        (
            "cast_back",
            HALVES,
            Exchange {
                cast_back,
                ..HALVES
            },
        ),
    ];
    let all = there.chain(back);
    all.map(|(what, op, other)| (what, op.in_halves(), other.in_halves()))
        .collect()
}

/// By each transport that a device has.
fn mismatches_of_experts(engines: Engines) -> Vec<(&'static str, Vec<Pair>)> {
    if !engines.dispatches {
        return vec![];
    }
    let mut all = vec![
        ("one_sided", at_once(Transport::OneSided, false)),
        ("fifo", at_once(Transport::Fifo, false)),
        ("gather", at_once(Transport::Gather, false)),
        ("in_place", at_once(Transport::InPlace, false)),
        ("one_sided_gathered_ids", at_once(Transport::OneSided, true)),
        ("gather_gathered_ids", at_once(Transport::Gather, true)),
        ("in_halves", in_halves()),
    ];
    if engines.pushes_rows {
        all.push(("pushed", at_once(Transport::Pushed, false)));
    }
    all
}

/// One after the other, either call on the culprit: a mismatch on every rank, long before the deadline, nothing that is half a result; and
/// after the reset what all ranks agree on gives the bits that it gave before.
fn mismatches(world: &World, pairs: Vec<Pair>) {
    let mut rng = world.rng();
    let probe = Probe::new(&mut rng, world.size);
    let rounds: Vec<_> = pairs
        .into_iter()
        .map(|(what, op, other)| {
            let [op, other] = match rng.random() {
                true => [op, other],
                false => [other, op],
            };
            let named = |op: Op| {
                let name = format!("{} ({what})", op.name);
                op.named(name)
            };
            let [culprit, late] = [(); 2].map(|()| rng.random_range(0..world.size));
            let dawdles = rng.random_range(0..300);
            (culprit, late, dawdles, named(op), named(other))
        })
        .collect();
    world.run(&config(), move |rank| {
        probe.run(rank);
        for (culprit, late, dawdles, op, other) in &rounds {
            let agreed = || {
                let ended = op.run(rank);
                ended.result.unwrap();
                let d = ended.output.unwrap();
                let bytes = rank.raw(d.view());
                assert!(!is_poisoned(d.dtype(), &bytes), "{}", op.name);
                bytes
            };
            let before = agreed();
            rank.meet();
            if rank.rank == *late {
                rank.dawdle(*dawdles);
            }
            differ(rank, *culprit, op, other);
            assert_eq!(agreed(), before, "{} after the reset", op.name);
        }
        probe.run(rank);
    });
}

/// A dispatch that has given its outputs, and fails when it is replayed, since a rank does not come: nothing is left there that looks like
/// what an earlier one gave.
fn outputs(world: &World, by: Transport) {
    let mut rng = world.rng();
    let size = world.size;
    let mut cases = Vec::new();
    for arrangement in arrangements(By::of(by, by)) {
        let mut case = Case::random(&mut rng, size, (10, 128, 3, 6));
        case.arrangement = arrangement;
        // With what lies between rows of two experts.
        case.room = (arrangement != Arrangement::BySource).then_some(30 * size + 16 * 6);
        case.by = By::of(by, by);
        case.dtype = DataType::BF16;
        case.cast = cast(ScaleFormat::F32).filter(|_| rng.random());
        let case = case.with_tokens(&mut rng, &vec![10; size]);
        cases.push((rng.random_range(0..size), case));
    }
    let config = CommConfig {
        dispatch_bytes: 2 << 20,
        all_reduce_bytes: 1 << 20,
        ..impatient()
    };
    world.run(&config, move |rank| {
        for (culprit, case) in &cases {
            // The first call of a generation may take longer.
            rank.settle(rank.lease().barrier()).unwrap();
            let own = Own::of(rank, case);
            let mut got = None;
            let graph = rank.device.capture(&rank.stream, &mut || {
                got = Some(own.dispatch(&mut rank.lease(), case)?);
                Ok(())
            });
            let (graph, got) = (graph.unwrap(), got.unwrap());
            rank.settle(graph.launch(&rank.stream).map(drop)).unwrap();
            check(rank, case, &got);
            rank.meet();
            if rank.rank != *culprit {
                let failed = rank.settle(graph.launch(&rank.stream).map(drop));
                let record = expect_fault(failed, "a dispatch that a rank does not make");
                assert_kind(&record, FaultKind::Timeout, "a rank that does not come");
                let parts = got.handle.parts();
                let named = [
                    ("rows", &got.rows),
                    ("ids", &got.ids),
                    ("counts", &got.counts),
                    ("received", &parts.received),
                    ("sources", &parts.sources),
                    ("offsets", &parts.offsets),
                ];
                let scales = got.scales.iter().map(|scales| ("scales", scales));
                let weights = got.weights.iter().map(|weights| ("weights", weights));
                let beside = got.beside.iter().map(|beside| ("beside", beside));
                let all = named.into_iter().chain(scales).chain(weights).chain(beside);
                for (name, out) in all {
                    let poisoned = is_poisoned(out.dtype(), &rank.raw(out.view()));
                    assert!(poisoned, "{name} of {:?}", case.arrangement);
                }
            }
            rank.meet();
            rank.comm().reset(AMPLE).unwrap();
        }
    });
}

/// Adds the contracts.
pub(super) fn add(suite: &mut Suite) {
    for (by, pairs) in mismatches_of_experts(suite.backend().engines()) {
        suite.add_from(2, &format!("faults/mismatch/experts/{by}"), move |world| {
            mismatches(world, pairs.clone());
        });
    }
    for (name, by) in transports(suite.backend().engines(), Arrangement::BySource) {
        suite.add_from(2, &format!("faults/outputs/{name}"), move |world| {
            outputs(world, by);
        });
    }
}
