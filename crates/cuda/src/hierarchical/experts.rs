//! Calls with experts across machines: what they are made of here.
//!
//! The host waits for counts between the hops, by reads that end when the group is stopped. What goes along the rail is NCCL's to carry, by
//! two connections where it is much.

use super::{CudaHierarchy, Inner, run::BOTH_BYTES};
use crate::{memory::check_reach, rails::Rails};
use brigade_device::{
    Buffer, Call, Communicator, Error, ExpertLayout, ExpertParts, FaultRecord, Group, Machines,
    Origin, Phase, PlacementCall, Rail, RailParams, Result, Routing, Stream, View,
};
use brigade_group::Stoppable;
use brigade_plan::routes::Slots;
use std::time::Duration;

impl CudaHierarchy {
    pub(super) fn experts(&self) -> Parts<'_> {
        let inner = &**self.handle.inner();
        let rails = inner.rails.as_deref();
        Parts {
            over: self,
            inner,
            rail: rails.map(|rails| Both { rails, inner }),
        }
    }
}

/// The first communicator inside, and the rail.
pub(super) struct Parts<'a> {
    over: &'a CudaHierarchy,
    inner: &'a Inner,
    rail: Option<Both<'a>>,
}

impl ExpertParts for Parts<'_> {
    fn group(&self) -> Group {
        *self.inner.across.group()
    }
    fn machines(&self) -> Machines {
        self.inner.machines()
    }
    fn origin(&self) -> Origin {
        self.inner.across.origin()
    }
    fn inside(&self) -> &dyn Communicator {
        &self.inner.inside[0]
    }
    fn rail(&self) -> Result<&dyn Rail> {
        let rail = self.rail.as_ref().map(|rail| rail as &dyn Rail);
        rail.ok_or_else(|| Error::invalid("machines", 1, "several, for a rail"))
    }
    fn within(&self) -> Duration {
        self.inner.most()
    }
    fn layout(&self, on: &Stream, routing: Routing<'_>) -> Result<(ExpertLayout, Vec<usize>)> {
        let (_, placement) = routing.check()?;
        let group = self.group();
        let layout = self.inner.device.expert_layout(on, routing, group)?;
        let slots = Slots::new(placement, group.size);
        Ok((layout, slots.firsts().to_vec()))
    }
    fn own_slots(&self, placement: PlacementCall) -> usize {
        let group = self.group();
        Slots::new(placement, group.size).of(group.rank).len()
    }
    fn reaches(&self, field: &'static str, view: View<'_>) -> Result<()> {
        check_reach(&self.inner.device.card, field, &view.retain())
    }
    fn heard(&self) -> Result<()> {
        Stoppable::fault(self.inner).map_or(Ok(()), |fault| Err(Error::Fault(fault)))
    }
    fn poison_if_stopped(&self, on: &Stream, out: &Buffer) -> Result<()> {
        self.inner.inside[0].core.poison_if_stopped(on, out)
    }
    fn usable(&self) -> Result<()> {
        self.inner.can_call()
    }
    fn begin(&self, on: &Stream, call: &Call) -> Result<()> {
        let lane = self.inner.device.lane(on)?;
        lane.refuse_capture("a call with experts across machines")?;
        self.over.made(call).begin(lane);
        Ok(())
    }
    fn give_up(&self, error: Error) -> Error {
        self.inner.across.give_up(error)
    }
}

/// Two connections as one rail: for exchanges while no other one is under way.
struct Both<'a> {
    rails: &'a Rails,
    inner: &'a Inner,
}

impl Rail for Both<'_> {
    fn group(&self) -> &Group {
        self.rails.connections[0].group()
    }
    fn collect(&self, on: &Stream, p: RailParams<'_>) -> Result<()> {
        self.rails.connections[0].collect(on, p)
    }
    fn diffuse(&self, on: &Stream, p: RailParams<'_>) -> Result<()> {
        self.rails.connections[0].diffuse(on, p)
    }
    fn exchange(&self, on: &Stream, p: RailParams<'_>) -> Result<()> {
        let rail = &self.rails.connections[0];
        let what = rail.exchanges(&p)?;
        // Where a machine sends rows the ways of another handle, pieces have other sizes, and NCCL would wait for what nobody sends: the hosts
        // find out.
        self.rails.line.call(p.signature());
        let how = (Some(p.signature()), p.within);
        // The same on all ranks of the rail.
        let bytes = p.pieces.iter().sum::<usize>() * p.from.dtype().bytes();
        if bytes < BOTH_BYTES {
            return rail.exchange(on, what, how);
        }
        // That of a phase, none of which is under way.
        let beside = &self.inner.streams[Phase::Collect as usize];
        self.rails.exchange((on, beside), what, how)
    }
    fn stop(&self, record: FaultRecord) {
        self.rails
            .connections
            .iter()
            .for_each(|rail| rail.stop(record));
    }
}
