//! Faults at the points of a call, made by a hook: delays change no result, what gets lost is a timeout, and a rank that
//! dies in the middle is a lost peer.

use super::{AMPLE, DEADLINE, GRACE, Probe, assert_in_time, assert_stays_stopped, impatient};
use crate::{
    backend::Rank,
    check::{assert_bits, assert_kind, expect_fault, is_poisoned},
    gather_linear::config,
    inject::{Director, Jitter, Mishap, What},
    ops::{self, Ended, Op},
    suite::World,
};
use brigade_device::{Action, CommConfig, FaultKind, FaultRecord, Point};
use rand::{Rng, seq::IndexedRandom};
use std::{
    thread,
    time::{Duration, Instant},
};

/// Calls in a row until a mishap shows: a credit that was not given is missed two uses later.
const CALLS: usize = 4;

/// What can befall a rank and ends in a timeout: a flag that is never sent, wherever one is, and a rest that is too long.
pub const MISHAPS: [(Point, Action); 4] = [
    (Point::Arrive, Action::Drop),
    (Point::Announce, Action::Drop),
    (Point::Done, Action::Drop),
    (Point::Begin, Action::Stall(AMPLE)),
];

/// What a call left in its output, if it has one.
fn left(rank: &Rank, ended: &Ended) -> Vec<u8> {
    let output = ended.output.as_ref();
    output.map_or_else(Vec::new, |d| rank.raw(d.view()))
}

/// What the call gives where nothing happens.
pub(super) fn undisturbed(rank: &Rank, op: &Op) -> Vec<u8> {
    let ended = op.run(rank);
    let bytes = left(rank, &ended);
    ended.result.unwrap();
    bytes
}

fn assert_unchanged(rank: &Rank, op: &Op, ended: &Ended, want: &[u8]) {
    if let Some(d) = &ended.output {
        assert_bits(&left(rank, ended), want, d.dtype(), &op.name);
    }
}

/// What a call that failed left is nothing that could be taken for a result and is not.
pub(super) fn assert_no_result(rank: &Rank, op: &Op, ended: &Ended, want: &[u8]) {
    if let Some(d) = &ended.output {
        let bytes = left(rank, ended);
        let values = crate::matrix::to_f64(d.dtype(), &bytes);
        let untouched = values.iter().all(|&x| x == ops::OLD);
        assert!(
            is_poisoned(d.dtype(), &bytes) || untouched || bytes == want,
            "{}: an output that is neither poisoned nor right: {values:?}",
            op.name
        );
    }
}

/// Makes the call until it ends in a fault, at most so often. Until then its results are right; and what the fault leaves
/// is nothing that could be taken for a result and is not.
fn first_fault(rank: &Rank, op: &Op, want: &[u8], limit: Duration) -> Option<FaultRecord> {
    (0..CALLS).find_map(|_| {
        let start = Instant::now();
        let ended = op.run(rank);
        assert_in_time(start, limit, &op.name);
        if ended.result.is_ok() {
            assert_unchanged(rank, op, &ended, want);
            return None;
        }
        assert_no_result(rank, op, &ended, want);
        Some(expect_fault(ended.result, &op.name))
    })
}

/// Whether the culprit has come to the point where its mishap waited.
fn has_happened(rank: &Rank, director: &Director, culprit: usize) -> bool {
    let mine = rank.rank == culprit && director.disarm();
    rank.share(&[mine.into()])[culprit] == [1]
}

/// Stalls all over the place change no result.
pub(super) fn delayed(world: &World, op: Op) {
    let jitter = Jitter::new(&mut world.rng(), 3, 1500);
    let director = Director::new(&world.backend, Some(jitter));
    world.run_injected(&config(), director, move |rank| {
        let want = undisturbed(rank, &op);
        for _ in 0..2 * CALLS {
            assert_unchanged(rank, &op, &op.run(rank), &want);
        }
    });
}

