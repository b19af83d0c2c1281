//! How long a rank waited for each other one, added up over calls.

use super::{
    case::{By, Case},
    config,
    own::Own,
};
use crate::{
    backend::Rank,
    check::{assert_kind, expect_fault, expect_invalid},
    faults::{AMPLE, DEADLINE, GRACE, assert_in_time},
    suite::{Suite, World},
};
use brigade_device::{
    Action, Arrangement, Buffer, CombineParams, CombineSum, Combined, CommConfig, DataType,
    Dispatched, FaultKind, Inject, Lease, Output, Point, Result, Step, Transport,
};
use rand::Rng;
use std::{
    sync::Arc,
    time::{Duration, Instant},
};

/// How late a rank is at each of its calls.
const STALL: Duration = Duration::from_millis(10);

/// Calls that are counted at a time.
pub const ROUNDS: u32 = 5;

/// Adds a contract of waits, where hooks make ranks late: in small groups, since it takes its time.
pub fn add(suite: &mut Suite, name: &str, contract: impl Fn(&World) + Clone + Send + 'static) {
    let (injects, worlds) = (suite.backend().injects(), suite.backend().worlds());
    for size in worlds
        .into_iter()
        .filter(|size| injects && (2..=3).contains(size))
    {
        suite.add_at(size, name, contract.clone());
    }
}

/// Some rank, and a hook that makes it late at every call.
pub fn late_rank(world: &World) -> (usize, Arc<dyn Inject>) {
    let late = world.rng().random_range(0..world.size);
    let hook = move |step: &Step| match step.point {
        Point::Begin if step.rank == late => Action::Stall(STALL),
        _ => Action::GoOn,
    };
    (late, Arc::new(hook))
}

/// Where waits are added up, and what is there: more than an i32 holds.
pub struct Waits {
    pub buffer: Buffer,
    had: Vec<i64>,
}

impl Waits {
    pub fn new(rank: &Rank) -> Self {
        let had: Vec<i64> = (0..rank.size as i64).map(|r| (1 << 40) + r).collect();
        let bytes = bytemuck::cast_slice(&had);
        Self {
            buffer: rank.upload_bytes(DataType::I64, &[rank.size], bytes),
            had,
        }
    }

    /// What was added for each rank since the last look. Nothing is for this one.
    pub fn more(&mut self, rank: &Rank) -> Vec<i64> {
        let now: Vec<i64> = bytemuck::pod_collect_to_vec(&rank.raw(self.buffer.view()));
        let more: Vec<i64> = now
            .iter()
            .zip(&self.had)
            .map(|(now, had)| now - had)
            .collect();
        assert!(more.iter().all(|&ns| ns >= 0), "{more:?}");
        assert_eq!(more[rank.rank], 0, "waits for itself: {more:?}");
        self.had = now;
        more
    }

    /// Whether `late`, which was late at `ROUNDS` calls since the last look, is who was waited for.
    pub fn show(&mut self, rank: &Rank, late: usize) -> bool {
        let more = self.more(rank);
        let half = i64::try_from((STALL * ROUNDS / 2).as_nanos()).unwrap();
        let others = (0..rank.size).filter(|&r| r != late).map(|r| more[r]);
        let others = others.max().unwrap_or(0);
        rank.rank == late || more[late] >= half && more[late] > others
    }
}

/// Some attempts, all by all ranks, until each has seen what it should: on a busy machine others are late, too.
pub fn try_all(rank: &Rank, what: &str, mut attempt: impl FnMut() -> bool) {
    const ATTEMPTS: usize = 10;
    let mut seen_by_all = || {
        let seen = attempt();
        rank.share(&[seen.into()]).iter().all(|seen| seen == &[1])
    };
    let seen = (0..ATTEMPTS).any(|_| seen_by_all());
    assert!(seen, "{what} do not show who was late");
}

/// What experts made, unless rows stayed in place.
fn combine(
    lease: &mut Lease<'_>,
    (case, there, sum): (&Case, &Dispatched, CombineSum),
    made: &Buffer,
    waits: Option<&Buffer>,
) -> Result<Combined> {
    let choice = case.by.back;
    let rows = match choice {
        Some(Transport::InPlace) => &there.rows,
        _ => made,
    };
    let mut waits = waits.cloned();
    lease.combine(CombineParams {
        rows: rows.view(),
        handle: &there.handle,
        sum,
        weights: None,
        biases: &[],
        output: Output::Allocate(case.dtype),
        waits: waits.as_mut().map(Buffer::view_mut),
        choice,
    })
}

