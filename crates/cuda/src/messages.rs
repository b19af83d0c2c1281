//! Messages between pairs of ranks, several at a time: what send, receive and all-to-all are made of.

use crate::{
    Launch,
    inject::Asker,
    job::{Job, Made, waiting},
    steps::{Counters, Use},
};
use brigade_device::{Error, Reason, Result};
use brigade_kernels::{MESSAGE_THREADS, MOST_MESSAGES, MessagesParams};
use brigade_plan::MAX_PIECES;
use brigade_sync::{Area, Half};

/// A message to or from a peer.
pub(crate) struct Message {
    pub(crate) peer: usize,
    pub(crate) receives: bool,
    pub(crate) signature: u32,
    pub(crate) address: u64,
    pub(crate) bytes: usize,
}

/// Blocks that carry a message when it is alone.
pub(crate) const BLOCKS_ALONE: u32 = 8;
/// Blocks that carry each of many.
pub(crate) const BLOCKS_EACH: u32 = 4;

/// Most blocks of one launch.
pub(crate) fn most_blocks(size: usize) -> u32 {
    BLOCKS_ALONE.max(2 * size.saturating_sub(1) as u32 * BLOCKS_EACH)
}

impl Job<'_> {
    /// Enqueues messages behind the steps so far, each carried by `blocks` blocks; both sides must say the same. In a call that
    /// all ranks make, a sender waits until its messages were read: so it hears of a receiver that wanted something else.
    pub(crate) fn messages(&mut self, list: &[Message], blocks: u32) -> Result<()> {
        self.steps_now()?;
        if list.is_empty() {
            return Ok(());
        }
        if list.len() > MOST_MESSAGES {
            return Err(Reason::new(
                "cuda-ranks",
                format!("{} messages at once, {MOST_MESSAGES} at most", list.len()),
                "make smaller groups",
            )
            .into());
        }
        let core = self.core;
        let layout = core.control.layout();
        let half = |n| Use {
            area: Area::Mail,
            half: Half::of(n),
        };
        let (slots, next) = (core.data_offset(half(0)), core.data_offset(half(1)));
        let mut parameters = MessagesParams {
            desk: core.memory.desk(Asker::Messages),
            slots: slots as u64,
            half_bytes: (next - slots) as u64,
            slot_bytes: (layout.half_bytes(Area::Mail) / core.size()) as u64,
            call_signature: self.kind.signature,
            ring: layout.ring(Area::Mail).base as u32,
            pieces: u32::from(MAX_PIECES),
            blocks,
            count: list.len() as u32,
            confirmed: u32::from(self.kind.made == Made::Together),
            counters: Counters::new(core.size()).messages() as u32,
            ..waiting!(MessagesParams, self)
        };
        for (i, message) in list.iter().enumerate() {
            parameters.peer[i] = message.peer as u32 + if message.receives { 256 } else { 0 };
            parameters.signature[i] = message.signature;
            parameters.local[i] = message.address;
            parameters.bytes[i] = message.bytes as u64;
            if !message.receives {
                self.count_moved(message.bytes);
            }
        }
        let kernel = &core.device.opened.kernels.messages;
        let shape = Launch::grid(blocks * list.len() as u32, MESSAGE_THREADS);
        // SAFETY: the messages lie in buffers of the call, the rest in the group's memory, which the core keeps.
        unsafe { kernel.launch(self.stream, shape, parameters) }.map_err(Error::from)
    }
}
