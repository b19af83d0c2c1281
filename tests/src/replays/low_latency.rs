//! The same for the low-latency exchange: ten thousand replays under stalls, in which rows, weights and experts change, in both slots; and
//! the control without the credit that protects what lies in a half from the next replay.
//!
//! Its halves are chosen when a call is issued, on all devices, and its calls meet nobody. So in a captured half of an exchange, the way
//! there or the way back alone, the credit is all that keeps the writer from the next replay's rows: also on the host. There and back in
//! one graph say the same again: nobody sends the next replay's rows before those of this one came back.

use super::{
    CONTROL_REPLAYS, Days, Hazard, READER, WRITER,
    experts::{HELD, OLD, bias, of_day, returned},
    in_turn, wrong_days,
};
use crate::{
    backend::Rank,
    check::{assert_kind, expect_fault},
    experts::{
        case::Case,
        own::{Own, f32s, i32s},
    },
    faults::{AMPLE, impatient},
    inject::Jitter,
    low_latency::{
        came::{Kept, received},
        config, send,
    },
    suite::{Suite, World},
};
use brigade_device::{
    Action, Activation, Buffer, CombineSum, CommConfig, DataType, FaultKind, Fp8Cast, Inject,
    LowLatencyCombineParams, Operation, Output, Replay, Result, ScaleFormat, Step,
};
use rand::Rng;
use std::sync::Arc;

/// What is captured.
#[derive(Clone, Copy, Debug)]
struct Kind {
    tokens: usize,
    hidden: usize,
    second_slot: bool,
    cast: Option<Fp8Cast>,
    /// How it comes back, if it does.
    back: Option<CombineSum>,
    seed: u64,
}

impl Kind {
    fn case(self, size: usize, day: u32) -> Case {
        let sizes = (self.tokens, self.hidden);
        let case = of_day(self.seed, day, size, sizes, false);
        let cast = self.cast;
        Case { cast, ..case }
    }
}

/// A captured way there, and back if there is one. Experts add something of their rank's to each row.
struct Captured {
    graph: Box<dyn Replay>,
    kind: Kind,
    own: Own,
    there: Kept,
    d: Buffer,
}

impl Captured {
    fn new(rank: &Rank, kind: Kind) -> Self {
        let case = kind.case(rank.size, 0);
        let own = Own::of(rank, &case);
        let bias = rank.upload_f32(&bias(rank.rank, kind.hidden));
        let d = rank.poisoned(DataType::F32, &[kind.tokens, kind.hidden]);
        let mut to = d.clone();
        let mut exchange = rank.low_latency();
        let (a, b) = exchange.slots();
        let slot = if kind.second_slot { b } else { a };
        let by_rank = kind.back == Some(CombineSum::ExpertByRank);
        let mut kept = None;
        let work = &mut || {
            let mut lease = rank.lease();
            let there = send(&mut lease, slot, (&own, &case), by_rank)?.receive(&mut lease)?;
            if let Some(sum) = kind.back {
                let (on, of_rank) = (&rank.stream, Some(bias.view()));
                let output = Output::Allocate(DataType::F32);
                let made = (rank.device).bias_activation(
                    on,
                    there.rows(),
                    of_rank,
                    Activation::None,
                    output,
                )?;
                let p = LowLatencyCombineParams {
                    rows: made.as_ref().unwrap().view(),
                    sum,
                    cast: None,
                    weights: own.weights.as_ref().filter(|_| !by_rank).map(Buffer::view),
                };
                let pending = lease.low_latency_combine(&there, p)?;
                pending.receive(&mut lease, Output::Into(to.view_mut()))?;
            }
            kept = Some(Kept::of(&there));
            Ok(())
        };
        Self {
            graph: rank.device.capture(&rank.stream, work).unwrap(),
            kind,
            own,
            there: kept.unwrap(),
            d,
        }
    }

