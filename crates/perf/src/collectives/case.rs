//! One size on one rank: its buffers, its calls, and their times.

use super::{
    Asked,
    chain::{Chain, Middle, Sum},
    expected::{Closeness, Inputs, ROOT},
    names::Choice,
    which::{Extent, Which},
};
use crate::{
    ranks::{PATIENCE, Rank},
    sample::{Times, Variant, measure},
};
use anyhow::{Context as _, Result};
use brigade::{
    AllGatherParams, AllReduceParams, AllToAllParams, Allocate, BroadcastParams, Buffer, Call,
    Comm, MemoryType, Plan, Queues, Reason, ReduceScatterParams, SumOrder, cuda::NcclComm,
};

/// What was measured of a size.
pub struct Measured {
    pub extent: Extent,
    /// One for each choice.
    pub ours: Vec<Ours>,
    pub nccl: Option<Times>,
    /// The chain with nothing in its middle.
    pub chain_alone: Option<Times>,
    /// The chain with NCCL's all-reduce in its middle.
    pub chain_nccl: Option<Times>,
}

/// What was measured of a choice.
pub struct Ours {
    pub choice: Choice,
    /// What was done, or why it cannot be.
    pub plan: Result<Plan, Reason>,
    pub times: Option<Times>,
    /// The chain with this all-reduce in its middle.
    pub chain: Option<Times>,
    /// The same with the norm in the all-reduce.
    pub chain_fused: Option<Times>,
}

/// Whose times a variant's are.
#[derive(Clone, Copy)]
enum Whose {
    Ours(usize),
    Nccl,
    Chain(usize),
    ChainFused(usize),
    ChainAlone,
    ChainNccl,
}

/// One size on one rank.
pub struct Case<'a> {
    pub rank: &'a Rank,
    pub asked: &'a Asked<'a>,
    pub comm: &'a Comm,
    pub inputs: &'a Inputs,
    pub extent: Extent,
    /// Part of the output, or the output part of it, if the call is in place.
    input: Buffer,
    output: Buffer,
}

impl<'a> Case<'a> {
    pub fn new(
        rank: &'a Rank,
        asked: &'a Asked<'a>,
        comm: &'a Comm,
        inputs: &'a Inputs,
        extent: Extent,
    ) -> Result<Self> {
        let Extent { all, share } = extent;
        let dtype = asked.options.dtype.dtype();
        let new = |elements: usize| {
            rank.device
                .allocate(&rank.on, MemoryType::Device, dtype, &[elements])
        };
        let whole = new(all)?;
        // Where nccl-tests has them too: own rows lie where they belong among those of all ranks.
        let own = || whole.slice(rank.number() * share, share);
        let (input, output) = match (asked.which, asked.in_place) {
            (Which::AllReduce | Which::Broadcast, true) => (whole.clone(), whole),
            (Which::AllReduce | Which::Broadcast, false) | (Which::AllToAll, _) => {
                (new(all)?, whole)
            }
            (Which::AllGather, true) => (own()?, whole),
            (Which::AllGather, false) => (new(share)?, whole),
            (Which::ReduceScatter, true) => (whole.clone(), own()?),
            (Which::ReduceScatter, false) => (whole, new(share)?),
        };
        let case = Self {
            rank,
            asked,
            comm,
            inputs,
            extent,
            input,
            output,
        };
        case.prepare()?;
        Ok(case)
    }

    /// Poison where the result goes, then the input.
    fn prepare(&self) -> brigade::Result<()> {
        let Rank { device, on, .. } = self.rank;
        device.fill(on, self.output.clone().view_mut(), 0xFF)?;
        let me = self.rank.number();
        if self.asked.which == Which::Broadcast && me != ROOT {
            return Ok(());
        }
        let bytes = self.inputs.bytes(me, self.input.shape().len());
        device.write(on, self.input.clone().view_mut(), &bytes)
    }

    /// The call as plans see it.
    fn call(&self, choice: Choice) -> Call {
        let (dtype, op) = (self.input.dtype(), self.asked.op.reduction());
        let rows = || self.rows().as_slice().into();
        match self.asked.which {
            Which::AllReduce => Call::AllReduce {
                elements: self.extent.all,
                dtype,
                output: dtype,
                op,
                choice: choice.algorithm,
            },
            Which::AllGather => Call::AllGather {
                rows: rows(),
                row_len: 1,
                dtype,
            },
            Which::ReduceScatter => Call::ReduceScatter {
                rows: rows(),
                row_len: 1,
                dtype,
                output: dtype,
                op,
            },
            Which::Broadcast => Call::Broadcast {
                elements: self.extent.all,
                dtype,
                root: ROOT,
            },
            Which::AllToAll => Call::AllToAll { row_len: 1, dtype },
        }
    }

