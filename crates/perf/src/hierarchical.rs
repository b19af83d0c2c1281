//! All-reduces across machines: ours as planned, in one slice, and NCCL's over all ranks at once.

use crate::{
    Common, check, data, meta,
    ranks::{PATIENCE, Rank, Ranks},
    rounded,
    sample::{Times, Variant, measure},
    sizes,
    trace::{self, Spans},
};
use anyhow::{Result, ensure};
use brigade::{
    Buffer, DeviceExt, HierarchicalAllReduceParams, HierarchicalCall, HierarchicalOperation,
    HierarchicalPath, HierarchicalPlan, Hierarchy, HierarchyConfig, Machines, ParallelMode,
    ReduceOp,
    cuda::{CudaConfig, CudaDevice},
    plan::hierarchical::Wire,
};
use clap::Args;
use half::bf16;
use serde_json::{Value, json};
use std::{path::PathBuf, process::Command, sync::Arc};

/// What is measured.
#[derive(Clone, Debug, Args)]
pub struct Hierarchical {
    #[command(flatten)]
    pub common: Common,
    /// Bytes to begin with
    #[arg(short, long, value_parser = sizes::bytes, default_value = "64K")]
    begin: usize,
    /// Bytes to end with
    #[arg(short, long, value_parser = sizes::bytes, default_value = "64M")]
    end: usize,
    /// From one size to the next
    #[arg(short, long, default_value_t = 4)]
    factor: usize,
    /// Machines that the ranks are cut into, in rank order
    #[arg(long, default_value_t = 2)]
    pub machines: usize,
    /// Force so many slices; without, the plan chooses
    #[arg(long)]
    slices: Option<u32>,
    /// Most slices on their way
    #[arg(long)]
    parallelism: Option<u16>,
    /// What plans take the wire between machines to carry, in bytes of a microsecond; without, what they guess
    #[arg(long, value_name = "BYTES")]
    wire_bytes_per_us: Option<u64>,
    /// What they take the way of a byte there to be, in nanoseconds; goes with --wire-bytes-per-us
    #[arg(
        long,
        value_name = "NS",
        default_value_t = 0,
        requires = "wire_bytes_per_us"
    )]
    wire_latency_ns: u64,
    /// With --processes: NCCL takes every machine for one, and goes from one to the other through sockets of this host
    #[arg(long, requires = "processes")]
    sockets: bool,
    /// Write a trace of one call to this file, for Perfetto, and a picture of it beside it, with .svg behind the name; of the
    /// last size
    #[arg(long, value_name = "FILE")]
    trace: Option<PathBuf>,
}

/// What was measured of a size.
struct Measured {
    times: Vec<Times>,
    plan: HierarchicalPlan,
    spans: Vec<Spans>,
}

impl Hierarchical {
    /// What a rank's process finds in its environment, of so many.
    pub fn prepare(&self, ranks: usize, rank: usize, command: &mut Command) -> Result<()> {
        if !self.sockets {
            return Ok(());
        }
        let machine = Machines::cut(ranks, self.machines)?.machine_of(rank);
        command
            .env("NCCL_HOSTID", format!("machine-{machine}"))
            .env("NCCL_SOCKET_IFNAME", "lo")
            .env("NCCL_IB_DISABLE", "1");
        Ok(())
    }

    fn choice(&self) -> Option<HierarchicalPath> {
        self.slices.map(|count| HierarchicalPath::Slices { count })
    }

    /// The rank's device, as plans are to see its wire.
    fn device(&self, rank: &Rank) -> Result<Arc<CudaDevice>> {
        let Some(bytes_per_us) = self.wire_bytes_per_us else {
            return Ok(Arc::clone(&rank.device));
        };
        let config = CudaConfig {
            serial: self.common.serial,
            wire: Some(Wire {
                latency_ns: self.wire_latency_ns,
                bytes_per_us,
            }),
            ..CudaConfig::default()
        };
        let gpu = brigade::Device::info(&*rank.device).ordinal as usize;
        Ok(CudaDevice::with(gpu, &config).map_err(brigade::Error::from)?)
    }

    fn join(&self, rank: &Rank, device: &Arc<CudaDevice>) -> Result<Hierarchy> {
        let machines = Machines::cut(rank.size(), self.machines)?;
        let mut config = HierarchyConfig::new(ParallelMode::Tp);
        config.parallelism = self.parallelism;
        let device = Arc::clone(device) as Arc<dyn brigade::Device>;
        Ok(device.join_machines(&*rank.boot, machines, &config)?)
    }
}

