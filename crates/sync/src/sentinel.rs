//! Sums in one shot: values are pushed into buffers that hold a sentinel, and a reader polls until none is left.

use crate::{Budget, Flag, Memory, Post, Stop, Wait, Want, Word, carried};

/// Three rotating buffers per source (after TensorRT-LLM's Lamport all-reduce), for exchanges of `f32` in which every rank
/// pushes to every peer: one is written now, one may still be read or already be written for the next use, and one is
/// cleared. Two values share a word.
///
/// A rank pushes for a use only when it has taken everything of the use before. In use `n` it clears, between its push and
/// the next, the buffer of use `n - 1`, that it has taken; a peer writes there for use `n + 2` only after it has taken this
/// rank's signature of use `n + 1`, which stands behind the clear. So the signature is pushed also when there are no
/// values.
///
/// The sentinel is one NaN, and pushing makes every NaN another one. All other values come through bit by bit.
///
/// Words per rank: [`words`](Self::words), from `base` on.
#[derive(Clone, Copy, Debug)]
pub struct Sentinel {
    /// This rank.
    pub rank: usize,
    /// Ranks in the group.
    pub size: usize,
    /// Most values from one rank to another.
    pub capacity: usize,
    /// First word.
    pub base: usize,
}

/// Buffers that rotate.
pub const BUFFERS: usize = 3;

/// Values in a word.
const LANES: usize = 2;

/// What one use does with the buffers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Turnover {
    /// The buffer that is written and read.
    pub buffer: usize,
    /// The buffer to be cleared.
    pub stale: usize,
    /// Values that lie there, from every source.
    pub stale_values: usize,
}

/// Which buffer is next, and how far each of them is filled: the same on every rank, since all make the same calls. The
/// buffers are counted by themselves, because 3 does not divide the number of epochs.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Rotation {
    next: usize,
    values: [usize; BUFFERS],
}

impl Rotation {
    /// Begins a use in which every rank pushes so many values to every peer.
    pub fn begin(&mut self, values: usize) -> Turnover {
        let buffer = self.next;
        let stale = (buffer + BUFFERS - 1) % BUFFERS;
        self.next = (buffer + 1) % BUFFERS;
        self.values[buffer] = values;
        Turnover {
            buffer,
            stale,
            stale_values: std::mem::take(&mut self.values[stale]),
        }
    }
}

impl Sentinel {
    /// The pattern of a place that nothing was pushed to.
    pub const EMPTY: u32 = u32::MAX;
    /// What every NaN becomes.
    pub const NAN: u32 = 0x7FC0_0000;

    /// Words it needs in every rank's memory.
    pub const fn words(size: usize, capacity: usize) -> usize {
        BUFFERS * size * (1 + Self::filled(capacity))
    }

    /// Words that so many values take.
    pub const fn filled(values: usize) -> usize {
        values.div_ceil(LANES)
    }

    /// The word of two values in the memory of `owner`.
    pub const fn place(self, owner: usize, buffer: usize, from: usize, i: usize) -> Word {
        let lane = buffer * self.size + from;
        Word {
            owner,
            index: self.base + lane * (1 + Self::filled(self.capacity)) + 1 + i,
        }
    }

    const fn signature_word(self, owner: usize, buffer: usize, from: usize) -> Word {
        let first = self.place(owner, buffer, from, 0);
        Word {
            owner,
            index: first.index - 1,
        }
    }

    /// The bits that are pushed for a value.
    pub const fn canonical(value: f32) -> u32 {
        if value.is_nan() {
            Self::NAN
        } else {
            value.to_bits()
        }
    }

    /// What a place holds: two values, or one and zero.
    pub fn pack(values: &[f32]) -> u64 {
        values
            .iter()
            .rev()
            .fold(0, |word, &v| word << 32 | u64::from(Self::canonical(v)))
    }

    /// The values in a place, if both have come.
    pub fn unpack(word: u64) -> Option<[f32; LANES]> {
        let lanes = [word as u32, (word >> 32) as u32];
        (!lanes.contains(&Self::EMPTY)).then_some(lanes.map(f32::from_bits))
    }

    /// Behind the values: which call they belong to.
    pub const fn signed(self, to: usize, turn: Turnover, flag: Flag) -> Post {
        Post {
            word: self.signature_word(to, turn.buffer, self.rank),
            flag,
        }
    }

    /// Waits for the signature of what `from` pushes.
    pub const fn signature(self, from: usize, turn: Turnover, flag: Flag) -> Wait {
        Wait {
            word: self.signature_word(self.rank, turn.buffer, from),
            want: Want::Exactly(flag),
            peer: from,
        }
    }

