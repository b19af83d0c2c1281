//! What was measured, as a row of the file and as a line of the table.

use super::{Algo, Hierarchical, case::Measured};
use crate::{collectives::names::name, rounded};
use brigade::{HierarchicalPlan, Machines};
use serde_json::{Map, Value, json};

pub fn row(options: &Hierarchical, machines: Machines, measured: &Measured) -> Value {
    let of = |name: &str| {
        let found = measured.times.iter().find(|t| t.name == name);
        found.map_or(Value::Null, |t| rounded(t.median))
    };
    let slices = match &measured.plan {
        HierarchicalPlan::Slices(plan) => plan.slices,
        HierarchicalPlan::Whole { .. } | HierarchicalPlan::Inside { .. } => 0,
    };
    let samples: Map<_, _> = measured
        .times
        .iter()
        .map(|t| {
            let samples = t.samples.iter().map(|&s| rounded(s)).collect();
            (t.name.to_owned(), samples)
        })
        .collect();
    json!({
        "machines": machines.count(), "ranks": machines.ranks(),
        "operation": name(options.operation), "op": name(options.op),
        "dtype": name(options.dtype),
        "bytes": measured.extent.all * options.dtype.bytes(),
        "graph": options.common.graph, "sockets": options.sockets.sockets,
        "us": of("ours"), "one_slice_us": of("one slice"), "nccl_flat_us": of("nccl"),
        "slices": slices, "plan": measured.plan.to_string(), "samples": samples,
    })
}

/// The names under which a row has the times of NCCL with an algorithm, and of ours beside it.
fn names(algo: Algo) -> [String; 2] {
    let name = name(algo);
    [format!("nccl_{name}_us"), format!("us_beside_{name}")]
}

/// Puts the rows of a run in which NCCL was told an algorithm into those of the first run.
pub fn merge(rows: &mut [Value], algo: Algo, run: &[Value]) {
    let [theirs, ours] = names(algo);
    for row in rows {
        let Some(of) = run.iter().find(|of| of["bytes"] == row["bytes"]) else {
            continue;
        };
        row[&theirs] = of["nccl_flat_us"].clone();
        row[&ours] = of["us"].clone();
        for (name, variant) in [(&theirs, "nccl"), (&ours, "ours")] {
            row["samples"][name.trim_end_matches("_us")] = of["samples"][variant].clone();
        }
    }
}

/// The table of these rows.
pub fn table(rows: &[Value], algos: &[Algo]) -> String {
    let mut columns = vec![
        ("bytes".to_owned(), "bytes".to_owned()),
        ("us".into(), "us".into()),
        ("one_slice_us".into(), "one slice us".into()),
        ("nccl_flat_us".into(), "nccl us".into()),
    ];
    for &algo in algos {
        let [theirs, ours] = names(algo);
        let name = name(algo);
        columns.push((theirs, format!("{name} us")));
        columns.push((ours, format!("beside {name}")));
    }
    let line = |cell: &dyn Fn(&(String, String)) -> String, plan: &str| {
        let cells: Vec<_> = columns.iter().map(|c| format!("{:>12}", cell(c))).collect();
        format!("{}  {plan}\n", cells.join(" "))
    };
    let mut text = line(&|(_, title)| title.clone(), "plan");
    for row in rows {
        let cell = |(name, _): &(String, String)| match &row[name] {
            Value::Null => "-".to_owned(),
            value => value.to_string(),
        };
        text += &line(&cell, row["plan"].as_str().unwrap_or("-"));
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{collectives::which::Extent, hierarchical::tests::read, sample::Times};
    use std::time::Duration;

    fn measured(us: f64, nccl: f64) -> Measured {
        Measured {
            extent: Extent {
                all: 512,
                share: 512,
            },
            times: vec![Times::new("ours", vec![us]), Times::new("nccl", vec![nccl])],
            plan: HierarchicalPlan::Whole {
                order: Some(brigade::SumOrder::ByMachine { ranks: 2 }),
                staging_bytes: 0,
                expected: Duration::ZERO,
                basis: brigade::CostsBasis::Guessed,
            },
            spans: Vec::new(),
        }
    }

    #[test]
    fn rows_tell_what_was_measured_and_nothing_else() {
        let options = read("--slices 3 -b 1K --dtype f32 --op avg").unwrap();
        let machines = Machines::cut(4, 2).unwrap();
        let row = row(&options, machines, &measured(12.34, 20.0));
        assert_eq!(
            (&row["operation"], &row["bytes"]),
            (&json!("all-reduce"), &json!(2048))
        );
        assert_eq!((&row["op"], &row["dtype"]), (&json!("avg"), &json!("f32")));
        assert_eq!((&row["us"], &row["slices"]), (&json!(12.3), &json!(0)));
        assert_eq!(row["nccl_flat_us"], json!(20.0));
        assert!(row["one_slice_us"].is_null());
    }

    #[test]
    fn algorithms_of_nccl_have_a_column_each_with_ours_beside_it() {
        let options = read("--vs nccl").unwrap();
        let machines = Machines::cut(4, 2).unwrap();
        let of = |us, nccl| vec![row(&options, machines, &measured(us, nccl))];
        let mut rows = of(10.0, 20.0);
        merge(&mut rows, Algo::Ring, &of(11.0, 21.0));
        merge(&mut rows, Algo::Tree, &[json!({"bytes": 7, "us": 1.0})]);
        let row = &rows[0];
        assert_eq!(
            (&row["us"], &row["nccl_flat_us"]),
            (&json!(10.0), &json!(20.0))
        );
        assert_eq!(
            (&row["us_beside_ring"], &row["nccl_ring_us"]),
            (&json!(11.0), &json!(21.0))
        );
        assert_eq!(row["samples"]["nccl_ring"], json!([21.0]));
        assert_eq!(row["samples"]["us_beside_ring"], json!([11.0]));
        assert!(row.get("nccl_tree_us").is_none());
        let text = table(&rows, &[Algo::Ring, Algo::Tree]);
        let lines: Vec<_> = text.lines().collect();
        assert!(lines[0].contains("beside ring") && lines[1].contains("11.0"));
        // The plan stands below its title.
        assert!(lines[1].contains("  whole"), "{text}");
        assert_eq!(lines[0].find("plan"), lines[1].find("whole"), "{text}");
    }
}
