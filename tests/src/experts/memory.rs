//! What is said beforehand of memory is what is taken then: at `join`, and by each call.

use super::{
    arrangements,
    case::{By, Case},
    config,
    own::{Own, check},
};
use crate::{
    backend::Rank,
    low_latency::{self, drawn},
    suite::World,
};
use brigade_device::{
    Arrangement, Buffer, Call, CombineCall, CombineParams, CombineSum, Comm, CommConfig, Fp8Cast,
    LowLatencyCombineCall, LowLatencyCombineParams, LowLatencyDispatchParams, Output, Plan,
    ScaleFormat, Transport,
};
use brigade_plan::experts;
use std::time::Duration;

/// No memory for any call with experts.
fn nothing() -> CommConfig {
    CommConfig {
        dispatch_bytes: 0,
        combine_bytes: 0,
        fifo_bytes: 0,
        low_latency_bytes: 0,
        all_reduce_bytes: 0,
        ..config()
    }
}

fn held(rank: &Rank) -> usize {
    rank.stream.sync(Duration::from_secs(20)).unwrap();
    rank.device.memory_status().unwrap().held_bytes as usize
}

/// How far what is told of a group's memory may be off: a GPU's comes in pages.
fn off(world: &World) -> u64 {
    match world.backend.asks_callers() {
        true => 0,
        false => 2 << 20,
    }
}

/// Joins with the memory that is told for these calls, and with none for others with experts.
fn join_for(rank: &Rank, calls: [&Call; 2], off: u64) -> Comm {
    let needed = |config: &CommConfig| rank.device.memory_need(config, rank.size).unwrap();
    let mut fit = nothing();
    for call in calls {
        let need = experts::need(call, rank.size).unwrap();
        let more = needed(&need.fit(nothing())) - needed(&nothing());
        // There were no queues before, which have counters.
        let counters = match need.field {
            "fifo_bytes" => rank.size * (8 << 10),
            _ => 0,
        };
        let told = (need.joined_bytes() + counters) as u64;
        let what = format!("{more} bytes more at join, {told} told: {call:?}");
        assert!(more.abs_diff(told) <= off, "{what}");
        fit = need.fit(fit);
    }
    rank.join_another(&fit)
}

/// Makes a call, whose results take what is told, but for so many bytes that lie in the group's memory.
fn assert_given<R>(
    (rank, tokens): (&Rank, usize),
    call: &Call,
    in_place: usize,
    make: impl FnOnce() -> R,
) -> R {
    /// Beside results, until the work is done.
    const SCRATCH: usize = 4096;
    let group = rank.comm().group();
    let given = experts::given_bytes(call, &group, tokens).unwrap() - in_place;
    let before = held(rank);
    let results = make();
    let took = held(rank) - before;
    let what = format!("{given} bytes were told, {took} were taken: {call:?}");
    assert!((given..=given + SCRATCH).contains(&took), "{what}");
    results
}

