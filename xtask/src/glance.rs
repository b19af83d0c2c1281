//! The page of the book that sets our times beside those of peers, and beside aims.

use crate::workspace::Workspace;
use anyhow::{Context, Result, ensure};
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
    /// What else is to be known of it.
    note: &'static str,
    /// Fields that say what a row is of.
    of: &'static [&'static str],
    /// What is shown: a heading and a field each. The first is our time.
    shown: &'static [(&'static str, &'static str)],
    /// Whom ours was measured beside.
    beside: &'static [Peer],
    /// A file of peers in other runs, and how the names of those begin that are meant.
    others: Option<(&'static str, &'static str)>,
    /// The field that has an aim, and the aim of each row that has one, by the first of what it is of.
    aims: (&'static str, &'static [(&'static str, f64)]),
}

/// A peer, where its time stands in a row, and our time beside it.
struct Peer {
    name: &'static str,
    at: &'static str,
    ours: &'static str,
}

const fn peer(name: &'static str, at: &'static str, ours: &'static str) -> Peer {
    Peer { name, at, ours }
}

const NCCL: Peer = peer("NCCL", "/nccl_us", "/us");
const SUMS: &[Peer] = &[
    NCCL,
    peer("torch one-shot", "/peers/torch_one_shot_us", "/us"),
    peer("torch two-shot", "/peers/torch_two_shot_us", "/us"),
];
const MANY_SUMS: &[Peer] = &[NCCL, peer("torch's NCCL", "/peers/torch_nccl_us", "/us")];
const EXPERTS: &[Peer] = &[peer("NCCL", "/nccl_us", "/total_us")];
const GATHERED: Peer = peer("NCCL, then the product", "/nccl_then_gemm_us", "/us");
const SCATTERED: Peer = peer("the product, then NCCL", "/nccl_then_gemm_us", "/us");
const FUSED: Peer = peer("torch fused", "/peers/torch_fused_us", "/us");
const MACHINES: &[Peer] = &[
    peer("NCCL", "/nccl_flat_us", "/us"),
    peer("NCCL's rings", "/nccl_ring_us", "/us_beside_ring"),
    peer("NCCL's trees", "/nccl_tree_us", "/us_beside_tree"),
];

/// Parts of the greater of the product alone and the quicker gather, which overlap is to come near.
const OF_FLOOR: [(&str, f64); 5] = [
    ("512", 1.25),
    ("2048", 1.08),
    ("4096", 1.03),
    ("8192", 1.03),
    ("16384", 1.03),
];

const US: &[(&str, &str)] = &[("us", "us")];
const LINEAR: &[(&str, &str)] = &[("us", "us"), ("of the floor", "of_floor")];
const THERE_AND_BACK: &[(&str, &str)] = &[
    ("us", "total_us"),
    ("there", "dispatch_us"),
    ("back", "combine_us"),
];

const NO_AIMS: (&str, &[(&str, f64)]) = ("us", &[]);
const EAGER: &str = "torch's fused call ran eager.";
const WHOLE_ROWS: &str = "NCCL sends whole rows of bf16 to ranks, and not to experts.";

/// What tables of a kind have in common.
const SUM: Table = Table {
    heading: "",
    file: "",
    note: "",
    of: &["bytes"],
    shown: US,
    beside: SUMS,
    others: None,
    aims: NO_AIMS,
};
const ROWS: Table = Table {
    of: &["tokens"],
    shown: THERE_AND_BACK,
    beside: EXPERTS,
    ..SUM
};
const PRODUCT: Table = Table {
    of: &["m", "n"],
    shown: LINEAR,
    beside: &[GATHERED],
    aims: ("of_floor", &OF_FLOOR),
    ..SUM
};

const TABLES: &[Table] = &[
    Table {
        heading: "All-reduce",
        file: "all-reduce.h200x4",
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
        ..SUM
    },
    Table {
        heading: "All-reduce of many bytes",
        file: "all-reduce-large.h200x4",
        beside: MANY_SUMS,
        aims: ("us", &[("64 MiB", 300.0), ("256 MiB", 1180.0)]),
        ..SUM
    },
    Table {
        heading: "All-reduce between two",
        file: "all-reduce.h200x2",
        ..SUM
    },
    Table {
        heading: "Rows to experts and back",
        file: "moe.h200x4",
        others: Some(("moe-peers.h200x4", "")),
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
        ..ROWS
    },
    Table {
        heading: "Rows to experts and back, within 24 multiprocessors",
        file: "moe-sm-budget-24.h200x4",
        note: "All rows are pushed. NCCL keeps no budget; of the others only DeepEP has one, the same.",
        others: Some(("moe-peers.h200x4", "DeepEP")),
        ..ROWS
    },
    Table {
        heading: "Rows to experts and back between two",
        file: "moe.h200x2",
        ..ROWS
    },
    Table {
        heading: "A row for each expert",
        file: "moe-by-expert.h200x4",
        note: WHOLE_ROWS,
        ..ROWS
    },
    Table {
        heading: "A row for each expert, between two",
        file: "moe-by-expert.h200x2",
        note: WHOLE_ROWS,
        ..ROWS
    },
    Table {
        heading: "Low latency, fp8 there",
        file: "moe-low-latency-fp8.h200x4",
        note: WHOLE_ROWS,
        aims: ("total_us", &[("128", 57.0)]),
        ..ROWS
    },
    Table {
        heading: "Low latency, fp8 there, one row for each rank",
        file: "moe-low-latency-by-rank.h200x4",
        note: WHOLE_ROWS,
        aims: ("total_us", &[("128", 31.0)]),
        ..ROWS
    },
    Table {
        heading: "Gather-linear",
        file: "gather-linear.h200x4",
        note: EAGER,
        beside: &[GATHERED, FUSED],
        ..PRODUCT
    },
    Table {
        heading: "Its twin, whose sums are scattered",
        file: "reduce-scatter-linear.h200x4",
        note: EAGER,
        beside: &[SCATTERED, FUSED],
        ..PRODUCT
    },
    Table {
        heading: "Gather-linear between two",
        file: "gather-linear.h200x2",
        ..PRODUCT
    },
    Table {
        heading: "Its twin between two",
        file: "reduce-scatter-linear.h200x2",
        beside: &[SCATTERED],
        ..PRODUCT
    },
    Table {
        heading: "All-reduce across two virtual machines of two, NCCL's usual sockets",
        file: "hierarchical.h100x4",
        note: ITS_OWN_RUN,
        beside: MACHINES,
        ..SUM
    },
    Table {
        heading: "The same with four threads of four sockets",
        file: "hierarchical-sockets.h100x4",
        note: ITS_OWN_RUN,
        beside: MACHINES,
        ..SUM
    },
];

const ITS_OWN_RUN: &str = "Ranks are processes, and nothing is captured. NCCL as it is, its rings and its trees each ran beside ours in a run of their own, and parts are of what ours took there.";

const INTRODUCTION: &str = "\
<!-- Written by `cargo xtask glance` from docs/results. -->
# At a glance

What some files of [results](results.md) say of how we stand: medians of the slowest rank, in microseconds, in CUDA graphs unless a table says otherwise. *Same run* is
whoever comes nearest of those that ran in the same run or right behind it on the same GPUs: NCCL, or torch, which has its own; *another day* is the quickest of other
programs by themselves: vLLM, TensorRT-LLM's kernels as FlashInfer has them, DeepEP. Behind each stands what part of it ours is: less than 1 is ahead.

*Aims* are what we set ourselves. Those of linears are parts of a floor, which is the greater of the product alone and of the quicker gather, or for sums that are scattered NCCL's
reduce-scatter. A token has 8 of 256 experts, and rows have 7168 elements of bf16; *back* is what there and back takes more than *there* alone. Linears have an inner
dimension of 8192. How figures were taken, and why some miss their aims, is in [results](results.md).
";

/// The page, from files by their paths.
///
/// # Errors
/// A file that is not there, or lacks what a table shows: all that it shows of ours, and of each peer and aim a row at least.
pub fn page(read: impl Fn(&str) -> Option<String>) -> Result<String> {
    let file = |stem: &str| -> Result<Value> {
        let path = format!("docs/results/{stem}.json");
        let text = read(&path).with_context(|| format!("cannot read {path}"))?;
        serde_json::from_str(&text).context(path)
    };
    let mut page = INTRODUCTION.to_owned();
    for table in TABLES {
        let results = file(table.file)?;
        let others = table.others.map(|(stem, _)| file(stem)).transpose()?;
        let told = told(table, &results, others.as_ref());
        write!(page, "\n{}", told.with_context(|| table.file)?)?;
    }
    Ok(page)
}

/// A table and its heading.
fn told(table: &Table, results: &Value, others: Option<&Value>) -> Result<String> {
    let rows = results["rows"].as_array().context("has no rows")?;
    check(table, rows, others)?;
    let (aimed, aims) = table.aims;
    let mut heads = vec![table.of.join(" x ")];
    heads.extend(table.shown.iter().map(|(name, _)| (*name).to_owned()));
    heads.extend((!table.beside.is_empty()).then(|| "same run".to_owned()));
    heads.extend(others.map(|_| "another day".to_owned()));
    heads.extend((!aims.is_empty()).then(|| "aim".to_owned()));
    let mut text = heading(table, &results["meta"])?;
    writeln!(
        text,
        "| {} |\n|{}",
        heads.join(" | "),
        "---|".repeat(heads.len())
    )?;
    for row in rows {
        let some = |field: &str| {
            let number = row[field].as_f64();
            number.with_context(|| format!("a row has no {field}"))
        };
        let ours = some(table.shown[0].1)?;
        let mut cells = vec![named(table.of, row)?];
        for (_, field) in table.shown {
            cells.push(some(field)?.to_string());
        }
        let number = |at: &str| row.pointer(at).and_then(Value::as_f64);
        let ran = |peer: &Peer| Some((peer.name, number(peer.at)?, number(peer.ours)?));
        if !table.beside.is_empty() {
            cells.push(nearest(table.beside.iter().filter_map(ran)));
        }
        if let Some(others) = others {
            let peers = peers_of(table, row, others);
            cells.push(nearest(
                peers.into_iter().map(|(name, us)| (name, us, ours)),
            ));
        }
        if !aims.is_empty() {
            let name = named(&table.of[..1], row)?;
            let aim = aims.iter().find(|(of, _)| *of == name);
            let what = some(aimed)?;
            cells.push(aim.map_or(String::new(), |(_, aim)| {
                format!("{aim} ({:.2})", what / aim)
            }));
        }
        writeln!(text, "| {} |", cells.join(" | "))?;
    }
    Ok(text)
}

/// Whether there is something of all that is to be shown beside ours.
fn check(table: &Table, rows: &[Value], others: Option<&Value>) -> Result<()> {
    let any = |at: &str| {
        rows.iter()
            .any(|row| row.pointer(at).is_some_and(Value::is_number))
    };
    for at in table.beside.iter().flat_map(|peer| [peer.at, peer.ours]) {
        ensure!(any(at), "no row has {at}");
    }
    for (name, _) in table.aims.1 {
        let is_it = |row| named(&table.of[..1], row).is_ok_and(|of| of == *name);
        ensure!(
            rows.iter().any(is_it),
            "no row is of {name}, which has an aim"
        );
    }
    if let (Some(others), Some((stem, of))) = (others, table.others) {
        let some = rows
            .iter()
            .any(|row| !peers_of(table, row, others).is_empty());
        ensure!(
            some,
            "{stem} has no times of peers whose names begin with {of:?}"
        );
    }
    Ok(())
}

/// Times of peers in another run of the same.
fn peers_of<'a>(table: &Table, row: &Value, others: &'a Value) -> Vec<(&'a str, f64)> {
    let of = table.others.map_or("", |(_, of)| of);
    let same = |other: &&Value| table.of.iter().all(|field| other[field] == row[field]);
    let there = others["rows"].as_array().into_iter().flatten().find(same);
    let peers = there.and_then(|row| row["peers"].as_object()).into_iter();
    let peers = peers.flatten().filter(|(name, _)| name.starts_with(of));
    peers
        .filter_map(|(name, us)| Some((name.as_str(), us.as_f64()?)))
        .collect()
}

fn heading(table: &Table, meta: &Value) -> Result<String> {
    let missing = |name: &str| format!("meta has no {name}");
    let of = |name: &str| meta[name].as_str().with_context(|| missing(name));
    let ranks = meta["ranks"].as_u64().with_context(|| missing("ranks"))?;
    let note = if table.note.is_empty() { "" } else { " " };
    Ok(format!(
        "## {}\n\n{ranks} x {}, {}, commit {} (`{}.json`).{note}{}\n\n",
        table.heading,
        of("gpu")?,
        of("date")?,
        of("commit")?,
        table.file,
        table.note
    ))
}

/// Of peers, their times and ours, whoever ours is the greatest part of; nothing where there are none.
fn nearest<'a>(peers: impl Iterator<Item = (&'a str, f64, f64)>) -> String {
    let part = |&(_, theirs, ours): &(&str, f64, f64)| ours / theirs;
    let nearest = peers.max_by(|a, b| part(a).total_cmp(&part(b)));
    nearest.map_or(String::new(), |peer| {
        format!("{} {} ({:.2})", peer.0, peer.1, part(&peer))
    })
}

