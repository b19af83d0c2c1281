//! Views of this rank's own segment, for buffers.

use brigade_device::{MemoryType, Storage};
use brigade_group::Segment;
use parking_lot::RwLock;
use std::{any::Any, ops::Range, sync::Arc};

/// Part of this rank's own segment, as a buffer sees it. The gate is open while the protocol lets this rank's views read
/// it (or, for own rows, write it), and shut while peers may write there.
pub(crate) struct Window {
    segment: Arc<Segment>,
    range: Range<usize>,
    gate: Arc<RwLock<bool>>,
}

impl Window {
    pub(crate) fn new(segment: Arc<Segment>, range: Range<usize>, gate: Arc<RwLock<bool>>) -> Self {
        Self {
            segment,
            range,
            gate,
        }
    }

    pub(crate) fn gate(&self) -> &RwLock<bool> {
        &self.gate
    }

    /// Whether it is seen through this gate.
    pub(crate) fn is_of(&self, gate: &Arc<RwLock<bool>>) -> bool {
        Arc::ptr_eq(&self.gate, gate)
    }

    /// # Safety
    /// The caller holds the gate for reading, and found it open.
    pub(crate) unsafe fn bytes(&self) -> &[u8] {
        // SAFETY: while the gate is open, peers hold no credit for these bytes.
        unsafe { self.segment.read(self.range.clone()) }
    }

    /// # Safety
    /// The caller holds the gate for writing, and found it open.
    #[expect(
        clippy::mut_from_ref,
        reason = "the gate's write guard makes the caller alone"
    )]
    pub(crate) unsafe fn bytes_mut(&self) -> &mut [u8] {
        // SAFETY: while the gate is open, peers hold no credit for these bytes; the guard keeps other views out.
        unsafe { self.segment.write(self.range.clone()) }
    }
}

impl std::fmt::Debug for Window {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Window({:?} of a user buffer)", self.range)
    }
}

impl Storage for Window {
    fn address(&self) -> u64 {
        self.segment.data(&self.range) as u64
    }
    fn bytes(&self) -> usize {
        self.range.len()
    }
    fn memory(&self) -> MemoryType {
        MemoryType::Host
    }
    fn as_any(&self) -> &dyn Any {
        self
    }
}
