//! The communicator of a GPU: joining a group, and one method per operation, each in its own file.

use crate::{
    CudaDevice, Pages,
    core::{Core, Parts},
    fifo,
    lane::CudaQueue,
    loading, messages,
    nccl_sums::NcclSums,
    pushed,
    rendezvous::{self, Hardware},
    state::state_words,
    steps::Counters,
};
use brigade_device::{
    Absent, AllGatherLoraLinearParams, AllGatherParams, AllReduceNormParams, AllReduceParams,
    AllToAllParams, AllToAllRowsParams, Bootstrap, BroadcastParams, Buffer, Call, Chunk,
    CombineParams, Combined, Comm, CommConfig, Communicator, DataType, Device, DispatchParams,
    Dispatched, Error, ExpertLayout, Experts, FaultRecord, Filled, GatherLinearParts,
    GatheredParts, Group, LinearAllReduceNorm, LinearCall, LoraLinearAllReduceNormParams,
    LoraLinearAllReduceParams, LoraLinearReduceScatterParams, LowLatencyBack,
    LowLatencyCombineParams, LowLatencyDispatchParams, LowLatencyRows, LowLatencySent, NcclUse,
    Output, OverlapMode, Plan, Reason, RecvParams, ReduceScatterParams, Reduced, Result, Routing,
    SendParams, Statistics, Stream, Traffic, Turn, UserBuffers, ViewMut, fallback,
};
use brigade_group::{Control, Sharing, agree};
use brigade_kernels::MOST_RANKS;
use brigade_plan::{Engines, MAX_PIECES, Topology};
use brigade_sync::Layout;
use std::{sync::Arc, time::Duration};

/// One rank's communicator on a GPU.
pub(crate) struct CudaComm {
    pub(crate) core: Arc<Core>,
}

/// What lies in a rank's part: words and data as everywhere, then the regions that users register.
struct PartLayout {
    layout: Layout,
    regions_start: usize,
    bytes: usize,
}

/// Regions begin at multiples of this.
pub(crate) const REGION_ALIGN: usize = 256;

fn part_layout(config: &CommConfig, rank: usize, size: usize) -> Result<PartLayout> {
    if size > MOST_RANKS {
        return Err(Reason::new(
            "cuda-ranks",
            format!("{size} ranks in a group, and the CUDA device serves {MOST_RANKS}"),
            "make smaller groups",
        )
        .into());
    }
    // What a step can name.
    if Counters::new(size).count(config.regions) > 0xFFFF || config.regions > 0xFFF {
        let want = "fewer regions: their counters need numbers of 16 bits";
        return Err(Error::invalid("regions", config.regions, want));
    }
    let layout = Layout::new(config, usize::from(MAX_PIECES), rank, size)?;
    if layout.words > 0xF_FFFF {
        let want = "fewer regions: their flags need numbers of 20 bits";
        return Err(Error::invalid("regions", config.regions, want));
    }
    let regions_start = layout.total_bytes().next_multiple_of(REGION_ALIGN);
    let bytes = regions_start
        .checked_add(config.region_bytes)
        .ok_or_else(|| {
            let want = "a size that fits in memory";
            Error::invalid("region_bytes", config.region_bytes, want)
        })?;
    Ok(PartLayout {
        layout,
        regions_start,
        bytes,
    })
}

/// Device memory that every rank takes in [`join`].
pub(crate) fn memory_need(device: &CudaDevice, config: &CommConfig, size: usize) -> Result<u64> {
    let part = part_layout(config, 0, size)?;
    let bytes = part.bytes.next_multiple_of(Pages::granularity(device)?);
    Ok((bytes + 8 * state_words(config, size)) as u64)
}

/// A plan that does not belong to its call.
pub(crate) fn unexpected(plan: &Plan) -> Error {
    Error::invalid("plan", format!("{plan:?}"), "a plan for this operation")
}

/// Joins the group: every rank makes its memory, maps everybody's, and all agree that all did; then they meet on their GPUs,
/// which shows that flags arrive.
pub(crate) fn join(
    device: Arc<CudaDevice>,
    boot: &dyn Bootstrap,
    config: &CommConfig,
) -> Result<Comm> {
    Ok(Comm::new(Arc::new(join_one(device, boot, config)?)))
}

