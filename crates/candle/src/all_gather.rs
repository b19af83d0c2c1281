//! Rows of all ranks, as an operation of candle's.

use crate::{
    Parallel,
    error::{OrCandle, invalid},
};
use brigade::{AllGatherParams, View, ViewMut, check_rows};
use candle_core::{CpuStorage, CustomOp1, Layout, Result, Shape, Tensor, shape::Dim};

/// Every rank gets the rows (dimension 0) of all ranks, in rank order. Any type that candle's in-memory tensors have, contiguous.
/// What is captured in a CUDA graph must be kept, as that of [`AllReduce`](crate::AllReduce).
#[derive(Clone, Debug)]
pub struct AllGather {
    /// Over whom.
    pub parallel: Parallel,
    /// Rows of each rank, the same list on every rank; may be 0. `None` if all have as many as this one: where they have not, all get
    /// [`Mismatch`](brigade::FaultKind::Mismatch).
    pub rows_per_rank: Option<Vec<usize>>,
}

impl AllGather {
    /// Of as many rows on every rank.
    pub fn even(parallel: &Parallel) -> Self {
        Self {
            parallel: parallel.clone(),
            rows_per_rank: None,
        }
    }

    /// Of so many rows on each rank.
    pub fn of(parallel: &Parallel, rows_per_rank: &[usize]) -> Self {
        Self {
            parallel: parallel.clone(),
            rows_per_rank: Some(rows_per_rank.to_vec()),
        }
    }

    /// Rows of each rank, and the shape of all of them.
    fn rows(&self, dims: &[usize]) -> Result<(Vec<usize>, Vec<usize>)> {
        let mut dims = dims.to_vec();
        let Some(first) = dims.first_mut() else {
            return Err(invalid("shape", "a scalar", "rows"));
        };
        let rows = self.parallel.rows(self.rows_per_rank.as_deref(), *first);
        *first = check_rows("rows_per_rank", &rows, self.parallel.size()).or_candle()?;
        Ok((rows, dims))
    }

    fn make(&self, rows: &[usize], from: View<'_>, to: ViewMut<'_>) -> brigade::Result<()> {
        let params = AllGatherParams {
            from,
            rows_per_rank: rows,
            to,
        };
        self.parallel.call(|lease| lease.all_gather(params))
    }

    /// As the operation, of a tensor that a graph keeps.
    fn of_tensor(&self, x: &Tensor) -> Result<Tensor> {
        let (rows, dims) = self.rows(x.dims())?;
        let make = |from: View<'_>, to: ViewMut<'_>| self.make(&rows, from, to);
        self.parallel.mapped(x, dims, make)
    }
}

impl CustomOp1 for AllGather {
    fn name(&self) -> &'static str {
        "all-gather"
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
    /// As many rows on every rank as on this one, unless a list says otherwise.
    pub(crate) fn rows(&self, given: Option<&[usize]>, own: usize) -> Vec<usize> {
        given.map_or_else(|| vec![own; self.size()], <[usize]>::to_vec)
    }

    /// All ranks' tensors, one after the other along `dim`, where each has as much as `counts` says (`None`: all the same).
    ///
    /// # Errors
    /// [`brigade::Error::Invalid`] for counts that do not fit; [`brigade::Error::Fault`] if a rank does not come, or has other counts.
    pub fn all_gather<D: Dim>(
        &self,
        x: &Tensor,
        dim: D,
        counts: Option<&[usize]>,
    ) -> Result<Tensor> {
        let dim = dim.to_index(x.shape(), "all-gather")?;
        let x = x.contiguous()?;
        let counts = self.rows(counts, x.dim(dim)?);
        if dim == 0 {
            return AllGather::of(self, &counts).of_tensor(&x);
        }
        let mut dims = x.dims().to_vec();
        let own = dims[dim];
        dims[dim] = check_rows("counts", &counts, self.size()).or_candle()?;
        if counts[self.rank()] != own {
            let want = format!("{own} for this rank");
            return Err(invalid("counts", format!("{counts:?}"), want));
        }
        // If all of it fits, so does each part.
        let all = dims.iter().try_fold(1usize, |all, &n| all.checked_mul(n));
        if all.is_none() {
            let want = "a size that fits in memory";
            return Err(invalid("counts", format!("{counts:?}"), want));
        }
        // Rows of one element: every rank's tensor travels as it lies, and is put into its place here.
        let lengths: Vec<usize> = counts
            .iter()
            .map(|&count| {
                dims[dim] = count;
                dims.iter().product()
            })
            .collect();
        let all = AllGather::of(self, &lengths).of_tensor(&x.flatten_all()?)?;
        let mut first = 0;
        let mut parts = Vec::with_capacity(counts.len());
        for (&count, &length) in counts.iter().zip(&lengths) {
            dims[dim] = count;
            parts.push(all.narrow(0, first, length)?.reshape(dims.as_slice())?);
            first += length;
        }
        Tensor::cat(&parts, dim)
    }
}
