//! What must hold for any bytes that somebody sends. The fuzz target includes this file too.

use brigade_group::frame::{
    Frame, FrameError, HEADER_BYTES, Header, MOST_BYTES, SMALL_BYTES, Sender,
};

const SENDERS: [Sender; 4] = [
    Sender::Stranger,
    Sender::Listener,
    Sender::Member,
    Sender::Root,
];

/// Reads `bytes` as a reader would: the first says who sends them, the second how many ranks there are, frames follow.
/// Gives how many frames were taken, and why no more.
///
/// # Panics
/// If the parser takes what it should not, or takes something else than what is there.
pub fn check(bytes: &[u8]) -> (usize, FrameError) {
    let (&[from, size], mut rest) = bytes.split_first_chunk().unwrap_or((&[0, 0], &[]));
    let from = SENDERS[usize::from(from) % SENDERS.len()];
    let size = 1 + usize::from(size) % 16;
    let mut count = 0;
    loop {
        if let Some(head) = rest.first_chunk::<HEADER_BYTES>()
            && let Ok(header) = Header::parse(head, from, size)
        {
            let proven = matches!(from, Sender::Member | Sender::Root);
            let most = if proven { MOST_BYTES } else { SMALL_BYTES };
            assert!(header.bytes <= most, "{header:?} from {from:?}");
        }
        match Frame::split(rest, from, size) {
            Ok((frame, after)) => {
                let taken = &rest[..rest.len() - after.len()];
                assert!(frame.encode() == taken, "{frame:?} has two encodings");
                (count, rest) = (count + 1, after);
            }
            Err(why) => return (count, why),
        }
    }
}
