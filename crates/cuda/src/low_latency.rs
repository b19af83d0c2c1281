//! The low-latency exchange: rows go straight to their places at the receivers, a word that tells of it behind each; who receives packs what has come.
//! Each half is one launch, and nothing waits between them.

use crate::{
    Kernel, KernelSet, Missing,
    combine::sum_code,
    comm::{CudaComm, unexpected},
    dispatch::format_code,
    in_turn::{InTurn, WIDEST, use_of},
    job::Job,
    memory::check_reach,
    routing::Placed,
    steps::Use,
    types,
};
use brigade_device::{
    Buffer, Call, CombineCast, CombineSum, DataType, LowLatencyBack, LowLatencyCombineParams,
    LowLatencyDispatchCall, LowLatencyDispatchParams, LowLatencyRows, LowLatencySent, Output,
    Placement, Plan, Result, ScaleFormat, Statistics, Turn, ViewMut,
};
use brigade_kernels::LowLatencyParams as Parameters;
use brigade_plan::{
    dispatch::part_bytes,
    low_latency::{BackRow, Section, There, Words},
    routes::Slots,
};
use brigade_sync::Half;
use std::sync::Arc;

/// Its kernels, in the order in which they run.
#[derive(Debug)]
pub(crate) struct LowLatencyKernels {
    send: Kernel<Parameters>,
    receive: Kernel<Parameters>,
    back: Kernel<Parameters>,
    back_sums: Kernel<Parameters>,
    sum: Kernel<Parameters>,
}

impl LowLatencyKernels {
    pub(crate) fn load(set: &Arc<KernelSet>) -> Result<Self, Missing> {
        Ok(Self {
            send: set.variant("_send")?,
            receive: set.variant("_receive")?,
            back: set.variant("_back")?,
            back_sums: set.variant("_back_sums")?,
            sum: set.variant("_sum")?,
        })
    }
}

/// Threads of a block with one row that have no part in sending it.
const NAMING: u32 = 64;

/// What a dispatch reads.
struct Own {
    rows: Buffer,
    ids: Buffer,
    map: Option<Buffer>,
    weights: Option<Buffer>,
}

impl CudaComm {
    fn begin_exchange(&self, slot: u8, call: &Call) -> Result<(u64, Half)> {
        match self.core.plan(call)? {
            Plan::LowLatency { .. } => {
                Ok(self.core.issue.lock().exchanges[usize::from(slot)].begin())
            }
            plan => Err(unexpected(&plan)),
        }
    }

    fn receive_exchange(&self, sent: &LowLatencySent) -> Result<Half> {
        sent.check(self.core.control.origin())?;
        let mut issue = self.core.issue.lock();
        issue.exchanges[usize::from(sent.call.slot)].receive(sent.ticket)
    }

    pub(crate) fn send_low_latency(
        &self,
        turn: &Turn,
        slot: u8,
        p: LowLatencyDispatchParams<'_>,
    ) -> Result<LowLatencySent> {
        let (device, lane) = (self.gpu(), self.gpu().lane(turn.stream())?);
        let group = *self.core.control.group();
        let call = p.check(slot)?;
        let signed = Call::LowLatencyDispatch(call.clone());
        let tokens = p.rows.shape().rows();
        let own = Own {
            rows: p.rows.retain(),
            ids: p.routing.ids.retain(),
            map: match p.routing.placement {
                Placement::Map { slots, .. } => Some(slots.retain()),
                Placement::Even { .. } | Placement::Ranks => None,
            },
            weights: p.weights.map(|weights| weights.retain()),
        };
        check_reach(&device.card, "rows.memory", &own.rows)?;
        check_reach(&device.card, "ids.memory", &own.ids)?;
        if let Some(map) = &own.map {
            check_reach(&device.card, "placement.slots.memory", map)?;
        }
        if let Some(weights) = &own.weights {
            check_reach(&device.card, "weights.memory", weights)?;
        }
        let chosen = device.scratch(lane, DataType::I32, &[tokens, call.k])?;
        let (ticket, half) = self.begin_exchange(slot, &signed)?;
        let sent = LowLatencySent {
            group,
            origin: self.core.control.origin(),
            ticket,
            call,
            chosen,
        };
        let mut kept = vec![&own.rows, &own.ids, &sent.chosen];
        kept.extend(own.map.iter().chain(&own.weights));
        let of = use_of(slot, half);
        let half = (InTurn::Send, of);
        self.core
            .in_turn(turn.stream(), &signed, half, &kept, |job| {
                job.send_in_turn(of, |job| job.send_there(&sent, &own, of))
            })?;
        Ok(sent)
    }

