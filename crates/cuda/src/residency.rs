//! Blocks that may spin at once. A block that waits for a peer holds its place on the GPU: if the blocks that it waits for
//! find none, nobody goes on. So whoever launches waiting blocks reserves their places first, over all communicators of the
//! process, and takes fewer blocks where there is no more room.

use crate::{CudaDevice, Kernel, Launch, core::Core, fifo, lane::Lane, mark::CudaMark, messages};
use brigade_device::{Device, Reason, Result};
use brigade_kernels::{ALL_REDUCE_THREADS, Parameters};
use brigade_plan::Topology;
use parking_lot::Mutex;
use std::{collections::BTreeMap, sync::Arc};

/// All of a GPU. So fine that what rounding lets through is far less than a block.
const WHOLE: u64 = 1_000_000_000;

/// What is reserved on each GPU, in parts of [`WHOLE`]. Of the process, since several devices may stand for one GPU.
static RESERVED: Mutex<BTreeMap<u32, u64>> = Mutex::new(BTreeMap::new());

/// Places of blocks that may wait; given back when dropped.
#[derive(Debug)]
pub struct Spinning {
    ordinal: u32,
    share: u64,
    blocks: u32,
}

impl CudaDevice {
    /// Reserves places for all blocks of a launch of `kernel`, until the result is dropped.
    ///
    /// # Errors
    /// [`Error::Unsupported`](brigade_device::Error::Unsupported) with the reason `cuda-residency` if they would not all be
    /// resident beside those that are reserved already.
    pub fn reserve_spinning<P: Parameters>(
        &self,
        kernel: &Kernel<P>,
        shape: Launch,
    ) -> Result<Spinning> {
        let places = self.places(kernel, shape)?;
        let share = share(u64::from(shape.blocks), places);
        let ordinal = self.info().ordinal;
        reserve(ordinal, share).map_err(|reserved| {
            let free = (WHOLE - reserved) * places / WHOLE;
            Reason::new(
                "cuda-residency",
                format!(
                    "{} blocks may spin, and GPU {ordinal} has room for {free}",
                    shape.blocks
                ),
                "lower sm_budget, or put fewer ranks on a GPU",
            )
        })?;
        Ok(Spinning {
            ordinal,
            share,
            blocks: shape.blocks,
        })
    }

    /// Reserves places for the launch, or more where nobody else needs them: up to a block for each multiprocessor, as long as
    /// half of the GPU stays free for others. Ranks need not have the same number.
    ///
    /// # Errors
    /// As [`reserve_spinning`](Self::reserve_spinning).
    pub(crate) fn reserve_half<P: Parameters>(
        &self,
        kernel: &Kernel<P>,
        shape: Launch,
    ) -> Result<Spinning> {
        let places = self.places(kernel, shape)?;
        let taken = RESERVED.lock().get(&self.info().ordinal).copied();
        let spare = (WHOLE / 2).saturating_sub(taken.unwrap_or(0)) * places / WHOLE;
        let most = u32::from(self.info().sms).min(spare as u32);
        let blocks = shape.blocks.max(most);
        self.reserve_spinning(kernel, Launch { blocks, ..shape })
    }

    /// Blocks of this shape that the GPU holds at once.
    fn places<P: Parameters>(&self, kernel: &Kernel<P>, shape: Launch) -> Result<u64> {
        Ok(u64::from(kernel.resident_per_sm(shape)?) * u64::from(self.info().sms))
    }
}

impl Spinning {
    /// How many blocks have a place.
    pub(crate) fn blocks(&self) -> u32 {
        self.blocks
    }
}

/// Most blocks of a launch of messages, or of one that serves queues, for which there are places.
pub(crate) fn most_messages(topology: &Topology) -> u32 {
    let (size, engines) = (topology.group.size, topology.engines);
    let queues = match topology.config.fifo_bytes {
        0 => 0,
        _ => fifo::ends(size, engines.queues.into()),
    };
    messages::most_blocks(size, u32::from(engines.channels).max(1)).max(queues)
}

/// Calls that a rank which shares its GPU may be ahead of the GPU.
const CALLS_AHEAD: usize = 32;

impl Core {
    /// Most blocks that carry each of many messages in any case, the same on all ranks.
    pub(crate) fn blocks_each(&self) -> u32 {
        u32::from(self.topology.engines.channels).max(1)
    }

    /// Blocks of so many threads that wait in one place. Where ranks share a GPU there is one, however small: each may hold a multiprocessor of
    /// its own, and a library's product that takes a whole one has to find some on which no peer's block waits for it.
    pub(crate) fn in_a_place(&self, threads: u32) -> u32 {
        if self.shares() {
            1
        } else {
            ALL_REDUCE_THREADS / threads
        }
    }

    /// What products may use while protocol steps run beside them, where the group keeps some of the GPU from them. By default
    /// they have all of it: steps find room between a product's blocks, and the library does better on a whole GPU.
    pub(crate) fn product_sms(&self) -> Option<u16> {
        let sms = self.device.info().sms;
        let kept = self.config.sm_budget.filter(|&kept| kept < sms);
        kept.map(|kept| sms - kept)
    }

    /// Blocks of steps and messages that may wait at the same time, each on a multiprocessor of its own.
    pub(crate) fn may_wait(&self) -> u32 {
        self.stepping.blocks + self.places_of_messages()
    }

    /// Where ranks share a GPU, none runs far ahead of what is done: a stream takes so many launches and no more, and a thread
    /// that waits there for room keeps all others from the driver, and so peers from what it waits for.
    pub(crate) fn keep_pace(&self, lane: &Arc<Lane>) {
        if !self.shares() || lane.capturing() {
            return;
        }
        let oldest = {
            let mut ahead = self.ahead.lock();
            ahead.extend(CudaMark::record(&self.device.card, lane.stream).ok());
            if ahead.len() <= CALLS_AHEAD {
                return;
            }
            ahead.pop_front()
        };
        if let Some(mark) = oldest {
            // However it ended, it is over, or will be found to be late where somebody waits for it.
            let _ = mark.reached(self.config.first_deadline.max(self.config.deadline));
        }
    }
}

/// What so many blocks take of a GPU with so many places.
fn share(blocks: u64, places: u64) -> u64 {
    blocks * WHOLE / places.max(1)
}

/// `Err` is what is reserved already.
fn reserve(ordinal: u32, share: u64) -> Result<(), u64> {
    let mut all = RESERVED.lock();
    let reserved = all.entry(ordinal).or_default();
    if *reserved + share > WHOLE {
        return Err(*reserved);
    }
    *reserved += share;
    Ok(())
}

impl Drop for Spinning {
    fn drop(&mut self) {
        if let Some(reserved) = RESERVED.lock().get_mut(&self.ordinal) {
            *reserved -= self.share;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_does_not_fit_beside_the_others_is_refused_until_they_are_gone() {
        // No GPU has this number, so no other test reserves there.
        let ordinal = 7_000;
        let take = |blocks| {
            let share = share(u64::from(blocks), 132);
            reserve(ordinal, share).map(|()| Spinning {
                ordinal,
                share,
                blocks,
            })
        };
        let (half, rest) = (take(66).unwrap(), take(65).unwrap());
        assert_eq!(take(2).map(drop), Err(half.share + rest.share));
        let one = take(1).unwrap();
        assert!(take(1).is_err());
        drop((one, half));
        assert!(take(66).is_ok());
        drop(rest);
        assert!(take(133).is_err() && take(132).is_ok());
    }
}
