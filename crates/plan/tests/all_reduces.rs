//! Which all-reduce is planned on which GPUs, with what launch, and what stands in the file of this build.

mod common;

use brigade_device::{AllReduceAlgorithm as A, Call, DataType, Launch, NcclUse, Plan, ReduceOp};
use brigade_plan::{
    Engines, Table, Topology,
    crossover::{Gpus, Links},
    plan, reason,
    tuned::{ByType, File, Float, told},
};
use common::topology;
use serde_json::{Value, json};
use std::{collections::HashSet, fmt::Write};

fn gpus(model: &str, links: Links, ranks: usize) -> Gpus {
    Gpus {
        model: Some(model.to_owned()),
        links,
        ranks,
    }
}

/// An entry of GPU `A` by NVLink.
fn entry(ranks: usize, one_shot_max_bytes: usize, more: &Value) -> Value {
    let mut entry = json!({
        "gpu": "A", "links": "nvlink", "ranks": ranks, "one_shot_max_bytes": one_shot_max_bytes,
        "pull_from_bytes": null, "max_blocks": 132, "nccl_from_bytes": null,
        "measured": {"from_bytes": 2048, "to_bytes": 4096},
        "versions": {"driver": "13.0", "cuda": "12.9", "nccl": "2.28.3"},
        "source": {"command": "c", "date": "2026-01-02", "commit": "0123456"},
    });
    for (name, value) in more.as_object().into_iter().flatten() {
        entry[name] = value.clone();
    }
    entry
}

/// With usual figures of 88 bytes in groups of two, of 77 in all others.
fn text(entries: &[Value]) -> String {
    let usual = |one_shot_max_bytes| json!({"one_shot_max_bytes": one_shot_max_bytes, "pull_from_bytes": 99, "max_blocks": 7, "why": "so"});
    let mut small = usual(88);
    small["max_ranks"] = 2.into();
    json!({"untuned": [small, usual(77)], "entries": entries}).to_string()
}

fn file(entries: &[Value]) -> File {
    File::read(&text(entries)).unwrap_or_else(|why| panic!("{why}"))
}

#[test]
fn the_narrowest_entry_counts_and_else_the_usual_figures() {
    let file = file(&[
        entry(2, 10, &json!({})),
        entry(4, 11, &json!({})),
        entry(4, 12, &json!({"dtype": "f32"})),
        entry(8, 13, &json!({"dtype": "bf16", "links": "pcie"})),
    ]);
    let of = |model, links, ranks| {
        let found = file.of(&gpus(model, links, ranks));
        found.each().map(|(_, f)| f.one_shot_max_bytes)
    };
    // f32, f16, bf16
    assert_eq!(of("A", Links::Nvlink, 2), [10; 3]);
    assert_eq!(of("A", Links::Nvlink, 4), [12, 11, 11]);
    assert_eq!(of("A", Links::Pcie, 8), [77, 77, 13]);
    // Nor does a group take what was measured of others.
    assert_eq!(of("A", Links::Nvlink, 3), [77; 3]);
    assert_eq!(of("A", Links::Pcie, 2), [88; 3]);
    assert_eq!(of("A", Links::Shared, 4), [77; 3]);
    assert_eq!(of("B", Links::Nvlink, 1), [88; 3]);
    let mixed = Gpus {
        model: None,
        ..gpus("A", Links::Nvlink, 4)
    };
    let usual = file.of(&mixed);
    assert_eq!(usual.f32.one_shot_max_bytes, 77);
    assert_eq!(
        (usual.f32.pull_from_bytes, usual.f32.max_blocks),
        (Some(99), 7)
    );
}

