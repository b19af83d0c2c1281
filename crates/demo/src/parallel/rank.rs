//! One rank's forward pass.

use super::{
    attention::{self, Cache, Heads, rms_norm},
    graph::{Graph, Graphs, Slots},
    tally::{Kind, Phase, Tally},
    weights::{RankLayer, RankWeights},
};
use crate::{Config, Error, Result};
use brigade::{Bootstrap, plan::rows};
use brigade_candle::Parallel;
use candle_core::Tensor;
use std::{
    sync::Arc,
    time::{Duration, Instant},
};

/// One rank of a run.
pub(crate) struct Rank {
    config: Config,
    /// For attention, the embedding and the head.
    pub(super) attention: Parallel,
    feed_forward: Parallel,
    weights: Arc<RankWeights>,
    heads: Heads,
    /// For each sequence, for each layer.
    caches: Vec<Vec<Cache>>,
    /// Tokens that were read of each sequence.
    read: Vec<usize>,
    /// Of the sequences that the last step was for.
    slots: Option<Slots>,
    /// If steps are to be captured.
    graph: Option<Graph>,
    /// How long others are waited for.
    pub(super) within: Duration,
    pub(super) tally: Tally,
}

/// Rows of one step: how many of each sequence, one sequence after the other.
type Runs = [(usize, usize)];

impl Rank {
    /// Steps are captured from these counts on, if there are any.
    pub(crate) fn new(
        config: Config,
        (attention, feed_forward): (Parallel, Parallel),
        (weights, heads): (RankWeights, Heads),
        sequences: usize,
        (within, graphs, tally): (Duration, Option<Graphs>, Tally),
    ) -> Result<Self> {
        let layers = || (0..config.layers).map(|_| heads.cache());
        let caches = (0..sequences).map(|_| layers().collect());
        Ok(Self {
            caches: caches.collect::<candle_core::Result<_>>()?,
            read: vec![0; sequences],
            slots: None,
            graph: graphs.map(Graph::counting_from),
            config,
            attention,
            feed_forward,
            weights: Arc::new(weights),
            heads,
            within,
            tally,
        })
    }

    pub(crate) fn device_name(&self) -> String {
        self.attention.device().info().name.clone()
    }

    pub(crate) fn weight_bytes(&self) -> u64 {
        self.weights.bytes
    }

    pub(crate) fn into_counts(self) -> (Tally, Option<Graphs>) {
        (self.tally, self.graph.map(|graph| graph.counts))
    }

    /// The collective end of both communicators. That of attention, by which ranks vote on who is lost, is the last.
    pub(crate) fn close(&self) -> Result<()> {
        self.feed_forward.close(self.within)?;
        Ok(self.attention.close(self.within)?)
    }

    /// The fault of either communicator, if there is one. On a GPU what was computed behind it is nothing.
    fn check(&self) -> Result<()> {
        self.feed_forward.check()?;
        Ok(self.attention.check()?)
    }

    /// Waits until all ranks have come here.
    pub(super) fn meet(&self) -> Result<()> {
        let attention = &self.attention;
        let mut lease = attention.comm().lease(attention.stream())?;
        lease.barrier()?;
        drop(lease);
        Ok(attention.sync(2 * self.within)?)
    }

    /// Hangs, with its place in the group, until the others have gone on without this rank, or as long as they take to do so.
    pub(super) fn stall(&self, rank: usize) -> Error {
        // The others wait once in each of two communicators on a GPU, and then for two more in their vote.
        const WAITS: u32 = 8;
        let end = Instant::now() + WAITS * self.within;
        while Instant::now() < end {
            match self.attention.comm().lease(self.attention.stream()) {
                // Nor does it say that it has seen the fault.
                Ok(_) | Err(brigade::Error::Fault(_)) => {}
                Err(left_out) => return left_out.into(),
            }
            // tidy: sleeps because to do nothing is what a rank that hangs does.
            std::thread::sleep(self.within / 64);
        }
        self.check().err().unwrap_or(Error::Left { rank })
    }

