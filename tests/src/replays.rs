//! Ten thousand replays with new data in each and stalls all over the place; and beside those of a gather-linear the same without the
//! credit that protects a chunk from the next replay, which must show.

mod experts;
pub mod linears;
mod low_latency;
mod sums;

use crate::{
    backend::Rank,
    check::{assert_kind, expect_fault},
    faults::{AMPLE, impatient},
    gather_linear::config,
    suite::{Suite, World},
};
use brigade_device::{Action, CommConfig, FaultKind, Inject, OverlapMode, Point, Step, Unguarded};
use linears::{Captured, Kind, N, ROWS};
use parking_lot::{Condvar, Mutex};
use rand::{Rng, rngs::StdRng};
use std::{sync::Arc, time::Duration};

const REPLAYS: u32 = 10_000;

/// The same in groups of so many ranks: fewer in large ones, whose replays take longer, most of all where there are more ranks than cores.
fn replays(size: usize) -> u32 {
    if size > 4 { REPLAYS / 10 } else { REPLAYS }
}

/// Replays within which a missing guard must show.
const CONTROL_REPLAYS: u32 = 100;

/// So many replays of captured graphs in turn, with the data of a day each: not one graph after the other, or each would find memory that
/// only its own kind was in.
fn in_turn<T>(rank: &Rank, graphs: &mut [T], check: impl FnMut(&mut T, u32)) {
    times_in_turn(replays(rank.size), graphs, check);
}

/// The same so many times.
fn times_in_turn<T>(times: u32, graphs: &mut [T], mut check: impl FnMut(&mut T, u32)) {
    assert_ne!(graphs.len() % 3, 0, "every third graph would have no turn");
    for day in 0..times {
        let which = (day as usize / 2 + day as usize) % graphs.len();
        check(&mut graphs[which], day);
    }
}

/// A control's replays: runs with the data of a day each, and is told whether the result was wrong.
type Days<'a> = &'a dyn Fn(&mut dyn FnMut(u32) -> bool);

