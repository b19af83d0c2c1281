//! An all-reduce between the neighbours that it has in a model: the product before it, and what reads its result.

use crate::{data, ranks::Rank};
use anyhow::{Result, ensure};
use brigade::{Activation, Buffer, GemmParams, Linear, Output, View, ViewMut};

/// Inner dimension of the product: one rank's part of a layer of 8192 over eight ranks.
const K: usize = 1024;

/// Most columns, where sizes have room for so many: the width of a large model.
const COLUMNS: usize = 8192;

/// Fewest: a product of fewer is none that a model has.
const FEWEST: usize = 64;

/// What comes between the neighbours, from the product's result to what is read afterwards.
pub type Middle<'a> = Box<dyn FnMut(View<'_>, ViewMut<'_>) -> brigade::Result<()> + 'a>;

/// A row-parallel linear in bf16: a product, the sum over ranks, then bias and SiLU, which is one small kernel that reads and
/// writes every element.
pub struct Chain<'a> {
    rank: &'a Rank,
    /// `[m, k]`
    x: Buffer,
    /// `[n, k]`
    weight: Buffer,
    /// `[n]`
    bias: Buffer,
    /// `[m, n]`
    product: Buffer,
    /// The same place as the product, if the sum is in place.
    sum: Buffer,
    end: Buffer,
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
            bias: upload(3, [1, n])?,
            sum: if in_place { product.clone() } else { empty()? },
            product,
            end: empty()?,
        })
    }

    /// All of it; without a middle, the neighbours alone.
    pub fn call(
        &self,
        middle: Option<Middle<'a>>,
    ) -> impl FnMut() -> brigade::Result<()> + use<'a> {
        let rank = self.rank;
        let (x, weight, bias) = (self.x.clone(), self.weight.clone(), self.bias.clone());
        let (mut product, mut sum) = (self.product.clone(), self.sum.clone());
        let (mut end, mut middle) = (self.end.clone(), middle);
        move || {
            let gemm = GemmParams {
                transpose_b: true,
                ..GemmParams::new(&x, &weight)
            };
            let (device, on) = (&rank.device, &rank.on);
            device.gemm(on, &gemm, Output::Into(product.view_mut()))?;
            if let Some(middle) = &mut middle {
                middle(product.view(), sum.view_mut())?;
            }
            let (bias, end) = (Some(bias.view()), Output::Into(end.view_mut()));
            device
                .bias_activation(on, sum.view(), bias, Activation::Silu, end)
                .map(drop)
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
