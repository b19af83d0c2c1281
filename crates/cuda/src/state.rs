//! A rank's own state in its GPU's memory: what kernels count, as the host reads and resets it.

use crate::{core::Core, driver::failed, mark::CudaMark, steps::Counters};
use brigade_device::{Absent, CommConfig, Mark, PeerWait, Result, Storage, Traffic};
use brigade_kernels::{
    STATE_ABSENT, STATE_CALLS, STATE_COUNTERS, STATE_GENERATION, STATE_MOVED, STATE_USES,
    STATE_WAITED, STATE_WAITS,
};
use cudarc::driver::result;
use std::time::Duration;

/// Longest that reading a rank's own counters may take.
const COUNTING: Duration = Duration::from_secs(60);

/// Words of a rank's own state.
pub(crate) fn state_words(config: &CommConfig, size: usize) -> usize {
    STATE_COUNTERS + 2 * Counters::new(size).count(config.regions)
}

impl Core {
    /// Calls that ended well, as far as they are known without waiting for the GPU long.
    pub(crate) fn calls(&self) -> u64 {
        self.read_state().map_or(0, |state| state[STATE_CALLS])
    }

    pub(crate) fn read_state(&self) -> Result<Vec<u64>> {
        let card = &self.device.card;
        card.bind()?;
        let mut words = vec![0u64; STATE_COUNTERS];
        let from = self.memory.state.address();
        // SAFETY: the state is at least this long, and the words outlive the wait below.
        unsafe { result::memcpy_dtoh_async(&mut words, from, card.counting) }
            .map_err(failed("cuMemcpyDtoHAsync"))?;
        CudaMark::record(card, card.counting)?.sync(COUNTING)?;
        Ok(words)
    }

    pub(crate) fn write_state(&self, first: usize, words: &[u64]) -> Result<()> {
        let card = &self.device.card;
        card.bind()?;
        let to = self.memory.state.address() + 8 * first as u64;
        // SAFETY: inside the state, and the words outlive the wait below.
        unsafe { result::memcpy_htod_async(to, words, card.counting) }
            .map_err(failed("cuMemcpyHtoDAsync"))?;
        CudaMark::record(card, card.counting)?.sync(COUNTING)
    }

    /// Writes a word of this rank's part, and waits for it.
    pub(crate) fn write_word(&self, address: u64, word: u64) -> Result<()> {
        let card = &self.device.card;
        card.bind()?;
        let words = [word];
        // SAFETY: a word of own memory of the group, as the caller says, and the number outlives the wait below.
        unsafe { result::memcpy_htod_async(address, &words, card.counting) }
            .map_err(failed("cuMemcpyHtoDAsync"))?;
        CudaMark::record(card, card.counting)?.sync(COUNTING)
    }

    /// Starts a generation that others may have counted further than this rank, in which some ranks are absent.
    pub(crate) fn write_generation(&self, generation: u8, absent: Absent) -> Result<()> {
        self.write_state(STATE_ABSENT, &[absent.bits().into()])?;
        self.write_state(STATE_GENERATION, &[generation.into()])
    }

    /// Sets bytes of this rank's part that no kernel uses now, and waits for it.
    pub(crate) fn set_now(&self, address: u64, byte: u8, bytes: usize) -> Result<()> {
        let card = &self.device.card;
        card.bind()?;
        // SAFETY: own memory of the group, as the caller says.
        unsafe { result::memset_d8_async(address, byte, bytes, card.counting) }
            .map_err(failed("cuMemsetD8Async"))?;
        CudaMark::record(card, card.counting)?.sync(COUNTING)
    }

    pub(crate) fn traffic(&self) -> Traffic {
        let state = self.read_state().unwrap_or(vec![0; STATE_COUNTERS]);
        let waits: Vec<_> = (0..self.size())
            .map(|r| PeerWait {
                waits: state[STATE_WAITS + r],
                waited_ns: state[STATE_WAITED + r],
            })
            .collect();
        Traffic {
            calls: state[STATE_CALLS],
            moved_bytes: state[STATE_MOVED],
            waited_ns: waits.iter().map(|w| w.waited_ns).sum(),
            waits,
        }
    }

    /// Forgets flags and counters of the old generation; the state is that of the next one from here on.
    pub(crate) fn wipe(&self) -> Result<()> {
        let card = &self.device.card;
        card.bind()?;
        let layout = self.control.layout();
        let kept = self.read_state()?;
        let words = self.address(self.rank(), 0);
        let state = self.memory.state.address();
        let next = self.generation().checked_add(1).unwrap_or(1);
        // SAFETY: own words and own state, which no kernel uses now: all ranks have let go of the old generation.
        unsafe {
            result::memset_d8_async(words, 0, 8 * layout.words, self.device.card.counting)
                .and_then(|()| {
                    result::memset_d8_async(
                        state,
                        0,
                        self.memory.state.bytes(),
                        self.device.card.counting,
                    )
                })
                .map_err(failed("cuMemsetD8Async"))?;
        }
        let mut fresh = vec![0; STATE_COUNTERS];
        fresh[STATE_GENERATION] = next.into();
        fresh[STATE_ABSENT] = self.control.absent().bits().into();
        for at in [STATE_CALLS, STATE_MOVED] {
            fresh[at] = kept[at];
        }
        let waits = STATE_WAITS..STATE_USES;
        fresh[waits.clone()].copy_from_slice(&kept[waits]);
        self.empty_slots()?;
        self.write_state(0, &fresh)?;
        self.memory.report.clear();
        Ok(())
    }
}
