//! One rank's forward pass.

use super::{
    attention::{Cache, attend, gated, rms_norm},
    tally::{Kind, Phase, Tally},
    weights::{Fused, RankLayer, RankWeights},
};
use crate::{Config, Result, Shard, reference::argmax};
use brigade::{
    AllGatherLoraLinearParams, AllGatherParams, AllReduceParams, Buffer, Chunk, Comm, DataType,
    Device, DeviceExt, GemmParams, LoraLinearAllReduceParams, LoraLinearParams,
    LoraLinearReduceScatterParams, LoraRun, MemoryType, Output, OverlapMode, ReduceOp,
    ReduceScatterParams, Stream, plan::rows,
};
use std::{sync::Arc, time::Duration};

/// Where a rank computes, and with whom.
pub(crate) struct Place<'a> {
    pub(crate) config: Config,
    pub(crate) shards: &'a [Shard],
    pub(crate) device: Arc<dyn Device>,
    pub(crate) on: Stream,
    /// For attention, the embedding and the head.
    pub(crate) attention: Comm,
    pub(crate) feed_forward: Comm,
    pub(crate) mode: Option<OverlapMode>,
}

/// One rank of a run.
pub(crate) struct Rank<'a> {
    place: Place<'a>,
    weights: RankWeights,
    /// For each sequence, for each layer.
    caches: Vec<Vec<Cache>>,
    tally: Tally,
}

/// Rows of one step: how many of each sequence, one sequence after the other.
type Runs = [(usize, usize)];

impl<'a> Rank<'a> {
    pub(crate) fn new(place: Place<'a>, weights: RankWeights, sequences: usize) -> Self {
        let layers = place.config.layers;
        Self {
            place,
            weights,
            caches: vec![vec![Cache::default(); layers]; sequences],
            tally: Tally::default(),
        }
    }

    pub(crate) fn device_name(&self) -> String {
        self.place.device.info().name.clone()
    }

    pub(crate) fn weight_bytes(&self) -> u64 {
        self.weights.bytes
    }

    pub(crate) fn into_tally(self) -> Tally {
        self.tally
    }

    /// The collective end of both communicators.
    pub(crate) fn close(&self, within: Duration) -> Result<()> {
        self.place.attention.close(within)?;
        Ok(self.place.feed_forward.close(within)?)
    }

