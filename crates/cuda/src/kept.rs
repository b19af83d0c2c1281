//! What graphs keep beside memory: what their work belongs to, which is asked before each launch.

use crate::{core::Core, hierarchical::Made, lane::Lane, nccl_sums::NcclSums, user_buffers::Held};
use brigade_device::{Absent, Buffer, DataType, MemoryType, Result, Shape, Storage};
use brigade_plan::reason;
use std::{any::Any, sync::Arc};

/// A storage of no bytes, kept with the buffers of a call.
#[derive(Debug)]
pub(crate) enum Kept {
    /// Whose call it is.
    Group(Token),
    /// What carries its sums.
    Nccl(Arc<NcclSums>),
    /// The call across machines that it is part of.
    Across(Made),
    /// The region of user buffers that it works in.
    Region(Held),
}

/// The wish that a communicator lives.
#[derive(Debug)]
pub(crate) struct Token {
    pub(crate) core: Arc<Core>,
    /// When work was captured.
    absent: Absent,
}

impl Token {
    pub(crate) fn new(core: Arc<Core>) -> Self {
        Self {
            absent: core.control.absent(),
            core,
        }
    }

    /// Whether the group still goes on without the ranks that were absent when work was captured, and no others.
    fn check(&self) -> Result<()> {
        match self.core.control.absent() {
            now if now == self.absent => Ok(()),
            now => Err(reason::absent_since(now).into()),
        }
    }
}

impl Kept {
    /// As work keeps it.
    pub(crate) fn buffer(self) -> Result<Buffer> {
        Buffer::new(Arc::new(self), DataType::U8, Shape::new(&[0])?)
    }

    /// What an allocation is, if it is none.
    pub(crate) fn of(storage: &Arc<dyn Storage>) -> Option<&Self> {
        storage.downcast()
    }

    /// For a launch of a graph on a stream: whether the work in it may be done again.
    pub(crate) fn again(&self, lane: &Arc<Lane>) -> Result<()> {
        match self {
            Self::Group(token) => {
                token.check()?;
                token.core.note(lane);
                Ok(())
            }
            Self::Nccl(sums) => Ok(sums.check()?),
            Self::Across(made) => made.again(lane),
            Self::Region(held) => held.check(),
        }
    }
}

impl Storage for Kept {
    fn address(&self) -> u64 {
        0
    }
    fn bytes(&self) -> usize {
        0
    }
    fn memory(&self) -> MemoryType {
        MemoryType::Device
    }
    fn as_any(&self) -> &dyn Any {
        self
    }
}