    pub(crate) fn receive_low_latency(
        &self,
        turn: &Turn,
        sent: &LowLatencySent,
        to: Statistics<'_>,
    ) -> Result<LowLatencyRows> {
        let (device, lane) = (self.gpu(), self.gpu().lane(turn.stream())?);
        let half = self.receive_exchange(sent)?;
        let own = Slots::new(sent.call.placement, sent.group.size).of(sent.group.rank);
        let new = |dtype, dims: &[usize]| device.scratch(lane, dtype, dims);
        let given = LowLatencyRows::new(sent, own.len(), new)?;
        if let Some(totals) = &to.totals {
            given.check_totals(totals)?;
        }
        let Statistics { totals, waits } = to;
        let [totals, waits] = [totals, waits].map(|to| to.map(|to| to.as_view().retain()));
        for (field, to) in [("totals.memory", &totals), ("waits.memory", &waits)] {
            if let Some(to) = to {
                check_reach(&device.card, field, to)?;
            }
        }
        let kept: Vec<&Buffer> = given.buffers().chain(&totals).chain(&waits).collect();
        let signed = Call::LowLatencyDispatch(sent.call.clone());
        let of = use_of(sent.call.slot, half);
        let half = (InTurn::Receive, of);
        self.core
            .in_turn(turn.stream(), &signed, half, &kept, |job| {
                job.adds_waits(waits.as_ref());
                job.receive_in_turn(of, |job| job.receive_there(&given, totals.as_ref(), of))
            })?;
        Ok(given)
    }

    pub(crate) fn send_low_latency_back(
        &self,
        turn: &Turn,
        there: &LowLatencyRows,
        p: LowLatencyCombineParams<'_>,
    ) -> Result<LowLatencyBack> {
        let device = self.gpu();
        let control = &self.core.control;
        let call = p.check(there, control.group(), control.origin())?;
        let signed = Call::LowLatencyCombine(call.clone());
        let rows = p.rows.retain();
        let weights = p.weights.map(|weights| weights.retain());
        check_reach(&device.card, "rows.memory", &rows)?;
        if let Some(weights) = &weights {
            check_reach(&device.card, "weights.memory", weights)?;
        }
        // Before an exchange begins.
        device.lane(turn.stream())?;
        let (ticket, half) = self.begin_exchange(call.there.slot, &signed)?;
        let back = LowLatencyBack {
            sent: LowLatencySent {
                ticket,
                ..there.sent.clone()
            },
            call,
            weights,
        };
        let mut kept = vec![&rows];
        match &there.held {
            Some(held) if back.call.sum == CombineSum::ExpertByRank => {
                kept.extend([&held.rows, &held.weights]);
            }
            _ => kept.extend([&there.counts, &there.sources]),
        }
        let of = use_of(back.sent.call.slot, half);
        let half = (InTurn::Send, of);
        self.core
            .in_turn(turn.stream(), &signed, half, &kept, |job| {
                job.send_in_turn(of, |job| job.send_back(&back, there, &rows, of))
            })?;
        Ok(back)
    }

