//! Collectives across machines: which slices, which phases, how many on their way; from what calls and links cost.
//!
//! After fairring (Meta Research, 2022), whose slices and parallelism were settings. Here both follow from a [`Costs`] table, since
//! slices that are too small pay a call's cost over and over, and slices that are too large leave phases idle.

mod costs;
mod measured;
mod schedule;
mod slices;
mod timeline;
mod whole;
mod work;

pub use costs::{Costs, Link, Measured, Wire};
pub use measured::Entry;
pub use schedule::{Schedule, Step, Track};
pub use slices::{Slices, parts_bytes};
pub use timeline::StepCost;
pub use whole::Whole;
pub use work::{Piece, Place, Work};

use crate::reason;
use brigade_device::{
    HierarchicalCall, HierarchicalOperation as Operation, HierarchicalPath as Path,
    HierarchicalPlan, HierarchyConfig, Machines, Phase, Reason, SlicedPlan, SumOrder, check_rows,
};
use smallvec::SmallVec;
use std::time::Duration;

/// Decides how `call` is carried out, or says why it cannot be. A function of its arguments alone; machines and call are signed,
/// configuration and costs are voted on.
///
/// # Errors
/// A [`Reason`] with [`CAPACITY`](reason::CAPACITY) if the staging memory does not hold an element of each rank, or all of a path that is
/// forced; and with [`ROWS`](reason::ROWS) for rows that do not go with the ranks.
pub fn plan(
    call: &HierarchicalCall,
    config: &HierarchyConfig,
    costs: &Costs,
) -> Result<HierarchicalPlan, Reason> {
    if let Operation::ReduceScatter { rows, .. } | Operation::AllGather { rows, .. } =
        &call.operation
    {
        let counts = check_rows("rows_per_rank", rows, call.machines.size());
        counts.map_err(|e| reason::rows(&e))?;
    }
    if call.machines.count() == 1 {
        return Ok(HierarchicalPlan::Inside {
            order: order_of(call),
            instead_of: call.choice.map(|_| reason::one_machine()),
        });
    }
    let whole = whole(call, config, costs);
    match call.choice {
        Some(Path::Whole) => whole.map(|(plan, _)| plan).ok_or_else(|| {
            let need = whole_bytes(call);
            reason::capacity("staging_bytes", need, config.staging_bytes)
        }),
        Some(Path::Slices { count }) => {
            let phases = phases(call);
            sliced(call, config, costs, (&phases, Some(count as usize)))
                .map(|(_, plan)| HierarchicalPlan::Slices(plan))
        }
        Some(Path::OneShot { count }) => {
            let phases = one_shot_phases(call).unwrap_or_else(|| phases(call));
            sliced(call, config, costs, (&phases, Some(count as usize)))
                .map(|(_, plan)| HierarchicalPlan::Slices(plan))
        }
        None => {
            // Whoever names the size of slices wants slices.
            let nothing = slices::elements(call) == 0;
            let whole = whole.filter(|_| config.slice_bytes.is_none() || nothing);
            let two = sliced(call, config, costs, (&phases(call), None));
            let one = one_shot_phases(call).map(|p| sliced(call, config, costs, (&p, None)));
            let slices = match (one, two) {
                // Where both take about as long, calls count for more than was thought sooner than bytes do.
                (Some(Ok(one)), Ok(two)) if one.0 <= about(two.0) => Ok(one),
                (Some(Ok(one)), Err(_)) => Ok(one),
                (_, two) => two,
            };
            match (whole, slices) {
                (Some((plan, whole_ns)), Ok((ns, _))) if about(whole_ns) < ns => Ok(plan),
                (_, Ok((_, plan))) => Ok(HierarchicalPlan::Slices(plan)),
                // Parts of slices are aligned, so that of few bytes all may fit where no slice does.
                (Some((plan, _)), Err(_)) => Ok(plan),
                (None, Err(_)) => Err(too_little(call, config, costs)),
            }
        }
    }
}

/// The phases that a call's slices go through: without those inside where a machine has one rank.
pub fn phases(call: &HierarchicalCall) -> SmallVec<[Phase; 5]> {
    let of = match call.operation {
        Operation::AllReduce { .. } => Phase::ALL.as_slice(),
        Operation::ReduceScatter { .. } => &Phase::ALL[..3],
        Operation::AllGather { .. } => &Phase::ALL[3..],
    };
    several(of, call.machines)
}

