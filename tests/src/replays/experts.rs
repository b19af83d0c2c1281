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
        own::{Own, check, f32s, i32s},
        transports,
    },
    faults::AMPLE,
    inject::Jitter,
    suite::{Suite, World},
};
use brigade_device::{
    Activation, Arrangement, Buffer, CombineParams, CombineSum, DataType, Dispatched, ExpertLayout,
    Inject, Output, Replay, Transport,
};
use rand::{Rng, SeedableRng, rngs::StdRng};
use std::{collections::BTreeSet, sync::Arc, time::Duration};

/// Experts of a token, and of all.
const K: usize = 3;
const EXPERTS: usize = 7;
/// Of tokens that go to both of two ranks, which of the experts is the writer's.
const OF_WRITER: usize = 1;

/// What every byte of an output is before a replay: no number that comes out, and not -1.
pub(super) const OLD: u8 = 0x7F;

/// What is captured.
#[derive(Clone, Copy, Debug)]
struct Kind {
    tokens: usize,
    hidden: usize,
    arrangement: Arrangement,
    there: Transport,
    back: Option<(CombineSum, Transport)>,
    /// Every token goes to all of two ranks, every day.
    to_all: bool,
    seed: u64,
}

impl Kind {
    /// Most rows of a rank.
    fn room(self, size: usize) -> Option<usize> {
        match self.arrangement {
            Arrangement::BySource => None,
            Arrangement::Dense => Some(size * self.tokens),
            Arrangement::ByExpert { alignment } => {
                Some(size * self.tokens * K + EXPERTS * (alignment - 1))
            }
        }
    }

    /// What all ranks send on a day.
    fn case(self, size: usize, day: u32) -> Case {
        let sizes = (self.tokens, self.hidden);
        let mut case = of_day(self.seed, day, size, sizes, self.to_all);
        case.arrangement = self.arrangement;
        case.by.there = Some(self.there);
        case.by.back = self.back.map(|(_, by)| by);
        case.room = self.room(size);
        case
    }
}

/// What all ranks send on a day: small whole numbers, so that sums are exact. So many tokens of each, and columns.
pub(super) fn of_day(
    seed: u64,
    day: u32,
    size: usize,
    (tokens, hidden): (usize, usize),
    to_all: bool,
) -> Case {
    // What is beside rows is of the same kinds every day.
    let any = &mut StdRng::seed_from_u64(seed);
    let mut case = Case::random(any, size, (tokens, hidden, K, EXPERTS));
    let mut rng = StdRng::seed_from_u64(seed.wrapping_add(day.into()));
    (case.dtype, case.wide) = (DataType::F32, false);
    case = case.with_tokens(&mut rng, &vec![tokens; size]);
    let some = rng.random_range(0..size);
    match rng.random_range(0..8) {
        _ if to_all => {
            let of_two = [0, EXPERTS as i64 - 1, -1];
            case.ids = vec![of_two.repeat(tokens); size];
        }
        // Now and then a rank's rows go nowhere, or all to one.
        0 => case.ids[some].fill(-1),
        1 => case.ids[some].fill(rng.random_range(0..EXPERTS as i64)),
        _ => {}
    }
    for rows in &mut case.rows {
        let values = (0..rows.len() / 4).map(|_| rng.random_range(-500i16..500));
        *rows = values.flat_map(|x| f32::from(x).to_ne_bytes()).collect();
    }
    for weight in case.weights.iter_mut().flatten().flatten() {
        *weight = f32::from(rng.random_range(1i8..=4));
    }
    case
}

/// What a rank's experts add to every row.
pub(super) fn bias(rank: usize, hidden: usize) -> Vec<f32> {
    (0..hidden)
        .map(|c| (1000 * (rank + 1) + c) as f32)
        .collect()
}

/// What a rank gets back: sums, and the weights that its rows went with.
pub(super) fn returned(case: &Case, me: usize, sum: CombineSum) -> [Vec<f32>; 2] {
    let rows: Vec<f32> = bytemuck::pod_collect_to_vec(&case.rows[me]);
    let own = &case.weights.as_ref().unwrap()[me];
    let (mut d, mut back) = (vec![0.0; rows.len()], vec![0.0; own.len()]);
    for token in 0..case.tokens(me) {
        let mut ranks = BTreeSet::new();
        for entry in 0..K {
            let Some(slot) = case.slot(me, token, entry) else {
                continue;
            };
            let (owner, weight) = (case.owner(slot).0, own[token * K + entry]);
            back[token * K + entry] = weight;
            let factor = match sum {
                CombineSum::Rank if !ranks.insert(owner) => continue,
                CombineSum::Rank => 1.0,
                CombineSum::Expert | CombineSum::ExpertByRank => weight,
            };
            for (c, added) in bias(owner, case.hidden).into_iter().enumerate() {
                let at = token * case.hidden + c;
                d[at] += factor * (rows[at] + added);
            }
        }
    }
    [d, back]
}

/// A captured way there, and back if there is one. Experts add something of their rank's to each row.
struct Captured {
    graph: Box<dyn Replay>,
    kind: Kind,
    own: Own,
    layout: ExpertLayout,
    /// Its rows are a copy, if they stay in place: those are gone at the end.
    there: Dispatched,
    d: Buffer,
    back: Option<Buffer>,
}

