//! Collectives across machines: their parameters, the signed call, and the plan.
//!
//! Five phases, after fairring (`AllReduceFuture`, Meta Research, 2022): a reduce-scatter inside every machine; along every rail,
//! each machine *collects* its piece of its ranks' shares from all machines, *adds*, and *diffuses* the sum; and an all-gather inside.
//! The tensor goes through them in slices, so that all phases are busy at once.

use crate::{
    AllGatherParams, DataType, Error, Machines, PerRank, Reason, ReduceOp, ReduceScatterParams,
    Result, SumOrder, View, ViewMut, collectives::check_all_reduce,
};
use smallvec::SmallVec;
use std::{fmt, time::Duration};

/// Every rank of all machines gets the reduction of all inputs.
#[derive(Debug)]
pub struct HierarchicalAllReduceParams<'a> {
    /// Result, and input too unless `from` is given. Same shape on every rank.
    pub data: ViewMut<'a>,
    /// Input, if it is to be kept. The result may then be f32 where the input is f16 or bf16; so are the sums that travel between
    /// machines.
    pub from: Option<View<'a>>,
    /// How values are combined.
    pub op: ReduceOp,
    /// Forced path.
    pub choice: Option<HierarchicalPath>,
}

impl HierarchicalAllReduceParams<'_> {
    /// # Errors
    /// [`Error::Invalid`] naming the field.
    pub fn check(&self) -> Result<()> {
        check_choice(self.choice)?;
        check_all_reduce(&self.data, self.from)
    }
}

/// A reduce-scatter or an all-gather of a [`Hierarchy`](crate::Hierarchy), with the path that it is to take. Parameters alone become one that
/// leaves the path to the plan.
#[derive(Debug)]
pub struct ByPath<P> {
    /// What is done.
    pub params: P,
    /// Forced path.
    pub choice: Option<HierarchicalPath>,
}

impl<P> From<P> for ByPath<P> {
    fn from(params: P) -> Self {
        Self {
            params,
            choice: None,
        }
    }
}

fn check_choice(choice: Option<HierarchicalPath>) -> Result<()> {
    match choice {
        Some(HierarchicalPath::Slices { count: 0 } | HierarchicalPath::OneShot { count: 0 }) => {
            Err(Error::invalid("choice", "0 slices", "at least 1"))
        }
        _ => Ok(()),
    }
}

/// How data gets across machines. Where there is one, nothing does, and a plan says so.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum HierarchicalPath {
    /// For few bytes: one call inside, one across. Every rank gets its machine's reduction of everything, or all of its machine's rows; sends
    /// along its rail what each machine needs of it; and reduces what came.
    Whole,
    /// Slices go through the phases. One slice is the plain sequence of phases, of several each phase has one at a time.
    Slices {
        /// At least 1. Fewer are made where the tensor has not as many elements, and more where memory does not hold so large ones.
        count: u32,
    },
    /// Slices of an all-reduce, of which ranks send their shares whole, and each adds what its rail's have: one call along the rail where
    /// [`Slices`](Self::Slices) has two, with half as many bytes as there are machines times theirs, so no more for two. Of other operations,
    /// whose slices go along the rail once, the same as those.
    OneShot {
        /// As there.
        count: u32,
    },
}

/// What is done across machines.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub enum HierarchicalOperation {
    /// See [`Hierarchy`](crate::Hierarchy)'s `all_reduce`.
    AllReduce {
        /// Elements of the input.
        elements: usize,
        /// How values are combined.
        op: ReduceOp,
    },
    /// Its `reduce_scatter`.
    ReduceScatter {
        /// Rows that each rank gets.
        rows: PerRank,
        /// Elements in a row.
        row_len: usize,
        /// How values are combined.
        op: ReduceOp,
    },
    /// Its `all_gather`.
    AllGather {
        /// Rows that each rank brings.
        rows: PerRank,
        /// Elements in a row.
        row_len: usize,
    },
}

