//! All-reduces across virtual machines whose rails are as slow as a network's: the pipeline against the bound that its plan names, and
//! against all phases one after the other.

use super::{Rounds, ratio, rounded};
use anyhow::{Context, Result, anyhow, ensure};
use brigade::{
    Bootstrap, Device, DeviceExt, HierarchicalAllReduceParams, HierarchicalPath, HierarchicalPlan,
    Hierarchy, HierarchyConfig, Machines, ParallelMode, ReduceOp, Stream,
    group::threads,
    host::{HostConfig, HostDevice, RailModel},
};
use brigade_benches::Pairs;
use serde_json::{Value, json};
use std::{
    sync::Arc,
    thread,
    time::{Duration, Instant},
};

const MACHINES: usize = 2;
const RANKS: usize = 2;

/// Rails: microseconds that a byte is on its way, and bytes in a microsecond. So slow that they are what is short on two cores, which four
/// ranks share for all that goes on inside machines.
const RAILS: [(u64, u64); 4] = [(1000, 20), (1000, 5), (5000, 20), (20_000, 20)];

/// f32 elements.
const ELEMENTS: [usize; 5] = [1 << 10, 1 << 14, 1 << 16, 1 << 18, 1 << 20];

/// Far more than any step takes.
const WITHIN: Duration = Duration::from_secs(60);

/// One rank of the hierarchy, with its values.
struct Rank<'b> {
    boot: &'b dyn Bootstrap,
    device: Arc<dyn Device>,
    on: Stream,
    over: Hierarchy,
}

impl<'b> Rank<'b> {
    fn new(boot: &'b dyn Bootstrap, model: RailModel) -> Result<Self> {
        let device: Arc<dyn Device> = HostDevice::with(&HostConfig {
            rail: Some(model),
            ..HostConfig::default()
        })?;
        let machines = Machines::cut(boot.size(), MACHINES)?;
        let mut config = HierarchyConfig::new(ParallelMode::Tp);
        config.comm.scratch_bytes = 8 << 20;
        Ok(Self {
            on: device.stream(0)?,
            over: Arc::clone(&device).join_machines(boot, machines, &config)?,
            device,
            boot,
        })
    }

    /// Sums once, from when all are there. Checks the sum: rank r brings r + 1 everywhere.
    fn time(
        &self,
        elements: usize,
        choice: Option<HierarchicalPath>,
    ) -> Result<(f64, HierarchicalPlan)> {
        let mine = (self.boot.rank() + 1) as f32;
        let mut data = self
            .device
            .upload(&self.on, &vec![mine; elements], &[elements])?;
        self.boot.all_gather(&[], WITHIN)?;
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
        let got: Vec<f32> = self.device.download(&self.on, data.view())?;
        let size = self.boot.size();
        let want = (size * (size + 1) / 2) as f32;
        ensure!(
            got.iter().all(|&x| x == want),
            "{plan}: not {want} everywhere"
        );
        Ok((us, plan))
    }

    fn pairs(&self, elements: usize, rounds: Rounds) -> Result<(Pairs, HierarchicalPlan)> {
        let one = Some(HierarchicalPath::Slices { count: 1 });
        let choices = [None, one];
        // The first calls take their memory.
        let (_, plan) = self.time(elements, None)?;
        self.time(elements, one)?;
        let pairs = Pairs::take(rounds.pairs, |which| {
            Ok(self.time(elements, choices[which])?.0)
        })?;
        Ok((pairs, plan))
    }
}

fn row(latency_us: u64, bytes_per_us: u64, elements: usize, rounds: Rounds) -> Result<Value> {
    let model = RailModel {
        latency: Duration::from_micros(latency_us),
        bytes_per_us,
    };
    let found = thread::scope(|scope| {
        let handles: Vec<_> = threads(MACHINES * RANKS)
            .into_iter()
            .map(|boot| scope.spawn(move || Rank::new(&boot, model)?.pairs(elements, rounds)))
            .collect();
        let joined = handles
            .into_iter()
            .map(|h| h.join().unwrap_or_else(|_| Err(anyhow!("a rank panicked"))));
        joined
            .collect::<Vec<_>>()
            .into_iter()
            .collect::<Result<Vec<_>>>()
    })?;
    let (pairs, plans): (Vec<Pairs>, Vec<_>) = found.into_iter().unzip();
    let pairs = Pairs::slowest(&pairs);
    let plan = plans.into_iter().next().context("no rank")?;
    let bound = match &plan {
        HierarchicalPlan::Whole { expected, .. } => *expected,
        HierarchicalPlan::Slices(p) => p.expected,
        HierarchicalPlan::Inside => Duration::ZERO,
    };
    let bound_us = bound.as_secs_f64() * 1e6;
    let us = pairs.median_us(0);
    let rail = format!("{latency_us} us, {bytes_per_us} MB/s");
    let mut peers = serde_json::Map::new();
    peers.insert(format!("bound, {rail}"), json!(rounded(bound_us)));
    peers.insert(
        format!("1 slice, {rail}"),
        json!(rounded(pairs.median_us(1))),
    );
    Ok(json!({
        "machines": MACHINES,
        "ranks": RANKS,
        "bytes": elements * 4,
        "dtype": "f32",
        "choice": rail,
        "us": rounded(us),
        "ratio_to_bound": ratio(us / bound_us),
        "peers": peers,
        "plan": plan.to_string(),
    }))
}

pub fn measure(rounds: Rounds) -> Result<Vec<Value>> {
    let cases = RAILS
        .into_iter()
        .flat_map(|rail| ELEMENTS.map(|n| (rail, n)));
    cases
        .map(|((latency_us, bytes_per_us), n)| row(latency_us, bytes_per_us, n, rounds))
        .collect()
}
