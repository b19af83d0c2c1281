//! The FIFO channel.

use crate::shared::*;
use brigade_sync::{
    Fifo, FifoReceiver, FifoSender, Flag, Post, Stop, Verdict, Wait, Want, Word, post,
};

/// What is taken away.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Without {
    Nothing,
    /// The sender waits for room.
    Room,
    /// There is room when `depth` items are not taken yet, and no more.
    ExactDepth,
    /// An item is put behind its data.
    DataFirst,
    /// An item is taken behind the reading.
    ReadFirst,
    /// The sender counts on over calls.
    Persistence,
    /// Counts are compared by signed difference.
    WrapSafety,
    /// A rank that can do something does not wait for something else.
    OneLoop,
    /// A call ends when all of it is taken.
    Drained,
    /// Items are signed by their call.
    Signed,
}

/// The model's queues have no lines, so that its memory is small.
fn squeezed(w: Word) -> Word {
    Word {
        index: w.index / Fifo::LINE_WORDS,
        ..w
    }
}

fn shifted(want: Want, by: u32) -> Want {
    let flag = want.flag();
    Want::AtLeast(Flag::new(
        flag.generation(),
        0,
        flag.epoch().wrapping_sub(by),
    ))
}

/// Waits for a count that is not smaller, as plain numbers.
fn waits_plainly(w: Wait) -> Step {
    awaits(w.peer, move |shared, budget| {
        loop {
            let events = shared.events(w.word.owner);
            let seen = Flag::from_bits(shared.load(w.word));
            let want = w.want.flag();
            if seen.generation() == want.generation() && seen.epoch() >= want.epoch() {
                return Ok(Ok(()));
            }
            if budget.spent() {
                return Ok(Err(brigade_sync::Stop::Timeout { seen: seen.bits() }));
            }
            shared.rest(w.word.owner, events, None);
        }
    })
}

/// A chain of ranks: each hands on to the next what it gets from the one before, in calls of a few items.
pub fn scenario(size: usize, depth: u32, calls: u32, items: u32, without: Without) -> Scenario {
    // Counts that wrap on the way.
    let start = u32::MAX - 1;
    let channel = |from: usize| Fifo {
        from,
        to: from + 1,
        size,
        depth,
        base: 0,
    };
    let waits = |w: Wait| {
        let w = Wait {
            word: squeezed(w.word),
            ..w
        };
        match without {
            Without::WrapSafety => waits_plainly(w),
            _ => waits(w),
        }
    };
    let posts = |p: Post| {
        posts(Post {
            word: squeezed(p.word),
            ..p
        })
    };
    let program = |rank: usize| {
        let mut program = Program::new();
        let fresh = || channel(rank).sender_from(GENERATION, start);
        let mut sender = (rank + 1 < size).then(fresh);
        let mut receiver = (rank > 0).then(|| channel(rank - 1).receiver_from(GENERATION, start));
        for n in 0..calls * items {
            let signature = n / items;
            if let Some(receiver) = &mut receiver {
                program.push(waits(receiver.arrival()));
                let look = reads(rank, cell(rank, receiver.entry()), value(n, 0));
                let taken = posts(receiver.taken(signature));
                if without == Without::ReadFirst {
                    program.extend([taken, look]);
                } else {
                    program.extend([look, taken]);
                }
            }
            if let Some(sender) = &mut sender {
                if without == Without::Persistence && n % items == 0 {
                    *sender = fresh();
                }
                if let Some(room) = sender.room().filter(|_| without != Without::Room) {
                    let by = u32::from(without == Without::ExactDepth);
                    program.push(waits(Wait {
                        want: shifted(room.want, by),
                        ..room
                    }));
                }
                let fill = writes(cell(rank + 1, sender.entry()), value(n, 0));
                let put = posts(sender.put(signature));
                if without == Without::DataFirst {
                    program.extend([put, fill]);
                } else {
                    program.extend([fill, put]);
                }
            }
        }
        program
    };
    Scenario::new(2 * size, depth as usize, (0..size).map(program).collect())
}

/// Entries of the queues in a call: they are cut anew for each.
const DEPTHS: [u32; 2] = [2, 1];

/// Cells of data of a queue, however it is cut.
const CELLS: usize = 2;

/// A rank's side of both queues in a call.
#[derive(Clone, Copy)]
struct Sides {
    rank: usize,
    call: usize,
    items: u32,
    without: Without,
}

impl Sides {
    const fn signature(self) -> u32 {
        // A rank in another call, where that is to be found out.
        self.call as u32
            + 1
            + if matches!(self.without, Without::Signed) {
                self.rank as u32
            } else {
                0
            }
    }

