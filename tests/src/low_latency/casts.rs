//! Rows that are cast on the way there, or back.

use super::{
    FORMATS, all_round_trips,
    back::weights,
    by_rank,
    came::{Kept, check},
    config, drawn, here, send,
};
use crate::{
    experts::{self, casts::diff_of_blocks, own::Own},
    low_latency::back::Back,
    matrix::{to_bytes, to_f64},
    suite::World,
};
use brigade_device::{CombineCast, CombineSum, DataType, Fp8Cast, LowLatencyCombineParams, Output};

/// Rows that are cast on the way there.
pub fn there(world: &World) {
    let mut rng = world.rng();
    let mut cases = vec![];
    for format in FORMATS {
        for column_major in [false, true] {
            let (mut case, back) = drawn(&mut rng, world.size, (12, 400, 3, 7));
            case.cast = Some(Fp8Cast {
                format,
                column_major,
            });
            cases.push((case.with_rows(&mut rng), back));
        }
    }
    all_round_trips(world, cases);
}

/// Rows that are cast on the way back, and a last block of columns that is not whole.
pub fn back(world: &World) {
    let mut rng = world.rng();
    let sizes = [(12, 400, 3, 7), (2, 7168, 8, 32), (33, 16, 4, 9)];
    let mut cases = vec![];
    for (format, sizes) in FORMATS.into_iter().zip(sizes) {
        for by in [here, by_rank] {
            let (case, back) = by(drawn(&mut rng, world.size, sizes));
            let cast = Some(CombineCast::Fp8(format));
            cases.push((case, Back { cast, ..back }));
        }
    }
    for sizes in [(12, 128, 3, 7), (2, 7168, 8, 32)] {
        for by in [here, by_rank] {
            let (case, back) = by(drawn(&mut rng, world.size, sizes));
            cases.push((case, back.in_logfmt()));
        }
    }
    all_round_trips(world, cases);
}

/// Where experts make of rows what they were, sums are those of what was sent, as far as fp8 can tell.
pub fn echoed(world: &World) {
    let mut rng = world.rng();
    let hidden = [288, 2048, 2880, 7168, 400, 64];
    let sums = [CombineSum::Expert, CombineSum::ExpertByRank];
    let each = experts::casts::FORMATS
        .into_iter()
        .flat_map(|f| sums.map(|sum| (f, sum)));
    let cases: Vec<_> = each
        .zip(hidden)
        .enumerate()
        .map(|(i, (((format, limit), sum), hidden))| {
            let (mut case, _) = drawn(&mut rng, world.size, (6, hidden, 3, 7));
            case.cast = Some(Fp8Cast {
                format,
                column_major: i % 3 == 1,
            });
            case.dtype = [DataType::BF16, DataType::F32][i / 2 % 2];
            (case.with_rows(&mut rng).with_weights_above_0(), sum, limit)
        })
        .collect();
    world.run(&config(), move |rank| {
        let mut lease = rank.lease();
        let mut exchange = rank.low_latency();
        for (case, sum, limit) in &cases {
            let own = Own::of(rank, case);
            let slot = exchange.slots().0;
            let there = send(&mut lease, slot, (&own, case), true).unwrap();
            let there = there.receive(&mut lease).unwrap();
            check(rank, case, &there);
            let kept = Kept::of(&there);
            let rows = to_bytes(case.dtype, &kept.dequantized(rank, case));
            let rows = rank.upload_bytes(case.dtype, kept.rows.shape().dims(), &rows);
            let pending = lease.low_latency_combine(
                &there,
                LowLatencyCombineParams {
                    rows: rows.view(),
                    sum: *sum,
                    cast: None,
                    weights: (*sum == CombineSum::Expert).then(|| weights(&own).view()),
                },
            );
            let mut d = rank.poisoned(DataType::F32, &[case.tokens(rank.rank), case.hidden]);
            let output = Output::Into(d.view_mut());
            pending.unwrap().receive(&mut lease, output).unwrap();
            let got = to_f64(DataType::F32, &rank.raw(d.view()));
            let diff = diff_of_blocks(&got, &case.echoed(rank.rank, *sum), case.hidden);
            assert!(diff < *limit, "{diff:e} of {sum:?}, {:?}", case.cast);
        }
    });
}