#[test]
fn figures_say_what_they_were_measured_on_or_that_they_were_not() {
    let file = file(&[
        entry(2, 10, &json!({})),
        entry(4, 10, &json!({"dtype": "f32", "nccl_from_bytes": 4096})),
        entry(
            8,
            10,
            &json!({"versions": {"driver": "13.0", "cuda": "13.0", "nccl": null}}),
        ),
    ]);
    let mut text = String::new();
    for ranks in [2, 4, 8] {
        for (dtype, figures) in file.of(&gpus("A", Links::Nvlink, ranks)).each() {
            writeln!(text, "{ranks} ranks, {}: {}", dtype.name(), figures.source).unwrap();
        }
    }
    let mixed = Gpus {
        model: None,
        links: Links::Unknown,
        ranks: 3,
    };
    writeln!(text, "{}", file.of(&mixed).f32.source).unwrap();
    insta::assert_snapshot!(text);
}

#[test]
fn what_is_no_file_of_figures_is_refused() {
    let sound = text(&[entry(2, 1, &json!({}))]);
    assert!(File::read(&sound).is_ok());
    let threads = |list: &[(usize, u16)]| {
        let rows: Vec<_> = list
            .iter()
            .map(|(bytes, threads)| json!({"max_bytes": bytes, "threads": threads}))
            .collect();
        text(&[entry(2, 1, &json!({ "threads": rows }))])
    };
    assert!(File::read(&threads(&[(1, 32), (2, 512)])).is_ok());
    for wrong in [
        String::new(),
        "{}".to_owned(),
        sound.replace("\"entries\"", "\"entry\""),
        sound.replace("\"max_ranks\"", "\"most_ranks\""),
        // No figures for larger groups.
        sound
            .replace(
                "\"pull_from_bytes\":99,",
                "\"pull_from_bytes\":99,\"max_ranks\":8,",
            )
            .replace("\"max_ranks\":2}", "\"more\":1}"),
        json!({"untuned": [], "entries": []}).to_string(),
        // What nobody has measured says why it is so.
        sound.replace("\"why\":\"so\"", "\"why\":\" \""),
        sound.replace(",\"why\":\"so\"", ""),
        text(&[json!({"gpu": "A"})]),
        text(&[entry(2, 1, &json!({"more": 1}))]),
        text(&[entry(2, 1, &json!({"dtype": "i32"}))]),
        text(&[entry(2, 1, &json!({"max_blocks": 0}))]),
        threads(&[(1, 0)]),
        threads(&[(1, 33)]),
        threads(&[(1, 1024)]),
        threads(&[(2, 32), (1, 64)]),
    ] {
        let refused = File::read(&wrong).unwrap_err();
        assert_eq!(refused.code, reason::ALL_REDUCES, "{wrong}");
    }
}

/// Every figure of this build says where it comes from, and none stands there twice.
#[test]
fn the_figures_of_this_build_are_sound() {
    let file = File::embedded().unwrap();
    let mut seen = HashSet::new();
    for e in file.entries() {
        let key = format!("{} {} {} {:?}", e.gpu, e.links, e.ranks, e.dtype);
        let source = &e.source;
        let digits = source.date.replace('-', "");
        assert!(
            source.date.len() == 10 && digits.parse::<u32>().is_ok(),
            "{key}"
        );
        assert!(source.command.starts_with("brigade-perf "), "{key}");
        assert!(
            e.ranks > 1 && e.measured.from_bytes < e.measured.to_bytes,
            "{key}"
        );
        assert!(e.one_shot_max_bytes <= e.measured.to_bytes, "{key}");
        assert!(seen.insert(key.clone()), "{key} stands there twice");
    }
    let of = |model, ranks| file.of(&gpus(model, Links::Nvlink, ranks)).bf16;
    let h200 = of("NVIDIA H200", 2);
    assert_eq!(
        (h200.one_shot_max_bytes, h200.pull_from_bytes),
        (256 << 20, None)
    );
    assert!(h200.source.starts_with("measured on NVIDIA H200"));
    let most = 256 << 10;
    for (ranks, kib) in [
        (1, most),
        (2, most),
        (3, 128),
        (4, 128),
        (5, 128),
        (16, 128),
    ] {
        let other = of("another", ranks);
        assert_eq!(other.one_shot_max_bytes, kib << 10);
        assert!(other.source.starts_with("untuned: "));
    }
}

