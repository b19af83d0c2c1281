//! Rows to their experts and back, in bf16: the layout, and all of it, beside NCCL's grouped sends of rows that are laid out and
//! counted already. Across machines too.

mod among;
mod apart;
mod case;
mod expected;
mod report;
pub mod tune;
mod ways;

use crate::{
    Common,
    machines::{Sockets, machines_of},
    meta,
    ranks::Ranks,
    trace,
};
use among::Among;
use anyhow::{Result, ensure};
use brigade::{
    CombineCast, CombineSum, CommConfig, DataType, Fp8Cast, ParallelMode, ScaleFormat, Transport,
};
use case::Case;
use clap::{Args, ValueEnum};
use std::{path::PathBuf, process::Command};

/// What four H200s push to each other at once, out of each, in 10^9 bytes in a second.
const WIRE_GB_PER_S: f64 = 344.0;

/// What is measured.
#[derive(Clone, Debug, Args)]
pub struct Moe {
    #[command(flatten)]
    pub common: Common,
    /// Tokens of each rank
    #[arg(long, num_args = 1.., value_delimiter = ',', default_values_t = [1, 8, 32, 128, 512, 1024, 4096])]
    tokens: Vec<usize>,
    /// Columns
    #[arg(long, default_value_t = 7168)]
    hidden: usize,
    /// Experts over all ranks
    #[arg(long, default_value_t = 256)]
    experts: usize,
    /// Experts of a token
    #[arg(short, long, default_value_t = 8)]
    k: usize,
    /// How received rows lie [default: by-source; across machines dense, and nothing else]
    #[arg(long, value_enum)]
    rows: Option<Rows>,
    /// Across so many machines that the ranks are cut into, in rank order; not in graphs, since the host waits for counts
    #[arg(long, conflicts_with = "graph")]
    machines: Option<usize>,
    #[command(flatten)]
    sockets: Sockets,
    /// Cast rows to fp8 on the way to their experts
    #[arg(long)]
    fp8: bool,
    /// How rows travel
    #[arg(long, value_enum, default_value = "auto")]
    transport: Choice,
    /// With low-latency: each rank adds its experts' rows before they go back
    #[arg(long)]
    by_rank: bool,
    /// With low-latency: how rows travel back
    #[arg(long, value_enum, default_value = "as-is")]
    back: Payload,
    /// With low-latency: count what every expert gets
    #[arg(long)]
    count: bool,
    /// Most multiprocessors that communication may use [default: the plan's choice]
    #[arg(long, value_name = "SMS")]
    sm_budget: Option<u16>,
    /// What the wire carries out of every GPU at once, in 10^9 bytes in a second, for the floor; across machines, along a rail [default:
    /// what four H200s push to each other; across machines there is no floor without]
    #[arg(long, value_name = "GB")]
    wire_gb_per_s: Option<f64>,
    /// Write a trace of one call there and back to this file, for Perfetto, and a picture of it beside it, with .svg behind the name; of
    /// the last number of tokens
    #[arg(long, value_name = "FILE")]
    trace: Option<PathBuf>,
}

/// How received rows lie.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum Rows {
    /// One after the other, by source
    Dense,
    /// With room for all that a source may send
    BySource,
    /// A row for each expert; sums of a rank's experts go back
    ByExpert,
}

/// How rows travel back.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum Payload {
    /// In bf16
    AsIs,
    /// Cast to fp8, with scales in f32
    Fp8,
    /// Cast to LogFMT-10
    Logfmt10,
}

/// A forced transport.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum Choice {
    /// The plan's
    Auto,
    /// Rows are written to their places at each receiver
    OneSided,
    /// Rows are their own flags
    Pushed,
    /// Rows are written to their places at each receiver, and are their own flags on the way back
    PushedBack,
    /// Rows pass through queues
    Fifo,
    /// All ranks get all rows, and keep their own
    Gather,
    /// Rows are written to their places at each receiver, stay there, and are added up from there
    InPlace,
    /// The same, but they go back as the plan chooses
    InPlaceThere,
    /// Rows are written to their places in a slot; sent and received apart, each expert's packed in its own room
    LowLatency,
}

impl Choice {
    /// As dispatches name it, if it is one of theirs.
    const fn transport(self) -> Option<Transport> {
        match self {
            Self::Auto | Self::LowLatency => None,
            Self::OneSided | Self::PushedBack => Some(Transport::OneSided),
            Self::Pushed => Some(Transport::Pushed),
            Self::Fifo => Some(Transport::Fifo),
            Self::Gather => Some(Transport::Gather),
            Self::InPlace | Self::InPlaceThere => Some(Transport::InPlace),
        }
    }

    /// As combines name it.
    const fn back(self) -> Option<Transport> {
        match self {
            Self::PushedBack => Some(Transport::Pushed),
            Self::InPlaceThere => None,
            _ => self.transport(),
        }
    }
}

impl Moe {
    fn choice(&self) -> Option<Transport> {
        self.transport.transport()
    }

    /// Bytes of a row on its way there, and on its way back.
    fn row_bytes(&self) -> (usize, usize) {
        let blocks = self.hidden.div_ceil(Fp8Cast::BLOCK);
        let (plain, fp8) = (2 * self.hidden, self.hidden + 4 * blocks);
        let there = if self.fp8 { fp8 } else { plain };
        let back = match self.cast_back() {
            None => plain,
            Some(CombineCast::Fp8(_)) => fp8,
            // Ten bits of each column, and two f32 of each block.
            Some(CombineCast::LogFmt10) => self.hidden * 10 / 8 + 8 * blocks,
        };
        (there, back)
    }

