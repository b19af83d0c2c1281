//! One size on one rank: its buffers, its calls, and their times.

use super::Hierarchical;
use crate::{
    collectives::{
        expected::{Closeness, Inputs},
        which::{Extent, Which},
    },
    ranks::{PATIENCE, Rank},
    sample::{Times, Variant, measure},
    trace::{self, Spans},
};
use anyhow::{Context, Result};
use brigade::{
    AllGatherParams, Allocate, Buffer, ByPath, HierarchicalAllReduceParams, HierarchicalCall,
    HierarchicalOperation, HierarchicalPath, HierarchicalPlan, Hierarchy, MemoryType, PerRank,
    ReduceOp, ReduceScatterParams,
    cuda::{CudaDevice, NcclComm},
};
use std::sync::Arc;

/// What was measured of a size.
pub struct Measured {
    pub extent: Extent,
    pub times: Vec<Times>,
    pub plan: HierarchicalPlan,
    pub spans: Vec<Spans>,
}

/// One size on one rank.
pub struct Case<'a> {
    pub rank: &'a Rank,
    pub options: &'a Hierarchical,
    /// The rank's device, as plans see its wire.
    pub device: &'a Arc<CudaDevice>,
    pub over: &'a Hierarchy,
    pub inputs: &'a Inputs,
    pub extent: Extent,
}

/// One slice: the plain sequence of phases.
const ONE: Option<HierarchicalPath> = Some(HierarchicalPath::Slices { count: 1 });

impl Case<'_> {
    /// Elements of a rank's input and of its output.
    fn sides(&self) -> (usize, usize) {
        let Extent { all, share } = self.extent;
        match self.which() {
            Which::ReduceScatter => (all, share),
            Which::AllGather => (share, all),
            _ => (all, all),
        }
    }

    fn which(&self) -> Which {
        self.options.operation.which()
    }

    fn op(&self) -> ReduceOp {
        self.options.op.reduction()
    }

    /// Elements are rows of one.
    fn rows(&self) -> Vec<usize> {
        vec![self.extent.share; self.rank.size()]
    }

    /// The call as plans see it.
    fn signed(&self) -> HierarchicalCall {
        let (dtype, op) = (self.options.dtype.dtype(), self.op());
        let rows: PerRank = self.rows().into_iter().collect();
        HierarchicalCall {
            machines: self.over.machines(),
            operation: match self.which() {
                Which::ReduceScatter => HierarchicalOperation::ReduceScatter {
                    rows,
                    row_len: 1,
                    op,
                },
                Which::AllGather => HierarchicalOperation::AllGather { rows, row_len: 1 },
                _ => HierarchicalOperation::AllReduce {
                    elements: self.extent.all,
                    op,
                },
            },
            dtype,
            output: dtype,
            choice: self.options.choice(),
        }
    }

    /// An output in which nothing has been written yet.
    fn fresh(&self) -> Result<Buffer> {
        let Rank { device, on, .. } = self.rank;
        let (dtype, shape) = (self.options.dtype.dtype(), [self.sides().1]);
        let mut buffer = device.allocate(on, MemoryType::Device, dtype, &shape)?;
        device.fill(on, buffer.view_mut(), 0xFF)?;
        Ok(buffer)
    }

    /// Enqueues one of our calls.
    fn call(
        &self,
        x: &Buffer,
        y: &mut Buffer,
        choice: Option<HierarchicalPath>,
    ) -> brigade::Result<()> {
        let mut lease = self.over.lease(&self.rank.on)?;
        let rows_per_rank = &self.rows()[..];
        let (from, to, op) = (x.view(), y.view_mut(), self.op());
        match self.which() {
            Which::ReduceScatter => lease.reduce_scatter(ByPath {
                params: ReduceScatterParams {
                    from,
                    rows_per_rank,
                    to,
                    op,
                },
                choice,
            }),
            Which::AllGather => lease.all_gather(ByPath {
                params: AllGatherParams {
                    from,
                    rows_per_rank,
                    to,
                },
                choice,
            }),
            _ => lease.all_reduce(HierarchicalAllReduceParams {
                data: to,
                from: Some(from),
                op,
                choice,
            }),
        }
        .map(drop)
    }

    /// Enqueues NCCL's over all ranks at once.
    fn flat(&self, nccl: &NcclComm, x: &Buffer, y: &mut Buffer) -> brigade::Result<()> {
        let (on, from, to) = (&self.rank.on, x.view(), y.view_mut());
        match self.which() {
            Which::ReduceScatter => nccl.reduce_scatter(on, from, to, self.op()),
            Which::AllGather => nccl.all_gather(on, from, to),
            _ => nccl.all_reduce(on, from, to, self.op()),
        }
    }

    /// Makes a call, and compares what it gives.
    fn check(
        &self,
        what: &str,
        call: impl FnOnce(&mut Buffer) -> brigade::Result<()>,
    ) -> Result<()> {
        let rank = self.rank;
        let mut y = self.fresh()?;
        call(&mut y)?;
        rank.on.sync(PATIENCE)?;
        self.over.check()?;
        let mut got = vec![0; y.bytes()];
        rank.device.read(&rank.on, y.view(), &mut got)?;
        let closeness = match self.which() {
            Which::AllGather => Closeness::Exact,
            _ => Closeness::Rounded,
        };
        let of = (self.which(), self.op(), self.extent);
        let verdict = self.inputs.check(of, rank.number(), closeness, &got);
        rank.agree(verdict.with_context(|| what.to_owned()))
    }

    pub fn measure(&self) -> Result<Measured> {
        let (rank, common) = (self.rank, &self.options.common);
        let (input, dtype) = (self.sides().0, self.options.dtype.dtype());
        let mut x = rank
            .device
            .allocate(&rank.on, MemoryType::Device, dtype, &[input])?;
        let mine = self.inputs.bytes(rank.number(), input);
        rank.device.write(&rank.on, x.view_mut(), &mine)?;
        let ours = self.options.choice();
        let choices = [("ours", ours), ("one slice", ONE)];
        let plan = self.over.explain(&self.signed())?;
        if common.check {
            for &(what, choice) in &choices {
                self.check(what, |y| self.call(&x, y, choice))?;
            }
            if let Some(nccl) = &rank.nccl {
                self.check("NCCL", |y| self.flat(nccl, &x, y))?;
            }
        }
        let how = (common.calls, common.graph);
        let mut variants = Vec::new();
        for &(name, choice) in &choices {
            let (x, mut y) = (&x, self.fresh()?);
            let again = move || self.call(x, &mut y, choice);
            variants.push(Variant::new(rank, name, how, again)?);
        }
        if let Some(nccl) = &rank.nccl {
            let (x, mut y) = (&x, self.fresh()?);
            let flat = move || self.flat(nccl, x, &mut y);
            variants.push(Variant::new(rank, "nccl", how, flat)?);
        }
        let times = measure(rank, &mut variants, common.rounds)?;
        drop(variants);
        rank.on.sync(PATIENCE)?;
        self.over.check()?;
        let spans = match self.options.trace {
            Some(_) => {
                let mut y = self.fresh()?;
                trace::record_on(self.device, rank, || self.call(&x, &mut y, ours))?
            }
            None => Vec::new(),
        };
        Ok(Measured {
            extent: self.extent,
            times,
            plan,
            spans,
        })
    }
}
