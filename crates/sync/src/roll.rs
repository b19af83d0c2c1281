//! Who is left of a group: a roll is called, and closed when all have answered that may, or when time is over.

use crate::{Budget, Memory, Stop, Word};
use std::cmp::Ordering;

/// Two words in rank 0's memory, for every other roll each: a rank answers and the roll is closed by one `compare_exchange` of one of
/// them. So there is one outcome for all, whoever dies on the way: rank 0's memory outlives it. Who comes after the closing finds that it
/// was left out, and by then has written nothing that anybody of the others will read. What a roll said stays until the next but one is
/// called: by then all who are in the next have read it.
///
/// Rolls are counted; a shrinking group calls two, and between them wipes its flags: who is in the second has wiped its own. The
/// other ranks' words of the same numbers are written for nothing but to wake who rests.
///
/// A word: who answered, 16 bits; who of the others is gone, 16 bits; the latest generation of those who answered, 8 bits; whether the roll
/// is closed, and which one it is.
#[derive(Clone, Copy, Debug)]
pub struct RollCall {
    /// This rank.
    pub rank: usize,
    /// Ranks in the group.
    pub size: usize,
    /// First word.
    pub base: usize,
}

/// A roll that was closed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Called {
    /// Who answered, a bit for each.
    pub answered: u16,
    /// Who did not, and never will.
    pub gone: u16,
    /// The latest of the generations that those who answered are in.
    pub generation: u8,
}

const CLOSED: u64 = 1 << 40;
const ROUND: u32 = 41;

fn round_of(word: u64) -> u32 {
    (word >> ROUND) as u32
}

fn called(word: u64) -> Called {
    Called {
        answered: word as u16,
        gone: (word >> 16) as u16,
        generation: (word >> 32) as u8,
    }
}

/// Of two generations of a group the later one: they are counted from 1, come round, and differ by 1 at most.
fn later(a: u8, b: u8) -> u8 {
    match a.abs_diff(b) {
        0 | 1 => a.max(b),
        _ => a.min(b).max(1),
    }
}

impl RollCall {
    /// Words it needs in every rank's memory.
    pub const WORDS: usize = 2;

    const fn word(self, owner: usize, round: u32) -> Word {
        Word {
            owner,
            index: self.base + round as usize % Self::WORDS,
        }
    }

    const fn mine(self) -> u64 {
        1 << self.rank
    }

    /// Changes the word that counts, and wakes all.
    fn change<M: Memory + ?Sized>(self, memory: &M, from: u64, to: u64) -> bool {
        let at = |owner| self.word(owner, round_of(to));
        let changed = memory.compare_exchange(at(0), from, to).is_ok();
        if changed {
            (1..self.size).for_each(|owner| memory.store(at(owner), to));
        }
        changed
    }

    /// Says that this rank has let go of all up to its `generation`, and is there. False if it comes too late.
    pub fn answer<M: Memory + ?Sized>(self, memory: &M, round: u32, generation: u8) -> bool {
        loop {
            let seen = memory.load(self.word(0, round));
            let (before, of) = match round_of(seen).cmp(&round) {
                Ordering::Less => (0, generation),
                Ordering::Greater => return false,
                Ordering::Equal if seen & self.mine() != 0 => return true,
                Ordering::Equal if seen & CLOSED != 0 => return false,
                Ordering::Equal => (seen & 0xFFFF, later(called(seen).generation, generation)),
            };
            let to = u64::from(round) << ROUND | u64::from(of) << 32 | before | self.mine();
            if self.change(memory, seen, to) {
                return true;
            }
        }
    }

    /// Waits until nobody is missing of those who are `expected` and not `departed`, or somebody has closed the roll.
    ///
    /// # Errors
    /// [`Stop::Timeout`] when the budget is spent.
    pub fn wait<M: Memory + ?Sized>(
        self,
        memory: &M,
        (round, expected): (u32, u16),
        budget: &mut (impl Budget + ?Sized),
        mut departed: impl FnMut(usize) -> bool,
    ) -> Result<(), Stop> {
        let mut spins = budget.spins();
        loop {
            let events = memory.events(self.rank);
            let seen = memory.load(self.word(0, round));
            let missing = expected & !called(seen).answered;
            if round_of(seen) != round || seen & CLOSED != 0 || missing == 0 {
                return Ok(());
            }
            if spins > 0 {
                spins -= 1;
                std::hint::spin_loop();
                continue;
            }
            if (0..self.size).all(|rank| missing >> rank & 1 == 0 || departed(rank)) {
                return Ok(());
            }
            if budget.spent() {
                return Err(Stop::Timeout { seen });
            }
            memory.rest(self.rank, events, budget.until());
        }
    }

    /// Closes the roll, if nobody has; those who have not answered are left out, and `gone` says of which ranks it is known that they
    /// have ended. `None` if the others have gone on without this rank.
    pub fn close<M: Memory + ?Sized>(self, memory: &M, round: u32, gone: u16) -> Option<Called> {
        loop {
            let seen = memory.load(self.word(0, round));
            if round_of(seen) != round || seen & self.mine() == 0 {
                return None;
            }
            if seen & CLOSED != 0 {
                return Some(called(seen));
            }
            let absent = !called(seen).answered;
            let to = seen | CLOSED | u64::from(gone & absent) << 16;
            if self.change(memory, seen, to) {
                return Some(called(to));
            }
        }
    }

    /// Whether the others have gone on without this rank since roll `round`, the last one that it was in.
    pub fn is_left_out<M: Memory + ?Sized>(self, memory: &M, round: u32) -> bool {
        let next = round.wrapping_add(1);
        let seen = memory.load(self.word(0, next));
        match round_of(seen).cmp(&next) {
            Ordering::Less => false,
            Ordering::Equal => seen & CLOSED != 0 && seen & self.mine() == 0,
            Ordering::Greater => true,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn the_later_generation_is_the_one_after(g in 1u8..=255) {
            let next = g.checked_add(1).unwrap_or(1);
            prop_assert_eq!(later(g, g), g);
            prop_assert_eq!(later(g, next), next);
            prop_assert_eq!(later(next, g), next);
        }
    }
}
