//! Gather-linear and its twin, beside what they are made of.

mod case;
pub mod crossover;
mod expected;
mod preferred;

use crate::{
    Common,
    factor::Scheme,
    meta,
    ranks::Ranks,
    rounded,
    sample::Times,
    shape::{self, Mode, Model, Shape},
    sizes,
    trace::{self, Spans},
};
use anyhow::{Result, ensure};
use brigade::DataType;
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
    /// Layers of models, in place of shapes; several go one after the other
    #[arg(long, value_enum, num_args = 1.., conflicts_with = "shapes")]
    model: Vec<Model>,
    /// Rows of all ranks to begin with: every layer of the shapes with each number of rows from here on
    #[arg(short, long, value_name = "ROWS")]
    begin: Option<usize>,
    /// Rows to end with
    #[arg(
        short,
        long,
        value_name = "ROWS",
        default_value_t = 16_384,
        requires = "begin"
    )]
    end: usize,
    /// From one number of rows to the next
    #[arg(short, long, default_value_t = 2, requires = "begin")]
    factor: usize,
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
    /// Adapters of this rank over all rows
    #[arg(long, value_name = "RANK", default_value_t = 0)]
    lora: usize,
    /// How many adapters there are, each over as many rows
    #[arg(long, value_name = "N", default_value_t = 2, requires = "lora")]
    adapters: usize,
    /// Multiply rows so that their bits do not depend on how many there are, or on the mode: our calls, and not the product that they stand
    /// beside
    #[arg(long)]
    batch_invariant: bool,
}

impl Linears {
    /// What is measured, on so many ranks.
    fn shapes(&self, which: Which, ranks: usize) -> Result<Vec<Shape>> {
        let scatters = which == Which::Scatter;
        let models = match &self.model[..] {
            [] => &[Model::Six],
            named => named,
        };
        let shapes = match &self.shapes[..] {
            [] => models
                .iter()
                .flat_map(|model| model.shapes(scatters, ranks))
                .collect(),
            named => named.to_vec(),
        };
        match self.begin {
            Some(begin) => shape::swept(&shapes, &sizes::steps(begin, self.end, self.factor)?),
            None => Ok(shapes),
        }
    }

    /// How many adapters there are.
    fn adapters(&self) -> usize {
        if self.lora > 0 { self.adapters } else { 0 }
    }

    /// Bytes that travel, as the collective alone counts them: rows of all ranks as they come out, or for all ranks as they go in.
    fn bytes(&self, which: Which, shape: Shape) -> usize {
        match which {
            Which::Gather => shape.m * shape.k * self.scheme.bytes(),
            Which::Scatter => shape.m * shape.n * DataType::BF16.bytes(),
        }
    }
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
    ensure!(
        !options.resident || which == Which::Gather,
        "--resident goes with gather-linear: its twin's rows lie nowhere but with the caller"
    );
    ensure!(options.adapters > 0, "--adapters: there must be one");
    let shapes = options.shapes(which, ranks.size())?;
    let meta = meta::meta(ranks)?;
    let mut text = format!(
        "{:>6} {:>6} {:>6} {:>6} {:>9} {:>9} {:>9} {:>9} {:>9} {:>9} {:>7} {:>7} {:>7} {:>7} {:>8} {:>9} {:>9}  plan\n",
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
        "/nccl",
        "/plain",
        "/chunked",
        "alg GB/s",
        "bus GB/s"
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
        let ratio = |to: &str| over(times, to).unwrap_or(f64::NAN);
        // 10^9 bytes in a second are 1000 in a microsecond.
        let alg = options.bytes(which, *shape) as f64 / ours / 1e3;
        let bus = alg * (ranks.size() as f64 - 1.0) / ranks.size() as f64;
        text += &format!(
            "{:>6} {:>6} {:>6} {:>6} {:>9.1} {:>9.1} {:>9.1} {:>9.1} {:>9.1} {:>9.1} {:>7.3} {:>7.3} {:>7.3} {:>7.3} {:>8.3} {alg:>9.1} {bus:>9.1}  {plan}\n",
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
            ratio("off"),
            ratio("nccl_and_gemm"),
            ratio("plain"),
            ratio("chunked"),
        );
        let mut row = row(*shape, options, times, plan, ours / floor);
        (row["alg_gb_per_s"], row["bus_gb_per_s"]) = (rounded(alg), rounded(bus));
        rows.push(row);
    }
    options.common.write(&meta, &rows)?;
    Ok(text)
}

