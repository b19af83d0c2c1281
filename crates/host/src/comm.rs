//! The host's communicator: joining a group, and one method per operation, each in its own file.

use crate::{
    core::{Core, Parts},
    device::HostDevice,
    memory,
    queue::HostQueue,
    rendezvous,
};
use brigade_device::{
    Absent, AllGatherLoraLinearParams, AllGatherParams, AllReduceNormParams, AllReduceParams,
    AllToAllParams, AllToAllRowsParams, Bootstrap, BroadcastParams, Buffer, Call, Chunk,
    CombineParams, Combined, Comm, CommConfig, Communicator, DataType, Device, DispatchParams,
    Dispatched, Error, ExpertLayout, Experts, FaultRecord, Filled, GatherLinearParts,
    GatheredParts, Group, Injector, LinearCall, LoraLinearAllReduceParams,
    LoraLinearReduceScatterParams, LowLatencyBack, LowLatencyCombineParams,
    LowLatencyDispatchParams, LowLatencyRows, LowLatencySent, NcclUse, Output, OverlapMode, Plan,
    Reason, RecvParams, ReduceScatterParams, Reduced, Result, Routing, SendParams, Statistics,
    Stream, Traffic, Turn, UserBuffers, ViewMut, fallback,
};
use brigade_group::Control;
use brigade_plan::{
    Copies, Engines, MAX_PIECES, Table, Topology, reason,
    transports::{ByRows, Figures},
};
use brigade_sync::Layout;
use std::{sync::Arc, time::Duration};

/// One rank's communicator on the host.
pub(crate) struct HostComm {
    pub(crate) core: Arc<Core>,
    pub(crate) device: Arc<HostDevice>,
}

fn layout(config: &CommConfig, rank: usize, size: usize) -> Result<Layout> {
    Layout::new(config, MAX_PIECES.into(), rank, size)
}

