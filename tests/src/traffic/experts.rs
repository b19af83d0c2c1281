//! Rows to their experts and back: by all transports but queues, in pieces too, what moves is each row for a peer with what belongs to it;
//! or every row to every peer, and what says whose it is to those who keep it.

use super::assert_moved;
use crate::{
    backend::Rank,
    experts::{
        self,
        case::{Beside, By, Came, Case, Ids},
        own::Own,
        transports,
    },
    suite::World,
};
use brigade_device::{
    Arrangement, CombineCall, CombineParams, CombineSum, CommConfig, DataType, DispatchCall,
    Fp8Cast, Handle, Output, ReceivedIds, Route, ScaleFormat, Transport,
};
use brigade_plan::moved;
use std::collections::BTreeSet;

/// Own tokens with an expert on each rank.
fn sent(case: &Case, me: usize) -> Vec<usize> {
    let goes =
        |to: usize, token: usize| (0..case.k).any(|e| case.local(to, me, token, e).is_some());
    let to = |to: usize| (0..case.tokens(me)).filter(|&t| goes(to, t)).count();
    (0..case.size).map(to).collect()
}

/// Rows that go back to each rank.
fn returned(case: &Case, me: usize, sum: CombineSum) -> Vec<usize> {
    let (came, _) = case.received(me);
    let to = |source: usize| {
        let from = came.iter().filter(|row: &&Came| row.source == source);
        match sum {
            CombineSum::Expert => from.count(),
            CombineSum::Rank | CombineSum::ExpertByRank => {
                from.map(|row| row.token).collect::<BTreeSet<_>>().len()
            }
        }
    };
    (0..case.size).map(to).collect()
}

/// What becomes of the rows has this type.
const BACK: DataType = DataType::F16;

fn combined(
    rank: &Rank,
    case: &Case,
    handle: &Handle,
    (sum, weights): (CombineSum, bool),
    choice: Option<Transport>,
) {
    let rows = rank.poisoned(BACK, handle.shape(case.hidden).unwrap().dims());
    let back = rank.poisoned(DataType::F32, handle.parts().ids.shape().dims());
    let call = CombineCall {
        max_tokens: case.max_tokens,
        hidden: case.hidden,
        dtype: BACK,
        output: DataType::F32,
        k: case.k,
        arrangement: case.arrangement,
        sum,
        weights,
        choice,
    };
    let want = moved::combine(rank.rank, &returned(case, rank.rank, sum), &call);
    assert_moved(rank, want, &format!("{call:?}"), || {
        rank.lease()
            .combine(CombineParams {
                rows: rows.view(),
                handle,
                sum,
                weights: weights.then(|| back.view()),
                biases: &[],
                output: Output::Allocate(DataType::F32),
                waits: None,
                choice,
            })
            .map(drop)
            .unwrap();
    });
}

/// Bytes that a rank moves.
fn dispatched(case: &Case, me: usize, call: &DispatchCall) -> u64 {
    match call.choice {
        Some(Transport::Gather) => {
            moved::gather_dispatch(me, &sent(case, me), case.tokens(me), call)
        }
        _ => moved::dispatch(me, &sent(case, me), call),
    }
}

fn round_trip(rank: &Rank, case: &Case, by: By) {
    let case = case.clone().by(by);
    let own = Own::of(rank, &case);
    let mut call = DispatchCall {
        max_tokens: case.max_tokens,
        hidden: case.hidden,
        dtype: case.dtype,
        beside_bytes: case.beside.iter().map(Beside::row_bytes).collect(),
        k: case.k,
        weights: case.weights.is_some(),
        placement: brigade_device::PlacementCall::Even {
            experts: case.experts,
        },
        arrangement: case.arrangement,
        max_recv: case.room,
        received_ids: ReceivedIds::Local,
        again: false,
        gathered: by.ids != Ids::Own,
        cast: case.cast,
        choice: by.there,
    };
    let mut there = None;
    let want = dispatched(&case, rank.rank, &call);
    assert_moved(rank, want, &format!("{call:?}"), || {
        there = Some(own.dispatch(&mut rank.lease(), &case).unwrap());
    });
    let handle = there.unwrap().handle;
    assert_eq!(handle.call(), &call, "what was dispatched");
    (call.again, call.gathered) = (true, false);
    let want = dispatched(&case, rank.rank, &call);
    assert_moved(rank, want, &format!("{call:?}"), || {
        let again = own.dispatch_by(&mut rank.lease(), &case, Route::Again(&handle));
        drop(again.unwrap());
    });
    let sums: &[CombineSum] = match case.arrangement {
        Arrangement::ByExpert { .. } if case.weights.is_none() => &[],
        Arrangement::ByExpert { .. } => &[CombineSum::Expert, CombineSum::ExpertByRank],
        Arrangement::Dense | Arrangement::BySource => &[CombineSum::Rank],
    };
    for &sum in sums {
        for weights in [false, true] {
            combined(rank, &case, &handle, (sum, weights), by.back);
        }
    }
}

/// Where every rank has the experts of all tokens, nobody sends them.
fn known(rank: &Rank, case: &Case) {
    for (there, ids) in [
        (Transport::OneSided, Ids::Ragged),
        (Transport::Gather, Ids::Padded),
    ] {
        let back = Transport::OneSided;
        round_trip(
            rank,
            case,
            By {
                ids,
                ..By::of(there, back)
            },
        );
    }
}

/// With scales and without, with weights and without.
fn cases(world: &World) -> Vec<Case> {
    let mut rng = world.rng();
    let arrangements = [
        Arrangement::Dense,
        Arrangement::BySource,
        Arrangement::ByExpert { alignment: 4 },
    ];
    let mut all = vec![];
    for (i, arrangement) in arrangements.into_iter().enumerate() {
        let mut case = Case::random(&mut rng, world.size, (40, 144, 3, 7));
        case.arrangement = arrangement;
        let mut cast = case.clone();
        cast.cast = Some(Fp8Cast {
            format: [
                ScaleFormat::F32,
                ScaleFormat::PowerOfTwo,
                ScaleFormat::Ue8m0,
            ][i],
            column_major: i == 1,
        });
        let cast = cast.with_rows(&mut rng);
        let mut bare = case.clone();
        bare.weights = None;
        let nothing = case.clone().with_tokens(&mut rng, &vec![0; world.size]);
        all.extend([case, cast, bare, nothing]);
    }
    all
}

pub(super) fn whole(world: &World) {
    let cases = cases(world);
    let transports: Vec<_> = transports(world.backend.engines(), Arrangement::Dense)
        .filter(|(_, by)| *by != Transport::Fifo)
        .collect();
    world.run(&experts::config(), move |rank| {
        for case in &cases {
            for &(_, choice) in &transports {
                round_trip(rank, case, By::of(choice, choice));
            }
            known(rank, case);
        }
    });
}

/// What goes in pieces is no more.
pub(super) fn pieces(world: &World) {
    let cases = cases(world);
    let config = CommConfig {
        dispatch_bytes: 2000 * world.size,
        combine_bytes: 1500 * world.size,
        ..experts::config()
    };
    world.run(&config, move |rank| {
        for case in &cases {
            for choice in [Transport::OneSided, Transport::Gather] {
                round_trip(rank, case, By::of(choice, choice));
            }
            known(rank, case);
        }
    });
}
