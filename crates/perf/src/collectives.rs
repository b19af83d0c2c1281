//! Collectives beside NCCL's, over sizes: all-reduce, all-gather, reduce-scatter, broadcast and all-to-all.

mod case;
mod chain;
pub mod expected;
pub mod names;
mod report;
pub mod tune;
pub mod which;

use crate::{Common, float::Float, meta, ranks::Ranks, sizes};
use anyhow::{Result, anyhow, ensure};
use brigade::{AllReduceAlgorithm, CommConfig, NcclUse, ParallelMode};
use case::{Case, Measured};
use clap::Args;
use expected::Inputs;
pub use names::Choice;
use names::Op;
pub use report::sms;
use which::Which;

/// What every collective is told.
#[derive(Clone, Debug, Args)]
pub struct Options {
    #[command(flatten)]
    common: Common,
    /// Bytes to begin with, of the larger of a rank's two buffers; K, M and G count in powers of 1024
    #[arg(short, long, value_parser = sizes::bytes, default_value = "2K")]
    begin: usize,
    /// Bytes to end with
    #[arg(short, long, value_parser = sizes::bytes, default_value = "16M")]
    end: usize,
    /// From one size to the next
    #[arg(short, long, default_value_t = 2)]
    factor: usize,
    /// Type of the numbers
    #[arg(short, long, value_enum, default_value_t = Float::Bf16)]
    dtype: Float,
    /// Capacity of one half of the communicator's scratch memory, through which larger inputs pass in pieces [default: the
    /// device's]
    #[arg(long, value_name = "BYTES", value_parser = sizes::bytes)]
    scratch_bytes: Option<usize>,
    /// Capacity of each of the three buffers that calls push through; larger all-reduces pass in pieces, all else that does not
    /// fit is not pushed [default: for all-reduces twice the largest size, at most 128 MiB; else the device's]
    #[arg(long, value_name = "BYTES", value_parser = sizes::bytes)]
    all_reduce_bytes: Option<usize>,
    /// Most multiprocessors that communication may use [default: the plan's choice]
    #[arg(long, value_name = "SMS")]
    sm_budget: Option<u16>,
}

#[derive(Clone, Debug, Args)]
pub struct AllReduce {
    #[command(flatten)]
    options: Options,
    /// How values are combined
    #[arg(short, long, value_enum, default_value_t = Op::Sum)]
    op: Op,
    /// How it is done; several are measured in turn
    #[arg(short, long, value_enum, value_name = "NAME", num_args = 1.., default_value = "auto")]
    algorithm: Vec<Choice>,
    /// Let plans choose NCCL where the tables say that it is quicker
    #[arg(long)]
    allow_nccl: bool,
    /// The result goes where the input lies
    #[arg(long)]
    in_place: bool,
    /// Also between a product in bf16 and a norm with a residual, all in one graph: the norm behind it, the norm in it, and these two
    /// alone
    #[arg(long)]
    chain: bool,
}

#[derive(Clone, Debug, Args)]
pub struct AllGather {
    #[command(flatten)]
    options: Options,
    /// Own rows lie where they belong among those of all ranks
    #[arg(long)]
    in_place: bool,
}

#[derive(Clone, Debug, Args)]
pub struct ReduceScatter {
    #[command(flatten)]
    options: Options,
    /// How values are combined
    #[arg(short, long, value_enum, default_value_t = Op::Sum)]
    op: Op,
    /// Own rows of the result go where those of the input lie
    #[arg(long)]
    in_place: bool,
}

#[derive(Clone, Debug, Args)]
pub struct Broadcast {
    #[command(flatten)]
    options: Options,
}

#[derive(Clone, Debug, Args)]
pub struct AllToAll {
    #[command(flatten)]
    options: Options,
}

/// One collective, as it was asked for.
#[derive(Clone, Copy, Debug)]
pub struct Asked<'a> {
    options: &'a Options,
    which: Which,
    op: Op,
    choices: &'a [Choice],
    allow_nccl: bool,
    in_place: bool,
    chain: bool,
}

impl<'a> Asked<'a> {
    /// What those are told that have no further options.
    fn plain(options: &'a Options, which: Which) -> Self {
        Self {
            options,
            which,
            op: Op::Sum,
            choices: &[Choice::AUTO],
            allow_nccl: false,
            in_place: false,
            chain: false,
        }
    }
}

