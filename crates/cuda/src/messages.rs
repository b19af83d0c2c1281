//! Messages between pairs of ranks, several at a time: what send, receive and all-to-all are made of.

use crate::{
    Launch,
    core::Core,
    inject::Asker,
    job::{Job, waiting},
    lane::Lane,
    residency::most_messages,
    steps::{Counters, Use},
    types,
};
use brigade_device::{DataType, Device, Error, Reason, Result};
use brigade_kernels::{MESSAGE_THREADS, MOST_MESSAGES, MessagesParams};
use brigade_plan::MAX_PIECES;
use brigade_sync::{Area, Half};
use std::sync::atomic::Ordering;

/// A message to or from a peer; or, received from this rank, what it has for itself in a call of all ranks.
pub(crate) struct Message {
    pub(crate) peer: usize,
    pub(crate) receives: bool,
    pub(crate) signature: u32,
    pub(crate) address: u64,
    pub(crate) bytes: usize,
}

/// Blocks that may carry each of a few messages in any case: what waits on a GPU keeps tiles of other communicators out, so they are no more
/// than many messages have.
const BLOCKS_ALONE: u32 = 8;
/// Most of them where no such tiles are in sight.
const BLOCKS_WIDE: u32 = 32;
/// Slots of each sender in a half.
const SLOTS: usize = 2;
/// Messages of a call between two ranks.
const MOST_ALONE: u32 = 2;
/// Bytes of a packet: what a thread carries at a time, and with the word behind it (`kernels/escaped.cuh`).
const PACKET: (usize, usize) = (64, 68);
/// Threads of a block that have a packet where blocks are many enough: a block whose threads all had one took 2 us longer.
const FEW_THREADS: u32 = MESSAGE_THREADS / 4;
/// Blocks that carry each of many, where nobody shares a GPU.
pub(crate) const BLOCKS_EACH: u32 = 4;

/// Most blocks of one launch that may wait where so many carry each message. Those for what a rank has for itself stand behind them, wait for
/// nobody, and ask no hook.
pub(crate) fn most_blocks(size: usize, each: u32) -> u32 {
    (MOST_ALONE * BLOCKS_ALONE).max(2 * size.saturating_sub(1) as u32 * each)
}

/// Blocks that carry each of many messages, where so many ranks of the group share a GPU: their blocks may all wait at once, for each
/// other's, so they must find places there, and those of a few more groups beside them. One at least, whatever that takes.
pub(crate) fn blocks_each(size: usize, sharing: usize) -> u32 {
    /// Of all ranks of a group that are on one GPU: a quarter of what an H200 holds.
    const SHARED_BLOCKS: u32 = 64;
    if sharing < 2 {
        return BLOCKS_EACH;
    }
    let fits = |each: &u32| most_blocks(size, *each) * sharing as u32 <= SHARED_BLOCKS;
    [BLOCKS_EACH, 2].into_iter().find(fits).unwrap_or(1)
}

/// Bytes of the longest.
fn longest(list: &[Message]) -> usize {
    list.iter().map(|message| message.bytes).max().unwrap_or(0)
}

/// Blocks for each of some messages, of which the longest has so many bytes: so many of their threads have a packet, if there is no more.
fn blocks_for(bytes: usize, threads: u32, most: u32) -> u32 {
    let of_block = PACKET.0 * threads as usize;
    (bytes.div_ceil(of_block) as u32).clamp(1, most)
}

impl Core {
    /// Bytes of a slot.
    fn slot_bytes(&self) -> usize {
        self.control.layout().half_bytes(Area::Mail) / (SLOTS * self.size())
    }

    /// Bytes of a message that a slot holds.
    fn piece_bytes(&self) -> usize {
        self.slot_bytes() / PACKET.1 * PACKET.0
    }

    /// Places for blocks of messages.
    fn message_places(&self) -> u32 {
        self.exchanging.blocks() * self.in_a_place(MESSAGE_THREADS)
    }

    /// Blocks that the budget has for each of so many messages.
    fn budget_for(&self, messages: u32) -> u32 {
        self.config.sm_budget.map_or(u32::MAX, u32::from) / messages
    }

    /// Blocks for each of these messages, all of a call: `narrow`, or more where there is room. Ranks need not have the same number.
    fn blocks_of(&self, lane: &Lane, list: &[Message], narrow: u32) -> u32 {
        let messages = (list.len() as u32).max(MOST_ALONE);
        // Half of the multiprocessors are left to others, whose tiles leave as many free from then on.
        let places = self
            .message_places()
            .min(u32::from(self.device.info().sms) / 2)
            / messages;
        let most = self.budget_for(messages).min(places).clamp(1, BLOCKS_WIDE);
        let piece = longest(list).min(self.piece_bytes());
        let wide = blocks_for(piece, MESSAGE_THREADS, most);
        // The hook has desks for no more than have places in any case.
        if wide <= narrow || self.memory.desk.is_some() || !self.is_far_from_tiles(lane) {
            return narrow;
        }
        // Whoever comes to have tiles finds this, or is found here.
        self.widest
            .fetch_max(wide * list.len() as u32, Ordering::SeqCst);
        match self.is_far_from_tiles(lane) {
            true => wide,
            false => narrow,
        }
    }

    /// Whether two teams of a message's blocks take its pieces in turn, if the longest has so many bytes. The hook is asked piece by piece.
    fn takes_teams(&self, longest: usize, blocks: u32) -> bool {
        longest > self.piece_bytes() && blocks.is_multiple_of(2) && self.memory.desk.is_none()
    }

