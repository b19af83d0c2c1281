use super::{fit::Sample, *};
use brigade::{
    CostsBasis, Machines,
    plan::{Entries, hierarchical::Wire},
};
use clap::Parser;

#[derive(Parser)]
struct Line {
    #[command(flatten)]
    tune: Tune,
}

fn read(words: &str) -> Result<Tune, clap::Error> {
    let words = std::iter::once("tune-hierarchical").chain(words.split_whitespace());
    Line::try_parse_from(words).map(|line| line.tune)
}

fn tune(words: &str) -> Tune {
    read(words).unwrap()
}

#[test]
fn options_are_read() {
    let line = tune("--processes --sockets --machines 4 -e 1M");
    let extent = line.extent(8).unwrap();
    assert_eq!((extent.machines.count(), extent.machines.ranks()), (4, 2));
    assert_eq!(
        extent.sizes,
        [4 << 10, 16 << 10, 64 << 10, 256 << 10, 1 << 20]
    );
    assert!(extent.config().staging_bytes >= 64 << 20 && line.rail().is_none());
    assert!(line.extent(7).is_err() && tune("--machines 1").extent(2).is_err());
    assert!(read("-n 0").is_err() && read("--calls 0").is_err());
    assert!(read("--sockets").is_err() && read("--rail-latency-us 5").is_err());
    let rail = tune("--rail-latency-us 5 --rail-bytes-per-us 7").rail();
    let want = RailModel {
        latency: Duration::from_micros(5),
        bytes_per_us: 7,
    };
    assert_eq!(rail, Some(want));
    // GPUs have rails of their own, and a host has no number of ranks.
    let refused = |words: &str| format!("{:#}", start(&tune(words)).unwrap_err());
    assert!(refused("--rail-bytes-per-us 7").contains("--device host"));
    assert!(refused("--device host").contains("--ranks"));
}

/// Slices are as many as are asked for, with the memory that is given them.
#[test]
fn every_call_goes_the_way_that_is_measured() {
    let (extent, costs) = (tune("").extent(16).unwrap(), Costs::host());
    let calls = place::calls(extent.machines, extent.float.dtype(), &extent.sizes).unwrap();
    let mut ways = std::collections::BTreeMap::new();
    for call in calls {
        *ways.entry(called(&call).1).or_insert(0) += 1;
        if call.machines.count() == 1 {
            continue;
        }
        let plan = brigade::plan::hierarchical::plan(&call, &extent.config(), &costs).unwrap();
        match (call.choice, &plan) {
            (Some(HierarchicalPath::Whole), brigade::HierarchicalPlan::Whole { .. }) => {}
            (
                Some(HierarchicalPath::Slices { count } | HierarchicalPath::OneShot { count }),
                brigade::HierarchicalPlan::Slices(plan),
            ) => {
                assert_eq!(plan.slices, count as usize, "{call:?}")
            }
            other => panic!("{other:?}"),
        }
    }
    let sizes = 3 * extent.sizes.len();
    let want = [
        ("1 slice", sizes),
        ("4 slices", sizes),
        ("inside", sizes),
        ("one-shot, 1", extent.sizes.len()),
        ("one-shot, 4", extent.sizes.len()),
        ("whole", sizes + 1),
    ];
    assert_eq!(ways, want.map(|(way, n)| (way.to_owned(), n)).into());
}

/// Costs of calls across virtual machines, whose ranks are threads: by the best of some rounds, as machines that test have other things to do.
fn fitted(words: &str) -> Result<Fitted> {
    let tune = tune(&format!("--device host --dtype f32 --calls 1 {words}"));
    let ranks = Ranks::Threads(tune.ranks.unwrap());
    let taken = tune.on_host(&ranks).unwrap();
    let best = |taken: &Taken| Sample {
        ns: taken
            .times
            .samples
            .iter()
            .fold(f64::INFINITY, |a, &b| a.min(b))
            * 1e3,
        ..taken.sample()
    };
    let samples: Vec<_> = taken.taken.iter().map(best).collect();
    let extent = tune.extent(ranks.size()).unwrap();
    fit(&samples, &extent.config(), &tune.guess())
}

