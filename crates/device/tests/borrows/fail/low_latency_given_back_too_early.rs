//! Slots are not given back, to be lent again, while a result is in one.
use brigade_device::*;

fn early(comm: &Comm, lease: &mut Lease<'_>, p: LowLatencyDispatchParams<'_>) -> Result<()> {
    let mut exchange = comm.low_latency()?;
    let first = lease.low_latency_dispatch(exchange.slots().0, p)?.receive(lease)?;
    drop(exchange);
    let mut again = comm.low_latency()?;
    let second = lease.low_latency_dispatch(again.slots().0, p)?.receive(lease)?;
    let _ = (first.rows(), second.rows());
    Ok(())
}

fn main() {}