/// After each mishap all ranks time out, and the group can go on.
///
/// All mishaps befall every operation in groups of three, or the largest below; in others one of them does, another with each
/// size: every mishap is a timeout long.
pub(super) fn mishaps(world: &World, op: Op) {
    let mut rng = world.rng();
    let probe = Probe::new(&mut rng, world.size);
    let sizes = world.backend.worlds().into_iter();
    let all = sizes.filter(|&size| size <= 3).max() == Some(world.size);
    let mishaps: Vec<_> = MISHAPS
        .into_iter()
        .enumerate()
        .filter(|(i, _)| all || *i == world.size % MISHAPS.len())
        .map(|(_, (point, action))| Mishap {
            culprit: rng.random_range(0..world.size),
            point,
            what: What::Act(action),
        })
        .collect();
    let director = Director::new(&world.backend, None);
    world.run_injected(&impatient(), director.clone(), move |rank| {
        probe.run(rank);
        for &mishap in &mishaps {
            befall(rank, &director, mishap, &op, DEADLINE);
            probe.run(rank);
        }
    });
}

/// What goes in pieces, of which the rank whose word gets lost has more than its peers, is no result in any part. Where ranks meet before they
/// push, the first word stops them before any piece.
pub(super) fn in_pieces(world: &World, config: &CommConfig, op: Op) {
    let mut rng = world.rng();
    let mishaps = [Point::Arrive, Point::Announce].map(|point| Mishap {
        culprit: rng.random_range(0..world.size),
        point,
        what: What::Act(Action::Drop),
    });
    let director = Director::new(&world.backend, None);
    world.run_injected(config, director.clone(), move |rank| {
        for mishap in mishaps {
            befall(rank, &director, mishap, &op, DEADLINE);
        }
    });
}

/// Lets a mishap happen while all ranks make a call whose deadline this is, and goes on from there.
pub fn befall(rank: &Rank, director: &Director, mishap: Mishap, op: &Op, deadline: Duration) {
    let Mishap { culprit, point, .. } = mishap;
    let want = undisturbed(rank, op);
    rank.meet();
    if rank.rank == culprit {
        director.arm(mishap);
    }
    rank.meet();
    let fault = first_fault(rank, op, &want, deadline + GRACE);
    if !has_happened(rank, director, culprit) {
        // Not every rank announces something in every operation, or is done with something; but where all meet, all come, and say so.
        let comes = op.meets && point == Point::Arrive;
        assert!(!comes && point != Point::Begin, "{point}");
        assert_eq!(fault, None, "{}: nothing happened at {point}", op.name);
        return;
    }
    let stopped = rank.comm().check();
    if point == Point::Done && stopped.is_ok() {
        // A later credit made up for the lost one, which nobody but its receiver waited for.
        assert_eq!(fault, None, "{}", op.name);
        return;
    }
    let record = expect_fault(stopped, "after a mishap");
    assert!(fault.is_none_or(|f| f == record), "{fault:?}, {record}");
    assert_kind(&record, FaultKind::Timeout, &op.name);
    let named = op.operations.iter().any(|&o| o as u32 == record.operation);
    assert!(named, "{}: {record}", op.name);
    assert_stays_stopped(rank, record);
    rank.comm().reset(AMPLE).unwrap();
    assert_eq!(undisturbed(rank, op), want, "after a mishap at {point}");
}

/// A rank that dies in the middle of a call: the others hear of it long before the deadline, in this call or the next.
pub(super) fn killed(world: &World, op: Op) {
    let mut rng = world.rng();
    let culprit = rng.random_range(0..world.size);
    // Points that every such operation comes to on the thread that makes the call.
    let points = match op.meets {
        true => [Point::Begin, Point::Arrive, Point::Meet],
        false => [Point::Begin, Point::Announce, Point::Read],
    };
    let point = *points.choose(&mut rng).unwrap();
    let director = Director::new(&world.backend, None);
    world.run_injected(&config(), director.clone(), move |rank| {
        let want = undisturbed(rank, &op);
        rank.meet();
        // Nobody is killed before all are back from meeting. Who is slow may hear of it here already.
        let _ = ops::barrier().run(rank);
        if rank.rank == culprit {
            let what = What::Kill(thread::current().id());
            director.arm(Mishap {
                culprit,
                point,
                what,
            });
        }
        let record = first_fault(rank, &op, &want, GRACE).unwrap();
        assert_kind(&record, FaultKind::PeerLost, &op.name);
        assert_eq!(record.peer as usize, culprit, "{record}");
        assert_eq!(expect_fault(rank.comm().check(), "check"), record);
        let reset = rank.comm().reset(Duration::from_millis(100));
        assert!(reset.is_err(), "reset without rank {culprit}");
    });
}
