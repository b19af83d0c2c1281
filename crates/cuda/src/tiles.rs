//! Whether this rank goes by tiles, where the plan says so.
//!
//! The plan goes by the signed call, which all ranks have in common. What is a rank's own is looked at here, before anything is
//! enqueued: what it multiplies rows by, where that lies, and whether its GPU has room. A rank that cannot have tiles is refused where they
//! were forced, and its plan says why it went chunk by chunk where they were not.

use crate::{
    core::Core,
    gemm_flags::{Run, Scales},
    lane::Lane,
    linear::adds_something,
    memory::{check_reach, overlap},
    quiet,
    steps::Use,
};
use brigade_device::{
    Buffer, DataType, Device, LoraRun, Operand, OverlapMode, OverlapPlan, QScheme, Reason, Result,
    View,
};
use brigade_kernels::{GEMM_LOW_COLUMNS, MOST_PARTS, MOST_RUNS};
use brigade_plan::{
    reason::{tiles_operands, tiles_room},
    without_tiles,
};
use brigade_sync::{Area, Half};
use std::{ops::Range, sync::Arc};

pub(crate) mod alone;

/// What bulk copies and wide stores want addresses and rows to be multiples of, in bytes.
pub(crate) const GRAIN: usize = 16;

/// How many elements of C are read together.
pub(crate) const BIAS_GRAIN: usize = 2;

/// Columns of adapters that tensor cores add up together.
const STEP: usize = 16;

/// What a rank brings to a product of tiles.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Operands<'a> {
    /// Of the rows that are multiplied.
    pub(crate) dtype: DataType,
    pub(crate) scheme: QScheme,
    /// Rows over all ranks.
    pub(crate) rows: usize,
    /// Ranks that have some.
    pub(crate) parts: usize,
    /// Own rows, where the caller has them.
    pub(crate) own: Option<Operand<'a>>,
    pub(crate) weight: Operand<'a>,
    pub(crate) transpose_weight: bool,
    pub(crate) bias: Option<View<'a>>,
    pub(crate) runs: &'a [LoraRun<'a>],
    /// Whether what an adapter adds must not depend on the other adapters, and so on where its columns lie among theirs.
    pub(crate) batch_invariant: bool,
    /// Of the result.
    pub(crate) output: DataType,
    /// Where tiles write it, if that is the caller's memory.
    pub(crate) d: Option<&'a Buffer>,
}

/// What a product of tiles has to itself on this GPU, but for peers of its group that share it.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Room {
    /// Blocks that there is room for.
    pub(crate) blocks: u32,
    /// Whether no other communicator of this process works on another stream.
    pub(crate) alone: bool,
    /// Whether this process has no other, whatever stream it may turn to.
    pub(crate) sole: bool,
}

/// What tiles take of a rank's operands.
pub(crate) struct Taken {
    pub(crate) room: Room,
    pub(crate) scales: Option<Scales>,
    pub(crate) runs: Vec<Run>,
    /// What weight, bias and adapters lie in.
    pub(crate) buffers: Vec<Buffer>,
}

impl Core {
    /// What a product of tiles takes, if `plan` says tiles and this rank can have them; `plan` says what it does instead, in as
    /// many pieces of a chunk as travel.
    pub(crate) fn tiles(
        &self,
        plan: &mut OverlapPlan,
        choice: Option<OverlapMode>,
        operands: &Operands<'_>,
        pieces: u16,
        lane: &Lane,
    ) -> Result<Option<Taken>> {
        if plan.mode != OverlapMode::Tiles || operands.are_empty() {
            return Ok(None);
        }
        let of = |half| Use {
            area: Area::Gather,
            half: Half::of(half),
        };
        let arriving = self.place(self.rank(), of(0), 0)
            ..self.place(self.rank(), of(1), self.config.gather_bytes);
        let buffers = operands.buffers();
        let found = operands.taken(&buffers, &arriving).and_then(|taken| {
            let room = self.waiting_blocks(lane)?;
            Ok((taken, room))
        });
        let ((scales, runs), room) = match found {
            Ok(found) => found,
            Err(why) => {
                without_tiles(plan, pieces, choice.is_some(), why)?;
                return Ok(None);
            }
        };
        for (field, buffer) in &buffers {
            check_reach(&self.device.card, field, buffer)?;
        }
        Ok(Some(Taken {
            room,
            scales,
            runs,
            buffers: buffers.into_iter().map(|(_, buffer)| buffer).collect(),
        }))
    }

