//! The way back: sums of what experts made.

use super::{
    case::{Case, rounded},
    own::{Leased, f32s},
};
use crate::{
    backend::Rank,
    check::assert_bits,
    matrix::{to_bytes, to_f64},
};
use brigade_device::{
    Arrangement, Buffer, CombineParams, CombineSum, DataType, Dispatched, Handle, Output, Shape,
};
use rand::{Rng, rngs::StdRng};
use std::sync::Arc;

/// What sums are written over.
#[derive(Clone, Copy, Debug)]
pub enum Over {
    /// Received rows, from the first on.
    Rows,
    /// The first bias, element by element where types are the same.
    Bias,
    /// What lies a row behind it.
    NextOfBias,
}

impl Over {
    pub const ALL: [Self; 3] = [Self::Rows, Self::Bias, Self::NextOfBias];
}

/// Where rows are, which experts have made.
enum Place {
    Any,
    /// Where they came.
    There(Buffer),
    /// In one allocation behind a bias, and so are sums.
    Shared(Over),
}

/// Everybody's experts make something of each row, and sums of it come back.
pub struct Back {
    sum: CombineSum,
    dtype: DataType,
    output: DataType,
    hidden: usize,
    biases: usize,
    /// Whether weights go back, too.
    weights: bool,
}

impl Back {
    pub fn random(rng: &mut StdRng, case: &Case) -> Self {
        let by_expert = matches!(case.arrangement, Arrangement::ByExpert { .. });
        let dtype = [DataType::BF16, DataType::F16, DataType::F32][rng.random_range(0..3)];
        Self {
            sum: match (by_expert, rng.random()) {
                (false, _) => CombineSum::Rank,
                (true, false) => CombineSum::Expert,
                (true, true) => CombineSum::ExpertByRank,
            },
            dtype,
            output: if rng.random() { dtype } else { DataType::F32 },
            hidden: case.hidden,
            biases: rng.random_range(0..=2),
            weights: true,
        }
    }

    /// The same without weights that go back.
    pub fn without_weights(self) -> Self {
        Self {
            weights: false,
            ..self
        }
    }

    /// The same with sums of each rank's experts.
    pub fn of_ranks(self) -> Self {
        Self {
            sum: CombineSum::ExpertByRank,
            ..self
        }
    }

    /// What can be made where rows lie that stay in place.
    pub fn in_place(rng: &mut StdRng, case: &Case) -> Self {
        let any = Self::random(rng, case);
        Self {
            output: if rng.random() {
                case.dtype
            } else {
                DataType::F32
            },
            dtype: case.dtype,
            weights: false,
            ..any
        }
    }

    /// Combines, and checks every bit.
    pub fn check(&self, rank: &Rank, lease: &mut impl Leased, case: &Case, handle: &Handle) {
        self.check_from(rank, lease, case, (handle, Place::Any));
    }

    /// The same, with sums over what they are made of.
    pub fn check_over(
        &self,
        rank: &Rank,
        lease: &mut impl Leased,
        case: &Case,
        (handle, over): (&Handle, Over),
    ) {
        self.check_from(rank, lease, case, (handle, Place::Shared(over)));
    }

    /// The same, with what experts make written to the place of the rows that came.
    pub fn check_there(&self, rank: &Rank, lease: &mut impl Leased, case: &Case, got: &Dispatched) {
        self.check_from(
            rank,
            lease,
            case,
            (&got.handle, Place::There(got.rows.clone())),
        );
    }

