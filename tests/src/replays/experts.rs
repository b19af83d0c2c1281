//! The same for rows that go to their experts and back, by all transports: ten thousand replays under stalls, in which rows, weights
//! and experts change; and, for what is pushed, the control in which a buffer that was read is not emptied before it is pushed into
//! again.
//!
//! Rows that are written one-sided, or that stay in place, lie in halves, whose credits have a control as `replays/without_credits` is one: on
//! GPUs, where a captured call keeps its half. The host's take the next one in every replay, and to come to the same again a rank has met all
//! others in between. Rows in queues have none: nobody ends a call before its entries are taken. What is pushed tells by itself that it is
//! there; how soon a reader that finds old values believes in them is different:
//!
//! | device | call | what the reader waits for first | what is old then |
//! |---|---|---|---|
//! | CUDA | combine | nothing | sums: the writer is held before it begins |
//! | CUDA | dispatch | the writer's arrival, for counts; and rows are read again after the hook was asked | counts: they come a little later than the arrival, and are other ones every day |
//! | host | both | the signature of a length, which is stored just before the part is | elements of a part: it is so large that the reader overtakes the writer; lengths are the same every day, since no part can be taken by an old one |
//!
//! So only the first is there in every replay; in the others the reader has to be quick. On the host, where threads wait for cores, it
//! gets several times a hundred replays for that; most often it needs the first.

mod captured;

use super::{
    CONTROL_REPLAYS, in_turn,
    sums::{BUFFERS, Hazard, READER, WRITER},
    wrong_days,
};
use crate::{
    backend::Rank,
    experts::{
        case::{Came, Case},
        config,
        own::{f32s, i32s},
        transports,
    },
    faults::AMPLE,
    inject::Jitter,
    suite::{Suite, World},
};
use brigade_device::{
    Arrangement, CombineSum, CommConfig, Fp8Cast, Inject, ScaleFormat, Transport,
};
use captured::{Captured, K, Kind};
pub(super) use captured::{OLD, bias, of_day, returned};
use rand::Rng;
use std::{sync::Arc, time::Duration};

/// Of tokens that go to both of two ranks, which of the experts is the writer's.
const OF_WRITER: usize = 1;

/// What comes of every row in every replay is that of its day, wherever ranks are held up: graphs of all transports, arrangements and
/// sums, of several lengths, in pieces, and with a cast, in turn and through the same memory.
fn under_stalls(world: &World) {
    let mut rng = world.rng();
    let jitter = Jitter::new(&mut rng, 20, 200);
    let mut kinds = vec![];
    for (i, (arrangement, sum)) in [
        (Arrangement::Dense, CombineSum::Rank),
        (Arrangement::BySource, CombineSum::Rank),
        (Arrangement::ByExpert { alignment: 1 }, CombineSum::Expert),
        (
            Arrangement::ByExpert { alignment: 4 },
            CombineSum::ExpertByRank,
        ),
    ]
    .into_iter()
    .enumerate()
    {
        for (_, by) in transports(world.backend.engines(), arrangement) {
            kinds.push(Kind {
                tokens: 3 + i,
                hidden: 8,
                arrangement,
                there: by,
                back: Some((sum, by)),
                cast: None,
                to_all: false,
                seed: rng.random(),
            });
        }
    }
    let whole = kinds[0];
    // Of tokens that do not fit at once, and go back in pieces, too.
    let (dense, by_source) = (Arrangement::Dense, Arrangement::BySource);
    let by_expert = Arrangement::ByExpert { alignment: 4 };
    for (arrangement, there, sum) in [
        (dense, Transport::OneSided, CombineSum::Rank),
        (by_expert, Transport::OneSided, CombineSum::Expert),
        (by_source, Transport::Gather, CombineSum::Rank),
    ] {
        kinds.push(Kind {
            tokens: MANY,
            arrangement,
            there,
            back: Some((sum, Transport::OneSided)),
            seed: rng.random(),
            ..whole
        });
    }
    let cast = Fp8Cast {
        format: ScaleFormat::F32,
        column_major: false,
    };
    let casts = [(dense, Transport::OneSided), (by_source, Transport::Pushed)];
    let pushes = world.backend.engines().pushes_rows;
    let can = |by| by != Transport::Pushed || pushes;
    for (arrangement, there) in casts.into_iter().filter(|cast| can(cast.1)) {
        kinds.push(Kind {
            hidden: 16,
            arrangement,
            there,
            back: None,
            cast: Some(cast),
            seed: rng.random(),
            ..whole
        });
    }
    let config = CommConfig {
        dispatch_bytes: 768 * world.size,
        combine_bytes: 512 * world.size,
        ..config()
    };
    world.run_injected(&config, Arc::new(jitter), move |rank| {
        let mut graphs: Vec<_> = kinds
            .iter()
            .map(|&kind| Captured::new(rank, kind))
            .collect();
        for graph in graphs.iter().filter(|graph| graph.kind.tokens == MANY) {
            assert!(graph.pieces() > 1, "{:?}: {}", graph.kind, graph.there.plan);
        }
        in_turn(rank, &mut graphs, |graph, day| graph.check(rank, day));
    });
}

