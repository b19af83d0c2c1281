//! Gathered rows serve further products until the lease goes on.
use brigade_device::*;

pub fn again(
    lease: &mut Lease<'_>,
    device: &dyn Device,
    on: &Stream,
    p: AllGatherLoraLinearParams<'_>,
    up: Operand<'_>,
) -> Result<Option<Buffer>> {
    let out = lease.all_gather_lora_linear(p)?;
    let gemm = GemmParams::new(out.a.operand()?, up);
    let second = device.gemm(on, &gemm, Output::Allocate(DataType::F32))?;
    lease.barrier()?;
    Ok(second)
}
