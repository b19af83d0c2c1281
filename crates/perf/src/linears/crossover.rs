//! From how large a product on overlap pays: overlap off against a mode, in turn, over a range of layers and row counts.

use super::{Case, Linears, Which};
use crate::{
    Common,
    factor::Scheme,
    fit, meta,
    ranks::Ranks,
    rounded,
    sample::Times,
    shape::{Layer, Mode, Shape},
};
use anyhow::{Result, ensure};
use brigade::{
    OverlapMode,
    plan::crossover::{Entry, Least, Overlapped, RowType, Source},
};
use clap::Args;
use serde_json::{Value, json};
use std::path::PathBuf;

/// Rows of one rank, if none are named.
const ROWS: [usize; 12] = [16, 32, 64, 96, 128, 192, 256, 384, 512, 768, 1024, 2048];

/// Layers, if none are named: inner dimension, and columns of all ranks.
const LAYERS: [[usize; 2]; 7] = [
    [8192, 2048],
    [8192, 5120],
    [8192, 10_240],
    [8192, 20_480],
    [8192, 28_672],
    [2048, 8192],
    [2048, 28_672],
];

/// What is measured.
#[derive(Clone, Debug, Args)]
pub struct Options {
    #[command(flatten)]
    pub common: Common,
    /// Of which operation
    #[arg(long, value_enum, default_value_t = Which::Gather)]
    operation: Which,
    /// How rows and weights are stored; quantized before anything is timed
    #[arg(long, value_enum, default_value_t = Scheme::Bf16)]
    scheme: Scheme,
    /// Layers k,n: inner dimension and columns of one rank [default: seven, from 2048,4096 to 8192,14336 on two ranks]
    #[arg(long, value_name = "K,N", num_args = 1..)]
    layers: Vec<Layer>,
    /// Rows of one rank [default: twelve counts from 16 to 2048]
    #[arg(long, value_name = "ROWS", num_args = 1..)]
    rows: Vec<usize>,
    /// Mode that is compared with off: auto for the one that plans have where overlap pays, ring, pull, tiles, or chunked:2 for two pieces
    #[arg(long, default_value = "auto")]
    mode: Mode,
    /// Write the entry to this file
    #[arg(long, value_name = "FILE")]
    entry: Option<PathBuf>,
}

/// What was measured of one number of rows.
#[derive(Clone, Copy, Debug, PartialEq)]
struct Point {
    shape: Shape,
    /// Median of the time with overlap over that of its pair without.
    ratio: f64,
}

/// What a figure may count, as plans do: the first that no other gains more than.
const COUNTED: [fn(Shape) -> Least; 2] = [
    |Shape { m, n, .. }| Least::Outputs(m * n),
    |Shape { m, k, n }| Least::Multiplications(m * n * k),
];

/// The smallest product from which on overlap costs least, over all of these.
fn least(points: &[Point]) -> Option<Least> {
    let step = |counted: fn(Shape) -> Least| {
        let each = points.iter().map(|p| fit::Point {
            size: counted(p.shape).count(),
            small: Some(1.0),
            large: Some(p.ratio),
        });
        let step = fit::step(&each.collect::<Vec<_>>())?;
        let mut all = points.iter().map(|p| counted(p.shape));
        Some((step, all.find(|least| least.count() == step.from)?))
    };
    let steps = COUNTED.into_iter().filter_map(step);
    let best = steps.reduce(|best, other| match other.0.is_ahead_of(&best.0) {
        true => other,
        false => best,
    });
    best.map(|(_, least)| least)
}

fn point(shape: Shape, [off, overlap]: &[Times; 2]) -> Point {
    Point {
        shape,
        ratio: overlap.over(off),
    }
}

