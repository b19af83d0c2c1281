//! Rows to their experts and back, in bf16: the layout, and all of it, beside NCCL's grouped sends of rows that are laid out and
//! counted already.

use crate::{
    Common, data, meta,
    ranks::{PATIENCE, Rank, Ranks},
    rounded,
    sample::{Times, Variant, measure},
    trace::{self, Spans},
};
use anyhow::{Result, ensure};
use brigade::{
    Allocate, Arrangement, Buffer, Call, CombineCast, CombineParams, CombineSum, Comm, CommConfig,
    DataType, DispatchParams, Fp8Cast, LowLatency, LowLatencyCombineParams,
    LowLatencyDispatchParams, MemoryType, Output, ParallelMode, Placement, Plan, ReceivedIds,
    Route, Routing, ScaleFormat, Transport, View, ViewMut,
};
use clap::{Args, ValueEnum};
use half::bf16;
use rand::{SeedableRng, rngs::StdRng, seq::index::sample};
use serde_json::{Map, Value, json};
use std::path::PathBuf;

/// What is measured.
#[derive(Clone, Debug, Args)]
pub struct Moe {
    #[command(flatten)]
    pub common: Common,
    /// Tokens of each rank
    #[arg(long, num_args = 1.., value_delimiter = ',', default_values_t = [1, 8, 32, 128, 512, 1024, 4096])]
    tokens: Vec<usize>,
    /// Columns
    #[arg(long, default_value_t = 7168)]
    hidden: usize,
    /// Experts over all ranks
    #[arg(long, default_value_t = 256)]
    experts: usize,
    /// Experts of a token
    #[arg(short, long, default_value_t = 8)]
    k: usize,
    /// How received rows lie
    #[arg(long, value_enum, default_value = "by-source")]
    rows: Rows,
    /// Cast rows to fp8 on the way to their experts
    #[arg(long)]
    fp8: bool,
    /// How rows travel
    #[arg(long, value_enum, default_value = "auto")]
    transport: Choice,
    /// With low-latency: each rank adds its experts' rows before they go back
    #[arg(long)]
    by_rank: bool,
    /// With low-latency: how rows travel back
    #[arg(long, value_enum, default_value = "as-is")]
    back: Payload,
    /// With low-latency: count what every expert gets
    #[arg(long)]
    count: bool,
    /// Most multiprocessors that communication may use [default: the plan's choice]
    #[arg(long, value_name = "SMS")]
    sm_budget: Option<u16>,
    /// Write a trace of one call there and back to this file, for Perfetto, and a picture of it beside it, with .svg behind the name; of
    /// the last number of tokens
    #[arg(long, value_name = "FILE")]
    trace: Option<PathBuf>,
}

/// How received rows lie.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum Rows {
    /// One after the other, by source
    Dense,
    /// With room for all that a source may send
    BySource,
    /// A row for each expert; sums of a rank's experts go back
    ByExpert,
}

/// How rows travel back.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum Payload {
    /// In bf16
    AsIs,
    /// Cast to fp8, with scales in f32
    Fp8,
    /// Cast to LogFMT-10
    Logfmt10,
}

/// A forced transport.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum Choice {
    /// The plan's
    Auto,
    /// Rows are written to their places at each receiver
    OneSided,
    /// Rows are their own flags
    Pushed,
    /// Rows pass through queues
    Fifo,
    /// All ranks get all rows, and keep their own
    Gather,
    /// Rows are written to their places at each receiver, stay there, and are added up from there
    InPlace,
    /// Rows are written to their places in a slot; sent and received apart, each expert's packed in its own room
    LowLatency,
}

impl Moe {
    fn choice(&self) -> Option<Transport> {
        match self.transport {
            Choice::Auto | Choice::LowLatency => None,
            Choice::OneSided => Some(Transport::OneSided),
            Choice::Pushed => Some(Transport::Pushed),
            Choice::Fifo => Some(Transport::Fifo),
            Choice::Gather => Some(Transport::Gather),
            Choice::InPlace => Some(Transport::InPlace),
        }
    }

