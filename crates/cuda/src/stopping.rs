//! Stopping a group, and hearing why it was stopped.

use crate::core::{Core, HEARSAY};
use brigade_device::{FaultKind, FaultRecord};
use brigade_sync::Memory;
use std::time::Instant;

impl Core {
    /// The fault that stopped the group in this generation, whoever found it. Where a kernel was stopped and nobody has said why, that is waited
    /// for.
    pub(crate) fn fault(&self) -> Option<FaultRecord> {
        let generation = self.generation();
        let known = self.known();
        if known.is_none() && self.memory.report.stopped(generation) {
            return self.hear_of_fault(generation);
        }
        known
    }

    /// The same, as far as it is known.
    pub(crate) fn known(&self) -> Option<FaultRecord> {
        let generation = self.generation();
        self.control.fault().or_else(|| {
            let record = self.memory.report.fault(generation)?;
            self.raise_in(generation, record)
        })
    }

    /// A kernel of this rank found the group stopped: whoever stopped it is about to say why.
    fn hear_of_fault(&self, generation: u8) -> Option<FaultRecord> {
        let end = Instant::now() + HEARSAY;
        let (memory, rank) = (self.control.memory(), self.rank());
        loop {
            let events = memory.events(rank);
            let heard = self.control.fault();
            if heard.is_some() || self.generation() != generation {
                return heard;
            }
            if Instant::now() >= end {
                return self.raise_in(generation, self.record(FaultKind::Aborted));
            }
            memory.rest(rank, events, Some(end));
        }
    }

    /// Stops the group; everybody's waits end with the record that won.
    pub(crate) fn raise(&self, record: FaultRecord) -> FaultRecord {
        let record = self.control.raise(record);
        self.ask_to_stop();
        record
    }

    /// The same for what was found in a generation, if that is the one of now.
    fn raise_in(&self, generation: u8, record: FaultRecord) -> Option<FaultRecord> {
        let record = self.control.raise_in(generation, record)?;
        self.memory.report.ask_to_stop(generation);
        Some(record)
    }

    /// Has the kernels of the generation that was stopped give up, and gives it.
    fn ask_to_stop(&self) -> Option<u8> {
        let generation = self.control.stopped()?;
        self.memory.report.ask_to_stop(generation);
        Some(generation)
    }

    pub(crate) fn record(&self, kind: FaultKind) -> FaultRecord {
        let rank = self.rank() as u32;
        FaultRecord {
            kind,
            operation: 0,
            rank,
            peer: rank,
            slot: 0,
            generation: self.generation().into(),
            expected: 0,
            seen: 0,
            waited_ns: 0,
            call: self.calls(),
            claimed: 1,
            across: 0,
        }
    }

    /// Has the hosts, and kernels that wait, hear of what stopped another group. Gives the generation that is stopped.
    pub(crate) fn tell(&self, record: FaultRecord) -> Option<u8> {
        if self.control.fault().is_none() {
            self.raise(record);
        }
        self.ask_to_stop()
    }

    /// Stops the group with what stopped another one. Kernels that wait for nothing look at their own stop word alone.
    pub(crate) fn stop(&self, record: FaultRecord) {
        let Some(generation) = self.tell(record) else {
            return;
        };
        let mut told_already = self.stopped.lock();
        if *told_already == generation || self.generation() != generation {
            return;
        }
        // Also if that fails: who looks again and again would wait for a driver that is gone.
        *told_already = generation;
        let stop = 8 * self.control.layout().abort.base;
        let told = self.write_word(self.address(self.rank(), stop), generation.into());
        if let Err(error) = told {
            tracing::warn!(%error, "kernels hear of a stop when they wait");
        }
    }

    pub(crate) fn abort(&self) {
        self.control.abort(self.calls());
        self.ask_to_stop();
    }
}
