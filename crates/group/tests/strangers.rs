//! Nothing that a stranger does while a group forms keeps the group from forming, or gets it in.
#![allow(clippy::unwrap_used)]

mod common;

use brigade_device::Bootstrap;
use brigade_group::{
    Address, TcpGroup,
    frame::{Body, Frame, HEADER_BYTES, Kind, SMALL_BYTES, Sender, VERSION},
};
use common::{
    LONG, addresses, at_once, config,
    raw::{Both, connect, hello, next},
    refusals, secret, tcp,
};
use std::{
    net::TcpListener,
    time::{Duration, Instant},
};

/// Long enough for those that come, on a busy machine.
const FORMING: Duration = Duration::from_millis(1200);

/// Rank 0 of 3 begins to listen; strangers come; then the other ranks. Gives how long those took.
fn forms_with(address: &Address, strangers: impl FnOnce() -> Vec<Box<dyn Both>>) -> Duration {
    let configs = [0, 1, 2].map(|r| {
        let mut config = config(r, 3, address);
        config.secret = secret("a");
        config
    });
    std::thread::scope(|s| {
        let first = s.spawn(|| TcpGroup::join(&configs[0]).unwrap());
        let inside = strangers();
        let start = Instant::now();
        let mut ranks = at_once(&configs[1..], |c| TcpGroup::join(c).unwrap());
        let took = start.elapsed();
        ranks.push(first.join().unwrap());
        at_once(&ranks, |b| b.all_gather(b"", LONG).unwrap());
        drop(inside);
        took
    })
}

#[test]
fn garbage_and_huge_lengths_are_dropped_without_an_answer() {
    for address in addresses() {
        forms_with(&address, || {
            let mut huge = hello(1, 3, true);
            huge[HEADER_BYTES - 4..HEADER_BYTES].copy_from_slice(&u32::MAX.to_le_bytes());
            let mut unknown = hello(1, 3, true);
            unknown[6] = 99;
            let proof_first = Frame::alone(Body::Proof([0; 32])).encode();
            let message = Frame::alone(Body::Message(&[0; 100])).encode();
            let http = b"GET / HTTP/1.1\r\n\r\n".to_vec();
            for bytes in [
                huge,
                unknown,
                proof_first,
                message,
                http,
                vec![0; 1 << 16],
                vec![b'B'],
            ] {
                let mut stream = connect(&address);
                // It may be closed before all is written.
                let _ = stream.write_all(&bytes);
                if bytes.len() > 1 {
                    let mut answer = [0; 1];
                    assert!(!matches!(stream.read(&mut answer), Ok(1..)), "{bytes:?}");
                }
            }
            Vec::new()
        });
    }
}

#[test]
fn strangers_that_say_little_or_nothing_do_not_hold_up_the_ranks() {
    for address in addresses() {
        let took = forms_with(&address, || {
            (0..150)
                .map(|i| {
                    let mut stream = connect(&address);
                    // None, some, or all bytes of a header, or all but one of a hello.
                    let bytes = hello(1, 3, true);
                    let _ = stream.write_all(&bytes[..[0, 1, 19, 20, bytes.len() - 1][i % 5]]);
                    stream
                })
                .collect()
        });
        assert!(took < Duration::from_secs(4), "{took:?}");
    }
}

#[test]
fn another_version_is_told_to_both_sides() {
    let address = tcp();
    let mut config = config(0, 2, &address);
    config.join_within = FORMING;
    std::thread::scope(|s| {
        let rank_0 = s.spawn(|| refusals(&[config.clone()]).remove(0));
        let mut newer = hello(1, 2, false);
        newer[4..6].copy_from_slice(&(VERSION + 1).to_le_bytes());
        let mut stream = connect(&address);
        stream.write_all(&newer).unwrap();
        let answer = next(&mut *stream, Sender::Listener);
        let (frame, _) = Frame::split(&answer, Sender::Listener, 1).unwrap();
        let why = "it speaks version 2, this is version 1";
        assert_eq!(frame.body, Body::Refused(why));
        let told = rank_0.join().unwrap();
        assert!(told.ends_with(&format!("({why})")), "{told}");
    });
}

