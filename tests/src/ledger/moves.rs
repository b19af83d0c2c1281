//! Collectives: reductions of every type by every algorithm, and data that only moves.

use super::{Entry, Inputs, Results, named};
use crate::{
    all_reduce::{OPS, algorithms},
    backend::Rank,
    layer::FLOATS,
};
use brigade_device::{
    AllGatherParams, AllReduceParams, AllToAllParams, BroadcastParams, DataType, ReduceOp,
    ReduceScatterParams,
};
use brigade_plan::Engines;

/// More than a block of any implementation, and no multiple of anything.
const ELEMENTS: usize = 2311;

/// Elements in a row.
pub(super) const COLUMNS: usize = 37;

/// Rows of every rank, none on some.
pub(super) fn rows(size: usize) -> Vec<usize> {
    (0..size).map(|r| (3 * r + 4) % 7).collect()
}

pub(super) fn infinities(op: ReduceOp) -> bool {
    matches!(op, ReduceOp::Max | ReduceOp::Min)
}

fn all_reduce(
    rank: &Rank,
    engines: Engines,
    mut inputs: Inputs,
    (op, dtype, output): (ReduceOp, DataType, DataType),
) -> Results {
    let bytes = inputs.floats(dtype, ELEMENTS, infinities(op));
    let from = rank.upload_bytes(dtype, &[ELEMENTS], &bytes);
    algorithms(engines)
        .into_iter()
        .map(|(name, choice)| {
            let mut to = rank.poisoned(output, &[ELEMENTS]);
            let params = AllReduceParams {
                data: to.view_mut(),
                from: Some(from.view()),
                op,
                choice,
            };
            rank.lease().all_reduce(params).unwrap();
            (name.into(), rank.raw(to.view()))
        })
        .collect()
}

fn reduce_scatter(
    rank: &Rank,
    mut inputs: Inputs,
    (op, dtype, output): (ReduceOp, DataType, DataType),
) -> Vec<u8> {
    let rows = rows(rank.size);
    let dims = [rows.iter().sum(), COLUMNS];
    let bytes = inputs.floats(dtype, dims[0] * COLUMNS, infinities(op));
    let from = rank.upload_bytes(dtype, &dims, &bytes);
    let mut to = rank.poisoned(output, &[rows[rank.rank], COLUMNS]);
    let params = ReduceScatterParams {
        from: from.view(),
        rows_per_rank: &rows,
        to: to.view_mut(),
        op,
    };
    rank.lease().reduce_scatter(params).unwrap();
    rank.raw(to.view())
}

fn all_gather(rank: &Rank, mut inputs: Inputs, dtype: DataType) -> Vec<u8> {
    let rows = rows(rank.size);
    let dims = [rows[rank.rank], COLUMNS];
    let from = inputs.bytes(dims[0] * COLUMNS * dtype.bytes());
    let from = rank.upload_bytes(dtype, &dims, &from);
    let mut to = rank.poisoned(dtype, &[rows.iter().sum(), COLUMNS]);
    let params = AllGatherParams {
        from: from.view(),
        rows_per_rank: &rows,
        to: to.view_mut(),
    };
    rank.lease().all_gather(params).unwrap();
    rank.raw(to.view())
}

fn broadcast(rank: &Rank, mut inputs: Inputs, dtype: DataType) -> Vec<u8> {
    let data = inputs.bytes(ELEMENTS * dtype.bytes());
    let mut data = rank.upload_bytes(dtype, &[ELEMENTS], &data);
    let params = BroadcastParams {
        data: data.view_mut(),
        root: rank.size / 2,
    };
    rank.lease().broadcast(params).unwrap();
    rank.raw(data.view())
}

fn all_to_all(rank: &Rank, mut inputs: Inputs, dtype: DataType) -> Vec<u8> {
    let count = |from: usize, to: usize| (2 * from + 3 * to) % 5;
    let send: Vec<_> = (0..rank.size).map(|to| count(rank.rank, to)).collect();
    let recv: Vec<_> = (0..rank.size).map(|from| count(from, rank.rank)).collect();
    let dims = [send.iter().sum(), COLUMNS];
    let from = inputs.bytes(dims[0] * COLUMNS * dtype.bytes());
    let from = rank.upload_bytes(dtype, &dims, &from);
    let mut to = rank.poisoned(dtype, &[recv.iter().sum(), COLUMNS]);
    let params = AllToAllParams {
        from: from.view(),
        send_rows: &send,
        to: to.view_mut(),
        recv_rows: &recv,
    };
    rank.lease().all_to_all(params).unwrap();
    rank.raw(to.view())
}

pub(super) fn entries(engines: Engines) -> Vec<Entry> {
    let mut all = vec![];
    for op in OPS {
        for dtype in FLOATS {
            let outputs = [dtype, DataType::F32];
            let different = if dtype == DataType::F32 { 1 } else { 2 };
            for output in &outputs[..different] {
                let kind = (op, dtype, *output);
                let name = format!("{op:?}/{}_to_{}", named(dtype), named(*output));
                all.push(Entry::new(
                    format!("all_reduce/{name}"),
                    move |rank, inputs| all_reduce(rank, engines, inputs, kind),
                ));
                all.push(Entry::one(
                    format!("reduce_scatter/{name}"),
                    move |rank, inputs| reduce_scatter(rank, inputs, kind),
                ));
            }
        }
    }
    type Move = fn(&Rank, Inputs, DataType) -> Vec<u8>;
    let moves: [(&str, Move); 3] = [
        ("all_gather", all_gather),
        ("broadcast", broadcast),
        ("all_to_all", all_to_all),
    ];
    for (name, run) in moves {
        for dtype in [DataType::I8, DataType::BF16, DataType::F32, DataType::I64] {
            let name = format!("{name}/{}", named(dtype));
            all.push(Entry::one(name, move |rank, inputs| {
                run(rank, inputs, dtype)
            }));
        }
    }
    all
}
