//! Own rows of a sum over all ranks, as an operation of candle's.

use crate::{Parallel, error::invalid};
use brigade::{ReduceOp, ReduceScatterParams, View, ViewMut};
use candle_core::{CpuStorage, CustomOp1, Layout, Result, Shape, Tensor};

/// Every rank gets its rows (dimension 0) of the reduction of all ranks' tensors, which have one shape: f32, f16 or bf16,
/// contiguous. What is captured in a CUDA graph must be kept, as that of [`AllReduce`](crate::AllReduce).
#[derive(Clone, Debug)]
pub struct ReduceScatter {
    /// Over whom.
    pub parallel: Parallel,
    /// Rows that each rank gets, the same list on every rank; may be 0. `None` cuts them as even as can be: the first ranks get one
    /// more.
    pub rows_per_rank: Option<Vec<usize>>,
    /// What is made of the values.
    pub op: ReduceOp,
}

impl ReduceScatter {
    /// The sum, cut as even as can be.
    pub fn sum(parallel: &Parallel) -> Self {
        Self {
            parallel: parallel.clone(),
            rows_per_rank: None,
            op: ReduceOp::Sum,
        }
    }

    /// Rows of each rank, and the shape of this one's.
    fn rows(&self, dims: &[usize]) -> Result<(Vec<usize>, Vec<usize>)> {
        let mut dims = dims.to_vec();
        let Some(first) = dims.first_mut() else {
            return Err(invalid("shape", "a scalar", "rows"));
        };
        let (size, rank) = (self.parallel.size(), self.parallel.rank());
        let rows = match &self.rows_per_rank {
            Some(rows) => rows.clone(),
            None => brigade::plan::rows::split(*first, size).to_vec(),
        };
        let Some(&own) = rows.get(rank) else {
            let want = format!("a count for each of {size} ranks");
            return Err(invalid("rows_per_rank", format!("{rows:?}"), want));
        };
        *first = own;
        Ok((rows, dims))
    }

    fn make(&self, rows: &[usize], from: View<'_>, to: ViewMut<'_>) -> brigade::Result<()> {
        let params = ReduceScatterParams {
            from,
            rows_per_rank: rows,
            to,
            op: self.op,
        };
        self.parallel.call(|lease| lease.reduce_scatter(params))
    }

    /// As the operation, of a tensor that a graph keeps.
    fn of_tensor(&self, x: &Tensor) -> Result<Tensor> {
        let (rows, dims) = self.rows(x.dims())?;
        let make = |from: View<'_>, to: ViewMut<'_>| self.make(&rows, from, to);
        self.parallel.mapped(x, dims, make)
    }
}

impl CustomOp1 for ReduceScatter {
    fn name(&self) -> &'static str {
        "reduce-scatter"
    }

    fn cpu_fwd(&self, storage: &CpuStorage, layout: &Layout) -> Result<(CpuStorage, Shape)> {
        let (rows, dims) = self.rows(layout.dims())?;
        let from = (storage, layout);
        self.parallel
            .mapped_cpu(from, &dims, |from, to| self.make(&rows, from, to))
    }

    #[cfg(feature = "cuda")]
    fn cuda_fwd(
        &self,
        storage: &candle_core::CudaStorage,
        layout: &Layout,
    ) -> Result<(candle_core::CudaStorage, Shape)> {
        let (rows, dims) = self.rows(layout.dims())?;
        let from = (storage, layout);
        self.parallel
            .mapped_cuda(from, &dims, |from, to| self.make(&rows, from, to))
    }
}

impl Parallel {
    /// Own rows of the sum of all ranks' tensors: see [`ReduceScatter`].
    ///
    /// # Errors
    /// [`brigade::Error::Invalid`] for counts that do not fit, or what cannot be added; [`brigade::Error::Fault`] if a rank does not
    /// come, or calls something else.
    pub fn reduce_scatter(&self, x: &Tensor, rows_per_rank: Option<&[usize]>) -> Result<Tensor> {
        let op = ReduceScatter {
            rows_per_rank: rows_per_rank.map(<[usize]>::to_vec),
            ..ReduceScatter::sum(self)
        };
        op.of_tensor(&x.contiguous()?)
    }
}
