//! Rows to their experts and back: bit for bit what was sent, in the order that the arrangement promises; and sums in the order of ranks
//! or experts.
//!
//! The sizes cover what the contract lists, not every combination of it: tokens 0, 1, 3, 128 and up to 1025; k 1, 2, 4, 6, 8, 10, 22, 32;
//! experts 8 to 1024, multiples of the ranks and not; hidden 8 to 8192. Every value is in one case at least, with each arrangement. 4096
//! tokens of a rank are in `many`, by source and by expert.
//!
//! Beside rows are none to four other things, of several types and odd widths.

pub mod back;
pub mod case;
pub mod casts;
mod chain;
mod gathered;
mod given;
mod in_place;
mod known;
mod limits;
mod many;
mod memory;
pub mod own;
mod routes;
mod totals;
pub mod waits;

use crate::{
    backend::Rank,
    check::expect_unsupported,
    suite::{Suite, World},
};
use back::{Back, Over};
use brigade_device::{Arrangement, CommConfig, DataType, ParallelMode, Route, Transport};
use brigade_plan::Engines;
use case::{By, Case, Ids, Where};
use own::{Own, check};
use rand::{Rng, rngs::StdRng};
use std::sync::Arc;

const ARRANGEMENTS: [(&str, Arrangement); 4] = [
    ("dense", Arrangement::Dense),
    ("by_source", Arrangement::BySource),
    ("by_expert", Arrangement::ByExpert { alignment: 1 }),
    ("by_aligned_expert", Arrangement::ByExpert { alignment: 16 }),
];

/// What is tried by each transport.
type Contract = fn(&World, By);

/// How names of trials begin, and the transports that they force.
const TRANSPORTS: [(&str, By); 6] = [
    ("", By::of(Transport::OneSided, Transport::OneSided)),
    ("pushed/", By::of(Transport::Pushed, Transport::Pushed)),
    ("fifo/", By::of(Transport::Fifo, Transport::Fifo)),
    ("gather/", By::of(Transport::Gather, Transport::Gather)),
    (
        "ragged/",
        By {
            ids: Ids::Ragged,
            ..By::of(Transport::OneSided, Transport::OneSided)
        },
    ),
    (
        "padded/",
        By {
            ids: Ids::Padded,
            ..By::of(Transport::Gather, Transport::OneSided)
        },
    ),
];

const PUSHED: Option<Transport> = Some(Transport::Pushed);

/// How rows may lie by a transport.
pub fn arrangements(by: By) -> impl Iterator<Item = Arrangement> {
    let in_place = by.there == Some(Transport::InPlace);
    let all = ARRANGEMENTS.into_iter().map(|(_, arrangement)| arrangement);
    all.filter(move |&arrangement| !in_place || arrangement == Arrangement::BySource)
}

/// All transports of a device for rows that lie so, with their names.
pub fn transports(
    engines: Engines,
    arrangement: Arrangement,
) -> impl Iterator<Item = (&'static str, Transport)> {
    let all = [
        ("one_sided", Transport::OneSided),
        ("pushed", Transport::Pushed),
        ("gather", Transport::Gather),
        ("fifo", Transport::Fifo),
        ("in_place", Transport::InPlace),
    ];
    let can = move |by: Transport| match by {
        Transport::Pushed => engines.pushes_rows,
        Transport::InPlace => arrangement == Arrangement::BySource,
        Transport::OneSided | Transport::Gather | Transport::Fifo => true,
    };
    let can = move |by| engines.dispatches && can(by);
    all.into_iter().filter(move |t| can(t.1))
}

/// Tokens of a rank at most, hidden, k, experts.
const SIZES: [(usize, usize, usize, usize); 10] = [
    (1, 2048, 8, 128),
    (3, 7168, 8, 256),
    (128, 288, 4, 60),
    (512, 8, 1, 8),
    (33, 2880, 6, 64),
    (17, 5120, 22, 1024),
    (5, 8192, 2, 9),
    (9, 64, 32, 100),
    (1025, 16, 10, 11),
    // More slots than a block knows at once.
    (40, 16, 6, 5000),
];

/// What has memory for all that is dispatched here.
pub fn config() -> CommConfig {
    CommConfig {
        dispatch_bytes: 2 << 20,
        combine_bytes: 4 << 20,
        fifo_bytes: 1 << 20,
        scratch_bytes: 4096,
        message_bytes: 4096,
        gather_bytes: 0,
        reduce_scatter_bytes: 0,
        all_reduce_bytes: 64 << 20,
        region_bytes: 0,
        ..CommConfig::new(ParallelMode::Ep)
    }
}