    fn shard(&self) -> &'a Shard {
        &self.place.shards[self.place.attention.group().rank]
    }

    fn upload(&self, values: &[f32], width: usize) -> Result<Buffer> {
        let rows = values.len().checked_div(width).unwrap_or(0);
        Ok(self
            .place
            .device
            .upload(&self.place.on, values, &[rows, width])?)
    }

    fn download(&self, buffer: &Buffer) -> Result<Vec<f32>> {
        Ok(self.place.device.download(&self.place.on, buffer.view())?)
    }

    /// Reads all prompts, and chooses the first token of each continuation.
    pub(crate) fn prefill(&mut self, prompts: &[Vec<u32>]) -> Result<Vec<u32>> {
        let runs: Vec<(usize, usize)> = prompts.iter().map(Vec::len).enumerate().collect();
        let tokens: Vec<u32> = prompts.concat();
        let shares = rows::split(tokens.len(), self.place.shards.len());
        let mut hidden = self.embed_scattered(&tokens, &shares)?;
        for layer in 0..self.place.config.layers {
            let norm = self.weights.layers[layer].attention_norm.clone();
            let qkv = self.gather(layer, Fused::QueryKeyValue, &hidden, &norm, &shares, &runs)?;
            let attended = self.attend(layer, &qkv, &runs);
            self.scatter(layer, Fused::Output, attended, &mut hidden, &shares, &runs)?;

            let norm = self.weights.layers[layer].feed_forward_norm.clone();
            let gate_up = self.gather(layer, Fused::GateUp, &hidden, &norm, &shares, &runs)?;
            let inner = gated(&gate_up, self.shard().feed_forward.len());
            self.scatter(layer, Fused::Down, inner, &mut hidden, &shares, &runs)?;
        }
        let last = self.last_rows(&hidden, &shares, &runs)?;
        self.choose(Phase::Prefill, &last)
    }

    /// Reads the last token of each active sequence, and chooses the next.
    pub(crate) fn decode(&mut self, active: &[(usize, u32)]) -> Result<Vec<u32>> {
        let runs: Vec<(usize, usize)> = active.iter().map(|&(sequence, _)| (sequence, 1)).collect();
        let tokens: Vec<u32> = active.iter().map(|&(_, token)| token).collect();
        let mut hidden = self.embed_replicated(&tokens)?;
        let epsilon = self.place.config.rms_epsilon;
        for layer in 0..self.place.config.layers {
            let x = rms_norm(&hidden, &self.weights.layers[layer].attention_norm, epsilon);
            let qkv = self.linear(layer, Fused::QueryKeyValue, &x, &runs)?;
            let attended = self.attend(layer, &qkv, &runs);
            self.linear_reduced(layer, Fused::Output, &attended, &mut hidden, &runs)?;

            let x = rms_norm(
                &hidden,
                &self.weights.layers[layer].feed_forward_norm,
                epsilon,
            );
            let gate_up = self.linear(layer, Fused::GateUp, &x, &runs)?;
            let inner = gated(&gate_up, self.shard().feed_forward.len());
            self.linear_reduced(layer, Fused::Down, &inner, &mut hidden, &runs)?;
        }
        let normed = rms_norm(&hidden, &self.weights.output_norm, epsilon);
        self.choose(Phase::Decode, &normed)
    }

    /// Rows of the tokens that this rank's share of the vocabulary knows; zeros for the others.
    fn embed(&self, tokens: &[u32]) -> Result<Buffer> {
        let (place, hidden) = (&self.place, self.place.config.hidden);
        let shape = [tokens.len(), hidden];
        let mut rows =
            place
                .device
                .allocate(&place.on, MemoryType::Device, DataType::F32, &shape)?;
        let vocabulary = &self.shard().vocabulary;
        for (row, &token) in tokens.iter().enumerate() {
            if vocabulary.contains(&(token as usize)) {
                let own = token as usize - vocabulary.start;
                let from = self.weights.embedding.slice(own, 1)?;
                let mut to = rows.view_mut();
                place
                    .device
                    .copy(&place.on, to.rows(row..row + 1)?, from.view())?;
            }
        }
        Ok(rows)
    }

    fn embed_scattered(&mut self, tokens: &[u32], shares: &[usize]) -> Result<Vec<f32>> {
        let part = self.embed(tokens)?;
        let own = shares[self.place.attention.group().rank];
        let mut rows = self.upload(
            &vec![0.0; own * self.place.config.hidden],
            self.place.config.hidden,
        )?;
        let comm = self.place.attention.clone();
        let before = comm.traffic().moved_bytes;
        let plan = comm
            .lease(&self.place.on)?
            .reduce_scatter(ReduceScatterParams {
                from: part.view(),
                rows_per_rank: shares,
                to: rows.view_mut(),
                op: ReduceOp::Sum,
            })?;
        self.count(&comm, before, Phase::Prefill, Kind::Embedding, plan);
        self.download(&rows)
    }

    fn embed_replicated(&mut self, tokens: &[u32]) -> Result<Vec<f32>> {
        let mut rows = self.embed(tokens)?;
        let comm = self.place.attention.clone();
        let before = comm.traffic().moved_bytes;
        let plan = comm.lease(&self.place.on)?.all_reduce(AllReduceParams {
            data: rows.view_mut(),
            from: None,
            op: ReduceOp::Sum,
            choice: None,
        })?;
        self.count(&comm, before, Phase::Decode, Kind::Embedding, plan);
        self.download(&rows)
    }

    fn count(
        &mut self,
        comm: &Comm,
        before: u64,
        phase: Phase,
        kind: Kind,
        plan: impl std::fmt::Display,
    ) {
        let moved = comm.traffic().moved_bytes - before;
        self.tally.add(phase, kind, plan.to_string(), moved);
    }

    fn comm_of(&self, which: Fused) -> (Comm, Kind) {
        let place = &self.place;
        match which {
            Fused::QueryKeyValue => (place.attention.clone(), Kind::QueryKeyValue),
            Fused::Output => (place.attention.clone(), Kind::AttentionOutput),
            Fused::GateUp => (place.feed_forward.clone(), Kind::GateUp),
            Fused::Down => (place.feed_forward.clone(), Kind::Down),
        }
    }

    /// Norms own rows into the user buffer, and multiplies everybody's.
    fn gather(
        &mut self,
        layer: usize,
        which: Fused,
        hidden: &[f32],
        norm: &[f32],
        shares: &[usize],
        runs: &Runs,
    ) -> Result<Vec<f32>> {
        let (comm, kind) = self.comm_of(which);
        let place = &self.place;
        let before = comm.traffic().moved_bytes;
        let mut lease = comm.lease(&place.on)?;
        let x = rms_norm(hidden, norm, place.config.rms_epsilon);
        let mut own = lease.own_chunk(shares, place.config.hidden, DataType::F32)?;
        place
            .device
            .write(&place.on, own.view_mut(), bytemuck::cast_slice(&x))?;
        let chunk = Chunk::Resident(own.filled());
        let weights = &self.weights.layers[layer];
        let runs = lora_runs(weights, which, runs);
        let out = lease.all_gather_lora_linear(AllGatherLoraLinearParams {
            total_n: Some(which.total_outputs(&place.config, place.shards)),
            runs: &runs,
            choice: place.mode,
            ..AllGatherLoraLinearParams::new(chunk, shares, weights.linear(which))
        })?;
        let (d, plan) = (out.d, out.plan);
        drop(lease);
        self.count(&comm, before, Phase::Prefill, kind, plan);
        d.map_or_else(|| Ok(Vec::new()), |d| self.download(&d))
    }

    /// Multiplies all rows, and adds own rows of the sum to the hidden state.
    fn scatter(
        &mut self,
        layer: usize,
        which: Fused,
        x: Vec<f32>,
        hidden: &mut [f32],
        shares: &[usize],
        runs: &Runs,
    ) -> Result<()> {
        let (comm, kind) = self.comm_of(which);
        let place = &self.place;
        let weights = &self.weights.layers[layer];
        let weight = weights.linear(which);
        let rows: usize = shares.iter().sum();
        let x = place
            .device
            .upload(&place.on, &x, &[rows, weight.shape().rows()])?;
        let before = comm.traffic().moved_bytes;
        let runs = lora_runs(weights, which, runs);
        let total_k = match which {
            Fused::Output => place.config.query_width(),
            _ => place.config.feed_forward,
        };
        let out =
            comm.lease(&place.on)?
                .lora_linear_reduce_scatter(LoraLinearReduceScatterParams {
                    total_k: Some(total_k),
                    runs: &runs,
                    choice: place.mode,
                    ..LoraLinearReduceScatterParams::new(&x, shares, weight)
                })?;
        self.count(&comm, before, Phase::Prefill, kind, out.plan);
        if let Some(d) = out.d {
            add(hidden, &self.download(&d)?);
        }
        Ok(())
    }

    /// A column-parallel linear of rows that every rank has.
    fn linear(&self, layer: usize, which: Fused, x: &[f32], runs: &Runs) -> Result<Vec<f32>> {
        let place = &self.place;
        let weights = &self.weights.layers[layer];
        let x = self.upload(x, place.config.hidden)?;
        let runs = lora_runs(weights, which, runs);
        let gemm = GemmParams::new(&x, weights.linear(which));
        let linear = LoraLinearParams { gemm, runs: &runs };
        let d = place
            .device
            .lora_linear(&place.on, &linear, Output::Allocate(DataType::F32))?;
        d.map_or_else(|| Ok(Vec::new()), |d| self.download(&d))
    }

    /// A row-parallel linear, whose sum is added to the hidden state of every rank.
    fn linear_reduced(
        &mut self,
        layer: usize,
        which: Fused,
        x: &[f32],
        hidden: &mut [f32],
        runs: &Runs,
    ) -> Result<()> {
        let (comm, kind) = self.comm_of(which);
        let place = &self.place;
        let weights = &self.weights.layers[layer];
        let weight = weights.linear(which);
        let x = self.upload(x, weight.shape().rows())?;
        let before = comm.traffic().moved_bytes;
        let runs = lora_runs(weights, which, runs);
        let gemm = GemmParams::new(&x, weight);
        let out =
            comm.lease(&place.on)?
                .lora_linear_with_all_reduce(LoraLinearAllReduceParams {
                    linear: LoraLinearParams { gemm, runs: &runs },
                    output: Output::Allocate(DataType::F32),
                    choice: None,
                })?;
        self.count(&comm, before, Phase::Decode, kind, out.plan);
        if let Some(d) = out.d {
            add(hidden, &self.download(&d)?);
        }
        Ok(())
    }

    /// Attends with this rank's heads, sequence by sequence.
    fn attend(&mut self, layer: usize, qkv: &[f32], runs: &Runs) -> Vec<f32> {
        let shard = self.shard();
        let config = &self.place.config;
        let width = shard.query_rows(config).len() + 2 * shard.kv_rows(config).len();
        let mut rest = qkv;
        let mut out = Vec::new();
        for &(sequence, rows) in runs {
            let (own, others) = rest.split_at(rows * width);
            rest = others;
            out.extend(attend(
                config,
                shard,
                own,
                &mut self.caches[sequence][layer],
            ));
        }
        out
    }

    /// The normed last row of every sequence, gathered from the ranks that have them.
    fn last_rows(&mut self, hidden: &[f32], shares: &[usize], runs: &Runs) -> Result<Vec<f32>> {
        let (place, width) = (&self.place, self.place.config.hidden);
        let offsets = rows::offsets(shares);
        let me = place.attention.group().rank;
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
                let row = end - 1 - offsets[me];
                own.extend_from_slice(&hidden[row * width..(row + 1) * width]);
            }
        }
        let own = rms_norm(&own, &self.weights.output_norm, place.config.rms_epsilon);
        let from = self.upload(&own, width)?;
        let mut to = self.upload(&vec![0.0; runs.len() * width], width)?;
        let comm = place.attention.clone();
        let before = comm.traffic().moved_bytes;
        let plan = comm.lease(&place.on)?.all_gather(AllGatherParams {
            from: from.view(),
            rows_per_rank: &counts,
            to: to.view_mut(),
        })?;
        self.count(&comm, before, Phase::Prefill, Kind::Head, plan);
        self.download(&to)
    }

    /// The best token for each row of normed hidden states: every rank's best, then the best of those.
    fn choose(&mut self, phase: Phase, normed: &[f32]) -> Result<Vec<u32>> {
        let place = &self.place;
        let x = self.upload(normed, place.config.hidden)?;
        let gemm = GemmParams {
            transpose_b: true,
            ..GemmParams::new(&x, &self.weights.embedding)
        };
        let logits = place
            .device
            .gemm(&place.on, &gemm, Output::Allocate(DataType::F32))?;
        let logits = logits.map_or_else(|| Ok(Vec::new()), |l| self.download(&l))?;
        let own = self.shard().vocabulary.clone();
        // Value and token of each row, as the bits that all_gather copies.
        let best: Vec<u32> = logits
            .chunks_exact(own.len())
            .flat_map(|row| {
                let token = argmax(row);
                [row[token as usize].to_bits(), token + own.start as u32]
            })
            .collect();
        let ranks = place.shards.len();
        let from = place.device.upload(&place.on, &best, &[1, best.len()])?;
        let mut to = place.device.upload(
            &place.on,
            &vec![0u32; ranks * best.len()],
            &[ranks, best.len()],
        )?;
        let comm = place.attention.clone();
        let before = comm.traffic().moved_bytes;
        let plan = comm.lease(&place.on)?.all_gather(AllGatherParams {
            from: from.view(),
            rows_per_rank: &vec![1; ranks],
            to: to.view_mut(),
        })?;
        let all: Vec<u32> = place.device.download(&place.on, to.view())?;
        self.count(&comm, before, phase, Kind::Choice, plan);
        Ok((0..best.len() / 2)
            .map(|row| {
                let of_rank = |r: usize| &all[r * best.len() + 2 * row..][..2];
                let values: Vec<f32> = (0..ranks).map(|r| f32::from_bits(of_rank(r)[0])).collect();
                of_rank(argmax(&values) as usize)[1]
            })
            .collect())
    }
}

/// The runs of a step's rows with their sequences' adapters.
fn lora_runs<'w>(weights: &'w RankLayer, which: Fused, runs: &Runs) -> Vec<LoraRun<'w>> {
    let all: Vec<LoraRun<'w>> = runs
        .iter()
        .map(|&(sequence, rows)| LoraRun {
            rows,
            adapter: weights.adapter(sequence, which),
        })
        .collect();
    if all.iter().all(|r| r.adapter.is_none()) {
        Vec::new()
    } else {
        all
    }
}

fn add(to: &mut [f32], from: &[f32]) {
    for (t, f) in to.iter_mut().zip(from) {
        *t += f;
    }
}
