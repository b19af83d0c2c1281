//! Products whose tiles wait: more than one tile in every direction, what they refuse, bits that do not depend on how rows
//! were cut, and ranks that go another way and say so.

use super::Case;
use crate::{
    backend::Rank,
    check::{assert_bits, assert_close, expect_unsupported, overlap_of},
    inject::Jitter,
    layer::{BiasKind, FLOATS, LoraKind, Spec},
    matrix::Matrix,
    suite::{Suite, World},
};
use brigade_device::{
    Activation, AllGatherLoraLinearParams, Buffer, Call, Chunk, CommConfig, DataType, Output,
    OverlapMode, OverlapPlan, ParallelMode, Result,
};
use brigade_plan::reason;
use rand::{Rng, rngs::StdRng};
use std::sync::Arc;

pub(crate) const TILES: Option<OverlapMode> = Some(OverlapMode::Tiles);

pub(crate) fn config() -> CommConfig {
    let mut config = CommConfig::new(ParallelMode::Tp);
    config.gather_bytes = 8 << 20;
    config.reduce_scatter_bytes = 8 << 20;
    config
}

/// A product of 16 Mi elements: of so many tiles that overlap pays on every GPU.
pub(crate) fn wide(s: &mut Spec) {
    let ranks = s.rows.len();
    s.rows.fill(256_usize.div_ceil(ranks));
    s.k.fill(8);
    s.n.fill(64 << 10);
}

