//! Products whose rows do not depend on each other's number: the kernel of tiles, which adds up the inner dimension in one order for every
//! row, in place of the library, which chooses among kernels by the number of rows.
//!
//! Adapters are more of the inner dimension. What a launch has of them lies at multiples of what tensor cores add up together, with
//! zeros elsewhere, so that it does not matter which others there are. Where they are more than a launch takes, there are several.

use crate::{
    CudaDevice,
    factors::are_integers,
    gemm_flags::{self, Part, Tiled},
    lane::Lane,
    tiles::Operands,
};
use brigade_device::{
    Buffer, Device, GemmParams, GemmShape, LoraLinearParams, LoraRun, Operand, Reason, Result,
    View, fallback,
};
use brigade_plan::reason::tiles_operands;
use std::{ops::Range, sync::Arc};

/// Whether the usual way has that property: sums of integers are exact in any order.
pub(crate) fn is_exact(gemm: &GemmParams<'_>, runs: &[LoraRun<'_>]) -> bool {
    let (a, b) = (gemm.a.scheme(), gemm.b.scheme());
    are_integers((a, gemm.transpose_a), (b, gemm.transpose_b))
        && runs.iter().all(|run| run.adapter.is_none())
}

fn operands<'a>(p: &LoraLinearParams<'a>, runs: &'a [LoraRun<'a>], d: &Buffer) -> Operands<'a> {
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
        batch_invariant: true,
        output: d.dtype(),
        // It lies apart, or is C exactly.
        d: None,
    }
}

/// Refuses what the end of a tile does not do.
fn check_form(gemm: &GemmParams<'_>, shape: &GemmShape) -> Result<(), Reason> {
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
            format!("{field}: batch_invariant products of this device take {want}"),
            "give it so, or go without batch_invariant",
        )),
    }
}

/// Rows, and their runs.
type Rows<'a> = (Range<usize>, Vec<LoraRun<'a>>);

/// Neighbouring runs that a launch takes together; at least one.
fn together<'a>(p: &LoraLinearParams<'a>, d: &Buffer) -> Result<Vec<Rows<'a>>, Reason> {
    let rows = p.gemm.a.shape().rows();
    let taken = |runs: &[LoraRun<'a>]| {
        let operands = operands(p, runs, d);
        operands.taken(&operands.buffers(), &(0..0)).map(drop)
    };
    if taken(p.runs).is_ok() {
        return Ok(vec![(0..rows, p.runs.to_vec())]);
    }
    let mut list: Vec<Rows<'a>> = Vec::new();
    let mut first = 0;
    for run in p.runs.iter().filter(|run| run.rows > 0) {
        let rows = first..first + run.rows;
        first = rows.end;
        let more = list.last().map(|(_, runs)| [&runs[..], &[*run]].concat());
        match (list.last_mut(), more) {
            (Some(last), Some(more)) if taken(&more).is_ok() => {
                *last = (last.0.start..rows.end, more)
            }
            _ => {
                taken(&[*run])?;
                list.push((rows, vec![*run]));
            }
        }
    }
    if list.is_empty() {
        taken(&[])?;
    }
    Ok(list)
}

impl CudaDevice {
    /// Whether chunks of rows can be multiplied so, before anything of their call is enqueued.
    pub(crate) fn check_batch_invariant(&self, of: &Operands<'_>) -> Result<(), Reason> {
        let weight = (of.weight.scheme(), of.transpose_weight);
        let adapters = of.runs.iter().filter(|run| run.adapter.is_some());
        if are_integers((of.scheme, false), weight) && adapters.clone().next().is_none() {
            return Ok(());
        }
        self.check_tiles(of.dtype, of.output)?;
        let check = |runs: &[LoraRun<'_>]| {
            let alone = Operands {
                runs,
                d: None,
                ..*of
            };
            alone.taken(&alone.buffers(), &(0..0)).map(drop)
        };
        check(&[])?;
        // Chunks have those of their rows, and several launches where they are many.
        adapters.into_iter().try_for_each(|run| check(&[*run]))
    }

    /// Writes `d`, which overlaps nothing that is read, except that it may be C.
    pub(crate) fn run_batch_invariant(
        &self,
        lane: &Arc<Lane>,
        p: &LoraLinearParams<'_>,
        shape: &GemmShape,
        d: &Buffer,
    ) -> Result<()> {
        check_form(&p.gemm, shape)?;
        self.check_tiles(p.gemm.a.dtype(), d.dtype())?;
        for (rows, runs) in together(p, d)? {
            let x = p.gemm.a.rows(rows.clone())?;
            let gemm = GemmParams {
                a: x,
                c: fallback::cut_bias(p.gemm.c, shape.n, rows.start, rows.len())?,
                ..p.gemm
            };
            let part = LoraLinearParams { gemm, runs: &runs };
            self.multiply_tiles(lane, &part, shape, &d.slice(rows.start, rows.len())?)?;
        }
        Ok(())
    }

    fn multiply_tiles(
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
