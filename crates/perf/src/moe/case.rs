//! One number of tokens on one rank: what it has, its calls, and their times.

use super::{
    Choice, Moe, Rows,
    among::{Among, Leased},
    apart, expected,
    ways::Ways,
};
use crate::{
    data,
    ranks::{PATIENCE, Rank},
    sample::{Times, Variant, measure},
    trace::{self, Spans},
};
use anyhow::Result;
use brigade::{
    Allocate, Arrangement, Buffer, Call, CombineParams, DataType, DispatchParams,
    LowLatencyCombineParams, LowLatencyDispatchParams, MemoryType, Output, Placement, Plan,
    ReceivedIds, Route, Routing, Transport, View, ViewMut,
};

/// What was measured of a number of tokens.
pub struct Measured {
    pub plan: Plan,
    pub times: Vec<Times>,
    /// Bytes that rank 0 sends to others, one way.
    pub sent_bytes: usize,
    /// Bytes that rank 0 sends to other machines, one way, if there are others.
    pub rail_bytes: Option<usize>,
    /// What the wire alone takes for rows there and back, where it is known.
    pub floor_us: Option<f64>,
    /// Of one call there and back, on every rank.
    pub spans: Vec<Spans>,
}

/// One number of tokens on one rank.
pub struct Case<'a> {
    pub rank: &'a Rank,
    pub among: &'a Among,
    pub options: &'a Moe,
    pub tokens: usize,
    rows: Buffer,
    ids: Buffer,
    weights: Buffer,
    /// Rows that each expert of this rank has got, if they are counted.
    totals: Option<Buffer>,
    pub ways: Ways,
}

impl<'a> Case<'a> {
    pub fn new(rank: &'a Rank, among: &'a Among, options: &'a Moe, tokens: usize) -> Result<Self> {
        let (me, k) = (rank.number(), options.k);
        let numbers = data::numbers(500 + me as u64, tokens * options.hidden);
        let ways = Ways::drawn(rank.size(), tokens, k, options.experts);
        let small = |dtype, bytes: &[u8]| -> Result<Buffer> {
            let shape = [tokens, k];
            let mut buffer = rank
                .device
                .allocate(&rank.on, MemoryType::Device, dtype, &shape)?;
            rank.device.write(&rank.on, buffer.view_mut(), bytes)?;
            Ok(buffer)
        };
        let totals = || -> Result<Buffer> {
            let own = ways.experts_of(me);
            let (memory, dtype) = (MemoryType::Device, DataType::I64);
            let mut totals = rank.device.allocate(&rank.on, memory, dtype, &[own])?;
            let zeros = vec![0; own * dtype.bytes()];
            rank.device.write(&rank.on, totals.view_mut(), &zeros)?;
            Ok(totals)
        };
        let weights: Vec<f32> = (0..tokens * k)
            .map(|i| 1.0 / (1.0 + (i % 8) as f32))
            .collect();
        Ok(Self {
            rows: data::upload(&rank.device, &rank.on, &numbers, [tokens, options.hidden])?,
            ids: small(DataType::I32, bytemuck::cast_slice(ways.ids(me)))?,
            weights: small(DataType::F32, bytemuck::cast_slice(&weights))?,
            totals: options.count.then(totals).transpose()?,
            rank,
            among,
            options,
            tokens,
            ways,
        })
    }

