//! Collectives across machines: ours as planned, and in one slice, and NCCL's over all ranks at once.

mod again;
mod case;
mod report;
pub mod tune;

use crate::{
    Common,
    collectives::{
        expected::Inputs,
        names::Op,
        which::{Extent, Which},
    },
    float::Float,
    machines::{Sockets, machines_of},
    meta,
    ranks::{Rank, Ranks},
    sizes, trace,
};
use anyhow::Result;
use brigade::{
    HierarchicalPath, Hierarchy, HierarchyConfig, Machines, ParallelMode,
    cuda::{CudaConfig, CudaDevice},
    plan::hierarchical::Wire,
};
use case::Case;
use clap::{Args, ValueEnum};
use std::{path::PathBuf, process::Command, sync::Arc};

/// What is measured.
#[derive(Clone, Debug, Args)]
pub struct Hierarchical {
    #[command(flatten)]
    pub common: Common,
    /// What is measured
    #[arg(long, value_enum, default_value_t = Operation::AllReduce)]
    operation: Operation,
    /// How values are combined
    #[arg(short, long, value_enum, default_value_t = Op::Sum)]
    op: Op,
    /// Type of the numbers
    #[arg(short, long, value_enum, default_value_t = Float::Bf16)]
    dtype: Float,
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
    /// Force so many slices; without, the plan chooses
    #[arg(long)]
    slices: Option<u32>,
    /// Force so many slices whose shares ranks send whole
    #[arg(long, value_name = "SLICES", conflicts_with_all = ["slices", "whole"])]
    one_shot: Option<u32>,
    /// Force the path of few bytes: one call inside and one across
    #[arg(long, conflicts_with = "slices")]
    whole: bool,
    /// Most slices on their way
    #[arg(long)]
    parallelism: Option<u16>,
    /// Most connections of a rank to its rail, at least 2
    #[arg(long)]
    connections: Option<u16>,
    /// Channels of NCCL's for each of them, up to 64; 0: as NCCL decides; without, as many as costs say, if they do
    #[arg(long)]
    channels: Option<u16>,
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
    /// With --vs nccl: all of it again for each of these as NCCL_ALGO, in other processes, with ours beside it
    #[arg(long, value_enum, value_name = "NAME", num_args = 1.., value_delimiter = ',')]
    nccl_algo: Vec<Algo>,
    /// Write a trace of one call to this file, for Perfetto, and a picture of it beside it, with .svg behind the name; of the
    /// last size
    #[arg(long, value_name = "FILE")]
    trace: Option<PathBuf>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum Operation {
    /// Every rank gets the reduction of all inputs
    AllReduce,
    /// Every rank gets its rows of the reduction
    ReduceScatter,
    /// Every rank gets all rows
    AllGather,
}

impl Operation {
    const fn which(self) -> Which {
        match self {
            Self::AllReduce => Which::AllReduce,
            Self::ReduceScatter => Which::ReduceScatter,
            Self::AllGather => Which::AllGather,
        }
    }

    /// As NCCL_ALGO has it.
    const fn of_nccl(self) -> &'static str {
        match self {
            Self::AllReduce => "allreduce",
            Self::ReduceScatter => "reducescatter",
            Self::AllGather => "allgather",
        }
    }
}

/// An algorithm of NCCL's.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Algo {
    /// Rings through all ranks
    Ring,
    /// Trees over machines, of all-reduces alone
    Tree,
    /// Parallel aggregated trees, of all but all-reduces, with one rank on each machine
    Pat,
}

impl Algo {
    /// As NCCL calls it.
    const fn of_nccl(self) -> &'static str {
        match self {
            Self::Ring => "Ring",
            Self::Tree => "Tree",
            Self::Pat => "PAT",
        }
    }
}

impl Hierarchical {
    /// What a rank's process finds in its environment, of so many.
    fn prepare(&self, ranks: usize, rank: usize, command: &mut Command) -> Result<()> {
        let how = (self.machines, self.common.shared);
        self.sockets.prepare(how, (ranks, rank), command)
    }