    /// Runs with what is sent on a day.
    fn replay(&mut self, rank: &Rank, case: &Case) -> Result<()> {
        let (device, on) = (&rank.device, &rank.stream);
        for output in self.there.buffers().chain([&self.d]) {
            device.fill(on, output.clone().view_mut(), OLD).unwrap();
        }
        self.own.write(rank, case);
        self.graph.launch(on)?.sync(AMPLE)
    }

    /// Runs with what is sent on a day, and asserts what comes out.
    fn check(&mut self, rank: &Rank, day: u32) {
        let case = self.kind.case(rank.size, day);
        self.replay(rank, &case).unwrap();
        self.there.check(rank, &case);
        if let Some(sum) = self.kind.back {
            let [want, _] = returned(&case, rank.rank, sum);
            let got = f32s(rank, &self.d);
            assert_eq!(got, want, "sums of replay {day}: {:?}", self.kind);
        }
    }
}

/// What comes of every row in every replay is that of its day, wherever ranks are held up: graphs of the way there, with a cast and
/// without, and of both sums, in turn and through the memory of both slots.
fn under_stalls(world: &World) {
    let mut rng = world.rng();
    let jitter = Jitter::new(&mut rng, 20, 200);
    let cast = Fp8Cast {
        format: ScaleFormat::F32,
        column_major: false,
    };
    let mut kinds = vec![];
    for (cast, back) in [
        (None, Some(CombineSum::Expert)),
        (None, None),
        (None, Some(CombineSum::ExpertByRank)),
        (Some(cast), None),
    ] {
        for second_slot in [false, true] {
            kinds.push(Kind {
                tokens: 3 + kinds.len() % 4,
                hidden: 16,
                second_slot,
                cast,
                back,
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

/// Tokens of a rank and columns, where the reader is held.
const TOKENS: usize = 6;
const HIDDEN: usize = 64;

/// Wrong days under the hazard in calls of one operation; what others do is not disturbed. Without the guard, what is waited for in vain is so since
/// it was written over.
fn wrong_of(
    of: Operation,
    world: &World,
    unguarded: bool,
    replay: impl Fn(&Rank, Days<'_>) + Send + Sync + 'static,
) -> Vec<u32> {
    let hazard = Arc::new(Hazard::new(unguarded, if unguarded { AMPLE } else { HELD }));
    let asked = Arc::clone(&hazard);
    let inject = move |step: &Step| match step.operation == of {
        true => Inject::at(&*asked, step),
        false => Action::GoOn,
    };
    let wrong = wrong_days(world, &config_of(unguarded), Arc::new(inject), replay);
    assert!(!unguarded || hazard.was_met(), "nothing was written over");
    wrong
}

/// Rows of each expert: source, token and entries, and the row itself.
type Rows = Vec<Vec<([i32; 3], Vec<u8>)>>;

/// What the reader must get.
fn sent(case: &Case) -> Rows {
    let each = case.hidden * case.dtype.bytes();
    let row = |named: [i32; 3]| {
        let [source, token, _] = named.map(|x| x as usize);
        (named, case.rows[source][token * each..][..each].to_vec())
    };
    let of_expert = |rows: Vec<[i32; 3]>| rows.into_iter().map(row).collect();
    received(case, READER).into_iter().map(of_expert).collect()
}

/// What it has got.
fn got(rank: &Rank, there: &Kept) -> Rows {
    let (rows, sources) = (rank.raw(there.rows.view()), i32s(rank, &there.sources));
    let (room, each) = (there.rows.shape().dims()[1], HIDDEN * 4);
    let row = |at: usize| {
        let named = [0, 1, 2].map(|i| sources[at * 3 + i]);
        (named, rows[at * each..][..each].to_vec())
    };
    let counts = i32s(rank, &there.counts).into_iter().enumerate();
    counts
        .map(|(expert, count)| {
            (0..count as usize)
                .map(|i| row(expert * room + i))
                .collect()
        })
        .collect()
}

/// Calls without a guard have a short deadline: what waits in vain there is to be told so.
fn config_of(unguarded: bool) -> CommConfig {
    match unguarded {
        true => CommConfig {
            deadline: impatient().deadline,
            ..config()
        },
        false => config(),
    }
}

/// Whether a replay without a guard waited in vain: what tells of rows one by one says which replay's they are, so a reader does not take
/// the next one's for those that are gone, nor does the writer get on without the reader.
fn in_vain(unguarded: bool, replayed: Result<()>) -> bool {
    if !unguarded || replayed.is_ok() {
        replayed.unwrap();
        return false;
    }
    let record = expect_fault(replayed, "a replay");
    assert_kind(&record, FaultKind::Timeout, "a replay");
    true
}

/// Two ranks, a reader held in every other replay of the way there, right after it saw the writer's flag. Gives the replays in which what
/// it got was wrong, or in which it waited in vain, of which there is one.
fn wrong_rows(world: &World, unguarded: bool) -> Vec<u32> {
    let kind = Kind {
        tokens: TOKENS,
        hidden: HIDDEN,
        second_slot: false,
        cast: None,
        back: None,
        seed: world.rng().random(),
    };
    let of = Operation::LowLatencyDispatch;
    wrong_of(of, world, unguarded, move |rank, days| {
        let mut captured = Captured::new(rank, kind);
        let mut stopped = false;
        rank.meet();
        days(&mut |day| {
            if stopped {
                return false;
            }
            let case = kind.case(2, day);
            stopped = in_vain(unguarded, captured.replay(rank, &case));
            if stopped {
                return rank.rank == READER;
            }
            if rank.rank != READER {
                captured.there.check(rank, &case);
                return false;
            }
            let got = got(rank, &captured.there);
            if got == sent(&case) {
                return false;
            }
            // What is wrong is the writer's, of the next replay: its rows, and where they go.
            let (mut mixed, next) = (case, kind.case(2, day + 1));
            mixed.ids[WRITER].clone_from(&next.ids[WRITER]);
            mixed.rows[WRITER].clone_from(&next.rows[WRITER]);
            assert!(got == sent(&mixed), "replay {day}");
            true
        });
        if stopped {
            rank.comm().reset(AMPLE).unwrap();
        }
    })
}

/// What a rank's experts make of the rows that they got, each in its place.
fn made(case: &Case, me: usize) -> Vec<f32> {
    let room = case.max_tokens * case.size;
    let (each, added) = (case.hidden, bias(me, case.hidden));
    let mut all = vec![f32::NAN; case.slots()[me] * room * each];
    for (expert, rows) in received(case, me).into_iter().enumerate() {
        for (i, [source, token, _]) in rows.into_iter().enumerate() {
            let rows: Vec<f32> = bytemuck::pod_collect_to_vec(&case.rows[source as usize]);
            let row = rows[token as usize * each..][..each].iter().zip(&added);
            let to = &mut all[(expert * room + i) * each..][..each];
            to.iter_mut().zip(row).for_each(|(to, (x, b))| *to = x + b);
        }
    }
    all
}

/// Of the reader's sums, what one rank's experts add to them.
fn part(case: &Case, owner: usize, sum: CombineSum) -> Vec<f32> {
    let mut only = case.clone();
    for i in 0..only.ids[READER].len() {
        let slot = case.slot(READER, i / case.k, i % case.k);
        if slot.is_some_and(|slot| case.owner(slot).0 != owner) {
            only.ids[READER][i] = -1;
        }
    }
    let [d, _] = returned(&only, READER, sum);
    d
}

/// The same on the way back alone: what experts make of rows is new in every replay, and who gets it is not.
fn wrong_sums(world: &World, sum: CombineSum, unguarded: bool) -> Vec<u32> {
    let seed = world.rng().random();
    let operation = Operation::LowLatencyCombine;
    wrong_of(operation, world, unguarded, move |rank, days| {
        let of = |day| of_day(seed, day, 2, (TOKENS, HIDDEN), true);
        let (first, by_rank) = (of(0), sum == CombineSum::ExpertByRank);
        let case = |day| Case {
            rows: of(day).rows,
            ..first.clone()
        };
        let own = Own::of(rank, &first);
        let mut exchange = rank.low_latency();
        let mut lease = rank.lease();
        rank.meet();
        let pending = send(&mut lease, exchange.slots().0, (&own, &first), by_rank).unwrap();
        let there = pending.receive(&mut lease).unwrap();
        drop(lease);
        let mut rows = rank.poisoned(DataType::F32, there.rows().shape().dims());
        let mut d = rank.poisoned(DataType::F32, &[TOKENS, HIDDEN]);
        let mut to = d.clone();
        let graph = rank.device.capture(&rank.stream, &mut || {
            let mut lease = rank.lease();
            let p = LowLatencyCombineParams {
                rows: rows.view(),
                sum,
                cast: None,
                weights: own.weights.as_ref().filter(|_| !by_rank).map(Buffer::view),
            };
            let pending = lease.low_latency_combine(&there, p)?;
            pending
                .receive(&mut lease, Output::Into(to.view_mut()))
                .map(drop)
        });
        let graph = graph.unwrap();
        let mut stopped = false;
        rank.meet();
        days(&mut |day| {
            if stopped {
                return false;
            }
            let (device, on, case, next) = (&rank.device, &rank.stream, case(day), case(day + 1));
            let new = made(&case, rank.rank);
            let bytes = bytemuck::cast_slice(&new);
            device.write(on, rows.view_mut(), bytes).unwrap();
            device.fill(on, d.view_mut(), OLD).unwrap();
            let replayed = graph.launch(on).and_then(|end| end.sync(AMPLE));
            stopped = in_vain(unguarded, replayed);
            if stopped {
                return rank.rank == READER;
            }
            let (got, [want, _]) = (f32s(rank, &d), returned(&case, rank.rank, sum));
            if got == want {
                return false;
            }
            assert_eq!(rank.rank, READER, "replay {day}");
            let parts = [part(&case, READER, sum), part(&next, WRITER, sum)];
            let mixed = (0..want.len()).map(|i| parts[0][i] + parts[1][i]);
            assert!(got.into_iter().eq(mixed), "replay {day}");
            true
        });
        if stopped {
            rank.comm().reset(AMPLE).unwrap();
        }
    })
}

/// Adds the contracts.
pub(super) fn add(suite: &mut Suite) {
    let worlds = suite.backend().worlds();
    if !suite.backend().engines().dispatches {
        return;
    }
    for &size in worlds.iter().filter(|size| matches!(size, 2..=4 | 8)) {
        suite.add_at(size, "replays/low_latency/under_stalls", under_stalls);
    }
    if !worlds.contains(&2) {
        return;
    }
    type Wrong = fn(&World, bool) -> Vec<u32>;
    let trials: [(&str, Wrong); 3] = [
        ("dispatch", wrong_rows),
        ("combine_by_expert", |world, unguarded| {
            wrong_sums(world, CombineSum::Expert, unguarded)
        }),
        ("combine_by_expert_and_rank", |world, unguarded| {
            wrong_sums(world, CombineSum::ExpertByRank, unguarded)
        }),
    ];
    for (name, wrong) in trials {
        let name = format!("replays/low_latency/{name}");
        suite.add_at(2, &format!("{name}/with_credits"), move |world| {
            let wrong = wrong(world, false);
            assert!(wrong.is_empty(), "wrong in replays {wrong:?}");
        });
        suite.add_at(2, &format!("{name}/without_credits"), move |world| {
            let wrong = wrong(world, true);
            assert!(
                !wrong.is_empty(),
                "nothing wrong in {CONTROL_REPLAYS} replays"
            );
        });
    }
}
