//! Expert parallelism: the low-latency exchange and its two slots.

use crate::*;

impl Lease<'_> {
    fn experts(&mut self) -> Result<(&dyn Experts, &mut Turn)> {
        let (backend, turn) = self.parts();
        Ok((backend.experts()?, turn))
    }

    /// Sends rows to their experts by the low-latency transport.
    ///
    /// # Errors
    /// [`Error::Unsupported`] if the device has no experts; otherwise as [`all_reduce`](Self::all_reduce).
    pub fn low_latency_dispatch<'s>(
        &mut self,
        slot: &'s mut Slot,
        p: LowLatencyDispatchParams<'_>,
    ) -> Result<Pending<'s>> {
        let (experts, turn) = self.experts()?;
        experts.dispatch(turn, slot.0, p)?;
        Ok(Pending { slot })
    }
}

/// One of two places for low-latency results: two can be live, and a third has no slot to borrow.
pub struct Slot(u8);

/// The two slots of a low-latency exchange.
pub struct LowLatency {
    slots: [Slot; 2],
}

impl LowLatency {
    /// Both slots.
    pub fn slots(&mut self) -> (&mut Slot, &mut Slot) {
        let [a, b] = &mut self.slots;
        (a, b)
    }
}

impl Default for LowLatency {
    fn default() -> Self {
        Self {
            slots: [Slot(0), Slot(1)],
        }
    }
}

/// Rows that have been sent, and not yet received.
#[must_use = "the rows have been asked for, not received"]
pub struct Pending<'s> {
    slot: &'s mut Slot,
}

impl<'s> Pending<'s> {
    /// Waits for them.
    ///
    /// # Errors
    /// As every call on a communicator.
    pub fn receive(self, lease: &mut Lease<'_>) -> Result<LowLatencyDispatched<'s>> {
        let (experts, turn) = lease.experts()?;
        let (rows, counts) = experts.receive(turn, self.slot.0)?;
        Ok(LowLatencyDispatched {
            rows,
            counts,
            _slot: self.slot,
        })
    }
}

/// Received rows, in their slot.
pub struct LowLatencyDispatched<'s> {
    rows: Buffer,
    counts: Buffer,
    _slot: &'s mut Slot,
}

impl LowLatencyDispatched<'_> {
    /// `[local experts, max tokens x ranks, hidden]`
    pub fn rows(&self) -> View<'_> {
        self.rows.view()
    }

    /// Rows of each local expert.
    pub fn counts(&self) -> View<'_> {
        self.counts.view()
    }
}

/// Rows for their experts.
#[derive(Clone, Copy, Debug)]
pub struct LowLatencyDispatchParams<'a> {
    /// `[tokens, hidden]`
    pub rows: View<'a>,
    /// `[tokens, k]`, -1 for none.
    pub ids: View<'a>,
    /// Whether rows are cast to fp8 with a scale per 128 columns on the way.
    pub fp8: bool,
}

/// The backend's side of expert parallelism.
pub trait Experts: Send + Sync {
    /// See [`Lease::low_latency_dispatch`].
    ///
    /// # Errors
    /// As every call.
    fn dispatch(&self, turn: &mut Turn, slot: u8, p: LowLatencyDispatchParams<'_>) -> Result<()>;
    /// See [`Pending::receive`].
    ///
    /// # Errors
    /// As every call.
    fn receive(&self, turn: &mut Turn, slot: u8) -> Result<(Buffer, Buffer)>;
}