/// Enqueues one of our calls.
fn call(
    rank: &Rank,
    over: &Hierarchy,
    x: &Buffer,
    y: &mut Buffer,
    choice: Option<HierarchicalPath>,
) -> brigade::Result<()> {
    let p = HierarchicalAllReduceParams {
        data: y.view_mut(),
        from: Some(x.view()),
        op: ReduceOp::Sum,
        choice,
    };
    over.lease(&rank.on)?.all_reduce(p).map(drop)
}

fn one_size(
    rank: &Rank,
    options: &Hierarchical,
    device: &Arc<CudaDevice>,
    over: &Hierarchy,
    bytes: usize,
) -> Result<Measured> {
    let elements = bytes / size_of::<bf16>();
    let mine = data::numbers(rank.number() as u64, elements);
    let x = data::upload(&rank.device, &rank.on, &mine, [1, elements])?;
    let fresh = || data::poisoned(&rank.device, &rank.on, [1, elements]);
    let how = (options.common.calls, options.common.graph);
    let ours = options.choice();
    let one = Some(HierarchicalPath::Slices { count: 1 });
    let plan = over.explain(&HierarchicalCall {
        machines: over.machines(),
        operation: HierarchicalOperation::AllReduce {
            elements,
            op: ReduceOp::Sum,
        },
        dtype: x.dtype(),
        output: x.dtype(),
        choice: ours,
    })?;
    if options.common.check {
        for (what, choice) in [("ours", ours), ("one slice", one)] {
            let mut y = fresh()?;
            call(rank, over, &x, &mut y, choice)?;
            rank.on.sync(PATIENCE)?;
            over.check()?;
            rank.agree(compare(rank, what, &y, elements))?;
        }
        if let Some(nccl) = &rank.nccl {
            let mut y = fresh()?;
            nccl.all_reduce(&rank.on, x.view(), y.view_mut(), ReduceOp::Sum)?;
            rank.on.sync(PATIENCE)?;
            rank.agree(compare(rank, "nccl", &y, elements))?;
        }
    }
    let variant = |name, choice| {
        let (x, mut y) = (x.clone(), fresh()?);
        let over = over.clone();
        let again = move || call(rank, &over, &x, &mut y, choice);
        Variant::new(rank, name, how, again)
    };
    let mut variants = vec![variant("ours", ours)?, variant("one slice", one)?];
    if let Some(nccl) = &rank.nccl {
        let (x, mut y) = (x.clone(), fresh()?);
        let flat = move || nccl.all_reduce(&rank.on, x.view(), y.view_mut(), ReduceOp::Sum);
        variants.push(Variant::new(rank, "nccl", how, flat)?);
    }
    let times = measure(rank, &mut variants, options.common.rounds)?;
    rank.on.sync(PATIENCE)?;
    over.check()?;
    let spans = match options.trace {
        Some(_) => {
            let mut y = fresh()?;
            trace::record_on(device, rank, || call(rank, over, &x, &mut y, ours))?
        }
        None => Vec::new(),
    };
    Ok(Measured { times, plan, spans })
}

/// Elements against sums in f64.
fn compare(rank: &Rank, what: &str, y: &Buffer, elements: usize) -> Result<()> {
    const LOOKED_AT: usize = 100_000;
    let got: Vec<bf16> = rank.device.download(&rank.on, y.view())?;
    let inputs: Vec<Vec<bf16>> = (0..rank.size())
        .map(|r| data::numbers(r as u64, elements))
        .collect();
    let pairs: Vec<_> = check::some(LOOKED_AT, elements)
        .map(|i| (got[i], inputs.iter().map(|x| x[i].to_f64()).sum()))
        .collect();
    check::close(what, &pairs)
}

