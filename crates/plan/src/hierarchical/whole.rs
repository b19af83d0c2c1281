//! The path as a whole: one call inside a machine and one along the rail, whatever is called.

use super::slices;
use crate::rows;
use brigade_device::{
    DataType, HierarchicalCall, HierarchicalOperation as Operation, Part, PerRank,
};
use std::ops::Range;

/// What a rank moves where nothing is cut.
///
/// - All-reduce: every rank gets its machine's reduction, which is its piece for every machine, and adds what all have.
/// - Reduce-scatter: every rank gets its machine's reduction of everything, and takes out of it a piece for each rank of its rail.
/// - All-gather: every rank gets its machine's rows, which are its piece.
///
/// ```
/// use brigade_device::*;
/// use brigade_plan::hierarchical::Whole;
/// let call = HierarchicalCall {
///     machines: Machines::cut(4, 2).unwrap(),
///     operation: HierarchicalOperation::ReduceScatter {
///         rows: [3, 1, 2, 5].into_iter().collect(),
///         row_len: 10,
///         op: ReduceOp::Sum,
///     },
///     dtype: DataType::F32,
///     output: DataType::F32,
///     choice: None,
/// };
/// let whole = Whole::new(&call, 1);
/// assert_eq!(whole.pieces[..], [10, 50]);
/// // Ranks 1 and 3 are its rail.
/// assert_eq!(whole.takes, [30..40, 60..110]);
/// ```
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Whole {
    /// Elements of each machine's piece along this rank's rail.
    pub pieces: PerRank,
    /// Where they lie in the machine's reduction, of a reduce-scatter whose machines have several ranks.
    pub takes: Vec<Range<usize>>,
    /// Elements of each rank of the machine that are gathered inside.
    pub inside: PerRank,
    /// Type of what goes along the rail.
    pub travels: DataType,
}

impl Whole {
    /// That of `rank` of all machines.
    pub fn new(call: &HierarchicalCall, rank: usize) -> Self {
        let machines = call.machines;
        let alone = machines.ranks() == 1;
        let elements = call.elements_of_ranks();
        let rail = || machines.rail(machines.local_of(rank));
        let of_machine = |machine: usize| machines.inside(machine).map(|rank| elements[rank]);
        let mut whole = Self {
            pieces: PerRank::new(),
            takes: Vec::new(),
            inside: PerRank::new(),
            travels: call.output,
        };
        match &call.operation {
            Operation::AllReduce { elements, .. } => {
                whole.pieces = PerRank::from_elem(*elements, machines.count());
            }
            Operation::ReduceScatter { .. } => {
                let offsets = rows::offsets(&elements);
                whole.pieces = rail().map(|rank| elements[rank]).collect();
                if alone {
                    whole.travels = call.dtype;
                } else {
                    whole.takes = rail()
                        .map(|rank| offsets[rank]..offsets[rank + 1])
                        .collect();
                }
            }
            Operation::AllGather { .. } => {
                let sum = |machine| of_machine(machine).sum();
                whole.pieces = (0..machines.count()).map(sum).collect();
                whole.inside = of_machine(machines.machine_of(rank)).collect();
            }
        }
        whole
    }

    /// Elements of what comes from each machine, or goes to each: the piece of `rank`'s machine.
    pub fn own(&self, call: &HierarchicalCall, rank: usize) -> usize {
        self.pieces[call.machines.machine_of(rank)]
    }

    /// Where pieces lie, one after the other.
    pub fn places(&self) -> impl Iterator<Item = Range<usize>> + '_ {
        let offsets = rows::offsets(&self.pieces);
        (0..self.pieces.len()).map(move |machine| offsets[machine]..offsets[machine + 1])
    }

    /// What lies in its slot, in bytes, the same on all ranks: the machine's reduction of everything, what goes along the rail, and what
    /// comes. What nobody needs has none.
    pub fn parts_bytes(call: &HierarchicalCall) -> [usize; Part::COUNT] {
        let (count, ranks) = (call.machines.count(), call.machines.ranks());
        let bytes = |elements: usize| elements.saturating_mul(call.output.bytes());
        let all = bytes(slices::elements(call));
        let mut parts = [0; Part::COUNT];
        match call.operation {
            Operation::AllReduce { .. } => {
                parts[Part::Share as usize] = all;
                parts[Part::Collected as usize] = all.saturating_mul(count);
            }
            Operation::ReduceScatter { .. } => {
                let rail = bytes(slices::most_rank_elements(call)).saturating_mul(count);
                parts[Part::Collected as usize] = rail;
                if ranks > 1 {
                    parts[Part::Output as usize] = all;
                    parts[Part::Share as usize] = rail;
                }
            }
            Operation::AllGather { .. } => {
                if ranks > 1 {
                    parts[Part::Share as usize] = bytes(most_machine_elements(call));
                }
            }
        }
        parts
    }
}

/// Elements of the machine that has most of them, of what is gathered.
pub(super) fn most_machine_elements(call: &HierarchicalCall) -> usize {
    let elements = call.elements_of_ranks();
    let machines = elements.chunks(call.machines.ranks());
    machines.map(|of| of.iter().sum()).max().unwrap_or(0)
}