    fn rows(&self) -> Rows {
        self.rows.unwrap_or(match self.machines {
            Some(_) => Rows::Dense,
            None => Rows::BySource,
        })
    }

    /// What the wire carries, if that is known.
    fn wire_gb_per_s(&self) -> Option<f64> {
        let usual = self.machines.is_none().then_some(WIRE_GB_PER_S);
        self.wire_gb_per_s.or(usual)
    }

    /// What a rank's process finds in its environment, of so many.
    pub fn prepare(&self, ranks: usize, rank: usize, command: &mut Command) -> Result<()> {
        let how = (self.machines.unwrap_or(1), self.common.shared);
        self.sockets.prepare(how, (ranks, rank), command)
    }

    /// What does not go across machines.
    fn check_machines(&self, ranks: usize) -> Result<()> {
        let Some(machines) = self.machines else {
            ensure!(!self.sockets.sockets, "--sockets goes with --machines");
            return Ok(());
        };
        machines_of(ranks, machines)?;
        let only = "--machines takes rows as they come: --rows dense, and no --transport low-latency or in-place";
        ensure!(
            self.rows() == Rows::Dense
                && !self.in_slots()
                && self.choice() != Some(Transport::InPlace),
            only
        );
        Ok(())
    }

    /// Room for the rows of all.
    fn config(&self, tokens: usize, size: usize) -> CommConfig {
        let bytes = size * (tokens * (2 * self.hidden + 16 * self.k + 64) + 8192);
        // What is pushed takes a word more for every sixteen.
        let pushed = bytes + bytes / 16;
        let config = CommConfig {
            dispatch_bytes: bytes,
            combine_bytes: bytes,
            all_reduce_bytes: pushed.clamp(8 << 20, 512 << 20),
            gather_bytes: 0,
            reduce_scatter_bytes: 0,
            sm_budget: self.sm_budget,
            ..CommConfig::new(ParallelMode::Ep)
        };
        match self.in_slots() {
            true => config.for_low_latency(
                (tokens, self.k),
                self.experts,
                self.hidden,
                DataType::BF16,
                size,
            ),
            false => config,
        }
    }

    fn cast_back(&self) -> Option<CombineCast> {
        match self.back {
            Payload::AsIs => None,
            Payload::Fp8 => Some(CombineCast::Fp8(ScaleFormat::F32)),
            Payload::Logfmt10 => Some(CombineCast::LogFmt10),
        }
    }

    /// How far what comes back as it went may be off, relatively.
    fn tolerance(&self) -> f64 {
        let there = if self.fp8 { 7e-2 } else { 0.0 };
        there + self.tolerance_back()
    }

    fn tolerance_back(&self) -> f64 {
        match self.cast_back() {
            None => 2e-2,
            // Half a step of fp8, and what is rounded besides.
            Some(CombineCast::Fp8(_)) => 8e-2,
            // The same of 32 binary orders of magnitude in 510 steps.
            Some(CombineCast::LogFmt10) => 4e-2,
        }
    }

    /// What comes back of a token.
    fn sum(&self) -> CombineSum {
        match (self.in_slots(), self.rows()) {
            (true, _) if self.by_rank => CombineSum::ExpertByRank,
            (true, _) => CombineSum::Expert,
            (false, Rows::ByExpert) => CombineSum::ExpertByRank,
            (false, Rows::Dense | Rows::BySource) => CombineSum::Rank,
        }
    }

    fn in_slots(&self) -> bool {
        self.transport == Choice::LowLatency
    }

    fn cast(&self) -> Option<Fp8Cast> {
        self.fp8.then_some(Fp8Cast {
            format: ScaleFormat::F32,
            column_major: false,
        })
    }
}

/// Measures all numbers of tokens; gives a table.
pub fn run(options: &Moe, ranks: &Ranks) -> Result<String> {
    ensure!(
        options.k <= options.experts,
        "a token names {} of {} experts",
        options.k,
        options.experts
    );
    ensure!(
        options.wire_gb_per_s.is_none_or(|gb| gb > 0.0),
        "--wire-gb-per-s must be more than 0"
    );
    ensure!(
        options.in_slots() || options.back == Payload::AsIs,
        "--back goes with --transport low-latency"
    );
    options.check_machines(ranks.size())?;
    let mut meta = meta::meta(ranks)?;
    meta["nccl_environment"] = meta::nccl_environment(std::env::vars_os()).into();
    let measured = ranks.run(&options.common, |rank| {
        let one = |&tokens: &usize| {
            let among = Among::join(rank, options, tokens)?;
            Case::new(rank, &among, options, tokens)?.measure()
        };
        options.tokens.iter().map(one).collect::<Result<Vec<_>>>()
    })?;
    if !ranks.speak() {
        return Ok(String::new());
    }
    if let (Some(path), Some(last)) = (&options.trace, measured.last()) {
        let title = format!(
            "{} tokens, {} ranks, {}",
            options.tokens.last().unwrap_or(&0),
            last.spans.len(),
            last.plan
        );
        trace::draw(path, &title, &last.spans)?;
    }
    let all = options.tokens.iter().zip(&measured);
    let rows: Vec<_> = all.map(|(&n, m)| report::row(options, n, m)).collect();
    options.common.write(&meta, &rows)?;
    Ok(report::table(options, &rows))
}