    /// Reads all of some sequences, and chooses the next token of each.
    pub(crate) fn prefill(&mut self, sequences: &[(usize, Vec<u32>)]) -> Result<Vec<u32>> {
        let weights = Arc::clone(&self.weights);
        let runs = sequences
            .iter()
            .map(|(sequence, tokens)| (*sequence, tokens.len()));
        let runs: Vec<(usize, usize)> = runs.collect();
        let tokens = sequences
            .iter()
            .flat_map(|(_, tokens)| tokens.iter().copied());
        let tokens = self.ids(tokens.collect())?;
        let shares = rows::split(tokens.elem_count(), self.attention.size());
        let mut hidden = self.counted(Phase::Prefill, Kind::Embedding, |rank| {
            let embedding = &rank.weights.embedding;
            embedding.forward_scattered(&tokens, Some(&shares))
        })?;
        for (number, layer) in weights.layers.iter().enumerate() {
            let x = self.norm(&hidden, &layer.attention_norm)?;
            let qkv = &layer.query_key_value;
            let qkv = self.counted(Phase::Prefill, Kind::QueryKeyValue, |_| {
                qkv.gathered
                    .forward_rows(&x, Some(&shares), &qkv.runs(&runs))
            })?;
            let attended = self.attend(&qkv, &runs, |rank, n, own| {
                rank.heads.prompt(own, &rank.caches[runs[n].0][number])
            })?;
            let output = &layer.output;
            let sum = self.counted(Phase::Prefill, Kind::AttentionOutput, |_| {
                let runs = output.runs(&runs);
                output
                    .scattered
                    .forward_rows(&attended, Some(&shares), &runs)
            })?;
            hidden = (hidden + sum)?;

            let x = self.norm(&hidden, &layer.feed_forward_norm)?;
            let gate_up = &layer.gate_up;
            let inner = self.counted(Phase::Prefill, Kind::GateUp, |_| {
                let runs = gate_up.runs(&runs);
                gate_up.gathered.forward_rows(&x, Some(&shares), &runs)
            })?;
            let (inner, down) = (self.feed_forward.silu_mul(&inner)?, &layer.down);
            let sum = self.counted(Phase::Prefill, Kind::Down, |_| {
                let runs = down.runs(&runs);
                down.scattered.forward_rows(&inner, Some(&shares), &runs)
            })?;
            hidden = (hidden + sum)?;
        }
        for &(sequence, rows) in &runs {
            self.read[sequence] = rows;
        }
        let last = self.last_rows(&hidden, &shares, &runs)?;
        let chosen = self.choose(Phase::Prefill, &last)?.to_vec1()?;
        self.check()?;
        Ok(chosen)
    }

    /// Reads the last token of each active sequence, and chooses the next. `boot` is where ranks meet that capture.
    pub(crate) fn decode(
        &mut self,
        active: &[(usize, u32)],
        boot: &dyn Bootstrap,
    ) -> Result<Vec<u32>> {
        let same = |slots: &Slots| slots.active.iter().eq(active.iter().map(|(s, _)| s));
        let mut graph = self.graph.take();
        let slots = match self.slots.take().filter(same) {
            Some(slots) => slots,
            None => {
                graph.iter_mut().for_each(Graph::forget);
                Slots::new(active, &self.read, self.attention.place())?
            }
        };
        let longest = active.iter().map(|&(s, _)| self.read[s] + 1).max();
        let span = attention::span(longest.unwrap_or(0), self.heads.most());
        let ran = match &mut graph {
            Some(graph) => graph.run(self, (&slots, span), boot),
            None => self.step(&slots, span),
        };
        self.graph = graph;
        ran?;
        let chosen = slots.tokens.to_vec1()?;
        self.check()?;
        for &(sequence, _) in active {
            self.read[sequence] += 1;
        }
        self.slots = Some(slots);
        Ok(chosen)
    }

