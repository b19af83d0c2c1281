//! A queue from one rank to another, that goes on over calls.

use crate::{Flag, Half, Post, Role, Wait, Want, Word};

/// Where the two counters of a queue stand. The queue itself lies in the receiver's memory, and so does the count of what
/// was put; the count of what was taken stands at the sender. So each side waits on its own memory only, and keeps its own
/// count to itself. Every counter has a line of its own.
///
/// A count says how far, not in which call: the sender may be in a later call than the receiver. Another call is noticed
/// by the flags of the call's barrier. Where every call ends with all of it taken ([`drained`](FifoSender::drained)), a call may cut
/// the queue's memory into other entries than the one before, and what the flags of items are signed by tells of another call too
/// ([`arrival_of`](FifoReceiver::arrival_of)).
///
/// Words per rank, for the queues with all peers: [`words`](Self::words), from `base` on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Fifo {
    /// Who puts.
    pub from: usize,
    /// Who takes.
    pub to: usize,
    /// Ranks in the group.
    pub size: usize,
    /// Entries of the queue: a power of two, so that entries follow each other also where counts wrap.
    pub depth: u32,
    /// First word.
    pub base: usize,
}

impl Fifo {
    /// Entries that a queue has if nothing else is said.
    pub const DEPTH: u32 = 4;
    /// Most queues from one rank to another.
    pub const CHANNELS: usize = 16;
    /// Words of a line that a counter has for itself (256 bytes).
    pub const LINE_WORDS: usize = 32;

    /// Words it needs in every rank's memory.
    pub const fn words(size: usize) -> usize {
        2 * size * Self::LINE_WORDS
    }

    /// What a word is for, if it is one of these queues', as all ranks have them: of a rank's memory, whichever of them this is.
    pub fn role(self, index: usize, channel: usize) -> Option<Role> {
        let line = index.checked_sub(self.base)? / Self::LINE_WORDS;
        if !index
            .wrapping_sub(self.base)
            .is_multiple_of(Self::LINE_WORDS)
        {
            return None;
        }
        let half = Half::of(0);
        match line.checked_sub(self.size) {
            None => Some(Role::Filled {
                half,
                slot: line,
                piece: channel,
            }),
            Some(from) if from < self.size => Some(Role::Credit { half, from }),
            Some(_) => None,
        }
    }

    const fn put_word(self) -> Word {
        Word {
            owner: self.to,
            index: self.base + self.from * Self::LINE_WORDS,
        }
    }

    const fn taken_word(self) -> Word {
        Word {
            owner: self.from,
            index: self.base + (self.size + self.to) * Self::LINE_WORDS,
        }
    }

    const fn entry(self, count: u32) -> usize {
        (count % self.depth) as usize
    }

    /// The sender's side, in a generation in which nothing was put yet.
    pub fn sender(self, generation: u8) -> FifoSender {
        self.sender_from(generation, 0)
    }

    /// The receiver's side, in a generation in which nothing was put yet.
    pub fn receiver(self, generation: u8) -> FifoReceiver {
        self.receiver_from(generation, 0)
    }

    /// The sender's side, if counting starts elsewhere, as at the receiver.
    pub fn sender_from(self, generation: u8, count: u32) -> FifoSender {
        assert!(
            self.depth.is_power_of_two(),
            "a queue of {} entries",
            self.depth
        );
        FifoSender {
            fifo: self,
            generation,
            put: count,
            fresh: self.depth,
        }
    }

    /// The receiver's side, if counting starts elsewhere, as at the sender.
    pub fn receiver_from(self, generation: u8, count: u32) -> FifoReceiver {
        FifoReceiver {
            fifo: self,
            generation,
            taken: count,
        }
    }
}

/// Who puts: for every item, wait for [`room`](Self::room), write the [`entry`](Self::entry), post [`put`](Self::put).
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FifoSender {
    fifo: Fifo,
    generation: u8,
    put: u32,
    /// Entries that nothing was put into yet: they need no credit, and there is none of this generation.
    fresh: u32,
}

impl FifoSender {
    /// Which entry the next item takes.
    pub const fn entry(&self) -> usize {
        self.fifo.entry(self.put)
    }

    /// Waits until the item that had the entry before was taken; nothing to wait for on the first round.
    pub fn room(&self) -> Option<Wait> {
        let taken = self.put.wrapping_add(1).wrapping_sub(self.fifo.depth);
        (self.fresh == 0).then_some(Wait {
            word: self.fifo.taken_word(),
            want: Want::AtLeast(Flag::new(self.generation, 0, taken)),
            peer: self.fifo.to,
        })
    }

    /// Waits until all that was put is taken: what a call ends with, so that the next one finds the queue empty.
    pub const fn drained(&self) -> Wait {
        Wait {
            word: self.fifo.taken_word(),
            want: Want::AtLeast(Flag::new(self.generation, 0, self.put)),
            peer: self.fifo.to,
        }
    }

    /// Items put so far, from where counting started.
    pub const fn count(&self) -> u32 {
        self.put
    }

    /// The item lies in its entry.
    pub fn put(&mut self, signature: u32) -> Post {
        self.put = self.put.wrapping_add(1);
        self.fresh = self.fresh.saturating_sub(1);
        Post {
            word: self.fifo.put_word(),
            flag: Flag::new(self.generation, signature, self.put),
        }
    }
}

/// Who takes: for every item, wait for its [`arrival`](Self::arrival), read the [`entry`](Self::entry), post
/// [`taken`](Self::taken).
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FifoReceiver {
    fifo: Fifo,
    generation: u8,
    taken: u32,
}

impl FifoReceiver {
    /// Which entry the next item lies in.
    pub const fn entry(&self) -> usize {
        self.fifo.entry(self.taken)
    }

    /// Waits for the next item.
    pub const fn arrival(&self) -> Wait {
        Wait {
            word: self.fifo.put_word(),
            want: Want::AtLeast(Flag::new(self.generation, 0, self.taken.wrapping_add(1))),
            peer: self.fifo.from,
        }
    }

    /// The same where every call ends with all of it taken: an item of another call is a mismatch.
    pub const fn arrival_of(&self, signature: u32) -> Wait {
        Wait {
            word: self.fifo.put_word(),
            want: Want::Since(Flag::new(
                self.generation,
                signature,
                self.taken.wrapping_add(1),
            )),
            peer: self.fifo.from,
        }
    }

    /// Items taken so far, from where counting started.
    pub const fn count(&self) -> u32 {
        self.taken
    }

    /// The item is not needed in its entry any more.
    pub fn taken(&mut self, signature: u32) -> Post {
        self.taken = self.taken.wrapping_add(1);
        Post {
            word: self.fifo.taken_word(),
            flag: Flag::new(self.generation, signature, self.taken),
        }
    }
}
