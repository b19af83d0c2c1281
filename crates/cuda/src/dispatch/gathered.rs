//! Experts of all ranks' tokens, which every rank has: it finds out by itself which rows come to it.

use super::Arguments;
use crate::{
    CudaDevice, Launch,
    job::{Job, waiting},
    lane::Lane,
    memory::check_reach,
    routing::Placed,
};
use brigade_device::{Buffer, DataType, DispatchCall, GatheredRouting, Lengths, Result, Ways};
use brigade_kernels::GatheredParams;
use brigade_plan::dispatch::{Load, Section, Sections};
use std::sync::Arc;

/// Ids, whose they are, and their weights; and where it is told which rows come.
pub(super) struct Gathered {
    ids: Buffer,
    lengths: Buffer,
    ragged: bool,
    weights: Option<Buffer>,
    pub(super) ways: Buffer,
}

impl Gathered {
    /// Of arguments that were checked.
    pub(super) fn new(
        device: &CudaDevice,
        lane: &Arc<Lane>,
        (call, size): (&DispatchCall, usize),
        all: &GatheredRouting<'_>,
    ) -> Result<Self> {
        let (field, lengths, ragged) = match all.lengths {
            Lengths::Ragged { offsets } => ("lengths.offsets.memory", offsets, true),
            Lengths::Padded { counts } => ("lengths.counts.memory", counts, false),
        };
        let bytes = Sections::part(call, Load::Ways, call.max_tokens).bytes;
        let dims = [size, bytes.next_multiple_of(64)];
        let gathered = Self {
            ids: all.ids.retain(),
            lengths: lengths.retain(),
            ragged,
            weights: all.weights.map(|w| w.retain()),
            ways: device.scratch(lane, DataType::U8, &dims)?,
        };
        check_reach(&device.card, "ids.memory", &gathered.ids)?;
        check_reach(&device.card, field, &gathered.lengths)?;
        if let Some(weights) = &gathered.weights {
            check_reach(&device.card, "weights.memory", weights)?;
        }
        Ok(gathered)
    }

    /// What work must keep.
    pub(super) fn buffers(&self) -> impl Iterator<Item = &Buffer> {
        [&self.ids, &self.lengths, &self.ways]
            .into_iter()
            .chain(&self.weights)
    }
}

impl Job<'_> {
    /// Takes own ids and weights out of those of all, and says which rows come.
    pub(super) fn find_rows(&self, a: &Arguments, all: &Gathered) -> Result<()> {
        let (Some(router), Ways::New(expected)) = (&a.router, &a.ways) else {
            return Ok(());
        };
        let call = &a.call;
        let placed = Placed::from(call.placement);
        let sections = Sections::part(call, Load::Ways, call.max_tokens);
        let mut parameters = GatheredParams {
            ids: all.ids.address(),
            map: router.map.as_ref().map_or(0, Buffer::address),
            lengths: all.lengths.address(),
            weights: all.weights.as_ref().map_or(0, Buffer::address),
            own_ids: router.ids.address(),
            own_weights: expected.own_weights.as_ref().map_or(0, Buffer::address),
            parts: all.ways.address(),
            parts_stride: all.ways.shape().columns() as u64,
            rows: (all.ids.shape().len() / call.k) as u64,
            ragged: u32::from(all.ragged),
            tokens: a.rows.shape().rows() as u32,
            max_tokens: call.max_tokens as u32,
            k: call.k as u32,
            id_bytes: all.ids.dtype().bytes() as u32,
            placement: placed.code,
            experts: placed.experts,
            copies: placed.copies,
            per_rank: placed.per_rank,
            signature: self.kind.signature,
            ..waiting!(GatheredParams, self)
        };
        for section in [Section::Token, Section::Slots, Section::Weights] {
            parameters.came[section.index()] = sections.of(section, 0).start as u64;
        }
        /// Threads of a block that goes through a rank's tokens.
        const THREADS: u32 = 1024;
        let shape = Launch::grid(a.group.size as u32, THREADS);
        let kernel = &self.core.device.opened.kernels.gathered;
        // SAFETY: all of it lies in buffers of the right sizes, which the call keeps; the kernel reads no ids but those that its lengths
        // say are there, and stops the group if they cannot be.
        unsafe { self.follow(self.stream, kernel, shape, parameters) }
    }
}
