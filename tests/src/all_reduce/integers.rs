//! Sums of small whole numbers, which every type holds exactly, so that whatever is lost, doubled or misplaced shows.
//!
//! What is tried of lengths, types, algorithms, numbers of blocks and group sizes is a cover, not their product:
//!
//! - Every algorithm, type and group size at lengths from 512 to 131,073, odd ones too (`exact`).
//! - Where it takes no time to speak of, every algorithm at 1 Mi, 4 Mi - 1 and 4 Mi elements: each of one type, and all of all
//!   types over group sizes (`long`).
//! - There too, both pushes in 1 to 16 blocks, in as many as a plan takes, and in every fourth number in between: each of one
//!   type, and all numbers over four group sizes (`blocks`). A number of blocks is forced by `sm_budget`.
//! - Equal bits on all ranks, of all algorithms, in a thousand repeats each: `same_bits`, one directory up. Ten thousand
//!   replays: `replays/sums`.

use super::{Case, Place, pushing};
use crate::{backend::Rank, gather_linear::config, layer::FLOATS, matrix::to_bytes, suite::World};
use brigade_device::{AllReduceAlgorithm, Call, CommConfig, DataType, Plan, ReduceOp};
use rand::{Rng, rngs::StdRng};

/// Values from 1 to 15, and their sums.
fn case(rng: &mut StdRng, size: usize, dtype: DataType, len: usize) -> Case {
    /// A prime, so that no share or piece begins where the values come again.
    const PERIOD: usize = 4093;
    let mut values = || -> Vec<f32> {
        let some: Vec<_> = (0..PERIOD)
            .map(|_| rng.random_range(1i32..=15) as f32)
            .collect();
        some.into_iter().cycle().take(len).collect()
    };
    let inputs: Vec<Vec<f32>> = (0..size).map(|_| values()).collect();
    let sum = |i| inputs.iter().map(|input| f64::from(input[i])).sum();
    let sums: Vec<f64> = (0..len).map(sum).collect();
    let mut case = Case::new(dtype, ReduceOp::Sum, Place::Beside, inputs);
    case.want = to_bytes(dtype, &sums);
    case
}

fn run(world: &World, config: &CommConfig, cases: Vec<Case>, choice: Option<AllReduceAlgorithm>) {
    world.run(config, move |rank| {
        for case in &cases {
            case.run(rank, choice);
        }
    });
}

/// See above.
pub(super) fn exact(world: &World, choice: Option<AllReduceAlgorithm>) {
    const LENGTHS: [usize; 5] = [512, 777, 4096, 33_331, 131_073];
    let mut rng = world.rng();
    let all = FLOATS.into_iter().flat_map(|d| LENGTHS.map(|len| (d, len)));
    let cases = all.map(|(dtype, len)| case(&mut rng, world.size, dtype, len));
    run(world, &config(), cases.collect(), choice);
}

/// See above.
pub(super) fn long(world: &World, choice: Option<AllReduceAlgorithm>) {
    const LENGTHS: [usize; 3] = [1 << 20, (1 << 22) - 1, 1 << 22];
    let mut rng = world.rng();
    let types = FLOATS.into_iter().cycle().skip(world.size % FLOATS.len());
    let cases = types
        .zip(LENGTHS)
        .map(|(dtype, len)| case(&mut rng, world.size, dtype, len));
    let roomy = CommConfig {
        all_reduce_bytes: 8 << 20,
        scratch_bytes: 1 << 20,
        ..config()
    };
    run(world, &roomy, cases.collect(), choice);
}

/// Blocks that the plan launches.
fn planned(rank: &Rank, case: &Case, algorithm: AllReduceAlgorithm) -> u16 {
    let call = Call::AllReduce {
        elements: case.want.len() / case.dtype.bytes(),
        dtype: case.dtype,
        output: case.dtype,
        op: case.op,
        choice: Some(algorithm),
    };
    match rank.comm().explain(&call).unwrap() {
        Plan::AllReduce { launch, .. } => launch.blocks,
        other => panic!("{other:?}"),
    }
}

/// See above.
pub(super) fn blocks(world: &World) {
    /// As many elements for each rank keep more blocks busy than multiprocessors are, and some are left over.
    const SHARE: usize = (160 * 512 * 8) + 5;
    let mut rng = world.rng();
    let size = world.size;
    let algorithms = pushing(world.backend.engines());
    let cases = FLOATS.map(|dtype| case(&mut rng, size, dtype, SHARE * size));
    // An input passes at once.
    let roomy = CommConfig {
        all_reduce_bytes: 4 * SHARE * size * size,
        ..config()
    };
    world.run(&roomy.clone(), move |rank| {
        let launches = algorithms.iter().map(|&(_, a)| a);
        let launches = launches.flat_map(|a| cases.iter().map(move |case| (case, a)));
        let most = launches.map(|(case, a)| planned(rank, case, a)).min();
        let most = most.unwrap();
        let tried = |&n: &u16| n <= 16 || n == most || (usize::from(n) + size).is_multiple_of(4);
        for budget in (1..=most).filter(tried) {
            // Blocks have places of the communicator's, which the next one needs.
            rank.leave();
            rank.meet();
            let config = CommConfig {
                sm_budget: Some(budget),
                ..roomy.clone()
            };
            let joined = rank.join_another(&config);
            rank.swap_comm(&mut Some(joined));
            let case = &cases[usize::from(budget) % cases.len()];
            for &(name, algorithm) in &algorithms {
                assert_eq!(planned(rank, case, algorithm), budget, "{name}");
                case.run(rank, Some(algorithm));
            }
        }
    });
}
