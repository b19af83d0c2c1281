//! The command that runs a layer of experts, and what it has to show.

use crate::{Device, processes, report::peak_rss_bytes};
use anyhow::{Result, ensure};
use brigade::{Bootstrap, group::TcpGroup};
use brigade_demo::moe::{
    Agreement, MoeShape, Options, Outcome, RandomExperts, Sum, run, run_as_rank,
};
use clap::{Args, ValueEnum};
use serde_json::{Value, json};
use std::{
    fmt::Write as _,
    io::Write,
    process::ExitCode,
    time::{Duration, Instant},
};

#[derive(Args)]
pub struct Moe {
    /// Whose dimensions the layer has
    #[arg(long, value_enum, default_value_t = Shape::Small)]
    shape: Shape,
    /// Take only so many of its experts
    #[arg(long, value_name = "N")]
    experts: Option<usize>,
    /// How many ranks to spread the experts over
    #[arg(long, value_name = "N", default_value_t = 2)]
    ranks: usize,
    /// Tokens: a number for every rank, or one for each, as in 3,0,5
    #[arg(long, value_name = "N", value_delimiter = ',', default_value = "4")]
    tokens: Vec<usize>,
    /// Which device carries it out; on cuda each rank takes a GPU of its own, where there are enough
    #[arg(long, value_enum, default_value_t = Device::Auto)]
    device: Device,
    /// What travels back: a row of each expert, or the sum of each rank's
    #[arg(long, value_enum, default_value_t = What::Rank)]
    sum: What,
    /// Cast rows to fp8 on the way to their experts
    #[arg(long)]
    fp8: bool,
    /// Timed passes, after one that loads the weights; all must give the same bits
    #[arg(long, value_name = "N", default_value_t = 3)]
    repeats: usize,
    /// Makes weights and tokens
    #[arg(long, value_name = "N", default_value_t = 1)]
    seed: u64,
    /// Make each rank a process instead of a thread. Where the environment says which rank this one is, as torchrun sets it, no others are
    /// started
    #[arg(long)]
    processes: bool,
    /// Print one JSON object on the last line
    #[arg(long)]
    json: bool,
    /// Seconds after which a rank that waits for another gives up
    #[arg(long, value_name = "SECONDS", default_value_t = 60)]
    deadline: u64,
}

#[derive(Clone, Copy, ValueEnum)]
enum Shape {
    /// 8 experts of 4096 x 14336, 2 for a token
    Mixtral,
    /// 128 experts of 2048 x 768, 8 for a token
    Qwen3,
    /// 256 experts of 7168 x 2048, 8 for a token
    Deepseek,
    /// 7 experts of 64 x 96, 3 for a token
    Small,
}

impl Shape {
    fn shape(self) -> MoeShape {
        match self {
            Self::Mixtral => MoeShape::mixtral(),
            Self::Qwen3 => MoeShape::qwen3(),
            Self::Deepseek => MoeShape::deepseek(),
            Self::Small => MoeShape::small(),
        }
    }
}

#[derive(Clone, Copy, ValueEnum)]
enum What {
    Expert,
    Rank,
}

impl Moe {
    pub fn run(self) -> Result<ExitCode> {
        if !self.processes {
            return self.layer(None);
        }
        if processes::is_rank() {
            return self.layer(Some(&processes::join()?));
        }
        processes::start(self.ranks, &[])
    }

    fn options(&self, ranks: usize) -> Result<Options> {
        let given = self.tokens.len();
        ensure!(
            given == 1 || given == ranks,
            "--tokens has {given} numbers, wanted 1, or {ranks} as there are ranks"
        );
        Ok(Options {
            tokens: (0..ranks).map(|r| self.tokens[r % given]).collect(),
            sum: match self.sum {
                What::Expert => Sum::Expert,
                What::Rank => Sum::Rank,
            },
            fp8: self.fp8,
            repeats: self.repeats,
            device: self.device.into(),
            deadline: Duration::from_secs(self.deadline),
        })
    }

    fn source(&self) -> Result<RandomExperts> {
        let mut shape = self.shape.shape();
        let most = shape.experts;
        shape.experts = self.experts.unwrap_or(most);
        ensure!(
            shape.experts <= most,
            "--experts is {}, and {} has {most}",
            shape.experts,
            shape.name
        );
        Ok(RandomExperts {
            shape,
            seed: self.seed,
        })
    }

    /// With all ranks, or as the one of a group.
    fn layer(self, group: Option<&TcpGroup>) -> Result<ExitCode> {
        let source = self.source()?;
        let options = self.options(group.map_or(self.ranks, Bootstrap::size))?;
        let outcome = match group {
            None => run(&source, &options)?,
            Some(group) => run_as_rank(&source, &options, group)?,
        };
        if group.is_some_and(|group| group.rank() > 0) {
            return Ok(ExitCode::SUCCESS);
        }
        let began = Instant::now();
        let agreement = outcome.compare(&source);
        let shown = Shown {
            all_experts: self.shape.shape().experts,
            seed: self.seed,
            outcome: &outcome,
            agreement: &agreement,
            compared_in: began.elapsed(),
        };
        let mut out = std::io::stdout();
        if self.json {
            writeln!(out, "{}", shown.json())?;
        } else {
            write!(out, "{}", shown.text())?;
        }
        agreement.verdict()?;
        Ok(ExitCode::SUCCESS)
    }
}