/// The phases of a [one-shot](Path::OneShot) across machines, which only an all-reduce can be: shares are diffused, and every machine adds
/// all of them.
pub fn one_shot_phases(call: &HierarchicalCall) -> Option<SmallVec<[Phase; 5]>> {
    let of = [
        Phase::ReduceInside,
        Phase::Diffuse,
        Phase::Add,
        Phase::GatherInside,
    ];
    let is = matches!(call.operation, Operation::AllReduce { .. });
    is.then(|| several(&of, call.machines))
}

/// Without phases inside where a machine has one rank.
fn several(of: &[Phase], machines: Machines) -> SmallVec<[Phase; 5]> {
    let alone = machines.ranks() == 1;
    of.iter()
        .copied()
        .filter(|p| !alone || !matches!(p, Phase::ReduceInside | Phase::GatherInside))
        .collect()
}

/// Which bits a sum over these machines promises: of one, those of its collective.
fn order(machines: Machines) -> SumOrder {
    match machines.count() {
        1 => SumOrder::Flat,
        _ => SumOrder::ByMachine {
            ranks: u16::try_from(machines.ranks()).unwrap_or(u16::MAX),
        },
    }
}

/// Bytes that the path of [`Path::Whole`] needs.
fn whole_bytes(call: &HierarchicalCall) -> usize {
    let parts = Whole::parts_bytes(call);
    parts
        .iter()
        .fold(0, |sum, bytes| sum.saturating_add(*bytes))
}

/// What the smallest slices need; or all as a whole, where that is less and may be.
fn too_little(call: &HierarchicalCall, config: &HierarchyConfig, costs: &Costs) -> Reason {
    let of = |phases: &[Phase]| slices::slot_bytes(call, (phases, 1), costs.in_place);
    let one_shot = one_shot_phases(call).map_or(usize::MAX, |phases| of(&phases));
    let slices = of(&phases(call)).min(one_shot);
    let whole = config.slice_bytes.is_none().then(|| whole_bytes(call));
    let need = slices.min(whole.unwrap_or(usize::MAX));
    reason::capacity("staging_bytes", need, config.staging_bytes)
}

/// The order of a call that reduces.
fn order_of(call: &HierarchicalCall) -> Option<SumOrder> {
    (!matches!(call.operation, Operation::AllGather { .. })).then(|| order(call.machines))
}

/// The path as a whole, and what it costs, if there is room for it.
fn whole(
    call: &HierarchicalCall,
    config: &HierarchyConfig,
    costs: &Costs,
) -> Option<(HierarchicalPlan, u64)> {
    let staging_bytes = whole_bytes(call);
    let ns = costs.whole_ns(call);
    let plan = HierarchicalPlan::Whole {
        order: order_of(call),
        staging_bytes,
        expected: Duration::from_nanos(ns),
        basis: costs.basis(call.machines),
    };
    (staging_bytes <= config.staging_bytes).then_some((plan, ns))
}

/// Most slots: a pipeline's [period](Schedule::ns) is a multiple of every number of them.
const MOST_SLOTS: usize = 6;

/// Where nothing is forced, pieces have a multiple of this many elements, so that copies of them are aligned.
const ALIGN_ELEMENTS: usize = 64;

