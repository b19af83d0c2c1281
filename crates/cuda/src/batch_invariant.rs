//! Products whose rows do not depend on each other's number: the kernel of tiles, which adds up the inner dimension in one order for every
//! row, in place of the library, which chooses among kernels by the number of rows.
//!
//! Adapters are more of the inner dimension. What a launch has of them lies at multiples of what tensor cores add up together, with
//! zeros elsewhere, so that it does not matter which others there are. Where they are more than a launch takes, there are several.

use crate::{
    CudaDevice,
    factors::are_integers,
    lane::Lane,
    tiles::{Operands, alone},
};
use brigade_device::{
    Buffer, GemmParams, GemmShape, LoraLinearParams, LoraRun, Reason, Result, fallback,
};
use std::{ops::Range, sync::Arc};

/// Whether the usual way has that property: sums of integers are exact in any order.
pub(crate) fn is_exact(gemm: &GemmParams<'_>, runs: &[LoraRun<'_>]) -> bool {
    let (a, b) = (gemm.a.scheme(), gemm.b.scheme());
    are_integers((a, gemm.transpose_a), (b, gemm.transpose_b))
        && runs.iter().all(|run| run.adapter.is_none())
}

/// Rows, and their runs.
type Rows<'a> = (Range<usize>, Vec<LoraRun<'a>>);

/// Neighbouring runs that a launch takes together; at least one.
fn together<'a>(p: &LoraLinearParams<'a>, d: &Buffer) -> Result<Vec<Rows<'a>>, Reason> {
    let rows = p.gemm.a.shape().rows();
    let taken = |runs: &[LoraRun<'a>]| {
        let operands = alone::operands(p, runs, d);
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
        alone::check_form(&p.gemm, shape)?;
        self.check_tiles(p.gemm.a.dtype(), d.dtype())?;
        for (rows, runs) in together(p, d)? {
            let x = p.gemm.a.rows(rows.clone())?;
            let gemm = GemmParams {
                a: x,
                c: fallback::cut_bias(p.gemm.c, shape.n, rows.start, rows.len())?,
                ..p.gemm
            };
            let part = LoraLinearParams { gemm, runs: &runs };
            self.multiply_by_tiles(lane, &part, shape, &d.slice(rows.start, rows.len())?)?;
        }
        Ok(())
    }
}
