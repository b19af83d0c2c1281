//! Experts of all ranks' tokens, in groups of up to 1024 ranks: what one of them is told of the rows that come to it. The plan says so
//! without asking anybody, as it does for the host; and kernels are held against that in groups that there are.

use super::{
    ARRANGEMENTS,
    case::{Case, Ids, Where},
    own::{Gathered, Told},
};
use crate::suite::World;
use brigade_device::{Arrangement, DispatchCall, PlacementCall};
use brigade_plan::{
    known::{Lengths, Unfit, routes_of_all},
    routes::{Arranged, Chooser, Coming, Slots},
};
use rand::Rng;

/// Ranks, most tokens of each, k, and experts.
const SIZES: [(usize, usize, usize, usize); 6] = [
    (3, 40, 32, 100),
    (8, 20, 8, 60),
    (72, 6, 10, 256),
    (255, 3, 6, 1000),
    (1000, 2, 2, 64),
    (1024, 2, 8, 1024),
];

/// Ragged and padded, with experts in any places and rows in any order.
pub fn of_any_group(world: &World) {
    let mut rng = world.rng();
    for (i, (size, most, k, experts)) in SIZES.into_iter().enumerate() {
        for (j, ids) in [Ids::Ragged, Ids::Padded].into_iter().enumerate() {
            let mut case = Case::random(&mut rng, size, (most, 8, k, experts));
            case.by.ids = ids;
            case.arrangement = ARRANGEMENTS[(i + 2 * j) % ARRANGEMENTS.len()].1;
            case.places = match rng.random_range(0..3) {
                0 => Where::Even,
                1 => Where::Ranks,
                _ => {
                    let per_rank = rng.random_range(1..=3);
                    let all = (per_rank * size) as i32;
                    // -1 is behind the last.
                    let of_expert = |_| match rng.random_range(0..3) {
                        0 => [-1, -1],
                        1 => [rng.random_range(0..all), -1],
                        _ => [0, 1].map(|_| rng.random_range(0..all)),
                    };
                    let slots = (0..experts).flat_map(of_expert).collect();
                    Where::Map { slots, per_rank }
                }
            };
            let tokens: Vec<usize> = (0..size).map(|_| rng.random_range(0..=most)).collect();
            let case = case.with_tokens(&mut rng, &tokens).with_any_ids(&mut rng);
            let me = [0, size - 1, rng.random_range(0..size)][rng.random_range(0..3)];
            check(&case, me);
            let wrong = rng.random_range(0..size);
            cannot_be(&case, me, wrong);
        }
    }
}

fn lengths<'a>(case: &Case, all: &'a Gathered) -> Lengths<'a> {
    Lengths {
        lengths: &all.lengths,
        ragged: case.by.ids == Ids::Ragged,
        rows: all.ids.len() / case.k,
        max_tokens: case.max_tokens,
    }
}

fn check(case: &Case, me: usize) {
    let (size, k) = (case.size, case.k);
    let all = Gathered::of(case).unwrap();
    let runs = lengths(case, &all).runs(size, (me, case.tokens(me)));
    let runs = runs.unwrap();
    let (placement, map) = match &case.places {
        Where::Even => {
            let experts = case.experts;
            (PlacementCall::Even { experts }, &[][..])
        }
        Where::Ranks => (PlacementCall::Ranks, &[][..]),
        Where::Map { slots, per_rank } => {
            let call = PlacementCall::Map {
                experts: case.experts,
                copies: slots.len() / case.experts,
                per_rank: *per_rank,
            };
            (call, &slots[..])
        }
    };
    let chooser = Chooser {
        placement,
        map,
        rank: 0,
        size,
    };
    let slots = Slots::new(placement, size);
    let routes = routes_of_all(&all.ids, k, &runs, chooser);
    let coming: Vec<Coming> = routes
        .iter()
        .map(|routes| Coming::new(routes, k, &slots, me))
        .collect();
    let weights: Vec<Vec<f32>> = coming
        .iter()
        .zip(&runs)
        .map(|(coming, run)| coming.weights(k, &all.weights[run.start * k..run.end * k]))
        .collect();
    let came: Vec<&[i32]> = coming.iter().map(|c| &c.slots[..]).collect();
    let own = slots.of(me).len();
    let arranged = Arranged::new(case.arrangement, case.max_tokens, &came, k, own);
    let call = DispatchCall {
        max_tokens: case.max_tokens,
        hidden: case.hidden,
        dtype: case.dtype,
        beside_bytes: case.beside.iter().map(|b| b.row_bytes()).collect(),
        k,
        weights: true,
        placement,
        arrangement: case.arrangement,
        max_recv: None,
        received_ids: case.received_ids,
        again: false,
        gathered: true,
        cast: None,
        choice: None,
    };
    let called = slots.called(me, case.received_ids);
    let told = arranged.told(&call, arranged.room(), called, &coming, &weights);
    let want = Told::of(case, me);
    let about = format!(
        "rank {me} of {size}, k {k}, {:?}, {:?}, {placement:?}, {:?}",
        case.by.ids, case.arrangement, case.received_ids
    );
    assert_eq!(arranged.room(), case.capacity(me), "room of {about}");
    assert!(told.sources == want.sources, "sources of {about}");
    assert!(told.ids == want.ids, "ids of {about}");
    assert!(told.weights == want.weights, "weights of {about}");
    assert!(arranged.counts == want.counts, "counts of {about}");
    let received = coming.iter().map(|c| c.tokens.len() as i32);
    assert!(
        received.eq(want.received.iter().copied()),
        "rows of {about}"
    );
    // The way back: each expert of each row that came is found again, and nothing else is.
    let by_expert = matches!(case.arrangement, Arrangement::ByExpert { .. });
    let entries = if by_expert {
        size * case.max_tokens * k
    } else {
        0
    };
    let mut rows_of = vec![-1; entries];
    for row in case.received(me).0 {
        if let Some(entry) = row.entry {
            let before = want.sources[row.at * 4 + 3] as usize;
            rows_of[(row.source * case.max_tokens + before) * k + entry] = row.at as i32;
        }
    }
    assert!(told.rows_of == rows_of, "the way back of {about}");
    // Nobody but the rank itself is asked where own rows go, so that is the same as without the others' ids.
    let mine = routes.into_iter().nth(me).unwrap();
    let own = Chooser {
        rank: me,
        ..chooser
    };
    assert!(
        mine == brigade_plan::routes::Routes::new(&case.ids[me], k, &own),
        "own rows of {about}"
    );
}

/// A number of tokens that is wrong is found, and said whose it is.
fn cannot_be(case: &Case, me: usize, wrong: usize) {
    let mut all = Gathered::of(case).unwrap();
    let ragged = case.by.ids == Ids::Ragged;
    // Of ragged ones, where the next rank's begin.
    let at = if ragged { wrong + 1 } else { wrong };
    all.lengths[at] += 1 + case.max_tokens as i32;
    let found = lengths(case, &all).runs(case.size, (me, case.tokens(me)));
    let seen = (case.tokens(wrong) + 1 + case.max_tokens) as i64;
    let want = if wrong == me {
        case.tokens(me)
    } else {
        case.max_tokens
    };
    let unfit = Unfit {
        source: wrong,
        want,
        seen,
    };
    assert_eq!(found, Err(unfit), "{:?} of {}", case.by.ids, case.size);
}
