//! What the plan's tests share: topologies, calls, and plans as one line of text.
#![allow(dead_code, reason = "every test file takes its part")]
#![allow(clippy::unwrap_used, reason = "what is not as promised panics")]

use brigade_device::{
    Arrangement, Call, CombineCall, CombineSum, CommConfig, DataType, DispatchCall, Group, Launch,
    LinearCall, OverlapMode, OverlapPlan, ParallelMode, PerRank, PlacementCall, Plan, QScheme,
    Reason, ReceivedIds, Transport,
};
use brigade_plan::{
    Engines, Entries, Table, Topology,
    crossover::{Gpus, Links},
};

pub const CHUNKED: OverlapMode = OverlapMode::Chunked { pieces: 2 };

/// Every mode that a caller may name, and none.
pub const CHOICES: [Option<OverlapMode>; 5] = [
    None,
    Some(OverlapMode::Off),
    Some(CHUNKED),
    Some(OverlapMode::Ring),
    Some(OverlapMode::Pull),
];

pub fn topology(rank: usize, size: usize) -> Topology {
    Topology {
        group: Group {
            mode: ParallelMode::Tp,
            rank,
            size,
        },
        config: CommConfig::new(ParallelMode::Tp),
        engines: Engines::host(),
    }
}

/// bf16, K = 1024, N = 512.
pub fn linear(rows: &[usize]) -> LinearCall {
    LinearCall {
        rows: rows.into(),
        k: 1024,
        n: 512,
        input: DataType::BF16,
        output: DataType::BF16,
        scheme: QScheme::None,
        lora: false,
        transpose_a: false,
        inner: None,
        choice: None,
    }
}

pub fn choice(c: Option<OverlapMode>) -> String {
    c.map_or("auto".into(), |m| m.to_string())
}

/// `mode | order | offsets | code of the reason`, or the code alone.
pub fn line(plan: &Result<Plan, Reason>) -> String {
    match plan {
        Ok(Plan::GatherLinear(p) | Plan::LinearReduceScatter(p)) => overlap(p),
        Ok(Plan::AllReduce {
            algorithm,
            order,
            piece_elements,
            ..
        }) => format!("{algorithm:?}, {order:?}, pieces of {piece_elements}"),
        Ok(Plan::ReduceScatter {
            order,
            piece_elements,
            pushed,
            ..
        }) => format!("{order:?}, {}", pieces(piece_elements, *pushed)),
        Ok(Plan::Copy {
            piece_elements,
            pieces,
            pushed: None,
        }) => format!("{pieces} pieces of {piece_elements}"),
        Ok(Plan::Copy { pushed, .. }) => pieces(&0, *pushed),
        Ok(other) => format!("{other}"),
        Err(reason) => format!("error: {}", reason.code),
    }
}

fn pieces(of: &usize, pushed: Option<Launch>) -> String {
    match pushed {
        Some(launch) => format!("pushed by {} x {}", launch.blocks, launch.threads),
        None => format!("pieces of {of}"),
    }
}

fn overlap(p: &OverlapPlan) -> String {
    let why = p
        .instead_of
        .as_ref()
        .map_or(String::new(), |r| format!("  ({})", r.code));
    format!(
        "{:<10} order {:?}  offsets {:?}{why}",
        p.mode.to_string(),
        p.order,
        p.offsets
    )
}

/// Both operations of a linear.
pub fn both(call: &LinearCall) -> [(&'static str, Call); 2] {
    [
        ("gather ", Call::GatherLinear(call.clone())),
        ("scatter", Call::LinearReduceScatter(call.clone())),
    ]
}

/// 8 of 256 experts for each token of bf16 rows of 7168, by source.
pub fn dispatch(max_tokens: usize, choice: Option<Transport>) -> DispatchCall {
    DispatchCall {
        max_tokens,
        hidden: 7168,
        dtype: DataType::BF16,
        beside_bytes: PerRank::new(),
        k: 8,
        weights: true,
        placement: PlacementCall::Even { experts: 256 },
        arrangement: Arrangement::BySource,
        max_recv: None,
        received_ids: ReceivedIds::Local,
        again: false,
        gathered: false,
        cast: None,
        choice,
    }
}

/// What comes back from it, a sum for each rank.
pub fn combine(max_tokens: usize, choice: Option<Transport>) -> CombineCall {
    CombineCall {
        max_tokens,
        hidden: 7168,
        dtype: DataType::BF16,
        output: DataType::BF16,
        k: 8,
        arrangement: Arrangement::BySource,
        sum: CombineSum::Rank,
        weights: false,
        choice,
    }
}

/// So many of the GPUs that were measured, perhaps in smaller groups, and the figures of this build for them.
pub fn on_gpus(size: usize, config: CommConfig) -> (Topology, Table) {
    let gpus = Gpus {
        model: Some("NVIDIA H200".into()),
        links: Links::Nvlink,
        ranks: size,
    };
    let topology = Topology {
        group: Group {
            mode: ParallelMode::Ep,
            rank: 0,
            size,
        },
        config,
        engines: Engines::cuda(true, true),
    };
    (topology, Table::cuda(&gpus, &Entries::default()).unwrap())
}
