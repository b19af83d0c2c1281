//! One fault record for the whole group: the first rank to give up wins, and every rank finds the same record.

use crate::{Memory, Word};

/// Words in every rank's memory: one that says which record counts, and room for two records.
///
/// Whoever gives up writes its record into a place that nobody else has, and then decides by one `compare_exchange` in
/// rank 0's memory: the record that is named there first is *the* record. Everybody who gives up then names that record in
/// the memory of all. A rank that dies on the way has either decided or not, and nobody waits for it. Nothing is cleared:
/// what an earlier generation decided counts for nothing.
#[derive(Clone, Copy, Debug)]
pub struct AbortCell {
    /// Ranks in the group.
    pub size: usize,
    /// First word.
    pub base: usize,
}

/// Places for records in each rank's memory: more than threads that give up at once and die before they decide.
const PLACES: usize = 2;

/// Bits of a verdict that name a place; the generation stands above them.
const PLACE_BITS: u32 = 16;

/// Looks at the verdict before a rank that found no place goes on with its own record. Only when as many others as there
/// are places died before they decided.
const PATIENCE: u32 = 1 << 20;

impl AbortCell {
    /// Words of a record.
    pub const RECORD: usize = 8;
    /// Words it needs in every rank's memory.
    pub const WORDS: usize = 1 + PLACES * (1 + Self::RECORD);

    const fn verdict_word(self, owner: usize) -> Word {
        Word {
            owner,
            index: self.base,
        }
    }

    /// Word 0 says for which generation the place is taken, the others hold the record.
    const fn place_word(self, place: usize, i: usize) -> Word {
        Word {
            owner: place / PLACES,
            index: self.base + 1 + place % PLACES * (1 + Self::RECORD) + i,
        }
    }

    /// The record that stopped the group in this generation, if `rank` has heard of one.
    pub fn raised<M: Memory + ?Sized>(
        self,
        memory: &M,
        rank: usize,
        generation: impl Into<u64>,
    ) -> Option<[u64; Self::RECORD]> {
        let verdict = memory.load(self.verdict_word(rank));
        let place = place_of(verdict, generation.into())?;
        Some(std::array::from_fn(|i| {
            memory.load(self.place_word(place, 1 + i))
        }))
    }

    /// Stops the group. Returns the record that won.
    pub fn raise<M: Memory + ?Sized>(
        self,
        memory: &M,
        generation: impl Into<u64>,
        record: [u64; Self::RECORD],
    ) -> [u64; Self::RECORD] {
        let generation = generation.into();
        if self.raised(memory, 0, generation).is_none() {
            match self.take_place(memory, generation) {
                Some(place) => {
                    for (i, value) in record.into_iter().enumerate() {
                        memory.store(self.place_word(place, 1 + i), value);
                    }
                    self.name(memory, 0, generation, place);
                }
                None => self.linger(memory, generation),
            }
        }
        let verdict = memory.load(self.verdict_word(0));
        let Some(place) = place_of(verdict, generation) else {
            return record;
        };
        for owner in 1..self.size {
            self.name(memory, owner, generation, place);
        }
        self.raised(memory, 0, generation).unwrap_or(record)
    }

    fn take_place<M: Memory + ?Sized>(self, memory: &M, generation: u64) -> Option<usize> {
        (0..self.size * PLACES).find(|&place| {
            let at = self.place_word(place, 0);
            let taken = memory.load(at);
            // Generation 0 is not told from memory that nobody has written yet, so it is counted from 1 here.
            taken != generation + 1 && memory.compare_exchange(at, taken, generation + 1).is_ok()
        })
    }

    /// Names the record in a rank's memory, unless one of this generation is named there.
    fn name<M: Memory + ?Sized>(self, memory: &M, owner: usize, generation: u64, place: usize) {
        let at = self.verdict_word(owner);
        let verdict = memory.load(at);
        if place_of(verdict, generation).is_none() {
            // Whoever was faster named one of this generation.
            let _ = memory.compare_exchange(at, verdict, verdict_of(generation, place));
        }
    }

    fn linger<M: Memory + ?Sized>(self, memory: &M, generation: u64) {
        let at = self.verdict_word(0);
        for _ in 0..PATIENCE {
            if place_of(memory.load(at), generation).is_some() {
                break;
            }
            std::hint::spin_loop();
        }
    }
}

const fn verdict_of(generation: u64, place: usize) -> u64 {
    generation << PLACE_BITS | (place as u64 + 1)
}

fn place_of(verdict: u64, generation: u64) -> Option<usize> {
    let place = (verdict & ((1 << PLACE_BITS) - 1)).checked_sub(1)?;
    (verdict >> PLACE_BITS == generation).then_some(place as usize)
}
