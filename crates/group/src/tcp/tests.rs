//! Ranks that have proved who they are, and then misbehave.

use super::{socket::Limit, *};
use crate::frame::{Body, Frame, HEADER_BYTES};
use socket::Stream;
use std::{
    net::TcpListener,
    sync::atomic::{AtomicU16, Ordering},
};

const LONG: Duration = Duration::from_secs(20);
/// Long enough for a busy machine to get to every thread.
const SILENCE: Duration = Duration::from_secs(1);

fn configs(address: &Address, silent_after: Duration) -> [TcpConfig; 3] {
    [0, 1, 2].map(|rank| {
        let mut config = TcpConfig::new(rank, 3, address.clone());
        config.join_within = LONG;
        config.heartbeat = SILENCE / 10;
        config.silent_after = silent_after;
        config
    })
}

/// A port where nobody listens, outside of those that systems give to whoever connects.
fn address() -> Address {
    static NEXT: AtomicU16 = AtomicU16::new(0);
    let start = std::process::id() as u16;
    loop {
        let next = start
            .wrapping_mul(31)
            .wrapping_add(NEXT.fetch_add(1, Ordering::Relaxed));
        let port = 30_000 + next % 2_000;
        if TcpListener::bind(("127.0.0.1", port)).is_ok() {
            return Address::tcp("127.0.0.1", port);
        }
    }
}

/// A group of three in which rank 2 is whatever the test makes of this connection.
fn with_rank_2(silent_after: Duration, test: impl FnOnce(&TcpGroup, &TcpGroup, Stream)) {
    let address = address();
    let [zero, one, two] = configs(&address, silent_after);
    std::thread::scope(|s| {
        let zero = s.spawn(|| TcpGroup::join(&zero).unwrap());
        let one = s.spawn(|| TcpGroup::join(&one).unwrap());
        let stream = welcomed(&two);
        write(&stream, 0, Body::Message(b""));
        test(&zero.join().unwrap(), &one.join().unwrap(), stream);
    });
}

/// A connection to rank 0, at which rank 0 takes the other side for this rank.
fn welcomed(config: &TcpConfig) -> Stream {
    let deadline = Deadline::after(LONG);
    let stream = loop {
        if let Ok(stream) = config.address.connect(false, deadline) {
            break stream;
        }
        assert!(!deadline.passed());
        std::thread::yield_now();
    };
    handshake::join(&stream, config, deadline).unwrap();
    stream
}

#[test]
fn a_rank_that_is_lost_before_all_have_come_ends_the_wait_for_the_rest() {
    let [zero, one, two] = configs(&address(), LONG);
    std::thread::scope(|s| {
        let zero = s.spawn(|| TcpGroup::join(&zero).unwrap_err().to_string());
        let stream = welcomed(&one);
        welcomed(&two).close();
        let lost = "lost: rank 2 (its connection closed)";
        assert_eq!(zero.join().unwrap(), format!("joining: {lost}"));
        // Rank 1, which has not asked for anything yet, is told too.
        let mut bytes = Vec::new();
        let mut part = [0; 100];
        while let Ok(some @ 1..) = stream.read_some(&mut part, Limit::Each(LONG)) {
            bytes.extend(&part[..some]);
        }
        let mut bodies = Vec::new();
        let mut rest = &bytes[..];
        while let Ok((frame, after)) = Frame::split(rest, crate::frame::Sender::Root, 3) {
            bodies.push(frame.body);
            rest = after;
        }
        bodies.retain(|body| *body != Body::Beat);
        let notice = Body::Lost(2, "its connection closed");
        assert_eq!(bodies, [notice, Body::Failed(lost), Body::Bye]);
    });
}

fn write(stream: &Stream, round: u64, body: Body<'_>) {
    let bytes = Frame { round, body }.encode();
    stream.write_full(&bytes, Limit::Each(LONG)).unwrap();
}

/// All survivors hear of rank 2's loss, by both ways; and why.
fn both_lose(zero: &TcpGroup, one: &TcpGroup) -> String {
    let losses = [zero, one].map(|b| b.liveness().wait(LONG).unwrap());
    assert_eq!(losses[0], losses[1]);
    assert_eq!(losses[0].rank, 2);
    let why = losses[0].why.clone();
    let told = |boot: &TcpGroup| {
        // A round that it was in before still ends well.
        let error = boot
            .all_gather(b"", LONG)
            .and_then(|_| boot.all_gather(b"", LONG));
        assert_eq!(boot.lost().unwrap().why, why);
        error.unwrap_err().to_string()
    };
    std::thread::scope(|s| {
        let zero = s.spawn(|| told(zero));
        let want = format!("gathering messages: lost: rank 2 ({why})");
        assert_eq!([told(one), zero.join().unwrap()], [want.as_str(); 2]);
    });
    why
}

