//! What calls and links cost across machines, and inside one, as plans count with it: measured, fitted, and written as an entry of a table.

mod fit;
mod place;

use crate::{
    Common,
    collectives::names::name,
    float::Float,
    machines::{Sockets, machines_of},
    meta,
    ranks::{self, PATIENCE, Rank, Ranks},
    rounded, sizes,
};
use anyhow::{Context, Result, ensure};
use brigade::{
    HierarchicalCall, HierarchicalOperation as Operation, HierarchicalPath, Queues,
    cuda::{NCCL_WITH_CHANNELS, Nccl, Stopwatch, find_nccl},
    host::{HostConfig, HostDevice, RailModel},
    plan::{
        crossover::{Links, Source},
        hierarchical::{Costs, Entry},
        tuned::{Sizes, Versions},
    },
};
use clap::{Args, ValueEnum};
use fit::{Fitted, expected_ns, fit, is_plain};
use place::{Extent, Place, Taken, sides};
use serde_json::{Value, json};
use std::{
    collections::BTreeMap,
    path::PathBuf,
    process::Command,
    sync::Arc,
    time::{Duration, Instant},
};

/// What is measured.
#[derive(Clone, Debug, Args)]
pub struct Tune {
    /// Ranks, a GPU each [default: all GPUs]
    #[arg(short = 'w', long, value_name = "RANKS")]
    ranks: Option<usize>,
    /// Make each rank a process instead of a thread, as torchrun does
    #[arg(long)]
    processes: bool,
    /// Let ranks share GPUs, in turn, where there are fewer GPUs than ranks: to see that it runs, since figures tell little then
    #[arg(long)]
    shared: bool,
    /// Machines that the ranks are cut into, in rank order
    #[arg(long, default_value_t = 2)]
    machines: usize,
    #[command(flatten)]
    sockets: Sockets,
    /// Rounds that are measured
    #[arg(short = 'n', long, default_value_t = 20, value_parser = sizes::at_least_one)]
    rounds: usize,
    /// Calls in a round, one after the other
    #[arg(long, default_value_t = 5, value_parser = sizes::at_least_one)]
    calls: usize,
    /// Capture the calls of a round in a graph, and replay it
    #[arg(long)]
    graph: bool,
    /// Bytes to begin with, of the larger of a rank's two buffers; K, M and G count in powers of 1024
    #[arg(short, long, value_parser = sizes::bytes, default_value = "4K")]
    begin: usize,
    /// Bytes to end with
    #[arg(short, long, value_parser = sizes::bytes, default_value = "16M")]
    end: usize,
    /// From one size to the next
    #[arg(short, long, default_value_t = 4)]
    factor: usize,
    /// Type of the numbers
    #[arg(short, long, value_enum, default_value_t = Float::Bf16)]
    dtype: Float,
    /// Whose machines: of GPUs, or virtual ones of this host's processors, with --ranks
    #[arg(long, value_enum, default_value_t = Kind::Cuda)]
    device: Kind,
    /// With --device host: what the link of a rank carries in a microsecond, in bytes
    #[arg(long, value_name = "BYTES")]
    rail_bytes_per_us: Option<u64>,
    /// With --rail-bytes-per-us: the way of a byte along it, in microseconds
    #[arg(
        long,
        value_name = "US",
        default_value_t = 0,
        requires = "rail_bytes_per_us"
    )]
    rail_latency_us: u64,
    /// Write the entry to this file
    #[arg(long, value_name = "FILE")]
    entry: Option<PathBuf>,
    /// Write rows and raw samples to this file
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,
}

/// Whose machines are measured.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum Kind {
    /// GPUs
    Cuda,
    /// This host's processors
    Host,
}

impl Tune {
    fn common(&self) -> Common {
        Common {
            ranks: self.ranks,
            processes: self.processes,
            rounds: self.rounds,
            calls: self.calls,
            graph: self.graph,
            check: true,
            shared: self.shared,
            serial: false,
            // What is measured is measured with no costs in mind.
            table: Vec::new(),
            vs: None,
            json: self.json.clone(),
        }
    }

