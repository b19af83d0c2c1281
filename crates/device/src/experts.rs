//! Expert parallelism: rows to their experts and back.

use crate::*;

impl Lease<'_> {
    pub(crate) fn experts(&mut self) -> Result<(&dyn Experts, &mut Turn)> {
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
    ) -> Result<LowLatencySent> {
        Err(no_low_latency())
    }
    /// See [`Pending::receive`] and [`Pending::receive_counted`].
    ///
    /// # Errors
    /// As every call; why there is no such transport.
    fn low_latency_receive(
        &self,
        _turn: &mut Turn,
        _sent: &LowLatencySent,
        _to: Statistics<'_>,
    ) -> Result<LowLatencyRows> {
        Err(no_low_latency())
    }
    /// See [`Lease::low_latency_combine`].
    ///
    /// # Errors
    /// As every call; why there is no such transport.
    fn low_latency_combine(
        &self,
        _turn: &mut Turn,
        _there: &LowLatencyRows,
        _p: LowLatencyCombineParams<'_>,
    ) -> Result<LowLatencyBack> {
        Err(no_low_latency())
    }
    /// See [`PendingCombine::receive`] and [`PendingCombine::receive_counted`].
    ///
    /// # Errors
    /// As every call; why there is no such transport.
    fn low_latency_take(
        &self,
        _turn: &mut Turn,
        _back: &LowLatencyBack,
        _output: Output<'_>,
        _waits: Option<ViewMut<'_>>,
    ) -> Result<Option<Buffer>> {
        Err(no_low_latency())
    }
}

fn no_low_latency() -> Error {
    let what = "this device has no low-latency transport";
    Reason::new("no-low-latency", what, "use dispatch").into()
}
