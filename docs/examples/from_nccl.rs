//! The sum over ranks that ends a row-parallel linear, by cudarc's NCCL and by Brigade: `docs/src/candle.md` shows both, and
//! `cargo xtask beside` compiles them.

use brigade_candle::{
    Parallel,
    brigade::{Bootstrap, CommConfig, ParallelMode},
};
use candle_core::{
    CpuStorage, CudaDevice, CudaStorage, CustomOp1, DType, Device, Error, Layout, Result, Shape,
    Tensor,
    backend::BackendStorage,
    bail,
    cuda_backend::cudarc::nccl::{Comm, Id, ReduceOp},
};

// ANCHOR: before
struct AllReduce(Comm);

// SAFETY: nobody sees to it, but only one thread may use the communicator at a time.
unsafe impl Send for AllReduce {}
// SAFETY: as above.
unsafe impl Sync for AllReduce {}

impl AllReduce {
    /// How `id` comes from rank 0 to the others is up to you.
    fn new(place: &CudaDevice, rank: usize, size: usize, id: Id) -> Result<Self> {
        let comm = Comm::from_rank(place.cuda_stream(), rank, size, id);
        Ok(Self(comm.map_err(Error::debug)?))
    }
}

impl CustomOp1 for AllReduce {
    fn name(&self) -> &'static str {
        "all-reduce"
    }

    fn cpu_fwd(&self, _: &CpuStorage, _: &Layout) -> Result<(CpuStorage, Shape)> {
        bail!("NCCL has no CPU")
    }

    fn cuda_fwd(&self, x: &CudaStorage, layout: &Layout) -> Result<(CudaStorage, Shape)> {
        let Some((from, to)) = layout.contiguous_offsets() else {
            bail!("not contiguous")
        };
        let place = x.device();
        let out = match x.dtype() {
            DType::F32 => {
                let x = x.as_cuda_slice::<f32>()?.slice(from..to);
                // SAFETY: the sum fills it.
                let mut out = unsafe { place.alloc::<f32>(to - from)? };
                let sum = self.0.all_reduce(&x, &mut out, &ReduceOp::Sum);
                sum.map_err(Error::debug)?;
                CudaStorage::wrap_cuda_slice(out, place.clone())
            }
            // And the same again for f16 and for bf16.
            other => bail!("{other:?}"),
        };
        Ok((out, layout.shape().clone()))
    }
}

fn row_parallel(sum: &AllReduce, x: &Tensor, weight: &Tensor) -> Result<Tensor> {
    // A rank that does not come is waited for as long as it takes.
    x.matmul(&weight.t()?)?.apply_op1_no_bwd(sum)
}
// ANCHOR_END: before

mod after {
    use super::*;

    // ANCHOR: after
    pub fn join(place: &Device, boot: &dyn Bootstrap) -> Result<Parallel> {
        Parallel::join(place, boot, &CommConfig::new(ParallelMode::Tp))
    }

    pub fn row_parallel(parallel: &Parallel, x: &Tensor, weight: &Tensor) -> Result<Tensor> {
        // f32, f16 or bf16, on a GPU or on the CPU; a rank that does not come is a fault by `CommConfig::deadline`.
        parallel.all_reduce(&x.matmul(&weight.t()?)?)
    }
    // ANCHOR_END: after
}

/// One rank's part, both ways.
pub fn both(
    boot: &dyn Bootstrap,
    (place, id): (&CudaDevice, Id),
    (x, weight): (&Tensor, &Tensor),
) -> Result<[Tensor; 2]> {
    let sum = AllReduce::new(place, boot.rank(), boot.size(), id)?;
    let parallel = after::join(&Device::Cuda(place.clone()), boot)?;
    Ok([
        row_parallel(&sum, x, weight)?,
        after::row_parallel(&parallel, x, weight)?,
    ])
}