impl Captured {
    fn new(rank: &Rank, kind: Kind) -> Self {
        let case = kind.case(rank.size, 0);
        let own = Own::of(rank, &case);
        let bias = rank.upload_f32(&bias(rank.rank, kind.hidden));
        let d = rank.poisoned(DataType::F32, &[kind.tokens, kind.hidden]);
        let mut to = d.clone();
        let copy = rank.poisoned(DataType::F32, &[rank.size, kind.tokens, kind.hidden]);
        let mut left = None;
        let work = &mut || {
            let mut lease = rank.lease();
            let layout = lease.expert_layout(own.routing(&case))?;
            let mut there = own.dispatch(&mut lease, &case)?;
            let in_place = kind.there == Transport::InPlace;
            let came = there.rows.clone();
            if in_place {
                rank.device
                    .copy(&rank.stream, copy.clone().view_mut(), came.view())?;
                there.rows = copy.clone();
            }
            let mut back = None;
            if let Some((sum, choice)) = kind.back {
                let mut place = came.clone();
                let made = rank.device.bias_activation(
                    &rank.stream,
                    there.rows.view(),
                    Some(bias.view()),
                    Activation::None,
                    match in_place {
                        true => Output::Into(place.view_mut()),
                        false => Output::Allocate(DataType::F32),
                    },
                )?;
                // None goes back with rows that stay in place.
                let weights = there.weights.as_ref().filter(|_| !in_place);
                let combined = lease.combine(CombineParams {
                    rows: made.as_ref().unwrap_or(&came).view(),
                    handle: &there.handle,
                    sum,
                    weights: weights.map(Buffer::view),
                    biases: &[],
                    output: Output::Into(to.view_mut()),
                    waits: None,
                    choice: Some(choice),
                })?;
                back = combined.weights;
            }
            left = Some((layout, there, back));
            Ok(())
        };
        let graph = rank.device.capture(&rank.stream, work).unwrap();
        let (layout, there, back) = left.unwrap();
        Self {
            graph,
            kind,
            own,
            layout,
            there,
            d,
            back,
        }
    }

    /// All that a replay writes.
    fn outputs(&self) -> impl Iterator<Item = &Buffer> {
        let parts = self.there.handle.parts();
        [&self.there.rows, &self.d]
            .into_iter()
            .chain(&self.there.beside)
            .chain(&self.back)
            .chain(self.layout.buffers())
            .chain(parts.buffers())
    }

    /// Runs with what is sent on a day.
    fn replay(&mut self, rank: &Rank, case: &Case) {
        let (device, on, me) = (&rank.device, &rank.stream, rank.rank);
        for output in self.outputs() {
            let mut to = output.clone();
            device.fill(on, to.view_mut(), OLD).unwrap();
        }
        let ids: Vec<i32> = case.ids[me].iter().map(|&id| id as i32).collect();
        let weights = &case.weights.as_ref().unwrap()[me];
        let own = &mut self.own;
        for (to, bytes) in [
            (&mut own.rows, &case.rows[me][..]),
            (&mut own.ids, bytemuck::cast_slice(&ids)),
            (own.weights.as_mut().unwrap(), bytemuck::cast_slice(weights)),
        ] {
            device.write(on, to.view_mut(), bytes).unwrap();
        }
        for (to, from) in own.beside.iter_mut().zip(&case.beside) {
            device.write(on, to.view_mut(), &from.of_ranks[me]).unwrap();
        }
        self.graph.launch(on).unwrap().sync(AMPLE).unwrap();
    }

    /// Runs with what is sent on a day, and asserts what comes out.
    fn check(&mut self, rank: &Rank, day: u32) {
        let case = self.kind.case(rank.size, day);
        self.replay(rank, &case);
        check(rank, &case, &self.there);
        let known = self.there.handle.layout().buffers();
        for (asked, known) in self.layout.buffers().into_iter().zip(known) {
            assert_eq!(
                i32s(rank, asked),
                i32s(rank, known),
                "layout of replay {day}"
            );
        }
        if let Some((sum, _)) = self.kind.back {
            let [d, weights] = returned(&case, rank.rank, sum);
            let what = format!("what came back in replay {day}: {:?}", self.kind);
            assert_eq!(f32s(rank, &self.d), d, "{what}");
            if let Some(back) = &self.back {
                assert_eq!(f32s(rank, back), weights, "weights of {what}");
            }
        }
    }
}

/// What comes of every row in every replay is that of its day, wherever ranks are held up: graphs of all transports, arrangements and
/// sums, and of several lengths, in turn and through the same memory.
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
                to_all: false,
                seed: rng.random(),
            });
        }
    }
    world.run_injected(&config(), Arc::new(jitter), move |rank| {
        let mut graphs: Vec<_> = kinds
            .iter()
            .map(|&kind| Captured::new(rank, kind))
            .collect();
        in_turn(rank, &mut graphs, |graph, day| graph.check(rank, day));
    });
}

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