    /// Empties all own buffers: when a generation begins, since nothing is pushed for the old one any more, and before a
    /// barrier of the new one, behind which pushing begins.
    pub fn prepare<M: Memory + ?Sized>(self, memory: &M) {
        for buffer in 0..BUFFERS {
            self.empty(memory, buffer, Self::filled(self.capacity));
        }
    }

    /// Empties the buffer of the use before, as far as it was filled: after this use's push, before the next one's.
    pub fn clear<M: Memory + ?Sized>(self, memory: &M, turn: Turnover) {
        self.empty(memory, turn.stale, Self::filled(turn.stale_values));
    }

    fn empty<M: Memory + ?Sized>(self, memory: &M, buffer: usize, words: usize) {
        for from in (0..self.size).filter(|&r| r != self.rank) {
            for i in 0..words {
                memory.store_relaxed(self.place(self.rank, buffer, from, i), u64::MAX);
            }
        }
    }

    /// Pushes values to a peer.
    pub fn push<M: Memory + ?Sized>(
        self,
        memory: &M,
        to: usize,
        turn: Turnover,
        flag: Flag,
        values: &[f32],
    ) {
        self.check(values.len());
        for (i, values) in values.chunks(LANES).enumerate() {
            let at = self.place(to, turn.buffer, self.rank, i);
            memory.store_relaxed(at, Self::pack(values));
        }
        crate::post(memory, self.signed(to, turn, flag));
    }

    /// Takes what `from` pushes.
    ///
    /// # Errors
    /// Why it gave up; `out` is then filled in part.
    #[expect(
        clippy::too_many_arguments,
        reason = "what every wait takes, and where"
    )]
    pub fn take<M: Memory + ?Sized>(
        self,
        memory: &M,
        from: usize,
        turn: Turnover,
        flag: Flag,
        out: &mut [f32],
        budget: &mut (impl Budget + ?Sized),
        watch: impl FnMut() -> bool,
    ) -> Result<(), Stop> {
        self.check(out.len());
        let words = Self::filled(out.len());
        let mut chunks = out.chunks_mut(LANES);
        carried::take(
            memory,
            (0..words).map(|i| self.place(self.rank, turn.buffer, from, i)),
            Self::unpack,
            self.signature(from, turn, flag),
            budget,
            watch,
            |values| {
                if let Some(chunk) = chunks.next() {
                    chunk.copy_from_slice(&values[..chunk.len()]);
                }
            },
        )
    }

    fn check(self, values: usize) {
        assert!(
            values <= self.capacity,
            "{values} values in {} places",
            self.capacity
        );
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn all_but_nan_comes_through(bits: u32, other: u32) {
            let values = [f32::from_bits(bits), f32::from_bits(other)];
            let back = Sentinel::unpack(Sentinel::pack(&values)).unwrap();
            for (value, back) in values.into_iter().zip(back) {
                if value.is_nan() {
                    prop_assert_eq!(back.to_bits(), Sentinel::NAN);
                } else {
                    prop_assert_eq!(back.to_bits(), value.to_bits());
                }
            }
        }
    }

    #[test]
    fn special_values_come_through() {
        let values = [-0.0, f32::INFINITY, f32::NEG_INFINITY, f32::from_bits(1)];
        for value in values {
            let back = Sentinel::unpack(Sentinel::pack(&[value])).unwrap();
            assert_eq!(back.map(f32::to_bits), [value.to_bits(), 0]);
        }
        let sentinel = f32::from_bits(Sentinel::EMPTY);
        assert!(sentinel.is_nan());
        for values in [[sentinel, 1.0], [1.0, sentinel]] {
            assert!(Sentinel::unpack(Sentinel::pack(&values)).is_some());
        }
        // A place with one value that came and one that did not is not there; words are written whole.
        assert_eq!(Sentinel::unpack(u64::from(u32::MAX)), None);
        assert_eq!(Sentinel::unpack(u64::from(u32::MAX) << 32), None);
    }

    #[test]
    fn each_use_clears_what_the_one_before_left() {
        let mut rotation = Rotation::default();
        let turns: Vec<_> = [5, 0, 9, 2, 1]
            .map(|n| rotation.begin(n))
            .map(|t| (t.buffer, t.stale, t.stale_values))
            .into();
        assert_eq!(
            turns,
            [(0, 2, 0), (1, 0, 5), (2, 1, 0), (0, 2, 9), (1, 0, 2)]
        );
    }
}