/// Two ranks, and a control's replays under a hazard. Gives the days on which results were wrong.
fn wrong_days(
    world: &World,
    config: &CommConfig,
    hazard: Arc<dyn Inject>,
    replay: impl Fn(&Rank, Days<'_>) + Send + Sync + 'static,
) -> Vec<u32> {
    let wrong = Arc::new(Mutex::new(vec![]));
    let found = Arc::clone(&wrong);
    world.run_injected(config, hazard, move |rank| {
        replay(rank, &|is_wrong| {
            let wrong = (0..CONTROL_REPLAYS).filter(|&day| is_wrong(day));
            wrong.for_each(|day| found.lock().push(day));
        });
    });
    std::mem::take(&mut *wrong.lock())
}

/// A gather-linear whose chunks go through the ranks' halves.
fn ring(rng: &mut StdRng) -> Kind {
    Kind::gather(OverlapMode::Ring, rng.random())
}

/// A rank that does not come to a replay: the launch fails on all others, D is poisoned, and what the graph does behind the
/// call finds nothing of before. After a reset the same graph works.
fn without_a_rank(world: &World) {
    let mut rng = world.rng();
    let culprit = rng.random_range(0..world.size);
    let kind = ring(&mut rng);
    world.run(&impatient(), move |rank| {
        let mut captured = Captured::new(rank, kind);
        for day in [0, 2] {
            captured.check(rank, day);
            rank.meet();
            if rank.rank != culprit {
                let launched = captured
                    .launch(rank, day + 1, 0)
                    .and_then(|end| end.sync(AMPLE));
                let record = expect_fault(launched, "a launch");
                assert_kind(&record, FaultKind::Timeout, "a launch");
                assert_eq!(record.peer as usize, culprit, "{record}");
                let [d, gathered] = captured.outputs(rank);
                assert!(d.iter().all(|x| x.is_nan()), "D not poisoned: {d:?}");
                // Own rows are what they are; the others' are poisoned, or the copy behind the call was never made.
                let own = gathered.len() / rank.size;
                let own = rank.rank * own..(rank.rank + 1) * own;
                let others = |i: &usize| !own.contains(i);
                let good = |i: usize| gathered[i] == 0.0 || gathered[i].is_nan();
                assert!((0..gathered.len()).filter(others).all(good), "{gathered:?}");
            }
            rank.meet();
            rank.comm().reset(AMPLE).unwrap();
        }
        captured.check(rank, 4);
    });
}

/// The reader, which is held in every other replay, right after it saw the writer's chunk and before it reads it.
const READER: usize = 0;
/// The rank whose chunk it is.
const WRITER: usize = 1;

/// Holds the reader at the hazard until the writer has put the next chunk into the same place.
struct Hazard {
    /// Whether the writer goes ahead without the reader's credit.
    unguarded: bool,
    /// Longest that a rank is held.
    patience: Duration,
    uses: Mutex<Uses>,
    news: Condvar,
}

/// The last use of the half for which this has happened.
#[derive(Default)]
struct Uses {
    /// The reader has seen the writer's flag.
    seen: u32,
    /// The writer's chunk lies at the reader.
    written: u32,
}

impl Hazard {
    fn new(unguarded: bool, patience: Duration) -> Self {
        Self {
            unguarded,
            patience,
            uses: Mutex::default(),
            news: Condvar::new(),
        }
    }

    /// Whether the writer has put a chunk where the reader had seen the one before, and nothing since.
    fn was_met(&self) -> bool {
        let uses = self.uses.lock();
        uses.written > uses.seen && uses.seen > 0
    }

    fn is_held(epoch: u32) -> bool {
        epoch % 2 == 1
    }

    fn tell(&self, change: impl FnOnce(&mut Uses)) {
        change(&mut self.uses.lock());
        self.news.notify_all();
    }

    fn hold(&self, epoch: u32, until: impl Fn(&Uses) -> bool) {
        let mut uses = self.uses.lock();
        let held = self
            .news
            .wait_while_for(&mut uses, |uses| !until(uses), self.patience);
        let lost = self.unguarded && held.timed_out();
        assert!(
            !lost,
            "held in use {epoch} for more than {:?}",
            self.patience
        );
    }
}

impl Inject for Hazard {
    fn at(&self, step: &Step) -> Action {
        let Some(epoch) = step.place.map(|p| p.epoch) else {
            return Action::GoOn;
        };
        match (step.point, step.rank, step.peer) {
            (Point::Announce, WRITER, READER) => self.tell(|uses| uses.written = epoch),
            (Point::Read, READER, WRITER) if Self::is_held(epoch) => {
                self.tell(|uses| uses.seen = epoch);
                self.hold(epoch, |uses| uses.written > epoch);
            }
            (Point::Credit, WRITER, READER) if self.unguarded && Self::is_held(epoch - 1) => {
                // A reader that has not seen the last flag yet would find this use's in its place, and say so.
                self.hold(epoch, |uses| uses.seen == epoch - 1);
                // SAFETY: this credit is the reader's for the use in which it is held by now, until the chunk of this use
                // is written and the lock of `uses` has passed from the writer to it. So it reads after the writer wrote,
                // and not beside it. The credit for this use, the writer waits for before the next.
                return Action::Skip(unsafe { Unguarded::promise() });
            }
            _ => {}
        }
        Action::GoOn
    }
}

/// Two ranks, a reader held at the hazard in every other replay. Gives the replays in which its part of D that comes from
/// the writer was wrong.
fn wrong_replays(world: &World, unguarded: bool, patience: Duration) -> Vec<u32> {
    let hazard = Arc::new(Hazard::new(unguarded, patience));
    let kind = ring(&mut world.rng());
    wrong_days(world, &config(), hazard, move |rank, days| {
        let mut captured = Captured::new(rank, kind);
        days(&mut |day| {
            let [d, _] = captured.replay(rank, day);
            let mut is_wrong = false;
            for (from, part) in d.chunks(ROWS * N).enumerate() {
                let of = |day| kind.part(rank.rank, from, 2, day);
                if part == of(day) {
                    continue;
                }
                // What is wrong is of the next replay, and only where a guard was left out.
                assert_eq!((rank.rank, from), (READER, WRITER), "replay {day}");
                assert_eq!(part, of(day + 1), "replay {day}");
                is_wrong = true;
            }
            is_wrong
        });
    })
}

/// A reader that is slow at the worst moment still reads what it was sent.
fn with_credits(world: &World) {
    let wrong = wrong_replays(world, false, Duration::from_millis(1));
    assert!(wrong.is_empty(), "wrong elements in replays {wrong:?}");
}

/// Negative control: without the credit, the reader finds the next replay's rows.
///
/// Which guard protects what: within a call, flags keep a chunk from being read too early. Between calls that are made one
/// by one, halves alternate, and a rank that would write the same half again has met all others in the call between,
/// which they entered by letting go of the half: there the credit says nothing new. A captured call keeps its half. Then
/// the next replay writes where this one reads, and the writer may be in it already, since it meets the reader only as it
/// leaves: the reader's arrival in *this* replay is all that it has waited for. If the reader has not seen its flag yet, it
/// finds the next one in its place, which is a `Mismatch`. If it has, the credit alone protects the chunk, and to leave it
/// out is enough.
fn without_credits(world: &World) {
    let wrong = wrong_replays(world, true, AMPLE);
    assert!(
        !wrong.is_empty(),
        "no wrong element in {CONTROL_REPLAYS} replays"
    );
}

/// A rank lets go of its graph while all others wait for it.
fn let_go(world: &World) {
    let kind = ring(&mut world.rng());
    world.run(&impatient(), move |rank| {
        for last in 0..rank.size {
            let mut captured = Captured::new(rank, kind);
            captured.check(rank, last as u32);
            if rank.rank == last {
                // So that the others wait by then.
                rank.dawdle(3000);
                drop(captured);
            }
            rank.lease().barrier().unwrap();
            rank.stream.record().unwrap().sync(AMPLE).unwrap();
        }
    });
}

/// Adds the contracts.
pub fn add(suite: &mut Suite) {
    suite.add_from(2, "replays/without_a_rank", without_a_rank);
    suite.add_from(2, "replays/let_go", let_go);
    linears::add(suite);
    if !suite.backend().injects() {
        return;
    }
    sums::add(suite);
    experts::add(suite);
    low_latency::add(suite);
    let worlds = suite.backend().worlds();
    if worlds.contains(&2) {
        suite.add_at(2, "replays/with_credits", with_credits);
        suite.add_at(2, "replays/without_credits", without_credits);
    }
}
