//! Back-pressure: many calls in a row, of all modes and sizes, with a rank that is late or reads late, never overwrite a
//! row that somebody still reads.

use super::{Case, config};
use crate::{
    layer::{LoraKind, Spec},
    linear_reduce_scatter,
    suite::{Suite, World},
    themes::{modes, scatters},
};
use brigade_device::OverlapMode;
use rand::{Rng, rngs::StdRng};

const CALLS: usize = 200;
const CASES: usize = 12;

/// One call of the sequence, the same on every rank.
struct Step {
    case: usize,
    choice: Option<OverlapMode>,
    slow_rank: usize,
    before: u32,
    after: u32,
}

fn steps(rng: &mut StdRng, size: usize, choices: &[Option<OverlapMode>]) -> Vec<Step> {
    (0..CALLS)
        .map(|_| Step {
            case: rng.random_range(0..CASES),
            choice: choices[rng.random_range(0..choices.len())],
            slow_rank: rng.random_range(0..size),
            before: if rng.random() {
                rng.random_range(0..400)
            } else {
                0
            },
            after: if rng.random() {
                rng.random_range(0..400)
            } else {
                0
            },
        })
        .collect()
}

fn spec(rng: &mut StdRng, size: usize) -> Spec {
    let resident = rng.random_ratio(1, 3);
    let lora = if rng.random() {
        LoraKind::Mixed
    } else {
        LoraKind::None
    };
    Spec::ragged(rng, size).with(|s| (s.resident, s.lora) = (resident, lora))
}

fn many_calls(world: &World, choices: &[Option<OverlapMode>], twin: bool) {
    let mut rng = world.rng();
    let cases: Vec<_> = (0..CASES)
        .map(|_| {
            let spec = spec(&mut rng, world.size);
            // Where tiles are among the modes, every other case is one that they take.
            let tiles = choices.iter().find(|&&c| c == Some(OverlapMode::Tiles));
            let taken = tiles.copied().flatten().filter(|_| rng.random());
            Case::new(&mut rng, spec.taken_by(taken))
        })
        .collect();
    let twins: Vec<_> = (0..CASES)
        .map(|_| {
            let spec = Spec::ragged(&mut rng, world.size);
            linear_reduce_scatter::Case::new(&mut rng, spec)
        })
        .collect();
    let steps = steps(&mut rng, world.size, choices);
    world.run(&config(), move |rank| {
        for step in &steps {
            let slow = step.slow_rank == rank.rank;
            if slow {
                rank.dawdle(step.before);
            }
            let pause = if slow { step.after } else { 0 };
            let case = &cases[step.case];
            let plan = case.run_slowly(rank, step.choice, pause);
            super::assert_mode(&plan, case.spec.choice(step.choice), rank.size);
            if twin {
                let choice = step.choice.filter(|&mode| scatters(Some(mode)));
                twins[step.case].run(rank, choice);
            }
        }
    });
}

pub(super) fn add(suite: &mut Suite) {
    let all = modes(suite.backend().engines());
    for (name, choices) in all.clone() {
        suite.add(&format!("gather_linear/pressure/{name}"), move |world| {
            many_calls(world, &choices, false);
        });
    }
    let choices: Vec<_> = all.into_iter().flat_map(|(_, choices)| choices).collect();
    suite.add("gather_linear/pressure/mixed", move |world| {
        many_calls(world, &choices, true);
    });
}
