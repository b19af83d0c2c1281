//! Rows of all ranks meet a column-parallel weight, as they come.

use crate::{
    Parallel, Runs, cut,
    error::OrCandle,
    linear::{Shard, check_total, shard_methods},
};
use brigade::{AllGatherLoraLinearParams, Chunk, Operand, Output, OverlapMode, check_rows};
use candle_core::{Module, Result, Tensor, safetensors::MmapedSafetensors};

/// `y = act(gather(x) W^T + adapters + b)`: sequence-parallel rows in, this rank's columns of all rows out (Korthikanti et al. 2022).
///
/// Every rank has its own rows, `[own rows, in]` (or `[own rows, inner, in]`), and gets `[all rows, own out]`. Rows are multiplied
/// while others are still on their way, where the plan finds that it pays.
#[derive(Clone, Debug)]
pub struct GatherLinear {
    shard: Shard,
    total: usize,
    choice: Option<OverlapMode>,
}

impl GatherLinear {
    /// From the whole weight `[out, in]` and bias `[out]`, of which this rank keeps its part.
    ///
    /// # Errors
    /// [`brigade::Error::Invalid`] for shapes that do not fit.
    pub fn new(parallel: &Parallel, weight: &Tensor, bias: Option<&Tensor>) -> Result<Self> {
        let total = weight.dim(0)?;
        let weight = cut::tensor(parallel, weight, 0)?;
        let bias = bias.map(|b| cut::tensor(parallel, b, 0)).transpose()?;
        Self::from_shard(parallel, &weight, bias.as_ref(), total)
    }

    /// From this rank's part, `[own out, in]`, of `total` output features in all.
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
        check_total("total", total, shard.outputs())?;
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
        let weight = cut::load(parallel, files, &name, 0)?;
        let total = cut::total(files, &name, 0)?;
        let bias = cut::load_if_there(parallel, files, &format!("{prefix}.bias"), 0)?;
        Self::from_shard(parallel, &weight, bias.as_ref(), total)
    }

    /// Forces a way to overlap, for who measures. The same on every rank.
    #[must_use]
    pub fn with_mode(mut self, mode: OverlapMode) -> Self {
        self.choice = Some(mode);
        self
    }

    shard_methods!();

    /// As [`forward`](Module::forward), where ranks have different numbers of rows, or rows have adapters (runs are over all
    /// gathered rows).
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
        let x = x.contiguous()?;
        let own = x.dims().first().copied().unwrap_or(0);
        let rows = shard.parallel.rows(rows_per_rank, own);
        let all = check_rows("rows_per_rank", &rows, shard.parallel.size()).or_candle()?;
        let shape = shard.output_rows(&x, all)?;
        let lent = shard.lend(&x, runs)?;
        shard.parallel.make(x.dtype(), shape, |to| {
            let chunk = Chunk::Copy(Operand::Plain(lent.x.view()));
            let params = AllGatherLoraLinearParams {
                transpose_weight: true,
                total_n: Some(self.total),
                bias: lent.bias(),
                activation: shard.activation,
                runs: &lent.runs(),
                output: Output::Into(to),
                choice: self.choice,
                ..AllGatherLoraLinearParams::new(chunk, &rows, lent.weight.view())
            };
            shard
                .parallel
                .call(|lease| Ok(lease.all_gather_lora_linear(params)?.plan))
        })
    }
}

impl Module for GatherLinear {
    /// Of as many rows on every rank.
    fn forward(&self, x: &Tensor) -> Result<Tensor> {
        self.forward_rows(x, None, &Runs::none())
    }
}