    fn fifo(self, from: usize) -> Fifo {
        Fifo {
            from,
            to: 1 - from,
            size: 2,
            depth: DEPTHS[self.call % 2],
            base: 0,
        }
    }

    /// Counts that wrap on the way.
    fn start(self) -> u32 {
        (u32::MAX - 1).wrapping_add(self.call as u32 * self.items)
    }

    fn sender(self, put: u32) -> FifoSender {
        let mut sender = self.fifo(self.rank).sender_from(GENERATION, self.start());
        for _ in 0..put {
            sender.put(0);
        }
        sender
    }

    fn receiver(self, taken: u32) -> FifoReceiver {
        let mut receiver = self
            .fifo(1 - self.rank)
            .receiver_from(GENERATION, self.start());
        for _ in 0..taken {
            receiver.taken(0);
        }
        receiver
    }

    /// What an item is.
    fn item(self, n: u32, from: usize) -> u64 {
        value(self.call as u32 * self.items + n, from)
    }

    /// The cells of an entry.
    fn cells(self, owner: usize, entry: usize) -> impl Iterator<Item = Word> {
        let each = CELLS / DEPTHS[self.call % 2] as usize;
        (entry * each..(entry + 1) * each).map(move |i| cell(owner, i))
    }

    /// Puts or takes one item: whatever can be done.
    fn does_one(self, unsigned: bool) -> Step {
        let peer = 1 - self.rank;
        let [put_cell, taken_cell] = [0, 1].map(|i| cell(self.rank, CELLS + i));
        awaits(peer, move |shared, budget| {
            let (put, taken) = (shared.read(put_cell) as u32, shared.read(taken_cell) as u32);
            let (mut sender, mut receiver) = (self.sender(put), self.receiver(taken));
            let at = |w: Word| squeezed(w);
            let posted = |p: Post| Post {
                word: squeezed(p.word),
                ..p
            };
            loop {
                let events = shared.events(self.rank);
                let room = sender.room();
                let free = |w: &Wait| w.want.verdict(shared.load(at(w.word))) == Verdict::Ready;
                if put < self.items && room.as_ref().is_none_or(free) {
                    for to in self.cells(peer, sender.entry()) {
                        shared.write(to, self.item(put, self.rank));
                    }
                    post(shared, posted(sender.put(self.signature())));
                    shared.write(put_cell, u64::from(put) + 1);
                    return Ok(Ok(()));
                }
                let waits = self.without == Without::OneLoop && put < self.items;
                if taken < self.items && !waits {
                    let arrival = match unsigned {
                        true => receiver.arrival(),
                        false => receiver.arrival_of(self.signature()),
                    };
                    let seen = shared.load(at(arrival.word));
                    match arrival.want.verdict(seen) {
                        Verdict::NotYet => {}
                        Verdict::Mismatch => return Ok(Err(Stop::Mismatch { seen })),
                        Verdict::Ready => {
                            for from in self.cells(self.rank, receiver.entry()) {
                                let (got, want) = (shared.read(from), self.item(taken, peer));
                                if got != want {
                                    return Err(wrong(self.rank, got, want));
                                }
                            }
                            post(shared, posted(receiver.taken(self.signature())));
                            shared.write(taken_cell, u64::from(taken) + 1);
                            return Ok(Ok(()));
                        }
                    }
                }
                if shared.stopped() {
                    return Ok(Err(Stop::Interrupted));
                }
                if budget.spent() {
                    return Ok(Err(Stop::Timeout { seen: 0 }));
                }
                shared.rest(self.rank, events, None);
            }
        })
    }
}

/// Two ranks that send each other more than the queues hold, in calls that cut the queues' memory in turn into two entries and one.
/// `differ` puts them into different calls; `without` has a guard taken away.
pub fn both_ways(calls: usize, items: u32, differ: bool, without: Without) -> Scenario {
    let program = |rank: usize| {
        let mut program = Program::new();
        for call in 0..calls {
            let sides = Sides {
                rank,
                call,
                items,
                without: if differ { Without::Signed } else { without },
            };
            for i in [0, 1] {
                program.push(writes(cell(rank, CELLS + i), 0));
            }
            let one = || sides.does_one(differ && without == Without::Signed);
            program.extend((0..2 * items).map(|_| one()));
            if without != Without::Drained {
                let drained = sides.sender(items).drained();
                program.push(waits(Wait {
                    word: squeezed(drained.word),
                    ..drained
                }));
            }
        }
        program
    };
    Scenario::new(4, CELLS + 2, (0..2).map(program).collect())
}
