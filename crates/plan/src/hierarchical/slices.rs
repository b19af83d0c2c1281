//! Which elements are in which slice, and where they lie on the way.

use crate::rows;
use brigade_device::{
    HierarchicalCall, HierarchicalOperation as Operation, Machines, Part, PerRank, Phase,
};
use std::ops::Range;

/// Parts of a slot begin at a cache line.
const ALIGN_BYTES: usize = 64;

/// The slices of a call. Every slice has a *piece* for each rank, and pieces lie one after the other by local number and then by
/// machine: so that a reduce-scatter inside gives a rank its rail's pieces, and its rail each machine its own.
///
/// - All-reduce: a slice is a range of the tensor, cut as evenly as can be over local numbers, and these over machines.
/// - Reduce-scatter and all-gather: a rank's piece is a range of its own rows.
///
/// ```
/// use brigade_device::*;
/// use brigade_plan::hierarchical::Slices;
/// let call = HierarchicalCall {
///     machines: Machines::cut(4, 2).unwrap(),
///     operation: HierarchicalOperation::AllReduce { elements: 11, op: ReduceOp::Sum },
///     dtype: DataType::F32,
///     output: DataType::F32,
///     choice: None,
/// };
/// let slices = Slices::new(&call, 2);
/// // Rank 1 is the second of the first machine: its piece lies behind those of ranks 0 and 2.
/// assert_eq!(slices.piece(0, 1), 4..6);
/// assert_eq!(slices.piece(1, 1), 10..11);
/// ```
#[derive(Clone, Debug)]
pub struct Slices {
    machines: Machines,
    rank_elements: usize,
    cut: Cut,
}

#[derive(Clone, Debug)]
enum Cut {
    /// So many elements, whoever reduces them.
    Even(usize),
    /// First element of each rank, and at the end the number of all.
    Owned(PerRank),
}

impl Slices {
    /// Of `rank_elements` of each rank.
    pub fn new(call: &HierarchicalCall, rank_elements: usize) -> Self {
        let cut = match &call.operation {
            Operation::AllReduce { elements, .. } => Cut::Even(*elements),
            Operation::ReduceScatter { .. } | Operation::AllGather { .. } => {
                Cut::Owned(rows::offsets(&call.elements_of_ranks()))
            }
        };
        Self {
            machines: call.machines,
            rank_elements,
            cut,
        }
    }

    /// A rank's piece of a slice, in elements of the whole tensor.
    pub fn piece(&self, slice: usize, rank: usize) -> Range<usize> {
        let step = self.rank_elements;
        match &self.cut {
            Cut::Even(elements) => {
                let at = |slice: usize| (slice * step * self.machines.size()).min(*elements);
                let (start, end) = (at(slice), at(slice + 1));
                let (machine, local) =
                    (self.machines.machine_of(rank), self.machines.local_of(rank));
                let share = rows::piece(end - start, self.machines.ranks(), local);
                let piece = rows::piece(share.len(), self.machines.count(), machine);
                let first = start + share.start;
                first + piece.start..first + piece.end
            }
            Cut::Owned(offsets) => {
                let end = offsets[rank + 1];
                let at = |slice: usize| (offsets[rank] + slice * step).min(end);
                at(slice)..at(slice + 1)
            }
        }
    }

    /// The same, counted from the rank's first element. For a reduce-scatter and an all-gather.
    pub fn own(&self, slice: usize, rank: usize) -> Range<usize> {
        let piece = self.piece(slice, rank);
        match &self.cut {
            Cut::Even(_) => piece,
            Cut::Owned(offsets) => piece.start - offsets[rank]..piece.end - offsets[rank],
        }
    }

    /// All pieces of a slice in the order in which they lie.
    pub fn pieces(&self, slice: usize) -> impl Iterator<Item = Range<usize>> + '_ {
        (0..self.machines.ranks())
            .flat_map(|local| self.machines.rail(local))
            .map(move |rank| self.piece(slice, rank))
    }

    /// Elements of each machine's piece on the rail of `local`.
    pub fn rail(&self, slice: usize, local: usize) -> PerRank {
        let ranks = self.machines.rail(local);
        ranks.map(|rank| self.piece(slice, rank).len()).collect()
    }

    /// Elements of each local number's share: its rail's pieces.
    pub fn shares(&self, slice: usize) -> PerRank {
        let share = |local| self.rail(slice, local).iter().sum();
        (0..self.machines.ranks()).map(share).collect()
    }
}