/// What decides is voted on, and where it comes from is not.
#[test]
fn ranks_vote_on_figures_and_not_on_where_they_come_from() {
    let digest = |more: Value| {
        let here = gpus("A", Links::Nvlink, 4);
        let (_, table) = on_gpus(4, file(&[entry(4, 1000, &more)]).of(&here), None);
        table.digest()
    };
    let plain = digest(json!({}));
    for told in [
        json!({"measured": {"from_bytes": 1, "to_bytes": 2}}),
        json!({"versions": {"driver": "1", "cuda": "2", "nccl": null}}),
        json!({"source": {"command": "d", "date": "2026-01-03", "commit": "76543210", "note": "n"}}),
    ] {
        assert_eq!(digest(told.clone()), plain, "{told}");
    }
    for decides in [
        json!({"one_shot_max_bytes": 1001}),
        json!({"pull_from_bytes": 1000}),
        json!({"max_blocks": 131}),
        json!({"nccl_from_bytes": 1}),
        json!({"threads": [{"max_bytes": 1, "threads": 32}]}),
        json!({"dtype": "f32"}),
    ] {
        assert_ne!(digest(decides.clone()), plain, "{decides}");
    }
}

fn all_reduce(bytes: usize, dtype: DataType, choice: Option<A>) -> Call {
    Call::AllReduce {
        elements: bytes / dtype.bytes(),
        dtype,
        output: dtype,
        op: ReduceOp::Sum,
        choice,
    }
}

fn on_gpus(ranks: usize, all_reduce: ByType, sm_budget: Option<u16>) -> (Topology, Table) {
    let mut topology = Topology {
        engines: Engines::cuda(true, true),
        ..topology(0, ranks)
    };
    topology.config.sm_budget = sm_budget;
    let table = Table {
        all_reduce,
        ..Table::host()
    };
    (topology, table)
}

fn planned(call: &Call, (topology, table): &(Topology, Table)) -> (A, Launch, usize) {
    match plan(call, topology, table) {
        Ok(Plan::AllReduce {
            algorithm,
            launch,
            piece_elements,
            ..
        }) => (algorithm, launch, piece_elements),
        other => panic!("{other:?}"),
    }
}

/// With an entry that is as if pulling won at last, without one, and within a budget.
#[test]
fn all_reduces_of_worlds_1_to_8() {
    let tuned: Vec<_> = (1..=8)
        .map(|ranks| {
            let threads = json!([{"max_bytes": 65_536, "threads": 64}]);
            let more = json!({"max_blocks": 64, "pull_from_bytes": 67_108_864, "threads": threads});
            entry(ranks, 1 << 20, &more)
        })
        .collect();
    let tuned = file(&tuned);
    let usual = File::embedded().unwrap();
    let mut text = String::new();
    for ranks in 1..=8 {
        let here = gpus("A", Links::Nvlink, ranks);
        for (name, figures, budget) in [
            ("untuned", usual.of(&here), None),
            ("tuned", tuned.of(&here), None),
            ("untuned, 16 SMs", usual.of(&here), Some(16)),
            ("tuned, 16 SMs", tuned.of(&here), Some(16)),
        ] {
            writeln!(text, "world {ranks}, {name}").unwrap();
            let on = on_gpus(ranks, figures, budget);
            // 2 KiB to 256 MiB.
            for bytes in (11..=28).map(|shift| 1usize << shift) {
                let (algorithm, launch, piece) =
                    planned(&all_reduce(bytes, DataType::BF16, None), &on);
                let Launch { blocks, threads } = launch;
                let piece = match piece {
                    usize::MAX => "one piece".to_owned(),
                    piece => format!("pieces of {piece}"),
                };
                let algorithm = format!("{algorithm:?}");
                writeln!(
                    text,
                    "  {bytes:>9} {algorithm:<11} {blocks:>3} x {threads:<3} {piece}"
                )
                .unwrap();
                assert!(blocks <= budget.unwrap_or(132));
            }
        }
    }
    insta::assert_snapshot!(text);
}

