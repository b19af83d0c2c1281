//! Two strangers become ranks of one group.
//!
//! ```text
//! rank r -> rank 0   Hello      rank, size, a fresh number
//! rank 0 -> rank r   Challenge  session, a fresh number
//! rank r -> rank 0   Proof
//! rank 0 -> rank r   Welcome    rank 0's proof         (or Refused, with a text, instead of Challenge or Welcome)
//! ```
//!
//! Invariant: until the other side's proof is checked, all reads go into memory of fixed length, and all have one deadline.

use super::{
    TcpConfig,
    address::Failure,
    socket::{Limit, Stream},
};
use crate::{
    Deadline, Secret,
    frame::{
        Body, Challenge, Frame, FrameError, HEADER_BYTES, Header, Hello, MAGIC, SMALL_BYTES, Sender,
    },
    proof::{Meeting, Prover, random},
};
use brigade_device::{Error, Result};
use std::{io, time::Duration};

/// How long a refused stranger may take to read why.
const PARTING: Duration = Duration::from_millis(500);

/// Somebody who has proved to be a rank, before the answer.
pub(crate) struct Proven {
    pub(crate) hello: Hello,
    pub(crate) stream: Stream,
    /// Rank 0's proof, to be sent.
    pub(crate) welcome: [u8; 32],
}

/// Somebody who is not taken.
#[derive(Default)]
pub(crate) struct Turned {
    /// For rank 0's user, if there is anything to tell.
    pub(crate) note: Option<String>,
    /// One of ours who should know why.
    pub(crate) parting: Option<(Stream, String)>,
}

impl From<Error> for Turned {
    fn from(error: Error) -> Self {
        let note = Some(error.to_string());
        Self {
            note,
            parting: None,
        }
    }
}

/// What rank 0 knows before anybody comes.
#[derive(Clone)]
pub(crate) struct Door {
    pub(crate) secret: Option<Secret>,
    pub(crate) session: [u8; 16],
}

impl Door {
    /// Rank 0's side.
    pub(crate) fn check(&self, stream: Stream, deadline: Deadline) -> Result<Proven, Turned> {
        let mut buffer = [0; SMALL_BYTES];
        // Now, since nobody can tell once it has left.
        let peer = stream.peer();
        let note = |why: &str| Turned {
            note: Some(format!("{peer} ({why})")),
            parting: None,
        };
        let refuse = |stream: Stream, why: &str| Turned {
            parting: Some((stream, why.to_owned())),
            ..note(why)
        };
        if stream.is_same_user() == Some(false) {
            return Err(note("another user's process"));
        }
        let hello = match read(&stream, &mut buffer, Sender::Stranger, deadline) {
            Ok(Frame {
                body: Body::Hello(hello),
                ..
            }) => hello,
            Err(Unread::Wrong(why @ FrameError::Version(_))) => {
                return Err(refuse(stream, &why.to_string()));
            }
            Err(Unread::Ended(None)) => return Err(Turned::default()),
            // Not one of ours: no answer.
            other => return Err(note(&why(other))),
        };
        match (hello.has_secret, self.secret.is_some()) {
            (false, true) => return Err(refuse(stream, "it has no secret, rank 0 has one")),
            (true, false) => return Err(refuse(stream, "it has a secret, rank 0 has none")),
            _ => {}
        }
        let meeting = Meeting {
            rank: hello.rank,
            size: hello.size,
            session: self.session,
            member_nonce: hello.nonce,
            root_nonce: random()?,
        };
        let challenge = Frame::alone(Body::Challenge(Challenge {
            session: meeting.session,
            nonce: meeting.root_nonce,
        }));
        let answer = stream
            .write_full(&challenge.encode(), Limit::By(deadline))
            .map_err(Unread::from)
            .and_then(|()| read(&stream, &mut buffer, Sender::Stranger, deadline));
        let tag = match answer {
            Ok(Frame {
                body: Body::Proof(tag),
                ..
            }) => tag,
            other => return Err(note(&why(other))),
        };
        let secret = self.secret.as_ref();
        if !meeting.is_proven(secret, Prover::Member, &tag) {
            return Err(refuse(stream, "its proof is wrong: it has another secret"));
        }
        let welcome = meeting.proof(secret, Prover::Root);
        Ok(Proven {
            hello,
            stream,
            welcome,
        })
    }
}

