//! What ranks send each other over a socket: a header of fixed length, then as many bytes as it says.
//!
//! ```text
//! magic 4 | version 2 | kind 2 | round 8 | length 4 | payload          all numbers little-endian
//! ```
//!
//! Invariant: a [`Header`] exists only for a kind that this [`Sender`] may send now, with a length that this kind can
//! have. So a reader asks for memory only after it knows what for, and a stranger's frames (at most [`SMALL_BYTES`]) need
//! none. There is one encoding of every frame: what [`Frame::parse`] takes, [`Frame::encode`] gives back bit for bit.

mod body;

pub use body::{Body, Challenge, Frame, Hello, message_limit};

/// Most bytes of a word.
pub const WORD_BYTES: usize = SMALL_BYTES - 4;

use std::ops::RangeInclusive;

/// The first bytes of every frame.
pub const MAGIC: [u8; 4] = *b"BRGD";
/// What both sides must speak. The place of magic and version is the same in every version.
pub const VERSION: u16 = 1;
/// Bytes of every header.
pub const HEADER_BYTES: usize = 20;
/// Most bytes that follow any header.
pub const MOST_BYTES: usize = 16 << 20;
/// Most bytes that follow a header before the sender has proved who it is.
pub const SMALL_BYTES: usize = 512;
/// Most ranks of a group.
pub const MOST_RANKS: usize = brigade_device::Group::MOST_RANKS;
/// Most bytes of a text about a failed call.
const TEXT_BYTES: usize = 8192;

/// What a frame is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u16)]
pub enum Kind {
    /// A rank says who it is.
    Hello = 1,
    /// Rank 0 asks it to prove that.
    Challenge = 2,
    /// It does.
    Proof = 3,
    /// So does rank 0.
    Welcome = 4,
    /// Rank 0 does not take it.
    Refused = 5,
    /// A rank's message of a round.
    Message = 6,
    /// A rank does not wait for this round any longer.
    GiveUp = 7,
    /// A rank's message of this round is too long to be sent.
    TooLong = 8,
    /// Everybody's messages of a round.
    Gathered = 9,
    /// Why there are none.
    Failed = 10,
    /// A rank is lost.
    Lost = 11,
    /// Still here.
    Beat = 12,
    /// Will not come any more.
    Bye = 13,
    /// What a rank tells all others between rounds.
    Word = 14,
}

impl Kind {
    const ALL: [Self; 14] = [
        Self::Hello,
        Self::Challenge,
        Self::Proof,
        Self::Welcome,
        Self::Refused,
        Self::Message,
        Self::GiveUp,
        Self::TooLong,
        Self::Gathered,
        Self::Failed,
        Self::Lost,
        Self::Beat,
        Self::Bye,
        Self::Word,
    ];

    /// How many bytes may follow, in a group of `size` ranks.
    fn lengths(self, size: usize) -> RangeInclusive<usize> {
        match self {
            Self::Hello => 41..=41,
            Self::Challenge => 48..=48,
            Self::Proof | Self::Welcome => 32..=32,
            Self::Refused => 0..=SMALL_BYTES,
            Self::Message => 0..=message_limit(size),
            Self::GiveUp | Self::TooLong => 8..=8,
            Self::Gathered => 4 * size..=MOST_BYTES,
            Self::Failed => 0..=TEXT_BYTES,
            Self::Lost | Self::Word => 4..=SMALL_BYTES,
            Self::Beat | Self::Bye => 0..=0,
        }
    }

    fn has_round(self) -> bool {
        matches!(
            self,
            Self::Message | Self::GiveUp | Self::TooLong | Self::Gathered | Self::Failed
        )
    }
}

/// Who sends, as far as is known; it decides what may be sent.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Sender {
    /// Whoever connected to rank 0 and has proved nothing yet.
    Stranger,
    /// Whoever listens where rank 0 should, and has proved nothing yet.
    Listener,
    /// A proven rank, to rank 0.
    Member,
    /// The proven rank 0.
    Root,
}

impl Sender {
    fn may_send(self, kind: Kind) -> bool {
        match self {
            Self::Stranger => matches!(kind, Kind::Hello | Kind::Proof),
            Self::Listener => matches!(kind, Kind::Challenge | Kind::Welcome | Kind::Refused),
            Self::Member => matches!(
                kind,
                Kind::Message | Kind::GiveUp | Kind::TooLong | Kind::Beat | Kind::Bye | Kind::Word
            ),
            Self::Root => matches!(
                kind,
                Kind::Gathered | Kind::Failed | Kind::Lost | Kind::Beat | Kind::Bye | Kind::Word
            ),
        }
    }
}

/// What is wrong with a frame.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum FrameError {
    /// It does not begin like one.
    #[error("it does not begin with {MAGIC:?}")]
    Magic,
    /// It is of another version.
    #[error("it speaks version {0}, this is version {VERSION}")]
    Version(u16),
    /// There is no such kind.
    #[error("there is no frame of kind {0}")]
    Kind(u16),
    /// There is such a kind, but not from there, or not now.
    #[error("{0:?} is not for {1:?} to send now")]
    Unexpected(Kind, Sender),
    /// No frame of this kind is so long, or so short.
    #[error("a {0:?} of {1} bytes")]
    Length(Kind, usize),
    /// A round where none belongs.
    #[error("a {0:?} in a round")]
    Round(Kind),
    /// The bytes do not say what this kind says.
    #[error("a {0:?} that cannot be understood")]
    Payload(Kind),
    /// It ends too soon.
    #[error("it ends too soon")]
    Short,
}

/// The checked beginning of a frame.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Header {
    /// What it is for.
    pub kind: Kind,
    /// Which call of the group it belongs to; 0 where it belongs to none.
    pub round: u64,
    /// How many bytes follow.
    pub bytes: usize,
}

impl Header {
    /// # Errors
    /// Whatever makes it a frame that this sender cannot send now, in a group of `size` ranks.
    pub fn parse(raw: &[u8; HEADER_BYTES], from: Sender, size: usize) -> Result<Self, FrameError> {
        let mut left = &raw[..];
        let short = FrameError::Short;
        if take::<4>(&mut left) != Some(MAGIC) {
            return Err(FrameError::Magic);
        }
        let version = take(&mut left)
            .map(u16::from_le_bytes)
            .ok_or(short.clone())?;
        if version != VERSION {
            return Err(FrameError::Version(version));
        }
        let kind = take(&mut left)
            .map(u16::from_le_bytes)
            .ok_or(short.clone())?;
        let round = take(&mut left)
            .map(u64::from_le_bytes)
            .ok_or(short.clone())?;
        let bytes = take(&mut left).map(u32::from_le_bytes).ok_or(short)? as usize;

        let known = Kind::ALL.iter().find(|k| **k as u16 == kind);
        let kind = *known.ok_or(FrameError::Kind(kind))?;
        if !from.may_send(kind) {
            return Err(FrameError::Unexpected(kind, from));
        }
        if !kind.lengths(size).contains(&bytes) {
            return Err(FrameError::Length(kind, bytes));
        }
        if round != 0 && !kind.has_round() {
            return Err(FrameError::Round(kind));
        }
        Ok(Self { kind, round, bytes })
    }
}

/// The next `N` bytes.
fn take<const N: usize>(from: &mut &[u8]) -> Option<[u8; N]> {
    let (head, rest) = from.split_first_chunk::<N>()?;
    *from = rest;
    Some(*head)
}