/// Median of our times over those of a variant, round by round, if it was measured.
fn over(times: &[Times], name: &str) -> Option<f64> {
    let of = |name: &str| times.iter().find(|t| t.name == name);
    Some(of("ours")?.over(of(name)?))
}

/// Variants that do the same as ours, or the same without adapters, and what our times over theirs are called.
const BESIDE: [(&str, &str); 4] = [
    ("off", "of_off"),
    ("nccl_and_gemm", "of_nccl_then_gemm"),
    ("plain", "of_plain"),
    ("chunked", "of_chunked"),
];

fn row(shape: Shape, options: &Linears, times: &[Times], plan: &str, of_floor: f64) -> Value {
    let Shape { m, k, n } = shape;
    let mut row = json!({
        "m": m, "k": k, "n": n, "dtype": "bf16", "scheme": options.scheme.name(), "lora": options.lora, "adapters": options.adapters(),
        "graph": options.common.graph, "resident": options.resident,
        "batch_invariant": options.batch_invariant, "plan": plan,
        "of_floor": thousandths(of_floor),
    });
    for (name, key) in BESIDE {
        if let Some(ratio) = over(times, name) {
            row[key] = thousandths(ratio);
        }
    }
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

fn thousandths(ratio: f64) -> Value {
    json!((ratio * 1000.0).round() / 1000.0)
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::Parser;

    #[derive(Parser)]
    struct Line {
        #[command(flatten)]
        linears: Linears,
    }

    fn read(words: &str) -> Result<Linears, clap::Error> {
        let words = std::iter::once("gather-linear").chain(words.split_whitespace());
        Line::try_parse_from(words).map(|line| line.linears)
    }

    #[test]
    fn rows_are_swept_over_layers() {
        let shapes = |words: &str, which| read(words).unwrap().shapes(which, 4).unwrap();
        assert_eq!(shapes("", Which::Gather), Model::Six.shapes(false, 4));
        let both = shapes("--model six qwen3-235b", Which::Scatter);
        assert_eq!(both.len(), 6 + 3);
        let swept = shapes("--shapes 5,8,16 7,8,16 -b 16 -e 128 -f 4", Which::Gather);
        assert_eq!(swept.iter().map(|s| s.m).collect::<Vec<_>>(), [16, 64]);
        let llama = shapes("--model llama-3-70b -b 1024", Which::Gather);
        assert_eq!((llama.len(), llama[9].m), (10, 16_384));
        assert!(read("-e 128").is_err() && read("--model six --shapes 1,2,3").is_err());
        assert!(
            read("-b 64 -e 32")
                .unwrap()
                .shapes(Which::Gather, 4)
                .is_err()
        );
    }

    #[test]
    fn adapters_have_a_rank() {
        let adapters = |words: &str| read(words).unwrap().adapters();
        assert_eq!([adapters(""), adapters("--lora 16")], [0, 2]);
        assert_eq!(adapters("--lora 16 --adapters 32"), 32);
        assert!(read("--adapters 32").is_err());
    }

    #[test]
    fn ratios_are_medians_of_pairs() {
        let times = |name, samples: &[f64]| Times::new(name, samples.to_vec());
        let all = [
            times("ours", &[10.0, 11.0, 12.0]),
            times("off", &[20.0, 10.0, 8.0]),
            times("plain", &[8.0, 10.0, 12.0]),
        ];
        let shape = Shape { m: 8, k: 16, n: 32 };
        let row = row(shape, &read("--lora 16").unwrap(), &all, "tiles", 1.5);
        // Medians are 11 and 10, and pairs 0.5, 1.1 and 1.5; likewise 1.25, 1.1 and 1.
        assert_eq!(
            (&row["of_off"], &row["of_plain"]),
            (&json!(1.1), &json!(1.1))
        );
        assert_eq!(
            (&row["off_us"], &row["plain_us"]),
            (&json!(10.0), &json!(10.0))
        );
        assert_eq!(row["samples"]["plain"], json!([8.0, 10.0, 12.0]));
        assert!(row.get("of_chunked").is_none() && row.get("of_nccl_then_gemm").is_none());
    }

    #[test]
    fn bytes_are_those_of_the_collective_alone() {
        let (shape, int8) = (Shape { m: 8, k: 16, n: 32 }, read("--scheme int8").unwrap());
        let of =
            |options: &Linears| [Which::Gather, Which::Scatter].map(|w| options.bytes(w, shape));
        assert_eq!(of(&read("").unwrap()), [256, 512]);
        assert_eq!(of(&int8), [128, 512]);
    }
}