/// The slices that cost least, or so many; and what they cost.
fn sliced(
    call: &HierarchicalCall,
    config: &HierarchyConfig,
    costs: &Costs,
    (phases, count): (&[Phase], Option<usize>),
) -> Result<(u64, SlicedPlan), Reason> {
    let largest = slices::most_rank_elements(call);
    let ranks = call.machines.size();
    // More are of no use, since a track has one slice at a time.
    let along = |p: &&Phase| matches!(p, Phase::Collect | Phase::Diffuse);
    let inside = phases.len() - phases.iter().filter(along).count();
    let connections = costs.connections;
    let connections = config
        .connections
        .map_or(connections, |most| connections.min(most.into()));
    let most_slots = |connections: usize| {
        let tracks = (inside + connections).min(MOST_SLOTS);
        config.parallelism.map_or(tracks, |p| tracks.min(p.into()))
    };
    let slices_of = |rank_elements: usize| largest.div_ceil(rank_elements.max(1)).max(1);
    // Slots of slices of so many elements a rank: as many as are of use, and fit.
    let fits = |rank_elements: usize, connections: usize| {
        let bytes = slices::slot_bytes(call, (phases, rank_elements), costs.in_place);
        let slots = most_slots(connections)
            .min(slices_of(rank_elements))
            .min(config.staging_bytes / bytes.max(1));
        (slots > 0).then_some((slots, bytes * slots))
    };
    let forced = count.map(|n| largest.div_ceil(n.max(1))).or_else(|| {
        let bytes = config.slice_bytes?;
        Some((bytes / call.dtype.bytes() / ranks).max(1))
    });
    let candidates: Vec<usize> = match forced {
        // As asked for, or the next smaller that there is room for.
        Some(wanted) => std::iter::successors(Some(wanted.min(largest).max(1)), |&n| {
            (n > 1).then(|| n.div_ceil(2))
        })
        .find(|&n| fits(n, 1).is_some())
        .into_iter()
        .collect(),
        None => counts()
            .take_while(|&n| n < largest)
            // The smallest there are, which fit if any do.
            .chain(std::iter::once(largest.max(1)))
            .map(|n| match largest.div_ceil(n).max(1) {
                few @ ..ALIGN_ELEMENTS => few,
                more => more.next_multiple_of(ALIGN_ELEMENTS).min(largest),
            })
            .filter(|&n| fits(n, 1).is_some())
            .collect(),
    };
    let begins = costs.begins_ns(call);
    let mut least = u64::MAX;
    let mut tried = Vec::new();
    for rank_elements in candidates {
        let slices = slices_of(rank_elements);
        for some in few(connections) {
            let Some((slots, staging_bytes)) = fits(rank_elements, some) else {
                continue;
            };
            let schedule = Schedule::new(phases, (slices, slots), some);
            // Too few for these phases.
            if schedule.connections != some {
                continue;
            }
            // Of one slot, slices go one after the other.
            let at_once = if slots > 1 { some } else { 1 };
            let steps = costs.by(at_once).steps(call, phases, rank_elements);
            // Most that have many slices need no simulation.
            let bound = begins.saturating_add(schedule.bound_ns(&steps));
            if !tried.is_empty() && bound >= least {
                continue;
            }
            let ns = begins.saturating_add(schedule.ns(&steps, costs.enqueue_ns));
            least = least.min(ns);
            let plan = SlicedPlan {
                phases: phases.into(),
                slices,
                rank_elements,
                slots,
                connections: schedule.connections,
                order: order_of(call),
                staging_bytes,
                expected: Duration::from_nanos(ns),
                basis: costs.basis(call.machines),
            };
            tried.push((ns, plan));
        }
    }
    let first = tried.into_iter().find(|(ns, _)| *ns <= about(least));
    first.ok_or_else(|| {
        let need = slices::slot_bytes(call, (phases, 1), costs.in_place);
        reason::capacity("staging_bytes", need, config.staging_bytes)
    })
}

/// The most that is about as long as this. Of plans that take about as long, the one of fewest slices is taken, since it depends least on what calls
/// really cost: with as many slices as can be, the link waits for whatever takes longer than was thought. Of as many slices, it is the one by
/// fewest connections, since each keeps threads of the host busy that others may need. And slices are taken where all bytes
/// in one call are about as quick, since they need less memory.
fn about(ns: u64) -> u64 {
    ns.saturating_add(ns / 64)
}

/// Numbers of connections that are tried, of so many: half as many each time, fewest first.
fn few(most: usize) -> SmallVec<[usize; 4]> {
    let halves = std::iter::successors(Some(most.max(1)), |&n| (n > 1).then(|| n.div_ceil(2)));
    let mut all: SmallVec<[usize; 4]> = halves.collect();
    all.reverse();
    all
}

/// Numbers of slices that are tried: 1, 2, 3, 4, 6, 8, 12, 16, ..
fn counts() -> impl Iterator<Item = usize> {
    std::iter::once(1).chain((0..usize::BITS - 2).flat_map(|e| [2 << e, 3 << e]))
}
