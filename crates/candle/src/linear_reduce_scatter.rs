//! A row-parallel product whose sums go to the owners of the rows.

use crate::{
    Parallel, Runs, cut,
    error::invalid,
    linear::{Shard, check_total, shard_methods},
};
use brigade::{LoraLinearReduceScatterParams, Output, OverlapMode};
use candle_core::{Module, Result, Tensor, safetensors::MmapedSafetensors};

/// `y = act(own rows of (sum over ranks of (x W^T + adapters)) + b)`: the way back from [`GatherLinear`](crate::GatherLinear).
///
/// Every rank has its own columns of all rows, `[all rows, own in]` (or `[all rows, inner, own in]`), and gets `[own rows, out]`.
/// Sums travel while other rows are still being multiplied, where the plan finds that it pays. Every rank has the whole bias, which
/// is added once.
#[derive(Clone, Debug)]
pub struct LinearReduceScatter {
    shard: Shard,
    total: usize,
    choice: Option<OverlapMode>,
}

impl LinearReduceScatter {
    /// From the whole weight `[out, in]`, of which this rank keeps its part, and the bias `[out]`.
    ///
    /// # Errors
    /// [`brigade::Error::Invalid`] for shapes that do not fit.
    pub fn new(parallel: &Parallel, weight: &Tensor, bias: Option<&Tensor>) -> Result<Self> {
        let total = weight.dim(1)?;
        let weight = cut::tensor(parallel, weight, 1)?;
        Self::from_shard(parallel, &weight, bias, total)
    }

    /// From this rank's part, `[out, own in]`, of `total` input features in all, and the whole bias.
    ///
    /// # Errors
    /// As [`new`](Self::new).
    pub fn from_shard(
        parallel: &Parallel,
        weight: &Tensor,
        bias: Option<&Tensor>,
        total: usize,
    ) -> Result<Self> {
        let shard = Shard::new(parallel, weight, bias)?;
        check_total("total", total, shard.inputs())?;
        Ok(Self {
            shard,
            total,
            choice: None,
        })
    }

    /// From `prefix.weight` (and `prefix.bias`, if it is there) of safetensors files: only this rank's part is read.
    ///
    /// # Errors
    /// As [`new`](Self::new); candle's, for files that have no such weight.
    pub fn load(parallel: &Parallel, files: &MmapedSafetensors, prefix: &str) -> Result<Self> {
        let name = format!("{prefix}.weight");
        let weight = cut::load(parallel, files, &name, 1)?;
        let total = cut::total(files, &name, 1)?;
        let bias = cut::whole_if_there(parallel, files, &format!("{prefix}.bias"))?;
        Self::from_shard(parallel, &weight, bias.as_ref(), total)
    }

    /// Forces a way to overlap, for who measures. The same on every rank.
    #[must_use]
    pub fn with_mode(mut self, mode: OverlapMode) -> Self {
        self.choice = Some(mode);
        self
    }

    shard_methods!();

    /// As [`forward`](Module::forward), with a count of rows for each rank, or with adapters.
    ///
    /// # Errors
    /// [`brigade::Error::Invalid`] naming what does not fit; [`brigade::Error::Fault`] if a rank does not come, or has other counts.
    pub fn forward_rows(
        &self,
        x: &Tensor,
        rows_per_rank: Option<&[usize]>,
        runs: &Runs,
    ) -> Result<Tensor> {
        let shard = &self.shard;
        let (size, rank) = (shard.parallel.size(), shard.parallel.rank());
        let x = x.contiguous()?;
        let all = x.dims().first().copied().unwrap_or(0);
        let rows = rows_per_rank.map_or_else(|| cut::counts(all, size), <[usize]>::to_vec);
        let Some(&own) = rows.get(rank) else {
            let want = format!("a count for each of {size} ranks");
            return Err(invalid("rows_per_rank", format!("{rows:?}"), want));
        };
        let shape = shard.output_rows(&x, own)?;
        let lent = shard.lend(&x, runs)?;
        shard.parallel.make(x.dtype(), shape, |to| {
            let params = LoraLinearReduceScatterParams {
                transpose_weight: true,
                total_k: Some(self.total),
                bias: lent.bias(),
                activation: shard.activation,
                runs: &lent.runs(),
                output: Output::Into(to),
                choice: self.choice,
                ..LoraLinearReduceScatterParams::new(lent.x.view(), &rows, lent.weight.view())
            };
            shard
                .parallel
                .call(|lease| Ok(lease.lora_linear_reduce_scatter(params)?.plan))
        })
    }
}

impl Module for LinearReduceScatter {
    /// Rows are cut as even as can be: the first ranks get one more.
    fn forward(&self, x: &Tensor) -> Result<Tensor> {
        self.forward_rows(x, None, &Runs::none())
    }
}
