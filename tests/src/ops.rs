//! Every operation as one call with small inputs, for contracts that all operations share.

mod experts;
mod linears;

use crate::{
    all_reduce::algorithms,
    backend::Rank,
    themes::{modes, scatters},
};
use brigade_device::{
    AllGatherParams, AllReduceAlgorithm, AllReduceNormParams, AllReduceParams, AllToAllParams,
    AllToAllRowsParams, BroadcastParams, Buffer, DataType, GemmParams, Lease,
    LoraLinearAllReduceNormParams, LoraLinearAllReduceParams, LoraLinearParams, Normed, Operation,
    Output, OverlapMode, QScheme, RecvParams, ReduceOp, ReduceScatterParams, Result, RowPayload,
    SendParams, Transport,
};
use brigade_plan::Engines;
use std::sync::Arc;

use experts::experts_gathered;
pub use experts::{Exchange, experts, low_latency};
pub use linears::{Linear, tiles_or_a_piece};

/// How a call ended.
pub struct Ended {
    /// What it returned; where devices work later, what waiting for it returned.
    pub result: Result<()>,
    /// Its output, if it has one that others fill. It held [`OLD`] before.
    pub output: Option<Buffer>,
}

type Make = dyn Fn(&Rank, &mut Lease<'_>) -> Ended + Send + Sync;

/// A call that all ranks can make.
#[derive(Clone)]
pub struct Op {
    /// For the names of trials.
    pub name: String,
    /// As fault records name it, or the part of it that a rank was in.
    pub operations: Vec<Operation>,
    /// Whether all ranks meet in it.
    pub meets: bool,
    call: Arc<Make>,
}

/// Rows of every rank in these calls.
const ROWS: usize = 3;
/// What outputs hold before the call: no call gives it.
pub const OLD: f64 = 0.75;
/// Elements in a row.
const COLUMNS: usize = 6;

impl Op {
    fn new(
        name: impl Into<String>,
        operation: Operation,
        call: impl Fn(&Rank, &mut Lease<'_>) -> Ended + Send + Sync + 'static,
    ) -> Self {
        Self {
            name: name.into(),
            operations: vec![operation],
            meets: true,
            call: Arc::new(call),
        }
    }

    /// The same by this name.
    pub fn named(self, name: impl Into<String>) -> Self {
        let name = name.into();
        Self { name, ..self }
    }

    /// Makes the call on the rank's stream, and waits for it.
    pub fn run(&self, rank: &Rank) -> Ended {
        match rank.comm().lease(&rank.stream) {
            Ok(mut lease) => {
                let ended = (self.call)(rank, &mut lease);
                drop(lease);
                Ended {
                    result: rank.settle(ended.result),
                    output: ended.output,
                }
            }
            Err(e) => Ended {
                result: Err(e),
                output: None,
            },
        }
    }
}

/// Small whole numbers, others on every rank: sums and products of them are exact, so that every order of work gives the
/// same bits.
fn own(rank: &Rank, dtype: DataType, dims: &[usize]) -> Buffer {
    filled(rank, dtype, dims, |i| (1 + rank.rank + 2 * (i % 5)) as f64)
}

fn old(rank: &Rank, dtype: DataType, dims: &[usize]) -> Buffer {
    filled(rank, dtype, dims, |_| OLD)
}

fn filled(rank: &Rank, dtype: DataType, dims: &[usize], value: impl Fn(usize) -> f64) -> Buffer {
    let values: Vec<_> = (0..dims.iter().product()).map(value).collect();
    rank.upload_bytes(dtype, dims, &crate::matrix::to_bytes(dtype, &values))
}

fn ended<T>(result: Result<T>, output: Buffer) -> Ended {
    Ended {
        result: result.map(drop),
        output: Some(output),
    }
}

/// All ranks meet.
pub fn barrier() -> Op {
    Op::new("barrier", Operation::Barrier, |_, lease| Ended {
        result: lease.barrier(),
        output: None,
    })
}

/// `len` elements, added up beside the input.
pub fn all_reduce(
    len: usize,
    dtype: DataType,
    op: ReduceOp,
    choice: Option<AllReduceAlgorithm>,
) -> Op {
    Op::new("all_reduce", Operation::AllReduce, move |rank, lease| {
        let from = own(rank, dtype, &[len]);
        let mut to = old(rank, dtype, &[len]);
        let result = lease.all_reduce(AllReduceParams {
            data: to.view_mut(),
            from: Some(from.view()),
            op,
            choice,
        });
        ended(result, to)
    })
}

/// `rows` rows that are added up, and normalized with this `eps`. Its output is the new residual, and the normalized rows
/// behind it.
pub fn all_reduce_norm(rows: usize, eps: f32, choice: Option<AllReduceAlgorithm>) -> Op {
    let operation = Operation::AllReduceNorm;
    Op::new("all_reduce_norm", operation, move |rank, lease| {
        let dims = [rows, COLUMNS];
        let from = own(rank, DataType::F32, &dims);
        let residual = filled(rank, DataType::F32, &dims, |i| (i % 7) as f64);
        let weight = filled(rank, DataType::F32, &[COLUMNS], |i| (1 + i) as f64);
        let both = old(rank, DataType::F32, &[2 * rows, COLUMNS]);
        let halves = both
            .slice(0, rows)
            .and_then(|sum| Ok((sum, both.slice(rows, rows)?)));
        let result = halves.and_then(|(mut sum, mut normed)| {
            lease.all_reduce_norm(AllReduceNormParams {
                from: from.view(),
                residual: residual.view(),
                weight: weight.view(),
                eps,
                sum: sum.view_mut(),
                normed: Normed::Plain(normed.view_mut()),
                choice,
            })
        });
        ended(result, both)
    })
}

/// Rows of every rank.
pub fn all_gather(rows_of_first: usize) -> Op {
    all_gather_of(rows_of_first, ROWS)
}

/// So many of the first rank's, and of each other's.
pub fn all_gather_of(rows_of_first: usize, rows_of_others: usize) -> Op {
    Op::new("all_gather", Operation::AllGather, move |rank, lease| {
        let mut rows = vec![rows_of_others; rank.size];
        rows[0] = rows_of_first;
        let from = own(rank, DataType::F32, &[rows[rank.rank], COLUMNS]);
        let mut to = old(rank, DataType::F32, &[rows.iter().sum(), COLUMNS]);
        let result = lease.all_gather(AllGatherParams {
            from: from.view(),
            rows_per_rank: &rows,
            to: to.view_mut(),
        });
        ended(result, to)
    })
}

/// Own rows of the sum.
pub fn reduce_scatter(op: ReduceOp) -> Op {
    reduce_scatter_of(ROWS, op)
}

/// So many of every rank's.
pub fn reduce_scatter_of(each: usize, op: ReduceOp) -> Op {
    Op::new(
        "reduce_scatter",
        Operation::ReduceScatter,
        move |rank, lease| {
            let rows = vec![each; rank.size];
            let from = own(rank, DataType::F32, &[each * rank.size, COLUMNS]);
            let mut to = old(rank, DataType::F32, &[each, COLUMNS]);
            let result = lease.reduce_scatter(ReduceScatterParams {
                from: from.view(),
                rows_per_rank: &rows,
                to: to.view_mut(),
                op,
            });
            ended(result, to)
        },
    )
}

/// The data of rank `root`, or of the last one if there are not so many.
pub fn broadcast(root: usize) -> Op {
    broadcast_of(1, root)
}

/// So many rows of it.
pub fn broadcast_of(rows: usize, root: usize) -> Op {
    Op::new("broadcast", Operation::Broadcast, move |rank, lease| {
        let root = root.min(rank.size - 1);
        let from = if rank.rank == root { own } else { old };
        let mut data = from(rank, DataType::F32, &[rows, COLUMNS]);
        let result = lease.broadcast(BroadcastParams {
            data: data.view_mut(),
            root,
        });
        Ended {
            result: result.map(drop),
            // The root's data is its own.
            output: (rank.rank != root).then_some(data),
        }
    })
}

/// Copies and a reduce-scatter of so many bytes of each rank.
pub fn of_bytes(bytes: usize) -> [Op; 3] {
    let rows = bytes / DataType::F32.bytes() / COLUMNS;
    [
        all_gather_of(rows, rows),
        reduce_scatter_of(rows, ReduceOp::Sum),
        broadcast_of(rows, 0),
    ]
}

/// A row from every rank to every rank.
pub fn all_to_all(columns: usize) -> Op {
    Op::new("all_to_all", Operation::AllToAll, move |rank, lease| {
        let rows = vec![1; rank.size];
        let from = own(rank, DataType::F32, &[rank.size, columns]);
        let mut to = old(rank, DataType::F32, &[rank.size, columns]);
        let result = lease.all_to_all(AllToAllParams {
            from: from.view(),
            send_rows: &rows,
            to: to.view_mut(),
            recv_rows: &rows,
        });
        ended(result, to)
    })
}

/// So many elements to the next rank, and from the one before. Who is far from a rank that fails may hear of it in a later call.
pub fn send_recv(len: usize) -> Op {
    Op::new("send_recv", Operation::SendRecv, move |rank, lease| {
        let from = own(rank, DataType::F32, &[len]);
        let mut to = old(rank, DataType::F32, &[len]);
        let result = lease.send_recv(
            SendParams {
                from: from.view(),
                peer: (rank.rank + 1) % rank.size,
            },
            RecvParams {
                to: to.view_mut(),
                peer: (rank.rank + rank.size - 1) % rank.size,
            },
        );
        ended(result, to)
    })
}

/// A row from every rank to every rank, named by lists.
pub fn all_to_all_rows(columns: usize) -> Op {
    let operation = Operation::AllToAllRows;
    Op::new("all_to_all_rows", operation, move |rank, lease| {
        let from = own(rank, DataType::F32, &[rank.size, columns]);
        let mut to = old(rank, DataType::F32, &[rank.size, columns]);
        let list = |n: usize| {
            let bytes: Vec<u8> = (0..n as i32).flat_map(i32::to_ne_bytes).collect();
            rank.upload_bytes(DataType::I32, &[n], &bytes)
        };
        let (offsets, rows) = (list(rank.size + 1), list(rank.size));
        let result = lease.all_to_all_rows(AllToAllRowsParams {
            payloads: &[RowPayload {
                from: from.view(),
                to: to.view_mut(),
            }],
            send_offsets: offsets.view(),
            send_rows: rows.view(),
            recv_offsets: offsets.view(),
            recv_rows: rows.view(),
        });
        ended(result, to)
    })
}

/// Gather-linear with `rows` rows a rank and `k` columns.
pub fn gather_linear(rows: usize, k: usize, choice: Option<OverlapMode>) -> Op {
    Linear::new(rows, k, choice).gather()
}

/// Its twin.
pub fn linear_reduce_scatter(rows: usize, n: usize, choice: Option<OverlapMode>) -> Op {
    Linear::new(rows, n, choice).scatter()
}

/// A linear whose result is summed over all ranks.
pub fn linear_all_reduce() -> Op {
    Op::new("linear_all_reduce", Operation::AllReduce, |rank, lease| {
        let x = own(rank, DataType::F32, &[ROWS, COLUMNS]);
        let weight = own(rank, DataType::F32, &[COLUMNS, COLUMNS]);
        let mut d = old(rank, DataType::F32, &[ROWS, COLUMNS]);
        let result = lease.lora_linear_with_all_reduce(LoraLinearAllReduceParams {
            linear: LoraLinearParams {
                gemm: GemmParams::new(&x, &weight),
                runs: &[],
            },
            output: Output::Into(d.view_mut()),
            choice: None,
        });
        ended(result, d)
    })
}

/// One whose sum is added to a residual and normalized. Its output is the new residual, and the normalized rows behind it.
pub fn linear_all_reduce_norm() -> Op {
    // As wide as rows are that a product may send.
    const HIDDEN: usize = 2048;
    let (name, operation) = ("linear_all_reduce_norm", Operation::AllReduceNorm);
    Op::new(name, operation, move |rank, lease| {
        let dtype = DataType::BF16;
        let x = own(rank, dtype, &[ROWS, 8]);
        let weight = own(rank, dtype, &[HIDDEN, 8]);
        let residual = own(rank, dtype, &[ROWS, HIDDEN]);
        let norm = own(rank, dtype, &[HIDDEN]);
        let both = old(rank, dtype, &[2 * ROWS, HIDDEN]);
        let halves = both
            .slice(0, ROWS)
            .and_then(|sum| Ok((sum, both.slice(ROWS, ROWS)?)));
        let gemm = GemmParams {
            transpose_b: true,
            ..GemmParams::new(&x, &weight)
        };
        let result = halves.and_then(|(mut sum, mut normed)| {
            lease.lora_linear_with_all_reduce_norm(LoraLinearAllReduceNormParams {
                linear: LoraLinearParams { gemm, runs: &[] },
                residual: residual.view(),
                weight: norm.view(),
                eps: 1e-5,
                sum: sum.view_mut(),
                normed: Normed::Plain(normed.view_mut()),
                choice: None,
            })
        });
        ended(result, both)
    })
}

/// Every operation, in every mode and algorithm that a device has.
pub fn all(engines: Engines) -> Vec<Op> {
    let mut ops = vec![
        barrier(),
        all_gather(ROWS),
        reduce_scatter(ReduceOp::Sum),
        broadcast(0),
        broadcast(usize::MAX).named("broadcast_from_last"),
        all_to_all(COLUMNS),
        linear_all_reduce(),
    ];
    if engines.dispatches {
        let by = |choice| experts(8, Some(choice));
        ops.push(by(Transport::OneSided));
        if engines.pushes_rows {
            ops.push(by(Transport::Pushed).named("experts_pushed"));
        }
        ops.push(by(Transport::Fifo).named("experts_fifo"));
        ops.push(by(Transport::Gather).named("experts_gather"));
        ops.push(by(Transport::InPlace).named("experts_in_place"));
        ops.push(experts_gathered(8, Some(Transport::OneSided)).named("experts_gathered"));
        ops.push(low_latency(8));
        ops.push(all_to_all_rows(COLUMNS));
    }
    for (name, choice) in algorithms(engines) {
        let op = all_reduce(100, DataType::F32, ReduceOp::Sum, choice);
        ops.push(op.named(format!("all_reduce_{name}")));
        if engines.norms {
            if choice.is_none() {
                ops.push(linear_all_reduce_norm());
            }
            let op = all_reduce_norm(ROWS, 1e-5, choice);
            ops.push(op.named(format!("all_reduce_norm_{name}")));
        }
    }
    // Scales travel with rows.
    let int8 = Linear::new(ROWS, COLUMNS, Some(tiles_or_a_piece(engines)));
    let int8 = int8.with(|l| l.scheme = QScheme::Int8PerToken).gather();
    ops.push(int8.named("gather_linear_int8"));
    for (name, choices) in modes(engines) {
        let choice = choices[choices.len() / 2];
        let op = gather_linear(ROWS, COLUMNS, choice);
        ops.push(op.named(format!("gather_linear_{name}")));
        if scatters(choice) {
            let op = linear_reduce_scatter(ROWS, COLUMNS, choice);
            ops.push(op.named(format!("linear_reduce_scatter_{name}")));
        }
    }
    ops
}
