//! Memory for slices on their way.

use crate::{Buffer, DataType, Error, Result, Shape};

/// Parts of a slot, in the order in which a slice goes through them.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Part {
    /// All ranks' pieces, as they go into the machine's reduction.
    Input = 0,
    /// What this rank has of them then: its rail's pieces.
    Share = 1,
    /// This rank's piece, as each machine has it.
    Collected = 2,
    /// The piece that they add up to.
    Sum = 3,
    /// All pieces of the rail.
    Rail = 4,
    /// All pieces of all ranks.
    Output = 5,
}

impl Part {
    /// How many there are.
    pub const COUNT: usize = 6;
}

/// Makes memory of so many bytes, which nobody has.
type Make<'a> = &'a dyn Fn(usize) -> Result<Buffer>;

/// A place for one slice.
#[derive(Clone, Debug)]
pub struct SliceSlot([Buffer; Part::COUNT]);

impl SliceSlot {
    /// With parts of so many bytes.
    fn new(make: Make<'_>, bytes: [usize; Part::COUNT]) -> Result<Self> {
        let parts = bytes.into_iter().map(make).collect::<Result<Vec<_>>>()?;
        let parts: Result<[Buffer; Part::COUNT], _> = parts.try_into();
        parts
            .map(Self)
            .map_err(|parts| Error::invalid("parts", parts.len(), Part::COUNT))
    }

    fn holds(&self, bytes: [usize; Part::COUNT]) -> bool {
        self.0
            .iter()
            .zip(bytes)
            .all(|(have, need)| have.bytes() >= need)
    }

    fn bytes(&self) -> usize {
        self.0.iter().map(Buffer::bytes).sum()
    }

    /// So many elements at the front of a part.
    ///
    /// # Errors
    /// [`Error::Invalid`] if it is too small.
    pub fn part(&self, part: Part, dtype: DataType, elements: usize) -> Result<Buffer> {
        let storage = self.0[part as usize].storage();
        Buffer::new(storage.clone(), dtype, Shape::new(&[elements])?)
    }
}

/// Slots, kept for the next calls: memory that is new costs more than what is done with it, and calls of several sizes take turns.
#[derive(Debug, Default)]
pub struct Staging {
    slots: Vec<SliceSlot>,
}

impl Staging {
    /// So many slots with parts of so many bytes. No more than `most` bytes are held, if these slots need no more. `make` makes memory
    /// of so many bytes.
    ///
    /// # Errors
    /// Those of `make`.
    pub fn slots(
        &mut self,
        make: impl Fn(usize) -> Result<Buffer>,
        count: usize,
        bytes: [usize; Part::COUNT],
        most: usize,
    ) -> Result<Vec<SliceSlot>> {
        let held = |slots: &[SliceSlot]| slots.iter().map(SliceSlot::bytes).sum::<usize>();
        let slots = std::mem::take(&mut self.slots);
        let (mut fit, mut rest): (Vec<_>, Vec<_>) =
            slots.into_iter().partition(|slot| slot.holds(bytes));
        let missing = count.saturating_sub(fit.len()) * bytes.iter().sum::<usize>();
        if held(&fit) + held(&rest) + missing > most {
            rest.clear();
        }
        if held(&fit) + missing > most {
            fit.clear();
        }
        while fit.len() < count {
            fit.push(SliceSlot::new(&make, bytes)?);
        }
        let slots = fit[..count].to_vec();
        fit.append(&mut rest);
        self.slots = fit;
        Ok(slots)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{MemoryType, Storage};
    use std::{
        any::Any,
        collections::BTreeSet,
        sync::{
            Arc,
            atomic::{AtomicU64, Ordering},
        },
    };

    const MOST: usize = 100_000;

    /// Memory of nobody's, which counts.
    #[derive(Debug)]
    struct Counted {
        address: u64,
        bytes: usize,
        held: Arc<AtomicU64>,
    }

    impl Drop for Counted {
        fn drop(&mut self) {
            self.held.fetch_sub(self.bytes as u64, Ordering::Relaxed);
        }
    }

    impl Storage for Counted {
        fn address(&self) -> u64 {
            self.address
        }
        fn bytes(&self) -> usize {
            self.bytes
        }
        fn memory(&self) -> MemoryType {
            MemoryType::Host
        }
        fn as_any(&self) -> &dyn Any {
            self
        }
    }

    #[derive(Default)]
    struct Memory {
        next: AtomicU64,
        held: Arc<AtomicU64>,
    }

    impl Memory {
        fn make(&self, bytes: usize) -> Result<Buffer> {
            self.held.fetch_add(bytes as u64, Ordering::Relaxed);
            let counted = Counted {
                address: self.next.fetch_add(1 << 20, Ordering::Relaxed),
                bytes,
                held: Arc::clone(&self.held),
            };
            Buffer::new(Arc::new(counted), DataType::U8, Shape::new(&[bytes])?)
        }

        fn held(&self) -> u64 {
            self.held.load(Ordering::Relaxed)
        }
    }

    /// Where slots lie: nobody shares a place.
    fn places(slots: &[SliceSlot]) -> BTreeSet<u64> {
        slots
            .iter()
            .flat_map(|s| &s.0)
            .map(Buffer::address)
            .collect()
    }

    /// A call of one large slice and one of several small ones need no new memory once each has been made.
    #[test]
    fn calls_that_take_turns_keep_their_slots() -> Result<()> {
        let memory = Memory::default();
        let mut staging = Staging::default();
        let mut after = Vec::new();
        for _ in 0..3 {
            for (count, bytes) in [(1, 8000), (5, 300), (2, 1000)] {
                let bytes = [bytes; Part::COUNT];
                let slots = staging.slots(|n| memory.make(n), count, bytes, MOST)?;
                assert!(slots.iter().all(|s| s.holds(bytes)));
                assert_eq!(places(&slots).len(), count * Part::COUNT);
            }
            after.push(memory.held());
        }
        assert_eq!(after, [(8000 + 4 * 300 + 1000) * Part::COUNT as u64; 3]);
        Ok(())
    }

    /// What does not fit together is let go of, and no call gets less than it needs.
    #[test]
    fn no_more_is_held_than_is_allowed() -> Result<()> {
        let memory = Memory::default();
        let mut staging = Staging::default();
        for (count, bytes) in [
            (1, 16_000),
            (5, 3000),
            (1, 9000),
            (5, 3300),
            (2, 8000),
            (1, 16_600),
        ] {
            let parts = [bytes; Part::COUNT];
            let slots = staging.slots(|n| memory.make(n), count, parts, MOST)?;
            assert_eq!(places(&slots).len(), count * Part::COUNT);
            assert!(slots.iter().all(|s| s.holds(parts)));
            drop(slots);
            let now = memory.held();
            assert!(now >= (count * bytes * Part::COUNT) as u64, "{now}");
            assert!(now <= MOST as u64, "{now} for {count} of {bytes}");
        }
        Ok(())
    }
}