/// Tokens of a rank that do not fit at once.
const MANY: usize = 24;

/// Tokens and columns of what a quick reader overtakes: which of them it does, is the machine's business.
const LARGE: [(usize, usize); 3] = [(32, 512), (6, 1024), (64, 1024)];

/// How long the reader is held where credits protect what it reads.
pub(super) const HELD: Duration = Duration::from_millis(1);

/// How often a control is tried where the reader has to be quick: its ranks are threads, which other work may hold up.
const TRIES: usize = 30;

/// What the writer's part of a sum is, of tokens that go to both ranks: with rows of `then`, and with the weights of `now` where whoever
/// sent the rows multiplies.
fn part([now, then]: [&Case; 2], sum: CombineSum) -> Vec<f32> {
    let rows: Vec<f32> = bytemuck::pod_collect_to_vec(&then.rows[READER]);
    let added = bias(WRITER, now.hidden);
    let weight = |token: usize| match sum {
        CombineSum::Rank => 1.0,
        CombineSum::Expert => now.weights.as_ref().unwrap()[READER][token * K + OF_WRITER],
        CombineSum::ExpertByRank => then.weights.as_ref().unwrap()[READER][token * K + OF_WRITER],
    };
    let value = |i: usize| weight(i / now.hidden) * (rows[i] + added[i % now.hidden]);
    (0..rows.len()).map(value).collect()
}

/// Two ranks, a writer that is late in every replay. Gives the replays in which the reader's sums were wrong.
fn wrong_sums(world: &World, sum: CombineSum, unguarded: bool, round: usize) -> Vec<u32> {
    let arrangement = match sum {
        CombineSum::Rank => Arrangement::Dense,
        CombineSum::Expert | CombineSum::ExpertByRank => Arrangement::ByExpert { alignment: 1 },
    };
    let (tokens, hidden) = LARGE[round % LARGE.len()];
    let kind = Kind {
        tokens,
        hidden,
        arrangement,
        // Only what comes back is in buffers that are emptied.
        there: Transport::OneSided,
        back: Some((sum, Transport::Pushed)),
        cast: None,
        to_all: true,
        seed: world.rng().random::<u64>() ^ round as u64,
    };
    wrong_replays(world, kind, unguarded, move |rank, captured, day| {
        let case = kind.case(2, day);
        let [want, _] = returned(&case, rank.rank, sum);
        let got = f32s(rank, &captured.d);
        if got == want {
            return false;
        }
        // What is wrong is of the buffer's use before, and only where the guard was left out.
        assert_eq!(rank.rank, READER, "replay {day}");
        let before = kind.case(2, day - BUFFERS);
        let (new, old) = (part([&case; 2], sum), part([&case, &before], sum));
        let good = |i: usize| got[i] == want[i] || got[i] == want[i] - new[i] + old[i];
        assert!((0..got.len()).all(good), "replay {day}: {got:?}");
        true
    })
}

/// The same for rows on their way to experts.
fn wrong_rows(world: &World, unguarded: bool, round: usize) -> Vec<u32> {
    let parts = world.backend.asks_callers();
    let (tokens, hidden) = LARGE[round % LARGE.len()];
    let kind = Kind {
        tokens,
        hidden: if parts { hidden } else { 64 },
        arrangement: Arrangement::BySource,
        there: Transport::Pushed,
        back: None,
        cast: None,
        to_all: parts,
        seed: world.rng().random::<u64>() ^ round as u64,
    };
    wrong_replays(world, kind, unguarded, move |rank, captured, day| {
        let case = kind.case(2, day);
        let received = i32s(rank, &captured.there.handle.parts().received);
        let rows = f32s(rank, &captured.there.rows);
        let (came, _) = case.received(rank.rank);
        let from = |source: usize| came.iter().filter(|row| row.source == source).count() as i32;
        let right = |row: &Came| {
            let at = row.token * case.hidden;
            let sent: Vec<f32> = bytemuck::pod_collect_to_vec(&case.rows[row.source]);
            rows[row.at * case.hidden..][..case.hidden] == sent[at..][..case.hidden]
        };
        if received == [0, 1].map(from) && came.iter().all(right) {
            return false;
        }
        assert_eq!(rank.rank, READER, "replay {day}");
        assert_eq!(received[READER], from(READER), "own rows of replay {day}");
        let (before, _) = kind.case(2, day - BUFFERS).received(READER);
        let old = before.iter().filter(|row| row.source == WRITER).count() as i32;
        let of_writer = received[WRITER];
        assert!(
            [from(WRITER), old].contains(&of_writer),
            "replay {day}: {of_writer} rows"
        );
        true
    })
}

