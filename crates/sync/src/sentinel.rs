//! Sums that are pushed: values go to places that are empty, and a reader polls until none of them is.

use crate::{BUFFERS, Budget, Flag, Memory, Post, Stop, Turnover, Wait, Want, Word, carried};
use brigade_device::DataType;

/// Three rotating buffers in every rank's memory (after TensorRT-LLM's Lamport all-reduce), for exchanges of f32, f16 and
/// bf16 in which every rank pushes to every peer, in one shot or in two. An exchange is one *use* of one buffer, both shots
/// in different places of it; a [`Rotation`](crate::Rotation) counts them.
///
/// # Lanes
/// Values travel in *lanes* of 32 bits, one f32 or two 16-bit values each, two lanes to a word. A lane of all ones is the
/// sentinel, which no value is: pushing makes it the type's [canonical NaN](Self::nan). Every other pattern comes through
/// as it is. So a sum is taken as it would be, since every NaN makes the same one of it; copies of any bits are not.
///
/// Lanes lie inverted in memory: an empty one is 0. So memory that nobody has touched is empty, and whoever joins with
/// large buffers pays nothing for them until they are used. On a GPU (`kernels/all_reduce.cu`) an empty lane is all ones,
/// since that memory is there and filled once in any case, and a kernel that polls then compares what it has read as it is.
/// Its signatures are the call's arrivals, since each exchange is a call of its own there. Devices never share buffers.
///
/// # Why three buffers suffice
/// In use `n` a rank pushes, signs, [clears](Self::clear) the buffer of use `n - 1`, and takes from all: in two shots it then
/// pushes and signs the sums of its share, and takes those of the others. It goes on to use `n + 1` only when it has taken
/// all that it is sent in use `n`. So whoever took a peer's first signature of use `n + 1` knows that the peer has taken
/// all of use `n`; and whoever took that of use `n + 2`, that the peer has cleared the buffer of use `n`, too.
///
/// A rank in use `n + 3` has taken all first signatures of use `n + 2`. So what it pushes, in either shot, goes into
/// buffers that have been read and cleared; and as the signature is a release, the clear does not come after it. While a
/// rank is in use `n`, its peers may push for use `n`, and those that have its signature of use `n` and all else that they
/// need, for use `n + 1`, but for no later one; and it clears the buffer of use `n - 1` itself. These are the three.
///
/// The second shot changes nothing in this, for it comes after the first signature of its use and before that of the next
/// one. Two buffers would not do: a peer that pushes for use `n + 1` would meet the clear of use `n - 1`. That it has the
/// sums of use `n` does not say that all others have cleared: who reduces nothing has none to push.
///
/// The first signature is pushed also when there are no values for a peer, in a use or in its share. The second comes only
/// with values.
///
/// Words of flags per rank: [`signatures`](Self::signatures), from `base` on. They are apart from the buffers, whose words
/// are only ever read and written relaxed.
#[derive(Clone, Copy, Debug)]
pub struct Sentinel {
    /// This rank.
    pub rank: usize,
    /// Ranks in the group.
    pub size: usize,
    /// First word of the signatures.
    pub base: usize,
    /// First word of the buffers.
    pub buffers: usize,
    /// Words of each buffer.
    pub capacity: usize,
}

/// Most shots of an exchange.
const SHOTS: usize = 2;

/// Bytes of a word, and of its lanes.
const WORD_BYTES: usize = 8;

/// One push of an exchange, and where it goes in the buffers: each rank has a slot for every peer there, the next one's
/// first.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Shot {
    /// 0, or 1 in the second one: each has signatures of its own.
    pub index: usize,
    /// Its first word in a buffer.
    pub first: usize,
    /// Words of a slot.
    pub words: usize,
    /// One rank alone pushes something, and has the one slot at all its peers.
    pub single: bool,
}

impl Shot {
    /// The only shot of an exchange, or its first.
    pub const fn first(words: usize) -> Self {
        Self {
            index: 0,
            first: 0,
            words,
            single: false,
        }
    }

    /// The only shot of an exchange in which one rank alone has something to push.
    pub const fn single(words: usize) -> Self {
        Self {
            single: true,
            ..Self::first(words)
        }
    }

    /// The one after this, behind it in the buffer.
    pub const fn then(self, size: usize, words: usize) -> Self {
        Self {
            index: self.index + 1,
            first: self.end(size),
            words,
            single: false,
        }
    }

    /// Words of a buffer that are taken up to here.
    pub const fn end(self, size: usize) -> usize {
        let peers = size.saturating_sub(1);
        let slots = if self.single && peers > 1 { 1 } else { peers };
        self.first + slots * self.words
    }
}

/// A lane as it lies in memory.
const fn inverted(lane: u32, nan: u32) -> u32 {
    !(if lane == Sentinel::EMPTY { nan } else { lane })
}

impl Sentinel {
    /// The lane that is no value.
    pub const EMPTY: u32 = u32::MAX;

