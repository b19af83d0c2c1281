//! Linears whose input features are spread over ranks.

use crate::{
    Parallel, Residual, ResidualNorm, Runs, cut,
    error::invalid,
    linear::{FEW, LentShard, Shard, shard_methods},
    residual_norm::{Inputs, Rows},
};
use brigade::{
    Activation, LoraLinearAllReduceNormParams, LoraLinearAllReduceParams, LoraLinearParams, Normed,
    Output, ViewMut,
};
use candle_core::{Module, Result, Shape, Tensor, safetensors::MmapedSafetensors};

/// `y = act(sum over ranks of (x W^T + adapters) + b)`, where each rank has its share of the input features (Shoeybi et al. 2019,
/// Megatron-LM).
///
/// Every rank has its own columns of `x`, `[.., own in]`, as a [`ColumnParallelLinear`](crate::ColumnParallelLinear) gives them, and
/// gets all of `y`, `[.., out]`. Every rank has the whole bias, which is added once.
#[derive(Clone, Debug)]
pub struct RowParallelLinear {
    shard: Shard,
}

impl RowParallelLinear {
    /// From the whole weight `[out, in]`, of which this rank keeps its part, and the bias `[out]`.
    ///
    /// # Errors
    /// [`brigade::Error::Invalid`] for shapes that do not fit.
    pub fn new(parallel: &Parallel, weight: &Tensor, bias: Option<&Tensor>) -> Result<Self> {
        let weight = cut::tensor(parallel, weight, 1)?;
        Self::from_shard(parallel, &weight, bias)
    }

    /// From this rank's part, `[out, own in]`, and the whole bias.
    ///
    /// # Errors
    /// As [`new`](Self::new).
    pub fn from_shard(parallel: &Parallel, weight: &Tensor, bias: Option<&Tensor>) -> Result<Self> {
        Ok(Self {
            shard: Shard::new(parallel, weight, bias)?.settled(),
        })
    }

    /// From `prefix.weight` (and `prefix.bias`, if it is there) of safetensors files: only this rank's part is read.
    ///
    /// # Errors
    /// As [`new`](Self::new); candle's, for files that have no such weight.
    pub fn load(parallel: &Parallel, files: &MmapedSafetensors, prefix: &str) -> Result<Self> {
        let weight = cut::load(parallel, files, &format!("{prefix}.weight"), 1)?;
        let bias = cut::whole_if_there(parallel, files, &format!("{prefix}.bias"))?;
        Self::from_shard(parallel, &weight, bias.as_ref())
    }

    shard_methods!();

    /// As [`forward`](Module::forward), with adapters.
    ///
    /// # Errors
    /// [`brigade::Error::Invalid`] naming what does not fit; [`brigade::Error::Fault`] if a rank does not come, or calls something else.
    pub fn forward_lora(&self, x: &Tensor, runs: &Runs) -> Result<Tensor> {
        let shard = &self.shard;
        let x = x.contiguous()?;
        let (shape, rows) = shard.output_shape(&x)?;
        let dims = [rows, shard.outputs()];
        let lent = shard.lend(&x, runs)?;
        let y = shard.parallel.make(x.dtype(), &dims, |to| {
            let linear = LoraLinearParams {
                gemm: shard.gemm(&lent, lent.bias())?,
                runs: &lent.runs(),
            };
            let params = LoraLinearAllReduceParams {
                linear,
                output: Output::Into(to),
                choice: None,
            };
            shard
                .parallel
                .call(|lease| Ok(lease.lora_linear_with_all_reduce(params)?.plan))
        })?;
        y.reshape(shape)
    }

