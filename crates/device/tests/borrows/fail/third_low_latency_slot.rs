//! Two low-latency results can be live; a third has no slot to borrow.
use brigade_device::*;

fn three(
    lease: &mut Lease<'_>,
    exchange: &mut LowLatency,
    p: LowLatencyDispatchParams<'_>,
) -> Result<()> {
    let (a, b) = exchange.slots();
    let first = lease.low_latency_dispatch(a, p)?.receive(lease)?;
    let second = lease.low_latency_dispatch(b, p)?.receive(lease)?;
    let third = lease.low_latency_dispatch(a, p)?.receive(lease)?;
    let _ = (first.rows(), second.rows(), third.rows());
    Ok(())
}

fn main() {}
