//! What the plan's tests share: topologies, calls, and plans as one line of text.
#![allow(dead_code, reason = "every test file takes its part")]

use brigade_device::{
    Call, CommConfig, DataType, Group, Launch, LinearCall, OverlapMode, OverlapPlan, ParallelMode,
    Plan, QScheme, Reason,
};
use brigade_plan::{Engines, Topology};

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
        three_dimensional: false,
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