    /// The lane that is pushed in its place: as many canonical NaNs of the type as a lane has values.
    pub const fn nan(dtype: DataType) -> u32 {
        let nan = dtype.poison() as u32;
        match dtype.bytes() {
            2 => nan << 16 | nan,
            _ => nan,
        }
    }

    /// Words of flags it needs in every rank's memory.
    pub const fn signatures(size: usize) -> usize {
        BUFFERS * SHOTS * size
    }

    /// Words of a buffer that so many bytes take.
    pub const fn filled(bytes: usize) -> usize {
        bytes.div_ceil(WORD_BYTES)
    }

    /// A word of what `from` pushes to `owner`.
    pub const fn place(
        self,
        owner: usize,
        buffer: usize,
        shot: Shot,
        from: usize,
        i: usize,
    ) -> Word {
        let slot = match shot.single {
            true => 0,
            false => (from + self.size - owner - 1) % self.size,
        };
        Word {
            owner,
            index: self.buffers + buffer * self.capacity + shot.first + slot * shot.words + i,
        }
    }

    const fn signature_word(self, owner: usize, buffer: usize, shot: Shot, from: usize) -> Word {
        Word {
            owner,
            index: self.base + (buffer * SHOTS + shot.index) * self.size + from,
        }
    }

    /// Up to 8 bytes; those that are missing are 0.
    pub(crate) fn word(bytes: &[u8]) -> u64 {
        let whole = bytes.try_into().unwrap_or_else(|_| {
            let mut all = [0; WORD_BYTES];
            all[..bytes.len()].copy_from_slice(bytes);
            all
        });
        u64::from_ne_bytes(whole)
    }

    /// What a place holds for up to 8 bytes; those that are missing are 0. `nan` takes the place of the sentinel.
    pub fn pack(bytes: &[u8], nan: u32) -> u64 {
        let word = Self::word(bytes);
        let [low, high] = [word as u32, (word >> 32) as u32].map(|lane| inverted(lane, nan));
        u64::from(high) << 32 | u64::from(low)
    }

    /// The bytes in a place, if both lanes have come.
    pub const fn unpack(word: u64) -> Option<[u8; WORD_BYTES]> {
        if word as u32 == 0 || word >> 32 == 0 {
            return None;
        }
        Some((!word).to_ne_bytes())
    }

    /// Behind the values: which call they belong to.
    pub const fn signed(self, to: usize, turn: Turnover, shot: Shot, flag: Flag) -> Post {
        Post {
            word: self.signature_word(to, turn.buffer, shot, self.rank),
            flag,
        }
    }

    /// Waits for the signature of what `from` pushes.
    pub const fn signature(self, from: usize, turn: Turnover, shot: Shot, flag: Flag) -> Wait {
        Wait {
            word: self.signature_word(self.rank, turn.buffer, shot, from),
            want: Want::Exactly(flag),
            peer: from,
        }
    }

    /// Empties all own buffers for a new generation: while nobody pushes, so between two gates of a reset. What is empty is
    /// left alone, so that memory that was never used is not taken now.
    pub fn empty<M: Memory + ?Sized>(self, memory: &M) {
        let words = self.buffers..self.buffers + BUFFERS * self.capacity;
        memory.empty(self.rank, words);
    }

    /// Empties the buffer of the use before, as far as it was filled: after this use's first push, before the next one's.
    pub fn clear<M: Memory + ?Sized>(self, memory: &M, turn: Turnover) {
        let first = self.buffers + turn.stale * self.capacity;
        for index in first..first + turn.stale_words {
            let owner = self.rank;
            memory.store_relaxed(Word { owner, index }, 0);
        }
    }

    /// Pushes values to a peer; they are to be [signed](Self::signed). `nan` takes the place of the sentinel.
    pub fn push<M: Memory + ?Sized>(
        self,
        memory: &M,
        to: usize,
        turn: Turnover,
        shot: Shot,
        nan: u32,
        bytes: &[u8],
    ) {
        self.check(shot, Self::filled(bytes.len()));
        let Word { owner, index } = self.place(to, turn.buffer, shot, self.rank, 0);
        for (index, bytes) in (index..).zip(bytes.chunks(WORD_BYTES)) {
            memory.store_relaxed(Word { owner, index }, Self::pack(bytes, nan));
        }
    }

