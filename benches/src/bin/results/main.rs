//! Measures the host device, and writes what it found as JSON. `cargo xtask bench results` builds and runs it.
#![allow(clippy::print_stderr, clippy::print_stdout)]

mod demo;
mod experts;
mod gather_linear;
mod gemm;
mod hierarchical;
mod meta;
mod phases;
mod reset;
mod trace;

use anyhow::{Context, Result};
use clap::{Parser, ValueEnum};
use serde_json::{Value, json};
use std::{fs, path::PathBuf};

/// Measures the host device, and writes what it found as JSON.
#[derive(Parser)]
#[command(name = "results")]
struct Cli {
    /// The folder to write to, if not docs/results
    #[arg(long, value_name = "DIR")]
    out: Option<PathBuf>,
    /// What to measure; everything if none is named
    #[arg(long, value_enum)]
    only: Vec<What>,
    /// So few rounds that the figures mean nothing, to see that it runs; not for the folder of results
    #[arg(long, requires = "out")]
    smoke: bool,
    /// Measure nothing: write when each phase of each slice ran, of one all-reduce across virtual machines, to this file for Perfetto,
    /// and a picture of it beside it, with .svg behind the name
    #[arg(long, value_name = "FILE", conflicts_with_all = ["only", "out", "smoke"])]
    trace: Option<PathBuf>,
}

#[derive(Clone, Copy, PartialEq, Eq, ValueEnum)]
enum What {
    Gemm,
    GatherLinear,
    Demo,
    Reset,
    Hierarchical,
    HierarchicalCosts,
    HierarchicalExperts,
}

impl What {
    /// The file's name without its end.
    fn name(self) -> &'static str {
        match self {
            Self::Gemm => "gemm.host",
            Self::GatherLinear => "gather-linear.host",
            Self::Demo => "demo.host",
            Self::Reset => "reset.host",
            Self::Hierarchical => "hierarchical.host",
            Self::HierarchicalCosts => "hierarchical-costs.host",
            Self::HierarchicalExperts => "hierarchical-experts.host",
        }
    }

    fn measure(self, rounds: Rounds) -> Result<Vec<Value>> {
        match self {
            Self::Gemm => gemm::measure(rounds),
            Self::GatherLinear => gather_linear::measure(rounds),
            Self::Demo => demo::measure(rounds),
            Self::Reset => reset::measure(rounds),
            Self::Hierarchical => hierarchical::measure(rounds),
            Self::HierarchicalCosts => hierarchical::measure_costs(rounds),
            Self::HierarchicalExperts => experts::measure(rounds),
        }
    }
}

/// How often things are done.
#[derive(Clone, Copy)]
struct Rounds {
    /// Times that two ways are compared.
    pairs: usize,
    /// About how long one of those times is to take.
    each_us: f64,
    /// Times that the model is asked, and for how many tokens.
    runs: usize,
    tokens: usize,
    /// Times that a group is stopped and reset, and groups.
    resets: usize,
    groups: usize,
}

const FULL: Rounds = Rounds {
    pairs: 20,
    each_us: 50_000.0,
    runs: 5,
    tokens: 64,
    resets: 200,
    groups: 9,
};

const SMOKE: Rounds = Rounds {
    pairs: 2,
    each_us: 100.0,
    runs: 1,
    tokens: 3,
    resets: 3,
    groups: 1,
};

impl Rounds {
    /// Calls that together take about as long as one time is to take.
    fn calls(self, call_us: f64) -> usize {
        ((self.each_us / call_us) as usize).clamp(1, 10_000)
    }
}

/// Two digits behind the point are more than the figures are good for.
fn rounded(x: f64) -> f64 {
    (x * 100.0).round() / 100.0
}

/// As [`rounded`], for ratios.
fn ratio(x: f64) -> f64 {
    (x * 1000.0).round() / 1000.0
}

fn main() -> Result<()> {
    let cli = Cli::parse();
    let rounds = if cli.smoke { SMOKE } else { FULL };
    if reset::is_rank() {
        println!("{}", reset::run_as_rank(rounds)?);
        return Ok(());
    }
    if let Some(path) = cli.trace {
        return trace::draw(&path);
    }
    let out = cli.out.unwrap_or_else(|| "docs/results".into());
    fs::create_dir_all(&out).with_context(|| format!("cannot make {}", out.display()))?;
    let mut what = cli.only;
    if what.is_empty() {
        what = What::value_variants().to_vec();
    }
    // Before anything is written, which may be in this checkout.
    let meta = meta::meta()?;
    for what in what {
        let rows = what.measure(rounds)?;
        let path = out.join(format!("{}.json", what.name()));
        fs::write(&path, text(&meta, &rows)?)
            .with_context(|| format!("cannot write {}", path.display()))?;
        eprintln!("{}: {} rows", path.display(), rows.len());
    }
    Ok(())
}

/// One row a line, so that a difference between two measurements can be read.
fn text(meta: &Value, rows: &[Value]) -> Result<String> {
    let rows: Vec<String> = rows.iter().map(|row| format!("    {row}")).collect();
    let text = format!(
        "{{\n  \"meta\": {meta},\n  \"rows\": [\n{}\n  ]\n}}\n",
        rows.join(",\n")
    );
    let back: Value = serde_json::from_str(&text)?;
    anyhow::ensure!(
        back["meta"] == *meta && back["rows"] != json!([]),
        "no rows"
    );
    Ok(text)
}
