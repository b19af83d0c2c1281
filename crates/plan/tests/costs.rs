//! Costs across machines, as users measure them: which count, what they decide, and what plans say of them.

#![allow(clippy::unwrap_used, reason = "tests")]

use brigade_device::{
    CostsBasis, DataType, Error, HierarchicalCall, HierarchicalOperation, HierarchyConfig,
    Machines, ParallelMode, ReduceOp,
};
use brigade_plan::{
    Entries,
    crossover::Whose,
    hierarchical::{Costs, Measured, plan},
};
use serde_json::{Value, json};

fn machines(count: usize, ranks: usize) -> Machines {
    Machines::cut(count * ranks, count).unwrap()
}

fn line(machines: Machines, elements: usize, costs: &Costs) -> String {
    let call = HierarchicalCall {
        machines,
        operation: HierarchicalOperation::AllReduce {
            elements,
            op: ReduceOp::Sum,
        },
        dtype: DataType::BF16,
        output: DataType::BF16,
        choice: None,
    };
    let config = HierarchyConfig::new(ParallelMode::Tp);
    plan(&call, &config, costs).unwrap().to_string()
}

/// Where costs are from decides nothing, so ranks need not agree on it; but plans say it.
#[test]
fn where_costs_are_from_changes_no_plan() {
    let measured = Costs {
        measured: Some(Measured {
            machines: 2,
            ranks: 4,
            whose: Whose::User,
        }),
        ..Costs::cuda()
    };
    let here = machines(2, 4);
    assert_eq!(measured.digest(), Costs::cuda().digest());
    assert!(!measured.told(here).contains("untuned"));
    for elements in [7, 1 << 20] {
        let lines = [measured, Costs::cuda()].map(|costs| line(here, elements, &costs));
        assert!(lines[0].ends_with(" by measured costs"), "{}", lines[0]);
        assert!(lines[1].ends_with(" by guessed costs"), "{}", lines[1]);
        let [one, other] = lines.each_ref().map(|line| line.split(" by ").next());
        assert_eq!(one, other);
    }
    let elsewhere = line(machines(2, 2), 7, &measured);
    assert!(
        elsewhere.ends_with(" by costs of other machines"),
        "{elsewhere}"
    );
}

fn entry(ranks: usize, more: &Value) -> Value {
    let mut entry = json!({
        "costs_version": 3, "gpu": "NVIDIA H200", "links": "nvlink", "machines": 2, "ranks": ranks,
        "inside_call_ns": 1000, "inside_bytes_per_us": 200_000, "across_call_ns": 3000, "across_bytes_per_us": 40_000,
        "wire_latency_ns": 5000, "wire_bytes_per_us": 6000, "add_bytes_per_us": 700_000, "copy_ns": 80, "connections": 4, "crowded_percent": 100,
        "measured": {"from_bytes": 4096, "to_bytes": 65536},
        "versions": {"driver": "13.0", "cuda": "13.0", "nccl": "2.28.9"},
        "source": {"command": "brigade-perf", "date": "2026-01-02", "commit": "0123456"},
    });
    for (name, value) in more.as_object().unwrap() {
        entry[name] = value.clone();
    }
    entry
}

fn read(value: &Value) -> Entries {
    Entries::read(&value.to_string()).unwrap_or_else(|why| panic!("{why}"))
}

/// Costs across machines are those of as many machines of as many ranks, else of the nearest, which is told; and no others'.
#[test]
fn costs_are_those_of_the_nearest_machines() {
    let of = |ranks, machines, call: usize| {
        entry(
            ranks,
            &json!({"machines": machines, "inside_call_ns": call}),
        )
    };
    let own = read(&json!([of(4, 2, 1), of(4, 8, 2), of(1, 2, 3), of(4, 2, 4)]));
    let found = |count, ranks| {
        let machines = machines(count, ranks);
        let costs = own.costs("NVIDIA H200", machines).unwrap();
        let told = costs.told(machines);
        assert!(told.contains("in the user's table"), "{told}");
        (costs.inside.call_ns, costs.basis(machines))
    };
    assert_eq!(found(2, 4), (1, CostsBasis::Measured));
    assert_eq!(found(8, 4), (2, CostsBasis::Measured));
    assert_eq!(found(2, 1), (3, CostsBasis::Measured));
    // Ranks of a machine count before the number of machines.
    assert_eq!(found(8, 1), (3, CostsBasis::Elsewhere));
    assert_eq!(found(6, 8), (2, CostsBasis::Elsewhere));
    let machines = machines(2, 4);
    assert_eq!(own.costs("host", machines), None);
    assert_eq!(Entries::default().costs("NVIDIA H200", machines), None);
}

