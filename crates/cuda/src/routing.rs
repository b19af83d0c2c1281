//! Who goes where: the layout of a rank's rows by their experts.

use crate::{
    CudaDevice, Kernel, KernelSet, Launch, Missing, comm::CudaComm, lane::Lane, memory::check_reach,
};
use brigade_device::{
    Absent, Buffer, DataType, ExpertLayout, Group, Placement, PlacementCall, Result, Routing,
    Stream, Turn,
};
use brigade_kernels::RouteParams;
use brigade_plan::routes::Slots;
use cudarc::driver::sys;
use std::sync::Arc;

/// The two kernels that find it out.
#[derive(Debug)]
pub(crate) struct RouteKernels {
    counts: Kernel<RouteParams>,
    lists: Kernel<RouteParams>,
}

/// Threads of their blocks, and the tokens of each.
const THREADS: u32 = 512;

/// Runs of tokens.
fn runs(tokens: usize) -> usize {
    tokens.div_ceil(THREADS as usize).max(1)
}

impl RouteKernels {
    pub(crate) fn load(set: &Arc<KernelSet>) -> Result<Self, Missing> {
        Ok(Self {
            counts: set.variant("_counts")?,
            lists: set.variant("_lists")?,
        })
    }
}

/// A placement as kernels know it.
#[derive(Clone, Copy)]
pub(crate) struct Placed {
    pub(crate) code: u32,
    pub(crate) experts: u32,
    pub(crate) copies: u32,
    pub(crate) per_rank: u32,
}

impl From<PlacementCall> for Placed {
    fn from(placement: PlacementCall) -> Self {
        let (code, experts, copies, per_rank) = match placement {
            PlacementCall::Even { experts } => (0, experts, 0, 0),
            PlacementCall::Map {
                experts,
                copies,
                per_rank,
            } => (1, experts, copies, per_rank),
            PlacementCall::Ranks => (2, 0, 0, 0),
        };
        // Checked to be small.
        Self {
            code,
            experts: experts as u32,
            copies: copies as u32,
            per_rank: per_rank as u32,
        }
    }
}

/// The arguments.
pub(crate) struct Router {
    pub(crate) ids: Buffer,
    pub(crate) map: Option<Buffer>,
    k: usize,
    placement: PlacementCall,
    group: Group,
    absent: Absent,
    counts: Buffer,
}

impl Router {
    /// Of arguments that were checked, for work on this stream.
    pub(crate) fn of(
        device: &CudaDevice,
        lane: &Arc<Lane>,
        routing: &Routing<'_>,
        (k, placement): (usize, PlacementCall),
        group: Group,
    ) -> Result<Self> {
        let router = Self {
            ids: routing.ids.retain(),
            map: match routing.placement {
                Placement::Map { slots, .. } => Some(slots.retain()),
                Placement::Even { .. } | Placement::Ranks => None,
            },
            k,
            placement,
            group,
            absent: Absent::default(),
            counts: {
                let dims = [group.size, runs(routing.ids.shape().rows())];
                device.scratch(lane, DataType::I32, &dims)?
            },
        };
        check_reach(&device.card, "ids.memory", &router.ids)?;
        if let Some(map) = &router.map {
            check_reach(&device.card, "placement.slots.memory", map)?;
        }
        Ok(router)
    }

    /// For a group where these ranks are absent: experts that lie there are none.
    pub(crate) fn without(self, absent: Absent) -> Self {
        Self { absent, ..self }
    }

    /// Buffers for what it finds.
    pub(crate) fn allocate(&self, device: &CudaDevice, lane: &Arc<Lane>) -> Result<ExpertLayout> {
        let (tokens, size) = (self.ids.shape().rows(), self.group.size);
        let slots = Slots::new(self.placement, size).total();
        let new = |dtype, dims: &[usize]| device.scratch(lane, dtype, dims);
        ExpertLayout::new((tokens, self.k), (size, slots), new)
    }

    /// What work must keep.
    pub(crate) fn buffers(&self) -> impl Iterator<Item = &Buffer> {
        [&self.ids, &self.counts].into_iter().chain(&self.map)
    }

    /// Finds out, and says so in the buffers, which the caller keeps until the work is done.
    pub(crate) fn route(
        &self,
        device: &CudaDevice,
        stream: sys::CUstream,
        to: &ExpertLayout,
    ) -> Result<()> {
        let placed = Placed::from(self.placement);
        let parameters = RouteParams {
            ids: self.ids.address(),
            map: self.map.as_ref().map_or(0, Buffer::address),
            slots: to.slots.address(),
            positions: to.positions.address(),
            sent: to.sent.address(),
            sent_offsets: to.sent_offsets.address(),
            rows_per_slot: to.rows_per_slot.address(),
            counts: self.counts.address(),
            absent: self.absent.bits().into(),
            runs: runs(self.ids.shape().rows()) as u32,
            tokens: self.ids.shape().rows() as u32,
            k: self.k as u32,
            id_bytes: self.ids.dtype().bytes() as u32,
            rank: self.group.rank as u32,
            size: self.group.size as u32,
            placement: placed.code,
            experts: placed.experts,
            copies: placed.copies,
            per_rank: placed.per_rank,
            room: to.sent.shape().len() as u32,
        };
        let threads = (parameters.tokens).next_multiple_of(32).clamp(32, THREADS);
        let shape = Launch::grid(parameters.size * parameters.runs, threads);
        let kernels = &device.opened.kernels;
        let programmatic = device.launches_early();
        for (kernel, follows) in [
            (&kernels.routes.counts, false),
            (&kernels.routes.lists, programmatic),
        ] {
            let shape = Launch {
                programmatic: follows,
                ..shape
            };
            // SAFETY: all of it lies in buffers of the right sizes, which the caller keeps.
            unsafe { kernel.launch(stream, shape, parameters) }?;
        }
        Ok(())
    }
}

impl CudaDevice {
    /// As [`Lease::expert_layout`](brigade_device::Lease::expert_layout), for a group that nobody need have joined: of more ranks than a
    /// machine has, for instance.
    ///
    /// # Errors
    /// As there; [`Group::check`].
    pub fn expert_layout(
        &self,
        on: &Stream,
        routing: Routing<'_>,
        group: Group,
    ) -> Result<ExpertLayout> {
        self.expert_layout_without(Absent::default(), on, routing, group)
    }

    fn expert_layout_without(
        &self,
        absent: Absent,
        on: &Stream,
        routing: Routing<'_>,
        group: Group,
    ) -> Result<ExpertLayout> {
        group.check()?;
        let checked = routing.check()?;
        let lane = self.lane(on)?;
        let router = Router::of(self, lane, &routing, checked, group)?.without(absent);
        let layout = router.allocate(self, lane)?;
        let buffers: Vec<&Buffer> = router.buffers().chain(layout.buffers()).collect();
        lane.run(&buffers, |stream| router.route(self, stream, &layout))?;
        Ok(layout)
    }
}

impl CudaComm {
    pub(crate) fn run_expert_layout(
        &self,
        turn: &Turn,
        routing: Routing<'_>,
    ) -> Result<ExpertLayout> {
        let control = &self.core.control;
        let (absent, group) = (control.absent(), *control.group());
        self.gpu()
            .expert_layout_without(absent, turn.stream(), routing, group)
    }
}
