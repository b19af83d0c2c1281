//! Gathered rows lie in the user buffer, and end with the lease's next call.
use brigade_device::*;

fn twice(
    lease: &mut Lease<'_>,
    p: AllGatherLoraLinearParams<'_>,
    q: AllGatherLoraLinearParams<'_>,
) -> Result<()> {
    let first = lease.all_gather_lora_linear(p)?;
    let second = lease.all_gather_lora_linear(q)?;
    let _ = (first.a.operand()?, second.a.operand()?);
    Ok(())
}

fn main() {}
