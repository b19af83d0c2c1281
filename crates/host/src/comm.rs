//! The host's communicator: joining a group, and one method per operation, each in its own file.

use crate::{
    core::{Core, Parts},
    device::HostDevice,
    layout::Layout,
    memory::{poison, writing},
    rendezvous,
};
use brigade_device::{
    AllGatherLoraLinearParams, AllGatherParams, AllReduceParams, AllToAllParams, Bootstrap,
    BroadcastParams, Buffer, Call, Chunk, Comm, CommConfig, Communicator, DataType, Device, Error,
    FaultRecord, Filled, GatherLinearParts, GatheredParts, Group, LinearCall,
    LoraLinearAllReduceParams, LoraLinearReduceScatterParams, Output, OverlapMode, Plan, Reason,
    RecvParams, ReduceScatterParams, Reduced, Result, SendParams, Traffic, Turn, UserBuffers,
    fallback,
};
use brigade_plan::{Engines, Table, Topology};
use std::{sync::Arc, time::Duration};

/// One rank's communicator on the host.
pub(crate) struct HostComm {
    pub(crate) core: Arc<Core>,
    pub(crate) device: Arc<HostDevice>,
}

/// Memory that every rank takes in [`join`].
pub(crate) fn memory_need(config: &CommConfig, size: usize) -> Result<u64> {
    Ok(Layout::new(config, 0, size)?.total_bytes() as u64)
}

/// A plan that does not belong to its call.
pub(crate) fn unexpected(plan: &Plan) -> Error {
    Error::invalid("plan", format!("{plan:?}"), "a plan for this operation")
}

/// The caller's buffer, if it gave one.
fn given(output: &Output<'_>) -> Option<Buffer> {
    match output {
        Output::Into(v) => Some(v.as_view().retain()),
        Output::Allocate(_) => None,
    }
}

/// Marks an output whose call a fault ended before anything was written to it.
fn mark(d: Option<Buffer>, error: &Error) {
    if let (Some(d), Error::Fault(_)) = (d, error) {
        // Whoever keeps the buffer busy writes to it anyhow.
        let _ = writing(&d, &[], |out, _| {
            poison(d.dtype(), out);
            Ok(())
        });
    }
}

/// Joins the group: every rank makes its segment, finds everybody's, and all agree that all did.
pub(crate) fn join(
    device: Arc<HostDevice>,
    boot: &dyn Bootstrap,
    config: &CommConfig,
) -> Result<Comm> {
    let (rank, size) = (boot.rank(), boot.size());
    if rank >= size {
        return Err(Error::invalid("rank", rank, format!("a rank below {size}")));
    }
    let layout = Layout::new(config, rank, size)?;
    let table = Table::host();
    let (sharing, segments) = rendezvous::exchange(boot, config, &table, &layout)?;
    let group = Group {
        mode: config.mode,
        rank,
        size,
    };
    let core = Core::new(Parts {
        group,
        topology: Topology {
            group,
            config: config.clone(),
            engines: Engines::host(),
        },
        config: config.clone(),
        table,
        layout,
        sharing,
        segments,
        inject: device.inject.clone(),
    })?;
    Ok(Comm::new(Arc::new(HostComm { core, device })))
}

impl Communicator for HostComm {
    fn group(&self) -> &Group {
        &self.core.group
    }
    fn device(&self) -> &dyn Device {
        &*self.device
    }
    fn plan(&self, call: &Call) -> Result<Plan, Reason> {
        self.core.plan(call)
    }
    fn fault(&self) -> Option<FaultRecord> {
        self.core.fault()
    }
    fn abort(&self) {
        self.core.abort();
    }
    fn reset(&self, within: Duration) -> Result<()> {
        self.core.reset(within)
    }
    fn close(&self, within: Duration) -> Result<()> {
        self.core.close(within)
    }
    fn traffic(&self) -> Traffic {
        self.core.traffic()
    }
    fn barrier(&self, turn: &mut Turn) -> Result<()> {
        self.run_barrier(turn)
    }
    fn all_reduce(&self, turn: &mut Turn, p: AllReduceParams<'_>) -> Result<Plan> {
        self.run_all_reduce(turn, p)
    }
    fn all_gather(&self, turn: &mut Turn, p: AllGatherParams<'_>) -> Result<Plan> {
        self.run_all_gather(turn, p)
    }
    fn reduce_scatter(&self, turn: &mut Turn, p: ReduceScatterParams<'_>) -> Result<Plan> {
        self.run_reduce_scatter(turn, p)
    }
    fn broadcast(&self, turn: &mut Turn, p: BroadcastParams<'_>) -> Result<Plan> {
        self.run_broadcast(turn, p)
    }
    fn all_to_all(&self, turn: &mut Turn, p: AllToAllParams<'_>) -> Result<Plan> {
        self.run_all_to_all(turn, p)
    }
    fn send(&self, turn: &mut Turn, p: SendParams<'_>) -> Result<()> {
        self.run_send(turn, p)
    }
    fn recv(&self, turn: &mut Turn, p: RecvParams<'_>) -> Result<()> {
        self.run_recv(turn, p)
    }
    fn user_buffers(&self) -> Result<&dyn UserBuffers, Reason> {
        Ok(self)
    }
    fn own_chunk(
        &self,
        turn: &mut Turn,
        rows_per_rank: &[usize],
        columns: usize,
        dtype: DataType,
    ) -> Result<(Buffer, Filled)> {
        self.run_own_chunk(turn, rows_per_rank, columns, dtype)
    }
    fn gather_chunk(
        &self,
        turn: &mut Turn,
        call: &LinearCall,
        chunk: Chunk<'_>,
    ) -> Result<GatheredParts> {
        self.run_gather_chunk(turn, call, chunk)
    }
    fn all_gather_lora_linear(
        &self,
        turn: &mut Turn,
        p: AllGatherLoraLinearParams<'_>,
    ) -> Result<GatherLinearParts> {
        let call = Call::GatherLinear(p.check(self.group())?);
        match self.core.plan(&call)? {
            Plan::GatherLinear(plan) if plan.mode != OverlapMode::Off => {
                self.run_gather_linear(turn, p, call, plan)
            }
            _ => {
                let d = given(&p.output);
                fallback::all_gather_lora_linear(self, turn, p).inspect_err(|e| mark(d, e))
            }
        }
    }
    fn lora_linear_reduce_scatter(
        &self,
        turn: &mut Turn,
        p: LoraLinearReduceScatterParams<'_>,
    ) -> Result<Reduced> {
        let call = Call::LinearReduceScatter(p.check(self.group())?);
        match self.core.plan(&call)? {
            Plan::LinearReduceScatter(plan) if plan.mode != OverlapMode::Off => {
                self.run_linear_reduce_scatter(turn, p, call, plan)
            }
            _ => {
                let d = given(&p.output);
                fallback::lora_linear_reduce_scatter(self, turn, p).inspect_err(|e| mark(d, e))
            }
        }
    }
    fn lora_linear_with_all_reduce(
        &self,
        turn: &mut Turn,
        p: LoraLinearAllReduceParams<'_>,
    ) -> Result<Reduced> {
        let d = given(&p.output);
        fallback::lora_linear_with_all_reduce(self, turn, p).inspect_err(|e| mark(d, e))
    }
}
