//! An all-reduce between the neighbours that it has in a model: the product before it, and the residual and norm that read its result.

use crate::{data, norms::EPS, ranks::Rank};
use anyhow::{Result, ensure};
use brigade::{
    AllReduceAlgorithm, AllReduceNormParams, Buffer, Call, Comm, DataType, GemmParams, Linear,
    Normed, Output, QScheme, ResidualNormParams, View, ViewMut,
};

/// Inner dimension of the product: one rank's part of a layer of 8192 over eight ranks.
const K: usize = 1024;

/// Most columns, where sizes have room for so many: the width of a large model.
const COLUMNS: usize = 8192;

/// Fewest: a product of fewer is none that a model has.
const FEWEST: usize = 64;

/// A sum over ranks, from the product to where the norm reads it.
pub type Sum<'a> = Box<dyn FnMut(View<'_>, ViewMut<'_>) -> brigade::Result<()> + 'a>;

/// What comes between product and norm.
pub enum Middle<'a> {
    /// Nothing: the neighbours alone.
    Nothing,
    /// A sum, and the norm behind it is a call of its own.
    Sum(Sum<'a>),
    /// A sum that has the norm in it.
    Fused(&'a Comm, Option<AllReduceAlgorithm>),
}

/// A row-parallel linear in bf16 as a block of a transformer has it: a product, the sum over ranks, then residual and norm.
pub struct Chain<'a> {
    rank: &'a Rank,
    /// `[m, k]`
    x: Buffer,
    /// `[n, k]`
    weight: Buffer,
    /// `[m, n]`
    residual: Buffer,
    /// `[n]`, of the norm.
    scale: Buffer,
    /// `[m, n]`
    product: Buffer,
    /// The same place as the product, if the sum is in place.
    sum: Buffer,
    /// The new residual.
    next: Buffer,
    normed: Buffer,
}

/// Rows and columns of a product of so many elements.
fn shape(elements: usize) -> Result<[usize; 2]> {
    let columns = COLUMNS.min(1 << elements.trailing_zeros().min(63));
    ensure!(
        columns >= FEWEST,
        "--chain needs sizes that {FEWEST} columns divide, and {elements} elements are no rows of so many"
    );
    Ok([elements / columns, columns])
}

impl<'a> Chain<'a> {
    pub fn new(rank: &'a Rank, elements: usize, in_place: bool) -> Result<Self> {
        let [m, n] = shape(elements)?;
        let (device, on) = (&rank.device, &rank.on);
        let upload = |of: u64, dims: [usize; 2]| {
            let seed = of * 1000 + rank.number() as u64;
            data::upload(device, on, &data::numbers(seed, dims[0] * dims[1]), dims)
        };
        let empty = || data::poisoned(device, on, [m, n]);
        let product = empty()?;
        Ok(Self {
            rank,
            x: upload(1, [m, K])?,
            weight: upload(2, [n, K])?,
            residual: upload(3, [m, n])?,
            scale: upload(4, [1, n])?.index(0)?,
            sum: if in_place { product.clone() } else { empty()? },
            product,
            next: empty()?,
            normed: empty()?,
        })
    }

    /// The signed call of the sum that has the norm in it.
    pub fn fused(&self, choice: Option<AllReduceAlgorithm>) -> Call {
        let shape = self.product.shape();
        Call::AllReduceNorm {
            rows: shape.rows(),
            hidden: shape.columns(),
            dtype: DataType::BF16,
            scheme: QScheme::None,
            eps_bits: EPS.to_bits(),
            scale_bits: None,
            choice,
        }
    }

    /// All of it.
    pub fn call(&self, mut middle: Middle<'a>) -> impl FnMut() -> brigade::Result<()> + use<'a> {
        let rank = self.rank;
        let [x, weight, residual, scale] =
            [&self.x, &self.weight, &self.residual, &self.scale].map(Buffer::clone);
        let [mut product, mut sum, mut next, mut normed] =
            [&self.product, &self.sum, &self.next, &self.normed].map(Buffer::clone);
        move || {
            let gemm = GemmParams {
                transpose_b: true,
                ..GemmParams::new(&x, &weight)
            };
            let (device, on) = (&rank.device, &rank.on);
            device.gemm(on, &gemm, Output::Into(product.view_mut()))?;
            match &mut middle {
                Middle::Nothing => {}
                Middle::Sum(all_reduce) => all_reduce(product.view(), sum.view_mut())?,
                Middle::Fused(comm, choice) => {
                    let params = AllReduceNormParams {
                        from: product.view(),
                        residual: residual.view(),
                        weight: scale.view(),
                        eps: EPS,
                        sum: next.view_mut(),
                        normed: Normed::Plain(normed.view_mut()),
                        choice: *choice,
                    };
                    return comm.lease(on)?.all_reduce_norm(params).map(drop);
                }
            }
            let params = ResidualNormParams {
                from: sum.view(),
                residual: residual.view(),
                weight: scale.view(),
                eps: EPS,
                sum: next.view_mut(),
                normed: Normed::Plain(normed.view_mut()),
            };
            device.residual_norm(on, &params)
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn products_are_as_wide_as_a_model_where_there_is_room() {
        for (elements, want) in [
            (1 << 10, [1, 1024]),
            (1 << 13, [1, 8192]),
            (3 << 13, [3, 8192]),
            (1 << 23, [1024, 8192]),
            (192, [3, 64]),
        ] {
            assert_eq!(shape(elements).unwrap(), want);
        }
        assert!(shape(96).is_err() && shape(1).is_err());
    }
}