/// The signed part of a call across machines.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct HierarchicalCall {
    /// Which ranks share a machine.
    pub machines: Machines,
    /// What is done.
    pub operation: HierarchicalOperation,
    /// Type of the input.
    pub dtype: DataType,
    /// Type of the result.
    pub output: DataType,
    /// Forced path.
    pub choice: Option<HierarchicalPath>,
}

impl HierarchicalCall {
    /// The call that these parameters make, checked.
    ///
    /// # Errors
    /// [`Error::Invalid`] naming the field.
    pub fn all_reduce(machines: Machines, p: &HierarchicalAllReduceParams<'_>) -> Result<Self> {
        p.check()?;
        let data = p.data.as_view();
        let from = p.from.unwrap_or(data);
        Ok(Self {
            machines,
            operation: HierarchicalOperation::AllReduce {
                elements: from.shape().len(),
                op: p.op,
            },
            dtype: from.dtype(),
            output: data.dtype(),
            choice: p.choice,
        })
    }

    /// The same for `rank` of all machines.
    ///
    /// # Errors
    /// As [`all_reduce`](Self::all_reduce).
    pub fn reduce_scatter(
        machines: Machines,
        rank: usize,
        ByPath { params: p, choice }: &ByPath<ReduceScatterParams<'_>>,
    ) -> Result<Self> {
        check_choice(*choice)?;
        p.check(rank, machines.size())?;
        Ok(Self {
            machines,
            operation: HierarchicalOperation::ReduceScatter {
                rows: PerRank::from_slice(p.rows_per_rank),
                row_len: p.from.shape().row_len(),
                op: p.op,
            },
            dtype: p.from.dtype(),
            output: p.to.dtype(),
            choice: *choice,
        })
    }

    /// The same for `rank` of all machines.
    ///
    /// # Errors
    /// As [`all_reduce`](Self::all_reduce).
    pub fn all_gather(
        machines: Machines,
        rank: usize,
        ByPath { params: p, choice }: &ByPath<AllGatherParams<'_>>,
    ) -> Result<Self> {
        check_choice(*choice)?;
        p.check(rank, machines.size())?;
        Ok(Self {
            machines,
            operation: HierarchicalOperation::AllGather {
                rows: PerRank::from_slice(p.rows_per_rank),
                row_len: p.to.shape().row_len(),
            },
            dtype: p.from.dtype(),
            output: p.to.dtype(),
            choice: *choice,
        })
    }

    /// How values are combined; a gather combines none.
    pub fn op(&self) -> ReduceOp {
        match self.operation {
            HierarchicalOperation::AllReduce { op, .. }
            | HierarchicalOperation::ReduceScatter { op, .. } => op,
            HierarchicalOperation::AllGather { .. } => ReduceOp::Sum,
        }
    }

    /// Elements of each rank, of what is scattered or gathered; none of an all-reduce.
    pub fn elements_of_ranks(&self) -> PerRank {
        match &self.operation {
            HierarchicalOperation::AllReduce { .. } => PerRank::new(),
            HierarchicalOperation::ReduceScatter { rows, row_len, .. }
            | HierarchicalOperation::AllGather { rows, row_len } => {
                rows.iter().map(|r| r * row_len).collect()
            }
        }
    }
}

/// What is done with a slice, one after the other.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Phase {
    /// Reduce-scatter inside the machine: every rank has its share of the machine's sum.
    ReduceInside,
    /// Along the rail: every machine gets its piece of that share from all machines.
    Collect,
    /// The pieces of all machines are reduced, in machine order.
    Add,
    /// Along the rail: every machine gets the others' reduced pieces.
    Diffuse,
    /// All-gather inside the machine.
    GatherInside,
}

impl Phase {
    /// All of them, in order.
    pub const ALL: [Self; 5] = [
        Self::ReduceInside,
        Self::Collect,
        Self::Add,
        Self::Diffuse,
        Self::GatherInside,
    ];