#[test]
fn a_type_goes_by_its_own_figures() {
    let file = file(&[
        entry(4, 4096, &json!({})),
        entry(4, 2048, &json!({"dtype": "f32"})),
    ]);
    let on = on_gpus(4, file.of(&gpus("A", Links::Nvlink, 4)), None);
    let of = |dtype| planned(&all_reduce(4096, dtype, None), &on).0;
    assert_eq!(of(DataType::F32), A::TwoShotPush);
    assert_eq!(of(DataType::F16), A::OneShotPush);
    assert_eq!(of(DataType::BF16), A::OneShotPush);
    assert_eq!(
        on.1.all_reduce.each().map(|(d, _)| d),
        [Float::F32, Float::F16, Float::Bf16]
    );
}

/// Only who allows other bits for speed gets them, from where NCCL was measured to be quicker, and not where a result is wider than it adds.
#[test]
fn nccl_is_chosen_where_it_is_allowed_and_was_quicker() {
    let file = file(&[entry(4, 1024, &json!({"nccl_from_bytes": 8192}))]);
    let of = |ranks, has_nccl, nccl, bytes, choice| {
        let figures = file.of(&gpus("A", Links::Nvlink, ranks));
        let (mut topology, table) = on_gpus(ranks, figures, None);
        topology.engines = topology.engines.with_nccl(has_nccl);
        topology.config.nccl = nccl;
        planned(
            &all_reduce(bytes, DataType::BF16, choice),
            &(topology, table),
        )
        .0
    };
    let allowed = |bytes| of(4, true, NcclUse::Quicker, bytes, None);
    assert_eq!(
        [1024, 8190, 8192, 1 << 30].map(allowed),
        [A::OneShotPush, A::TwoShotPush, A::Nccl, A::Nccl]
    );
    let ours = A::TwoShotPush;
    assert_eq!(of(4, true, NcclUse::Forced, 8192, None), ours);
    assert_eq!(of(4, true, NcclUse::Quicker, 8192, Some(ours)), ours);
    assert_eq!(of(4, true, NcclUse::Forced, 8192, Some(A::Nccl)), A::Nccl);
    assert_eq!(
        of(4, false, NcclUse::Quicker, 8192, None),
        ours,
        "it is gone"
    );
    assert_ne!(
        of(2, true, NcclUse::Quicker, 8192, None),
        A::Nccl,
        "nobody has measured it"
    );
    let (mut topology, table) = on_gpus(4, file.of(&gpus("A", Links::Nvlink, 4)), None);
    topology.engines = topology.engines.with_nccl(true);
    topology.config.nccl = NcclUse::Quicker;
    let widened = Call::AllReduce {
        elements: 1 << 20,
        dtype: DataType::BF16,
        output: DataType::F32,
        op: ReduceOp::Sum,
        choice: None,
    };
    assert_eq!(planned(&widened, &(topology, table)).0, ours);
}

/// Whatever is forced, and however small the budget is, a launch is one that kernels take.
#[test]
fn a_launch_is_within_its_budget() {
    let usual = File::embedded().unwrap().of(&gpus("A", Links::Nvlink, 4));
    for budget in [Some(0), Some(1), Some(3), Some(500), None] {
        let on = on_gpus(4, usual.clone(), budget);
        for bytes in [0, 2, 16, 1 << 20, 1 << 30] {
            for choice in [A::OneShotPush, A::TwoShotPush] {
                let (_, launch, _) = planned(&all_reduce(bytes, DataType::BF16, Some(choice)), &on);
                let most = budget.unwrap_or(132).clamp(1, 132);
                assert!((1..=most).contains(&launch.blocks), "{launch:?}");
                assert!([128, 256, 512].contains(&launch.threads), "{launch:?}");
            }
        }
    }
}

