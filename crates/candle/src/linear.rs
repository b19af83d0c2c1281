//! What all linears have: a shard of the weight, a bias, an activation, adapters.

use crate::{
    Adapter, Parallel, Runs, adapter,
    adapter::LentRuns,
    error::{OrCandle, invalid},
    into::Form,
    memory::Lent,
};
use brigade::{Activation, Buffer, GemmParams, LoraLinearParams, LoraRun, Output, View, ViewMut};
use candle_core::{DType, Result, Shape, Tensor};
use std::time::Duration;

/// Longest that a layer waits for its weight to be there; if it is not by then, products wait for what is in front of them.
const ARRIVES: Duration = Duration::from_secs(10);

/// Rows up to which a product and what follows it are one call: where a device has no kernel for both, what lies between them is memory that nobody else has, and
/// nothing of memory's stands between the two.
pub(crate) const FEW: usize = 16;

/// This rank's part of a linear.
#[derive(Clone, Debug)]
pub(crate) struct Shard {
    pub(crate) parallel: Parallel,
    /// `[out, in]`, as candle and checkpoints have it.
    pub(crate) weight: Tensor,
    /// Whether the weight is there, and stays as it is.
    settled: bool,
    /// `[out]`
    pub(crate) bias: Option<Tensor>,
    pub(crate) activation: Activation,
    pub(crate) adapters: Vec<Adapter>,
}

impl Shard {
    pub(crate) fn new(parallel: &Parallel, weight: &Tensor, bias: Option<&Tensor>) -> Result<Self> {
        parallel.check_place(weight)?;
        let &[outputs, _] = weight.dims() else {
            let want = "2 dimensions, [out, in]";
            return Err(invalid(
                "weight.shape",
                format!("{:?}", weight.dims()),
                want,
            ));
        };
        if let Some(bias) = bias {
            parallel.check_place(bias)?;
            if bias.dims() != [outputs] {
                let want = format!("[{outputs}]");
                return Err(invalid("bias.shape", format!("{:?}", bias.dims()), want));
            }
        }
        Ok(Self {
            parallel: parallel.clone(),
            weight: weight.contiguous()?,
            settled: false,
            bias: bias.map(Tensor::contiguous).transpose()?,
            activation: Activation::None,
            adapters: Vec::new(),
        })
    }

    /// Waits for the weight, so that products may read it ahead where a device does that. What candle may change, a variable or anything made of one,
    /// is never settled; nor is what does not come in time.
    pub(crate) fn settled(self) -> Self {
        let weight = &self.weight;
        let reads_ahead =
            weight.device().is_cuda() && matches!(weight.dtype(), DType::F16 | DType::BF16);
        let settled =
            reads_ahead && !weight.track_op() && self.parallel.stream().sync(ARRIVES).is_ok();
        Self { settled, ..self }
    }

    /// Features that this rank's weight takes.
    pub(crate) fn inputs(&self) -> usize {
        self.weight.dims()[1]
    }

    /// Features that this rank's weight gives.
    pub(crate) fn outputs(&self) -> usize {
        self.weight.dims()[0]
    }

    pub(crate) fn set_adapters(&mut self, adapters: Vec<Adapter>) -> Result<()> {
        adapter::check(&adapters, (self.inputs(), self.outputs()))?;
        self.adapters = adapters;
        Ok(())
    }

    /// Lends everything that a call needs.
    pub(crate) fn lend<'t>(&'t self, x: &'t Tensor, runs: &Runs) -> Result<LentShard<'t>> {
        let parallel = &self.parallel;
        Ok(LentShard {
            x: parallel.lend(x)?,
            weight: parallel.lend(&self.weight)?,
            bias: self.bias.as_ref().map(|b| parallel.lend(b)).transpose()?,
            runs: runs.lend(parallel, &self.adapters)?,
        })
    }

