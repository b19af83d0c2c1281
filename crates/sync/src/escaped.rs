//! Copies that are pushed: as sums, but that any lane may be the sentinel.

use crate::{Budget, Flag, Memory, Sentinel, Shot, Stop, Turnover, Word, carried};
use std::{cell::RefCell, iter};

/// Words of a packet, with a bit for each lane in one word more, if there is one.
const PACKET_WORDS: usize = 16;

/// Bytes of a word.
const WORD_BYTES: usize = 8;

/// A bit for each lane of a word that is the sentinel: bit 0 for the lower, bit 32 for the upper one.
const fn sentinels(word: u64) -> u64 {
    let (low, high) = (word as u32, (word >> 32) as u32);
    (low == Sentinel::EMPTY) as u64 | ((high == Sentinel::EMPTY) as u64) << 32
}

/// Stands for the sentinel, and for itself.
const STAND_IN: u32 = Sentinel::EMPTY - 1;

/// Whether more is told of a word than itself: whether a lane is the sentinel, or what stands for it.
const fn has_more(word: u64) -> bool {
    word as u32 >= STAND_IN || (word >> 32) as u32 >= STAND_IN
}

/// Lanes of all ones where such bits are.
const fn restored(bits: u64) -> u64 {
    (bits & 1 | (bits >> 32 & 1) << 32) * Sentinel::EMPTY as u64
}

/// Exchanges in which some ranks push any bytes to all. They take uses of the same buffers as those of sums, and the argument for
/// three of them is the same: whoever has nothing to push signs too, so a rank goes on when all have begun the use.
///
/// # Packets
/// In each packet of 16 words another lane stands for one that is the sentinel. Behind all packets there is a place for a word of each, which is pushed
/// if the packet has a lane of those two: with a bit for every lane that was the sentinel, 16 of them in each of its own lanes, which therefore are
/// never the sentinel. So every word tells by itself whether it is there, as those of sums do, in whatever order they come; and what stands for
/// the sentinel tells that there is one more.
impl Sentinel {
    /// Words of a slot that a copy of so many bytes takes.
    pub const fn copied(bytes: usize) -> usize {
        let words = Self::filled(bytes);
        words + words.div_ceil(PACKET_WORDS)
    }

    /// Pushes any bytes to a peer; they are to be [signed](Self::signed), also when there are none.
    pub fn push_copy<M: Memory + ?Sized>(
        self,
        memory: &M,
        to: usize,
        turn: Turnover,
        shot: Shot,
        bytes: &[u8],
    ) {
        self.check(shot, Self::copied(bytes.len()));
        let store = |i, word| {
            let at = self.place(to, turn.buffer, shot, self.rank, i);
            memory.store_relaxed(at, word);
        };
        let words = Self::filled(bytes.len());
        for (p, packet) in bytes.chunks(PACKET_WORDS * WORD_BYTES).enumerate() {
            let (mut bits, mut more) = (0, false);
            for (k, bytes) in packet.chunks(WORD_BYTES).enumerate() {
                bits |= sentinels(Self::word(bytes)) << k;
                more |= has_more(Self::word(bytes));
                store(p * PACKET_WORDS + k, Self::pack(bytes, STAND_IN));
            }
            if more {
                store(words + p, Self::pack(&bits.to_ne_bytes(), STAND_IN));
            }
        }
    }

