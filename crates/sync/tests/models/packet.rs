//! Packets that carry their flag.

use crate::shared::*;
use brigade_sync::{Flag, Memory, Packets, Word};
use std::time::Instant;

/// What is taken away.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Without {
    Nothing,
    /// Sets alternate.
    SecondSet,
    /// A packet's tag is that of its use.
    Tag,
    /// Data and tag are one word.
    OneWord,
    /// Every use is signed, also when it is empty.
    SignatureWhenEmpty,
    /// Signatures tell calls apart.
    Signature,
    /// From time to time all slots are written.
    Sweeps,
}

/// Memory that takes a guard from what goes through it.
struct Bent<'a> {
    shared: &'a dyn Shared,
    packets: Packets,
    empty: bool,
    without: Without,
}

impl Bent<'_> {
    fn place(&self, at: Word) -> Word {
        let set = self.packets.size * (1 + self.packets.capacity);
        match self.without {
            Without::SecondSet => Word {
                index: at.index % set,
                ..at
            },
            _ => at,
        }
    }

    /// A second word for a slot, behind all others.
    fn behind(&self, at: Word) -> Word {
        Word {
            index: at.index + Packets::words(self.packets.size, self.packets.capacity),
            ..at
        }
    }
}

const LOW: u64 = u32::MAX as u64;

impl Memory for Bent<'_> {
    fn load(&self, at: Word) -> u64 {
        self.shared.load(self.place(at))
    }

    fn store(&self, at: Word, value: u64) {
        if self.without != Without::SignatureWhenEmpty || !self.empty {
            self.shared.store(self.place(at), value);
        }
    }

    fn load_relaxed(&self, at: Word) -> u64 {
        let word = self.shared.load_relaxed(self.place(at));
        match self.without {
            Without::OneWord => word | self.shared.load_relaxed(self.behind(at)),
            _ => word,
        }
    }

    fn store_relaxed(&self, at: Word, value: u64) {
        match self.without {
            Without::OneWord => {
                self.shared.store_relaxed(self.behind(at), value & LOW);
                self.shared.store_relaxed(at, value & !LOW);
            }
            Without::Sweeps if self.empty => {}
            _ => self.shared.store_relaxed(self.place(at), value),
        }
    }

    fn compare_exchange(&self, at: Word, current: u64, new: u64) -> Result<(), u64> {
        self.shared.compare_exchange(at, current, new)
    }

    fn events(&self, owner: usize) -> u32 {
        self.shared.events(owner)
    }

    fn rest(&self, owner: usize, events: u32, until: Option<Instant>) {
        self.shared.rest(owner, events, until);
    }
}

fn bytes(n: u32, from: usize, packets: usize) -> Vec<u8> {
    (0..packets)
        .flat_map(|i| (value(n, from) as u32 | (i as u32) << 16).to_le_bytes())
        .collect()
}

fn compare(rank: usize, got: &[u8], want: &[u8]) -> Result<(), Fault> {
    let word = |c: &[u8]| u64::from(u16::from_le_bytes([c[0], c[1]]));
    got.chunks(Packets::BYTES)
        .zip(want.chunks(Packets::BYTES))
        .find(|(got, want)| got != want)
        .map_or(Ok(()), |(got, want)| {
            Err(wrong(rank, word(got), word(want)))
        })
}

/// Every rank sends to every peer, so many packets in each use of these epochs.
pub fn scenario(size: usize, uses: &[(u32, usize)], stranger: bool, without: Without) -> Scenario {
    let capacity = uses.iter().map(|u| u.1).max().unwrap();
    let program = |rank| {
        let packets = Packets {
            rank,
            size,
            capacity,
            base: 0,
        };
        let mut program = Program::new();
        for (n, &(epoch, used)) in (0..).zip(uses) {
            let signature = match without {
                Without::Signature => 0,
                _ if stranger && rank + 1 == size => 0xBAD,
                _ => 0xA11,
            };
            let flag = Flag::new(GENERATION, signature, epoch);
            // Without the tag of its use, every packet has the same.
            let data_flag = match without {
                Without::Tag => Flag::new(GENERATION, signature, epoch & 1),
                _ => flag,
            };
            let empty = used == 0;
            for to in peers(rank, size) {
                program.push(does(move |shared| {
                    let bent = Bent {
                        shared,
                        packets,
                        empty,
                        without,
                    };
                    packets.send(&bent, to, data_flag, &bytes(n, rank, used));
                }));
            }
            for from in peers(rank, size) {
                if empty && without == Without::SignatureWhenEmpty {
                    continue;
                }
                program.push(awaits(from, move |shared, budget| {
                    let bent = Bent {
                        shared,
                        packets,
                        empty,
                        without,
                    };
                    let mut got = vec![0; used * Packets::BYTES];
                    let heard = || shared.stopped();
                    let end = packets.receive(&bent, from, data_flag, &mut got, budget, heard);
                    if end.is_ok() {
                        compare(rank, &got, &bytes(n, from, used))?;
                    }
                    Ok(end)
                }));
            }
        }
        program
    };
    let words = Packets::words(size, capacity) * (1 + usize::from(without == Without::OneWord));
    Scenario::new(words, 0, (0..size).map(program).collect())
}
