//! What a communicator cannot overlap: the plan says why and the result is right all the same, and what was forced is
//! refused before anything is launched.

use super::tiles::wide;
use super::{Case, config};
use crate::{
    backend::Rank,
    check::{expect_invalid, expect_unsupported},
    layer::{LoraKind, Spec},
    suite::{Suite, World},
    themes::modes,
};
use brigade_device::{
    AllGatherLoraLinearParams, Chunk, CommConfig, DataType, OverlapMode, ParallelMode,
};
use brigade_plan::{MAX_PIECES, reason};
use rand::{Rng, rngs::StdRng};

/// Modes that can be forced to overlap.
fn overlapping(world: &World) -> Vec<OverlapMode> {
    modes(world.backend.engines())
        .into_iter()
        .flat_map(|(_, choices)| choices)
        .flatten()
        .filter(|&mode| mode != OverlapMode::Off)
        .collect()
}

/// Asserts that forcing any of the modes is refused with this reason.
fn refused(rank: &Rank, case: &Case, modes: &[OverlapMode], code: &str) {
    let layer = case.layers[rank.rank].upload(rank);
    let x = rank.upload(&case.x[rank.rank]);
    let runs = layer.runs();
    for &mode in modes {
        let mut lease = rank.lease();
        let chunk = Chunk::Copy((&x).into());
        let result = lease.all_gather_lora_linear(AllGatherLoraLinearParams {
            choice: Some(mode),
            runs: &runs,
            ..AllGatherLoraLinearParams::new(chunk, &case.spec.rows, &layer.weight)
        });
        assert_eq!(expect_unsupported(result, &format!("{mode}")), code);
    }
}

/// Off where nothing is forced, with this reason; refused where a mode is.
fn falls_back(world: &World, config: &CommConfig, specs: Vec<Spec>, code: &'static str) {
    let mut rng = world.rng();
    let cases: Vec<_> = specs.into_iter().map(|s| Case::new(&mut rng, s)).collect();
    let modes = overlapping(world);
    world.run(config, move |rank| {
        for case in &cases {
            let plan = case.run(rank, None);
            assert_eq!(plan.mode, OverlapMode::Off);
            let why = plan.instead_of.as_ref().map(|r| r.code);
            assert_eq!(why, Some(code));
            refused(rank, case, &modes, code);
            case.run_forced(rank, Some(OverlapMode::Off));
        }
    });
}

/// More rows than the user buffer takes, and more than the scratch memory takes at once.
fn capacity(world: &World) {
    let mut rng = world.rng();
    let mut config = config();
    config.gather_bytes = 512;
    config.scratch_bytes = 4096;
    let large = |rng: &mut StdRng| {
        let rank = rng.random_range(0..world.size);
        Spec::ragged(rng, world.size).with(|s| {
            s.rows[rank] += 60;
            s.k.fill(48);
            s.dtype = DataType::F32;
            s.lora = LoraKind::Mixed;
        })
    };
    let specs = vec![large(&mut rng), large(&mut rng)];
    falls_back(world, &config, specs, reason::CAPACITY);
}

/// Space for own rows is refused where all rows do not fit.
fn own_chunk_capacity(world: &World) {
    let mut config = config();
    config.gather_bytes = 1024;
    let case = Case::new(&mut world.rng(), Spec::ragged(&mut world.rng(), world.size));
    world.run(&config, move |rank| {
        let rows = vec![17; rank.size];
        let mut lease = rank.lease();
        let space = lease.own_chunk(&rows, 16, DataType::F32).map(drop);
        assert_eq!(expect_unsupported(space, "own_chunk"), reason::CAPACITY);
        for columns in [1 << 62, (1 << 62) + 4, usize::MAX / 4 + 2, usize::MAX] {
            for rows in [0, 1] {
                let rows = vec![rows; rank.size];
                let space = lease.own_chunk(&rows, columns, DataType::F32).map(drop);
                assert_eq!(expect_invalid(space, "own_chunk"), "columns", "{columns}");
            }
        }
        drop(lease);
        case.run(rank, None);
    });
}

/// Only tensor-parallel groups overlap.
fn group_modes(world: &World) {
    use ParallelMode::{Dp, DpAndTp, Ep, Eplb};
    for mode in [Dp, DpAndTp, Ep, Eplb] {
        let mut config = config();
        config.mode = mode;
        let spec = Spec::ragged(&mut world.rng(), world.size);
        falls_back(world, &config, vec![spec], reason::GROUP_MODE);
    }
}

/// Attention and feed-forward groups of the same ranks have user buffers of their own.
fn two_groups(world: &World) {
    let mut rng = world.rng();
    let mut modes = overlapping(world);
    // Tiles that wait are one group's: see `tiles/room`.
    modes.retain(|&mode| mode != OverlapMode::Tiles);
    let mut case = || {
        let spec = Spec::ragged(&mut rng, world.size);
        Case::new(&mut rng, spec)
    };
    let (attention, feed_forward) = (case(), case());
    world.run(&config(), move |rank| {
        let mut other = config();
        other.mode = ParallelMode::FfnTp;
        let mut other = Some(rank.join_another(&other));
        for &mode in modes.iter().cycle().take(12) {
            attention.run_forced(rank, Some(mode));
            rank.swap_comm(&mut other);
            feed_forward.run_forced(rank, Some(mode));
            rank.swap_comm(&mut other);
        }
    });
}