/// The same, for what is made of communicators.
pub(crate) fn join_one(
    device: Arc<CudaDevice>,
    boot: &dyn Bootstrap,
    config: &CommConfig,
) -> Result<CudaComm> {
    let (rank, size) = (boot.rank(), boot.size());
    if rank >= size {
        return Err(Error::invalid("rank", rank, format!("a rank below {size}")));
    }
    let PartLayout {
        layout,
        regions_start,
        bytes,
    } = part_layout(config, rank, size)?;
    let within = config.first_deadline;
    rendezvous::vote_on(boot, config)?;
    let hardware = Hardware::of(boot, &device, within)?;
    let table = hardware.table(boot, &device.entries, within)?;
    let sharing = Sharing::between(boot, within)?;
    loading::check(sharing.one_process(), hardware.distinct)?;
    let segments = sharing.exchange(boot, layout.words, 0, within)?;
    let symmetric = rendezvous::exchange(boot, &device, &sharing, bytes, within)?;
    let nccl = match config.nccl {
        NcclUse::Never => None,
        NcclUse::Forced | NcclUse::Quicker => {
            let sums = NcclSums::join(boot, &device, hardware.shares(), within)?;
            Some(sums)
        }
    };
    let group = Group {
        mode: config.mode,
        rank,
        size,
    };
    let made = Core::new(Parts {
        topology: Topology {
            group,
            config: config.clone(),
            engines: Engines::cuda(hardware.tiles, size <= pushed::MOST_RANKS)
                .with_nccl(nccl.is_some())
                .with_channels(messages::blocks_each(size, hardware.sharing) as u8)
                .with_queues(fifo::queues_each(size, hardware.sharing, config.sm_budget) as u8),
        },
        control: Control::new(group, layout, sharing, segments),
        config: config.clone(),
        table,
        symmetric,
        nccl,
        regions_start,
        sharing: hardware.sharing,
        device,
    });
    let core = agree(boot, "join: device state", made, within)?;
    let comm = CudaComm { core };
    let met = match size {
        1 => Ok(()),
        _ => comm.core.meet_once(),
    };
    agree(boot, "join: flags between GPUs", met, within)?;
    Ok(comm)
}

impl CudaComm {
    pub(crate) fn gpu(&self) -> &CudaDevice {
        &self.core.device
    }

    /// Makes a call that is not overlapped, and so made of several, whose output is poisoned if the group is stopped in one of
    /// them.
    fn in_parts<R>(
        &self,
        on: &Stream,
        given: Option<Buffer>,
        new: impl FnOnce(&R) -> Option<Buffer>,
        call: impl FnOnce() -> Result<R>,
    ) -> Result<R> {
        let done = call()?;
        if let Some(d) = given.or_else(|| new(&done)) {
            self.core.poison_if_stopped(on, &d)?;
        }
        Ok(done)
    }
}

/// The caller's buffer, if it gave one.
pub(crate) fn given(output: &Output<'_>) -> Option<Buffer> {
    match output {
        Output::Into(v) => Some(v.as_view().retain()),
        Output::Allocate(_) => None,
    }
}

impl Communicator for CudaComm {
    fn group(&self) -> &Group {
        self.core.control.group()
    }
    fn device(&self) -> &dyn Device {
        &*self.core.device
    }
    fn own_stream(&self) -> Result<Stream> {
        let lane = Arc::clone(self.core.own_lane()?);
        Ok(Stream::new(Arc::new(CudaQueue(lane))))
    }
    fn plan(&self, call: &Call) -> Result<Plan, Reason> {
        self.core.plan(call)
    }
    fn told(&self, call: &Call) -> Result<String, Reason> {
        self.core.told(call)
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
        self.run_all_reduce(turn.stream(), None, p)
    }
    fn all_reduce_norm(&self, turn: &mut Turn, p: AllReduceNormParams<'_>) -> Result<Plan> {
        self.run_all_reduce_norm(turn, p)
    }
    fn all_gather(&self, turn: &mut Turn, p: AllGatherParams<'_>) -> Result<Plan> {
        self.run_all_gather(turn.stream(), None, p)
    }
    fn reduce_scatter(&self, turn: &mut Turn, p: ReduceScatterParams<'_>) -> Result<Plan> {
        self.run_reduce_scatter(turn.stream(), None, p)
    }
    fn reduce_scatter_parts(
        &self,
        turn: &mut Turn,
        call: &LinearCall,
        p: ReduceScatterParams<'_>,
    ) -> Result<Plan> {
        let call = Call::LinearReduceScatter(call.clone());
        self.run_reduce_scatter(turn.stream(), Some(&call), p)
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
                self.in_parts(&on, d, |r| r.d.clone(), call)
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
                self.in_parts(&on, d, |r| r.d.clone(), call)
            }
        }
    }
    fn lora_linear_with_all_reduce(
        &self,
        turn: &mut Turn,
        p: LoraLinearAllReduceParams<'_>,
    ) -> Result<Reduced> {
        if let Some(reduced) = self.sent_to_a_sum(turn, &p)? {
            return Ok(reduced);
        }
        let (on, d) = (turn.stream().clone(), given(&p.output));
        let call = || fallback::lora_linear_with_all_reduce(self, turn, p);
        self.in_parts(&on, d, |r| r.d.clone(), call)
    }
    fn lora_linear_with_all_reduce_norm(
        &self,
        turn: &mut Turn,
        p: LoraLinearAllReduceNormParams<'_>,
    ) -> Result<LinearAllReduceNorm> {
        self.run_linear_all_reduce_norm(turn, p)
    }
}

impl Experts for CudaComm {
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