/// What a row is of, as people read it.
fn named(of: &[&str], row: &Value) -> Result<String> {
    let one = |field: &&str| {
        let n = row[*field].as_u64();
        let n = n.with_context(|| format!("a row has no {field}"))?;
        Ok(match *field {
            "bytes" if n.is_multiple_of(1 << 20) => format!("{} MiB", n >> 20),
            "bytes" => format!("{} KiB", n >> 10),
            _ => n.to_string(),
        })
    };
    let names: Result<Vec<_>> = of.iter().map(one).collect();
    Ok(names?.join(" x "))
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    const TABLE: Table = Table {
        heading: "Sums",
        file: "sums",
        beside: &[NCCL, peer("rings", "/ring_us", "/us_beside_ring")],
        others: Some(("peers", "v")),
        aims: ("us", &[("2 KiB", 2.0)]),
        ..SUM
    };

    fn results() -> Value {
        json!({
            "meta": {"date": "2026-11-28", "commit": "abcdef0", "gpu": "a GPU", "ranks": 4},
            "rows": [
                {"bytes": 2048, "us": 2.5, "nccl_us": 10.0, "ring_us": 5.0, "us_beside_ring": 3.0},
                {"bytes": 1 << 20, "us": 8.0, "nccl_us": 4.0},
            ],
        })
    }

    fn peers() -> Value {
        json!({"rows": [{"bytes": 2048, "peers": {"vllm": 5.0, "very slow": 6.0, "trt": 1.0}}]})
    }

    #[test]
    fn a_row_says_what_part_of_others_and_of_its_aim_it_is() {
        assert_eq!(
            told(&TABLE, &results(), Some(&peers())).unwrap(),
            "## Sums\n\n4 x a GPU, 2026-11-28, commit abcdef0 (`sums.json`).\n\n\
             | bytes | us | same run | another day | aim |\n|---|---|---|---|---|\n\
             | 2 KiB | 2.5 | rings 5 (0.60) | vllm 5 (0.50) | 2 (1.25) |\n\
             | 1 MiB | 8 | NCCL 4 (2.00) |  |  |\n"
        );
    }

    #[test]
    fn what_is_not_there_is_named() {
        let why = page(|_| None).unwrap_err().to_string();
        assert_eq!(why, "cannot read docs/results/all-reduce.h200x4.json");
        let why = |results: Value, peers: Value| {
            let told = told(&TABLE, &results, Some(&peers));
            told.unwrap_err().to_string()
        };
        let without = |field: &str| {
            let mut results = results();
            let row = results["rows"][0].as_object_mut().unwrap();
            row.remove(field);
            results
        };
        assert_eq!(why(without("us"), peers()), "a row has no us");
        assert_eq!(why(without("ring_us"), peers()), "no row has /ring_us");
        assert_eq!(
            why(without("us_beside_ring"), peers()),
            "no row has /us_beside_ring"
        );
        assert_eq!(
            why(without("bytes"), peers()),
            "no row is of 2 KiB, which has an aim"
        );
        let mut nowhere = results();
        nowhere["meta"]["gpu"] = Value::Null;
        assert_eq!(why(nowhere, peers()), "meta has no gpu");
        assert_eq!(
            why(results(), json!({})),
            "peers has no times of peers whose names begin with \"v\""
        );
    }
}