/// The rail that was modelled is found, and another one is another. A host that is busy takes longer, and never less; so bounds are wider on
/// that side, and what is found while others take its processors may be measured again.
#[test]
fn a_modelled_rail_is_recovered() {
    const TRIES: usize = 4;
    for (latency_us, bytes_per_us) in [(6000, 40), (12_000, 20)] {
        let words = format!(
            "-w 2 -n 6 -b 8K -e 512K -f 8 --rail-latency-us {latency_us} --rail-bytes-per-us {bytes_per_us}"
        );
        let is_recovered = |costs: &Costs| {
            let latency = (costs.across.call_ns + costs.wire.latency_ns) as f64;
            let rate = costs.wire.bytes_per_us as f64;
            (0.9..1.4).contains(&(latency / (latency_us * 1000) as f64))
                && (0.7..1.4).contains(&(rate / bytes_per_us as f64))
        };
        let mut found = Vec::new();
        while found.len() < TRIES {
            let tried = fitted(&words).map(|fitted| fitted.costs);
            if tried.as_ref().is_ok_and(is_recovered) {
                break;
            }
            found.push(tried.map_err(|refused| refused.to_string()));
        }
        assert!(found.len() < TRIES, "{words}: {found:?}");
    }
}

/// A host with no rail has none: what would be found for one is no latency of milliseconds, and more than such links carry.
#[test]
fn where_there_is_no_rail_none_is_found() {
    // Times this short may follow no costs on a busy host, which is said then.
    match fitted("-w 2 -n 8 -b 8K -e 128K") {
        Ok(Fitted { costs, .. }) => {
            let call = costs.across.call_ns + costs.wire.latency_ns;
            assert!(call < 2_000_000, "{costs:?}");
            assert!(costs.wire.bytes_per_us > 60, "{costs:?}");
        }
        Err(refused) => assert!(
            refused.to_string().contains("follows no costs"),
            "{refused}"
        ),
    }
}

/// What is written is read again, and says all that was found, and where.
#[test]
fn an_entry_is_what_devices_take() {
    let (tune, extent) = (
        tune("--device host -w 4 -e 64K"),
        tune("-e 64K").extent(4).unwrap(),
    );
    let costs = Costs {
        copy_ns: 77,
        ..Costs::host().with_wire(Wire {
            latency_ns: 123_456,
            bytes_per_us: 789,
        })
    };
    let off = vec![1.0, 0.5, 1.25];
    let meta = meta::host(&Ranks::Threads(4)).unwrap();
    let written = |costs| {
        let off = off.clone();
        tune.written(&meta, &extent, &Fitted { costs, off })
    };
    let entry = written(costs).unwrap();
    assert_eq!((entry.gpu.as_str(), entry.links), ("host", Links::Shared));
    assert_eq!((entry.machines, entry.ranks), (2, 2));
    assert_eq!(entry.measured.to_bytes, 64 << 10);
    let note = entry.source.note.clone().unwrap();
    assert!(
        note.contains("factor of 1.25") && note.contains("within 2.00"),
        "{note}"
    );
    let text = serde_json::to_string_pretty(&entry).unwrap();
    let machines = Machines::cut(4, 2).unwrap();
    let read = Entries::read(&text)
        .unwrap()
        .costs("host", machines)
        .unwrap();
    assert_eq!(read.digest(), costs.digest());
    assert_eq!(read.basis(machines), CostsBasis::Measured);
    // What cannot be is not written.
    let zero = costs.with_wire(Wire {
        latency_ns: 0,
        bytes_per_us: 0,
    });
    let refused = written(zero).unwrap_err().to_string();
    assert!(refused.contains("wire_bytes_per_us"), "{refused}");
}

