//! What was measured, as a table and as rows of a file.

use super::{
    Asked,
    case::{Measured, Ours},
    names,
    which::{Which, gb_per_s},
};
use crate::sample::Times;
use brigade::{Launch, Plan};
use serde_json::{Value, json};

/// One line of the table, and one row of the file: a choice at a size.
struct Row<'a> {
    asked: &'a Asked<'a>,
    ranks: usize,
    measured: &'a Measured,
    ours: &'a Ours,
}

/// The table of all sizes.
pub fn table(asked: &Asked<'_>, ranks: usize, measured: &[Measured]) -> String {
    let mut text = Row::heading(asked);
    for row in rows(asked, ranks, measured) {
        text += &row.line();
    }
    text
}

/// The rows of a file.
pub fn json(asked: &Asked<'_>, ranks: usize, measured: &[Measured]) -> Vec<Value> {
    let all = rows(asked, ranks, measured);
    all.map(|row| row.json()).collect()
}

fn rows<'a>(
    asked: &'a Asked<'a>,
    ranks: usize,
    measured: &'a [Measured],
) -> impl Iterator<Item = Row<'a>> {
    measured.iter().flat_map(move |measured| {
        measured.ours.iter().map(move |ours| Row {
            asked,
            ranks,
            measured,
            ours,
        })
    })
}

/// Blocks that a plan launches, where it says so; no more multiprocessors than that have a part in it.
pub fn sms(plan: &Plan) -> Option<u16> {
    match plan {
        Plan::AllReduce {
            launch: Launch { blocks, .. },
            ..
        } if *blocks > 0 => Some(*blocks),
        Plan::Copy { pushed, .. } | Plan::ReduceScatter { pushed, .. } => {
            pushed.map(|launch| launch.blocks)
        }
        _ => None,
    }
}

/// A cell of the table; a dash for what was not measured.
fn cell(x: Option<f64>, decimals: usize) -> String {
    x.map_or_else(|| format!("{:>9}", "-"), |x| format!("{x:>9.decimals$}"))
}

/// With two decimals: small collectives take few microseconds.
fn hundredths(x: f64) -> Value {
    json!((x * 100.0).round() / 100.0)
}

fn samples(times: &Times) -> Value {
    times.samples.iter().map(|&us| hundredths(us)).collect()
}

