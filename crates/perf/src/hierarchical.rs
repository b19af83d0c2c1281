//! Collectives across machines: ours as planned, all-reduces in one slice too, and NCCL's over all ranks at once.

use crate::{
    Common, check, data,
    machines::{Sockets, machines_of},
    meta,
    ranks::{PATIENCE, Rank, Ranks},
    rounded,
    sample::{Times, Variant, measure},
    sizes,
    trace::{self, Spans},
};
use anyhow::{Result, ensure};
use brigade::{
    AllGatherParams, Buffer, DataType, DeviceExt, HierarchicalAllReduceParams, HierarchicalCall,
    HierarchicalOperation, HierarchicalPath, HierarchicalPlan, Hierarchy, HierarchyConfig,
    Machines, ParallelMode, PerRank, ReduceOp, ReduceScatterParams,
    cuda::{CudaConfig, CudaDevice, NcclComm},
    plan::hierarchical::Wire,
};
use clap::{Args, ValueEnum};
use half::bf16;
use serde_json::{Value, json};
use std::{path::PathBuf, process::Command, sync::Arc};

/// What is measured.
#[derive(Clone, Debug, Args)]
pub struct Hierarchical {
    #[command(flatten)]
    pub common: Common,
    /// What is measured
    #[arg(long, value_enum, default_value_t = Which::AllReduce)]
    operation: Which,
    /// Bytes to begin with, of the larger of a rank's two buffers
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
    machines: usize,
    /// Force so many slices of an all-reduce; without, the plan chooses
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
    #[command(flatten)]
    sockets: Sockets,
    /// Write a trace of one call to this file, for Perfetto, and a picture of it beside it, with .svg behind the name; of the
    /// last size
    #[arg(long, value_name = "FILE")]
    trace: Option<PathBuf>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum Which {
    /// Every rank gets the reduction of all inputs
    AllReduce,
    /// Every rank gets its rows of the reduction
    ReduceScatter,
    /// Every rank gets all rows
    AllGather,
}

/// One size of one operation on so many ranks: elements of the larger buffer, and of a rank's share.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Extent {
    which: Which,
    ranks: usize,
    all: usize,
}

impl Extent {
    /// So many bytes, or somewhat fewer: shares are multiples of 16 bytes.
    fn new(which: Which, bytes: usize, ranks: usize) -> Result<Self> {
        const SHARE: usize = 8;
        let elements = bytes / size_of::<bf16>();
        let all = match which {
            Which::AllReduce => elements,
            Which::ReduceScatter | Which::AllGather => elements / (SHARE * ranks) * SHARE * ranks,
        };
        ensure!(
            all > 0,
            "{bytes} bytes have no share for each of {ranks} ranks"
        );
        Ok(Self { which, ranks, all })
    }

    const fn bytes(self) -> usize {
        self.all * size_of::<bf16>()
    }

    const fn share(self) -> usize {
        self.all / self.ranks
    }

    /// Elements of a rank's input and of its output.
    const fn sides(self) -> (usize, usize) {
        match self.which {
            Which::AllReduce => (self.all, self.all),
            Which::ReduceScatter => (self.all, self.share()),
            Which::AllGather => (self.share(), self.all),
        }
    }

    /// As it is signed.
    fn operation(self) -> HierarchicalOperation {
        let rows: PerRank = vec![self.share(); self.ranks].into_iter().collect();
        match self.which {
            Which::AllReduce => HierarchicalOperation::AllReduce {
                elements: self.all,
                op: ReduceOp::Sum,
            },
            Which::ReduceScatter => HierarchicalOperation::ReduceScatter {
                rows,
                row_len: 1,
                op: ReduceOp::Sum,
            },
            Which::AllGather => HierarchicalOperation::AllGather { rows, row_len: 1 },
        }
    }

    /// What element `i` of rank `me`'s result should be, of all inputs.
    fn wanted(self, me: usize, i: usize, inputs: &[Vec<bf16>]) -> f64 {
        let sum = |at: usize| inputs.iter().map(|x| x[at].to_f64()).sum();
        match self.which {
            Which::AllReduce => sum(i),
            Which::ReduceScatter => sum(me * self.share() + i),
            Which::AllGather => inputs[i / self.share()][i % self.share()].to_f64(),
        }
    }
}

