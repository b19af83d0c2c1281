//! Packets of data that carry their flag: no flag has to follow the data, at the price of half the bytes.

use crate::{Budget, Flag, Memory, Post, Stop, Wait, Want, Word, carried};

/// Packets of 4 bytes of data and 4 bytes of tag in one 64-bit word (after NCCL's LL; on a GPU 12 and 4 bytes), for
/// exchanges in which every rank sends to every peer.
///
/// There are two sets of slots, which alternate from use to use. A rank sends for a use only when it has received
/// everything of the use before, and sends at least the signature, also when there is no data. So whoever has received use
/// `n + 1` from a peer knows that the peer is done with use `n`, and may write into its set again.
///
/// A tag is the flag's generation and the lower 24 bits of its epoch. A slot that a short use left out keeps an old tag;
/// so that it cannot come true again, all slots are written [once in 2^23 uses](Self::sweeps).
///
/// Words per rank: [`words`](Self::words), from `base` on.
#[derive(Clone, Copy, Debug)]
pub struct Packets {
    /// This rank.
    pub rank: usize,
    /// Ranks in the group.
    pub size: usize,
    /// Most packets from one rank to another.
    pub capacity: usize,
    /// First word.
    pub base: usize,
}

/// Alternating sets of slots.
const SETS: usize = 2;

/// Bits of an epoch that stand in a tag.
const TAG_BITS: u32 = 24;

impl Packets {
    /// Bytes of data in a packet.
    pub const BYTES: usize = 4;

    /// Words it needs in every rank's memory.
    pub const fn words(size: usize, capacity: usize) -> usize {
        SETS * size * (1 + capacity)
    }

    /// Packets that so many bytes take.
    pub const fn packets(bytes: usize) -> usize {
        bytes.div_ceil(Self::BYTES)
    }

    /// Whether a use writes every slot of its set: two uses in a row, one for each set, before the tags of a slot that was
    /// left out since can come again.
    pub const fn sweeps(epoch: u32) -> bool {
        epoch & ((1 << (TAG_BITS - 1)) - 1) < SETS as u32
    }

    /// The tag of all packets of one use.
    pub const fn tag(flag: Flag) -> u32 {
        (flag.generation() as u32) << TAG_BITS | flag.epoch() & ((1 << TAG_BITS) - 1)
    }

    /// What a slot holds: up to 4 bytes, the rest zero, and the tag.
    pub fn pack(tag: u32, bytes: &[u8]) -> u64 {
        let mut data = [0; Self::BYTES];
        data[..bytes.len()].copy_from_slice(bytes);
        u64::from(tag) << 32 | u64::from(u32::from_le_bytes(data))
    }

    /// The bytes in a slot, if they are of the use with this tag.
    pub fn unpack(tag: u32, word: u64) -> Option<[u8; Self::BYTES]> {
        ((word >> 32) as u32 == tag).then_some((word as u32).to_le_bytes())
    }

    /// The slot of a packet in the memory of `owner`.
    pub const fn slot(self, owner: usize, from: usize, epoch: u32, packet: usize) -> Word {
        let lane = epoch as usize % SETS * self.size + from;
        Word {
            owner,
            index: self.base + lane * (1 + self.capacity) + 1 + packet,
        }
    }

    const fn signature_word(self, owner: usize, from: usize, epoch: u32) -> Word {
        let first = self.slot(owner, from, epoch, 0);
        Word {
            owner,
            index: first.index - 1,
        }
    }

    /// Behind the packets: which call they belong to.
    pub const fn signed(self, to: usize, flag: Flag) -> Post {
        Post {
            word: self.signature_word(to, self.rank, flag.epoch()),
            flag,
        }
    }

    /// Waits for the signature of what `from` sends.
    pub const fn signature(self, from: usize, flag: Flag) -> Wait {
        Wait {
            word: self.signature_word(self.rank, from, flag.epoch()),
            want: Want::Exactly(flag),
            peer: from,
        }
    }