    /// Takes any bytes that `from` pushes, and its signature.
    ///
    /// # Errors
    /// Why it gave up; `out` is then filled in part.
    #[expect(
        clippy::too_many_arguments,
        reason = "what every wait takes, and where"
    )]
    pub fn take_copy<M: Memory + ?Sized>(
        self,
        memory: &M,
        from: usize,
        turn: Turnover,
        shot: Shot,
        flag: Flag,
        out: &mut [u8],
        budget: &mut (impl Budget + ?Sized),
        watch: impl FnMut() -> bool,
    ) -> Result<(), Stop> {
        let (words, all) = (Self::filled(out.len()), Self::copied(out.len()));
        self.check(shot, all);
        let Word { owner, index } = self.place(self.rank, turn.buffer, shot, from, 0);
        // Packets of which there is more: known once all their words are.
        let more = RefCell::new(vec![]);
        let (mut found, mut taken) = (0.., 0..);
        let behind = iter::from_fn(|| {
            let packet = more.borrow().get(found.next()?).copied();
            packet.map(|packet: usize| words + packet)
        });
        carried::take(
            memory,
            (0..words).chain(behind).map(|i| Word {
                owner,
                index: index + i,
            }),
            Self::unpack,
            self.signature(from, turn, shot, flag),
            budget,
            watch,
            |bytes| match taken.next() {
                Some(i) if i < words => {
                    if let Some(chunk) = out.chunks_mut(WORD_BYTES).nth(i) {
                        chunk.copy_from_slice(&bytes[..chunk.len()]);
                    }
                    let (packet, mut more) = (i / PACKET_WORDS, more.borrow_mut());
                    if has_more(u64::from_ne_bytes(bytes)) && more.last() != Some(&packet) {
                        more.push(packet);
                    }
                }
                Some(i) => {
                    let packet = more.borrow().get(i - words).copied().unwrap_or_default();
                    let packet = out.chunks_mut(PACKET_WORDS * WORD_BYTES).nth(packet);
                    restore(packet.unwrap_or_default(), u64::from_ne_bytes(bytes));
                }
                None => {}
            },
        )
    }
}

/// Makes lanes of a packet the sentinel again.
fn restore(packet: &mut [u8], bits: u64) {
    for (k, chunk) in packet.chunks_mut(WORD_BYTES).enumerate() {
        // What stands for the sentinel has all ones but one.
        let word = Sentinel::word(chunk) | restored(bits >> k);
        let len = chunk.len();
        chunk.copy_from_slice(&word.to_ne_bytes()[..len]);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{BUFFERS, Deadline, Rotation, Words};
    use proptest::prelude::*;
    use std::{sync::atomic::AtomicU64, time::Duration};

    fn through(bytes: &[u8]) -> Vec<u8> {
        let words = Sentinel::copied(bytes.len());
        let of = |rank| Sentinel {
            rank,
            size: 2,
            base: 0,
            buffers: Sentinel::signatures(2),
            capacity: words,
        };
        let all = Sentinel::signatures(2) + BUFFERS * words + crate::BELL_WORDS;
        let zeroed = || (0..all).map(|_| AtomicU64::new(0)).collect();
        let memory: Words<Vec<AtomicU64>> = Words::new([0, 1].map(|_| zeroed()).into());
        let shot = Shot::first(words);
        let turn = Rotation::default().begin(shot.end(2));
        let flag = Flag::new(1, 2, turn.epoch);
        of(0).push_copy(&memory, 1, turn, shot, bytes);
        crate::post(&memory, of(0).signed(1, turn, shot, flag));
        let mut got = vec![7; bytes.len()];
        let mut budget = Deadline::after(Duration::from_secs(10));
        of(1)
            .take_copy(&memory, 0, turn, shot, flag, &mut got, &mut budget, || {
                false
            })
            .unwrap();
        got
    }

    #[test]
    fn only_lanes_of_all_ones_have_bits() {
        assert_eq!(sentinels(u64::MAX), 1 << 32 | 1);
        assert_eq!(sentinels(u64::MAX - 1), 1 << 32);
        assert_eq!(sentinels(0xFFFF_FFFF), 1);
        assert_eq!(sentinels(0x00FF_FFFF_FF00_FFFF), 0);
        assert_eq!(restored(1 << 32 | 1), u64::MAX);
        assert_eq!(restored(!(1 << 32 | 1)), 0);
    }

    proptest! {
        #[test]
        fn any_bytes_come_through(
            words in proptest::collection::vec(
                prop_oneof![1 => Just(u32::MAX), 1 => Just(STAND_IN), 1 => Just(0), 60 => any::<u32>()],
                0..300,
            ),
            cut in 0..8usize
        ) {
            let mut bytes: Vec<u8> = words.into_iter().flat_map(u32::to_ne_bytes).collect();
            bytes.truncate(bytes.len().saturating_sub(cut));
            prop_assert_eq!(through(&bytes), bytes);
        }
    }
}
