//! All-reduces that push: their buffers go round, within a call and between calls, and a reset finds them as they are.

use super::{Case, Place, pushing};
use crate::{
    check::{assert_kind, expect_fault, expect_unsupported},
    faults::{AMPLE, impatient},
    gather_linear::config,
    layer::FLOATS,
    ops,
    suite::{Suite, World},
};
use brigade_device::{AllReduceAlgorithm, CommConfig, DataType, FaultKind, ReduceOp};
use brigade_plan::reason;
use rand::{Rng, rngs::StdRng};

fn sum(rng: &mut StdRng, size: usize, len: usize) -> Case {
    let places = [Place::OverInput, Place::Beside, Place::Widened];
    let place = places[rng.random_range(0..3)];
    let dtype = FLOATS[rng.random_range(0..3)];
    Case::random(rng, size, len, (dtype, ReduceOp::Sum, place))
}

/// Inputs much longer than a buffer: a call uses each of them many times, with no barrier in between.
fn in_pieces(world: &World, algorithm: AllReduceAlgorithm) {
    let mut rng = world.rng();
    let cases: Vec<_> = [20_001, 1, 3000, 7, 9999]
        .map(|len| sum(&mut rng, world.size, len))
        .into();
    let small = CommConfig {
        all_reduce_bytes: 1000,
        ..config()
    };
    world.run(&small, move |rank| {
        for case in &cases {
            case.run(rank, Some(algorithm));
        }
    });
}

/// Calls of all lengths and both algorithms in turn: each finds a buffer that one of another length was in.
fn in_turn(world: &World) {
    let mut rng = world.rng();
    let choices = pushing(world.backend.engines());
    let lens: Vec<_> = (0..200)
        .map(|_| match rng.random_range(0..3) {
            0 => rng.random_range(0..20),
            1 => rng.random_range(0..600),
            _ => rng.random_range(0..9000),
        })
        .collect();
    let cases: Vec<_> = lens
        .into_iter()
        .map(|len| {
            let choice = choices[rng.random_range(0..choices.len())].1;
            (sum(&mut rng, world.size, len), choice)
        })
        .collect();
    world.run(&config(), move |rank| {
        for (case, choice) in &cases {
            case.run(rank, Some(*choice));
        }
    });
}

/// After a call that one rank did not come to, what the others pushed lies in every buffer. After a reset nobody finds it.
fn after_a_reset(world: &World, algorithm: AllReduceAlgorithm) {
    let mut rng = world.rng();
    let culprit = rng.random_range(0..world.size);
    let mut draw = |len| sum(&mut rng, world.size, len);
    // At least one call before: the very first has a longer deadline. Each of the three buffers is the one that is lost, and
    // one of them again.
    let rounds: Vec<_> = (1..=4)
        .map(|before| {
            let before: Vec<_> = (0..before).map(|_| draw(3000)).collect();
            (before, draw(3000), [700, 3000, 50, 3000].map(&mut draw))
        })
        .collect();
    world.run(&impatient(), move |rank| {
        // The first call of all may take longer.
        ops::barrier().run(rank).result.unwrap();
        for (before, lost, after) in &rounds {
            for case in before {
                case.run(rank, Some(algorithm));
            }
            rank.meet();
            if rank.rank != culprit {
                let record = expect_fault(lost.try_run(rank, Some(algorithm)), "without a rank");
                assert_kind(&record, FaultKind::Timeout, "without a rank");
                assert_eq!(record.peer as usize, culprit, "{record}");
            }
            rank.meet();
            rank.comm().reset(AMPLE).unwrap();
            for case in after {
                case.run(rank, Some(algorithm));
            }
        }
    });
}

/// Without buffers a forced push is refused with a reason, and the plan takes another algorithm.
fn without_buffers(world: &World) {
    let mut rng = world.rng();
    let choices = pushing(world.backend.engines());
    let kind = (DataType::F32, ReduceOp::Sum, Place::Beside);
    let case = Case::random(&mut rng, world.size, 33, kind);
    let none = CommConfig {
        all_reduce_bytes: 0,
        ..config()
    };
    world.run(&none, move |rank| {
        for (name, choice) in &choices {
            let refused = case.try_run(rank, Some(*choice));
            assert_eq!(expect_unsupported(refused, name), reason::SCRATCH);
        }
        case.run(rank, None);
    });
}

/// Adds the contracts.
pub fn add(suite: &mut Suite) {
    let choices = pushing(suite.backend().engines());
    for &(name, algorithm) in &choices {
        suite.add(&format!("all_reduce/{name}/in_pieces"), move |world| {
            in_pieces(world, algorithm);
        });
        let trial = format!("all_reduce/{name}/after_a_reset");
        suite.add_from(2, &trial, move |world| after_a_reset(world, algorithm));
    }
    if !choices.is_empty() {
        suite.add("all_reduce/pushed/in_turn", in_turn);
        suite.add_from(2, "all_reduce/pushed/without_buffers", without_buffers);
    }
}
