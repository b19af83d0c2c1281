//! Lengths that need many slices: of every operation, reduction and type, in place and beside.
//!
//! What ranks bring repeats itself after a number of elements that goes with no slice's, so millions of them take no more drawing and no more of
//! the oracle than thousands.

use super::{Case, Made, Place, What, all_ranks, at, config};
use crate::{
    all_reduce::OPS,
    layer::FLOATS,
    suite::{Suite, World},
};
use brigade_device::{DataType, HierarchicalPath, HierarchicalPlan, ReduceOp};
use rand::Rng;

/// Elements after which inputs repeat themselves: a prime.
const PERIOD: usize = 4099;

const LONG: usize = 1 << 20;

const LONGEST: usize = (1 << 24) + 3;

type Call = (What, (DataType, ReduceOp, Place));

/// As many slices as devices whose calls cost little would take.
const EIGHT: Option<HierarchicalPath> = Some(HierarchicalPath::Slices { count: 8 });

/// Calls of such a length, each by the path of many slices. Of what is scattered and gathered ranks have unequally many elements.
fn lengths(world: &World, shape: (usize, usize), len: usize, calls: &[Call]) {
    let mut rng = world.rng();
    let cases = calls.iter().map(|&(what, kind)| {
        let case = Case::random(&mut rng, shape, PERIOD, kind).repeated(len);
        // All that is left is the last one's.
        let mut rows: Vec<usize> = (1..world.size)
            .map(|_| rng.random_range(0..=len / world.size))
            .collect();
        rows.push(len - rows.iter().sum::<usize>());
        (case, what, rows)
    });
    let cases: Vec<_> = cases.collect();
    world.run(&all_ranks(), move |rank| {
        let mut config = config();
        config.comm.scratch_bytes = 1 << 20;
        let over = rank.join_machines(shape.0, &config);
        let held = || rank.device.memory_status().unwrap().held_bytes;
        let before = held();
        for (case, what, rows) in &cases {
            let plan = match what {
                What::AllReduce => case.run(rank, &over, EIGHT),
                _ => {
                    let made = Made {
                        what: *what,
                        op: case.op,
                        choice: EIGHT,
                        rows,
                    };
                    case.run_as(made, rank, &over)
                }
            };
            let is_cut = matches!(&plan, HierarchicalPlan::Slices(p) if p.slices > 2);
            assert!(is_cut || shape.0 == 1, "{plan}");
            // The calls' own memory, which stays for the next.
            let after = held();
            assert!(
                after - before <= config.staging_bytes as u64,
                "{before} to {after}"
            );
        }
    });
}

/// All reductions, each of another type and in another place; between three shapes, all of all types. And both operations that have
/// no place to choose.
fn long(shape: usize) -> Vec<Call> {
    use Place::{Beside, OverInput, Widened};
    let places = [Beside, OverInput, Widened, Beside];
    let sums = OPS.into_iter().enumerate().map(|(i, op)| {
        let dtype = FLOATS[(i + shape) % FLOATS.len()];
        (What::AllReduce, (dtype, op, places[(i + shape) % 4]))
    });
    let op = OPS[shape % OPS.len()];
    let dtype = FLOATS[(shape + 1) % FLOATS.len()];
    let others = [
        (What::ReduceScatter, (dtype, op, Beside)),
        (What::AllGather, (dtype, op, Beside)),
    ];
    sums.chain(others).collect()
}

/// Adds the contracts.
pub fn add(suite: &mut Suite) {
    use DataType::{BF16, F16, F32};
    use Place::{Beside, OverInput, Widened};
    use ReduceOp::{Avg, Max, Min, Sum};
    use What::{AllGather, AllReduce, ReduceScatter};
    let shapes = [
        (2, 1),
        (2, 2),
        (4, 1),
        (1, 4),
        (3, 2),
        (2, 4),
        (4, 2),
        (4, 4),
    ];
    for (i, shape) in shapes.into_iter().enumerate() {
        at(suite, shape, "long", move |world, shape| {
            lengths(world, shape, LONG, &long(i));
        });
    }
    let longest: [(_, &[Call]); 5] = [
        (
            (2, 1),
            &[
                (AllReduce, (BF16, Sum, OverInput)),
                (ReduceScatter, (F32, Min, Beside)),
            ],
        ),
        (
            (2, 2),
            &[
                (AllReduce, (F16, Max, Beside)),
                (AllGather, (BF16, Sum, Beside)),
            ],
        ),
        (
            (1, 4),
            &[
                (AllReduce, (F16, Avg, Beside)),
                (ReduceScatter, (BF16, Sum, Widened)),
            ],
        ),
        (
            (4, 1),
            &[
                (AllReduce, (F16, Min, OverInput)),
                (AllGather, (F16, Sum, Beside)),
            ],
        ),
        // Half a GiB of inputs.
        ((4, 4), &[(AllReduce, (BF16, Avg, OverInput))]),
    ];
    for (shape, calls) in longest {
        at(suite, shape, "longest", move |world, shape| {
            lengths(world, shape, LONGEST, calls);
        });
    }
}
