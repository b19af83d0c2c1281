//! The contract of a group: every call ends on every rank, within its time, with everybody's message or a typed error.
#![allow(clippy::unwrap_used)]

use brigade_device::{Bootstrap, Error, Reason, Result};
use brigade_group::{ThreadGroup, agree, threads, vote};
use std::{
    sync::{Mutex, mpsc},
    time::{Duration, Instant},
};

const LONG: Duration = Duration::from_secs(30);
const SHORT: Duration = Duration::from_millis(50);
/// How much later than its deadline a wait may end, on a machine that does other things too.
const SLACK: Duration = Duration::from_secs(1);

/// Runs `f` as every rank at once; results in rank order.
fn run<T: Send>(ranks: &[ThreadGroup], f: impl Fn(&ThreadGroup) -> T + Sync) -> Vec<T> {
    std::thread::scope(|s| {
        let handles: Vec<_> = ranks.iter().map(|b| s.spawn(|| f(b))).collect();
        handles.into_iter().map(|h| h.join().unwrap()).collect()
    })
}

fn told<T>(results: Vec<Result<T>>) -> String {
    let line = |(rank, r): (usize, Result<T>)| match r {
        Ok(_) => format!("rank {rank}: ok\n"),
        Err(e @ Error::Group { .. }) => format!("rank {rank}: {e}\n"),
        Err(e) => panic!("{e:?} is not a group's error"),
    };
    results.into_iter().enumerate().map(line).collect()
}

#[test]
fn every_rank_gets_every_message_in_rank_order() {
    for size in [1, 2, 3, 8] {
        for all in run(&threads(size), |b| {
            let mine = vec![b.rank() as u8; b.rank()];
            b.all_gather(&mine, LONG).unwrap()
        }) {
            let want: Vec<_> = (0..size).map(|r| vec![r as u8; r]).collect();
            assert_eq!(all, want);
        }
    }
    assert!(threads(0).is_empty());
}

#[test]
fn rounds_do_not_mix() {
    const ROUNDS: u32 = 500;
    let ends = run(&threads(4), |b| {
        for round in 0..ROUNDS {
            let all = b.all_gather(&round.to_le_bytes(), LONG).unwrap();
            assert!(all.iter().all(|m| *m == round.to_le_bytes()));
        }
        ROUNDS
    });
    assert_eq!(ends, [ROUNDS; 4]);
}

#[test]
fn a_missing_rank_is_named_to_everybody_within_the_deadline() {
    let mut ranks = threads(4);
    let absent = ranks.remove(2);
    let start = Instant::now();
    let results = run(&ranks, |b| b.all_gather(b"here", SHORT));
    assert!(start.elapsed() >= SHORT && start.elapsed() < SHORT + SLACK);
    let mut texts: Vec<_> = results
        .into_iter()
        .map(|r| r.unwrap_err().to_string())
        .collect();
    // Who had not come yet when the first of them gave up is up to the scheduler; that all tell the same is not.
    texts.dedup();
    assert_eq!(texts.len(), 1);
    assert!(
        texts[0].contains("missing after 50ms: rank"),
        "{}",
        texts[0]
    );
    drop(absent);
}

#[test]
fn who_comes_too_late_gets_the_same_error_at_once_and_the_next_round_works() {
    let ranks = threads(3);
    let (gave_up, all_gave_up) = mpsc::channel();
    let all_gave_up = Mutex::new(all_gave_up);
    let results = run(&ranks, |b| {
        let first = if b.rank() == 2 {
            // Ranks 0 and 1 have returned by now.
            for _ in 0..2 {
                all_gave_up.lock().unwrap().recv_timeout(LONG).unwrap();
            }
            let start = Instant::now();
            let result = b.all_gather(b"late", LONG);
            assert!(
                start.elapsed() < LONG / 2,
                "waited for a round that is over"
            );
            result
        } else {
            let result = b.all_gather(b"early", SHORT);
            gave_up.send(()).unwrap();
            result
        };
        let second = b.all_gather(&[b.rank() as u8], LONG);
        assert_eq!(second.unwrap(), [[0], [1], [2]]);
        first.unwrap_err().to_string()
    });
    assert!(results.windows(2).all(|w| w[0] == w[1]), "{results:?}");
    let missing = results[0].split("; there").next().unwrap();
    assert!(
        missing.contains("missing after 50ms: rank") && missing.ends_with('2'),
        "{missing}"
    );
}

