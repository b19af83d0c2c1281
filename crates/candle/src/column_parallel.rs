//! Linears whose output features are spread over ranks.

use crate::{
    Parallel, Runs, cut,
    error::{OrCandle, invalid},
    linear::{Shard, check_total, shard_methods},
};
use brigade::check_rows;
use candle_core::{D, Module, Result, Tensor, safetensors::MmapedSafetensors};

/// `y = act(x W^T + adapters + b)`, where each rank has its share of the output features (Shoeybi et al. 2019, Megatron-LM).
///
/// Every rank has all of `x`, `[.., in]`, and gets its own columns, `[.., own out]`: what a [`RowParallelLinear`](crate::RowParallelLinear)
/// takes. Nothing travels, unless the outputs are to be [gathered](Self::gathered).
#[derive(Clone, Debug)]
pub struct ColumnParallelLinear {
    shard: Shard,
    /// Output features of each rank, if they are gathered.
    gathered: Option<Vec<usize>>,
}

impl ColumnParallelLinear {
    /// From the whole weight `[out, in]` and bias `[out]`, of which this rank keeps its part.
    ///
    /// # Errors
    /// [`brigade::Error::Invalid`] for shapes that do not fit.
    pub fn new(parallel: &Parallel, weight: &Tensor, bias: Option<&Tensor>) -> Result<Self> {
        let weight = cut::tensor(parallel, weight, 0)?;
        let bias = bias.map(|b| cut::tensor(parallel, b, 0)).transpose()?;
        Self::from_shard(parallel, &weight, bias.as_ref())
    }

    /// From this rank's part, `[own out, in]`.
    ///
    /// # Errors
    /// As [`new`](Self::new).
    pub fn from_shard(parallel: &Parallel, weight: &Tensor, bias: Option<&Tensor>) -> Result<Self> {
        Ok(Self {
            shard: Shard::new(parallel, weight, bias)?.settled(),
            gathered: None,
        })
    }

    /// From `prefix.weight` (and `prefix.bias`, if it is there) of safetensors files: only this rank's part is read.
    ///
    /// # Errors
    /// As [`new`](Self::new); candle's, for files that have no such weight.
    pub fn load(parallel: &Parallel, files: &MmapedSafetensors, prefix: &str) -> Result<Self> {
        let weight = cut::load(parallel, files, &format!("{prefix}.weight"), 0)?;
        let bias = cut::load_if_there(parallel, files, &format!("{prefix}.bias"), 0)?;
        Self::from_shard(parallel, &weight, bias.as_ref())
    }

    /// Every rank gets all columns, of which `out_per_rank` come from each: `None` as [`new`](Self::new) cuts `total` features.
    ///
    /// # Errors
    /// [`brigade::Error::Invalid`] if the counts do not fit this rank's part.
    pub fn gathered(mut self, total: usize, out_per_rank: Option<&[usize]>) -> Result<Self> {
        let (size, rank) = (self.shard.parallel.size(), self.shard.parallel.rank());
        let counts = out_per_rank.map_or_else(|| cut::counts(total, size), <[usize]>::to_vec);
        let own = self.shard.outputs();
        let all = check_rows("out_per_rank", &counts, size).or_candle()?;
        if (all, counts[rank]) != (total, own) {
            let want = format!("{total} over {size} ranks, {own} for this one");
            return Err(invalid("out_per_rank", format!("{counts:?}"), want));
        }
        check_total("total", total, own)?;
        self.gathered = Some(counts);
        Ok(self)
    }

    shard_methods!();

    /// As [`forward`](Module::forward), with adapters.
    ///
    /// # Errors
    /// [`brigade::Error::Invalid`] naming what does not fit; [`brigade::Error::Fault`] if outputs are gathered and a rank does not come.
    pub fn forward_lora(&self, x: &Tensor, runs: &Runs) -> Result<Tensor> {
        let shard = &self.shard;
        let own = shard.product(x, runs)?;
        match &self.gathered {
            Some(counts) => shard.parallel.all_gather(&own, D::Minus1, Some(counts)),
            None => Ok(own),
        }
    }

    /// As [`forward_lora`](Self::forward_lora), into a tensor that is there, `[.., own out]`: of a step that is captured, which allocates nothing then.
    ///
    /// # Errors
    /// As [`forward_lora`](Self::forward_lora); [`brigade::Error::Invalid`] for an `out` of another shape or type, or with memory of an
    /// input, and for a linear whose outputs are gathered.
    pub fn forward_into(&self, x: &Tensor, runs: &Runs, out: &Tensor) -> Result<()> {
        self.own_outputs()?;
        self.shard.product_into(x, runs, out)
    }

    /// As [`forward_lora`](Self::forward_lora) and [`Parallel::silu_mul`] behind it, of a linear whose outputs are this rank's part of a gate and what it is for, side by side:
    /// `[.., own out / 2]`. Of few rows one operation, where a device has a kernel for both.
    ///
    /// # Errors
    /// As these; [`brigade::Error::Invalid`] for a linear whose outputs are gathered.
    pub fn forward_silu_mul(&self, x: &Tensor, runs: &Runs) -> Result<Tensor> {
        self.own_outputs()?;
        self.shard.gated(x, runs)
    }

    /// The same into a tensor that is there: of a step of up to 16 rows that is captured, which allocates nothing then.
    ///
    /// # Errors
    /// As [`forward_silu_mul`](Self::forward_silu_mul); [`brigade::Error::Invalid`] for an `out` of another shape or type, or with memory of an input.
    pub fn forward_silu_mul_into(&self, x: &Tensor, runs: &Runs, out: &Tensor) -> Result<()> {
        self.own_outputs()?;
        self.shard.gated_into(x, runs, out)
    }

    fn own_outputs(&self) -> Result<()> {
        match self.gathered {
            Some(_) => Err(invalid("out", "of gathered outputs", "of own ones")),
            None => Ok(()),
        }
    }
}

impl Module for ColumnParallelLinear {
    fn forward(&self, x: &Tensor) -> Result<Tensor> {
        self.forward_lora(x, &Runs::none())
    }
}
