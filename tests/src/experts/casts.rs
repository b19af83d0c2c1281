//! Rows that are cast on the way there: what comes, and what comes back of it, is what was sent, as far as fp8 can tell.

use super::{
    ARRANGEMENTS,
    back::diff,
    case::{By, Case, size_of_block},
    config,
    own::{Leased, Own, check},
};
use crate::{
    backend::Rank,
    matrix::{to_bytes, to_f32, to_f64},
    quantized::fp8,
    suite::World,
};
use brigade_device::{
    Arrangement, CombineParams, CombineSum, DataType, Dispatched, Fp8Cast, Output, ScaleFormat,
};

/// Formats of scales, and how far rows and sums of them may be from what they would be without a cast, by [`diff`].
pub const FORMATS: [(ScaleFormat, f64); 3] = [
    (ScaleFormat::F32, 9e-4),
    (ScaleFormat::PowerOfTwo, 7e-3),
    (ScaleFormat::Ue8m0, 7e-3),
];

/// Columns of rows: whole blocks of 128, and a part of the last.
const HIDDEN: [usize; 6] = [400, 288, 2048, 2880, 7168, 64];

/// There and back in every format, scales by rows and by columns, rows of tokens and of experts.
pub fn casts(world: &World, by: By) {
    let mut rng = world.rng();
    let mut hidden = HIDDEN.into_iter().cycle();
    let mut cases = vec![];
    for (format, limit) in FORMATS {
        for (i, column_major) in [false, true].into_iter().enumerate() {
            for dtype in [DataType::BF16, DataType::F32] {
                let hidden = hidden.next().unwrap_or(400);
                let mut case = Case::random(&mut rng, world.size, (12, hidden, 3, 7));
                (case.dtype, case.arrangement) = (dtype, ARRANGEMENTS[2 * i].1);
                case.cast = Some(Fp8Cast {
                    format,
                    column_major,
                });
                let case = case.with_rows(&mut rng).with_weights_above_0();
                cases.push((case.by(by), limit));
            }
        }
    }
    world.run(&config(), move |rank| {
        for (case, limit) in &cases {
            let mut lease = rank.lease();
            let got = Own::of(rank, case).dispatch(&mut lease, case).unwrap();
            check(rank, case, &got);
            check_cast(rank, case, &got, *limit);
            check_echo(rank, &mut lease, case, &got, *limit);
        }
    });
}

/// How far numbers are from what they should be, where blocks of very different sizes count the same.
pub fn diff_of_blocks(got: &[f64], want: &[f64], hidden: usize) -> f64 {
    let sized = |values: &[f64]| -> Vec<f64> {
        let each = values.iter().enumerate();
        each.map(|(i, x)| x / size_of_block(i % hidden)).collect()
    };
    diff(&sized(got), &sized(want))
}

/// The numbers of a rank's rows, as they lie; NaNs where none came.
fn dequantized(rank: &Rank, case: &Case, got: &Dispatched) -> Vec<f64> {
    let cast = case.cast.unwrap();
    let (_, per_row) = cast.scales(case.hidden);
    let (values, scales) = (
        rank.raw(got.rows.view()),
        rank.raw(got.scales.as_ref().unwrap().view()),
    );
    let capacity = case.capacity(rank.rank);
    let scale = |at: usize, block: usize| match (cast.format, cast.column_major) {
        (ScaleFormat::Ue8m0, major) => {
            let i = if major {
                (block / 4 * capacity + at) * 4 + block % 4
            } else {
                at * per_row + block
            };
            2f64.powi(i32::from(scales[i]) - 127)
        }
        (_, major) => {
            let i = if major {
                block * capacity + at
            } else {
                at * per_row + block
            };
            f64::from(to_f32(DataType::F32, &scales)[i])
        }
    };
    let mut rows = vec![f64::NAN; capacity * case.hidden];
    for row in case.received(rank.rank).0 {
        for block in 0..case.hidden.div_ceil(128) {
            let s = scale(row.at, block);
            if cast.format != ScaleFormat::F32 {
                assert_eq!(s.log2().fract(), 0.0, "{s} is no power of two");
            }
            let columns = block * 128..case.hidden.min((block + 1) * 128);
            for i in columns.map(|column| row.at * case.hidden + column) {
                rows[i] = fp8(values[i]) * s;
            }
        }
    }
    rows
}

/// What was cast is what was sent.
pub fn check_cast(rank: &Rank, case: &Case, got: &Dispatched, limit: f64) {
    let rows = dequantized(rank, case, got);
    let bytes = case.hidden * case.dtype.bytes();
    let (mut came, mut sent) = (vec![], vec![]);
    for row in case.received(rank.rank).0 {
        came.extend(&rows[row.at * case.hidden..][..case.hidden]);
        let original = &case.rows[row.source][row.token * bytes..][..bytes];
        sent.extend(to_f64(case.dtype, original));
    }
    let diff = diff_of_blocks(&came, &sent, case.hidden);
    assert!(diff < limit, "{diff:e} of {:?}", case.cast);
}

/// Where experts make of rows what they were, sums are those of what was sent.
pub fn check_echo(rank: &Rank, lease: &mut impl Leased, case: &Case, got: &Dispatched, limit: f64) {
    let rows = to_bytes(case.dtype, &dequantized(rank, case, got));
    let shape = got.handle.shape(case.hidden).unwrap();
    let rows = rank.upload_bytes(case.dtype, shape.dims(), &rows);
    let sums: &[CombineSum] = match case.arrangement {
        Arrangement::ByExpert { .. } => &[CombineSum::Expert, CombineSum::ExpertByRank],
        _ => &[CombineSum::Rank],
    };
    for &sum in sums {
        let mut d = rank.poisoned(DataType::F32, &[case.tokens(rank.rank), case.hidden]);
        lease
            .combine(CombineParams {
                rows: rows.view(),
                handle: &got.handle,
                sum,
                weights: None,
                biases: &[],
                output: Output::Into(d.view_mut()),
                waits: None,
                choice: case.by.back,
            })
            .unwrap();
        let got = to_f64(DataType::F32, &rank.raw(d.view()));
        let diff = diff_of_blocks(&got, &case.echoed(rank.rank, sum), case.hidden);
        assert!(diff < limit, "{diff:e} of {sum:?}, {:?}", case.cast);
    }
}
