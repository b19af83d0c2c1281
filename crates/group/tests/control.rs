//! The contract of shared memory and of control: what one rank writes, raises or says, every rank finds.
#![allow(clippy::unwrap_used)]

use brigade_device::{
    Bootstrap, CommConfig, Error, FaultKind, FaultRecord, Group, Operation, ParallelMode, Result,
};
use brigade_group::{Control, Sharing, ThreadGroup, threads};
use brigade_sync::{Deadline, Layout, Memory, Word, wait};
use std::{
    sync::atomic::{AtomicBool, Ordering},
    time::Duration,
};

const LONG: Duration = Duration::from_secs(30);
const SHORT: Duration = Duration::from_millis(50);

fn join(boot: &ThreadGroup) -> Control {
    let config = CommConfig::new(ParallelMode::Tp);
    let (rank, size) = (boot.rank(), boot.size());
    let group = Group {
        mode: config.mode,
        rank,
        size,
    };
    let layout = Layout::new(&config, 1, rank, size).unwrap();
    let sharing = Sharing::between(boot, LONG).unwrap();
    assert!(sharing.one_process());
    let segments = sharing
        .exchange(boot, layout.words, layout.bytes, LONG)
        .unwrap();
    Control::new(group, layout, sharing, segments)
}

/// Every rank's control, in rank order.
fn controls(size: usize) -> Vec<Control> {
    each(&threads(size), join)
}

/// Runs `f` with all of them at once; results in order.
fn each<I: Sync, T: Send>(all: &[I], f: impl Fn(&I) -> T + Sync) -> Vec<T> {
    std::thread::scope(|s| {
        let handles: Vec<_> = all.iter().map(|one| s.spawn(|| f(one))).collect();
        handles.into_iter().map(|h| h.join().unwrap()).collect()
    })
}

fn reset(control: &Control, within: Duration) -> Result<()> {
    control.reset(within, 0, |_| Ok(()), || Ok(()), || {})
}

fn record(rank: u32, generation: u8) -> FaultRecord {
    FaultRecord {
        kind: FaultKind::Timeout,
        operation: Operation::Barrier as u32,
        rank,
        peer: 0,
        slot: 0,
        generation: generation.into(),
        expected: 1,
        seen: 2,
        waited_ns: 3,
        call: 4,
        claimed: 1,
        across: 0,
    }
}

#[test]
fn every_rank_reaches_the_same_words_and_bytes() {
    let all = controls(3);
    let at = Word { owner: 1, index: 0 };
    all[0].memory().store(at, 7);
    assert!(all.iter().all(|c| c.memory().load(at) == 7));
    // SAFETY: no other thread has these segments.
    unsafe { all[2].segments()[1].0.write(5..8) }.copy_from_slice(b"abc");
    for control in &all {
        // SAFETY: as above, and nobody writes any more.
        assert_eq!(unsafe { control.segments()[1].0.read(5..8) }, b"abc");
    }
}

#[test]
fn what_one_rank_raises_stops_all_with_one_record() {
    let all = controls(3);
    assert!(all.iter().all(|c| c.usable().is_ok()));
    let first = all[2].raise(record(2, 1));
    assert_eq!(first, record(2, 1));
    assert_eq!(all[1].raise(record(1, 1)), first);
    all[0].abort(9);
    for control in &all {
        assert_eq!(control.fault(), Some(first));
        assert!(matches!(control.usable(), Err(Error::Fault(f)) if f == first));
    }
}

#[test]
fn an_abort_says_who_and_after_how_many_calls() {
    let all = controls(2);
    all[1].abort(9);
    let seen = all[0].fault().unwrap();
    assert_eq!(seen.kind, FaultKind::Aborted);
    assert_eq!((seen.rank, seen.peer, seen.call), (1, 1, 9));
}

#[test]
fn who_leaves_has_departed_for_all_others() {
    let all = controls(3);
    assert!((0..3).all(|peer| !all[0].departed(peer)));
    all[1].leave();
    assert!(all[0].departed(1) && all[2].departed(1));
    assert!(!all[0].departed(2) && !all[1].departed(1));
}

#[test]
fn a_reset_forgets_the_fault_and_wipes_flags_but_not_who_left() {
    let all = controls(2);
    let flag = Word { owner: 1, index: 0 };
    all[0].memory().store(flag, 7);
    all[0].abort(0);
    for result in each(&all, |c| reset(c, LONG)) {
        result.unwrap();
    }
    for control in &all {
        assert_eq!((control.generation(), control.fault()), (2, None));
        assert_eq!(control.memory().load(flag), 0);
    }
    all[1].leave();
    let error = reset(&all[0], LONG).unwrap_err();
    assert_eq!(error.to_string(), "reset: ranks [1] are gone");
    assert!(all[0].departed(1));
}

