//! The frame parser: any bytes are refused or taken for what they are, and what version 1 looks like does not change.
#![allow(clippy::unwrap_used)]

#[path = "common/frame_property.rs"]
mod frame_property;

use brigade_group::frame::{
    Body, Challenge, Frame, FrameError, HEADER_BYTES, Header, Hello, Kind, MOST_BYTES, SMALL_BYTES,
    Sender, message_limit,
};
use frame_property::check;
use proptest::prelude::*;
use std::{collections::BTreeMap, fs, path::Path};

/// A corpus file's bytes: who sends, one less than the ranks, frames.
fn sent(from: u8, ranks: u8, frames: &[Frame<'_>]) -> Vec<u8> {
    let mut bytes = vec![from, ranks - 1];
    for frame in frames {
        bytes.extend(frame.encode());
    }
    bytes
}

fn with(mut bytes: Vec<u8>, at: usize, value: u8) -> Vec<u8> {
    bytes[2 + at] = value;
    bytes
}

/// Where the fuzzer starts, and what becomes of it: how many frames are taken, and why no more.
fn corpus() -> Vec<(&'static str, Vec<u8>, usize, FrameError)> {
    use FrameError as E;
    let (tag, nonce) = ([0xab; 32], [0xcd; 32]);
    let round = |round, body| Frame { round, body };
    let hello = Frame::alone(Body::Hello(Hello {
        rank: 2,
        size: 3,
        has_secret: true,
        nonce,
    }));
    let session = [0xef; 16];
    let challenge = Frame::alone(Body::Challenge(Challenge { session, nonce }));
    let from_stranger = sent(0, 3, &[hello.clone(), Frame::alone(Body::Proof(tag))]);
    let from_listener = sent(1, 3, &[challenge, Frame::alone(Body::Welcome(tag))]);
    let refused = sent(1, 3, &[Frame::alone(Body::Refused("rank 2 came twice ü"))]);
    let calls = [
        round(0, Body::Message(b"")),
        Frame::alone(Body::Beat),
        round(1, Body::Message(b"hello")),
        round(1, Body::GiveUp(60_000_000)),
        round(u64::MAX, Body::TooLong(1 << 40)),
        Frame::alone(Body::Bye),
    ];
    let answers = [
        round(0, Body::Gathered(vec![b"", b"", b""])),
        round(1, Body::Gathered(vec![b"a", b"", b"ccc"])),
        Frame::alone(Body::Lost(1, "its connection closed")),
        round(
            2,
            Body::Failed("missing after 1s: rank 1; there: ranks 0, 2"),
        ),
        Frame::alone(Body::Beat),
        Frame::alone(Body::Bye),
    ];
    let words = [Body::Word(2, b"a word"), Body::Word(0, b"")].map(Frame::alone);
    let gathered = sent(3, 3, &answers[1..2]);
    let lost = sent(3, 3, &answers[2..3]);
    let cut = from_stranger[..from_stranger.len() - 1].to_vec();
    let length = HEADER_BYTES - 4;
    vec![
        (
            "bad-kind",
            with(from_stranger.clone(), 6, 15),
            0,
            E::Kind(15),
        ),
        (
            "bad-magic",
            with(from_stranger.clone(), 0, b'b'),
            0,
            E::Magic,
        ),
        (
            "bad-rank",
            with(lost, HEADER_BYTES, 3),
            0,
            E::Payload(Kind::Lost),
        ),
        (
            "bad-secret-flag",
            with(from_stranger.clone(), HEADER_BYTES + 8, 2),
            0,
            E::Payload(Kind::Hello),
        ),
        (
            "bad-text",
            with(refused.clone(), HEADER_BYTES, 0xff),
            0,
            E::Payload(Kind::Refused),
        ),
        (
            "bad-version",
            with(from_stranger.clone(), 4, 2),
            0,
            E::Version(2),
        ),
        ("calls", sent(2, 3, &calls), 6, E::Short),
        ("answers", sent(3, 3, &answers), 6, E::Short),
        ("cut", cut, 1, E::Short),
        ("empty", Vec::new(), 0, E::Short),
        ("handshake", from_stranger.clone(), 2, E::Short),
        ("handshake-answers", from_listener, 2, E::Short),
        (
            "huge-length",
            with(from_stranger.clone(), length + 3, 0xff),
            0,
            E::Length(Kind::Hello, 0xff00_0029),
        ),
        (
            "huge-message",
            with(gathered.clone(), HEADER_BYTES + 3, 0xff),
            0,
            E::Payload(Kind::Gathered),
        ),
        ("refused", refused, 1, E::Short),
        (
            "round-where-none-is",
            with(from_stranger, 8, 1),
            0,
            E::Round(Kind::Hello),
        ),
        (
            "short-message",
            with(gathered, HEADER_BYTES, 0),
            0,
            E::Payload(Kind::Gathered),
        ),
        ("words", sent(2, 3, &words), 2, E::Short),
        (
            "stranger-calls",
            sent(0, 3, &calls),
            0,
            E::Unexpected(Kind::Message, Sender::Stranger),
        ),
        (
            "stranger-says-hello-for-rank-0",
            sent(3, 3, &[hello]),
            0,
            E::Unexpected(Kind::Hello, Sender::Root),
        ),
    ]
}

fn folder() -> &'static Path {
    Path::new(concat!(env!("CARGO_MANIFEST_DIR"), "/tests/corpus"))
}

