//! Which figure counts for which GPUs, and what stands in the file of this build.

mod common;

use brigade_device::{Call, DataType, OverlapMode, Plan, QScheme, Reason};
use brigade_plan::{
    Entries, Table,
    crossover::{Crossover, Figures, Gpus, Least, Links, Overlapped},
    plan, reason,
};
use common::{linear, topology};
use std::collections::HashSet;

fn gpus(model: &str, links: Links, ranks: usize) -> Gpus {
    Gpus {
        model: Some(model.to_owned()),
        links,
        ranks,
    }
}

fn outputs(crossover: &Crossover) -> Option<usize> {
    match crossover.least? {
        Least::Outputs(outputs) => Some(outputs),
        other => panic!("{other}"),
    }
}

/// Entries `gpu links ranks dtype outputs`, with `-` for none.
fn figures(entries: &[&str]) -> Figures {
    let number = |word: &str| match word {
        "-" => "null".to_owned(),
        number => number.to_owned(),
    };
    let least = |word: &str| match word {
        "-" => "null".to_owned(),
        outputs => format!(r#"{{"outputs": {outputs}}}"#),
    };
    let entry = |line: &&str| {
        let [gpu, links, ranks, dtype, outputs] = line.split(' ').collect::<Vec<_>>()[..] else {
            panic!("{line}");
        };
        let (ranks, least) = (number(ranks), least(outputs));
        format!(
            r#"{{"gpu": "{gpu}", "links": "{links}", "ranks": {ranks}, "operation": "gather-linear", "dtype": "{dtype}",
            "least": {least}, "source": {{"command": "c", "date": "2026-01-02", "commit": "0123456"}}}}"#
        )
    };
    let entries: Vec<_> = entries.iter().map(entry).collect();
    let text = format!(
        r#"{{"default": {{"least": {{"outputs": 77}}, "source": {{"note": "not measured"}}}}, "entries": [{}]}}"#,
        entries.join(",")
    );
    Figures::read(&text).unwrap_or_else(|why| panic!("{why}"))
}

#[test]
fn the_narrowest_entry_counts_and_else_the_default() {
    let figures = figures(&[
        "A nvlink - bf16 10",
        "A nvlink 4 bf16 11",
        "A nvlink 4 int8 12",
        "A pcie - bf16 -",
        "B nvlink 8 fp8 13",
    ]);
    let of = |model, links, ranks| {
        let found = figures.of(&gpus(model, links, ranks), Overlapped::GatherLinear);
        found.each().map(|(_, c)| outputs(c))
    };
    let (default, nvlink, pcie) = (Some(77), Links::Nvlink, Links::Pcie);
    assert_eq!(of("A", nvlink, 2), [Some(10), Some(12), default]);
    assert_eq!(of("A", nvlink, 4), [Some(11), Some(12), default]);
    assert_eq!(of("A", pcie, 4), [None, default, default]);
    assert_eq!(of("B", nvlink, 8), [default, default, Some(13)]);
    // Nobody measured groups of this size: the nearest.
    assert_eq!(of("B", nvlink, 4), [default, default, Some(13)]);
    assert_eq!(of("C", nvlink, 4), [default; 3]);
    assert_eq!(of("A", Links::Shared, 4), [default; 3]);
    // Nor does the twin, or a group of several models, take what was measured of others.
    let mixed = Gpus {
        model: None,
        ..gpus("A", nvlink, 4)
    };
    for (gpus, operation) in [
        (mixed, Overlapped::GatherLinear),
        (gpus("A", nvlink, 4), Overlapped::ReduceScatterLinear),
    ] {
        assert_eq!(outputs(&figures.of(&gpus, operation).bf16), default);
    }
    let told = |ranks| {
        let gpus = gpus("A", nvlink, ranks);
        figures.of(&gpus, Overlapped::GatherLinear).bf16.source
    };
    assert_eq!(
        told(2),
        "A by nvlink, 2026-01-02, commit 0123456, in the table of this build"
    );
    assert_eq!(
        told(4),
        "A by nvlink of 4 ranks, 2026-01-02, commit 0123456, in the table of this build"
    );
}

#[test]
fn what_was_measured_at_another_number_of_ranks_says_so() {
    let figures = figures(&[
        "A nvlink 4 bf16 11",
        "A nvlink 2 bf16 10",
        "A nvlink 2 int8 -",
    ]);
    let of = |ranks| figures.of(&gpus("A", Links::Nvlink, ranks), Overlapped::GatherLinear);
    let measured = |ranks: usize| {
        format!(
            "A by nvlink of {ranks} ranks, 2026-01-02, commit 0123456, in the table of this build"
        )
    };
    for (ranks, least, from) in [(2, 10, 2), (3, 10, 2), (4, 11, 4), (5, 11, 4), (8, 11, 4)] {
        let found = of(ranks).bf16;
        assert_eq!(outputs(&found), Some(least), "{ranks}");
        let own = ranks == from;
        let told = format!(
            "untuned: not measured at {ranks} ranks; the figure of {}",
            measured(from)
        );
        assert_eq!(found.source, if own { measured(from) } else { told });
    }
    // That it paid nowhere is no less a figure.
    let int8 = of(8).int8;
    assert_eq!(int8.least, None);
    assert!(int8.source.starts_with("untuned"), "{}", int8.source);
}