    /// Room for the rows of all.
    fn config(&self, tokens: usize, size: usize) -> CommConfig {
        let bytes = size * (tokens * (2 * self.hidden + 16 * self.k + 64) + 8192);
        // What is pushed takes a word more for every sixteen.
        let pushed = bytes + bytes / 16;
        let config = CommConfig {
            dispatch_bytes: bytes,
            combine_bytes: bytes,
            all_reduce_bytes: pushed.clamp(8 << 20, 256 << 20),
            gather_bytes: 0,
            reduce_scatter_bytes: 0,
            sm_budget: self.sm_budget,
            ..CommConfig::new(ParallelMode::Ep)
        };
        match self.in_slots() {
            true => config.for_low_latency((tokens, self.k), self.hidden, DataType::BF16, size),
            false => config,
        }
    }

    fn cast_back(&self) -> Option<CombineCast> {
        match self.back {
            Payload::AsIs => None,
            Payload::Fp8 => Some(CombineCast::Fp8(ScaleFormat::F32)),
            Payload::Logfmt10 => Some(CombineCast::LogFmt10),
        }
    }

    /// How far what comes back as it went may be off, relatively.
    fn tolerance(&self) -> f64 {
        match self.cast_back() {
            None => 2e-2,
            // Half a step of fp8, and what is rounded besides.
            Some(CombineCast::Fp8(_)) => 8e-2,
            // The same of 32 binary orders of magnitude in 510 steps.
            Some(CombineCast::LogFmt10) => 4e-2,
        }
    }

    /// What comes back of a token.
    fn sum(&self) -> CombineSum {
        match (self.in_slots(), self.rows) {
            (true, _) if self.by_rank => CombineSum::ExpertByRank,
            (true, _) => CombineSum::Expert,
            (false, Rows::ByExpert) => CombineSum::ExpertByRank,
            (false, Rows::Dense | Rows::BySource) => CombineSum::Rank,
        }
    }

    fn in_slots(&self) -> bool {
        self.transport == Choice::LowLatency
    }

    fn cast(&self) -> Option<Fp8Cast> {
        self.fp8.then_some(Fp8Cast {
            format: ScaleFormat::F32,
            column_major: false,
        })
    }
}

/// What was measured of a number of tokens.
struct Measured {
    plan: Plan,
    times: Vec<Times>,
    /// Bytes that rank 0 sends to others, one way.
    sent_bytes: usize,
    /// Of one call there and back, on every rank.
    spans: Vec<Spans>,
}

/// One number of tokens on one rank.
struct Case<'a> {
    rank: &'a Rank,
    comm: &'a Comm,
    options: &'a Moe,
    tokens: usize,
    rows: Buffer,
    ids: Buffer,
    weights: Buffer,
    /// Rows that each expert of this rank has got, if they are counted.
    totals: Option<Buffer>,
    /// Experts of every rank's tokens.
    all_ids: Vec<Vec<i32>>,
}

/// Different experts for each token.
fn experts(rank: usize, tokens: usize, k: usize, experts: usize) -> Vec<i32> {
    let mut rng = StdRng::seed_from_u64(77 + rank as u64);
    (0..tokens)
        .flat_map(|_| sample(&mut rng, experts, k).into_vec())
        .map(|e| e as i32)
        .collect()
}

impl<'a> Case<'a> {
    fn new(rank: &'a Rank, comm: &'a Comm, options: &'a Moe, tokens: usize) -> Result<Self> {
        let (me, k) = (rank.number(), options.k);
        let numbers = data::numbers(500 + me as u64, tokens * options.hidden);
        let of = |r| experts(r, tokens, k, options.experts);
        let all_ids: Vec<_> = (0..rank.size()).map(of).collect();
        let small = |dtype, bytes: &[u8]| -> Result<Buffer> {
            let shape = [tokens, k];
            let mut buffer = rank
                .device
                .allocate(&rank.on, MemoryType::Device, dtype, &shape)?;
            rank.device.write(&rank.on, buffer.view_mut(), bytes)?;
            Ok(buffer)
        };
        let totals = || -> Result<Buffer> {
            let placement = brigade::PlacementCall::Even {
                experts: options.experts,
            };
            let own = brigade::plan::routes::Slots::new(placement, rank.size()).of(me);
            let (memory, dtype) = (MemoryType::Device, DataType::I64);
            let mut totals = rank
                .device
                .allocate(&rank.on, memory, dtype, &[own.len()])?;
            let zeros = vec![0; own.len() * dtype.bytes()];
            rank.device.write(&rank.on, totals.view_mut(), &zeros)?;
            Ok(totals)
        };
        let weights: Vec<f32> = (0..tokens * k)
            .map(|i| 1.0 / (1.0 + (i % 8) as f32))
            .collect();
        Ok(Self {
            rows: data::upload(&rank.device, &rank.on, &numbers, [tokens, options.hidden])?,
            ids: small(DataType::I32, bytemuck::cast_slice(&all_ids[me]))?,
            weights: small(DataType::F32, bytemuck::cast_slice(&weights))?,
            totals: options.count.then(totals).transpose()?,
            rank,
            comm,
            options,
            tokens,
            all_ids,
        })
    }

