//! What calls across machines take, and inside one, on any device.

use super::fit::Sample;
use crate::{float::Float, ranks::PATIENCE, sample::Times};
use anyhow::{Context, Result, ensure};
use brigade::{
    AllGatherParams, Bootstrap, Buffer, ByPath, DataType, Device, HierarchicalAllReduceParams,
    HierarchicalCall, HierarchicalOperation as Operation, HierarchicalPath, HierarchicalPlan,
    Hierarchy, HierarchyConfig, Machines, MemoryType, PerRank, ReduceOp, ReduceScatterParams,
    Replay, Stream,
    group::{agree, split},
};
use std::{sync::Arc, time::Duration};

/// Rounds before anything counts.
const WARM_UP: usize = 2;

/// Shares of ranks are multiples of so many elements.
const ALIGN_ELEMENTS: usize = 8;

/// How long work keeps the stream that it is enqueued on.
pub type Watch<'a> = dyn Fn(&mut dyn FnMut() -> brigade::Result<()>) -> Result<Duration> + 'a;

/// How much is measured.
#[derive(Clone, Debug)]
pub struct Extent {
    pub machines: Machines,
    pub float: Float,
    /// Bytes of the larger of a rank's two buffers.
    pub sizes: Vec<usize>,
    pub rounds: usize,
    /// Calls in a round, one after the other.
    pub calls: usize,
    /// In a graph, which is replayed.
    pub graph: bool,
    /// Most connections of a rank to its rail.
    pub connections: Option<u16>,
    /// Channels of each.
    pub channels: Option<u16>,
}

impl Extent {
    /// Of the hierarchies that are measured: slices are as many as are asked for, whatever memory they take, and calls that take turns all keep
    /// theirs.
    pub fn config(&self) -> HierarchyConfig {
        let usual = HierarchyConfig::new(brigade::ParallelMode::Tp);
        let largest = self.sizes.iter().copied().max().unwrap_or(0);
        let need = largest.saturating_mul(3 * (self.machines.count() + 8));
        HierarchyConfig {
            staging_bytes: usual.staging_bytes.max(need),
            connections: self.connections,
            channels: self.channels,
            ..usual
        }
    }
}

/// One rank, on any device.
pub struct Place<'a> {
    pub boot: &'a dyn Bootstrap,
    pub device: Arc<dyn Device>,
    pub on: &'a Stream,
    pub watch: &'a Watch<'a>,
}

/// What was measured of a call.
#[derive(Clone, Debug)]
pub struct Taken {
    pub call: HierarchicalCall,
    /// By so many connections, where several slices were under way.
    pub connections: Option<usize>,
    /// Of so many channels each, as was asked for.
    pub channels: Option<u16>,
    pub times: Times,
}

impl Taken {
    pub fn sample(&self) -> Sample {
        Sample {
            call: self.call.clone(),
            ns: self.times.median * 1e3,
        }
    }
}

/// All calls that are measured: those inside a machine first, where its ranks are several.
pub fn calls(
    machines: Machines,
    dtype: DataType,
    sizes: &[usize],
) -> Result<Vec<HierarchicalCall>> {
    let slices = |count| Some(HierarchicalPath::Slices { count });
    let one_shot = |count| Some(HierarchicalPath::OneShot { count });
    let across = [
        Some(HierarchicalPath::Whole),
        slices(1),
        slices(4),
        one_shot(1),
        one_shot(4),
    ];
    let mut all = Vec::new();
    if machines.ranks() > 1 {
        let one = Machines::cut(machines.ranks(), 1)?;
        for bytes in sizes {
            all.extend(each(one, dtype, *bytes, None));
        }
    }
    // Of nothing, which shows what a call takes where nothing is on its way.
    all.extend(each(machines, dtype, 0, across[0]).pop());
    for bytes in sizes {
        for choice in across {
            let all_reduce =
                |call: &HierarchicalCall| matches!(call.operation, Operation::AllReduce { .. });
            // Of other operations, what has one shot is the same as slices.
            let is_one_shot = matches!(choice, Some(HierarchicalPath::OneShot { .. }));
            let calls = each(machines, dtype, *bytes, choice).into_iter();
            all.extend(calls.filter(|call| !is_one_shot || all_reduce(call)));
        }
    }
    Ok(all)
}

