//! A mixture of experts, each of which lives on one rank.

use crate::{
    Parallel,
    error::{OrCandle, invalid},
    memory,
};
use brigade::{
    Arrangement, CombineParams, CombineSum, DeviceExt, DispatchParams, Dispatched, Output,
    Placement, ReceivedIds, Route, Routing, Transport, View,
};
use candle_core::{DType, Result, Tensor};
use std::ops::Range;

/// Tokens go to the ranks of their experts, and what those make of them comes back and is added up (GShard, Lepikhin et al. 2020).
///
/// Experts are spread over ranks as features are, the first ranks have one more. A router, the caller's own, says which experts each of this
/// rank's tokens goes to, and with which weights; ranks have their own tokens, as many as they like, also none.
#[derive(Clone, Debug)]
pub struct ExpertParallel {
    parallel: Parallel,
    experts: usize,
    max_tokens: usize,
    sum: CombineSum,
    choice: Option<Transport>,
}

impl ExpertParallel {
    /// For so many experts in all, and at most `max_tokens` tokens of a rank in one call: the same on every rank. The group must have
    /// been joined for expert parallelism ([`ParallelMode::Ep`](brigade::ParallelMode::Ep)), which gives it memory for rows on their
    /// way.
    pub fn new(parallel: &Parallel, experts: usize, max_tokens: usize) -> Self {
        Self {
            parallel: parallel.clone(),
            experts,
            max_tokens,
            sum: CombineSum::Expert,
            choice: None,
        }
    }

    /// Each rank adds what its own experts made of a token before it goes back: fewer bytes travel, and sums are rounded once more. The
    /// same on every rank.
    #[must_use]
    pub fn with_sums_by_rank(mut self) -> Self {
        self.sum = CombineSum::ExpertByRank;
        self
    }

    /// Forces a way for rows to travel, for who measures. The same on every rank.
    #[must_use]
    pub fn with_transport(mut self, transport: Transport) -> Self {
        self.choice = Some(transport);
        self
    }

    /// Which experts this rank has.
    ///
    /// # Errors
    /// None in practice.
    pub fn own(&self) -> Result<Range<usize>> {
        crate::cut::share(self.experts, 1, self.parallel.size(), self.parallel.rank())
    }

    /// `y = sum over a token's experts of weight * expert(x)`, f32 inside and rounded once.
    ///
    /// `x` is `[tokens, hidden]`; `ids` `[tokens, k]`, u32, i32 or i64, names experts from 0 (a number that names none, as -1, is
    /// none); `weights` `[tokens, k]` of any float. `expert` is called for each own expert that rows have come for, with its number
    /// and those rows, `[rows, hidden]`, and gives as many. A rank whose `expert` fails stops the group, so that nobody waits for it.
    ///
    /// # Errors
    /// What `expert` returns; [`brigade::Error::Invalid`] naming what does not fit; [`brigade::Error::Fault`] if a rank does not come.
    pub fn forward(
        &self,
        x: &Tensor,
        ids: &Tensor,
        weights: &Tensor,
        mut expert: impl FnMut(usize, &Tensor) -> Result<Tensor>,
    ) -> Result<Tensor> {
        let &[tokens, hidden] = x.dims() else {
            return Err(invalid(
                "x.shape",
                format!("{:?}", x.dims()),
                "[tokens, hidden]",
            ));
        };
        self.parallel.refuse_capture()?;
        let padded = self.padded(x)?;
        let weights = weights.to_dtype(DType::F32)?.contiguous()?;
        // The handle of a dispatch keeps a view of them, for the combine.
        let weights = self.parallel.lend(&weights)?;
        let there = self.dispatch(&padded, ids, weights.view())?;
        let back = self
            .made(&there, hidden, &mut expert)
            // The others wait for this rank's rows in the combine.
            .inspect_err(|_| self.parallel.abort())?;
        let out = self.combine(&there, &back, tokens)?;
        out.narrow(1, 0, hidden)?.contiguous()
    }

    /// Rows of a multiple of 16 bytes, as they travel.
    fn padded(&self, x: &Tensor) -> Result<Tensor> {
        let hidden = x.dim(1)?;
        let step = (DispatchParams::ROW_BYTES / x.dtype().size_in_bytes().max(1)).max(1);
        match hidden.next_multiple_of(step) - hidden {
            0 => x.contiguous(),
            more => x.pad_with_zeros(1, 0, more)?.contiguous(),
        }
    }

    fn dispatch(&self, x: &Tensor, ids: &Tensor, weights: View<'_>) -> Result<Dispatched> {
        let parallel = &self.parallel;
        let ids = match ids.dtype() {
            DType::I32 | DType::I64 => ids.contiguous()?,
            _ => ids.to_dtype(DType::I64)?.contiguous()?,
        };
        let (x, ids) = (parallel.lend(x)?, parallel.lend(&ids)?);
        let placement = Placement::Even {
            experts: self.experts,
        };
        let params = DispatchParams {
            rows: x.view(),
            beside: &[],
            route: Route::Experts {
                routing: Routing {
                    ids: ids.view(),
                    placement,
                },
                weights: Some(weights),
            },
            arrangement: Arrangement::ByExpert { alignment: 1 },
            max_tokens: self.max_tokens,
            // Who calls an expert must know its rows on the host anyway.
            max_recv: None,
            received_ids: ReceivedIds::Local,
            totals: None,
            cast: None,
            choice: self.choice,
        };
        parallel
            .lease()
            .and_then(|mut lease| lease.dispatch(params))
            .or_candle()
    }

    /// What own experts make of the rows that came, as these lie.
    fn made(
        &self,
        there: &Dispatched,
        hidden: usize,
        expert: &mut impl FnMut(usize, &Tensor) -> Result<Tensor>,
    ) -> Result<Tensor> {
        let (device, on) = (self.parallel.device(), self.parallel.stream());
        let offsets: Vec<i32> = device.download(on, there.handle.offsets()).or_candle()?;
        let rows = self.parallel.tensor(there.rows.view())?;
        let width = rows.dim(1)?;
        let first = self.own()?.start;
        let mut parts = Vec::new();
        for (slot, bounds) in offsets.windows(2).enumerate() {
            let (from, to) = (bounds[0].max(0) as usize, bounds[1].max(0) as usize);
            if from >= to {
                continue;
            }
            let count = to - from;
            let own = rows.narrow(0, from, count)?.narrow(1, 0, hidden)?;
            let made = expert(first + slot, &own.contiguous()?)?;
            if made.dims() != [count, hidden] {
                let got = format!("{:?} of expert {}", made.dims(), first + slot);
                return Err(invalid("expert", got, format!("[{count}, {hidden}]")));
            }
            parts.push(made.pad_with_zeros(1, 0, width - hidden)?);
        }
        match parts.is_empty() {
            true => Ok(rows),
            false => Tensor::cat(&parts, 0)?.contiguous(),
        }
    }

    fn combine(&self, there: &Dispatched, rows: &Tensor, tokens: usize) -> Result<Tensor> {
        let parallel = &self.parallel;
        memory::data_type(rows.dtype())?;
        let lent = parallel.lend(rows)?;
        parallel.make(rows.dtype(), (tokens, rows.dim(1)?), |to| {
            let params = CombineParams {
                rows: lent.view(),
                handle: &there.handle,
                sum: self.sum,
                weights: None,
                biases: &[],
                output: Output::Into(to),
                choice: self.choice,
            };
            parallel.call(|lease| Ok(lease.combine(params)?.plan))
        })
    }
}