#[test]
fn what_is_raised_for_a_generation_that_is_over_stops_nobody() {
    let all = controls(2);
    all[0].abort(0);
    assert_eq!(all[1].stopped(), Some(1));
    for result in each(&all, |c| reset(c, LONG)) {
        result.unwrap();
    }
    assert_eq!(all[0].raise_in(1, record(0, 1)), None);
    for control in &all {
        assert_eq!((control.stopped(), control.fault()), (None, None));
    }
    let now = record(0, 2);
    assert_eq!(all[0].raise_in(2, now), Some(now));
    for control in &all {
        assert_eq!((control.stopped(), control.fault()), (Some(2), Some(now)));
    }
}

/// Every other generation is stopped, and whoever looks all the while never sees one that is not.
#[test]
fn no_generation_is_taken_for_the_one_that_was_stopped_before() {
    let alone = &controls(1)[0];
    let done = AtomicBool::new(false);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            while !done.load(Ordering::Acquire) {
                if let Some(generation) = alone.stopped() {
                    assert_eq!(generation % 2, 1, "{generation} was not stopped");
                }
            }
        });
        let cycle = |generation: u32| {
            if generation % 2 == 1 {
                alone.abort(0);
            }
            reset(alone, LONG)
        };
        let all = (1..=200).try_for_each(cycle);
        done.store(true, Ordering::Release);
        all.unwrap();
    });
}

#[test]
fn generations_wrap_to_1() {
    let alone = &controls(1)[0];
    for _ in 1..=255 {
        reset(alone, LONG).unwrap();
    }
    assert_eq!(alone.generation(), 1);
}

#[test]
fn who_gives_up_a_reset_stays_stopped_and_can_try_again() {
    let all = controls(2);
    let error = reset(&all[0], SHORT).unwrap_err();
    assert_eq!(
        error.to_string(),
        "reset: ranks [1] did not come within 50ms"
    );
    let fault = all[0].fault().unwrap();
    assert_eq!(
        (fault.kind, fault.operation, fault.peer, fault.expected),
        (FaultKind::Timeout, Operation::Reset as u32, 1, 1)
    );
    for result in each(&all, |c| reset(c, LONG)) {
        result.unwrap();
    }
    assert!(all.iter().all(|c| c.usable().is_ok()));
}

#[test]
fn a_reset_that_timed_out_at_the_second_gate_goes_on_there() {
    let all = controls(2);
    let fails = |c: &Control| {
        let wipe = || Err(Error::Busy("the device"));
        c.reset(LONG, 0, |_| Ok(()), wipe, || {})
    };
    // Rank 1 cannot wipe, so rank 0 finds it at the first gate and not at the second.
    let results = std::thread::scope(|s| {
        let other = s.spawn(|| fails(&all[1]));
        for arrival in all[0].layout().reset.meet(1) {
            let mut deadline = Deadline::after(LONG);
            wait(all[0].memory(), arrival, &mut deadline, || false).unwrap();
        }
        [reset(&all[0], SHORT), other.join().unwrap()]
    });
    assert!(matches!(results[0], Err(Error::Group { .. })));
    assert!(matches!(results[1], Err(Error::Busy("the device"))));
    assert_eq!(all[0].fault().unwrap().expected, 2);
    assert_eq!(all[1].fault().unwrap().kind, FaultKind::Aborted);

    // Rank 0 goes on where it was, while rank 1 wipes again.
    let never = |_: &Deadline| -> Result<()> { panic!("let go twice") };
    std::thread::scope(|s| {
        let other = s.spawn(|| reset(&all[1], LONG));
        let wipes = || panic!("wiped twice");
        all[0].reset(LONG, 0, never, wipes, || {}).unwrap();
        other.join().unwrap().unwrap();
    });
    assert!(
        all.iter()
            .all(|c| c.generation() == 2 && c.usable().is_ok())
    );
}

#[test]
fn an_error_before_the_first_gate_leaves_the_group_as_it_was() {
    let alone = &controls(1)[0];
    let busy = |_: &Deadline| Err(Error::Busy("the user buffer"));
    let error = alone.reset(LONG, 0, busy, || Ok(()), || {}).unwrap_err();
    assert!(matches!(error, Error::Busy("the user buffer")));
    assert!(alone.usable().is_ok() && alone.generation() == 1);
}

#[test]
fn resets_do_not_meet_and_none_follows_a_close() {
    let alone = &controls(1)[0];
    let twice = |_: &Deadline| reset(alone, LONG);
    let error = alone.reset(LONG, 0, twice, || Ok(()), || {}).unwrap_err();
    assert!(matches!(error, Error::Busy("the communicator")));
    alone.set_closed();
    assert!(matches!(reset(alone, LONG), Err(Error::Closed)));
    assert!(matches!(alone.usable(), Err(Error::Closed)));
}