impl AllReduce {
    pub fn asked(&self) -> Asked<'_> {
        Asked {
            op: self.op,
            choices: &self.algorithm,
            allow_nccl: self.allow_nccl,
            in_place: self.in_place,
            chain: self.chain,
            ..Asked::plain(&self.options, Which::AllReduce)
        }
    }
}

impl AllGather {
    pub fn asked(&self) -> Asked<'_> {
        Asked {
            in_place: self.in_place,
            ..Asked::plain(&self.options, Which::AllGather)
        }
    }
}

impl ReduceScatter {
    pub fn asked(&self) -> Asked<'_> {
        Asked {
            op: self.op,
            in_place: self.in_place,
            ..Asked::plain(&self.options, Which::ReduceScatter)
        }
    }
}

impl Broadcast {
    pub fn asked(&self) -> Asked<'_> {
        Asked {
            // Its input and its result are one buffer.
            in_place: true,
            ..Asked::plain(&self.options, Which::Broadcast)
        }
    }
}

impl AllToAll {
    pub fn asked(&self) -> Asked<'_> {
        Asked::plain(&self.options, Which::AllToAll)
    }
}

/// Most that a buffer of all-reduces is given where nothing is said.
const MOST_PUSHED: usize = 128 << 20;

impl Asked<'_> {
    pub fn common(&self) -> &Common {
        &self.options.common
    }

    /// One communicator for all sizes, as a program has it, with room for the parts of the largest.
    fn config(&self, largest: usize) -> CommConfig {
        let mut config = CommConfig::new(ParallelMode::Tp);
        config.reduce_scatter_bytes = match self.which {
            Which::ReduceScatter => largest,
            _ => config.reduce_scatter_bytes,
        };
        config.scratch_bytes = self.options.scratch_bytes.unwrap_or(config.scratch_bytes);
        config.all_reduce_bytes = match (self.which, self.options.all_reduce_bytes) {
            (_, Some(bytes)) => bytes,
            (Which::AllReduce, None) => (2 * largest).min(MOST_PUSHED),
            _ => config.all_reduce_bytes,
        };
        config.sm_budget = self.options.sm_budget;
        let nccl = Some(AllReduceAlgorithm::Nccl);
        config.nccl = match self.choices.iter().any(|c| c.algorithm == nccl) {
            _ if self.allow_nccl => NcclUse::Quicker,
            true => NcclUse::Forced,
            false => NcclUse::Never,
        };
        config
    }
}