/// A call of each operation.
fn each(
    machines: Machines,
    dtype: DataType,
    bytes: usize,
    choice: Option<HierarchicalPath>,
) -> Vec<HierarchicalCall> {
    let size = machines.size();
    let share = (bytes / dtype.bytes() / size).next_multiple_of(ALIGN_ELEMENTS);
    let share = if bytes == 0 { 0 } else { share };
    let (rows, op) = (PerRank::from_elem(share, size), ReduceOp::Sum);
    let row_len = 1;
    [
        Operation::AllReduce {
            elements: share * size,
            op,
        },
        Operation::ReduceScatter {
            rows: rows.clone(),
            row_len,
            op,
        },
        Operation::AllGather { rows, row_len },
    ]
    .map(|operation| HierarchicalCall {
        machines,
        operation,
        dtype,
        output: dtype,
        choice,
    })
    .into()
}

/// Elements of a rank's input, and of its output; every rank has equally many.
pub fn sides(call: &HierarchicalCall) -> (usize, usize) {
    let share = |rows: &PerRank| rows.first().copied().unwrap_or(0);
    match &call.operation {
        Operation::AllReduce { elements, .. } => (*elements, *elements),
        Operation::ReduceScatter { rows, .. } => (rows.iter().sum(), share(rows)),
        Operation::AllGather { rows, .. } => (share(rows), rows.iter().sum()),
    }
}

/// What a rank brings everywhere.
fn brought(rank: usize) -> f32 {
    (rank % 128 + 1) as f32
}

/// A hierarchy, and the numbers of its ranks among all.
struct Joined {
    over: Hierarchy,
    members: Vec<usize>,
}

/// A call with its buffers.
struct Case<'j> {
    joined: &'j Joined,
    call: HierarchicalCall,
    x: Buffer,
    y: Buffer,
}

impl Case<'_> {
    fn enqueue(&mut self, on: &Stream) -> brigade::Result<()> {
        let mut lease = self.joined.over.lease(on)?;
        let (from, to, choice) = (self.x.view(), self.y.view_mut(), self.call.choice);
        match &self.call.operation {
            Operation::AllReduce { op, .. } => lease.all_reduce(HierarchicalAllReduceParams {
                data: to,
                from: Some(from),
                op: *op,
                choice,
            }),
            Operation::ReduceScatter { rows, op, .. } => lease.reduce_scatter(ByPath {
                params: ReduceScatterParams {
                    from,
                    rows_per_rank: rows,
                    to,
                    op: *op,
                },
                choice,
            }),
            Operation::AllGather { rows, .. } => lease.all_gather(ByPath {
                params: AllGatherParams {
                    from,
                    rows_per_rank: rows,
                    to,
                },
                choice,
            }),
        }
        .map(drop)
    }

    /// Compares with what every rank must get: of sums, within what types round.
    fn check(&self, float: Float, got: &[f32]) -> Result<()> {
        let members = &self.joined.members;
        let sum: f32 = members.iter().map(|&rank| brought(rank)).sum();
        let (share, most) = match &self.call.operation {
            Operation::AllGather { .. } => (sides(&self.call).0, 0.0),
            _ => (usize::MAX, 4.0 * float.epsilon() as f32 * sum),
        };
        for (i, &got) in got.iter().enumerate() {
            let want = match share {
                usize::MAX => sum,
                share => brought(members[i / share]),
            };
            ensure!(
                (got - want).abs() <= most,
                "{:?}, {:?}: element {i} is {got}, and should be {want}",
                self.call.operation,
                self.call.choice
            );
        }
        Ok(())
    }
}