/// Elements of the whole tensor.
pub(super) fn elements(call: &HierarchicalCall) -> usize {
    match &call.operation {
        Operation::AllReduce { elements, .. } => *elements,
        Operation::ReduceScatter { rows, row_len, .. } | Operation::AllGather { rows, row_len } => {
            rows.iter().map(|r| r * row_len).sum()
        }
    }
}

/// Elements of the rank that has most of them, if all is one slice.
pub(super) fn most_rank_elements(call: &HierarchicalCall) -> usize {
    match &call.operation {
        Operation::AllReduce { elements, .. } => elements.div_ceil(call.machines.size()),
        Operation::ReduceScatter { rows, row_len, .. } | Operation::AllGather { rows, row_len } => {
            rows.iter().map(|r| r * row_len).max().unwrap_or(0)
        }
    }
}

/// What lies in a slot, in bytes of the largest slice: what goes into each phase that there is, in their order, and what comes out of the
/// last. What nobody needs has none. (Of a full slice every piece is as large as can be; what is left for the last slice is less, however it
/// is cut.) Where slices of an all-reduce are read and written `in_place`, in the caller's tensors, which they lie in as one piece, they need
/// none there.
pub fn parts_bytes(
    call: &HierarchicalCall,
    (phases, rank_elements): (&[Phase], usize),
    in_place: bool,
) -> [usize; Part::COUNT] {
    let mut parts = parts_of(call, phases, rank_elements);
    if in_place && matches!(call.operation, Operation::AllReduce { .. }) {
        // What goes into the first phase, and what comes out of the last.
        let ends = match call.machines.ranks() {
            1 => [Part::Share, Part::Rail],
            _ => [Part::Input, Part::Output],
        };
        for part in ends {
            parts[part as usize] = 0;
        }
    }
    parts
}

/// The same where all of it is copied.
pub(super) fn parts_of(
    call: &HierarchicalCall,
    phases: &[Phase],
    rank_elements: usize,
) -> [usize; Part::COUNT] {
    let (count, ranks) = (call.machines.count(), call.machines.ranks());
    let bytes = |elements: usize, each: usize| {
        elements
            .saturating_mul(each)
            .checked_next_multiple_of(ALIGN_BYTES)
            .unwrap_or(usize::MAX)
    };
    let rail = rank_elements.saturating_mul(count);
    let all = rail.saturating_mul(ranks);
    let (input, output) = (call.dtype.bytes(), call.output.bytes());
    let has = |phase| phases.contains(&phase);
    let when = |is: bool, bytes: usize| if is { bytes } else { 0 };
    let travels = if ranks == 1 { input } else { output };
    if is_one_shot(phases) {
        return [
            when(has(Phase::ReduceInside), bytes(all, input)),
            bytes(rail, travels),
            bytes(rail.saturating_mul(count), travels),
            0,
            bytes(rail, output),
            when(has(Phase::GatherInside), bytes(all, output)),
        ];
    }
    [
        when(has(Phase::ReduceInside), bytes(all, input)),
        when(has(Phase::Collect), bytes(rail, travels)),
        when(has(Phase::Add), bytes(rail, travels)),
        when(
            has(Phase::Add) || has(Phase::Diffuse),
            bytes(rank_elements, output),
        ),
        when(has(Phase::Diffuse), bytes(rail, output)),
        when(has(Phase::GatherInside), bytes(all, output)),
    ]
}

/// Whether shares are diffused whole, and added by all.
pub(super) fn is_one_shot(phases: &[Phase]) -> bool {
    let at = |of: Phase| phases.iter().position(|phase| *phase == of);
    at(Phase::Diffuse)
        .zip(at(Phase::Add))
        .is_some_and(|(diffuse, add)| diffuse < add)
}

/// All of it.
pub(super) fn slot_bytes(call: &HierarchicalCall, cut: (&[Phase], usize), in_place: bool) -> usize {
    let parts = parts_bytes(call, cut, in_place);
    parts.iter().fold(0, |sum, b| sum.saturating_add(*b))
}
