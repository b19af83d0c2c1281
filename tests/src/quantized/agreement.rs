//! The plan and the device agree: what was planned to overlap does, what was refused is refused for the reason given, and
//! everything else is done without overlap.

use super::{SCHEMES, add_at_worlds, gather::Case};
use crate::{
    check::expect_unsupported,
    gather_linear::config,
    layer::{LoraKind, Spec},
    suite::{Suite, World},
    themes::modes,
};
use brigade_device::{CommConfig, OverlapMode, ParallelMode, Plan, QScheme};
use brigade_plan::reason;
use rand::{Rng, rngs::StdRng, seq::IndexedRandom};

const CONFIGS: usize = 6;
const CALLS: usize = 24;

/// A communicator that some calls fit and others do not.
fn any_config(rng: &mut StdRng) -> CommConfig {
    let mut config = config();
    config.gather_bytes = [0, 1, 300, 1000, 100_000][rng.random_range(0..5)];
    config.gather_scale_bytes = [0, 4, 8, 20, 100, 4096][rng.random_range(0..6)];
    config.mode = *[
        ParallelMode::Tp,
        ParallelMode::Tp,
        ParallelMode::FfnTp,
        ParallelMode::Dp,
    ]
    .choose(rng)
    .unwrap();
    config
}

fn any_call(rng: &mut StdRng, size: usize) -> Case {
    let spec = Spec::ragged(rng, size).with(|s| {
        let k = [0, 1, 8, 40, 130][rng.random_range(0..5)];
        s.k.fill(k);
        s.transpose = rng.random();
        s.lora = *[LoraKind::None, LoraKind::Mixed].choose(rng).unwrap();
        if rng.random_ratio(1, 6) {
            s.rows.fill(0);
        }
    });
    let scheme = *SCHEMES.choose(rng).unwrap();
    let weight = *[QScheme::None, QScheme::Int8PerToken, QScheme::Fp8PerTensor]
        .choose(rng)
        .unwrap();
    Case::new(rng, spec, scheme, weight)
}

fn agrees(world: &World) {
    let mut rng = world.rng();
    let mut choices: Vec<_> = modes(world.backend.engines())
        .into_iter()
        .flat_map(|m| m.1)
        .collect();
    choices.extend([0, 16, 17].map(|pieces| Some(OverlapMode::Chunked { pieces })));
    for _ in 0..CONFIGS {
        let calls: Vec<_> = (0..CALLS)
            .map(|_| {
                (
                    any_call(&mut rng, world.size),
                    *choices.choose(&mut rng).unwrap(),
                )
            })
            .collect();
        world.run(&any_config(&mut rng), move |rank| {
            for (case, choice) in &calls {
                let (result, explained) = case.call(rank, *choice);
                // The plan goes by the call; the weight, C and adapters are each rank's own, and alike here.
                let tiles = *choice == Some(OverlapMode::Tiles);
                match explained {
                    Ok(Plan::GatherLinear(_)) if tiles && result.is_err() => {
                        let code = expect_unsupported(result, "refused");
                        assert_eq!(code, reason::TILES_OPERANDS);
                    }
                    Ok(Plan::GatherLinear(plan)) => assert_eq!(result.unwrap(), plan),
                    Ok(other) => panic!("{other:?} for a gather-linear"),
                    Err(why) => assert_eq!(expect_unsupported(result, "refused"), why.code),
                }
            }
        });
    }
}

pub(super) fn add(suite: &mut Suite) {
    add_at_worlds(suite, "quantized_gather/agreement", agrees);
}
