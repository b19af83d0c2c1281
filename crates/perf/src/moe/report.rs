//! What was measured, as a row of the file and as a line of the table.

use super::{Moe, case::Measured};
use crate::{rounded, sample::Times};
use brigade::Plan;
use serde_json::{Map, Value, json};

pub fn row(options: &Moe, tokens: usize, measured: &Measured) -> Value {
    let of = |name: &str| {
        let found = measured.times.iter().find(|t| t.name == name);
        found.map_or(Value::Null, |t| rounded(t.median))
    };
    let number = |v: Value| v.as_f64().unwrap_or(f64::NAN);
    let samples: Map<_, _> = measured
        .times
        .iter()
        .map(|t| {
            (
                t.name.to_owned(),
                t.samples.iter().map(|&s| rounded(s)).collect(),
            )
        })
        .collect();
    let floor = measured.floor_us;
    let total = number(of("total"));
    let of_floor = match floor {
        Some(floor) if floor > 0.0 && total.is_finite() => {
            json!((total / floor * 1000.0).round() / 1000.0)
        }
        _ => Value::Null,
    };
    let blocks = match measured.plan {
        Plan::Experts { launch, .. } if launch.blocks > 0 => json!(launch.blocks),
        _ => Value::Null,
    };
    let mut row = json!({
        "tokens": tokens, "hidden": options.hidden, "k": options.k, "experts": options.experts,
        "transport": match options.in_slots() {
            true => format!("low latency, {}", measured.plan),
            false => measured.plan.to_string(),
        },
        "rows": format!("{:?}", options.rows()), "sum": format!("{:?}", options.sum()),
        "dtype": if options.fp8 { "fp8 there, bf16 back" } else { "bf16" },
        "back": format!("{:?}", options.back),
        "graph": options.common.graph, "sms": blocks, "sm_budget": options.sm_budget, "sent_bytes": measured.sent_bytes,
        "layout_us": of("layout"), "dispatch_us": of("dispatch"),
        "combine_us": rounded(number(of("total")) - number(of("dispatch"))),
        "total_us": of("total"), "nccl_us": of("nccl"),
        "wire_gb_per_s": options.wire_gb_per_s(), "floor_us": floor.map(rounded), "of_floor": of_floor, "samples": samples,
    });
    if let (Some(machines), Some(bytes)) = (options.machines, measured.rail_bytes) {
        row["machines"] = json!(machines);
        row["sockets"] = json!(options.sockets.sockets);
        row["rail_bytes"] = json!(bytes);
    }
    // What was sent and received apart, and products beside that, outside of graphs.
    let apart = ["_send", "_receive", "gemm", "gemm_pending"];
    let apart = |t: &&Times| apart.iter().any(|end| t.name.ends_with(end));
    for times in measured.times.iter().filter(apart) {
        row[format!("{}_us", times.name)] = rounded(times.median);
    }
    if let (Some(alone), Some(pending)) = (of("gemm").as_f64(), of("gemm_pending").as_f64()) {
        row["gemm_pending_ratio"] = json!((pending / alone * 1e4).round() / 1e4);
    }
    row
}

