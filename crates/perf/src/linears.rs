//! Gather-linear and its twin, beside what they are made of.

mod case;
pub mod crossover;
mod expected;

use crate::{
    Common,
    factor::Scheme,
    meta,
    ranks::Ranks,
    rounded,
    sample::Times,
    shape::{Mode, Shape, usual},
    trace::{self, Spans},
};
use anyhow::{Result, ensure};
use case::{Case, Measured};
use clap::{Args, ValueEnum};
use serde_json::{Value, json};
use std::path::{Path, PathBuf};

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Which {
    /// Gather the rows of all ranks, and multiply them
    #[value(name = "gather-linear")]
    Gather,
    /// Multiply, and give every rank its rows of the sum
    #[value(name = "reduce-scatter-linear")]
    Scatter,
}

/// What is measured.
#[derive(Clone, Debug, Args)]
pub struct Linears {
    #[command(flatten)]
    pub common: Common,
    /// Shapes m,k,n: rows of all ranks, inner dimension and columns of one rank [default: six of large models]
    #[arg(long, value_name = "M,K,N", num_args = 1..)]
    shapes: Vec<Shape>,
    /// How rows and weights are stored; quantized before anything is timed
    #[arg(long, value_enum, default_value_t = Scheme::Bf16)]
    scheme: Scheme,
    /// Mode: auto, off, ring, pull, tiles, or chunked:2 for two pieces
    #[arg(long, default_value = "auto")]
    mode: Mode,
    /// Own rows lie in the user buffer already, where whoever made them has put them
    #[arg(long)]
    resident: bool,
    /// Multiprocessors that are kept from products [default: the device's choice]
    #[arg(long, value_name = "SMS")]
    sm_budget: Option<u16>,
    /// Write a trace of one call to this file, for Perfetto, and a picture of it beside it, with .svg behind the name; of the
    /// last shape
    #[arg(long, value_name = "FILE")]
    trace: Option<PathBuf>,
    /// Adapters of this rank, two of them over half of the rows each
    #[arg(long, value_name = "RANK", default_value_t = 0)]
    lora: usize,
}

/// Writes the trace and the picture.
fn draw(path: &Path, shape: Shape, plan: &str, spans: &[Spans]) -> Result<()> {
    let Shape { m, k, n } = shape;
    let title = format!("{m} x {k} x {n}, {} ranks, {plan}", spans.len());
    trace::draw(path, &title, spans)
}

/// Measures all shapes; gives a table.
pub fn run(options: &Linears, which: Which, ranks: &Ranks) -> Result<String> {
    ensure!(
        !options.resident || options.scheme == Scheme::Bf16,
        "--resident goes with bf16 alone: space in the user buffer is handed out for floats"
    );
    let shapes = if options.shapes.is_empty() {
        usual(ranks.size())
    } else {
        options.shapes.clone()
    };
    let meta = meta::meta(ranks)?;
    let mut text = format!(
        "{:>6} {:>6} {:>6} {:>6} {:>9} {:>9} {:>9} {:>9} {:>9} {:>9} {:>7} {:>7} {:>7}  plan\n",
        "scheme",
        "m",
        "k",
        "n",
        "ours us",
        "off us",
        "gemm us",
        "gather us",
        "nccl us",
        "nccl+gemm",
        "/floor",
        "/off",
        "/nccl"
    );
    let measured = ranks.run(&options.common, |rank| {
        shapes
            .iter()
            .map(|&shape| Case::new(rank, options, which, shape)?.run(which))
            .collect::<Result<Vec<_>>>()
    })?;
    if !ranks.speak() {
        return Ok(String::new());
    }
    let mut rows = Vec::new();
    if let (Some(path), Some(shape), Some(last)) = (&options.trace, shapes.last(), measured.last())
    {
        draw(path, *shape, &last.plan, &last.spans)?;
    }
    for (shape, Measured { times, plan, .. }) in shapes.iter().zip(&measured) {
        let of = |name: &str| times.iter().find(|t| t.name == name).map(|t| t.median);
        let (ours, gemm) = (
            of("ours").unwrap_or(f64::NAN),
            of("gemm").unwrap_or(f64::NAN),
        );
        let collective = [of("gather"), of("nccl")]
            .into_iter()
            .flatten()
            .fold(f64::INFINITY, f64::min);
        let floor = if collective.is_finite() {
            gemm.max(collective)
        } else {
            gemm
        };
        let ratio = |to: Option<f64>| to.map_or(f64::NAN, |t| ours / t);
        text += &format!(
            "{:>6} {:>6} {:>6} {:>6} {:>9.1} {:>9.1} {:>9.1} {:>9.1} {:>9.1} {:>9.1} {:>7.3} {:>7.3} {:>7.3}  {plan}\n",
            options.scheme.name(),
            shape.m,
            shape.k,
            shape.n,
            ours,
            of("off").unwrap_or(f64::NAN),
            gemm,
            of("gather").unwrap_or(f64::NAN),
            of("nccl").unwrap_or(f64::NAN),
            of("nccl_and_gemm").unwrap_or(f64::NAN),
            ours / floor,
            ratio(of("off")),
            ratio(of("nccl_and_gemm")),
        );
        rows.push(row(*shape, options, times, plan, ours / floor));
    }
    options.common.write(&meta, &rows)?;
    Ok(text)
}

fn row(shape: Shape, options: &Linears, times: &[Times], plan: &str, of_floor: f64) -> Value {
    let Shape { m, k, n } = shape;
    let mut row = json!({
        "m": m, "k": k, "n": n, "dtype": "bf16", "scheme": options.scheme.name(), "lora": options.lora,
        "graph": options.common.graph, "resident": options.resident, "plan": plan,
        "of_floor": (of_floor * 1000.0).round() / 1000.0,
    });
    for t in times {
        let name = match t.name {
            "ours" => "us".to_owned(),
            "nccl_and_gemm" => "nccl_then_gemm_us".to_owned(),
            other => format!("{other}_us"),
        };
        row[&name] = rounded(t.median);
        if t.name == "ours" {
            row["us_p99"] = rounded(t.p99);
        }
        row["samples"][t.name] = t.samples.iter().map(|&s| rounded(s)).collect();
    }
    row
}
