//! Calls with experts across machines: what they are made of here.

use super::{GRACE, HostHierarchy, Inner};
use crate::{comm::HostComm, queue::HostQueue};
use brigade_device::{
    Buffer, Call, Communicator, Error, ExpertLayout, ExpertParts, Group, Machines, Origin,
    PlacementCall, Rail, Result, Routing, Stream, View,
};
use brigade_plan::routes::Slots;
use std::{sync::Arc, time::Duration};

impl HostHierarchy {
    pub(super) fn experts(&self) -> Parts<'_> {
        let inner = &*self.inner;
        Parts {
            inner,
            inside: HostComm {
                core: Arc::clone(&inner.inside[0]),
                device: Arc::clone(&inner.device),
            },
        }
    }
}

/// The first communicator inside, and the first one along the rail.
pub(super) struct Parts<'a> {
    inner: &'a Inner,
    inside: HostComm,
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
        &self.inside
    }
    fn rail(&self) -> Result<&dyn Rail> {
        Ok(&self.inner.rails[0])
    }
    fn within(&self) -> Duration {
        let config = &self.inner.config.comm;
        let usual = match self.inner.across.calls() {
            // Counted as it began.
            0 | 1 => config.first_deadline,
            _ => config.deadline,
        };
        usual + GRACE
    }
    fn layout(&self, on: &Stream, routing: Routing<'_>) -> Result<(ExpertLayout, Vec<usize>)> {
        let (_, placement) = routing.check()?;
        let group = self.group();
        let layout = self.inner.device.expert_layout(on, routing, group)?;
        let slots = Slots::new(placement, group.size);
        Ok((layout, slots.firsts().to_vec()))
    }
    fn own_slots(&self, placement: PlacementCall) -> usize {
        let group = self.inner.across.group();
        Slots::new(placement, group.size).of(group.rank).len()
    }
    fn reaches(&self, _field: &'static str, _view: View<'_>) -> Result<()> {
        Ok(())
    }
    fn heard(&self) -> Result<()> {
        self.inner.across.usable()
    }
    /// Calls have ended here, and say how.
    fn poison_if_stopped(&self, _on: &Stream, _out: &Buffer) -> Result<()> {
        Ok(())
    }
    fn usable(&self) -> Result<()> {
        self.inner.across.usable()
    }
    fn begin(&self, on: &Stream, _call: &Call) -> Result<()> {
        HostQueue::of(on)?.refuse_capture("a call with experts across machines")?;
        self.inner.across.count_call();
        Ok(())
    }
    fn give_up(&self, error: Error) -> Error {
        self.inner.across.give_up(error)
    }
}