/// The other ranks' side.
pub(crate) fn join(stream: &Stream, config: &TcpConfig, deadline: Deadline) -> Result<(), Failure> {
    let mut buffer = [0; SMALL_BYTES];
    let ever = |what: String| Failure::Ever(super::joining(what));
    if stream.is_same_user() == Some(false) {
        return Err(ever(format!(
            "another user's process listens at {}",
            config.address
        )));
    }
    let nonce = random().map_err(Failure::Ever)?;
    let hello = Hello {
        rank: config.rank as u32,
        size: config.size as u32,
        has_secret: config.secret.is_some(),
        nonce,
    };
    let limit = Limit::By(deadline);
    stream.write_full(&Frame::alone(Body::Hello(hello)).encode(), limit)?;
    let mut next = || match read(stream, &mut buffer, Sender::Listener, deadline) {
        Ok(Frame {
            body: Body::Refused(why),
            ..
        }) => Err(ever(format!("refused by rank 0: {why}"))),
        Ok(Frame {
            body: Body::Challenge(challenge),
            ..
        }) => Ok(Answer::Challenge(challenge)),
        Ok(Frame {
            body: Body::Welcome(tag),
            ..
        }) => Ok(Answer::Welcome(tag)),
        Err(Unread::Wrong(why)) => Err(ever(format!(
            "what listens at {} is not this group's rank 0: {why}",
            config.address
        ))),
        // It may be the end of an earlier group.
        other => Err(Failure::Now(why(other))),
    };
    let order = || ever("rank 0 answers out of order".into());
    let Answer::Challenge(Challenge {
        session,
        nonce: root_nonce,
    }) = next()?
    else {
        return Err(order());
    };
    let meeting = Meeting {
        rank: hello.rank,
        size: hello.size,
        session,
        member_nonce: nonce,
        root_nonce,
    };
    let secret = config.secret.as_ref();
    let proof = meeting.proof(secret, Prover::Member);
    stream.write_full(&Frame::alone(Body::Proof(proof)).encode(), limit)?;
    let Answer::Welcome(tag) = next()? else {
        return Err(order());
    };
    if !meeting.is_proven(secret, Prover::Root, &tag) {
        return Err(ever(format!(
            "what listens at {} does not know the secret",
            config.address
        )));
    }
    Ok(())
}

enum Answer {
    Challenge(Challenge),
    Welcome([u8; 32]),
}

/// Tells a stranger why it cannot stay, and lets it read that.
pub(crate) fn part(stream: &Stream, why: &str) {
    let limit = Limit::By(Deadline::after(PARTING));
    let refused = Frame::alone(Body::Refused(why)).encode();
    if stream.write_full(&refused, limit).is_ok() {
        stream.finish();
        // What lies unread when a socket is closed can take with it what was written.
        let mut rest = [0; SMALL_BYTES];
        for _ in 0..64 {
            if !matches!(stream.read_some(&mut rest, limit), Ok(1..)) {
                break;
            }
        }
    }
}

/// Why there is no frame.
enum Unread {
    /// The connection ended; with the error, if it did not just close before the first byte.
    Ended(Option<io::Error>),
    Wrong(FrameError),
}

impl From<io::Error> for Unread {
    fn from(error: io::Error) -> Self {
        Self::Ended(Some(error))
    }
}

/// One frame of somebody who has proved nothing.
fn read<'a>(
    stream: &Stream,
    buffer: &'a mut [u8; SMALL_BYTES],
    from: Sender,
    deadline: Deadline,
) -> Result<Frame<'a>, Unread> {
    let limit = Limit::By(deadline);
    let mut head = [0; HEADER_BYTES];
    let got = match stream.read_some(&mut head, limit)? {
        0 => return Err(Unread::Ended(None)),
        got => got,
    };
    // Whoever does not begin with our name is not waited for.
    let known = got.min(MAGIC.len());
    if head[..known] != MAGIC[..known] {
        return Err(Unread::Wrong(FrameError::Magic));
    }
    stream.read_full(&mut head[got..], limit)?;
    // Nothing that a stranger may send has a length that depends on the size of the group.
    let header = Header::parse(&head, from, 1).map_err(Unread::Wrong)?;
    let payload = &mut buffer[..header.bytes];
    stream.read_full(payload, limit)?;
    Frame::parse(&header, payload, 1).map_err(Unread::Wrong)
}

fn why(read: Result<Frame<'_>, Unread>) -> String {
    match read {
        Ok(frame) => format!("a {:?} out of order", frame.body.kind()),
        Err(Unread::Wrong(error)) => error.to_string(),
        Err(Unread::Ended(None)) => "it closed the connection".into(),
        Err(Unread::Ended(Some(error))) => match error.kind() {
            io::ErrorKind::TimedOut => "it was too slow".into(),
            io::ErrorKind::UnexpectedEof => "it closed the connection".into(),
            _ => error.to_string(),
        },
    }
}

/// The error of a rank that cannot have joined.
pub(crate) fn unreached(config: &TcpConfig, within: Duration, last: &str) -> Error {
    super::joining(format!(
        "no rank 0 at {} after {within:?}: {last}",
        config.address
    ))
}