/// There and back again.
fn round_trip(rank: &Rank, case: &Case, back: &Back) {
    let own = Own::of(rank, case);
    let mut lease = rank.lease();
    let got = own.dispatch(&mut lease, case).unwrap();
    check(rank, case, &got);
    back.check(rank, &mut lease, case, &got.handle);
}

/// Rows of others the same ways as those of the first.
fn same_ways(rank: &Rank, first: &Case, others: &[&Case]) {
    let mut lease = rank.lease();
    let there = Own::of(rank, first).dispatch(&mut lease, first).unwrap();
    for case in others {
        let route = Route::Again(&there.handle);
        let own = Own::of(rank, case);
        check(
            rank,
            case,
            &own.dispatch_by(&mut lease, case, route).unwrap(),
        );
    }
}

/// Most tokens of a rank, columns, experts of a token, and experts of what is drawn for stress.
pub(crate) const DRAWN: (usize, usize, usize, usize) = (19, 8 * 4, 4, 19);

/// Any small round trip, for stress.
pub fn draw(rng: &mut StdRng, size: usize) -> impl Fn(&Rank) + Send + Sync + use<> {
    let (max_tokens, hidden, k, experts) = DRAWN;
    let sizes = (
        rng.random_range(0..=max_tokens),
        8 * rng.random_range(1..=hidden / 8),
        rng.random_range(1..=k),
        rng.random_range(1..=experts),
    );
    let mut case = Case::random(rng, size, sizes);
    case.arrangement = ARRANGEMENTS[rng.random_range(0..ARRANGEMENTS.len())].1;
    let mut any = || TRANSPORTS[rng.random_range(0..TRANSPORTS.len())].1;
    let (there, back) = (any(), any().back);
    let case = case.by(By { back, ..there }).with_any_ids(rng);
    let back = Back::random(rng, &case);
    move |rank| round_trip(rank, &case, &back)
}

fn arranged(world: &World, arrangement: Arrangement, by: By) {
    let mut rng = world.rng();
    // Every other one, but by the two transports that the plan takes.
    let all = [TRANSPORTS[0].1, TRANSPORTS[1].1].contains(&by);
    let sizes = SIZES.into_iter().enumerate();
    let cases: Vec<(Case, Back)> = sizes
        .filter(|(i, _)| all || i % 2 == world.size % 2)
        .map(|(i, mut sizes)| {
            if by.there == PUSHED {
                // The most that kernels are for.
                if matches!(arrangement, Arrangement::ByExpert { .. }) {
                    sizes.0 = sizes.0.min(1024);
                }
                sizes.3 = sizes.3.min(1024);
            }
            let mut case = Case::random(&mut rng, world.size, sizes);
            case.arrangement = arrangement;
            case.dtype = [DataType::BF16, DataType::F16, DataType::I8][rng.random_range(0..3)];
            if !(case.hidden * case.dtype.bytes()).is_multiple_of(16) {
                case.dtype = DataType::BF16;
            }
            // What goes one way may come back another.
            let back = if i % 4 == 3 { None } else { by.back };
            let by = By { back, ..by };
            let case = case.with_rows(&mut rng).by(by).with_any_ids(&mut rng);
            let back = Back::random(&mut rng, &case);
            (case, back)
        })
        .collect();
    world.run(&config(), move |rank| {
        cases
            .iter()
            .for_each(|(case, back)| round_trip(rank, case, back));
    });
}

/// Room for more rows than come, nobody's rows, all to one rank, and no weights.
fn extremes(world: &World, by: By) {
    let mut rng = world.rng();
    let size = world.size;
    let mut cases = vec![];
    for (_, arrangement) in ARRANGEMENTS {
        let mut case = Case::random(&mut rng, size, (20, 32, 3, 2 * size + 1));
        case.arrangement = arrangement;
        if arrangement != Arrangement::BySource {
            case.room = Some(20 * 3 * size + 16 * 4);
        }
        let full = case.clone().with_tokens(&mut rng, &vec![20; size]);
        let none = case.clone().with_tokens(&mut rng, &vec![0; size]);
        let mut to_one = full.clone();
        to_one.ids.iter_mut().for_each(|ids| ids.fill(0));
        let mut nowhere = full.clone();
        nowhere.ids.iter_mut().for_each(|ids| ids.fill(-1));
        cases.extend([full, none, to_one, nowhere].map(|mut case| {
            case.by = by;
            let case = case.with_any_ids(&mut rng);
            let back = Back::random(&mut rng, &case);
            (case, back)
        }));
    }
    let mut bare = Case::random(&mut rng, size, (6, 16, 2, 5));
    bare.weights = None;
    let bare = bare.by(by);
    let back = Back::random(&mut rng, &bare);
    cases.push((bare, back));
    world.run(&config(), move |rank| {
        cases
            .iter()
            .for_each(|(case, back)| round_trip(rank, case, back));
    });
}