/// Call by call, and replay by replay.
pub fn waits(world: &World, by: By) {
    let mut rng = world.rng();
    let (late, hook) = late_rank(world);
    let mut arrangements = vec![(Arrangement::BySource, CombineSum::Rank)];
    if by.there != Some(Transport::InPlace) {
        arrangements.push((Arrangement::ByExpert { alignment: 1 }, CombineSum::Expert));
    }
    let cases: Vec<_> = arrangements
        .into_iter()
        .map(|(arrangement, sum)| {
            let mut case = Case::random(&mut rng, world.size, (12, 16, 3, 7));
            case.dtype = DataType::BF16;
            case.arrangement = arrangement;
            // A graph needs it.
            let known = 12 * 3 * world.size;
            case.room = (arrangement != Arrangement::BySource).then_some(known);
            (case.with_rows(&mut rng).by(by), sum)
        })
        .collect();
    world.run_injected(&config(), hook, move |rank| {
        for &(ref case, sum) in &cases {
            let mut own = Own::of(rank, case);
            let mut lease = rank.lease();
            // What is loaded first takes its time.
            let there = own.dispatch(&mut lease, case).unwrap();
            let shape = there.handle.shape(case.hidden).unwrap();
            let made = rank.poisoned(case.dtype, shape.dims());
            combine(&mut lease, (case, &there, sum), &made, None).unwrap();
            let (mut gone, mut back) = (Waits::new(rank), Waits::new(rank));
            own.waits = Some(gone.buffer.clone());
            try_all(rank, "calls", || {
                for _ in 0..ROUNDS {
                    let there = own.dispatch(&mut lease, case).unwrap();
                    combine(&mut lease, (case, &there, sum), &made, Some(&back.buffer)).unwrap();
                }
                gone.show(rank, late) & back.show(rank, late)
            });
            drop(lease);
            let graph = rank.device.capture(&rank.stream, &mut || {
                let mut lease = rank.lease();
                let there = own.dispatch(&mut lease, case)?;
                combine(&mut lease, (case, &there, sum), &made, Some(&back.buffer)).map(drop)
            });
            let graph = graph.unwrap();
            try_all(rank, "replays", || {
                for _ in 0..ROUNDS {
                    graph.launch(&rank.stream).unwrap();
                }
                gone.show(rank, late) & back.show(rank, late)
            });
            // Who has nothing to count gets nothing added.
            let mut lease = rank.lease();
            own.waits = None;
            let there = own.dispatch(&mut lease, case).unwrap();
            combine(&mut lease, (case, &there, sum), &made, None).unwrap();
            for waits in [&mut gone, &mut back] {
                assert_eq!(waits.more(rank), vec![0; rank.size]);
            }
            // What cannot be added to is named before anything is sent.
            for (field, wrong) in [
                ("waits.dtype", rank.poisoned(DataType::I32, &[rank.size])),
                (
                    "waits.shape",
                    rank.poisoned(DataType::I64, &[rank.size + 1]),
                ),
            ] {
                let back = combine(&mut lease, (case, &there, sum), &made, Some(&wrong));
                assert_eq!(expect_invalid(back, field), field);
                own.waits = Some(wrong);
                let result = own.dispatch(&mut lease, case);
                assert_eq!(expect_invalid(result, field), field);
            }
            lease.barrier().unwrap();
        }
    });
}

/// A rank never comes for wide rows that go back, many for a budget: all others give up, and those that count waits end as the rest do.
pub fn never_comes(world: &World, by: By) {
    const TOKENS: usize = 256;
    let mut rng = world.rng();
    let culprit = rng.random_range(0..world.size);
    let cases = [
        (Arrangement::BySource, CombineSum::Rank),
        (
            Arrangement::ByExpert { alignment: 1 },
            CombineSum::ExpertByRank,
        ),
    ]
    .map(|(arrangement, sum)| {
        let mut case = Case::random(&mut rng, world.size, (TOKENS, 1040, 2, 8));
        (case.dtype, case.arrangement) = (DataType::BF16, arrangement);
        let case = case.with_tokens(&mut rng, &vec![TOKENS; world.size]).by(by);
        (case, sum)
    });
    let config = CommConfig {
        deadline: DEADLINE,
        first_deadline: AMPLE,
        sm_budget: Some(12),
        ..config()
    };
    world.run(&config, move |rank| {
        for ((case, sum), counts) in cases.iter().flat_map(|case| [(case, true), (case, false)]) {
            let own = Own::of(rank, case);
            let waits = Waits::new(rank);
            let waits = counts.then_some(&waits.buffer);
            let mut lease = rank.lease();
            let there = own.dispatch(&mut lease, case).unwrap();
            let shape = there.handle.shape(case.hidden).unwrap();
            let made = rank.poisoned(case.dtype, shape.dims());
            combine(&mut lease, (case, &there, *sum), &made, waits).unwrap();
            lease.barrier().unwrap();
            drop(lease);
            rank.meet();
            if rank.rank == culprit {
                rank.meet();
                expect_fault(rank.comm().check(), "who never came");
            } else {
                let start = Instant::now();
                let mut lease = rank.lease();
                let back = combine(&mut lease, (case, &there, *sum), &made, waits).map(drop);
                drop(lease);
                let record = expect_fault(rank.settle(back), "without a peer");
                assert_in_time(start, DEADLINE + GRACE, "without a peer");
                assert_kind(&record, FaultKind::Timeout, "without a peer");
                assert_eq!(record.peer as usize, culprit, "{record}");
                rank.meet();
            }
            rank.comm().reset(AMPLE).unwrap();
        }
    });
}
