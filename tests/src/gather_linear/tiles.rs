//! Products whose tiles wait: more than one tile in every direction, what they refuse, and bits that do not depend on how rows
//! were cut.

use super::Case;
use crate::{
    backend::Rank,
    check::{assert_bits, expect_unsupported},
    layer::{BiasKind, LoraKind, Spec},
    linear_reduce_scatter as twin,
    matrix::Matrix,
    suite::{Suite, World},
};
use brigade_device::{
    AllGatherLoraLinearParams, Chunk, CommConfig, DataType, OverlapMode, ParallelMode,
};
use brigade_plan::reason;
use rand::{Rng, rngs::StdRng};

const TILES: Option<OverlapMode> = Some(OverlapMode::Tiles);

fn config() -> CommConfig {
    let mut config = CommConfig::new(ParallelMode::Tp);
    config.gather_bytes = 8 << 20;
    config.reduce_scatter_bytes = 8 << 20;
    config
}

/// Sizes on both sides of those of tiles.
fn large(rng: &mut StdRng, size: usize) -> Spec {
    let rows = [0, 1, 64, 127, 128, 129, 200, 256, 300];
    let dtype = [DataType::F16, DataType::BF16][rng.random_range(0..2)];
    Spec::even(rng, size).with(|s| {
        for r in &mut s.rows {
            *r = rows[rng.random_range(0..rows.len())];
        }
        s.rows[0] = s.rows[0].max(1);
        s.k.fill(8 * rng.random_range(1..=90));
        s.n.fill(8 * rng.random_range(1..=70));
        (s.dtype, s.output, s.bias_type, s.transpose) = (dtype, dtype, dtype, true);
        s.bias = [BiasKind::None, BiasKind::Row, BiasKind::OneRow][rng.random_range(0..3)];
        s.resident = rng.random();
        let kinds = [
            LoraKind::None,
            LoraKind::Bare,
            LoraKind::One,
            LoraKind::Mixed,
        ];
        s.lora = kinds[rng.random_range(0..kinds.len())];
    })
}

fn many_tiles(world: &World) {
    let mut rng = world.rng();
    let cases: Vec<_> = (0..8)
        .map(|_| {
            let spec = large(&mut rng, world.size);
            Case::new(&mut rng, spec)
        })
        .collect();
    world.run(&config(), move |rank| {
        for case in &cases {
            case.run_forced(rank, TILES);
        }
    });
}

/// The same for the twin, whose tiles are written at their owners'.
fn many_tiles_of_twin(world: &World) {
    let mut rng = world.rng();
    let cases: Vec<_> = (0..8)
        .map(|_| {
            let spec = large(&mut rng, world.size).with(|s| s.resident = false);
            twin::Case::new(&mut rng, spec)
        })
        .collect();
    world.run(&config(), move |rank| {
        for case in &cases {
            case.run(rank, TILES);
        }
    });
}

/// Rows of which no tiles can be made are refused by name, and multiplied in another mode where nothing is forced.
fn refused(world: &World) {
    let mut rng = world.rng();
    let dtypes = [DataType::F32, DataType::BF16];
    let cases = dtypes.map(|dtype| {
        let spec = Spec::even(&mut rng, world.size).with(|s| {
            s.k.fill(12);
            (s.dtype, s.output, s.bias_type) = (dtype, dtype, dtype);
        });
        Case::new(&mut rng, spec)
    });
    world.run(&config(), move |rank| {
        for case in &cases {
            let layer = case.layers[rank.rank].upload(rank);
            let x = rank.upload(&case.x[rank.rank]);
            let mut lease = rank.lease();
            let chunk = Chunk::Copy((&x).into());
            let result = lease.all_gather_lora_linear(AllGatherLoraLinearParams {
                choice: TILES,
                ..AllGatherLoraLinearParams::new(chunk, &case.spec.rows, &layer.weight)
            });
            assert_eq!(expect_unsupported(result, "tiles"), reason::TILES);
            drop(lease);
            case.run(rank, None);
        }
    });
}

/// D's bits are the same however the same rows are cut, and whoever has them.
fn bits(world: &World) {
    let mut rng = world.rng();
    let size = world.size;
    let (rows, k, n) = (150 * size, 8 * 77, 8 * 33);
    let all = Matrix::random(&mut rng, DataType::BF16, &[rows, k], 1.0);
    let weight = Matrix::random(&mut rng, DataType::BF16, &[n, k], 1.0);
    let cuts: Vec<Vec<usize>> = (0..4)
        .map(|_| {
            let mut ends: Vec<_> = (1..size).map(|_| rng.random_range(0..=rows)).collect();
            ends.sort_unstable();
            ends.push(rows);
            let starts = [0].into_iter().chain(ends.clone());
            ends.iter()
                .zip(starts)
                .map(|(end, start)| end - start)
                .collect()
        })
        .collect();
    world.run(&config(), move |rank| {
        let results: Vec<_> = cuts
            .iter()
            .map(|cut| product(rank, &all, &weight, cut))
            .collect();
        for (cut, result) in cuts.iter().zip(&results) {
            assert_bits(result, &results[0], DataType::BF16, &format!("cut {cut:?}"));
        }
    });
}

/// The bytes of D.
fn product(rank: &Rank, all: &Matrix, weight: &Matrix, cut: &[usize]) -> Vec<u8> {
    let first = cut[..rank.rank].iter().sum();
    let own = all.slice(first, cut[rank.rank]);
    let (x, weight) = (rank.upload(&own), rank.upload(weight));
    let mut lease = rank.lease();
    let result = lease.all_gather_lora_linear(AllGatherLoraLinearParams {
        transpose_weight: true,
        choice: TILES,
        ..AllGatherLoraLinearParams::new(Chunk::Copy((&x).into()), cut, &weight)
    });
    let d = result.unwrap().d.unwrap();
    rank.raw(d.view())
}

pub(super) fn add(suite: &mut Suite) {
    suite.add("gather_linear/tiles/many", many_tiles);
    suite.add("linear_reduce_scatter/tiles/many", many_tiles_of_twin);
    suite.add("gather_linear/tiles/refused", refused);
    suite.add("gather_linear/tiles/bits", bits);
}
