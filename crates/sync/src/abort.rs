//! One fault record for the whole group: the first rank to give up wins, and every rank finds the same record.

use crate::{Memory, Word};

/// A cell in every rank's memory: a state word and eight words of record.
///
/// Rank 0's cell decides: who claims it for this generation writes *the* record. Everybody who gives up then spreads that
/// record to the cells that have none yet. Nothing is cleared: a state of an earlier generation counts as none.
#[derive(Clone, Copy, Debug)]
pub struct AbortCell {
    /// Ranks in the group.
    pub size: usize,
    /// First word.
    pub base: usize,
}

const CLAIMED: u64 = 1;
const WRITTEN: u64 = 2;

/// Looks at a claimed cell before a rank goes on with its own record, because whoever claimed it died on the way.
const PATIENCE: u32 = 1 << 20;

impl AbortCell {
    /// Words of a record.
    pub const RECORD: usize = 8;
    /// Words it needs in every rank's memory.
    pub const WORDS: usize = 1 + Self::RECORD;

    fn word(&self, owner: usize, i: usize) -> Word {
        Word {
            owner,
            index: self.base + i,
        }
    }

    /// The record in `rank`'s own cell, if the group was stopped in this generation.
    pub fn raised<M: Memory + ?Sized>(
        &self,
        memory: &M,
        rank: usize,
        generation: u8,
    ) -> Option<[u64; Self::RECORD]> {
        let state = memory.load(self.word(rank, 0));
        (state == u64::from(generation) << 8 | WRITTEN)
            .then(|| std::array::from_fn(|i| memory.load(self.word(rank, 1 + i))))
    }

    /// Stops the group. Returns the record that won.
    pub fn raise<M: Memory + ?Sized>(
        &self,
        memory: &M,
        generation: u8,
        record: [u64; Self::RECORD],
    ) -> [u64; Self::RECORD] {
        let mut winner = record;
        for owner in 0..self.size {
            if self.claim(memory, owner, generation) {
                for (i, value) in winner.into_iter().enumerate() {
                    memory.store(self.word(owner, 1 + i), value);
                }
                memory.store(self.word(owner, 0), u64::from(generation) << 8 | WRITTEN);
            } else if owner == 0 {
                winner = (0..PATIENCE)
                    .find_map(|_| {
                        std::hint::spin_loop();
                        self.raised(memory, 0, generation)
                    })
                    .unwrap_or(record);
            }
        }
        winner
    }

    fn claim<M: Memory + ?Sized>(&self, memory: &M, owner: usize, generation: u8) -> bool {
        let at = self.word(owner, 0);
        let mut state = memory.load(at);
        while state >> 8 != u64::from(generation) {
            match memory.compare_exchange(at, state, u64::from(generation) << 8 | CLAIMED) {
                Ok(()) => return true,
                Err(other) => state = other,
            }
        }
        false
    }
}
