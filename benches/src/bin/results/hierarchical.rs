//! All-reduces across virtual machines whose rails are as slow as a network's: the pipeline against its bound, against what its plan
//! expects, and against all phases one after the other. And what phases cost the host itself, from which plans know it.

use super::{
    Rounds,
    phases::{PhaseSpan, listen},
    ratio, rounded,
};
use anyhow::{Context, Result, anyhow, ensure};
use brigade::{
    Bootstrap, Buffer, DataType, Device, DeviceExt, Element, HierarchicalAllReduceParams,
    HierarchicalCall, HierarchicalOperation, HierarchicalPath, HierarchicalPlan, Hierarchy,
    HierarchyConfig, Machines, ParallelMode, Phase, ReduceOp, Stream, View,
    group::threads,
    host::{HostConfig, HostDevice, RailModel},
    plan::hierarchical::{Costs, Link, Schedule, Wire, phases},
};
use brigade_benches::{Pairs, median};
use serde_json::{Value, json};
use std::{
    sync::Arc,
    thread,
    time::{Duration, Instant},
};

/// Machines, each of so many ranks; and rails: microseconds that a byte is on its way, and bytes in a microsecond. So slow that they are
/// what is short on two cores, which all ranks share for whatever they copy and add.
pub(super) const CASES: [(usize, usize, u64, u64); 6] = [
    (2, 1, 200, 200),
    (2, 1, 1000, 200),
    (2, 1, 5000, 100),
    (2, 2, 200, 50),
    (2, 2, 1000, 50),
    (2, 2, 5000, 25),
];

/// f32 elements: 4 MiB to 16 MiB of each rank.
const ELEMENTS: [usize; 3] = [1 << 20, 1 << 21, 1 << 22];

/// The same, of slices whose phases are timed one by one: next to nothing, and much.
const SLICES: [usize; 3] = [1 << 8, 1 << 18, 1 << 20];

/// Where they are timed.
const TIMED: (usize, usize) = (2, 2);

/// Far more than any step takes.
const WITHIN: Duration = Duration::from_secs(60);

/// One rank of the hierarchy, with its values.
pub(super) struct Rank<'b> {
    pub boot: &'b dyn Bootstrap,
    device: Arc<dyn Device>,
    pub on: Stream,
    pub over: Hierarchy,
}

impl<'b> Rank<'b> {
    fn new(
        boot: &'b dyn Bootstrap,
        config: &HierarchyConfig,
        machines: Machines,
        rail: Option<RailModel>,
    ) -> Result<Self> {
        let device: Arc<dyn Device> = HostDevice::with(&HostConfig {
            rail,
            ..HostConfig::default()
        })?;
        Ok(Self {
            on: device.stream(0)?,
            over: Arc::clone(&device).join_machines(boot, machines, config)?,
            device,
            boot,
        })
    }

    /// Waits for the others.
    pub(super) fn meet(&self) -> Result<()> {
        self.boot.all_gather(&[], WITHIN)?;
        Ok(())
    }

    pub(super) fn upload<T: Element>(&self, values: &[T], shape: &[usize]) -> Result<Buffer> {
        Ok(self.device.upload(&self.on, values, shape)?)
    }

    pub(super) fn download<T: Element>(&self, view: View<'_>) -> Result<Vec<T>> {
        Ok(self.device.download(&self.on, view)?)
    }

    /// Room for so many f32.
    pub(super) fn data(&self, elements: usize) -> Result<Buffer> {
        self.upload(&vec![0f32; elements], &[elements])
    }

    /// Sums once, from when all are there. Checks the sum: rank r brings r + 1 everywhere.
    pub(super) fn time(
        &self,
        data: &mut Buffer,
        choice: Option<HierarchicalPath>,
    ) -> Result<(f64, HierarchicalPlan)> {
        let mine = ((self.boot.rank() + 1) as f32).to_le_bytes();
        let mine = mine.repeat(data.shape().len());
        self.device.write(&self.on, data.view_mut(), &mine)?;
        self.meet()?;
        let start = Instant::now();
        let plan = self
            .over
            .lease(&self.on)?
            .all_reduce(HierarchicalAllReduceParams {
                data: data.view_mut(),
                from: None,
                op: ReduceOp::Sum,
                choice,
            })?;
        let us = start.elapsed().as_secs_f64() * 1e6;
        let got: Vec<f32> = self.download(data.view())?;
        let size = self.boot.size();
        let want = (size * (size + 1) / 2) as f32;
        ensure!(
            got.iter().all(|&x| x == want),
            "{plan}: not {want} everywhere"
        );
        Ok((us, plan))
    }