/// Plans are made from what was quicker: by two connections, where more are no gain.
#[test]
fn fewer_connections_count_where_more_are_no_gain() {
    let extent = tune("").extent(4).unwrap();
    let calls = place::calls(extent.machines, extent.float.dtype(), &[4096, 8192]).unwrap();
    let taken = |call: &HierarchicalCall, us: f64, connections| Taken {
        call: call.clone(),
        connections: Some(connections),
        channels: None,
        times: crate::sample::Times::new("", vec![us]),
    };
    let in_flight = || calls.iter().filter(|call| !is_plain(call));
    assert_eq!(in_flight().count(), 2 * 4);
    let of = |by: usize, two: [f64; 2]| {
        let two = |(i, call)| taken(call, two[i % 2], 2);
        let measured = Measured {
            taken: calls.iter().map(|call| taken(call, 100.0, by)).collect(),
            by_two: in_flight().enumerate().map(two).collect(),
            others: Vec::new(),
        };
        let (quickest, connections) = measured.quickest(4);
        assert_eq!(quickest.len(), calls.len());
        let us = |plain| quickest.iter().filter(move |t| is_plain(&t.call) == plain);
        assert!(us(true).all(|t| t.times.median == 100.0));
        let sum: f64 = us(false).map(|t| t.times.median).sum();
        (connections, sum)
    };
    assert_eq!(of(4, [90.0, 100.0]), (2, 760.0));
    assert_eq!(of(4, [80.0, 120.0]), (2, 800.0));
    assert_eq!(of(4, [90.0, 120.0]), (4, 800.0));
    // What went by two anyway says nothing.
    assert_eq!(of(2, [90.0, 90.0]), (4, 800.0));
    let nothing = Measured {
        taken: Vec::new(),
        by_two: Vec::new(),
        others: Vec::new(),
    };
    assert_eq!(nothing.quickest(2).1, 2);
}

/// Connections have as many channels as calls were quickest by, where that is more than chance.
#[test]
fn channels_count_where_calls_are_quicker_by_them() {
    let extent = tune("").extent(4).unwrap();
    let calls = place::calls(extent.machines, extent.float.dtype(), &[4096, 65536]).unwrap();
    // What calls by one connection take, few bytes and many, each the way that is quickest; others say nothing of it.
    let taken = |few: f64, many: f64, channels: Option<u16>| -> Vec<Taken> {
        let of = |call: &HierarchicalCall| {
            let (_, way, bytes) = called(call);
            let us = if bytes < 65536 { few } else { many };
            let us = match (goes_by_one(call), way.as_str()) {
                (false, _) => 1.0,
                (true, "1 slice") => us,
                (true, _) => us * 1.5,
            };
            Taken {
                call: call.clone(),
                connections: None,
                channels,
                times: crate::sample::Times::new("", vec![us]),
            }
        };
        calls.iter().map(of).collect()
    };
    let first = taken(100.0, 1000.0, None);
    let quickest = |tried: &[(f64, f64, u16)]| {
        let tried = tried.iter().map(|&(few, many, channels)| {
            let extent = Extent {
                channels: Some(channels),
                ..extent.clone()
            };
            (taken(few, many, Some(channels)), extent)
        });
        quickest_channels(&first, tried.collect()).and_then(|extent| extent.channels)
    };
    assert_eq!(quickest(&[]), None);
    assert_eq!(quickest(&[(110.0, 800.0, 4), (150.0, 790.0, 8)]), Some(4));
    assert_eq!(quickest(&[(110.0, 800.0, 4), (110.0, 700.0, 8)]), Some(8));
    assert_eq!(quickest(&[(99.0, 999.0, 4), (150.0, 790.0, 8)]), None);
}

/// What a file of results has: all calls, and behind them those that went by two connections too.
fn recorded(text: &str) -> (Measured, Extent) {
    let file: Value = serde_json::from_str(text).unwrap();
    let extent = tune("-b 256K -e 64M").extent(4).unwrap();
    let calls = place::calls(extent.machines, extent.float.dtype(), &extent.sizes).unwrap();
    let taken = |row: &Value| {
        let is = |call: &&HierarchicalCall| {
            let (operation, way, bytes) = called(call);
            row["operation"] == operation && row["choice"] == way && row["bytes"] == bytes
        };
        Taken {
            call: calls.iter().find(is).unwrap().clone(),
            connections: row["connections"].as_u64().map(|n| n as usize),
            channels: row["channels"].as_u64().map(|n| n as u16),
            times: crate::sample::Times::new("", vec![row["us"].as_f64().unwrap()]),
        }
    };
    let (all, rest) = file["rows"].as_array().unwrap().split_at(calls.len());
    let two = calls.iter().filter(|call| !is_plain(call)).count();
    let (by_two, others) = rest.split_at(two);
    let [taken, by_two, others] =
        [all, by_two, others].map(|rows| rows.iter().map(taken).collect());
    let measured = Measured {
        taken,
        by_two,
        others,
    };
    (measured, extent)
}