/// Experts in several slots, slots of none, and ids that are ranks.
fn placements(world: &World, by: By) {
    let mut rng = world.rng();
    let mut cases = vec![];
    for (_, arrangement) in ARRANGEMENTS {
        let per_rank = 3;
        let all = (per_rank * world.size) as i32;
        let mut case = Case::random(&mut rng, world.size, (30, 16, 4, 7));
        case.arrangement = arrangement;
        let mut slots: Vec<i32> = (0..7 * 3).map(|_| rng.random_range(0..all)).collect();
        // One expert has one copy, and one none.
        slots[3..6].copy_from_slice(&[1, -1, -1]);
        slots[6..9].fill(-1);
        case.places = Where::Map { slots, per_rank };
        let mut ranks = case.clone();
        ranks.places = Where::Ranks;
        for case in [case, ranks] {
            let tokens: Vec<usize> = (0..world.size).map(|_| rng.random_range(1..=30)).collect();
            let case = case.with_tokens(&mut rng, &tokens).by(by);
            let case = case.with_any_ids(&mut rng);
            let back = Back::random(&mut rng, &case);
            cases.push((case, back));
        }
    }
    world.run(&config(), move |rank| {
        cases
            .iter()
            .for_each(|(case, back)| round_trip(rank, case, back));
    });
}

/// What does not fit goes in pieces, or waits until there is room in a queue, and what no piece holds is refused.
fn pieces(world: &World, by: By) {
    let mut rng = world.rng();
    let cases = ARRANGEMENTS.map(|(_, arrangement)| {
        let mut case = Case::random(&mut rng, world.size, (50, 64, 3, 10));
        case.arrangement = arrangement;
        let case = case.by(by);
        let back = Back::random(&mut rng, &case);
        (case, back)
    });
    let config = CommConfig {
        dispatch_bytes: 1000 * world.size,
        combine_bytes: 1024 * world.size,
        fifo_bytes: 1000 * world.size,
        ..config()
    };
    world.run(&config, move |rank| {
        for (case, back) in &cases {
            round_trip(rank, case, back);
            same_ways(rank, case, &[case]);
            let mut wide = case.clone();
            wide.hidden = 1024;
            wide.rows = wide
                .ids
                .iter()
                .map(|ids| vec![1; ids.len() / 3 * 2048])
                .collect();
            let refused = Own::of(rank, &wide).dispatch(&mut rank.lease(), &wide);
            let code = expect_unsupported(refused, "a row that no piece holds");
            assert_eq!(code, brigade_plan::reason::CAPACITY);
        }
    });
}

/// Queues of so many entries, and of so many bytes, as the configuration says.
fn queue_settings(world: &World) {
    let by = By::of(Transport::Fifo, Transport::Fifo);
    let mut rng = world.rng();
    let cases = ARRANGEMENTS.map(|(_, arrangement)| {
        let mut case = Case::random(&mut rng, world.size, (30, 64, 3, 10));
        case.arrangement = arrangement;
        let case = case.by(by);
        let back = Back::random(&mut rng, &case);
        (case, back)
    });
    let cases = Arc::new(cases);
    for (depth, entry_bytes) in [
        (Some(1), Some(512)),
        (Some(2), Some(832)),
        (Some(64), None),
        (None, Some(1984)),
    ] {
        let config = CommConfig {
            fifo_bytes: (128 << 10) * world.size,
            fifo_depth: depth,
            fifo_entry_bytes: entry_bytes,
            ..config()
        };
        let cases = Arc::clone(&cases);
        world.run(&config, move |rank| {
            for (case, back) in &*cases {
                round_trip(rank, case, back);
            }
        });
    }
}

