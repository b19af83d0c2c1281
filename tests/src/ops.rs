//! Every operation as one call with small inputs, for contracts that all operations share.

mod linears;

use crate::{
    all_reduce::algorithms,
    backend::Rank,
    themes::{modes, scatters},
};
use brigade_device::{
    AllGatherParams, AllReduceAlgorithm, AllReduceNormParams, AllReduceParams, AllToAllParams,
    AllToAllRowsParams, Arrangement, BroadcastParams, Buffer, CombineParams, CombineSum, DataType,
    DispatchParams, GatheredRouting, GemmParams, Lease, Lengths, LoraLinearAllReduceParams,
    LoraLinearParams, LowLatencyCombineParams, LowLatencyDispatchParams, Normed, Operation, Output,
    OverlapMode, Placement, QScheme, ReceivedIds, ReduceOp, ReduceScatterParams, Result, Route,
    Routing, RowPayload, Transport,
};
use brigade_plan::Engines;
use std::sync::Arc;

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
    Op::new("all_gather", Operation::AllGather, move |rank, lease| {
        let mut rows = vec![ROWS; rank.size];
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
    Op::new(
        "reduce_scatter",
        Operation::ReduceScatter,
        move |rank, lease| {
            let rows = vec![ROWS; rank.size];
            let from = own(rank, DataType::F32, &[ROWS * rank.size, COLUMNS]);
            let mut to = old(rank, DataType::F32, &[ROWS, COLUMNS]);
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
    Op::new("broadcast", Operation::Broadcast, move |rank, lease| {
        let root = root.min(rank.size - 1);
        let from = if rank.rank == root { own } else { old };
        let mut data = from(rank, DataType::F32, &[COLUMNS]);
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

/// A row of every rank to each rank, and back again. Its output is the sum of all.
pub fn experts(hidden: usize, choice: Option<Transport>) -> Op {
    experts_by(hidden, choice, false)
}

/// The same where every rank has the experts of all ranks' tokens.
fn experts_gathered(hidden: usize, choice: Option<Transport>) -> Op {
    experts_by(hidden, choice, true)
}

fn experts_by(hidden: usize, choice: Option<Transport>, gathered: bool) -> Op {
    let op = Op::new("experts", Operation::Combine, move |rank, lease| {
        let rows = own(rank, DataType::F32, &[1, hidden]);
        let everybody: Vec<u8> = (0..rank.size as i32).flat_map(i32::to_ne_bytes).collect();
        let ids = rank.upload_bytes(DataType::I32, &[1, rank.size], &everybody);
        let dims = [rank.size, 1, rank.size];
        let all = rank.upload_bytes(DataType::I32, &dims, &everybody.repeat(rank.size));
        let one: Vec<u8> = 1i32.to_ne_bytes().repeat(rank.size);
        let counts = rank.upload_bytes(DataType::I32, &[rank.size], &one);
        let known = Route::Gathered(GatheredRouting {
            ids: all.view(),
            lengths: Lengths::Padded {
                counts: counts.view(),
            },
            weights: None,
            placement: Placement::Ranks,
        });
        let own_ids = Route::Experts {
            routing: Routing {
                ids: ids.view(),
                placement: Placement::Ranks,
            },
            weights: None,
        };
        let mut d = old(rank, DataType::F32, &[1, hidden]);
        let there = lease.dispatch(DispatchParams {
            rows: rows.view(),
            beside: &[],
            route: if gathered { known } else { own_ids },
            arrangement: Arrangement::BySource,
            max_tokens: 1,
            max_recv: None,
            received_ids: ReceivedIds::Local,
            totals: None,
            waits: None,
            cast: None,
            choice,
        });
        // What a dispatch writes is its own.
        let there = match there {
            Ok(there) => there,
            Err(e) => {
                return Ended {
                    result: Err(e),
                    output: None,
                };
            }
        };
        let result = lease.combine(CombineParams {
            rows: there.rows.view(),
            handle: &there.handle,
            sum: CombineSum::Rank,
            weights: None,
            biases: &[],
            output: Output::Into(d.view_mut()),
            waits: None,
            choice,
        });
        ended(result, d)
    });
    Op {
        operations: vec![Operation::Dispatch, Operation::Combine],
        ..op
    }
}

/// A row of every rank to each rank, and back again, in two halves each. Its output is the sum of all.
pub fn low_latency(hidden: usize) -> Op {
    let op = Op::new(
        "low_latency",
        Operation::LowLatencyCombine,
        move |rank, lease| {
            let rows = own(rank, DataType::F32, &[1, hidden]);
            let everybody: Vec<u8> = (0..rank.size as i32).flat_map(i32::to_ne_bytes).collect();
            let ids = rank.upload_bytes(DataType::I32, &[1, rank.size], &everybody);
            let weights = filled(rank, DataType::F32, &[1, rank.size], |_| 1.0);
            let mut d = old(rank, DataType::F32, &[1, hidden]);
            let mut exchange = rank.low_latency();
            let there = lease
                .low_latency_dispatch(
                    exchange.slots().0,
                    LowLatencyDispatchParams {
                        rows: rows.view(),
                        routing: Routing {
                            ids: ids.view(),
                            placement: Placement::Ranks,
                        },
                        weights: None,
                        max_tokens: 1,
                        cast: None,
                    },
                )
                .and_then(|pending| pending.receive(lease));
            // What a dispatch writes is its own.
            let there = match there {
                Ok(there) => there,
                Err(e) => {
                    return Ended {
                        result: Err(e),
                        output: None,
                    };
                }
            };
            let p = LowLatencyCombineParams {
                rows: there.rows(),
                sum: CombineSum::Expert,
                cast: None,
                weights: Some(weights.view()),
            };
            let result = lease
                .low_latency_combine(&there, p)
                .and_then(|pending| pending.receive(lease, Output::Into(d.view_mut())));
            ended(result, d)
        },
    );
    Op {
        operations: vec![Operation::LowLatencyDispatch, Operation::LowLatencyCombine],
        meets: false,
        ..op
    }
}

/// Every operation, in every mode and algorithm that a device has.
pub fn all(engines: Engines) -> Vec<Op> {
    let named = |name: String, op: Op| Op { name, ..op };
    let mut ops = vec![
        barrier(),
        all_gather(ROWS),
        reduce_scatter(ReduceOp::Sum),
        broadcast(0),
        named("broadcast_from_last".into(), broadcast(usize::MAX)),
        all_to_all(COLUMNS),
        linear_all_reduce(),
    ];
    if engines.dispatches {
        ops.push(experts(8, Some(Transport::OneSided)));
        if engines.pushes_rows {
            let op = experts(8, Some(Transport::Pushed));
            ops.push(named("experts_pushed".into(), op));
        }
        ops.push(named(
            "experts_fifo".into(),
            experts(8, Some(Transport::Fifo)),
        ));
        let op = experts(8, Some(Transport::Gather));
        ops.push(named("experts_gather".into(), op));
        let op = experts(8, Some(Transport::InPlace));
        ops.push(named("experts_in_place".into(), op));
        let op = experts_gathered(8, Some(Transport::OneSided));
        ops.push(named("experts_gathered".into(), op));
        ops.push(low_latency(8));
        ops.push(all_to_all_rows(COLUMNS));
    }
    for (name, choice) in algorithms(engines) {
        let op = all_reduce(100, DataType::F32, ReduceOp::Sum, choice);
        ops.push(named(format!("all_reduce_{name}"), op));
        if engines.norms {
            let op = all_reduce_norm(ROWS, 1e-5, choice);
            ops.push(named(format!("all_reduce_norm_{name}"), op));
        }
    }
    // Scales travel with rows.
    let int8 = Linear::new(ROWS, COLUMNS, Some(tiles_or_a_piece(engines)));
    let int8 = int8.with(|l| l.scheme = QScheme::Int8PerToken).gather();
    ops.push(named("gather_linear_int8".into(), int8));
    for (name, choices) in modes(engines) {
        let choice = choices[choices.len() / 2];
        let op = gather_linear(ROWS, COLUMNS, choice);
        ops.push(named(format!("gather_linear_{name}"), op));
        if scatters(choice) {
            let op = linear_reduce_scatter(ROWS, COLUMNS, choice);
            ops.push(named(format!("linear_reduce_scatter_{name}"), op));
        }
    }
    ops
}