impl Place<'_> {
    /// What these calls take, the same on all ranks: those inside a machine first.
    ///
    /// Calls of a size take turns, round by round; a time is that of the slowest rank. Each is made once before, and what it gives is
    /// compared.
    pub fn measure(&self, extent: &Extent, all: &[HierarchicalCall]) -> Result<Vec<Taken>> {
        let (machines, rank) = (extent.machines, self.boot.rank());
        let inside = match machines.ranks() {
            1 => None,
            ranks => {
                let machine = machines.machine_of(rank);
                let over = split(self.boot, machine, PATIENCE, |part| {
                    self.join(part, Machines::cut(ranks, 1)?, extent)
                })?;
                let members = machines.inside(machine).collect();
                Some(Joined { over, members })
            }
        };
        let across = Joined {
            over: self.join(self.boot, machines, extent)?,
            members: (0..machines.size()).collect(),
        };
        let mut taken = Vec::new();
        let alike = |a: &HierarchicalCall, b: &HierarchicalCall| {
            a.machines == b.machines && most_elements(a) == most_elements(b)
        };
        for together in all.chunk_by(alike) {
            let joined = match (&inside, together[0].machines == machines) {
                (Some(inside), false) => inside,
                _ => &across,
            };
            taken.extend(self.measure_together(extent, joined, together)?);
        }
        // Nobody leaves while another still works in it.
        self.boot.all_gather(&[], PATIENCE)?;
        Ok(taken)
    }

    fn join(
        &self,
        boot: &dyn Bootstrap,
        machines: Machines,
        extent: &Extent,
    ) -> brigade::Result<Hierarchy> {
        Arc::clone(&self.device).join_machines(boot, machines, &extent.config())
    }

    /// Buffers of a call; the input has been written, and nothing to the output.
    fn case<'j>(
        &self,
        float: Float,
        joined: &'j Joined,
        call: &HierarchicalCall,
    ) -> Result<Case<'j>> {
        let make = |elements: usize| {
            self.device
                .allocate(self.on, MemoryType::Device, call.dtype, &[elements])
        };
        let (input, output) = sides(call);
        let (mut x, mut y) = (make(input)?, make(output)?);
        let mut one = Vec::new();
        float.store(brought(self.boot.rank()), &mut one);
        self.device
            .write(self.on, x.view_mut(), &one.repeat(input))?;
        self.device.fill(self.on, y.view_mut(), 0xFF)?;
        Ok(Case {
            joined,
            call: call.clone(),
            x,
            y,
        })
    }

    /// Makes it once, and compares.
    fn check(&self, float: Float, case: &mut Case<'_>) -> Result<()> {
        let mut made = || -> Result<()> {
            case.enqueue(self.on)?;
            self.on.sync(PATIENCE)?;
            case.joined.over.check()?;
            let mut got = vec![0; case.y.bytes()];
            self.device.read(self.on, case.y.view(), &mut got)?;
            case.check(float, &float.load(&got))
        };
        let made = made();
        Ok(agree(self.boot, "tune-hierarchical", made, PATIENCE)?)
    }

    fn measure_together(
        &self,
        extent: &Extent,
        joined: &Joined,
        calls: &[HierarchicalCall],
    ) -> Result<Vec<Taken>> {
        let cases = calls.iter().map(|c| self.case(extent.float, joined, c));
        let mut cases = cases.collect::<Result<Vec<_>>>()?;
        for case in &mut cases {
            self.check(extent.float, case)?;
        }
        let mut graphs: Vec<Option<Box<dyn Replay>>> = Vec::new();
        for case in &mut cases {
            let mut round = || (0..extent.calls).try_for_each(|_| case.enqueue(self.on));
            let captured = || self.device.capture(self.on, &mut round);
            graphs.push(extent.graph.then(captured).transpose()?);
        }
        let mut samples = vec![Vec::new(); cases.len()];
        for round in 0..WARM_UP + extent.rounds {
            for ((case, graph), samples) in cases.iter_mut().zip(&graphs).zip(&mut samples) {
                let us = self.round(extent.calls, case, graph.as_deref())?;
                if round >= WARM_UP {
                    samples.push(us);
                }
            }
        }
        joined.over.check()?;
        let each = calls.iter().zip(samples);
        let connections = |call: &HierarchicalCall| match joined.over.explain(call) {
            Ok(HierarchicalPlan::Slices(plan)) if plan.slots > 1 => Some(plan.connections),
            _ => None,
        };
        let taken = |(call, samples): (&HierarchicalCall, _)| Taken {
            call: call.clone(),
            connections: connections(call),
            channels: extent.channels,
            times: Times::new("", samples),
        };
        Ok(each.map(taken).collect())
    }

    /// Microseconds of one call, as the mean of a round of the slowest rank.
    fn round(&self, calls: usize, case: &mut Case<'_>, graph: Option<&dyn Replay>) -> Result<f64> {
        self.boot.all_gather(&[], PATIENCE)?;
        let took = (self.watch)(&mut || match graph {
            Some(graph) => graph.launch(self.on).map(drop),
            None => (0..calls).try_for_each(|_| case.enqueue(self.on)),
        })?;
        self.on.sync(PATIENCE)?;
        let all = self
            .boot
            .all_gather(&took.as_secs_f64().to_le_bytes(), PATIENCE)?;
        let seconds = |bytes: &Vec<u8>| bytes.as_slice().try_into().map(f64::from_le_bytes);
        let each = all.iter().map(seconds).collect::<Result<Vec<_>, _>>();
        let each = each.context("a rank sent something else than a time")?;
        Ok(each.into_iter().fold(0.0, f64::max) * 1e6 / calls as f64)
    }
}

fn most_elements(call: &HierarchicalCall) -> usize {
    let (input, output) = sides(call);
    input.max(output)
}