/// The same for rows that lie in a half, there to be taken or to stay: its credit is what protects them from the next replay, as it does
/// in [`super::without_credits`]. Nothing comes back, or the writer would meet the reader there.
fn overwritten(world: &World, there: Transport, unguarded: bool) -> Vec<u32> {
    let kind = Kind {
        tokens: 6,
        hidden: 64,
        arrangement: Arrangement::BySource,
        there,
        back: None,
        cast: None,
        // What says which row is what is the same every day.
        to_all: true,
        seed: world.rng().random(),
    };
    let patience = if unguarded { AMPLE } else { HELD };
    let hazard = super::Hazard::new(unguarded, patience);
    wrong_of(world, kind, Arc::new(hazard), move |rank, captured, day| {
        let of =
            |day| -> Vec<f32> { bytemuck::pod_collect_to_vec(&kind.case(2, day).rows.concat()) };
        let (got, want) = (f32s(rank, &captured.there.rows), of(day));
        if got == want {
            return false;
        }
        // What is wrong is of the next replay.
        assert_eq!(rank.rank, super::READER, "replay {day}");
        let next = of(day + 1);
        let writers = want.len() / 2 * super::WRITER..want.len() / 2 * (super::WRITER + 1);
        let want_of = |i: usize| {
            if writers.contains(&i) {
                next[i]
            } else {
                want[i]
            }
        };
        assert!((0..got.len()).all(|i| got[i] == want_of(i)), "replay {day}");
        true
    })
}

fn wrong_replays(
    world: &World,
    kind: Kind,
    unguarded: bool,
    is_wrong: impl Fn(&Rank, &Captured, u32) -> bool + Send + Sync + 'static,
) -> Vec<u32> {
    wrong_of(world, kind, Arc::new(Hazard::new(unguarded)), is_wrong)
}

fn wrong_of(
    world: &World,
    kind: Kind,
    hazard: Arc<dyn Inject>,
    is_wrong: impl Fn(&Rank, &Captured, u32) -> bool + Send + Sync + 'static,
) -> Vec<u32> {
    wrong_days(world, &config(), hazard, move |rank, days| {
        let mut captured = Captured::new(rank, kind);
        days(&mut |day| {
            captured.replay(rank, &kind.case(2, day));
            is_wrong(rank, &captured, day)
        });
    })
}

/// Adds the contracts.
pub(super) fn add(suite: &mut Suite) {
    let engines = suite.backend().engines();
    let worlds = suite.backend().worlds();
    if !engines.dispatches {
        return;
    }
    for &size in worlds.iter().filter(|size| matches!(size, 2..=4 | 8)) {
        suite.add_at(size, "replays/experts/under_stalls", under_stalls);
    }
    if !worlds.contains(&2) {
        return;
    }
    for (name, there) in [
        ("one_sided", Transport::OneSided),
        ("in_place", Transport::InPlace),
    ] {
        let name = format!("replays/experts/{name}");
        suite.add_at(2, &format!("{name}/with_credits"), move |world| {
            let wrong = overwritten(world, there, false);
            assert!(wrong.is_empty(), "wrong in replays {wrong:?}");
        });
        if suite.backend().asks_callers() {
            continue;
        }
        suite.add_at(2, &format!("{name}/without_credits"), move |world| {
            let wrong = overwritten(world, there, true);
            assert!(
                !wrong.is_empty(),
                "nothing wrong in {CONTROL_REPLAYS} replays"
            );
        });
    }
    if !engines.pushes_rows {
        return;
    }
    type Wrong = fn(&World, bool, usize) -> Vec<u32>;
    let trials: [(&str, Wrong); 4] = [
        ("dispatch", wrong_rows),
        ("combine_by_rank", |world, not, round| {
            wrong_sums(world, CombineSum::Rank, not, round)
        }),
        ("combine_by_expert", |world, not, round| {
            wrong_sums(world, CombineSum::Expert, not, round)
        }),
        ("combine_by_expert_and_rank", |world, not, round| {
            wrong_sums(world, CombineSum::ExpertByRank, not, round)
        }),
    ];
    for (name, wrong) in trials {
        let name = format!("replays/experts/{name}");
        suite.add_at(2, &format!("{name}/cleared"), move |world| {
            let wrong = wrong(world, false, 0);
            assert!(wrong.is_empty(), "wrong in replays {wrong:?}");
        });
        suite.add_at(2, &format!("{name}/not_cleared"), move |world| {
            let tries = if world.backend.asks_callers() {
                TRIES
            } else {
                1
            };
            let shows = (0..tries).any(|round| !wrong(world, true, round).is_empty());
            assert!(
                shows,
                "nothing wrong in {tries} times {CONTROL_REPLAYS} replays"
            );
        });
    }
}