#[test]
fn a_rank_that_falls_silent_is_lost() {
    with_rank_2(SILENCE, |zero, one, _silent| {
        assert_eq!(both_lose(zero, one), "silent for 1s");
    });
}

#[test]
fn a_rank_that_beats_is_not_lost() {
    with_rank_2(SILENCE, |zero, one, stream| {
        let start = std::time::Instant::now();
        while start.elapsed() < SILENCE * 2 {
            write(&stream, 0, Body::Beat);
            assert_eq!(zero.liveness().wait(SILENCE / 10), None);
            assert_eq!(one.lost(), None);
        }
        write(&stream, 0, Body::Bye);
        let error = one.all_gather(b"", LONG).unwrap_err();
        assert_eq!(error.to_string(), "gathering messages: gone: rank 2");
    });
}

#[test]
fn a_rank_that_does_not_read_is_lost_and_holds_up_nobody() {
    with_rank_2(SILENCE, |zero, one, stream| {
        write(&stream, 1, Body::Message(b""));
        let much = vec![1; 5 << 20];
        std::thread::scope(|s| {
            s.spawn(|| {
                // It goes on to say that it is there.
                let beat = Frame::alone(Body::Beat).encode();
                while stream.write_full(&beat, Limit::Each(LONG)).is_ok() {
                    zero.liveness().wait(SILENCE / 10);
                }
            });
            let one = s.spawn(|| one.all_gather(&much, LONG).unwrap());
            assert!(zero.all_gather(&much, LONG).unwrap() == one.join().unwrap());
            assert_eq!(zero.lost(), None);
            assert_eq!(zero.liveness().wait(LONG).unwrap().why, "it does not read");
            stream.close();
        });
        assert_eq!(both_lose(zero, one), "it does not read");
    });
}

#[test]
fn a_rank_whose_connection_closes_is_lost_at_once() {
    with_rank_2(LONG, |zero, one, stream| {
        let start = std::time::Instant::now();
        stream.close();
        assert_eq!(both_lose(zero, one), "its connection closed");
        assert!(start.elapsed() < SILENCE);
    });
}

/// What a rank does.
type Act<'a> = &'a dyn Fn(&Stream);

#[test]
fn a_rank_that_breaks_the_protocol_is_lost_and_the_reason_is_told() {
    let twice = |stream: &Stream| {
        write(stream, 1, Body::Message(b""));
        write(stream, 1, Body::Message(b""));
    };
    let cases: [(Act<'_>, &str); 6] = [
        (
            &|stream| write(stream, 5, Body::Message(b"")),
            "it is in round 5, and should be in 1",
        ),
        (&twice, "rank 2 is in another call already"),
        (
            &|stream| write(stream, 1, Body::GiveUp(0)),
            "it sent a GiveUp out of order",
        ),
        (
            &|stream| write(stream, 1, Body::Gathered(vec![b""; 3])),
            "it broke the protocol: Gathered is not for Member to send now",
        ),
        (
            &|stream| stream.write_full(&[0; 20], Limit::Each(LONG)).unwrap(),
            "it broke the protocol: it does not begin with [66, 82, 71, 68]",
        ),
        (
            &|stream| {
                let round = 1;
                let body = Body::Message(b"");
                let mut bytes = Frame { round, body }.encode();
                bytes[HEADER_BYTES - 4..].copy_from_slice(&((1u32 << 24) - 1).to_le_bytes());
                stream.write_full(&bytes, Limit::Each(LONG)).unwrap();
            },
            "it broke the protocol: a Message of 16777215 bytes",
        ),
    ];
    for (act, why) in cases {
        with_rank_2(LONG, |zero, one, stream| {
            act(&stream);
            assert_eq!(both_lose(zero, one), why);
        });
    }
}

#[test]
fn an_answer_that_comes_too_late_is_not_taken_for_the_next() {
    with_rank_2(LONG, |zero, one, stream| {
        write(&stream, 1, Body::Message(b"2"));
        let short = Duration::from_millis(1);
        // Rank 1 gives up before rank 0 comes; rank 0 gets the same end; the round after it works.
        let told = one.all_gather(b"1", short).unwrap_err().to_string();
        assert!(told.contains("missing after 1ms: rank"), "{told}");
        assert_eq!(zero.all_gather(b"0", LONG).unwrap_err().to_string(), told);
        // A word about a round that has ended is no offence.
        write(&stream, 1, Body::GiveUp(1));
        write(&stream, 2, Body::Message(b"2"));
        let all = std::thread::scope(|s| {
            let zero = s.spawn(|| zero.all_gather(b"0", LONG).unwrap());
            let one = one.all_gather(b"1", LONG).unwrap();
            assert_eq!(zero.join().unwrap(), one);
            one
        });
        assert_eq!(all, [b"0", b"1", b"2"]);
    });
}