/// Measures all layers; gives a table, and what it comes to.
pub fn run(options: &Options, ranks: &Ranks) -> Result<String> {
    ensure!(
        options.mode.0 != Some(OverlapMode::Off),
        "--mode: off is what all others are compared with"
    );
    ensure!(
        !options.common.with_nccl(),
        "NCCL has no part in a crossover: leave --vs out"
    );
    let size = ranks.size();
    ensure!(size > 1, "there must be two ranks");
    let layers = match &options.layers[..] {
        [] => LAYERS.map(|[k, n]| Layer { k, n: n / size }).to_vec(),
        named => named.to_vec(),
    };
    let rows = match &options.rows[..] {
        [] => ROWS.to_vec(),
        named => named.to_vec(),
    };
    ensure!(!rows.contains(&0), "there must be a row on each rank");
    let shape = |Layer { k, n }: Layer, rows: usize| Shape {
        m: rows * size,
        k,
        n,
    };
    let linears = Linears {
        common: options.common.clone(),
        shapes: Vec::new(),
        model: Vec::new(),
        begin: None,
        end: 0,
        factor: 2,
        scheme: options.scheme,
        mode: options.mode,
        resident: false,
        sm_budget: None,
        trace: None,
        lora: 0,
        adapters: 1,
        batch_invariant: false,
    };
    let (which, scheme) = (options.operation, options.scheme);
    let meta = meta::meta(ranks)?;
    let measured = ranks.run(&options.common, |rank| {
        let one = |shape| Case::new(rank, &linears, which, shape)?.pairs(which);
        let of = |&layer: &Layer| rows.iter().map(|&r| one(shape(layer, r))).collect();
        layers.iter().map(of).collect::<Result<Vec<Vec<_>>>>()
    })?;
    if !ranks.speak() {
        return Ok(String::new());
    }
    let mut text = format!(
        "{:>6} {:>6} {:>6} {:>6} {:>12} {:>9} {:>10} {:>7}  mode\n",
        "scheme", "m", "k", "n", "outputs", "off us", "overlap us", "/off"
    );
    let (mut json_rows, mut all, mut verdicts) = (Vec::new(), Vec::new(), Vec::new());
    let mut modes: Vec<String> = Vec::new();
    for (&layer, measured) in layers.iter().zip(&measured) {
        let mut points = Vec::new();
        for (&r, (mode, times)) in rows.iter().zip(measured) {
            let (shape, mode) = (shape(layer, r), mode.to_string());
            let point = point(shape, times);
            text += &line(shape, scheme, point, (times, &mode));
            json_rows.push(row(shape, options, point, (times, &mode)));
            if !modes.contains(&mode) {
                modes.push(mode);
            }
            points.push(point);
        }
        verdicts.push(least(&points));
        all.extend(points);
    }
    for (Layer { k, n }, verdict) in layers.iter().zip(&verdicts) {
        text += &format!("{k},{n}: overlap pays {}\n", told(*verdict));
    }
    let all = least(&all);
    text += &format!("all layers: overlap pays {}\n", told(all));
    options.common.write(&meta, &json_rows)?;
    if let Some(path) = &options.entry {
        let entry = entry(options, &meta, size, all, (&layers, &rows, &modes))?;
        crate::write_entry(path, &entry)?;
    }
    Ok(text)
}

fn told(least: Option<Least>) -> String {
    match least {
        Some(least) => format!("from {least} on"),
        None => "at no size that was measured".to_owned(),
    }
}

/// Times with overlap off and with it, and the mode.
type Pair<'a> = (&'a [Times; 2], &'a str);

fn line(shape: Shape, scheme: Scheme, point: Point, ([off, overlap], mode): Pair<'_>) -> String {
    format!(
        "{:>6} {:>6} {:>6} {:>6} {:>12} {:>9.1} {:>10.1} {:>7.3}  {mode}\n",
        scheme.name(),
        shape.m,
        shape.k,
        shape.n,
        shape.m * shape.n,
        off.median,
        overlap.median,
        point.ratio
    )
}

fn row(shape: Shape, options: &Options, point: Point, ([off, overlap], mode): Pair<'_>) -> Value {
    let Shape { m, k, n } = shape;
    let samples = |times: &Times| -> Value { times.samples.iter().map(|&s| rounded(s)).collect() };
    json!({
        "m": m, "k": k, "n": n, "scheme": options.scheme.name(), "graph": options.common.graph,
        "mode": mode, "outputs": m * n, "off_us": rounded(off.median), "us": rounded(overlap.median),
        "of_off": (point.ratio * 1000.0).round() / 1000.0,
        "samples": { "off": samples(off), "overlap": samples(overlap) },
    })
}

