//! Tiles of the twin: more than one in every direction, in pieces, D in what it is made of, and what they refuse.

use super::{Case, Lies};
use crate::{
    check::{assert_bits, expect_unsupported},
    gather_linear::tiles::{TILES, config, heavy, large},
    layer::Spec,
    suite::{Suite, World},
};
use brigade_device::{Activation, LoraLinearReduceScatterParams};
use brigade_plan::{reason, twin_pieces};
use rand::{Rng, rngs::StdRng};

fn drawn(rng: &mut StdRng, size: usize) -> Case {
    let spec = large(rng, size).with(|s| s.resident = false);
    Case::new(rng, spec)
}

/// Ranks come in any order.
fn many_tiles(world: &World) {
    let mut rng = world.rng();
    let cases: Vec<_> = (0..8).map(|_| drawn(&mut rng, world.size)).collect();
    let late: Vec<usize> = cases
        .iter()
        .map(|_| rng.random_range(0..world.size))
        .collect();
    world.run(&config(), move |rank| {
        for (case, &late) in cases.iter().zip(&late) {
            if rank.rank == late {
                rank.dawdle(200);
            }
            case.run(rank, TILES);
        }
    });
}

/// A rank with so many rows that parts travel in pieces, of which some are whole tiles and some are not, and ranks with few or none.
fn pieces(world: &World) {
    let mut rng = world.rng();
    let cases: Vec<_> = (0..3)
        .map(|_| {
            let most = rng.random_range(0..world.size);
            let rows = rng.random_range(1024..1100);
            // Parts of all ranks must fit an owner's half.
            let columns = if world.size > 4 { 8 } else { 24 };
            let spec = large(&mut rng, world.size).with(|s| {
                s.rows.iter_mut().for_each(|r| *r %= 130);
                s.rows[most] = rows;
                s.n.fill(columns);
                s.resident = false;
            });
            assert_eq!(twin_pieces(&spec.rows), 2);
            Case::new(&mut rng, spec)
        })
        .collect();
    world.run(&config(), move |rank| {
        for case in &cases {
            case.run(rank, TILES);
        }
    });
}

/// Parts of so many bytes that GPUs do not send them as they send few.
fn many_bytes(world: &World) {
    let mut rng = world.rng();
    let (spec, config) = heavy(&mut rng, world.size, (8, 8192));
    let case = Case::new(&mut rng, spec.with(|s| s.resident = false));
    world.run(&config, move |rank| {
        case.run(rank, TILES);
    });
}

/// D may lie in what it is made of: the same bits come out as in memory of its own.
fn inside(world: &World) {
    let mut rng = world.rng();
    let cases: Vec<_> = (0..4).map(|_| drawn(&mut rng, world.size)).collect();
    world.run(&config(), move |rank| {
        for case in &cases {
            let apart = case.bytes(rank, TILES, Lies::BehindX);
            let inside = case.bytes(rank, TILES, Lies::InX);
            assert_bits(&inside, &apart, case.spec.output, "D in x");
        }
    });
}

/// A weight that is stored as `[K, N]` is refused by name where tiles are forced, and the next call finds everybody where they were.
fn operands(world: &World) {
    let mut rng = world.rng();
    let spec = Spec::ragged(&mut rng, world.size).with(|s| s.activation = Activation::Silu);
    let spec = spec.taken_by(TILES);
    let case = Case::new(&mut rng, spec);
    world.run(&config(), move |rank| {
        let spec = &case.spec;
        let x = rank.upload(&case.x[rank.rank]);
        let weight = rank.poisoned(spec.dtype, &[spec.k[rank.rank], spec.n[0]]);
        let refused = rank
            .lease()
            .lora_linear_reduce_scatter(LoraLinearReduceScatterParams {
                choice: TILES,
                ..LoraLinearReduceScatterParams::new(&x, &spec.rows, &weight)
            });
        assert_eq!(
            expect_unsupported(refused, "forced"),
            reason::TILES_OPERANDS
        );
        case.run(rank, TILES);
    });
}

pub(super) fn add(suite: &mut Suite) {
    suite.add("linear_reduce_scatter/tiles/operands", operands);
    suite.add("linear_reduce_scatter/tiles/many", many_tiles);
    suite.add("linear_reduce_scatter/tiles/pieces", pieces);
    suite.add_from(2, "linear_reduce_scatter/tiles/many_bytes", many_bytes);
    suite.add("linear_reduce_scatter/tiles/inside", inside);
}