/// What a run has to show.
struct Shown<'a> {
    /// Of the model, if only some were taken.
    all_experts: usize,
    seed: u64,
    outcome: &'a Outcome,
    agreement: &'a Agreement,
    compared_in: Duration,
}

fn ms(time: Duration) -> f64 {
    time.as_secs_f64() * 1e3
}

impl Shown<'_> {
    fn json(&self) -> Value {
        let (o, a) = (self.outcome, self.agreement);
        let [router, dispatch, experts, combine] = o.medians().map(ms);
        let weight_bytes: Vec<u64> = o.ranks.iter().map(|r| r.weight_bytes).collect();
        json!({
            "shape": o.shape.name,
            "hidden": o.shape.hidden,
            "feed_forward": o.shape.feed_forward,
            "experts": o.shape.experts,
            "experts_of_model": self.all_experts,
            "experts_used": o.experts_used(),
            "top_k": o.shape.top_k,
            "seed": self.seed,
            "ranks": o.ranks.len(),
            "tokens_per_rank": o.options.tokens,
            "device": o.ranks[0].device,
            "sum": self.sum(),
            "fp8": o.options.fp8,
            "repeats": o.options.repeats,
            "router_ms": router,
            "dispatch_ms": dispatch,
            "experts_ms": experts,
            "combine_ms": combine,
            "rows_per_rank": o.rows_per_rank(),
            "weight_bytes_per_rank": weight_bytes,
            "peak_rss_bytes": peak_rss_bytes(),
            "dispatch_plan": o.ranks[0].plans[0],
            "combine_plan": o.ranks[0].plans[1],
            "compared": a.compared,
            "unclear": a.unclear,
            "diff": a.diff,
            "worst_diff": a.worst_diff,
            "max_error": a.max_error,
            "bound": a.bound,
        })
    }

    fn sum(&self) -> &'static str {
        match self.outcome.options.sum {
            Sum::Expert => "expert",
            Sum::Rank => "rank",
        }
    }

    fn text(&self) -> String {
        let (o, a) = (self.outcome, self.agreement);
        let [router, dispatch, experts, combine] = o.medians().map(ms);
        let rows = o.rows_per_rank();
        let weights = o.ranks.iter().map(|r| r.weight_bytes).sum();
        let experts_of = match o.shape.experts == self.all_experts {
            true => o.shape.experts.to_string(),
            false => format!("{} of its {}", o.shape.experts, self.all_experts),
        };
        let mut lines: Vec<(&str, String)> = vec![
            (
                "layer",
                format!(
                    "{}: {experts_of} experts of {} x {}, {} for a token",
                    o.shape.name, o.shape.hidden, o.shape.feed_forward, o.shape.top_k
                ),
            ),
            (
                "ranks",
                format!("{} on {}", o.ranks.len(), o.ranks[0].device),
            ),
            ("tokens", list(&o.options.tokens)),
            ("rows", format!("{} at each rank's experts", list(&rows))),
            (
                "weights",
                format!(
                    "{}, of the {} experts that were chosen; peak memory of this process {}",
                    size(weights),
                    o.experts_used(),
                    size(peak_rss_bytes().unwrap_or(0))
                ),
            ),
        ];
        let [there, back] = &o.ranks[0].plans;
        lines.extend([
            ("router", format!("{router:.3} ms")),
            ("dispatch", format!("{dispatch:.3} ms  {there}")),
            ("experts", format!("{experts:.3} ms")),
            ("combine", format!("{combine:.3} ms  {back}")),
            (
                "f64",
                format!(
                    "{} tokens compared in {:.1} s, {} unclear: diff {:.1e}, of a token at most {:.1e}, bound {:.1e}; greatest error {:.1e}",
                    a.compared,
                    self.compared_in.as_secs_f64(),
                    a.unclear,
                    a.diff,
                    a.worst_diff,
                    a.bound,
                    a.max_error
                ),
            ),
            (
                "bits",
                format!("equal in {} passes", o.options.repeats + 1),
            ),
        ]);
        let mut text = String::new();
        for (name, value) in lines {
            let _ = writeln!(text, "{name:<9} {value}");
        }
        text
    }
}

fn size(bytes: u64) -> String {
    match bytes as f64 {
        bytes if bytes < 1e9 => format!("{:.1} MB", bytes / 1e6),
        bytes => format!("{:.1} GB", bytes / 1e9),
    }
}

/// Numbers side by side; the least and the greatest if they are many.
fn list(numbers: &[usize]) -> String {
    const MOST: usize = 8;
    let (least, most) = (numbers.iter().min(), numbers.iter().max());
    match (least, most) {
        (Some(least), Some(most)) if numbers.len() > MOST => format!("from {least} to {most}"),
        _ => {
            let words: Vec<String> = numbers.iter().map(ToString::to_string).collect();
            words.join(", ")
        }
    }
}