    fn extent(&self, ranks: usize) -> Result<Extent> {
        let machines = machines_of(ranks, self.machines)?;
        ensure!(machines.count() > 1, "there must be two machines");
        Ok(Extent {
            machines,
            float: self.dtype,
            sizes: sizes::steps(self.begin, self.end, self.factor)?,
            rounds: self.rounds,
            calls: self.calls,
            graph: self.graph,
            connections: None,
            channels: None,
        })
    }

    fn rail(&self) -> Option<RailModel> {
        let latency = Duration::from_micros(self.rail_latency_us);
        self.rail_bytes_per_us.map(|bytes_per_us| RailModel {
            latency,
            bytes_per_us,
        })
    }

    /// On this host's processors, whose calls have been made when they return.
    fn on_host(&self, ranks: &Ranks) -> Result<Measured> {
        let extent = self.extent(ranks.size())?;
        let config = HostConfig {
            rail: self.rail(),
            ..HostConfig::default()
        };
        ranks.each(|boot, _| {
            let device = HostDevice::with(&config)?;
            let place = Place {
                on: &device.stream(0)?,
                boot: &*boot,
                device,
                watch: &|work| {
                    let start = Instant::now();
                    work()?;
                    Ok(start.elapsed())
                },
            };
            self.measure(&place, &extent)
        })
    }

    /// All calls, by connections of as many channels as are quickest; and where a rank has more than two connections, those of which several slices are under
    /// way by two as well.
    fn measure(&self, place: &Place<'_>, extent: &Extent) -> Result<Measured> {
        let mut all = place::calls(extent.machines, extent.float.dtype(), &extent.sizes)?;
        let mut taken = place.measure(extent, &all)?;
        let tried = self.tried().iter().map(|&channels| Extent {
            channels: Some(channels),
            ..extent.clone()
        });
        let by_one: Vec<_> = all.iter().filter(|c| goes_by_one(c)).cloned().collect();
        let tried = tried.map(|extent| Ok((place.measure(&extent, &by_one)?, extent)));
        let tried: Vec<_> = tried.collect::<Result<_>>()?;
        let mut others: Vec<Taken> = tried.iter().flat_map(|(t, _)| t.clone()).collect();
        let quickest = quickest_channels(&taken, tried);
        let extent = quickest.as_ref().unwrap_or(extent);
        if quickest.is_some() {
            others.extend(std::mem::replace(&mut taken, place.measure(extent, &all)?));
        }
        let by_two = match self.guess().connections {
            ..=2 => Vec::new(),
            _ => {
                let extent = Extent {
                    connections: Some(2),
                    ..extent.clone()
                };
                all.retain(|call| !is_plain(call));
                place.measure(&extent, &all)?
            }
        };
        Ok(Measured {
            taken,
            by_two,
            others,
        })
    }

    /// On GPUs, by their own clocks.
    fn on_gpus(&self, ranks: &Ranks) -> Result<Measured> {
        let extent = self.extent(ranks.size())?;
        ranks.run(&self.common(), |rank: &Rank| {
            let place = Place {
                boot: &*rank.boot,
                device: Arc::clone(&rank.device) as _,
                on: &rank.on,
                watch: &|work| {
                    let mut watch = Stopwatch::default();
                    watch.start(&rank.device, &rank.on)?;
                    work()?;
                    watch.stop(&rank.device, &rank.on)?;
                    Ok(watch.elapsed(PATIENCE)?)
                },
            };
            self.measure(&place, &extent)
        })
    }

    fn meta(&self, ranks: &Ranks) -> Result<Value> {
        let mut meta = match self.device {
            Kind::Cuda => meta::meta(ranks)?,
            Kind::Host => meta::host(ranks)?,
        };
        meta["machines"] = self.machines.into();
        if self.shared {
            meta["link"] = json!(Links::Shared);
        }
        if self.device == Kind::Cuda {
            meta["nccl_environment"] = meta::nccl_environment(std::env::vars_os()).into();
        }
        Ok(meta)
    }