/// Up to four ranks blocks have as many threads as were measured there; beyond, so many that all blocks have something to do.
#[test]
fn blocks_of_larger_groups_are_filled_in_part_rather_than_fewer() {
    let usual = File::embedded().unwrap().of(&gpus("A", Links::Nvlink, 8));
    for granules in (0..200_000).step_by(7) {
        for sm_budget in [None, Some(16), Some(1)] {
            let of = |ranks| usual.bf16.launch((1 << 20, ranks), granules, sm_budget);
            let measured = of(2);
            let most = usize::from(sm_budget.unwrap_or(132));
            let fit = |threads: &u16| granules.div_ceil(usize::from(*threads)) <= most;
            let threads = [128, 256, 512].into_iter().find(fit).unwrap_or(512);
            let blocks = granules.div_ceil(usize::from(threads)).clamp(1, most) as u16;
            assert_eq!(measured, Launch { blocks, threads }, "{granules}");
            assert_eq!(of(4), measured);
            for ranks in [5, 8] {
                let Launch { blocks, threads } = of(ranks);
                let all = usize::from(blocks) * usize::from(threads);
                assert!(all >= granules || (usize::from(blocks), threads) == (most, 512));
                assert!(threads % 32 == 0 && (1..=most).contains(&blocks.into()));
                if measured.threads < 512 {
                    assert_eq!(of(ranks), measured, "{granules}");
                } else {
                    // With a warp less in each, blocks would not do.
                    let less = most * (usize::from(threads) - 32);
                    assert!(granules > less, "{granules}: {blocks} x {threads}");
                }
            }
        }
    }
}

/// What this build has for eight of the GPUs that were measured, and why: nobody has measured eight.
#[test]
fn all_reduces_of_this_build_on_eight_h200s() {
    let file = File::embedded().unwrap();
    let mut text = String::new();
    for links in [Links::Nvlink, Links::Shared] {
        let here = gpus("NVIDIA H200", links, 8);
        let on = on_gpus(8, file.of(&here), None);
        writeln!(text, "{links}").unwrap();
        for bytes in (11..=28).map(|shift| 1usize << shift) {
            let (algorithm, launch, _) = planned(&all_reduce(bytes, DataType::BF16, None), &on);
            let told = told(algorithm, launch, &on.1.all_reduce.bf16);
            writeln!(text, "  {bytes:>9} bytes, {algorithm:?}: {told}").unwrap();
            assert!(told.contains("untuned: nobody has measured"), "{told}");
        }
    }
    // Beside it, what was measured says so.
    for ranks in [2, 4] {
        let figures = file.of(&gpus("NVIDIA H200", Links::Nvlink, ranks));
        assert!(figures.bf16.source.starts_with("measured on"), "{ranks}");
    }
    insta::assert_snapshot!(text);
}

#[test]
fn what_is_told_names_blocks_threads_multiprocessors_and_why() {
    let file = file(&[entry(2, 1 << 20, &json!({"pull_from_bytes": 1 << 20}))]);
    let mut text = String::new();
    for ranks in [2, 4] {
        let on = on_gpus(ranks, file.of(&gpus("A", Links::Nvlink, ranks)), Some(24));
        for bytes in [64, 1 << 16, 1 << 20] {
            let (algorithm, launch, _) = planned(&all_reduce(bytes, DataType::BF16, None), &on);
            let told = told(algorithm, launch, &on.1.all_reduce.bf16);
            writeln!(text, "{bytes:>7} bytes, {algorithm:?}: {told}").unwrap();
        }
    }
    let host = Table::host();
    let told = told(A::OneShotPull, Launch::default(), &host.all_reduce.bf16);
    writeln!(text, "on the host: {told}").unwrap();
    insta::assert_snapshot!(text);
}
