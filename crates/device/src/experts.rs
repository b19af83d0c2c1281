//! Expert parallelism: rows to their experts and back, and the low-latency exchange with its two slots.

use crate::*;

impl Lease<'_> {
    fn experts(&mut self) -> Result<(&dyn Experts, &mut Turn)> {
        let (backend, turn) = self.parts();
        Ok((backend.experts()?, turn))
    }

    /// Where this rank's rows would go. Asks no other rank.
    ///
    /// # Errors
    /// [`Error::Invalid`] naming the field; [`Error::Unsupported`] if the device has no experts.
    pub fn expert_layout(&mut self, routing: Routing<'_>) -> Result<ExpertLayout> {
        let (experts, turn) = self.experts()?;
        experts.layout(turn, routing)
    }

    /// Every rank gets the rows whose experts it has.
    ///
    /// # Errors
    /// As [`all_reduce`](Self::all_reduce); [`Error::Unsupported`] if the device has no experts, or a forced transport cannot be; a
    /// fault of [`Overflow`](FaultKind::Overflow) if more rows come than there is room for.
    pub fn dispatch(&mut self, p: DispatchParams<'_>) -> Result<Dispatched> {
        let (experts, turn) = self.experts()?;
        experts.dispatch(turn, p)
    }

    /// Every rank gets back what became of its rows, added up.
    ///
    /// # Errors
    /// As [`dispatch`](Self::dispatch).
    pub fn combine(&mut self, p: CombineParams<'_>) -> Result<Combined> {
        let (experts, turn) = self.experts()?;
        experts.combine(turn, p)
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
        experts.low_latency_dispatch(turn, slot.0, p)?;
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
        let (rows, counts) = experts.low_latency_receive(turn, self.slot.0)?;
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
    /// See [`Lease::expert_layout`].
    ///
    /// # Errors
    /// As every call.
    fn layout(&self, turn: &mut Turn, routing: Routing<'_>) -> Result<ExpertLayout>;
    /// See [`Lease::dispatch`].
    ///
    /// # Errors
    /// As every call.
    fn dispatch(&self, turn: &mut Turn, p: DispatchParams<'_>) -> Result<Dispatched>;
    /// See [`Lease::combine`].
    ///
    /// # Errors
    /// As every call.
    fn combine(&self, turn: &mut Turn, p: CombineParams<'_>) -> Result<Combined>;
    /// See [`Lease::low_latency_dispatch`].
    ///
    /// # Errors
    /// As every call; why there is no such transport.
    fn low_latency_dispatch(
        &self,
        _turn: &mut Turn,
        _slot: u8,
        _p: LowLatencyDispatchParams<'_>,
    ) -> Result<()> {
        Err(no_low_latency().into())
    }
    /// See [`Pending::receive`].
    ///
    /// # Errors
    /// As every call; why there is no such transport.
    fn low_latency_receive(&self, _turn: &mut Turn, _slot: u8) -> Result<(Buffer, Buffer)> {
        Err(no_low_latency().into())
    }
}

fn no_low_latency() -> Reason {
    Reason::new(
        "no-low-latency",
        "this device has no low-latency transport",
        "use dispatch",
    )
}
