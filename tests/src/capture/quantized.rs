//! A gather-linear of int8 rows as a graph, with what quantizes them in front: their scales travel with them.

use super::{Captured, DAYS, Subject};
use crate::{
    backend::Rank,
    check::assert_close,
    layer::Spec,
    matrix::{Matrix, to_f64},
    ops::tiles_or_a_piece,
    oracle,
    quantized::{Quantized, Uploaded, gather::params},
};
use brigade_device::{AllGatherLoraLinearParams, Buffer, DataType, Output, OverlapMode, QScheme};
use brigade_plan::Engines;
use rand::{Rng, rngs::StdRng};

struct Rows {
    spec: Spec,
    mode: OverlapMode,
    weights: Vec<Quantized>,
    /// Own rows of every rank on every day: whole numbers, the greatest of each row 127, so that they stay what they are.
    days: Vec<Vec<Matrix>>,
}

/// In tiles, where there are some.
pub(super) fn subject(rng: &mut StdRng, size: usize, engines: Engines) -> Box<dyn Subject> {
    let spec = Spec::ragged(rng, size).with(|s| {
        s.k.fill(16 * rng.random_range(1..4));
        s.n.fill(8 * rng.random_range(1..5));
        s.output = DataType::BF16;
    });
    let [k, n] = [spec.k[0], spec.n[0]];
    let int8 = QScheme::Int8PerToken;
    let weights = (0..size).map(|_| Quantized::random(rng, int8, [n, k], 1.0));
    let weights = weights.collect();
    let mut rows = |rows: usize| {
        let mut values: Vec<f64> = (0..rows * k)
            .map(|_| rng.random_range(-127i8..=127).into())
            .collect();
        for row in values.chunks_mut(k) {
            row[0] = 127.0;
        }
        Matrix {
            dtype: DataType::F32,
            dims: vec![rows, k],
            values,
        }
    };
    let days = (0..DAYS).map(|_| spec.rows.iter().map(|&own| rows(own)).collect());
    Box::new(Rows {
        days: days.collect(),
        mode: tiles_or_a_piece(engines),
        weights,
        spec,
    })
}

impl Rows {
    fn call(&self, rank: &Rank, x: &Buffer, d: &mut Buffer, weight: &Uploaded) {
        let int8 = QScheme::Int8PerToken;
        let made = rank.device.quantize(&rank.stream, x.view(), int8).unwrap();
        let mut lease = rank.lease();
        let call = AllGatherLoraLinearParams {
            transpose_weight: true,
            output: Output::Into(d.view_mut()),
            choice: Some(self.mode),
            ..params(&made, &self.spec.rows, weight)
        };
        lease.all_gather_lora_linear(call).unwrap();
    }

    fn buffers(&self, rank: &Rank) -> (Buffer, Buffer, Uploaded) {
        let (spec, me) = (&self.spec, rank.rank);
        let weight = Uploaded::Quantized(self.weights[me].upload(rank));
        let d = rank.poisoned(spec.output, &[spec.total_rows(), spec.n[me]]);
        (rank.upload(&self.days[0][me]), d, weight)
    }
}

impl Subject for Rows {
    fn capture(&self, rank: &Rank) -> Captured {
        let (x, d, weight) = self.buffers(rank);
        Captured::new(rank, x, d, |x, d| self.call(rank, x, d, &weight))
    }

    fn input(&self, rank: usize, day: usize) -> Vec<u8> {
        self.days[day][rank].bytes()
    }

    fn check(&self, rank: &Rank, day: usize, output: &[u8]) {
        let all = Matrix::stack(&self.days[day]);
        let weight = self.weights[rank.rank].dequantized();
        let want = oracle::multiply(&all, false, &weight, true);
        let got = to_f64(self.spec.output, output);
        assert_close(&got, &want, self.spec.output, "a replay of int8 rows");
    }

    fn eager(&self, rank: &Rank, day: usize) {
        let (mut x, mut d, weight) = self.buffers(rank);
        let bytes = self.input(rank.rank, day);
        let written = rank.device.write(&rank.stream, x.view_mut(), &bytes);
        written.unwrap();
        self.call(rank, &x, &mut d, &weight);
        self.check(rank, day, &rank.raw(d.view()));
    }
}
