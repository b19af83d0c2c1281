//! Rows to experts and back.

use super::{Ended, Op, ended, filled, old, own};
use crate::backend::Rank;
use brigade_device::{
    Arrangement, Buffer, CombineCast, CombineParams, CombineSum, DataType, DispatchParams, Fp8Cast,
    GatheredRouting, Lease, Lengths, LowLatencyCombineParams, LowLatencyDispatchParams, Operation,
    Output, Placement, ReceivedIds, Result, Route, Routing, Transport,
};

/// What ranks must agree on when each sends a row to every rank, and gets it back. Experts are ranks.
#[derive(Clone, Copy, Debug)]
pub struct Exchange {
    /// Elements in a row.
    pub hidden: usize,
    /// Their type.
    pub dtype: DataType,
    /// Most tokens of a rank, of which it has one.
    pub max_tokens: usize,
    /// How often a token names nobody, beside all ranks.
    pub nobody: usize,
    /// Cast on the way there.
    pub cast: Option<Fp8Cast>,
    /// Bytes beside a row.
    pub beside: usize,
    /// Whether rows have weights: they do where they lie by expert.
    pub weighted: bool,
    /// How received rows lie.
    pub arrangement: Arrangement,
    /// How received ids number slots.
    pub received_ids: ReceivedIds,
    /// Whether every rank has the experts of all ranks' tokens.
    pub gathered: bool,
    /// What comes back of a token.
    pub sum: CombineSum,
    /// Type of the rows that go back: those that came, if it is theirs.
    pub back: DataType,
    /// Cast on the way back, in two halves.
    pub cast_back: Option<CombineCast>,
    /// Type of the result.
    pub output: DataType,
    /// Forced transport.
    pub choice: Option<Transport>,
}

/// A row of every rank to each rank, and back again. Its output is the sum of all.
pub fn experts(hidden: usize, choice: Option<Transport>) -> Op {
    let exchange = Exchange::of(hidden);
    Exchange { choice, ..exchange }.at_once()
}

/// The same where every rank has the experts of all ranks' tokens.
pub fn experts_gathered(hidden: usize, choice: Option<Transport>) -> Op {
    Exchange {
        choice,
        gathered: true,
        ..Exchange::of(hidden)
    }
    .at_once()
}

/// A row of every rank to each rank, and back again, in two halves each. Its output is the sum of all.
pub fn low_latency(hidden: usize) -> Op {
    let sum = CombineSum::Expert;
    Exchange {
        sum,
        ..Exchange::of(hidden)
    }
    .in_halves()
}

impl Exchange {
    /// Of f32 rows, and nothing else that need not be.
    pub const fn of(hidden: usize) -> Self {
        Self {
            hidden,
            dtype: DataType::F32,
            max_tokens: 1,
            nobody: 0,
            cast: None,
            beside: 0,
            weighted: false,
            arrangement: Arrangement::BySource,
            received_ids: ReceivedIds::Local,
            gathered: false,
            sum: CombineSum::Rank,
            back: DataType::F32,
            cast_back: None,
            output: DataType::F32,
            choice: None,
        }
    }

    /// As a dispatch and a combine.
    pub fn at_once(self) -> Op {
        let op = Op::new("experts", Operation::Combine, move |rank, lease| {
            let d = old(rank, self.output, &[1, self.hidden]);
            self.there_and_back(rank, lease, d)
        });
        Op {
            operations: vec![Operation::Dispatch, Operation::Combine],
            ..op
        }
    }

    /// As a low-latency exchange.
    pub fn in_halves(self) -> Op {
        let operation = Operation::LowLatencyCombine;
        let op = Op::new("low_latency", operation, move |rank, lease| {
            let d = old(rank, self.output, &[1, self.hidden]);
            self.halves(rank, lease, d)
        });
        Op {
            operations: vec![Operation::LowLatencyDispatch, operation],
            meets: false,
            ..op
        }
    }

    /// The experts of so many tokens.
    fn ids(&self, rank: &Rank, tokens: &[usize]) -> Buffer {
        let nobody = std::iter::repeat_n(-1, self.nobody);
        let one: Vec<i32> = (0..rank.size as i32).chain(nobody).collect();
        let all = one.repeat(tokens.iter().product());
        let dims = [tokens, &[one.len()]].concat();
        rank.upload_bytes(DataType::I32, &dims, bytemuck::cast_slice(&all))
    }

