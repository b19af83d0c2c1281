//! Whom rows go among: the ranks of one machine, or of several.

use super::Moe;
use crate::ranks::Rank;
use brigade::{
    CombineParams, Combined, Comm, Device, DispatchParams, Dispatched, Hierarchy, HierarchyConfig,
    HierarchyLease, Lease, Machines, ParallelMode, Reason, Routing, Stream,
};
use std::sync::Arc;

pub enum Among {
    /// The ranks of a communicator.
    Ranks(Comm),
    /// Those of all machines of a hierarchy.
    Machines(Hierarchy),
}

impl Among {
    /// As the options say, with room for the rows of all.
    pub fn join(rank: &Rank, options: &Moe, tokens: usize) -> anyhow::Result<Self> {
        let comm = options.config(tokens, rank.size());
        let Some(machines) = options.machines else {
            return Ok(Self::Ranks(rank.join(&comm)?));
        };
        let config = HierarchyConfig {
            comm,
            ..HierarchyConfig::new(ParallelMode::Ep)
        };
        let machines = Machines::cut(rank.size(), machines)?;
        let device = Arc::clone(&rank.device) as Arc<dyn Device>;
        let over = device.join_machines(&*rank.boot, machines, &config)?;
        Ok(Self::Machines(over))
    }

    /// The communicator: low latency is inside a machine alone.
    pub fn comm(&self) -> Result<&Comm, Reason> {
        match self {
            Self::Ranks(comm) => Ok(comm),
            Self::Machines(_) => Err(Reason::new(
                "across-machines",
                "an exchange in two halves does not go across machines",
                "leave out --machines",
            )),
        }
    }

    pub fn lease(&self, on: &Stream) -> brigade::Result<Leased<'_>> {
        Ok(match self {
            Self::Ranks(comm) => Leased::Ranks(comm.lease(on)?),
            Self::Machines(over) => Leased::Machines(over.lease(on)?),
        })
    }

    /// Which ranks share a machine, where there are several.
    pub fn machines(&self) -> Option<Machines> {
        match self {
            Self::Ranks(_) => None,
            Self::Machines(over) => Some(over.machines()),
        }
    }

    pub fn check(&self) -> brigade::Result<()> {
        match self {
            Self::Ranks(comm) => comm.check(),
            Self::Machines(over) => over.check(),
        }
    }
}

pub enum Leased<'a> {
    Ranks(Lease<'a>),
    Machines(HierarchyLease<'a>),
}

impl Leased<'_> {
    pub fn expert_layout(&mut self, routing: Routing<'_>) -> brigade::Result<()> {
        match self {
            Self::Ranks(lease) => lease.expert_layout(routing).map(drop),
            Self::Machines(lease) => lease.expert_layout(routing).map(drop),
        }
    }

    pub fn dispatch(&mut self, p: DispatchParams<'_>) -> brigade::Result<Dispatched> {
        match self {
            Self::Ranks(lease) => lease.dispatch(p),
            Self::Machines(lease) => lease.dispatch(p),
        }
    }

    pub fn combine(&mut self, p: CombineParams<'_>) -> brigade::Result<Combined> {
        match self {
            Self::Ranks(lease) => lease.combine(p),
            Self::Machines(lease) => lease.combine(p),
        }
    }
}