    fn choice(&self) -> Option<HierarchicalPath> {
        let slices = self.slices.map(|count| HierarchicalPath::Slices { count });
        let one_shot = self
            .one_shot
            .map(|count| HierarchicalPath::OneShot { count });
        slices
            .or(one_shot)
            .or(self.whole.then_some(HierarchicalPath::Whole))
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
        config.connections = self.connections;
        config.channels = self.channels;
        let device = Arc::clone(device) as Arc<dyn brigade::Device>;
        Ok(device.join_machines(&*rank.boot, machines, &config)?)
    }
}

/// Measures: once, or with each algorithm of NCCL's that is asked for.
pub fn start(options: &Hierarchical) -> Result<String> {
    if !options.nccl_algo.is_empty() && again::part().is_none() {
        return again::run(options);
    }
    let prepare = |ranks, rank, command: &mut Command| options.prepare(ranks, rank, command);
    let common = &options.common;
    common.run_prepared(prepare, |ranks| run(options, ranks))
}

/// Measures all sizes; gives a table.
fn run(options: &Hierarchical, ranks: &Ranks) -> Result<String> {
    let machines = machines_of(ranks.size(), options.machines)?;
    let which = options.operation.which();
    let extents = sizes::steps(options.begin, options.end, options.factor)?
        .into_iter()
        .map(|bytes| which.extent(bytes, options.dtype, ranks.size()))
        .collect::<Result<Vec<_>>>()?;
    let mut meta = meta::meta(ranks)?;
    meta["nccl_environment"] = meta::nccl_environment(std::env::vars_os()).into();
    let measured = ranks.run(&options.common, |rank| {
        let device = options.device(rank)?;
        let over = options.join(rank, &device)?;
        let inputs = Inputs::fresh(rank, options.dtype)?;
        let one = |&extent: &Extent| {
            let case = Case {
                rank,
                options,
                device: &device,
                over: &over,
                inputs: &inputs,
                extent,
            };
            case.measure()
        };
        extents.iter().map(one).collect::<Result<Vec<_>>>()
    })?;
    if !ranks.speak() {
        return Ok(String::new());
    }
    let rows: Vec<_> = measured
        .iter()
        .map(|measured| report::row(options, machines, measured))
        .collect();
    if let (Some(path), Some(last), Some(row)) = (&options.trace, measured.last(), rows.last()) {
        let title = format!("{machines}, {} bytes: {}", row["bytes"], last.plan);
        trace::draw(path, &title, &last.spans)?;
    }
    match again::part() {
        Some(path) => crate::write_rows(&path, &meta, &rows)?,
        None => options.common.write(&meta, &rows)?,
    }
    Ok(report::table(&rows, &[]))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::collectives::names::name;
    use clap::Parser;

    #[derive(Parser)]
    struct Line {
        #[command(flatten)]
        options: Hierarchical,
    }

    pub fn read(line: &str) -> Result<Hierarchical, clap::Error> {
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
    fn options_are_read() {
        let options = read("--slices 3 --op max --dtype f16 --vs nccl --nccl-algo ring,tree");
        let options = options.unwrap();
        let three = HierarchicalPath::Slices { count: 3 };
        assert_eq!(options.choice(), Some(three));
        let whole = read("--whole --operation all-gather").unwrap();
        assert_eq!(whole.choice(), Some(HierarchicalPath::Whole));
        let shot = read("--one-shot 2").unwrap();
        assert_eq!(shot.choice(), Some(HierarchicalPath::OneShot { count: 2 }));
        assert!(read("--whole --slices 3").is_err() && read("--whole --one-shot 3").is_err());
        assert_eq!(options.nccl_algo, [Algo::Ring, Algo::Tree]);
        assert_eq!((options.op, options.dtype), (Op::Max, Float::F16));
        for operation in Operation::value_variants() {
            let line = format!("--operation {}", name(*operation));
            assert_eq!(read(&line).unwrap().operation, *operation);
        }
        // What there is no NCCL beside needs none of its algorithms.
        let refused = start(&read("--nccl-algo ring").unwrap()).unwrap_err();
        assert!(refused.to_string().contains("--vs nccl"), "{refused}");
    }
}