    /// Whether products of this group may be of tiles that wait.
    fn has_tiles(&self) -> bool {
        let topology = &self.topology;
        // Rows pass through the gather region, and parts of sums through that of the twin.
        let passes = self.config.gather_bytes > 0 || self.config.reduce_scatter_bytes > 0;
        passes && self.size() > 1 && topology.engines.tiles && topology.group.mode.overlaps()
    }

    /// Whether no other communicator of this process may have tiles that wait on this GPU, but on this lane.
    pub(crate) fn is_far_from_tiles(&self, lane: &Lane) -> bool {
        let mut others = quiet::others(self).into_iter();
        others.all(|core| !core.has_tiles() || core.works_only_on(lane))
    }

    /// Blocks of a launch that holds a multiprocessor with each while it waits: what other communicators need meanwhile is left free, so that
    /// all these blocks have a place at once. While some had none, the GPU would begin no other kernel.
    ///
    /// Those whose calls were all on the stream of this one need nothing: their work comes before or behind.
    fn waiting_blocks(&self, lane: &Lane) -> Result<Room, Reason> {
        let mut beside = quiet::others(self);
        let sole = beside.len() < self.sharing;
        beside.retain(|core| !core.works_only_on(lane));
        // Peers on this GPU have a part of it each. With one other product this one may share: whoever comes second gets what is left, so
        // rows that the first waits for come, and parts of sums too, whose tiles are made where there is room. Of three, each could keep the next one's steps from their peers.
        let tiled = beside.iter().filter(|core| core.has_tiles()).count();
        if tiled > (self.sharing - 1).max(1) {
            return Err(tiles_room(format!(
                "{tiled} other communicators of this process may have tiles that wait on this GPU, on other streams"
            )));
        }
        let sms = self.product_sms().unwrap_or(self.device.info().sms);
        // Each of theirs may sit on a multiprocessor of its own: but for sums that are pushed, which these tiles never wait for.
        let kept = beside.iter().map(|core| core.may_wait()).sum();
        match u32::from(sms).saturating_sub(kept) / self.sharing as u32 {
            0 => Err(tiles_room(format!(
                "{} other communicators of this process may have {kept} blocks waiting on the {sms} multiprocessors for products",
                beside.len()
            ))),
            blocks => Ok(Room {
                blocks,
                alone: beside.len() < self.sharing,
                sole,
            }),
        }
    }

    /// So many blocks, or as many fewer as leave steps beside them a multiprocessor.
    pub(crate) fn beside_steps(&self, blocks: u32) -> u32 {
        let all = self.sharing as u32 * blocks;
        let full = all >= u32::from(self.device.info().sms);
        (blocks - u32::from(full)).max(1)
    }

    /// Whether all its calls so far were on this stream, and there were some.
    pub(crate) fn works_only_on(&self, lane: &Lane) -> bool {
        let used = self.used.lock();
        let mut streams = used
            .iter()
            .filter(|lane| !Arc::ptr_eq(lane, &self.waiter))
            .map(|lane| lane.stream)
            .peekable();
        streams.peek().is_some() && streams.all(|stream| stream == lane.stream)
    }
}