/// A mode that the device has not is refused by name where it is forced.
fn lacking(world: &World) {
    let mut rng = world.rng();
    let spec = Spec::even(&mut rng, world.size).taken_by(Some(OverlapMode::Tiles));
    let case = Case::new(&mut rng, spec);
    world.run(&config(), move |rank| {
        let layer = case.layers[rank.rank].upload(rank);
        let x = rank.upload(&case.x[rank.rank]);
        let mut lease = rank.lease();
        let result = lease.all_gather_lora_linear(AllGatherLoraLinearParams {
            choice: Some(OverlapMode::Tiles),
            transpose_weight: true,
            ..AllGatherLoraLinearParams::new(
                Chunk::Copy((&x).into()),
                &case.spec.rows,
                &layer.weight,
            )
        });
        assert_eq!(expect_unsupported(result, "tiles"), reason::NO_ENGINE);
        drop(lease);
        case.run(rank, None);
    });
}

/// A chunk is cut into 1 to [`MAX_PIECES`] pieces.
fn pieces(world: &World) {
    let spec = Spec::ragged(&mut world.rng(), world.size).with(|s| s.lora = LoraKind::None);
    let case = Case::new(&mut world.rng(), spec);
    world.run(&config(), move |rank| {
        let bad = [0, MAX_PIECES + 1, u16::MAX].map(|pieces| OverlapMode::Chunked { pieces });
        refused(rank, &case, &bad, reason::PIECES);
        let most = OverlapMode::Chunked { pieces: MAX_PIECES };
        case.run_forced(rank, Some(most));
    });
}

/// Parameters that cannot be right are refused on the rank, and the communicator goes on.
fn refusals(world: &World) {
    let case = Case::new(&mut world.rng(), Spec::even(&mut world.rng(), world.size));
    world.run(&config(), move |rank| {
        let spec = &case.spec;
        let layer = case.layers[rank.rank].upload(rank);
        let (own, k) = (spec.rows[rank.rank], spec.k[0]);
        let with = |rows: &[usize], own, k| {
            let x = rank.poisoned(spec.dtype, &[own, k]);
            let chunk = Chunk::Copy((&x).into());
            let params = AllGatherLoraLinearParams::new(chunk, rows, &layer.weight);
            let result = rank.lease().all_gather_lora_linear(params).map(drop);
            expect_invalid(result, "gather-linear")
        };
        assert_eq!(with(&spec.rows[1..], own, k), "rows_per_rank");
        assert_eq!(with(&spec.rows, own + 1, k), "chunk.shape");
        assert_eq!(with(&spec.rows, own, k + 1), "weight.shape");
        for much in [usize::MAX / 4, (1 << 62) - 1, (1 << 61) - 1] {
            let mut rows = spec.rows.clone();
            rows[(rank.rank + 1) % rank.size] = much;
            assert_eq!(with(&rows, own, k), "rows_per_rank", "{much}");
        }
        let x = rank.poisoned(spec.dtype, &[own, k]);
        for n in [usize::MAX, usize::MAX / 8] {
            let chunk = Chunk::Copy((&x).into());
            let params = AllGatherLoraLinearParams {
                total_n: Some(n),
                ..AllGatherLoraLinearParams::new(chunk, &spec.rows, &layer.weight)
            };
            let result = rank.lease().all_gather_lora_linear(params).map(drop);
            assert_eq!(expect_invalid(result, "total_n"), "total_n");
        }
        case.run(rank, None);
    });
}

/// Where nothing is forced, large calls overlap and small ones do not, and both say so.
fn auto(world: &World) {
    let mut rng = world.rng();
    let size = world.size;
    let mut with = |change: &dyn Fn(&mut Spec)| {
        let spec = Spec::even(&mut rng, size).with(|s| {
            change(s);
            (s.dtype, s.output) = (DataType::F32, DataType::F32);
        });
        Case::new(&mut rng, spec)
    };
    let of = |s: &mut Spec, rows: usize, k: usize| {
        s.rows.fill(rows);
        s.k.fill(k);
        s.n.fill(8);
    };
    let small = with(&|s| of(s, 1, 128));
    // By a product of many tiles, or by chunks that are long to copy.
    let large = match world.backend.engines().tiles {
        true => with(&|s| wide(s)),
        false => with(&|s| of(s, 64, 16 << 10)),
    };
    let mut config = config();
    config.gather_bytes = size << 22;
    world.run(&config, move |rank| {
        let plan = small.run(rank, None);
        let why = plan.instead_of.as_ref().map(|r| r.code);
        assert_eq!(
            (plan.mode, why),
            (OverlapMode::Off, Some(reason::TOO_SMALL))
        );
        let plan = large.run(rank, None);
        assert!(plan.mode != OverlapMode::Off, "{:?}", plan.instead_of);
        assert_eq!(plan.instead_of, None);
    });
}

pub(super) fn add(suite: &mut Suite) {
    suite.add_from(2, "gather_linear/limits/capacity", capacity);
    suite.add(
        "gather_linear/limits/own_chunk_capacity",
        own_chunk_capacity,
    );
    suite.add_from(2, "gather_linear/limits/group_modes", group_modes);
    suite.add("gather_linear/limits/two_groups", two_groups);
    suite.add("gather_linear/limits/refusals", refusals);
    let engines = suite.backend().engines();
    if engines.chunked {
        suite.add_from(2, "gather_linear/limits/pieces", pieces);
    }
    if !engines.tiles {
        suite.add("gather_linear/limits/lacking", lacking);
    }
    if engines.ring || engines.chunked {
        suite.add_from(2, "gather_linear/limits/auto", auto);
    }
}