/// Measures all sizes; gives a table.
pub fn run(asked: &Asked<'_>, ranks: &Ranks) -> Result<String> {
    let options = asked.options;
    ensure!(ranks.size() > 1, "there must be two ranks");
    ensure!(
        !asked.chain || options.dtype == Float::Bf16,
        "--chain goes with bf16 alone, which its product gives"
    );
    ensure!(
        !asked.chain || asked.op == Op::Sum,
        "--chain goes with sums alone, which have a norm behind them"
    );
    let extents = sizes::steps(options.begin, options.end, options.factor)?
        .into_iter()
        .map(|bytes| asked.which.extent(bytes, options.dtype, ranks.size()))
        .collect::<Result<Vec<_>>>()?;
    let meta = meta::meta(ranks)?;
    let measured = ranks.run(&options.common, |rank| {
        let largest = extents.iter().map(|e| e.all).max().unwrap_or(0);
        let comm = rank.join(&asked.config(largest * options.dtype.bytes()))?;
        let inputs = Inputs::fresh(rank, options.dtype)?;
        extents
            .iter()
            .map(|&extent| Case::new(rank, asked, &comm, &inputs, extent)?.run())
            .collect::<Result<Vec<Measured>>>()
    })?;
    if !ranks.speak() {
        return Ok(String::new());
    }
    // A size may be out of an algorithm's reach, which its row says; one that runs at none was asked for in vain.
    let mut all = measured.iter().flat_map(|m| &m.ours);
    if !all.clone().any(|ours| ours.times.is_some()) {
        let reason = all.find_map(|ours| ours.plan.clone().err());
        return Err(reason.map_or_else(|| anyhow!("nothing was measured"), Into::into));
    }
    let rows = report::json(asked, ranks.size(), &measured);
    options.common.write(&meta, &rows)?;
    Ok(report::table(asked, ranks.size(), &measured))
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::Parser;

    #[derive(Parser)]
    enum Line {
        AllReduce(AllReduce),
        AllGather(AllGather),
        ReduceScatter(ReduceScatter),
        Broadcast(Broadcast),
        AllToAll(AllToAll),
    }

    fn read(line: &str) -> Result<Line, clap::Error> {
        Line::try_parse_from(std::iter::once("brigade-perf").chain(line.split(' ')))
    }

    fn all_reduce(line: &str) -> AllReduce {
        match read(&format!("all-reduce {line}")) {
            Ok(Line::AllReduce(all_reduce)) => all_reduce,
            _ => panic!("{line}"),
        }
    }

    #[test]
    fn without_options_the_plan_chooses_and_sums_in_bf16_over_fourteen_sizes() {
        let line = all_reduce("--graph");
        let asked = line.asked();
        assert_eq!((asked.op, asked.choices), (Op::Sum, &[Choice::AUTO][..]));
        assert!(asked.common().graph && !asked.in_place && !asked.chain);
        let o = asked.options;
        assert_eq!(o.dtype, Float::Bf16);
        let sizes = sizes::steps(o.begin, o.end, o.factor).unwrap();
        assert_eq!(sizes.len(), 14);
        assert_eq!((sizes[0], sizes[13]), (2 << 10, 16 << 20));
    }

    #[test]
    fn several_algorithms_are_measured_in_one_run() {
        use AllReduceAlgorithm::{OneShotPull, TwoShot};
        for words in [
            "-a auto one-shot-pull two-shot --op max",
            "--algorithm auto --algorithm one-shot-pull --op max -a two-shot",
        ] {
            let line = all_reduce(words);
            let forced: Vec<_> = line.asked().choices.iter().map(|c| c.algorithm).collect();
            assert_eq!(forced, [None, Some(OneShotPull), Some(TwoShot)], "{words}");
            assert_eq!(line.asked().op, Op::Max);
        }
        assert!(read("all-reduce -a sideways").is_err());
    }

    #[test]
    fn every_collective_takes_what_concerns_it_and_nothing_else() {
        let Ok(Line::ReduceScatter(scatter)) =
            read("reduce-scatter -o avg --in-place -d f16 -b 4K -e 8K -f 2")
        else {
            panic!("another collective");
        };
        let asked = scatter.asked();
        assert_eq!((asked.which, asked.op), (Which::ReduceScatter, Op::Avg));
        assert_eq!((asked.options.begin, asked.options.end), (4096, 8192));
        assert!(asked.in_place && asked.options.dtype == Float::F16);
        let Ok(Line::AllGather(gather)) = read("all-gather --vs nccl") else {
            panic!("another collective");
        };
        assert!(gather.asked().common().with_nccl() && !gather.asked().in_place);
        let Ok(Line::Broadcast(broadcast)) = read("broadcast --check") else {
            panic!("another collective");
        };
        assert!(broadcast.asked().in_place);
        let Ok(Line::AllToAll(exchange)) = read("all-to-all -e 64M") else {
            panic!("another collective");
        };
        assert!(exchange.asked().which == Which::AllToAll && !exchange.asked().in_place);
        for wrong in [
            "broadcast --in-place",
            "all-to-all --in-place",
            "all-gather --op sum",
            "reduce-scatter --chain",
            "reduce-scatter -a two-shot",
            "all-reduce -d f64",
        ] {
            assert!(read(wrong).is_err(), "{wrong}");
        }
    }

    #[test]
    fn one_communicator_has_room_for_all_sizes() {
        let line = all_reduce("--scratch-bytes 4M --sm-budget 8");
        let config = line.asked().config(64 << 20);
        assert_eq!((config.scratch_bytes, config.sm_budget), (4 << 20, Some(8)));
        let usual = CommConfig::new(ParallelMode::Tp);
        assert_eq!(config.reduce_scatter_bytes, usual.reduce_scatter_bytes);
        let options = &all_reduce("--check").options;
        let scatter = Asked::plain(options, Which::ReduceScatter).config(64 << 20);
        assert_eq!(scatter.reduce_scatter_bytes, 64 << 20);
        assert_eq!(scatter.scratch_bytes, usual.scratch_bytes);
    }
}
