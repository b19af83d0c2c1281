//! Who goes where: the layout of a rank's rows by their experts.

use crate::{
    comm::HostComm,
    device::HostDevice,
    memory::{reading, writing},
    queue::HostQueue,
};
use brigade_device::{
    Absent, Buffer, DataType, ExpertLayout, Group, Placement, PlacementCall, Result, Routing,
    Stream, Turn,
};
use brigade_plan::{
    known,
    routes::{Chooser, Routes, Slots},
};
use std::ops::Range;

/// The arguments, kept for as long as the call is in flight or captured.
#[derive(Clone)]
pub(crate) struct Router {
    ids: Buffer,
    map: Option<Buffer>,
    k: usize,
    placement: PlacementCall,
    group: Group,
    absent: Absent,
}

impl Router {
    /// Of arguments that were checked.
    pub(crate) fn of(
        routing: &Routing<'_>,
        k: usize,
        placement: PlacementCall,
        group: Group,
    ) -> Self {
        Self {
            ids: routing.ids.retain(),
            map: match routing.placement {
                Placement::Map { slots, .. } => Some(slots.retain()),
                Placement::Even { .. } | Placement::Ranks => None,
            },
            k,
            placement,
            group,
            absent: Absent::default(),
        }
    }

    /// For a group where these ranks are absent: experts that lie there are none.
    pub(crate) fn without(self, absent: Absent) -> Self {
        Self { absent, ..self }
    }

    /// Buffers for what it finds of so many tokens.
    pub(crate) fn allocate(&self, device: &HostDevice, tokens: usize) -> Result<ExpertLayout> {
        let size = self.group.size;
        let slots = Slots::new(self.placement, size).total();
        let new = |dtype, dims: &[usize]| device.heap(dtype, dims);
        ExpertLayout::new((tokens, self.k), (size, slots), new)
    }

    /// Finds out.
    pub(crate) fn find(&self) -> Result<Routes> {
        self.choosing(|ids, chooser| Routes::new(ids, self.k, &chooser))
    }

    /// The same for every rank, of whose tokens these ids are.
    pub(crate) fn find_all(&self, runs: &[Range<usize>]) -> Result<Vec<Routes>> {
        self.choosing(|ids, chooser| known::routes_of_all(ids, self.k, runs, chooser))
    }

    fn choosing<R>(&self, find: impl FnOnce(&[i64], Chooser<'_>) -> R) -> Result<R> {
        let inputs: Vec<&Buffer> = std::iter::once(&self.ids).chain(&self.map).collect();
        reading(&inputs, |inputs| {
            let mut ids: Vec<i64> = match self.ids.dtype() {
                DataType::I64 => integers::<i64>(inputs[0]),
                _ => integers::<i32>(inputs[0])
                    .into_iter()
                    .map(i64::from)
                    .collect(),
            };
            let map = inputs.get(1).map(|map| integers::<i32>(map));
            let chooser = Chooser {
                placement: self.placement,
                map: map.as_deref().unwrap_or_default(),
                rank: self.group.rank,
                size: self.group.size,
            };
            if !self.absent.is_empty() {
                let all = Slots::new(self.placement, self.group.size);
                for (i, id) in ids.iter_mut().enumerate() {
                    let slot = chooser.slot(*id, i / self.k);
                    let rank = slot.and_then(|slot| all.rank_of(slot));
                    if rank.is_some_and(|rank| self.absent.contains(rank)) {
                        *id = -1;
                    }
                }
            }
            Ok(find(&ids, chooser))
        })
    }

    /// The same, and says so in the buffers.
    pub(crate) fn route(&self, to: &ExpertLayout) -> Result<Routes> {
        let routes = self.find()?;
        tell(&routes, to)?;
        Ok(routes)
    }
}

/// Writes down where rows go.
pub(crate) fn tell(routes: &Routes, to: &ExpertLayout) -> Result<()> {
    set(&to.slots, &routes.slots)?;
    set(&to.positions, &routes.positions)?;
    set(&to.sent, &routes.sent)?;
    set(&to.sent_offsets, &routes.sent_offsets)?;
    set(&to.rows_per_slot, &routes.rows_per_slot)
}

/// Numbers from wherever they lie.
pub(crate) fn integers<T: bytemuck::Pod>(bytes: &[u8]) -> Vec<T> {
    bytemuck::allocation::pod_collect_to_vec(bytes)
}

/// Adds counts to what was counted before, i64.
pub(crate) fn add_to<T: Copy + Into<i64>>(totals: &Buffer, counts: &[T]) -> Result<()> {
    writing(totals, &[], |out, _| {
        for (total, &count) in out.chunks_exact_mut(8).zip(counts) {
            let sum = bytemuck::pod_read_unaligned::<i64>(total).wrapping_add(count.into());
            total.copy_from_slice(&sum.to_ne_bytes());
        }
        Ok(())
    })
}

/// Writes all of a buffer.
pub(crate) fn set<T: bytemuck::NoUninit>(to: &Buffer, values: &[T]) -> Result<()> {
    writing(to, &[], |out, _| {
        out.copy_from_slice(bytemuck::cast_slice(values));
        Ok(())
    })
}

impl HostDevice {
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
        let (k, placement) = routing.check()?;
        let router = Router::of(&routing, k, placement, group).without(absent);
        let layout = router.allocate(self, routing.tokens())?;
        let to = layout.clone();
        HostQueue::of(on)?.run(move || router.route(&to).map(drop))?;
        Ok(layout)
    }
}

impl HostComm {
    pub(crate) fn run_expert_layout(
        &self,
        turn: &Turn,
        routing: Routing<'_>,
    ) -> Result<ExpertLayout> {
        let control = &self.core.control;
        let (absent, group) = (control.absent(), *control.group());
        self.device
            .expert_layout_without(absent, turn.stream(), routing, group)
    }
}
