//! Values that norms must treat with care: rows of zeros, infinities, NaNs of any payload, squares that overflow or vanish.

use super::{Case, NORMED};
use crate::{
    all_reduce::{SPECIAL, uneven},
    gather_linear::config,
    layer::FLOATS,
    suite::World,
};
use brigade_device::AllReduceAlgorithm;
use rand::Rng;

pub(super) fn values(world: &World, choice: Option<AllReduceAlgorithm>) {
    /// Its square is beyond f32's largest.
    const LARGE: f32 = 1e20;
    const HIDDEN: usize = 36;
    const EPS: [f32; 3] = [0.0, 1e-6, 1e30];
    let special: Vec<f32> = SPECIAL.into_iter().chain([LARGE]).collect();
    let mut rng = world.rng();
    let mut cases = vec![];
    // Any two of a type, a scheme and an eps meet.
    for (d, dtype) in FLOATS.into_iter().enumerate() {
        for (n, scheme) in NORMED.into_iter().enumerate() {
            let (kind, eps) = ((dtype, scheme), EPS[(d + n) % EPS.len()]);
            // On the first rank rows of each value alone, and rows with one of it among others; beside the former, all
            // other ranks have zeros, and in the end everybody has a row of each zero.
            let mut draw = |rank: usize| -> Vec<f32> {
                let mut rows = vec![];
                for &x in &special {
                    rows.extend([if rank == 0 { x } else { 0.0 }; HIDDEN]);
                    let mut row = [0.0; HIDDEN].map(|_| uneven(&mut rng));
                    if rank == 0 {
                        row[rng.random_range(0..HIDDEN)] = x;
                    }
                    rows.extend(row);
                }
                rows.extend([0.0; HIDDEN]);
                rows.extend([-0.0; HIDDEN]);
                rows
            };
            let inputs = (0..world.size).map(&mut draw).collect();
            let residual = draw(1);
            let weight = (0..HIDDEN).map(|j| match special.get(j) {
                Some(&x) => x,
                None => uneven(&mut rng),
            });
            let others = [residual, weight.collect()];
            cases.push(Case::new(
                kind,
                [2 * special.len() + 2, HIDDEN],
                inputs,
                others,
                eps,
            ));
        }
    }
    world.run(&config(), move |rank| {
        for case in &cases {
            case.run(rank, choice);
        }
    });
}
