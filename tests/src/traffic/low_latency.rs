//! The low-latency exchange moves each row once to a rank, and back once for each of its experts, or once.

use super::assert_moved;
use crate::{
    experts::{
        self,
        case::{Case, Where},
        own::Own,
    },
    suite::World,
};
use brigade_device::{
    Buffer, CombineCast, CombineSum, CommConfig, DataType, Fp8Cast, LowLatencyCombineCall,
    LowLatencyCombineParams, LowLatencyDispatchParams, Output, ScaleFormat,
};
use brigade_plan::moved;

/// What becomes of the rows has this type.
const BACK: DataType = DataType::F16;

/// Own tokens with an expert on each rank; the experts on this rank of each rank's tokens; and those tokens themselves.
fn counted(case: &Case, me: usize) -> [Vec<usize>; 3] {
    let at = |to: usize, from: usize, token: usize| {
        let local = |e| case.local(to, from, token, e);
        (0..case.k).filter(|&e| local(e).is_some()).count()
    };
    let there = |to| (0..case.tokens(me)).filter(|&t| at(to, me, t) > 0).count();
    let back = |to| (0..case.tokens(to)).map(|t| at(me, to, t)).sum();
    let sums = |to| (0..case.tokens(to)).filter(|&t| at(me, to, t) > 0).count();
    [
        (0..case.size).map(there).collect(),
        (0..case.size).map(back).collect(),
        (0..case.size).map(sums).collect(),
    ]
}

pub(super) fn exchanged(world: &World) {
    let mut rng = world.rng();
    let mut case = Case::random(&mut rng, world.size, (40, 144, 3, 7));
    case.places = Where::Even;
    let mut cast = case.clone();
    cast.cast = Some(Fp8Cast {
        format: ScaleFormat::F32,
        column_major: false,
    });
    let cast = cast.with_rows(&mut rng);
    let nothing = case.clone().with_tokens(&mut rng, &vec![0; world.size]);
    let by = [CombineSum::Expert, CombineSum::ExpertByRank];
    let casts = [
        None,
        Some(CombineCast::Fp8(ScaleFormat::F32)),
        Some(CombineCast::Fp8(ScaleFormat::Ue8m0)),
        Some(CombineCast::LogFmt10),
    ];
    let ways = by.map(|sum| casts.map(|cast_back| (sum, cast_back)));
    let cases = [case, cast, nothing].map(|case| (case, ways));
    let config = CommConfig {
        low_latency_bytes: 1 << 20,
        ..experts::config()
    };
    world.run(&config, move |rank| {
        let all = cases.iter().flat_map(|(case, ways)| {
            let ways = ways.as_flattened().iter();
            ways.map(move |&(sum, cast_back)| (case, sum, cast_back))
        });
        for (case, sum, cast_back) in all {
            let by_rank = sum == CombineSum::ExpertByRank;
            let own = Own::of(rank, case);
            let mut exchange = rank.low_latency();
            let slot = exchange.slots().0;
            let weights = own.weights.as_ref().map(Buffer::view);
            let p = LowLatencyDispatchParams {
                rows: own.rows.view(),
                routing: own.routing(case),
                weights: weights.filter(|_| by_rank),
                max_tokens: case.max_tokens,
                cast: case.cast,
            };
            let call = p.check(0).unwrap();
            let [to, rows_back, sums_back] = counted(case, rank.rank);
            let back_to = if by_rank { sums_back } else { rows_back };
            let want = moved::low_latency_dispatch(rank.rank, &to, &call);
            let (mut pending, mut there) = (None, None);
            assert_moved(rank, want, &format!("{call:?}, sent"), || {
                pending = Some(rank.lease().low_latency_dispatch(slot, p).unwrap());
            });
            assert_moved(rank, 0, &format!("{call:?}, received"), || {
                there = pending
                    .take()
                    .map(|p| p.receive(&mut rank.lease()).unwrap());
            });
            let there = there.unwrap();
            let (dtype, hidden) = match cast_back {
                Some(CombineCast::LogFmt10) => (DataType::BF16, 256),
                _ => (BACK, case.hidden),
            };
            let [experts, room] = [0, 1].map(|d| there.rows().shape().dims()[d]);
            let made = rank.poisoned(dtype, &[experts, room, hidden]);
            let call = LowLatencyCombineCall {
                there: call,
                hidden,
                dtype,
                sum,
                cast: cast_back,
            };
            let want = moved::low_latency_combine(rank.rank, &back_to, &call);
            let mut back = None;
            assert_moved(rank, want, &format!("{call:?}, sent"), || {
                let p = LowLatencyCombineParams {
                    rows: made.view(),
                    sum,
                    cast: cast_back,
                    weights: weights.filter(|_| !by_rank),
                };
                back = Some(rank.lease().low_latency_combine(&there, p).unwrap());
            });
            assert_moved(rank, 0, &format!("{call:?}, received"), || {
                let output = Output::Allocate(dtype);
                let back = back.take().map(|b| b.receive(&mut rank.lease(), output));
                assert!(back.unwrap().unwrap().is_some());
            });
        }
    });
}
