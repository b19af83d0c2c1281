//! A linear, the sum of its parts over all ranks, a residual and a norm: what ends either half of a transformer's block whose weights are split by input features.

use crate::{
    Activation, AllReduceAlgorithm, AllReduceNormParams, Call, Error, GemmShape, LoraLinearParams,
    Normed, Plan, Result, View, ViewMut, norm, params::resident,
};

/// How the call was carried out.
#[derive(Clone, Debug, PartialEq)]
pub struct LinearAllReduceNorm {
    /// Of the sum.
    pub plan: Plan,
    /// Whether the product sent its parts itself, so that the sum began before it had ended. Ranks may differ in it.
    pub sent: bool,
}

/// Multiplies, sums over all ranks, adds the residual, and normalizes every row:
/// `sum = all_reduce(x W + adapters) + residual`, `normed = sum / sqrt(mean(sum^2) + eps) * weight`.
///
/// A rank's part is rounded to the residual's type, as where the three are calls of their own: the same bits, and the call of
/// [`AllReduceNormParams`] to all peers.
#[derive(Debug)]
pub struct LoraLinearAllReduceNormParams<'a> {
    /// The linear, of which nothing but adapters follows the product.
    pub linear: LoraLinearParams<'a>,
    /// What is added to the sum of all parts, `[rows, hidden]`: f32, f16 or bf16. A rank adds its own.
    pub residual: View<'a>,
    /// What normalized columns are multiplied by, `[hidden]` of the same type.
    pub weight: View<'a>,
    /// Added to the mean square; finite, not negative, and the same on every rank.
    pub eps: f32,
    /// The new residual, of the same shape and type: may be exactly the bytes of `residual`.
    pub sum: ViewMut<'a>,
    /// The normalized rows, which overlap nothing else but what the linear reads.
    pub normed: Normed<'a>,
    /// Forced algorithm of the sum.
    pub choice: Option<AllReduceAlgorithm>,
}

impl<'a> LoraLinearAllReduceNormParams<'a> {
    /// Checks shapes, types and places, and gives the product's and the signed call.
    ///
    /// # Errors
    /// [`Error::Invalid`] naming the field, what it was and what it should have been.
    pub fn check(&self) -> Result<(GemmShape, Call)> {
        let shape = self.linear.check()?;
        let gemm = &self.linear.gemm;
        let want = "none in front of a residual";
        if let Some(c) = gemm.c.filter(|_| gemm.beta != 0.0) {
            return Err(Error::invalid("linear.gemm.c", c.shape(), want));
        }
        if gemm.activation != Activation::None {
            let got = format!("{:?}", gemm.activation);
            return Err(Error::invalid("linear.gemm.activation", got, want));
        }
        resident(
            "residual",
            Some(self.residual.memory()),
            gemm.a.kernel().memory(),
        )?;
        self.sum.check_writable()?;
        let views = [self.residual, self.weight, self.sum.as_view()];
        let [rows, hidden] = norm::check(None, views, self.eps, &self.normed)?;
        if shape.d.dims() != [rows, hidden] {
            let want = format!("{}, as the linear's result", shape.d);
            return Err(Error::invalid(
                "residual.shape",
                self.residual.shape(),
                want,
            ));
        }
        let call = Call::AllReduceNorm {
            rows,
            hidden,
            dtype: self.residual.dtype(),
            scheme: self.normed.scheme(),
            eps_bits: self.eps.to_bits(),
            scale_bits: self.normed.scale().map(f32::to_bits),
            choice: self.choice,
        };
        Ok((shape, call))
    }

    /// What is left when the parts are there.
    pub fn behind(self, from: View<'a>) -> AllReduceNormParams<'a> {
        AllReduceNormParams {
            from,
            residual: self.residual,
            weight: self.weight,
            eps: self.eps,
            sum: self.sum,
            normed: self.normed,
            choice: self.choice,
        }
    }
}