/// What was measured of a size.
struct Measured {
    extent: Extent,
    times: Vec<Times>,
    plan: HierarchicalPlan,
    spans: Vec<Spans>,
}

impl Hierarchical {
    /// What a rank's process finds in its environment, of so many.
    pub fn prepare(&self, ranks: usize, rank: usize, command: &mut Command) -> Result<()> {
        let how = (self.machines, self.common.shared);
        self.sockets.prepare(how, (ranks, rank), command)
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
            wire: Some(Wire {
                latency_ns: self.wire_latency_ns,
                bytes_per_us,
            }),
            ..self.common.cuda()?
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
    (over, extent): (&Hierarchy, Extent),
    x: &Buffer,
    y: &mut Buffer,
    choice: Option<HierarchicalPath>,
) -> brigade::Result<()> {
    let mut lease = over.lease(&rank.on)?;
    let rows_per_rank = &vec![extent.share(); extent.ranks][..];
    let (from, to, op) = (x.view(), y.view_mut(), ReduceOp::Sum);
    match extent.which {
        Which::AllReduce => lease.all_reduce(HierarchicalAllReduceParams {
            data: to,
            from: Some(from),
            op,
            choice,
        }),
        Which::ReduceScatter => lease.reduce_scatter(ReduceScatterParams {
            from,
            rows_per_rank,
            to,
            op,
        }),
        Which::AllGather => lease.all_gather(AllGatherParams {
            from,
            rows_per_rank,
            to,
        }),
    }
    .map(drop)
}

/// Enqueues NCCL's over all ranks at once.
fn flat(
    rank: &Rank,
    nccl: &NcclComm,
    extent: Extent,
    x: &Buffer,
    y: &mut Buffer,
) -> brigade::Result<()> {
    let (from, to, op) = (x.view(), y.view_mut(), ReduceOp::Sum);
    match extent.which {
        Which::AllReduce => nccl.all_reduce(&rank.on, from, to, op),
        Which::ReduceScatter => nccl.reduce_scatter(&rank.on, from, to, op),
        Which::AllGather => nccl.all_gather(&rank.on, from, to),
    }
}

fn one_size(
    rank: &Rank,
    options: &Hierarchical,
    device: &Arc<CudaDevice>,
    over: &Hierarchy,
    bytes: usize,
) -> Result<Measured> {
    let extent = Extent::new(options.operation, bytes, rank.size())?;
    let (input, output) = extent.sides();
    let mine = data::numbers(rank.number() as u64, input);
    let x = data::upload(&rank.device, &rank.on, &mine, [input, 1])?;
    let fresh = || data::poisoned(&rank.device, &rank.on, [output, 1]);
    let how = (options.common.calls, options.common.graph);
    let ours = options.choice();
    let one = Some(HierarchicalPath::Slices { count: 1 });
    // Slices are forced of all-reduces alone.
    let choices = match extent.which {
        Which::AllReduce => vec![("ours", ours), ("one slice", one)],
        Which::ReduceScatter | Which::AllGather => vec![("ours", None)],
    };
    let plan = over.explain(&HierarchicalCall {
        machines: over.machines(),
        operation: extent.operation(),
        dtype: DataType::BF16,
        output: DataType::BF16,
        choice: ours,
    })?;
    if options.common.check {
        for &(what, choice) in &choices {
            let mut y = fresh()?;
            call(rank, (over, extent), &x, &mut y, choice)?;
            rank.on.sync(PATIENCE)?;
            over.check()?;
            rank.agree(compare(rank, what, &y, extent))?;
        }
        if let Some(nccl) = &rank.nccl {
            let mut y = fresh()?;
            flat(rank, nccl, extent, &x, &mut y)?;
            rank.on.sync(PATIENCE)?;
            rank.agree(compare(rank, "nccl", &y, extent))?;
        }
    }
    let variant = |&(name, choice): &(&'static str, Option<HierarchicalPath>)| {
        let (x, mut y) = (x.clone(), fresh()?);
        let over = over.clone();
        let again = move || call(rank, (&over, extent), &x, &mut y, choice);
        Variant::new(rank, name, how, again)
    };
    let mut variants = choices.iter().map(variant).collect::<Result<Vec<_>>>()?;
    if let Some(nccl) = &rank.nccl {
        let (x, mut y) = (x.clone(), fresh()?);
        let flat = move || flat(rank, nccl, extent, &x, &mut y);
        variants.push(Variant::new(rank, "nccl", how, flat)?);
    }
    let times = measure(rank, &mut variants, options.common.rounds)?;
    rank.on.sync(PATIENCE)?;
    over.check()?;
    let spans = match options.trace {
        Some(_) => {
            let mut y = fresh()?;
            trace::record_on(device, rank, || {
                call(rank, (over, extent), &x, &mut y, ours)
            })?
        }
        None => Vec::new(),
    };
    Ok(Measured {
        extent,
        times,
        plan,
        spans,
    })
}

/// Elements against sums in f64.
fn compare(rank: &Rank, what: &str, y: &Buffer, extent: Extent) -> Result<()> {
    const LOOKED_AT: usize = 100_000;
    let got: Vec<bf16> = rank.device.download(&rank.on, y.view())?;
    let inputs: Vec<Vec<bf16>> = (0..rank.size())
        .map(|r| data::numbers(r as u64, extent.sides().0))
        .collect();
    let pairs: Vec<_> = check::some(LOOKED_AT, got.len())
        .map(|i| (got[i], extent.wanted(rank.number(), i, &inputs)))
        .collect();
    check::close(what, &pairs)
}

/// Measures all sizes; gives a table.
pub fn run(options: &Hierarchical, ranks: &Ranks) -> Result<String> {
    ensure!(
        options.slices.is_none() || options.operation == Which::AllReduce,
        "--slices goes with all-reduce alone"
    );
    let machines = machines_of(ranks.size(), options.machines)?;
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
    for measured in &measured {
        let bytes = measured.extent.bytes();
        let row = row(options, machines, measured);
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

fn row(options: &Hierarchical, machines: Machines, measured: &Measured) -> Value {
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
    let operation = options.operation.to_possible_value();
    let operation = operation.map_or_else(String::new, |value| value.get_name().to_owned());
    json!({
        "machines": machines.count(), "ranks": machines.ranks(),
        "operation": operation, "bytes": measured.extent.bytes(),
        "graph": options.common.graph, "sockets": options.sockets.sockets,
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
    fn sockets_are_for_processes() {
        let options = read("--processes --sockets --machines 2").unwrap();
        let mut command = Command::new("none");
        options.prepare(4, 3, &mut command).unwrap();
        assert!(command.get_envs().any(|(name, _)| name == "NCCL_HOSTID"));
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
            extent: Extent::new(Which::AllReduce, 1024, 4).unwrap(),
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
        let row = row(&options, machines, &measured);
        assert_eq!(
            (&row["operation"], &row["bytes"]),
            (&json!("all-reduce"), &json!(1024))
        );
        assert_eq!((&row["us"], &row["slices"]), (&json!(12.3), &json!(0)));
        assert!(row["nccl_flat_us"].is_null() && row["one_slice_us"].is_null());
    }
    #[test]
    fn shares_are_whole_and_every_element_has_its_owner() {
        let of = |which, bytes| Extent::new(which, bytes, 3).unwrap();
        assert_eq!(of(Which::AllReduce, 1000).sides(), (500, 500));
        let scattered = of(Which::ReduceScatter, 1000);
        assert_eq!((scattered.sides(), scattered.bytes()), ((480, 160), 960));
        let gathered = of(Which::AllGather, 1000);
        assert_eq!(gathered.sides(), (160, 480));
        assert!(Extent::new(Which::AllGather, 32, 3).is_err());
        let inputs = |n: usize| -> Vec<Vec<bf16>> {
            let of =
                |rank: usize| (0..n).map(move |i| bf16::from_f32((rank * 100 + i % 50) as f32));
            (0..3).map(|rank| of(rank).collect()).collect()
        };
        let (all, shares) = (inputs(480), inputs(160));
        let near = |got: f64, want: f64| assert!((got - want).abs() < 3.0, "{got}, {want}");
        // The second rank's first element is element 160, which is 10 of every 50.
        near(scattered.wanted(1, 0, &all), 330.0);
        near(gathered.wanted(0, 170, &shares), 110.0);
        near(of(Which::AllReduce, 960).wanted(2, 7, &all), 321.0);
        for which in [Which::AllReduce, Which::ReduceScatter, Which::AllGather] {
            let name = which.to_possible_value().unwrap();
            let line = format!("--operation {}", name.get_name());
            assert_eq!(read(&line).unwrap().operation, which);
        }
    }
}