/// What was measured, as `tables/crossovers.json` of brigade-plan has it.
fn entry(
    options: &Options,
    meta: &Value,
    ranks: usize,
    least: Option<Least>,
    (layers, rows, modes): (&[Layer], &[usize], &[String]),
) -> Result<Entry> {
    let text = |name: &str| meta[name].as_str().unwrap_or("unknown").to_owned();
    let layers: Vec<_> = layers
        .iter()
        .map(|Layer { k, n }| format!("{k},{n}"))
        .collect();
    let (first, last) = (rows.iter().min(), rows.iter().max());
    let note = format!(
        "{} and off; layers {}; {} to {} rows of one rank; median of {} pairs",
        modes.join(", "),
        layers.join(" "),
        first.unwrap_or(&0),
        last.unwrap_or(&0),
        options.common.rounds
    );
    Ok(Entry {
        gpu: text("gpu"),
        links: serde_json::from_value(meta["link"].clone())?,
        ranks: Some(ranks),
        operation: match options.operation {
            Which::Gather => Overlapped::GatherLinear,
            Which::Scatter => Overlapped::ReduceScatterLinear,
        },
        dtype: match options.scheme {
            Scheme::Bf16 => RowType::Bf16,
            Scheme::Int8 => RowType::Int8,
            Scheme::Fp8 => RowType::Fp8,
        },
        least,
        source: Source {
            command: text("command"),
            date: text("date"),
            commit: text("commit"),
            note: Some(note),
        },
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use brigade::plan::{
        Entries,
        crossover::{Figures, Gpus, Links},
    };
    use clap::Parser;

    #[derive(Parser)]
    struct Line {
        #[command(flatten)]
        options: Options,
    }

    fn options(words: &str) -> Options {
        let words = std::iter::once("crossover").chain(words.split_whitespace());
        Line::try_parse_from(words).unwrap().options
    }

    fn points(all: &[([usize; 3], f64)]) -> Vec<Point> {
        let point = |&([m, k, n], ratio): &([usize; 3], f64)| Point {
            shape: Shape { m, k, n },
            ratio,
        };
        all.iter().map(point).collect()
    }

    #[test]
    fn all_layers_have_one_figure() {
        let of = |all: &[(usize, f64)]| {
            let all: Vec<_> = all.iter().map(|&(n, ratio)| ([1, 7, n], ratio)).collect();
            least(&points(&all)).map(|least| match least {
                Least::Outputs(outputs) => outputs,
                other => panic!("{other}"),
            })
        };
        assert_eq!(of(&[(1, 1.2), (2, 0.9), (4, 0.8)]), Some(2));
        // In whatever order they were measured; 2 gains in one layer what it loses in another, and a bit.
        assert_eq!(
            of(&[(4, 0.8), (1, 1.3), (2, 1.1), (2, 0.8), (8, 0.7)]),
            Some(2)
        );
        assert_eq!(of(&[(1, 0.9), (2, 0.9)]), Some(1));
        assert_eq!(of(&[(1, 1.5), (2, 1.1)]), None);
        // No more than chance.
        assert_eq!(of(&[(1, 0.99)]), None);
        assert_eq!(of(&[(1, f64::NAN)]), None);
        assert_eq!(of(&[]), None);
    }

    /// Of what a figure may count, that counts which tells best where overlap pays.
    #[test]
    fn what_tells_best_is_counted() {
        let small = [([4, 2, 8], 1.2), ([8, 2, 8], 1.1), ([16, 2, 8], 1.3)];
        let large = [([1, 64, 8], 1.1), ([2, 64, 8], 0.8), ([4, 64, 8], 0.7)];
        let of = |all: &[([usize; 3], f64)]| least(&points(all));
        let both: Vec<_> = small.into_iter().chain(large).collect();
        assert_eq!(of(&both), Some(Least::Multiplications(2 * 64 * 8)));
        // With as many elements as before, and whatever the inner dimension.
        let swapped = large.map(|([m, _, n], ratio)| ([m * 16, 2, n], ratio));
        let both: Vec<_> = small[..1].iter().copied().chain(swapped).collect();
        assert_eq!(of(&both), Some(Least::Outputs(2 * 16 * 8)));
    }

    /// The figures of brigade-plan's table are what the files say that their commands wrote.
    #[test]
    fn the_table_has_what_files_say() {
        let folder = concat!(env!("CARGO_MANIFEST_DIR"), "/../../docs/results");
        let figures = Figures::embedded().unwrap();
        assert!(!figures.entries().is_empty());
        for entry in figures.entries() {
            let (_, name) = entry.source.command.split_once("--json ").unwrap();
            let name = name.split(' ').next().unwrap();
            let text = std::fs::read_to_string(format!("{folder}/{name}")).unwrap();
            let file: Value = serde_json::from_str(&text).unwrap();
            for (field, here) in [
                ("command", &entry.source.command),
                ("date", &entry.source.date),
                ("commit", &entry.source.commit),
                ("gpu", &entry.gpu),
            ] {
                assert_eq!(file["meta"][field], here.as_str(), "{name}");
            }
            let number = |row: &Value, field| row[field].as_u64().unwrap() as usize;
            let times = |row: &Value, field| {
                let samples = row["samples"][field].as_array().unwrap();
                let samples: Vec<_> = samples.iter().map(|s| s.as_f64().unwrap()).collect();
                times(&samples)
            };
            let rows = file["rows"].as_array().unwrap().iter().map(|row| {
                let [m, k, n] = ["m", "k", "n"].map(|field| number(row, field));
                point(
                    Shape { m, k, n },
                    &["off", "overlap"].map(|f| times(row, f)),
                )
            });
            assert_eq!(entry.least, least(&rows.collect::<Vec<_>>()), "{name}");
        }
    }

    fn times(samples: &[f64]) -> Times {
        Times {
            name: "",
            median: 0.0,
            p99: 0.0,
            samples: samples.to_vec(),
        }
    }

    #[test]
    fn pairs_are_told_by_the_median_of_their_ratios() {
        // Medians of 11 and 10, and pairs of 0.9, 1.1 and 2.
        let times = [times(&[10.0, 11.0, 12.0]), times(&[20.0, 9.9, 13.2])];
        let shape = Shape { m: 8, k: 16, n: 32 };
        let point = point(shape, &times);
        assert!((point.ratio - 1.1).abs() < 1e-9);
    }

    /// What is written can be put into the file of brigade-plan as it is, and given to a device.
    #[test]
    fn an_entry_is_one_of_the_table() {
        let options = options("--operation reduce-scatter-linear --scheme fp8 -n 7");
        let meta = json!({
            "gpu": "NVIDIA H200", "link": "nvlink", "date": "2026-01-02", "commit": "0123456789ab",
            "command": "brigade-perf crossover",
        });
        let layers = [Layer { k: 8, n: 16 }];
        let entry = entry(
            &options,
            &meta,
            4,
            Some(Least::Outputs(1000)),
            (&layers, &[1, 2], &["chunked(1)".into()]),
        )
        .unwrap();
        let text = format!(
            r#"{{"default": {{"least": {{"outputs": 1}}, "source": {{"note": ""}}}}, "entries": [{}]}}"#,
            serde_json::to_string(&entry).unwrap()
        );
        let figures = Figures::read(&text).unwrap();
        Entries::read(&serde_json::to_string(&entry).unwrap()).unwrap();
        assert_eq!(figures.entries(), [entry]);
        let gpus = Gpus {
            model: Some("NVIDIA H200".into()),
            links: Links::Nvlink,
            ranks: 4,
        };
        let found = figures.of(&gpus, Overlapped::ReduceScatterLinear);
        assert_eq!(found.fp8.least, Some(Least::Outputs(1000)));
        assert_eq!(found.bf16.least, Some(Least::Outputs(1)));
        assert_eq!(
            text.matches(
                "chunked(1) and off; layers 8,16; 1 to 2 rows of one rank; median of 7 pairs"
            )
            .count(),
            1
        );
    }
}