    fn routing(&self) -> Routing<'_> {
        Routing {
            ids: self.ids.view(),
            placement: Placement::Even {
                experts: self.options.experts,
            },
        }
    }

    fn layout(&self) -> brigade::Result<()> {
        let mut lease = self.among.lease(&self.rank.on)?;
        lease.expert_layout(self.routing())
    }

    fn dispatch(&self, lease: &mut Leased<'_>) -> brigade::Result<brigade::Dispatched> {
        let (size, k) = (self.rank.size(), self.options.k);
        let slots = self.options.experts.div_ceil(size);
        lease.dispatch(DispatchParams {
            rows: self.rows.view(),
            beside: &[],
            route: Route::Experts {
                routing: self.routing(),
                weights: Some(self.weights.view()),
            },
            arrangement: match self.options.rows() {
                Rows::Dense => Arrangement::Dense,
                Rows::BySource => Arrangement::BySource,
                Rows::ByExpert => Arrangement::ByExpert { alignment: 1 },
            },
            max_tokens: self.tokens,
            max_recv: match self.options.rows() {
                // Across machines, the host knows what comes.
                Rows::Dense => match self.among {
                    Among::Ranks(_) => Some(size * self.tokens),
                    Among::Machines(_) => None,
                },
                Rows::BySource => None,
                Rows::ByExpert => Some(size * self.tokens * k.min(slots)),
            },
            received_ids: ReceivedIds::Local,
            totals: None,
            waits: None,
            cast: self.options.cast(),
            choice: self.options.choice(),
        })
    }

    pub fn way_there(&self) -> LowLatencyDispatchParams<'_> {
        LowLatencyDispatchParams {
            rows: self.rows.view(),
            routing: self.routing(),
            weights: self.options.by_rank.then(|| self.weights.view()),
            max_tokens: self.tokens,
            cast: self.options.cast(),
        }
    }

    pub fn receive<'s>(
        &self,
        lease: &mut brigade::Lease<'_>,
        pending: brigade::Pending<'s>,
    ) -> brigade::Result<brigade::LowLatencyDispatched<'s>> {
        let mut totals = self.totals.clone();
        let to = brigade::Statistics {
            totals: totals.as_mut().map(Buffer::view_mut),
            waits: None,
        };
        pending.receive_counted(lease, to)
    }

    /// One way, and what was done.
    fn there(&self) -> brigade::Result<Plan> {
        let on = &self.rank.on;
        if !self.options.in_slots() {
            return Ok(self.dispatch(&mut self.among.lease(on)?)?.plan);
        }
        let comm = self.among.comm()?;
        let mut lease = comm.lease(on)?;
        let (mut exchange, p) = (comm.low_latency()?, self.way_there());
        let (slot, call) = (exchange.slots().0, p.check(0)?);
        let pending = lease.low_latency_dispatch(slot, p)?;
        self.receive(&mut lease, pending)?;
        Ok(comm.explain(&Call::LowLatencyDispatch(call))?)
    }

    /// Memory for what stands for the experts' rows.
    pub fn made(&self) -> Result<Buffer> {
        let (device, on) = (&self.rank.device, &self.rank.on);
        let shape = self.made_shape()?;
        Ok(device.allocate(on, MemoryType::Device, DataType::BF16, &shape)?)
    }

    /// The shape of what experts make of rows.
    fn made_shape(&self) -> brigade::Result<Vec<usize>> {
        let hidden = self.options.hidden;
        if self.options.in_slots() {
            let slots = self.ways.experts_of(self.rank.number());
            return Ok(vec![slots, self.tokens * self.rank.size(), hidden]);
        }
        let first = self.dispatch(&mut self.among.lease(&self.rank.on)?)?;
        Ok(first.handle.shape(hidden)?.dims().to_vec())
    }

    /// What goes back of an exchange in two halves.
    pub fn way_back<'m>(&'m self, rows: View<'m>) -> LowLatencyCombineParams<'m> {
        LowLatencyCombineParams {
            rows,
            sum: self.options.sum(),
            cast: self.options.cast_back(),
            weights: (!self.options.by_rank).then(|| self.weights.view()),
        }
    }

    /// There and back, with what `make` makes of received rows and their scales; with the rows themselves, if it makes nothing.
    pub fn both(
        &self,
        make: impl Fn(View<'_>, Option<View<'_>>) -> Result<Option<Buffer>>,
    ) -> Result<Buffer> {
        let on = &self.rank.on;
        let output = Output::Allocate(DataType::BF16);
        if self.options.in_slots() {
            let comm = self.among.comm()?;
            let (mut lease, mut exchange) = (comm.lease(on)?, comm.low_latency()?);
            let slot = exchange.slots().0;
            let pending = lease.low_latency_dispatch(slot, self.way_there())?;
            let there = self.receive(&mut lease, pending)?;
            let made = make(there.rows(), there.scales())?;
            let p = self.way_back(made.as_ref().map_or(there.rows(), Buffer::view));
            let back = lease.low_latency_combine(&there, p)?;
            return Ok(back
                .receive(&mut lease, output)?
                .ok_or(brigade::Error::Closed)?);
        }
        let mut lease = self.among.lease(on)?;
        let there = self.dispatch(&mut lease)?;
        // Rows that were cast stay in place, and what was made of them goes back another way.
        let in_place = self.options.choice() == Some(Transport::InPlace);
        let fp8 = self.options.fp8;
        let made = match in_place && !fp8 {
            true => None,
            false => make(there.rows.view(), there.scales.as_ref().map(Buffer::view))?,
        };
        let back = lease.combine(CombineParams {
            rows: made.as_ref().unwrap_or(&there.rows).view(),
            handle: &there.handle,
            sum: self.options.sum(),
            weights: None,
            biases: &[],
            output,
            waits: None,
            choice: (self.options.transport.back()).filter(|_| !(in_place && fp8)),
        })?;
        Ok(back.d.ok_or(brigade::Error::Closed)?)
    }

    /// The same with what stands for the experts' rows, without a word on the host.
    pub fn timed(&self, made: &Buffer) -> brigade::Result<()> {
        let both = self.both(|_, _| Ok(Some(made.clone())));
        both.map(drop).map_err(|error| match error.downcast() {
            Ok(error) => error,
            Err(_) => brigade::Error::Closed,
        })
    }

    pub fn measure(&self) -> Result<Measured> {
        let (rank, common) = (self.rank, &self.options.common);
        if common.check {
            rank.agree(expected::check(self))?;
        }
        let how = (common.calls, common.graph);
        let made = self.made()?;
        let plan = self.there()?;
        let dispatch = || self.there().map(drop);
        let mut variants = vec![
            Variant::new(rank, "layout", how, || self.layout())?,
            Variant::new(rank, "dispatch", how, dispatch)?,
            Variant::new(rank, "total", how, || self.timed(&made))?,
        ];
        let me = rank.number();
        let peers: Vec<usize> = (0..rank.size()).filter(|&r| r != me).collect();
        let buffer =
            |rows: usize| data::poisoned(&rank.device, &rank.on, [rows, self.options.hidden]);
        let to = |peer: &usize| buffer(self.ways.rows_between(me, *peer));
        let from = |peer: &usize| buffer(self.ways.rows_between(*peer, me));
        let out: Vec<Buffer> = peers.iter().map(to).collect::<Result<_>>()?;
        let mut into: Vec<Buffer> = peers.iter().map(from).collect::<Result<_>>()?;
        let mut back: Vec<Buffer> = peers.iter().map(to).collect::<Result<_>>()?;
        if let Some(nccl) = &rank.nccl {
            let of_nccl = peers.clone();
            let both = move || {
                let sends: Vec<(View<'_>, usize)> =
                    out.iter().map(Buffer::view).zip(of_nccl.clone()).collect();
                let mut takes: Vec<(ViewMut<'_>, usize)> = into
                    .iter_mut()
                    .map(Buffer::view_mut)
                    .zip(of_nccl.clone())
                    .collect();
                nccl.exchange(&rank.on, &sends, &mut takes)?;
                let sends: Vec<(View<'_>, usize)> =
                    into.iter().map(Buffer::view).zip(of_nccl.clone()).collect();
                let mut takes: Vec<(ViewMut<'_>, usize)> = back
                    .iter_mut()
                    .map(Buffer::view_mut)
                    .zip(of_nccl.clone())
                    .collect();
                nccl.exchange(&rank.on, &sends, &mut takes)
            };
            variants.push(Variant::new(rank, "nccl", how, both)?);
        }
        let mut times = measure(rank, &mut variants, common.rounds)?;
        times.extend(apart::times(self, &made)?);
        let spans = trace::record(rank, || self.timed(&made))?;
        rank.on.sync(PATIENCE)?;
        self.among.check()?;
        let to = |&peer: &usize| match self.options.transport {
            Choice::Gather => self.tokens,
            _ => self.ways.rows_between(me, peer),
        };
        let rows: usize = peers.iter().map(to).sum();
        let row_bytes = self.options.row_bytes();
        let wire = self.options.wire_gb_per_s().map(|gb| gb * 1e3);
        let machines = self.among.machines();
        Ok(Measured {
            plan,
            times,
            sent_bytes: rows * row_bytes.0,
            rail_bytes: machines.map(|cut| self.ways.rows_along(me, cut) * row_bytes.0),
            floor_us: wire.map(|bytes_per_us| match machines {
                Some(cut) => self.ways.rail_floor_us(row_bytes, cut, bytes_per_us),
                None => self
                    .ways
                    .floor_us(row_bytes, self.options.sum(), bytes_per_us),
            }),
            spans,
        })
    }
}