    /// What is written for devices to plan by.
    fn written(&self, meta: &Value, extent: &Extent, fitted: &Fitted) -> Result<Entry> {
        let text = |name: &str| meta[name].as_str().unwrap_or("unknown").to_owned();
        let how = if self.graph { "graphs" } else { "calls" };
        let (half, worst) = fitted.off();
        let mut note = format!(
            "{}; medians of {} rounds of {} {how}; by these costs, plans expect half of the calls within a factor of {half:.2} of what they \
             took, all within {worst:.2}",
            name(self.dtype),
            self.rounds,
            self.calls,
        );
        if let Some(nccl) = meta["nccl_environment"].as_str() {
            note += &format!("; {nccl}");
        }
        let costs = &fitted.costs;
        let entry = Entry {
            costs_version: Entry::VERSION,
            gpu: text("gpu"),
            links: serde_json::from_value(meta["link"].clone())?,
            machines: extent.machines.count(),
            ranks: extent.machines.ranks(),
            inside_call_ns: costs.inside.call_ns,
            inside_bytes_per_us: costs.inside.bytes_per_us,
            across_call_ns: costs.across.call_ns,
            across_bytes_per_us: costs.across.bytes_per_us,
            wire_latency_ns: costs.wire.latency_ns,
            wire_bytes_per_us: costs.wire.bytes_per_us,
            add_bytes_per_us: costs.add_bytes_per_us,
            copy_ns: costs.copy_ns,
            connections: costs.connections,
            crowded_percent: costs.crowded_percent,
            channels: costs.channels,
            measured: Sizes {
                from_bytes: extent.sizes.first().copied().unwrap_or(self.begin),
                to_bytes: extent.sizes.last().copied().unwrap_or(self.end),
            },
            versions: Versions {
                driver: text("driver"),
                cuda: text("cuda"),
                nccl: meta["nccl"].as_str().map(str::to_owned),
            },
            source: Source {
                command: text("command"),
                date: text("date"),
                commit: text("commit"),
                note: Some(note),
            },
        };
        entry.check()?;
        Ok(entry)
    }

    /// How many channels are tried beside what whoever carries connections decides.
    fn tried(&self) -> &'static [u16] {
        let has_channels = |nccl: Nccl| nccl.version >= NCCL_WITH_CHANNELS;
        match self.device {
            Kind::Cuda if find_nccl(&[]).is_some_and(has_channels) => &[4, 8],
            _ => &[],
        }
    }

    /// What plans count with where nobody measured anything.
    fn guess(&self) -> Costs {
        match self.device {
            Kind::Cuda => Costs::cuda(),
            Kind::Host => Costs::host(),
        }
    }

    /// Fits what was taken, writes it, and tells of it.
    fn tell(&self, ranks: &Ranks, measured: &Measured) -> Result<String> {
        if !ranks.speak() {
            return Ok(String::new());
        }
        let (extent, guess) = (self.extent(ranks.size())?, self.guess());
        let (taken, connections) = measured.quickest(guess.connections);
        let counted = Costs {
            connections,
            channels: measured.channels(),
            ..guess
        };
        let samples: Vec<_> = taken.iter().map(Taken::sample).collect();
        let meta = self.meta(ranks)?;
        let fitted = fit(&samples, &extent.config(), &counted);
        // What follows no costs is of interest, too.
        let costs = fitted.as_ref().map_or(counted, |fitted| fitted.costs);
        let told = |taken: &[Taken]| -> Result<Vec<Value>> {
            let each = taken.iter();
            each.map(|taken| row(taken, &extent, [&costs, &guess]))
                .collect()
        };
        let mut all = told(&measured.taken)?;
        all.extend(told(&measured.by_two)?);
        all.extend(told(&measured.others)?);
        self.common().write(&meta, &all)?;
        let (fitted, rows) = (fitted?, told(&taken)?);
        if let Some(path) = &self.entry {
            crate::write_entry(path, &self.written(&meta, &extent, &fitted)?)?;
        }
        Ok(table(&extent, &fitted, &guess, &rows))
    }
}