/// Memory that every rank takes in [`join`].
pub(crate) fn memory_need(config: &CommConfig, size: usize) -> Result<u64> {
    Ok(layout(config, 0, size)?.total_bytes() as u64)
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
fn mark(d: Option<&Buffer>, error: &Error) {
    if let (Some(d), Error::Fault(_)) = (d, error) {
        memory::mark(d);
    }
}

/// Makes a call that is not overlapped, and so made of several, whose output is marked if a fault ends one of them: the
/// caller's buffer, or the one that the call gives.
fn in_parts<R>(
    on: &Stream,
    d: Option<Buffer>,
    new: impl FnOnce(&R) -> Option<Buffer>,
    call: impl FnOnce() -> Result<R>,
) -> Result<R> {
    let queue = HostQueue::of(on)?;
    let replayed = |r: &R| -> Box<dyn Fn(&Error) + Send + Sync> {
        let d = d.clone().or_else(|| new(r));
        Box::new(move |error| mark(d.as_ref(), error))
    };
    queue
        .together(call, replayed)
        .inspect_err(|error| mark(d.as_ref(), error))
}

/// Joins the group: every rank makes its segment, finds everybody's, and all agree that all did.
pub(crate) fn join(
    device: Arc<HostDevice>,
    boot: &dyn Bootstrap,
    config: &CommConfig,
) -> Result<Comm> {
    let table = Table {
        copies: Copies {
            push_max_bytes: device.push_max_bytes,
            // Between steps, a host copies as much at once as it likes.
            in_pieces: false,
            source: "".into(),
        },
        experts: ByRows::all(Figures {
            push_max_bytes: device.push_max_bytes,
            push_back_max_bytes: device.push_max_bytes,
            ..Figures::nothing_pushed()
        }),
        ..Table::host()
    };
    let core = join_core(boot, config, table, device.inject.clone())?;
    Ok(Comm::new(Arc::new(HostComm { core, device })))
}

/// The same, without what a communicator is to its users.
pub(crate) fn join_core(
    boot: &dyn Bootstrap,
    config: &CommConfig,
    table: Table,
    inject: Option<Injector>,
) -> Result<Arc<Core>> {
    let (rank, size) = (boot.rank(), boot.size());
    if rank >= size {
        return Err(Error::invalid("rank", rank, format!("a rank below {size}")));
    }
    let layout = layout(config, rank, size)?;
    let (sharing, segments) = rendezvous::exchange(boot, config, &table, &layout)?;
    if config.nccl != NcclUse::Never {
        return Err(reason::no_nccl().into());
    }
    let group = Group {
        mode: config.mode,
        rank,
        size,
    };
    Core::new(Parts {
        control: Control::new(group, layout, sharing, segments),
        topology: Topology {
            group,
            config: config.clone(),
            engines: Engines::host(),
        },
        config: config.clone(),
        table,
        inject,
    })
}

impl Communicator for HostComm {
    fn group(&self) -> &Group {
        self.core.control.group()
    }
    fn device(&self) -> &dyn Device {
        &*self.device
    }
    fn plan(&self, call: &Call) -> Result<Plan, Reason> {
        self.core.plan(call)
    }
    fn told(&self, call: &Call) -> Result<String, Reason> {
        self.core.told(call)
    }
    fn fault(&self) -> Option<FaultRecord> {
        self.core.control.fault()
    }
    fn abort(&self) {
        self.core.abort();
    }
    fn reset(&self, within: Duration) -> Result<()> {
        self.core.reset(within)
    }
    fn shrink(&self, within: Duration) -> Result<Absent> {
        self.core.shrink(within)
    }
    fn absent(&self) -> Absent {
        self.core.control.absent()
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
    fn all_reduce_norm(&self, turn: &mut Turn, p: AllReduceNormParams<'_>) -> Result<Plan> {
        self.run_all_reduce_norm(turn, p)
    }
    fn all_gather(&self, turn: &mut Turn, p: AllGatherParams<'_>) -> Result<Plan> {
        self.run_all_gather(turn, p)
    }
    fn reduce_scatter(&self, turn: &mut Turn, p: ReduceScatterParams<'_>) -> Result<Plan> {
        self.run_reduce_scatter(turn, None, p)
    }
    fn reduce_scatter_parts(
        &self,
        turn: &mut Turn,
        call: &LinearCall,
        p: ReduceScatterParams<'_>,
    ) -> Result<Plan> {
        self.run_reduce_scatter(turn, Some(Call::LinearReduceScatter(call.clone())), p)
    }
    fn broadcast(&self, turn: &mut Turn, p: BroadcastParams<'_>) -> Result<Plan> {
        self.run_broadcast(turn, p)
    }
    fn all_to_all(&self, turn: &mut Turn, p: AllToAllParams<'_>) -> Result<Plan> {
        self.run_all_to_all(turn, p)
    }
    fn all_to_all_rows(&self, turn: &mut Turn, p: AllToAllRowsParams<'_>) -> Result<Plan> {
        self.run_all_to_all_rows(turn, p)
    }
    fn send(&self, turn: &mut Turn, p: SendParams<'_>) -> Result<()> {
        self.run_send(turn, p)
    }
    fn recv(&self, turn: &mut Turn, p: RecvParams<'_>) -> Result<()> {
        self.run_recv(turn, p)
    }
    fn send_recv(&self, turn: &mut Turn, send: SendParams<'_>, recv: RecvParams<'_>) -> Result<()> {
        self.run_send_recv(turn, send, recv)
    }
    fn user_buffers(&self) -> Result<&dyn UserBuffers, Reason> {
        Ok(self)
    }
    fn experts(&self) -> Result<&dyn Experts, Reason> {
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
                let (on, d) = (turn.stream().clone(), given(&p.output));
                let call = || fallback::all_gather_lora_linear(self, turn, p);
                in_parts(&on, d, |r| r.d.clone(), call)
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
                let (on, d) = (turn.stream().clone(), given(&p.output));
                let call = || fallback::lora_linear_reduce_scatter(self, turn, p);
                in_parts(&on, d, |r| r.d.clone(), call)
            }
        }
    }
    fn lora_linear_with_all_reduce(
        &self,
        turn: &mut Turn,
        p: LoraLinearAllReduceParams<'_>,
    ) -> Result<Reduced> {
        let (on, d) = (turn.stream().clone(), given(&p.output));
        let call = || fallback::lora_linear_with_all_reduce(self, turn, p);
        in_parts(&on, d, |r| r.d.clone(), call)
    }
}

impl Experts for HostComm {
    fn layout(&self, turn: &mut Turn, routing: Routing<'_>) -> Result<ExpertLayout> {
        self.run_expert_layout(turn, routing)
    }
    fn dispatch(&self, turn: &mut Turn, p: DispatchParams<'_>) -> Result<Dispatched> {
        self.run_dispatch(turn, p)
    }
    fn combine(&self, turn: &mut Turn, p: CombineParams<'_>) -> Result<Combined> {
        self.run_combine(turn, p)
    }
    fn low_latency_dispatch(
        &self,
        turn: &mut Turn,
        slot: u8,
        p: LowLatencyDispatchParams<'_>,
    ) -> Result<LowLatencySent> {
        self.send_low_latency(turn, slot, p)
    }
    fn low_latency_receive(
        &self,
        turn: &mut Turn,
        sent: &LowLatencySent,
        to: Statistics<'_>,
    ) -> Result<LowLatencyRows> {
        self.receive_low_latency(turn, sent, to)
    }
    fn low_latency_combine(
        &self,
        turn: &mut Turn,
        there: &LowLatencyRows,
        p: LowLatencyCombineParams<'_>,
    ) -> Result<LowLatencyBack> {
        self.send_low_latency_back(turn, there, p)
    }
    fn low_latency_take(
        &self,
        turn: &mut Turn,
        back: &LowLatencyBack,
        output: Output<'_>,
        waits: Option<ViewMut<'_>>,
    ) -> Result<Option<Buffer>> {
        self.receive_low_latency_back(turn, back, output, waits)
    }
}
