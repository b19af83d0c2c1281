//! What experts make of rows that came by the low-latency exchange, and the sums that come back.

use super::came::received;
use crate::{
    backend::Rank,
    check::assert_bits,
    experts::{
        back::diff,
        case::{Came, Case, rounded},
        own::Own,
    },
    matrix::{to_bytes, to_f64},
};
use brigade_device::{
    Buffer, CombineCast, CombineSum, DataType, Lease, LowLatencyCombineParams,
    LowLatencyDispatched, Output, PendingCombine,
};
use rand::{Rng, rngs::StdRng};
use std::collections::BTreeMap;

/// What everybody's experts make of rows, and how it comes back.
#[derive(Clone, Copy, Debug)]
pub struct Back {
    pub dtype: DataType,
    pub output: DataType,
    pub sum: CombineSum,
    pub cast: Option<CombineCast>,
    /// Whether weights go ahead with the rows.
    pub weighted: bool,
    /// Whether the result goes into a buffer of the caller's.
    pub into: bool,
}

impl Back {
    pub fn random(rng: &mut StdRng) -> Self {
        let dtype = [DataType::BF16, DataType::F16, DataType::F32][rng.random_range(0..3)];
        let by_rank = rng.random();
        Self {
            dtype,
            output: if rng.random() { dtype } else { DataType::F32 },
            sum: match by_rank {
                true => CombineSum::ExpertByRank,
                false => CombineSum::Expert,
            },
            cast: None,
            weighted: by_rank || rng.random(),
            into: rng.random(),
        }
    }

    /// The same with rows that are bf16, and LogFMT-10 on the way.
    pub fn in_logfmt(self) -> Self {
        Self {
            dtype: DataType::BF16,
            output: match self.output {
                DataType::F32 => DataType::F32,
                _ => DataType::BF16,
            },
            cast: Some(CombineCast::LogFmt10),
            ..self
        }
    }

    fn made(self, case: &Case, owner: usize, expert: usize, from: (usize, usize)) -> Vec<f64> {
        let row = Came {
            at: 0,
            source: from.0,
            token: from.1,
            entry: Some(expert),
        };
        case.made(owner, &row, case.hidden, self.dtype)
    }

    /// What this rank's experts make of the rows that must have come; behind them, NaNs, of which nothing may come back.
    pub fn rows(self, rank: &Rank, case: &Case) -> Buffer {
        let want = received(case, rank.rank);
        let room = case.max_tokens * case.size;
        let mut rows = vec![f64::NAN; want.len() * room * case.hidden];
        for (expert, want) in want.iter().enumerate() {
            for (i, &[source, token, _]) in want.iter().enumerate() {
                let made = self.made(case, rank.rank, expert, (source as usize, token as usize));
                rows[(expert * room + i) * case.hidden..][..case.hidden].copy_from_slice(&made);
            }
        }
        let dims = [want.len(), room, case.hidden];
        rank.upload_bytes(self.dtype, &dims, &to_bytes(self.dtype, &rows))
    }

