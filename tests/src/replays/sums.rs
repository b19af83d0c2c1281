//! The same for all-reduces that push: ten thousand replays under stalls, and the control in which a buffer that was read is
//! not emptied before it is pushed into again.

use super::{CONTROL_REPLAYS, in_turn, wrong_days};
use crate::{
    all_reduce::pushing,
    backend::Rank,
    faults::AMPLE,
    gather_linear::config,
    inject::Jitter,
    suite::{Suite, World},
};
use brigade_device::{
    Action, AllReduceAlgorithm, AllReduceParams, Buffer, DataType, DeviceExt, Inject, Point,
    ReduceOp, Replay, Step, Unguarded,
};
use parking_lot::{Condvar, Mutex};
use std::{sync::Arc, time::Duration};

/// Own values of a rank on a day: small whole numbers, so that sums are exact, and no two days or ranks are alike.
fn values(rank: usize, day: u32, len: usize) -> Vec<f32> {
    let first = 8 * day + rank as u32;
    (0..len).map(|i| (first + 1000 * i as u32) as f32).collect()
}

/// What all ranks get, if rank `r` was on the day `day(r)`.
fn sums(size: usize, day: impl Fn(usize) -> u32, len: usize) -> Vec<f32> {
    let ranks: Vec<_> = (0..size).map(|r| values(r, day(r), len)).collect();
    (0..len).map(|i| ranks.iter().map(|v| v[i]).sum()).collect()
}

/// A captured all-reduce.
struct Captured {
    graph: Box<dyn Replay>,
    x: Buffer,
    d: Buffer,
    len: usize,
}

impl Captured {
    fn new(rank: &Rank, choice: AllReduceAlgorithm, len: usize) -> Self {
        let x = rank.upload_f32(&values(rank.rank, 0, len));
        let d = rank.poisoned(DataType::F32, &[len]);
        let mut to = d.clone();
        let work = &mut || {
            rank.lease()
                .all_reduce(AllReduceParams {
                    data: to.view_mut(),
                    from: Some(x.view()),
                    op: ReduceOp::Sum,
                    choice: Some(choice),
                })
                .map(drop)
        };
        let graph = rank.device.capture(&rank.stream, work).unwrap();
        Self { graph, x, d, len }
    }

    /// Runs with the values of a day.
    fn replay(&mut self, rank: &Rank, day: u32) -> Vec<f32> {
        let (device, on) = (&rank.device, &rank.stream);
        let mine = values(rank.rank, day, self.len);
        let bytes = bytemuck::cast_slice(&mine);
        device.write(on, self.x.view_mut(), bytes).unwrap();
        device.fill(on, self.d.view_mut(), 0xFF).unwrap();
        self.graph.launch(on).unwrap().sync(AMPLE).unwrap();
        device.download(on, self.d.view()).unwrap()
    }
}

/// Every sum of every replay is that of its day, wherever ranks are held up: graphs of all algorithms and of several lengths
/// in turn, through the same buffers.
fn under_stalls(world: &World) {
    let jitter = Jitter::new(&mut world.rng(), 20, 200);
    let choices = pushing(world.backend.engines());
    world.run_injected(&config(), Arc::new(jitter), move |rank| {
        let all = choices.iter().flat_map(|c| [7, 50].map(|len| (c.1, len)));
        let mut graphs: Vec<_> = all.map(|(c, len)| Captured::new(rank, c, len)).collect();
        in_turn(rank, &mut graphs, |graph, day| {
            let got = graph.replay(rank, day);
            assert_eq!(got, sums(rank.size, |_| day, graph.len), "replay {day}");
        });
    });
}

/// The rank whose buffers are not emptied, where that guard is left out.
pub(super) const READER: usize = 0;
/// The rank that is held at the beginning of every replay, until the reader is about to wait for what it pushes.
pub(super) const WRITER: usize = 1;

/// Uses after which a buffer comes again.
pub(super) const BUFFERS: u32 = 3;

/// How long the writer is held beyond that: the reader has long looked at what is in its buffer.
const HELD: Duration = Duration::from_millis(1);

pub(super) struct Hazard {
    unguarded: bool,
    /// Replays that the reader is in.
    begun: Mutex<u64>,
    news: Condvar,
}

impl Hazard {
    pub(super) fn new(unguarded: bool) -> Self {
        Self {
            unguarded,
            begun: Mutex::default(),
            news: Condvar::new(),
        }
    }
}

impl Inject for Hazard {
    fn at(&self, step: &Step) -> Action {
        match (step.point, step.rank) {
            (Point::Arrive, READER) => {
                *self.begun.lock() = step.call;
                self.news.notify_all();
            }
            (Point::Begin, WRITER) => {
                let mut begun = self.begun.lock();
                let waits = |begun: &mut u64| *begun < step.call;
                let held = self.news.wait_while_for(&mut begun, waits, AMPLE);
                assert!(!held.timed_out(), "the reader does not come to {step:?}");
                return Action::Stall(HELD);
            }
            (Point::Clear, READER) if self.unguarded => {
                // SAFETY: buffers of sums are atomics, read and written by anybody at any time; left out is only that this
                // one is emptied, so the reader finds old values there.
                return Action::Skip(unsafe { Unguarded::promise() });
            }
            _ => {}
        }
        Action::GoOn
    }
}

/// Two ranks, a writer that is late in every replay. Gives the replays in which the reader's sums were wrong.
fn wrong_replays(world: &World, choice: AllReduceAlgorithm, unguarded: bool) -> Vec<u32> {
    /// Of several warps: lanes of the one that looks for the writer's arrival look at data until that is there, too, and would mostly
    /// find what it brings.
    const LEN: usize = 300;
    let hazard = Arc::new(Hazard::new(unguarded));
    wrong_days(world, &config(), hazard, move |rank, days| {
        let mut captured = Captured::new(rank, choice, LEN);
        days(&mut |day| {
            let got = captured.replay(rank, day);
            if got == sums(2, |_| day, LEN) {
                return false;
            }
            if choice == AllReduceAlgorithm::OneShotPush {
                // What is wrong is of the buffer's use before, and only where the guard was left out.
                assert_eq!(rank.rank, READER, "replay {day}");
                let old = |r| day - if r == WRITER { BUFFERS } else { 0 };
                let (right, old) = (sums(2, |_| day, LEN), sums(2, old, LEN));
                let good = |i: usize| got[i] == right[i] || got[i] == old[i];
                assert!((0..LEN).all(good), "replay {day}: {got:?}");
            }
            true
        });
    })
}

/// Adds the contracts.
pub(super) fn add(suite: &mut Suite) {
    let choices = pushing(suite.backend().engines());
    let worlds = suite.backend().worlds();
    if choices.is_empty() {
        return;
    }
    for &size in worlds.iter().filter(|size| matches!(size, 2..=4 | 8)) {
        suite.add_at(size, "replays/sums/under_stalls", under_stalls);
    }
    if !worlds.contains(&2) {
        return;
    }
    for (name, choice) in choices {
        suite.add_at(2, &format!("replays/sums/{name}/cleared"), move |world| {
            let wrong = wrong_replays(world, choice, false);
            assert!(wrong.is_empty(), "wrong sums in replays {wrong:?}");
        });
        suite.add_at(
            2,
            &format!("replays/sums/{name}/not_cleared"),
            move |world| {
                let wrong = wrong_replays(world, choice, true);
                assert!(
                    !wrong.is_empty(),
                    "no wrong sum in {CONTROL_REPLAYS} replays"
                );
            },
        );
    }
}
