//! The page of the book that sets our times beside those of peers, and beside aims.

use crate::workspace::Workspace;
use anyhow::{Context, Result};
use clap::Args;
use serde_json::Value;
use std::{fmt::Write, fs, process::ExitCode};

/// Write the page of the book that says how we stand, docs/src/at_a_glance.md, from files of docs/results
///
/// `cargo xtask tidy` refuses a page that is not what this writes.
#[derive(Debug, Args)]
pub struct Glance {}

/// Where it is.
pub const PAGE: &str = "docs/src/at_a_glance.md";

impl Glance {
    pub fn run(self, workspace: &Workspace) -> Result<ExitCode> {
        let read = |path: &str| fs::read_to_string(workspace.root.join(path)).ok();
        let path = workspace.root.join(PAGE);
        fs::write(&path, page(read)?).with_context(|| path.display().to_string())?;
        println!("{}", path.display());
        Ok(ExitCode::SUCCESS)
    }
}

/// Rows of one file.
struct Table {
    heading: &'static str,
    /// Of docs/results, without the ending.
    file: &'static str,
    /// Fields that say what a row is of.
    of: &'static [&'static str],
    /// What else is shown: a heading and a field each. The first is our time.
    shown: &'static [(&'static str, &'static str)],
    /// Fields of peers in the same run, of which the quickest is shown.
    beside: &'static [&'static str],
    /// A file of peers in other runs, and how the names of those begin that are meant.
    others: Option<(&'static str, &'static str)>,
    /// The field that has an aim, and the aim of each row that has one, by the first of what it is of.
    aims: (&'static str, &'static [(&'static str, f64)]),
}

/// Parts of the greater of the product alone and the quicker gather, which overlap is to come near.
const OF_FLOOR: [(&str, f64); 5] = [
    ("512", 1.25),
    ("2048", 1.08),
    ("4096", 1.03),
    ("8192", 1.03),
    ("16384", 1.03),
];

const LINEAR: &[(&str, &str)] = &[("us", "us"), ("of the floor", "of_floor")];
const THERE_AND_BACK: &[(&str, &str)] = &[
    ("us", "total_us"),
    ("there", "dispatch_us"),
    ("back", "combine_us"),
];
const HIERARCHICAL: &[&str] = &["nccl_flat_us", "nccl_ring_us", "nccl_tree_us"];

const TABLES: [Table; 15] = [
    Table {
        heading: "All-reduce",
        file: "all-reduce.h200x4",
        of: &["bytes"],
        shown: &[("us", "us")],
        beside: &["nccl_us"],
        others: Some(("all-reduce-peers.h200x4", "")),
        aims: (
            "us",
            &[
                ("2 KiB", 2.4),
                ("16 KiB", 2.55),
                ("64 KiB", 2.9),
                ("128 KiB", 3.4),
                ("256 KiB", 4.4),
                ("512 KiB", 5.8),
                ("1 MiB", 7.7),
                ("2 MiB", 12.2),
                ("4 MiB", 21.2),
                ("8 MiB", 39.5),
                ("16 MiB", 76.3),
            ],
        ),
    },
    Table {
        heading: "All-reduce of many bytes",
        file: "all-reduce-large.h200x4",
        of: &["bytes"],
        shown: &[("us", "us")],
        beside: &["nccl_us"],
        others: None,
        aims: ("us", &[("64 MiB", 300.0), ("256 MiB", 1180.0)]),
    },
    Table {
        heading: "All-reduce between two",
        file: "all-reduce.h200x2",
        of: &["bytes"],
        shown: &[("us", "us")],
        beside: &["nccl_us"],
        others: None,
        aims: ("us", &[]),
    },
    Table {
        heading: "Rows to experts and back",
        file: "moe.h200x4",
        of: &["tokens"],
        shown: THERE_AND_BACK,
        beside: &["nccl_us"],
        others: Some(("moe-peers.h200x4", "TensorRT")),
        aims: (
            "total_us",
            &[
                ("1", 9.0),
                ("8", 9.5),
                ("32", 14.0),
                ("128", 35.0),
                ("512", 126.0),
                ("1024", 246.0),
                ("4096", 945.0),
            ],
        ),
    },
    Table {
        heading: "Rows to experts and back, within 24 multiprocessors",
        file: "moe-sm-budget-24.h200x4",
        of: &["tokens"],
        shown: THERE_AND_BACK,
        beside: &["nccl_us"],
        others: Some(("moe-peers.h200x4", "DeepEP")),
        aims: ("total_us", &[]),
    },
    Table {
        heading: "Rows to experts and back between two",
        file: "moe.h200x2",
        of: &["tokens"],
        shown: THERE_AND_BACK,
        beside: &["nccl_us"],
        others: None,
        aims: ("total_us", &[]),
    },
    Table {
        heading: "A row for each expert",
        file: "moe-by-expert.h200x4",
        of: &["tokens"],
        shown: THERE_AND_BACK,
        beside: &["nccl_us"],
        others: None,
        aims: ("total_us", &[]),
    },
    Table {
        heading: "Low latency, fp8 there",
        file: "moe-low-latency-fp8.h200x4",
        of: &["tokens"],
        shown: THERE_AND_BACK,
        beside: &[],
        others: None,
        aims: ("total_us", &[("128", 57.0)]),
    },
    Table {
        heading: "Low latency, fp8 there, one row for each rank",
        file: "moe-low-latency-by-rank.h200x4",
        of: &["tokens"],
        shown: THERE_AND_BACK,
        beside: &[],
        others: None,
        aims: ("total_us", &[("128", 31.0)]),
    },
    Table {
        heading: "Gather-linear",
        file: "gather-linear.h200x4",
        of: &["m", "n"],
        shown: LINEAR,
        beside: &["nccl_then_gemm_us"],
        others: None,
        aims: ("of_floor", &OF_FLOOR),
    },
    Table {
        heading: "Its twin, whose sums are scattered",
        file: "reduce-scatter-linear.h200x4",
        of: &["m", "n"],
        shown: LINEAR,
        beside: &["nccl_then_gemm_us"],
        others: None,
        aims: ("of_floor", &OF_FLOOR),
    },
    Table {
        heading: "Gather-linear between two",
        file: "gather-linear.h200x2",
        of: &["m", "n"],
        shown: LINEAR,
        beside: &["nccl_then_gemm_us"],
        others: None,
        aims: ("of_floor", &OF_FLOOR),
    },
    Table {
        heading: "Its twin between two",
        file: "reduce-scatter-linear.h200x2",
        of: &["m", "n"],
        shown: LINEAR,
        beside: &["nccl_then_gemm_us"],
        others: None,
        aims: ("of_floor", &OF_FLOOR),
    },
    Table {
        heading: "All-reduce across two virtual machines of two, NCCL's usual sockets",
        file: "hierarchical.h100x4",
        of: &["bytes"],
        shown: &[("us", "us")],
        beside: HIERARCHICAL,
        others: None,
        aims: ("us", &[]),
    },
    Table {
        heading: "The same with four threads of four sockets",
        file: "hierarchical-sockets.h100x4",
        of: &["bytes"],
        shown: &[("us", "us")],
        beside: HIERARCHICAL,
        others: None,
        aims: ("us", &[]),
    },
];

const INTRODUCTION: &str = "\
<!-- Written by `cargo xtask glance` from docs/results. -->
# At a glance

What files of [results](results.md) say of how we stand: microseconds, slowest rank. *Same run* is the quickest of what ran in it beside ours, NCCL or NCCL and then a
product; *another day* is the quickest of other programs by themselves. Behind each stands what part of it ours is: less than 1 is ahead. *Aims* were set before anything
was built, by what links and launches allow; those of linears are parts of a floor, which is the greater of the product alone and the quicker gather.

A token has 8 of 256 experts, and rows have 7168 elements of bf16; linears have an inner dimension of 8192. NCCL keeps no budget. How figures were taken, and why
some miss their aims, is in [results](results.md).
";

/// The page, from files by their paths.
///
/// # Errors
/// A file that is not there, or lacks what a table shows.
pub fn page(read: impl Fn(&str) -> Option<String>) -> Result<String> {
    let file = |stem: &str| -> Result<Value> {
        let path = format!("docs/results/{stem}.json");
        let text = read(&path).with_context(|| format!("there is no {path}"))?;
        serde_json::from_str(&text).context(path)
    };
    let mut page = INTRODUCTION.to_owned();
    for table in &TABLES {
        let results = file(table.file)?;
        let others = table.others.map(|(stem, _)| file(stem)).transpose()?;
        let told = told(table, &results, others.as_ref());
        write!(page, "\n{}", told.with_context(|| table.file)?)?;
    }
    Ok(page)
}

/// A table and its heading.
fn told(table: &Table, results: &Value, others: Option<&Value>) -> Result<String> {
    let meta = |name: &str| results["meta"][name].as_str().unwrap_or("unknown");
    let mut text = format!(
        "## {}\n\n`{}.json`, {}, commit {}\n\n",
        table.heading,
        table.file,
        meta("date"),
        meta("commit")
    );
    let rows = results["rows"].as_array().context("has no rows")?;
    let (aimed, aims) = table.aims;
    let mut heads = vec![table.of.join(" x ")];
    heads.extend(table.shown.iter().map(|(name, _)| (*name).to_owned()));
    heads.extend((!table.beside.is_empty()).then(|| "same run".to_owned()));
    heads.extend(others.map(|_| "another day".to_owned()));
    heads.extend((!aims.is_empty()).then(|| "aim".to_owned()));
    writeln!(
        text,
        "| {} |\n|{}",
        heads.join(" | "),
        "---|".repeat(heads.len())
    )?;
    for row in rows {
        let number = |field: &str| row[field].as_f64();
        let some = |field| number(field).with_context(|| format!("a row has no {field}"));
        let ours = some(table.shown[0].1)?;
        let mut cells = vec![named(table.of, row)];
        for (_, field) in table.shown {
            cells.push(some(field)?.to_string());
        }
        if !table.beside.is_empty() {
            cells.push(beside(
                ours,
                table.beside.iter().filter_map(|field| number(field)),
            ));
        }
        if let (Some(others), Some((_, of))) = (others, table.others) {
            let same = |other: &&Value| table.of.iter().all(|field| other[field] == row[field]);
            let peers = others["rows"].as_array().into_iter().flatten().find(same);
            let peers = peers
                .and_then(|row| row["peers"].as_object())
                .into_iter()
                .flatten();
            let meant = peers.filter(|(name, _)| name.starts_with(of));
            cells.push(beside(ours, meant.filter_map(|(_, us)| us.as_f64())));
        }
        if !aims.is_empty() {
            let aim = aims
                .iter()
                .find(|(name, _)| *name == named(&table.of[..1], row));
            let what = some(aimed)?;
            cells.push(beside(what, aim.map(|&(_, aim)| aim).into_iter()));
        }
        writeln!(text, "| {} |", cells.join(" | "))?;
    }
    Ok(text)
}

/// The least of some times, and what part of it ours is; nothing where there are none.
fn beside(ours: f64, times: impl Iterator<Item = f64>) -> String {
    match times.min_by(f64::total_cmp) {
        Some(least) => format!("{least} ({:.2})", ours / least),
        None => String::new(),
    }
}

/// What a row is of, as people read it.
fn named(of: &[&str], row: &Value) -> String {
    let one = |field: &&str| {
        let n = row[field].as_u64().unwrap_or_default();
        match *field {
            "bytes" if n.is_multiple_of(1 << 20) => format!("{} MiB", n >> 20),
            "bytes" => format!("{} KiB", n >> 10),
            _ => n.to_string(),
        }
    };
    of.iter().map(one).collect::<Vec<_>>().join(" x ")
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    const ALL_REDUCE: Table = Table {
        heading: "Sums",
        file: "sums",
        of: &["bytes"],
        shown: &[("us", "us")],
        beside: &["nccl_us", "ring_us"],
        others: Some(("peers", "v")),
        aims: ("us", &[("2 KiB", 2.0)]),
    };

    #[test]
    fn a_row_says_what_part_of_others_and_of_its_aim_it_is() {
        let results = json!({
            "meta": {"date": "2026-11-28", "commit": "abcdef0"},
            "rows": [
                {"bytes": 2048, "us": 2.5, "nccl_us": 10.0, "ring_us": 5.0},
                {"bytes": 1 << 20, "us": 8.0, "nccl_us": 4},
            ],
        });
        let peers = json!({"rows": [{"bytes": 2048, "peers": {"vllm": 5, "trt": 1}}]});
        assert_eq!(
            told(&ALL_REDUCE, &results, Some(&peers)).unwrap(),
            "## Sums\n\n`sums.json`, 2026-11-28, commit abcdef0\n\n\
             | bytes | us | same run | another day | aim |\n|---|---|---|---|---|\n\
             | 2 KiB | 2.5 | 5 (0.50) | 5 (0.50) | 2 (1.25) |\n\
             | 1 MiB | 8 | 4 (2.00) |  |  |\n"
        );
    }

    #[test]
    fn what_is_not_there_is_named() {
        let why = page(|_| None).unwrap_err().to_string();
        assert_eq!(why, "there is no docs/results/all-reduce.h200x4.json");
        let results = json!({"rows": [{"bytes": 2048}]});
        let why = told(&ALL_REDUCE, &results, None).unwrap_err().to_string();
        assert_eq!(why, "a row has no us");
    }
}