    /// Takes the tokens that are in the slots, and leaves the next ones there. The host reads nothing, and nothing depends on where sequences are
    /// but for their `span`: on a GPU it can be captured.
    pub(super) fn step(&mut self, slots: &Slots, span: usize) -> Result<()> {
        let weights = Arc::clone(&self.weights);
        let runs: Vec<(usize, usize)> = slots.active.iter().map(|&s| (s, 1)).collect();
        let spots = (0..runs.len()).map(|n| self.heads.spot(&slots.position(n)?, span));
        let spots = spots.collect::<candle_core::Result<Vec<_>>>()?;
        let mut hidden = self.counted(Phase::Decode, Kind::Embedding, |rank| {
            rank.weights.embedding.forward(&slots.tokens)
        })?;
        for (number, layer) in weights.layers.iter().enumerate() {
            let RankLayer {
                query_key_value,
                output,
                gate_up,
                down,
                ..
            } = layer;
            let x = self.norm(&hidden, &layer.attention_norm)?;
            // Nothing travels here.
            let qkv = query_key_value
                .whole
                .forward_lora(&x, &query_key_value.runs(&runs))?;
            let attended = self.attend(&qkv, &runs, |rank, n, own| {
                let cache = &rank.caches[runs[n].0][number];
                rank.heads.step(own, cache, &spots[n])
            })?;
            let sum = self.counted(Phase::Decode, Kind::AttentionOutput, |_| {
                output.whole.forward_lora(&attended, &output.runs(&runs))
            })?;
            hidden = (hidden + sum)?;

            let x = self.norm(&hidden, &layer.feed_forward_norm)?;
            let gate_up = gate_up.whole.forward_lora(&x, &gate_up.runs(&runs))?;
            let inner = self.feed_forward.silu_mul(&gate_up)?;
            let sum = self.counted(Phase::Decode, Kind::Down, |_| {
                down.whole.forward_lora(&inner, &down.runs(&runs))
            })?;
            hidden = (hidden + sum)?;
        }
        let normed = self.norm(&hidden, &weights.output_norm)?;
        Ok(slots.advance(&self.choose(Phase::Decode, &normed)?)?)
    }

    fn ids(&self, tokens: Vec<u32>) -> Result<Tensor> {
        Ok(Tensor::new(tokens, self.attention.place())?)
    }

    fn norm(&self, x: &Tensor, weight: &Tensor) -> Result<Tensor> {
        Ok(rms_norm(x, weight, self.config.rms_epsilon)?)
    }

    /// A call of one of the two groups, and what it moved.
    fn counted<T>(
        &mut self,
        phase: Phase,
        kind: Kind,
        work: impl FnOnce(&Self) -> candle_core::Result<T>,
    ) -> Result<T> {
        let parallel = match kind {
            Kind::GateUp | Kind::Down => self.feed_forward.clone(),
            _ => self.attention.clone(),
        };
        // A GPU has not run what was called: to ask what it moved would be to wait for it, at every call.
        let counts = parallel.place().is_cpu();
        let moved = || counts.then(|| parallel.comm().traffic().moved_bytes);
        let before = moved();
        let out = work(self)?;
        let moved = moved().zip(before).map(|(after, before)| after - before);
        let plan = parallel
            .last_plan()
            .map_or_else(String::new, |p| p.to_string());
        self.tally.add(phase, kind, plan, moved);
        Ok(out)
    }

    /// Attends with this rank's heads: `work` does so for the rows of one of the runs.
    fn attend(
        &self,
        qkv: &Tensor,
        runs: &Runs,
        work: impl Fn(&Self, usize, &Tensor) -> candle_core::Result<Tensor>,
    ) -> Result<Tensor> {
        let mut first = 0;
        let mut out = Vec::new();
        for (n, &(_, rows)) in runs.iter().enumerate() {
            out.push(work(self, n, &qkv.narrow(0, first, rows)?)?);
            first += rows;
        }
        Ok(Tensor::cat(&out, 0)?)
    }

    /// The normed last row of every sequence, gathered from the ranks that have them.
    fn last_rows(&mut self, hidden: &Tensor, shares: &[usize], runs: &Runs) -> Result<Tensor> {
        let offsets = rows::offsets(shares);
        let me = self.attention.rank();
        let mut counts = vec![0; shares.len()];
        let mut own = Vec::new();
        let mut end = 0;
        for &(_, rows) in runs {
            end += rows;
            let owner = (0..shares.len())
                .find(|&r| (offsets[r]..offsets[r + 1]).contains(&(end - 1)))
                .unwrap_or(0);
            counts[owner] += 1;
            if owner == me {
                own.push(hidden.narrow(0, end - 1 - offsets[me], 1)?);
            }
        }
        let own = match own.is_empty() {
            true => hidden.narrow(0, 0, 0)?,
            false => Tensor::cat(&own, 0)?,
        };
        let own = self.norm(&own, &Arc::clone(&self.weights).output_norm)?;
        self.counted(Phase::Prefill, Kind::Head, |rank| {
            rank.attention.all_gather(&own, 0, Some(&counts))
        })
    }

    /// The best token for each row of normed hidden states, u32.
    fn choose(&mut self, phase: Phase, normed: &Tensor) -> Result<Tensor> {
        self.counted(phase, Kind::Choice, |rank| rank.weights.head.argmax(normed))
    }
}