    pub(crate) fn receive_low_latency_back(
        &self,
        turn: &Turn,
        back: &LowLatencyBack,
        output: Output<'_>,
        waits: Option<ViewMut<'_>>,
    ) -> Result<Option<Buffer>> {
        let (device, lane) = (self.gpu(), self.gpu().lane(turn.stream())?);
        let dims = [back.sent.chosen.shape().rows(), back.call.hidden];
        let (d, new) = match output {
            Output::Into(view) => (view.as_view().retain(), false),
            Output::Allocate(dtype) => (device.scratch(lane, dtype, &dims)?, true),
        };
        check_reach(&device.card, "output.memory", &d)?;
        let waits = waits.map(|waits| waits.as_view().retain());
        if let Some(waits) = &waits {
            check_reach(&device.card, "waits.memory", waits)?;
        }
        let half = self.receive_exchange(&back.sent)?;
        let signed = Call::LowLatencyCombine(back.call.clone());
        let mut kept = vec![&back.sent.chosen, &d];
        kept.extend(back.weights.iter().chain(&waits));
        let of = use_of(back.sent.call.slot, half);
        let half = (InTurn::Receive, of);
        self.core
            .in_turn(turn.stream(), &signed, half, &kept, |job| {
                job.adds_waits(waits.as_ref());
                job.receive_in_turn(of, |job| job.add_up_back(back, &d, of))
            })?;
        Ok(new.then_some(d))
    }
}