/// Sizes on both sides of those of tiles.
pub(crate) fn large(rng: &mut StdRng, size: usize) -> Spec {
    let rows = [0, 1, 64, 127, 128, 129, 200, 256, 300];
    let dtype = [DataType::F16, DataType::BF16][rng.random_range(0..2)];
    Spec::even(rng, size)
        .with(|s| {
            for r in &mut s.rows {
                *r = rows[rng.random_range(0..rows.len())];
            }
            s.rows[0] = s.rows[0].max(1);
            s.k.fill(8 * rng.random_range(1..=90));
            s.n.fill(8 * rng.random_range(1..=70));
            (s.dtype, s.output, s.transpose) = (dtype, dtype, true);
            let kinds = [
                BiasKind::None,
                BiasKind::Row,
                BiasKind::OneRow,
                BiasKind::Full,
            ];
            s.bias = kinds[rng.random_range(0..kinds.len())];
            s.bias_type = FLOATS[rng.random_range(0..FLOATS.len())];
            let activations = [Activation::None, Activation::Relu, Activation::Silu];
            s.activation = activations[rng.random_range(0..activations.len())];
            s.resident = rng.random();
            let kinds = [
                LoraKind::None,
                LoraKind::Bare,
                LoraKind::One,
                LoraKind::Mixed,
            ];
            s.lora = kinds[rng.random_range(0..kinds.len())];
        })
        .taken_by(TILES)
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

/// Some rows, inner dimension and columns, so that `bytes` go from a rank to all others, which have room for them.
pub(crate) fn heavy(rng: &mut StdRng, size: usize, (k, n): (usize, usize)) -> (Spec, CommConfig) {
    const BYTES: usize = 9 << 20;
    let rows = (BYTES / 2 / k.max(n)).div_ceil(size - 1);
    let spec = Spec::even(rng, size).with(|s| {
        s.rows.fill(rows);
        s.rows[size - 1] += 1;
        s.k.fill(k);
        s.n.fill(n);
        (s.dtype, s.output, s.transpose) = (DataType::BF16, DataType::BF16, true);
    });
    let mut config = config();
    config.gather_bytes = 3 * BYTES;
    config.reduce_scatter_bytes = 3 * BYTES;
    (spec.taken_by(TILES), config)
}

/// So many that GPUs do not send them as they send few.
fn many_bytes(world: &World) {
    let mut rng = world.rng();
    let (spec, config) = heavy(&mut rng, world.size, (8192, 8));
    let case = Case::new(&mut rng, spec);
    world.run(&config, move |rank| case.run_forced(rank, TILES));
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

/// Own rows where no bulk copy can read them.
fn unaligned(rank: &Rank, x: &Matrix) -> Buffer {
    let elements = x.values.len();
    let mut room = rank.poisoned(x.dtype, &[elements + 1]);
    let data = rank.upload(x).reshape(&[elements]).unwrap();
    let mut inside = room.view_mut();
    let inside = inside.rows(1..elements + 1).unwrap();
    rank.device.copy(&rank.stream, inside, data.view()).unwrap();
    room.slice(1, elements).unwrap().reshape(&x.dims).unwrap()
}

/// What a rank multiplies its rows by, and where they lie.
pub(super) struct Own {
    pub(super) case: Case,
    /// By rank, whether the weight is stored as `[N, K]`.
    pub(super) transposed: Vec<bool>,
    pub(super) aligned: bool,
}

impl Own {
    /// Makes the call, and asserts its result, if there is one. Gives its plan, and what was explained beforehand.
    pub(super) fn call(
        &self,
        rank: &Rank,
        choice: Option<OverlapMode>,
    ) -> Result<[OverlapPlan; 2]> {
        let (case, me) = (&self.case, rank.rank);
        let layer = case.layers[me].upload(rank);
        let x = match self.aligned {
            true => rank.upload(&case.x[me]),
            false => unaligned(rank, &case.x[me]),
        };
        let mut d = rank.poisoned(case.spec.output, &[case.spec.total_rows(), case.spec.n[me]]);
        let params = AllGatherLoraLinearParams {
            transpose_weight: self.transposed[me],
            bias: layer.bias.as_ref().map(|b| b.view()),
            activation: case.spec.activation,
            output: Output::Into(d.view_mut()),
            choice,
            ..AllGatherLoraLinearParams::new(
                Chunk::Copy((&x).into()),
                &case.spec.rows,
                &layer.weight,
            )
        };
        let call = Call::GatherLinear(params.check(&rank.comm().group())?);
        let explained = rank.comm().explain(&call)?;
        let plan = rank.lease().all_gather_lora_linear(params)?.plan;
        rank.settle(Ok(()))?;
        let want = &case.want[me];
        assert_close(&rank.values(d.view()), want, case.spec.output, "own way");
        Ok([plan, explained].map(|plan| overlap_of(&plan).clone()))
    }
}

/// What a rank multiplies by that tiles do not take is refused by name where tiles are forced, before anything is done: the next
/// call finds everybody where they were.
fn operands(world: &World) {
    let mut rng = world.rng();
    let changes: [fn(&mut Spec); 3] = [|_| {}, |s| s.transpose = false, |s| s.n.fill(12)];
    let cases = changes.map(|change| {
        // All have rows, and so all are refused: a rank without any would wait for the others.
        let spec = Spec::even(&mut rng, world.size).with(|s| s.dtype = DataType::BF16);
        let spec = spec.taken_by(TILES).with(change);
        Own {
            transposed: vec![spec.transpose; world.size],
            // The first is changed in nothing else.
            aligned: spec.choice(TILES) != TILES,
            case: Case::new(&mut rng, spec),
        }
    });
    let spec = Spec::ragged(&mut rng, world.size).taken_by(TILES);
    let taken = Case::new(&mut rng, spec);
    world.run(&config(), move |rank| {
        for own in &cases {
            let moved = rank.comm().traffic().moved_bytes;
            let refused = own.call(rank, TILES);
            assert_eq!(
                expect_unsupported(refused, "forced"),
                reason::TILES_OPERANDS
            );
            assert_eq!(rank.comm().traffic().moved_bytes, moved, "moved something");
            own.call(rank, None).unwrap();
            taken.run_forced(rank, TILES);
        }
    });
}

/// Where nothing is forced, a rank that cannot have tiles goes chunk by chunk and says why; the others have tiles, and all results are
/// right.
fn one_rank_differs(world: &World) {
    let mut rng = world.rng();
    let size = world.size;
    let culprit = rng.random_range(0..size);
    let spec = Spec::even(&mut rng, size).with(|s| {
        wide(s);
        (s.dtype, s.output, s.transpose) = (DataType::BF16, DataType::BF16, true);
    });
    let mut layers = spec.layers(&mut rng, false);
    let other = spec.clone().with(|s| s.transpose = false);
    layers[culprit] = other.layers(&mut rng, false).swap_remove(culprit);
    let own = Own {
        transposed: layers.iter().map(|layer| layer.transpose).collect(),
        aligned: true,
        case: Case::with_layers(&mut rng, spec, Some(layers)),
    };
    let mut config = config();
    config.gather_bytes = size << 22;
    world.run(&config, move |rank| {
        let [plan, explained] = own.call(rank, None).unwrap();
        assert_eq!(
            (explained.mode, &explained.instead_of),
            (OverlapMode::Tiles, &None)
        );
        if rank.rank != culprit {
            assert_eq!(plan, explained);
            return;
        }
        let why = plan.instead_of.as_ref().map(|r| r.code);
        let chunked = OverlapMode::Chunked { pieces: 1 };
        assert_eq!((plan.mode, why), (chunked, Some(reason::TILES_OPERANDS)));
        assert_eq!(plan.order, explained.order);
    });
}

/// Tiles ask no hook: with one they are not to be had, on all ranks alike.
fn hooked(world: &World) {
    let mut rng = world.rng();
    let spec = Spec::ragged(&mut rng, world.size).taken_by(TILES);
    let own = Own {
        transposed: vec![true; world.size],
        aligned: true,
        case: Case::new(&mut rng, spec),
    };
    let jitter = Jitter::new(&mut rng, 1000, 10);
    world.run_injected(&config(), Arc::new(jitter), move |rank| {
        let refused = own.call(rank, TILES);
        assert_eq!(expect_unsupported(refused, "forced"), reason::NO_ENGINE);
        own.call(rank, None).unwrap();
    });
}

pub(super) fn add(suite: &mut Suite) {
    suite.add("gather_linear/tiles/operands", operands);
    suite.add_from(2, "gather_linear/tiles/one_rank_differs", one_rank_differs);
    if suite.backend().injects() {
        suite.add("gather_linear/tiles/hooked", hooked);
    }

    suite.add("gather_linear/tiles/many", many_tiles);
    suite.add_from(2, "gather_linear/tiles/many_bytes", many_bytes);
    suite.add("gather_linear/tiles/refused", refused);
    suite.add("gather_linear/tiles/bits", bits);
}
