//! Entries of the user's: which of them count, and which are none.

use brigade_device::Error;
use brigade_plan::{
    Entries, Table,
    crossover::{Gpus, Least, Links},
};
use serde_json::{Value, json};

/// What this build has of gather-linear on two H200s.
const GATHER: usize = 6_291_456;

fn gpus(model: &str, links: Links, ranks: usize) -> Gpus {
    Gpus {
        model: Some(model.to_owned()),
        links,
        ranks,
    }
}

/// What entries of all kinds have, of H200s by NVLink, and what one has beside it.
fn entry(ranks: usize, kind: &Value, more: &Value) -> Value {
    let mut entry = json!({
        "gpu": "NVIDIA H200", "links": "nvlink", "ranks": ranks,
        "source": {"command": "brigade-perf", "date": "2026-01-02", "commit": "0123456"},
    });
    for (name, value) in [kind, more]
        .into_iter()
        .flat_map(Value::as_object)
        .flatten()
    {
        entry[name] = value.clone();
    }
    entry
}

fn crossover(ranks: usize, more: &Value) -> Value {
    let kind = json!({"operation": "gather-linear", "dtype": "bf16", "least": {"outputs": 77}});
    entry(ranks, &kind, more)
}

fn all_reduce(ranks: usize, more: &Value) -> Value {
    let kind = json!({
        "one_shot_max_bytes": 78, "pull_from_bytes": null, "max_blocks": 7, "nccl_from_bytes": null,
        "measured": {"from_bytes": 2048, "to_bytes": 4096},
        "versions": {"driver": "13.0", "cuda": "13.0", "nccl": null},
    });
    entry(ranks, &kind, more)
}

fn experts(ranks: usize, more: &Value) -> Value {
    let kind = json!({
        "push_max_bytes": 79, "measured": {"from_tokens": 1, "to_tokens": 2, "hidden": 3},
        "versions": {"driver": "13.0", "cuda": "13.0", "nccl": null},
    });
    entry(ranks, &kind, more)
}

fn read(value: &Value) -> Entries {
    Entries::read(&value.to_string()).unwrap_or_else(|why| panic!("{why}"))
}

fn table(gpus: &Gpus, own: &Entries) -> Table {
    Table::cuda(gpus, own).unwrap_or_else(|why| panic!("{why}"))
}

#[test]
fn the_users_entries_count_before_those_of_the_build() {
    let here = gpus("NVIDIA H200", Links::Nvlink, 4);
    let (none, nothing) = (Entries::default(), json!({}));
    let usual = table(&here, &none);
    // A file with one entry, and one with a list of two kinds.
    let both = json!([all_reduce(4, &nothing), experts(4, &nothing)]);
    let own = read(&crossover(4, &nothing)).and(read(&both));
    let tuned = table(&here, &own);
    assert_eq!(tuned.gather.bf16.least, Some(Least::Outputs(77)));
    for (_, figures) in tuned.all_reduce.each() {
        assert_eq!((figures.one_shot_max_bytes, figures.max_blocks), (78, 7));
    }
    for (_, figures) in tuned.experts.each() {
        assert_eq!(figures.push_max_bytes, Some(79));
    }
    // All that they say nothing of is as it was.
    assert_eq!(tuned.gather.int8, usual.gather.int8);
    assert_eq!(tuned.scatter, usual.scatter);
    assert_eq!(tuned.copies, usual.copies);
    // Nor do they count for other GPUs.
    for other in [
        gpus("NVIDIA H200", Links::Pcie, 4),
        gpus("another", Links::Nvlink, 4),
        Gpus {
            model: None,
            ..here.clone()
        },
    ] {
        assert_eq!(table(&other, &own), table(&other, &none));
    }
    // All-reduces and experts of other numbers of ranks neither.
    let fewer = gpus("NVIDIA H200", Links::Nvlink, 2);
    assert_eq!(
        table(&fewer, &own).all_reduce,
        table(&fewer, &none).all_reduce
    );
    assert_eq!(table(&fewer, &own).experts, table(&fewer, &none).experts);
}

#[test]
fn whose_table_it_is_is_told() {
    let here = gpus("NVIDIA H200", Links::Nvlink, 2);
    let nothing = json!({});
    let own = [
        crossover(2, &nothing),
        all_reduce(2, &nothing),
        experts(2, &nothing),
    ];
    let sources = |own: &Entries| {
        let Table {
            all_reduce,
            experts,
            gather,
            ..
        } = table(&here, own);
        [
            gather.bf16.source,
            all_reduce.bf16.source,
            experts.plain.source,
        ]
    };
    for source in sources(&read(&Value::from(own.to_vec()))) {
        assert!(source.contains(", in the user's table"), "{source}");
        assert!(source.contains("2026-01-02"), "{source}");
    }
    for source in sources(&Entries::default()) {
        assert!(source.contains(", in the table of this build"), "{source}");
    }
}

/// What the user measured of all types counts before what this build has of one, and of the user's the first that is as narrow.
#[test]
fn the_users_wide_entry_counts_before_a_narrow_one_of_the_build() {
    let here = gpus("NVIDIA H200", Links::Nvlink, 2);
    // The build has an entry of plain rows alone.
    let nothing = json!({});
    let wide = table(&here, &read(&experts(2, &nothing)));
    assert_eq!(wide.experts.plain.push_max_bytes, Some(79));
    let of = |entries: &[Value]| table(&here, &read(&Value::from(entries.to_vec()))).all_reduce;
    let sized = |bytes: usize, dtype: Option<&str>| {
        let mut more = json!({"one_shot_max_bytes": bytes});
        if let Some(dtype) = dtype {
            more["dtype"] = dtype.into();
        }
        all_reduce(2, &more)
    };
    let found = of(&[
        sized(1, None),
        sized(2, Some("f32")),
        sized(3, None),
        sized(4, Some("f32")),
    ]);
    let sizes = found.each().map(|(_, figures)| figures.one_shot_max_bytes);
    assert_eq!(sizes, [2, 1, 1]);
}

