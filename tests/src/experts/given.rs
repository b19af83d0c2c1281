//! Rows that are fp8 before they are sent: their scales travel beside them, and what comes is, to the bit, what a cast on the way gives.

use super::{
    arrangements,
    case::{Beside, By, Case},
    config,
    own::{Own, check},
};
use crate::suite::World;
use brigade_device::{Buffer, DataType, DispatchParams, Fp8Cast, QScheme, ScaleFormat};
use rand::Rng;

/// By each arrangement that the transport has, from each type that is cast.
pub fn scales(world: &World, by: By) {
    let mut rng = world.rng();
    let cases: Vec<Case> = arrangements(by)
        .map(|arrangement| {
            // Of which the last block is not whole.
            let mut case = Case::random(&mut rng, world.size, (12, 400, 3, 7));
            case.arrangement = arrangement;
            case.dtype = [DataType::BF16, DataType::F16, DataType::F32][rng.random_range(0..3)];
            case.cast = Some(Fp8Cast {
                format: ScaleFormat::F32,
                column_major: false,
            });
            case.beside.truncate(DispatchParams::MOST_BESIDE - 1);
            case.with_rows(&mut rng).by(by)
        })
        .collect();
    world.run(&config(), move |rank| {
        for case in &cases {
            let own = Own::of(rank, case);
            let cast = own.dispatch(&mut rank.lease(), case).unwrap();
            let cast = [&cast.rows, cast.scales.as_ref().unwrap()].map(|b| rank.raw(b.view()));
            let rows = own.rows.view();
            let quantized = rank
                .device
                .quantize(&rank.stream, rows, QScheme::Fp8PerTokenBlock)
                .unwrap();
            let of_ranks = |part: &Buffer| rank.share(&rank.raw(part.view()));
            let mut given = Case {
                dtype: DataType::F8E4M3,
                rows: of_ranks(quantized.kernel()),
                cast: None,
                ..case.clone()
            };
            let scales = Beside {
                dtype: DataType::F32,
                width: case.hidden.div_ceil(Fp8Cast::BLOCK),
                of_ranks: of_ranks(quantized.scales()),
            };
            given.beside.insert(0, scales);
            let got = Own::of(rank, &given).dispatch(&mut rank.lease(), &given);
            let got = got.unwrap();
            check(rank, &given, &got);
            let parts = [&got.rows, &got.beside[0]].map(|b| rank.raw(b.view()));
            let each = [case.hidden, given.beside[0].row_bytes()];
            for row in case.received(rank.rank).0 {
                for ((got, cast), each) in parts.iter().zip(&cast).zip(each) {
                    let at = row.at * each..(row.at + 1) * each;
                    assert_eq!(got[at.clone()], cast[at], "{row:?}, {each} bytes");
                }
            }
        }
    });
}