    fn owner(&self, expert: i32) -> usize {
        let (experts, size) = (self.options.experts, self.rank.size());
        brigade::plan::routes::Slots::new(brigade::PlacementCall::Even { experts }, size)
            .rank_of(expert as usize)
            .unwrap_or(0)
    }

    /// Rows that go from one rank to another.
    fn rows_between(&self, from: usize, to: usize) -> usize {
        self.all_ids[from]
            .chunks(self.options.k)
            .filter(|ids| ids.iter().any(|&e| self.owner(e) == to))
            .count()
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
        self.comm
            .lease(&self.rank.on)?
            .expert_layout(self.routing())
            .map(drop)
    }

    fn dispatch(&self, lease: &mut brigade::Lease<'_>) -> brigade::Result<brigade::Dispatched> {
        let (size, k) = (self.rank.size(), self.options.k);
        let slots = self.options.experts.div_ceil(size);
        lease.dispatch(DispatchParams {
            rows: self.rows.view(),
            beside: &[],
            route: Route::Experts {
                routing: self.routing(),
                weights: Some(self.weights.view()),
            },
            arrangement: match self.options.rows {
                Rows::Dense => Arrangement::Dense,
                Rows::BySource => Arrangement::BySource,
                Rows::ByExpert => Arrangement::ByExpert { alignment: 1 },
            },
            max_tokens: self.tokens,
            max_recv: match self.options.rows {
                Rows::Dense => Some(size * self.tokens),
                Rows::BySource => None,
                Rows::ByExpert => Some(size * self.tokens * k.min(slots)),
            },
            received_ids: ReceivedIds::Local,
            totals: None,
            cast: self.options.cast(),
            choice: self.options.choice(),
        })
    }