    /// Its name in traces and tables.
    pub const fn name(self) -> &'static str {
        match self {
            Self::ReduceInside => "reduce inside",
            Self::Collect => "collect",
            Self::Add => "add",
            Self::Diffuse => "diffuse",
            Self::GatherInside => "gather inside",
        }
    }
}

/// What the time that a plan expects rests on.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum CostsBasis {
    /// Costs that nobody measured, or not all of them.
    Guessed,
    /// Costs that were measured with other numbers of machines, or of their ranks.
    Elsewhere,
    /// Costs that were measured with as many machines, of as many ranks.
    Measured,
}

impl fmt::Display for CostsBasis {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Guessed => "guessed costs",
            Self::Elsewhere => "costs of other machines",
            Self::Measured => "measured costs",
        })
    }
}

/// How a call across machines is carried out.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum HierarchicalPlan {
    /// There is one machine: it is one collective inside, by the plan of that.
    Inside {
        /// Which bits; of a gather, none.
        order: Option<SumOrder>,
        /// Why no path was taken, where one was forced.
        instead_of: Option<Reason>,
    },
    /// See [`HierarchicalPath::Whole`].
    Whole {
        /// Which bits; of a gather, none.
        order: Option<SumOrder>,
        /// Memory that it takes besides that of the communicators.
        staging_bytes: usize,
        /// What it should take.
        expected: Duration,
        /// What that rests on.
        basis: CostsBasis,
    },
    /// See [`HierarchicalPath::Slices`] and [`HierarchicalPath::OneShot`], whose phases are others.
    Slices(SlicedPlan),
}

impl HierarchicalPlan {
    /// Which bits it promises; of a gather, none.
    pub const fn order(&self) -> Option<SumOrder> {
        match self {
            Self::Inside { order, .. } | Self::Whole { order, .. } => *order,
            Self::Slices(plan) => plan.order,
        }
    }
}

/// Slices and their phases.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SlicedPlan {
    /// What each slice goes through: without those inside where machines have one rank, and without those that the operation does
    /// not need.
    pub phases: SmallVec<[Phase; 5]>,
    /// At least 1.
    pub slices: usize,
    /// Elements of each rank in a slice; the last one has what is left.
    pub rank_elements: usize,
    /// Places for slices on their way: the `n`-th takes the one of the slice so many before it, once that has left it.
    pub slots: usize,
    /// Connections to the rail that steps along it take in turn: as few as are as quick as all that a rank has. Where slices have one slot, one
    /// after the other, GPUs send large pieces by two all the same, half by each.
    pub connections: usize,
    /// Which bits; of a gather, none.
    pub order: Option<SumOrder>,
    /// Memory of all slots.
    pub staging_bytes: usize,
    /// When the last step ends, if each takes what the table of costs says and begins as soon as its slice, its thread or stream, a slot and
    /// the link between machines let it.
    pub expected: Duration,
    /// What that rests on.
    pub basis: CostsBasis,
}

impl fmt::Display for HierarchicalPlan {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let order = self.order().map_or(String::new(), |o| format!(", {o:?}"));
        match self {
            Self::Inside { instead_of, .. } => {
                let why = instead_of
                    .as_ref()
                    .map(|reason| format!(" ({})", reason.what));
                write!(f, "one machine: inside{order}{}", why.unwrap_or_default())
            }
            Self::Whole {
                expected, basis, ..
            } => write!(f, "whole{order}, expected {expected:.1?} by {basis}"),
            Self::Slices(p) => {
                let phases: Vec<_> = p.phases.iter().map(|p| p.name()).collect();
                write!(
                    f,
                    "{} x {} elements a rank in {} slots by {} connections: {}{order}, expected {:.1?} by {}",
                    p.slices,
                    p.rank_elements,
                    p.slots,
                    p.connections,
                    phases.join(", "),
                    p.expected,
                    p.basis
                )
            }
        }
    }
}
