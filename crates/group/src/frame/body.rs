//! What the bytes after a header say.

use super::{
    FrameError, HEADER_BYTES, Header, Kind, MAGIC, MOST_BYTES, SMALL_BYTES, Sender, TEXT_BYTES,
    VERSION, take,
};

/// Longest message of one rank in bytes, so that everybody's fit into one frame.
pub fn message_limit(size: usize) -> usize {
    MOST_BYTES / size.max(1) - 4
}

/// A rank says who it is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Hello {
    /// Its number.
    pub rank: u32,
    /// Ranks in its group.
    pub size: u32,
    /// Whether it was given a secret.
    pub has_secret: bool,
    /// What rank 0's proof must be about.
    pub nonce: [u8; 32],
}

/// Rank 0 asks for a proof.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Challenge {
    /// The same for all ranks of this group, and for no other group.
    pub session: [u8; 16],
    /// What the proof must be about.
    pub nonce: [u8; 32],
}

/// The payload of a frame, by kind.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Body<'a> {
    /// A rank says who it is.
    Hello(Hello),
    /// Rank 0 asks for a proof.
    Challenge(Challenge),
    /// A rank's proof.
    Proof([u8; 32]),
    /// Rank 0's proof.
    Welcome([u8; 32]),
    /// Why rank 0 does not take whoever asks.
    Refused(&'a str),
    /// A rank's message.
    Message(&'a [u8]),
    /// How long the rank has waited, in microseconds.
    GiveUp(u64),
    /// How long the message would have been, in bytes.
    TooLong(u64),
    /// Everybody's messages, in rank order.
    Gathered(Vec<&'a [u8]>),
    /// Why there are none.
    Failed(&'a str),
    /// This rank is lost, and how that was noticed.
    Lost(u32, &'a str),
    /// Still here.
    Beat,
    /// Will not come any more.
    Bye,
    /// What this rank tells all others.
    Word(u32, &'a [u8]),
}

/// One frame.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Frame<'a> {
    /// Which call of the group it belongs to; 0 where it belongs to none.
    pub round: u64,
    /// What it says.
    pub body: Body<'a>,
}

impl<'a> Frame<'a> {
    /// A frame that belongs to no round.
    pub fn alone(body: Body<'a>) -> Self {
        Self { round: 0, body }
    }

    /// What the bytes after `header` say, in a group of `size` ranks.
    ///
    /// # Errors
    /// [`FrameError::Payload`] if they do not say it.
    pub fn parse(header: &Header, payload: &'a [u8], size: usize) -> Result<Self, FrameError> {
        let wrong = FrameError::Payload(header.kind);
        if payload.len() != header.bytes {
            return Err(FrameError::Short);
        }
        let body = body(header.kind, payload, size).ok_or(wrong)?;
        let round = header.round;
        Ok(Self { round, body })
    }

    /// The frame at the beginning of `bytes`, and the rest.
    ///
    /// # Errors
    /// As [`Header::parse`] and [`Frame::parse`]; [`FrameError::Short`] if `bytes` ends before the frame does.
    pub fn split(
        bytes: &'a [u8],
        from: Sender,
        size: usize,
    ) -> Result<(Self, &'a [u8]), FrameError> {
        let (head, rest) = bytes
            .split_first_chunk::<HEADER_BYTES>()
            .ok_or(FrameError::Short)?;
        let header = Header::parse(head, from, size)?;
        let (payload, rest) = rest
            .split_at_checked(header.bytes)
            .ok_or(FrameError::Short)?;
        Ok((Self::parse(&header, payload, size)?, rest))
    }

    /// As it is sent. Texts that are too long are cut; messages must not be.
    pub fn encode(&self) -> Vec<u8> {
        let mut out = Vec::with_capacity(HEADER_BYTES + 64);
        out.extend(MAGIC);
        out.extend(VERSION.to_le_bytes());
        out.extend((self.body.kind() as u16).to_le_bytes());
        out.extend(self.round.to_le_bytes());
        out.extend([0; 4]);
        self.body.put(&mut out);
        let bytes = out.len() - HEADER_BYTES;
        debug_assert!(bytes <= MOST_BYTES);
        out[HEADER_BYTES - 4..HEADER_BYTES].copy_from_slice(&(bytes as u32).to_le_bytes());
        out
    }
}

impl Body<'_> {
    /// What the frame is for.
    pub fn kind(&self) -> Kind {
        match self {
            Self::Hello(_) => Kind::Hello,
            Self::Challenge(_) => Kind::Challenge,
            Self::Proof(_) => Kind::Proof,
            Self::Welcome(_) => Kind::Welcome,
            Self::Refused(_) => Kind::Refused,
            Self::Message(_) => Kind::Message,
            Self::GiveUp(_) => Kind::GiveUp,
            Self::TooLong(_) => Kind::TooLong,
            Self::Gathered(_) => Kind::Gathered,
            Self::Failed(_) => Kind::Failed,
            Self::Lost(..) => Kind::Lost,
            Self::Beat => Kind::Beat,
            Self::Bye => Kind::Bye,
            Self::Word(..) => Kind::Word,
        }
    }

    fn put(&self, out: &mut Vec<u8>) {
        match self {
            Self::Hello(hello) => {
                out.extend(hello.rank.to_le_bytes());
                out.extend(hello.size.to_le_bytes());
                out.push(u8::from(hello.has_secret));
                out.extend(hello.nonce);
            }
            Self::Challenge(challenge) => {
                out.extend(challenge.session);
                out.extend(challenge.nonce);
            }
            Self::Proof(tag) | Self::Welcome(tag) => out.extend(tag),
            Self::Refused(why) => out.extend(cut(why, SMALL_BYTES).as_bytes()),
            Self::Message(message) => out.extend_from_slice(message),
            Self::GiveUp(number) | Self::TooLong(number) => out.extend(number.to_le_bytes()),
            Self::Gathered(all) => {
                for message in all {
                    out.extend((message.len() as u32).to_le_bytes());
                    out.extend_from_slice(message);
                }
            }
            Self::Failed(why) => out.extend(cut(why, TEXT_BYTES).as_bytes()),
            Self::Lost(rank, why) => {
                out.extend(rank.to_le_bytes());
                out.extend(cut(why, SMALL_BYTES - 4).as_bytes());
            }
            Self::Word(rank, what) => {
                out.extend(rank.to_le_bytes());
                out.extend_from_slice(what);
            }
            Self::Beat | Self::Bye => {}
        }
    }
}

fn body(kind: Kind, payload: &[u8], size: usize) -> Option<Body<'_>> {
    let mut left = payload;
    let body = match kind {
        Kind::Hello => Body::Hello(Hello {
            rank: take(&mut left).map(u32::from_le_bytes)?,
            size: take(&mut left).map(u32::from_le_bytes)?,
            has_secret: match take(&mut left)? {
                [0] => false,
                [1] => true,
                _ => return None,
            },
            nonce: take(&mut left)?,
        }),
        Kind::Challenge => Body::Challenge(Challenge {
            session: take(&mut left)?,
            nonce: take(&mut left)?,
        }),
        Kind::Proof => Body::Proof(take(&mut left)?),
        Kind::Welcome => Body::Welcome(take(&mut left)?),
        Kind::Refused => Body::Refused(text(&mut left)?),
        Kind::Message => Body::Message(std::mem::take(&mut left)),
        Kind::GiveUp => Body::GiveUp(take(&mut left).map(u64::from_le_bytes)?),
        Kind::TooLong => Body::TooLong(take(&mut left).map(u64::from_le_bytes)?),
        Kind::Gathered => {
            let mut all = Vec::with_capacity(size);
            for _ in 0..size {
                let bytes = take(&mut left).map(u32::from_le_bytes)? as usize;
                let (message, rest) = left.split_at_checked(bytes)?;
                all.push(message);
                left = rest;
            }
            Body::Gathered(all)
        }
        Kind::Failed => Body::Failed(text(&mut left)?),
        Kind::Lost => {
            let rank = take(&mut left).map(u32::from_le_bytes)?;
            if rank as usize >= size {
                return None;
            }
            Body::Lost(rank, text(&mut left)?)
        }
        Kind::Beat => Body::Beat,
        Kind::Bye => Body::Bye,
        Kind::Word => {
            let rank = take(&mut left).map(u32::from_le_bytes)?;
            if rank as usize >= size {
                return None;
            }
            Body::Word(rank, std::mem::take(&mut left))
        }
    };
    left.is_empty().then_some(body)
}

fn text<'a>(from: &mut &'a [u8]) -> Option<&'a str> {
    std::str::from_utf8(std::mem::take(from)).ok()
}

/// At most `bytes` of a text, in whole characters.
fn cut(text: &str, bytes: usize) -> &str {
    let mut end = bytes.min(text.len());
    while !text.is_char_boundary(end) {
        end -= 1;
    }
    &text[..end]
}