    /// As [`forward_lora`](Self::forward_lora) with what stands behind it in a transformer: adds `residual` `[.., out]` to the sum, and
    /// normalizes it, in one operation. A product of this rank's columns is rounded to the type of `x` and the residual on the way.
    ///
    /// # Errors
    /// As [`forward_lora`](Self::forward_lora); [`brigade::Error::Invalid`] for a linear with a bias or an activation, which would stand
    /// between the two, and for a residual of another type than `x`.
    pub fn forward_norm(
        &self,
        x: &Tensor,
        runs: &Runs,
        residual: &Tensor,
        norm: &ResidualNorm,
    ) -> Result<Residual> {
        let (shape, rows) = self.normed_shape(x, residual)?;
        let (shard, parallel) = (&self.shard, &self.shard.parallel);
        if rows > FEW {
            return parallel.all_reduce_norm(&shard.product(x, runs)?, residual, norm);
        }
        let x = x.contiguous()?;
        let (lent, rows) = (shard.lend(&x, runs)?, Rows::of(shape.dims())?);
        parallel.normed(rows, residual, norm, |inputs, sum, normed| {
            self.multiply_normed(&lent, inputs, norm, (sum, normed))
        })
    }

    /// The same into tensors that are there, which are neither the residual nor each other: of a step of up to 16 rows that is captured, which
    /// allocates nothing then.
    ///
    /// # Errors
    /// As [`forward_norm`](Self::forward_norm); [`brigade::Error::Invalid`] for tensors of another shape or type, or with memory of
    /// something else in the call.
    pub fn forward_norm_into(
        &self,
        x: &Tensor,
        runs: &Runs,
        residual: &Tensor,
        norm: &ResidualNorm,
        out: &Residual,
    ) -> Result<()> {
        let (shape, rows) = self.normed_shape(x, residual)?;
        let (shard, parallel) = (&self.shard, &self.shard.parallel);
        let x = x.contiguous()?;
        let mut others: Vec<_> = shard.factors().collect();
        others.push(&x);
        if rows > FEW {
            // candle frees it behind the sum, which it may well be worth to a graph with many layers.
            let part = shard.product(&x, runs)?;
            return parallel.sum_norm_into(&part, residual, norm, out, &others);
        }
        let rows = Rows::of(shape.dims())?;
        parallel.check_normed_into(rows, (residual, norm), out, &others)?;
        let lent = shard.lend(&x, runs)?;
        parallel.normed_into(rows, (residual, norm), out, |inputs, sum, normed| {
            self.multiply_normed(&lent, inputs, norm, (sum, normed))
        })
    }

    fn multiply_normed(
        &self,
        lent: &LentShard<'_>,
        inputs: Inputs<'_>,
        norm: &ResidualNorm,
        (sum, normed): (ViewMut<'_>, ViewMut<'_>),
    ) -> brigade::Result<()> {
        let shard = &self.shard;
        let params = LoraLinearAllReduceNormParams {
            linear: LoraLinearParams {
                gemm: shard.gemm(lent, None)?,
                runs: &lent.runs(),
            },
            residual: inputs.residual,
            weight: inputs.weight,
            eps: norm.eps,
            sum,
            normed: Normed::Plain(normed),
            choice: None,
        };
        shard
            .parallel
            .call(|lease| Ok(lease.lora_linear_with_all_reduce_norm(params)?.plan))
    }

    /// The shape of what comes out, and the number of its rows, if nothing stands between the sum and a residual.
    fn normed_shape(&self, x: &Tensor, residual: &Tensor) -> Result<(Shape, usize)> {
        let shard = &self.shard;
        if residual.dtype() != x.dtype() {
            let (got, want) = (residual.dtype(), x.dtype());
            return Err(invalid(
                "residual.dtype",
                format!("{got:?}"),
                format!("{want:?}, as x"),
            ));
        }
        for (field, there) in [
            ("bias", shard.bias.is_some()),
            ("activation", shard.activation != Activation::None),
        ] {
            if there {
                return Err(invalid(
                    field,
                    "there is one",
                    "none in front of a residual",
                ));
            }
        }
        shard.output_shape(x)
    }
}

impl Module for RowParallelLinear {
    fn forward(&self, x: &Tensor) -> Result<Tensor> {
        self.forward_lora(x, &Runs::none())
    }
}
