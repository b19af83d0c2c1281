//! Own rows are written in place, proven, and used.
use brigade_device::*;

pub fn resident(
    lease: &mut Lease<'_>,
    device: &dyn Device,
    on: &Stream,
    x: View<'_>,
    weight: View<'_>,
) -> Result<Option<Buffer>> {
    let rows = [4, 4];
    let mut own = lease.own_chunk(&rows, 8, DataType::BF16)?;
    device.copy(on, own.view_mut(), x)?;
    let chunk = Chunk::Resident(own.filled());
    let p = AllGatherLoraLinearParams::new(chunk, &rows, weight);
    Ok(lease.all_gather_lora_linear(p)?.d)
}