impl Job<'_> {
    /// What all kernels are told.
    fn exchanging_rows(&self, sent: &LowLatencySent, of: Use) -> Parameters {
        let (core, call) = (self.core, &sent.call);
        let placed = Placed::from(call.placement);
        let slots = Slots::new(call.placement, core.size()).total();
        let layout = core.control.layout();
        let half = layout.half_bytes(of.area);
        Parameters {
            half: core.data_offset(of) as u64,
            part_bytes: part_bytes(half, core.size()) as u64,
            told: (core.data_start() + layout.told_start(of.area.slot(), of.half)) as u64,
            told_bytes: 8 * Words::new(call, core.size()).count() as u64,
            chosen: sent.chosen.address(),
            tokens: sent.chosen.shape().rows() as u32,
            max_tokens: call.max_tokens as u32,
            k: call.k as u32,
            placement: placed.code,
            experts: placed.experts,
            copies: placed.copies,
            per_rank: placed.per_rank,
            slots_each: (slots / core.size()) as u32,
            slots_more: (slots % core.size()) as u32,
            room: call.room(core.size()) as u32,
            ..self.half_in_turn(of)
        }
    }

    /// The same of the way there.
    fn there(&self, sent: &LowLatencySent, of: Use) -> Parameters {
        let there = There::new(&sent.call);
        let of_each = [
            Section::Row,
            Section::Scales,
            Section::Experts,
            Section::Weights,
        ]
        .map(|s| there.of(s));
        Parameters {
            section: of_each.map(|(start, _)| start as u64),
            row_bytes: of_each.map(|(_, each)| each as u64),
            ..self.exchanging_rows(sent, of)
        }
    }

    fn send_there(&self, sent: &LowLatencySent, own: &Own, of: Use) -> Result<()> {
        let mut parameters = self.there(sent, of);
        let tokens = sent.chosen.shape().rows();
        parameters.from = own.rows.address();
        parameters.hidden = own.rows.shape().row_len() as u32;
        if let Some(cast) = sent.call.cast {
            parameters.from_type = types::float_code(own.rows.dtype());
            parameters.payload = fp8_code(cast.format);
        }
        parameters.weights = own.weights.as_ref().map_or(0, Buffer::address);
        parameters.ids = own.ids.address();
        parameters.map = own.map.as_ref().map_or(0, Buffer::address);
        parameters.id_bytes = own.ids.dtype().bytes() as u32;
        let row_bytes = own.rows.shape().row_len() * own.rows.dtype().bytes();
        let threads = self.sending_threads(tokens, row_bytes);
        let blocks = (tokens * threads as usize).div_ceil(WIDEST as usize);
        // Where a row has a block, the last warp tells meanwhile what its token names.
        parameters.row_threads = match threads {
            WIDEST => WIDEST - NAMING,
            _ => threads,
        };
        let kernel = &self.core.device.opened.kernels.low_latency.send;
        // SAFETY: own rows lie in buffers of the call, and go into the group's memory, which the core keeps.
        unsafe { self.launch_in_turn(kernel, blocks, parameters) }
    }

    fn receive_there(
        &self,
        given: &LowLatencyRows,
        totals: Option<&Buffer>,
        of: Use,
    ) -> Result<()> {
        let experts = given.counts.shape().len();
        // A row for each token of each rank, at most.
        let rows = self.core.size() * given.sent.call.max_tokens;
        let threads = self.receiving_threads(rows, row_bytes(&given.sent.call));
        let mut parameters = Parameters {
            to: given.rows.address(),
            to_scales: given.scales.as_ref().map_or(0, Buffer::address),
            counts: given.counts.address(),
            sources: given.sources.address(),
            ranges: given.ranges.address(),
            scale_words: words_by_columns(&given.sent.call),
            totals: totals.map_or(0, Buffer::address),
            own_experts: experts as u32,
            row_threads: threads,
            ..self.holding(given, self.there(&given.sent, of))
        };
        let outputs = [
            Some(&given.rows),
            given.scales.as_ref(),
            Some(&given.counts),
            Some(&given.sources),
            Some(&given.ranges),
        ];
        for (i, out) in outputs.into_iter().enumerate() {
            parameters.poisoned_bytes[i] = out.map_or(0, |out| out.bytes() as u64);
            parameters.poisons[i] = out.map_or(0, |out| types::poison_pattern(out.dtype()));
        }
        // A warp for each expert besides.
        let threads = rows * threads as usize + 32 * experts;
        let blocks = threads.div_ceil(WIDEST as usize);
        let kernel = &self.core.device.opened.kernels.low_latency.receive;
        // SAFETY: what has come lies in the group's memory, and goes into buffers of the call.
        unsafe { self.launch_in_turn(kernel, blocks, parameters) }
    }

    /// With what is kept of tokens that came with weights.
    fn holding(&self, given: &LowLatencyRows, parameters: Parameters) -> Parameters {
        let held = given.held.as_ref();
        Parameters {
            rows_of: held.map_or(0, |held| held.rows.address()),
            held: held.map_or(0, |held| held.weights.address()),
            ..parameters
        }
    }

    /// What kernels are told of the way back.
    fn returning(&self, back: &LowLatencyBack, of: Use) -> Parameters {
        let row = BackRow::new(&back.call);
        Parameters {
            row_bytes: [row.values, row.beside, row.place(), 0].map(|bytes| bytes as u64),
            hidden: back.call.hidden as u32,
            from_type: types::float_code(back.call.dtype),
            payload: match back.call.cast {
                None => 0,
                Some(CombineCast::Fp8(format)) => fp8_code(format),
                Some(CombineCast::LogFmt10) => 4,
            },
            sum: sum_code(back.call.sum),
            ..self.exchanging_rows(&back.sent, of)
        }
    }

    fn send_back(
        &self,
        back: &LowLatencyBack,
        there: &LowLatencyRows,
        rows: &Buffer,
        of: Use,
    ) -> Result<()> {
        let kernels = &self.core.device.opened.kernels.low_latency;
        let (experts, tokens) = (
            there.counts.shape().len(),
            back.call.there.room(self.core.size()),
        );
        let mut parameters = Parameters {
            from: rows.address(),
            own_experts: experts as u32,
            ..self.returning(back, of)
        };
        let (kernel, blocks) = match back.call.sum {
            CombineSum::ExpertByRank => {
                parameters = self.holding(there, parameters);
                let row_bytes = back.call.hidden * back.call.dtype.bytes();
                parameters.row_threads = self.sending_threads(tokens, row_bytes);
                let threads = tokens * parameters.row_threads as usize;
                (&kernels.back_sums, threads.div_ceil(WIDEST as usize))
            }
            CombineSum::Expert | CombineSum::Rank => {
                parameters.counts = there.counts.address();
                parameters.sources = there.sources.address();
                // A row for each, at most.
                (&kernels.back, tokens * back.call.there.k.min(experts))
            }
        };
        // SAFETY: rows lie in a buffer of the call, and go into the group's memory, which the core keeps: to places that are checked against
        // the call's, or follow from what the receiving kernel wrote down.
        unsafe { self.launch_in_turn(kernel, blocks, parameters) }
    }

    /// Threads for each of so many rows that are sent: all at once, if they can be, since whoever tells that a row has come waits until all that
    /// was sent by then has.
    fn sending_threads(&self, rows: usize, row_bytes: usize) -> u32 {
        threads_for(rows, row_bytes, self.writers())
    }

    /// The same of rows that are received.
    fn receiving_threads(&self, rows: usize, row_bytes: usize) -> u32 {
        let all = (self.core.in_turn_blocks(WIDEST) * WIDEST) as usize;
        threads_for(rows, row_bytes, all)
    }

    /// Threads that add up each of so many tokens: of a few tokens, those of some blocks.
    fn sum_threads(&self, back: &LowLatencyBack, tokens: usize) -> u32 {
        let all = (self.core.in_turn_blocks(WIDEST) * WIDEST) as usize;
        // Eight columns for each.
        let most = back.call.hidden.div_ceil(8);
        [4 * WIDEST, 2 * WIDEST, WIDEST]
            .into_iter()
            .find(|&t| tokens * t as usize <= all && t as usize / 2 < most)
            .unwrap_or_else(|| {
                self.receiving_threads(tokens, back.call.hidden * back.call.dtype.bytes())
            })
    }

    fn add_up_back(&self, back: &LowLatencyBack, d: &Buffer, of: Use) -> Result<()> {
        let tokens = back.sent.chosen.shape().rows();
        let threads = self.sum_threads(back, tokens);
        let parameters = Parameters {
            to: d.address(),
            poisoned_bytes: [d.bytes() as u64, 0, 0, 0, 0],
            poisons: [types::poison_pattern(d.dtype()), 0, 0, 0, 0],
            weights: back.weights.as_ref().map_or(0, Buffer::address),
            out_type: types::float_code(d.dtype()),
            row_threads: threads,
            ..self.returning(back, of)
        };
        let blocks = (tokens * threads as usize).div_ceil(WIDEST as usize);
        let kernel = &self.core.device.opened.kernels.low_latency.sum;
        // SAFETY: what has come back lies in the group's memory, all else in buffers of the call.
        unsafe { self.launch_in_turn(kernel, blocks, parameters) }
    }
}

/// Threads for each of so many rows of so many bytes, of so many threads.
fn threads_for(rows: usize, row_bytes: usize, all: usize) -> u32 {
    [WIDEST, WIDEST / 2, WIDEST / 4, WIDEST / 8]
        .into_iter()
        .find(|&t| rows * t as usize <= all && t as usize * 16 <= row_bytes)
        .unwrap_or(32)
}

/// Words of a row's scales if they lie by columns, or 0.
fn words_by_columns(call: &LowLatencyDispatchCall) -> u32 {
    let words = call
        .cast
        .and_then(|cast| cast.words_by_columns(call.hidden));
    words.unwrap_or(0) as u32
}

/// Bytes of a row on its way there.
fn row_bytes(call: &LowLatencyDispatchCall) -> usize {
    There::new(call).of(Section::Row).1
}

/// Rows as fp8, as kernels are told.
fn fp8_code(format: ScaleFormat) -> u32 {
    1 + format_code(format)
}