/// An entry of the build for this very size counts before one of the user's for another; of two that are as far, the user's does.
#[test]
fn near_sizes_are_the_last_to_count() {
    let nothing = json!({});
    let own = read(&crossover(4, &nothing));
    let of = |ranks| {
        table(&gpus("NVIDIA H200", Links::Nvlink, ranks), &own)
            .gather
            .bf16
    };
    // The build has an entry of two ranks.
    assert_eq!(of(2).least, Some(Least::Outputs(GATHER)));
    assert_eq!(of(4).least, Some(Least::Outputs(77)));
    let eight = of(8);
    assert_eq!(eight.least, Some(Least::Outputs(77)));
    assert!(
        eight.source.starts_with("untuned: not measured at 8 ranks"),
        "{}",
        eight.source
    );
    assert!(
        eight.source.ends_with("in the user's table"),
        "{}",
        eight.source
    );
}

#[test]
fn ranks_vote_on_what_users_entries_decide() {
    let here = gpus("NVIDIA H200", Links::Nvlink, 2);
    let digest = |entries: &[Value]| {
        let own = read(&Value::from(entries.to_vec()));
        table(&here, &own).digest()
    };
    let (nothing, other) = (json!({}), json!({"max_blocks": 8}));
    let usual = digest(&[]);
    let kinds = [
        crossover(2, &nothing),
        all_reduce(2, &nothing),
        experts(2, &nothing),
    ];
    let mut digests: Vec<_> = kinds
        .iter()
        .map(|one| digest(std::slice::from_ref(one)))
        .collect();
    digests.extend([usual, digest(&[all_reduce(2, &other)])]);
    for (i, one) in digests.iter().enumerate() {
        assert!(!digests[..i].contains(one), "{i}");
    }
    // An entry that decides what the build decides is no other table; one of other GPUs is none at all.
    assert_eq!(
        digest(&[crossover(2, &json!({"least": {"outputs": GATHER}}))]),
        usual
    );
    assert_eq!(digest(&[all_reduce(8, &nothing)]), usual);
}

#[test]
fn what_is_no_entry_is_refused_by_its_field() {
    let without = |mut entry: Value, field: &str| {
        entry.as_object_mut().map(|fields| fields.remove(field));
        entry.to_string()
    };
    let nothing = json!({});
    let some_blocks = |blocks: Value| all_reduce(2, &json!({ "max_blocks": blocks })).to_string();
    let threads = |threads: Value| all_reduce(2, &json!({ "threads": threads })).to_string();
    let pair = |bytes: usize, threads: usize| json!({"max_bytes": bytes, "threads": threads});
    for (text, field, got, want) in [
        (String::new(), "entries", "EOF while parsing", "JSON"),
        ("{".to_owned(), "entries", "EOF while parsing", "JSON"),
        ("7".to_owned(), "entries", "7", "an entry with operation"),
        (
            json!({"gpu": "A", "ranks": 2}).to_string(),
            "entries",
            "an entry of the fields [gpu, ranks]",
            "an entry with operation",
        ),
        // A whole table is none: what it has for GPUs that nobody measured would count for nothing.
        (
            json!({"untuned": [], "entries": []}).to_string(),
            "entries",
            "an entry of the fields [",
            "an entry with operation",
        ),
        (
            some_blocks("many".into()),
            "entry of all-reduces",
            "max_blocks: invalid type: string \"many\"",
            "u16",
        ),
        (
            some_blocks(70_000.into()),
            "entry of all-reduces",
            "max_blocks: invalid value: integer `70000`",
            "u16",
        ),
        (some_blocks(0.into()), "max_blocks", "0", "at least 1"),
        (
            threads(json!([pair(1, 48)])),
            "threads",
            "48",
            "1 to 16 warps",
        ),
        (
            threads(json!([pair(2, 32), pair(1, 32)])),
            "threads.max_bytes",
            "[2, 1]",
            "sizes that ascend",
        ),
        (
            all_reduce(2, &json!({"more": 1})).to_string(),
            "entry of all-reduces",
            "more: unknown field `more`",
            "one of",
        ),
        (
            without(all_reduce(2, &nothing), "measured"),
            "entry of all-reduces",
            "missing field `measured`",
            "all fields",
        ),
        // Left out is not the same as null, which says that overlap paid nowhere.
        (
            without(crossover(2, &nothing), "least"),
            "entry of crossovers",
            "missing field `least`",
            "all fields",
        ),
        (
            crossover(2, &json!({"least": {"rows": 7}})).to_string(),
            "entry of crossovers",
            "least: unknown variant `rows`",
            "`multiplications`",
        ),
        (
            crossover(2, &json!({"links": "string"})).to_string(),
            "entry of crossovers",
            "links: unknown variant `string`",
            "`nvlink`",
        ),
        (
            experts(2, &json!({"rows_at_a_time": 0})).to_string(),
            "rows_at_a_time",
            "0",
            "at least 1",
        ),
        (
            experts(2, &json!({"push_max_bytes": null})).to_string(),
            "entry of experts",
            "push_max_bytes: invalid type: null",
            "usize",
        ),
        // The second of a list.
        (
            json!([crossover(2, &nothing), {"operation": "all-reduce"}]).to_string(),
            "entry of crossovers",
            "operation: unknown variant `all-reduce`",
            "`gather-linear`",
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