    /// Two ways in turn, after a first time of each, which takes memory.
    fn pairs(
        &self,
        elements: usize,
        choices: [Option<HierarchicalPath>; 2],
        rounds: Rounds,
    ) -> Result<(Pairs, HierarchicalPlan)> {
        let mut data = self.data(elements)?;
        let (_, plan) = self.time(&mut data, choices[0])?;
        self.time(&mut data, choices[1])?;
        let pairs = Pairs::take(rounds.pairs, |which| {
            Ok(self.time(&mut data, choices[which])?.0)
        })?;
        Ok((pairs, plan))
    }
}

/// One slice: the plain sequence of phases.
pub(super) const ONE: Option<HierarchicalPath> = Some(HierarchicalPath::Slices { count: 1 });

/// What every rank of a new hierarchy finds, in rank order.
pub(super) fn on_ranks<R: Send>(
    machines: Machines,
    rail: Option<RailModel>,
    work: impl Fn(&Rank<'_>) -> Result<R> + Sync,
) -> Result<Vec<R>> {
    let mut config = HierarchyConfig::new(ParallelMode::Tp);
    config.comm.scratch_bytes = 8 << 20;
    on_ranks_of(&config, machines, rail, work)
}

/// The same with such a configuration.
pub(super) fn on_ranks_of<R: Send>(
    config: &HierarchyConfig,
    machines: Machines,
    rail: Option<RailModel>,
    work: impl Fn(&Rank<'_>) -> Result<R> + Sync,
) -> Result<Vec<R>> {
    let work = &work;
    thread::scope(|scope| {
        let handles: Vec<_> = threads(machines.size())
            .into_iter()
            .map(|boot| scope.spawn(move || work(&Rank::new(&boot, config, machines, rail)?)))
            .collect();
        let joined: Vec<_> = handles
            .into_iter()
            .map(|h| h.join().unwrap_or_else(|_| Err(anyhow!("a rank panicked"))))
            .collect();
        joined.into_iter().collect()
    })
}

/// The slowest rank of every time, and the plan.
fn slowest(found: Vec<(Pairs, HierarchicalPlan)>) -> Result<(Pairs, HierarchicalPlan)> {
    let (pairs, plans): (Vec<Pairs>, Vec<_>) = found.into_iter().unzip();
    let plan = plans.into_iter().next().context("no rank")?;
    Ok((Pairs::slowest(&pairs), plan))
}

fn call(machines: Machines, elements: usize) -> HierarchicalCall {
    HierarchicalCall {
        machines,
        operation: HierarchicalOperation::AllReduce {
            elements,
            op: ReduceOp::Sum,
        },
        dtype: DataType::F32,
        output: DataType::F32,
        choice: None,
    }
}

fn row(
    (count, ranks, latency_us, bytes_per_us): (usize, usize, u64, u64),
    elements: usize,
    rounds: Rounds,
) -> Result<Value> {
    let machines = Machines::cut(count * ranks, count)?;
    let model = RailModel {
        latency: Duration::from_micros(latency_us),
        bytes_per_us,
    };
    let found = on_ranks(machines, Some(model), |rank| {
        rank.pairs(elements, [None, ONE], rounds)
    })?;
    let (pairs, plan) = slowest(found)?;
    let costs = Costs::host().with_wire(Wire {
        latency_ns: latency_us * 1000,
        bytes_per_us,
    });
    let (bound_ns, expected, slices) = match &plan {
        HierarchicalPlan::Slices(p) => {
            let steps = costs.steps(&call(machines, elements), &p.phases, p.rank_elements);
            (Schedule::of(p).bound_ns(&steps), p.expected, p.slices)
        }
        // One call inside and one across, which no order makes shorter.
        HierarchicalPlan::Whole { expected, .. } => {
            (u64::try_from(expected.as_nanos())?, *expected, 0)
        }
        HierarchicalPlan::Inside { .. } => return Err(anyhow!("{plan}: nothing across machines")),
    };
    // The same where bytes need no wire.
    let same = Some(match u32::try_from(slices)? {
        0 => HierarchicalPath::Whole,
        count => HierarchicalPath::Slices { count },
    });
    let found = on_ranks(machines, None, |rank| {
        rank.pairs(elements, [same, ONE], rounds)
    })?;
    let (host, _) = slowest(found)?;
    let bound_us = bound_ns as f64 / 1e3;
    let us = pairs.median_us(0);
    let latency_ms = latency_us as f64 / 1e3;
    let rail = format!("{machines}, {latency_ms} ms, {bytes_per_us} MB/s");
    let mut peers = serde_json::Map::new();
    peers.insert(format!("bound, {rail}"), json!(rounded(bound_us)));
    Ok(json!({
        "machines": count,
        "ranks": ranks,
        "bytes": elements * 4,
        "dtype": "f32",
        "choice": rail,
        "us": rounded(us),
        "ratio_to_bound": ratio(us / bound_us),
        "expected": rounded(expected.as_secs_f64() * 1e6),
        "one_slice": rounded(pairs.median_us(1)),
        "host_alone": rounded(host.median_us(0)),
        "slices": slices,
        "plan": plan.to_string(),
        "peers": peers,
    }))
}

pub fn measure(rounds: Rounds) -> Result<Vec<Value>> {
    let cases = CASES
        .into_iter()
        .flat_map(|case| ELEMENTS.map(|n| (case, n)));
    cases
        .map(|(case, elements)| row(case, elements, rounds))
        .collect()
}

/// A row for each phase: what it takes with next to nothing, and bytes in a microsecond beyond that.
pub fn measure_costs(rounds: Rounds) -> Result<Vec<Value>> {
    // With these a step takes a nanosecond for each byte that is counted.
    let each = Link {
        call_ns: 0,
        bytes_per_us: 1000,
    };
    let counted = Costs {
        inside: each,
        across: each,
        wire: Wire::NONE,
        add_bytes_per_us: 1000,
        enqueue_ns: 0,
        connections: Costs::host().connections,
        crowded_percent: 100,
        channels: None,
        in_place: false,
        copy_ns: 0,
        measured: None,
    };
    let machines = Machines::cut(TIMED.0 * TIMED.1, TIMED.0)?;
    let found = SLICES.map(|elements| -> Result<_> {
        let (done, found) = listen(|| {
            on_ranks(machines, None, |rank| {
                rank.pairs(elements, [ONE, ONE], rounds)
            })
        });
        done?;
        let call = call(machines, elements);
        let steps = counted.steps(&call, &phases(&call), elements / call.machines.size());
        Ok((steps, found))
    });
    let found = found.into_iter().collect::<Result<Vec<_>>>()?;
    let us = |of: &[PhaseSpan], phase: Phase| {
        let of_phase = of.iter().filter(|span| span.phase == phase.name());
        let us: Vec<f64> = of_phase.map(PhaseSpan::us).collect();
        (!us.is_empty()).then(|| median(&us)).context("no span")
    };
    let mut rows = Vec::new();
    for (i, phase) in Phase::ALL.into_iter().enumerate() {
        let (steps, little) = &found[0];
        let (first_bytes, first_us) = (steps[i].ns(), us(little, phase)?);
        for (steps, much) in &found[1..] {
            let (bytes, us) = (steps[i].ns(), us(much, phase)?);
            rows.push(json!({
                "phase": phase.name(),
                "call_us": rounded(first_us),
                "moved_bytes": bytes,
                "phase_us": rounded(us),
                "bytes_per_us": rounded((bytes - first_bytes) as f64 / (us - first_us)),
            }));
        }
    }
    Ok(rows)
}
