//! Parts of a communicator's memory as buffers see them.

use crate::{card::Card, core::Core};
use brigade_device::{Error, MemoryType, Result, Storage};
use std::{
    any::Any,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
};

/// Part of this rank's own user buffer. It is good while the call that made it is the last one on its half: after that, peers
/// may write there.
#[derive(Debug)]
pub(crate) struct Window {
    core: Arc<Core>,
    address: u64,
    bytes: usize,
    views: Arc<AtomicU64>,
    number: u64,
}

impl Window {
    pub(crate) fn new(core: Arc<Core>, address: u64, bytes: usize, views: Arc<AtomicU64>) -> Self {
        Self {
            core,
            address,
            bytes,
            number: views.load(Ordering::Acquire),
            views,
        }
    }

    /// Whose GPU's memory it is.
    pub(crate) fn card(&self) -> &Card {
        &self.core.device.card
    }

    /// Whether it is good for as long as `views` stays what it is.
    pub(crate) fn is_of(&self, views: &Arc<AtomicU64>) -> bool {
        Arc::ptr_eq(&self.views, views)
    }

    /// Whether it may still be used.
    pub(crate) fn check(&self) -> Result<()> {
        if self.views.load(Ordering::Acquire) == self.number {
            return Ok(());
        }
        Err(Error::invalid(
            "memory",
            "rows of a user buffer that a later call has taken over",
            "rows of the last call, copied out where they are needed longer",
        ))
    }
}

impl Storage for Window {
    fn address(&self) -> u64 {
        self.address
    }
    fn bytes(&self) -> usize {
        self.bytes
    }
    fn memory(&self) -> MemoryType {
        MemoryType::Device
    }
    fn as_any(&self) -> &dyn Any {
        self
    }
}