/// What calls took.
struct Measured {
    /// All of them, by as many connections of all that a rank has as untuned plans take.
    taken: Vec<Taken>,
    /// Those of several slices by two, if it has more.
    by_two: Vec<Taken>,
    /// What was measured by connections of other numbers of channels.
    others: Vec<Taken>,
}

/// By how much calls must be quicker with channels of one's own choice, in the mean.
const QUICKER: f64 = 0.03;

/// Whether something goes along rails, and all of it by one connection.
fn goes_by_one(call: &HierarchicalCall) -> bool {
    call.machines.count() > 1 && is_plain(call)
}

/// Of what was tried, that by which calls of one connection are quickest, each the way that it is quickest, in the geometric mean; if any is quicker than what
/// was taken first.
fn quickest_channels(first: &[Taken], tried: Vec<(Vec<Taken>, Extent)>) -> Option<Extent> {
    let mean = |all: &[Taken]| {
        let mut least = BTreeMap::new();
        for taken in all.iter().filter(|t| goes_by_one(&t.call)) {
            let (operation, _, bytes) = called(&taken.call);
            let us = least.entry((operation, bytes)).or_insert(f64::INFINITY);
            *us = taken.times.median.min(*us);
        }
        least.values().map(|us| us.ln()).sum::<f64>() / least.len().max(1) as f64
    };
    let means = tried.into_iter().map(|(all, extent)| (mean(&all), extent));
    let quickest = means.min_by(|a, b| a.0.total_cmp(&b.0));
    let most = mean(first) - QUICKER;
    quickest.filter(|(mean, _)| *mean < most).map(|(_, e)| e)
}

impl Measured {
    /// Channels of the connections by which plans are to go.
    fn channels(&self) -> Option<u16> {
        self.taken.first().and_then(|taken| taken.channels)
    }

    /// What plans are to be made from, of which calls in flight went by as many connections as they were quickest by; and how many that is,
    /// of so many. What went by two anyway says nothing of it.
    fn quickest(&self, most: usize) -> (Vec<Taken>, usize) {
        let by_two = |taken: &&Taken| {
            let differs =
                |two: &&Taken| two.call == taken.call && two.connections != taken.connections;
            self.by_two.iter().find(differs)
        };
        let pairs = self.taken.iter().filter_map(|t| Some((t, by_two(&t)?)));
        let (sum, n) = pairs.fold((0.0, 0u32), |(sum, n), (all, two)| {
            (sum + (two.times.median / all.times.median).ln(), n + 1)
        });
        // By fewer, if they are no slower in the geometric mean.
        let fewer = n > 0 && sum <= 0.0;
        let of = |taken: &Taken| by_two(&taken).filter(|_| fewer).unwrap_or(taken).clone();
        let connections = if fewer { 2 } else { most };
        (self.taken.iter().map(of).collect(), connections)
    }
}

/// Measures; gives a table of costs.
pub fn start(tune: &Tune) -> Result<String> {
    match tune.device {
        Kind::Cuda => {
            ensure!(
                tune.rail_bytes_per_us.is_none(),
                "--rail-bytes-per-us slows the rails of --device host"
            );
            let how = (tune.machines, tune.shared);
            let prepare = |ranks, rank, command: &mut Command| {
                tune.sockets.prepare(how, (ranks, rank), command)
            };
            let measure = |ranks: &Ranks| tune.tell(ranks, &tune.on_gpus(ranks)?);
            tune.common().run_prepared(prepare, measure)
        }
        Kind::Host => {
            let asked = || tune.ranks.context("--device host needs --ranks");
            if tune.processes && !ranks::is_rank() {
                ranks::start(asked()?, |_, _| Ok(()))?;
                return Ok(String::new());
            }
            let ranks = Ranks::or_threads(tune.ranks, asked)?;
            tune.tell(&ranks, &tune.on_host(&ranks)?)
        }
    }
}

