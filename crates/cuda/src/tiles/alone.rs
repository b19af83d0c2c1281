//! A linear whose rows are all there, by the kernel of tiles: where rows must not depend on each other's number, and where it is quicker than
//! the library, which has no product that takes adapters along.

use super::{GRAIN, Operands};
use crate::{
    CudaDevice,
    gemm_flags::{self, Falls, Part, Tiled},
    lane::Lane,
};
use brigade_device::{
    Buffer, Device, GemmParams, GemmShape, LoraLinearParams, LoraRun, Operand, Reason, Result, View,
};
use brigade_kernels::{GEMM_LOW_COLUMNS, GEMM_ROWS};
use brigade_plan::reason::tiles_operands;
use std::sync::Arc;

/// What tiles take of a linear, with these runs of its rows.
pub(crate) fn operands<'a>(
    p: &LoraLinearParams<'a>,
    runs: &'a [LoraRun<'a>],
    d: &Buffer,
) -> Operands<'a> {
    let gemm = &p.gemm;
    Operands {
        dtype: gemm.a.dtype(),
        scheme: gemm.a.scheme(),
        rows: gemm.a.shape().rows(),
        parts: 1,
        own: Some(gemm.a),
        weight: gemm.b,
        transpose_weight: gemm.transpose_b,
        bias: gemm.c.filter(|_| gemm.beta != 0.0),
        runs,
        batch_invariant: gemm.batch_invariant,
        output: d.dtype(),
        // It lies apart, or is C exactly.
        d: None,
    }
}

/// Refuses what the end of a tile does not do.
pub(crate) fn check_form(gemm: &GemmParams<'_>, shape: &GemmShape) -> Result<(), Reason> {
    let has_c = gemm.c.is_some() && gemm.beta != 0.0;
    let found = [
        ("a.shape", shape.d.dims().len() != 2, "2 dimensions"),
        ("transpose_a", gemm.transpose_a, "rows of A as they are"),
        ("alpha", gemm.alpha != 1.0, "a factor of 1"),
        ("beta", has_c && gemm.beta != 1.0, "a factor of 1 or 0"),
    ]
    .into_iter()
    .find(|(_, wrong, _)| *wrong);
    match found {
        None => Ok(()),
        Some((field, _, want)) => Err(tiles_operands(
            format!("{field}: products by tiles of this device take {want}"),
            "give it so, or go without batch_invariant",
        )),
    }
}

impl CudaDevice {
    /// A linear with adapters by tiles, where they take it and are quicker than the library beside adapters by themselves; `false`, and nothing is done,
    /// otherwise.
    pub(crate) fn adapters_by_tiles(
        &self,
        lane: &Arc<Lane>,
        p: &LoraLinearParams<'_>,
        shape: &GemmShape,
        d: &Buffer,
    ) -> Result<bool> {
        let operands = operands(p, p.runs, d);
        let taken = check_form(&p.gemm, shape)
            .and_then(|()| operands.taken(&operands.buffers(), &(0..0)))
            .map(|(_, runs)| (runs.len(), gemm_flags::low_columns(&runs)));
        let sms = p.gemm.sm_cap.unwrap_or(self.info().sms).max(1);
        let types = [operands.dtype, operands.output];
        let Ok((adapters, low_columns)) = taken else {
            return Ok(false);
        };
        let falls = self.falls(types, [shape.m, shape.n], low_columns, sms.into());
        if !falls.is_some_and(|falls| pays((adapters, low_columns), shape, &falls)) {
            return Ok(false);
        }
        self.multiply_by_tiles(lane, p, shape, d)?;
        Ok(true)
    }

    /// A linear that tiles take, into `d`, which overlaps nothing that is read, except that it may be C.
    pub(crate) fn multiply_by_tiles(
        &self,
        lane: &Arc<Lane>,
        p: &LoraLinearParams<'_>,
        shape: &GemmShape,
        d: &Buffer,
    ) -> Result<()> {
        // Its stores are wide.
        let whole = d.address().is_multiple_of(GRAIN as u64);
        self.beside(lane, d, whole, |d| self.write_by_tiles(lane, p, shape, d))
    }