#[test]
fn who_is_gone_is_not_waited_for() {
    let mut ranks = threads(3);
    drop(ranks.pop());
    let start = Instant::now();
    let text = told(run(&ranks, |b| b.all_gather(b"", LONG)));
    assert!(start.elapsed() < LONG / 2);
    insta::assert_snapshot!(text, @r"
    rank 0: gathering messages: gone: rank 2
    rank 1: gathering messages: gone: rank 2
    ");
}

#[test]
fn no_time_at_all_is_an_error_and_not_a_hang() {
    let ranks = threads(2);
    let error = ranks[0].all_gather(b"", Duration::ZERO).unwrap_err();
    insta::assert_snapshot!(error, @"gathering messages: missing after 0ns: rank 1; there: rank 0");
}

#[test]
fn a_vote_passes_or_fails_on_all_ranks() {
    let same = run(&threads(3), |b| vote(b, "table", b"0x1234", LONG));
    assert!(same.iter().all(Result::is_ok));
    let differ = run(&threads(4), |b| {
        let mine = if b.rank() == 2 {
            "scratch 2 MiB"
        } else {
            "scratch 1 MiB"
        };
        vote(b, "join: configuration", mine.as_bytes(), LONG)
    });
    insta::assert_snapshot!(told(differ));
}

#[test]
fn all_succeed_or_all_fail_with_every_reason() {
    let values = run(&threads(3), |b| {
        agree(b, "path", Ok::<_, Reason>(b.rank()), LONG).unwrap()
    });
    assert_eq!(values, [0, 1, 2]);
    let failed = run(&threads(4), |b| {
        let mine = match b.rank() {
            0 | 2 => Ok(()),
            _ => Err(Reason::new(
                "no-fabric",
                format!("no fabric handle on GPU {}", b.rank()),
                "use file descriptors",
            )),
        };
        agree(b, "handle path", mine, LONG)
    });
    insta::assert_snapshot!(told(failed));
    let silent = run(&threads(2), |b| {
        let mine = if b.rank() == 0 { Ok(()) } else { Err("") };
        agree(b, "handle path", mine, LONG)
    });
    assert!(
        silent.iter().all(Result::is_err),
        "a reason without a text is still one"
    );
}

#[test]
fn a_rank_at_another_step_is_noticed() {
    let results = run(&threads(3), |b| {
        if b.rank() == 1 {
            vote(b, "tables", b"same", LONG)
        } else {
            vote(b, "configuration", b"same", LONG)
        }
    });
    insta::assert_snapshot!(told(results));
    let mixed = run(&threads(2), |b| {
        if b.rank() == 0 {
            vote(b, "configuration", b"", LONG)
        } else {
            agree(b, "memory", Ok::<_, Reason>(()), LONG)
        }
    });
    assert!(mixed.iter().all(Result::is_err));
}

#[test]
fn a_vote_names_the_missing_under_its_own_step() {
    let ranks = threads(2);
    let mut text = String::new();
    for result in [
        vote(&ranks[0], "configuration", b"", SHORT),
        agree(&ranks[0], "memory", Ok::<_, Reason>(()), SHORT),
        agree(&ranks[0], "memory", Err("out of memory"), SHORT),
    ] {
        text += &format!("{}\n", result.unwrap_err());
    }
    insta::assert_snapshot!(text);
}

#[test]
fn long_views_are_cut_and_bytes_that_are_no_text_are_shown() {
    let results = run(&threads(2), |b| {
        let mine = if b.rank() == 0 {
            vec![b'x'; 5000]
        } else {
            vec![0xFF, b'a']
        };
        vote(b, "bytes", &mine, LONG)
    });
    let text = results[0].as_ref().unwrap_err().to_string();
    assert!(text.len() < 1000 && text.contains("x\"..."), "{text}");
    assert!(text.contains("\u{FFFD}a"), "{text}");
}