    fn check_from(
        &self,
        rank: &Rank,
        lease: &mut impl Leased,
        case: &Case,
        (handle, place): (&Handle, Place),
    ) {
        let (me, tokens) = (rank.rank, case.tokens(rank.rank));
        let (came, _) = case.received(me);
        let capacity = case.capacity(me);
        // Where there is no row, NaNs: nothing of them may come back.
        let mut rows = vec![f64::NAN; capacity * self.hidden];
        let per_row = handle.parts().ids.shape().len() / capacity.max(1);
        let mut weights = vec![f32::NAN; capacity * per_row];
        let back =
            |source: usize, token: usize, entry: usize| (source * 7 + token * 3 + entry + 1) as f32;
        for row in &came {
            let made = case.made(me, row, self.hidden, self.dtype);
            rows[row.at * self.hidden..][..self.hidden].copy_from_slice(&made);
            for (i, entry) in row.entry.map_or(0..case.k, |e| e..e + 1).enumerate() {
                weights[row.at * per_row + i] = back(row.source, row.token, entry);
            }
        }
        let shape = handle.shape(self.hidden).unwrap();
        let rows = rank.upload_bytes(self.dtype, shape.dims(), &to_bytes(self.dtype, &rows));
        let copied = |from: &Buffer, mut to: Buffer| {
            let (device, on) = (&rank.device, &rank.stream);
            device.copy(on, to.view_mut(), from.view()).unwrap();
            to
        };
        let ids = handle.parts().ids.shape();
        let weights = rank.upload_bytes(DataType::F32, ids.dims(), bytemuck::cast_slice(&weights));
        let bias = |n: usize| -> Vec<f64> {
            (0..tokens * self.hidden)
                .map(|i| ((i * 5 + n + me) % 23) as f64 / 8.0 - 1.0)
                .collect()
        };
        let biases: Vec<_> = (0..self.biases).map(bias).collect();
        let mut uploaded: Vec<_> = biases
            .iter()
            .map(|b| {
                rank.upload_bytes(self.dtype, &[tokens, self.hidden], &to_bytes(self.dtype, b))
            })
            .collect();
        let matrix = [tokens, self.hidden];
        let (rows, mut d) = match place {
            Place::Any => (rows, rank.poisoned(self.output, &matrix)),
            Place::There(there) => (copied(&rows, there), rank.poisoned(self.output, &matrix)),
            Place::Shared(over) => {
                let row_bytes = self.hidden * self.dtype.bytes();
                let (d_bytes, bias_bytes) = (tokens * self.hidden * 4, tokens * row_bytes);
                let bytes = bias_bytes + rows.bytes() + row_bytes + d_bytes;
                let all = rank.poisoned(DataType::U8, &[bytes]);
                let at = |byte, dtype, shape| {
                    Buffer::at(Arc::clone(all.storage()), byte, dtype, shape).unwrap()
                };
                if let Some(bias) = uploaded.first_mut() {
                    *bias = copied(bias, at(0, self.dtype, bias.shape()));
                }
                let start = match over {
                    Over::Rows => bias_bytes,
                    Over::Bias => 0,
                    Over::NextOfBias => row_bytes,
                };
                (
                    copied(&rows, at(bias_bytes, self.dtype, rows.shape())),
                    at(start, self.output, Shape::new(&matrix).unwrap()),
                )
            }
        };
        let views: Vec<_> = uploaded.iter().map(Buffer::view).collect();
        let combined = lease
            .combine(CombineParams {
                rows: rows.view(),
                handle,
                sum: self.sum,
                weights: self.weights.then(|| weights.view()),
                biases: &views,
                output: Output::Into(d.view_mut()),
                waits: None,
                choice: case.by.back,
            })
            .unwrap();
        let (exact, wide) = case.combined(
            me,
            (self.sum, self.dtype, self.output, self.hidden),
            &biases,
        );
        let rounded = |&x: &f32| f64::from(rounded(self.output, x));
        let want = to_bytes(self.output, &exact.iter().map(rounded).collect::<Vec<_>>());
        let got = rank.raw(d.view());
        assert_bits(&got, &want, self.output, "combined rows");
        // Of few values one that cancels may weigh as much as all others.
        let few = wide.len() < 4096;
        let limit = match (self.dtype, few) {
            (DataType::F32, false) => 1e-12,
            (DataType::F32, true) => 1e-10,
            (_, false) => 5e-6,
            (_, true) => 1e-3,
        };
        let diff = diff(&to_f64(self.output, &got), &wide);
        assert!(diff < limit, "{diff:e} of {:?}", self.dtype);
        let mut want = vec![0f32; tokens * case.k];
        for token in 0..tokens {
            for entry in 0..case.k {
                if case.slot(me, token, entry).is_some() {
                    want[token * case.k + entry] = back(me, token, entry);
                }
            }
        }
        let got = combined.weights.map(|w| f32s(rank, &w));
        assert_eq!(got, self.weights.then_some(want), "weights that come back");
    }
}

/// 1 - 2 sum(xy) / sum(x^2 + y^2)
pub fn diff(x: &[f64], y: &[f64]) -> f64 {
    let (mut both, mut squares) = (0.0, 0.0);
    for (x, y) in x.iter().zip(y) {
        both += 2.0 * x * y;
        squares += x * x + y * y;
    }
    if squares == 0.0 {
        0.0
    } else {
        1.0 - both / squares
    }
}