    /// Asserts what came back: to the last bit, or, if it was cast, as far as that can tell.
    pub fn check(self, rank: &Rank, case: &Case, got: &Buffer) {
        let (me, hidden) = (rank.rank, case.hidden);
        let weights = &case.weights.as_ref().unwrap()[me];
        // And what the greatest magnitudes of rows would add up to.
        let (mut exact, mut wide, mut most) = (vec![], vec![], vec![]);
        for token in 0..case.tokens(me) {
            // What is added by rank, and there by entry; or all by entry.
            let mut parts: BTreeMap<usize, Vec<Vec<f32>>> = BTreeMap::new();
            let mut sums_wide = vec![0.0; hidden];
            let mut greatest = 0.0;
            for entry in 0..case.k {
                let Some(slot) = case.slot(me, token, entry) else {
                    continue;
                };
                let (owner, expert) = case.owner(slot);
                let weight = weights[token * case.k + entry];
                let made = self.made(case, owner, expert, (me, token));
                let row = made.iter().fold(0.0, |most: f64, x| most.max(x.abs()));
                greatest += row * f64::from(weight.abs());
                let each = sums_wide.iter_mut().zip(&made);
                each.for_each(|(sum, x)| *sum += x * f64::from(weight));
                let products = made.into_iter().map(|x| x as f32 * weight).collect();
                let part = match self.sum {
                    CombineSum::ExpertByRank => owner,
                    _ => entry,
                };
                parts.entry(part).or_default().push(products);
            }
            let parts = parts.into_values().map(|part| match self.sum {
                CombineSum::ExpertByRank => added(part, hidden)
                    .into_iter()
                    .map(|x| rounded(self.dtype, x))
                    .collect(),
                _ => added(part, hidden),
            });
            exact.extend(added(parts, hidden));
            wide.extend(sums_wide);
            most.extend(vec![greatest; hidden]);
        }
        let rounded = |&x: &f32| f64::from(rounded(self.output, x));
        let want = to_bytes(self.output, &exact.iter().map(rounded).collect::<Vec<_>>());
        let got = rank.raw(got.view());
        let limit = match self.cast {
            None => {
                assert_bits(&got, &want, self.output, "sums");
                5e-6
            }
            Some(CombineCast::Fp8(_)) => 9e-4,
            Some(CombineCast::LogFmt10) => 1e-4,
        };
        let got = to_f64(self.output, &got);
        if wide.len() >= 1000 {
            let diff = diff(&got, &wide);
            assert!(diff < limit, "{diff:e} of {self:?}");
            return;
        }
        // A few sums may all nearly cancel: each is as near as its addends are.
        let near = if self.cast.is_some() {
            1.0 / 16.0
        } else {
            1.0 / 128.0
        };
        for ((got, want), most) in got.iter().zip(&wide).zip(&most) {
            let off = (got - want).abs();
            assert!(off <= near * most, "{got} for {want}, of {most}: {self:?}");
        }
    }

    pub fn params<'a>(self, rows: &'a Buffer, own: &'a Own) -> LowLatencyCombineParams<'a> {
        let here = self.sum == CombineSum::Expert;
        LowLatencyCombineParams {
            rows: rows.view(),
            sum: self.sum,
            cast: self.cast,
            weights: here.then(|| weights(own).view()),
        }
    }

    /// There and back, behind what was received.
    pub fn send<'d>(
        self,
        rank: &Rank,
        lease: &mut Lease<'_>,
        (own, case): (&Own, &Case),
        there: &'d LowLatencyDispatched<'_>,
    ) -> PendingCombine<'d> {
        let rows = self.rows(rank, case);
        let p = self.params(&rows, own);
        lease.low_latency_combine(there, p).unwrap()
    }

    pub fn receive(
        self,
        rank: &Rank,
        lease: &mut Lease<'_>,
        case: &Case,
        pending: PendingCombine<'_>,
    ) {
        let dims = [case.tokens(rank.rank), case.hidden];
        let mut d = rank.poisoned(self.output, &dims);
        let output = match self.into {
            true => Output::Into(d.view_mut()),
            false => Output::Allocate(self.output),
        };
        let given = pending.receive(lease, output).unwrap();
        assert_eq!(given.is_none(), self.into);
        self.check(rank, case, given.as_ref().unwrap_or(&d));
    }
}

/// The sums of all columns, in the order of the rows; 0 of none.
fn added(rows: impl IntoIterator<Item = Vec<f32>>, columns: usize) -> Vec<f32> {
    let add = |sum: Vec<f32>, row: Vec<f32>| sum.iter().zip(row).map(|(s, x)| s + x).collect();
    rows.into_iter()
        .reduce(add)
        .unwrap_or_else(|| vec![0.0; columns])
}

/// Weights that come beside a case.
pub fn weights(own: &Own) -> &Buffer {
    own.weights.as_ref().unwrap()
}
