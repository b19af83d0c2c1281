//! Low-rank adapters (LoRA, Hu et al. 2021), and which rows have which.

use crate::{
    Parallel, cut,
    error::{OrCandle, invalid},
    memory::Lent,
};
use brigade::{Lora, LoraRun};
use candle_core::{Result, Tensor};
use std::ops::Range;

/// An adapter: `scale * x A B` is added to a linear.
#[derive(Clone, Debug)]
pub struct Adapter {
    a: Tensor,
    b: Tensor,
    scale: f32,
}

impl Adapter {
    /// From `A [in, r]` and `B [r, out]`.
    ///
    /// # Errors
    /// [`brigade::Error::Invalid`] if they do not fit each other.
    pub fn new(a: &Tensor, b: &Tensor, scale: f32) -> Result<Self> {
        match (a.dims(), b.dims()) {
            (&[_, r], &[also, _]) if r == also => Ok(Self {
                a: a.contiguous()?,
                b: b.contiguous()?,
                scale,
            }),
            (a, b) => Err(invalid(
                "adapter",
                format!("A {a:?} and B {b:?}"),
                "A [in, r] and B [r, out]",
            )),
        }
    }

    /// From matrices as PEFT stores them: `lora_A.weight [r, in]`, `lora_B.weight [out, r]`. The scale is `alpha / r`.
    ///
    /// # Errors
    /// As [`new`](Self::new).
    pub fn from_peft(lora_a: &Tensor, lora_b: &Tensor, alpha: f32) -> Result<Self> {
        let r = lora_a.dim(0)?;
        Self::new(&lora_a.t()?, &lora_b.t()?, alpha / r.max(1) as f32)
    }

    /// A and B.
    pub(crate) fn factors(&self) -> [&Tensor; 2] {
        [&self.a, &self.b]
    }

    /// For a column-parallel linear: this rank's columns of B.
    ///
    /// # Errors
    /// candle's, for columns that are not there.
    pub fn columns(&self, part: Range<usize>) -> Result<Self> {
        Ok(Self {
            b: cut::range(&self.b, 1, part)?,
            ..self.clone()
        })
    }

    /// For a row-parallel linear: this rank's rows of A.
    ///
    /// # Errors
    /// candle's, for rows that are not there.
    pub fn rows(&self, part: Range<usize>) -> Result<Self> {
        Ok(Self {
            a: cut::range(&self.a, 0, part)?,
            ..self.clone()
        })
    }

    fn lend(&self, parallel: &Parallel) -> Result<LentAdapter<'_>> {
        Ok(LentAdapter {
            a: parallel.lend(&self.a)?,
            b: parallel.lend(&self.b)?,
            scale: self.scale,
        })
    }
}

/// Which rows have which adapter: runs of consecutive rows, the same on every rank. Where activations have more than two dimensions,
/// rows are counted over all but the last.
///
/// ```
/// use brigade_candle::Runs;
///
/// // A batch of four tokens: two of adapter 0, one without, one of adapter 1.
/// let runs = Runs::per_row([Some(0), Some(0), None, Some(1)]);
/// assert_eq!(runs, Runs::of([(2, Some(0)), (1, None), (1, Some(1))]));
/// ```
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Runs(Vec<(usize, Option<usize>)>);

impl Runs {
    /// No row has one.
    pub fn none() -> Self {
        Self::default()
    }

    /// So many rows of that adapter, and so on: all rows must be covered.
    pub fn of(runs: impl IntoIterator<Item = (usize, Option<usize>)>) -> Self {
        Self(runs.into_iter().collect())
    }

    /// The adapter of each row. Neighbours of one adapter become one run, so sort a batch by adapters where you can.
    pub fn per_row(rows: impl IntoIterator<Item = Option<usize>>) -> Self {
        let mut runs: Vec<(usize, Option<usize>)> = Vec::new();
        for adapter in rows {
            match runs.last_mut() {
                Some((rows, last)) if *last == adapter => *rows += 1,
                _ => runs.push((1, adapter)),
            }
        }
        Self(runs)
    }

    /// Lends the adapters that are named, once each.
    pub(crate) fn lend<'t>(
        &self,
        parallel: &Parallel,
        adapters: &'t [Adapter],
    ) -> Result<LentRuns<'t>> {
        let mut lent: Vec<Option<LentAdapter<'t>>> = adapters.iter().map(|_| None).collect();
        for index in self.0.iter().filter_map(|run| run.1) {
            let Some(adapter) = adapters.get(index) else {
                let want = format!("one of the layer's {} adapters", adapters.len());
                return Err(invalid("runs.adapter", index, want));
            };
            if lent[index].is_none() {
                lent[index] = Some(adapter.lend(parallel)?);
            }
        }
        Ok(LentRuns {
            runs: self.0.clone(),
            adapters: lent,
        })
    }
}

struct LentAdapter<'t> {
    a: Lent<'t>,
    b: Lent<'t>,
    scale: f32,
}

/// Runs with the memory of their adapters.
pub(crate) struct LentRuns<'t> {
    runs: Vec<(usize, Option<usize>)>,
    adapters: Vec<Option<LentAdapter<'t>>>,
}

impl LentRuns<'_> {
    /// As Brigade's parameters have them.
    pub(crate) fn runs(&self) -> Vec<LoraRun<'_>> {
        let adapter = |index: usize| self.adapters.get(index)?.as_ref();
        let run = |&(rows, index): &(usize, Option<usize>)| LoraRun {
            rows,
            adapter: index.and_then(adapter).map(|lent| Lora {
                a: lent.a.view(),
                b: lent.b.view(),
                scale: lent.scale,
            }),
        };
        self.runs.iter().map(run).collect()
    }
}

/// Checks what a layer is given.
pub(crate) fn check(adapters: &[Adapter], (inputs, outputs): (usize, usize)) -> Result<()> {
    for (index, adapter) in adapters.iter().enumerate() {
        let (from, to) = (adapter.a.dim(0)?, adapter.b.dim(1)?);
        if (from, to) != (inputs, outputs) {
            return Err(brigade::Error::invalid(
                "adapters",
                format!("adapter {index} from {from} to {to}"),
                format!("{inputs} to {outputs}, as this rank's weight"),
            ))
            .or_candle();
        }
    }
    Ok(())
}
