//! What stands between the halves of a transformer's blocks: a residual, and a norm.

use crate::{
    Parallel,
    error::{OrCandle, invalid},
    into::Form,
};
use brigade::{Normed, ResidualNormParams, View, ViewMut};
use candle_core::{Result, Tensor};

/// The norm behind a residual: `sum / sqrt(mean(sum^2) + eps) * weight` over the last dimension (Zhang and Sennrich: Root Mean Square Layer
/// Normalization, 2019), in f32 and rounded once.
#[derive(Clone, Debug)]
pub struct ResidualNorm {
    weight: Tensor,
    pub(crate) eps: f32,
}

impl ResidualNorm {
    /// With a weight of `[hidden]`, of the type of the activations, and the same epsilon on every rank.
    ///
    /// # Errors
    /// [`brigade::Error::Invalid`] for a weight that is no vector.
    pub fn new(weight: &Tensor, eps: f32) -> Result<Self> {
        match weight.dims() {
            [_] => Ok(Self {
                weight: weight.contiguous()?,
                eps,
            }),
            other => Err(invalid("weight.shape", format!("{other:?}"), "[hidden]")),
        }
    }
}

/// What comes out.
#[derive(Clone, Debug)]
pub struct Residual {
    /// What came in and the residual, added up: the residual of what comes next.
    pub sum: Tensor,
    /// The same, normalized: the input of what comes next.
    pub normed: Tensor,
}

/// What an operation reads behind its rows: the residual, as rows, and the weight of the norm.
pub(crate) struct Inputs<'a> {
    pub(crate) residual: View<'a>,
    pub(crate) weight: View<'a>,
}

/// Rows that a residual is added to.
#[derive(Clone, Copy)]
pub(crate) struct Rows<'a> {
    /// Of the tensor that they are, `[.., hidden]`.
    dims: &'a [usize],
    /// Rows and columns.
    shape: [usize; 2],
}

impl<'a> Rows<'a> {
    /// Of a tensor of these dimensions.
    pub(crate) fn of(dims: &'a [usize]) -> Result<Self> {
        let Some((&hidden, outer)) = dims.split_last() else {
            return Err(invalid("x.shape", "a scalar", "[.., hidden]"));
        };
        let shape = [outer.iter().product(), hidden];
        Ok(Self { dims, shape })
    }

    /// Those that come of them and a residual.
    fn form(&self, residual: &Tensor) -> Form<'a> {
        Form {
            dtype: residual.dtype(),
            dims: self.dims,
            rows: self.shape,
        }
    }

    /// The tensor's memory as rows.
    pub(crate) fn cut<'v>(&self, view: View<'v>) -> brigade::Result<View<'v>> {
        view.reshape(&self.shape)
    }
}

impl Parallel {
    /// `sum = x + residual`, and its norm, in one operation of this rank's alone: for rows that are spread over ranks, behind
    /// [`LinearReduceScatter`](crate::LinearReduceScatter). `x` and `residual` are `[.., hidden]`, of one type.
    ///
    /// # Errors
    /// [`brigade::Error::Invalid`] naming what does not fit.
    pub fn residual_norm(
        &self,
        x: &Tensor,
        residual: &Tensor,
        norm: &ResidualNorm,
    ) -> Result<Residual> {
        let x = x.contiguous()?;
        let lent = self.lend(&x)?;
        let rows = Rows::of(x.dims())?;
        self.normed(rows, residual, norm, |inputs, sum, normed| {
            let params = ResidualNormParams {
                from: rows.cut(lent.view())?,
                residual: inputs.residual,
                weight: inputs.weight,
                eps: norm.eps,
                sum,
                normed: Normed::Plain(normed),
            };
            self.device().residual_norm(self.stream(), &params)
        })
    }

    /// New tensors for a residual and its norm, which `call` writes as rows.
    pub(crate) fn normed(
        &self,
        rows: Rows<'_>,
        residual: &Tensor,
        norm: &ResidualNorm,
        call: impl FnOnce(Inputs<'_>, ViewMut<'_>, ViewMut<'_>) -> brigade::Result<()>,
    ) -> Result<Residual> {
        let (dtype, Rows { dims, shape }) = (residual.dtype(), rows);
        let mut sum = None;
        let normed = self.with_inputs(rows, residual, norm, |inputs| {
            self.make(dtype, shape.as_slice(), |normed| {
                let made = self.make(dtype, shape.as_slice(), |sum| call(inputs, sum, normed));
                sum = Some(made);
                Ok(())
            })
        })?;
        match sum {
            Some(sum) => Ok(Residual {
                sum: sum?.reshape(dims)?,
                normed: normed.reshape(dims)?,
            }),
            None => Err(crate::to_candle(brigade::Error::Closed)),
        }
    }

    /// Checks that they can go into tensors that are there, which have no memory of `others`: before anything is lent.
    pub(crate) fn check_normed_into(
        &self,
        rows: Rows<'_>,
        (residual, norm): (&Tensor, &ResidualNorm),
        Residual { sum, normed }: &Residual,
        others: &[&Tensor],
    ) -> Result<()> {
        let form = rows.form(residual);
        for (field, tensor, other) in [("out.sum", sum, normed), ("out.normed", normed, sum)] {
            let to = (field, tensor);
            self.check_into(to, form, &[residual, &norm.weight, other])?;
            self.check_into(to, form, others)?;
        }
        Ok(())
    }

    /// The same as [`normed`](Self::normed) in tensors that are there, which were checked.
    pub(crate) fn normed_into(
        &self,
        rows: Rows<'_>,
        (residual, norm): (&Tensor, &ResidualNorm),
        Residual { sum, normed }: &Residual,
        call: impl FnOnce(Inputs<'_>, ViewMut<'_>, ViewMut<'_>) -> brigade::Result<()>,
    ) -> Result<()> {
        let form = rows.form(residual);
        let mut written = Err(crate::to_candle(brigade::Error::Closed));
        self.with_inputs(rows, residual, norm, |inputs| {
            self.write(normed, form, |normed| {
                written = self.write(sum, form, |sum| call(inputs, sum, normed));
                Ok(())
            })
        })?;
        written
    }

    /// Checks what an operation reads, and lends it.
    fn with_inputs<R>(
        &self,
        rows: Rows<'_>,
        residual: &Tensor,
        norm: &ResidualNorm,
        work: impl FnOnce(Inputs<'_>) -> Result<R>,
    ) -> Result<R> {
        for tensor in [residual, &norm.weight] {
            self.check_place(tensor)?;
        }
        if residual.dims() != rows.dims {
            let want = format!("{:?}, as what is added to it", rows.dims);
            return Err(invalid(
                "residual.shape",
                format!("{:?}", residual.dims()),
                want,
            ));
        }
        let residual = residual.contiguous()?;
        let (old, weight) = (self.lend(&residual)?, self.lend(&norm.weight)?);
        work(Inputs {
            residual: rows.cut(old.view()).or_candle()?,
            weight: weight.view(),
        })
    }
}