    fn to_slot(&self) -> LowLatencyDispatchParams<'_> {
        LowLatencyDispatchParams {
            rows: self.rows.view(),
            routing: self.routing(),
            weights: self.options.by_rank.then(|| self.weights.view()),
            max_tokens: self.tokens,
            cast: self.options.cast(),
        }
    }

    fn receive<'s>(
        &self,
        lease: &mut brigade::Lease<'_>,
        pending: brigade::Pending<'s>,
    ) -> brigade::Result<brigade::LowLatencyDispatched<'s>> {
        match self.totals.clone() {
            Some(mut totals) => pending.receive_counted(lease, totals.view_mut()),
            None => pending.receive(lease),
        }
    }

    /// One way, and what was done.
    fn there(&self) -> brigade::Result<Plan> {
        let mut lease = self.comm.lease(&self.rank.on)?;
        if !self.options.in_slots() {
            return Ok(self.dispatch(&mut lease)?.plan);
        }
        let (mut exchange, p) = (LowLatency::default(), self.to_slot());
        let (slot, call) = (exchange.slots().0, p.check(0)?);
        let pending = lease.low_latency_dispatch(slot, p)?;
        self.receive(&mut lease, pending)?;
        Ok(self.comm.explain(&Call::LowLatencyDispatch(call))?)
    }

    /// The shape of what experts make of rows.
    fn made_shape(&self) -> brigade::Result<Vec<usize>> {
        let hidden = self.options.hidden;
        if self.options.in_slots() {
            let placement = self.routing().check()?.1;
            let (me, size) = (self.rank.number(), self.rank.size());
            let slots = brigade::plan::routes::Slots::new(placement, size).of(me);
            return Ok(vec![slots.len(), self.tokens * size, hidden]);
        }
        let first = self.dispatch(&mut self.comm.lease(&self.rank.on)?)?;
        Ok(first.handle.shape(hidden)?.dims().to_vec())
    }

    /// There and back, with what stands for the experts' rows, or with the rows themselves.
    fn both(&self, made: Option<&Buffer>) -> brigade::Result<Buffer> {
        let mut lease = self.comm.lease(&self.rank.on)?;
        let output = Output::Allocate(DataType::BF16);
        if self.options.in_slots() {
            let mut exchange = LowLatency::default();
            let slot = exchange.slots().0;
            let pending = lease.low_latency_dispatch(slot, self.to_slot())?;
            let there = self.receive(&mut lease, pending)?;
            let p = LowLatencyCombineParams {
                rows: made.map_or(there.rows(), Buffer::view),
                sum: self.options.sum(),
                cast: self.options.cast_back(),
                weights: (!self.options.by_rank).then(|| self.weights.view()),
            };
            let back = lease.low_latency_combine(&there, p)?;
            return back
                .receive(&mut lease, output)?
                .ok_or(brigade::Error::Closed);
        }
        let there = self.dispatch(&mut lease)?;
        let made = made.filter(|_| self.options.transport != Choice::InPlace);
        let back = lease.combine(CombineParams {
            rows: made.unwrap_or(&there.rows).view(),
            handle: &there.handle,
            sum: self.options.sum(),
            weights: None,
            biases: &[],
            output,
            choice: self.options.choice(),
        })?;
        back.d.ok_or(brigade::Error::Closed)
    }

    /// Rows that come back as they went are sums of themselves.
    fn check(&self) -> Result<()> {
        if self.options.fp8 {
            return Ok(());
        }
        let back = self.both(None)?;
        let mut got = vec![bf16::ZERO; self.tokens * self.options.hidden];
        let bytes = bytemuck::cast_slice_mut(&mut got);
        self.rank.device.read(&self.rank.on, back.view(), bytes)?;
        let me = self.rank.number();
        let numbers = data::numbers(500 + me as u64, self.tokens * self.options.hidden);
        let (hidden, k) = (self.options.hidden, self.options.k);
        for token in 0..self.tokens {
            let ids = &self.all_ids[me][token * k..][..k];
            let mut factor = 0f64;
            for rank in 0..self.rank.size() {
                let own: Vec<usize> = (0..k).filter(|&e| self.owner(ids[e]) == rank).collect();
                factor += match self.options.sum() {
                    CombineSum::Rank => f64::from(u8::from(!own.is_empty())),
                    CombineSum::Expert | CombineSum::ExpertByRank => own
                        .iter()
                        .map(|e| 1.0 / (1.0 + ((token * k + e) % 8) as f64))
                        .sum(),
                };
            }
            for column in 0..hidden {
                let at = token * hidden + column;
                let (got, want) = (got[at].to_f64(), numbers[at].to_f64() * factor);
                let off = (got - want).abs();
                ensure!(
                    off <= self.options.tolerance() * want.abs().max(1e-2),
                    "token {token}, column {column}: {got} instead of {want}"
                );
            }
        }
        Ok(())
    }

    fn measure(&self) -> Result<Measured> {
        let (rank, common) = (self.rank, &self.options.common);
        if common.check {
            rank.agree(self.check())?;
        }
        let how = (common.calls, common.graph);
        let shape = self.made_shape()?;
        let made = rank
            .device
            .allocate(&rank.on, MemoryType::Device, DataType::BF16, &shape)?;
        let plan = self.there()?;
        let dispatch = || self.there().map(drop);
        let mut variants = vec![
            Variant::new(rank, "layout", how, || self.layout())?,
            Variant::new(rank, "dispatch", how, dispatch)?,
            Variant::new(rank, "total", how, || self.both(Some(&made)).map(drop))?,
        ];
        let me = rank.number();
        let peers: Vec<usize> = (0..rank.size()).filter(|&r| r != me).collect();
        let buffer =
            |rows: usize| data::poisoned(&rank.device, &rank.on, [rows, self.options.hidden]);
        let to = |peer: &usize| buffer(self.rows_between(me, *peer));
        let from = |peer: &usize| buffer(self.rows_between(*peer, me));
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
        let times = measure(rank, &mut variants, common.rounds)?;
        let spans = trace::record(rank, || self.both(Some(&made)).map(drop))?;
        rank.on.sync(PATIENCE)?;
        self.comm.check()?;
        let to = |&peer: &usize| match self.options.transport {
            Choice::Gather => self.tokens,
            _ => self.rows_between(me, peer),
        };
        let rows: usize = peers.iter().map(to).sum();
        Ok(Measured {
            plan,
            times,
            sent_bytes: rows * self.options.hidden * 2,
            spans,
        })
    }
}

