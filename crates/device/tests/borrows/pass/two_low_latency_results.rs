//! Two low-latency results are live at once, and a slot is free again after its result.
use brigade_device::*;

pub fn two(
    lease: &mut Lease<'_>,
    exchange: &mut LowLatency,
    p: LowLatencyDispatchParams<'_>,
) -> Result<()> {
    let (a, b) = exchange.slots();
    let first = lease.low_latency_dispatch(a, p)?;
    let second = lease.low_latency_dispatch(b, p)?;
    let (first, second) = (first.receive(lease)?, second.receive(lease)?);
    let _ = (first.rows(), second.counts());
    let third = lease.low_latency_dispatch(a, p)?.receive(lease)?;
    let _ = (second.rows(), third.rows());
    Ok(())
}