    /// The product of `[.., in]`, with this rank's weight and a C that is added in it: rows are all dimensions but the last.
    pub(crate) fn gemm<'a>(
        &self,
        lent: &'a LentShard<'_>,
        bias: Option<View<'a>>,
    ) -> brigade::Result<GemmParams<'a>> {
        let x = lent.x.view();
        let columns = self.inputs();
        let rows: usize = x.shape().dims().iter().rev().skip(1).product();
        Ok(GemmParams {
            c: bias,
            transpose_b: true,
            settled_b: self.settled,
            activation: self.activation,
            ..GemmParams::new(x.reshape(&[rows, columns])?, lent.weight.view())
        })
    }

    /// This rank's product, with its own adapters and bias: nothing travels.
    pub(crate) fn product(&self, x: &Tensor, runs: &Runs) -> Result<Tensor> {
        let x = x.contiguous()?;
        let (shape, rows) = self.output_shape(&x)?;
        let lent = self.lend(&x, runs)?;
        let dims = (rows, self.outputs());
        let own = self.parallel.make(x.dtype(), dims, |to| {
            self.multiply(&lent, Output::Into(to)).map(drop)
        })?;
        own.reshape(shape)
    }

    /// The same in a tensor that is there.
    pub(crate) fn product_into(&self, x: &Tensor, runs: &Runs, out: &Tensor) -> Result<()> {
        let x = x.contiguous()?;
        let (shape, rows) = self.output_shape(&x)?;
        let form = Form {
            dtype: x.dtype(),
            dims: shape.dims(),
            rows: [rows, self.outputs()],
        };
        let mut read = vec![&x];
        read.extend(self.factors());
        self.parallel.check_into(("out", out), form, &read)?;
        let lent = self.lend(&x, runs)?;
        self.parallel.write(out, form, |to| {
            self.multiply(&lent, Output::Into(to)).map(drop)
        })
    }

    /// This rank's product as gate and up side by side, and what comes of them, `[.., out / 2]`.
    pub(crate) fn gated(&self, x: &Tensor, runs: &Runs) -> Result<Tensor> {
        let (shape, rows) = self.gated_shape(x)?;
        if rows > FEW {
            return self.parallel.silu_mul(&self.product(x, runs)?);
        }
        let x = x.contiguous()?;
        let lent = self.lend(&x, runs)?;
        let dims = (rows, self.outputs() / 2);
        let own = self
            .parallel
            .make(x.dtype(), dims, |to| self.multiply_gated(&lent, to))?;
        own.reshape(shape)
    }

    /// The same in a tensor that is there.
    pub(crate) fn gated_into(&self, x: &Tensor, runs: &Runs, out: &Tensor) -> Result<()> {
        let (shape, rows) = self.gated_shape(x)?;
        let x = x.contiguous()?;
        let form = Form {
            dtype: x.dtype(),
            dims: shape.dims(),
            rows: [rows, self.outputs() / 2],
        };
        let mut read = vec![&x];
        read.extend(self.factors());
        self.parallel.check_into(("out", out), form, &read)?;
        if rows > FEW {
            return self.parallel.silu_mul_into(&self.product(&x, runs)?, out);
        }
        let lent = self.lend(&x, runs)?;
        self.parallel
            .write(out, form, |to| self.multiply_gated(&lent, to))
    }

    fn gated_shape(&self, x: &Tensor) -> Result<(Shape, usize)> {
        let (shape, rows) = self.output_shape(x)?;
        let mut dims = shape.into_dims();
        match dims.last_mut() {
            Some(last) if *last % 2 == 0 => *last /= 2,
            _ => {
                let want = "[2 n, in], gate and up";
                return Err(invalid(
                    "weight.shape",
                    format!("{:?}", self.weight.dims()),
                    want,
                ));
            }
        }
        Ok((dims.into(), rows))
    }

    fn multiply_gated(&self, lent: &LentShard<'_>, to: ViewMut<'_>) -> brigade::Result<()> {
        let linear = LoraLinearParams {
            gemm: self.gemm(lent, lent.bias())?,
            runs: &lent.runs(),
        };
        let (device, on) = (self.parallel.device(), self.parallel.stream());
        device.lora_linear_silu_mul(on, &linear, Output::Into(to))?;
        Ok(())
    }

    fn multiply(
        &self,
        lent: &LentShard<'_>,
        output: Output<'_>,
    ) -> brigade::Result<Option<Buffer>> {
        let linear = LoraLinearParams {
            gemm: self.gemm(lent, lent.bias())?,
            runs: &lent.runs(),
        };
        let (device, on) = (self.parallel.device(), self.parallel.stream());
        device.lora_linear(on, &linear, output)
    }

    /// All tensors of the linear.
    pub(crate) fn factors(&self) -> impl Iterator<Item = &Tensor> {
        let adapters = self.adapters.iter().flat_map(Adapter::factors);
        [&self.weight].into_iter().chain(&self.bias).chain(adapters)
    }

    /// The shape of what comes out of `[.., in]`, and the number of its rows.
    pub(crate) fn output_shape(&self, x: &Tensor) -> Result<(Shape, usize)> {
        let mut dims = x.dims().to_vec();
        match dims.last_mut() {
            Some(last) if *last == self.inputs() => *last = self.outputs(),
            _ => {
                let want = format!("[.., {}], as the weight", self.inputs());
                return Err(invalid("x.shape", format!("{:?}", x.dims()), want));
            }
        }
        let rows = dims[..dims.len() - 1].iter().product();
        Ok((dims.into(), rows))
    }

    /// As [`output_shape`](Self::output_shape), of two dimensions or three, with another number of rows in the first.
    pub(crate) fn output_rows(&self, x: &Tensor, rows: usize) -> Result<Shape> {
        let mut dims = self.output_shape(x)?.0.into_dims();
        if !(2..=3).contains(&dims.len()) {
            let want = "[rows, in], or [rows, inner, in]";
            return Err(invalid("x.shape", format!("{:?}", x.dims()), want));
        }
        dims[0] = rows;
        Ok(dims.into())
    }
}