/// Files that the fuzzer found are replayed too. `UPDATE_CORPUS=1` writes those that are listed here.
#[test]
fn the_corpus_is_read_as_it_always_was() {
    let mut files = BTreeMap::new();
    for entry in fs::read_dir(folder()).unwrap() {
        let path = entry.unwrap().path();
        let name = path.file_name().unwrap().to_str().unwrap().to_owned();
        files.insert(name, fs::read(path).unwrap());
    }
    for (name, bytes, frames, why) in corpus() {
        if std::env::var_os("UPDATE_CORPUS").is_some() {
            fs::write(folder().join(name), &bytes).unwrap();
            files.insert(name.into(), bytes.clone());
        }
        assert_eq!(
            files.get(name),
            Some(&bytes),
            "{name}: version 1 has changed"
        );
        assert_eq!(check(&bytes), (frames, why), "{name}");
    }
    for (name, bytes) in &files {
        let (frames, why) = check(bytes);
        assert!(frames <= bytes.len() / HEADER_BYTES, "{name}: {why}");
    }
}

#[test]
fn nobody_may_send_more_than_is_allowed() {
    let head = |kind: Kind, bytes: u32| {
        let mut raw = [0; HEADER_BYTES];
        raw.copy_from_slice(&Frame::alone(Body::Beat).encode());
        raw[6..8].copy_from_slice(&(kind as u16).to_le_bytes());
        raw[16..].copy_from_slice(&bytes.to_le_bytes());
        raw
    };
    for size in [1, 8, 1024] {
        let most = message_limit(size) as u32;
        assert!((most as usize + 4) * size <= MOST_BYTES);
        let longest = Header::parse(&head(Kind::Message, most), Sender::Member, size);
        assert_eq!(longest.unwrap().bytes, most as usize);
        let longer = Header::parse(&head(Kind::Message, most + 1), Sender::Member, size);
        assert_eq!(
            longer,
            Err(FrameError::Length(Kind::Message, most as usize + 1))
        );
    }
    let huge = Header::parse(
        &head(Kind::Gathered, MOST_BYTES as u32 + 1),
        Sender::Root,
        3,
    );
    assert_eq!(
        huge,
        Err(FrameError::Length(Kind::Gathered, MOST_BYTES + 1))
    );
    let small = Header::parse(&head(Kind::Gathered, 11), Sender::Root, 3);
    assert_eq!(small, Err(FrameError::Length(Kind::Gathered, 11)));
}

#[test]
fn long_texts_are_cut_between_characters() {
    let long = "ü".repeat(SMALL_BYTES);
    for (body, from) in [
        (Body::Refused(&long), Sender::Listener),
        (Body::Lost(0, &long), Sender::Root),
    ] {
        let bytes = Frame::alone(body).encode();
        assert_eq!(bytes.len(), HEADER_BYTES + SMALL_BYTES);
        assert!(Frame::split(&bytes, from, 1).is_ok());
    }
}

fn frames() -> impl Strategy<Value = (u8, u8, Vec<u8>)> {
    let bytes = || prop::collection::vec(any::<u8>(), 0..200);
    let all = prop::collection::vec(bytes(), 1..8);
    let (nonce, session) = (any::<[u8; 32]>(), any::<[u8; 16]>());
    prop_oneof![
        (any::<(u32, u32, bool)>(), nonce).prop_map(|((rank, size, has_secret), nonce)| {
            let hello = Hello {
                rank,
                size,
                has_secret,
                nonce,
            };
            (0, 0, Frame::alone(Body::Hello(hello)).encode())
        }),
        (session, nonce).prop_map(|(session, nonce)| {
            let body = Body::Challenge(Challenge { session, nonce });
            (1, 0, Frame::alone(body).encode())
        }),
        (any::<u64>(), bytes()).prop_map(|(round, message)| {
            let body = Body::Message(&message);
            (2, 3, Frame { round, body }.encode())
        }),
        (any::<u64>(), all).prop_map(|(round, all)| {
            let ranks = all.len() as u8 - 1;
            let body = Body::Gathered(all.iter().map(Vec::as_slice).collect());
            (3, ranks, Frame { round, body }.encode())
        }),
        (0..4u32, bytes())
            .prop_map(|(rank, what)| { (2, 3, Frame::alone(Body::Word(rank, &what)).encode()) }),
        (any::<u64>(), ".{0,80}").prop_map(|(round, why)| {
            (
                3,
                3,
                Frame {
                    round,
                    body: Body::Failed(&why),
                }
                .encode(),
            )
        }),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, cases: 2000, ..ProptestConfig::default() })]

    #[test]
    fn what_is_encoded_is_read_back((from, ranks, frame) in frames(), more in 1..4usize) {
        let mut bytes = vec![from, ranks];
        bytes.extend(frame.repeat(more));
        prop_assert_eq!(check(&bytes), (more, FrameError::Short));
    }

    #[test]
    fn a_changed_byte_is_refused_or_means_something_else(
        (from, ranks, frame) in frames(), at in any::<prop::sample::Index>(), change in 1..=255u8,
    ) {
        let mut bytes = vec![from, ranks];
        bytes.extend(&frame);
        let at = 2 + at.index(frame.len());
        bytes[at] ^= change;
        // What is taken is checked to be what is there.
        prop_assert!(check(&bytes).0 <= 1 + frame.len() / HEADER_BYTES);
    }

    #[test]
    fn any_bytes_are_read_without_a_panic(bytes in prop::collection::vec(any::<u8>(), 0..300)) {
        prop_assert!(check(&bytes).0 <= bytes.len() / HEADER_BYTES);
    }
}