#[test]
fn what_is_no_file_of_figures_is_refused() {
    let default = r#""default": {"least": {"outputs": 1}, "source": {"note": ""}}"#;
    for text in [
        "",
        "{}",
        &format!("{{{default}}}"),
        &format!(r#"{{{default}, "entries": [{{"gpu": "A"}}]}}"#),
        &format!(r#"{{{default}, "entries": [], "more": 1}}"#),
    ] {
        let refused = Figures::read(text).unwrap_err();
        assert_eq!(refused.code, reason::CROSSOVERS, "{text}");
    }
}

/// Every figure of this build says where it comes from, and none stands there twice.
#[test]
fn the_figures_of_this_build_are_sound() {
    let figures = Figures::embedded().unwrap();
    let mut seen = HashSet::new();
    for e in figures.entries() {
        let key = format!(
            "{} {} {:?} {:?} {:?}",
            e.gpu, e.links, e.ranks, e.operation, e.dtype
        );
        let source = &e.source;
        let digits = source.date.replace('-', "");
        assert!(
            source.date.len() == 10 && digits.parse::<u32>().is_ok(),
            "{key}"
        );
        assert!(
            source.commit.len() >= 7 && source.commit.chars().all(|c| c.is_ascii_hexdigit()),
            "{key}: {}",
            source.commit
        );
        assert!(source.command.starts_with("brigade-perf "), "{key}");
        assert_ne!(e.least.map(Least::count), Some(0), "{key}");
        assert!(seen.insert(key.clone()), "{key} stands there twice");
    }
    let of_h200s = |ranks| {
        let here = gpus("NVIDIA H200", Links::Nvlink, ranks);
        Table::cuda(&here, &Entries::default()).unwrap()
    };
    let [two, h200, four] = [2, 3, 4].map(of_h200s);
    let other = Table::cuda(&gpus("another", Links::Pcie, 4), &Entries::default()).unwrap();
    for (table, scatter) in [(&h200, 4_194_304), (&other, 6_291_456)] {
        assert_eq!(outputs(&table.gather.bf16), Some(6_291_456));
        assert_eq!(outputs(&table.scatter.bf16), Some(scatter));
    }
    assert_eq!(outputs(&four.gather.bf16), Some(7_340_032));
    assert_eq!(outputs(&four.scatter.bf16), Some(10_485_760));
    for (table, measured) in [(&two, true), (&h200, false)] {
        for crossover in [&table.gather.bf16, &table.scatter.bf16] {
            let source = &crossover.source;
            assert!(
                source.contains("NVIDIA H200 by nvlink of 2 ranks"),
                "{source}"
            );
            assert_eq!(!source.starts_with("untuned"), measured, "{source}");
        }
    }
    assert!(other.gather.bf16.source.starts_with("default"));
}

/// Figures are of what one rank multiplies: a gather has the columns of one, of all that its call names, and its twin so much of the inner
/// dimension.
#[test]
fn a_plan_counts_what_one_rank_multiplies() {
    let (rows, columns, inner) = (64, 128, 256);
    let outputs = 4 * rows * columns;
    for (least, gather, twin) in [
        (Least::Outputs(outputs), true, true),
        (Least::Outputs(outputs + 1), false, false),
        (Least::Multiplications(outputs * inner), true, true),
        (Least::Multiplications(outputs * inner + 1), false, false),
    ] {
        let mut table = Table::host();
        let crossover = Crossover {
            least: Some(least),
            source: "measured".into(),
        };
        (table.gather.bf16, table.scatter.bf16) = (crossover.clone(), crossover);
        let mut gathers = linear(&[rows; 4]);
        (gathers.n, gathers.k) = (4 * columns, inner);
        let mut scatters = linear(&[rows; 4]);
        (scatters.n, scatters.k) = (columns, 4 * inner);
        let calls = [
            (Call::GatherLinear(gathers), gather),
            (Call::LinearReduceScatter(scatters), twin),
        ];
        for (call, pays) in calls {
            let (Plan::GatherLinear(p) | Plan::LinearReduceScatter(p)) =
                plan(&call, &topology(0, 4), &table).unwrap()
            else {
                panic!("{call:?}");
            };
            assert_eq!(p.mode != OverlapMode::Off, pays, "{least}: {p:?}");
        }
    }
}

/// Rows of a type go by the figure of that type, and the plan says which one it was.
#[test]
fn a_plan_goes_by_the_type_of_its_rows() {
    let crossover = |bytes: Option<usize>| Crossover {
        least: bytes.map(Least::ChunkBytes),
        source: "measured".into(),
    };
    let mut table = Table::host();
    table.gather.bf16 = crossover(Some(8192));
    table.gather.int8 = crossover(Some(8193));
    table.gather.fp8 = crossover(None);
    let planned = |scheme, input, rows| -> (OverlapMode, Option<Reason>) {
        let mut call = linear(&[rows; 4]);
        (call.scheme, call.input) = (scheme, input);
        match plan(&Call::GatherLinear(call), &topology(0, 4), &table) {
            Ok(Plan::GatherLinear(p)) => (p.mode, p.instead_of),
            other => panic!("{other:?}"),
        }
    };
    let told = |of: (OverlapMode, Option<Reason>)| of.1.map(|r| (r.code, r.what.into_owned()));
    let [bf16, int8, fp8] = [
        (QScheme::None, DataType::BF16),
        (QScheme::Int8PerToken, DataType::I8),
        (QScheme::Fp8PerTensor, DataType::F8E4M3),
    ];
    // 1024 columns.
    assert_eq!(planned(bf16.0, bf16.1, 4).0, OverlapMode::Ring);
    assert_eq!(planned(int8.0, int8.1, 9).0, OverlapMode::Ring);
    assert_eq!(
        told(planned(int8.0, int8.1, 8)),
        Some((
            reason::TOO_SMALL,
            "chunks of 8192 bytes are too small for overlap to pay, below 8193: measured".into()
        ))
    );
    assert_eq!(
        told(planned(fp8.0, fp8.1, 1024)),
        Some((
            reason::TUNED_OFF,
            "overlap paid at no size that was measured: measured".into()
        ))
    );
}
