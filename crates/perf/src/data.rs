//! Random numbers, on the host and on a GPU.

use anyhow::Result;
use brigade::{Allocate, Buffer, DataType, MemoryType, Stream, cuda::CudaDevice};
use half::bf16;
use rand::{Rng, SeedableRng, rngs::StdRng};

/// Numbers from a table that is far shorter than what is drawn, since drawing takes longer than measuring: different rows have
/// different numbers all the same.
pub fn numbers(seed: u64, count: usize) -> Vec<bf16> {
    const TABLE: usize = 65_521;
    let mut rng = StdRng::seed_from_u64(seed);
    let table: Vec<bf16> = (0..TABLE)
        .map(|_| bf16::from_f32(rng.random_range(-1.0..1.0)))
        .collect();
    table.iter().copied().cycle().take(count).collect()
}

/// A matrix on the GPU.
pub fn upload(
    device: &CudaDevice,
    on: &Stream,
    values: &[bf16],
    shape: [usize; 2],
) -> Result<Buffer> {
    let mut buffer = device.allocate(on, MemoryType::Device, DataType::BF16, &shape)?;
    device.write(on, buffer.view_mut(), bytemuck::cast_slice(values))?;
    Ok(buffer)
}

/// An output in which nothing has been written yet.
pub fn poisoned(device: &CudaDevice, on: &Stream, shape: [usize; 2]) -> Result<Buffer> {
    let mut buffer = device.allocate(on, MemoryType::Device, DataType::BF16, &shape)?;
    device.fill(on, buffer.view_mut(), 0xFF)?;
    Ok(buffer)
}