    /// The same, where `d` lies at a whole [`GRAIN`].
    fn write_by_tiles(
        &self,
        lane: &Arc<Lane>,
        p: &LoraLinearParams<'_>,
        shape: &GemmShape,
        d: &Buffer,
    ) -> Result<()> {
        let (gemm, operands) = (&p.gemm, operands(p, p.runs, d));
        let named = operands.buffers();
        let (scales, runs) = operands.taken(&named, &(0..0))?;
        let x = gemm.a.kernel();
        let rows = x.shape().rows();
        let of = |view: View<'_>, rows| gemm_flags::Rows {
            address: view.address(),
            rows,
            columns: shape.k,
        };
        let x_scales = match &gemm.a {
            Operand::Quantized(q) => Some(q.scales().retain()),
            Operand::Plain(_) => None,
        };
        let part = Part {
            rows: 0..rows,
            first: 0,
            out: d.address(),
            scales: x_scales.as_ref().map_or(0, Buffer::address),
            from: None,
        };
        let read = named.into_iter().map(|(_, buffer)| buffer);
        let blocks = gemm.sm_cap.unwrap_or_else(|| self.info().sms);
        let tiled = Tiled {
            blocks: u32::from(blocks).max(1),
            dtype: x.dtype(),
            output: d.dtype(),
            scales,
            all: of(x, rows),
            own: of(x, rows),
            weight: of(gemm.b.kernel(), shape.n),
            bias: operands.bias.map(|c| c.retain()),
            activation: gemm.activation,
            parts: vec![part],
            runs,
            buffers: read
                .chain(x_scales)
                .chain([x.retain(), d.clone()])
                .collect(),
        };
        self.tiled(lane, &tiled)
    }
}

/// The fewest rows that were measured. Of fewer, a product by itself is quicker by the kernel for few rows.
const FEWEST: usize = 16;

/// Whether a linear with so many adapters, of so many columns in all, is quicker by tiles, as seen on an H200 of one and two. The library takes two launches for each (or two
/// for three runs or more), which tiles lose again where they leave much of their last round idle; or, where rows are so few that the weight's bytes are all that counts,
/// where there are tiles for few multiprocessors, or a single adapter is so wide that laying it out and multiplying by it takes as long.
fn pays((adapters, low_columns): (usize, usize), shape: &GemmShape, falls: &Falls) -> bool {
    let band = GEMM_ROWS as usize;
    let single = adapters == 1;
    // What rounds may take of rounds without anything idle, in hundredths.
    let most = if single { 128 } else { 150 };
    let filled = match shape.m <= 2 * band {
        true => {
            let wide = single && low_columns > GEMM_LOW_COLUMNS as usize / 2;
            !wide && 4 * falls.tiles >= 3 * falls.sms
        }
        false => 100 * falls.cost * falls.sms * band <= most * shape.m * shape.n,
    };
    shape.m >= FEWEST && adapters > 0 && filled
}

#[cfg(test)]
mod tests {
    use super::*;
    use brigade_device::Shape;

    #[test]
    fn adapters_go_by_tiles_where_they_fill_their_rounds() {
        let of = |adapters, m, n, tiles, cost| {
            let shape = GemmShape {
                batch: 1,
                m,
                n,
                k: 8192,
                d: Shape::new(&[m, n]).unwrap(),
            };
            let sms = 132;
            pays(adapters, &shape, &Falls { sms, tiles, cost })
        };
        let (few, two) = ((1, 32), (2, 64));
        assert!(of(two, 64, 8192, 128, 96) && !of(two, 64, 4096, 64, 96));
        assert!(of(few, 64, 8192, 128, 96) && !of((1, 33), 64, 8192, 128, 96));
        assert!(!of((0, 0), 64, 8192, 128, 96) && !of(two, 15, 8192, 128, 96));
        assert!(of(two, 384, 8192, 96, 262) && !of(two, 300, 8192, 96, 262));
        assert!(of(two, 300, 8192, 129, 202) && !of(few, 300, 8192, 129, 202));
        assert!(of(two, 512, 10240, 216, 404) && !of(few, 512, 10240, 216, 404));
        assert!(of(two, 1024, 8192, 256, 524) && !of(two, 1025, 8192, 288, 786));
        assert!(of(few, 8192, 2560, 640, 1572) && of((1, 64), 512, 8192, 128, 262));
    }
}