    /// Elements are rows of one.
    fn rows(&self) -> Vec<usize> {
        vec![self.extent.share; self.rank.size()]
    }

    /// Brigade's call, from the input to the output.
    fn ours(&self, choice: Choice) -> impl FnMut() -> brigade::Result<()> + use<'a> {
        let (rank, comm, asked) = (self.rank, self.comm, self.asked);
        let (input, mut output) = (self.input.clone(), self.output.clone());
        let (rows, op) = (self.rows(), asked.op.reduction());
        move || {
            let mut lease = comm.lease(&rank.on)?;
            match asked.which {
                Which::AllReduce => lease.all_reduce(AllReduceParams {
                    data: output.view_mut(),
                    from: Some(input.view()).filter(|_| !asked.in_place),
                    op,
                    choice: choice.algorithm,
                }),
                Which::AllGather => lease.all_gather(AllGatherParams {
                    from: input.view(),
                    rows_per_rank: &rows,
                    to: output.view_mut(),
                }),
                Which::ReduceScatter => lease.reduce_scatter(ReduceScatterParams {
                    from: input.view(),
                    rows_per_rank: &rows,
                    to: output.view_mut(),
                    op,
                }),
                Which::Broadcast => lease.broadcast(BroadcastParams {
                    data: output.view_mut(),
                    root: ROOT,
                }),
                Which::AllToAll => lease.all_to_all(AllToAllParams {
                    from: input.view(),
                    send_rows: &rows,
                    to: output.view_mut(),
                    recv_rows: &rows,
                }),
            }
            .map(drop)
        }
    }

    /// NCCL's, likewise.
    fn nccl(&self, nccl: &'a NcclComm) -> impl FnMut() -> brigade::Result<()> + use<'a> {
        let (on, which, op) = (&self.rank.on, self.asked.which, self.asked.op.reduction());
        let (input, mut output) = (self.input.clone(), self.output.clone());
        let (size, share) = (self.rank.size(), self.extent.share);
        move || match which {
            Which::AllReduce => nccl.all_reduce(on, input.view(), output.view_mut(), op),
            Which::AllGather => nccl.all_gather(on, input.view(), output.view_mut()),
            Which::ReduceScatter => nccl.reduce_scatter(on, input.view(), output.view_mut(), op),
            Which::Broadcast => nccl.broadcast(on, output.view_mut(), ROOT),
            // As nccl-tests has it, to and from itself too.
            Which::AllToAll => {
                let shares = |of: &Buffer| -> brigade::Result<Vec<Buffer>> {
                    (0..size).map(|r| of.slice(r * share, share)).collect()
                };
                let (from, mut to) = (shares(&input)?, shares(&output)?);
                let from: Vec<_> = from.iter().map(Buffer::view).zip(0..).collect();
                let mut to: Vec<_> = to.iter_mut().map(Buffer::view_mut).zip(0..).collect();
                nccl.exchange(on, &from, &mut to)
            }
        }
    }

    /// Makes the call and compares what it gives; if graphs are asked for, one of it too, which is replayed twice, since what
    /// was counted on by the first replay must hold for the second.
    fn check(
        &self,
        what: &str,
        closeness: Closeness,
        mut call: impl FnMut() -> brigade::Result<()>,
    ) -> Result<()> {
        let rank = self.rank;
        self.prepare()?;
        call()?;
        self.compare(what, closeness)?;
        if self.asked.options.common.graph {
            let graph = rank.device.capture(&rank.on, &mut call)?;
            // No GPU waits for a peer whose graph is still being made.
            rank.meet()?;
            for _ in 0..2 {
                self.prepare()?;
                drop(graph.launch(&rank.on)?);
                self.compare(&format!("{what} in a graph"), closeness)?;
            }
        }
        Ok(())
    }

    /// All ranks hear of what one of them finds.
    fn compare(&self, what: &str, closeness: Closeness) -> Result<()> {
        let rank = self.rank;
        // A fault is told as what it is, before anybody looks at what it left.
        rank.on.sync(PATIENCE)?;
        let mut got = vec![0; self.output.bytes()];
        rank.device.read(&rank.on, self.output.view(), &mut got)?;
        let call = (self.asked.which, self.asked.op.reduction(), self.extent);
        let verdict = self.inputs.check(call, rank.number(), closeness, &got);
        let bytes = self.extent.all * self.input.dtype().bytes();
        rank.agree(verdict.with_context(|| format!("{what}, {bytes} bytes")))
    }

    fn check_all(&self, plans: &[(Choice, Result<Plan, Reason>)]) -> Result<()> {
        for (choice, plan) in plans {
            let closeness = match plan {
                Err(_) => continue,
                Ok(Plan::AllReduce { order, .. } | Plan::ReduceScatter { order, .. })
                    if *order != SumOrder::Flat =>
                {
                    Closeness::Rounded
                }
                Ok(_) => Closeness::Exact,
            };
            self.check(choice.name, closeness, self.ours(*choice))?;
        }
        if let Some(nccl) = &self.rank.nccl {
            let closeness = match self.asked.which {
                Which::AllReduce | Which::ReduceScatter => Closeness::Rounded,
                Which::AllGather | Which::Broadcast | Which::AllToAll => Closeness::Exact,
            };
            self.check("NCCL", closeness, self.nccl(nccl))?;
        }
        Ok(())
    }

    /// The sum of a chain.
    fn sum(&self, choice: Choice) -> Sum<'a> {
        let (rank, comm, asked) = (self.rank, self.comm, self.asked);
        Box::new(move |from, to| {
            comm.lease(&rank.on)?
                .all_reduce(AllReduceParams {
                    data: to,
                    from: Some(from).filter(|_| !asked.in_place),
                    op: asked.op.reduction(),
                    choice: choice.algorithm,
                })
                .map(drop)
        })
    }

    /// Times, and what was planned.
    pub fn run(&self) -> Result<Measured> {
        let (rank, common) = (self.rank, &self.asked.options.common);
        let how = (common.calls, common.graph);
        let plans: Vec<(Choice, Result<Plan, Reason>)> = self
            .asked
            .choices
            .iter()
            .map(|&choice| (choice, self.comm.explain(&self.call(choice))))
            .collect();
        if common.check {
            self.check_all(&plans)?;
        }
        self.prepare()?;
        let possible = || plans.iter().enumerate().filter(|(_, (_, p))| p.is_ok());
        let mut list = Vec::new();
        for (i, (choice, _)) in possible() {
            let variant = Variant::new(rank, choice.name, how, self.ours(*choice))?;
            list.push((Whose::Ours(i), variant));
        }
        if let Some(nccl) = &rank.nccl {
            let variant = Variant::new(rank, "nccl", how, self.nccl(nccl))?;
            list.push((Whose::Nccl, variant));
        }
        if self.asked.chain {
            let chain = Chain::new(rank, self.extent.all, self.asked.in_place)?;
            let mut add = |whose, name, middle| -> Result<()> {
                // Always in a graph, as chains run.
                let variant = Variant::new(rank, name, (common.calls, true), chain.call(middle))?;
                list.push((whose, variant));
                Ok(())
            };
            add(Whose::ChainAlone, "chain alone", Middle::Nothing)?;
            for (i, (choice, _)) in possible() {
                add(Whose::Chain(i), choice.name, Middle::Sum(self.sum(*choice)))?;
                let by = choice.algorithm;
                // Sums in an order of NCCL's have no norm in them.
                if self.comm.explain(&chain.fused(by)).is_ok() {
                    let fused = Middle::Fused(self.comm, by);
                    add(Whose::ChainFused(i), choice.name, fused)?;
                }
            }
            if let Some(nccl) = &rank.nccl {
                let op = self.asked.op.reduction();
                let sum: Sum<'a> =
                    Box::new(move |from, to| nccl.all_reduce(&rank.on, from, to, op));
                add(Whose::ChainNccl, "nccl", Middle::Sum(sum))?;
            }
        }
        let (whose, mut variants): (Vec<_>, Vec<_>) = list.into_iter().unzip();
        let times = measure(rank, &mut variants, common.rounds)?;
        rank.on.sync(PATIENCE)?;
        self.comm.check()?;
        Ok(self.sorted(plans, whose.into_iter().zip(times)))
    }

    fn sorted(
        &self,
        plans: Vec<(Choice, Result<Plan, Reason>)>,
        times: impl Iterator<Item = (Whose, Times)>,
    ) -> Measured {
        let new = |(choice, plan)| Ours {
            choice,
            plan,
            times: None,
            chain: None,
            chain_fused: None,
        };
        let mut measured = Measured {
            extent: self.extent,
            ours: plans.into_iter().map(new).collect(),
            nccl: None,
            chain_alone: None,
            chain_nccl: None,
        };
        for (whose, times) in times {
            let place = match whose {
                Whose::Ours(i) => &mut measured.ours[i].times,
                Whose::Chain(i) => &mut measured.ours[i].chain,
                Whose::ChainFused(i) => &mut measured.ours[i].chain_fused,
                Whose::Nccl => &mut measured.nccl,
                Whose::ChainAlone => &mut measured.chain_alone,
                Whose::ChainNccl => &mut measured.chain_nccl,
            };
            *place = Some(times);
        }
        measured
    }
}
