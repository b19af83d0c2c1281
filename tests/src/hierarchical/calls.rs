//! The three operations as one call, for contracts that go through all of them.

use super::{Case, settled};
use crate::{backend::Rank, check::assert_bits};
use brigade_device::{
    AllGatherParams, Buffer, ByPath, HierarchicalAllReduceParams, HierarchicalPath,
    HierarchicalPlan, Hierarchy, Operation, ReduceOp, ReduceScatterParams, Result,
};
use std::ops::Range;

/// An operation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum What {
    AllReduce,
    ReduceScatter,
    AllGather,
}

impl What {
    pub(super) const ALL: [Self; 3] = [Self::AllReduce, Self::ReduceScatter, Self::AllGather];

    /// As records name it.
    pub(super) fn operation(self) -> Operation {
        match self {
            Self::AllReduce => Operation::HierarchicalAllReduce,
            Self::ReduceScatter => Operation::HierarchicalReduceScatter,
            Self::AllGather => Operation::HierarchicalAllGather,
        }
    }
}

/// A call.
#[derive(Clone, Copy, Debug)]
pub(super) struct Made<'a> {
    pub(super) what: What,
    pub(super) op: ReduceOp,
    pub(super) choice: Option<HierarchicalPath>,
    /// Elements of each rank, of what is scattered or gathered.
    pub(super) rows: &'a [usize],
}

impl Made<'_> {
    /// A rank's own elements among those of all.
    pub(super) fn own(&self, rank: usize) -> Range<usize> {
        let first = self.rows[..rank].iter().sum::<usize>();
        first..first + self.rows[rank]
    }

    /// Elements that `rank` brings, and that it gets, of `all`.
    pub(super) fn elements(&self, rank: usize, all: usize) -> (usize, usize) {
        match self.what {
            What::AllReduce => (all, all),
            What::ReduceScatter => (all, self.rows[rank]),
            What::AllGather => (self.rows[rank], all),
        }
    }
}

/// Makes it, from a buffer or in place, which an all-reduce alone can be.
pub(super) fn make(
    rank: &Rank,
    over: &Hierarchy,
    made: Made<'_>,
    (from, to): (Option<&Buffer>, &mut Buffer),
) -> Result<HierarchicalPlan> {
    let Made {
        what,
        op,
        choice,
        rows: rows_per_rank,
    } = made;
    let mut lease = over.lease(&rank.stream)?;
    let (from, to) = (from.map(Buffer::view), to.view_mut());
    match what {
        What::AllReduce => lease.all_reduce(HierarchicalAllReduceParams {
            data: to,
            from,
            op,
            choice,
        }),
        What::ReduceScatter => lease.reduce_scatter(ByPath {
            params: ReduceScatterParams {
                from: from.unwrap(),
                rows_per_rank,
                to,
                op,
            },
            choice,
        }),
        What::AllGather => lease.all_gather(ByPath {
            params: AllGatherParams {
                from: from.unwrap(),
                rows_per_rank,
                to,
            },
            choice,
        }),
    }
}

impl Case {
    /// What `rank` brings to a call of this case's numbers, and what it must get.
    pub(super) fn sides(&self, made: Made<'_>, rank: usize) -> [Vec<u8>; 2] {
        let bytes = |of: Range<usize>, size| of.start * size..of.end * size;
        let part = |rank| {
            let own = bytes(made.own(rank), self.dtype.bytes());
            self.input(rank)[own].to_vec()
        };
        let input = || self.input(rank).into_owned();
        match made.what {
            What::AllReduce => [input(), self.want.clone()],
            What::ReduceScatter => {
                let own = bytes(made.own(rank), self.output().bytes());
                [input(), self.want[own].to_vec()]
            }
            What::AllGather => {
                let all = (0..made.rows.len()).flat_map(part);
                [part(rank), all.collect()]
            }
        }
    }

    /// Makes a call of this case's numbers into memory of its own, and asserts its bits, and that its input is as it was.
    pub(super) fn run_as(&self, made: Made<'_>, rank: &Rank, over: &Hierarchy) -> HierarchicalPlan {
        let output = match made.what {
            What::AllGather => self.dtype,
            _ => self.output(),
        };
        let [input, want] = self.sides(made, rank.rank);
        let (brings, gets) = made.elements(rank.rank, self.len);
        let from = rank.upload_bytes(self.dtype, &[brings], &input);
        let mut to = rank.poisoned(output, &[gets]);
        let plan = make(rank, over, made, (Some(&from), &mut to));
        let plan = settled(rank, over, plan);
        let what = format!("{made:?} of {} {}: {plan:?}", self.len, self.dtype);
        let plan = plan.unwrap_or_else(|e| panic!("{what}: {e}"));
        super::assert_taken(&plan, made.choice);
        assert_bits(&rank.raw(to.view()), &want, output, &what);
        assert_bits(&rank.raw(from.view()), &input, self.dtype, "input kept");
        plan
    }
}
