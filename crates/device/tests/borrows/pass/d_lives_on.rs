//! D is the caller's, and outlives the calls after it.
use brigade_device::*;

pub fn both(
    lease: &mut Lease<'_>,
    p: AllGatherLoraLinearParams<'_>,
    q: AllGatherLoraLinearParams<'_>,
) -> Result<(Option<Buffer>, Option<Buffer>)> {
    let d = lease.all_gather_lora_linear(p)?.d;
    let e = lease.all_gather_lora_linear(q)?.d;
    Ok((d, e))
}
