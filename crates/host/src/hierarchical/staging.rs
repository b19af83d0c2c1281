//! Memory for slices on their way.

use crate::device::HostDevice;
use brigade_device::{Buffer, DataType, Result, Shape};

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
    /// So many elements at the front of a part.
    pub(super) fn part(&self, part: Part, dtype: DataType, elements: usize) -> Result<Buffer> {
        let storage = self.0[part as usize].storage();
        Buffer::new(storage.clone(), dtype, Shape::new(&[elements])?)
    }
}

/// Slots, kept for the next call that fits them.
#[derive(Default)]
pub(super) struct Staging {
    slots: Vec<Slot>,
    bytes: [usize; PARTS],
}

impl Staging {
    /// So many slots with parts of so many bytes.
    pub(super) fn slots(
        &mut self,
        device: &HostDevice,
        count: usize,
        bytes: [usize; PARTS],
    ) -> Result<Vec<Slot>> {
        let fit = self
            .bytes
            .iter()
            .zip(bytes)
            .all(|(&have, need)| have >= need);
        if !fit || self.slots.len() < count {
            // Before there is more: no more than one call's at a time.
            *self = Self::default();
            let slot = |_| {
                let mut parts = Vec::new();
                for bytes in bytes {
                    parts.push(device.heap(DataType::U8, &[bytes])?);
                }
                let parts: Result<[Buffer; PARTS], _> = parts.try_into();
                parts.map(Slot).map_err(|parts: Vec<_>| {
                    brigade_device::Error::invalid("parts", parts.len(), PARTS)
                })
            };
            self.slots = (0..count).map(slot).collect::<Result<_>>()?;
            self.bytes = bytes;
        }
        Ok(self.slots[..count].to_vec())
    }
}