impl Row<'_> {
    fn heading(asked: &Asked<'_>) -> String {
        let mut text = format!(
            "{:>10} {:>5} {:>13} {:>9} {:>9} {:>9} {:>9} {:>4}",
            "bytes", "dtype", "algorithm", "us", "p99 us", "alg GB/s", "bus GB/s", "sms"
        );
        if asked.options.common.with_nccl() {
            text += &format!(" {:>9} {:>9} {:>9}", "nccl us", "p99 us", "/nccl");
        }
        if asked.chain {
            text += &format!(
                " {:>9} {:>9} {:>9} {:>9}",
                "chain us", "fused us", "alone us", "with nccl"
            );
        }
        text + "  plan\n"
    }

    fn bytes(&self) -> usize {
        self.measured.extent.all * self.asked.options.dtype.bytes()
    }

    /// What was chosen: where there is no choice, nothing.
    fn algorithm(&self) -> Option<String> {
        match &self.ours.plan {
            Ok(Plan::AllReduce { algorithm, .. }) => Some(names::algorithm(*algorithm)),
            _ => None,
        }
    }

    fn sms(&self) -> Option<u16> {
        self.ours.plan.as_ref().ok().and_then(sms)
    }

    fn plan(&self) -> String {
        match &self.ours.plan {
            Ok(plan) => plan.to_string(),
            Err(reason) => reason.to_string(),
        }
    }

    fn line(&self) -> String {
        let times = self.ours.times.as_ref();
        let us = times.map(|t| t.median);
        let rate = us.map(|us| gb_per_s(self.bytes(), us));
        let factor = self.asked.which.bus_factor(self.ranks);
        let name = self.algorithm();
        let mut text = format!(
            "{:>10} {:>5} {:>13} {} {} {} {} {:>4}",
            self.bytes(),
            names::name(self.asked.options.dtype),
            name.as_deref().unwrap_or(self.ours.choice.name),
            cell(us, 2),
            cell(times.map(|t| t.p99), 2),
            cell(rate, 1),
            cell(rate.map(|r| r * factor), 1),
            self.sms().map_or_else(|| "-".into(), |n| n.to_string()),
        );
        if self.asked.options.common.with_nccl() {
            let nccl = self.measured.nccl.as_ref();
            let ratio = us.zip(nccl).map(|(us, nccl)| us / nccl.median);
            let (median, p99) = (nccl.map(|t| t.median), nccl.map(|t| t.p99));
            text += &format!(" {} {} {}", cell(median, 2), cell(p99, 2), cell(ratio, 3));
        }
        if self.asked.chain {
            let chains = [
                &self.ours.chain,
                &self.ours.chain_fused,
                &self.measured.chain_alone,
                &self.measured.chain_nccl,
            ];
            for chain in chains {
                text += &format!(" {}", cell(chain.as_ref().map(|t| t.median), 2));
            }
        }
        text + "  " + &self.plan() + "\n"
    }

    fn json(&self) -> Value {
        let options = &self.asked.options;
        let mut row = json!({
            "bytes": self.bytes(), "dtype": names::name(options.dtype),
            "graph": options.common.graph, "in_place": self.asked.in_place,
        });
        if matches!(self.asked.which, Which::AllReduce | Which::ReduceScatter) {
            row["op"] = names::name(self.asked.op).into();
        }
        if self.asked.which == Which::AllReduce {
            row["choice"] = self.ours.choice.name.into();
            row["algorithm"] = self.algorithm().into();
        }
        row["plan"] = self.plan().into();
        row["sms"] = self.sms().into();
        if let Some(times) = &self.ours.times {
            let rate = gb_per_s(self.bytes(), times.median);
            row["us"] = hundredths(times.median);
            row["us_p99"] = hundredths(times.p99);
            row["alg_gb_per_s"] = hundredths(rate);
            row["bus_gb_per_s"] = hundredths(rate * self.asked.which.bus_factor(self.ranks));
            row["samples"]["ours"] = samples(times);
        }
        if let Some(nccl) = &self.measured.nccl {
            row["nccl_us"] = hundredths(nccl.median);
            row["nccl_us_p99"] = hundredths(nccl.p99);
            if let Some(ours) = &self.ours.times {
                row["of_nccl"] = json!((ours.median / nccl.median * 1000.0).round() / 1000.0);
            }
            row["samples"]["nccl"] = samples(nccl);
        }
        let chains = [
            ("us", "chain", &self.ours.chain),
            ("fused_us", "chain_fused", &self.ours.chain_fused),
            ("alone_us", "chain_alone", &self.measured.chain_alone),
            ("nccl_us", "chain_nccl", &self.measured.chain_nccl),
        ];
        for (name, of, times) in chains {
            if let Some(times) = times {
                row["chain"][name] = hundredths(times.median);
                row["samples"][of] = samples(times);
            }
        }
        row
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::collectives::{AllReduce, names::Choice, which::Extent};
    use brigade::{AllReduceAlgorithm, Reason, SumOrder};
    use clap::{Parser, ValueEnum};

    #[derive(Parser)]
    struct Line {
        #[command(flatten)]
        all_reduce: AllReduce,
    }

    fn times(samples: [f64; 3]) -> Times {
        Times {
            name: "any",
            median: samples[1],
            p99: samples[2],
            samples: samples.to_vec(),
        }
    }

    /// A megabyte in 20 us by one algorithm, and not at all by another.
    fn measured() -> Measured {
        let choice = |name| Choice::from_str(name, false).unwrap();
        let ran = Plan::AllReduce {
            algorithm: AllReduceAlgorithm::TwoShot,
            order: SumOrder::Flat,
            piece_elements: 1 << 18,
            launch: Launch {
                blocks: 24,
                ..Launch::default()
            },
        };
        let refused = Reason::new("too-much", "it does not fit", "take less");
        Measured {
            extent: Extent {
                all: 500_000,
                share: 500_000,
            },
            ours: vec![
                Ours {
                    choice: choice("auto"),
                    plan: Ok(ran),
                    times: Some(times([19.0, 20.0, 21.234])),
                    chain: Some(times([39.0, 40.0, 41.0])),
                    chain_fused: Some(times([34.0, 35.0, 36.0])),
                },
                Ours {
                    choice: choice("one-shot-push"),
                    plan: Err(refused),
                    times: None,
                    chain: None,
                    chain_fused: None,
                },
            ],
            nccl: Some(times([30.0, 40.0, 50.0])),
            chain_alone: Some(times([21.0, 22.0, 23.0])),
            chain_nccl: None,
        }
    }

    fn told<R>(words: &[&str], tell: impl Fn(&Asked<'_>, &[Measured]) -> R) -> R {
        let line = Line::try_parse_from(std::iter::once(&"all-reduce").chain(words)).unwrap();
        tell(&line.all_reduce.asked(), &[measured()])
    }

    #[test]
    fn rows_say_what_was_chosen_and_how_it_compares() {
        let words = ["--vs", "nccl", "--chain"];
        let rows = told(&words, |asked, m| json(asked, 4, m));
        assert_eq!(rows.len(), 2);
        let wanted = json!({
            "bytes": 1_000_000, "dtype": "bf16", "graph": false, "in_place": false, "op": "sum",
            "choice": "auto", "algorithm": "two-shot", "plan": "TwoShot, Flat", "sms": 24,
            "us": 20.0, "us_p99": 21.23, "alg_gb_per_s": 50.0, "bus_gb_per_s": 75.0,
            "samples": {
                "ours": [19.0, 20.0, 21.23], "nccl": [30.0, 40.0, 50.0],
                "chain": [39.0, 40.0, 41.0], "chain_fused": [34.0, 35.0, 36.0],
                "chain_alone": [21.0, 22.0, 23.0],
            },
            "nccl_us": 40.0, "nccl_us_p99": 50.0, "of_nccl": 0.5,
            "chain": { "us": 40.0, "fused_us": 35.0, "alone_us": 22.0 },
        });
        assert_eq!(rows[0], wanted);
    }

    #[test]
    fn what_cannot_run_says_why_and_has_no_time() {
        let rows = told(&[], |asked, m| json(asked, 4, m));
        assert_eq!(rows[1]["plan"], "it does not fit; take less");
        assert_eq!(rows[1]["choice"], "one-shot-push");
        assert!(rows[1].get("us").is_none() && rows[1]["algorithm"].is_null());
    }

    #[test]
    fn the_table_has_a_column_for_everything_that_was_asked_for() {
        let columns = |words: &[&str]| {
            let text = told(words, |asked, m| table(asked, 4, m));
            let cells = |line: &str| line.split("  ").filter(|c| !c.trim().is_empty()).count();
            let lines: Vec<&str> = text.lines().collect();
            assert_eq!(lines.len(), 3);
            // Up to the plan, all lines are as wide.
            let widths = lines.iter().map(|l| l.rfind("  ")).collect::<Vec<_>>();
            assert!(widths.iter().all(|w| *w == widths[0]), "{text}");
            (cells(lines[0]), text)
        };
        let (few, plain) = columns(&[]);
        let (more, whole) = columns(&["--vs", "nccl", "--chain"]);
        assert!(more > few);
        assert!(!plain.contains("nccl") && whole.contains("nccl us"));
        let line = whole.lines().nth(1).unwrap();
        for cell in [
            "two-shot", "20.00", "21.23", "50.0", "75.0", "0.500", "35.00", "22.00",
        ] {
            assert!(line.contains(cell), "{cell}: {line}");
        }
        assert!(plain.ends_with("it does not fit; take less\n"));
    }
}