/// A shard's memory and that of the activations.
pub(crate) struct LentShard<'t> {
    pub(crate) x: Lent<'t>,
    pub(crate) weight: Lent<'t>,
    bias: Option<Lent<'t>>,
    runs: LentRuns<'t>,
}

impl LentShard<'_> {
    pub(crate) fn bias(&self) -> Option<View<'_>> {
        self.bias.as_ref().map(Lent::view)
    }

    pub(crate) fn runs(&self) -> Vec<LoraRun<'_>> {
        self.runs.runs()
    }
}

/// The total that ranks must agree on, over the ranks' own numbers.
///
/// # Errors
/// [`brigade::Error::Invalid`] if this rank has more.
pub(crate) fn check_total(field: &'static str, total: usize, own: usize) -> Result<()> {
    if own > total {
        let want = format!("at least this rank's {own}");
        return Err(brigade::Error::invalid(field, total, want)).or_candle();
    }
    Ok(())
}

/// What all linears offer beside their own calls.
macro_rules! shard_methods {
    () => {
        /// Applied to the result, in the same rounding.
        #[must_use]
        pub fn with_activation(mut self, activation: brigade::Activation) -> Self {
            self.shard.activation = activation;
            self
        }

        /// Adapters that runs name by their place in this list: this rank's parts of them, as the weight is this rank's part.
        ///
        /// # Errors
        /// [`brigade::Error::Invalid`] if one does not fit the weight.
        pub fn with_adapters(mut self, adapters: Vec<crate::Adapter>) -> candle_core::Result<Self> {
            self.shard.set_adapters(adapters)?;
            Ok(self)
        }

        /// This rank's part of the weight, `[out, in]`.
        pub fn weight(&self) -> &candle_core::Tensor {
            &self.shard.weight
        }

        /// The bias that this rank has.
        pub fn bias(&self) -> Option<&candle_core::Tensor> {
            self.shard.bias.as_ref()
        }
    };
}
pub(crate) use shard_methods;
