//! Sums over all ranks, as an operation of candle's.

use crate::{Parallel, error::OrCandle, memory};
use brigade::{AllReduceParams, ReduceOp, ViewMut};
use candle_core::{CpuStorage, CustomOp1, Device, InplaceOp1, Layout, Result, Shape, Tensor};

/// Every rank gets the reduction of all ranks' tensors, which have one shape: f32, f16 or bf16, contiguous.
///
/// With `apply_op1_no_bwd` the result is a new tensor, with `inplace_op1` it replaces the input and nothing is allocated. Sums are
/// taken in f32 in rank order and rounded once, so all ranks have the same bits (unless the plan's algorithm is NCCL's).
///
/// Tensors must lie where `parallel` works, as those of its methods. A CUDA graph keeps what methods lend to Brigade, but not the tensors
/// of custom operations, which have them for the call alone, as candle's own: if one is captured, keep its tensors for as long as the
/// graph is launched.
#[derive(Clone, Debug)]
pub struct AllReduce {
    /// Over whom.
    pub parallel: Parallel,
    /// What is made of the values.
    pub op: ReduceOp,
}

impl AllReduce {
    /// The sum.
    pub fn sum(parallel: &Parallel) -> Self {
        Self {
            parallel: parallel.clone(),
            op: ReduceOp::Sum,
        }
    }

    fn change(&self, data: ViewMut<'_>) -> brigade::Result<()> {
        let params = AllReduceParams {
            data,
            from: None,
            op: self.op,
            choice: None,
        };
        self.parallel.call(|lease| lease.all_reduce(params))
    }

    fn make(&self, from: brigade::View<'_>, data: ViewMut<'_>) -> brigade::Result<()> {
        let params = AllReduceParams {
            data,
            from: Some(from),
            op: self.op,
            choice: None,
        };
        self.parallel.call(|lease| lease.all_reduce(params))
    }
}

impl CustomOp1 for AllReduce {
    fn name(&self) -> &'static str {
        "all-reduce"
    }

    fn cpu_fwd(&self, storage: &CpuStorage, layout: &Layout) -> Result<(CpuStorage, Shape)> {
        let from = (storage, layout);
        self.parallel
            .mapped_cpu(from, layout.dims(), |from, to| self.make(from, to))
    }

    #[cfg(feature = "cuda")]
    fn cuda_fwd(
        &self,
        storage: &candle_core::CudaStorage,
        layout: &Layout,
    ) -> Result<(candle_core::CudaStorage, Shape)> {
        let from = (storage, layout);
        self.parallel
            .mapped_cuda(from, layout.dims(), |from, to| self.make(from, to))
    }
}

impl InplaceOp1 for AllReduce {
    fn name(&self) -> &'static str {
        "all-reduce-inplace"
    }

    fn cpu_fwd(&self, storage: &mut CpuStorage, layout: &Layout) -> Result<()> {
        self.parallel.check_device(&Device::Cpu)?;
        self.parallel.refuse_capture()?;
        memory::change_cpu(storage, layout, |data| self.change(data))
    }

    #[cfg(feature = "cuda")]
    fn cuda_fwd(&self, storage: &mut candle_core::CudaStorage, layout: &Layout) -> Result<()> {
        let place = Device::Cuda(storage.device.clone());
        self.parallel.check_device(&place)?;
        let nobody = std::sync::Arc::new(());
        crate::cuda::change(storage, layout, nobody, |data| self.change(data))
    }
}

impl Parallel {
    /// The sum of all ranks' tensors: see [`AllReduce`].
    ///
    /// # Errors
    /// [`brigade::Error::Invalid`] for what cannot be added; [`brigade::Error::Fault`] if a rank does not come, or calls something
    /// else.
    pub fn all_reduce(&self, x: &Tensor) -> Result<Tensor> {
        let sum = AllReduce::sum(self);
        self.mapped(&x.contiguous()?, x.shape(), |from, to| sum.make(from, to))
    }

    /// All ranks meet.
    ///
    /// # Errors
    /// [`brigade::Error::Fault`] if one does not come.
    pub fn barrier(&self) -> Result<()> {
        self.lease().and_then(|mut l| l.barrier()).or_candle()
    }
}