/// A dispatch and a combine.
pub fn at_once(world: &World, by: By) {
    let mut rng = world.rng();
    let in_place = by.there == Some(Transport::InPlace);
    let cases: Vec<Case> = arrangements(by)
        .map(|arrangement| {
            let mut case = Case::random(&mut rng, world.size, (40, 512, 3, 2 * world.size));
            case.arrangement = arrangement;
            if arrangement != Arrangement::BySource {
                case.room = Some(40 * 3 * world.size + 16 * 4);
            }
            Case { by, ..case }
        })
        .collect();
    let off = off(world);
    let stay = in_place && world.backend.engines().rows_in_place;
    world.run(&config(), move |rank| {
        for case in &cases {
            let own = Own::of(rank, case);
            let first = own.dispatch(&mut rank.lease(), case).unwrap();
            let made = first.handle.call().clone();
            let sum = match case.arrangement {
                Arrangement::ByExpert { .. } => CombineSum::Expert,
                Arrangement::Dense | Arrangement::BySource => CombineSum::Rank,
            };
            // None goes back with rows that stay in place.
            let weighted = !in_place;
            let back = Call::Combine(CombineCall {
                max_tokens: made.max_tokens,
                hidden: made.hidden,
                dtype: made.dtype,
                output: made.dtype,
                k: made.k,
                arrangement: made.arrangement,
                sum,
                weights: weighted,
                choice: by.back,
            });
            let there = Call::Dispatch(made);
            let comm = join_for(rank, [&there, &back], off);
            let mut lease = comm.lease(&rank.stream).unwrap();
            let of = (&*rank, case.tokens(rank.rank));
            let rows = if stay { first.rows.bytes() } else { 0 };
            let dispatch = || own.dispatch(&mut lease, case).unwrap();
            let got = assert_given(of, &there, rows, dispatch);
            check(rank, case, &got);
            if let Plan::Experts { pieces, .. } = got.plan {
                let queued = by.there == Some(Transport::Fifo);
                assert!(queued || pieces == 1, "{}", got.plan);
            }
            let made = match in_place {
                true => got.rows.clone(),
                false => rank.poisoned(case.dtype, got.rows.shape().dims()),
            };
            let p = CombineParams {
                rows: made.view(),
                handle: &got.handle,
                sum,
                weights: got.weights.as_ref().filter(|_| weighted).map(Buffer::view),
                biases: &[],
                output: Output::Allocate(case.dtype),
                waits: None,
                choice: by.back,
            };
            assert_given(of, &back, 0, || lease.combine(p).unwrap());
        }
    });
}

/// A low-latency exchange, with a cast and without, and by both sums.
pub fn in_halves(world: &World) {
    let mut rng = world.rng();
    let cases = [
        (CombineSum::Expert, None),
        (CombineSum::ExpertByRank, None),
        (CombineSum::Expert, Some(false)),
        (CombineSum::ExpertByRank, Some(true)),
    ]
    .map(|(sum, cast)| {
        let mut case = drawn(&mut rng, world.size, (20, 512, 3, 2 * world.size)).0;
        case.cast = cast.map(|column_major| Fp8Cast {
            format: ScaleFormat::F32,
            column_major,
        });
        (case.with_rows(&mut rng), sum)
    });
    let off = off(world);
    world.run(&low_latency::config(), move |rank| {
        for (case, sum) in &cases {
            let own = Own::of(rank, case);
            let weights = own.weights.as_ref().map(Buffer::view);
            let (at_experts, at_home) = match sum {
                CombineSum::ExpertByRank => (weights, None),
                _ => (None, weights),
            };
            let p = LowLatencyDispatchParams {
                rows: own.rows.view(),
                routing: own.routing(case),
                weights: at_experts,
                max_tokens: case.max_tokens,
                cast: case.cast,
            };
            let call = p.check(0).unwrap();
            let back = Call::LowLatencyCombine(LowLatencyCombineCall {
                there: call.clone(),
                hidden: case.hidden,
                dtype: case.dtype,
                sum: *sum,
                cast: None,
            });
            let there = Call::LowLatencyDispatch(call);
            let comm = join_for(rank, [&there, &back], off);
            let mut lease = comm.lease(&rank.stream).unwrap();
            let mut exchange = comm.low_latency().unwrap();
            let of = (&*rank, case.tokens(rank.rank));
            let got = assert_given(of, &there, 0, || {
                let sent = lease.low_latency_dispatch(exchange.slots().0, p).unwrap();
                sent.receive(&mut lease).unwrap()
            });
            low_latency::came::check(rank, case, &got);
            let made = rank.poisoned(case.dtype, got.rows().shape().dims());
            let p = LowLatencyCombineParams {
                rows: made.view(),
                sum: *sum,
                cast: None,
                weights: at_home,
            };
            assert_given(of, &back, 0, || {
                let sent = lease.low_latency_combine(&got, p).unwrap();
                let output = Output::Allocate(case.dtype);
                sent.receive(&mut lease, output).unwrap().unwrap()
            });
        }
    });
}