/// What rank 1 of 2, with a secret or without, says about a listener that answers with `answers`, one for each frame.
fn rank_1_meets(has_secret: bool, answers: &mut dyn FnMut(Frame<'_>) -> Vec<u8>) -> String {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let port = listener.local_addr().unwrap().port();
    let mut config = config(1, 2, &Address::tcp("127.0.0.1", port));
    config.secret = secret("a").filter(|_| has_secret);
    std::thread::scope(|s| {
        let told = s.spawn(|| refusals(&[config]).remove(0));
        let mut stream: Box<dyn Both> = Box::new(listener.accept().unwrap().0);
        for _ in 0..2 {
            let asked = next(&mut *stream, Sender::Stranger);
            let (frame, _) = Frame::split(&asked, Sender::Stranger, 1).unwrap();
            let answer = answers(frame);
            stream.write_all(&answer).unwrap();
            let asks = Frame::split(&answer, Sender::Listener, 1)
                .is_ok_and(|(frame, _)| frame.body.kind() == Kind::Challenge);
            if !asks {
                break;
            }
        }
        told.join().unwrap().replace(&port.to_string(), "PORT")
    })
}

fn challenge() -> Vec<u8> {
    let (session, nonce) = ([1; 16], [2; 32]);
    Frame::alone(Body::Challenge(brigade_group::frame::Challenge {
        session,
        nonce,
    }))
    .encode()
}

#[test]
fn a_listener_that_does_not_know_the_secret_is_not_taken_for_rank_0() {
    let unknown = "joining: what listens at 127.0.0.1:PORT does not know the secret";
    // A guess; and the rank's own proof, sent back.
    for reflect in [false, true] {
        let told = rank_1_meets(true, &mut |frame| match frame.body {
            Body::Proof(tag) => {
                Frame::alone(Body::Welcome(if reflect { tag } else { [9; 32] })).encode()
            }
            _ => challenge(),
        });
        assert_eq!(told, unknown);
    }
    let told = rank_1_meets(true, &mut |_| Frame::alone(Body::Welcome([0; 32])).encode());
    assert_eq!(told, "joining: rank 0 answers out of order");
}

#[test]
fn a_listener_that_is_no_rank_0_is_told() {
    let mut newer = challenge();
    newer[4] = 2;
    let mut huge = challenge();
    huge[HEADER_BYTES - 4..HEADER_BYTES].copy_from_slice(&(1u32 << 24).to_le_bytes());
    let long = Frame::alone(Body::Refused(&"x".repeat(SMALL_BYTES))).encode();
    let mut longer = long.clone();
    longer[HEADER_BYTES - 4] += 1;
    for (answer, why) in [
        (newer, "it speaks version 2, this is version 1"),
        (huge, "a Challenge of 16777216 bytes"),
        (longer, "a Refused of 513 bytes"),
        (
            b"220 mail.example.org ESMTP\r\n".to_vec(),
            "it does not begin with [66, 82, 71, 68]",
        ),
        (
            Frame::alone(Body::Bye).encode(),
            "Bye is not for Listener to send now",
        ),
    ] {
        let told = rank_1_meets(false, &mut |_| answer.clone());
        assert_eq!(
            told,
            format!("joining: what listens at 127.0.0.1:PORT is not this group's rank 0: {why}")
        );
    }
    let told = rank_1_meets(false, &mut |_| long.clone());
    assert_eq!(
        told,
        format!("joining: refused by rank 0: {}", "x".repeat(SMALL_BYTES))
    );
}

#[test]
fn a_proof_that_was_overheard_proves_nothing() {
    let (address, middle) = (tcp(), TcpListener::bind("127.0.0.1:0").unwrap());
    let port = middle.local_addr().unwrap().port();
    let mut zero = config(0, 2, &address);
    let mut one = config(1, 2, &Address::tcp("127.0.0.1", port));
    (zero.secret, one.secret) = (secret("a"), secret("a"));
    zero.join_within = FORMING;
    std::thread::scope(|s| {
        let rank_0 = s.spawn(|| refusals(&[zero.clone()]).remove(0));
        let rank_1 = s.spawn(|| refusals(&[one.clone()]).remove(0));
        // Between both: the hello and the challenge go through, the proof is kept.
        let mut member: Box<dyn Both> = Box::new(middle.accept().unwrap().0);
        let mut root = connect(&address);
        let hello = next(&mut *member, Sender::Stranger);
        root.write_all(&hello).unwrap();
        let asked = next(&mut *root, Sender::Listener);
        member.write_all(&asked).unwrap();
        let proof = next(&mut *member, Sender::Stranger);
        drop(root);
        // In another connection it is refused, with the same hello.
        let mut again = connect(&address);
        again.write_all(&hello).unwrap();
        next(&mut *again, Sender::Listener);
        again.write_all(&proof).unwrap();
        let answer = next(&mut *again, Sender::Listener);
        let (frame, _) = Frame::split(&answer, Sender::Listener, 1).unwrap();
        assert_eq!(
            frame.body,
            Body::Refused("its proof is wrong: it has another secret")
        );
        member
            .write_all(&Frame::alone(Body::Refused("enough")).encode())
            .unwrap();
        assert_eq!(rank_1.join().unwrap(), "joining: refused by rank 0: enough");
        assert!(
            rank_0
                .join()
                .unwrap()
                .contains("missing after 1.2s: rank 1")
        );
    });
}
