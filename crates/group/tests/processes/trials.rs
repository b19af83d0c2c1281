//! What holds for ranks that are processes.

use super::{
    common::{SLACK, addresses, tcp, unix},
    ranks::{Ranks, assert_within},
};
use std::time::{Duration, Instant};

type Named = (&'static str, fn());

pub const ALL: &[Named] = &[
    ("processes_gather_at_every_size", gather_at_every_size),
    ("a_late_rank_is_waited_for", a_late_rank_is_waited_for),
    ("a_missing_rank_is_named_to_all", a_missing_rank_is_named),
    ("a_killed_rank_is_noticed_within_a_second", a_killed_rank),
    ("a_stopped_rank_is_noticed_over_tcp", a_stopped_rank),
    (
        "a_stopped_rank_0_ends_a_wait_over_a_unix_socket",
        a_stopped_rank_0,
    ),
    ("descriptors_are_passed", descriptors_are_passed),
    (
        "a_killed_rank_ends_the_passing",
        a_killed_rank_ends_the_passing,
    ),
    ("another_secret_does_not_get_in", another_secret),
];

/// What the contract says of a process that died.
const SOON: Duration = Duration::from_secs(1);

fn gather_at_every_size() {
    for address in addresses() {
        for size in [1, 2, 3, 5, 8] {
            let mut ranks = Ranks::joined(size, &address);
            ranks.order(0..size, "gather 50");
            ranks.expect(0..size, "gathered 50");
            ranks.finish();
        }
    }
}

fn a_late_rank_is_waited_for() {
    for address in addresses() {
        for late in [0, 2] {
            let mut ranks = Ranks::new(3, &address);
            let early = (0..3).filter(|r| *r != late);
            ranks.start(early.clone());
            ranks.expect(early, "started");
            ranks.start([late]);
            ranks.expect([late], "started");
            ranks.expect(0..3, "joined");
            ranks.finish();
        }
    }
}

fn a_missing_rank_is_named() {
    let mut ranks = Ranks::new(4, &tcp());
    ranks.set("JOIN_MS", 2000);
    ranks.start([0, 1, 3]);
    ranks.expect([0, 1, 3], "started");
    let start = Instant::now();
    let want = "joining: missing after 2s: rank 2; there: ranks 0, 1, 3";
    for (text, at) in ranks.timed([0, 1, 3]) {
        assert_eq!(text, want);
        assert_within(start, at, Duration::from_secs(2) + SLACK);
    }
}

fn a_killed_rank() {
    for address in addresses() {
        for victim in [2, 0] {
            let mut ranks = Ranks::joined(4, &address);
            let left = (0..4).filter(|r| *r != victim);
            // One does not wait for anything; it hears of it all the same.
            let idle = 3;
            let busy = left.clone().filter(|r| *r != idle);
            ranks.order(busy.clone(), "gather 1");
            let killed = ranks.kill(victim);
            let lost = format!("rank {victim} is lost: its connection closed");
            let failed = format!("gathering messages: lost: rank {victim} (its connection closed)");
            for (text, at) in ranks.timed(busy.clone().chain(busy).chain([idle])) {
                assert!(text == lost || text == failed, "{text}");
                assert_within(killed, at, SOON);
            }
        }
    }
}

fn a_stopped_rank() {
    let mut ranks = Ranks::new(3, &tcp());
    ranks.set("SILENT_MS", 1500);
    ranks.start(0..3);
    ranks.expect(0..3, "started");
    ranks.expect(0..3, "joined");
    let stopped = ranks.stop(1);
    for (text, at) in ranks.timed([0, 2]) {
        assert_eq!(text, "rank 1 is lost: silent for 1.5s");
        assert_within(stopped, at, Duration::from_millis(1500) + SLACK);
    }
}

fn a_stopped_rank_0() {
    let mut ranks = Ranks::new(2, &unix());
    ranks.set("GATHER_MS", 400);
    ranks.start(0..2);
    ranks.expect(0..2, "started");
    ranks.expect(0..2, "joined");
    let stopped = ranks.stop(0);
    ranks.order([1], "gather 1");
    for (text, at) in ranks.timed([1]) {
        let want = "gathering messages: no answer from rank 0 after 400ms and 500ms";
        assert_eq!(text, want);
        assert_within(stopped, at, Duration::from_millis(900) + SLACK);
    }
}

fn descriptors_are_passed() {
    for size in [1, 2, 5] {
        let mut ranks = Ranks::joined(size, &unix());
        for _ in 0..2 {
            ranks.order(0..size, "pass .");
            let all: Vec<_> = (0..size).map(|r| format!("rank {r}")).collect();
            ranks.expect(0..size, &format!("passed {}", all.join(", ")));
        }
        ranks.finish();
    }
}

fn a_killed_rank_ends_the_passing() {
    let mut ranks = Ranks::joined(3, &tcp());
    ranks.order([0, 1], "pass .");
    let killed = ranks.kill(2);
    let lost = "rank 2 is lost: its connection closed";
    let failed = "passing file descriptors: lost: rank 2 (its connection closed)";
    for (text, at) in ranks.timed([0, 1, 0, 1]) {
        assert!(text == lost || text == failed, "{text}");
        assert_within(killed, at, SOON);
    }
}

fn another_secret() {
    let mut ranks = Ranks::new(2, &tcp());
    ranks.set("JOIN_MS", 2000);
    ranks.set("BRIGADE_SECRET", "correct horse battery staple");
    ranks.start([0]);
    ranks.expect([0], "started");
    ranks.set("BRIGADE_SECRET", "incorrect horse battery staple");
    ranks.start([1]);
    ranks.expect([1], "started");
    let told = ranks.lines([0, 1]);
    let why = "its proof is wrong: it has another secret";
    assert_eq!(told[1], format!("joining: refused by rank 0: {why}"));
    assert!(
        told[0]
            .starts_with("joining: missing after 2s: rank 1; there: rank 0; refused: 127.0.0.1:")
    );
    assert!(told[0].ends_with(&format!("({why})")), "{}", told[0]);
}