impl Operands<'_> {
    /// Inner and outer dimension.
    fn dims(&self) -> (usize, usize) {
        let shape = self.weight.shape();
        match self.transpose_weight {
            true => (shape.columns(), shape.rows()),
            false => (shape.rows(), shape.columns()),
        }
    }

    /// Whether there is nothing to multiply, by tiles or otherwise.
    fn are_empty(&self) -> bool {
        let (k, n) = self.dims();
        k == 0 || n == 0
    }

    /// What is read beside the rows, by the names of parameters.
    pub(crate) fn buffers(&self) -> Vec<(&'static str, Buffer)> {
        let adapters = self.runs.iter().filter_map(|run| run.adapter);
        let mut list = vec![("weight.memory", self.weight.kernel().retain())];
        if let Operand::Quantized(weight) = &self.weight {
            list.push(("weight.memory", weight.scales().retain()));
        }
        list.extend(self.bias.map(|c| ("bias.memory", c.retain())));
        list.extend(
            adapters.flat_map(|lora| [lora.a, lora.b].map(|v| ("runs.adapter", v.retain()))),
        );
        list
    }

    /// Scales and adapters as the kernel has them, or the first parameter that it does not take. Rows of peers are `arriving` there.
    pub(crate) fn taken(
        &self,
        buffers: &[(&'static str, Buffer)],
        arriving: &Range<u64>,
    ) -> Result<(Option<Scales>, Vec<Run>), Reason> {
        self.check_weight()?;
        let scales = self.scales()?;
        let runs = self.adapters()?;
        self.check_sizes()?;
        self.check_addresses()?;
        self.check_apart(buffers, arriving)?;
        Ok((scales, runs))
    }

    fn check_weight(&self) -> Result<(), Reason> {
        let dtype = self.weight.kernel().dtype();
        if dtype != self.dtype {
            return Err(tiles_operands(
                format!(
                    "weight.dtype: tiles have factors of one type, not {} and {dtype}",
                    self.dtype
                ),
                "give the weight in the type of the rows",
            ));
        }
        if !self.transpose_weight {
            return Err(tiles_operands(
                "transpose_weight: tiles read weights stored as [N, K], and this one is stored as [K, N]",
                "store it as [N, K]",
            ));
        }
        Ok(())
    }

    /// What scales are like: each row or each rank has one, each column or the weight.
    fn scales(&self) -> Result<Option<Scales>, Reason> {
        let weight = match (self.scheme, &self.weight) {
            (QScheme::None, Operand::Plain(_)) => return Ok(None),
            (_, Operand::Quantized(weight)) if weight.zeros().is_none() => weight,
            _ => return Err(self.other_scheme()),
        };
        let by_column = match (self.scheme, weight.scheme()) {
            (QScheme::Int8PerToken, QScheme::Int8PerToken) => true,
            (QScheme::Int8PerToken, QScheme::Int8PerTensor)
            | (QScheme::Fp8PerTensor, QScheme::Fp8PerTensor) => false,
            _ => return Err(self.other_scheme()),
        };
        Ok(Some(Scales {
            by_row: self.scheme.per_row(),
            columns: weight.scales().address(),
            by_column,
        }))
    }

    fn other_scheme(&self) -> Reason {
        tiles_operands(
            format!(
                "weight: tiles have no scales for rows of {:?} and a weight of {:?}, and no zero points",
                self.scheme,
                self.weight.scheme()
            ),
            "quantize the weight as the rows are, symmetrically",
        )
    }

    /// Runs of rows to which an adapter adds something.
    fn adapters(&self) -> Result<Vec<Run>, Reason> {
        let (mut end, mut columns) = (0, 0);
        let mut list = Vec::new();
        for run in self.runs {
            let rows = end..end + run.rows;
            end = rows.end;
            let Some(lora) = run.adapter.filter(|_| adds_something(run)) else {
                continue;
            };
            if [lora.a.dtype(), lora.b.dtype()] != [self.dtype; 2] {
                return Err(tiles_operands(
                    format!(
                        "runs.adapter: tiles take factors of the rows' {}, not {} and {}",
                        self.dtype,
                        lora.a.dtype(),
                        lora.b.dtype()
                    ),
                    "give adapters in the type of rows that are not quantized",
                ));
            }
            // The factor goes into what is rounded between the two: in f16, it must neither overflow nor vanish there.
            if self.dtype == DataType::F16 && !(0.25..=1.0).contains(&lora.scale.abs()) {
                return Err(tiles_operands(
                    format!(
                        "runs.adapter.scale: tiles of f16 take 0.25 to 1, and not {}",
                        lora.scale
                    ),
                    "put the rest of it into a factor",
                ));
            }
            let width = lora.a.shape().columns();
            if self.batch_invariant {
                columns = usize::next_multiple_of(columns, STEP);
            }
            list.push(Run {
                rows,
                first: lora.a.address(),
                second: lora.b.address(),
                column: columns,
                width,
                scale: lora.scale,
            });
            columns += width;
        }
        if list.len() > MOST_RUNS || columns > GEMM_LOW_COLUMNS as usize {
            return Err(tiles_operands(
                format!(
                    "runs: tiles take {MOST_RUNS} with adapters of {GEMM_LOW_COLUMNS} columns in all, not {} of {columns}",
                    list.len()
                ),
                "make several calls",
            ));
        }
        Ok(list)
    }

    fn check_sizes(&self) -> Result<(), Reason> {
        let (k, n) = self.dims();
        let whole = |n: usize, dtype: DataType| n.is_multiple_of(GRAIN / dtype.bytes());
        if !whole(k, self.dtype) || !whole(n, self.output) {
            return Err(tiles_operands(
                format!("weight.shape: tiles take K and N of whole {GRAIN} bytes, not {k} and {n}"),
                "fill the weight up",
            ));
        }
        let fits = |&n: &usize| i32::try_from(n).is_ok();
        if ![k, n, self.rows].iter().all(fits) || self.parts > MOST_PARTS {
            return Err(tiles_operands(
                format!(
                    "rows_per_rank: {} rows of {} ranks by {k} by {n} are more than tiles count",
                    self.rows, self.parts
                ),
                "make several calls",
            ));
        }
        Ok(())
    }

    fn check_addresses(&self) -> Result<(), Reason> {
        let own = self.own.map(|rows| ("chunk", rows.kernel()));
        let weight = ("weight", self.weight.kernel());
        let d = self.d.map(|d| ("output", d.view()));
        for (field, matrix) in own.into_iter().chain([weight]).chain(d) {
            let address = matrix.address();
            // A rank may have no rows: nobody looks where they are.
            if matrix.bytes() > 0 && !address.is_multiple_of(GRAIN as u64) {
                return Err(unaligned(field, address, GRAIN as u64));
            }
        }
        if let Some(c) = self.bias {
            let grain = (BIAS_GRAIN * c.dtype().bytes()) as u64;
            if !c.address().is_multiple_of(grain) {
                return Err(unaligned("bias", c.address(), grain));
            }
        }
        Ok(())
    }

    /// D is written while its factors are still read, and rows still come.
    fn check_apart(
        &self,
        buffers: &[(&'static str, Buffer)],
        arriving: &Range<u64>,
    ) -> Result<(), Reason> {
        let Some(d) = self.d else { return Ok(()) };
        let own = self.own.iter().flat_map(|rows| {
            let scales = match rows {
                Operand::Quantized(q) => Some(q.scales().retain()),
                Operand::Plain(_) => None,
            };
            [rows.kernel().retain()].into_iter().chain(scales)
        });
        let apart = |b: &Buffer| !overlap(b, d);
        let end = d.address() + d.bytes() as u64;
        let in_the_way = d.address() < arriving.end && arriving.start < end;
        if !in_the_way
            && buffers.iter().all(|(_, b)| apart(b))
            && own.into_iter().all(|b| apart(&b))
        {
            return Ok(());
        }
        Err(tiles_operands(
            "output: tiles write D while factors are still read, and it lies in one",
            "give D memory of its own",
        ))
    }
}

fn unaligned(field: &str, address: u64, grain: u64) -> Reason {
    tiles_operands(
        format!("{field}: tiles want it at a multiple of {grain} bytes, not at {address:#x}"),
        "align it",
    )
}

#[cfg(test)]
pub(crate) mod tests;