    /// Sends bytes for a use, as many as the receiver awaits.
    pub fn send<M: Memory + ?Sized>(self, memory: &M, to: usize, flag: Flag, bytes: &[u8]) {
        let used = Self::packets(bytes.len());
        assert!(
            used <= self.capacity,
            "{used} packets in {} slots",
            self.capacity
        );
        let (tag, epoch) = (Self::tag(flag), flag.epoch());
        for (i, data) in bytes.chunks(Self::BYTES).enumerate() {
            let at = self.slot(to, self.rank, epoch, i);
            memory.store_relaxed(at, Self::pack(tag, data));
        }
        if Self::sweeps(epoch) {
            for i in used..self.capacity {
                memory.store_relaxed(self.slot(to, self.rank, epoch, i), Self::pack(tag, &[]));
            }
        }
        crate::post(memory, self.signed(to, flag));
    }

    /// Receives what `from` sends for a use.
    ///
    /// # Errors
    /// Why it gave up; `out` is then filled in part.
    pub fn receive<M: Memory + ?Sized>(
        self,
        memory: &M,
        from: usize,
        flag: Flag,
        out: &mut [u8],
        budget: &mut (impl Budget + ?Sized),
        watch: impl FnMut() -> bool,
    ) -> Result<(), Stop> {
        let used = Self::packets(out.len());
        assert!(
            used <= self.capacity,
            "{used} packets in {} slots",
            self.capacity
        );
        let tag = Self::tag(flag);
        let mut chunks = out.chunks_mut(Self::BYTES);
        carried::take(
            memory,
            (0..used).map(|i| self.slot(self.rank, from, flag.epoch(), i)),
            |word| Self::unpack(tag, word),
            self.signature(from, flag),
            budget,
            watch,
            |data| {
                if let Some(chunk) = chunks.next() {
                    chunk.copy_from_slice(&data[..chunk.len()]);
                }
            },
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn bytes_come_back(tag: u32, bytes in proptest::collection::vec(any::<u8>(), 0..=4)) {
            let word = Packets::pack(tag, &bytes);
            prop_assert_eq!(&Packets::unpack(tag, word).unwrap()[..bytes.len()], &bytes[..]);
            prop_assert_eq!(Packets::unpack(tag.wrapping_add(1), word), None);
        }

        /// Between a use and the next one with the same tag, every slot of the set is written at least once.
        #[test]
        fn no_tag_comes_twice_unswept(epoch: u32) {
            let again = 1u32 << TAG_BITS;
            prop_assert_eq!(
                Packets::tag(Flag::new(1, 0, epoch)),
                Packets::tag(Flag::new(1, 0, epoch.wrapping_add(again)))
            );
            let half = 1u32 << (TAG_BITS - 1);
            // The first use of the same set, after this one, that sweeps.
            let mut sweep = epoch.wrapping_add(half) & !(half - 1);
            sweep |= epoch & 1;
            prop_assert!(Packets::sweeps(sweep));
            prop_assert_eq!(sweep % 2, epoch % 2);
            let after = sweep.wrapping_sub(epoch);
            prop_assert!(after > 0 && after < again);
        }
    }

    #[test]
    fn slots_do_not_overlap() {
        let packets = |rank| Packets {
            rank,
            size: 3,
            capacity: 5,
            base: 7,
        };
        let mut indices: Vec<usize> = (0..2)
            .flat_map(|epoch| (0..3).map(move |from| (epoch, from)))
            .flat_map(|(epoch, from)| {
                let signed = packets(from).signed(1, Flag::new(1, 0, epoch)).word.index;
                (0..5)
                    .map(move |i| packets(0).slot(1, from, epoch, i).index)
                    .chain([signed])
            })
            .collect();
        indices.sort_unstable();
        let all: Vec<usize> = (7..7 + Packets::words(3, 5)).collect();
        assert_eq!(indices, all);
    }
}