    /// Takes what `from` pushes, and its signature.
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
        shot: Shot,
        flag: Flag,
        out: &mut [u8],
        budget: &mut (impl Budget + ?Sized),
        watch: impl FnMut() -> bool,
    ) -> Result<(), Stop> {
        self.check(shot, Self::filled(out.len()));
        let Word { owner, index } = self.place(self.rank, turn.buffer, shot, from, 0);
        let words = index..index + Self::filled(out.len());
        let mut chunks = out.chunks_mut(WORD_BYTES);
        carried::take(
            memory,
            words.map(|index| Word { owner, index }),
            Self::unpack,
            self.signature(from, turn, shot, flag),
            budget,
            watch,
            |bytes| {
                let Some(chunk) = chunks.next() else { return };
                match <&mut [u8; WORD_BYTES]>::try_from(&mut *chunk) {
                    Ok(whole) => *whole = bytes,
                    Err(_) => chunk.copy_from_slice(&bytes[..chunk.len()]),
                }
            },
        )
    }

    /// That words fit in their slot, and the slot in a buffer.
    pub(crate) fn check(self, shot: Shot, words: usize) {
        let end = shot.end(self.size);
        assert!(
            words <= shot.words && end <= self.capacity,
            "{words} words in a slot of {} words, which end at {end} of {}",
            shot.words,
            self.capacity
        );
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Rotation;
    use DataType::{BF16, F16, F32};
    use proptest::prelude::*;

    const TYPES: [(DataType, u32); 3] =
        [(F32, 0x7FC0_0000), (F16, 0x7E00_7E00), (BF16, 0x7FC0_7FC0)];

    fn through(lanes: [u32; 2], nan: u32) -> [u32; 2] {
        let bytes = lanes.map(u32::to_ne_bytes).concat();
        let back = Sentinel::unpack(Sentinel::pack(&bytes, nan)).unwrap();
        let (low, high) = back.split_at(4);
        [low, high].map(|lane| u32::from_ne_bytes(lane.try_into().unwrap()))
    }

    proptest! {
        #[test]
        fn all_but_the_sentinel_comes_through(low: u32, high: u32) {
            for (dtype, canonical) in TYPES {
                let nan = Sentinel::nan(dtype);
                prop_assert_eq!(nan, canonical);
                let want = [low, high].map(|lane| if lane == u32::MAX { nan } else { lane });
                prop_assert_eq!(through([low, high], nan), want);
            }
        }
    }

    #[test]
    fn neighbours_of_the_sentinel_come_through_and_it_becomes_a_nan() {
        let neighbours = [
            u32::MAX - 1,
            0x7FFF_FFFF,
            0xFFFF_FFFE,
            0xFFFE_FFFF,
            0x0000_FFFF,
        ];
        let specials = [
            0,
            1,
            0x8000_0000,
            0x7F80_0000,
            0xFF80_0000,
            0x7FC0_0000,
            0x8001_8001,
        ];
        for lane in neighbours.into_iter().chain(specials) {
            for (_, nan) in TYPES {
                assert_eq!(through([lane, !lane], nan)[0], lane);
                assert_eq!(through([1, lane], nan)[1], lane);
                assert_eq!(through([u32::MAX, lane], nan), [nan, lane]);
                assert_eq!(through([lane, u32::MAX], nan), [lane, nan]);
            }
        }
    }

    #[test]
    fn a_place_is_empty_until_both_lanes_have_come() {
        assert_eq!(Sentinel::unpack(0), None);
        let word = Sentinel::pack(&[1, 2, 3], 0);
        assert_eq!(Sentinel::unpack(word), Some([1, 2, 3, 0, 0, 0, 0, 0]));
        for lane in [word & u64::from(u32::MAX), word >> 32 << 32] {
            assert_eq!(Sentinel::unpack(lane), None);
        }
    }

    #[test]
    fn slots_and_signatures_are_apart_and_the_next_rank_has_the_first() {
        let of = |rank| Sentinel {
            rank,
            size: 3,
            base: 5,
            buffers: 100,
            capacity: 24,
        };
        let shot = Shot::first(5);
        let shots = [shot, shot.then(3, 7)];
        assert_eq!(shots[1].end(3), 24);
        assert_eq!(of(0).place(1, 0, shot, 2, 0).index, 100);
        assert_eq!(
            of(0).place(1, 2, shots[1], 0, 3).index,
            100 + 2 * 24 + 10 + 7 + 3
        );
        let mut rotation = Rotation::default();
        let (mut words, mut flags) = (vec![], vec![]);
        for turn in [0; BUFFERS].map(|_| rotation.begin(24)) {
            for (shot, from) in shots.into_iter().flat_map(|s| [0, 2].map(|from| (s, from))) {
                let place = |i| of(1).place(1, turn.buffer, shot, from, i).index;
                words.extend((0..shot.words).map(place));
                let flag = Flag::new(1, 2, turn.epoch);
                let wait = of(1).signature(from, turn, shot, flag);
                assert_eq!(of(from).signed(1, turn, shot, flag).word, wait.word);
                flags.push(wait.word.index);
            }
        }
        words.sort_unstable();
        assert_eq!(words, (100..100 + 3 * 24).collect::<Vec<_>>());
        flags.sort_unstable();
        flags.dedup();
        assert_eq!(flags.len(), BUFFERS * 2 * 2);
        let all = 5..5 + Sentinel::signatures(3);
        assert!(flags.iter().all(|f| all.contains(f)));
    }
}