/// Measures all sizes; gives a table.
pub fn run(options: &Hierarchical, ranks: &Ranks) -> Result<String> {
    ensure!(ranks.size() > 1, "there must be two ranks");
    let machines = Machines::cut(ranks.size(), options.machines)?;
    let sizes = sizes::steps(options.begin, options.end, options.factor)?;
    let mut meta = meta::meta(ranks)?;
    meta["nccl_environment"] = meta::nccl_environment(std::env::vars_os()).into();
    let measured = ranks.run(&options.common, |rank| {
        let device = options.device(rank)?;
        let over = options.join(rank, &device)?;
        let sizes = sizes.iter();
        sizes
            .map(|&bytes| one_size(rank, options, &device, &over, bytes))
            .collect::<Result<Vec<_>>>()
    })?;
    if !ranks.speak() {
        return Ok(String::new());
    }
    if let (Some(path), Some(last)) = (&options.trace, measured.last()) {
        let title = format!(
            "{machines}, {} bytes: {}",
            sizes[sizes.len() - 1],
            last.plan
        );
        trace::draw(path, &title, &last.spans)?;
    }
    let mut text = format!(
        "{:>10} {:>10} {:>12} {:>10}  plan\n",
        "bytes", "us", "one slice us", "nccl us"
    );
    let mut rows = Vec::new();
    for (&bytes, measured) in sizes.iter().zip(&measured) {
        let row = row(options, machines, bytes, measured);
        let of = |name: &str| row[name].as_f64().unwrap_or(f64::NAN);
        text += &format!(
            "{bytes:>10} {:>10.1} {:>12.1} {:>10.1}  {}\n",
            of("us"),
            of("one_slice_us"),
            of("nccl_flat_us"),
            measured.plan
        );
        rows.push(row);
    }
    options.common.write(&meta, &rows)?;
    Ok(text)
}

fn row(options: &Hierarchical, machines: Machines, bytes: usize, measured: &Measured) -> Value {
    let of = |name: &str| {
        let found = measured.times.iter().find(|t| t.name == name);
        found.map_or(Value::Null, |t| rounded(t.median))
    };
    let slices = match &measured.plan {
        HierarchicalPlan::Slices(plan) => plan.slices,
        HierarchicalPlan::Whole { .. } | HierarchicalPlan::Inside => 0,
    };
    let samples: serde_json::Map<_, _> = measured
        .times
        .iter()
        .map(|t| {
            let samples = t.samples.iter().map(|&s| rounded(s)).collect();
            (t.name.to_owned(), samples)
        })
        .collect();
    json!({
        "machines": machines.count(), "ranks": machines.ranks(), "bytes": bytes,
        "graph": options.common.graph, "sockets": options.sockets,
        "us": of("ours"), "one_slice_us": of("one slice"), "nccl_flat_us": of("nccl"),
        "slices": slices, "plan": measured.plan.to_string(), "samples": samples,
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::Parser;
    use std::time::Duration;

    #[derive(Parser)]
    struct Line {
        #[command(flatten)]
        options: Hierarchical,
    }

    fn read(line: &str) -> Result<Hierarchical, clap::Error> {
        let words = std::iter::once("brigade-perf").chain(line.split(' '));
        Line::try_parse_from(words).map(|line| line.options)
    }

    #[test]
    fn processes_of_a_machine_have_one_name_for_nccl() {
        let options = read("--processes --sockets --machines 2").unwrap();
        let hosts = [0, 1, 2, 3].map(|rank| {
            let mut command = Command::new("none");
            options.prepare(4, rank, &mut command).unwrap();
            let mut variables = command.get_envs();
            let host = variables.find(|(name, _)| *name == "NCCL_HOSTID");
            host.and_then(|(_, value)| value?.to_str().map(str::to_owned))
        });
        let of = |machine: usize| Some(format!("machine-{machine}"));
        assert_eq!(hosts, [of(0), of(0), of(1), of(1)]);
        let mut command = Command::new("none");
        assert!(options.prepare(3, 0, &mut command).is_err());
        let alone = read("--processes").unwrap();
        alone.prepare(3, 0, &mut command).unwrap();
        assert!(command.get_envs().next().is_none());
        assert!(read("--sockets").is_err() && read("--wire-latency-ns 5").is_err());
    }

    #[test]
    fn rows_tell_what_was_measured_and_nothing_else() {
        let options = read("--slices 3 -b 1K").unwrap();
        assert_eq!(
            options.choice(),
            Some(HierarchicalPath::Slices { count: 3 })
        );
        let measured = Measured {
            times: vec![Times {
                name: "ours",
                median: 12.34,
                p99: 20.0,
                samples: vec![12.34],
            }],
            plan: HierarchicalPlan::Whole {
                order: brigade::SumOrder::ByMachine { ranks: 2 },
                staging_bytes: 0,
                expected: Duration::ZERO,
            },
            spans: Vec::new(),
        };
        let machines = Machines::cut(4, 2).unwrap();
        let row = row(&options, machines, 1024, &measured);
        assert_eq!((&row["us"], &row["slices"]), (&json!(12.3), &json!(0)));
        assert!(row["nccl_flat_us"].is_null() && row["one_slice_us"].is_null());
    }
}