/// Sums over the rows and biases that they are made of have the bits of those that lie apart, also where rows go back in pieces.
fn over_inputs(world: &World, by: By) {
    let mut rng = world.rng();
    let cases = ARRANGEMENTS.map(|(_, arrangement)| {
        let mut case = Case::random(&mut rng, world.size, (50, 64, 3, 10));
        case.arrangement = arrangement;
        let case = case.by(by).with_any_ids(&mut rng);
        let back = Back::random(&mut rng, &case);
        (case, back)
    });
    let config = CommConfig {
        combine_bytes: 1024 * world.size,
        ..config()
    };
    world.run(&config, move |rank| {
        for (case, back) in &cases {
            let own = Own::of(rank, case);
            let mut lease = rank.lease();
            let got = own.dispatch(&mut lease, case).unwrap();
            for over in Over::ALL {
                back.check_over(rank, &mut lease, case, (&got.handle, over));
            }
        }
    });
}

/// Other rows the same ways.
fn again(world: &World, by: By) {
    let mut rng = world.rng();
    let cases = ARRANGEMENTS.map(|(_, arrangement)| {
        let mut case = Case::random(&mut rng, world.size, (40, 24, 3, 9));
        case.arrangement = arrangement;
        let case = case.by(by).with_any_ids(&mut rng);
        let mut other = case.clone();
        other.dtype = DataType::F32;
        let other = other.with_rows(&mut rng).with_any_beside(&mut rng);
        (case, other)
    });
    world.run(&config(), move |rank| {
        for (case, other) in &cases {
            same_ways(rank, case, &[other, case]);
        }
    });
}

/// Adds all trials.
pub fn add(suite: &mut Suite) {
    if !suite.backend().engines().dispatches {
        return;
    }
    chain::add(suite);
    in_place::add(suite);
    for (how, by) in TRANSPORTS {
        if by.there == PUSHED && !suite.backend().engines().pushes_rows {
            continue;
        }
        for (name, arrangement) in ARRANGEMENTS {
            suite.add(&format!("experts/{how}{name}"), move |world| {
                arranged(world, arrangement, by);
            });
        }
        let contracts: [(&str, Contract); 12] = [
            ("extremes", extremes),
            ("placements", placements),
            ("pieces", pieces),
            ("again", again),
            ("over_inputs", over_inputs),
            ("casts", casts::casts),
            ("given_scales", given::scales),
            ("overflow", limits::overflow),
            ("captured", limits::captured),
            ("never_launched", limits::never_launched),
            ("totals", totals::totals),
            ("memory", memory::at_once),
        ];
        for (name, contract) in contracts {
            if (by.there, name) == (PUSHED, "pieces") {
                continue;
            }
            suite.add(&format!("experts/{how}{name}"), move |world| {
                contract(world, by);
            });
        }
        waits::add(suite, &format!("experts/{how}waits"), move |world| {
            waits::waits(world, by);
        });
    }
    waits::add(suite, "experts/in_place/waits", |world| {
        waits::waits(world, in_place::IN_PLACE);
    });
    if suite.backend().worlds().contains(&1) && matches!(suite.backend().routes(), Ok(Some(_))) {
        suite.add_at(1, "experts/routes", routes::of_any_group);
        suite.add_at(1, "experts/known", known::of_any_group);
        suite.add_at(1, "experts/routes_refused", routes::of_no_group);
    }
    for (name, there) in [
        ("one_sided", Transport::OneSided),
        ("gather", Transport::Gather),
    ] {
        suite.add(&format!("experts/gathered/{name}"), move |world| {
            gathered::mismatch(world, there);
        });
    }
    many::add(suite);
    suite.add("experts/in_place/totals", |world| {
        totals::totals(world, in_place::IN_PLACE);
    });
    suite.add("experts/in_place/given_scales", |world| {
        given::scales(world, in_place::IN_PLACE);
    });
    suite.add("experts/statistics", totals::of_all_ranks);
    suite.add("experts/fifo/settings", queue_settings);
    suite.add("experts/gathered/refused", gathered::refused);
    suite.add("experts/not_capturable", limits::not_capturable);
    suite.add("experts/refused", limits::refused);
    suite.add("experts/without_halves", limits::without_halves);
    suite.add("experts/other_communicator", limits::other_communicator);
    suite.add("experts/in_place/memory", |world| {
        memory::at_once(world, in_place::IN_PLACE);
    });
    suite.add("low_latency/memory", memory::in_halves);
}
