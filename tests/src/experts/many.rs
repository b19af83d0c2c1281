//! Many tokens, for which kernels have loops of their own: 4096 of a rank and more, and rows back that are both many and wide, for all
//! multiprocessors or a budget of them.

use super::{
    PUSHED, TRANSPORTS,
    back::Back,
    case::{By, Case},
    config,
    in_place::IN_PLACE,
    own::{Own, check},
    waits,
};
use crate::suite::{Suite, World};
use brigade_device::{Arrangement, CommConfig, Route, Transport};

const PUSHED_BACK: By = By::of(Transport::OneSided, Transport::Pushed);

/// More tokens of every rank than any other case has: 4096 are all that most stacks prefill at once. And once more the same ways.
fn there_and_back(
    world: &World,
    by: By,
    (tokens, hidden): (usize, usize),
    (config, rounds): (&CommConfig, u32),
) {
    let mut rng = world.rng();
    let cases = [
        Arrangement::BySource,
        Arrangement::ByExpert { alignment: 16 },
    ];
    let in_place = by.there == Some(Transport::InPlace);
    // Of rows by expert, fewer are pushed.
    let by_source = in_place || by.there == PUSHED;
    let cases: Vec<_> = cases
        .into_iter()
        .filter(|&arrangement| !by_source || arrangement == Arrangement::BySource)
        .map(|arrangement| {
            let mut case = Case::random(&mut rng, world.size, (tokens, hidden, 2, 8));
            case.arrangement = arrangement;
            let case = case.with_tokens(&mut rng, &vec![tokens; world.size]);
            let case = case.by(by).with_any_ids(&mut rng);
            let backs = match in_place {
                true => vec![Back::in_place(&mut rng, &case)],
                // Kernels for many wide rows are for such as have no weights.
                false => vec![
                    Back::random(&mut rng, &case),
                    Back::random(&mut rng, &case).without_weights(),
                ],
            };
            (case, backs)
        })
        .collect();
    world.run(config, move |rank| {
        for (case, backs) in (0..rounds).flat_map(|_| &cases) {
            let own = Own::of(rank, case);
            let mut lease = rank.lease();
            let got = own.dispatch(&mut lease, case).unwrap();
            check(rank, case, &got);
            for back in backs {
                match in_place {
                    true => back.check_there(rank, &mut lease, case, &got),
                    false => back.check(rank, &mut lease, case, &got.handle),
                }
            }
            if !in_place {
                let route = Route::Again(&got.handle);
                let again = own.dispatch_by(&mut lease, case, route).unwrap();
                check(rank, case, &again);
            }
        }
    });
}

/// Sums of what experts of a rank made of tokens that are many for a budget, of which each has several there: as many as are added at once, fewer and more.
fn sums(world: &World, config: &CommConfig) {
    let mut rng = world.rng();
    let cases = [(13, 17, 1), (32, 40, 16)].map(|(k, experts, alignment)| {
        let mut case = Case::random(&mut rng, world.size, (128, 1040, k, experts));
        case.arrangement = Arrangement::ByExpert { alignment };
        let tokens: Vec<_> = (0..world.size).map(|rank| 128 - rank).collect();
        let case = case.with_tokens(&mut rng, &tokens).by(PUSHED_BACK);
        let backs = [(); 3].map(|()| Back::random(&mut rng, &case).without_weights().of_ranks());
        (case, backs)
    });
    world.run(config, move |rank| {
        for (case, backs) in &cases {
            let own = Own::of(rank, case);
            let mut lease = rank.lease();
            let got = own.dispatch(&mut lease, case).unwrap();
            check(rank, case, &got);
            for back in backs {
                back.check(rank, &mut lease, case, &got.handle);
            }
        }
    });
}

pub fn add(suite: &mut Suite) {
    let in_place = [("in_place/", IN_PLACE)];
    for (how, by) in TRANSPORTS.into_iter().chain(in_place) {
        let pushes = suite.backend().engines().pushes_rows;
        if !suite.backend().worlds().contains(&2) || (by.there == PUSHED && !pushes) {
            continue;
        }
        // Of what is pushed there, the most that kernels are for.
        let tokens = if by.there == PUSHED { 8192 } else { 4096 };
        suite.add_at(2, &format!("experts/{how}many_tokens"), move |world| {
            there_and_back(world, by, (tokens, 8), (&config(), 1));
        });
    }
    // Kernels that push back have a loop of their own for rows that are both many and wide, by how many ranks there may be.
    for (size, name, rows) in [
        (2, "many_tokens", (4096, 8)),
        (2, "wide_rows", (1100, 1040)),
        (3, "wide_rows", (1100, 1040)),
        (4, "wide_rows", (1100, 1040)),
        (8, "wide_rows", (1100, 1040)),
    ] {
        if !suite.backend().worlds().contains(&size) {
            continue;
        }
        // For as many rows of f32 as come back for two experts of each token, and an eighth for what is beside them.
        let (usual, bytes) = (config(), size * rows.0 * 2 * rows.1 * 4);
        let roomy = CommConfig {
            all_reduce_bytes: usual.all_reduce_bytes.max(bytes + bytes / 8),
            ..usual
        };
        suite.add_at(size, &format!("experts/pushed_back/{name}"), move |world| {
            there_and_back(world, PUSHED_BACK, rows, (&roomy, 1));
        });
    }
    // Within a budget, blocks are as large as can be, and every buffer is used again. Ways that blocks tell each other fill no granule to its end.
    let few = CommConfig {
        dispatch_bytes: 8 << 20,
        sm_budget: Some(12),
        ..config()
    };
    let pushed = By::of(Transport::Pushed, Transport::Pushed);
    for (how, by, rows) in [
        ("pushed", pushed, (4099, 16)),
        ("in_place", IN_PLACE, (4099, 16)),
        ("pushed_back", PUSHED_BACK, (1100, 1040)),
    ] {
        let pushes = by.there != PUSHED || suite.backend().engines().pushes_rows;
        let worlds = suite.backend().worlds();
        for &size in worlds.iter().filter(|size| pushes && [2, 4].contains(size)) {
            let few = few.clone();
            suite.add_at(size, &format!("experts/{how}/budget"), move |world| {
                there_and_back(world, by, rows, (&few, 3));
            });
        }
    }
    for size in suite.backend().worlds() {
        if [2, 3].contains(&size) {
            suite.add_at(size, "experts/pushed_back/never_comes", |world| {
                waits::never_comes(world, PUSHED_BACK);
            });
        }
        let few = few.clone();
        if [2, 3, 4, 8].contains(&size) {
            suite.add_at(size, "experts/pushed_back/sums", move |world| {
                sums(world, &few);
            });
        }
    }
}