    /// Places that messages of this group have taken, or may take in any case: tiles of other communicators leave as many free.
    pub(crate) fn places_of_messages(&self) -> u32 {
        most_messages(&self.topology).max(self.widest.load(Ordering::SeqCst))
    }
}

impl Job<'_> {
    /// A call between two ranks that is nothing but these messages, in one launch: it begins and counts the call, and poisons what it was to
    /// receive, of this type, if the group was stopped.
    pub(crate) fn messages(&mut self, list: &[Message], poison: DataType) -> Result<()> {
        // Where a hook is asked, it hears of the beginning.
        if self.core.memory.desk.is_some() {
            self.steps.start();
            self.steps_now()?;
        }
        self.launch_messages(list, (MOST_ALONE, BLOCKS_ALONE), |p| {
            p.poison = types::poison_pattern(poison);
        })
    }

    /// The same of all ranks: messages to and from every peer, and last what this rank has for itself, at that address. A sender may be
    /// through before its messages are read: it hears of a receiver that wanted something else in its next call of all ranks at the latest.
    pub(crate) fn messages_to_all(
        &mut self,
        list: &[Message],
        own: u64,
        poison: DataType,
    ) -> Result<()> {
        // Where a hook is asked, it hears of the arrival and the end as well.
        let asked = self.core.memory.desk.is_some();
        if asked {
            self.steps.arrive();
            self.steps_now()?;
        }
        let blocks = self.core.blocks_each();
        self.launch_messages(list, (list.len() as u32, blocks), |p| {
            p.poison = types::poison_pattern(poison);
            p.own = own;
            p.arrives = u32::from(!asked);
        })?;
        if asked {
            let sent = list.iter().filter(|message| !message.receives);
            self.count_moved(sent.map(|message| message.bytes).sum());
            self.steps.meet();
            self.steps.finish();
        }
        Ok(())
    }

    /// Enqueues a call's messages, of which so many have a share of the budget, and so many blocks in any case. The rest of what the kernel is
    /// told is `set`.
    fn launch_messages(
        &mut self,
        list: &[Message],
        (sharing, blocks): (u32, u32),
        set: impl FnOnce(&mut MessagesParams),
    ) -> Result<()> {
        let core = self.core;
        let most = core.budget_for(sharing).clamp(1, blocks);
        let narrow = blocks_for(longest(list), FEW_THREADS, most);
        let blocks = core.blocks_of(self.lane, list, narrow);
        let all = blocks * list.len() as u32;
        // Of as many as have places in any case: tiles elsewhere leave room for one launch.
        let both_fit = core.overtakes && blocks == narrow && 2 * all <= core.message_places();
        let mut parameters = self.messages_parameters(list, blocks)?;
        parameters.lets_next = u32::from(both_fit);
        set(&mut parameters);
        let shape = Launch {
            programmatic: both_fit,
            ..Launch::grid(all, MESSAGE_THREADS)
        };
        let kernels = &core.device.opened.kernels;
        let kernel = match core.takes_teams(longest(list), blocks) {
            true => &kernels.messages_in_teams,
            false => &kernels.messages,
        };
        // SAFETY: the messages lie in buffers of the call, the rest in the group's memory, which the core keeps.
        unsafe { kernel.launch(self.stream, shape, parameters) }.map_err(Error::from)
    }

    fn messages_parameters(&self, list: &[Message], blocks: u32) -> Result<MessagesParams> {
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
            slot_bytes: core.slot_bytes() as u64,
            piece_bytes: core.piece_bytes() as u64,
            call_signature: self.kind.signature,
            ring: layout.ring(Area::Mail).base as u32,
            pieces: u32::from(MAX_PIECES),
            blocks,
            count: list.len() as u32,
            counters: Counters::new(core.size()).messages() as u32,
            ..waiting!(MessagesParams, self)
        };
        for (i, message) in list.iter().enumerate() {
            parameters.peer[i] = message.peer as u32 + if message.receives { 256 } else { 0 };
            parameters.signature[i] = message.signature;
            parameters.local[i] = message.address;
            parameters.bytes[i] = message.bytes as u64;
            if !message.receives {
                parameters.moved_bytes += message.bytes as u64;
            }
        }
        Ok(parameters)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranks_that_share_a_gpu_carry_a_message_with_fewer_blocks() {
        // Blocks of 512 threads with 64 registers each: two on each of 132 multiprocessors.
        const PLACES: u32 = 264;
        let of = |size, sharing| blocks_each(size, sharing);
        for size in 1..=16 {
            assert_eq!(of(size, 1), BLOCKS_EACH, "{size}");
        }
        let found = [
            (2, 2),
            (3, 3),
            (4, 2),
            (4, 4),
            (8, 2),
            (8, 4),
            (8, 8),
            (16, 4),
        ];
        let found = found.map(|(size, sharing)| of(size, sharing));
        assert_eq!(found, [4, 4, 4, 2, 2, 1, 1, 1]);
        // Two groups of all ranks find places beside each other.
        for (size, sharing) in [(4, 4), (8, 2), (8, 4), (8, 8)] {
            let blocks = sharing as u32 * most_blocks(size, of(size, sharing));
            assert!(
                2 * blocks < PLACES,
                "{size} ranks, {sharing} on a GPU: {blocks}"
            );
        }
        // With as many as if nobody shared, one group of eight would not.
        assert!(8 * most_blocks(8, BLOCKS_EACH) > PLACES);
    }
}