/// What a call is, for people and files: operation, way, and bytes of the larger of a rank's two buffers.
fn called(call: &HierarchicalCall) -> (&'static str, String, usize) {
    let operation = match call.operation {
        Operation::AllReduce { .. } => "all-reduce",
        Operation::ReduceScatter { .. } => "reduce-scatter",
        Operation::AllGather { .. } => "all-gather",
    };
    let way = match call.choice {
        None => "inside".to_owned(),
        Some(HierarchicalPath::Whole) => "whole".to_owned(),
        Some(HierarchicalPath::Slices { count: 1 }) => "1 slice".to_owned(),
        Some(HierarchicalPath::OneShot { count }) => format!("one-shot, {count}"),
        Some(HierarchicalPath::Slices { count }) => format!("{count} slices"),
    };
    let (input, output) = sides(call);
    (operation, way, input.max(output) * call.dtype.bytes())
}

fn row(taken: &Taken, extent: &Extent, [costs, guess]: [&Costs; 2]) -> Result<Value> {
    let (operation, way, bytes) = called(&taken.call);
    let us = |costs: &Costs| -> Result<Value> {
        let ns = expected_ns(&taken.call, &extent.config(), costs)?;
        Ok(rounded(ns / 1e3))
    };
    let samples = taken.times.samples.iter().map(|&us| rounded(us));
    Ok(json!({
        "machines": extent.machines.count(), "ranks": extent.machines.ranks(),
        "operation": operation, "choice": way, "dtype": name(extent.float), "bytes": bytes, "graph": extent.graph,
        "connections": taken.connections, "channels": taken.channels, "us": rounded(taken.times.median), "expected_us": us(costs)?, "untuned_us": us(guess)?,
        "samples": samples.collect::<Vec<_>>(),
    }))
}

/// What costs are, beside what they were guessed to be; and how far off they are.
fn table(extent: &Extent, fitted: &Fitted, guess: &Costs, rows: &[Value]) -> String {
    let Fitted { costs, off } = fitted;
    let figures = |c: &Costs| {
        [
            c.inside.call_ns,
            c.inside.bytes_per_us,
            c.across.call_ns,
            c.across.bytes_per_us,
            c.wire.latency_ns,
            c.wire.bytes_per_us,
            c.add_bytes_per_us,
            c.copy_ns,
            c.connections as u64,
            c.crowded_percent,
            c.channels.unwrap_or_default().into(),
        ]
    };
    let names = [
        "inside, a call, ns",
        "inside, bytes in a us",
        "across, a call, ns",
        "across, bytes in a us",
        "wire, latency, ns",
        "wire, bytes in a us",
        "added, bytes in a us",
        "a copy, ns",
        "connections",
        "crowded, percent",
        "channels, 0: NCCL's",
    ];
    let mut text = format!("{:<24} {:>12} {:>12}\n", "", "measured", "untuned");
    for ((name, got), guess) in names.iter().zip(figures(costs)).zip(figures(guess)) {
        text += &format!("{name:<24} {got:>12} {guess:>12}\n");
    }
    let (half, worst) = fitted.off();
    text += &format!(
        "{}: by these costs, plans expect half of {} calls within a factor of {half:.2} of what they took, all within {worst:.2}\n",
        extent.machines,
        off.len(),
    );
    let factor = |x: f64| x.max(1.0 / x);
    let furthest = off.iter().zip(rows);
    if let Some((_, row)) = furthest.max_by(|a, b| factor(*a.0).total_cmp(&factor(*b.0))) {
        text += &format!(
            "furthest off: {} of {} bytes, {}: {} us, expected {}\n",
            row["operation"].as_str().unwrap_or("-"),
            row["bytes"],
            row["choice"].as_str().unwrap_or("-"),
            row["us"],
            row["expected_us"],
        );
    }
    text
}

#[cfg(test)]
mod tests;