/// All figures of a file decide, and ranks vote on all of them.
#[test]
fn every_figure_of_costs_is_voted_on() {
    let machines = machines(2, 2);
    let of = |more: Value| -> Costs {
        let own = read(&entry(2, &more));
        own.costs("NVIDIA H200", machines).unwrap()
    };
    let usual = of(json!({}));
    assert_eq!(
        usual.told(machines),
        "costs of calls and bytes measured at 2 x 2 ranks, in the user's table; a wire of 5000 ns and 6000 bytes in a microsecond"
    );
    let fields = [
        "inside_call_ns",
        "inside_bytes_per_us",
        "across_call_ns",
        "across_bytes_per_us",
        "wire_latency_ns",
        "wire_bytes_per_us",
        "add_bytes_per_us",
        "copy_ns",
    ];
    let mut digests = vec![usual.digest(), Costs::cuda().digest()];
    digests.extend(fields.map(|field| of(json!({ field: 77 })).digest()));
    digests.push(of(json!({"connections": 2})).digest());
    digests.push(of(json!({"crowded_percent": 120})).digest());
    digests.push(of(json!({"channels": 4})).digest());
    // More than a device has, it has not.
    let many = of(json!({"connections": 77}));
    assert_eq!(many.connections, Costs::cuda().connections);
    for (i, one) in digests.iter().enumerate() {
        assert!(!digests[..i].contains(one), "{i}");
    }
    // Where it was measured and by whom does not count.
    assert_eq!(of(json!({"links": "pcie"})).digest(), usual.digest());
}

#[test]
fn what_cannot_be_costs_is_refused_by_its_field() {
    let nothing = json!({});
    let without = |mut entry: Value, field: &str| {
        entry.as_object_mut().unwrap().remove(field);
        entry.to_string()
    };
    for (text, field, got, want) in [
        // Another version may mean other things by the same names, or have others.
        (
            entry(2, &json!({"costs_version": 4, "more": 1})).to_string(),
            "costs_version",
            "4",
            "3, which this build counts with",
        ),
        (
            without(entry(2, &nothing), "wire_latency_ns"),
            "entry of costs",
            "missing field `wire_latency_ns`",
            "all fields",
        ),
        (
            entry(2, &json!({"across_call_ns": -1})).to_string(),
            "entry of costs",
            "across_call_ns: invalid value: integer `-1`",
            "u64",
        ),
        (
            entry(2, &json!({"copy_ns": 60_000_000_001u64})).to_string(),
            "copy_ns",
            "60000000001",
            "at most 60000000000, a minute",
        ),
        (
            entry(2, &json!({"wire_bytes_per_us": 0})).to_string(),
            "wire_bytes_per_us",
            "0",
            "at least 1",
        ),
        (
            entry(2, &json!({"connections": 1})).to_string(),
            "connections",
            "1",
            "at least 2",
        ),
        (
            entry(2, &json!({"crowded_percent": 99})).to_string(),
            "crowded_percent",
            "99",
            "100 to 10000",
        ),
        (
            entry(2, &json!({"channels": 0})).to_string(),
            "channels",
            "0",
            "1 to 64",
        ),
        (
            entry(2, &json!({"channels": 65})).to_string(),
            "channels",
            "65",
            "1 to 64",
        ),
        (
            entry(2, &json!({"machines": 1})).to_string(),
            "machines",
            "1",
            "2 to 1024",
        ),
        (
            entry(513, &nothing).to_string(),
            "ranks",
            "513",
            "1 to 512 on each of 2",
        ),
        // Half of a file.
        (
            entry(2, &nothing).to_string()[..200].to_owned(),
            "entries",
            "EOF while parsing",
            "JSON",
        ),
    ] {
        match Entries::read(&text) {
            Err(Error::Invalid {
                field: f,
                got: g,
                want: w,
            }) => {
                assert_eq!(f, field, "{text}");
                assert!(g.contains(got), "{text}: {g}");
                assert!(w.contains(want), "{text}: {w}");
            }
            other => panic!("{text}: {other:?}"),
        }
    }
}