fn row(options: &Moe, tokens: usize, measured: &Measured) -> Value {
    let of = |name: &str| {
        let found = measured.times.iter().find(|t| t.name == name);
        found.map_or(Value::Null, |t| rounded(t.median))
    };
    let number = |v: Value| v.as_f64().unwrap_or(f64::NAN);
    let samples: Map<_, _> = measured
        .times
        .iter()
        .map(|t| {
            (
                t.name.to_owned(),
                t.samples.iter().map(|&s| rounded(s)).collect(),
            )
        })
        .collect();
    json!({
        "tokens": tokens, "hidden": options.hidden, "k": options.k, "experts": options.experts,
        "transport": match options.in_slots() {
            true => format!("low latency, {}", measured.plan),
            false => measured.plan.to_string(),
        },
        "rows": format!("{:?}", options.rows), "sum": format!("{:?}", options.sum()),
        "dtype": if options.fp8 { "fp8 there, bf16 back" } else { "bf16" },
        "back": format!("{:?}", options.back),
        "graph": options.common.graph, "sms": options.sm_budget, "sent_bytes": measured.sent_bytes,
        "layout_us": of("layout"), "dispatch_us": of("dispatch"),
        "combine_us": rounded(number(of("total")) - number(of("dispatch"))),
        "total_us": of("total"), "nccl_us": of("nccl"), "samples": samples,
    })
}

/// Measures all numbers of tokens; gives a table.
pub fn run(options: &Moe, ranks: &Ranks) -> Result<String> {
    ensure!(
        options.k <= options.experts,
        "a token names {} of {} experts",
        options.k,
        options.experts
    );
    let meta = meta::meta(ranks)?;
    let measured = ranks.run(&options.common, |rank| {
        let one = |&tokens: &usize| {
            let comm = rank.join(&options.config(tokens, rank.size()))?;
            Case::new(rank, &comm, options, tokens)?.measure()
        };
        options.tokens.iter().map(one).collect::<Result<Vec<_>>>()
    })?;
    if !ranks.speak() {
        return Ok(String::new());
    }
    let mut text = format!(
        "{:>7} {:>10} {:>9} {:>11} {:>10} {:>9} {:>9}\n",
        "tokens", "sent", "layout us", "dispatch us", "combine us", "total us", "nccl us"
    );
    let mut rows = Vec::new();
    if let (Some(path), Some(last)) = (&options.trace, measured.last()) {
        let title = format!(
            "{} tokens, {} ranks, {}",
            options.tokens.last().unwrap_or(&0),
            last.spans.len(),
            last.plan
        );
        trace::draw(path, &title, &last.spans)?;
    }
    for (&tokens, measured) in options.tokens.iter().zip(&measured) {
        let row = row(options, tokens, measured);
        let of = |name: &str| row[name].as_f64().unwrap_or(f64::NAN);
        text += &format!(
            "{tokens:>7} {:>10} {:>9.1} {:>11.1} {:>10.1} {:>9.1} {:>9.1}\n",
            measured.sent_bytes,
            of("layout_us"),
            of("dispatch_us"),
            of("combine_us"),
            of("total_us"),
            of("nccl_us"),
        );
        rows.push(row);
    }
    options.common.write(&meta, &rows)?;
    Ok(text)
}