    fn weights(&self, rank: &Rank, ids: &Buffer) -> Buffer {
        filled(rank, DataType::F32, ids.shape().dims(), |_| 1.0)
    }

    /// What goes back of the rows that came.
    fn made(&self, rank: &Rank, came: &Buffer) -> Buffer {
        if came.dtype() == self.back {
            return came.clone();
        }
        own(rank, self.back, came.shape().dims())
    }

    fn there_and_back(&self, rank: &Rank, lease: &mut Lease<'_>, mut d: Buffer) -> Ended {
        let rows = own(rank, self.dtype, &[1, self.hidden]);
        let tags = vec![rank.rank as u8; self.beside];
        let beside = rank.upload_bytes(DataType::U8, &[1, self.beside], &tags);
        let ids = self.ids(rank, &[1]);
        let all = self.ids(rank, &[rank.size, self.max_tokens]);
        let [weights, all_weights] = [&ids, &all].map(|ids| self.weights(rank, ids));
        let given = |weights| Some(weights).filter(|_| self.weighted);
        let one: Vec<u8> = 1i32.to_ne_bytes().repeat(rank.size);
        let counts = rank.upload_bytes(DataType::I32, &[rank.size], &one);
        let there = lease.dispatch(DispatchParams {
            rows: rows.view(),
            beside: &[beside.view()][..usize::from(self.beside > 0)],
            route: match self.gathered {
                true => Route::Gathered(GatheredRouting {
                    ids: all.view(),
                    lengths: Lengths::Padded {
                        counts: counts.view(),
                    },
                    weights: given(all_weights.view()),
                    placement: Placement::Ranks,
                }),
                false => Route::Experts {
                    routing: Routing {
                        ids: ids.view(),
                        placement: Placement::Ranks,
                    },
                    weights: given(weights.view()),
                },
            },
            arrangement: self.arrangement,
            max_tokens: self.max_tokens,
            max_recv: (self.arrangement != Arrangement::BySource).then_some(rank.size),
            received_ids: self.received_ids,
            totals: None,
            waits: None,
            cast: self.cast,
            choice: self.choice,
        });
        let there = match there {
            Ok(there) => there,
            Err(e) => return not_there(e),
        };
        // What was cast goes back another way, if it stays in place.
        let stays = self.choice == Some(Transport::InPlace) && self.cast.is_some();
        let result = lease.combine(CombineParams {
            rows: self.made(rank, &there.rows).view(),
            handle: &there.handle,
            sum: self.sum,
            weights: None,
            biases: &[],
            output: Output::Into(d.view_mut()),
            waits: None,
            choice: self.choice.filter(|_| !stays),
        });
        ended(result, d)
    }

    fn halves(&self, rank: &Rank, lease: &mut Lease<'_>, mut d: Buffer) -> Ended {
        let rows = own(rank, self.dtype, &[1, self.hidden]);
        let ids = self.ids(rank, &[1]);
        let weights = self.weights(rank, &ids);
        let mut exchange = rank.low_latency();
        let p = LowLatencyDispatchParams {
            rows: rows.view(),
            routing: Routing {
                ids: ids.view(),
                placement: Placement::Ranks,
            },
            weights: self.weighted.then(|| weights.view()),
            max_tokens: self.max_tokens,
            cast: self.cast,
        };
        let there = lease
            .low_latency_dispatch(exchange.slots().0, p)
            .and_then(|pending| pending.receive(lease));
        let there = match there {
            Ok(there) => there,
            Err(e) => return not_there(e),
        };
        let made = self.made(rank, &there.rows().retain());
        let p = LowLatencyCombineParams {
            rows: made.view(),
            sum: self.sum,
            cast: self.cast_back,
            weights: (self.sum == CombineSum::Expert).then(|| weights.view()),
        };
        let result: Result<_> = lease
            .low_latency_combine(&there, p)
            .and_then(|pending| pending.receive(lease, Output::Into(d.view_mut())));
        ended(result, d)
    }
}

/// What a dispatch writes is its own.
fn not_there(e: brigade_device::Error) -> Ended {
    Ended {
        result: Err(e),
        output: None,
    }
}