/// The table of these rows.
pub fn table(options: &Moe, rows: &[Value]) -> String {
    let mut columns = vec![
        ("tokens", "tokens"),
        ("sent_bytes", "sent"),
        ("layout_us", "layout us"),
        ("dispatch_us", "dispatch us"),
        ("combine_us", "combine us"),
        ("total_us", "total us"),
        ("floor_us", "floor us"),
        ("of_floor", "of floor"),
        ("nccl_us", "nccl us"),
    ];
    if options.machines.is_some() {
        columns.insert(2, ("rail_bytes", "along rails"));
    }
    if options.in_slots() {
        columns.extend([
            ("dispatch_send_us", "send us"),
            ("dispatch_receive_us", "receive us"),
            ("combine_send_us", "send back us"),
            ("combine_receive_us", "receive us"),
            ("gemm_us", "gemm us"),
            ("gemm_pending_us", "pending us"),
            ("gemm_pending_ratio", "ratio"),
        ]);
    }
    let line = |cell: &dyn Fn(&(&str, &str)) -> String| {
        let cells: Vec<_> = columns.iter().map(|c| format!("{:>12}", cell(c))).collect();
        cells.join(" ") + "\n"
    };
    let mut text = line(&|(_, title)| (*title).to_owned());
    for row in rows {
        text += &line(&|(name, _)| match &row[*name] {
            Value::Null => "-".to_owned(),
            value => value.to_string(),
        });
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::moe::Choice;
    use brigade::{Launch, Transport};
    use clap::Parser;

    #[derive(Parser)]
    struct Line {
        #[command(flatten)]
        moe: Moe,
    }

    fn told(words: &str, launch: Launch, halves: bool) -> (Value, String) {
        let words = std::iter::once("moe").chain(words.split_whitespace());
        let options = Line::try_parse_from(words).unwrap().moe;
        let mut times = vec![
            Times::new("layout", vec![1.0]),
            Times::new("dispatch", vec![12.0]),
            Times::new("total", vec![20.0]),
        ];
        if halves {
            times.push(Times::new("dispatch_send", vec![7.0]));
            times.push(Times::new("combine_receive", vec![3.0]));
            times.push(Times::new("gemm", vec![1600.0]));
            times.push(Times::new("gemm_pending", vec![1604.0]));
        }
        let measured = Measured {
            plan: Plan::Experts {
                transport: Transport::Pushed,
                piece_rows: 8,
                pieces: 1,
                launch,
            },
            times,
            sent_bytes: 1000,
            rail_bytes: Some(300),
            floor_us: options.wire_gb_per_s().map(|_| 8.0),
            spans: Vec::new(),
        };
        let row = row(&options, 8, &measured);
        let text = table(&options, std::slice::from_ref(&row));
        (row, text)
    }

    #[test]
    fn a_row_has_its_floor_and_the_blocks_that_the_plan_knows() {
        let launch = Launch {
            blocks: 24,
            threads: 256,
        };
        let (row, text) = told("--sm-budget 30", launch, false);
        assert_eq!((&row["sms"], &row["sm_budget"]), (&json!(24), &json!(30)));
        assert_eq!(
            (&row["floor_us"], &row["of_floor"]),
            (&json!(8.0), &json!(2.5))
        );
        assert_eq!(
            (&row["combine_us"], &row["nccl_us"]),
            (&json!(8.0), &Value::Null)
        );
        for apart in ["dispatch_send_us", "gemm_us", "gemm_pending_ratio"] {
            assert!(row.get(apart).is_none(), "{apart}");
        }
        let widths: Vec<_> = text.lines().map(str::len).collect();
        assert!(widths.len() == 2 && widths[0] == widths[1], "{text}");
        let (row, _) = told("", Launch::default(), false);
        assert!(row["sms"].is_null() && row["sm_budget"].is_null());
    }

    #[test]
    fn a_row_across_machines_says_what_went_along_rails() {
        let (row, text) = told("--machines 2", Launch::default(), false);
        assert_eq!(
            (&row["machines"], &row["rows"]),
            (&json!(2), &json!("Dense"))
        );
        assert_eq!(
            (&row["rail_bytes"], &row["sent_bytes"]),
            (&json!(300), &json!(1000))
        );
        // What GPUs push to each other says nothing of rails.
        assert!(row["floor_us"].is_null() && row["of_floor"].is_null());
        assert!(text.contains("along rails"), "{text}");
        let (row, _) = told("--machines 2 --wire-gb-per-s 5", Launch::default(), false);
        assert_eq!(row["floor_us"], json!(8.0));
        let (row, text) = told("", Launch::default(), false);
        assert!(row.get("rail_bytes").is_none() && !text.contains("along rails"));
    }

    #[test]
    fn what_stays_inside_machines_is_refused_across_them() {
        let read = |words: &str| {
            let words = std::iter::once("moe").chain(words.split_whitespace());
            Line::try_parse_from(words).map(|line| line.moe)
        };
        let refused = |words: &str, ranks| read(words).unwrap().check_machines(ranks).is_err();
        assert!(!refused("--machines 2 --processes --sockets", 4));
        assert!(refused("--machines 2", 3));
        assert!(refused("--machines 2 --rows by-expert", 4));
        assert!(refused("--machines 2 --transport low-latency", 4));
        assert!(refused("--machines 2 --transport in-place", 4));
        assert!(refused("--machines 2 --transport in-place-there", 4));
        assert!(refused("--processes --sockets", 4));
        assert!(read("--machines 2 --graph").is_err());
    }

    #[test]
    fn rows_that_stay_in_place_go_back_from_there_or_as_the_plan_has_it() {
        let ways = |choice: Choice| (choice.transport(), choice.back());
        let there = Some(Transport::InPlace);
        assert_eq!(ways(Choice::InPlace), (there, there));
        assert_eq!(ways(Choice::InPlaceThere), (there, None));
    }

    #[test]
    fn halves_are_told_apart() {
        let (row, text) = told("--transport low-latency", Launch::default(), true);
        assert_eq!(row["dispatch_send_us"], json!(7.0));
        assert_eq!(row["combine_receive_us"], json!(3.0));
        assert!(text.contains("send back us"));
    }

    #[test]
    fn a_product_stands_beside_the_same_while_a_receive_is_pending() {
        let (row, text) = told("--transport low-latency", Launch::default(), true);
        assert_eq!(
            (&row["gemm_us"], &row["gemm_pending_us"]),
            (&json!(1600.0), &json!(1604.0))
        );
        assert_eq!(row["gemm_pending_ratio"], json!(1.0025));
        let last = |line: &str| line.split_whitespace().last().map(str::to_owned);
        let lines: Vec<_> = text.lines().filter_map(last).collect();
        assert_eq!(lines, ["ratio", "1.0025"], "{text}");
    }
}
