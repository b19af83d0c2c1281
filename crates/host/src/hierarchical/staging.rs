//! Memory for slices on their way.

use crate::device::HostDevice;
use brigade_device::{Buffer, DataType, Error, Result, Shape};

/// Parts of a slot, in the order in which a slice goes through them.
#[derive(Clone, Copy)]
pub(super) enum Part {
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

const PARTS: usize = 6;

/// A place for one slice.
#[derive(Clone)]
pub(super) struct Slot([Buffer; PARTS]);

impl Slot {
    /// With parts of so many bytes.
    fn new(device: &HostDevice, bytes: [usize; PARTS]) -> Result<Self> {
        let parts = bytes.map(|bytes| device.heap(DataType::U8, &[bytes]));
        let parts = parts.into_iter().collect::<Result<Vec<_>>>()?;
        let parts: Result<[Buffer; PARTS], _> = parts.try_into();
        parts
            .map(Self)
            .map_err(|parts| Error::invalid("parts", parts.len(), PARTS))
    }

    fn holds(&self, bytes: [usize; PARTS]) -> bool {
        self.0
            .iter()
            .zip(bytes)
            .all(|(have, need)| have.bytes() >= need)
    }

    fn bytes(&self) -> usize {
        self.0.iter().map(Buffer::bytes).sum()
    }

    /// So many elements at the front of a part.
    pub(super) fn part(&self, part: Part, dtype: DataType, elements: usize) -> Result<Buffer> {
        let storage = self.0[part as usize].storage();
        Buffer::new(storage.clone(), dtype, Shape::new(&[elements])?)
    }
}

/// Slots, kept for the next calls: memory that is new costs more than what is done with it, and calls of several sizes take turns.
#[derive(Default)]
pub(super) struct Staging {
    slots: Vec<Slot>,
}

impl Staging {
    /// So many slots with parts of so many bytes. No more than `most` bytes are held, if these slots need no more.
    pub(super) fn slots(
        &mut self,
        device: &HostDevice,
        count: usize,
        bytes: [usize; PARTS],
        most: usize,
    ) -> Result<Vec<Slot>> {
        let held = |slots: &[Slot]| slots.iter().map(Slot::bytes).sum::<usize>();
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
            fit.push(Slot::new(device, bytes)?);
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
    use brigade_device::Allocate;
    use std::collections::BTreeSet;

    const MOST: usize = 100_000;

    /// Where slots lie: nobody shares a place.
    fn places(slots: &[Slot]) -> BTreeSet<u64> {
        slots
            .iter()
            .flat_map(|s| &s.0)
            .map(Buffer::address)
            .collect()
    }

    fn held(device: &HostDevice) -> Result<u64> {
        Ok(device.memory_status()?.held_bytes)
    }

    /// A call of one large slice and one of several small ones need no new memory once each has been made.
    #[test]
    fn calls_that_take_turns_keep_their_slots() -> Result<()> {
        let device = HostDevice::new()?;
        let mut staging = Staging::default();
        let mut after = Vec::new();
        for _ in 0..3 {
            for (count, bytes) in [(1, 8000), (5, 300), (2, 1000)] {
                let slots = staging.slots(&device, count, [bytes; PARTS], MOST)?;
                assert!(slots.iter().all(|s| s.holds([bytes; PARTS])));
                assert_eq!(places(&slots).len(), count * PARTS);
            }
            after.push(held(&device)?);
        }
        assert_eq!(after, [(8000 + 4 * 300 + 1000) * PARTS as u64; 3]);
        Ok(())
    }

    /// What does not fit together is let go of, and no call gets less than it needs.
    #[test]
    fn no_more_is_held_than_is_allowed() -> Result<()> {
        let device = HostDevice::new()?;
        let mut staging = Staging::default();
        for (count, bytes) in [
            (1, 16_000),
            (5, 3000),
            (1, 9000),
            (5, 3300),
            (2, 8000),
            (1, 16_600),
        ] {
            let slots = staging.slots(&device, count, [bytes; PARTS], MOST)?;
            assert_eq!(places(&slots).len(), count * PARTS);
            assert!(slots.iter().all(|s| s.holds([bytes; PARTS])));
            drop(slots);
            let now = held(&device)?;
            assert!(now >= (count * bytes * PARTS) as u64, "{now}");
            assert!(now <= MOST as u64, "{now} for {count} of {bytes}");
        }
        Ok(())
    }
}