/// Plans made from what was measured on four H100s cut where that was quicker, and do not where it was slower: with many sockets for each
/// connection, one slice took 0.6 to 0.9 of what four took, on a quiet host and a busy one.
#[test]
fn plans_cut_where_it_was_measured_to_pay() {
    let plans = |text| {
        let (measured, extent) = recorded(text);
        let (taken, connections) = measured.quickest(Costs::cuda().connections);
        let samples: Vec<_> = taken.iter().map(Taken::sample).collect();
        let counted = Costs {
            connections,
            channels: measured.channels(),
            ..Costs::cuda()
        };
        let Fitted { costs, .. } = fit(&samples, &extent.config(), &counted).unwrap();
        let plan = |mib: usize| {
            let call = HierarchicalCall {
                operation: Operation::AllReduce {
                    elements: mib << 19,
                    op: brigade::ReduceOp::Sum,
                },
                choice: None,
                ..taken[0].call.clone()
            };
            let call = HierarchicalCall {
                machines: extent.machines,
                ..call
            };
            match brigade::plan::hierarchical::plan(&call, &extent.config(), &costs).unwrap() {
                brigade::HierarchicalPlan::Slices(plan) => (plan.slices, plan.connections),
                other => panic!("{other}"),
            }
        };
        (costs, [1, 4, 16].map(plan))
    };
    let quiet = include_str!("../../../../../docs/results/tune-hierarchical-sockets.h100x4.json");
    let busy =
        include_str!("../../../../../docs/results/tune-hierarchical-sockets-busy.h100x4.json");
    for (file, channels) in [(quiet, Some(4)), (busy, None)] {
        let (costs, many_sockets) = plans(file);
        let keeps = |&(slices, connections): &(usize, usize)| slices <= 2 && connections == 1;
        assert!(many_sockets.iter().all(keeps), "{many_sockets:?} {costs:?}");
        assert!(costs.crowded_percent > 125, "{costs:?}");
        assert_eq!(costs.channels, channels);
    }
    let file = include_str!("../../../../../docs/results/tune-hierarchical.h100x4.json");
    let (costs, one_socket) = plans(file);
    assert_eq!(one_socket[0], (1, 1), "{costs:?}");
    let cuts = |&(slices, connections): &(usize, usize)| slices > 2 && connections == 4;
    assert!(one_socket[1..].iter().all(cuts), "{one_socket:?}");
    assert!(costs.crowded_percent <= 125, "{costs:?}");
}

#[test]
fn people_read_what_is_furthest_off() {
    let extent = tune("").extent(4).unwrap();
    let calls = place::calls(extent.machines, extent.float.dtype(), &[4096]).unwrap();
    let taken = |us: f64| Taken {
        call: calls[4].clone(),
        connections: None,
        channels: None,
        times: crate::sample::Times::new("", vec![us]),
    };
    let costs = Costs::host();
    let rows =
        [100.0, 900_000.0].map(|us| row(&taken(us), &extent, [&costs, &Costs::cuda()]).unwrap());
    assert_eq!(
        (&rows[1]["choice"], &rows[1]["us"]),
        (&json!("whole"), &json!(900_000.0))
    );
    assert_ne!(rows[0]["expected_us"], rows[0]["untuned_us"]);
    let off = vec![1.1, 0.001];
    let told = table(&extent, &Fitted { costs, off }, &Costs::cuda(), &rows);
    assert!(
        told.contains("furthest off: all-reduce of 4096 bytes, whole: 900000.0 us"),
        "{told}"
    );
    assert!(told.contains("all within 1000.00"), "{told}");
}
