//! The low-latency exchange. Of what is received, all is promised but what lies behind each expert's rows.

use super::{
    Entry, Inputs,
    experts::{EXPERTS, HIDDEN, MOST_TOKENS, Own, Placed, tokens},
    named,
};
use crate::{backend::Rank, experts, layer::FLOATS, low_latency::came::promised};
use brigade_device::{
    CombineCast, CombineSum, CommConfig, DataType, Fp8Cast, LowLatencyCombineParams,
    LowLatencyDispatchParams, Output, ScaleFormat,
};
use brigade_plan::Engines;

fn config() -> CommConfig {
    CommConfig {
        low_latency_bytes: 1 << 20,
        ..experts::config()
    }
}

/// Columns of a row that goes back in whole blocks.
const BLOCKS: usize = 256;

/// How rows go there and back.
#[derive(Clone, Copy)]
struct Kind {
    dtype: DataType,
    output: DataType,
    cast: Option<Fp8Cast>,
    sum: CombineSum,
    cast_back: Option<CombineCast>,
}

/// There and back, with something else for the way back.
fn exchange(rank: &Rank, mut inputs: Inputs, kind: Kind) -> Vec<u8> {
    let Kind {
        dtype,
        output,
        cast,
        sum,
        cast_back,
    } = kind;
    let by_rank = sum == CombineSum::ExpertByRank;
    let own = Own::new(rank, &mut inputs, dtype, Placed::Even);
    let mut lease = rank.lease();
    let mut slots = rank.low_latency();
    let p = LowLatencyDispatchParams {
        rows: own.rows.view(),
        routing: own.routing(Placed::Even),
        weights: by_rank.then(|| own.weights.view()),
        max_tokens: MOST_TOKENS,
        cast,
    };
    let there = lease.low_latency_dispatch(slots.slots().0, p).unwrap();
    let there = there.receive(&mut lease).unwrap();
    let mut all = promised(rank, &there, cast);
    let hidden = match cast_back {
        Some(CombineCast::LogFmt10) => BLOCKS,
        _ => HIDDEN,
    };
    let [experts, room, _] = *there.rows().shape().dims() else {
        panic!("{:?}", there.rows());
    };
    let dims = [experts, room, hidden];
    let made = inputs.floats(dtype, dims.iter().product(), false);
    let made = rank.upload_bytes(dtype, &dims, &made);
    let p = LowLatencyCombineParams {
        rows: made.view(),
        sum,
        cast: cast_back,
        weights: (!by_rank).then(|| own.weights.view()),
    };
    let mut d = rank.poisoned(output, &[tokens(rank.rank), hidden]);
    let back = lease.low_latency_combine(&there, p).unwrap();
    let back = back.receive(&mut lease, Output::Into(d.view_mut()));
    assert!(back.unwrap().is_none());
    drop(lease);
    all.extend(rank.raw(d.view()));
    all
}

/// Where the rows of each rank begin at every expert.
fn ranges(rank: &Rank, mut inputs: Inputs) -> Vec<u8> {
    let own = Own::new(rank, &mut inputs, DataType::BF16, Placed::Even);
    let mut lease = rank.lease();
    let mut slots = rank.low_latency();
    let p = LowLatencyDispatchParams {
        rows: own.rows.view(),
        routing: own.routing(Placed::Even),
        weights: None,
        max_tokens: MOST_TOKENS,
        cast: None,
    };
    let there = lease.low_latency_dispatch(slots.slots().0, p).unwrap();
    let there = there.receive(&mut lease).unwrap();
    rank.raw(there.ranges())
}

pub(super) fn entries(engines: Engines) -> Vec<Entry> {
    if !engines.dispatches {
        return vec![];
    }
    let mut kinds = vec![];
    for dtype in FLOATS {
        let kind = Kind {
            dtype,
            output: dtype,
            cast: None,
            sum: CombineSum::Expert,
            cast_back: None,
        };
        kinds.push((named(dtype), kind));
        let by_rank = Kind {
            sum: CombineSum::ExpertByRank,
            ..kind
        };
        kinds.push((format!("{}_by_rank", named(dtype)), by_rank));
    }
    for format in [
        ScaleFormat::F32,
        ScaleFormat::PowerOfTwo,
        ScaleFormat::Ue8m0,
    ] {
        let kind = |column_major| Kind {
            dtype: DataType::BF16,
            output: DataType::F32,
            cast: Some(Fp8Cast {
                format,
                column_major,
            }),
            sum: CombineSum::Expert,
            cast_back: None,
        };
        kinds.push((format!("fp8_{format:?}_by_columns"), kind(true)));
        let kind = kind(false);
        kinds.push((format!("fp8_{format:?}"), kind));
        for (name, dtype, sum) in [
            ("bf16", DataType::BF16, CombineSum::Expert),
            ("f16", DataType::F16, CombineSum::ExpertByRank),
            ("f32", DataType::F32, CombineSum::ExpertByRank),
        ] {
            let back = Kind {
                dtype,
                cast: None,
                sum,
                cast_back: Some(CombineCast::Fp8(format)),
                ..kind
            };
            kinds.push((format!("{name}_fp8_{format:?}_back"), back));
        }
    }
    for (name, sum) in [
        ("", CombineSum::Expert),
        ("_by_rank", CombineSum::ExpertByRank),
    ] {
        let kind = Kind {
            dtype: DataType::BF16,
            output: DataType::F32,
            cast: None,
            sum,
            cast_back: Some(CombineCast::LogFmt10),
        };
        kinds.push((format!("bf16_logfmt10_back{name}"), kind));
    }
    let entry = |(name, kind): (String, _)| Entry {
        config,
        ..Entry::one(
            format!("low_latency/{name}_of_{EXPERTS}"),
            move |rank, inputs| exchange(rank, inputs, kind),
        )
    };
    let ranges = Entry {
        config,
        ..Entry::one(format!("low_latency/ranges_of_{EXPERTS}"), ranges)
    };
    kinds.into_iter().map(entry).chain([ranges]).collect()
}
